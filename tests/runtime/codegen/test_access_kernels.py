"""What kernels read and write on CPU, against PYTHON (the definition) and NumPy: gathers, masks, symbolic sizes."""

from __future__ import annotations

import numpy as np
import pytest

from manygrad import Tensor
from manygrad.runtime.codegen.opts import named
from manygrad.runtime.devices import get_device
from manygrad.tensor.dtype import DType, dtypes
from manygrad.tensor.environment import Context
from manygrad.tensor.uop.args import VarArg
from manygrad.tensor.uop.ops import Ops
from manygrad.tensor.uop.uop import UOp
from tests.runtime.codegen.kernels import (
    RNG,
    I,
    add,
    agree,
    f32,
    index,
    load,
    loop,
    mul,
    red,
    reduce,
    run,
    same,
    sink,
    store,
)


@pytest.mark.parametrize("n", [1, 5, 33, 257])
def test_gather(n: int) -> None:
    d, rows = 20, 11
    i, j = loop(n, 0), loop(d, 1)
    at = load(2, i, dtypes.int64).cast(dtypes.index)
    inside = UOp.const(dtypes.index, -1).alu(Ops.CMPLT, at).alu(Ops.AND, at.alu(Ops.CMPLT, I(rows)))
    table, ids = RNG.standard_normal((rows, d)).astype(np.float32), RNG.integers(-2, rows + 2, n)
    ast = sink(store(0, add(mul(i, d), j), load(1, add(mul(at, d), j), valid=inside), i, j))
    got = agree(ast, [np.ones((n, d), np.float32), table, ids])[0]
    want = np.where(((ids >= 0) & (ids < rows))[:, None], table[np.clip(ids, 0, rows - 1)], 0)
    np.testing.assert_array_equal(got, want)
    # the index varies along the vector
    ast = sink(store(0, i, load(1, at, valid=inside), i))
    agree(ast, [np.ones(n, np.float32), table[:, 0].copy(), ids])


@pytest.mark.parametrize("d", [f32, dtypes.int32, dtypes.bfloat16], ids=lambda d: d.name)
@pytest.mark.parametrize("width", [1, 5, 32, 100])
def test_scatter_add(d: DType, width: int) -> None:
    t, j = loop(50, 0), loop(width, 1)
    at = load(2, t, dtypes.int64).cast(dtypes.index)
    values, ids = RNG.integers(-4, 5, (50, width)).astype(d.np), RNG.integers(0, 7, 50)
    ast = sink(store(0, add(mul(at, width), j), load(1, add(mul(t, width), j), d), t, j, arg="add"))
    base = RNG.integers(-4, 5, (7, width)).astype(d.np)
    got = agree(ast, [base, values, ids])[0]
    want = base.astype(np.float64)
    np.add.at(want, ids, values.astype(np.float64))
    same(got, want.astype(d.np), 1e-6)


def test_stores_guarded_and_masked() -> None:
    i, j = loop(9, 0), loop(40, 1)
    odd = i.alu(Ops.MOD, I(2)).alu(Ops.CMPEQ, I(1))
    part = j.alu(Ops.CMPLT, I(23)).alu(Ops.AND, I(2).alu(Ops.CMPLT, j))
    offset = add(mul(i, 40), j)
    ast = sink(
        store(0, offset, load(2, offset), i, j, valid=odd),
        store(1, offset, load(2, offset, valid=part), i, j, valid=part),
    )
    agree(
        ast,
        [
            np.full((9, 40), 5, np.float32),
            np.full((9, 40), 6, np.float32),
            RNG.standard_normal((9, 40)).astype(np.float32),
        ],
    )


