"""emit_object: LLVM's code generator, for several threads at once.

llvmlite lets one thread at a time into LLVM, whose code generator takes most of a compilation. LLVM itself compiles
modules of different contexts side by side, each by a target machine of its own. So that one function of llvmlite's
library is called without llvmlite's lock; whatever else is asked of LLVM goes through it, and is short.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from functools import cache
from typing import Any

from llvmlite.binding import ffi

FUNCTION = "LLVMPY_TargetMachineEmitToMemory"  # (machine, module, object code or assembly, error) -> buffer


def emit_object(machine: Any, module: Any) -> bytes:
    """The object code of a module. No other thread may use its context or `machine` meanwhile."""
    emit = _without_lock()
    if emit is None:
        return bytes(machine.emit_object(module))
    with ffi.OutputString() as error:
        buffer = emit(machine, module, 1, error)
        if not buffer:
            raise RuntimeError(str(error))
    try:
        return ctypes.string_at(ffi.lib.LLVMPY_GetBufferStart(buffer), ffi.lib.LLVMPY_GetBufferSize(buffer))
    finally:
        ffi.lib.LLVMPY_DisposeMemoryBuffer(buffer)


@cache
def _without_lock() -> Callable[..., Any] | None:
    """None where an llvmlite has no such function: then its own is called, one thread at a time."""
    try:
        locked = getattr(ffi.lib, FUNCTION)
        emit = getattr(ctypes.CDLL(ffi.lib._name), FUNCTION)
        emit.argtypes, emit.restype = locked.argtypes, locked.restype
    except (AttributeError, OSError):
        return None
    return emit
