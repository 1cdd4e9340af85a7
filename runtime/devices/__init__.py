"""The devices: `get_device("CPU:1")` gives the one object of that name."""

from __future__ import annotations

import importlib
import re
import threading
from functools import cache

from manygrad.runtime.devices.base import Device, Kernel

__all__ = ["Device", "Kernel", "canonical", "get_device"]

# kind -> (module, class); a backend is imported when it is first asked for
BACKENDS = {
    "CPU": ("cpu", "CPUDevice"),
    "PYTHON": ("python", "PythonDevice"),
    "NULL": ("null", "NullDevice"),
    "DISK": ("disk", "DiskDevice"),
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
            f"unknown device {name!r}: the kinds are {', '.join(BACKENDS)}; write for example 'CPU', 'CPU:1' or 'DISK:/path/to/file' "
            "(the default is the environment variable DEVICE)"
        )
    if kind == "DISK":
        if not rest:
            raise ValueError(f"device {name!r} names no file: write 'DISK:/path/to/file'")
        return f"DISK:{rest}"
    if colon and not rest.isdecimal():
        raise ValueError(f"device {name!r}: after '{kind}:' a number is expected, as in '{kind}:0'")
    return f"{kind}:{int(rest) if rest else 0}"


def get_device(name: str) -> Device:
    """The device of that name, made on first use. Raises ValueError for an unknown kind."""
    found = _DEVICES.get(name)
    if found is None:
        key = canonical(name)
        with _LOCK:
            found = _DEVICES.get(key)
            if found is None:
                module, cls = BACKENDS[key.partition(":")[0]]
                found = getattr(importlib.import_module(f"{__name__}.{module}"), cls)(key)
                _DEVICES[key] = found
            _DEVICES[name] = found
    return found
