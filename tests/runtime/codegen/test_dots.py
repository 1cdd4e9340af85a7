"""Products that the processor adds up four at a time (bytes: exact for all values) or two (bfloat16),
chosen where they are worth it."""

from __future__ import annotations

import warnings

import numpy as np
import pytest

from manygrad import Tensor, TinyJit
from manygrad.runtime.codegen.analysis.describe import signature
from manygrad.runtime.codegen.kernel.dots import BYTES, is_dot, is_total, use_dots
from manygrad.runtime.codegen.loops.show import show
from manygrad.runtime.codegen.opts import CacheRead, Opts, Reorder, RFactor, Tensorize, Tile, Unroll, Vectorize
from manygrad.runtime.codegen.pipeline import prepare
from manygrad.runtime.codegen.target import Dot, Machine
from manygrad.runtime.devices.target import AVX2_DOTS, host_target
from manygrad.tensor.dtype import DType, dtypes
from manygrad.tensor.environment import Context
from manygrad.tensor.uop.ops import Ops
from manygrad.tensor.uop.uop import UOp
from tests.fuzz.products import check
from tests.runtime.codegen.kernels import (
    add,
    bytes_product,
    gemm,
    load,
    loop,
    mul,
    packed_arrays,
    packed_product,
    packed_result,
    red,
    reduce,
    run,
    sink,
    small_product,
    store,
)
from tests.runtime.codegen.test_opts import run_with

X86 = (Dot(dtypes.uint8, dtypes.int8, 64),)
WORDS = AVX2_DOTS
ARM = (Dot(dtypes.int8, dtypes.int8, 16), Dot(dtypes.uint8, dtypes.uint8, 16))
PAIRS = [(a, b) for a in BYTES for b in BYTES]


@pytest.mark.parametrize("dots", [X86, WORDS, ARM], ids=["x86", "avx2", "arm"])
@pytest.mark.parametrize("types", PAIRS, ids=lambda p: f"{p[0].name} {p[1].name}")
def test_in_the_types_that_the_machine_has(types: tuple[DType, DType], dots: tuple[Dot, ...]) -> None:
    """As it computes without, at the ends of both types;
    a factor is moved, and the other one added up, only where it must be."""
    ast = bytes_product(4, 5, 20, "NT", types)
    sig = signature(use_dots(ast, dots))
    pairs = [(d.left, d.right) for d in dots]
    assert all(is_dot(u.src[0]) and tuple(s.dtype for s in u.src[0].src) in pairs for u in sig.reduces)
    as_it_is = types in pairs or types[::-1] in pairs
    assert [is_total(u) for u in sig.reduces].count(True) == (0 if as_it_is else 1)
    rng = np.random.default_rng(0)
    arrays = [
        np.zeros((4, 5), np.int32),
        *(rng.choice([d.min, d.max, 0, 1], s).astype(d.np) for d, s in zip(types, ((4, 20), (5, 20)))),
    ]
    want = arrays[1].astype(np.int32) @ arrays[2].T.astype(np.int32)
    np.testing.assert_array_equal(run(ast, arrays)[0], want)
    np.testing.assert_array_equal(run(ast, arrays, device="CPU")[0], want)


def test_only_sums_of_products_of_bytes() -> None:
    for ast in (gemm(8, 8, 32), gemm(8, 8, 32, dtype=dtypes.int8), bytes_product(8, 8, 15)):
        assert use_dots(ast, X86) is ast
    assert use_dots(bytes_product(8, 8, 16), ()) is bytes_product(8, 8, 16)


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("m", [1, 3, 8, 21])
def test_blocks_of_bytes_with_scales(m: int, bits: int) -> None:
    """Exact in the interpreter and on this machine: the sums of blocks, in int32, stand in the sum of all blocks."""
    ast, arrays = packed_product(m, 3, 5, bits), packed_arrays(m, 3, 5, bits)
    want = packed_result(*arrays[1:])
    for device in ("PYTHON", "CPU"):
        np.testing.assert_array_equal(run(ast, arrays, device=device)[0], want)


