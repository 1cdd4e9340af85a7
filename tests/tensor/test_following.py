"""A plain loop whose calls are put off: what is replayed, what is made as it comes, and that nobody can tell."""

from __future__ import annotations

import gc
import sys
import threading
import warnings
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

from manygrad import Context, Tensor, TinyJit, dtypes, nn, no_grad
from manygrad.nn import functional as F
from manygrad.runtime.jit.results import ResultMemory
from manygrad.runtime.storage import STORAGE
from manygrad.tensor.deferred import endings, tree, varying
from manygrad.tensor.deferred.tensors import DeferredTensor
from manygrad.tensor.deferred.trace import PUT_OFF, THREAD, Trace
from manygrad.tensor.deferred.tree import MOST_CHILDREN
from manygrad.tensor.environment import FOLLOW

pytestmark = pytest.mark.skipif(not FOLLOW, reason="FOLLOW=0: no call is put off")


class Counts:
    replays = captures = flushes = 0


@pytest.fixture
def counts(monkeypatch: pytest.MonkeyPatch) -> Iterator[Counts]:
    found, computed, flush = Counts(), endings.computed, Trace.flush

    def counted(trace: Trace, ending: Any, *rest: Any, **named: Any) -> Any:
        if ending.replay is None:
            found.captures += 1
        else:
            found.replays += 1
        return computed(trace, ending, *rest, **named)

    def flushed(self: Trace, why: str) -> None:
        found.flushes += bool(self.put_off)
        flush(self, why)

    monkeypatch.setattr(endings, "computed", counted)
    monkeypatch.setattr(Trace, "flush", flushed)
    yield found


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


LAYERS: dict[str, Callable[[], list[nn.Module]]] = {
    "plain": lambda: [nn.ReLU()],
    "batch norm": lambda: [nn.BatchNorm1d(8), nn.ReLU()],
    "dropout": lambda: [nn.Dropout(0.5)],
    "norms": lambda: [nn.LayerNorm(8), nn.GELU(), nn.RMSNorm(8)],
}


@pytest.mark.parametrize("name", LAYERS)
def test_a_training_loop_is_replayed_from_its_fourth_step_on(name: str, counts: Counts) -> None:
    loop = Training(*LAYERS[name]())
    for i in range(4):
        loop.step(i)
    before = counts.replays, counts.flushes
    for i in range(6):
        loop.step(i).item()
    assert (counts.replays - before[0], counts.flushes - before[1]) == (6, 0)
    same(lambda: losses(lambda: Training(*LAYERS[name]())))


def test_what_a_followed_call_costs() -> None:
    """Python functions that run for one call of a method with one argument: it is what a step of many of them takes."""

    def relus() -> Tensor:
        t = x
        for _ in range(20):
            t = t.relu()
        return t

    x, calls = Tensor(array(4)), 0

    def count(_: Any, event: str, __: Any) -> None:
        nonlocal calls
        calls += event == "call"

    for _ in range(4):
        relus().numpy()
    before = sys.getprofile()
    sys.setprofile(count)
    try:
        t = relus()
    finally:
        sys.setprofile(before)
    assert isinstance(t, DeferredTensor)
    assert calls <= 20 * 7 + 20


def test_a_loss_that_is_read_before_backward(counts: Counts) -> None:
    """The read is one replay, the rest of the step another, whatever of the step is kept."""

    def run(counts: Counts | None = None) -> list[np.ndarray]:
        loop, found = Training(nn.Tanh()), []
        kept: list[Any] = []
        for i in range(9):
            if counts is not None and i == 5:
                counts.replays = counts.captures = counts.flushes = 0
            loop.optimizer.zero_grad()
            out = loop.model(Tensor(array(5, 4, seed=i)))
            loss = F.mse_loss(out, Tensor(array(5, 3)))
            found.append(np.array(loss.item()))
            loss.backward()
            loop.optimizer.step()
            kept += [out, loss]
        return [*found, *loop.state(), *(t.numpy() for t in kept)]

    same(run)
    run(counts)
    assert (counts.replays, counts.captures, counts.flushes) == (8, 0, 0)


