"""Updates by joined values that are cheaper computed again than read: one kernel a part,
which stores the value and uses it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from manygrad import Tensor, TinyJit, nn
from manygrad.nn.optim import SGD, AdamW
from manygrad.tensor.uop import Ops, UOp
from tests.schedule.programs import linear_of


def vectors(*sizes: int) -> list[Tensor]:
    rng = np.random.default_rng(0)
    return [Tensor(rng.normal(size=n).astype(np.float32)).realize() for n in sizes]


def update(momentum: bool) -> tuple[list[Tensor], Callable[[], list[np.ndarray]]]:
    """Two outer products joined, an update by them; the tensors to realize, and what they must be."""
    a, b, c, d, w, m = vectors(8, 16, 4, 32, 256, 256)
    old = [t.numpy().astype(np.float64) for t in (a, b, c, d, w, m)]
    g = (a.reshape(8, 1) * b).reshape(-1).cat((c.reshape(4, 1) * d).reshape(-1))
    if momentum:
        m.assign(m * 0.5 + g)
    w.assign(w - (m if momentum else g) * 0.1)

    def expected() -> list[np.ndarray]:
        gradient = np.concatenate([np.outer(old[0], old[1]).reshape(-1), np.outer(old[2], old[3]).reshape(-1)])
        moved = old[5] * 0.5 + gradient if momentum else gradient
        return [gradient, old[4] - 0.1 * moved, *([moved] if momentum else [])]

    return [g, w, *([m] if momentum else [])], expected


def read_by(call: UOp) -> list[UOp]:
    """The buffers that a kernel loads from."""
    return list(dict.fromkeys(call.src[1 + u.src[0].src[0].arg] for u in call.src[0].toposort() if u.op is Ops.LOAD))


@pytest.mark.parametrize("momentum", [False, True])
def test_each_part_is_one_kernel_that_stores_and_uses_it(momentum: bool) -> None:
    tensors, expected = update(momentum)
    calls = linear_of(tensors).src
    assert [len(c.src[0].src) for c in calls] == [3, 3] if momentum else [2, 2]
    assert all(len(read_by(c)) == (4 if momentum else 3) for c in calls)  # two vectors, and what is updated
    tensors[0].realize(*tensors[1:])
    for t, e in zip(tensors, expected()):
        np.testing.assert_allclose(t.numpy(), e, rtol=1e-5, atol=1e-6)


def test_what_takes_a_reduction_is_read() -> None:
    a, b, w = vectors(8 * 4, 4 * 16, 256)
    products = [(a.reshape(8, 4) @ b.reshape(4, 16)).reshape(-1), (b.reshape(16, 4) @ a.reshape(4, 8)).reshape(-1)]
    w.assign(w - products[0].cat(products[1]))
    assert len(linear_of(w).src) == 3


def test_a_small_part_with_a_reduction_stays_joined() -> None:
    a, b, x, w = vectors(8, 16, 40, 136)
    old = w.numpy()
    w.assign(w - (a.reshape(8, 1) * b).reshape(-1).cat(x.reshape(8, 5).sum(1)))
    w.realize()
    g = np.concatenate([np.outer(a.numpy(), b.numpy()).reshape(-1), x.numpy().reshape(8, 5).sum(1)])
    np.testing.assert_allclose(w.numpy(), old - g, rtol=1e-5, atol=1e-6)


def test_what_is_read_before_its_part_is_written() -> None:
    """The gradient of the lower layer reads the upper layer's weights as they were."""
    a, b, w = vectors(8, 16, 256)
    old = w.numpy().astype(np.float64)
    upper = w.shrink(((128, 256),)).reshape(16, 8)
    below = upper @ a
    w.assign(w - (a.reshape(8, 1) * below).reshape(-1).cat((b.reshape(16, 1) * a).reshape(-1)))
    w.realize()
    x, y = a.numpy().astype(np.float64), b.numpy().astype(np.float64)
    g = np.concatenate([np.outer(x, old[128:].reshape(16, 8) @ x).reshape(-1), np.outer(y, x).reshape(-1)])
    np.testing.assert_allclose(w.numpy(), old - g, rtol=1e-5, atol=1e-5)


def test_two_layers_in_one_buffer_are_updated_without_a_gradient_in_memory() -> None:
    """The gradients need both layers' weights, through sums that are stored before any weight is written."""
    x, w = vectors(8, 128 + 16 + 256)
    old = w.numpy().astype(np.float64)
    lower, bias, upper = (
        w.shrink(((0, 128),)).reshape(16, 8),
        w.shrink(((128, 144),)),
        w.shrink(((144, 400),)).reshape(16, 16),
    )
    h = ((lower * x).sum(1) + bias).relu()
    d = (upper * h).sum(1).reshape(16, 1) - 1
    below = ((upper * d).sum(0) * (h > 0).float()).reshape(16, 1)
    w.assign(w - (below * x).reshape(-1).cat(below.reshape(-1), (d * h).reshape(-1)) * 0.1)
    loops = [[r.src[0].arg for r in call.src[0].src[0].src[2:]] for call in linear_of(w).src]
    assert [400] not in loops and [16, 8] in loops
    w.realize()
    a, c, u = old[:128].reshape(16, 8), old[128:144], old[144:].reshape(16, 16)
    k = np.maximum(a @ x.numpy() + c, 0)
    e = u @ k - 1
    down = (u.T @ e) * (k > 0)
    g = np.concatenate([np.outer(down, x.numpy()).reshape(-1), down, np.outer(e, k).reshape(-1)])
    np.testing.assert_allclose(w.numpy(), old - 0.1 * g, rtol=1e-4, atol=1e-4)


def test_updates_that_need_each_other_are_updated_at_once() -> None:
    (w,) = vectors(256)
    old = w.numpy()
    w.assign(w - w.shrink(((128, 129),)).expand(128).cat(w.shrink(((0, 1),)).expand(128)))
    w.realize()
    np.testing.assert_array_equal(w.numpy(), old - np.repeat(old[[128, 0]], 128))


@pytest.mark.parametrize(
    "optimiser",
    [
        lambda p: SGD(p, lr=0.1),
        lambda p: SGD(p, lr=0.1, momentum=0.9, weight_decay=0.1, nesterov=True),
        lambda p: AdamW(p, lr=0.1),
    ],
)
def test_steps_of_one_sample_are_those_of_two_halves(optimiser: Callable[[Any], Any]) -> None:
    """One sample, and the same sample twice, whose gradients are products that are not computed again:
    equal steps up to rounding."""
    data = np.random.default_rng(0).normal(size=(1, 24)).astype(np.float32)

    def run(copies: int) -> list[np.ndarray]:
        Tensor.manual_seed(0)
        model = nn.Sequential(nn.Linear(24, 16), nn.Tanh(), nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 3))
        steps = optimiser(list(model.parameters()))
        x = Tensor(np.repeat(data, copies, 0)).realize()

        @TinyJit
        def step() -> Tensor:
            steps.zero_grad()
            loss = model(x).square().mean()
            loss.backward()
            steps.step()
            return loss

        for _ in range(4):
            step()
        return [t.numpy() for p in model.parameters() for t in (p, p.grad) if t is not None]

    for one, two in zip(run(1), run(2)):
        np.testing.assert_allclose(one, two, rtol=2e-4, atol=2e-5)
