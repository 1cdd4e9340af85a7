"""Loops that look at gradients, also by views of them, and change them in place are replayed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from manygrad import Context, Tensor, nn, no_grad
from manygrad.nn import functional as F
from manygrad.tensor.deferred import counts
from manygrad.tensor.environment import FOLLOW

pytestmark = pytest.mark.skipif(not FOLLOW, reason="FOLLOW=0: no call is put off")
STEPS = 20


def clip_norm(grads: list[Tensor], model: nn.Module) -> object:
    return nn.utils.clip_grad_norm_(model.parameters(), 0.1)


def clip_norm_read(grads: list[Tensor], model: nn.Module) -> object:
    return float(nn.utils.clip_grad_norm_(model.parameters(), 0.1).item())


def clip_largest(grads: list[Tensor], model: nn.Module) -> object:
    return nn.utils.clip_grad_norm_(model.parameters(), 0.1, norm_type=float("inf"))


def clip_value(grads: list[Tensor], model: nn.Module) -> object:
    return nn.utils.clip_grad_value_(model.parameters(), 0.01)


def by_views(grads: list[Tensor], model: nn.Module) -> object:
    norm = sum((g.reshape(-1).square().sum() for g in grads), Tensor(0.0)).sqrt()
    _scale(grads, 0.1 / (norm + 1e-6))
    return norm


def by_one_vector(grads: list[Tensor], model: nn.Module) -> object:
    norm = Tensor.cat([g.flatten() for g in grads]).norm()
    _scale(grads, 0.1 / (norm + 1e-6))
    return norm


def by_views_that_live(grads: list[Tensor], model: nn.Module) -> object:
    views = [g.reshape(-1) for g in grads]
    norm = sum((v.square().sum() for v in views), Tensor(0.0)).sqrt()
    _scale(grads, 0.1 / (norm + 1e-6))
    return views[0].sum() + norm  # (which shows what was written)


def _scale(grads: list[Tensor], factor: Tensor) -> None:
    with no_grad():
        for g in grads:
            g.mul_(factor.minimum(1.0))


def run(how: Callable[[list[Tensor], nn.Module], Any]) -> list[Any]:
    Tensor.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 3))
    optimizer, found = nn.optim.AdamW(model.parameters(), lr=0.05), []
    for i in range(STEPS):
        x = Tensor(np.random.default_rng(i).standard_normal((4, 5)).astype(np.float32))
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), Tensor(np.arange(4) % 3))
        loss.backward()
        kept = how([p.grad for p in model.parameters() if p.grad is not None], model)
        optimizer.step()
        found += [loss.item(), kept.item() if isinstance(kept, Tensor) else kept]
    return [*found, *(p.tolist() for p in model.parameters())]


HOW = [clip_norm, clip_norm_read, clip_largest, clip_value, by_views, by_one_vector, by_views_that_live]


@pytest.mark.parametrize("how", HOW, ids=lambda f: f.__name__)
def test_gradients_that_are_clipped(how: Callable[[list[Tensor], nn.Module], Any]) -> None:
    with Context(FOLLOW=0):
        want = run(how)
    replays = counts.COUNTS.replays
    got = run(how)
    if how is clip_norm_read:  # (a read computes what others are made in one kernel with, where nothing was read)
        for a, b in zip(got, want, strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)
    else:
        assert got == want
    assert how is by_views_that_live or counts.COUNTS.replays - replays >= STEPS - 6
