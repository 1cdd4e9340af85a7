"""Random small kernels: CPU, under the heuristic's and under random optimisations, computes what PYTHON computes."""

from __future__ import annotations

import numpy as np
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from manygrad.runtime.codegen.analysis.describe import signature
from manygrad.runtime.codegen.opts import (
    Block,
    CacheRead,
    Opt,
    Parallel,
    Prefetch,
    ReduceBlock,
    Reorder,
    Tile,
    Unroll,
    Vectorize,
    legal,
)
from manygrad.runtime.devices import get_device
from manygrad.tensor.dtype import dtypes
from manygrad.tensor.environment import Context
from manygrad.tensor.uop.intervals import bounds
from manygrad.tensor.uop.ops import Ops
from manygrad.tensor.uop.uop import UOp
from tests.runtime.codegen.kernels import I, add, f32, gemm, load, loop, mul, red, reduce, run, sink, store

SETTINGS = settings(
    max_examples=60,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
)


@st.composite
def kernels(draw: st.DrawFn) -> tuple[UOp, list[np.ndarray]]:
    """One or two loops, up to two reduces, inputs with random strides, masks, gathers and reshapes."""
    loops = [loop(draw(st.sampled_from([1, 2, 5, 16, 17, 33, 70])), n) for n in range(draw(st.integers(1, 3)))]
    while int(np.prod([r.src[0].arg for r in loops])) > 4000:
        loops.pop()
    reduces = [red(draw(st.sampled_from([1, 2, 3, 16, 21, 40])), 10 + n) for n in range(draw(st.integers(0, 2)))]
    slots: list[np.ndarray] = []
    rng = np.random.default_rng(draw(st.integers(0, 1000)))

    def offset(ranges: list[UOp]) -> UOp:
        terms: list[UOp | int] = [draw(st.integers(0, 3))]
        stride = 1
        for r in draw(st.permutations(ranges)):
            kind = draw(st.sampled_from(["affine", "affine", "affine", "skip", "div", "mod", "flip"]))
            size = r.src[0].arg
            if kind == "affine":
                terms.append(mul(r, stride))
            elif kind == "div":
                terms.append(
                    mul(add(r, draw(st.integers(0, 3))).alu(Ops.IDIV, I(draw(st.sampled_from([2, 3, 16, 32])))), stride)
                )
            elif kind == "mod":
                terms.append(
                    mul(
                        add(mul(r, draw(st.integers(1, 2))), draw(st.integers(0, 17))).alu(
                            Ops.MOD, I(draw(st.sampled_from([3, 8, 16, 32])))
                        ),
                        stride,
                    )
                )
            elif kind == "flip":
                terms.append(mul(add(size - 1, r.alu(Ops.NEG)), stride))
            stride *= size + draw(st.integers(0, 1))
        found = add(*terms)
        assume(bounds(found)[1] < 200_000)  # a remainder may be larger than its range
        return found

    def condition(ranges: list[UOp]) -> UOp:
        r = draw(st.sampled_from(ranges))
        limit = I(draw(st.integers(0, r.src[0].arg)))
        kind = draw(st.sampled_from(["below", "above", "even", "equal"]))
        if kind == "below":
            return r.alu(Ops.CMPLT, limit)
        if kind == "above":
            return limit.alu(Ops.CMPLT, r)
        return (r.alu(Ops.MOD, I(2)) if kind == "even" else r).alu(Ops.CMPEQ, I(0) if kind == "even" else limit)

    def new_slot(extent: int, integer: bool = False) -> int:
        slots.append(rng.integers(0, 50, extent) if integer else (rng.integers(-8, 9, extent) / 4).astype(np.float32))
        return len(slots)

    def leaf(ranges: list[UOp]) -> UOp:
        kind = draw(st.sampled_from(["load", "load", "load", "masked", "gather", "index", "const"]))
        if kind == "const":
            return UOp.const(f32, draw(st.sampled_from([0.5, -2.0, 3.0])))
        if kind == "index":
            return draw(st.sampled_from(ranges)).cast(f32)
        if kind == "gather":
            at = load(new_slot(200_000, True), offset(ranges), dtypes.int64).cast(dtypes.index)
            return load(new_slot(50), at)
        valid = condition(ranges) if kind == "masked" else None
        return load(new_slot(200_000), offset(ranges), valid=valid)

    def value(ranges: list[UOp], depth: int) -> UOp:
        if depth == 0:
            return leaf(ranges)
        op = draw(st.sampled_from([Ops.ADD, Ops.MUL, Ops.MAX, Ops.SUB, Ops.WHERE]))
        a, b = value(ranges, depth - 1), value(ranges, depth - 1)
        return condition(ranges).alu(Ops.WHERE, a, b) if op is Ops.WHERE else a.alu(op, b)

    out = value(loops, 1)
    for n, r in enumerate(reduces):
        scope = loops if n == 0 or draw(st.booleans()) else loops[:1]
        inner = value([*scope, r], draw(st.integers(0, 2)))
        if n == 1 and draw(st.booleans()):  # reads the reduction before it
            inner = inner.alu(Ops.ADD, out) if draw(st.booleans()) else inner.alu(Ops.MAX, out)
        out = out.alu(
            draw(st.sampled_from([Ops.ADD, Ops.MAX])), reduce(inner, r, op=draw(st.sampled_from([Ops.ADD, Ops.MAX])))
        )
    target: list[UOp | int] = []
    stride = 1
    for r in draw(st.permutations(loops)):
        target.append(mul(r, stride))
        stride *= r.src[0].arg + draw(st.integers(0, 1))
    valid = condition(loops) if draw(st.booleans()) else None
    return sink(store(0, add(*target), out, *loops, valid=valid)), [np.full(stride, 9, np.float32), *slots]