WRITING_LAYERS: dict[str, Callable[[], list[nn.Module]]] = {
    "dropout": lambda: [nn.Dropout(0.4), nn.Tanh()],
    "batch norm": lambda: [nn.BatchNorm1d(8), nn.Tanh()],
    "both": lambda: [nn.BatchNorm1d(8), nn.Linear(8, 8), nn.Dropout(0.3), nn.LayerNorm(8), nn.Dropout(0.2)],
}


@pytest.mark.parametrize("name", WRITING_LAYERS)
def test_a_read_after_calls_that_write(name: str, counts: Counts) -> None:
    """What they write is written once, at the read, and not when the rest of the step is made."""

    def run(counts: Counts | None = None, kind: str = "loss") -> list[np.ndarray]:
        Tensor.manual_seed(5)
        loop, found = Training(*WRITING_LAYERS[name]()), []
        kept: list[Tensor] = []
        for i in range(12):
            if counts is not None and i == 8:
                counts.replays = counts.captures = counts.flushes = 0
            loop.optimizer.zero_grad()
            out = loop.model(Tensor(array(5, 4, seed=i)))
            loss = F.mse_loss(out, Tensor(array(5, 3)))
            if kind != "after":
                found.append(np.array(loss.item()))
            if kind == "two":
                found.append(out.sum().numpy())
            if kind == "more":
                loss = loss + out.abs().mean()
            if kind == "another way" and i > 5:
                loss = loss * 0.5 if i % 2 else loss + out.square().mean()
            if kind == "another pass" and i % 3 == 2:
                again = F.mse_loss(loop.model(Tensor(array(5, 4, seed=50 + i))), Tensor(array(5, 3)))
                found.append(np.array(again.item()))
                again.backward()
            if kind == "no more" and i % 2:
                continue
            if kind == "state":
                found += [t.numpy() for t in loop.model.state_dict().values()]
            loss.backward()
            if kind == "after":
                found.append(np.array(loss.item()))
            loop.optimizer.step()
            if kind == "kept":
                kept += [out, loss]
        return [*found, *loop.state(), *(t.numpy() for t in kept), Tensor.rand(3).numpy()]

    for kind in ("loss", "kept", "after", "two", "more", "another way", "another pass", "no more", "state"):
        same(lambda kind=kind: run(None, kind))  # type: ignore[misc]
    for kind in ("loss", "kept", "more", "after"):
        run(counts, kind)
        assert counts.replays >= 8 and (counts.captures, counts.flushes) == (0, 0), kind


@pytest.mark.parametrize("name", ["plain", "dropout", "batch norm"])
@pytest.mark.parametrize("read", [False, True])
def test_a_value_that_two_optimisers_train_from(name: str, read: bool) -> None:
    """As in a GAN: the first one's step ends a trace, and the gradient of a value that lives on flows on."""

    def run() -> list[np.ndarray]:
        Tensor.manual_seed(2)
        judge = nn.Sequential(nn.Linear(3, 4), *LAYERS["plain"](), nn.Linear(4, 1))
        learns = nn.optim.SGD(judge.parameters(), lr=0.1)
        loop, found = Training(*LAYERS[name]()), []
        for i in range(9):
            fake = loop.model(Tensor(array(5, 4, seed=i)))
            if read:
                found.append(np.array(fake.sum().item()))
            learns.zero_grad()
            loss = judge(fake.detach()).square().mean()
            found.append(np.array(loss.item()))
            loss.backward()
            learns.step()
            loop.optimizer.zero_grad()
            loss = (judge(fake) - 1).square().mean()
            found.append(np.array(loss.item()))
            loss.backward()
            found += loop.state()
            loop.optimizer.step()
        return found

    same(run)


