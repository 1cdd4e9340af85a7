"""Code for processors other than this one: it compiles, and, for the older ones of the same family, it runs."""

from __future__ import annotations

import ctypes
import platform
from dataclasses import replace

import llvmlite.binding as llvm
import numpy as np
import pytest

from manygrad.native.compiler import Compiler
from manygrad.native.processor import Processor
from manygrad.runtime.codegen.dots import Dot
from manygrad.runtime.codegen.opts import CacheRead, Tensorize, Vectorize
from manygrad.runtime.codegen.pipeline import Prepared, prepare
from manygrad.runtime.codegen.target import Machine
from manygrad.runtime.devices.target import AVX2_DOTS, Target
from manygrad.runtime.render.llvm import render
from manygrad.runtime.render.text import ENTRY
from manygrad.tensor.dtype import dtypes
from manygrad.tensor.uop.ops import Ops
from manygrad.tensor.uop.uop import UOp
from tests.runtime.codegen.kernels import (
    add,
    bytes_product,
    elementwise,
    f32,
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
    if (
        platform.machine() != "x86_64"
        or target is NEON
        or (target is AVX2 and not llvm.get_host_cpu_features().get("avx2"))
    ):
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
    assert instruction in Compiler(target.processor).machine.emit_assembly(llvm.parse_assembly(prepared.code(render)))


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
    assert instructions[bits] in compiler.machine.emit_assembly(llvm.parse_assembly(code))
    if target is AVX2_BYTES and platform.machine() == "x86_64" and llvm.get_host_cpu_features().get("avx2"):
        call(compiler, prepared, arrays)
        np.testing.assert_array_equal(arrays[0], packed_result(*arrays[1:]))


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
    assert "vdpbf16ps" in Compiler(ZEN.processor).machine.emit_assembly(llvm.parse_assembly(prepared.code(render)))
    assert not any(o.kind == "tensorize" for o in prepare(ast, AVX2.machine).opts)
