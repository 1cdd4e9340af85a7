"""Lists of Opts: what is legal, their canonical form, and that every legal list computes what PYTHON computes."""

from __future__ import annotations

import ctypes
import itertools
import re

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from manygrad import Tensor
from manygrad.runtime.codegen.analysis.describe import signature
from manygrad.runtime.codegen.kernel.dots import BYTES, use_dots
from manygrad.runtime.codegen.opts import (
    KINDS,
    Align,
    Block,
    CacheRead,
    ComputeAt,
    NontemporalStore,
    Opt,
    Parallel,
    Prefetch,
    ReadAhead,
    ReduceBlock,
    Reorder,
    RFactor,
    Skip,
    Tensorize,
    Tile,
    Unroll,
    Vectorize,
    canonical,
    legal,
    loop_nest,
    named,
    neighbours,
    sums,
)
from manygrad.runtime.codegen.pipeline import prepare
from manygrad.runtime.codegen.target import Dot
from manygrad.runtime.devices import get_device
from manygrad.runtime.devices.target import host_target
from manygrad.tensor.dtype import DType, dtypes
from manygrad.tensor.environment import Context
from manygrad.tensor.uop.ops import Ops
from manygrad.tensor.uop.uop import UOp
from tests.runtime.codegen.kernels import (
    I,
    add,
    bytes_product,
    f32,
    gemm,
    load,
    logsumexp,
    loop,
    mul,
    red,
    reduce,
    run,
    sink,
    store,
)
from tests.runtime.codegen.test_random import kernels

SETTINGS = settings(
    max_examples=120,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much, HealthCheck.data_too_large],
)
SIZES = st.sampled_from([1, 2, 5, 16, 17, 33, 40, 65])
DTYPES = st.sampled_from([f32, f32, f32, dtypes.float64, dtypes.bfloat16, dtypes.float16, dtypes.int32, dtypes.int8])


def run_with(ast: UOp, arrays: list[np.ndarray], opts: tuple[Opt, ...], simplify: bool = True) -> np.ndarray:
    """Argument 0 after the CPU's kernel under `opts`."""
    device = get_device("CPU")
    handles = [device.alloc(a.nbytes) for a in arrays]
    for h, a in zip(handles, arrays):
        device.copyin(h, memoryview(a.reshape(-1).view(np.uint8)))
    with Context(CACHE=0):
        device.compile_with(ast, opts, simplify)(handles)
    got = device.as_numpy(handles[0], arrays[0].nbytes).copy().view(arrays[0].dtype).reshape(arrays[0].shape)
    for h, a in zip(handles, arrays):
        device.free(h, a.nbytes)
    return got


def lanes() -> int:
    return host_target().machine.vector_bytes // 4


# *** the families of kernels ***


def values(seed: int, d: DType, n: int) -> np.ndarray:
    rng = np.random.default_rng(seed)
    return rng.integers(-3, 4, n).astype(d.np) if d.is_int else (rng.standard_normal(n)).astype(d.np)


def softmax_gradient(m: int, n: int) -> UOp:
    """out = s * (y - sum(s * y)) over each row, s = softmax(x)."""
    i, j, r, s, q = loop(m, 0), loop(n, 1), red(n, 2), red(n, 3), red(n, 4)
    top = reduce(load(1, add(mul(i, n), r)), r, op=Ops.MAX)
    e = lambda c: load(1, add(mul(i, n), c)).alu(Ops.SUB, top).alu(Ops.EXP)  # noqa: E731
    total = reduce(e(s), s)
    dot = reduce(e(q).alu(Ops.FDIV, total).alu(Ops.MUL, load(2, add(mul(i, n), q))), q)
    value = e(j).alu(Ops.FDIV, total).alu(Ops.MUL, load(2, add(mul(i, n), j)).alu(Ops.SUB, dot))
    return sink(store(0, add(mul(i, n), j), value, i, j))


def any_bytes(seed: int, d: DType, count: int) -> np.ndarray:
    """All values, both ends often."""
    rng = np.random.default_rng(seed)
    found = rng.integers(d.min, d.max, count, endpoint=True)
    return np.where(rng.random(count) < 0.2, rng.choice([d.min, d.max], count), found).astype(d.np)


