"""Hand-built kernel ASTs for the tests of the kernel compiler and of the devices."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import numpy as np

from manygrad.runtime.codegen.opts import Opts
from manygrad.runtime.devices import get_device
from manygrad.tensor.dtype import DType, dtypes
from manygrad.tensor.environment import Context
from manygrad.tensor.uop.args import RangeArg, VarArg
from manygrad.tensor.uop.ops import Ops
from manygrad.tensor.uop.uop import UOp

f32 = dtypes.float32
RNG = np.random.default_rng(0)
SIZES = (1, 3, 16, 17, 63, 1023)


def I(value: int | UOp) -> UOp:  # noqa: E743
    return UOp.const(dtypes.index, value) if isinstance(value, int) else value


def add(*terms: int | UOp) -> UOp:
    out = I(terms[0])
    for t in terms[1:]:
        out = out.alu(Ops.ADD, I(t))
    return out


def mul(a: UOp, b: int | UOp) -> UOp:
    return a.alu(Ops.MUL, b if isinstance(b, UOp) else UOp.const(a.dtype, b))


def loop(size: int | UOp, id: int) -> UOp:
    return UOp(Ops.RANGE, dtypes.index, (I(size),), RangeArg(id, "loop"))


def red(size: int | UOp, id: int) -> UOp:
    return UOp(Ops.RANGE, dtypes.index, (I(size),), RangeArg(id, "reduce"))


def index(slot: int, dtype: DType, offset: int | UOp, valid: UOp | None = None) -> UOp:
    src = (UOp(Ops.PARAM, dtype, (), slot), I(offset)) + (() if valid is None else (valid,))
    return UOp(Ops.INDEX, dtype, src)


def load(slot: int, offset: int | UOp, dtype: DType = f32, valid: UOp | None = None) -> UOp:
    return UOp(Ops.LOAD, dtype, (index(slot, dtype, offset, valid),))


def reduce(value: UOp, *ranges: UOp, op: Ops = Ops.ADD) -> UOp:
    return UOp(Ops.REDUCE, value.dtype, (value, *ranges), op)


def store(
    slot: int, offset: int | UOp, value: UOp, *loops: UOp, valid: UOp | None = None, arg: str | None = None
) -> UOp:
    return UOp(Ops.STORE, dtypes.void, (index(slot, value.dtype, offset, valid), value, *loops), arg)


def sink(*stores: UOp) -> UOp:
    return UOp(Ops.SINK, dtypes.void, stores)


def elementwise(f: Callable[..., UOp], inputs: Sequence[DType], size: int) -> UOp:
    """out[i] = f(in1[i], in2[i], ...)."""
    i = loop(size, 0)
    return sink(store(0, i, f(*(load(n + 1, i, d) for n, d in enumerate(inputs))), i))


def count(step: int, most: int) -> UOp:
    """A number that only a variable says: `step` times as much."""
    return mul(UOp(Ops.DEFINE_VAR, dtypes.index, (), VarArg("n", 1, most)), step)


def gemm(
    m: int,
    n: int,
    k: int | UOp,
    layout: str = "NN",
    dtype: DType = f32,
    epilogue: Callable[[UOp, UOp, UOp], UOp] | None = None,
) -> UOp:
    """c[m, n] = sum over k of a b; `layout` letter T: that operand is stored transposed."""
    im, jn, rk = loop(m, 0), loop(n, 1), red(k, 2)
    a = load(1, add(mul(im, k), rk) if layout[0] == "N" else add(mul(rk, m), im), dtype)
    b = load(2, add(mul(rk, n), jn) if layout[1] == "N" else add(mul(jn, k), rk), dtype)
    acc = f32 if dtype.is_half else dtype
    value = reduce(a.cast(acc).alu(Ops.MUL, b.cast(acc)), rk).cast(dtype)
    if epilogue is not None:
        value = epilogue(value, im, jn)
    return sink(store(0, add(mul(im, n), jn), value, im, jn))


def gemm_in_blocks(m: int, n: int, k: int, levels: int = 2) -> UOp:
    """c[m, n] = a.T b, the sum over k taken in 2 ** levels blocks of rows, which are added in pairs, and these."""
    im, jn, rk = loop(m, 0), loop(n, 1), red(k, 2 + levels)
    halves = [red(2, 2 + i) for i in range(levels)]
    row = add(*(mul(h, k << levels - 1 - i) for i, h in enumerate(halves)), rk)
    value = reduce(load(1, add(mul(row, m), im)).alu(Ops.MUL, load(2, add(mul(row, n), jn))), rk)
    for h in reversed(halves):
        value = reduce(value, h)
    return sink(store(0, add(mul(im, n), jn), value, im, jn))


def two_products(m: int, n: int, k: int) -> UOp:
    """c[m, n] = (a @ b.T) * (a @ d.T), both sums over the same range."""
    im, jn, rk = loop(m, 0), loop(n, 1), red(k, 2)
    a, b, d = load(1, add(mul(im, k), rk)), load(2, add(mul(jn, k), rk)), load(3, add(mul(jn, k), rk))
    sums = [reduce(a.alu(Ops.MUL, v), rk) for v in (b, d)]
    return sink(store(0, add(mul(im, n), jn), sums[0].alu(Ops.MUL, sums[1]), im, jn))


def logsumexp(m: int, n: int, guarded: bool = False, d: DType = f32) -> UOp:
    """`guarded`: 0 is taken in place of a maximum that is not finite, as `Tensor.logsumexp` does."""
    i, k, j = loop(m, 0), red(n, 1), red(n, 2)
    top = reduce(load(1, add(mul(i, n), k), d), k, op=Ops.MAX)
    if guarded:
        inf = [top.alu(Ops.CMPEQ, UOp.const(d, v)) for v in (math.inf, -math.inf)]
        top = (
            top.alu(Ops.CMPNE, top)
            .alu(Ops.OR, inf[0].alu(Ops.OR, inf[1]))
            .alu(Ops.NOT)
            .alu(Ops.WHERE, top, UOp.const(d, 0.0))
        )
    total = reduce(load(1, add(mul(i, n), j), d).alu(Ops.SUB, top).alu(Ops.EXP), j)
    return sink(store(0, i, total.alu(Ops.LOG).alu(Ops.ADD, top), i))


def bytes_product(
    m: int,
    n: int,
    k: int,
    layout: str = "NN",
    types: tuple[DType, DType] = (dtypes.int8, dtypes.int8),
    padded: bool = False,
    scaled: bool = False,
) -> UOp:
    """c[m, n] = sum over k of a b in int32; the first and the last column of a left out;
    as float32, scaled for each column."""
    i, j, r = loop(m, 0), loop(n, 1), red(k, 2)
    valid = I(0).alu(Ops.CMPLT, r).alu(Ops.AND, r.alu(Ops.CMPLT, I(k - 1))) if padded else None
    a = load(1, add(mul(i, k), r) if layout[0] == "N" else add(mul(r, m), i), types[0], valid)
    b = load(2, add(mul(r, n), j) if layout[1] == "N" else add(mul(j, k), r), types[1])
    value = reduce(a.cast(dtypes.int32).alu(Ops.MUL, b.cast(dtypes.int32)), r)
    value = value.cast(f32).alu(Ops.MUL, load(3, j)) if scaled else value
    return sink(store(0, add(mul(i, n), j), value, i, j))


def small_product(m: int, n: int, k: int, most: int) -> UOp:
    """c[m, n] = sum over k of (w[k, n] & most) * x[m, k]; w uint8, x int8, c int32."""
    i, j, r = loop(m, 0), loop(n, 1), red(k, 2)
    w = load(2, add(mul(r, n), j), dtypes.uint8).alu(Ops.AND, UOp.const(dtypes.uint8, most))
    x = load(1, add(mul(i, k), r), dtypes.int8)
    product = w.cast(dtypes.int32).alu(Ops.MUL, x.cast(dtypes.int32))
    return sink(store(0, add(mul(i, n), j), reduce(product, r), i, j))


def packed_product(m: int, groups: int, blocks: int, bits: int = 4) -> UOp:
    """c[i, g, r] = sum over blocks b of s[g, b, r] * (sum over h, k, t of w[g, b, h, k, r, t] * x[i, b, h, k, t]), the
    weights' rows r side by side: uint8 of 4 bits, h the half of a byte, or of 8; x int8, its 32 bytes in order."""
    i, g, r = loop(m, 0), loop(groups, 1), loop(16, 2)
    b, h, k, t = red(blocks, 3), red(2, 4), red(4, 5), red(4, 6)
    block = add(mul(g, blocks), b)
    if bits == 4:
        byte = load(2, add(mul(block, 256), mul(k, 64), mul(r, 4), t), dtypes.uint8)
        w = byte.alu(Ops.SHR, mul(h, 4).cast(dtypes.uint8)).alu(Ops.AND, UOp.const(dtypes.uint8, 15))
    else:
        w = load(2, add(mul(block, 512), mul(h, 256), mul(k, 64), mul(r, 4), t), dtypes.uint8)
    x = load(1, add(mul(add(mul(i, blocks), b), 32), mul(h, 16), mul(k, 4), t), dtypes.int8)
    inner = reduce(w.cast(dtypes.int32).alu(Ops.MUL, x.cast(dtypes.int32)), h, k, t)
    value = reduce(load(3, add(mul(block, 16), r)).alu(Ops.MUL, inner.cast(f32)), b)
    return sink(store(0, add(mul(i, groups * 16), mul(g, 16), r), value, i, g, r))


