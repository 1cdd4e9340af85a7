"""`launcher doctor`: what this host has, what is missing, and the line that installs it.

    launcher doctor [--device CUDA] [--quick] [--json]

Each finding is a line that begins with `ok`, `--` (not here; nothing needs it) or `!!` (something will not work), and
says what to do. Devices are tried by computing on them: a copy of 64 MiB and a product of two 1024 x 1024 matrices,
warm, the best of five. Exit code 1 where something is wrong, 69 where `--device` names a kind that is not here.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import resource
import shutil
import socket
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from manygrad.errors import EXIT_INFEASIBLE, EXIT_USAGE

OK, ABSENT, WRONG = "ok", "--", "!!"
COPY_BYTES, SIDE = 64 << 20, 1024
LEAST_SHARED_BYTES = 64 << 20  # of /dev/shm, which Ray asks for
LEAST_FILES = 1024
PACKAGES = ("numpy", "llvmlite", "pyzmq", "cloudpickle", "cryptography", "ray")
KINDS = ("CPU", "CUDA", "OPENCL")


@dataclass(frozen=True)
class Finding:
    """`state`: ok, -- or !!; `text` says what there is, or what to do."""

    state: str
    name: str
    text: str

    def __str__(self) -> str:
        return f"{self.state}  {self.name:12}{self.text}"


def size(nbytes: float) -> str:
    return f"{nbytes / 2**30:.1f} GiB" if nbytes >= 2**30 else f"{nbytes / 2**20:.0f} MiB"


# *** the host ***


def packages() -> Iterator[Finding]:
    from importlib.metadata import PackageNotFoundError, version

    here = Path(__file__).parents[1]
    try:
        yield Finding(OK, "manygrad", f"{version('manygrad')} in {here}")
    except PackageNotFoundError:
        yield Finding(OK, "manygrad", f"not installed, from {here}")
    yield Finding(OK, "python", f"{platform.python_version()}, {sys.executable}")
    for name in PACKAGES:
        try:
            yield Finding(OK, name, version(name))
        except PackageNotFoundError:
            yield Finding(WRONG, name, f"is not installed: pip install {name}")


def host() -> Iterator[Finding]:
    from manygrad.native.processor import cores, llvm_version, matrix_unit, processor

    p = processor()
    wide = "AVX-512" if p.has("avx512f") else "AVX2" if p.has("avx2") else p.architecture
    units = f"{wide}{', AMX' if p.has('amx-bf16') and matrix_unit() else ''}"
    llvm = ".".join(map(str, llvm_version()))
    yield Finding(OK, "host", f"{socket.gethostname()}, {platform.system()} {platform.release()}")
    yield Finding(OK, "processor", f"{p.cpu} ({units}), {cores()} cores for this process, LLVM {llvm}")
    yield memory()
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft < LEAST_FILES:
        yield Finding(WRONG, "open files", f"at most {soft}: `ulimit -n {min(hard, 4096)}` before a run on workers")
    else:
        yield Finding(OK, "open files", f"at most {soft}")
    yield shared_memory()
    yield cache()


def memory() -> Finding:
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
        kib = {k: int(v.split()[0]) for k, _, v in (line.partition(":") for line in lines)}
        return Finding(OK, "memory", f"{size(kib['MemTotal'] << 10)}, {size(kib['MemAvailable'] << 10)} free")
    except (OSError, ValueError, KeyError):
        return Finding(ABSENT, "memory", "this system does not say")


def shared_memory() -> Finding:
    try:
        free = shutil.disk_usage("/dev/shm").free
    except OSError as error:
        return Finding(ABSENT, "/dev/shm", f"{error.strerror}; Ray writes to /tmp instead")
    if free < LEAST_SHARED_BYTES:
        return Finding(WRONG, "/dev/shm", f"{size(free)} free; in a container: --shm-size=1g")
    return Finding(OK, "/dev/shm", f"{size(free)} free")


def cache() -> Finding:
    """Whether compiled kernels can be kept."""
    from manygrad.tensor.environment import CACHE_DIR

    folder = Path(str(CACHE_DIR.value)).expanduser()
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=folder):
            pass
    except OSError as error:
        return Finding(WRONG, "cache", f"{folder}: {error.strerror}; kernels are compiled in each run: set CACHE_DIR")
    return Finding(OK, "cache", f"{folder}, {size(shutil.disk_usage(folder).free)} free on its disk")


def ray() -> Finding:
    """Whether a cluster is named, and answers. (Asking Ray itself would take seconds.)"""
    address = os.environ.get("RAY_ADDRESS", "")
    named = Path("/tmp/ray/ray_current_cluster")
    if not address and named.exists():
        address = named.read_text().strip()
    place, _, port = address.rpartition(":")
    if not place or not port.isdigit():
        return Finding(
            ABSENT, "cluster", "no Ray runs here; the launcher starts one for each run (--address joins one)"
        )
    try:
        socket.create_connection((place.strip("[]"), int(port)), timeout=2).close()
    except OSError as error:
        return Finding(WRONG, "cluster", f"{address} does not answer ({error}): `ray stop`, or unset RAY_ADDRESS")
    return Finding(OK, "cluster", f"a Ray head answers at {address}: --address {address}")


# *** devices ***


def device(kind: str, quick: bool) -> Iterator[Finding]:
    """What a kind of device is, and how fast."""
    from manygrad.errors import NoCUDAError, NoOpenCLError

    try:
        for name, text in described(kind):
            rates = "" if quick else f"; {rates_of(name)}"
            yield Finding(OK, name, f"{text}{rates}")
    except (NoCUDAError, NoOpenCLError) as error:
        yield Finding(ABSENT, kind, str(error))
    except Exception as error:  # (what a driver does that is there and does not work is not known)
        yield Finding(WRONG, kind, f"{type(error).__name__}: {error}")


def described(kind: str) -> Iterator[tuple[str, str]]:
    """(device, what it is) of all there are of a kind."""
    if kind == "CUDA":
        from manygrad.runtime.devices.cuda.driver import gpu_count, gpu_of

        for i in range(gpu_count()):
            g = gpu_of(i)
            version = f"{g.driver_version // 1000}.{g.driver_version % 1000 // 10}"
            yield (
                f"CUDA:{i}",
                f"{g.name}, compute capability {g.arch / 10}, {g.units} multiprocessors, {size(g.memory_bytes)}, "
                f"driver for CUDA {version}",
            )
    elif kind == "OPENCL":
        from manygrad.runtime.devices.opencl.driver import driver

        own = driver().device
        yield "OPENCL:0", f"{own.name.strip()}, {own.platform.name.strip()}, {own.platform.version.strip()}"
    else:
        yield "CPU:0", "kernels by LLVM"


def rates_of(name: str) -> str:
    """How fast it copies and multiplies."""
    from manygrad.runtime.devices import get_device
    from manygrad.runtime.jit.tiny_jit import TinyJit
    from manygrad.tensor.tensor import Tensor

    wait = get_device(name).synchronize

    def best(f: Callable[[], Tensor]) -> float:
        step = TinyJit(lambda: f().realize())
        took = []
        for _ in range(8):
            wait()
            began = time.perf_counter()
            step()
            wait()
            took.append(time.perf_counter() - began)
        return min(took[3:])

    x = Tensor.ones(COPY_BYTES // 4, device=name).contiguous().realize()
    a, b = (Tensor.rand(SIDE, SIDE, device=name).realize() for _ in range(2))
    copied = 2 * COPY_BYTES / best(lambda: x + 1)
    return f"copies {copied / 1e9:.1f} GB/s, multiplies {2 * SIDE**3 / best(lambda: a @ b) / 1e9:.0f} GFLOP/s (float32)"


# *** the command ***


def examine(kinds: tuple[str, ...] = KINDS, quick: bool = False) -> Iterator[Finding]:
    """All findings, as they are made."""
    yield from packages()
    yield from host()
    yield ray()
    for kind in kinds:
        yield from device(kind, quick)


def main(words: list[str]) -> int:
    """The command line; returns the exit code."""
    parser = argparse.ArgumentParser("launcher doctor", description="What this host has, and what is missing.")
    parser.add_argument("--device", choices=KINDS, type=str.upper, help="a kind that has to be here, else 69")
    parser.add_argument("--quick", action="store_true", help="measure nothing")
    parser.add_argument("--json", action="store_true", help="the findings as JSON, at the end")
    try:
        given = parser.parse_args(words)
    except SystemExit as e:
        return EXIT_USAGE if e.code else 0
    found: list[Finding] = []
    for one in examine((given.device,) if given.device else KINDS, given.quick):
        found.append(one)
        if not given.json:
            print(one, flush=True)
    if given.json:
        made: list[dict[str, Any]] = [asdict(one) for one in found]
        print(json.dumps(made, indent=1))
    if given.device and not any(x.state == OK and x.name.startswith(given.device) for x in found):
        return EXIT_INFEASIBLE
    return int(any(x.state == WRONG for x in found))


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
