"""OPENCL besides what all backends do (`test_conformance.py`): what it says where it is not installed, its limits, its
disk cache, its text."""

from __future__ import annotations

import subprocess
import sys
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from manygrad import Tensor
from manygrad.errors import NoOpenCLError
from manygrad.runtime.codegen.lowered import Inst, Low, LoweredProgram
from manygrad.runtime.codegen.pipeline import prepare
from manygrad.runtime.codegen.render.opencl.printer import OpenCLTarget, global_scratch, render
from manygrad.runtime.codegen.render.opencl.text import pieces
from manygrad.runtime.codegen.target import Machine
from manygrad.runtime.devices import get_device
from manygrad.runtime.devices.opencl import driver as opencl_driver
from manygrad.runtime.devices.opencl.driver import driver, vector_bytes_of
from manygrad.tensor.dtype import dtypes
from manygrad.tensor.environment import OPENCL_DEVICE, Context
from manygrad.tensor.uop.ops import Ops
from tests.opencl import needs_opencl
from tests.runtime.codegen.kernels import elementwise, f32, gemm, run

# *** where it is not installed ***


def test_importing_manygrad_does_not_import_pyopencl() -> None:
    code = (
        "import sys, manygrad; from manygrad import Tensor; Tensor([1.0]).numpy(); "
        "import manygrad.runtime.devices.opencl.backend; sys.exit('pyopencl' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


@pytest.fixture
def unknown_driver(monkeypatch: pytest.MonkeyPatch) -> None:
    """As before the first use; what is open stays as it is for the tests to come."""
    monkeypatch.setattr(opencl_driver, "_opened", [])


def test_without_the_package_the_error_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch, unknown_driver: None
) -> None:
    monkeypatch.setitem(sys.modules, "pyopencl", None)
    with pytest.raises(NoOpenCLError, match=r"pip install pyopencl.*apt-get install pocl-opencl-icd"):
        Tensor([1.0], device="OPENCL:90").realize()


class NoPlatforms:
    class Error(Exception):
        pass

    def __init__(self, fails: bool) -> None:
        self.fails = fails

    def get_platforms(self) -> list[Any]:
        if self.fails:
            raise self.Error("PLATFORM_NOT_FOUND_KHR")
        return []


@pytest.mark.parametrize("fails", [False, True])
def test_without_a_driver_the_error_says_what_to_install(
    fails: bool, monkeypatch: pytest.MonkeyPatch, unknown_driver: None
) -> None:
    monkeypatch.setitem(sys.modules, "pyopencl", NoPlatforms(fails))
    with pytest.raises(NoOpenCLError, match="no OpenCL driver is installed.*apt-get install pocl-opencl-icd"):
        Tensor([1.0], device="OPENCL:91").realize()


@needs_opencl
def test_a_number_that_no_device_has_is_told_with_those_there_are(
    monkeypatch: pytest.MonkeyPatch, unknown_driver: None
) -> None:
    monkeypatch.setattr(OPENCL_DEVICE, "common", 1000)
    with pytest.raises(ValueError, match=r"OPENCL_DEVICE=1000: .* 0: "):
        driver()


# *** limits ***


@needs_opencl
def test_more_memory_than_the_device_has_is_a_memory_error() -> None:
    with pytest.raises(MemoryError, match="this OpenCL device gives at most"):
        get_device("OPENCL").alloc(driver().largest_bytes + 1)


@needs_opencl
def test_float64_where_the_device_has_none(monkeypatch: pytest.MonkeyPatch) -> None:
    ast = elementwise(lambda a: a.alu(Ops.ADD, a), [dtypes.float64], 10)
    program = get_device("OPENCL").compile(ast).prepared.program()  # type: ignore[attr-defined]
    with pytest.raises(NotImplementedError, match=r"computes in float64.*cast to float32"):
        render(program, OpenCLTarget(double=False))


# *** code ***


@needs_opencl
def test_a_second_device_of_the_kind_loads_from_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    from manygrad.runtime.devices.opencl import backend

    ast, made = gemm(5, 6, 7), list[str]()
    backend.COMPILED.build(ast)
    monkeypatch.setattr(backend.COMPILED.store, "put", lambda key, payload: made.append("put"))
    kernel = backend.COMPILED.build(ast)
    assert not made and "__kernel" in kernel.source


def test_the_key_of_compiled_code_has_the_driver() -> None:
    class Platform:
        name, version = "P", "1"

    class Device:
        platform, name, version, driver_version = Platform, "D", "2", "7.3"

    machine = opencl_driver.Machine(64, 32)
    old = opencl_driver.Driver(Device, None, True, 2, 1, 1, (), machine, OpenCLTarget())
    assert b"7.3" in old.key
    Device.driver_version = "7.4"
    assert b"7.4" in old.key and b"7.3" not in old.key


def test_pieces_of_a_value() -> None:
    assert pieces(16) == (16,) and pieces(64) == (16,) * 4 and pieces(27) == (16, 8, 2, 1) and pieces(1) == (1,)


