"""Loops whose values nobody reads for long: samplers, simulations. They are replayed a few rounds at a time."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from manygrad import Tensor, dtypes, nn, no_grad
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
    assert counts.replays >= 10 and counts.captures <= 12


def test_a_sampler_whose_step_is_a_number_in_all_places(counts: Counts) -> None:
    """As it is mostly written: the step in a wave's phase, and as the place in a table."""

    def run() -> list[np.ndarray]:
        Tensor.manual_seed(5)
        model, rates = nn.Linear(8, 4), Tensor(array(ROUNDS, seed=2)).realize()
        waves, out = Tensor(array(4, seed=3)).realize(), []
        with no_grad():
            for n in (3, 2, 3):
                x = Tensor(array(n, 4)).realize()
                for i in reversed(range(ROUNDS)):
                    t = Tensor.full((n,), i, dtype=dtypes.int64, device=None if n == 2 else "CPU")
                    angle = t[:, None].float() * waves[None]
                    rate = rates[t][:, None]
                    x = x * 0.9 + rate * model(angle.sin().cat(angle.cos(), dim=-1))
                out.append(x.numpy())
        return out

    same(run)
    assert counts.replays >= 10 and counts.captures <= 12


@pytest.mark.parametrize("make", [lambda i: Tensor.full((3,), i / 4), lambda i: Tensor(i / 4)], ids=["full", "number"])
def test_what_is_changed_in_place_is_the_programs_own(make: Callable[[int], Tensor]) -> None:
    """A number that is another one each time is an input where it is read, not where it is written to."""

    def run() -> list[np.ndarray]:
        x, out = Tensor(array(3)).realize(), []
        with no_grad():
            for i in range(60):
                t = other = make(i)
                t += x[0]
                t *= 2.5
                out.append(x * other + t)
                if i % 20 == 19:
                    out[-1].numpy()
        return [y.numpy() for y in out]

    same(run)


def test_each_cast_of_a_number_rounds_it() -> None:
    def run() -> list[np.ndarray]:
        x, y = Tensor(array(3)).realize(), Tensor(array(3)).realize()
        with no_grad():
            for i in range(60):
                t = Tensor.full((3,), 2049.75 + i)
                y = y * 0.5 + x * t.half().float() + x * t.int()
        return [y.numpy()]

    same(run)


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
