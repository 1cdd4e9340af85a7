"""NVIDIA's driver, by the package cuda-bindings: which GPUs there are, and its errors as Python's.

Nothing but the driver is needed, no toolkit: PTX comes from LLVM (`ptx.py`), and the driver makes machine code of it.
Both are asked for when a device CUDA is first used. A GPU's primary context is used, the one that other libraries of
the process use, too; the driver keeps one current for each thread, which `Gpu.enter` sees to.
"""

from __future__ import annotations

import importlib
import threading
from dataclasses import dataclass
from functools import cache
from typing import Any

from manygrad.errors import CUDAError, NoCUDAError
from manygrad.runtime.codegen.target import WARP_DOTS, Machine
from manygrad.tensor.environment import CUDA_DEVICE

PACKAGE = (
    "device CUDA needs the package cuda-bindings: pip install cuda-bindings "
    "(of manygrad itself: pip install '.[cuda]'), and NVIDIA's driver"
)
DRIVER = (
    "device CUDA: NVIDIA's driver is not there, or sees no GPU: `nvidia-smi` lists what it sees; "
    "on Debian and Ubuntu the driver is the package nvidia-driver"
)
OUT_OF_MEMORY = 2  # CUDA_ERROR_OUT_OF_MEMORY
NOT_READY = 600  # CUDA_ERROR_NOT_READY
# what a kernel did wrong: from then on every call of this process fails in the same way
STICKY = {
    700: "used an address that is not its own",
    702: "taken more time than the display's watchdog allows",
    710: "failed an assertion",
    714: "overflowed the hardware's stack",
    715: "come to an instruction that is none",
    716: "used an address that is not aligned",
    717: "used an address of the wrong address space",
    718: "jumped to where no instruction is",
    719: "failed",
}
VECTOR_BYTES = 16  # the widest access of a thread
LEAST_ARCH = 70
LEAST_MATRIX_ARCH = 80


def cuda() -> Any:
    """The package's module. Raises NoCUDAError."""
    try:
        return importlib.import_module("cuda.bindings.driver")
    except ImportError as error:
        raise NoCUDAError(f"{PACKAGE} ({error})") from None


def checked(answer: tuple[Any, ...], what: str) -> Any:
    """What a call of the driver gave. Raises CUDAError, or MemoryError, that says what was asked for."""
    code, *found = answer
    number = int(code)
    if number:
        name = getattr(code, "name", str(number))
        if number == OUT_OF_MEMORY:
            raise MemoryError(f"{what}: the GPU has no memory left ({name})")
        if number in STICKY:
            raise CUDAError(
                f"{what}: a kernel that ran before has {STICKY[number]} ({name}); the GPU answers nothing more to "
                "this process. CHECK_OOB=1 finds the access, DEBUG=2 names the kernels as they run"
            )
        raise CUDAError(f"{what}: {name} ({number})")
    return found[0] if len(found) == 1 else tuple(found) if found else None


@dataclass(frozen=True, eq=False)
class Gpu:
    """One of the GPUs that the driver lets this process see."""

    number: int
    name: str
    context: Any
    arch: int  # its compute capability, 90 for 9.0
    units: int  # multiprocessors
    memory_bytes: int
    driver_version: int
    machine: Machine

    def enter(self) -> Any:
        """Makes its context the calling thread's; the driver's module."""
        own = cuda()
        if getattr(_current, "gpu", None) is not self:
            checked(own.cuCtxSetCurrent(self.context), f"GPU {self.number}")
            _current.gpu = self
        return own

    @property
    def key(self) -> bytes:
        """What machine code depends on besides the kernel."""
        return f"{self.name} {self.arch} {self.driver_version} {self.machine}".encode()


_current = threading.local()
_opening = threading.RLock()


def gpu_count() -> int:
    """How many GPUs the driver lets this process see. Raises NoCUDAError where there is none."""
    with _opening:
        return _count()


@cache
def _count() -> int:
    """Raises NoCUDAError where there is none."""
    own = cuda()
    try:
        checked(own.cuInit(0), "cuInit")
        count = int(checked(own.cuDeviceGetCount(), "cuDeviceGetCount"))
    except Exception as error:  # (cuda-bindings has no class of its own for a driver that is not installed)
        raise NoCUDAError(f"{DRIVER} ({error})") from None
    if not count:
        raise NoCUDAError(DRIVER)
    return count


def gpu_of(device: int) -> Gpu:
    """The GPU of device `CUDA:device`, counted from CUDA_DEVICE on: with fewer GPUs than devices several of these share
    one."""
    with _opening:
        return _gpu((int(CUDA_DEVICE.value) + device) % _count())


@cache
def _gpu(number: int) -> Gpu:
    own = cuda()
    device = checked(own.cuDeviceGet(number), f"GPU {number}")
    of = own.CUdevice_attribute

    def attribute(name: str) -> int:
        found = getattr(of, f"CU_DEVICE_ATTRIBUTE_{name}")
        return int(checked(own.cuDeviceGetAttribute(found, device), f"GPU {number}: {name}"))

    arch = 10 * attribute("COMPUTE_CAPABILITY_MAJOR") + attribute("COMPUTE_CAPABILITY_MINOR")
    text = bytes(checked(own.cuDeviceGetName(100, device), f"GPU {number}")).split(b"\0")[0].decode()
    if arch < LEAST_ARCH:
        raise NoCUDAError(f"GPU {number}, {text}, has compute capability {arch / 10}; 7.0 or more is needed")
    units = attribute("MULTIPROCESSOR_COUNT")
    machine = Machine(
        VECTOR_BYTES,
        registers=32,
        cache_bytes=1 << 20,
        cores=units,
        group_items=attribute("MAX_THREADS_PER_BLOCK"),
        shared_bytes=attribute("MAX_SHARED_MEMORY_PER_BLOCK"),
        warp_items=attribute("WARP_SIZE"),
        copies_ahead=arch >= LEAST_MATRIX_ARCH,
        dots=WARP_DOTS if arch >= LEAST_MATRIX_ARCH else (),
    )
    context = checked(own.cuDevicePrimaryCtxRetain(device), f"GPU {number}")
    memory = int(checked(own.cuDeviceTotalMem(device), f"GPU {number}"))
    version = int(checked(own.cuDriverGetVersion(), "cuDriverGetVersion"))
    return Gpu(number, text, context, arch, units, memory, version, machine)
