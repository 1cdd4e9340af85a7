"""The OpenCL device that all `OPENCL:i` of this process run on: how it is found, and what it says about itself.

`pyopencl` is imported when the device is first used: without it, and without an OpenCL driver, everything else works.
"""

from __future__ import annotations

import ctypes
import importlib
import os
from dataclasses import dataclass
from typing import Any

from manygrad.errors import NoOpenCLError
from manygrad.native.processor import cores
from manygrad.runtime.codegen.render.opencl.printer import OpenCLTarget
from manygrad.runtime.codegen.target import Machine
from manygrad.runtime.devices.opencl.pocl import own_folder
from manygrad.tensor.environment import OPENCL_DEVICE

PACKAGE = (
    "device OPENCL needs the package pyopencl: pip install pyopencl (of manygrad itself: pip install '.[opencl]'); "
    "and a driver: on Debian and Ubuntu apt-get install pocl-opencl-icd ocl-icd-libopencl1 (runs on any processor), "
    "or the one of your GPU's vendor"
)
DRIVER = (
    "device OPENCL: no OpenCL driver is installed: on Debian and Ubuntu apt-get install pocl-opencl-icd "
    "ocl-icd-libopencl1 (runs on any processor), or install the one of your GPU's vendor; `clinfo -l` lists them"
)
WIDEST_BYTES = 64  # vectors of 16 float32, the widest type of OpenCL C
# what a work item loads at once also where a device computes with scalars (a GPU, or a driver that makes vectors of
# work items); less would hold no two float64
LEAST_BYTES = 16
LOCAL_PART = 4  # of a device's local memory a group may take one part in so many, so that several groups fit
LANGUAGE, SUBGROUP_LANGUAGE = "-cl-std=CL1.2", "-cl-std=CL3.0"
OPTIONS = (LANGUAGE, "-w")  # (generated code may compare a value with itself)
EXACT_DIVISION = "-cl-fp32-correctly-rounded-divide-sqrt"


def opencl() -> Any:
    """The package. Raises NoOpenCLError."""
    # pocl's own cache of kernels ends a process when another one compiles the same kernel at that moment
    # ("pocl_binary_get_kernels_metadata: Assertion"), as workers do; binaries are kept in ours
    os.environ.setdefault("POCL_KERNEL_CACHE", "0")
    try:
        return importlib.import_module("pyopencl")
    except ImportError as error:
        raise NoOpenCLError(f"{PACKAGE} ({error})") from None


def devices() -> list[Any]:
    """All OpenCL devices of this machine. Raises NoOpenCLError where there is none."""
    cl = opencl()
    try:
        with own_folder():
            found = [d for p in cl.get_platforms() for d in p.get_devices()]
    except cl.Error as error:
        raise NoOpenCLError(f"{DRIVER} ({error})") from None
    if not found:
        raise NoOpenCLError(DRIVER)
    return found


@dataclass(frozen=True)
class Driver:
    """`is_cpu`: a processor, which runs a group's work items one after the other."""

    device: Any
    context: Any
    is_cpu: bool
    units: int
    largest_bytes: int  # of one piece of memory
    parameter_bytes: int  # of all arguments of a kernel
    options: tuple[str, ...]
    machine: Machine
    target: OpenCLTarget

    @property
    def key(self) -> bytes:
        """Key of compiled code besides the kernel."""
        d = self.device
        about = (d.platform.name, d.platform.version, d.name, d.version, d.driver_version, self.options, self.target)
        return f"{about} {self.machine}".encode()


_opened: list[Driver] = []  # the process's only one: memory and queues belong to its context


def driver() -> Driver:
    """Driver of OPENCL_DEVICE. Raises NoOpenCLError, or ValueError for a number that no device has."""
    if not _opened:
        _opened.append(_open(int(OPENCL_DEVICE.value)))
    return _opened[0]


SUBGROUPS = {"cl_khr_subgroup_shuffle", "cl_intel_required_subgroup_size"}
SUBGROUP_SIZES = 0x4108  # CL_DEVICE_SUB_GROUP_SIZES_INTEL, for which pyopencl has no name


def subgroup_sizes(device: Any) -> tuple[int, ...]:
    """Sizes of subgroups that a kernel may demand; (): the work items of a subgroup exchange no values, or its size is
    unknown."""
    if not set(device.extensions.split()) >= SUBGROUPS:
        return ()
    sizes, nbytes = (ctypes.c_size_t * 16)(), ctypes.c_size_t()
    info = ctypes.CDLL(opencl()._cl.__file__).clGetDeviceInfo
    given = ctypes.c_void_p(device.int_ptr), SUBGROUP_SIZES, ctypes.sizeof(sizes), sizes, ctypes.byref(nbytes)
    return () if info(*given) else tuple(sorted(sizes[: nbytes.value // ctypes.sizeof(ctypes.c_size_t)]))


def vector_bytes_of(device: Any) -> int:
    return min(WIDEST_BYTES, max(LEAST_BYTES, 4 * int(device.preferred_vector_width_float)))


def _open(number: int) -> Driver:
    cl, found = opencl(), devices()
    if not 0 <= number < len(found):
        names = "; ".join(f"{i}: {d.name.strip()} ({d.platform.name.strip()})" for i, d in enumerate(found))
        raise ValueError(f"OPENCL_DEVICE={number}: this machine has the OpenCL devices {names}")
    device = found[number]
    is_cpu = bool(device.type & cl.device_type.CPU)
    vector_bytes = vector_bytes_of(device)
    # (several items a group on a GPU: one alone would leave most of what executes it idle)
    group = 1 if is_cpu else min(64, device.max_work_group_size)
    exact = device.single_fp_config & cl.device_fp_config.CORRECTLY_ROUNDED_DIVIDE_SQRT
    units = max(1, device.max_compute_units)
    cache_bytes = int(device.global_mem_cache_size) or 1 << 18
    subgroups = subgroup_sizes(device)
    return Driver(
        device,
        cl.Context([device]),
        is_cpu,
        units,
        int(device.max_mem_alloc_size),
        int(device.max_parameter_size),
        (*OPTIONS, EXACT_DIVISION) if exact else OPTIONS,
        Machine(
            vector_bytes,
            registers=32 if vector_bytes == WIDEST_BYTES else 16,
            cache_bytes=min(1 << 20, cache_bytes),
            # (of a processor all, also where this worker has a share of them: how a sum is cut must not depend on it)
            cores=cores() if is_cpu else units,
            group_items=int(device.max_work_group_size),
            shared_bytes=int(device.local_mem_size),
            subgroup_items=max(subgroups, default=0),
        ),
        OpenCLTarget(group, int(device.local_mem_size) // LOCAL_PART, bool(device.double_fp_config), subgroups),
    )
