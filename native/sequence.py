"""Sequence words in shared memory: publish, and wait with a short spin, yields, and then a futex, always with a limit.

A waiter sleeps on its own process's *doorbell* word. It first says in its *interest* word what it waits for (a code, or
ANY), so that whoever bumps the doorbell makes the system call only when the waiter sleeps for just that. Both sides use
sequentially consistent operations, so a wake-up cannot fall between the check and the sleep. The functions are LLVM IR
(`ir/sequence.ll`: atomics, which ctypes lacks) and run without Python's lock. Linux only.
"""

from __future__ import annotations

import ctypes
import platform
from functools import cache
from typing import Any, NamedTuple

from manygrad.native import futex
from manygrad.native.compiler import compiler
from manygrad.native.graph import clock
from manygrad.native.processor import processor
from manygrad.native.source import module, pause

ANY, NOBODY = 0xFFFFFFFF, 0
REACHED, NOT_YET = 0, 1
# A waiter gives its core away so often before it sleeps, as the process it waits for may need that very core: four on
# two cores hand a message round in 18 us instead of 72. One that took longer than YIELD_NS went to a process that
# computes: then it sleeps, as sleepers are woken at once.
YIELDS, YIELD_NS = 64, 50_000


def constants() -> dict[str, int]:
    """Constants of `sequence.ll`, and of what it needs."""
    return {**futex.constants(), "YIELDS": YIELDS, "YIELD_NS": YIELD_NS, "CLOCK": clock()}


class SequenceFunctions(NamedTuple):
    """Addresses and unsigned 32-bit numbers; `limit` is the address of a `Timespec`.

    `publish(word, value, bell, interest, code)`, `load(word)`, `wait(word, target, bell, interest, code, spins, limit)`
    """

    publish: Any
    load: Any
    wait: Any


@cache
def functions() -> SequenceFunctions:
    """Compiled on first use. Raises `OSError` off Linux."""
    if not futex.available():
        raise OSError(
            f"shared-memory signalling needs Linux on {sorted(futex.SYSTEM_CALL)}, this is {platform.system()} on "
            f"{platform.machine()}; set TRANSPORT=zmq"
        )
    text = module("futex", "clock", pause(processor().architecture), "sequence", **constants())
    at = compiler().functions(text, SequenceFunctions._fields)
    p, u = ctypes.c_void_p, ctypes.c_uint32
    return SequenceFunctions(
        ctypes.CFUNCTYPE(None, p, u, p, p, u)(at["publish"]),
        ctypes.CFUNCTYPE(u, p)(at["load"]),
        ctypes.CFUNCTYPE(u, p, u, p, p, u, ctypes.c_int64, p)(at["wait"]),
    )


class Timespec(ctypes.Structure):
    """The kernel's `struct timespec`, for a relative limit."""

    _fields_ = [("sec", ctypes.c_long), ("nsec", ctypes.c_long)]

    @classmethod
    def of(cls, seconds: float) -> Timespec:
        return cls(int(seconds), int(seconds % 1 * 1e9))