@st.composite
def random_opts(draw: st.DrawFn, ast: UOp) -> tuple[Opt, ...]:
    """Any legal plan that is not the heuristic's."""
    sig = signature(ast)
    opts: list[Opt] = []
    vectorized = draw(st.sampled_from([None, *sig.loops]))
    for r in sig.loops:
        lanes = draw(st.sampled_from([2, 4, 16])) if r is vectorized else 1
        if lanes > 1:
            opts.append(Vectorize(r.arg.id, lanes))
        tile = lanes * draw(st.integers(1, 3))
        if tile > 1:
            opts.append(Tile(r.arg.id, tile))
    for u in sig.reduces:
        for r in u.src[1:]:
            if draw(st.booleans()) and r is u.src[-1]:
                opts.append(Unroll(r.arg.id, draw(st.sampled_from([2, 3]))))
    opts.append(Parallel(draw(st.integers(0, len(sig.loops)))))
    return tuple(opts)


def close(got: list[np.ndarray], want: list[np.ndarray]) -> None:
    np.testing.assert_allclose(got[0], want[0], rtol=2e-4, atol=2e-3)


@SETTINGS
@given(kernels())
def test_heuristic(kernel: tuple[UOp, list[np.ndarray]]) -> None:
    with Context(CACHE=0):
        close(run(*kernel, device="CPU"), run(*kernel))


@SETTINGS
@given(st.data())
def test_any_opts_of_a_product(data: st.DataObject) -> None:
    """Tiles, packing of either operand, and blocks of any size, in every order of the loops."""
    size = st.sampled_from([1, 5, 16, 17, 40, 65])
    m, n, k = data.draw(size), data.draw(size), data.draw(size)
    ast = gemm(m, n, k, data.draw(st.sampled_from(["NN", "NT", "TN", "TT"])))
    lanes = data.draw(st.sampled_from([4, 16]))
    opts = [
        Vectorize(1, lanes),
        Tile(1, lanes * data.draw(st.integers(1, 2))),
        Tile(0, data.draw(st.integers(1, 3))),
    ]
    columns_first = data.draw(st.booleans())
    if columns_first:
        opts.append(Reorder(1, 0))
    if data.draw(st.booleans()):
        opts.append(CacheRead(1, 2) if columns_first else CacheRead(0, 1))
    unroll = data.draw(st.sampled_from([1, 2]))
    opts.append(Unroll(2, unroll))
    if data.draw(st.booleans()):
        inner = data.draw(st.booleans())
        opts.append(Block(0 if columns_first == inner else 1, data.draw(st.integers(1, 5))))
        parts = data.draw(st.booleans())
        if parts:
            opts.append(ReduceBlock(2, unroll * data.draw(st.sampled_from([1, 4, 7]))))
        opts.append(Parallel(2 if inner or not parts else 1))
        both = [*opts, CacheRead(0, 1), CacheRead(1, 2)]
        if data.draw(st.booleans()) and legal(signature(ast), tuple(both)) is None:
            opts = both
    else:
        opts.append(Parallel(data.draw(st.integers(0, 2))))
    ahead = [*opts, Prefetch(2, data.draw(st.sampled_from([1, 2])))]
    if data.draw(st.booleans()) and legal(signature(ast), tuple(ahead)) is None:
        opts = ahead
    rng = np.random.default_rng(0)
    arrays = [rng.integers(-8, 9, s).astype(np.float32) for s in ((m, n), m * k, k * n)]
    device = get_device("CPU")
    with Context(CACHE=0):
        kernel = device.compile_with(ast, tuple(opts), simplify=False)
        handles = [device.alloc(a.nbytes) for a in arrays]
        for h, a in zip(handles, arrays):
            device.copyin(h, memoryview(a))
        kernel(handles)
        got = device.as_numpy(handles[0], arrays[0].nbytes).view(np.float32).reshape(m, n).copy()
        for h, a in zip(handles, arrays):
            device.free(h, a.nbytes)
    np.testing.assert_array_equal(got, run(ast, arrays)[0])


@SETTINGS
@given(st.data())
def test_any_opts(data: st.DataObject) -> None:
    ast, arrays = data.draw(kernels())
    opts = data.draw(random_opts(ast))
    device = get_device("CPU")
    with Context(CACHE=0):
        kernel = device.compile_with(ast, opts, simplify=False)
        handles = [device.alloc(a.nbytes) for a in arrays]
        for h, a in zip(handles, arrays):
            device.copyin(h, memoryview(a))
        kernel(handles)
        got = device.as_numpy(handles[0], arrays[0].nbytes).view(np.float32).copy()
        for h, a in zip(handles, arrays):
            device.free(h, a.nbytes)
    close([got], run(ast, arrays))