@st.composite
def products_of_bytes(draw: st.DrawFn) -> tuple[UOp, list[np.ndarray]]:
    m, n, k, seed = draw(SIZES), draw(SIZES), draw(st.sampled_from([16, 17, 40, 67, 130])), draw(st.integers(0, 9))
    a, b = draw(st.sampled_from(BYTES)), draw(st.sampled_from(BYTES))
    padded, scaled = draw(st.booleans()), draw(st.booleans())
    ast = bytes_product(m, n, k, draw(st.sampled_from(["NN", "NT", "TN", "TT"])), (a, b), padded, scaled)
    out = np.zeros((m, n), np.float32 if scaled else np.int32)
    return ast, [out, any_bytes(seed, a, m * k), any_bytes(seed + 1, b, k * n), values(seed, f32, n)]


@st.composite
def products_of_bfloat16(draw: st.DrawFn) -> tuple[UOp, list[np.ndarray]]:
    m, n, k, seed, d = (
        draw(SIZES),
        draw(SIZES),
        draw(st.sampled_from([16, 17, 40, 67, 130])),
        draw(st.integers(0, 9)),
        dtypes.bfloat16,
    )
    ast = gemm(m, n, k, draw(st.sampled_from(["NN", "NT", "TN", "TT"])), d)
    return ast, [np.zeros((m, n), d.np), values(seed, d, m * k), values(seed + 1, d, k * n)]


@st.composite
def sums_of_exponentials(draw: st.DrawFn) -> tuple[UOp, list[np.ndarray]]:
    m, n, seed = draw(SIZES), draw(SIZES), draw(st.integers(0, 9))
    return logsumexp(m, n, draw(st.booleans())), [np.zeros(m, np.float32), values(seed, f32, m * n)]


@st.composite
def families(draw: st.DrawFn) -> tuple[UOp, list[np.ndarray]]:
    """A kernel as training has them, of odd sizes and of several dtypes, with its arguments."""
    d, seed = draw(DTYPES), draw(st.integers(0, 9))
    m, n, k = draw(SIZES), draw(SIZES), draw(SIZES)
    zeros = lambda *shape: np.zeros(shape, d.np)  # noqa: E731
    i, j, r = loop(m, 0), loop(n, 1), red(k, 2)
    match draw(
        st.sampled_from(
            ["elementwise", "reduce", "product", "product", "shared", "softmax", "rows", "padded", "convolution"]
        )
    ):
        case "elementwise":
            a = load(1, add(mul(i, n), j) if draw(st.booleans()) else add(mul(j, m), i), d)
            value = a.alu(Ops.MUL, load(2, j, d)).alu(Ops.ADD, load(3, i, d))
            return sink(store(0, add(mul(i, n), j), value, i, j)), [
                zeros(m, n),
                values(seed, d, m * n),
                values(1, d, n),
                values(2, d, m),
            ]
        case "reduce":
            terms = draw(st.permutations([(i, m), (j, n), (r, k)]))
            offset, stride = I(0), 1
            for x, size in terms:
                offset, stride = add(offset, mul(x, stride)), stride * size
            value = reduce(load(1, offset, d), r, op=draw(st.sampled_from([Ops.ADD, Ops.MAX])))
            return sink(store(0, add(mul(i, n), j), value, i, j)), [zeros(m, n), values(seed, d, stride)]
        case "product":
            layout = draw(st.sampled_from(["NN", "NT", "TN", "TT"]))
            return gemm(m, n, k, layout, d), [zeros(m, n), values(seed, d, m * k), values(seed + 1, d, k * n)]
        case "shared":  # two reductions in one loop, one of which does not depend on the columns
            x = load(1, add(mul(i, k), r))
            value = reduce(x.alu(Ops.MUL, load(2, add(mul(r, n), j))), r).alu(Ops.ADD, reduce(x, r, op=Ops.MAX))
            ast = sink(store(0, add(mul(i, n), j), value, i, j))
            return ast, [np.zeros((m, n), np.float32), values(seed, f32, m * k), values(seed + 1, f32, k * n)]
        case "softmax":
            s, j = red(n, 3), loop(n, 1)
            r = red(n, 2)
            at = lambda c: load(1, add(mul(i, n), c))  # noqa: E731
            top = reduce(at(r), r, op=Ops.MAX)
            total = reduce(at(s).alu(Ops.SUB, top).alu(Ops.EXP), s)
            value = at(j).alu(Ops.SUB, top).alu(Ops.EXP).alu(Ops.FDIV, total)
            return sink(store(0, add(mul(i, n), j), value, i, j)), [
                np.zeros((m, n), np.float32),
                values(seed, f32, m * n),
            ]
        case "rows":  # the gradient of a softmax: what one reduction computes is used in another, and in the result
            ast = softmax_gradient(m, n)
            return ast, [np.zeros((m, n), np.float32), values(seed, f32, m * n), values(seed + 1, f32, m * n)]
        case "padded":
            inside = I(1).alu(Ops.CMPLT, j).alu(Ops.AND, j.alu(Ops.CMPLT, I(n - 1)))
            value = inside.alu(Ops.WHERE, load(1, add(mul(i, n), j, -1), d, inside), load(2, i, d))
            return sink(store(0, add(mul(i, n), j), value, i, j)), [
                zeros(m, n),
                values(seed, d, m * n),
                values(1, d, m),
            ]
        case _:
            width = min(n, 20)
            b, o, y, x = loop(2, 0), loop(min(m, 6), 1), loop(5, 2), loop(width, 3)
            c, ky, kx = red(min(k, 4), 4), red(3, 5), red(3, 6)
            row, col = add(y, ky, -1), add(x, kx, -1)
            valid = None
            for v, size in ((row, 5), (col, width)):
                one = I(-1).alu(Ops.CMPLT, v).alu(Ops.AND, v.alu(Ops.CMPLT, I(size)))
                valid = one if valid is None else valid.alu(Ops.AND, one)
            ci, co = min(k, 4), min(m, 6)
            source = load(1, add(mul(b, ci * 5 * width), mul(c, 5 * width), mul(row, width), col), valid=valid)
            weight = load(2, add(mul(o, ci * 9), mul(c, 9), mul(ky, 3), kx))
            out = add(mul(b, co * 5 * width), mul(o, 5 * width), mul(y, width), x)
            ast = sink(store(0, out, reduce(source.alu(Ops.MUL, weight), c, ky, kx), b, o, y, x))
            shapes = (2 * ci * 5 * width, co * ci * 9)
            return ast, [np.zeros((2, co, 5, width), np.float32), *(values(seed, f32, s) for s in shapes)]


