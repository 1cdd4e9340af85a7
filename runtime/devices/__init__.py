"""The devices: `get_device("CPU:1")` gives the one object of that name in the current Runtime."""

from __future__ import annotations

import importlib
import re
import threading
from functools import cache
from typing import TYPE_CHECKING

from manygrad.runtime.current import current
from manygrad.runtime.devices.base import Backend, Kernel
from manygrad.runtime.devices.compile.loaded import LoadedKernels
from manygrad.runtime.devices.device import Device

if TYPE_CHECKING:
    from manygrad.collectives.transport.arena import Arena

__all__ = ["Device", "Devices", "Kernel", "canonical", "get_device"]

# kind -> module, whose BACKEND names the parts; it is imported when a device of the kind is first asked for
BACKENDS = {
    "CPU": "manygrad.runtime.devices.cpu.backend",
    "CUDA": "manygrad.runtime.devices.cuda.backend",
    "OPENCL": "manygrad.runtime.devices.opencl.backend",
    "PYTHON": "manygrad.runtime.devices.python",
    "NULL": "manygrad.runtime.devices.null",
    "DISK": "manygrad.runtime.devices.disk",
}


@cache
def canonical(name: str) -> str:
    """The local name of a device: `cpu` -> `CPU:0`, `CPU:1@3` -> `CPU:1`, `DISK:/a/b` as it is."""
    local = re.sub(r"@\d+$", "", name)
    kind, colon, rest = local.partition(":")
    kind = kind.upper()
    if kind not in BACKENDS:
        raise ValueError(
            f"unknown device {name!r}: the kinds are {', '.join(BACKENDS)}; write for example 'CPU', 'CPU:1' or "
            "'DISK:/path/to/file' (the default is the environment variable DEVICE)"
        )
    if kind == "DISK":
        if not rest:
            raise ValueError(f"device {name!r} names no file: write 'DISK:/path/to/file'")
        return f"DISK:{rest}"
    if colon and not rest.isdecimal():
        raise ValueError(f"device {name!r}: after '{kind}:' a number is expected, as in '{kind}:0'")
    return f"{kind}:{int(rest) if rest else 0}"


@cache
def _kind(kind: str) -> tuple[Backend, LoadedKernels]:
    """The backend and the kernels that all devices of a kind share, whoever's they are: kernels are loaded once a
    process."""
    backend: Backend = importlib.import_module(BACKENDS[kind]).BACKEND
    return backend, LoadedKernels(backend.builder)


class Devices:
    """Devices that one worker has opened; with an `arena`, the memory of its CPUs comes from there."""

    def __init__(self, arena: Arena | None = None) -> None:
        self.arena = arena
        self._opened: dict[str, Device] = {}  # by each name under which it was asked for
        self._lock = threading.RLock()

    def get(self, name: str) -> Device:
        """The device of that name, opened on first use. Raises ValueError for an unknown kind."""
        found = self._opened.get(name)
        if found is None:
            key = canonical(name)
            with self._lock:
                found = self._opened.get(key)
                if found is None:  # (a destructor may open it meanwhile)
                    found = self._opened.setdefault(key, Device(key, *_kind(key.partition(":")[0]), self.arena))
                self._opened[name] = found
        return found

    def trim(self) -> None:
        """Gives freed memory back to the system."""
        for device in {*self._opened.values()}:
            device.trim()


def get_device(name: str) -> Device:
    """Device of the current Runtime, by name."""
    device: Device = current().devices.get(name)
    return device
