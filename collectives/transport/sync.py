"""Sequence words in shared memory: publish, and wait with a short spin and then a futex, always with a limit.

A waiter sleeps on its own process's *doorbell* word. It first says in its *interest* word what it waits for (a code, or
ANY), so that whoever bumps the doorbell makes the system call only when the waiter sleeps for just that. Both sides use
sequentially consistent operations, so a wake-up cannot fall between the check and the sleep. The functions are LLVM IR
(atomics, which ctypes lacks) around libc's `syscall`, and run without the GIL. Linux only.
"""

from __future__ import annotations

import ctypes
import platform
from functools import cache
from typing import Any, NamedTuple

from manygrad.collectives.native import compile_ir

ANY, NOBODY = 0xFFFFFFFF, 0
REACHED, NOT_YET = 0, 1
_FUTEX = {"x86_64": 202, "aarch64": 98}
_PAUSE = {"x86_64": 'call void asm sideeffect "pause", ""()', "aarch64": 'call void asm sideeffect "yield", ""()'}

_IR = """
define void @publish(ptr %word, i32 %value, ptr %bell, ptr %interest, i32 %code) {{
  store atomic i32 %value, ptr %word release, align 4
  %old = atomicrmw add ptr %bell, i32 1 seq_cst
  fence seq_cst
  %want = load atomic i32, ptr %interest seq_cst, align 4
  %mine = icmp eq i32 %want, %code
  %any = icmp eq i32 %want, -1
  %wake = or i1 %mine, %any
  br i1 %wake, label %call, label %end
call:
  %r = call i64 (i64, ...) inttoptr (i64 {syscall} to ptr)(
    i64 {futex}, ptr %bell, i32 1, i32 2147483647, ptr null, ptr null, i32 0)
  br label %end
end:
  ret void
}}

define i32 @load(ptr %word) {{
  %v = load atomic i32, ptr %word acquire, align 4
  ret i32 %v
}}

; 0 once (word - target) >= 0 as a signed difference, 1 after a wake-up or the time limit without it
define i32 @wait(ptr %word, i32 %target, ptr %bell, ptr %interest, i32 %code, i64 %spins, ptr %limit) {{
entry:
  br label %spin
spin:
  %i = phi i64 [0, %entry], [%i2, %again]
  %v = load atomic i32, ptr %word acquire, align 4
  %d = sub i32 %v, %target
  %ok = icmp sge i32 %d, 0
  br i1 %ok, label %reached, label %again
again:
  {pause}
  %i2 = add i64 %i, 1
  %more = icmp slt i64 %i2, %spins
  br i1 %more, label %spin, label %announce
announce:
  store atomic i32 %code, ptr %interest seq_cst, align 4
  %seen = load atomic i32, ptr %bell seq_cst, align 4
  fence seq_cst
  %v2 = load atomic i32, ptr %word acquire, align 4
  %d2 = sub i32 %v2, %target
  %ok2 = icmp sge i32 %d2, 0
  br i1 %ok2, label %awake, label %sleep
sleep:
  %r = call i64 (i64, ...) inttoptr (i64 {syscall} to ptr)(
    i64 {futex}, ptr %bell, i32 0, i32 %seen, ptr %limit, ptr null, i32 0)
  %v3 = load atomic i32, ptr %word acquire, align 4
  %d3 = sub i32 %v3, %target
  %ok3 = icmp sge i32 %d3, 0
  br i1 %ok3, label %awake, label %notyet
awake:
  store atomic i32 0, ptr %interest release, align 4
  br label %reached
notyet:
  store atomic i32 0, ptr %interest release, align 4
  ret i32 1
reached:
  ret i32 0
}}
"""


class _Functions(NamedTuple):
    publish: Any
    load: Any
    wait: Any


@cache
def functions() -> _Functions:
    """`publish(word, value, bell, interest, code)`, `load(word)` and
    `wait(word, target, bell, interest, code, spins, limit)`.

    Addresses and unsigned 32-bit numbers; `limit` is the address of a `timespec`. Raises `OSError` off Linux.
    """
    machine = platform.machine()
    if platform.system() != "Linux" or machine not in _FUTEX:
        raise OSError(
            f"shared-memory signalling needs Linux on {sorted(_FUTEX)}, this is {platform.system()} on {machine}; "
            "set TRANSPORT=zmq"
        )
    syscall = ctypes.cast(ctypes.CDLL(None).syscall, ctypes.c_void_p).value
    text = _IR.format(syscall=syscall, futex=_FUTEX[machine], pause=_PAUSE[machine])
    publish, load, wait = compile_ir(text, ["publish", "load", "wait"])
    p, u = ctypes.c_void_p, ctypes.c_uint32
    return _Functions(
        ctypes.CFUNCTYPE(None, p, u, p, p, u)(publish),
        ctypes.CFUNCTYPE(u, p)(load),
        ctypes.CFUNCTYPE(u, p, u, p, p, u, ctypes.c_int64, p)(wait),
    )


class Timespec(ctypes.Structure):
    """The kernel's `struct timespec`, for a relative limit."""

    _fields_ = [("sec", ctypes.c_long), ("nsec", ctypes.c_long)]

    @classmethod
    def of(cls, seconds: float) -> Timespec:
        return cls(int(seconds), int(seconds % 1 * 1e9))