def test_invalid_loads_touch_nothing() -> None:
    """The offset of an invalid load may be anywhere."""
    i = loop(64, 0)
    far = mul(i, 1 << 40)
    never = i.alu(Ops.CMPLT, I(1))
    agree(sink(store(0, i, load(1, far, valid=never), i)), [np.ones(64, np.float32), np.ones(1, np.float32)])
    j = loop(6, 1)
    guard = j.alu(Ops.CMPLT, I(1))
    agree(
        sink(store(0, add(mul(j, 64), i), load(1, add(mul(j, 1 << 40), i), valid=guard), j, i)),
        [np.ones((6, 64), np.float32), np.ones(64, np.float32)],
    )


def test_flip_transpose_and_reshape() -> None:
    x = RNG.standard_normal((24, 50)).astype(np.float32)
    i, j = loop(24, 0), loop(50, 1)
    flipped = sink(store(0, add(mul(i, 50), j), load(1, add(mul(i, 50), 49, j.alu(Ops.NEG))), i, j))
    np.testing.assert_array_equal(agree(flipped, [np.zeros_like(x), x])[0], x[:, ::-1])
    turned = sink(store(0, add(mul(j, 24), i), load(1, add(mul(i, 50), j)), j, i))
    np.testing.assert_array_equal(agree(turned, [np.zeros((50, 24), np.float32), x])[0], x.T)
    # a flat loop over a permuted tensor: quotients and remainders, with and without carries inside a vector
    for a, b, c in ((4, 32, 6), (5, 7, 9), (3, 48, 16)):
        y = RNG.standard_normal((a, b, c)).astype(np.float32)
        f = loop(a * b * c, 0)
        p, q, r = f.alu(Ops.IDIV, I(b * a)), f.alu(Ops.IDIV, I(b)).alu(Ops.MOD, I(a)), f.alu(Ops.MOD, I(b))
        ast = sink(store(0, f, load(1, add(mul(q, b * c), mul(r, c), p)), f))
        np.testing.assert_array_equal(agree(ast, [np.zeros((c, a, b), np.float32), y])[0], y.transpose(2, 0, 1))
        p, q, r = f.alu(Ops.IDIV, I(b * c)), f.alu(Ops.IDIV, I(b)).alu(Ops.MOD, I(c)), f.alu(Ops.MOD, I(b))
        ast = sink(store(0, f, load(1, add(mul(p, b * c), mul(q, b), r, 0)), f))
        np.testing.assert_array_equal(agree(ast, [np.zeros(a * b * c, np.float32), y.reshape(-1)])[0], y.reshape(-1))


def test_indices_as_values() -> None:
    i, j = loop(20, 0), loop(37, 1)
    offset = add(mul(i, 37), j)
    lower = j.alu(Ops.CMPLT, add(i, 1))
    value = lower.alu(Ops.WHERE, offset.cast(dtypes.int32).cast(f32), UOp.const(f32, -1))
    got = agree(sink(store(0, offset, value, i, j)), [np.zeros((20, 37), np.float32)])[0]
    np.testing.assert_array_equal(got, np.where(np.tri(20, 37, dtype=bool), np.arange(740).reshape(20, 37), -1))


@pytest.mark.parametrize("n", [1, 16, 17, 100])
def test_symbolic_sizes(n: int) -> None:
    v, w = (UOp(Ops.DEFINE_VAR, dtypes.index, (), VarArg(name, 1, most)) for name, most in (("n", 128), ("a", 50)))
    x = RNG.standard_normal(128 * 50).astype(np.float32)
    i, r = loop(w, 0), red(v, 1)
    row = sink(store(0, i, reduce(load(1, i.alu(Ops.MUL, v).alu(Ops.ADD, r)), r), i))
    got = agree(row, [np.zeros(50, np.float32), x], (7, n), rtol=1e-4)[0]
    same(got[:7], x[: 7 * n].reshape(7, n).sum(1), 1e-4)
    assert (got[7:] == 0).all()
    i = loop(v.alu(Ops.ADD, I(3)), 0)
    agree(sink(store(0, i, load(1, i).alu(Ops.MUL, load(1, i)), i)), [np.zeros(131, np.float32), x[:131]], (n,))
    i, j, r = loop(v, 0), loop(w, 1), red(v, 2)
    product = reduce(
        load(1, i.alu(Ops.MUL, v).alu(Ops.ADD, r)).alu(Ops.MUL, load(2, r.alu(Ops.MUL, w).alu(Ops.ADD, j))), r
    )
    a, b = RNG.standard_normal((n, n)).astype(np.float32), RNG.standard_normal((n, 20)).astype(np.float32)
    got = agree(
        sink(store(0, i.alu(Ops.MUL, w).alu(Ops.ADD, j), product, i, j)),
        [np.zeros((n, 20), np.float32), a, b],
        (20, n),
        rtol=1e-3,
    )[0]
    same(got, a @ b, 1e-3)


