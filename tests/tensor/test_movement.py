"""Movement operators and creation against NumPy, on tensors whose elements all differ."""

from __future__ import annotations

from collections.abc import Iterator
from math import prod
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from manygrad import Context, Tensor, dtypes
from manygrad.tensor.uop import Ops
from tests.tensor.oracle import check


@pytest.fixture(autouse=True, scope="module")
def interpreter() -> Iterator[None]:
    with Context(DEVICE="PYTHON"):
        yield


def count(*shape: int) -> np.ndarray:
    return np.arange(prod(shape), dtype=np.int32).reshape(shape)


@st.composite
def movements(draw: Any) -> tuple[np.ndarray, list[tuple[str, Any]]]:
    """An array and a chain of movement ops that fit it."""
    shape = tuple(draw(st.lists(st.sampled_from([1, 2, 3, 4, 6]), min_size=0, max_size=4)))
    a = count(*shape)
    steps: list[tuple[str, Any]] = []
    for _ in range(draw(st.integers(1, 6))):
        kind = draw(st.sampled_from(["reshape", "permute", "expand", "pad", "shrink", "flip"]))
        n = a.ndim
        if kind == "reshape":
            left, dims = a.size, []
            while left > 1 and len(dims) < 4:
                d = draw(st.sampled_from([x for x in range(1, left + 1) if left % x == 0]))
                dims.append(d)
                left //= d
            arg: Any = (*dims, left) if a.size else a.shape
            a = a.reshape(arg)
        elif kind == "permute":
            arg = tuple(draw(st.permutations(range(n))))
            a = a.transpose(arg)
        elif kind == "expand":
            arg = tuple(draw(st.integers(1, 3)) if d == 1 else d for d in a.shape)
            a = np.broadcast_to(a, arg)
        elif kind == "pad":
            arg = tuple((draw(st.integers(0, 2)), draw(st.integers(0, 2))) for _ in a.shape)
            a = np.pad(a, arg) if n else a
        elif kind == "shrink":
            cuts = [sorted((draw(st.integers(0, d)), draw(st.integers(0, d)))) for d in a.shape]
            arg = tuple((b, e) for b, e in cuts)
            a = a[tuple(slice(b, e) for b, e in cuts)]
        else:
            arg = tuple(draw(st.sets(st.integers(0, n - 1)))) if n else ()
            a = np.flip(a, arg)
        steps.append((kind, arg))
        if a.size > 400:
            break
    return count(*shape), steps


def numpy_step(a: np.ndarray, kind: str, arg: Any) -> np.ndarray:
    if kind == "pad":
        return np.pad(a, arg) if a.ndim else a
    if kind == "shrink":
        return a[tuple(slice(b, e) for b, e in arg)]
    return {"reshape": np.reshape, "permute": np.transpose, "expand": np.broadcast_to, "flip": np.flip}[kind](a, arg)


@settings(max_examples=250)
@given(movements())
def test_chains_of_movement(case: tuple[np.ndarray, list[tuple[str, Any]]]) -> None:
    a, steps = case
    t = Tensor(a)
    for kind, arg in steps:
        if kind in ("pad", "shrink") and not arg:
            continue
        t, a = getattr(t, kind)(arg), numpy_step(a, kind, arg)
    check(t, a)


def test_reshape_infers_a_dim_and_keeps_dims() -> None:
    a = count(2, 3, 4)
    assert Tensor(a).reshape(-1).shape == (24,)
    check(Tensor(a).reshape(6, -1), a.reshape(6, 4))
    check(Tensor(a).reshape(None, -1), a.reshape(2, 12))
    check(Tensor(a).view((4, 6)), a.reshape(4, 6))
    check(Tensor(a[:1, :1, :1]).reshape(()), a[0, 0, 0])
    check(Tensor(np.zeros((0, 3))).reshape(3, 0, 5), np.zeros((3, 0, 5)))


def test_flatten_and_unflatten() -> None:
    a = count(2, 3, 4)
    check(Tensor(a).flatten(), a.reshape(-1))
    check(Tensor(a).flatten(1), a.reshape(2, 12))
    check(Tensor(a).flatten(0, -2), a.reshape(6, 4))
    check(Tensor(5).flatten(), np.array([5]))
    check(Tensor(a).unflatten(-1, (2, 2)), a.reshape(2, 3, 2, 2))
    check(Tensor(np.zeros((2, 0, 3))).flatten(1), np.zeros((2, 0)))


def test_transposes() -> None:
    a = count(2, 3, 4)
    t = Tensor(a)
    check(t.T, a.T)
    check(t.mT, a.swapaxes(-1, -2))
    check(t.transpose(0, -1), a.swapaxes(0, -1))
    check(t.permute(-1, 0, 1), a.transpose(-1, 0, 1))
    check(t.permute((2, 1, 0)), a.transpose(2, 1, 0))
    check(Tensor(3).T, np.array(3))


