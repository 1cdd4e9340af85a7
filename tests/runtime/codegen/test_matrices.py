"""Products of bfloat16 and bytes on a matrix unit: what takes it, in which shapes, and that it adds up a row the
same way whatever is beside it."""

from __future__ import annotations

import re

import llvmlite.binding as llvm
import numpy as np
import pytest

from manygrad import Tensor
from manygrad.native.compiler import Compiler
from manygrad.native.processor import Processor, matrix_unit
from manygrad.runtime.codegen.analysis.describe import size_factor
from manygrad.runtime.codegen.kernel.dots import row_step, step_of
from manygrad.runtime.codegen.loops.show import show
from manygrad.runtime.codegen.lowered import Inst, Low
from manygrad.runtime.codegen.opts import (
    Block,
    CacheRead,
    Matrix,
    Opts,
    ReduceBlock,
    Reorder,
    Tensorize,
    Tile,
    Unroll,
    Vectorize,
)
from manygrad.runtime.codegen.pipeline import prepare
from manygrad.runtime.codegen.render.llvm.printer import render
from manygrad.runtime.codegen.target import Dot, Machine
from manygrad.runtime.devices.target import AMX_ROWS, dot_products, host_target
from manygrad.tensor.dtype import dtypes, to_dtype
from manygrad.tensor.environment import Context
from manygrad.tensor.uop.args import VarArg
from manygrad.tensor.uop.ops import Ops
from manygrad.tensor.uop.symbolic import evaluate
from manygrad.tensor.uop.uop import UOp
from tests.runtime.codegen.kernels import (
    add,
    bytes_product,
    count,
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

BF16 = dtypes.bfloat16
AMX = Machine(64, 32, 2 << 20, cores=2, dots=(Dot(BF16, BF16, 64, rows=AMX_ROWS),))
needs_unit = pytest.mark.skipif(
    all(d.rows == 1 for d in host_target().machine.dots), reason="this processor has no matrix unit (AMX)"
)


def product(m: int, n: int, k: int | UOp, layout: str = "NT") -> UOp:
    return gemm(m, n, k, layout, BF16)


def kinds(ast: UOp, machine: Machine = AMX) -> set[str]:
    return {o.kind for o in prepare(ast, machine).opts}


# *** what is chosen ***


def test_two_by_two_squares_along_as_much_as_an_instruction_adds_up() -> None:
    prepared = prepare(product(512, 1536, 576), AMX)
    assert {Tile(0, 32), Tile(1, 32), Unroll(2, 32), Tensorize(2, 2), Matrix(2), CacheRead(1, 2)} <= set(prepared.opts)
    assert "reduce ADD(argument 1 argument 2) over k2 in matrices:" in show(prepared.tree())


@pytest.mark.parametrize(("k", "terms"), [(576, 32), (32, 32), (64, 32), (48, 24), (100, 20), (40, 20), (16, 16)])
def test_a_reduction_is_cut_evenly(k: int, terms: int) -> None:
    assert Unroll(2, terms) in prepare(product(64, 64, k), AMX).opts


@pytest.mark.parametrize("k", [33, 34, 46, 77])
def test_one_that_only_few_terms_cut_evenly_takes_vectors(k: int) -> None:
    assert "matrix" not in kinds(product(64, 64, k)) and "tensorize" in kinds(product(64, 64, k))


def test_by_the_pattern_alone_not_by_the_size_of_the_batch() -> None:
    """Rows that lie along the reduction, however many; one of columns that lie side by side, too (a row by a transposed
    matrix is a sum in lanes, on every machine)."""
    for layout in ("NN", "NT"):
        assert all("matrix" in kinds(product(m, 96, 64, layout)) for m in (2, 3, 16, 33, 1000))
        assert all("matrix" in kinds(product(64, n, 64, layout)) for n in (5, 16, 50, 96))
    assert "matrix" in kinds(product(1, 96, 64, "NN"))
    assert {"rfactor"} <= kinds(product(1, 96, 64, "NT")) and "matrix" not in kinds(product(1, 96, 64, "NT"))
    # rows of the result in vectors where it is the other factor that lies along the reduction
    assert {Vectorize(0, 16), Matrix(2)} <= set(prepare(product(64, 50, 64, "TT"), AMX).opts)


def test_rows_that_lie_apart_along_the_reduction_are_packed_one_after_the_other() -> None:
    """A gradient of weights: both factors are packed, in blocks of columns, so that rows are turned for several."""
    prepared = prepare(product(512, 512, 1024, "TN"), AMX)
    assert {CacheRead(0, 1), CacheRead(1, 2), Matrix(2), Block(1, 8)} <= set(prepared.opts)
    assert "block" not in kinds(product(512, 512, 8192))  # rows that lie in place need none
    (stage,) = (s for s in prepared.tree().local.stages.values() if s.turned)
    assert stage.pitches == {stage.loop: 32, stage.ranges[0]: 1}  # a register is 1 KiB in order


@pytest.mark.parametrize(("step", "terms"), [(32, 32), (64, 32), (16, 16), (48, 24)])
@pytest.mark.parametrize("layout", ["NN", "NT"])
def test_of_a_number_of_terms_that_only_a_variable_says(step: int, terms: int, layout: str) -> None:
    """Where it is a multiple of what an instruction adds up; as attention over tokens so far. No code for a rest."""
    prepared = prepare(product(64, 64, count(step, 16), layout), AMX)
    assert {Tensorize(2, 2), Unroll(2, terms), Matrix(2), CacheRead(1, 2)} <= set(prepared.opts)
    assert show(prepared.tree()).count("over k2") == 1


@pytest.mark.parametrize("step", [1, 4, 15])
def test_not_where_it_may_leave_a_rest(step: int) -> None:
    assert "matrix" not in kinds(product(64, 64, count(step, 64)))


def test_sums_in_lanes_take_an_instruction_where_all_lanes_have_as_many_terms() -> None:
    found = {step: kinds(product(1, 96, count(step, 8), "NT")) for step in (16, 32, 48, 64)}
    assert all("rfactor" in k for k in found.values())
    assert [step for step, k in found.items() if "tensorize" in k] == [32, 64]


def test_not_the_product_of_a_matrix_by_itself() -> None:
    """Whose one argument would have to be packed in two ways."""
    i, j, r = loop(64, 0), loop(64, 1), red(64, 2)
    a, b = (load(1, add(mul(r, 64), x), BF16).cast(dtypes.float32) for x in (i, j))
    assert "matrix" not in kinds(sink(store(0, add(mul(i, 64), j), reduce(a.alu(Ops.MUL, b), r), i, j)))


def test_not_without_a_unit_nor_of_other_types() -> None:
    without = Machine(64, 32, 2 << 20, cores=2, dots=(Dot(BF16, BF16, 64),))
    assert "matrix" not in kinds(product(64, 64, 64), without)
    for dtype in (dtypes.float32, dtypes.float16):
        assert "matrix" not in kinds(gemm(64, 64, 64, "NT", dtype))


def test_the_unit_is_one_of_a_processor_that_has_it_and_a_system_that_lets_it_be_used() -> None:
    features = "+avx512vnni,+avx512vl,+avx512bf16"
    plain = Processor("x86_64-unknown-linux-gnu", "znver4", features)
    assert [d.rows for d in dot_products(plain)] == [1, 1]
    there = AMX_ROWS if matrix_unit() else 1
    in_parts = [there] if there > 1 else []  # float32
    for more, rows in (("bf16", [1, there, *in_parts]), ("int8", [there, 1])):
        found = dot_products(Processor(plain.triple, "sapphirerapids", f"{features},+amx-tile,+amx-{more}"))
        assert [d.rows for d in found] == rows


BYTES_UNIT = Machine(64, 32, 2 << 20, cores=2, dots=(Dot(dtypes.uint8, dtypes.int8, 64, rows=AMX_ROWS),))


@pytest.mark.parametrize("layout", ["NN", "NT", "TN", "TT"])
@pytest.mark.parametrize("types", [("int8", "int8"), ("uint8", "int8"), ("uint8", "uint8")], ids=" ".join)
def test_of_bytes_of_any_types(layout: str, types: tuple[str, str]) -> None:
    """A factor that is moved by 128 is packed, and the other one's sum stands beside the product."""
    ast = bytes_product(64, 96, 128, layout, (to_dtype(types[0]), to_dtype(types[1])))
    assert {Tensorize(2, 4), Unroll(2, 64), Matrix(2)} <= set(prepare(ast, BYTES_UNIT).opts)


def test_not_along_rows_whose_own_sum_has_lanes() -> None:
    """Of every second byte by two rows of bytes, of which one is moved by 128, and the other one added up."""
    j, r = loop(2, 0), red(16, 1)
    a, b = load(1, mul(r, 2), dtypes.uint8), load(2, add(mul(j, 16), r), dtypes.uint8)
    for x, y in ((a, b), (b, a)):
        ast = sink(store(0, j, reduce(x.cast(dtypes.int32).alu(Ops.MUL, y.cast(dtypes.int32)), r), j))
        assert "matrix" not in kinds(ast, BYTES_UNIT)


def test_not_of_bytes_that_are_read_under_a_condition() -> None:
    types = (dtypes.int8, dtypes.int8)
    for m in (1, 64):
        assert "matrix" not in kinds(bytes_product(m, 96, 128, "NT", types, padded=True), BYTES_UNIT)


def test_not_where_something_wider_is_computed() -> None:
    """The sum of a product of bytes over its columns, in int64: vectors have half as many lanes."""
    i, j, r = loop(64, 0), loop(96, 1), red(128, 2)
    a, b = load(1, add(mul(i, 128), r), dtypes.int8), load(2, add(mul(r, 96), j), dtypes.int8)
    total = reduce(a.cast(dtypes.int32).alu(Ops.MUL, b.cast(dtypes.int32)), r).cast(dtypes.int64)
    ast = sink(store(0, add(mul(i, 96), j), total, i, j))
    assert "matrix" not in kinds(ast, BYTES_UNIT) and "tensorize" in kinds(ast, BYTES_UNIT)


# *** what is refused ***

GOOD: Opts = (Vectorize(1, 16), Tensorize(2, 2), Unroll(2, 32), Matrix(2), Reorder(1, 0), CacheRead(1, 2))
REFUSED: list[tuple[UOp, Opts, str]] = [
    (product(64, 64, 64), (*GOOD, Tile(0, 48)), "at most 2 squares high"),
    (product(64, 64, 64), (*GOOD, Tile(1, 64)), "and 2 wide"),
    (product(64, 64, 64), tuple(o for o in GOOD if not isinstance(o, CacheRead)), "is not packed at it"),
    (product(64, 64, 64), tuple(o for o in GOOD if not isinstance(o, Tensorize)), "tensorized"),
    (product(64, 64, 48), GOOD, "cuts it evenly"),
    (product(64, 64, 128), (*GOOD[:2], Unroll(2, 64), *GOOD[3:]), "into at most 32"),
    (product(64, 64, 64), (Vectorize(1, 8), *GOOD[1:]), "the vectors are not its"),
    (product(64, 64, 64, "TN"), GOOD, "does not lie along the range"),
    (product(64, 64, 64), (*GOOD, CacheRead(0, 1)), "not packed along its rows"),
    (product(64, 64, 64, "TN"), (*GOOD, Tile(0, 16), CacheRead(0, 1), Block(0, 2)), "tile by tile"),
    (gemm(64, 64, 64, "NT"), GOOD, "tensorize"),
    (product(64, 64, count(16, 8)), GOOD, "may leave a rest of its tiles"),
]


@pytest.mark.parametrize(("ast", "opts", "why"), REFUSED, ids=[why for *_, why in REFUSED])
def test_refused_with_a_reason(ast: UOp, opts: Opts, why: str) -> None:
    with pytest.raises(ValueError, match=re.escape(why)):
        prepare(ast, AMX, opts)


def test_sums_that_rest_are_refused() -> None:
    with pytest.raises(ValueError, match="do not rest|block"):
        prepare(product(64, 64, 64), AMX, (*GOOD, ReduceBlock(2, 32)))


def test_a_machine_without_it_refuses_it() -> None:
    without = Machine(64, 32, dots=(Dot(BF16, BF16, 64),))
    with pytest.raises(ValueError, match="the machine has no such unit"):
        prepare(product(64, 64, 64), without, GOOD)


def test_steps_of_a_load() -> None:
    i, k = loop(8, 0), red(64, 1)
    at = load(1, add(mul(i, 64), k))
    assert (step_of(at, i), step_of(at, k), step_of(at, loop(3, 7))) == (64, 1, 0)
    halved = load(1, add(mul(i.alu(Ops.IDIV, UOp.const(dtypes.index, 2)), 64), k))
    assert step_of(halved, i) is None and step_of(halved, k) == 1


def test_steps_of_a_load_that_only_a_variable_says() -> None:
    i, j, k, n = loop(8, 0), loop(8, 1), red(64, 2), count(32, 4)
    at = load(1, add(mul(i, n), mul(add(j, 3), mul(n, 2)), k))
    assert step_of(at, i) is None
    found = [row_step(at, r) for r in (i, j, k)]
    assert None not in found
    assert [evaluate(u, {"n": 3}) for u in found] == [96, 192, 1]
    both = load(1, add(mul(i, n), mul(mul(i, n), i)))
    assert row_step(both, i) is None and row_step(load(1, i.alu(Ops.MOD, n)), i) is None


def test_what_a_size_is_a_multiple_of() -> None:
    n, m = count(32, 4), UOp(Ops.DEFINE_VAR, dtypes.index, (), VarArg("m", 1, 9))
    sizes = [UOp.const(dtypes.index, 12), n, m, add(n, 48), add(n, m), mul(mul(m, 6), n), n.alu(Ops.SUB, mul(m, 12))]
    assert [size_factor(red(u, 0)) for u in sizes] == [12, 32, 1, 16, 1, 192, 4]


# *** its instructions ***


def insts(ast: UOp, *ops: Low) -> list[Inst]:
    return [x for x in prepare(ast, AMX).program().insts if x.op in ops]


def test_each_square_that_is_loaded_is_multiplied_twice() -> None:
    """Registers 0 to 3 hold sums, 4 and 5 rows, 6 and 7 columns; one shape throughout."""
    ast = product(64, 64, 64)
    assert [x.arg.register for x in insts(ast, Low.MATRIX_LOAD)] == [4, 6, 7, 5]
    assert [x.arg[:3] for x in insts(ast, Low.MATRIX_DOT)] == [(0, 4, 6), (1, 4, 7), (2, 5, 6), (3, 5, 7)]
    (shapes,) = insts(ast, Low.MATRIX_SHAPES)
    assert shapes.arg == ((16, 64),) * 8
    rows, columns, *_ = insts(ast, Low.MATRIX_LOAD)
    assert (rows.arg.rows, rows.arg.width, rows.arg.step) == (16, 32, 64)
    assert (columns.arg.rows, columns.arg.width, columns.arg.step) == (16, 32, 64)


def test_a_tile_with_fewer_rows_sets_its_shapes_and_puts_those_of_a_whole_one_back() -> None:
    shapes = [x.arg for x in insts(product(32 + 19, 64, 64), Low.MATRIX_SHAPES)]
    whole = ((16, 64),) * 8
    rest = ((16, 64), (16, 64), (3, 64), (3, 64), (16, 64), (3, 64), (16, 64), (16, 64))
    assert shapes == [whole, rest, whole]
    assert [x.arg for x in insts(product(32 + 16, 64, 64), Low.MATRIX_SHAPES)] == [whole]  # (two registers rest)


def test_code_for_it() -> None:
    """Registers are set up once and given back; AMX's instructions are what it is made of."""
    llvm.initialize_all_targets()
    llvm.initialize_all_asmprinters()
    target = Processor("x86_64-unknown-linux-gnu", "sapphirerapids", "+amx-tile,+amx-bf16")
    text = prepare(product(64, 64, 64), AMX).code(render)
    for name, times in ("ldtilecfg", 1), ("tilerelease", 1), ("tdpbf16ps", 4), ("tileloadd64", 4), ("tilestored64", 4):
        assert len(re.findall(rf"call void @llvm\.x86\.{name}\(", text)) == times, name
    assert Compiler(target).object_code(text)


# *** what it computes ***


@needs_unit
@pytest.mark.parametrize("layout", ["NN", "NT", "TN", "TT"])
@pytest.mark.parametrize("types", [("int8", "int8"), ("int8", "uint8"), ("uint8", "uint8")], ids=" ".join)
def test_bytes_are_exact_at_the_ends_of_their_types(layout: str, types: tuple[str, str]) -> None:
    left, right = (to_dtype(t) for t in types)
    rng = np.random.default_rng(0)
    for m, n, k in ((64, 64, 64), (1, 40, 48), (17, 33, 200), (50, 129, 96)):
        a, b = (rng.choice([d.min, d.max, 0, 1], s).astype(d.np) for d, s in ((left, (m, k)), (right, (k, n))))
        given = [x.T.copy() if letter == "T" else x for x, letter in zip((a, b), layout)]
        ast = bytes_product(m, n, k, layout, (left, right))
        for checks in (0, 1):
            with Context(CHECK_OOB=checks):
                got = run(ast, [np.zeros((m, n), np.int32), *given], device="CPU")[0]
            np.testing.assert_array_equal(got, a.astype(np.int32) @ b.astype(np.int32))


@needs_unit
@pytest.mark.parametrize("layout", ["NN", "NT", "TN", "TT"])
@pytest.mark.parametrize(
    "shape",
    [(64, 64, 64), (1, 40, 32), (2, 5, 16), (17, 33, 100), (33, 16, 48), (31, 47, 576), (130, 257, 512), (48, 1, 32)],
    ids=str,
)
def test_it_adds_up_what_numpy_does(layout: str, shape: tuple[int, int, int]) -> None:
    """Sums of small whole numbers are exact in any order; infinities and NaN stay in their rows and columns."""
    m, n, k = shape
    rng = np.random.default_rng(0)
    a, b = (rng.integers(-3, 4, s).astype(BF16.np) for s in ((m, k), (k, n)))
    a[0, 0], b[-1, n // 2] = np.inf, np.nan
    given = [x.T.copy() if letter == "T" else x for x, letter in zip((a, b), layout)]
    with np.errstate(all="ignore"):
        want = (a.astype(np.float32) @ b.astype(np.float32)).astype(BF16.np)
    for checks in (0, 1):
        with Context(CHECK_OOB=checks):
            got = run(product(m, n, k, layout), [np.zeros((m, n), BF16.np), *given], device="CPU")[0]
        np.testing.assert_array_equal(got.astype(np.float32), want.astype(np.float32))


@needs_unit
@pytest.mark.parametrize("layout", ["NN", "NT", "TN", "TT"])
@pytest.mark.parametrize("shape", [(64, 64), (2, 5), (17, 33), (70, 48)], ids=str)
def test_it_adds_up_as_many_terms_as_a_variable_says(layout: str, shape: tuple[int, int]) -> None:
    """Rows of the factors lie as far apart as there are terms."""
    (m, n), rng = shape, np.random.default_rng(0)
    ast = product(m, n, count(32, 7), layout)
    for times in (1, 2, 7):
        a, b = (rng.integers(-3, 4, s).astype(BF16.np) for s in ((m, 32 * times), (32 * times, n)))
        given = [x.T.copy() if letter == "T" else x for x, letter in zip((a, b), layout)]
        for checks in (0, 1):
            with Context(CHECK_OOB=checks):
                got = run(ast, [np.zeros((m, n), BF16.np), *given], (times,), "CPU")[0]
            want = (a.astype(np.float32) @ b.astype(np.float32)).astype(BF16.np)
            np.testing.assert_array_equal(got.astype(np.float32), want.astype(np.float32))


@needs_unit
def test_a_read_past_the_end_is_found_where_only_a_variable_says_how_far_rows_lie_apart() -> None:
    arrays = [np.zeros(s, BF16.np) for s in ((32, 32), (32, 64), (96, 32))]
    with Context(CHECK_OOB=1), pytest.raises(IndexError, match="argument 1"):
        run(product(32, 32, count(32, 7)), arrays, (3,), "CPU")


@needs_unit
@pytest.mark.parametrize("layout", ["NN", "NT"])
def test_a_row_is_the_same_bits_in_a_batch_of_any_size(layout: str) -> None:
    rng = np.random.default_rng(1)
    a, b = (rng.standard_normal(s).astype(BF16.np) for s in ((70, 192), (192, 50)))
    right = b if layout[1] == "N" else b.T.copy()

    def rows(first: int, last: int) -> np.ndarray:
        out = np.zeros((last - first, 50), np.float32)
        i, j, r = loop(last - first, 0), loop(50, 1), red(192, 2)
        at = add(mul(r, 50), j) if layout[1] == "N" else add(mul(j, 192), r)
        x, w = load(1, add(mul(i, 192), r), BF16).cast(dtypes.float32), load(2, at, BF16).cast(dtypes.float32)
        ast = sink(store(0, add(mul(i, 50), j), reduce(x.alu(Ops.MUL, w), r), i, j))
        return run(ast, [out, a[first:last], right], device="CPU")[0]

    whole = rows(0, 70)
    parts = [(0, 2), (5, 23), (32, 65), (3, 67)] + ([(0, 1), (69, 70)] if layout == "NN" else [])
    for first, last in parts:
        np.testing.assert_array_equal(rows(first, last), whole[first:last])


@needs_unit
def test_what_follows_a_product_reads_its_sums() -> None:
    """Bias, activation and residual in the product's kernel, of batches, on both threads."""
    rng = np.random.default_rng(2)
    x, w, b = (rng.standard_normal(s).astype(BF16.np) for s in ((3, 50, 96), (70, 96), (70,)))
    r = rng.standard_normal((3, 50, 70)).astype(np.float32)
    made = (Tensor(x).float() @ Tensor(w).float().T + Tensor(b).float()).relu() + Tensor(r)
    want = np.maximum(x.astype(np.float64) @ w.astype(np.float64).T + b.astype(np.float64), 0) + r
    np.testing.assert_allclose(made.numpy(), want, atol=1e-4)
