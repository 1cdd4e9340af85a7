"""Loops that the tests beside this file run: as they are, and with calls that are made at once."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from manygrad import Context, Tensor, nn
from manygrad.nn import functional as F


class Counts:
    replays = captures = flushes = 0


def array(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


class Training:
    """A loop as in any tutorial."""

    def __init__(self, *layers: nn.Module, lr: float = 0.01) -> None:
        Tensor.manual_seed(3)
        self.model = nn.Sequential(nn.Linear(4, 8), *layers, nn.Linear(8, 3))
        self.optimizer = nn.optim.Adam(self.model.parameters(), lr=lr)

    def step(self, i: int, rows: int = 5) -> Tensor:
        x, y = Tensor(array(rows, 4, seed=i)), Tensor(np.arange(rows) % 3)
        self.optimizer.zero_grad()
        loss = F.cross_entropy(self.model(x), y)
        loss.backward()
        self.optimizer.step()
        return loss

    def state(self) -> list[np.ndarray]:
        grads = [p.grad.numpy() for p in self.model.parameters() if p.grad is not None]
        return [*(t.numpy() for t in self.model.state_dict().values()), *grads]


def losses(make: Callable[[], Training], steps: int = 8) -> list[np.ndarray]:
    loop = make()
    found = [np.array(loop.step(i).item()) for i in range(steps)]
    return [*found, *loop.state()]


def same(make: Callable[[], list[np.ndarray]]) -> None:
    """The same bits as where calls are made as they come."""
    with Context(FOLLOW=0):
        want = make()
    for a, b in zip(make(), want, strict=True):
        np.testing.assert_array_equal(a, b)


def close(make: Callable[[], list[np.ndarray]]) -> None:
    """As there, but for the last bits."""
    with Context(FOLLOW=0):
        want = make()
    for a, b in zip(make(), want, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-7)


LAYERS: dict[str, Callable[[], list[nn.Module]]] = {
    "plain": lambda: [nn.ReLU()],
    "batch norm": lambda: [nn.BatchNorm1d(8), nn.ReLU()],
    "dropout": lambda: [nn.Dropout(0.5)],
    "norms": lambda: [nn.LayerNorm(8), nn.GELU(), nn.RMSNorm(8)],
}
