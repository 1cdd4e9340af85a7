"""Products of float32 on a matrix unit that multiplies bfloat16, each number as the sum of three: what takes it, and
that it is as exact as float32, and the same where numbers are not finite."""

from __future__ import annotations

import numpy as np
import pytest

from manygrad import Tensor
from manygrad.runtime.codegen.analysis.describe import signature
from manygrad.runtime.codegen.kernel.dots import is_dot
from manygrad.runtime.codegen.loops.local import Stage
from manygrad.runtime.codegen.loops.show import show
from manygrad.runtime.codegen.opts import (
    Block,
    CacheRead,
    Float32Parts,
    Matrix,
    ReduceBlock,
    Tensorize,
    Tile,
    Unroll,
    Vectorize,
    legal,
)
from manygrad.runtime.codegen.pipeline import choice_of, explain, prepare, rewrite
from manygrad.runtime.codegen.target import Dot, Machine
from manygrad.runtime.devices.target import AMX_ROWS, host_target
from manygrad.tensor.dtype import DType, dtypes, to_dtype
from manygrad.tensor.environment import Context
from manygrad.tensor.uop.ops import Ops
from manygrad.tensor.uop.uop import UOp
from tests.runtime.codegen.kernels import add, count, gemm, load, loop, mul, red, reduce, run, sink, store

F32 = dtypes.float32
AMX = Machine(64, 32, 2 << 20, cores=2, dots=(Dot(F32, F32, 64, rows=AMX_ROWS),))
LAYOUTS = ("NN", "NT", "TN", "TT")
needs_unit = pytest.mark.skipif(
    not any(d.in_parts for d in host_target().machine.dots),
    reason="this processor has no matrix unit (AMX) of bfloat16",
)


def kinds(ast: UOp, machine: Machine = AMX) -> set[str]:
    return {o.kind for o in prepare(ast, machine).opts}


def layed(layout: str, *factors: np.ndarray) -> list[np.ndarray]:
    """As a kernel of that layout reads them."""
    return [x.T.copy() if letter == "T" else x for x, letter in zip(factors, layout)]


def multiplied(a: np.ndarray, b: np.ndarray, layout: str = "NN", parts: int = 1, checks: int = 0) -> np.ndarray:
    (m, k), n = a.shape, b.shape[1]
    with Context(FLOAT32_PARTS=parts, CHECK_OOB=checks):
        return run(gemm(m, n, k, layout), [np.zeros((m, n), np.float32), *layed(layout, a, b)], device="CPU")[0]


def stages(ast: UOp) -> list[Stage]:
    return list(prepare(ast, AMX).tree().local.stages.values())


def bits(x: np.ndarray) -> np.ndarray:
    return x.view(np.uint32)


def mixed(m: int, n: int, k: int, layout: str, left: DType, right: DType) -> UOp:
    """A product of two types in float32."""
    i, j, r = loop(m, 0), loop(n, 1), red(k, 2)
    a = load(1, add(mul(i, k), r) if layout[0] == "N" else add(mul(r, m), i), left)
    b = load(2, add(mul(r, n), j) if layout[1] == "N" else add(mul(j, k), r), right)
    a, b = (x if x.dtype is F32 else x.cast(F32) for x in (a, b))
    return sink(store(0, add(mul(i, n), j), reduce(a.alu(Ops.MUL, b), r), i, j))


# *** what is chosen ***


@pytest.mark.parametrize("layout", LAYOUTS)
def test_both_factors_are_packed_in_parts(layout: str) -> None:
    ast = gemm(512, 1536, 576, layout)
    prepared = prepare(ast, AMX)
    assert {Tile(0, 32), Tile(1, 32), Unroll(2, 32), Tensorize(2, 2), Matrix(2)} <= set(prepared.opts)
    assert {Float32Parts(2), CacheRead(0, 1), CacheRead(1, 2)} <= set(prepared.opts) and "block" in kinds(ast)
    assert "in matrices:" in show(prepared.tree())
    for stage in stages(ast):
        assert (stage.dtype, stage.parts) == (dtypes.bfloat16, 3)