def rows_plus_columns(rows: int, columns: int) -> UOp:
    i, j = loop(rows, 0), loop(columns, 1)
    return sink(store(0, add(mul(i, columns), j), add(load(1, i), load(2, j)), i, j))


def walk(draw: st.DrawFn, ast: UOp, split: bool) -> tuple[Opt, ...]:
    """A list that the search can come to: a few steps from the heuristic's or from the one without optimisation."""
    prepared = prepare(ast, host_target().machine)
    sig = signature(prepared.ast)
    opts = canonical(sig, prepared.opts)
    if split and draw(st.booleans()):
        opts = ()
    for _ in range(draw(st.integers(1, 5))):
        around = neighbours(sig, opts, lanes(), split)
        if not around:
            break
        kinds = sorted({o.kind for x in around for o in x if o not in opts})
        kind = draw(st.sampled_from(kinds)) if kinds else None
        around = [x for x in around if kind is None or any(o.kind == kind and o not in opts for o in x)]
        opts = draw(st.sampled_from(around))
    return opts


def close(got: np.ndarray, want: np.ndarray) -> None:
    if got.dtype.kind in "biu":
        np.testing.assert_array_equal(got, want)
    else:
        tolerance = {8: 1e-10, 4: 1e-4}.get(got.dtype.itemsize, 5e-2)
        np.testing.assert_allclose(got.astype(np.float64), want.astype(np.float64), rtol=tolerance, atol=tolerance)


def test_every_list_that_the_search_can_pick() -> None:
    """What PYTHON computes; and the bits of the heuristic's kernel unless a reduction is split otherwise. Every kind
    of Opt is tried."""
    tried: set[str] = set()

    def check(data: st.DataObject, some: st.SearchStrategy[tuple[UOp, list[np.ndarray]]]) -> None:
        ast, arrays = data.draw(some)
        split = data.draw(st.booleans())
        opts = walk(data.draw, ast, split)
        tried.update(o.kind for o in opts)
        got = run_with(ast, arrays, opts)
        close(got, run(ast, arrays)[0])
        prepared = prepare(ast, host_target().machine)
        sig, chosen = signature(prepared.ast), prepared.opts
        if sums(sig, opts) == sums(sig, chosen):
            np.testing.assert_array_equal(got, run_with(ast, arrays, chosen))

    @SETTINGS
    @given(st.data())
    def all_kernels(data: st.DataObject) -> None:
        check(data, families() if data.draw(st.integers(0, 3)) else kernels())

    @settings(SETTINGS, max_examples=100)
    @given(st.data())
    def with_dots(data: st.DataObject) -> None:
        check(data, products_of_bytes() if data.draw(st.booleans()) else products_of_bfloat16())

    @settings(SETTINGS, max_examples=30)
    @given(st.data())
    def with_exponentials(data: st.DataObject) -> None:
        check(data, sums_of_exponentials())

    @settings(SETTINGS, max_examples=20)
    @given(st.data())
    def with_rows(data: st.DataObject) -> None:
        arrays = [np.zeros((20, 80), np.float32), values(0, f32, 20), values(1, f32, 80)]
        check(data, st.just((rows_plus_columns(20, 80), arrays)))

    all_kernels()
    with_rows()
    with_dots()
    with_exponentials()
    machine = host_target().machine
    absent = {"float32_parts"}  # (a search does not change it: test_parts.py)
    absent |= set() if machine.dots else {"tensorize"}
    if all(d.rows == 1 for d in machine.dots):
        absent.add("matrix")
    if machine.group_items == 1:
        absent |= {"bind", "bind_reduce", "cache_shared"}
    assert tried == {kind.kind for kind in KINDS} - absent  # (groups: test_groups.py, test_lanes.py)