@pytest.mark.parametrize("dots", [X86, WORDS, ARM, ()], ids=["x86", "avx2", "arm", "none"])
def test_blocks_of_bytes_are_multiplied_where_the_machine_can(dots: tuple[Dot, ...]) -> None:
    """Rows in vectors, blocks written out, weights read once for all rows of the other factor."""
    machine = Machine(64 if dots == X86 else 32 if dots == WORDS else 16, 32, dots=dots)
    opts = set(prepare(packed_product(64, 4, 5), machine).opts)
    if dots:
        assert {Tensorize(6, 4), Unroll(4, 2), Unroll(5, 4), Reorder(1, 0), Tile(2, 16)} <= opts
        assert Vectorize(2, machine.vector_bytes // 4) in opts
    else:
        assert not any(o.kind == "tensorize" for o in opts)


def test_small_numbers_are_multiplied_by_fewer_instructions() -> None:
    def taken(ast: UOp) -> list[Dot]:
        return [u.src[0].arg for u in signature(use_dots(ast, WORDS)).reduces if is_dot(u.src[0])]

    assert taken(packed_product(1, 1, 2)) == [WORDS[0]._replace(most=15)]
    assert taken(packed_product(1, 1, 2, bits=8)) == [WORDS[1]]


@pytest.mark.parametrize("most", [0, 1, 3, 7, 15, 31, 63, 127])
def test_so_many_sums_of_two_products_fit_16_bits(most: int) -> None:
    """Those of the largest numbers do, and one more would not."""
    count, largest = WORDS[0]._replace(most=most).words_most, 2 * most * 128
    assert count * largest <= 32767 < (count + 1) * largest if most else count == 0
    assert WORDS[1].words_most == 0 and X86[0].words_most == 0


@pytest.mark.parametrize(("most", "terms"), [(15, 32), (31, 16), (7, 72), (3, 168), (1, 508)])
def test_sums_that_fit_16_bits_stay_in_them(most: int, terms: int) -> None:
    """Up to the last term for which that is certain, in whatever pieces the sum is made, but in one; elsewhere not."""
    machine = Machine(32, 16, dots=WORDS)
    column = (Vectorize(1, 8), Tensorize(2, 4))

    def held(ast: UOp, opts: Opts | None = column) -> bool:
        return " in 16 bits" in show(prepare(ast, machine, opts).tree())

    assert all(held(small_product(4, 16, k, most)) for k in (terms, max(16, terms - 1)))
    assert held(small_product(4, 16, terms, most), (*column, Unroll(2, 8)))
    assert not held(small_product(4, 16, terms + 1, most))
    assert not held(small_product(4, 16, terms, most), (Vectorize(1, 8),))
    assert not held(small_product(4, 16, terms, most), (RFactor(2, 8), Tensorize(2, 4)))
    assert not held(small_product(4, 16, terms, 2 * most + 1)) and not held(small_product(4, 16, 16, 255))
    assert " in 16 bits" not in show(prepare(small_product(4, 16, terms, most), Machine(64, 32, dots=X86)).tree())


def test_blocks_of_small_numbers_are_a_loop_for_several_rows() -> None:
    """Unpacked, a block of two vectors a step overflows 16 registers; of one row nothing is held."""
    machine = Machine(32, 16, dots=WORDS)
    for bits, whole in ((4, {Unroll(4, 2)}), (8, set())):
        opts = prepare(packed_product(64, 4, 5, bits), machine).opts
        assert {Tile(0, 4), Tile(2, 16)} <= set(opts) and {o for o in opts if o.kind == "unroll"} == whole
    one = prepare(packed_product(1, 4, 5), machine)
    assert {Unroll(4, 2), Unroll(5, 4)} <= set(one.opts) and " in 16 bits" in show(one.tree())
    single = Machine(32, 16, dots=(Dot(dtypes.uint8, dtypes.int8, 32),))  # one instruction: AVX-VNNI
    assert {Tile(0, 2), Unroll(4, 2), Unroll(5, 4)} <= set(prepare(packed_product(64, 4, 5), single).opts)


@pytest.mark.parametrize("layout", ["NN", "NT", "TN", "TT"])
@pytest.mark.parametrize("shape", [(40, 70, 200), (64, 64, 64), (1, 40, 33), (7, 5, 16), (130, 257, 511)], ids=str)
def test_products_of_bfloat16(layout: str, shape: tuple[int, int, int]) -> None:
    """Sums of small whole numbers are exact in any order; infinities and NaN spread as ever."""
    m, n, k = shape
    rng = np.random.default_rng(0)
    a, b = (rng.integers(-3, 4, s).astype(dtypes.bfloat16.np) for s in ((m, k), (k, n)))
    a[0, 0], a[m // 2, -1] = np.inf, np.nan
    given = [x.T.copy() if letter == "T" else x for x, letter in zip((a, b), layout)]
    with np.errstate(all="ignore"):
        want = (a.astype(np.float32) @ b.astype(np.float32)).astype(dtypes.bfloat16.np)
    arrays = [np.zeros((m, n), dtypes.bfloat16.np), *given]
    with Context(CHECK_OOB=1):
        checked = run(gemm(m, n, k, layout, dtypes.bfloat16), arrays, device="CPU")[0]
    for got in (run(gemm(m, n, k, layout, dtypes.bfloat16), arrays, device="CPU")[0], checked):
        np.testing.assert_array_equal(got.astype(np.float32), want.astype(np.float32))


@pytest.mark.parametrize("layout", ["NN", "NT", "TN", "TT"])
@pytest.mark.parametrize("d", [dtypes.bfloat16, dtypes.int8], ids=str)
@pytest.mark.parametrize("k", [17, 40, 67])
def test_products_in_single_lanes(layout: str, d: DType, k: int) -> None:
    """What is added up beyond the last of an odd number is 0, also where both factors lie apart along the sum."""
    rng, terms = np.random.default_rng(0), 4 // d.itemsize
    kind = np.int32 if d.is_int else np.float32
    ast = bytes_product(3, 5, k, layout, (d, d)) if d.is_int else gemm(3, 5, k, layout, d)
    a, b = (rng.integers(-3, 4, (k, n)).astype(d.np) for n in (3, 5))
    if d.is_float:
        a[-1, 0] = np.inf
    with np.errstate(all="ignore"):
        want = (a.T.astype(kind) @ b.astype(kind)).astype(np.int32 if d.is_int else d.np)
    try:
        prepare(ast, host_target().machine, (Tensorize(2, terms),))
    except ValueError as error:
        pytest.skip(f"this machine has no such instruction: {error}")
    given = [a.copy() if layout[0] == "T" else a.T.copy(), b.T.copy() if layout[1] == "T" else b]
    got = run_with(ast, [np.zeros_like(want), *given], (Tensorize(2, terms),))
    np.testing.assert_array_equal(got.astype(kind), want.astype(kind))


def two_products(m: int, n: int, k: int, shares: bool = True) -> UOp:
    """c[m, n] = (sum over k of a b) * (sum over k of a d); `shares`: over one range."""
    i, j, r = loop(m, 0), loop(n, 1), red(k, 2)

    def product(slot: int, r: UOp) -> UOp:
        a, b = (load(1, add(mul(i, k), r), dtypes.bfloat16), load(slot, add(mul(j, k), r), dtypes.bfloat16))
        return reduce(a.cast(dtypes.float32).alu(Ops.MUL, b.cast(dtypes.float32)), r)

    value = product(2, r).alu(Ops.MUL, product(3, r if shares else red(k, 3)))
    return sink(store(0, add(mul(i, n), j), value, i, j))


@pytest.mark.parametrize("shares", [True, False])
@pytest.mark.parametrize("shape", [(1, 1536, 576), (2, 96, 64), (8, 70, 33), (64, 48, 32)], ids=str)
def test_two_products_of_bfloat16_over_one_range(shape: tuple[int, int, int], shares: bool) -> None:
    """They are multiplied by one decision about the range. (There were two: it was said that the kernel cannot take
    them, and it ran without any.)"""
    m, n, k = shape
    ast = two_products(m, n, k, shares)
    machine = Machine(64, 32, 1 << 20, cores=2, dots=(Dot(dtypes.bfloat16, dtypes.bfloat16, 64),))
    opts = prepare(ast, machine).opts
    assert [o.kind for o in opts].count("tensorize") == 1 and len(opts) > 2
    rng = np.random.default_rng(0)
    a, b, d = (rng.integers(-3, 4, s).astype(dtypes.bfloat16.np) for s in ((m, k), (n, k), (n, k)))
    want = (a.astype(np.float32) @ b.astype(np.float32).T) * (a.astype(np.float32) @ d.astype(np.float32).T)
    got = run(ast, [np.zeros((m, n), np.float32), a, b, d], device="CPU")[0]
    np.testing.assert_array_equal(got, want)


@pytest.mark.parametrize("shape", [(1, 40, 32), (4, 100, 100), (20, 33, 64)], ids=str)
def test_a_range_that_another_sum_goes_over_too(shape: tuple[int, int, int]) -> None:
    """(x + 1) @ b.T beside x @ b.T: x + 1 is no plain read, so the range that both share is not cut into pairs. (It
    was: it was said that the kernel cannot take it.)"""
    m, n, k = shape
    i, j, r = loop(m, 0), loop(n, 1), red(k, 2)
    a, b = load(1, add(mul(i, k), r), dtypes.bfloat16), load(2, add(mul(j, k), r), dtypes.bfloat16)
    more = a.alu(Ops.ADD, UOp.const(dtypes.bfloat16, 1))
    sums = [reduce(x.cast(dtypes.float32).alu(Ops.MUL, b.cast(dtypes.float32)), r) for x in (a, more)]
    ast = sink(store(0, add(mul(i, n), j), sums[0].alu(Ops.ADD, sums[1]), i, j))
    machine = Machine(64, 32, 1 << 20, cores=2, dots=(Dot(dtypes.bfloat16, dtypes.bfloat16, 64),))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert not any(o.kind == "tensorize" for o in prepare(ast, machine).opts)
    rng = np.random.default_rng(0)
    x, y = (rng.integers(-3, 4, s).astype(dtypes.bfloat16.np) for s in ((m, k), (n, k)))
    got = run(ast, [np.zeros((m, n), np.float32), x, y], device="CPU")[0]
    np.testing.assert_array_equal(got, (2 * x.astype(np.float32) + 1) @ y.astype(np.float32).T)


def test_of_bfloat16_matrix_products_alone() -> None:
    """Not what is read under a condition, added up over several ranges, or squared; and their sums are in float32."""
    dots = (Dot(dtypes.bfloat16, dtypes.bfloat16, 64),)
    wide = lambda *args, **more: load(*args, dtypes.bfloat16, **more).cast(dtypes.float32)  # noqa: E731
    i, j, r, s = loop(8, 0), loop(8, 1), red(32, 2), red(32, 3)
    a, b = wide(1, add(mul(i, 32), r)), wide(2, add(mul(j, 32), r))
    inside = r.alu(Ops.CMPLT, UOp.const(dtypes.index, 30))
    kernel = lambda value, *ranges: sink(store(0, add(mul(i, 8), j), reduce(value, *ranges), i, j))  # noqa: E731
    for ast in (
        kernel(a.alu(Ops.MUL, a), r), kernel(wide(1, add(mul(i, 32), r), valid=inside).alu(Ops.MUL, b), r),
        kernel(wide(1, add(mul(i, 1024), mul(s, 32), r)).alu(Ops.MUL, wide(2, add(mul(j, 1024), mul(s, 32), r))), s, r),
        gemm(8, 8, 32), gemm(8, 8, 15, dtype=dtypes.bfloat16), gemm(8, 8, 32, dtype=dtypes.float16),
    ):  # fmt: skip
        assert use_dots(ast, dots) is ast
    assert all(
        is_dot(u.src[0]) and u.dtype is dtypes.float32
        for u in signature(use_dots(kernel(a.alu(Ops.MUL, b), r), dots)).reduces
    )


def test_what_the_heuristic_makes_of_them() -> None:
    """Columns are packed in groups, the sums of rows are made along the rows;
    rows that do not lie along the reduction are packed, too."""
    machine = Machine(64, 32, cache_bytes=2 << 20, cores=2, dots=X86)
    across = {layout: set(prepare(bytes_product(256, 256, 256, layout), machine).opts) for layout in ("NN", "NT", "TN")}
    for layout in ("NN", "NT"):
        assert {Tensorize(2, 4), CacheRead(1, 2), RFactor(3, 16), Tensorize(3, 4)} <= across[layout]
    assert {Tensorize(2, 4), CacheRead(1, 2), CacheRead(0, 1)} <= across["TN"]
    vector = set(prepare(bytes_product(1, 256, 256, "NT"), machine).opts)  # a row by a matrix: nothing is used twice
    assert {"rfactor", "tensorize"} <= {o.kind for o in vector} and not {"cache_read", "vectorize"} & {
        o.kind for o in vector
    }
    without = prepare(bytes_product(256, 256, 256), Machine(64, 32))
    assert not any(o.kind == "tensorize" for o in without.opts) and len(signature(without.ast).reduces) == 1


@pytest.mark.parametrize("dtype", [dtypes.bfloat16, dtypes.int8], ids=lambda d: d.name)
@pytest.mark.parametrize("shape", [(576, 1536, 512), (2048, 2048, 2048), (96, 1000, 8190), (1536, 576, 511)], ids=str)
def test_long_products_of_rows_that_lie_apart(shape: tuple[int, int, int], dtype: DType) -> None:
    """They are cut into parts of whole groups. (Into parts of 103 iterations: it was said that the kernel cannot take
    them, and it ran without any.)"""
    m, n, k = shape
    machine = Machine(64, 32, 1 << 20, cores=2, dots=(*X86, Dot(dtypes.bfloat16, dtypes.bfloat16, 64)))
    ast = gemm(m, n, k, "TN", dtype) if dtype.is_float else bytes_product(m, n, k, "TN", (dtype, dtype))
    assert {"tensorize", "cache_read"} <= {o.kind for o in prepare(ast, machine).opts}


@pytest.mark.parametrize("shape", [(1, 70, 200), (33, 70, 200), (64, 64, 64), (5, 3, 17)], ids=str)
def test_a_product_with_its_scale_is_one_exact_kernel(shape: tuple[int, int, int]) -> None:
    m, n, k = shape
    rng = np.random.default_rng(0)
    x, w = (rng.choice([-128, -127, 0, 127], s).astype(np.int8) for s in ((m, k), (n, k)))
    scale = rng.random(n).astype(np.float32)
    tx, tw, ts = (Tensor(v).realize() for v in (x, w, scale))
    step = TinyJit(lambda: ((tx.int() @ tw.int().T).float() * ts).realize())
    step()
    result = step()
    assert len(step.captured.items) == 1
    np.testing.assert_array_equal(
        result.numpy(), (x.astype(np.int32) @ w.T.astype(np.int32)).astype(np.float32) * scale
    )


def test_a_line_of_symbolic_length_is_not_written_out() -> None:
    """Its terms, four an instruction, are known to leave no rest; 64 of them together are not."""
    check(
        {"shape": (64, 2, 512), "types": ("int8", "int8"), "layout": "NN", "batch": (2,), "devices": 1, "step": 16,
         "made": False, "then": "nothing", "seed": 0}
    )  # fmt: skip


@pytest.mark.parametrize(("k", "n"), [(2, 16), (4, 33), (17, 64)])
def test_a_sum_of_bytes_inside_of_another(k: int, n: int) -> None:
    """In one kernel only the inner one takes four terms an instruction: it depends on the range of the outer one."""
    rng = np.random.default_rng(4)
    x, a, b = (rng.integers(0, 4, s).astype(np.uint8) for s in (k, (n, k), (1, n)))
    got = Tensor(x) @ Tensor(a).T @ Tensor(b).T
    np.testing.assert_array_equal(got.numpy(), x @ a.T @ b.T)
