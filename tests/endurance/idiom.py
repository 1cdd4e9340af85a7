"""What an idiom is: a loop as people write it, which yields after each step what it has to show."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from manygrad import Tensor, nn
from manygrad.nn import functional as F

Loop = Callable[[], Iterator[Any]]


@dataclass(frozen=True)
class Idiom:
    """`keeps`: tensors that the program itself keeps in each step; `rounds`: whether a value may differ in its last
    bits where calls are put off (docs/fast_loops.md says when)."""

    loop: Loop
    keeps: float = 0
    rounds: bool = False

    @property
    def name(self) -> str:
        return self.loop.__name__


IDIOMS: dict[str, Idiom] = {}


def idiom(loop: Loop | None = None, keeps: float = 0, rounds: bool = False) -> Any:
    """As a decorator, with or without options: a loop that is one of the idioms."""
    if loop is None:
        return lambda f: idiom(f, keeps, rounds)
    assert loop.__name__ not in IDIOMS
    IDIOMS[loop.__name__] = Idiom(loop, keeps, rounds)
    return loop


# *** what most programs have ***


def batch(i: int, rows: int = 8) -> tuple[np.ndarray, np.ndarray]:
    """The rows of a step and their targets."""
    x = np.random.default_rng(i).standard_normal((rows, 4)).astype(np.float32)
    return x, x.sum(1, keepdims=True) * 0.5


def network(*between: nn.Module) -> nn.Sequential:
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), *between, nn.Linear(8, 1))


def trained(*between: nn.Module, lr: float = 0.05) -> tuple[nn.Sequential, nn.optim.SGD]:
    model = network(*between)
    return model, nn.optim.SGD(model.parameters(), lr=lr, momentum=0.9)


def loss_of(model: Any, i: int, rows: int = 8) -> Tensor:
    x, y = batch(i, rows)
    return F.mse_loss(model(Tensor(x)), Tensor(y))


def train(model: Any, optimizer: Any, i: int) -> Tensor:
    """One step; gives its loss."""
    optimizer.zero_grad()
    loss = loss_of(model, i)
    loss.backward()
    optimizer.step()
    return loss


__all__ = ["IDIOMS", "Idiom", "batch", "idiom", "loss_of", "network", "train", "trained"]