# *** what is legal ***


def masked_pair() -> UOp:
    """out[i, j] = sum_r x[i, r] * max_s y[r, s] * z[j]: a nested reduction."""
    i, j, r, s = loop(8, 0), loop(8, 1), red(8, 2), red(8, 3)
    inner = reduce(load(2, add(mul(r, 8), s)), s, op=Ops.MAX)
    value = reduce(load(1, add(mul(i, 8), r)).alu(Ops.MUL, inner), r).alu(Ops.MUL, load(3, j))
    return sink(store(0, add(mul(i, 8), j), value, i, j))


def scatter_add() -> UOp:
    i, j = loop(8, 0), loop(16, 1)
    at = load(2, i, dtypes.int64).cast(dtypes.index)
    return sink(store(0, add(mul(at, 16), j), load(1, add(mul(i, 16), j)), i, j, arg="add"))


def set_at(where: str, n: int = 8, m: int = 16) -> UOp:
    """out[p[i, j]], out[i, p[i, j]] or out[p[i, j], j] = x[i, j], of values for one place the last; nothing where p
    is outside of 0..m-1."""
    i, j = loop(n, 0), loop(m, 1)
    at = load(2, add(mul(i, m), j), dtypes.int64).cast(dtypes.index)
    inside = I(-1).alu(Ops.CMPLT, at).alu(Ops.AND, at.alu(Ops.CMPLT, I(m)))
    offset = {"anywhere": at, "rows": add(mul(i, m), at), "columns": add(mul(at, m), j)}[where]
    return sink(store(0, offset, load(1, add(mul(i, m), j)), i, j, valid=inside, arg="set"))


@settings(SETTINGS, max_examples=60)
@given(st.data())
def test_stores_in_order(data: st.DataObject) -> None:
    """Whatever list is legal, the last value stays, as in PYTHON; and "add" keeps its bits."""
    where = data.draw(st.sampled_from(["anywhere", "rows", "columns"]))
    n, m = data.draw(st.sampled_from([1, 5, 8, 33])), data.draw(st.sampled_from([3, 16, 40, 200]))
    ast = set_at(where, n, m)
    how = data.draw(st.sampled_from(["set", "add", "max"]))
    ast = ast.replace(src=(ast.src[0].replace(arg=how),))
    random = np.random.RandomState(data.draw(st.integers(0, 99)))
    places = random.randint(-1, data.draw(st.integers(1, m)) + 1, (n, m))
    arrays = [np.zeros(max(n, m) * m, np.float32), random.randn(n, m).astype(np.float32), places]
    opts: tuple[Opt, ...] = ()
    for opt in data.draw(
        st.lists(
            st.sampled_from(
                [
                    Vectorize(0, 4),
                    Vectorize(1, 8),
                    Tile(0, 4),
                    Tile(1, 8),
                    Tile(1, 3),
                    Reorder(1, 0),
                    Parallel(1),
                ]
            ),
            max_size=6,
        )
    ):
        opts = (*opts, opt) if legal(signature(ast), (*opts, opt)) is None else opts
    want = run(ast, arrays)[0]
    np.testing.assert_array_equal(run_with(ast, arrays, opts, simplify=False), want, str(opts))
    np.testing.assert_array_equal(run(ast, arrays, device="CPU")[0], want)


