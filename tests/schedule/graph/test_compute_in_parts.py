"""Elementwise ops on joined values are done to the parts."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from manygrad import Context, Tensor
from manygrad.tensor.uop import Ops
from tests.schedule.programs import kernels_of, stored

PARTS = ((2, 3), (4, 3), (1, 3))
CASES: dict[str, tuple[Callable[[Tensor], Tensor], Callable[[np.ndarray], np.ndarray]]] = {
    "one op": (lambda t: t.relu(), lambda a: np.maximum(a, 0)),
    "a chain with numbers": (lambda t: (1 - t * 2).maximum(0.5), lambda a: np.maximum(1 - a * 2, 0.5)),
    "a comparison": (lambda t: t > 0, lambda a: a > 0),
    "two functions": (lambda t: t.exp().sqrt(), lambda a: np.sqrt(np.exp(a))),
    "a smaller type": (lambda t: t.cast("int32"), lambda a: a.astype(np.int32)),
}


def _arrays(axis: int) -> list[np.ndarray]:
    rng = np.random.default_rng(0)
    return [(rng.normal(size=s) * 3).astype(np.float32).swapaxes(0, axis).copy() for s in PARTS]


@pytest.mark.parametrize("device", ["CPU", "PYTHON"])
@pytest.mark.parametrize("axis", [0, 1])
@pytest.mark.parametrize("name", CASES)
def test_each_part_has_one_kernel_that_does_it(name: str, axis: int, device: str) -> None:
    f, want = CASES[name]
    arrays = _arrays(axis)
    with Context(DEVICE=device):
        parts = [Tensor(a).realize() for a in arrays]
        assert len(kernels_of(f(Tensor.cat(parts, dim=axis)))) == len(PARTS)
        got = f(Tensor.cat(parts, dim=axis)).numpy()
    np.testing.assert_allclose(got, want(np.concatenate(arrays, axis)), rtol=1e-5)


@pytest.mark.parametrize("cut", [0, 1])
@pytest.mark.parametrize("rows", [8, 7, 1])
def test_of_cut_parts(cut: int, rows: int) -> None:
    a = np.random.default_rng(0).normal(size=(rows, 5)).astype(np.float32)
    x = Tensor(a).shard(("CPU:0", "CPU:1"), axis=cut)
    for axis in (0, 1):
        got = (x.cat(x * 2, dim=axis).relu() + 1).numpy()
        np.testing.assert_allclose(got, np.maximum(np.concatenate([a, a * 2], axis), 0) + 1, rtol=1e-6)


def test_a_joined_value_that_others_read_is_stored_as_it_is() -> None:
    both = stored(2, 3).cat(stored(4, 3))
    assert len(kernels_of([both, both.relu()])) == 3


def test_parts_made_by_reductions_and_wider_results_stay() -> None:
    product = stored(16, 16) @ stored(16, 16)
    assert len(kernels_of(product.cat(stored(2, 16)).relu())) == 3
    assert len(kernels_of(stored(2, 3).cat(stored(4, 3)).cast("float64"))) == 3


def test_what_a_product_reads_is_written_once() -> None:
    kernels = kernels_of(stored(8, 16).cat(stored(8, 16)).exp() @ stored(16, 8))
    assert [any(u.op is Ops.EXP for u in k.toposort()) for k in kernels] == [True, False]


def test_gradients_through_it() -> None:
    a, b = (Tensor(x).requires_grad_() for x in _arrays(0)[:2])
    Tensor.cat([a, b]).square().sum().backward()
    assert a.grad is not None and b.grad is not None
    np.testing.assert_allclose(a.grad.numpy(), 2 * a.numpy(), rtol=1e-6)
    np.testing.assert_allclose(b.grad.numpy(), 2 * b.numpy(), rtol=1e-6)
