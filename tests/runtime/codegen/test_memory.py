"""What is kept of a row, asked for ahead and stored past the caches: the instructions, the bits, the choices."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from manygrad.runtime.codegen.analysis.describe import signature
from manygrad.runtime.codegen.choose import choose
from manygrad.runtime.codegen.cost import RECORD_BYTES, STREAM_BYTES
from manygrad.runtime.codegen.kernel.collapse import collapse
from manygrad.runtime.codegen.kernel.legalize import legalize
from manygrad.runtime.codegen.lowered import Low, LoweredProgram
from manygrad.runtime.codegen.opts import (
    Align,
    CacheRead,
    ComputeAt,
    NontemporalStore,
    Opt,
    Parallel,
    Prefetch,
    ReadAhead,
    Reorder,
    RFactor,
    Tile,
    Unroll,
    Vectorize,
)
from manygrad.runtime.codegen.pipeline import Prepared, prepare
from manygrad.runtime.codegen.target import Machine
from manygrad.runtime.devices import get_device
from manygrad.runtime.devices.target import host_target
from manygrad.tensor.dtype import DType, dtypes
from manygrad.tensor.environment import Context
from manygrad.tensor.uop.ops import Ops
from manygrad.tensor.uop.uop import UOp
from tests.runtime.codegen.kernels import add, f32, gemm, load, loop, mul, red, reduce, sink, store
from tests.runtime.codegen.test_opts import run_with, softmax_gradient, values

MEMORY = ("compute_at", "prefetch", "read_ahead", "nontemporal_store")
LANES = host_target().machine.vector_bytes // 4


def softmax(m: int, n: int) -> UOp:
    i, j, r, s = loop(m, 0), loop(n, 1), red(n, 2), red(n, 3)
    top = reduce(load(1, add(mul(i, n), r)), r, op=Ops.MAX)
    e = lambda c: load(1, add(mul(i, n), c)).alu(Ops.SUB, top).alu(Ops.EXP)  # noqa: E731
    return sink(store(0, add(mul(i, n), j), e(j).alu(Ops.FDIV, reduce(e(s), s)), i, j))


def double(n: int) -> UOp:
    i = loop(n, 0)
    return sink(store(0, i, load(1, i).alu(Ops.ADD, load(1, i)), i))


def program(ast: UOp, opts: tuple[Opt, ...]) -> LoweredProgram:
    prepared = prepare(ast, host_target().machine, opts)
    return prepared.program()


def count(p: LoweredProgram, op: Low, local: bool) -> int:
    return sum(x.op is op and (x.src[0].op is Low.SCRATCH) == local for x in p.insts)


@pytest.mark.parametrize(("m", "n"), [(1, 33), (5, 40), (9, 64), (6, 1000)])
@pytest.mark.parametrize("make", [softmax, softmax_gradient])
def test_the_same_bits_with_and_without(make: object, m: int, n: int) -> None:
    ast = make(m, n)  # type: ignore[operator]
    chosen = prepare(ast, host_target().machine).opts
    assert any(o.kind == "compute_at" for o in chosen)
    arrays = [np.zeros((m, n), np.float32), values(0, f32, m * n), values(1, f32, m * n)]
    bare = tuple(o for o in chosen if o.kind not in MEMORY)
    want = run_with(ast, arrays, bare)
    np.testing.assert_array_equal(run_with(ast, arrays, chosen), want)
    np.testing.assert_array_equal(run_with(ast, arrays, (*chosen, NontemporalStore(0))), want)
    with Context(CHECK_OOB=1):
        np.testing.assert_array_equal(run_with(ast, arrays, (*chosen, NontemporalStore(0))), want)


def test_an_exponential_is_computed_once() -> None:
    """Of two passes over a row that need it, one stores it to local memory, the other reads it there."""
    ast = softmax(8, 64)
    with_, without = (
        program(ast, (RFactor(2, 16), RFactor(3, 16), Vectorize(1, 16), *more)) for more in ((ComputeAt(3, 1),), ())
    )
    assert (count(without, Low.STORE, True), count(without, Low.LOAD, True)) == (0, 0)
    assert (count(with_, Low.STORE, True), count(with_, Low.LOAD, True)) == (1, 1)
    assert count(with_, Low.LOAD, False) == count(without, Low.LOAD, False) - 1
    assert with_.scratch_bytes == 64 * 4
    assert sum(x.op is Low.FMA for x in with_.insts) < 0.6 * sum(x.op is Low.FMA for x in without.insts)


def test_the_first_pass_asks_for_the_next_row_where_a_core_can_wait_for_it() -> None:
    """Of large arrays, in rows that are a good burst; each array's in a pass of its own, one row a tile."""
    machine = replace(host_target().machine, burst_bytes=4096)

    def opts(ast: UOp) -> set[Opt]:
        return {
            o for o in prepare(ast, machine).opts if isinstance(o, Prefetch) or (isinstance(o, Tile) and o.axis == 0)
        }

    assert opts(softmax(4096, 1024)) == {Prefetch(2, 1)}
    assert opts(softmax_gradient(4096, 1024)) == {Prefetch(2, 1), Prefetch(4, 2)}
    assert opts(softmax(1024, 1024)) == {Prefetch(3, 1), Tile(0, 2)}
    assert Prefetch(3, 1) in opts(softmax(4096, 1025)) and Prefetch(3, 1) in opts(softmax(20000, 500))