SET_ANYWHERE, SET_IN_ROWS, SET_IN_COLUMNS = set_at("anywhere"), set_at("rows"), set_at("columns")
PRODUCT, NESTED, SCATTER, ROWS = gemm(32, 32, 64), masked_pair(), scatter_add(), softmax_gradient(8, 40)
SUMS = rows_plus_columns(20, 50)
OF_BYTES = use_dots(bytes_product(32, 32, 64), (Dot(dtypes.uint8, dtypes.int8, 64),))
OF_HALVES = use_dots(gemm(32, 32, 64, dtype=dtypes.bfloat16), (Dot(dtypes.bfloat16, dtypes.bfloat16, 64),))
ALL = Parallel(2)
FIRST = Parallel(1)


@pytest.mark.parametrize(
    ("ast", "opts", "reason"),
    [
        (PRODUCT, [Tile(7, 2)], "the kernel has no range 7"),
        (PRODUCT, [Tile(2, 2)], "does not apply to a reduce range"),
        (PRODUCT, [Unroll(0, 2)], "does not apply to a loop range"),
        (PRODUCT, [Reorder(0, 0)], "there is no other loop 0"),
        (PRODUCT, [Parallel(3)], "the kernel has 2 loops"),
        (PRODUCT, [Vectorize(1, 3)], "a power of two"),
        (PRODUCT, [Vectorize(1, 128)], "2 to 64"),
        (PRODUCT, [Vectorize(1, 16), Vectorize(0, 16)], "another vectorize already"),
        (PRODUCT, [Vectorize(1, 16), Tile(1, 24)], "no multiple of its 16 lanes"),
        (PRODUCT, [Tile(1, 0)], "at least 1"),
        (PRODUCT, [Vectorize(1, 16), RFactor(2, 16)], "has lanes along loop 1 already"),
        (NESTED, [RFactor(2, 4)], "a REDUCE inside of it depends on it"),
        (PRODUCT, [CacheRead(0, 2)], "it changes with a loop inside it, or not with this one"),
        (PRODUCT, [CacheRead(1, 0)], "no REDUCE reads argument 0"),
        (PRODUCT, [RFactor(2, 16), CacheRead(0, 1)], "has lanes of its own"),
        (PRODUCT, [Block(0, 4)], "needs all loops in the parallel loop"),
        (PRODUCT, [Reorder(1, 0), Block(1, 4), ALL, CacheRead(0, 1), CacheRead(1, 2)], None),
        (PRODUCT, [Block(0, 4), ALL, Tile(0, 4), CacheRead(0, 1), CacheRead(1, 2)], None),
        (PRODUCT, [CacheRead(1, 2), Tile(1, 1 << 20)], "bytes of local memory"),
        (PRODUCT, [ReduceBlock(2, 16)], "needs a block"),
        (PRODUCT, [Block(0, 4), FIRST, Unroll(2, 4), ReduceBlock(2, 6)], "a multiple of the tile 4"),
        (PRODUCT, [Block(0, 4), ALL, ReduceBlock(2, 6)], "needs all loops up to its own in the parallel loop"),
        (PRODUCT, [Block(0, 4), FIRST, ReduceBlock(2, 8), CacheRead(0, 1), CacheRead(1, 2)], None),
        (NESTED, [Block(0, 4), FIRST, ReduceBlock(3, 4)], "the outermost range of the reduction is 2"),
        (NESTED, [Block(0, 4), FIRST, ReduceBlock(2, 4)], "do not depend on the blocked loop 0"),
        (NESTED, [Block(1, 4), ALL, ReduceBlock(2, 4)], "must share their ranges and type"),
        (PRODUCT, [Tensorize(1, 4)], "does not apply to a loop range"),
        (PRODUCT, [Tensorize(2, 4)], "are no sums of products of bytes or bfloat16"),
        (OF_BYTES, [Tensorize(2, 2)], "an instruction adds up 4 products"),
        (OF_HALVES, [Tensorize(2, 4)], "an instruction adds up 2 products"),
        (OF_HALVES, [Vectorize(1, 16), Tensorize(2, 2), CacheRead(1, 2)], None),
        (OF_BYTES, [Tensorize(2, 4), Unroll(2, 6)], r"\(6\) is no multiple of the 4 iterations"),
        (OF_BYTES, [RFactor(3, 16), Tensorize(3, 4), Unroll(3, 96)], r"\(96\) is no multiple of the 64 iterations"),
        (OF_BYTES, [Tensorize(2, 4), Skip(2)], "not where single iterations are skipped"),
        (OF_BYTES, [Vectorize(1, 16), RFactor(3, 16), Tensorize(2, 4), Tensorize(3, 4), CacheRead(1, 2)], None),
        (SCATTER, [Parallel(1)], "iterations of loop 0 may store to one address"),
        (SCATTER, [Vectorize(0, 8)], "iterations of loop 0 may store to one address"),
        (SCATTER, [ALL], "cut along one loop at most"),
        (ROWS, [ComputeAt(3, 7)], "the kernel has no range 7"),
        (ROWS, [ComputeAt(1, 3)], "does not apply to a loop range"),
        (ROWS, [ComputeAt(2, 1)], "nothing worth keeping is computed along range 2 and again along range 1"),
        (ROWS, [ComputeAt(3, 4), ComputeAt(4, 1)], "range 4 is part of another compute_at"),
        (ROWS, [Vectorize(0, 4), ComputeAt(3, 4)], "what is kept runs along the vectorized loop"),
        (ROWS, [Block(1, 4), ALL, ComputeAt(3, 4)], "not with a block"),
        (ROWS, [Prefetch(0, 1)], "argument 1 is not read along range 0 and a loop around it"),
        (ROWS, [Prefetch(3, 2)], "argument 2 is not read along range 3"),
        (ROWS, [Vectorize(1, 16), NontemporalStore(1)], "not one that is only stored to"),
        (ROWS, [NontemporalStore(0)], "no loop is vectorized"),
        (ROWS, [ComputeAt(3, 4), ComputeAt(3, 1), Prefetch(3, 1), Vectorize(1, 16), NontemporalStore(0)], None),
        (PRODUCT, [Reorder(1, 0), CacheRead(1, 2), Prefetch(2, 2)], "argument 2 is packed"),
        (PRODUCT, [Reorder(1, 0), CacheRead(1, 2), Prefetch(2, 1)], None),
        (ROWS, [ReadAhead(0, 64)], "the argument is not read"),
        (ROWS, [ReadAhead(1, 0)], "at least 1 byte"),
        (ROWS, [ReadAhead(1, 64), ReadAhead(1, 128)], "there is another read_ahead already"),
        (PRODUCT, [Reorder(1, 0), CacheRead(1, 2), ReadAhead(2, 64)], "the argument is packed"),
        (PRODUCT, [Reorder(1, 0), CacheRead(1, 2), ReadAhead(1, 64)], None),
        (PRODUCT, [ReduceBlock(2, 16), CacheRead(1, 2)], "needs a block"),
        (PRODUCT, [Vectorize(1, 16), Align(1)], "a kernel with one STORE, no condition on it and no REDUCE"),
        (SUMS, [Vectorize(1, 16), Align(0)], "not the vectorized loop"),
        (SUMS, [Vectorize(1, 16), Align(1)], "where a vector is stored is not known but for a multiple of its length"),
        (SUMS, [Vectorize(1, 16), Tile(1, 48), Tile(0, 16), Align(1)], "the loop is short"),
        (SUMS, [Vectorize(1, 16), Tile(0, 16), Align(1), Block(0, 1), ALL], "not with a block"),
        (SUMS, [Vectorize(1, 16), Tile(0, 16), Align(1), ALL], None),
        (SCATTER, [Vectorize(1, 16), Reorder(1, 0), Parallel(1)], None),
        (SCATTER, [Tile(0, 4)], None),
        (SET_ANYWHERE, [Tile(0, 4)], "one is done before the next"),
        (SET_ANYWHERE, [Tile(1, 4)], None),
        (SET_ANYWHERE, [Reorder(1, 0)], "stay in their order"),
        (SET_ANYWHERE, [Parallel(1)], "iterations of loop 0 may store to one address"),
        (SET_IN_ROWS, [Parallel(1), Tile(1, 4)], None),
        (SET_IN_ROWS, [Vectorize(1, 8)], "iterations of loop 1 may store to one address"),
        (SET_IN_COLUMNS, [Reorder(1, 0), Parallel(1), Vectorize(1, 8)], None),
        (SET_IN_COLUMNS, [Parallel(1)], "iterations of loop 0 may store to one address"),
        (PRODUCT, [Block(1, 4), ALL, Unroll(2, 4), ReduceBlock(2, 8)], None),
        (PRODUCT, [Reorder(1, 0), Vectorize(1, 16), Tile(0, 6), CacheRead(1, 2), ALL], None),
    ],
)  # fmt: skip
def test_legal(ast: UOp, opts: list[Opt], reason: str | None) -> None:
    found = legal(signature(ast), tuple(opts))
    if reason is None:
        assert found is None
        prepare(ast, host_target().machine, tuple(opts), simplify=False).program()
    else:
        assert re.search(reason, found or ""), found
        with pytest.raises(ValueError, match="cannot be optimised by"):
            prepare(ast, host_target().machine, tuple(opts), simplify=False)