def test_squeeze_and_unsqueeze() -> None:
    a = count(1, 3, 1)
    t = Tensor(a)
    assert t.squeeze().shape == (3,) and t.squeeze(0).shape == (3, 1) and t.squeeze(-1).shape == (1, 3) and t.squeeze(1).shape == (1, 3, 1)
    assert [Tensor(count(2, 3)).unsqueeze(d).shape for d in (0, 1, 2, -1, -3)] == [(1, 2, 3), (2, 1, 3), (2, 3, 1), (2, 3, 1), (1, 2, 3)]
    assert Tensor(3).unsqueeze(0).shape == (1,) and Tensor(3).unsqueeze(-1).shape == (1,)


def test_expand() -> None:
    a = count(3, 1)
    check(Tensor(a).expand(3, 4), np.broadcast_to(a, (3, 4)))
    check(Tensor(a).expand(2, -1, 4), np.broadcast_to(a, (2, 3, 4)))
    check(Tensor(a).expand(3, 0), np.broadcast_to(a, (3, 0)))


@pytest.mark.parametrize("value", [0.0, 2.5, -np.inf])
def test_pad(value: float) -> None:
    a = count(2, 3).astype(np.float32)
    for torch_style, pairs in [((1, 2), ((0, 0), (1, 2))), ((1, 0, 0, 2), ((0, 2), (1, 0))), (((1, 1), (0, 2)), ((1, 1), (0, 2))), (((1, 0), None), ((1, 0), (0, 0)))]:
        check(Tensor(a).pad(torch_style, value=value), np.pad(a, pairs, constant_values=value))
    check(Tensor(a).pad((-1, 2), value=value), np.pad(a[:, 1:], ((0, 0), (0, 2)), constant_values=value))
    check(Tensor(a).pad((-1, -1, -1, 0)), a[1:, 1:2])


def test_cat_and_stack() -> None:
    a, b, c = count(2, 3), count(4, 3) + 100, count(2, 0)
    check(Tensor(a).cat(Tensor(b)), np.concatenate([a, b]))
    check(Tensor(a).cat(Tensor(a), Tensor(c), dim=-1), np.concatenate([a, a, c], -1))
    check(Tensor(a).cat(Tensor(a).float(), dim=1), np.concatenate([a, a], 1).astype(np.float32))
    for d in (0, 1, 2, -1):
        check(Tensor(a).stack(Tensor(a) + 1, Tensor(a) * 2, dim=d), np.stack([a, a + 1, a * 2], d))
    check(Tensor(c).cat(Tensor(c), dim=0), np.concatenate([c, c]))
    check(Tensor(1).stack(Tensor(2)), np.array([1, 2]))


def test_cat_of_computed_values_and_of_cats() -> None:
    a = count(3, 2)
    t = (Tensor(a) + 1).cat(Tensor(a).flip(0), dim=1)
    check(t.cat(t * 2, dim=0).sum(1), np.concatenate([x := np.concatenate([a + 1, a[::-1]], 1), x * 2]).sum(1))


def test_split_chunk_unbind() -> None:
    a = count(7, 2)
    for got, want in [
        (Tensor(a).split(3), [a[:3], a[3:6], a[6:]]),
        (Tensor(a).split([1, 0, 6]), [a[:1], a[1:1], a[1:]]),
        (Tensor(a).split([1, 1], dim=-1), [a[:, :1], a[:, 1:]]),
        (Tensor(a).chunk(3), [a[:3], a[3:6], a[6:]]),
        (Tensor(a).unbind(1), [a[:, 0], a[:, 1]]),
    ]:
        assert len(got) == len(want)
        for g, w in zip(got, want):
            check(g, w)


def test_repeat_roll_triangles() -> None:
    a = count(3, 4)
    check(Tensor(a).repeat(2, 3), np.tile(a, (2, 3)))
    check(Tensor(a).repeat(2, 1, 2), np.tile(a, (2, 1, 2)))
    for shift in (0, 1, -1, 5, -7):
        check(Tensor(a).roll(shift, 1), np.roll(a, shift, 1))
        check(Tensor(a).roll(shift, -2), np.roll(a, shift, 0))
    for k in (-4, -1, 0, 1, 5):
        check(Tensor(a).tril(k), np.tril(a, k))
        check(Tensor(a).triu(k), np.triu(a, k))
    check(Tensor(count(2, 3, 3)).tril(), np.tril(count(2, 3, 3)))
    assert Tensor([[np.inf, np.nan], [1.0, np.nan]]).triu(1).tolist()[1] == [0.0, 0.0]