def test_rows_of_a_gradient_are_kept_once() -> None:
    opts = prepare(softmax_gradient(64, 1024), host_target().machine).opts
    assert [o for o in opts if o.kind == "compute_at"] == [ComputeAt(3, 4), ComputeAt(3, 1)]
    assert [o for o in opts if o.kind == "prefetch"] == [Prefetch(3, 1), Prefetch(1, 2)]


def test_as_many_rows_as_half_of_the_first_cache_holds() -> None:
    """A row of 512 is 2 KiB, as are what is kept of it and the next one; a long row is worked on with one other."""
    wide = Machine(vector_bytes=64, registers=32, scales=True, cores=2)
    rows = lambda n: [o.size for o in prepare(softmax(64, n), wide).opts if isinstance(o, Tile) and o.axis == 0]  # noqa: E731
    assert (rows(256), rows(512), rows(640), rows(1024), rows(8192)) == ([4], [4], [3], [2], [2])


@pytest.mark.parametrize(("n", "cores", "tile"), [(256, 2, 64), (384, 2, 96), (384, 3, 64), (1 << 20, 2, 96)])
def test_cores_have_as_many_columns_of_a_sum(n: int, cores: int, tile: int) -> None:
    """Where no row is used again, memory bounds the sum over rows, and every core reads."""
    j, r = loop(n, 0), red(50, 1)
    ast = sink(store(0, j, reduce(load(1, add(mul(r, n), j)), r), j))
    opts = choose(ast, Machine(vector_bytes=64, registers=32, cores=cores))
    assert [o.size for o in opts if o.kind == "tile"] == [tile]


def test_prefetch_is_a_tile_ahead() -> None:
    opts = (RFactor(2, 16), RFactor(3, 16), Vectorize(1, 16), Tile(0, 4), Prefetch(1, 1))
    p = program(softmax(8, 64), opts)
    ahead = [x for x in p.insts if x.op is Low.PREFETCH]
    assert sorted({x.arg for x in ahead}) == [64 * row for row in (4, 5, 6, 7)]