def test_flags_of_a_kind_are_those_that_are_asked_for() -> None:
    """One that was renamed would be set for nobody."""
    for kind in KINDS:
        flags = [name for name, value in vars(kind).items() if isinstance(value, bool)]
        assert [name for name in flags if name not in Opt.__annotations__] == [], kind


def test_kinds_by_name() -> None:
    assert named("tile", 0, 6) == Tile(0, 6) and named("parallel", 2) == Parallel(2)
    with pytest.raises(ValueError, match="unknown kind of Opt: swizzle; the kinds are reorder, vectorize"):
        named("swizzle", 0, 2)
    with pytest.raises(ValueError, match=r"parallel\(0, 2\)"):
        named("parallel", 0, 2)


def test_stage_inside_of_a_tiled_loop() -> None:
    """What is packed at a loop has all positions of the tiles outside of it on which it depends, too."""
    b, x, r = loop(4, 0), loop(35, 1), red(8, 2)
    y = loop(4, 3)
    value = reduce(load(1, add(mul(b, 280), mul(r, 35), x)).alu(Ops.MUL, load(2, add(mul(y, 8), r))), r)
    ast = sink(store(0, add(mul(b, 140), mul(x, 4), y), value, b, x, y))
    rng = np.random.default_rng(0)
    arrays = [
        np.zeros((4, 35, 4), np.float32),
        rng.random((4, 8, 35), dtype=np.float32),
        rng.random((4, 8), dtype=np.float32),
    ]
    want = run(ast, arrays)[0]
    for tile in (1, 2, 3):
        opts = (Vectorize(1, 16), Tile(0, tile), CacheRead(1, 1), Parallel(2))
        np.testing.assert_allclose(run_with(ast, arrays, opts, simplify=False), want, rtol=1e-6)
        opts = (Vectorize(3, 4), Tile(0, tile), Tile(1, 6), CacheRead(1, 1))
        np.testing.assert_allclose(run_with(ast, arrays, opts, simplify=False), want, rtol=1e-6)
    vectors_outside = (Vectorize(0, 4), Tile(1, 5), CacheRead(1, 1), Parallel(2))
    np.testing.assert_allclose(run_with(ast, arrays, vectors_outside, simplify=False), want, rtol=1e-6)


