"""The CPU device against the PYTHON device (the definition) and NumPy, on hand-built kernels."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from manygrad.runtime.codegen.legalize import legalize
from manygrad.runtime.devices import get_device
from manygrad.runtime.devices.target import host_target
from manygrad.tensor.dtype import DType, dtypes
from manygrad.tensor.environment import Context
from manygrad.tensor.uop.args import VarArg
from manygrad.tensor.uop.ops import Ops
from manygrad.tensor.uop.uop import UOp
from tests.runtime.codegen.kernels import (
    I,
    add,
    elementwise,
    f32,
    gemm,
    index,
    load,
    loop,
    mul,
    red,
    reduce,
    run,
    sink,
    store,
)

RNG = np.random.default_rng(0)
SIZES = (1, 3, 16, 17, 63, 1023)


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


FLOAT_OPS = [Ops.ADD, Ops.SUB, Ops.MUL, Ops.FDIV, Ops.MAX, Ops.CMPLT, Ops.CMPNE, Ops.CMPEQ]
INT_OPS = [
    Ops.ADD,
    Ops.SUB,
    Ops.MUL,
    Ops.IDIV,
    Ops.MOD,
    Ops.MAX,
    Ops.CMPLT,
    Ops.CMPNE,
    Ops.CMPEQ,
    Ops.AND,
    Ops.OR,
    Ops.XOR,
    Ops.SHL,
    Ops.SHR,
]
BOOL_OPS = [Ops.ADD, Ops.MUL, Ops.MAX, Ops.CMPLT, Ops.CMPNE, Ops.CMPEQ, Ops.AND, Ops.OR, Ops.XOR]


@pytest.mark.parametrize("d", dtypes.all, ids=lambda d: d.name)
def test_binary(d: DType) -> None:
    ops = FLOAT_OPS if d.is_float else BOOL_OPS if d.is_bool else INT_OPS
    n = 331
    a, b = data(d, n), data(d, n)
    if d.is_int:
        edge = np.array([0, 1, int(d.max), int(d.min)] + ([-1] if not d.is_unsigned else [])).astype(d.np)
        pairs = np.array(list(itertools.product(edge, edge)))
        a[: len(pairs)], b[: len(pairs)] = pairs[:, 0], pairs[:, 1]
        b[40:200] = RNG.integers(0, d.itemsize * 8 + 3, 160).astype(d.np)
    i = loop(n, 0)
    x, y = load(len(ops), i, d), load(len(ops) + 1, i, d)
    values = [x.alu(op, y) for op in ops]
    ast = sink(*(store(k, i, v, i) for k, v in enumerate(values)))
    outs = [np.zeros(n, v.dtype.np) for v in values]
    agree(ast, [*outs, a, b], rtol=0 if not d.is_float else 1e-6)


@pytest.mark.parametrize("d", dtypes.all, ids=lambda d: d.name)
def test_unary(d: DType) -> None:
    ops = (
        [Ops.NEG, Ops.RECIP, Ops.SQRT, Ops.EXP, Ops.LOG, Ops.SIN, Ops.TRUNC]
        if d.is_float
        else [Ops.NOT]
        if d.is_bool
        else [Ops.NOT, Ops.NEG, Ops.TRUNC]
    )
    a = data(d, 100)
    i = loop(100, 0)
    ast = sink(*(store(k, i, load(len(ops), i, d).alu(op), i) for k, op in enumerate(ops)))
    agree(ast, [*(np.zeros(100, d.np) for _ in ops), a], rtol=1e-14 if d is dtypes.float64 else 1e-6)


@pytest.mark.parametrize("a", dtypes.all, ids=lambda d: d.name)
def test_cast(a: DType) -> None:
    x = data(a, 60)
    if a.is_float:
        x[8:20] = np.array([1e10, -1e10, 255.5, -128.5, 65504, 65520, 3e38, 1.0039063, 1e20, -1e20, 300, 1e-8]).astype(
            a.np
        )
    i = loop(60, 0)
    ast = sink(*(store(k, i, load(len(dtypes.all), i, a).cast(b), i) for k, b in enumerate(dtypes.all)))
    agree(ast, [*(np.zeros(60, b.np) for b in dtypes.all), x], rtol=0)


def test_float64_rounds_once_to_float16() -> None:
    x = (1 + np.arange(256) / 256.0 + 2.0**-40 * RNG.integers(-1, 2, 256)) * 2.0 ** RNG.integers(-16, 15, 256)
    i = loop(256, 0)
    got = run(
        sink(store(0, i, load(1, i, dtypes.float64).cast(dtypes.float16), i)),
        [np.zeros(256, np.float16), x],
        device="CPU",
    )[0]
    np.testing.assert_array_equal(got, x.astype(np.float16))


@pytest.mark.parametrize(
    ("a", "b"),
    [
        (f32, dtypes.int32),
        (dtypes.int64, dtypes.float64),
        (dtypes.bfloat16, dtypes.uint16),
        (dtypes.float16, dtypes.int16),
    ],
)
def test_bitcast(a: DType, b: DType) -> None:
    x = data(a, 50)
    i = loop(50, 0)
    got = run(sink(store(0, i, load(1, i, a).bitcast(b), i)), [np.zeros(50, b.np), x], device="CPU")[0]
    np.testing.assert_array_equal(got, x.view(b.np))


@pytest.mark.parametrize("n", SIZES)
def test_elementwise_sizes(n: int) -> None:
    ast = elementwise(lambda a, b, m: m.alu(Ops.WHERE, a.alu(Ops.MUL, b), a), [f32, f32, dtypes.bool], n)
    agree(ast, [np.full(n, 7, np.float32), data(f32, n), data(f32, n), data(dtypes.bool, n)])


@pytest.mark.parametrize("d", [f32, dtypes.float64, dtypes.float16, dtypes.bfloat16])
def test_fma(d: DType) -> None:
    ast = elementwise(lambda a, b, c: a.alu(Ops.FMA, b, c), [d] * 3, 50)
    agree(ast, [np.zeros(50, d.np), *(data(d, 50) for _ in range(3))], rtol=1e-2 if d.is_half else 1e-5)


def test_fma_rounds_once() -> None:
    a = np.full(20, 1 + 2.0**-12, np.float32)
    ast = elementwise(lambda a, b, c: a.alu(Ops.FMA, b, c), [f32] * 3, 20)
    got = agree(ast, [np.zeros_like(a), a, a, np.full_like(a, -1 - 2.0**-11)])[0]
    assert got.tolist() == [2.0**-24] * 20


@pytest.mark.parametrize("layout", ["NN", "NT", "TN", "TT"])
@pytest.mark.parametrize(
    "shape", [(1, 1, 1), (3, 17, 5), (17, 3, 63), (64, 48, 33), (7, 130, 1), (1, 70, 40), (70, 1, 40), (65, 66, 67)]
)
def test_gemm(layout: str, shape: tuple[int, int, int]) -> None:
    m, n, k = shape
    a, b = RNG.standard_normal((m, k)).astype(np.float32), RNG.standard_normal((k, n)).astype(np.float32)
    stored = [x if t == "N" else np.ascontiguousarray(x.T) for x, t in zip((a, b), layout)]
    agree(gemm(m, n, k, layout), [np.zeros((m, n), np.float32), *stored], rtol=1e-4)


@pytest.mark.parametrize(
    "d",
    [dtypes.float64, dtypes.float16, dtypes.bfloat16, dtypes.int32, dtypes.int8, dtypes.uint64],
    ids=lambda d: d.name,
)
def test_gemm_dtypes(d: DType) -> None:
    a, b = (data(d, 20, 20) if d.is_int else RNG.standard_normal((20, 20)).astype(d.np) for _ in range(2))
    agree(gemm(20, 20, 20, dtype=d), [np.zeros((20, 20), d.np), a, b], rtol=1e-2 if d.is_half else 1e-6)


def test_gemm_epilogue() -> None:
    def epilogue(c: UOp, m: UOp, n: UOp) -> UOp:
        biased = c.alu(Ops.ADD, load(3, n))
        return biased.alu(Ops.MAX, UOp.const(f32, 0)).alu(Ops.ADD, load(4, add(mul(m, 50), n)))

    arrays = [
        np.zeros((40, 50), np.float32),
        *(RNG.standard_normal(s).astype(np.float32) for s in ((40, 30), (30, 50), (50,), (40, 50))),
    ]
    want = np.maximum(arrays[1] @ arrays[2] + arrays[3], 0) + arrays[4]
    same(agree(gemm(40, 50, 30, epilogue=epilogue), arrays, rtol=1e-4)[0], want, 1e-4)


@pytest.mark.parametrize("op", [Ops.ADD, Ops.MUL, Ops.MAX])
@pytest.mark.parametrize(
    "d",
    [f32, dtypes.float64, dtypes.int32, dtypes.int8, dtypes.uint8, dtypes.bool, dtypes.bfloat16],
    ids=lambda d: d.name,
)
@pytest.mark.parametrize("order", ["row", "column", "all", "middle"])
def test_reduce(op: Ops, d: DType, order: str) -> None:
    for a, b in ((5, 37), (33, 3), (19, 100)):
        x = data(d, a, b) if not d.is_float else (RNG.standard_normal((a, b)) * 0.1 + 1).astype(d.np)
        if order == "all":
            r, s = red(a, 1), red(b, 2)
            ast, out = sink(store(0, 0, reduce(load(1, add(mul(r, b), s), d), r, s, op=op))), np.zeros(1, d.np)
        elif order == "row":
            i, r = loop(a, 0), red(b, 1)
            ast, out = sink(store(0, i, reduce(load(1, add(mul(i, b), r), d), r, op=op), i)), np.zeros(a, d.np)
        elif order == "column":
            i, r = loop(b, 0), red(a, 1)
            ast, out = sink(store(0, i, reduce(load(1, add(mul(r, b), i), d), r, op=op), i)), np.zeros(b, d.np)
        else:
            i, j, r = loop(1, 0), loop(b, 2), red(a, 1)
            ast, out = (
                sink(store(0, add(mul(i, b), j), reduce(load(1, add(mul(r, b), j), d), r, op=op), i, j)),
                np.zeros(b, d.np),
            )
        agree(ast, [out, x], rtol=2e-2 if d.is_half else 1e-4)


def test_max_propagates_nan() -> None:
    x = RNG.standard_normal((6, 40)).astype(np.float32)
    x[1, 3] = x[2, 39] = x[4, 0] = np.nan
    i, r = loop(6, 0), red(40, 1)
    got = agree(sink(store(0, i, reduce(load(1, add(mul(i, 40), r)), r, op=Ops.MAX), i)), [np.zeros(6, np.float32), x])[
        0
    ]
    np.testing.assert_array_equal(np.isnan(got), [False, True, True, False, True, False])


@pytest.mark.parametrize(("rows", "cols"), [(1, 1), (3, 17), (9, 128), (33, 50)])
def test_softmax(rows: int, cols: int) -> None:
    i, j, r, s = loop(rows, 0), loop(cols, 1), red(cols, 2), red(cols, 3)
    at = lambda c: load(1, add(mul(i, cols), c))  # noqa: E731
    top = reduce(at(r), r, op=Ops.MAX)
    total = reduce(at(s).alu(Ops.SUB, top).alu(Ops.EXP), s)
    value = at(j).alu(Ops.SUB, top).alu(Ops.EXP).alu(Ops.FDIV, total)
    x = RNG.standard_normal((rows, cols)).astype(np.float32)
    got = agree(sink(store(0, add(mul(i, cols), j), value, i, j)), [np.zeros_like(x), x])[0]
    e = np.exp(x - x.max(1, keepdims=True))
    same(got, e / e.sum(1, keepdims=True), 1e-5)


def test_reduces_share_a_loop() -> None:
    i, r = loop(10, 0), red(50, 1)
    x = load(1, add(mul(i, 50), r))
    mean, square = reduce(x, r), reduce(x.alu(Ops.MUL, x), r)
    agree(
        sink(store(0, i, mean.alu(Ops.ADD, square), i)),
        [np.zeros(10, np.float32), RNG.standard_normal((10, 50)).astype(np.float32)],
    )


def test_nested_reduces() -> None:
    # out[i] = sum_r (max_s x[i, r, s]) * y[r]
    i, r, s = loop(6, 0), red(20, 1), red(33, 2)
    inner = reduce(load(1, add(mul(i, 660), mul(r, 33), s)), s, op=Ops.MAX)
    outer = reduce(inner.alu(Ops.MUL, load(2, r)), r)
    arrays = [
        np.zeros(6, np.float32),
        RNG.standard_normal((6, 20, 33)).astype(np.float32),
        RNG.standard_normal(20).astype(np.float32),
    ]
    got = agree(sink(store(0, i, outer, i)), arrays, rtol=1e-4)[0]
    same(got, (arrays[1].max(2) * arrays[2]).sum(1), 1e-4)
    # out[r'] with a matrix product inside a reduction over rows
    j, k, t = loop(30, 0), red(9, 1), red(17, 2)
    product = reduce(load(1, add(mul(k, 17), t)).alu(Ops.MUL, load(2, add(mul(t, 30), j))), t)
    a, b = RNG.standard_normal((9, 17)).astype(np.float32), RNG.standard_normal((17, 30)).astype(np.float32)
    got = agree(
        sink(store(0, j, reduce(product.alu(Ops.MAX, UOp.const(f32, 0)), k), j)),
        [np.zeros(30, np.float32), a, b],
        rtol=1e-4,
    )[0]
    same(got, np.maximum(a @ b, 0).sum(0), 1e-4)


@pytest.mark.parametrize("shape", [(1, 1, 1, 5, 5, 3), (2, 3, 5, 9, 20, 3), (1, 4, 12, 6, 33, 1), (2, 2, 8, 16, 16, 5)])
def test_conv2d_with_padding(shape: tuple[int, ...]) -> None:
    n, ci, co, h, w, k = shape
    p = k // 2
    b, o, y, x = loop(n, 0), loop(co, 1), loop(h, 2), loop(w, 3)
    c, ky, kx = red(ci, 4), red(k, 5), red(k, 6)
    row, col = add(y, ky, -p), add(x, kx, -p)
    inside = None
    for v, size in ((row, h), (col, w)):
        low = UOp.const(dtypes.index, -1).alu(Ops.CMPLT, v)
        both = low.alu(Ops.AND, v.alu(Ops.CMPLT, I(size)))
        inside = both if inside is None else inside.alu(Ops.AND, both)
    source = load(1, add(mul(b, ci * h * w), mul(c, h * w), mul(row, w), col), valid=inside)
    weight = load(2, add(mul(o, ci * k * k), mul(c, k * k), mul(ky, k), kx))
    value = reduce(source.alu(Ops.MUL, weight), c, ky, kx)
    ast = sink(store(0, add(mul(b, co * h * w), mul(o, h * w), mul(y, w), x), value, b, o, y, x))
    arrays = [
        np.zeros((n, co, h, w), np.float32),
        RNG.standard_normal((n, ci, h, w)).astype(np.float32),
        RNG.standard_normal((co, ci, k, k)).astype(np.float32),
    ]
    got = agree(ast, arrays, rtol=1e-4)[0]
    padded = np.pad(arrays[1], ((0, 0), (0, 0), (p, p), (p, p)))
    windows = np.lib.stride_tricks.sliding_window_view(padded, (k, k), axis=(2, 3))
    same(got, np.einsum("nchwij,ocij->nohw", windows, arrays[2]), 1e-4)


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


def test_unrelated_reduces_of_different_loops() -> None:
    """One that depends on the vectorized loop and one that does not stand side by side."""
    r1, r2, k, s = loop(2, 1), loop(2, 2), red(2, 10), red(2, 11)
    value = reduce(r2.cast(f32), k).alu(Ops.ADD, reduce(load(1, add(mul(r1, 2), mul(r2, 4))), s))
    got = agree(
        sink(store(0, add(r1, mul(r2, 2)), value, r1, r2)), [np.zeros(4, np.float32), np.arange(20, dtype=np.float32)]
    )[0]
    assert got.tolist() == [0, 4, 10, 14]


@pytest.mark.parametrize("width", [5, 13, 26, 64])
def test_pooling(width: int) -> None:
    """Strides and quotients along the vector: max over windows of two, and its gradient's x // 2."""
    n = width // 2
    i, j, r = loop(7, 0), loop(n, 1), red(2, 2)
    x = RNG.standard_normal((7, width)).astype(np.float32)
    ast = sink(store(0, add(mul(i, n), j), reduce(load(1, add(mul(i, width), mul(j, 2), r)), r, op=Ops.MAX), i, j))
    pooled = agree(ast, [np.zeros((7, n), np.float32), x])[0]
    np.testing.assert_array_equal(pooled, x[:, : 2 * n].reshape(7, n, 2).max(2))
    i, j = loop(7, 0), loop(2 * n, 1)
    ast = sink(store(0, add(mul(i, 2 * n), j), load(1, add(mul(i, n), j.alu(Ops.IDIV, I(2)))), i, j))
    np.testing.assert_array_equal(
        agree(ast, [np.zeros((7, 2 * n), np.float32), pooled])[0], np.repeat(pooled, 2, axis=1)
    )


