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


@pytest.mark.parametrize("value", [0.0, 2.5, -np.inf])
def test_pad(value: float) -> None:
    a = count(2, 3).astype(np.float32)
    for torch_style, pairs in [
        ((1, 2), ((0, 0), (1, 2))),
        ((1, 0, 0, 2), ((0, 2), (1, 0))),
        (((1, 1), (0, 2)), ((1, 1), (0, 2))),
        (((1, 0), None), ((1, 0), (0, 0))),
    ]:
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


def test_triangles_leave_nothing_of_what_they_cut_off() -> None:
    assert Tensor([[np.inf, np.nan], [1.0, np.nan]]).triu(1).tolist()[1] == [0.0, 0.0]
    assert (
        Tensor.tril_indices(2, 3, 1).tolist() == [[0, 0, 1, 1, 1], [0, 1, 0, 1, 2]]
        and Tensor.triu_indices(3, 2, -1, dtype="int32").dtype is dtypes.int32
    )
    assert Tensor.triu_indices(2, 2, 5).shape == (2, 0)


def test_fill_diagonal() -> None:
    for shape, wrap in [((3, 5), False), ((7, 3), False), ((7, 3), True), ((4, 4), True), ((2, 2, 2), False)]:
        a = np.zeros(shape, np.float32)
        np.fill_diagonal(a, 2.0, wrap)
        check(Tensor.zeros(*shape).fill_diagonal(2.0, wrap), a)


def test_views_are_views() -> None:
    """Written through, they show in what they were taken from; and no data moves to read them."""
    for view in (
        lambda t: t.diagonal(1), lambda t: t.movedim(0, 1)[::-1], lambda t: t.narrow(0, 1, 2),
        lambda t: t.select(1, -1), lambda t: t.unfold(0, 2, 2),
        lambda t: t.as_strided((2, 2), (1, 6), 7), lambda t: t.unflatten(1, (2, 3)).mT,
        lambda t: t.tensor_split(3, 1)[2], lambda t: t.rearrange("a (b c) -> c b a", b=2),
    ):  # fmt: skip
        a = count(5, 6)
        t = Tensor(a).realize()
        v = view(t)
        places = view(Tensor(np.arange(30).reshape(5, 6))).numpy()
        v.assign(-v - 1)
        want = a.reshape(-1).copy()
        want[places.reshape(-1)] = -want[places.reshape(-1)] - 1
        np.testing.assert_array_equal(t.numpy().reshape(-1), want)


def test_rearrange() -> None:
    a = count(2, 12, 3)
    t = Tensor(a)
    check(t.rearrange("b n c -> c b n"), a.transpose(2, 0, 1))
    check(t.rearrange("b (h w) c -> b c h w", h=3), a.reshape(2, 3, 4, 3).transpose(0, 3, 1, 2))
    check(t.rearrange("b (h w) c -> (b h) (w c)", w=4), a.reshape(6, 12))
    check(t.rearrange("... c -> c ..."), a.transpose(2, 0, 1))
    check(t.rearrange("b ... -> (...) b"), a.reshape(2, 36).T)
    check(t.rearrange("b n c -> b 1 n c"), a[:, None])
    check(t[:1].rearrange("1 n c -> n c"), a[0])
    for formula, sizes, message in [
        ("b n c", {}, "it needs one"), ("b n -> n b", {}, "left side has 2 dims, the tensor 3"),
        ("b n c -> b n", {}, "each name stands once"),
        ("b (h w) c -> b h w c", {}, "give the sizes of all but one"),
        ("b (h w) c -> b h w c", {"h": 5}, "does not fit a dim of 12"), ("b n c -> b n c", {"q": 2}, "does not name"),
        ("b (n c -> b n c", {}, "parentheses"),
    ]:  # fmt: skip
        with pytest.raises(ValueError, match=message):
            t.rearrange(formula, **sizes)