def packed_arrays(m: int, groups: int, blocks: int, bits: int = 4) -> list[np.ndarray]:
    """For it: bytes at the ends of their types, and scales by which results are exact."""
    x = RNG.choice([-128, -127, 127, 1], (m, blocks, 32)).astype(np.int8)
    w = RNG.choice([0, 255, 240, 15, 128], (groups, blocks, 2 if bits == 8 else 1, 4, 16, 4)).astype(np.uint8)
    scale = RNG.choice([1.0, -2.0, 0.5], (groups, blocks, 16)).astype(np.float32)
    return [np.zeros((m, groups * 16), np.float32), x, w, scale]


def packed_result(x: np.ndarray, w: np.ndarray, scale: np.ndarray) -> np.ndarray:
    numbers = np.concatenate([w & 15, w >> 4], 2) if w.shape[2] == 1 else w
    groups, blocks = w.shape[:2]
    rows = numbers.transpose(0, 4, 1, 2, 3, 5).reshape(groups * 16, blocks, 32).astype(np.int64)
    sums = np.einsum("ibk,nbk->inb", x.astype(np.int64), rows)
    return (sums * scale.transpose(0, 2, 1).reshape(groups * 16, blocks)).sum(-1)


def run(
    ast: UOp,
    arrays: Sequence[np.ndarray],
    vars: tuple[int, ...] = (),
    device: str = "PYTHON",
    opts: Opts | None = None,
) -> list[np.ndarray]:
    """Runs `ast`, with these `opts`, on copies of `arrays`; gives them back as they are afterwards."""
    dev = get_device(device)
    handles = [dev.alloc(a.nbytes) for a in arrays]
    for h, a in zip(handles, arrays):
        dev.copyin(h, memoryview(np.ascontiguousarray(a).reshape(-1).view(np.uint8)))
    kernel = dev.compile(ast) if opts is None else dev.compile_with(ast, opts)
    kernel(handles, vars, wait=True)
    out = []
    for h, a in zip(handles, arrays):
        raw = np.empty(a.nbytes, np.uint8)
        dev.copyout(memoryview(raw), h)
        out.append(raw.view(a.dtype).reshape(a.shape))
        dev.free(h, a.nbytes)
    return out


