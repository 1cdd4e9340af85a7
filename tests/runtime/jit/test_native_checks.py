"""What native code looks at before it makes a replay alone: a change of anything that Python would see stops it."""

from __future__ import annotations

import argparse
import random
import weakref
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from manygrad import Tensor, TinyJit, autocast, nn, no_grad
from manygrad.errors import JitError
from manygrad.native.checks import KINDS, Check, CheckTable, words_of
from manygrad.native.replay import DONE
from manygrad.tensor.guards import Guards

SCALE = 2.0


class Settings:
    offset = 1.0  # (of the class)

    def __init__(self) -> None:
        self.power = 2.0


def stored(value: float) -> Tensor:
    return Tensor(np.full(6, value, np.float32)).contiguous().realize()


def is_native(step: Any, *args: Tensor) -> bool:
    """Whether native code alone makes this call within a few."""
    for _ in range(60):  # (it is prepared by two calls, and for a tenth of a second)
        step(*args)
        if step.again is not None and step.again.replay.call(*args) == DONE:
            return True
    return False


def reads_all() -> tuple[Any, Any, dict[str, Callable[[], None]]]:
    """A step of many things that it reads, what it gives in NumPy, and a change of each of them."""
    factor, numbers, table, settings = 3.0, [1.0, 2.0], {"a": 5.0}, Settings()
    layer, shift = nn.Dropout(0.0), stored(1.0)
    data, options = SimpleNamespace(bias=0.5), argparse.Namespace(depth=2)

    def step(x: Tensor) -> Tensor:
        y = (
            x * SCALE
            + factor * sum(numbers)
            + table["a"] ** settings.power
            + settings.offset
            + data.bias
            + options.depth
        )
        return layer(y + shift)

    def plain(x: float) -> float:
        own = float(shift.numpy()[0])
        return (
            x * SCALE
            + factor * sum(numbers)
            + table["a"] ** settings.power
            + settings.offset
            + data.bias
            + options.depth
            + own
        )

    def cell() -> None:
        nonlocal factor
        factor += 1

    def a_global() -> None:
        global SCALE
        SCALE += 1

    def a_class() -> None:
        Settings.offset += 1

    def a_closure() -> None:
        nonlocal shift
        shift = stored(7.0)

    def a_mode() -> None:
        layer.train(not layer.training)

    changes: dict[str, Callable[[], None]] = {
        "cell": cell,
        "global": a_global,
        "element": lambda: numbers.__setitem__(0, numbers[0] + 1),
        "length": lambda: numbers.append(3.0),
        "dict": lambda: table.update(a=table["a"] + 1),
        "attribute": lambda: setattr(settings, "power", settings.power + 1),
        "class": a_class,
        "object": lambda: setattr(data, "bias", data.bias + 1),
        "tensor": a_closure,
        "mode": a_mode,
        "options": lambda: setattr(options, "depth", options.depth + 1),
    }
    return step, plain, changes


@pytest.mark.parametrize("what", list(reads_all()[2]))
def test_a_change_of_what_a_step_reads_stops_it(what: str) -> None:
    fn, plain, changes = reads_all()
    step, x = TinyJit(fn), stored(4.0)
    assert is_native(step, x)
    for _ in range(2):
        changes[what]()
        assert step.again is None or step.again.replay.call(x) != DONE
        for _ in range(5):
            assert np.allclose(step(x).numpy(), plain(4.0), rtol=1e-6)


def test_a_change_of_a_mode_stops_it() -> None:
    step, x = TinyJit(lambda x: x @ x), Tensor(np.eye(4, dtype=np.float32)).contiguous().realize()
    for mode in (no_grad, Tensor.train, autocast):
        assert is_native(step, x)
        with mode():
            assert step.again.replay.call(x) != DONE and step.again.replay.changed >= 0


def test_python_and_native_code_look_at_the_same() -> None:
    """Each thing that `Guards.hold` finds changed is a row that is another one now."""
    fn, _, changes = reads_all()
    for name, change in changes.items():
        guards = Guards(fn)
        rows = [c.words() for c in guards.checks()]
        assert guards.hold()
        change()
        now = Guards(fn)
        assert not guards.hold(), name
        assert rows != [c.words() for c in now.checks()], name


HOLDS: dict[str, Callable[[Tensor], Any]] = {
    "itself": lambda out: out,
    "a view": lambda out: out[1:],
    "detached": lambda out: out.detach(),
    "another tensor of its node": lambda out: out._new(out.uop),
    "another tensor's gradient": lambda out: setattr(OTHER, "grad", out),
}
OTHER = Tensor(np.zeros(6, np.float32), requires_grad=True)


