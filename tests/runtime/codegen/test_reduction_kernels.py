"""Kernels with reductions on CPU, against PYTHON (the definition) and NumPy: products, sums, convolutions."""

from __future__ import annotations

import warnings

import numpy as np
import pytest

from manygrad.tensor.dtype import DType, dtypes
from manygrad.tensor.uop.ops import Ops
from manygrad.tensor.uop.uop import UOp
from tests.runtime.codegen.kernels import (
    RNG,
    I,
    add,
    agree,
    data,
    f32,
    gemm,
    load,
    loop,
    mul,
    red,
    reduce,
    run,
    same,
    sink,
    store,
    two_products,
)


@pytest.mark.parametrize("layout", ["NN", "NT", "TN", "TT"])
@pytest.mark.parametrize(
    "shape", [(1, 1, 1), (3, 17, 5), (17, 3, 63), (64, 48, 33), (7, 130, 1), (1, 70, 40), (70, 1, 40), (65, 66, 67)]
)
def test_gemm(layout: str, shape: tuple[int, int, int]) -> None:
    m, n, k = shape
    a, b = RNG.standard_normal((m, k)).astype(np.float32), RNG.standard_normal((k, n)).astype(np.float32)
    stored = [x if t == "N" else np.ascontiguousarray(x.T) for x, t in zip((a, b), layout)]
    agree(gemm(m, n, k, layout), [np.zeros((m, n), np.float32), *stored], rtol=1e-4)


@pytest.mark.parametrize("d", [f32, dtypes.float64, dtypes.int32, dtypes.bfloat16], ids=lambda d: d.name)
@pytest.mark.parametrize("columns, terms", [(70, 67), (16, 16), (33, 100), (300, 1030)])
def test_a_row_has_the_same_bits_among_any_number(columns: int, terms: int, d: DType) -> None:
    """a @ b.T of one row more or less: b is turned in registers, or a or b is packed."""
    a, b = (data(d, n, terms) if d.is_int else RNG.standard_normal((n, terms)).astype(d.np) for n in (70, columns))
    want = run(gemm(70, columns, terms, "NT", d), [np.zeros((70, columns), d.np), a, b])[0]
    same(want, run(gemm(70, columns, terms, "NT", d), [np.zeros_like(want), a, b], (), "PYTHON")[0], 1e-2)
    for rows in (2, 3, 5, 8, 12, 13, 16, 17, 24, 40, 64):
        got = run(gemm(rows, columns, terms, "NT", d), [np.zeros((rows, columns), d.np), a[:rows], b])[0]
        np.testing.assert_array_equal(got.view(np.uint8), want[:rows].view(np.uint8), f"{rows} rows")


def test_a_row_of_two_products_has_the_same_bits_among_any_number() -> None:
    a, b, d = (RNG.standard_normal((n, 100)).astype(np.float32) for n in (70, 300, 300))
    want = run(two_products(70, 300, 100), [np.zeros((70, 300), np.float32), a, b, d])[0]
    same(want, (a @ b.T) * (a @ d.T), 1e-3)
    for rows in (2, 3, 5, 8, 9, 12, 16, 17, 40):
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            got = run(two_products(rows, 300, 100), [np.zeros((rows, 300), np.float32), a[:rows], b, d])[0]
        np.testing.assert_array_equal(got, want[:rows], f"{rows} rows")


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