@pytest.mark.parametrize("size, k, s, d", [(7, 3, 1, 1), (7, 3, 2, 1), (9, 2, 3, 2), (5, 5, 1, 1), (6, 1, 4, 1), (8, 3, 1, 3), (4, 2, 2, 1)])
def test_windows(size: int, k: int, s: int, d: int) -> None:
    """Every window of a sliding one, along both dims, as views."""
    a = count(2, size, size + 2)
    out0, out1 = ((n - d * (k - 1) - 1) // s + 1 for n in (size, size + 2))
    want = np.zeros((2, out0, out1, k, k), np.int32)
    for i, j, p, q in np.ndindex(out0, out1, k, k):
        want[:, i, j, p, q] = a[:, i * s + p * d, j * s + q * d]
    t = Tensor(a).unfold_windows((k, k), (s, s), (d, d))
    check(t, want)
    assert all(u.op in (Ops.BUFFER, Ops.RESHAPE, Ops.EXPAND, Ops.SHRINK, Ops.PAD, Ops.PERMUTE) for u in t.uop.toposort())


def test_ranges() -> None:
    for args in [(5,), (2, 9), (2, 9, 3), (9, 2, -2), (0,), (5, 2), (-3, 3)]:
        check(Tensor.arange(*args), np.arange(*args, dtype=np.int64))
    for args in [(5.0,), (0.5, 3.0), (0, 1, 0.1), (3, 0, -0.75)]:
        check(Tensor.arange(*args), np.arange(*args).astype(np.float32))
    check(Tensor.arange(5, dtype="uint8"), np.arange(5, dtype=np.uint8))
    for args in [(0, 1, 5), (1, 1, 1), (3, -2, 11), (0, 1, 0)]:
        check(Tensor.linspace(*args), np.linspace(*args).astype(np.float32))
    check(Tensor.eye(3), np.eye(3, dtype=np.float32))
    check(Tensor.eye(2, 4, dtype="int8"), np.eye(2, 4, dtype=np.int8))


def test_filled() -> None:
    check(Tensor.zeros(2, 3), np.zeros((2, 3), np.float32))
    check(Tensor.ones((3,), dtype="int16"), np.ones(3, np.int16))
    check(Tensor.full((2, 2), 7), np.full((2, 2), 7))
    check(Tensor.full((), 1.5), np.float32(1.5))
    check(Tensor.full((0, 2), True), np.full((0, 2), True))
    x = Tensor(count(2, 3))
    check(x.zeros_like(), np.zeros((2, 3), np.int32))
    check(x.ones_like(dtype="float64"), np.ones((2, 3)))
    check(x.full_like(9), np.full((2, 3), 9, np.int32))


def test_data_from_everywhere() -> None:
    nested = [[1, 2], [3, 4]]
    assert Tensor(nested).tolist() == Tensor(tuple(map(tuple, nested))).tolist() == nested
    assert Tensor(range(4)).tolist() == [0, 1, 2, 3]
    assert Tensor(b"\x01\x02").tolist() == [1, 2] and Tensor(b"\x01\x02").dtype is dtypes.uint8
    assert Tensor(np.float64([1, 2])[::-1]).tolist() == [2.0, 1.0]
    assert Tensor(count(3, 4).T).tolist() == count(3, 4).T.tolist()
    assert Tensor([]).shape == (0,) and Tensor([[], []]).shape == (2, 0)
    assert Tensor(5).tolist() == 5 and Tensor(Tensor([1.0])).tolist() == [1.0]
    a = count(4)
    t = Tensor(a)
    a[:] = 0
    assert t.tolist() == [0, 1, 2, 3]  # a copy, not a view of the array
    b = t.numpy()
    b[:] = 9
    assert t.tolist() == [0, 1, 2, 3]


def test_what_a_tensor_says_of_itself() -> None:
    t = Tensor(count(2, 3))
    assert (t.shape, t.ndim, t.numel(), t.size(), t.size(-1), len(t), t.nbytes, t.element_size()) == ((2, 3), 2, 6, (2, 3), 3, 2, 24, 4)
    assert repr(t) == "<Tensor [2, 3] int32 on PYTHON:0, realized>" and repr(t + 1) == "<Tensor [2, 3] int32 on PYTHON:0, lazy>"
    assert (float(Tensor([1.5])), int(Tensor([[3]])), bool(Tensor([0.0])), [10, 20, 30][Tensor(1)]) == (1.5, 3, False, 20)
    assert type(Tensor(2).item()) is int and type(Tensor(2.5).item()) is float and Tensor(True).item() is True
    assert np.asarray(t).tolist() == count(2, 3).tolist()