@pytest.mark.parametrize("how", list(HOLDS))
def test_what_is_held_is_not_written(how: str) -> None:
    total = stored(0.0)

    @TinyJit
    def step(x: Tensor) -> Tensor:
        total.assign(total + x)
        return total * 2

    x = stored(1.0)
    assert is_native(step, x)
    count = int(total.numpy()[0])
    for _ in range(40):
        out = step(x)
        count += 1
        kept = HOLDS[how](out)
        held = OTHER.grad if kept is None else kept
        del out
        again = step(x)
        count += 1
        assert held is not None and np.all(held.numpy() == 2 * (count - 1))
        assert np.all(again.numpy() == 2 * count)
        del held, kept
        OTHER.grad = None


CHANGES_OF_A_RESULT: dict[str, Callable[[Tensor], Any]] = {
    "written": lambda out: out.assign(out * 0 - 1).realize(),
    "added to": lambda out: out.add_(5),
    "trained": lambda out: out.requires_grad_(True),
    "given a gradient": lambda out: setattr(out, "_grad", OTHER),  # (nothing is made or counted by these two)
    "another node": lambda out: setattr(out, "uop", OTHER.uop),
}


@pytest.mark.parametrize("how", list(CHANGES_OF_A_RESULT))
def test_a_result_that_was_changed_and_dropped_is_as_it_was_made(how: str) -> None:
    step, x = TinyJit(lambda x: x * 2), stored(3.0)
    assert is_native(step, x)
    for _ in range(30):
        CHANGES_OF_A_RESULT[how](step(x))
        out = step(x)
        assert np.all(out.numpy() == 6) and out.grad is None and not out.requires_grad
        del out


@pytest.mark.parametrize("seed", range(6))
def test_random_training_gives_what_numpy_gives(seed: int) -> None:
    """Losses and gradients that are kept, changed or dropped, gradients that are set to None, rates that change."""
    rng = random.Random(seed)
    w = Tensor(np.ones(6, np.float32), requires_grad=True)
    values, rate = np.ones(6, np.float32), [2.0]  # (with which it goes to and fro between 1 and 15)
    x = stored(1.0)

    @TinyJit
    def step(x: Tensor) -> Tensor:
        w.grad = None
        ((w - 8) ** 2).sum().mul(0.5).backward()
        assert w.grad is not None
        total = (w.detach() * x).sum().realize()
        w.assign((w - rate[0] * w.grad).detach())
        return total

    kept: list[tuple[Tensor, np.ndarray]] = []
    for _ in range(120):
        for _ in range(rng.choice([1, 1, 4])):
            total, expected, gradient = step(x), values.sum(), values - 8
            values = values - np.float32(rate[0]) * gradient
        what = rng.random()
        if what < 0.3:
            kept.append((total, expected))
        elif what < 0.4:
            assert w.grad is not None
            kept.append((w.grad, gradient))
            if rng.random() < 0.5:  # (as many references as if nobody had it)
                w.grad = None
        elif what < 0.5:
            w.grad = None
        elif what < 0.6:
            total.assign(total * 0 - 3).realize()
            kept.append((total, np.float32(-3)))
        elif what < 0.65:
            rate[0] = rng.choice([2.0, 0.0])
        elif what < 0.7:
            kept.append((total + 1, expected + 1))
        if rng.random() < 0.3:
            kept = kept[rng.randrange(2) :]
        for t, expected in kept[-5:]:
            assert np.array_equal(t.numpy(), expected)
        assert np.array_equal(w.numpy(), values)
    for t, expected in kept:
        assert np.array_equal(t.numpy(), expected)


def test_a_gradient_that_is_kept_and_taken_away_is_not_written() -> None:
    """It has as many references as if its tensor had it and nobody else."""
    w = Tensor(np.ones(6, np.float32), requires_grad=True)

    @TinyJit
    def step() -> None:
        w.grad = None
        ((w - 8) ** 2).sum().mul(0.5).backward()
        assert w.grad is not None
        w.assign((w - 2 * w.grad).detach()).realize()

    assert is_native(step)
    for i in range(20):
        step()
        kept = w.grad
        assert kept is not None
        before = kept.numpy().copy()
        if i % 2:
            w.grad = None
        step()
        assert np.array_equal(kept.numpy(), before) and w.grad is not None
        del kept


def test_a_tensor_that_is_gone_needs_no_gradient() -> None:
    """Its gradient's memory is free then, and native code makes the replays again."""
    kept = [Tensor(np.full(6, i, np.float32), requires_grad=True) for i in range(3)]
    kept[0].realize(*kept[1:])

    @TinyJit
    def step(x: Tensor) -> Tensor:
        for t in kept:
            t.grad = None
        loss = sum((t * x).sum() for t in kept)
        loss.backward()
        return loss.realize()

    x = stored(1.0)
    assert is_native(step, x)
    other = Tensor(np.zeros(6, np.float32), requires_grad=True)
    captured = step.captured
    slot = next(s for s in captured.results.slots if s.owners)
    slot.owners.append((weakref.ref(other), 0))
    other.grad = slot.now.tensors[0]
    captured.native.guards = None  # (all rows are made anew)
    captured.prepare()
    assert is_native(step, x)
    del other
    assert step.again.replay.call(x) != DONE
    assert is_native(step, x)


