"""Reading and writing by index, against NumPy.

Mixed indices follow PyTorch where it differs from NumPy: an int beside an index tensor selects first, it is not
broadcast with the tensors. So the oracle applies ints and slices, then the arrays.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from manygrad import Context, Tensor, TinyJit, dtypes
from manygrad.runtime.profile.counters import GlobalCounters
from manygrad.tensor.uop import Ops
from tests.tensor.oracle import check


@pytest.fixture(autouse=True, scope="module")
def interpreter() -> Iterator[None]:
    with Context(DEVICE="PYTHON"):
        yield


@st.composite
def indexed(draw: Any, arrays: bool = True) -> tuple[tuple[int, ...], tuple[Any, ...]]:
    """(shape, index): ints, slices with steps, None, Ellipsis, and integer arrays that broadcast."""
    shape = tuple(draw(st.lists(st.integers(1, 5), min_size=1, max_size=4)))
    used = draw(st.integers(0, len(shape)))
    ellipsis = draw(st.integers(0, used)) if used == len(shape) or draw(st.booleans()) else None
    common = tuple(draw(st.lists(st.integers(1, 3), max_size=2)))
    index: list[Any] = []
    for k in range(used):
        if k == ellipsis:
            index.append(...)
        if draw(st.integers(0, 5)) == 0:
            index.append(None)
        at = k if ellipsis is None or k < ellipsis else len(shape) - used + k
        n = shape[at]
        kind = draw(st.sampled_from(["slice", "slice", "int", "array"] if arrays else ["slice", "slice", "int"]))
        if kind == "int":
            index.append(draw(st.integers(-n, n - 1)))
        elif kind == "slice":
            edge = st.none() | st.integers(-n - 2, n + 2)
            index.append(slice(draw(edge), draw(edge), draw(st.sampled_from([None, 1, 2, 3, -1, -2, -3]))))
        else:
            dims = tuple(draw(st.sampled_from([1, d])) for d in common[draw(st.integers(0, len(common))) :]) or (
                draw(st.integers(1, 3)) if not common else common[-1],
            )
            size = int(np.prod(dims))
            index.append(np.array(draw(st.lists(st.integers(-n, n - 1), min_size=size, max_size=size))).reshape(dims))
    if ellipsis == used:
        index.append(...)
    return shape, tuple(index)


def parts(shape: tuple[int, ...], index: tuple[Any, ...]) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
    """The index as two: ints, slices, None; then arrays on what is left."""
    used = sum(x is not None and x is not Ellipsis for x in index)
    at = next((i for i, x in enumerate(index) if x is Ellipsis), len(index))
    items = [*index[:at], *[slice(None)] * (len(shape) - used), *index[at + 1 :]]
    basic = tuple(slice(None) if isinstance(x, np.ndarray) else x for x in items)
    advanced = tuple(x if isinstance(x, np.ndarray) else slice(None) for x in items if not isinstance(x, int))
    return basic, advanced


def of_tensors(index: tuple[Any, ...]) -> tuple[Any, ...]:
    return tuple(Tensor(x) if isinstance(x, np.ndarray) else x for x in index)


def broadcasts(index: tuple[Any, ...]) -> bool:
    try:
        np.broadcast_shapes(*[x.shape for x in index if isinstance(x, np.ndarray)])
    except ValueError:
        return False
    return True


def count(shape: tuple[int, ...]) -> np.ndarray:
    return np.arange(1, np.prod(shape, dtype=int) + 1, dtype=np.int64).reshape(shape)


@settings(max_examples=250)
@given(indexed(arrays=False))
def test_basic_reading(case: tuple[tuple[int, ...], tuple[Any, ...]]) -> None:
    shape, index = case
    a = count(shape)
    got = Tensor(a)[index]
    check(got, a[index])
    assert Ops.GATHER not in {u.op for u in got.uop.toposort()}


@settings(max_examples=250)
@given(indexed())
def test_reading(case: tuple[tuple[int, ...], tuple[Any, ...]]) -> None:
    shape, index = case
    if not broadcasts(index):
        return
    basic, advanced = parts(shape, index)
    a = count(shape)
    check(Tensor(a)[of_tensors(index)], a[basic][advanced])
    check((Tensor(a) * 2)[of_tensors(index)] + 1, a[basic][advanced] * 2 + 1)


@settings(max_examples=250)
@given(indexed(), st.sampled_from(["number", "full", "broadcast", "self"]))
def test_writing(case: tuple[tuple[int, ...], tuple[Any, ...]], kind: str) -> None:
    """t[index] = value, also where value is computed from t itself;
    elements that two indices name get one of both values."""
    shape, index = case
    if not broadcasts(index):
        return
    basic, advanced = parts(shape, index)
    a = count(shape)
    t = Tensor(a).realize()
    old = t + 0  # lazy: must still see the old values
    picked = a.copy()[basic][advanced]
    if kind == "number":
        value: Any = -7
    elif kind == "full":
        value = -np.arange(1, picked.size + 1).reshape(picked.shape)
    elif kind == "broadcast":
        value = -np.arange(1, (picked.shape[-1] if picked.ndim else 1) + 1).reshape(picked.shape[-1:])
    else:
        value = picked * 10
    positions = np.arange(a.size).reshape(shape)[basic][advanced].reshape(-1)
    want = a.copy()
    want.reshape(-1)[positions] = np.broadcast_to(value, picked.shape).reshape(-1)
    t[of_tensors(index)] = (
        Tensor(a)[of_tensors(index)] * 10
        if kind == "self"
        else Tensor(value)
        if isinstance(value, np.ndarray)
        else value
    )
    if len(set(positions.tolist())) == positions.size or kind in ("number", "self"):
        check(t, want)
    else:
        touched = np.zeros(a.size, bool)
        touched[positions] = True
        got = t.numpy().reshape(-1)
        np.testing.assert_array_equal(got[~touched], a.reshape(-1)[~touched])
        assert (got[touched] < 0).all()
    check(old, a)


@pytest.mark.parametrize("d", dtypes.all, ids=lambda d: d.name)
def test_every_type(d: Any) -> None:
    a = np.array([[0, 1, 1], [1, 0, 1]]).astype(d.np)
    t = Tensor(a)
    i = Tensor([1, 0, 1])
    check(t[i, ::-1][:, 1:], a[[1, 0, 1], ::-1][:, 1:])
    t[0, 1:] = 0
    t[Tensor([1]), Tensor([1])] = 1
    want = a.copy()
    want[0, 1:] = 0
    want[1, 1] = 1
    check(t, want)


@pytest.mark.parametrize("kind", ["int8", "uint8", "int32", "uint64"])
def test_every_type_of_index(kind: str) -> None:
    a = count((5, 2))
    i = np.array([4, 0, 2], kind)
    check(Tensor(a)[Tensor(i)], a[i])
    if kind.startswith("i"):
        check(Tensor(a)[Tensor(-1 - i)], a[-1 - i])


def test_lists_arrays_and_whole_tensors_are_indices() -> None:
    a = count((4, 3))
    t = Tensor(a)
    check(t[[0, 2]], a[[0, 2]])
    check(t[:, [2, 2, 0]], a[:, [2, 2, 0]])
    check(t[np.array([1, 3]), np.array([0, 1])], a[[1, 3], [0, 1]])
    check(t[[]], a[np.array([], int)])
    check(t[Tensor(2)], a[2])
    check(t[(1,)], a[1])
    check(t[...], a)
    check(t[None, ..., None], a[None, ..., None])
    check(t[np.int64(1)], a[1])
    check(t[True and 2], a[2])
    assert [row.tolist() for row in t] == a.tolist()


def test_positions_outside_read_no_value_and_write_nothing() -> None:
    """An index tensor's values are not known when the graph is built. What was computed with them stays an error;
    memory that was written at valid places too keeps what it holds."""
    t = Tensor([1.0, 2.0, 3.0])
    read = t[Tensor([0, 3, -4, 2])]
    with pytest.raises(IndexError, match="out of range"):
        read.tolist()
    with pytest.raises(RuntimeError, match="index -4 is out of range.*computed with it and has no value"):
        read.tolist()
    t[Tensor([1, 7])] = 9.0
    with pytest.raises(IndexError, match="index 7 is out of range"):
        t.tolist()
    assert t.tolist() == [1.0, 9.0, 3.0]


def test_masks_with_views_on_the_left_of_an_assignment() -> None:
    a = count((4, 3)).astype(np.float32)
    t = Tensor(a)
    m = a % 2 == 0
    t[1:, ::-1][Tensor(m[1:])] = -1.0
    a[1:, ::-1][m[1:]] = -1.0
    check(t, a)
    t[Tensor(m[:, 0]), 1:] = Tensor(np.full((int(m[:, 0].sum()), 2), 9.0, np.float32))
    a[m[:, 0], 1:] = 9.0
    check(t, a)
    t[[True, False, False, True]] += 100.0
    a[[True, False, False, True]] += 100.0
    check(t, a)
    check(t[True], a[True])
    check(t[False], a[False])


def test_writing_with_a_mask_reads_nothing() -> None:
    """No value is waited for: it works inside a TinyJit."""

    @TinyJit
    def clipped(x: Tensor) -> Tensor:
        y = x.clone()
        y[y > 2] = 2.0
        return y.realize()

    for row in ([1.0, 5.0], [3.0, 2.5], [0.0, 0.5]):
        assert clipped(Tensor(row)).tolist() == [min(v, 2.0) for v in row]


def test_gradients_go_through_writes() -> None:
    x, w = Tensor([1.0, 2.0, 3.0], requires_grad=True), Tensor([7.0], requires_grad=True)
    y = x * 2
    y[Tensor([0])] = w
    y.square().sum().backward()
    assert (
        x.grad is not None and w.grad is not None and (x.grad.tolist(), w.grad.tolist()) == ([0.0, 16.0, 24.0], [14.0])
    )


def test_scatter_reductions_share_gradients_among_equals_and_zeros() -> None:
    base, src = Tensor([2.0, 0.0, 5.0], requires_grad=True), Tensor([2.0, 2.0, 0.0, 0.0], requires_grad=True)
    base.scatter_reduce(0, Tensor([0, 0, 1, 2]), src, "amax").backward(gradient=Tensor([3.0, 4.0, 5.0]))
    assert base.grad is not None and src.grad is not None
    assert base.grad.tolist() == [1.0, 2.0, 5.0] and src.grad.tolist() == [1.0, 1.0, 2.0, 0.0]
    base, src = Tensor([2.0, 3.0], requires_grad=True), Tensor([0.0, 5.0, 0.0, 0.0], requires_grad=True)
    base.scatter_reduce(0, Tensor([0, 0, 1, 1]), src, "prod").backward(gradient=Tensor([1.0, 1.0]))
    assert base.grad is not None and src.grad is not None
    assert base.grad.tolist() == [0.0, 0.0] and src.grad.tolist() == [10.0, 0.0, 0.0, 0.0]


def test_gradient_of_a_gather_touches_what_was_read() -> None:
    """Work is proportional to the rows read, not to rows times table."""
    with Context(DEVICE="CPU"):
        t = Tensor(np.zeros((10000, 16), np.float32), requires_grad=True)
        GlobalCounters.reset()
        t[Tensor(np.arange(64))].square().sum().backward()
        assert t.grad is not None
        t.grad.realize()
    assert GlobalCounters.global_ops < 10 * 64 * 16


def test_errors() -> None:
    t = Tensor(count((3, 4)))
    for index, message in [
        (3, r"index 3 is outside dim 0 of size 3, shape \(3, 4\)"),
        ((0, -5), r"index -5 is outside dim 1 of size 4"),
        ((0, 0, 0), r"3 indices for a tensor of 2 dims, shape \(3, 4\)"),
        ((..., ...), "only one Ellipsis"),
        (Tensor([True, False]), r"a mask of shape \(2,\) does not fit the dims \(3,\)"),
        (Tensor([0.5]), "must be of integers or booleans, not float32"),
        ("a", "cannot index with str"),
        (1.5, "cannot index with float"),
    ]:
        with pytest.raises(IndexError, match=message):
            t[index]
    for call, error, message in [
        (
            lambda: t.gather(0, Tensor([0])),
            ValueError,
            r"gather: index has 1 dims, the tensor 2; shapes \(1,\) and \(3, 4\)",
        ),
        (lambda: t.gather(0, Tensor([[0] * 5])), ValueError, r"larger than the tensor, \(3, 4\), in dim 1"),
        (lambda: t.gather(0, Tensor([[0.5]])), TypeError, "must be of integers, not float32"),
        (lambda: t.scatter(0, Tensor([[0]])), TypeError, "pass src, a tensor or a number"),
        (lambda: t.scatter(0, Tensor([[0]]), 1, reduce="max"), ValueError, "scatter_reduce knows more"),
        (lambda: t.scatter_add(0, Tensor([[0]]), Tensor([[1.0]])), TypeError, "src is float32, the tensor int64"),
        (lambda: t.scatter_reduce(0, Tensor([[0]]), t, "max"), ValueError, "reduce is one of"),
        (
            lambda: t.index_add(0, Tensor([0]), t),
            ValueError,
            r"1 slices along dim 0 of \(3, 4\) have shape \(1, 4\), source \(3, 4\)",
        ),
        (lambda: t.masked_select(t), TypeError, "the mask must be bool, not int64"),
        (lambda: t.one_hot(0), ValueError, "num_classes must be positive"),
        (lambda: t.put(Tensor([0]), t), ValueError, "1 positions and 12 values"),
    ]:
        with pytest.raises(error, match=message):
            call()
    with pytest.raises(ValueError, match="slice step cannot be 0"):
        t[::0]
    with pytest.raises(ValueError, match=r"shapes \(2,\) and \(3,\) do not broadcast"):
        t[Tensor([0, 1]), Tensor([0, 1, 2])]
    with pytest.raises(ValueError, match=r"cannot write a value of shape \(3,\) where the index selects \(4,\)"):
        t[0] = Tensor([1, 2, 3])
    with pytest.raises(ValueError, match=r"shape \(3,\) where the index selects \(2, 4\)"):
        t[Tensor([0, 2])] = Tensor([1, 2, 3])
    with pytest.raises(RuntimeError, match="a leaf Variable that requires grad"):
        Tensor([1.0], requires_grad=True)[0] = 2.0
    check(t, count((3, 4)))  # nothing was lost


@pytest.mark.parametrize("kind", ["uint8", "int8", "int16"])
@pytest.mark.parametrize("axis", [None, 0, 1])
def test_positions_that_wrap_in_a_narrow_type(kind: str, axis: int | None) -> None:
    """A count in a type that does not hold it is no count: neither on one device nor where the indexed dim is cut."""
    a = np.arange(600, dtype=np.float32).reshape(300, 2)
    t = Tensor(a) if axis is None else Tensor(a).shard(("CPU:0", "CPU:1"), axis)
    i = Tensor.arange(300).cast(kind).cast("int32")
    want = a[np.arange(300).astype(kind).astype(np.int32)]
    np.testing.assert_array_equal(t[i].numpy(), want)
    np.testing.assert_array_equal((t[i] * 2).sum(0).numpy(), (want * 2).sum(0))
    rows = t.gather(0, i.reshape(300, 1).expand(300, 2).cast("int64") % 300)
    np.testing.assert_array_equal(rows.numpy(), want)


def test_iteration() -> None:
    a = np.arange(6.0, dtype=np.float32).reshape(3, 2)
    assert [t.tolist() for t in Tensor(a)] == a.tolist()
    assert list(Tensor(a[:0])) == []
    with pytest.raises(TypeError, match="0-d"):
        iter(Tensor(1.0))