def test_of_a_long_reduction_some_at_a_time_for_as_many_panels_for_every_core() -> None:
    assert {Block(1, 6), ReduceBlock(2, 768)} <= set(prepare(gemm(1024, 384, 1536, "NT"), AMX).opts)
    assert {Block(1, 9), ReduceBlock(2, 512)} <= set(prepare(gemm(512, 576, 1536, "NT"), AMX).opts)
    assert "reduce_block" not in kinds(gemm(512, 576, 576, "NT"))
    assert "reduce_block" not in kinds(gemm(512, 160, 1536, "NT"))  # too few panels for two cores


@pytest.mark.parametrize(
    "ast",
    [
        gemm(127, 256, 64),
        gemm(256, 127, 64),
        gemm(256, 256, 16),
        gemm(256, 256, 784),  # (no whole number of an instruction's terms)
        gemm(256, 256, 1 << 15),
        gemm(256, 256, count(32, 16)),
    ],
    ids=["few rows", "few columns", "short", "uneven", "longer than a panel", "of a variable"],
)
def test_other_products_are_as_on_a_machine_without(ast: UOp) -> None:
    plain = prepare(ast, Machine(64, 32, 2 << 20, cores=2))
    found = prepare(ast, AMX)
    assert found.opts == plain.opts and found.ast is plain.ast
    assert explain(ast, AMX) == explain(ast, Machine(64, 32, 2 << 20, cores=2))


def test_by_the_reduction_and_the_pattern_once_there_are_rows_enough() -> None:
    assert all("matrix" in kinds(gemm(m, n, 96, "NT")) for m in (128, 129, 5000) for n in (128, 640))


def test_not_where_it_is_switched_off() -> None:
    with Context(FLOAT32_PARTS=0):
        assert "matrix" not in kinds(gemm(512, 576, 576))


def test_given_opts_decide_whether_a_kernel_is_multiplied_in_parts() -> None:
    ast = gemm(128, 128, 64)
    plain = prepare(ast, AMX, (Vectorize(1, 16), Tile(0, 4)))
    assert not any(is_dot(u) for u in plain.ast.toposort())
    taken = prepare(ast, AMX)
    assert prepare(ast, AMX, taken.opts).ast is taken.ast
    unsaid = tuple(o for o in taken.opts if o != Float32Parts(2))
    with pytest.raises(ValueError, match="REDUCEs over it are no sums of products"):
        prepare(ast, AMX, unsaid)
    with pytest.raises(ValueError, match=r"float32_parts\(2\): no product of float32 .* that this machine multiplies"):
        prepare(ast, Machine(64, 32), (Vectorize(1, 16), Float32Parts(2)))
    with pytest.raises(ValueError, match="of a matrix unit alone"):
        prepare(ast, AMX, (Vectorize(1, 16), Float32Parts(2)))


def test_one_operation_costs_the_same_after_a_product_in_parts() -> None:
    """What follows the product is weighed as it was written: an exponential as one."""
    i, j, k = loop(256, 0), loop(256, 1), red(64, 2)
    product = reduce(load(1, add(mul(i, 64), k)).alu(Ops.MUL, load(2, add(mul(k, 256), j))), k)
    choice = choice_of(rewrite(sink(store(0, add(mul(i, 256), j), product.alu(Ops.EXP), i, j)), AMX), AMX)
    operations = choice.facts.operations
    assert Float32Parts(2) in choice.opts and sum(u.op is Ops.EXP for u in operations) == 1
    assert [u for u in operations if u.op is Ops.REDUCE] == list(choice.facts.sig.reduces)


def test_no_vector_instruction_multiplies_parts() -> None:
    sig = signature(prepare(gemm(128, 128, 64), AMX).ast)
    assert "of a matrix unit alone" in (legal(sig, (Vectorize(1, 16), Tensorize(2, 2))) or "")