def test_errors() -> None:
    t = Tensor(count(2, 3))
    for call, error, message in [
        (lambda: Tensor.cat([]), ValueError, "cat of no tensors"),
        (lambda: t.cat(3), TypeError, "cat takes tensors, got int"),
        (lambda: t.cat(t[:, :2]), ValueError, r"cat along dim 0: \(2, 2\) does not fit \(2, 3\)"),
        (lambda: t.stack(t[0]), ValueError, r"stack: \(3,\) is not \(2, 3\)"),
        (lambda: t.split([1, 1], 1), ValueError, r"sizes \[1, 1\] do not add up to dim 1"),
        (lambda: t.chunk(0), ValueError, "must be positive, got 0"),
        (lambda: t.hsplit(2), ValueError, "does not divide into 2 equal parts; use tensor_split"),
        (lambda: t.unflatten(1, (2, 2)), ValueError, "do not multiply to dim 1"),
        (lambda: t.movedim((0, 1), (0, 0)), ValueError, "each once"),
        (lambda: t.narrow(1, 2, 2), IndexError, r"narrow: \[2, 2 \+ 2\) is outside dim 1 of size 3"),
        (lambda: t.unfold(1, 4, 1), ValueError, "the size must be at most 3"),
        (lambda: t.as_strided((3,), (3,)), ValueError, "reach element 6 of 6"),
        (lambda: t.diagonal(0, 1, -1), ValueError, "dim1 and dim2 are both 1"),
        (lambda: t.pad((1, 1), "mirror"), ValueError, "not 'mirror'"),
        (lambda: t.pad((3, 0), "reflect"), ValueError, "needs a dim larger than that"),
        (lambda: t.repeat(2), ValueError, "for each dim"),
        (lambda: t.roll((1, 2), 0), ValueError, "2 shifts for 1 dims"),
        (lambda: t.squeeze(2), IndexError, r"dim 2 is outside -2..1"),
        (lambda: t.sum_to_size(2, 2), ValueError, "does not broadcast"),
    ]:
        with pytest.raises(error, match=message):
            call()


@pytest.mark.parametrize(
    "size, k, s, d", [(7, 3, 1, 1), (7, 3, 2, 1), (9, 2, 3, 2), (5, 5, 1, 1), (6, 1, 4, 1), (8, 3, 1, 3), (4, 2, 2, 1)]
)
def test_windows(size: int, k: int, s: int, d: int) -> None:
    """Every window of a sliding one, along both dims, as views."""
    a = count(2, size, size + 2)
    out0, out1 = ((n - d * (k - 1) - 1) // s + 1 for n in (size, size + 2))
    want = np.zeros((2, out0, out1, k, k), np.int32)
    for i, j, p, q in np.ndindex(out0, out1, k, k):
        want[:, i, j, p, q] = a[:, i * s + p * d, j * s + q * d]
    t = Tensor(a).unfold_windows((k, k), (s, s), (d, d))
    check(t, want)
    assert all(
        u.op in (Ops.BUFFER, Ops.RESHAPE, Ops.EXPAND, Ops.SHRINK, Ops.PAD, Ops.PERMUTE) for u in t.uop.toposort()
    )


def test_ranges() -> None:
    for args in [(5,), (2, 9), (2, 9, 3), (9, 2, -2), (0,), (5, 5), (-3, 3)]:
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
    assert (t.shape, t.ndim, t.numel(), t.size(), t.size(-1), len(t), t.nbytes, t.element_size()) == (
        (2, 3),
        2,
        6,
        (2, 3),
        3,
        2,
        24,
        4,
    )
    assert (
        repr(t) == "<Tensor [2, 3] int32 on PYTHON:0, realized>"
        and repr(t + 1) == "<Tensor [2, 3] int32 on PYTHON:0, lazy>"
    )
    assert (float(Tensor([1.5])), int(Tensor([[3]])), bool(Tensor([0.0])), [10, 20, 30][Tensor(1)]) == (
        1.5,
        3,
        False,
        20,
    )
    assert type(Tensor(2).item()) is int and type(Tensor(2.5).item()) is float and Tensor(True).item() is True
    assert np.asarray(t).tolist() == count(2, 3).tolist()


@pytest.mark.parametrize("mode", ["constant", "reflect", "replicate", "circular"])
def test_padding_cannot_crop_more_than_there_is(mode: str) -> None:
    x = Tensor(np.zeros((1, 1, 6)))
    with pytest.raises(ValueError, match=r"pad: .*\(-7, 2\).* crops more than \(1, 1, 6\)"):
        x.pad((-7, 2), mode=mode)
    assert x.pad((-2, -4), mode=mode).shape == (1, 1, 0)
    if mode == "circular":
        with pytest.raises(ValueError, match="dim 2 of .* is 2 after cropping"):
            x.pad((-4, 3), mode=mode)
