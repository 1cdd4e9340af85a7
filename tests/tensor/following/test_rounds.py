"""Loops whose values nobody reads for long: samplers, simulations. They are replayed a few rounds at a time."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from manygrad import Tensor, nn, no_grad
from manygrad.nn import functional as F
from manygrad.runtime.profile.counters import GlobalCounters
from manygrad.tensor.deferred.trace import THREAD
from manygrad.tensor.environment import FOLLOW
from tests.tensor.following.loops import Counts, array, same

pytestmark = pytest.mark.skipif(not FOLLOW, reason="FOLLOW=0: no call is put off")
ROUNDS = 120


class Denoiser(nn.Module):
    def __init__(self, layers: int = 1) -> None:
        super().__init__()
        self.time = nn.Embedding(ROUNDS, 8)
        self.first, self.last = nn.Linear(4, 8), nn.Linear(8, 4)
        self.between = nn.ModuleList([nn.Linear(8, 8) for _ in range(layers)])

    def forward(self, x: Tensor, t: Tensor) -> Tensor:
        h = self.first(x) + self.time(t)
        for layer in self.between:
            h = F.silu(layer(h))
        return self.last(h)


def sampled(model: Denoiser, times: Callable[[int], Tensor]) -> Tensor:
    x = Tensor.randn(3, 4)
    for t in reversed(range(ROUNDS)):
        x = (x - 0.01 * t / ROUNDS * model(x, times(t))) / (1 + 1e-4 * t)
        if t > 0:
            x = x + Tensor.randn(3, 4) * (1e-3 * t)
    return x


TIMES: dict[str, Callable[[int], Tensor]] = {
    "full": lambda t: Tensor.full((3,), t),
    "list": lambda t: Tensor([t] * 3),
    "array": lambda t: Tensor(np.full(3, t)),
    "number": lambda t: Tensor(t).expand(3),
}


@pytest.mark.parametrize("layers", [1, 9])
@pytest.mark.parametrize("times", TIMES)
def test_a_sampler(times: str, layers: int, counts: Counts) -> None:
    def run() -> list[np.ndarray]:
        Tensor.manual_seed(3)
        model = Denoiser(layers)
        with no_grad():
            return [sampled(model, TIMES[times]).numpy() for _ in range(3)]

    same(run)
    # (a number in all places is part of the calls that read it: it goes with what lies on any device)
    assert times in ("full", "number") or (counts.replays >= 10 and counts.captures <= 12)


def test_a_simulation_in_place() -> None:
    def run() -> list[np.ndarray]:
        place, speed = Tensor(array(6)).realize(), Tensor(array(6, seed=1)).realize()
        for i in range(600):
            speed.mul_(0.99).sub_(place * 0.01)
            place.add_(speed, alpha=0.1)
            if i == 400:
                place.clamp_(-1, 1)
        return [place.numpy(), speed.numpy()]

    same(run)


def test_an_iteration_that_keeps_what_it_made(counts: Counts) -> None:
    def run() -> list[np.ndarray]:
        a, x, path = Tensor(array(4, 4)).realize(), Tensor(array(4)).realize(), []
        for _ in range(400):
            y = a @ x
            x = y / y.square().sum().sqrt()
            path.append(x)
        return [Tensor.stack(path).numpy(), path[3].numpy(), path[-1].numpy()]

    same(run)
    assert counts.replays >= 5


def test_layers_are_no_rounds(counts: Counts) -> None:
    """A deep model without an ending for long is not cut: each layer has weights of its own."""

    def run() -> list[np.ndarray]:
        Tensor.manual_seed(3)
        layers = [nn.Linear(4, 4) for _ in range(150)]
        found = []
        with no_grad():
            for i in range(4):
                x = Tensor(array(2, 4, seed=i))
                for layer in layers:
                    x = F.relu(layer(x))
                found.append(x.numpy())
        return found

    same(run)
    assert counts.captures == 1 and counts.replays >= 1


def test_gradients_flow_through_all_rounds(counts: Counts) -> None:
    def run() -> list[np.ndarray]:
        Tensor.manual_seed(3)
        cell, found = nn.Linear(4, 4), []
        for i in range(3):
            h = Tensor(array(2, 4, seed=i))
            for _ in range(200):
                h = cell(h).tanh()
            cell.zero_grad()
            h.sum().backward()
            assert cell.weight.grad is not None
            found += [h.numpy(), cell.weight.grad.numpy()]
        return found

    same(run)


def test_what_a_trace_holds_does_not_grow() -> None:
    x = Tensor(array(4)).realize()
    most = 0
    for _ in range(5000):
        x = x * 0.999 + 0.001
        most = max(most, THREAD.trace.node.depth)
    assert most < 2000
    assert abs(x.numpy() - (array(4) * 0.999**5000 + 1 - 0.999**5000)).max() < 1e-4


def test_a_round_that_begins_with_an_operator_in_place() -> None:
    """On a value of the trace, which the program also keeps now and then."""

    def run() -> list[np.ndarray]:
        x, kept = Tensor.ones(4) * 0.5, []
        for i in range(300):
            x.mul_(0.999)
            x.add_(0.01 * (i % 3))
            if i % 50 == 0:
                kept.append(x)
                x = x * 1.5
        return [x.numpy(), *(k.numpy() for k in kept)]

    same(run)


@pytest.mark.parametrize(
    "make",
    [lambda x, i: Tensor.full((500, 500), i * 0.5), lambda x, i: x.reshape(-1, 1) * x + i],
    ids=["full", "outer"],
)
def test_what_is_large_stays_lazy(make: Callable[[Tensor, int], Tensor], no_collection: None) -> None:
    x = Tensor(np.arange(4000, dtype=np.float32)).realize()
    held = GlobalCounters.mem_used
    made = [make(x, i) for i in range(300)]
    assert GlobalCounters.mem_used - held < 1 << 16
    assert made[200][3, 4].item() == make(x, 200)[3, 4].item()


def test_what_lies_on_no_device_goes_with_any() -> None:
    """Numbers, and what is made of them, that live when a loop is cut, or are others in each round."""
    devices = ("CPU:0", "CPU:1")
    x, y = Tensor(array(4, 3)).realize(), Tensor(array(4, 3)).shard(devices, 0).realize()
    for i in range(120):
        mask = Tensor.arange(3).expand(4, 3) + Tensor.full((4, 3), i * 0.5)
        z = Tensor.ones(4, 3) * (i * 0.25) + mask
        x, y = x + 0.01 * z, y + 0.01 * z
    np.testing.assert_allclose(x.numpy(), y.numpy(), rtol=1e-5)