def test_losses_of_several_batches_that_are_read_before_their_backward() -> None:
    """Each has the masks of its own time."""

    def run() -> list[np.ndarray]:
        loop, found = Training(nn.Dropout(0.5), nn.Tanh()), []
        for i in range(9):
            loop.optimizer.zero_grad()
            losses = []
            for k in range(3):
                loss = F.mse_loss(loop.model(Tensor(array(5, 4, seed=3 * i + k))), Tensor(array(5, 3)))
                found.append(np.array(loss.item()))
                losses.append(loss)
            for loss in losses:
                loss.backward()
            found.append(loop.model[0].weight.grad.numpy())
            loop.optimizer.step()
        return [*found, *loop.state()]

    same(run)


def test_gradients_that_are_added_to_while_they_are_put_off() -> None:
    """After a read the next forward pass is another trace, whose gradients are added to those of the first; and who
    holds a gradient holds the one that the step takes."""

    def run() -> list[np.ndarray]:
        loop, found = Training(nn.Tanh()), []
        first = loop.model[0].weight
        for i in range(12):
            x, y = Tensor(array(5, 4, seed=i)), Tensor(array(5, 3))
            loop.optimizer.zero_grad()
            loss = F.mse_loss(loop.model(x), y)
            found.append(np.array(loss.item()))
            loss.backward()
            held = first.grad
            assert held is not None
            if i % 3 == 2:
                F.mse_loss(loop.model(x), y * 2).backward()
                found.append(held.numpy())
            if i % 4 == 3:
                held *= 0.5
            assert first.grad is held
            loop.optimizer.step()
        return [*found, *loop.state()]

    same(run)


def test_what_a_kept_loss_says_of_its_gradient() -> None:
    """After the step it has none, and says why, as where calls are made at once; so does what was read before."""

    def run(read: bool) -> list[str]:
        loop, found = Training(nn.Tanh()), []
        kept: list[Tensor] = []
        for i in range(8):
            loop.optimizer.zero_grad()
            out = loop.model(Tensor(array(5, 4, seed=i)))
            loss = F.mse_loss(out, Tensor(array(5, 3)))
            if read:
                loss.item()
            loss.backward()
            loop.optimizer.step()
            kept += [out, loss]
        for t in kept[6:]:
            found.append(str(t.requires_grad))
            with pytest.raises(RuntimeError) as error:
                t.sum().backward()
            found.append(str(error.value))
        return found

    for read in (False, True):
        with Context(FOLLOW=0):
            want = run(read)
        assert run(read) == want
        assert any("was overwritten" in text for text in want) == read


def test_results_that_are_kept_are_the_callers(counts: Counts) -> None:
    loop = Training(nn.ReLU())
    kept = [loop.step(i) for i in range(10)]
    with Context(FOLLOW=0):
        other = Training(nn.ReLU())
        want = [other.step(i).item() for i in range(10)]
    assert [t.item() for t in kept] == want
    assert counts.replays >= 5


def test_evaluation_between_steps(counts: Counts) -> None:
    def run() -> list[np.ndarray]:
        loop, found = Training(nn.BatchNorm1d(8)), []
        for _ in range(5):
            loop.model.train()
            for i in range(4):
                loop.step(i)
            loop.model.eval()
            with no_grad():
                for i in range(3):
                    out = loop.model(Tensor(array(7, 4, seed=i)))
                    right = (out.argmax(1) == Tensor(np.arange(7) % 3)).float().mean()
                    found += [np.array(right.item()), out.numpy()]
        return [*found, *loop.state()]

    same(run)
    assert counts.replays >= 15


