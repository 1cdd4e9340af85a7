"""Where a value holds, and what emitted instructions have to be."""

from __future__ import annotations

from dataclasses import replace
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest

from manygrad import Tensor
from manygrad.nn import functional as F
from manygrad.runtime.codegen.analysis.affine import TileAnalysis
from manygrad.runtime.codegen.emit.emission import Emission
from manygrad.runtime.codegen.emit.spec import verify
from manygrad.runtime.codegen.loops.lanes import Lanes, Tiling
from manygrad.runtime.codegen.lowered import Inst, Low, LoweredProgram
from manygrad.runtime.codegen.opts import CacheRead, Tile, Unroll, Vectorize
from manygrad.runtime.codegen.pipeline import prepare
from manygrad.runtime.devices.target import host_target
from manygrad.tensor.dtype import dtypes
from manygrad.tensor.uop import Ops, UOp
from tests.runtime.codegen.kernels import I, add, loop, mul, red, reduce, run, sink, store
from tests.runtime.codegen.kernels import load as load_of
from tests.runtime.codegen.test_opts import run_with

RNG = np.random.default_rng(0)


@pytest.mark.parametrize("width", [1, 7, 16, 31, 33, 48, 65])
@pytest.mark.parametrize("pad", [1, 9, 15, 16, 17, 33])
def test_a_sum_over_padded_rows(width: int, pad: int) -> None:
    """The last tile has masks of its own, which those of whole tiles are not."""
    x = RNG.integers(1, 50, (2, width)).astype(np.float32)
    for d in ("float32", "float64", "int32"):
        got = F.pad(Tensor(x).cast(d), (pad, pad)).sum(0)
        np.testing.assert_array_equal(got.numpy(), np.pad(x, ((0, 0), (pad, pad))).sum(0))


def test_the_case_that_was_reported() -> None:
    x = np.arange(66, dtype=np.float32).reshape(2, 33)
    got = F.pad(Tensor(x), (9, 9)).sum(0).tolist()
    assert got == [0.0] * 9 + [33.0 + 2 * i for i in range(33)] + [0.0] * 9


@pytest.mark.parametrize(("dilation", "padding"), [(64, 32), (17, 40), (8, 15)])
@pytest.mark.parametrize("d", ["float32", "float64"])
def test_dilated_convolutions_with_their_gradients(dilation: int, padding: int, d: str) -> None:
    x, w = RNG.integers(-4, 5, (1, 2, 70)).astype(d), RNG.integers(-4, 5, (3, 2, 3)).astype(d)
    given, weight = Tensor(x, requires_grad=True), Tensor(w, requires_grad=True)
    got = F.conv1d(given, weight, dilation=dilation, padding=padding)
    wide, length = np.pad(x, ((0, 0), (0, 0), (padding, padding))), 70 + 2 * padding - 2 * dilation
    taps = [wide[:, :, k * dilation : k * dilation + length] for k in range(3)]
    np.testing.assert_array_equal(got.numpy(), sum(np.einsum("bcl,oc->bol", t, w[:, :, k]) for k, t in enumerate(taps)))
    ahead = RNG.integers(-4, 5, got.shape).astype(d)
    (got * Tensor(ahead)).sum().backward()
    back = np.zeros_like(wide)
    for k in range(3):
        back[:, :, k * dilation : k * dilation + length] += np.einsum("bol,oc->bcl", ahead, w[:, :, k])
    np.testing.assert_array_equal(given.grad.numpy(), back[:, :, padding:-padding])
    np.testing.assert_array_equal(weight.grad.numpy(), np.stack([np.einsum("bol,bcl->oc", ahead, t) for t in taps], 2))


@pytest.mark.parametrize("d", ["float32", "float64"])
def test_transposed_convolution(d: str) -> None:
    x, w = RNG.integers(-4, 5, (1, 2, 33)).astype(d), RNG.integers(-4, 5, (2, 3, 3)).astype(d)
    want = np.zeros((1, 3, 32 * 2 + 2 * 9 + 1), d)
    for k in range(3):
        want[:, :, 9 * k : 9 * k + 65 : 2] += np.einsum("bcl,co->bol", x, w[:, :, k])
    np.testing.assert_array_equal(F.conv_transpose1d(Tensor(x), Tensor(w), stride=2, dilation=9).numpy(), want)


def turned_product(m: int, n: int, k: int, shift: int) -> UOp:
    """c = a @ b.T, where b's columns are rolled by `shift` in each block of 32."""
    i, j, r = loop(m, 0), loop(n, 1), red(k, 2)
    column = add(mul(r.alu(Ops.IDIV, I(32)), 32), add(r, shift).alu(Ops.MOD, I(32)))
    value = load_of(1, add(mul(i, k), r)).alu(Ops.MUL, load_of(2, add(mul(j, k), column)))
    return sink(store(0, add(mul(i, n), j), reduce(value, r), i, j))


