"""Elementwise kernels on CPU, against PYTHON (the definition) and NumPy: each op in each type."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from manygrad.runtime.codegen.kernel.legalize import legalize
from manygrad.runtime.codegen.lowered import Low
from manygrad.runtime.codegen.pipeline import prepare
from manygrad.runtime.devices.target import host_target
from manygrad.tensor.dtype import DType, dtypes
from manygrad.tensor.uop.ops import Ops
from manygrad.tensor.uop.uop import UOp
from tests.runtime.codegen.kernels import (
    RNG,
    SIZES,
    agree,
    data,
    elementwise,
    f32,
    load,
    loop,
    run,
    sink,
    store,
)

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


ROUNDED = (dtypes.bfloat16, dtypes.float16, *(d for d in dtypes.all if d.is_int))


@pytest.mark.parametrize("b", ROUNDED, ids=lambda d: d.name)
@pytest.mark.parametrize("a", [dtypes.float32, dtypes.float64], ids=lambda d: d.name)
def test_cast_in_whole_registers(a: DType, b: DType) -> None:
    """Any bits; and numbers around the type's ends, in registers with subnormal ones among them and without any."""
    words = np.uint32 if a is dtypes.float32 else np.uint64
    bits = RNG.integers(0, np.iinfo(words).max, 2048, words).view(a.np)
    ends = np.array([b.min, b.max] if b.is_int else [-3e38, 3e38], a.np)
    near = (ends[:, None] + np.linspace(-2, 2, 256, dtype=a.np)).ravel()
    steps = np.concatenate([ends, *(np.nextafter(ends, np.array(way, a.np)) for way in (-np.inf, np.inf))])
    subnormal = RNG.integers(0, 2**23, 512, np.uint32) | RNG.integers(0, 2, 512, np.uint32) << np.uint32(31)
    subnormal = subnormal.view(np.float32).astype(a.np)
    few = RNG.standard_normal(512).astype(a.np)
    few[::40] = subnormal[::40]
    tie = (RNG.integers(0, 2**15, 512, np.uint32) << np.uint32(16) | np.uint32(0x8000)).view(np.float32).astype(a.np)
    x = np.concatenate([bits, near, steps, subnormal, few, tie, RNG.standard_normal(77).astype(a.np)])
    i = loop(len(x), 0)
    read = load(1, i, a)
    for value in (read.cast(b), read.alu(Ops.MUL, read).cast(b)):
        agree(sink(store(0, i, value, i)), [np.zeros(len(x), b.np), x], rtol=0)
    if b is dtypes.bfloat16:
        got = run(sink(store(0, i, read.cast(b), i)), [np.zeros(len(x), b.np), x], device="CPU")[0]
        some = ~np.isnan(x)
        np.testing.assert_array_equal(got.view(np.uint16)[some], x.astype(b.np).view(np.uint16)[some])
        assert np.isnan(got.astype(np.float32)[~some]).all()


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


def test_deep_expression() -> None:
    """No recursion limit in the compiler."""
    i = loop(20, 0)
    value = load(1, i)
    for _ in range(1500):
        value = value.alu(Ops.ADD, load(1, i))
    agree(sink(store(0, i, value, i)), [np.zeros(20, np.float32), np.ones(20, np.float32)])


def test_scalar_kernel_and_constant() -> None:
    assert agree(sink(store(0, 2, UOp.const(f32, 3.5))), [np.zeros(4, np.float32)])[0].tolist() == [0, 0, 3.5, 0]


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


@pytest.mark.parametrize("d", [f32, dtypes.float64], ids=lambda d: d.name)
def test_what_large_arguments_of_sin_need_stands_in_a_branch(d: DType) -> None:
    x = np.linspace(-50, 50, 1000).astype(d.np)
    x[[3, 500, 999]] = 1e9, -(2.0**70), np.inf
    with np.errstate(all="ignore"):
        want = np.sin(x.astype(np.float64))
    kernel = elementwise(lambda a: a.alu(Ops.SIN), [d], len(x))
    got = run(kernel, [np.zeros_like(x), x], device="CPU")[0]
    np.testing.assert_allclose(got, want, rtol=0, atol=4 * np.finfo(d.np).eps)
    insts = prepare(kernel, host_target().machine).program().insts
    depth, rounds = 0, []
    for i in insts:
        depth += (i.op is Low.IF) - (i.op is Low.END and depth > 0)
        if i.op is Low.ROUND:
            rounds.append(depth)
    assert len(rounds) > 10 and 0 not in rounds