def test_weights_that_are_loaded_replaced_or_written_are_seen() -> None:
    def run() -> list[np.ndarray]:
        loop, found = Training(nn.ReLU()), []
        saved = {k: t.detach().clone().realize() for k, t in loop.model.state_dict().items()}
        for i in range(24):
            if i == 6:
                loop.model.load_state_dict(saved)
            if i == 10:
                loop.model[0].weight.detach().assign(Tensor(array(8, 4, seed=9)))
            if i == 14:
                loop.model[2].weight.data = Tensor(array(3, 8, seed=8))
            if i == 17:
                loop.model[2].weight.requires_grad_(False)
            if i == 20:
                loop.optimizer.param_groups[0]["lr"] = 0.5
            if i == 22:
                loop.optimizer.param_groups[0]["betas"] = (0.5, 0.5)
            found.append(np.array(loop.step(i).item()))
        return [*found, *loop.state()]

    same(run)


def test_a_number_that_changes_and_sizes_that_change() -> None:
    def run() -> list[np.ndarray]:
        w, found = Tensor(array(4, 4)).realize(), []
        for i in range(3 * MOST_CHILDREN):
            found.append((w * (i * 0.5) + 1).relu().sum().numpy())
        loop = Training(nn.ReLU())
        found += [loop.step(i, rows=2 + i % 3).numpy() for i in range(20)]
        return [*found, *loop.state()]

    same(run)


def test_who_writes_to_what_is_read_has_it_read_first() -> None:
    def run() -> list[np.ndarray]:
        found = []
        for i in range(6):
            w = Tensor(array(3, seed=i)).realize()
            y = w * 2
            w.add_(1)
            z = w * 2
            w[0] = 7.0
            found += [y.numpy(), z.numpy(), w.numpy()]
        return found

    same(run)


def test_another_thread_reads_what_is_put_off() -> None:
    def run() -> list[np.ndarray]:
        found: list[np.ndarray] = []
        for i in range(5):
            x = Tensor(array(4, seed=i))
            y = (x * 2 + Tensor.rand(4)).relu()
            t = threading.Thread(target=lambda y=y: found.append((y + 1).numpy()))
            t.start()
            t.join(60)
            found.append(y.numpy())
        return found

    Tensor.manual_seed(1)
    with Context(FOLLOW=0):
        want = run()
    Tensor.manual_seed(1)
    for a, b in zip(run(), want, strict=True):
        np.testing.assert_array_equal(a, b)


def test_a_step_that_fails_and_goes_on() -> None:
    def run() -> list[np.ndarray]:
        loop = Training(nn.ReLU())
        found = []
        for i in range(12):
            loss = loop.step(i)
            if i % 3 == 2:
                with pytest.raises((ValueError, RuntimeError)):
                    F.mse_loss(loop.model(Tensor(array(5, 4))), Tensor(array(2, 7)))
                with pytest.raises(ZeroDivisionError):
                    y = loop.model(Tensor(array(5, 4))).sum()
                    y * (1 / 0)
            found.append(loss.numpy())
        return [*found, *loop.state()]

    same(run)


def test_a_deferred_tensor_answers_without_being_made(counts: Counts) -> None:
    x = Tensor(array(4, 6)).realize()
    make = lambda: x.reshape(2, 12).relu()  # noqa: E731
    for _ in range(3):
        make().numpy()
    y = make()
    assert type(y) is DeferredTensor and isinstance(y, Tensor)
    before = counts.flushes
    assert (y.shape, y.ndim, y.dtype.name, y.device, y.numel(), len(y)) == ((2, 12), 2, "float32", x.device, 24, 2)
    assert counts.flushes == before
    assert y.uop.op is not None and type(y) is Tensor and counts.flushes == before + 1


def test_data_that_decides_is_read_each_time() -> None:
    def run() -> list[np.ndarray]:
        found = []
        for i in range(8):
            x = Tensor(array(6, seed=i))
            y = x * 2 if x.sum().item() > 0 else x - 1
            found += [y.numpy(), x[x > 0].numpy()]
        return found

    same(run)


def test_nothing_of_a_model_stays_after_it() -> None:
    loop = Training(nn.ReLU())
    for i in range(6):
        loop.step(i).item()
    weight, memory = weakref.ref(loop.model[0].weight), weakref.ref(STORAGE[loop.optimizer.flats[0].flat.uop])
    del loop
    gc.collect()
    assert weight() is None and memory() is None
    THREAD.trace.flush("a test")
    assert not PUT_OFF


