"""An index out of range is an IndexError when a value is read next, wherever and however the index came to be used."""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextvars import copy_context
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from manygrad import Tensor, TinyJit, Variable, function
from manygrad.errors import LostValue
from manygrad.nn import functional as F
from manygrad.runtime import faults
from manygrad.runtime.current import current
from manygrad.tensor.uop import Ops
from manygrad.tensor.uop.intervals import bounds
from tests.schedule.programs import sink_of

TWO = ("CPU:0", "CPU:1")
N = 6


def ints(*values: int, dtype: str = "int64") -> Tensor:
    return Tensor(np.array(values, dtype)).realize()


def table(*shape: int) -> Tensor:
    return Tensor(np.arange(np.prod(shape), dtype=np.float32).reshape(shape) + 1).realize()


def written(write: Callable[[Tensor, Tensor], Any]) -> Callable[[Tensor], Tensor]:
    def run(i: Tensor) -> Tensor:
        t = table(N, 2)
        out = write(t, i)
        return t if out is None else out

    return run


# name -> (function of an index of three elements, valid ones: low and high, what the error calls it)
USES: dict[str, tuple[Callable[[Tensor], Tensor], int, int, str]] = {
    "t[i]": (lambda i: table(N, 2)[i], -N, N - 1, "index"),
    "t[:, i]": (lambda i: table(2, N)[:, i], -N, N - 1, "index"),
    "t[i, j]": (lambda i: table(N, 2)[i, ints(0, 1, 1)], -N, N - 1, "index"),
    "t[mask, i]": (lambda i: table(3, N)[Tensor([True, True, True]), i], -N, N - 1, "index"),
    "t[i] = v": (written(lambda t, i: t.__setitem__(i, 7.0)), -N, N - 1, "index"),
    "gather": (lambda i: table(N, 2).gather(0, i.reshape(3, 1)), -N, N - 1, "gather: index"),
    "take": (lambda i: table(N // 2, 2).take(i), -N, N - 1, "take: index"),
    "take_along_dim": (lambda i: table(N, 2).take_along_dim(i.reshape(3, 1), 0), -N, N - 1, "gather: index"),
    "index_select": (lambda i: table(N, 2).index_select(0, i), -N, N - 1, "index_select: index"),
    "scatter": (lambda i: table(N).scatter(0, i, table(3)), 0, N - 1, "scatter: index"),
    "scatter_add": (lambda i: table(N).scatter_add(0, i, table(3)), 0, N - 1, "scatter_add: index"),
    "scatter_reduce": (lambda i: table(N).scatter_reduce(0, i, table(3), "amax"), 0, N - 1, "scatter_reduce: index"),
    "index_add": (lambda i: table(N, 2).index_add(0, i, table(3, 2)), -N, N - 1, "index_add: index"),
    "index_copy": (lambda i: table(N, 2).index_copy(0, i, table(3, 2)), -N, N - 1, "index_copy: index"),
    "index_fill": (lambda i: table(N, 2).index_fill(0, i, 0.5), -N, N - 1, "index_fill: index"),
    "index_put": (lambda i: table(N, 2).index_put((i,), table(3, 2)), -N, N - 1, "index"),
    "put": (lambda i: table(N // 2, 2).put(i, table(3)), -N, N - 1, "put: index"),
    "one_hot": (lambda i: i.one_hot(N), 0, N - 1, "one_hot: class"),
    "embedding": (lambda i: F.embedding(i, table(N, 2)), 0, N - 1, "embedding: row"),
    "embedding_bag": (lambda i: F.embedding_bag(i.reshape(1, 3), table(N, 2)), 0, N - 1, "embedding: row"),
    "cross_entropy": (lambda i: F.cross_entropy(table(3, N), i, ignore_index=-1), -1, N - 1, "cross_entropy: class"),
    "nll_loss": (lambda i: F.nll_loss(table(3, N), i, ignore_index=-1), -1, N - 1, "nll_loss: class"),
    "multi_margin_loss": (lambda i: F.multi_margin_loss(table(3, N), i), 0, N - 1, "multi_margin_loss: class"),
    "multilabel_margin_loss": (lambda i: F.multilabel_margin_loss(
        table(1, N), ints(-1, -1, -1, 0, 0, 0).index_put((ints(0, 1, 2),), i).reshape(1, N)),
        -1, N - 1, "multilabel_margin_loss: class"),
}  # fmt: skip


@pytest.fixture(autouse=True)
def no_fault_is_left() -> Any:
    yield
    current().faults.look()  # (each is told once, also where two devices found it)


@pytest.mark.parametrize("name", USES)
def test_each_operator(name: str) -> None:
    use, low, high, what = USES[name]
    use(ints(low, high, 1)).numpy()
    for wrong in (low - 1, high + 1, 1 << 40):
        with pytest.raises(
            IndexError, match=rf"^{what} {wrong} is out of range: .* are valid \(test_checking.py:\d+\)$"
        ):
            use(ints(0, wrong, 1)).numpy()
    use(ints(low, high, 1)).numpy()  # told once
    with pytest.raises(IndexError, match=what):
        use(ints(0, high + 1, 1, dtype="int32").cast("int16")).numpy()


def test_what_was_computed_with_it_has_no_value_afterwards_either() -> None:
    t, i = table(N, 2), ints(0, N, 1)
    x = t[i]
    y = x * 2
    for _ in range(3):
        with pytest.raises((IndexError, RuntimeError), match=f"index {N} is out of range"):
            x.numpy()
    for _ in range(2):
        with pytest.raises((IndexError, RuntimeError), match=f"index {N} is out of range"):
            y.tolist()
    with pytest.raises(RuntimeError, match="this tensor was computed with it and has no value"):
        (x + 1).numpy()
    unrelated = t * 2
    z = t[i].realize()
    with pytest.raises(IndexError):
        unrelated.numpy()  # (told once, at the next read)
    assert unrelated[0].tolist() == [2, 4] and z.shape == (3, 2)
    with pytest.raises(LostValue, match="has no value"):
        z.numpy()
    w = table(N, 2).requires_grad_()
    with pytest.raises(IndexError):
        (stored := w[i].realize()).numpy()
    with pytest.raises(RuntimeError, match="has no value"):
        stored.numpy()


def test_in_a_gradient() -> None:
    w = table(N, 2).requires_grad_()
    F.embedding(ints(1, N), w).sum().backward()
    assert w.grad is not None
    with pytest.raises(IndexError, match=f"embedding: row {N} "):
        w.grad.numpy()


@pytest.mark.parametrize("device", ["CPU", "CPU:1", "PYTHON"])
def test_devices(device: str) -> None:
    t = table(N, 2).to(device)
    assert t[ints(1, -1).to(device)].numpy().tolist() == [[3, 4], [11, 12]]
    with pytest.raises(IndexError, match="index 6 "):
        t[ints(1, N).to(device)].numpy()


@pytest.mark.parametrize("axis", [None, 0])
@pytest.mark.parametrize("table_axis", [None, 0, 1])
def test_sharded(axis: int | None, table_axis: int | None) -> None:
    t = table(N, 2).shard(TWO, table_axis)
    assert t[ints(1, -1, 3).shard(TWO, axis)].numpy().tolist() == [[3, 4], [11, 12], [7, 8]]
    for at in range(3):
        index = [1, 2, 3]
        index[at] = N
        with pytest.raises(IndexError, match="index 6 "):
            t[ints(*index).shard(TWO, axis)].numpy()
    with pytest.raises(IndexError, match="cross_entropy: class 9 "):
        F.cross_entropy(table(4, N).shard(TWO, 0), ints(1, 2, 3, 9).shard(TWO, axis)).item()


def test_replayed_steps_are_told_when_one_reads() -> None:
    logits = table(3, N)

    @TinyJit
    def step(target: Tensor) -> Tensor:
        return F.cross_entropy(logits, target).realize()

    for k in range(6):
        loss = step(ints(0, 1, 60 + k if k in (3, 4) else 2))  # (a few steps without reading)
    with pytest.raises(IndexError, match="cross_entropy: class 64 "):
        loss.item()
    for _ in range(2):  # (the word does not say which of the unread losses it is about)
        with pytest.raises(LostValue, match="class 64 is out of range.*computed with it and has no value"):
            loss.item()
    want = F.cross_entropy(logits, ints(0, 1, 2)).item()
    for _ in range(3):
        held, loss = loss, step(ints(0, 1, 2))
        assert loss.item() == want
    with pytest.raises(IndexError, match="class 70 "):
        step(ints(0, 1, 70)).item()
    assert held.item() == loss.item() == want and step(ints(0, 1, 2)).item() == want


@pytest.mark.parametrize("replayed", [False, True])
def test_every_value_that_stands_on_it_is_lost_and_no_other(replayed: bool) -> None:
    t, bias = table(N), table(3)

    def work(i: Tensor) -> tuple[Tensor, Tensor]:
        x = t[i]
        return x, x.sum() + 1

    step = TinyJit(work) if replayed else work
    for _ in range(3):
        for r in step(ints(0, 1, 2)):
            r.numpy()
    x, total = step(ints(0, N, 2))
    x.realize(total)
    other = (bias * 2).realize()
    y = (total * 3).realize()
    view, lazy = x[:2], x + 1
    passed = step(ints(0, 1, 2))[0].realize()  # of the same place, and unread
    with pytest.raises(IndexError, match="index 6 "):
        bias.numpy()
    for _ in range(2):
        for lost in (x, total, y, view, lazy, passed):
            with pytest.raises(LostValue, match="index 6 is out of range.*computed with it and has no value"):
                lost.numpy()
    assert other.tolist() == [2, 4, 6] and bias.tolist() == [1, 2, 3]
    assert [r.tolist() for r in step(ints(0, 1, 2))] == [[1, 2, 3], 7]
    fine = step(ints(0, 1, 2))
    fine[0].numpy()
    with pytest.raises(IndexError, match="index 9 "):
        step(ints(0, 9, 2))[0].numpy()
    assert [r.tolist() for r in fine] == [[1, 2, 3], 7]  # it was known to be right


def test_what_a_replay_makes_of_it_is_lost() -> None:
    t, double = table(N), TinyJit(lambda x: (x * 2).realize())
    for _ in range(3):
        double(t[ints(1, 2)].realize()).numpy()
    wrong = double(t[ints(1, N)].realize())
    with pytest.raises(IndexError, match="index 6 "):
        t.numpy()
    with pytest.raises(LostValue, match="index 6 "):
        wrong.numpy()
    assert double(t[ints(1, 2)].realize()).tolist() == [4, 6]


def test_the_line_of_each_use_of_equal_graphs() -> None:
    t, i = table(N), ints(0, N)
    a = t[i]
    b = t[ints(0, N)]
    first = test_the_line_of_each_use_of_equal_graphs.__code__.co_firstlineno
    for x in (a, b):
        with pytest.raises(IndexError) as told:
            x.numpy()
        assert str(told.value).endswith(f"(test_checking.py:{first + (2 if x is a else 3)})")


def test_in_a_function() -> None:
    @function
    def pick(t: Tensor, i: Tensor) -> Tensor:
        return t[i] * 2

    t = table(N)
    assert pick(t, ints(0, 5)).numpy().tolist() == [2, 12]
    with pytest.raises(IndexError, match="index 7 "):
        pick(t, ints(0, 7)).numpy()


def test_of_symbolic_shape() -> None:
    n = Variable("n", 1, 4).bind(3)
    t = table(N)
    assert t[ints(0, 5, 2, 9)[:n]].sum().item() == 1 + 6 + 3  # what is beyond n is not looked at
    with pytest.raises(IndexError, match="index 9 "):
        t[ints(0, 5, 9, 2)[:n]].sum().item()


def test_constants() -> None:
    with pytest.raises(IndexError, match="index 6 "):
        table(N)[Tensor(N)].numpy()
    with pytest.raises(IndexError, match="index 7 "):
        table(N)[Tensor.arange(8)].numpy()


def test_the_largest_and_smallest_integers() -> None:
    for far in (2**63 - 1, -(2**63)):
        with pytest.raises(IndexError, match=r"index beyond 2\*\*62 "):
            table(N)[ints(far, 1)].numpy()


def test_no_kernel_where_the_graph_says_that_it_is_in_range() -> None:
    def checks(x: Tensor) -> int:
        return sum(u.op is Ops.CHECK for u in sink_of([x]).toposort())

    t = table(N)
    assert checks(t[Tensor.arange(N)]) == 0
    assert checks(t[(Tensor.arange(3) * 2 + 1).flip(0)]) == 0
    assert checks(t[ints(1, 2).fmod(N)]) == 0
    assert checks(t[ints(1, 2).clamp(0, N - 1)]) == 0
    assert checks(t.sort().values) == checks(t.median()) == checks(t.unique()) == 0
    assert checks(t[ints(1, 2)]) == 1
    assert checks(F.embedding(ints(1, 2), table(N, 2))) == 1


def test_every_place_has_a_word_until_there_are_too_many(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(faults, "WORDS", 4)
    words = faults._Words("CPU")
    sites = [faults.Site("index", 0, n, "a.py:1") for n in range(1, 9)]
    for n, site in enumerate(sites):
        words.word(site).copyin(np.array([2 * 10 + 2]))
        told = site if n < 3 else faults.OTHERS
        assert words.look() == (told, 22)
        words.forget(told)
        assert words.look() is None


def test_threads_find_their_own_lines() -> None:
    told: list[str] = []

    def work(k: int) -> None:
        t = table(N)
        for _ in range(20):
            try:
                t[ints(0, N + k)].numpy()
            except (IndexError, LostValue) as error:  # (another thread may have found it first)
                told.append(str(error))

    threads = [threading.Thread(target=copy_context().run, args=(work, k)) for k in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    # a word keeps the worst index and whoever reads first is told: at least one error a place and round, none invented
    assert told and all("test_checking.py" in t and any(f"index {N + k} " in t for k in range(4)) for t in told)


@settings(max_examples=60, deadline=None)
@given(
    st.integers(1, 40),
    st.sampled_from(["int8", "uint8", "int16", "int32", "int64", "uint32"]),
    st.lists(st.integers(-60, 60), min_size=1, max_size=20),
)
def test_random_indices(n: int, dtype: str, values: list[int]) -> None:
    index = np.array(values).astype(dtype)
    array = np.arange(n, dtype=np.float32)
    wide = index.astype(np.int64)
    if ((wide < -n) | (wide >= n)).any():
        with pytest.raises(IndexError):
            Tensor(array)[Tensor(index)].numpy()
    else:
        np.testing.assert_array_equal(Tensor(array)[Tensor(index)].numpy(), array[wide])


@st.composite
def counts(draw: Any) -> tuple[Tensor, np.ndarray]:
    """Arithmetic on counts, and the same in NumPy."""
    n = draw(st.integers(1, 6))
    t, a = Tensor.arange(n).cast("int32"), np.arange(n, dtype=np.int32)
    for _ in range(draw(st.integers(1, 5))):
        kind = draw(
            st.sampled_from(["add", "mul", "neg", "max", "min", "where", "pad", "cast", "and", "sub", "mod", "div"])
        )
        c = draw(st.integers(-5, 9))
        if kind == "add":
            t, a = t + c, a + np.int32(c)
        elif kind == "sub":
            t, a = c - t, np.int32(c) - a
        elif kind == "mul":
            t, a = t * c, a * np.int32(c)
        elif kind == "neg":
            t, a = -t, -a
        elif kind == "max":
            t, a = t.maximum(c), np.maximum(a, np.int32(c))
        elif kind == "min":
            t, a = t.minimum(c), np.minimum(a, np.int32(c))
        elif kind == "where":
            t, a = (t < c)._where(t, c), np.where(a < c, a, np.int32(c))
        elif kind == "pad":
            t, a = t.pad((1, 2)), np.pad(a, (1, 2))
        elif kind == "cast":
            t, a = t.cast("int8").cast("int32"), a.astype(np.int8).astype(np.int32)
        elif kind == "and":
            t, a = t & 13, a & np.int32(13)
        elif kind == "mod":
            t, a = t.fmod(3 + abs(c)), np.fmod(a, np.int32(3 + abs(c)))
        else:
            t, a = t.div(3, rounding_mode="trunc"), (np.sign(a) * (np.abs(a) // 3)).astype(np.int32)
    return t, a


@settings(max_examples=150, deadline=None)
@given(counts())
def test_bounds_hold_every_value(pair: tuple[Tensor, np.ndarray]) -> None:
    t, a = pair
    low, high = bounds(t.uop)
    np.testing.assert_array_equal(t.numpy(), a)
    assert low <= a.min() and a.max() <= high
