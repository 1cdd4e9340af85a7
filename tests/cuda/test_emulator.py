"""The emulator notices what a GPU would answer with a fault or with wrong numbers: errors are planted in PTX that is
right, one at a time."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence

import numpy as np
import pytest

from manygrad.runtime.codegen.analysis.describe import evaluate_int
from manygrad.runtime.codegen.opts import Opts, named
from manygrad.runtime.codegen.pipeline import prepare
from manygrad.runtime.codegen.render.llvm.nvptx import NVPTXTarget, render, scratch_of_thread, threads_of
from manygrad.runtime.codegen.target import Machine
from manygrad.runtime.devices.cuda.ptx import ptx_of
from manygrad.tensor.uop.ops import Ops
from manygrad.tensor.uop.uop import UOp
from tests.cuda.arithmetic import fma32, fma64, quotient, shifted
from tests.cuda.emulator import launch, parsed
from tests.cuda.memory import DeviceMemory, Fault, Traffic
from tests.runtime.codegen.kernels import elementwise, f32, gemm, run

MACHINE = Machine(16, 32, cores=4, group_items=1024, shared_bytes=48 << 10, subgroup_items=32)
TILED = (named("tile", 0, 4), named("tile", 1, 4), named("parallel", 2), named("bind", 0, 4), named("bind", 1, 8))
SHARED = (*TILED, named("cache_shared", 2, 1, 16), named("cache_shared", 2, 2, 16))
TARGET = NVPTXTarget()
ACROSS = (named("parallel", 2), named("bind", 1, 2), named("bind_reduce", 2, 16))
RNG = np.random.default_rng(0)


def result(
    ast: UOp,
    arrays: Sequence[np.ndarray],
    opts: Opts | None,
    change: Callable[[str], str] | None = None,
    machine: Machine = MACHINE,
    per: int = 1,
    target: NVPTXTarget = TARGET,
    traffic: Traffic | None = None,
) -> np.ndarray:
    """Argument 0 after a kernel was run in the emulator, with its PTX changed; `per`: indices of the grid that a group
    runs one after the other."""
    program = prepare(ast, machine, opts).program()
    ptx = ptx_of(render(program, target), 90)
    if change is not None:
        assert change(ptx) != ptx
        ptx = change(ptx)
    memory, places = DeviceMemory(1 << 26), []
    memory.traffic = traffic
    for a in arrays:
        places.append(memory.alloc(a.nbytes))
        memory.view(places[-1], a.nbytes)[:] = a.view(np.uint8)
    threads = (*threads_of(program, target), 1, 1)[:3]
    total = math.prod(-(-evaluate_int(n, {}) // step) for n, step in program.parallel)
    blocks = -(-total // (per if program.group else per * threads[0]))
    words = [*places, total, per]
    if program.scratch_bytes:
        words.append(memory.alloc(scratch_of_thread(program) * blocks * math.prod(threads)))
    launch(parsed(ptx), memory, (blocks, 1, 1), threads, [w.to_bytes(8, "little") for w in words])
    return memory.view(places[0], arrays[0].nbytes).view(arrays[0].dtype).copy()


def floats(*sizes: int) -> list[np.ndarray]:
    return [RNG.standard_normal(n).astype(np.float32) for n in sizes]


CASES: dict[str, tuple[UOp, list[int], Opts | None]] = {
    "elementwise": (elementwise(lambda a, b: a.alu(Ops.MUL, b).alu(Ops.EXP), [f32, f32], 4001), [4001] * 3, None),
    "product": (gemm(17, 19, 23), [17 * 19, 17 * 23, 23 * 19], None),
    "groups": (gemm(48, 96, 48), [48 * 96, 48 * 48, 48 * 96], TILED),
    "shared memory": (gemm(48, 96, 48), [48 * 96, 48 * 48, 48 * 96], SHARED),
    "across a warp": (gemm(6, 8, 64), [6 * 8, 6 * 64, 64 * 8], ACROSS),
}


@pytest.mark.parametrize("name", CASES)
def test_kernels_give_what_python_gives(name: str) -> None:
    ast, sizes, opts = CASES[name]
    arrays = floats(*sizes)
    got = result(ast, arrays, opts)
    np.testing.assert_allclose(got, run(ast, [a.copy() for a in arrays])[0], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("size", [1, 2, 4])
def test_a_signed_number_is_widened_where_it_is_loaded(size: int) -> None:
    ptx = f""".visible .entry kernel(.param .u64 to, .param .u64 from) .reqntid 1, 1, 1 {{
    .reg .b64 %rd<4>; ld.param.b64 %rd1, [to]; ld.param.b64 %rd2, [from];
    ld.global.s{8 * size} %rd3, [%rd2]; st.global.b64 [%rd1], %rd3; ret; }}"""
    memory = DeviceMemory(1 << 16)
    places = [memory.alloc(8), memory.alloc(8)]
    memory.view(places[1], size)[:] = np.array([-3], f"i{size}").view(np.uint8)
    launch(parsed(ptx), memory, (1, 1, 1), (1, 1, 1), [p.to_bytes(8, "little") for p in places])
    assert memory.view(places[0], 8).view(np.int64).tolist() == [-3]


def without(pattern: str, count: int = 0) -> Callable[[str], str]:
    return lambda ptx: re.sub(pattern, "", ptx, count=count)


def swapped(pattern: str, text: str, count: int = 1) -> Callable[[str], str]:
    return lambda ptx: re.sub(pattern, text, ptx, count=count)


PLANTED = {
    "a barrier is left out": ("shared memory", without(r"\tbarrier[^\n]*\n"), "race"),
    "the second barrier is left out": (
        "shared memory",
        without(r"\tbarrier[^\n]*\n(?=(?:(?!barrier)[\s\S])*$)"),
        "race",
    ),
    "a thread writes to its neighbour's place": (
        "shared memory",
        swapped(r"st\.shared\.b32 (\s*)\[(%rd?\d+)(?:\+\d+)?\]", r"st.shared.b32 \1[\2+4]"),
        "race|of .* that a block shares",
    ),
    "an access one vector too far": (
        "elementwise",
        swapped(r"ld\.global\.v4\.b32 (\s*)(\{[^}]*\}), \[(%rd\d+)(\+-?\d+)?\]", r"ld.global.v4.b32 \1\2, [\3+65536]"),
        "in no block",
    ),
    "an address that is no multiple": (
        "elementwise",
        swapped(r"(ld\.global\.v4\.b32 \s*\{[^}]*\}, \[%rd\d+)(?:\+-?\d+)?\]", r"\1+4]"),
        "no multiple of 16",
    ),
    "threads that never reach the barrier": (
        "shared memory",
        swapped(r"(\tbarrier)", r"\tmov.u32 %r1, %tid.x;\n\tsetp.eq.b32 %p1, %r1, 0;\n\t@%p1 ret;\n\1"),
        "",
    ),
    "an exchange that one thread misses": (
        "across a warp",
        swapped(r"(\tshfl)", r"\tmov.u32 %r1, %tid.x;\n\tsetp.eq.b32 %p1, %r1, 3;\n\t@%p1 ret;\n\1"),
        "missing",
    ),
    "an exchange with another thread": (
        "across a warp",
        swapped(r"(shfl\.sync\.bfly\.b32 [^;]*, )8(, 31)", r"\g<1>4\2"),
        "",
    ),
    "a register that is not written": ("product", swapped(r"\tfma\.rn\.f32[^\n]*\n", ""), ""),
    "a sum that begins elsewhere": ("product", swapped(r"0f00000000", "0f3F800000"), ""),
}


@pytest.mark.parametrize("name", PLANTED)
def test_a_planted_error_is_noticed(name: str) -> None:
    """By a Fault, or by the numbers."""
    case, change, message = PLANTED[name]
    ast, sizes, opts = CASES[case]
    arrays = floats(*sizes)
    try:
        got = result(ast, arrays, opts, change)
    except Fault as fault:
        assert re.search(message, str(fault)), fault
        return
    assert not message, f"no fault, where {message} was expected"
    want = run(ast, [a.copy() for a in arrays])[0]
    assert not np.allclose(got, want, rtol=1e-4, atol=1e-5)


def test_arithmetic_is_pythons() -> None:
    """Rounded once, as exact fractions say; shifts and divisions at the ends."""
    from fractions import Fraction

    a, b, c = (RNG.standard_normal(400).astype(np.float32) * 2.0 ** RNG.integers(-30, 30, 400) for _ in range(3))
    for f, t in ((fma32, np.float32), (fma64, np.float64)):
        x, y, z = a.astype(t), b.astype(t), c.astype(t)
        z[::2] = (-(x * y) + z * t(1e-9))[::2]
        exact = [Fraction(float(p)) * Fraction(float(q)) + Fraction(float(r)) for p, q, r in zip(x, y, z)]
        if t is np.float64:
            assert f(x, y, z).tolist() == [float(e) for e in exact]
        else:  # (a float of a fraction is rounded once to float64: nearest float32 of the fraction by comparison)
            for got, e in zip(f(x, y, z), exact):
                near = [np.nextafter(got, s, dtype=np.float32) for s in (-np.inf, np.inf)]
                assert all(abs(Fraction(float(got)) - e) <= abs(Fraction(float(n)) - e) for n in near)
    ints = np.array([7, -7, 7, -7, -(2**31), 5], np.int32)
    by = np.array([2, 2, -2, -2, -1, 0], np.int32)
    assert quotient(ints, by).tolist() == [3, -3, -3, 3, -(2**31), -1]
    assert shifted(np.array([1, 1, 1], np.uint32), np.array([31, 32, 2**31], np.uint32), True).tolist() == [2**31, 0, 0]
    assert shifted(np.array([-8, -8], np.int64), np.array([1, 64], np.uint32), False).tolist() == [-4, -1]
