"""Programs that run with a TinyJit and without, and have to see the same numbers.

Each case is given `jit`, TinyJit or nothing at all, and returns the numbers that it saw.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from manygrad import Tensor, TinyJit, nn
from manygrad.nn import functional as F

CALLS = 7
Jit = Callable[[Callable[..., Any]], Any]
Case = Callable[[Jit], list[Any]]


def batch(i: int) -> tuple[Tensor, Tensor]:
    rng = np.random.default_rng(i)
    x = rng.standard_normal((4, 3)).astype(np.float32)
    return Tensor(x).realize(), Tensor(x.sum(1, keepdims=True)).realize()


class Net(nn.Module):
    def __init__(self) -> None:
        self.a, self.norm, self.b = nn.Linear(3, 5), nn.BatchNorm1d(5), nn.Linear(5, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.b(F.relu(self.norm(self.a(x))))


class Training:
    """A model, an optimiser and a step that trains; `between(i)` comes before the call `i`."""

    def __init__(self, optimizer: Callable[..., Any] = nn.optim.SGD, **options: Any) -> None:
        Tensor.manual_seed(3)
        self.model = Net()
        self.optimizer = optimizer(self.model.parameters(), **{"lr": 0.05, **options})

    def step(self, x: Tensor, y: Tensor) -> Tensor:
        self.optimizer.zero_grad()
        loss = F.mse_loss(self.model(x), y)
        loss.backward()
        self.optimizer.step()
        return loss

    def run(self, jit: Jit, between: Callable[[int], Any] = lambda i: None) -> list[Any]:
        step, seen = jit(self.step), []
        for i in range(CALLS):
            between(i)
            seen.append(step(*batch(i)).item())
        return [*seen, *(t.numpy() for t in self.model.state_dict().values())]


def plainly(fn: Callable[..., Any]) -> Any:
    return fn


def same(case: Case, rounding: float = 0.0) -> None:
    """`rounding`: where kernels compute gradients together that are read one by one without a capture."""
    want, got = case(plainly), case(TinyJit)
    assert len(got) == len(want)
    for i, (a, b) in enumerate(zip(got, want)):
        np.testing.assert_allclose(np.asarray(a), np.asarray(b), rounding, rounding, err_msg=f"value {i}")