def test_only_whole_squares_rest_between_blocks_of_the_reduction() -> None:
    prepared = prepare(gemm(130, 558, 992), AMX)
    assert {ReduceBlock(2, 512), Tile(0, 32)} <= set(prepared.opts)
    some = tuple(Tile(0, 26) if o == Tile(0, 32) else o for o in prepared.opts)
    assert "only sums of whole squares rest" in (legal(signature(prepared.ast), some) or "")


# *** what it computes ***


@needs_unit
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("k", [32, 96, 1536])
def test_a_number_by_one_is_that_number(layout: str, k: int) -> None:
    """The three parts have all bits of it: of the whole range, but for what is next to nothing."""
    rng = np.random.default_rng(0)
    exponents = rng.integers(127 - 100, 255, (130, k), np.uint32)
    a = (rng.integers(0, 1 << 32, (130, k), np.uint32) & 0x807FFFFF | exponents << 23).view(np.float32)
    some = rng.integers(0, k, 140)
    picked = np.zeros((k, 140), np.float32)
    picked[some, np.arange(140)] = 1
    for checks in (0, 1):
        np.testing.assert_array_equal(bits(multiplied(a, picked, layout, checks=checks)), bits(a[:, some]))
        np.testing.assert_array_equal(bits(multiplied(picked.T, a.T, layout, checks=checks)), bits(a[:, some].T))


@needs_unit
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(
    "shape",
    [
        (128, 128, 64),
        (130, 150, 96),
        (128, 129, 800),
        (130, 257, 512),
        (136, 600, 1536),
        (200, 140, 2048),
        (147, 558, 992),
    ],
    ids=str,
)
@pytest.mark.parametrize("signs", ["both", "one"])
def test_errors_are_below_those_of_float32_sums(layout: str, shape: tuple[int, int, int], signs: str) -> None:
    (m, n, k), rng = shape, np.random.default_rng(1)
    a, b = (rng.standard_normal(s).astype(np.float32) for s in ((m, k), (k, n)))
    a, b = (np.abs(a), np.abs(b)) if signs == "one" else (a, b)
    want, terms = a.astype(np.float64) @ b, np.abs(a.astype(np.float64)) @ np.abs(b)
    mine, fmas = (np.abs(multiplied(a, b, layout, parts) - want) / terms for parts in (1, 0))
    assert 0 < np.sqrt((mine**2).mean()) < np.sqrt((fmas**2).mean())
    assert mine.max() < fmas.max() * 1.1


@needs_unit
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("shape", [(130, 150, 64), (129, 600, 1536), (144, 512, 2048)], ids=str)
def test_what_is_not_finite_is_as_in_float32(layout: str, shape: tuple[int, int, int]) -> None:
    """Infinite numbers by whole ones, whose last parts are 0, in any part of the reduction, and such as cancel."""
    (m, n, k), rng = shape, np.random.default_rng(2)
    for seed in range(4):
        a = rng.integers(-2, 3, (m, k)).astype(np.float32)
        b = rng.standard_normal((k, n)).astype(np.float32)
        for x in (a, b) if seed else (a,):
            for _ in range(3):
                x[rng.integers(x.shape[0]), rng.integers(x.shape[1])] = rng.choice([np.inf, -np.inf, np.nan, 1e30])
        mine, fmas = (multiplied(a, b, layout, parts) for parts in (1, 0))
        for kind in (np.isnan, np.isposinf, np.isneginf):
            np.testing.assert_array_equal(kind(mine), kind(fmas))
        finite = np.isfinite(fmas)
        assert not finite.all()
        np.testing.assert_allclose(mine[finite], fmas[finite], rtol=1e-5, atol=1e-3)


@needs_unit
def test_the_largest_numbers_stay_finite() -> None:
    """The first part is cut, not rounded: it is never infinite."""
    most = np.finfo(np.float32).max
    a, b = np.zeros((128, 64), np.float32), np.zeros((64, 128), np.float32)
    a[:, 5], b[5] = np.linspace(0.9, 1, 128) * most, np.linspace(-1, 1, 128)
    want = (a[:, 5:6].astype(np.float64) * b[5]).astype(np.float32)
    np.testing.assert_allclose(multiplied(a, b), want, rtol=3e-7)