def test_deep_expression() -> None:
    """No recursion limit in the compiler."""
    i = loop(20, 0)
    value = load(1, i)
    for _ in range(1500):
        value = value.alu(Ops.ADD, load(1, i))
    agree(sink(store(0, i, value, i)), [np.zeros(20, np.float32), np.ones(20, np.float32)])


def ulp_error(got: np.ndarray, want: np.ndarray) -> np.ndarray:
    """Distance in units of the last place of the exact result."""
    spacing = np.spacing(np.abs(want).astype(got.dtype)).astype(np.float64)
    with np.errstate(all="ignore"):
        error = np.abs(got.astype(np.float64) - want) / spacing
    return np.where((got == want.astype(got.dtype)) | (np.isnan(got) & np.isnan(want)), 0, error)


@pytest.mark.parametrize(("op", "scales"), [(Ops.EXP, True), (Ops.EXP, False), (Ops.LOG, False), (Ops.SIN, False)])
def test_transcendentals_within_two_ulp(op: Ops, scales: bool) -> None:
    if scales and not host_target().machine.scales:
        pytest.skip("the processor has no instructions for it")
    bits = RNG.integers(0, 1 << 32, 200_000, dtype=np.uint64).astype(np.uint32).view(np.float32)
    special = [
        0.0,
        -0.0,
        np.inf,
        -np.inf,
        np.nan,
        1e-45,
        3.4e38,
        -3.4e38,
        88.72283,
        88.72284,
        -103.97,
        -103.98,
        2e5,
        -2e5,
        3e6,
        -3e6,
    ]
    x = np.concatenate([bits, np.linspace(-110, 110, 100_000), np.linspace(-0.05, 0.05, 100_000), special]).astype(
        np.float32
    )
    ast = legalize(elementwise(lambda a: a.alu(op), [f32], len(x)), scales).ast
    got = run(ast, [np.zeros_like(x), x], device="CPU")[0]
    with np.errstate(all="ignore"):
        want = {Ops.EXP: np.exp, Ops.LOG: np.log, Ops.SIN: np.sin}[op](x.astype(np.float64))
        want = np.where(np.isfinite(want.astype(np.float32)), want, want.astype(np.float32))
        error = ulp_error(got, want)
    np.testing.assert_array_equal(np.isnan(got), np.isnan(want))
    worst = int(np.nanargmax(error))
    assert error.max() <= 2, f"{op.name}({x[worst]!r}) = {got[worst]!r}, not {want[worst]!r}: {error.max():.2f} ulp"


