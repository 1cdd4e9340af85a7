"""The devices: `get_device("CPU:1")` gives the one object of that name."""

from __future__ import annotations

import importlib
import re
import threading
from functools import cache

from manygrad.runtime.devices.base import Backend, Kernel
from manygrad.runtime.devices.device import Device
from manygrad.runtime.devices.loaded import LoadedKernels

__all__ = ["Device", "Kernel", "canonical", "get_device"]

# kind -> module, whose BACKEND names the parts; it is imported when a device of the kind is first asked for
BACKENDS = {
    "CPU": "manygrad.runtime.devices.cpu",
    "OPENCL": "manygrad.runtime.devices.opencl",
    "PYTHON": "manygrad.runtime.devices.python",
    "NULL": "manygrad.runtime.devices.null",
    "DISK": "manygrad.runtime.devices.disk",
}

_DEVICES: dict[str, Device] = {}
_LOCK = threading.Lock()


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
    """What all devices of a kind share."""
    backend: Backend = importlib.import_module(BACKENDS[kind]).BACKEND
    return backend, LoadedKernels(backend.builder)


def get_device(name: str) -> Device:
    """The device of that name, made on first use. Raises ValueError for an unknown kind."""
    found = _DEVICES.get(name)
    if found is None:
        key = canonical(name)
        with _LOCK:
            found = _DEVICES.get(key)
            if found is None:
                found = _DEVICES[key] = Device(key, *_kind(key.partition(":")[0]))
            _DEVICES[name] = found
    return found