@pytest.mark.parametrize("n", [1, 31, 64, 90, 97, 200])
def test_a_symbolic_loop_of_packed_columns(n: int) -> None:
    """What is left of a loop whose size is known at run time goes vector by vector,
    each packed anew for every tile of rows."""
    v = UOp(Ops.DEFINE_VAR, dtypes.index, (), VarArg("n", 1, 200))
    i, j, r = loop(150, 0), loop(v, 1), red(48, 2)
    product = reduce(load(1, add(mul(i, 48), r)).alu(Ops.MUL, load(2, add(mul(j, 48), r))), r)
    ast = sink(store(0, add(mul(i, 200), j), product, i, j))
    assert any(o.kind == "cache_read" for o in get_device("CPU").compile(ast).opts)
    a, b = RNG.standard_normal((150, 48)).astype(np.float32), RNG.standard_normal((200, 48)).astype(np.float32)
    got = agree(ast, [np.zeros((150, 200), np.float32), a, b], (n,), rtol=1e-4)[0]
    same(got[:, :n], a @ b[:n].T, 1e-4)
    assert (got[:, n:] == 0).all()


@pytest.mark.parametrize("rows", [2, 3, 12])
@pytest.mark.parametrize("n", [1, 15, 16, 17, 90, 200])
def test_a_symbolic_loop_of_turned_columns(rows: int, n: int) -> None:
    """Of a last square, which may not be whole, rows are read that are there; a row's bits are those of packing."""
    v = UOp(Ops.DEFINE_VAR, dtypes.index, (), VarArg("n", 1, 200))

    def queries_by_keys(count: int) -> UOp:
        i, j, r = loop(count, 0), loop(v, 1), red(48, 2)
        product = reduce(load(1, add(mul(i, 48), r)).alu(Ops.MUL, load(2, add(mul(j, 48), r))), r)
        return sink(store(0, add(mul(i, 200), j), product, i, j))

    assert not any(o.kind == "cache_read" for o in get_device("CPU").compile(queries_by_keys(rows)).opts)
    a, b = RNG.standard_normal((70, 48)).astype(np.float32), RNG.standard_normal((n, 48)).astype(np.float32)
    arrays = [np.zeros((rows, 200), np.float32), a[:rows], b]
    agree(queries_by_keys(rows), arrays, (n,), rtol=1e-4)
    with Context(CHECK_OOB=1):
        got = run(queries_by_keys(rows), arrays, (n,), "CPU")[0]
    want = run(queries_by_keys(70), [np.zeros((70, 200), np.float32), a, b], (n,), "CPU")[0]
    np.testing.assert_array_equal(got, want[:rows])
    assert (got[:, n:] == 0).all()


def test_variable_outside_its_bounds() -> None:
    v = UOp(Ops.DEFINE_VAR, dtypes.index, (), VarArg("n", 1, 8))
    i = loop(v, 0)
    with pytest.raises(ValueError, match=r"n is 9, outside of its bounds 1\.\.8"):
        run(sink(store(0, i, load(1, i), i)), [np.zeros(16, np.float32)] * 2, (9,), "CPU")


