"""Code for processors other than this one: it compiles, and, for the older ones of the same family, it runs."""

from __future__ import annotations

import ctypes
import platform
import re
from dataclasses import replace

import llvmlite.binding as llvm
import numpy as np
import pytest

from manygrad.native.compiler import Compiler
from manygrad.native.processor import Processor
from manygrad.runtime.codegen.opts import CacheRead, RFactor, Tensorize, Tile, Unroll, Vectorize
from manygrad.runtime.codegen.pipeline import Prepared, prepare
from manygrad.runtime.codegen.render.llvm.printer import render
from manygrad.runtime.codegen.render.llvm.text import ENTRY
from manygrad.runtime.codegen.target import Dot, Machine
from manygrad.runtime.devices.target import AVX2_DOTS, Target
from manygrad.tensor.dtype import dtypes
from manygrad.tensor.uop.ops import Ops
from manygrad.tensor.uop.uop import UOp
from tests.runtime.codegen.kernels import (
    add,
    bytes_product,
    elementwise,
    f32,
    gemm,
    gemm_in_blocks,
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

AVX2 = Target(Processor("x86_64-unknown-linux-gnu", "haswell"), Machine(32, 16))
AVX2_BYTES = replace(AVX2, machine=replace(AVX2.machine, dots=AVX2_DOTS))
SSE = Target(Processor("x86_64-unknown-linux-gnu", "x86-64-v2"), Machine(16, 16))
VNNI = Target(
    Processor("x86_64-unknown-linux-gnu", "alderlake"), Machine(32, 16, dots=(Dot(dtypes.uint8, dtypes.int8, 32),))
)
HALVES = (Dot(dtypes.uint8, dtypes.int8, 64), Dot(dtypes.bfloat16, dtypes.bfloat16, 64))
ZEN = Target(Processor("x86_64-unknown-linux-gnu", "znver4"), Machine(64, 32, scales=True, dots=HALVES))
NEON = Target(
    Processor("aarch64-unknown-linux-gnu", "neoverse-n1"), Machine(16, 32, dots=(Dot(dtypes.int8, dtypes.int8, 16),))
)


def softmax(rows: int, cols: int) -> UOp:
    i, j, r, s = loop(rows, 0), loop(cols, 1), red(cols, 2), red(cols, 3)
    at = lambda c: load(1, add(mul(i, cols), c))  # noqa: E731
    top = reduce(at(r), r, op=Ops.MAX)
    total = reduce(at(s).alu(Ops.SUB, top).alu(Ops.EXP), s)
    return sink(store(0, add(mul(i, cols), j), at(j).alu(Ops.SUB, top).alu(Ops.EXP).alu(Ops.FDIV, total), i, j))


def gather(n: int) -> UOp:
    i = loop(n, 0)
    at = load(2, i, dtypes.int64).cast(dtypes.index)
    return sink(store(0, i, load(1, at, valid=at.alu(Ops.CMPLT, UOp.const(dtypes.index, 5))), i))


KERNELS = {
    "gemm": (gemm(33, 40, 50), [(33, 40), (33, 50), (50, 40)], np.float32),
    "gemm NT": (gemm(33, 40, 50, "NT"), [(33, 40), (33, 50), (40, 50)], np.float32),
    "gemm in blocks": (gemm_in_blocks(33, 40, 13), [(33, 40), (52, 33), (52, 40)], np.float32),
    "gemm bf16": (gemm(20, 40, 50, dtype=dtypes.bfloat16), [(20, 40), (20, 50), (50, 40)], dtypes.bfloat16.np),
    "softmax": (softmax(7, 45), [(7, 45), (7, 45)], np.float32),
    "max int8": (elementwise(lambda a, b: a.alu(Ops.MAX, b), [dtypes.int8] * 2, 77), [77, 77, 77], np.int8),
    "log sin": (elementwise(lambda a: a.alu(Ops.LOG).alu(Ops.SIN), [f32], 60), [60, 60], np.float32),
    "half": (elementwise(lambda a, b: a.alu(Ops.MUL, b), [dtypes.float16] * 2, 50), [50, 50, 50], np.float16),
}


def call(compiler: Compiler, prepared: Prepared, arrays: list[np.ndarray]) -> None:
    """Runs it here, on `arrays`."""
    address = compiler.load(compiler.object_code(prepared.code(render)), [ENTRY])[ENTRY]
    function = ctypes.CFUNCTYPE(
        None, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int64, ctypes.c_int64, ctypes.c_void_p
    )(address)
    buffers = (ctypes.c_void_p * len(arrays))(*[a.ctypes.data for a in arrays])
    scratch = np.zeros(1 << 22, np.uint8)
    total = int(np.prod([-(-n.arg // step) for n, step in prepared.program().parallel]))
    function(ctypes.addressof(buffers), 0, 0, total, scratch.ctypes.data)


def runs_avx2() -> bool:
    return platform.machine() == "x86_64" and bool(llvm.get_host_cpu_features().get("avx2"))


@pytest.mark.parametrize("target", [AVX2, SSE, NEON], ids=lambda t: t.processor.cpu)
@pytest.mark.parametrize("name", [*KERNELS, "gather"])
def test_other_targets(target: Target, name: str) -> None:
    llvm.initialize_all_targets()
    llvm.initialize_all_asmprinters()
    compiler = Compiler(target.processor)
    if name == "gather":
        assert compiler.object_code(prepare(gather(70), target.machine).code(render))
        return
    ast, shapes, dtype = KERNELS[name]
    prepared = prepare(ast, target.machine)
    assert compiler.object_code(prepared.code(render))
    if platform.machine() != "x86_64" or target is NEON or (target is AVX2 and not runs_avx2()):
        return
    if target is SSE and name != "max int8":
        return  # without the processor's FMA and half conversions these would call a library
    rng = np.random.default_rng(0)
    arrays = [(rng.random(s) * 4 + 0.5).astype(dtype) for s in shapes]
    want = run(ast, arrays)[0].astype(np.float64)
    call(compiler, prepared, arrays)
    np.testing.assert_allclose(arrays[0].astype(np.float64), want, rtol=1e-2 if np.dtype(dtype).itemsize == 2 else 1e-5)


@pytest.mark.parametrize(
    ("target", "instruction"), [(VNNI, "vpdpbusd"), (NEON, "sdot")], ids=["alderlake", "neoverse-n1"]
)
@pytest.mark.parametrize("lanes", [None, 2, 16])
def test_products_of_bytes(target: Target, instruction: str, lanes: int | None) -> None:
    """Also in vectors that are shorter or longer than the machine's."""
    llvm.initialize_all_targets()
    llvm.initialize_all_asmprinters()
    opts = None if lanes is None else (Vectorize(1, lanes), Tensorize(2, 4), CacheRead(1, 2))
    prepared = prepare(bytes_product(33, 40, 50), target.machine, opts)
    assert Tensorize(2, 4) in prepared.opts
    assert instruction in Compiler(target.processor).target_machine().emit_assembly(
        llvm.parse_assembly(prepared.code(render))
    )


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize(
    ("target", "instructions"),
    [(VNNI, {4: "vpdpbusd", 8: "vpdpbusd"}), (AVX2_BYTES, {4: "vpmaddubsw", 8: "vpmaddwd"})],
    ids=["alderlake", "haswell"],
)
def test_blocks_of_bytes(target: Target, instructions: dict[int, str], bits: int) -> None:
    """By the instructions that there are, and exact."""
    llvm.initialize_all_targets()
    llvm.initialize_all_asmprinters()
    prepared, arrays = prepare(packed_product(5, 3, 4, bits), target.machine), packed_arrays(5, 3, 4, bits)
    code = prepared.code(render)
    compiler = Compiler(target.processor)
    assert instructions[bits] in compiler.target_machine().emit_assembly(llvm.parse_assembly(code))
    if target is AVX2_BYTES and runs_avx2():
        call(compiler, prepared, arrays)
        np.testing.assert_array_equal(arrays[0], packed_result(*arrays[1:]))


@pytest.mark.parametrize("rows", [1, 4, 5, 23])
@pytest.mark.parametrize("bits", [4, 8])
def test_blocks_at_the_ends_of_their_types(bits: int, rows: int) -> None:
    """The largest weights by the largest and the smallest inputs, in whole blocks: nothing wraps around in 16 bits."""
    prepared = prepare(packed_product(rows, 2, 3, bits), AVX2_BYTES.machine)
    arrays = packed_arrays(rows, 2, 3, bits)
    for x, w in ((127, 255), (-127, 255), (-128, 255), (-128, 0)):
        arrays[0][:], arrays[1][:], arrays[2][:] = 0, x, w
        if runs_avx2():
            call(Compiler(AVX2.processor), prepared, arrays)
            np.testing.assert_array_equal(arrays[0], packed_result(*arrays[1:]))


@pytest.mark.parametrize(
    ("most", "k"), [(15, 32), (15, 30), (15, 33), (15, 64), (31, 16), (31, 20), (127, 16), (255, 16)]
)
@pytest.mark.parametrize("opts", [None, "column", "narrow", "wide", "written out", "lanes"])
def test_sums_of_small_numbers(opts: str | None, most: int, k: int) -> None:
    """Exact at the ends of their types, in vectors of any width, also where the sums do not fit 16 bits."""
    given = {
        None: None, "column": (Vectorize(1, 8), Tensorize(2, 4)), "narrow": (Vectorize(1, 2), Tensorize(2, 4)),
        "wide": (Vectorize(1, 16), Tensorize(2, 4), Tile(0, 2)), "lanes": (RFactor(2, 8), Tensorize(2, 4)),
        "written out": (Vectorize(1, 4), Tensorize(2, 4), Unroll(2, 8)),
    }[opts]  # fmt: skip
    m, n, rng = 5, 24, np.random.default_rng(0)
    prepared = prepare(small_product(m, n, k, most), AVX2_BYTES.machine, given)
    compiler = Compiler(AVX2.processor)
    assert compiler.object_code(prepared.code(render))
    x, w = np.full((m, k), -128, np.int8), np.full((k, n), 255, np.uint8)
    x[1], x[2], x[3] = 127, rng.integers(-128, 128, k), rng.choice([-128, 127], k)
    w[:, 1], w[:, 2:9], w[:, 9:] = 0, rng.integers(0, 256, (k, 7)), rng.choice([0, 255], (k, n - 9), p=[0.1, 0.9])
    arrays = [np.zeros((m, n), np.int32), x, w]
    want = x.astype(np.int32) @ (w & most).astype(np.int32)
    np.testing.assert_array_equal(run(small_product(m, n, k, most), arrays)[0], want)
    if runs_avx2():
        call(compiler, prepared, arrays)
        np.testing.assert_array_equal(arrays[0], want)


def test_a_block_of_small_numbers_is_widened_once() -> None:
    """Four rows by two vectors: 16 products for each two groups of four numbers of a block, added up in 16 bits, and
    then one instruction for each sum to widen it. Of larger numbers each product is widened."""
    code = prepare(packed_product(4, 2, 3), AVX2_BYTES.machine).code(render)
    text = Compiler(AVX2.processor).target_machine().emit_assembly(llvm.parse_assembly(code))
    counts = {name: len(re.findall(rf"\b{name}\b", text)) for name in ("vpmaddubsw", "vpaddw", "vpmaddwd", "vpaddd")}
    assert counts == {"vpmaddubsw": 16, "vpaddw": 16, "vpmaddwd": 8, "vpaddd": 0}


@pytest.mark.parametrize("layout", ["NN", "NT", "TN"])
@pytest.mark.parametrize("lanes", [None, 2, 32])
def test_products_of_bfloat16(layout: str, lanes: int | None) -> None:
    """Two at a time, where the processor can."""
    llvm.initialize_all_targets()
    llvm.initialize_all_asmprinters()
    ast = gemm(33, 40, 50, layout, dtypes.bfloat16)
    opts = None if lanes is None else (Vectorize(1, lanes), Tensorize(2, 2), CacheRead(1, 2))
    prepared = prepare(ast, ZEN.machine, opts)
    assert Tensorize(2, 2) in prepared.opts
    assert "vdpbf16ps" in Compiler(ZEN.processor).target_machine().emit_assembly(
        llvm.parse_assembly(prepared.code(render))
    )
    assert not any(o.kind == "tensorize" for o in prepare(ast, AVX2.machine).opts)