def data(d: DType, *shape: int) -> np.ndarray:
    """Values of both signs, with specials at the front for the floats."""
    if d.is_bool:
        return RNG.integers(0, 2, shape).astype(bool)
    if d.is_int:
        low, high = max(int(d.min), -(2**40)), min(int(d.max), 2**40)
        return RNG.integers(low, high, shape, endpoint=True).astype(d.np)
    out = (RNG.standard_normal(shape) * 4).astype(d.np)
    flat = out.reshape(-1)
    special = np.array([0.0, -0.0, np.inf, -np.inf, np.nan, 1e-40, 2.5, -2.5]).astype(d.np)
    flat[: min(flat.size // 2, 8)] = special[: min(flat.size // 2, 8)]
    return out


def same(got: np.ndarray, want: np.ndarray, rtol: float = 1e-5) -> None:
    if got.dtype.kind in "biu":
        np.testing.assert_array_equal(got, want)
    else:
        np.testing.assert_allclose(got.astype(np.float64), want.astype(np.float64), rtol=rtol, atol=rtol)


def agree(ast: UOp, arrays: list[np.ndarray], vars: tuple[int, ...] = (), rtol: float = 1e-5) -> list[np.ndarray]:
    """CPU with and without optimisation gives what PYTHON gives."""
    want = run(ast, arrays, vars, "PYTHON")
    for noopt in (0, 1):
        with Context(NOOPT=noopt):
            got = run(ast, arrays, vars, "CPU")
        for g, w in zip(got, want):
            same(g, w, rtol)
    return want