def test_in_place_and_two_outputs() -> None:
    i = loop(100, 0)
    a, b = load(0, i), load(1, i)
    new_a = a.alu(Ops.ADD, b)
    ast = sink(store(0, i, new_a, i), store(1, i, a.alu(Ops.SUB, b), i))
    x, y = RNG.standard_normal(100).astype(np.float32), RNG.standard_normal(100).astype(np.float32)
    got = agree(ast, [x, y])
    np.testing.assert_array_equal(got[1], x - y)


def test_broadcast_vector_store_of_a_scalar() -> None:
    i, j = loop(3, 0), loop(50, 1)
    agree(
        sink(store(0, add(mul(i, 50), j), load(1, i), i, j)),
        [np.zeros((3, 50), np.float32), np.arange(3, dtype=np.float32)],
    )


def test_strided_load_valid_at_some_positions_only() -> None:
    """The square of a transposed load must not make the invalid positions known."""
    r0, r1 = loop(16, 0), loop(16, 1)
    even = r1.alu(Ops.MOD, I(2)).alu(Ops.CMPEQ, I(0))
    x = RNG.standard_normal((16, 16)).astype(np.float32)
    got = agree(
        sink(store(0, add(r0, mul(r1, 16)), load(1, add(r1, mul(r0, 16)), valid=even), r0, r1)), [np.zeros_like(x), x]
    )[0]
    np.testing.assert_array_equal(got, np.where(np.arange(16)[:, None] % 2 == 0, x.T, 0))


def test_index_of_a_kernel_needs_no_argument() -> None:
    assert index(3, f32, 1).src[0].arg == 3
    assert get_device("CPU").compile(sink(store(0, 0, UOp.const(f32, 1)))).nbytes == 4


@pytest.mark.parametrize("kind", ["uint8", "int16", "int32", "int64"])
@pytest.mark.parametrize("size", [1, 2])
@pytest.mark.parametrize("axis", [0, 1])
def test_places_of_any_type_in_windows(kind: str, size: int, axis: int) -> None:
    """A quotient or remainder of a sum of loops and places, which are seen through their cast to an index."""
    x = np.array([1.0, 2.0], np.float32)
    windows = np.lib.stride_tricks.sliding_window_view(x, size, 0)
    for count in (1, 2, 3, 5):
        places = np.random.default_rng(count).integers(0, windows.shape[axis], count)
        with Context(SPEC=1):
            got = Tensor(x).unfold(0, size, 1).index_select(axis, Tensor(places).cast(kind).realize()).numpy()
        np.testing.assert_array_equal(got, np.take(windows, places, axis))


@pytest.mark.parametrize("lanes", [4, 8, 16])
def test_places_in_scratch_memory_that_agree_in_all_lanes(lanes: int) -> None:
    """Places that are read where the lanes agree that nothing is: the copy of them is read as a vector."""
    size = 17
    i, r = loop(size, 0), red(size, 1)
    first = I(size - 2).alu(Ops.CMPLT, r).alu(Ops.AND, i.alu(Ops.CMPLT, I(1)))
    at = load(1, r.alu(Ops.SUB, I(size - 1)), dtypes.int64, valid=first)
    at = at.alu(Ops.CMPLT, UOp.const(dtypes.int64, 0)).alu(Ops.WHERE, at.alu(Ops.ADD, UOp.const(dtypes.int64, 2)), at)
    at = at.cast(dtypes.index)
    inside = I(-1).alu(Ops.CMPLT, at).alu(Ops.AND, at.alu(Ops.CMPLT, I(2)))
    ast = sink(store(0, i, reduce(load(2, at, valid=inside), r), i))
    arrays = [np.zeros(size, np.float32), np.array([-1]), np.array([3.0, 5.0], np.float32)]
    opts = (named("vectorize", 0, lanes), named("tile", 0, 2 * lanes), named("cache_read", 0, 1))
    with Context(SPEC=1):
        got = run(ast, arrays, (), "CPU", opts)[0]
    np.testing.assert_array_equal(got, [5.0 + 16 * 3.0] + [17 * 3.0] * 16)
    np.testing.assert_array_equal(got, run(ast, arrays)[0])