def test_canonical() -> None:
    sig = signature(PRODUCT)
    opts = (Parallel(1), Tile(1, 16), Vectorize(1, 16), Reorder(1, 0), Reorder(0, 1), Unroll(2, 1), Tile(0, 2))
    assert canonical(sig, opts) == (Vectorize(1, 16), Tile(0, 2), Parallel(1))
    for x in neighbours(sig, opts, 16, sums_may_change=True):
        plan, again = loop_nest(sig, x), loop_nest(sig, canonical(sig, x))
        assert (plan.loops, plan.tile, plan.parallel) == (again.loops, again.tile, again.parallel)


def test_neighbours_keep_the_order_of_sums_unless_told() -> None:
    for ast in (PRODUCT, gemm(20, 20, 40, "NT"), NESTED):
        prepared = prepare(ast, host_target().machine)
        sig = signature(prepared.ast)
        same, all_ = (neighbours(sig, prepared.opts, 16, split) for split in (False, True))
        assert same and set(same) < set(all_)
        assert all(sums(sig, x) == sums(sig, prepared.opts) for x in same)
        assert any(sums(sig, x) != sums(sig, prepared.opts) for x in all_)
        assert all(legal(sig, x) is None for x in all_) and len(set(all_)) == len(all_)


def test_lanes_of_a_range_that_another_reduction_uses_without() -> None:
    """The second one runs the shared range singly, so nothing about it may be taken for a multiple of the lanes."""
    i, j, r = loop(3, 0), loop(32, 1), red(32, 2)
    quarter = r.alu(Ops.MOD, I(4)).cast(f32)
    rows = reduce(load(1, add(mul(i, 32), r)), r)
    columns = reduce(load(2, add(mul(r, 32), j)).alu(Ops.MUL, quarter), r)
    ast = sink(store(0, add(mul(i, 32), j), rows.alu(Ops.ADD, columns), i, j))
    rng = np.random.default_rng(0)
    arrays = [np.zeros((3, 32), np.float32), *(rng.integers(-4, 5, s).astype(np.float32) for s in ((3, 32), (32, 32)))]
    opts = (Vectorize(1, 16), RFactor(2, 16), Parallel(1))
    np.testing.assert_array_equal(run_with(ast, arrays, opts, simplify=False), run(ast, arrays)[0])


