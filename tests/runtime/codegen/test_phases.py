"""Loops split by the phase of a condition, and iterations that a condition leaves out."""

from __future__ import annotations

import numpy as np
import pytest

from manygrad.runtime.codegen.analysis.describe import part_held, signature
from manygrad.runtime.codegen.kernel.split_phases import phased_loops, split_phases
from manygrad.runtime.codegen.lowered import Low
from manygrad.runtime.codegen.opts import (
    Block,
    CacheRead,
    Opt,
    Parallel,
    ReduceBlock,
    Reorder,
    Skip,
    Tile,
    Unroll,
    Vectorize,
    legal,
)
from manygrad.runtime.codegen.pipeline import Prepared, prepare
from manygrad.runtime.codegen.target import Machine
from manygrad.runtime.devices import get_device
from manygrad.runtime.devices.target import host_target
from manygrad.tensor.environment import Context
from manygrad.tensor.uop.ops import Ops
from manygrad.tensor.uop.uop import UOp
from tests.runtime.codegen.kernels import I, add, load, loop, mul, red, reduce, run, sink, store

OUT, IN = 20, 9


def input_gradient(size: int, stride: int, taps: int = 3, batch: int = 8, out: int = OUT) -> UOp:
    """out[b, c, x] = sum over o, k of g[b, o, (x + k - 1) / stride] * w[o, c, k],
    where that divides and lies inside."""
    b, c, x = loop(batch, 0), loop(out, 1), loop(size, 2)
    o, k = red(IN, 3), red(taps, 4)
    at = add(x, k, -1)
    small = -(-size // stride)
    shifted = add(x, k, stride * taps - 1)  # the same phase, not negative
    valid = I(-1).alu(Ops.CMPLT, at).alu(Ops.AND, at.alu(Ops.CMPLT, I(stride * small)))
    valid = valid.alu(Ops.AND, shifted.alu(Ops.MOD, I(stride)).alu(Ops.CMPLT, I(1)))
    pixel = add(shifted.alu(Ops.IDIV, I(stride)), -taps)
    g = load(1, add(mul(b, IN * small), mul(o, small), pixel), valid=valid)
    w = load(2, add(mul(o, out * taps), mul(c, taps), k))
    return sink(store(0, add(mul(b, out * size), mul(c, size), x), reduce(g.alu(Ops.MUL, w), o, k), b, c, x))


def arrays(size: int, stride: int, taps: int = 3, batch: int = 8, out: int = OUT) -> list[np.ndarray]:
    rng = np.random.default_rng(0)
    shapes = ((batch, out, size), (batch, IN, -(-size // stride)), (IN, out, taps))
    return [rng.standard_normal(s).astype(np.float32) for s in shapes]


def on_cpu(ast: UOp, data: list[np.ndarray], opts: tuple[Opt, ...] | None = None, simplify: bool = True) -> np.ndarray:
    device = get_device("CPU")
    handles = [device.alloc(x.nbytes) for x in data]
    for handle, x in zip(handles, data):
        device.copyin(handle, memoryview(x).cast("B"))
    device.compile_with(ast, opts, simplify)(handles)
    out = np.empty_like(data[0])
    device.copyout(memoryview(out).cast("B"), handles[0])
    return out


@pytest.mark.parametrize("stride", [1, 2, 3])
@pytest.mark.parametrize("size", [2, 6, 12, 30])
def test_gradient_of_a_strided_convolution(size: int, stride: int) -> None:
    ast, data = input_gradient(size, stride), arrays(size, stride)
    np.testing.assert_allclose(on_cpu(ast, data), run(ast, data)[0], rtol=1e-4, atol=1e-5)
    split = split_phases(ast)
    np.testing.assert_array_equal(run(split, data)[0], run(ast, data)[0])
    sizes = [r.src[0].arg for r in signature(split).loops]
    assert sizes == ([8, OUT, stride, size // stride] if size > stride > 1 else [8, OUT, size])


def test_what_no_phase_has_is_not_computed() -> None:
    """Of 3 taps an even or odd pixel has 2 or 1: the heuristic skips the others."""
    prepared = prepare(input_gradient(12, 2), host_target().machine)
    assert Skip(4) in prepared.opts
    assert Skip(4) not in prepare(input_gradient(12, 1), host_target().machine).opts  # (one in 18 at an edge)


def test_a_size_that_the_period_does_not_divide_stays() -> None:
    ast = input_gradient(9, 2)
    assert phased_loops(signature(ast)) == {} and split_phases(ast) is ast


@pytest.mark.parametrize("tiles", [(), (Tile(2, 2),), (Tile(0, 4), Unroll(4, 3)), (Vectorize(2, 4),)])
def test_skip_with_any_tile(tiles: tuple[Opt, ...]) -> None:
    """Where a tile does not agree on a condition, nothing is skipped; the result is the same."""
    for size, stride in ((2, 1), (6, 2), (12, 3)):
        ast, data = split_phases(input_gradient(size, stride)), arrays(size, stride)
        opts = (*tiles, Skip(4), Parallel(1))
        want = run(ast, data)[0]
        np.testing.assert_allclose(on_cpu(ast, data, opts, simplify=False), want, rtol=1e-4, atol=1e-5)
        packed = (Vectorize(1, 16), Reorder(1, 0), CacheRead(signature(ast).loops[-1].arg.id, 1), *opts)
        if not any(o.kind == "vectorize" for o in tiles) and legal(signature(ast), packed) is None:
            np.testing.assert_allclose(on_cpu(ast, data, packed, simplify=False), want, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    "tiles",
    [
        (),
        (Tile(2, 6),),
        (Tile(2, 6), Unroll(4, 3)),
        (Vectorize(1, 16), Unroll(4, 3)),
    ],
)
def test_nothing_is_read_where_nothing_is_added(tiles: tuple[Opt, ...]) -> None:
    """What a condition guards is read under it, not before: no access is outside of its buffer."""
    ast, data = input_gradient(6, 1), arrays(6, 1)
    with Context(CHECK_OOB=1):
        got = on_cpu(ast, data, (*tiles, Skip(4), Parallel(1)), simplify=False)
    np.testing.assert_allclose(got, run(ast, data)[0], rtol=1e-4, atol=1e-5)


def test_a_tile_of_whole_rows_knows_its_edges() -> None:
    """Of 6 pixels x 3 taps, 2 lie outside: with all of them in one tile, 16 FMAs are made."""
    opts = (Vectorize(1, 16), Tile(2, 6), Unroll(4, 3), Skip(4))
    ast = input_gradient(6, 1)
    program = Prepared("k", ast, tuple(opts)).program()
    assert sum(x.op is Low.FMA for x in program.insts) == 2 * 16  # (the last vector of OUT is a partial one)
    assert not any(x.op is Low.IF for x in program.insts)


@pytest.mark.parametrize("size", [4, 6])
def test_a_row_of_an_image_is_read_where_it_lies(size: int) -> None:
    """A tile has all pixels of a row: what is masked is known, so nothing is packed for it."""
    ast, data = input_gradient(size, 1, out=64), arrays(size, 1, out=64)
    opts = prepare(ast, Machine(vector_bytes=64, registers=32)).opts
    assert Tile(2, size) in opts and Skip(4) in opts
    assert [o.argument for o in opts if o.kind == "cache_read"] == [2]
    with Context(CHECK_OOB=1):
        np.testing.assert_allclose(on_cpu(ast, data, opts), run(ast, data)[0], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("tile", [3, 5, 10])
def test_versions_by_where_a_tile_lies(tile: int) -> None:
    """A tile of some pixels of a row asks once where it lies, then knows which taps count."""
    opts = (
        Vectorize(1, 16),
        Tile(2, tile),
        Unroll(4, 3),
        Skip(4),
        Parallel(2),
    )
    ast, data = input_gradient(14, 1), arrays(14, 1)
    program = Prepared("k", ast, tuple(opts)).program()
    innermost = {
        max(i for i in range(at) if program.insts[i].op is Low.LOOP)
        for at, x in enumerate(program.insts)
        if x.op is Low.FMA
    }
    inside = [
        program.insts[i].op
        for begin in innermost
        for i in range(begin, next(j for j in range(begin, len(program.insts)) if program.insts[j].op is Low.END))
    ]
    assert len(innermost) >= 2 and Low.IF not in inside
    with Context(CHECK_OOB=1):
        np.testing.assert_array_equal(on_cpu(ast, data, opts, simplify=False), on_cpu(ast, data, (), simplify=False))


def test_skip_is_for_sums() -> None:
    x, k = loop(4, 0), red(3, 1)
    ast = sink(store(0, x, reduce(load(1, add(x, k), valid=add(x, k).alu(Ops.CMPLT, I(4))), k, op=Ops.MAX), x))
    assert "no sum" in (legal(signature(ast), (Skip(1),)) or "")


def test_part_held() -> None:
    x, k = loop(8, 0), red(4, 1)
    assert part_held(x.alu(Ops.CMPLT, I(2))) == 0.25
    assert part_held(add(x, k).alu(Ops.MOD, I(2)).alu(Ops.CMPLT, I(1))) == 0.5
    assert part_held(add(x, mul(loop(1 << 20, 2), 8)).alu(Ops.CMPLT, I(2))) == 1.0


def weights_gradient(batch: int, filters: int, channels: int, size: int, taps: int = 3) -> UOp:
    """out[o, c, k] = sum over b, x of g[b, o, x] * a[b, c, x + k - 1], where that lies inside."""
    o, c, k, b, x = loop(filters, 0), loop(channels, 1), loop(taps, 2), red(batch, 3), red(size, 4)
    at = add(x, k, -1)
    valid = I(-1).alu(Ops.CMPLT, at).alu(Ops.AND, at.alu(Ops.CMPLT, I(size)))
    a = load(1, add(mul(b, channels * size), mul(c, size), at), valid=valid)
    g = load(2, add(mul(b, filters * size), mul(o, size), x))
    return sink(store(0, add(mul(o, channels * taps), mul(c, taps), k), reduce(g.alu(Ops.MUL, a), b, x), o, c, k))


def test_a_panel_larger_than_the_cache_is_packed_in_blocks_of_the_reduction() -> None:
    machine = Machine(vector_bytes=64, registers=32, cache_bytes=1 << 16, cores=2)
    ast = weights_gradient(6, 32, 3, 300)
    opts = prepare(ast, machine).opts
    assert Vectorize(0, 16) in opts and CacheRead(0, 2) in opts and Block(0, 1) in opts
    assert [o for o in opts if o.kind == "reduce_block"] == [ReduceBlock(3, 1)]
    rng = np.random.default_rng(0)
    data = [
        np.zeros((32, 3, 3), np.float32),
        *(rng.standard_normal(s).astype(np.float32) for s in ((6, 3, 300), (6, 32, 300))),
    ]
    with Context(CHECK_OOB=1):
        np.testing.assert_allclose(on_cpu(ast, data, opts), run(ast, data)[0], rtol=1e-4, atol=1e-3)


@pytest.mark.parametrize("size", [12, 16, 56, 300])
def test_the_order_of_a_weights_gradient_is_the_same_for_any_batch(size: int) -> None:
    for filters in (4, 16, 40):
        lanes = {
            tuple(
                o for o in prepare(weights_gradient(b, filters, 3, size), Machine(64, 32)).opts if o.kind == "rfactor"
            )
            for b in (2, 3, 64, 4096)
        }
        assert len(lanes) == 1


@pytest.mark.parametrize("others", ["a choice", "a sum beside it", "a product beside it"])
def test_what_is_packed_is_all_that_is_read(others: str) -> None:
    """A factor that is masked out is left unpacked only where every sum that may read it skips it."""
    i, j, k = loop(4, 0), loop(32, 1), red(9, 2)
    b = load(2, add(mul(k, 32), j), valid=I(3).alu(Ops.CMPLT, k))
    a, at = load(1, add(mul(i, 9), k)), add(mul(i, 32), j)
    zero = UOp.const(b.dtype, 0.0)
    total = {
        "a choice": lambda: reduce(k.alu(Ops.CMPLT, add(i, 6)).alu(Ops.WHERE, b, zero), k),
        "a sum beside it": lambda: reduce(a.alu(Ops.MUL, b), k).alu(Ops.ADD, reduce(a, k)),
        "a product beside it": lambda: reduce(a.alu(Ops.MUL, b), k).alu(Ops.MAX, reduce(a.alu(Ops.MUL, a), k)),
    }[others]()
    ast, rng = sink(store(0, at, total, i, j)), np.random.default_rng(0)
    data = [rng.integers(-4, 4, s).astype(np.float32) for s in ((4, 32), (4, 9), (9, 32))]
    want = run(ast, data)[0]
    every = sink(store(0, at, reduce(a.alu(Ops.MUL, load(2, add(mul(k, 32), j))), k), i, j))
    for more in (
        (),
        (Vectorize(1, 16),),
        (Vectorize(1, 16), Unroll(2, 9)),
        (Vectorize(1, 16), Tile(0, 2), Parallel(1)),
    ):
        opts = (*more, Skip(2), CacheRead(1, 2))
        assert legal(signature(ast), opts) is None, opts
        for _ in range(3):  # (whatever local memory holds: what another kernel has packed there, too)
            on_cpu(every, data, (*more, CacheRead(1, 2)), simplify=False)
            np.testing.assert_array_equal(on_cpu(ast, data, opts, simplify=False), want, err_msg=str(opts))
