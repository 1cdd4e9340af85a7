"""Values set at positions that are named more than once: the last one stays, on every device, and has the gradient."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from manygrad import Context, Tensor, TinyJit
from manygrad.tensor.uop import Ops

TWO = ("CPU:0", "CPU:1")
WAYS: dict[
    str, tuple[dict[str, Any], int | str | None]
] = {  # environment; how the tensors are cut over two devices ("one": over none)
    "one thread": ({"THREADS": 1}, "one"),
    "two threads": ({"THREADS": 2}, "one"),
    "without optimisation": ({"THREADS": 2, "NOOPT": 1}, "one"),
    "interpreter": ({"DEVICE": "PYTHON"}, "one"),
    "copies": ({}, None),
    "cut along dim 0": ({}, 0),
    "cut along the last dim": ({}, -1),
}
EVERYWHERE = pytest.mark.parametrize("way", WAYS)


def tensor(a: np.ndarray, cut: int | str | None) -> Tensor:
    t = Tensor(a)
    return t if cut == "one" else t.shard(TWO, None if cut is None or not a.ndim else cut % a.ndim)


def written(t: Tensor, index: Any, value: Tensor) -> Tensor:
    t[index] = value
    return t


def in_turn(x: np.ndarray, where: np.ndarray, values: np.ndarray) -> np.ndarray:
    """`x` with values[k] at the flat places where[k], one after the other."""
    out = x.copy().reshape(-1)
    for i, v in zip(where.reshape(-1).tolist(), values.reshape(-1).tolist()):
        out[i] = v
    return out.reshape(x.shape)


def programs(
    n: int, m: int, count: int, random: np.random.RandomState
) -> dict[str, tuple[Callable[..., Tensor], list[np.ndarray], np.ndarray]]:
    """name -> (what is done with tensors, the arrays they are made of, the result)."""
    x = random.randn(n, m).astype(np.float32)
    places = np.arange(n * m).reshape(n, m)
    rows, columns = random.randint(0, n, count), random.randint(0, m, count)
    by_row, by_column = random.randn(count, m).astype(np.float32), random.randn(n, count).astype(np.float32)
    each = random.randn(count).astype(np.float32)
    flat = random.randint(-n * m, n * m, count)
    table = random.randint(0, n, (count, m))
    along = random.randint(0, m, (n, count))
    pair = random.randn(count, 2, m).astype(np.float32)
    two = random.randint(0, n, (count, 2))
    return {
        "index_copy 0": (lambda x, i, v: x.index_copy(0, i, v), [x, rows, by_row], in_turn(x, places[rows], by_row)),
        "index_copy 1": (
            lambda x, i, v: x.index_copy(1, i, v),
            [x, columns, by_column],
            in_turn(x, places[:, columns], by_column),
        ),
        "scatter 0": (
            lambda x, i, v: x.scatter(0, i, v),
            [x, table, by_row],
            in_turn(x, table * m + np.arange(m), by_row),
        ),
        "scatter 1": (
            lambda x, i, v: x.scatter(1, i, v),
            [x, along, by_column],
            in_turn(x, along + m * np.arange(n)[:, None], by_column),
        ),
        "scatter a number": (
            lambda x, i: x.scatter(1, i, value=2.5),
            [x, along],
            in_turn(x, along + m * np.arange(n)[:, None], np.full(along.shape, 2.5)),
        ),
        "put": (lambda x, i, v: x.put(i, v), [x, flat, each], in_turn(x, flat, each)),
        "index_put rows": (lambda x, i, v: x.index_put((i,), v), [x, rows, by_row], in_turn(x, places[rows], by_row)),
        "index_put places": (
            lambda x, i, j, v: x.index_put((i, j), v),
            [x, rows, columns, each],
            in_turn(x, rows * m + columns, each),
        ),
        "index_put one value": (
            lambda x, i, v: x.index_put((i,), v),
            [x, rows, each[:1]],
            in_turn(x, places[rows], np.full(by_row.shape, each[0])),
        ),
        "x[i] = v": (lambda x, i, v: written(x, i, v), [x, rows, by_row], in_turn(x, places[rows], by_row)),
        "x[i, j] = v": (
            lambda x, i, j, v: written(x, (i, j), v),
            [x, rows, columns, each],
            in_turn(x, rows * m + columns, each),
        ),
        "x[:, i] = v": (
            lambda x, i, v: written(x, (slice(None), i), v),
            [x, columns, by_column],
            in_turn(x, places[:, columns], by_column),
        ),
        "x[i of two dims] = v": (lambda x, i, v: written(x, i, v), [x, two, pair], in_turn(x, places[two], pair)),
    }


@EVERYWHERE
@settings(max_examples=6)
@given(n=st.integers(1, 9), m=st.integers(1, 9), count=st.integers(1, 30), seed=st.integers(0, 999))
def test_the_last_value_stays(way: str, n: int, m: int, count: int, seed: int) -> None:
    environment, cut = WAYS[way]
    with Context(**environment):
        for name, (f, arrays, want) in programs(n, m, count, np.random.RandomState(seed)).items():
            sharded = [tensor(a, cut if a.dtype.kind == "f" else (None if cut != "one" else cut)) for a in arrays]
            np.testing.assert_array_equal(f(*sharded).numpy(), want, f"{name}, {way}")
            if cut == 0:  # the index is cut, too
                np.testing.assert_array_equal(f(*[tensor(a, 0) for a in arrays]).numpy(), want, f"{name}, index cut")


@pytest.mark.parametrize("threads", [1, 2])
def test_many_values(threads: int) -> None:
    """Enough that threads would meet: the same as NumPy, and the same again."""
    random = np.random.RandomState(0)
    for name, (f, arrays, want) in programs(64, 96, 20000, random).items():
        with Context(THREADS=threads):
            for _ in range(3):
                np.testing.assert_array_equal(f(*[Tensor(a).realize() for a in arrays]).numpy(), want, name)
    n = 1 << 18
    i, v = random.randint(0, n // 8, n), random.randn(n).astype(np.float32)
    want = np.zeros(n, np.float32)
    want[i] = v
    at, value = Tensor(i).realize(), Tensor(v).realize()
    with Context(THREADS=threads):
        for _ in range(5):
            x = Tensor.zeros(n).contiguous().realize()
            x[at] = value
            np.testing.assert_array_equal(x.numpy(), want)


def test_in_a_jit() -> None:
    for name, (f, _arrays, _) in programs(7, 5, 40, np.random.RandomState(1)).items():

        @TinyJit
        def step(*t: Tensor, f: Any = f) -> Tensor:
            return f(t[0] + 0, *t[1:]).contiguous()

        for seed in range(5):
            _, again, want = programs(7, 5, 40, np.random.RandomState(seed))[name]
            np.testing.assert_array_equal(step(*[Tensor(a).realize() for a in again]).numpy(), want, name)


@EVERYWHERE
def test_gradient_of_the_value_that_stays(way: str) -> None:
    environment, cut = WAYS[way]
    random = np.random.RandomState(2)
    for name, (f, arrays, _) in programs(5, 4, 12, random).items():
        if name == "scatter a number":
            continue
        with Context(**environment):
            x, *i, v = [tensor(a, cut if a.dtype.kind == "f" else (None if cut != "one" else cut)) for a in arrays]
            x, v = x.requires_grad_(), v.requires_grad_()
            w = random.randn(5, 4).astype(np.float32)
            base = x * 1.0
            (f(base, *i, v) * tensor(w, cut)).sum().backward()
            assert x.grad is not None and v.grad is not None
            marks = [
                np.full(arrays[0].shape, -1.0, np.float32),
                *arrays[1:-1],
                np.arange(arrays[-1].size, dtype=np.float32).reshape(arrays[-1].shape),
            ]
            with Context(DEVICE="CPU", THREADS=1):
                stayed = f(*[Tensor(a) for a in marks]).numpy()  # which value is where
            np.testing.assert_allclose(x.grad.numpy(), np.where(stayed < 0, w, 0), 1e-6, err_msg=name)
            want = np.zeros(arrays[-1].size, np.float32)
            np.add.at(want, stayed[stayed >= 0].astype(int), w[stayed >= 0])
            np.testing.assert_allclose(v.grad.numpy(), want.reshape(v.shape), 1e-5, 1e-6, err_msg=name)


def test_distinct_positions_need_no_order() -> None:
    """What is known to be written once is a SCATTER "place": its kernel is cut over threads."""
    x, at, v = Tensor.zeros(8).contiguous().realize(), Tensor([3, 1]), Tensor([1.0, 2.0])

    def kinds(t: Tensor) -> set[Any]:
        return {u.arg for u in t.uop.toposort() if u.op is Ops.SCATTER}

    assert kinds(x.index_copy(0, at, v)) == {"set"}
    assert (
        kinds(x.index_copy(0, at[:1], v[:1]))
        == kinds(x.index_put((at,), Tensor(2.0)))
        == kinds(x.scatter(0, at, value=1))
        == {"place"}
    )
    assert kinds(Tensor(np.arange(10.0)).argsort()) <= {"place", "add"}
    assert kinds(Tensor(np.arange(10) % 3).unique(return_inverse=True, size=3)[1]) <= {"place", "add"}
    assert kinds(Tensor(np.arange(10) % 3).nonzero(size=3)) == {"place"}
    assert kinds(Tensor(np.arange(10000.0)).argsort()) <= {"place", "add"}


def test_an_empty_scatter_keeps_its_history() -> None:
    """Its source has a gradient, of zeros; and no zero changes its sign."""
    x, source = Tensor([1.0, -0.0], requires_grad=True), Tensor.zeros(0, requires_grad=True)
    y = x.scatter_add(0, Tensor(np.zeros(0, np.int64)), source)
    y.sum().backward()
    assert np.signbit(y.numpy()).tolist() == [False, True]
    assert x.grad is not None and source.grad is not None
    assert x.grad.tolist() == [1.0, 1.0] and source.grad.shape == (0,)