def test_parts_of_a_table_are_replaced() -> None:
    name, x, y = "real", 1.5, 2.5
    one = words_of([Check(KINDS.index("ATTRIBUTE"), x, name, 1)])
    table = CheckTable([one, [], one * 2])
    assert table.count == 3 and [table.part_of(row) for row in range(3)] == [0, 2, 2]
    table.put(2, words_of([Check(KINDS.index("ATTRIBUTE"), y, name, 2)] * 2))
    assert [table.rows[k * 4 + 1] for k in range(3)] == [id(x), id(y), id(y)]
    with pytest.raises(ValueError):
        table.put(0, [])


def test_a_replay_that_fails_after_results_were_left_is_made_by_python_next(monkeypatch: pytest.MonkeyPatch) -> None:
    step, x = TinyJit(lambda x: x * 2), stored(3.0)
    assert is_native(step, x)
    out = step(x)

    def fail(self: Any, *args: Any) -> None:
        raise MemoryError("no memory for another result")

    with monkeypatch.context() as m:
        m.setattr(type(step.captured.results.slots[0]), "leave", fail)
        with pytest.raises(MemoryError):
            step(x)
    assert step.again is None and np.all(out.numpy() == 6)
    assert np.all(step(x).numpy() == 6) and is_native(step, x)


def test_other_arguments_are_read_where_they_lie_by_native_code() -> None:
    """New batches in each call, kept and dropped ones, and some that it cannot read so: each gives its own numbers."""
    total = stored(0.0)

    def count(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        total.assign(total + x.sum()).realize()  # (before the rest)
        return x * 2 + y + total, x.sum()

    step = TinyJit(count)
    rng = np.random.default_rng(0)
    kept: list[tuple[Tensor, np.ndarray]] = []
    seen, natively, expected = [], 0, 0.0
    for i in range(60):
        x, y = (rng.integers(-9, 9, 6).astype(np.float32) for _ in range(2))
        before = step.again
        a = Tensor(x)
        if i % 7 == 3:  # a view, a lazy value, the same one twice, a result of the last call
            a = Tensor(np.concatenate([x, x]))[6:]
        elif i % 7 == 5:
            a = Tensor(x - 1) + 1
        elif i % 11 == 10:
            a, x = kept[-1]
        elif i % 9 == 8:  # what the step writes
            a, x = total, np.full(6, expected, np.float32)
        b = a if i % 5 == 4 else Tensor(y)
        lazy = total + 1 if i % 6 == 1 else None
        was = expected
        out, s = step(a, b)
        natively += before is not None and step.again is before
        expected += float(x.sum())
        want = x * 2 + (x if b is a else y) + expected
        np.testing.assert_array_equal(out.numpy(), want)
        if before is not None and i % 7 not in (3, 5):
            with pytest.raises(RuntimeError, match="computed from one of the targets"):
                (out * 3).sum().gradient(a)
        assert s.item() == x.sum() and total.tolist() == [expected] * 6
        if lazy is not None:
            assert lazy.tolist() == [was + 1] * 6
        if i % 3:
            kept.append((out, want))
        seen.append(a)
        del out, s  # (so that nobody holds some of the results)
    for out, want in kept:
        np.testing.assert_array_equal(out.numpy(), want)
    assert natively >= 15


def test_other_arguments_of_another_kind_are_no_native_call() -> None:
    step = TinyJit(lambda x: x * 2)
    assert is_native(step, stored(1.0))
    with pytest.raises(JitError):
        step(Tensor(np.ones(6, np.float64)))
    assert is_native(step, stored(1.0))
    assert np.all(step(Tensor(np.ones(7, np.float32))).numpy() == 2)  # (other sizes are another capture)
    lost = Tensor(np.ones(6, np.float32))[Tensor(np.array([0, 1, 2, 3, 4, 9]))]
    with pytest.raises(IndexError):
        step(lost.realize()).numpy()
    assert np.all(step(stored(3.0)).numpy() == 6)


class Factors:
    scale = 1.0


@pytest.mark.parametrize("read", [lambda x: x * Factors.scale, lambda x: x * getattr(Factors(), "scale")])  # noqa: B009
def test_attributes_of_classes_that_code_names_are_watched(read: Any) -> None:
    step, x = TinyJit(read), Tensor([1.0])
    try:
        for i in range(14):
            Factors.scale = 1.0 + i // 5
            assert step(x).tolist() == [1.0 + i // 5]
    finally:
        Factors.scale = 1.0
