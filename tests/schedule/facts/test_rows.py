"""Reductions of a row that stay in the kernel that uses them, and those that must not."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from manygrad import Tensor
from manygrad.schedule.facts.rows import ROW
from tests.schedule.programs import kernels_of, linear_of, stored

RNG = np.random.default_rng(0)
X = RNG.standard_normal((6, 40)).astype(np.float32)
W = RNG.standard_normal(40).astype(np.float32)


def softmax(a: np.ndarray, axis: int = -1) -> np.ndarray:
    e = np.exp(a - a.max(axis, keepdims=True))
    return e / e.sum(axis, keepdims=True)


def normed(a: np.ndarray) -> np.ndarray:
    return (a - a.mean(-1, keepdims=True)) / np.sqrt(a.var(-1, keepdims=True) + 1e-5)


ONE: dict[str, tuple[Callable[[Tensor, Tensor], Tensor], Callable[[np.ndarray, np.ndarray], np.ndarray]]] = {
    "softmax": (lambda x, w: x.softmax(-1), lambda a, b: softmax(a)),
    "log_softmax": (lambda x, w: x.log_softmax(-1), lambda a, b: np.log(softmax(a))),
    "layer norm": (lambda x, w: x.layer_norm(40, w, w), lambda a, b: normed(a) * b + b),
    "rms norm": (
        lambda x, w: x.rms_norm(40, w, eps=1e-5),
        lambda a, b: a / np.sqrt((a * a).mean(-1, keepdims=True) + 1e-5) * b,
    ),
    "softmax of a scaled and masked row": (
        lambda x, w: (x * 0.3 + w).tril().softmax(-1),
        lambda a, b: softmax(np.tril(a * np.float32(0.3) + b)),
    ),
    "a norm of rows": (
        lambda x, w: x / x.square().sum(1, keepdim=True).sqrt(),
        lambda a, b: a / np.linalg.norm(a, axis=1, keepdims=True),
    ),
    "two trailing dims": (
        lambda x, w: x.reshape(2, 3, 40) - x.reshape(2, 3, 40).mean((1, 2), keepdim=True),
        lambda a, b: a.reshape(2, 3, 40) - a.reshape(2, 120).mean(1)[:, None, None],
    ),
    "a loss of rows": (lambda x, w: (x.log_softmax(-1) * w).sum(1), lambda a, b: (np.log(softmax(a)) * b).sum(1)),
}


@pytest.mark.parametrize("device", ["CPU", "PYTHON"])
@pytest.mark.parametrize("name", ONE)
def test_one_kernel_a_row(name: str, device: str) -> None:
    f, want = ONE[name]
    x, w = Tensor(X, device=device).realize(), Tensor(W, device=device).realize()
    assert len(kernels_of(f(x, w))) == 1
    np.testing.assert_allclose(f(x, w).numpy(), want(X, W), rtol=2e-5, atol=2e-6)


SEVERAL: dict[str, tuple[Callable[[], Tensor], int]] = {
    "columns": (lambda: stored(16, 16) - stored(16, 16).sum(0, keepdim=True), 2),
    "rows too long for the cache": (lambda: stored(2, ROW + 1).softmax(-1), 3),
    "rows and columns": (lambda: (lambda x: x - x.sum(1, keepdim=True) - x.sum(0, keepdim=True))(stored(16, 16)), 2),
    "a product of normalised rows": (lambda: stored(16, 16).softmax(-1) @ stored(16, 16), 2),
    "a transpose of normalised rows": (lambda: stored(16, 16).softmax(-1).T.contiguous(), 2),
    "a slice of normalised rows": (lambda: stored(16, 16).softmax(-1)[:, ::2] * 1.0, 2),
}


@pytest.mark.parametrize("name", SEVERAL)
def test_no_reduction_is_repeated(name: str) -> None:
    program, count = SEVERAL[name]
    assert len(kernels_of(program())) == count


def test_values_of_those() -> None:
    x = Tensor(X).realize()
    for got, want in [
        (x - x.sum(1, keepdim=True) - x.sum(0, keepdim=True), X - X.sum(1, keepdims=True) - X.sum(0, keepdims=True)),
        (x.softmax(-1).T * 2, softmax(X).T * 2),
        (x.softmax(-1)[:, ::3].softmax(-1), softmax(softmax(X)[:, ::3])),
        (x.softmax(-1).pad((1, 1)).sum(1), np.ones(6)),
        (x.softmax(-1).softmax(0), softmax(softmax(X), 0)),
    ]:
        np.testing.assert_allclose(got.numpy(), want, rtol=2e-5, atol=5e-6)


@pytest.mark.parametrize("rows", [1, 3, 64])
def test_a_row_has_the_same_bits_in_any_batch(rows: int) -> None:
    a = np.tile(X[:1], (rows, 1))
    want = Tensor(X[:1]).softmax(-1).numpy()
    got = Tensor(a).softmax(-1).numpy()
    assert (got == want).all()


def test_a_norm_keeps_its_statistics_for_the_gradient() -> None:
    """Its kernels: both statistics in one, the result; what is between them is made again, by the gradient, too."""
    x, w, b = (stored(*shape).requires_grad_() for shape in ((8, 16), (16,), (16,)))
    out = x.layer_norm(16, w, b)
    (out @ stored(16, 4)).square().sum().backward()
    assert x.grad is not None and w.grad is not None and b.grad is not None
    calls = linear_of([x.grad, w.grad, b.grad]).src
    written = [[call.src[1:][s.src[0].src[0].arg].shape for s in call.src[0].src] for call in calls]
    assert written[:2] == [[(8, 1), (8, 1)], [(8, 16)]]
    statistics = [call.src[1:][s.src[0].src[0].arg] for call in calls[:1] for s in call.src[0].src]
    assert sum(set(statistics) <= set(call.src[1:]) for call in calls) == 4  # both kernels, the gradients of w and of x
    assert len(calls) == 6
    rng = np.random.default_rng(3)
    a, g = rng.standard_normal((8, 16)), rng.standard_normal((8, 16))
    x = Tensor(a.astype(np.float32)).realize().requires_grad_()
    (x.layer_norm(16) * Tensor(g.astype(np.float32))).sum().backward()
    assert x.grad is not None
    deviation = np.sqrt(a.var(1, keepdims=True) + 1e-5)
    normal = (a - a.mean(1, keepdims=True)) / deviation
    want = (g - g.mean(1, keepdims=True) - normal * (g * normal).mean(1, keepdims=True)) / deviation
    np.testing.assert_allclose(x.grad.numpy(), want, rtol=1e-4, atol=1e-5)
