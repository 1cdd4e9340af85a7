"""Which lists of Opts are legal, their canonical form, and what the search tries next."""

from __future__ import annotations

import ctypes
import itertools
import re

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from manygrad import Tensor
from manygrad.runtime.codegen.analysis.describe import signature
from manygrad.runtime.codegen.kernel.dots import use_dots
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
from manygrad.tensor.dtype import dtypes
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
    loop,
    mul,
    red,
    reduce,
    run,
    sink,
    store,
)
from tests.runtime.codegen.test_opts import SETTINGS, rows_plus_columns, run_with, softmax_gradient


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


def set_in_parts(more: int = 0, n: int = 8, m: int = 16, size: int = 5) -> UOp:
    """out[p[i, j], j] = x[i, j] by parts of `size` of its rows, each of which stores what is for one of its rows, or of
    `more` after them."""
    parts = -(-n // size)
    part, i, j = loop(parts, 0), loop(n, 1), loop(m, 2)
    at = load(2, add(mul(i, m), j), dtypes.int64).cast(dtypes.index)
    begin = mul(part, size)
    mine = add(begin, -1).alu(Ops.CMPLT, at).alu(Ops.AND, at.alu(Ops.CMPLT, add(begin, size + more)))
    inside = I(-1).alu(Ops.CMPLT, at).alu(Ops.AND, at.alu(Ops.CMPLT, I(n)))
    value = load(1, add(mul(i, m), j))
    return sink(store(0, add(mul(at, m), j), value, part, i, j, valid=inside.alu(Ops.AND, mine), arg="set"))


@settings(SETTINGS, max_examples=60)
@given(st.data())
def test_stores_in_order(data: st.DataObject) -> None:
    """Whatever list is legal, the last value stays, as in PYTHON; and "add" keeps its bits."""
    where = data.draw(st.sampled_from(["anywhere", "rows", "columns", "parts"]))
    n, m = data.draw(st.sampled_from([1, 5, 8, 33])), data.draw(st.sampled_from([3, 16, 40, 200]))
    ast = set_in_parts(data.draw(st.sampled_from([0, 0, 2])), n, m) if where == "parts" else set_at(where, n, m)
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
                    Reorder(2, 1),
                    Vectorize(2, 8),
                    Tile(2, 8),
                    Parallel(1),
                    Parallel(2),
                ]
            ),
            max_size=6,
        )
    ):
        opts = (*opts, opt) if legal(signature(ast), (*opts, opt)) is None else opts
    want = run(ast, arrays)[0]
    np.testing.assert_array_equal(run_with(ast, arrays, opts, simplify=False), want, str(opts))
    np.testing.assert_array_equal(run(ast, arrays, device="CPU")[0], want)


SET_IN_PARTS, SET_IN_PARTS_THAT_MEET = set_in_parts(), set_in_parts(1)
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
        (SCATTER, [ALL], "iterations of loop 0 may store to one address"),
        (SCATTER, [Reorder(1, 0), ALL], "iterations of loop 0 may store to one address"),
        (SET_IN_PARTS, [Reorder(2, 1), ALL, Vectorize(2, 8)], None),
        (SET_IN_PARTS, [ALL], "iterations of loop 1 may store to one address"),
        (SET_IN_PARTS_THAT_MEET, [FIRST], "iterations of loop 0 may store to one address"),
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