def test_rows_of_a_product_are_asked_for_a_tile_ahead() -> None:
    m, n, k = 12, 64, 70
    opts = (Reorder(1, 0), Vectorize(1, 16), Tile(0, 4), CacheRead(1, 2), Prefetch(2, 1))
    ahead = [x for x in program(gemm(m, n, k), opts).insts if x.op is Low.PREFETCH]
    assert {x.src[0].arg for x in ahead} == {1}
    assert sorted({x.arg for x in ahead}) == [k * row // 16 * 16 for row in (4, 5, 6, 7)]  # (whole lines)
    written_out = [x for x in program(gemm(m, n, k), (*opts, Unroll(2, 2))).insts if x.op is Low.PREFETCH]
    assert len(written_out) == len(ahead)


def rows_sum(rows: int, columns: int, d: DType = f32) -> UOp:
    i, k = loop(rows, 0), red(columns, 1)
    value = load(1, add(mul(i, columns), k), d)
    return sink(store(0, i, reduce(value if d is f32 else value.cast(f32), k), i))


def test_a_line_is_read_ahead_once() -> None:
    opts = (RFactor(1, 16), Unroll(1, 64), Tile(0, 2), ReadAhead(1, 4096))
    ahead = [x for x in program(rows_sum(8, 256), opts).insts if x.op is Low.PREFETCH]
    assert sorted(x.arg for x in ahead) == [256 * row + 1024 + 16 * line for row in (0, 1) for line in range(4)]
    halves = [x for x in program(rows_sum(8, 256, dtypes.bfloat16), opts).insts if x.op is Low.PREFETCH]
    assert sorted(x.arg for x in halves) == [256 * row + 2048 + 32 * line for row in (0, 1) for line in range(2)]


def test_what_is_read_in_order_is_read_ahead() -> None:
    """Not what rests in the first caches, not columns, not what many rows read again. Of rows side by side the next
    tile's, of long ones further on in each."""
    wide = Machine(vector_bytes=64, registers=32, cores=2)
    ahead = lambda ast: [o for o in prepare(ast, wide).opts if o.kind == "read_ahead"]  # noqa: E731
    assert ahead(rows_sum(64, 1024)) == [ReadAhead(1, 16 << 10)] and ahead(rows_sum(64, 2048)) == [ReadAhead(1, 4096)]
    assert ahead(rows_sum(64, 200)) == []
    assert ahead(gemm(1, 512, 1024, "NT")) == [ReadAhead(2, 16 << 10)]
    assert ahead(gemm(1, 512, 1024, "NN")) == [] and ahead(gemm(256, 512, 1024, "NT")) == []


def test_stream_writes_whole_aligned_vectors() -> None:
    """What is left over is stored as ever; and so is everything where the buffer begins in the middle of a cache
    line."""
    n = 16 * 5 + 3
    opts = (Vectorize(0, 16), NontemporalStore(0), Parallel(1))
    p = program(double(n), opts)
    assert (count(p, Low.STREAM, False), count(p, Low.STORE, False)) == (1, 1)
    text = prepare(double(n), host_target().machine, opts)
    device = get_device("CPU")
    kernel = device.compile_with(double(n), opts)
    assert "!nontemporal" in kernel.source and text.opts == opts
    x = values(0, f32, n)
    target, source = device.alloc(4 * (n + 16)), device.alloc(4 * n)
    device.copyin(source, memoryview(x).cast("B"))
    for offset in (0, 4, 32, 64):
        kernel([device.view(target, offset, 4 * n), source])
        got = device.as_numpy(device.view(target, offset, 4 * n), 4 * n).view(np.float32)
        np.testing.assert_array_equal(got, x + x)


def double_and_square(m: int, n: int) -> UOp:
    """Two results a row, scaled by the row's largest and by a column's weight."""
    i, j, r = loop(m, 0), loop(n, 1), red(n, 2)
    x = (
        load(2, add(mul(i, n), j))
        .alu(Ops.MUL, reduce(load(2, add(mul(i, n), r)), r, op=Ops.MAX))
        .alu(Ops.MUL, load(3, j))
    )
    at = add(mul(i, n), j)
    return sink(store(0, at, x.alu(Ops.ADD, x), i, j), store(1, at, x.alu(Ops.MUL, x), i, j))


@pytest.mark.parametrize("n", [135, 200, 259, 1000])
@pytest.mark.parametrize("rows", [1, 3])
def test_rows_that_begin_anywhere_are_stored_in_whole_lines(n: int, rows: int) -> None:
    """The bits of the loop as it was; from buffers that begin within a line as well."""
    m, ast = 7, double_and_square(7, n)
    bare = (
        RFactor(2, LANES),
        Vectorize(1, LANES),
        Tile(1, 2 * LANES),
        *([Tile(0, rows)] if rows > 1 else []),
        Parallel(1),
    )
    streamed = (*bare, NontemporalStore(0), NontemporalStore(1))
    assert count(program(ast, streamed), Low.STREAM, False) > 0
    assert (
        LANES * 4 < 64 or count(program(ast, (*bare, NontemporalStore(0))), Low.STREAM, False) == 0
    )  # (a vector that is a line)
    arrays = [np.zeros((m, n), np.float32), np.zeros((m, n), np.float32), values(0, f32, m * n), values(1, f32, n)]
    device = get_device("CPU")
    results = []
    for opts, offset in ((bare, 0), (streamed, 0), (streamed, 4), (streamed, 32)):
        with Context(CHECK_OOB=int(offset == 0)):
            kernel = device.compile_with(ast, opts)
        held = [device.alloc(a.nbytes + 64) for a in arrays]
        views = [device.view(h, offset, a.nbytes) for h, a in zip(held, arrays)]
        for v, a in zip(views, arrays):
            device.copyin(v, memoryview(a).cast("B"))
        kernel(views)
        results.append([device.as_numpy(v, 4 * m * n).view(np.float32).copy() for v in views[:2]])
    for got in results[1:]:
        np.testing.assert_array_equal(got, results[0])


def test_large_rows_are_streamed_wherever_they_begin() -> None:
    for n in (1000, 1001, 1008):
        rows = STREAM_BYTES // (4 * n) + 1
        assert NontemporalStore(0) in prepare(softmax(rows, n), host_target().machine).opts
    assert NontemporalStore(0) not in prepare(softmax(STREAM_BYTES // 4000 - 1, 1000), host_target().machine).opts


def turn(rows: int, columns: int) -> UOp:
    i, j = loop(columns, 0), loop(rows, 1)
    return sink(store(0, add(mul(i, rows), j), load(1, add(mul(j, columns), i)), i, j))


@pytest.mark.parametrize(
    ("rows", "columns"), [(1024, 1032), (1025, 1024), (1023, 1041), (512, 512), (511, 77), (67, 40)]
)
def test_transposes_are_stored_in_whole_lines(rows: int, columns: int) -> None:
    """Vectors begin at lines also where rows do not; large ones go along the source and past the caches."""
    ast = turn(rows, columns)
    chosen = prepare(ast, host_target().machine).opts
    assert ({Reorder(1, 0), NontemporalStore(0)} <= set(chosen)) is (rows * columns >= 1 << 20)
    assert Tile(1, 2 * LANES) in chosen and (Align(1) in chosen) is (rows % LANES > 0)
    a = values(0, f32, rows * columns).reshape(rows, columns)
    got = run_with(ast, [np.zeros((columns, rows), np.float32), a], chosen)
    np.testing.assert_array_equal(got, a.T)


@pytest.mark.parametrize("order", [(), (Reorder(1, 0),)], ids=["inside", "outside"])
@pytest.mark.parametrize("parallel", [1, 2])
def test_aligned_vectors(parallel: int, order: tuple[Opt, ...]) -> None:
    """All vectors inside of a row are streamed, its first and last elements are not; each piece of the parallel loop
    stores its own."""
    rows, columns = 5 * LANES + 3, LANES + 1
    ast = turn(rows, columns)
    opts = (
        *order,
        Vectorize(1, LANES),
        Tile(0, LANES),
        Tile(1, 2 * LANES),
        Align(1),
        NontemporalStore(0),
    )
    opts = (*opts, Parallel(parallel))
    p = program(ast, opts)
    vectors = [x for x in p.insts if x.op is Low.STREAM]
    assert vectors and all(x.lanes == LANES for x in vectors)
    assert all(len(x.src) == 4 and x.src[3].op is Low.FIRST for x in p.insts if x.op is Low.STORE)
    a = values(0, f32, rows * columns).reshape(rows, columns)
    for checked in (0, 1):
        with Context(CHECK_OOB=checked):
            got = run_with(ast, [np.zeros((columns, rows), np.float32), a], opts, simplify=False)
        np.testing.assert_array_equal(got, a.T)


def test_only_large_outputs_are_streamed() -> None:
    for n, expected in ((STREAM_BYTES // 4, True), (STREAM_BYTES // 4 - 16, False)):
        opts = prepare(double(n), host_target().machine).opts
        assert (NontemporalStore(0) in opts) is expected
    i = loop(STREAM_BYTES // 4, 0)  # in place: its lines are read anyway
    ast = sink(store(0, i, load(0, i).alu(Ops.ADD, load(1, i)), i))
    assert not any(o.kind == "nontemporal_store" for o in prepare(ast, host_target().machine).opts)


def test_what_an_update_in_place_only_writes_leaves_the_caches_to_it() -> None:
    for n, expected in ((RECORD_BYTES // 4, [NontemporalStore(0)]), (RECORD_BYTES // 4 - 16, [])):
        i = loop(n, 0)
        g = load(2, i).alu(Ops.MUL, load(2, i))
        ast = sink(store(0, i, g, i), store(1, i, load(1, i).alu(Ops.SUB, g), i))
        assert [o for o in prepare(ast, host_target().machine).opts if o.kind == "nontemporal_store"] == expected


# *** reductions in one pass ***


def test_reductions_of_one_row_share_a_range() -> None:
    """The sum of exponentials and the product with them need the maximum only: one pass makes both."""
    i, r, s, q = loop(8, 0), red(40, 1), red(40, 2), red(40, 3)
    x = lambda c: load(1, add(mul(i, 40), c))  # noqa: E731
    top = reduce(x(r), r, op=Ops.MAX)
    e = lambda c: x(c).alu(Ops.SUB, top).alu(Ops.EXP)  # noqa: E731
    total, dot = reduce(e(s), s), reduce(e(q).alu(Ops.MUL, load(2, add(mul(i, 40), q))), q)
    ast = sink(store(0, i, dot.alu(Ops.FDIV, total), i))
    first, *both = [u.src[1] for u in signature(collapse(ast)).reduces]
    assert len(both) == 2 and both[0] is both[1] and first is r
    arrays = [np.zeros(8, np.float32), values(0, f32, 320), values(1, f32, 320)]
    opts = tuple(RFactor(x, 16) for x in (1, 2, 3))
    together = tuple(o for o in opts if o.axis in (1, both[0].arg.id))
    np.testing.assert_array_equal(run_with(ast, arrays, together), run_with(ast, arrays, opts, simplify=False))


def test_a_sum_waits_for_one_that_goes_over_the_same_data() -> None:
    """sum(g) needs nothing, sum(g * (x - sum(x))) the first sum: g is read in one pass, the second of two."""
    i, r, s, q = loop(8, 0), red(40, 1), red(40, 2), red(40, 3)
    x, g = (lambda c, n=n: load(n, add(mul(i, 40), c)) for n in (1, 2))
    top, plain = reduce(x(r), r), reduce(g(s), s)
    along = reduce(g(q).alu(Ops.MUL, x(q).alu(Ops.SUB, top)), q)
    ast = sink(store(0, i, plain.alu(Ops.MUL, along), i))
    ranges = [u.src[1] for u in signature(collapse(ast)).reduces]
    assert len(ranges) == 3 and len(set(ranges)) == 2
    arrays = [np.zeros(8, np.float32), values(0, f32, 320), values(1, f32, 320)]
    opts = tuple(RFactor(n, 16) for n in (1, 2, 3))
    together = tuple(o for o in opts if o.axis in {u.arg.id for u in ranges})
    np.testing.assert_array_equal(run_with(ast, arrays, together), run_with(ast, arrays, opts, simplify=False))


def test_reductions_that_need_each_other_or_read_nothing_in_common_do_not() -> None:
    i, r, s = loop(8, 0), red(40, 1), red(40, 2)
    x = lambda c: load(1, add(mul(i, 40), c))  # noqa: E731
    mean = reduce(x(r), r)
    deviation = sink(store(0, i, reduce(x(s).alu(Ops.SUB, mean), s), i))
    other = sink(store(0, i, mean.alu(Ops.ADD, reduce(load(2, add(mul(i, 40), s)), s)), i))
    for ast in (deviation, other):
        assert len({u.src[1:] for u in signature(collapse(ast)).reduces}) == 2


# *** instructions that take whole registers ***


@pytest.mark.parametrize("lanes", [1, 2, 4, 8, 16, 32])
@pytest.mark.parametrize("d", [f32, dtypes.float64])
def test_the_exponential_has_the_same_bits_in_any_number_of_lanes(lanes: int, d: DType) -> None:
    """In float64 also those of machines that take nine instructions to scale; in float32 those take another
    polynomial."""
    machine = host_target().machine
    if not machine.scales:
        pytest.skip("the processor has no such instruction")
    x = np.concatenate(
        [np.linspace(-800, 800, 20001), np.linspace(-104, 90, 20001), [np.inf, -np.inf, np.nan, 0.0, -0.0, 1e30, -1e30]]
    )
    x = x.astype(d.np)
    i = loop(len(x), 0)
    ast = sink(store(0, i, load(1, i, d).alu(Ops.EXP), i))
    opts = (Vectorize(0, lanes),) if lanes > 1 else ()
    whole = prepare(ast, machine, opts)
    assert sum(u.op is Low.SCALE for u in whole.program().insts) > 0
    assert any(u.op is Low.LOOKUP for u in whole.program().insts) is (d is f32)
    other, others = (ast, (Vectorize(0, 16),)) if d is f32 else (legalize(ast, scales=False).ast, opts)
    np.testing.assert_array_equal(
        run_with(ast, [np.zeros_like(x), x], opts), run_with(other, [np.zeros_like(x), x], others)
    )


@pytest.mark.parametrize("pixels", [3, 4, 6, 7, 9, 11, 16, 20])
@pytest.mark.parametrize("channels", [16, 21, 40])
def test_stores_across_memory_are_turned(pixels: int, channels: int) -> None:
    """out[c, x] = a[c] * b[x] with vectors along c: of several x in a tile, vectors along x are stored."""
    c, x = loop(channels, 0), loop(pixels, 1)
    ast = sink(store(0, add(mul(c, pixels), x), load(1, c).alu(Ops.MUL, load(2, x)), c, x))
    data = [
        np.zeros((channels, pixels), np.float32),
        np.arange(channels, dtype=np.float32),
        np.arange(pixels, dtype=np.float32),
    ]
    opts = (Vectorize(0, 16), Tile(1, pixels), Parallel(1))
    program = Prepared("k", ast, tuple(opts)).program()
    scattered = [x for x in program.insts if x.op is Low.STORE and x.src[1].lanes > 1]
    assert len(scattered) <= 2 * 2  # (at most two positions are left over, of two vectors)
    with Context(CHECK_OOB=1):
        np.testing.assert_array_equal(run_with(ast, data, opts), np.outer(data[1], data[2]))


def test_short_loops_of_a_strided_result_are_in_the_tile() -> None:
    """The gradient of a max pool: vectors along images or pixels, 3 x 3 results of each side by side."""
    i, k, r = loop(320, 0), loop(3, 1), red(3, 2)
    top = reduce(load(1, add(mul(i, 3), r)), r, op=Ops.MAX)
    ast = sink(store(0, add(mul(i, 3), k), load(1, add(mul(i, 3), k)).alu(Ops.SUB, top), i, k))
    opts = prepare(ast, host_target().machine).opts
    assert Vectorize(0, LANES) in opts and Tile(1, 3) in opts and Unroll(2, 3) in opts
    x = np.random.default_rng(0).standard_normal((320, 3)).astype(np.float32)
    np.testing.assert_array_equal(run_with(ast, [np.zeros_like(x), x], opts), x - x.max(1, keepdims=True))