def test_a_tiny_jit_and_a_plain_loop_take_turns() -> None:
    def run() -> list[np.ndarray]:
        loop, found = Training(nn.ReLU()), []
        step = TinyJit(lambda x: loop.model(x).sum())
        for i in range(10):
            found.append(loop.step(i).numpy())
            found.append(step(Tensor(array(5, 4, seed=i)) * 2).numpy())
        return found

    same(run)


def test_a_changed_external_tensor_that_was_not_noticed_is_an_error() -> None:
    w = Tensor(array(3)).realize()
    for i in range(4):
        y = w * 3
        if i < 3:
            y.numpy()
    w.uop = Tensor(array(3, seed=1)).realize().uop  # as nobody may
    with pytest.raises(RuntimeError, match="FOLLOW=0"):
        y.numpy()


def test_errors_name_the_line_of_this_call() -> None:
    """Calls that are alike on two lines are two, in a replay, too."""
    t, first = Tensor(array(6)).realize(), test_errors_name_the_line_of_this_call.__code__.co_firstlineno
    uses = [
        lambda i: t[i] * 2,
        lambda i: t[i] * 2,
    ]
    for k in range(8):
        line, bad = first + 4 + k % 2, k >= 6
        index = Tensor(np.array([0, 6 if bad else 5]))
        if not bad:
            uses[k % 2](index).numpy()
            continue
        with pytest.raises(IndexError, match=rf"index 6 .*test_following.py:{line}\)"):
            uses[k % 2](index).numpy()


def test_what_a_key_says_is_all_that_a_call_depends_on() -> None:
    """Zeros of both signs, numbers of other kinds, modes and orders of arguments are told apart."""

    def run() -> list[np.ndarray]:
        x, found = Tensor(np.array([-1.0, 0.0, 1.0], np.float32)).realize(), []
        for zero in (0.0, -0.0, 0, False, 0.0, -0.0):
            found.append((x.copysign(zero)).numpy())
            found.append((1 / (x * 0 + zero)).numpy())
        for one in (1, 1.0, True, 1, 1.0, True):
            found.append((Tensor([3]) * one).numpy())
        for mode in (True, False, True, False):
            with Tensor.train(mode):
                Tensor.manual_seed(5)
                found.append(x.dropout(0.5).numpy())
        return found

    same(run)