@pytest.mark.parametrize("op", [Ops.EXP, Ops.LOG, Ops.SIN], ids=lambda o: o.name)
def test_transcendentals_of_float64(op: Ops) -> None:
    x = np.concatenate(
        [
            RNG.standard_normal(2000) * 100,
            10.0 ** RNG.uniform(-300, 300, 2000),
            [0.0, -0.0, np.inf, -np.inf, np.nan, 5e-324, 1.7e308, 709.7, -745.0],
        ]
    )
    got = run(elementwise(lambda a: a.alu(op), [dtypes.float64], len(x)), [np.zeros_like(x), x], device="CPU")[0]
    with np.errstate(all="ignore"):
        want = {Ops.EXP: np.exp, Ops.LOG: np.log, Ops.SIN: np.sin}[op](x)
    np.testing.assert_allclose(got, want, rtol=2e-15, atol=0)


@pytest.mark.parametrize("d", [f32, dtypes.float64, dtypes.bfloat16])
@pytest.mark.parametrize(("rows", "columns"), [(1, 40), (5, 33), (7, 100)])
def test_maximum_of_a_row_with_and_without_nan(rows: int, columns: int, d: DType) -> None:
    """A NaN in any place, or none; rows end in the middle of a vector, whose other lanes compute 0 * inf."""
    x = RNG.standard_normal((rows, columns)).astype(d.np) - 10
    i, k = loop(rows, 0), red(columns, 1)
    value = load(1, add(mul(i, columns), k), d)
    ast = sink(store(0, i, reduce(value.alu(Ops.RECIP).alu(Ops.MUL, value).alu(Ops.MUL, value), k, op=Ops.MAX), i))
    for place in (None, 0, 15, 16, columns - 1):
        x[0] = -7
        x[0, place or 0] = -5 if place is None else np.nan
        got = run(ast, [np.zeros(rows, d.np), x], device="CPU")[0]
        np.testing.assert_allclose(
            got.astype(np.float64), x.astype(np.float64).max(1), rtol=0.02 if d.is_half else 1e-6
        )


def test_scalar_kernel_and_constant() -> None:
    assert agree(sink(store(0, 2, UOp.const(f32, 3.5))), [np.zeros(4, np.float32)])[0].tolist() == [0, 0, 3.5, 0]


def test_index_of_a_kernel_needs_no_argument() -> None:
    assert index(3, f32, 1).src[0].arg == 3
    assert get_device("CPU").compile(sink(store(0, 0, UOp.const(f32, 1)))).nbytes == 4