@pytest.mark.parametrize("unroll", [1, 2, 16, 32, 64])
@pytest.mark.parametrize("shift", [1, 8, 16])
def test_squares_of_a_reduction_that_is_unrolled_further(shift: int, unroll: int) -> None:
    """An operand is packed in squares of 16 iterations, of which the unrolled loop takes 32: where the column wraps
    around is known of the latter alone."""
    ast = turned_product(12, 64, 64, shift)
    arrays = [np.zeros((12, 64), np.float32), *(RNG.integers(-3, 4, s).astype(np.float32) for s in (12 * 64, 64 * 64))]
    opts = (Vectorize(1, 16), Tile(1, 32), Tile(0, 4), CacheRead(1, 2), *((Unroll(2, unroll),) * (unroll > 1)))
    np.testing.assert_array_equal(run_with(ast, arrays, opts), run(ast, arrays)[0])


# *** SPEC ***


def test_a_tile_that_begins_elsewhere_than_index_expressions_take_it_to() -> None:
    """What was wrong with squares: their tiles of 16 were taken to begin at multiples of 32."""

    def without_squares(tiling: Tiling, lanes: Lanes) -> TileAnalysis:
        return analysis_of(tiling, replace(lanes, square=None))

    analysis_of = Tiling._analysis
    opts = (Vectorize(1, 16), Tile(1, 32), Tile(0, 4), CacheRead(1, 2), Unroll(2, 32))
    prepare(turned_product(12, 64, 64, 8), MACHINE, opts).tree()
    with (
        patch.object(Tiling, "_analysis", without_squares),
        pytest.raises(AssertionError, match="begins at multiples of 16, they take it to begin at multiples of 32"),
    ):
        prepare(turned_product(12, 64, 64, 8), MACHINE, opts).tree()


def padded_sum() -> UOp:
    """out[i] = sum over k < 2 of x[33 k + i - 9], where 9 <= i < 42."""
    i, k = loop(51, 0), red(2, 1)
    inside = I(8).alu(Ops.CMPLT, i).alu(Ops.AND, i.alu(Ops.CMPLT, I(42)))
    return sink(store(0, i, reduce(load_of(1, add(i, mul(k, 33), -9), valid=inside), k), i))


MACHINE = replace(host_target().machine, vector_bytes=64, registers=32)


def kept_with_its_instruction(e: Emission, u: UOp, key: Any, inst: Inst) -> None:
    """What the values did: an instruction of the outermost block is remembered there."""
    remember(e, u, key, inst)
    e.values[key].append(e.values[key][-1]._replace(block=e.blocks[inst.depth]))


remember = Emission.remember


def test_a_value_that_is_kept_too_far_out_is_an_error() -> None:
    prepare(padded_sum(), MACHINE).program()
    with patch.object(Emission, "remember", kept_with_its_instruction), pytest.raises(AssertionError, match="rests on"):
        prepare(padded_sum(), MACHINE).program()


def inst(op: Ops | Low, *src: Inst, dtype: Any = dtypes.index, arg: Any = None, lanes: int = 1) -> Inst:
    return Inst(op, dtype, lanes, src, arg, 0)


def wrong(*insts: Inst) -> str:
    with pytest.raises(AssertionError) as error:
        verify(LoweredProgram("k", insts, (), 1, ()))
    return str(error.value)


def test_rules_of_instructions() -> None:
    zero, ten = inst(Low.CONST, arg=0), inst(Low.CONST, arg=10)
    pointer = inst(Low.PARAM, dtype=dtypes.float32, arg=0)
    begin, end = inst(Low.LOOP, zero, ten, arg=1), inst(Low.END, dtype=dtypes.void)
    found = inst(Low.LOAD, pointer, begin, dtype=dtypes.float32, arg=0)
    write = inst(Low.STORE, pointer, begin, found, dtype=dtypes.void, arg=0)
    verify(LoweredProgram("k", (zero, ten, pointer, begin, found, write, end), (), 1, ()))

    assert "stands before" in wrong(zero, ten, pointer, begin, write, found, end)
    assert "stands before" in wrong(zero, ten, pointer, begin, found, end, write)  # of a block that has ended
    assert "a block ends" in wrong(zero, ten, pointer, begin, found, write)
    assert "a block ends" in wrong(zero, end)
    mask = inst(Low.FIRST, dtype=dtypes.bool, arg=3, lanes=8)
    guarded = inst(Low.LOAD, pointer, zero, mask, dtype=dtypes.float32, arg=0, lanes=16)
    assert "one condition" in wrong(zero, pointer, mask, guarded)
    assert "some of them" in wrong(inst(Low.FIRST, dtype=dtypes.bool, arg=9, lanes=8))
    one, two = (inst(Low.CONST, dtype=d, arg=1) for d in (dtypes.float32, dtypes.float64))
    assert "same type" in wrong(one, two, inst(Ops.ADD, one, two, dtype=dtypes.float32))
    assert "lanes" in wrong(one, inst(Ops.NEG, one, dtype=dtypes.float32, lanes=8))
    assert "a variable" in wrong(one, inst(Low.SET, one, one, dtype=dtypes.void))
    assert "steps" in wrong(zero, ten, inst(Low.LOOP, zero, ten, arg=0), end)


def test_a_program_of_the_compiler_is_verified() -> None:
    """SPEC=1, as in all tests: what stands where its sources do not is found before it is printed."""

    def misplaced(e: Emission, x: Inst, y: Inst) -> Inst:
        return Inst(Ops.ADD, dtypes.index, 1, (x, y), None, 0)

    with patch.object(Emission, "add", misplaced), pytest.raises(AssertionError, match="stands before"):
        prepare(padded_sum(), MACHINE).program()