def test_captures_hold_no_more_memory_than_is_allowed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of many shapes those that were used last stay, however large one is."""
    x = Tensor(array(1000, 50)).realize()
    monkeypatch.setattr(tree, "MOST_BYTES", 200_000)
    for rows in (200, 400, 600, 800, 1000):
        for _ in range(3):
            (x[:rows] @ x[:50] + 1).softmax(0).sum(0).numpy()
        mine = THREAD.trace.tree
        assert mine.nbytes() <= 200_000 or len(mine.captures) == 1


def test_the_default_type_is_part_of_a_key(monkeypatch: pytest.MonkeyPatch) -> None:
    for kind in ("float32", "float64", "float32", "float64"):
        monkeypatch.setattr(dtypes, "default_float", getattr(dtypes, kind))
        for _ in range(3):
            t = Tensor.ones(3) * 2
            assert t.dtype.name == kind and t.numpy().dtype.name == kind


def test_an_alias_of_what_a_step_writes_shows_what_was_written() -> None:
    """The same calls on tensors that share memory, and on such that do not."""

    def run() -> list[np.ndarray]:
        w, found = Tensor(array(4)).realize(), []
        others = [Tensor(array(4, seed=i)).realize() for i in range(12)]
        for i, other in enumerate(others):
            x = w.detach() if i in (5, 9) else other.detach()
            x = x if i in (5, 9) else Tensor(x.numpy())
            with no_grad():
                w.add_(1)
            found += [(x * 2).numpy(), w.numpy()]
        return found

    same(run)


def test_another_optimiser_of_the_same_parameters_has_its_own_state() -> None:
    """Also one that stands where a dead one stood."""

    def run() -> list[np.ndarray]:
        loop, found = Training(nn.ReLU()), []
        for _ in range(4):
            loop.optimizer = nn.optim.Adam(loop.model.parameters(), lr=0.01)
            gc.collect()
            found += [loop.step(i).numpy() for i in range(5)]
        return [*found, *loop.state()]

    same(run)


READS: dict[str, Callable[[Tensor], list[Tensor]]] = {
    "a view, then its base": lambda h: [h[1], h],
    "a base, then its view": lambda h: [h, h[1]],
    "two views": lambda h: list(h.chunk(2)),
    "a view of a view": lambda h: [h.reshape(-1)[2:9].reshape(7, 1), h.T, h],
    "what is made of what is read": lambda h: [h, h.exp() * 3, h.exp()],
    "what is made of a part": lambda h: [h[0], (h * h).sum(), h],
    "the same twice": lambda h: [h * 2, h * 2],
}


@pytest.mark.parametrize("name", READS)
@pytest.mark.parametrize("wait", [False, True])
@pytest.mark.parametrize("write", [False, True])
def test_values_read_one_after_the_other(name: str, wait: bool, write: bool, counts: Counts) -> None:
    """A read stores what is one storage with it, and what is made of it reads it there; a write is seen in all."""

    def run() -> list[np.ndarray]:
        Tensor.manual_seed(1)
        layer, found = nn.Linear(4, 6), []
        for i in range(8):
            h = layer(Tensor(array(3, 4, seed=i))).tanh()
            if write:
                h = h.detach()
            values = READS[name](h)
            for t in values:
                found.append(t.numpy())
                if wait:
                    found.append(h.numpy())
                if write:
                    t += 1.0
            found += [t.numpy() for t in values]
            later = (values[0] * 3 + values[-1].sum()).sum()
            found += [h.numpy(), later.numpy()]
        return found

    same(run)
    assert counts.replays >= 5 or write


def test_gradients_of_a_replayed_loop_lie_where_the_last_ones_lay(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody holds them after `zero_grad()`, though they are views of one memory: no step makes new memory for them."""
    loop, left = Training(nn.ReLU()), []
    leave = ResultMemory.leave
    monkeypatch.setattr(ResultMemory, "leave", lambda memory: [left.append(memory), leave(memory)])
    for i in range(12):
        loop.step(i).item()
        if i == 5:
            left.clear()
    assert not left


def test_a_tensor_that_is_unpacked_is_followed(counts: Counts) -> None:
    """Its end is known by its length: no index is tried that is out of range."""

    def run() -> list[np.ndarray]:
        found = []
        for i in range(8):
            q, k = Tensor(array(2, 3, seed=i)) * 2
            found.append((q + sum(k)).numpy())
        return found

    same(run)
    assert counts.replays == 6 and counts.captures == 1


def test_a_loop_by_hand_with_numbers_that_change(counts: Counts) -> None:
    """Decay of the rate, weights of the loss: numbers become inputs after a few steps, and nothing is built anew."""

    def run() -> list[np.ndarray]:
        Tensor.manual_seed(5)
        layer, rate, found = nn.Linear(4, 3), 0.1, []
        for i in range(24):
            x = Tensor(array(5, 4, seed=i))
            loss = F.mse_loss(layer(x), x[:, :3]) * (1 + 1 / (i + 1)) + i * 1e-3
            loss.backward()
            with no_grad():
                for p in layer.parameters():
                    p -= rate * p.grad
                    p.grad = None
            rate *= 0.97
            found.append(loss.numpy())
            if i == 14:
                counts.captures = counts.replays = counts.flushes = 0
        return [*found, *(p.numpy() for p in layer.parameters())]

    same(run)
    assert (counts.captures, counts.flushes) == (0, 0) and counts.replays >= 9


