"""CUDA besides what all backends do (`runtime/devices/test_conformance.py`): what it says where it is not installed,
memory, graphs, streams, faults, what is left."""

from __future__ import annotations

import gc
import subprocess
import sys
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from manygrad import Tensor, TinyJit
from manygrad.errors import CUDAError, NoCUDAError, OutOfBoundsError
from manygrad.runtime.devices import get_device
from manygrad.runtime.devices.cuda import driver as cuda_driver
from manygrad.runtime.devices.cuda.driver import checked, gpu_of
from manygrad.tensor.environment import Context
from manygrad.tensor.uop.ops import Ops
from tests.cuda.driver import CUresult, Emulated
from tests.cuda.install import emulated, emulator
from tests.runtime.codegen.kernels import elementwise, f32

# *** where it is not installed ***


def test_importing_manygrad_does_not_import_cuda_bindings() -> None:
    code = (
        "import sys, manygrad; from manygrad import Tensor; Tensor([1.0]).numpy(); "
        "import manygrad.runtime.devices.cuda.backend; sys.exit('cuda.bindings.driver' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


@pytest.fixture
def unknown_gpus() -> Iterator[None]:
    """As before the first use; what is open stays as it is for the tests to come."""
    count, gpu = cuda_driver._count, cuda_driver._gpu
    cuda_driver._count, cuda_driver._gpu = (__import__("functools").cache(f.__wrapped__) for f in (count, gpu))
    yield
    cuda_driver._count, cuda_driver._gpu = count, gpu


def test_without_the_package_the_error_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch, unknown_gpus: None
) -> None:
    monkeypatch.setitem(sys.modules, "cuda.bindings.driver", None)
    with pytest.raises(NoCUDAError, match=r"pip install cuda-bindings.*NVIDIA's driver"):
        Tensor([1.0], device="CUDA:90").realize()


class NoDriver(SimpleNamespace):
    def cuInit(self, flags: int) -> tuple[Any, ...]:
        raise RuntimeError("libcuda.so.1 is not there")


class NoGpus(SimpleNamespace):
    def cuInit(self, flags: int) -> tuple[Any, ...]:
        return (CUresult.CUDA_SUCCESS,)

    def cuDeviceGetCount(self) -> tuple[Any, ...]:
        return CUresult.CUDA_SUCCESS, 0


@pytest.mark.parametrize("driver", [NoDriver, NoGpus])
def test_without_a_driver_the_error_says_what_to_install(
    driver: type, monkeypatch: pytest.MonkeyPatch, unknown_gpus: None
) -> None:
    monkeypatch.setitem(sys.modules, "cuda.bindings.driver", driver())
    with pytest.raises(NoCUDAError, match=r"sees no GPU.*nvidia-smi"):
        Tensor([1.0], device="CUDA:91").realize()


# *** memory ***


def test_a_copy_waits_for_both_devices() -> None:
    """What is copied was written before, and is not written over before it is copied."""
    x = Tensor(np.arange(64, dtype=np.float32), device="CUDA:0").realize()
    for i in range(5):
        x = (x + 1).to(f"CUDA:{(i + 1) % 2}").realize()
        kept = x * 1
        x.assign(x * 2).realize()
        assert kept.tolist() == (x / 2).tolist()
    want = np.arange(64, dtype=np.float32)
    for _ in range(5):
        want = (want + 1) * 2
    assert x.tolist() == want.tolist()


@emulated
def test_more_memory_than_there_is_is_a_memory_error() -> None:
    with pytest.raises(MemoryError, match=r"CUDA:0: \d+ bytes.*no memory left"):
        get_device("CUDA").alloc(emulator().memories[0].size + 1)


@emulated
def test_nothing_is_left_on_the_device() -> None:
    def work() -> float:
        @TinyJit
        def step(a: Tensor, b: Tensor) -> Tensor:
            return ((a + 1).exp() @ b).sum().realize()

        ones = [Tensor.ones(32, 32, device="CUDA:5").contiguous().realize() for _ in range(2)]
        return [step(*ones).item() for _ in range(4)][-1]

    device = get_device("CUDA:5")
    found = []
    for _ in range(8):  # (in the first ones the loop is recorded)
        work()
        gc.collect()
        device.trim()
        device.synchronize()
        found.append(emulator().left)
    assert len({*found[4:]}) == 1, found


# *** replay ***


@emulated
def test_a_captured_step_is_one_graph_and_reads_the_memory_of_each_call() -> None:
    @TinyJit
    def step(a: Tensor, b: Tensor) -> Tensor:
        return ((a + 1).exp() @ b).realize()

    rng = np.random.default_rng(0)
    graphs = []
    for _ in range(6):
        a, b = (rng.standard_normal((8, 8)).astype(np.float32) for _ in range(2))
        got = step(Tensor(a, device="CUDA").realize(), Tensor(b, device="CUDA").realize()).numpy()
        np.testing.assert_allclose(got, np.exp(a + 1) @ b, rtol=1e-4, atol=1e-4)
        graphs.append(emulator().counts["graphs"])
    assert graphs[-1] - graphs[1] <= 1, graphs  # made once, then its nodes' arguments change


# *** faults ***


@emulated
def test_an_index_out_of_range_is_named_with_check_oob() -> None:
    with Context(CHECK_OOB=1):
        x = Tensor(np.arange(10, dtype=np.float32), device="CUDA:6").realize()
        assert (x + 1).sum().item() == 55.0
        device = get_device("CUDA:6")
        kernel = device.compile(elementwise(lambda a: a.alu(Ops.ADD, a), [f32], 16))
        small = device.alloc(40)
        with pytest.raises(OutOfBoundsError, match="element 10 of argument .*, which has 10"):
            kernel([small, small])
            device.synchronize()


@pytest.mark.parametrize("code", [700, 719])
def test_a_fault_says_that_the_gpu_is_lost(code: int) -> None:
    with pytest.raises(CUDAError, match=r"a kernel that ran before has .*CHECK_OOB=1"):
        checked((CUresult(code),), "a copy")


def test_a_driver_that_is_out_of_memory() -> None:
    with pytest.raises(MemoryError, match="a copy: the GPU has no memory left"):
        checked((CUresult(2), None), "a copy")


def test_work_happens_when_it_is_waited_for() -> None:
    """The emulated driver does nothing before: data that is read too early is not there."""
    own = Emulated(gpus=1, size=1 << 20)
    own.cuCtxSetCurrent(own.contexts[0])
    stream = own.cuStreamCreate(0)[1]
    at = own.cuMemAllocAsync(16, stream)[1]
    data = np.arange(16, dtype=np.uint8)
    own.cuMemcpyHtoDAsync(at, data.ctypes.data, 16, stream)
    assert own.view(at, 16).tolist() != data.tolist()
    own.cuStreamSynchronize(stream)
    assert own.view(at, 16).tolist() == data.tolist()


def test_devices_beyond_the_gpus_share_them() -> None:
    count = cuda_driver._count()
    assert gpu_of(count) is gpu_of(0) and get_device(f"CUDA:{count}").queue is not get_device("CUDA:0").queue