@needs_unit
def test_numbers_next_to_nothing_have_fewer_bits() -> None:
    """Below 2**-126 a part counts as 0: the error is never more than that for each factor of size 1."""
    rng = np.random.default_rng(3)
    a = (rng.standard_normal((128, 64)) * 2.0**-120).astype(np.float32)
    b = rng.uniform(-1, 1, (64, 128)).astype(np.float32)
    error = np.abs(multiplied(a, b) - a.astype(np.float64) @ b)
    assert error.max() < 64 * 2.0**-126


@needs_unit
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("types", [("float32", "bfloat16"), ("float16", "float32"), ("float16",) * 2], ids=" ".join)
def test_half_types_have_fewer_parts(layout: str, types: tuple[str, str]) -> None:
    left, right = (to_dtype(t) for t in types)
    for m, n, k in ((130, 144, 96), (133, 400, 1536)):
        ast, rng = mixed(m, n, k, layout, left, right), np.random.default_rng(6)
        numbers = {s.value.src[0].dtype if s.value.op is Ops.CAST else F32: s.parts for s in stages(ast)}
        assert numbers == {d: {F32: 3, dtypes.float16: 2, dtypes.bfloat16: 1}[d] for d in (left, right)}
        a, b = (rng.standard_normal(s).astype(d.np) for s, d in (((m, k), left), ((k, n), right)))
        want = a.astype(np.float64) @ b.astype(np.float64)
        terms = np.abs(a.astype(np.float64)) @ np.abs(b.astype(np.float64))
        a[3, 5], b[7, 1], a[4, 4] = np.inf, 0, 0
        for checks in (0, 1):
            with Context(CHECK_OOB=checks):
                got = run(ast, [np.zeros((m, n), np.float32), *layed(layout, a, b)], device="CPU")[0]
        whole = np.ones((m, n), bool)
        whole[[3, 4]], whole[:, 1] = False, False
        assert (np.abs(got - want) / terms)[whole].max() < np.finfo(np.float32).eps * 4
        assert not np.isfinite(got[3]).any() and np.isfinite(np.delete(got, 3, 0)).all()


@needs_unit
@pytest.mark.parametrize("layout", ["NN", "NT"])
@pytest.mark.parametrize("k", [192, 1536])
def test_a_row_is_the_same_bits_in_a_batch_of_any_size(layout: str, k: int) -> None:
    """From 128 rows on, and however columns are cut."""
    rng = np.random.default_rng(4)
    a, b = (rng.standard_normal(s).astype(np.float32) for s in ((300, k), (k, 600)))
    whole = multiplied(a, b, layout)
    for first, last in ((0, 128), (5, 140), (64, 299), (3, 300)):
        np.testing.assert_array_equal(bits(multiplied(a[first:last], b, layout)), bits(whole[first:last]))
        columns = slice(first, first + 128)
        np.testing.assert_array_equal(bits(multiplied(a, b[:, columns].copy(), layout)), bits(whole[:, columns]))


@needs_unit
def test_what_follows_a_product_reads_its_sums() -> None:
    rng = np.random.default_rng(5)
    for m, n, k in ((130, 140, 96), (144, 384, 1536)):
        x, w, b, r = (rng.standard_normal(s).astype(np.float32) for s in ((3, m, k), (n, k), (n,), (3, m, n)))
        x[1, 3, 5] = np.inf
        made = (Tensor(x) @ Tensor(w).T + Tensor(b)).relu() + Tensor(r)
        with np.errstate(invalid="ignore"):
            want = np.maximum(x.astype(np.float64) @ w.astype(np.float64).T + b, 0) + r
        np.testing.assert_allclose(made.numpy(), want, rtol=1e-5, atol=1e-4 * np.sqrt(k / 96))