@pytest.mark.filterwarnings("ignore:.*another number each time")
@pytest.mark.parametrize("number", [0.0, -0.0, 1.0, -1.0, 2.0, 3, 1e-45, 1e38, 0.1])
@pytest.mark.parametrize("kind", ["float64", "float32", "float16", "bfloat16", "int32"])
def test_a_number_from_memory_gives_the_bits_of_a_constant(number: float, kind: str) -> None:
    x = Tensor(np.array([0.0, -0.0, 1.5, -3.25, 7.0, 0.1]), dtype=kind)
    for name in sorted(varying.OPERATORS - {"__iadd__", "__isub__", "__imul__"}):
        op = getattr(x, name)
        _, given = varying.with_input((x, number))
        assert isinstance(given, Tensor) == (kind in varying.TYPES)
        want, got = op(number), op(given)
        assert got.dtype is want.dtype
        assert got.numpy().tobytes() == want.numpy().tobytes(), name


def test_a_line_says_what_keeps_a_loop_from_being_replayed() -> None:
    first = test_a_line_says_what_keeps_a_loop_from_being_replayed.__code__.co_firstlineno
    x = Tensor(array(3)).realize()
    cases: list[tuple[str, int, Callable[[int], Tensor]]] = [
        ("`clamp` has another number each time .*Tensor", 4, lambda i: x.clamp(0, i / 3)),
        ("`roll` has another number each time .*Tensor", 5, lambda i: x.roll(i)),
    ]
    for text, line, make in cases:
        with pytest.warns(UserWarning, match=rf"test_following.py:{first + line}: {text}"):
            for i in range(20):
                make(i).numpy()
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            for i in range(20, 30):  # (once)
                make(i).numpy()


def test_what_is_made_once_is_no_cliff() -> None:
    """Models that are trained one after the other, parameters that are read and written one by one."""
    weights = [nn.Parameter(array(k + 1)) for k in range(30)]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for w in weights:
            w.detach().numpy()
            Tensor(array(*w.shape)).to(w.device).numpy()
        for _ in range(20):
            loop = Training(nn.ReLU())
            for i in range(3):
                loop.step(i).item()


@pytest.mark.parametrize("read", [False, True])
@pytest.mark.parametrize("drop", [False, True])
@pytest.mark.parametrize("by_hand", [False, True])
def test_a_gradient_of_ones_own(read: bool, drop: bool, by_hand: bool) -> None:
    """What is set after backward() stays, whether what backward() made was dropped, or its loss read, before."""

    def run() -> list[np.ndarray]:
        loop, found = Training(nn.ReLU()), []
        first = loop.model[0].weight
        for i in range(8):
            loop.optimizer.zero_grad()
            loss = F.mse_loss(loop.model(Tensor(array(5, 4, seed=i))), Tensor(array(5, 3)))
            loss.backward()
            if read:
                found.append(loss.numpy())
            if drop:
                first.grad = None
            first.grad = Tensor(array(8, 4, seed=i + 20))
            if by_hand:
                with no_grad():
                    for p in loop.model.parameters():
                        p -= p.grad * 0.1
            else:
                loop.optimizer.step()
            found += [loss.numpy(), first.grad.numpy()]
        return [*found, *loop.state()]

    same(run)


def test_a_place_that_is_called_in_several_ways() -> None:
    """Its number is an input only where it is all that there is besides a tensor."""

    def run() -> list[np.ndarray]:
        x, found = Tensor(array(3)).realize(), []
        for i in range(20):
            ways: list[tuple[tuple[Any, ...], dict[str, Any]]] = [((0.1 * i + 0.3,), {}), ((0.1 * i,), {"alpha": 0.7})]
            ways += [((), {"other": 0.1 * i}), ((Tensor(array(3, seed=i)),), {"alpha": 0.1 * i})]
            for args, named in ways:
                found.append(x.add(*args, **named).numpy())
        return found

    same(run)
