"""Gradients that several backward passes add up, and what is read, clipped or called in between: replayed, with the
bits of calls that are made as they come."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from manygrad import Tensor, nn, no_grad
from manygrad.nn import functional as F
from manygrad.tensor.environment import FOLLOW
from tests.tensor.following.loops import LAYERS, Counts, Training, array, close, same

pytestmark = pytest.mark.skipif(not FOLLOW, reason="FOLLOW=0: no call is put off")
STEPS = 10


class Accumulating(Training):
    """Each step adds up the gradients of `parts` batches."""

    parts = 3

    def __init__(self, *layers: nn.Module) -> None:
        super().__init__(*layers)
        # (a bias before batch norm has no gradient but rounding)
        self.optimizer = nn.optim.Adam(self.model.parameters(), lr=0.01, eps=1e-3)

    def loss(self, i: int) -> Tensor:
        x, y = Tensor(array(5, 4, seed=i)), Tensor(np.arange(5) % 3)
        return F.cross_entropy(self.model(x), y) / self.parts

    def between(self, loss: Tensor) -> list[np.ndarray]:
        """After each backward pass."""
        return []

    def before_step(self) -> list[np.ndarray]:
        return []

    def begin(self) -> list[np.ndarray]:
        self.optimizer.zero_grad()
        return []

    def run(self) -> list[np.ndarray]:
        found = []
        for i in range(STEPS):
            found += self.begin()
            for part in range(self.parts):
                loss = self.loss(self.parts * i + part)
                loss.backward()
                found += self.between(loss)
            found += self.before_step()
            self.optimizer.step()
            found.append(loss.numpy())
        return [*found, *self.state()]


class Reading(Accumulating):
    def between(self, loss: Tensor) -> list[np.ndarray]:
        return [np.array(loss.item())]


class ReadingAGradient(Accumulating):
    def between(self, loss: Tensor) -> list[np.ndarray]:
        return [p.grad.numpy() for p in self.model.parameters() if p.grad is not None]


class Clipping(Reading):
    def before_step(self) -> list[np.ndarray]:
        return [nn.utils.clip_grad_norm_(self.model.parameters(), 0.5).numpy()]


class Norms(Accumulating):
    def before_step(self) -> list[np.ndarray]:
        return [np.array(p.grad.square().sum().item()) for p in self.model.parameters() if p.grad is not None]


class KeepingLosses(Reading):
    """As `losses.append(loss)` does: each keeps what it was computed from."""

    def __init__(self, *layers: nn.Module) -> None:
        super().__init__(*layers)
        self.losses: list[Tensor] = []

    def between(self, loss: Tensor) -> list[np.ndarray]:
        self.losses.append(loss)
        return super().between(loss)


class Summing(Accumulating):
    """The losses of all parts, read at the end."""

    def __init__(self, *layers: nn.Module) -> None:
        super().__init__(*layers)
        self.total = Tensor(0.0)

    def between(self, loss: Tensor) -> list[np.ndarray]:
        self.total = self.total + loss.detach()
        return []

    def before_step(self) -> list[np.ndarray]:
        return [self.total.numpy()]


class Holding(Reading):
    """A gradient that is held, one that is seen through a view, and one that is scaled in place."""

    def between(self, loss: Tensor) -> list[np.ndarray]:
        found = super().between(loss)
        first, last = self.model[0], self.model[len(self.model) - 1]
        assert first.weight.grad is not None and last.weight.grad is not None and first.bias.grad is not None
        if not hasattr(self, "held") or self.held is not first.weight.grad:
            self.held, self.seen = first.weight.grad, last.weight.grad.view(-1)
        first.bias.grad.mul_(0.5)
        return [*found, self.held.numpy(), self.seen.numpy()]

    def before_step(self) -> list[np.ndarray]:
        assert self.held is self.model[0].weight.grad
        return [self.held.numpy(), self.seen.numpy(), self.seen[:3].numpy()]


class Zeroing(Reading):
    """Gradients are set to zeros in place."""

    def begin(self) -> list[np.ndarray]:
        before = self.model[0].weight.grad
        self.optimizer.zero_grad(set_to_none=False)
        assert self.model[0].weight.grad is before
        return []


class ReadingZeros(Zeroing):
    """As they are, and through a view."""

    def begin(self) -> list[np.ndarray]:
        held = self.model[0].weight.grad
        view = None if held is None else held.view(-1)[:5]
        super().begin()
        return [] if held is None or view is None else [view.numpy(), held.numpy()]


class InPlace(Reading):
    """Gradients that are averaged, decayed and clamped in place, as one does by hand."""

    def before_step(self) -> list[np.ndarray]:
        for p in self.model.parameters():
            assert p.grad is not None
            p.grad.div_(3)
            p.grad.add_(p.detach(), alpha=0.01)
            p.grad.clamp_(-0.1, 0.1)
        assert self.model[0].weight.grad is not None
        return [self.model[0].weight.grad.numpy()]


class Hooked(Accumulating):
    def __init__(self, *layers: nn.Module) -> None:
        super().__init__(*layers)
        self.called = 0
        for p in self.model.parameters():
            p.register_hook(self.halved)
            p.register_post_accumulate_grad_hook(self.count)

    def halved(self, g: Tensor) -> Tensor:
        return g * 0.5

    def count(self, p: Tensor) -> None:
        assert p.grad is not None and not p.grad.requires_grad
        self.called += 1

    def run(self) -> list[np.ndarray]:
        found = super().run()
        assert self.called == STEPS * self.parts * len(list(self.model.parameters()))
        return found


class Skipping(Reading):
    """Batches that are left out, as where a loss is not finite, and gradients that are dropped or replaced."""

    def between(self, loss: Tensor) -> list[np.ndarray]:
        value = loss.item()
        bias = self.model[0].bias
        if value > 0.4:
            bias.grad = None
        elif value > 0.35:
            bias.grad = Tensor(array(8, seed=4))
        return [np.array(value)]


# how many replays a step has at least, and whether gradients are computed as where calls are made as they come
# (a sum is rounded once or twice where what it adds is stored in between)
ACCUMULATING: dict[str, tuple[type[Accumulating], int, bool]] = {
    "nothing read": (Accumulating, 1, True),
    "each loss": (Reading, 3, True),
    "each gradient": (ReadingAGradient, 3, False),
    "clipped": (Clipping, 4, False),
    "norms": (Norms, 4, False),
    "losses kept": (KeepingLosses, 3, True),
    "sum of losses": (Summing, 0, True),
    "held": (Holding, 0, False),
    "in place": (InPlace, 4, False),
    "zeros": (Zeroing, 1, False),
    "zeros read": (ReadingZeros, 0, False),
    "hooks": (Hooked, 1, True),
    "skipped": (Skipping, 0, True),
}


@pytest.mark.parametrize("layers", LAYERS)
@pytest.mark.parametrize("kind", ACCUMULATING)
def test_gradients_that_add_up(kind: str, layers: str, counts: Counts) -> None:
    make, replays, is_exact = ACCUMULATING[kind]
    (same if is_exact else close)(lambda: make(*LAYERS[layers]()).run())
    assert counts.replays >= replays * (STEPS - 6)


def test_one_loop_over_batches(counts: Counts) -> None:
    """`if i % 4 == 3: step()` in a loop over batches, each loss read."""

    def run() -> list[np.ndarray]:
        loop, found = Accumulating(nn.ReLU()), []
        for i in range(32):
            loss = loop.loss(i)
            loss.backward()
            found.append(np.array(loss.item()))
            if i % 4 == 3:
                loop.optimizer.step()
                loop.optimizer.zero_grad()
        return [*found, *loop.state()]

    same(run)
    assert counts.replays >= 20


@pytest.mark.parametrize("read", [False, True])
def test_a_loss_twice(read: bool) -> None:
    """backward() twice from one loss, and from two that stand on the same."""

    def run() -> list[np.ndarray]:
        loop, found = Accumulating(nn.Tanh()), []
        for i in range(STEPS):
            loop.optimizer.zero_grad()
            h = loop.model(Tensor(array(5, 4, seed=i)))
            a, b = h.square().mean(), h.abs().sum()
            for loss in (a, b, a):
                loss.backward()
                if read:
                    found.append(loss.numpy())
            loop.optimizer.step()
            found += [a.numpy(), b.numpy()]
        return [*found, *loop.state()]

    same(run)


def test_gradients_given_by_hand(counts: Counts) -> None:
    """A step whose gradients the program makes itself, from numbers and from others."""

    def run() -> list[np.ndarray]:
        loop, found = Accumulating(nn.ReLU()), []
        for i in range(STEPS):
            loop.optimizer.zero_grad()
            loss = loop.loss(i)
            loss.backward()
            found.append(loss.numpy())
            for n, p in enumerate(loop.model.parameters()):
                assert p.grad is not None
                p.grad = Tensor(array(*p.shape, seed=n)) if n % 2 else p.grad.clone() * 2
            loop.optimizer.step()
        return [*found, *loop.state()]

    same(run)
    assert counts.replays >= STEPS - 4


def test_activations_that_are_written_in_place(counts: Counts) -> None:
    """`x += residual`, an activation in place, and views of what is written."""

    def run() -> list[np.ndarray]:
        loop, found = Accumulating(nn.ReLU()), []
        first, last = loop.model[0], loop.model[2]
        for i in range(STEPS):
            loop.optimizer.zero_grad()
            x, y = Tensor(array(5, 4, seed=i)), Tensor(np.arange(5) % 3)
            h = first(x) * 2
            h += first(x).tanh()
            same_memory = h
            h.relu_()
            if i >= STEPS - 2:
                view = h.view(-1)
                h *= 0.5
                found.append(view.numpy())
            assert same_memory is h
            loss = F.cross_entropy(last(h), y)
            found.append(loss.numpy())
            loss.backward()
            found.append(np.array((h > 0).sum().item()))
            loop.optimizer.step()
        return [*found, *loop.state()]

    close(run)
    assert counts.replays >= 2 * (STEPS - 6)


@pytest.mark.parametrize("of", ["buffer", "weights", "lazy"])
def test_views_that_are_written_in_place(of: str) -> None:
    """What they are views of shows it: memory from before, a parameter, and a value of the same step."""

    def run() -> list[np.ndarray]:
        Tensor.manual_seed(1)
        layer, found = nn.Linear(8, 4), []
        layer.weight.assign(Tensor(array(4, 8)))
        buffer = Tensor.zeros(32).contiguous().realize()
        for i in range(STEPS):
            if of == "lazy":
                buffer = Tensor(array(32, seed=i)) * 2
            whole = layer.weight.detach() if of == "weights" else buffer
            part = whole.view(4, 8)[i % 4]
            part += 1.0
            part.mul_(0.5)
            column = whole.view(4, 8)[:, i % 8]
            column.clamp_(-1, 1)
            found += [np.array(whole.sum().item()), part.numpy(), layer(Tensor(array(2, 8, seed=i))).numpy()]
        return [*found, buffer.numpy(), layer.weight.numpy()]

    same(run)


def test_memory_of_accumulated_gradients_is_given_back() -> None:
    from manygrad.runtime.devices import get_device

    loop, memory = KeepingLosses(nn.ReLU()), []
    loop.optimizer.zero_grad()
    for i in range(60):
        loss = loop.loss(i % 4)
        loss.backward()
        loop.between(loss)
        memory.append(get_device("CPU").allocated)
    weights = sum(p.numel() * 4 for p in loop.model.parameters())
    grown = (memory[-1] - memory[-21]) / 20
    batch = 5 * 4 * 4 + 5 * 8
    assert grown < weights / 2 + 8 * batch, "each loss keeps its batch, as its history is, and no gradient"


@pytest.mark.parametrize("follow", [False, True])
def test_what_backward_leaves_has_a_history_where_it_is_asked_for(follow: bool) -> None:
    x = Tensor(array(3), requires_grad=True)
    for _ in range(4):
        x.grad = None
        (x * x * x).sum().backward()
        assert x.grad is not None and not x.grad.requires_grad
        with pytest.raises(RuntimeError, match="create_graph=True"):
            x.grad.sum().backward()
        if follow:
            x.grad.numpy()
        x.grad = None
        (x * x * x).sum().backward(create_graph=True)
        g, x.grad = x.grad, None
        assert g is not None and g.requires_grad
        g.sum().backward()
        np.testing.assert_allclose(x.grad.numpy(), 6 * x.numpy(), rtol=1e-6)


class Scheduled:
    def __init__(self, lr: float) -> None:
        self.weight = Tensor(np.ones((4, 3), np.float32), requires_grad=True)
        self.optimizer = nn.optim.SGD([self.weight], lr=lr, momentum=0.9)
        self.schedule = nn.optim.lr_scheduler.ExponentialLR(self.optimizer, 0.5)
        self.want, self.momentum, self.lr = np.ones((4, 3), np.float32), np.float32(0), np.float32(lr)

    def train(self, by_hand: bool) -> None:
        x = array(8, 4)
        slope = np.broadcast_to(x.sum(0)[:, None], (4, 3))
        for _ in range(5):
            self.optimizer.zero_grad()
            if by_hand:
                self.weight.grad = Tensor(slope.copy())
            else:
                (Tensor(x) @ self.weight).sum().backward()
            self.optimizer.step()
            self.schedule.step()
            self.momentum = np.float32(0.9) * self.momentum + slope
            self.want, self.lr = self.want - self.lr * self.momentum, self.lr / 2


@pytest.mark.parametrize("by_hand", [False, True])
@pytest.mark.parametrize("reset", [False, True])
def test_trainings_in_turns_have_each_its_own_rate(by_hand: bool, reset: bool) -> None:
    """A schedule writes what the step of its own optimiser reads, and no other's; and so does who writes to a state."""
    trained = [Scheduled(lr) for lr in (0.1, 0.2, 0.3, 0.4)]
    for _ in range(5):
        for one in trained:
            one.train(by_hand)
            if reset:
                with no_grad():
                    one.optimizer.state[one.weight]["momentum_buffer"].zero_()
                one.momentum = np.float32(0)
    for one in trained:
        np.testing.assert_allclose(one.weight.numpy(), one.want, rtol=2e-6)


def test_a_copy_of_what_is_put_off() -> None:
    """deepcopy and pickle of a tensor whose call is put off, and of one whose gradient is."""
    import copy
    import pickle

    copied: list[Callable[[Tensor], Tensor]] = [copy.deepcopy, lambda t: pickle.loads(pickle.dumps(t))]
    for copies in copied:
        w = Tensor(array(3, 3), requires_grad=True)
        for i in range(6):
            w.grad = None
            y = Tensor(array(3, 3, seed=i)) @ w
            y.sum().backward()
            assert w.grad is not None
            again = copies(w.grad * 2)
            assert type(again) is Tensor
            np.testing.assert_array_equal(again.numpy(), w.grad.numpy() * 2)
            both = copy.deepcopy(w)
            assert both.grad is not None and type(both.grad) is Tensor
            np.testing.assert_array_equal(both.grad.numpy(), w.grad.numpy())