def program_of(lanes: int, scratch_bytes: int = 0) -> LoweredProgram:
    """Stores the first 5 of `lanes` numbers, each one more than that of twice its place, from scratch or not."""
    insts: list[Inst] = []

    def emit(op: Any, dtype: Any, *src: Inst, arg: Any = None, lanes: int = 1) -> Inst:
        insts.append(Inst(op, dtype, lanes, src, arg, 0))
        return insts[-1]

    out, given = (emit(Low.PARAM, f32, arg=i) for i in range(2))
    zero = emit(Low.CONST, dtypes.index, arg=0)
    iota = emit(Low.IOTA, dtypes.index, lanes=lanes)
    two = emit(Low.CONST, dtypes.index, arg=2, lanes=lanes)
    places = emit(Ops.MUL, dtypes.index, iota, two, lanes=lanes)
    value = emit(Low.LOAD, f32, given, places, arg=0, lanes=lanes)
    one = emit(Low.CONST, f32, arg=1.0, lanes=lanes)
    more = emit(Ops.ADD, f32, value, one, lanes=lanes)
    if scratch_bytes:
        own = emit(Low.SCRATCH, f32, arg=64)
        emit(Low.STORE, dtypes.void, own, zero, more, arg=0, lanes=lanes)
        more = emit(Low.LOAD, f32, own, zero, arg=0, lanes=lanes)
    turned = emit(Low.SHUFFLE, f32, more, more, arg=tuple(range(lanes))[::-1], lanes=lanes)
    mask = emit(Low.FIRST, dtypes.bool, arg=lanes - 2, lanes=lanes)
    emit(Low.STORE, dtypes.void, out, zero, turned, mask, arg=0, lanes=lanes)
    return LoweredProgram("test", tuple(insts), (), 2, (), scratch_bytes)


@needs_opencl
@pytest.mark.parametrize("lanes", [3, 4, 16, 27, 64])
@pytest.mark.parametrize("local", [None, True, False])
def test_values_of_any_number_of_lanes_and_scratch_memory(lanes: int, local: bool | None) -> None:
    import pyopencl as cl

    target = OpenCLTarget(local_bytes=1 << 14 if local else 0)
    text = render(program_of(lanes, 0 if local is None else 64 + 4 * lanes), target)
    assert ("__local uchar all_scratch" in text) == bool(local) and (global_scratch(text) > 0) == (local is False)
    context, queue = driver().context, cl.CommandQueue(driver().context)
    kernel = cl.Kernel(cl.Program(context, text).build(), "run_part")
    given, out = np.arange(2 * lanes, dtype=np.float32), np.full(lanes, -1, np.float32)
    memory = [cl.Buffer(context, cl.mem_flags.COPY_HOST_PTR, hostbuf=x) for x in (out, given)]
    scratch = [cl.Buffer(context, cl.mem_flags.READ_WRITE, 4096)] if local is False else []
    numbers = [np.int64(n) for n in (0, 0, 1, 1)]
    kernel.set_args(memory[0], numbers[0], memory[1], numbers[1], *numbers[2:], *scratch)
    cl.enqueue_nd_range_kernel(queue, kernel, (1,), (1,))
    cl.enqueue_copy(queue, out, memory[0])
    want = np.full(lanes, -1, np.float32)
    want[: lanes - 2] = (given[::2] + 1)[::-1][: lanes - 2]
    assert (out == want).all()


@needs_opencl
def test_masks_loads_and_selections_are_vectors() -> None:
    code = (
        get_device("OPENCL")
        .compile(elementwise(lambda a, b: a.alu(Ops.CMPLT, b).alu(Ops.WHERE, a, b), [f32, f32], 64))
        .source
    )  # type: ignore[attr-defined]
    lanes = driver().machine.vector_bytes // 4
    if lanes > 1:
        assert f"vload{lanes}(" in code and f"vstore{lanes}(" in code and f"const int{lanes} " in code
    x, y = np.arange(64, dtype=np.float32), np.arange(64, dtype=np.float32)[::-1].copy()
    ast = elementwise(lambda a, b: a.alu(Ops.CMPLT, b).alu(Ops.WHERE, a, b), [f32, f32], 64)
    assert (run(ast, [np.zeros_like(x), x, y], device="OPENCL")[0] == np.minimum(x, y)).all()


@pytest.mark.parametrize(("lanes", "nbytes"), [(0, 16), (1, 16), (4, 16), (8, 32), (16, 64), (32, 64)])
def test_a_device_of_scalars_has_vectors_all_the_same(lanes: int, nbytes: int) -> None:
    """What the heuristic chooses for such a device is legal: its vectors hold two of each type at least."""
    assert vector_bytes_of(SimpleNamespace(preferred_vector_width_float=lanes)) == nbytes
    for d in (dtypes.float64, dtypes.int64, dtypes.float32):
        with Context(SPEC=1):
            prepare(gemm(24, 40, 33, dtype=d), Machine(nbytes, 16, group_items=256))