def test_debug_3_shows_the_list(capsys: pytest.CaptureFixture[str]) -> None:
    with Context(DEBUG=3):
        (Tensor.ones(33, 40).contiguous().realize() * 2).realize()
    shown = capsys.readouterr().out
    assert re.search(r"^e_33_40_\w+: vectorize\(\d+, \d+\).* parallel\(1\)$", shown, re.MULTILINE), shown


def test_a_thread_keeps_what_it_packed_for_its_next_part_of_the_loop() -> None:
    """The second part of a panel's rows finds it packed, as its scratch says that it ran up to where that part
    begins."""
    ast = gemm(32, 48, 24)
    opts = (
        Vectorize(1, 16),
        Tile(1, 48),
        Tile(0, 4),
        Reorder(1, 0),
        CacheRead(1, 2),
        Parallel(2),
    )
    with Context(CHECK_OOB=0):  # (a checked kernel is given more than its buffers)
        kernel = get_device("CPU").compile_with(ast, opts)
    run_part = ctypes.CFUNCTYPE(None, *[ctypes.c_void_p] * 2, *[ctypes.c_int64] * 2, ctypes.c_void_p)(kernel.address)
    rng = np.random.default_rng(0)
    arrays = [
        np.zeros((32, 48), np.float32),
        *(rng.integers(-4, 5, s).astype(np.float32) for s in ((32, 24), (24, 48))),
    ]
    want, columns = arrays[1] @ arrays[2], arrays[2].copy()
    buffers = (ctypes.c_void_p * 3)(*[a.ctypes.data for a in arrays])
    scratch = np.zeros(1 << 16, np.int64)
    for header, known in ((3, True), (0, False)):  # 8 tiles of rows: 3, then 5
        scratch[0], arrays[2][:] = 0, columns
        run_part(ctypes.addressof(buffers), None, 0, 3, scratch.ctypes.data)
        arrays[2][:] = 0
        scratch[0] = header
        run_part(ctypes.addressof(buffers), None, 3, 8, scratch.ctypes.data)
        np.testing.assert_array_equal(arrays[0], want if known else np.where(np.arange(32)[:, None] < 12, want, 0))


def test_what_is_masked_along_an_unrolled_reduction_is_not_staged() -> None:
    """It was packed in vectors along the reduction, the mask looked at once a vector: wrong where 4 iterations or
    more are written out."""
    i, j, r = loop(2, 0), loop(2, 1), red(16, 2)
    inside = I(0).alu(Ops.CMPLT, r).alu(Ops.AND, r.alu(Ops.CMPLT, I(15)))
    product = load(1, add(mul(i, 16), r), f32, inside).alu(Ops.MUL, load(2, add(mul(r, 2), j), f32))
    ast = sink(store(0, add(mul(i, 2), j), reduce(product, r), i, j))
    staged = (Reorder(1, 0), Vectorize(1, 8), Tile(0, 2), Unroll(2, 4), CacheRead(0, 1))
    assert "masked along a reduction of which fours are written out" in (legal(signature(ast), staged) or "")
    assert legal(signature(ast), (*staged[:3], staged[4])) is None


def test_an_unrolling_inside_of_one_around_it_counts_for_the_order() -> None:
    """Of two ranges and of three: lists of equal sums have equal bits, whatever is unrolled."""
    rng = np.random.default_rng(0)
    for sizes in ((6, 7), (4, 3, 5)):
        i, ks = loop(9, 0), [red(n, 1 + x) for x, n in enumerate(sizes)]
        at, step = mul(i, int(np.prod(sizes))), 1
        for k in reversed(ks):
            at, step = add(at, mul(k, step)), step * k.src[0].arg
        ast = sink(store(0, i, reduce(load(1, at), *ks), i))
        arrays = [np.zeros(9, np.float32), (rng.standard_normal((9, *sizes)) * 1e3).astype(np.float32)]
        bits: dict[object, bytes] = {}
        for tiles in itertools.product((1, 2, 3), repeat=len(sizes)):
            opts = tuple(Unroll(k.arg.id, t) for k, t in zip(ks, tiles) if t > 1)
            found = run_with(ast, arrays, opts, simplify=False).tobytes()
            assert bits.setdefault(sums(signature(ast), opts), found) == found, opts
        assert 1 < len({*bits.values()}) <= len(bits)
