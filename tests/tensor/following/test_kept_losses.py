"""Losses that are kept, added up and averaged without detach(), as metrics: no gradient flows on from them once the
parameters are written to, so the loop is replayed all the same."""

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

STEPS = 30


class Metrics:
    """What a loop keeps of its losses."""

    def __init__(self) -> None:
        self.total, self.average, self.kept = Tensor(0.0), None, list[Tensor]()

    def read(self) -> list[Any]:
        average = [] if self.average is None else [self.average.item()]
        return [self.total.item(), *average, *(t.item() for t in self.kept[-3:])]


def _add(m: Metrics, loss: Tensor) -> None:
    m.total = m.total + loss


def _add_in_place(m: Metrics, loss: Tensor) -> None:
    m.total += loss


def _average(m: Metrics, loss: Tensor) -> None:
    m.average = loss if m.average is None else 0.9 * m.average + 0.1 * loss


def _keep(m: Metrics, loss: Tensor) -> None:
    m.kept.append(loss)


HOW: dict[str, Callable[[Metrics, Tensor], None]] = {f.__name__[1:]: f for f in (_add, _add_in_place, _average, _keep)}


def run(how: str, before: bool, read: str) -> list[Any]:
    Tensor.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 3))
    optimizer, metrics, found = nn.optim.SGD(model.parameters(), lr=0.05), Metrics(), []
    for i in range(STEPS):
        x = Tensor(np.random.default_rng(i).standard_normal((4, 5)).astype(np.float32))
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), Tensor(np.arange(4) % 3))
        if "loss" in read:
            found.append(loss.item())
        if before:
            HOW[how](metrics, loss)
        loss.backward()
        optimizer.step()
        if not before:
            HOW[how](metrics, loss)
        if "metrics" in read and i % 10 == 9:
            found += metrics.read()
    return [*found, *metrics.read(), *(p.tolist() for p in model.parameters())]


@pytest.mark.parametrize("read", ["", "loss", "metrics", "loss and metrics"])
@pytest.mark.parametrize("before", [True, False], ids=["before backward", "after the step"])
@pytest.mark.parametrize("how", HOW)
def test_losses_that_are_kept(how: str, before: bool, read: str) -> None:
    with Context(FOLLOW=0):
        want = run(how, before, read)
    replays = counts.COUNTS.replays
    assert run(how, before, read) == want
    assert counts.COUNTS.replays - replays >= STEPS - 8


def test_a_context_that_changes_nothing_is_none() -> None:
    """Tests that say FOLLOW=1 are followed."""
    with Context(FOLLOW=0):
        want = run("add", True, "")
        before = counts.COUNTS.replays
        assert run("add", True, "") == want and counts.COUNTS.replays == before
        with Context(FOLLOW=1):
            assert run("add", True, "") == want and counts.COUNTS.replays - before >= STEPS - 8


@pytest.mark.parametrize("follow", [0, 1])
def test_a_gradient_through_such_a_sum_is_an_error(follow: int) -> None:
    with Context(FOLLOW=follow):
        w = Tensor([1.0, 2.0], requires_grad=True)
        optimizer, total = nn.optim.SGD([w], lr=0.05), Tensor(0.0)
        for i in range(12):
            optimizer.zero_grad()
            loss = (w * w).sum()
            if i == 9:
                with pytest.raises(RuntimeError, match="gradient cannot be had any more"):
                    (loss + total).backward()
                optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            total = total + loss
        w.grad = None
        (total.detach() * w).sum().backward()
        assert w.grad is not None and w.grad.tolist() == [total.item()] * 2
