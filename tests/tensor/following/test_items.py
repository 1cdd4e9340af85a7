"""Loops that write items of tensors (`x[mask] = 0`, `h[:, 0] = p`) are replayed, to the same bits."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from manygrad import Context, Tensor, nn
from manygrad.nn import functional as F
from manygrad.tensor.deferred import counts
from manygrad.tensor.environment import FOLLOW

pytestmark = pytest.mark.skipif(not FOLLOW, reason="FOLLOW=0: no call is put off")
STEPS = 18


class Batch:
    """What a step may write to: a batch and its labels, a mask, memory that lives on, a weight."""

    def __init__(self, i: int, state: Tensor, weight: Tensor) -> None:
        rng = np.random.default_rng(i)
        self.x, self.y = Tensor(rng.standard_normal((4, 3)).astype(np.float32)), Tensor(rng.integers(0, 3, 4))
        self.mask, self.state, self.weight = Tensor(rng.random(4) < 0.5), state, weight


def add_through_a_view(b: Batch, h: Tensor) -> Tensor:
    v = h[1:]
    v[0] = 1.0
    return h


def keep_in_state(b: Batch, h: Tensor) -> Tensor:
    b.state[1:] = h[1:].detach()
    return h + b.state


def beside_what_was_made_before(b: Batch, h: Tensor) -> Tensor:
    h = h.relu()
    twice = h * 2
    h[0] = b.weight[0]
    return h + twice


BEFORE: dict[str, Callable[[Batch], object]] = {
    "a number": lambda b: b.x.__setitem__(slice(1, None), 0.5),
    "a trained value": lambda b: b.x.__setitem__(slice(1, None), b.weight[1:]),
    "its own items": lambda b: b.x.__setitem__(slice(1, None), b.x[:-1] * 2),
    "a mask": lambda b: b.x.__setitem__(b.mask, 0.5),
    "labels": lambda b: b.y.__setitem__(b.mask, -100),
}
AFTER: dict[str, Callable[[Batch, Tensor], Tensor | None]] = {
    "a column": lambda b, h: h.__setitem__((slice(None), 0), 0.0),
    "rows by index": lambda b, h: h.__setitem__(Tensor([0, 2]), b.weight[1]),
    "where a condition holds": lambda b, h: h.__setitem__(h > 0, 0.0),
    "through a view": add_through_a_view,
    "state": keep_in_state,
    "beside what was made before": beside_what_was_made_before,
}


def run(how: str) -> list[Any]:
    Tensor.manual_seed(0)
    weight = Tensor(np.full((4, 3), 0.1, np.float32), requires_grad=True)
    state, layer, found = Tensor(np.zeros((4, 3), np.float32)), nn.Linear(3, 3), []
    optimizer = nn.optim.SGD([weight, *layer.parameters()], lr=0.05)
    for i in range(STEPS):
        b = Batch(i, state, weight)
        optimizer.zero_grad()
        if how in BEFORE:
            BEFORE[how](b)
        h = layer(b.x)
        if how in AFTER and (changed := AFTER[how](b, h)) is not None:
            h = changed
        loss = F.cross_entropy(h, b.y, ignore_index=-100) + weight.square().sum()
        if i % 2 and how != "a trained value":  # (which a read makes numbers of)
            found.append(loss.item())
        loss.backward()
        optimizer.step()
        if i % 5 == 0:
            found += [b.x.tolist(), b.y.tolist(), state.tolist()]
    return [*found, weight.tolist(), layer.weight.tolist(), state.tolist()]


@pytest.mark.parametrize("how", [*BEFORE, *AFTER])
def test_items_that_are_written_in_a_loop(how: str) -> None:
    with Context(FOLLOW=0):
        want = run(how)
    before = counts.COUNTS.replays
    assert repr(run(how)) == repr(want)  # (labels may all be left out: NaN)
    assert counts.COUNTS.replays - before >= (4 if how == "through a view" else STEPS - 4)


OUT: dict[str, Callable[[Tensor], Tensor]] = {
    "a copy": lambda x: x.clone(),
    "zeros": lambda x: Tensor.zeros(9, 5),
    "a product": lambda x: x * 2,
}


@pytest.mark.parametrize("rounds", [1, 6])
@pytest.mark.parametrize("values", [2, 20])
@pytest.mark.parametrize("made", OUT)
def test_what_is_written_to_between_reads_keeps_its_gradients(made: str, values: int, rounds: int) -> None:
    """As the parts of a mixture of experts are put together. A read in a step of many values stored `out`, which had no
    gradient yet, as memory: all but the last write were numbers."""
    w = Tensor(np.ones((5, 3), np.float32), requires_grad=True)
    x, optimizer = Tensor(np.ones((9, 5), np.float32)), nn.optim.SGD([w], lr=0.0)
    for _ in range(rounds):
        optimizer.zero_grad()
        h, kept = x @ w, []
        for _ in range(values):
            h = h * 1.0
            kept.append(h)
        out = OUT[made](x)
        for i in range(3):
            y = h[i] * (i + 1)
            if y.sum().item() > 0:
                out[i, :3] = y
        out.sum().backward()
        assert w.grad is not None and w.grad.sum().item() == 90
        optimizer.step()


def test_whether_memory_requires_a_gradient_after_a_write_that_is_put_off() -> None:
    w, found = Tensor([1.0, 2.0], requires_grad=True), []
    optimizer = nn.optim.SGD([w], lr=0.0)
    for i in range(8):
        optimizer.zero_grad()
        x = Tensor([float(i), 1.0])
        h = (x * 2).sum()
        x.add_(w)
        found.append(x.requires_grad)
        (x.sum() + h).backward()
        optimizer.step()
    assert found == [True] * 8
