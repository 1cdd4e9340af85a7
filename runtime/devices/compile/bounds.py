"""CHECK_OOB=1: what a bounds-checked kernel is given, and what it reports.

Such a kernel compares the index of every load and store, lane by lane where it is a vector, with the size of the
buffer. The first violation of a call fills in a record, and the access is not made; the device reads the record after
the call and raises. On CPU the kernel's array of buffers is longer for that, and the kernel returns at once:

    address of slot 0, ..., of slot n-1 | bytes of slot 0, ..., of slot n-1 | address of the record

On OPENCL these are arguments of their own (`runtime/codegen/render/opencl/bounds.py`).
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

from manygrad.errors import OutOfBoundsError
from manygrad.runtime.devices.host import Memory

ACCESSES = ("", "load", "store")
LOCAL, SHARED = -1, -2  # the slots of a thread's scratch memory, and of what a group shares
WORDS = 4  # of a record: access (0: none), slot, index, size in elements


class BoundsRecord:
    """A record in host memory. The first violation stays."""

    def __init__(self) -> None:
        self.words = (ctypes.c_int64 * WORDS)()

    def arguments(self, handles: Sequence[Memory], slots: int) -> ctypes.Array[ctypes.c_void_p]:
        """The array of buffers of a checked kernel that takes `slots`."""
        known = handles[:slots]
        words = [*(h.address for h in known), *(h.nbytes for h in known), ctypes.addressof(self.words)]
        return (ctypes.c_void_p * len(words))(*words)

    def check(self, name: str) -> None:
        """Raises OutOfBoundsError, and clears the record, if kernel `name` has reported."""
        words = tuple(self.words)
        self.words[0] = 0
        report(name, words)


def report(name: str, words: Sequence[int]) -> None:
    """Raises OutOfBoundsError if that is what kernel `name` left in its record."""
    access, slot, index, size = words
    if not access:
        return
    what = {LOCAL: "local memory", SHARED: "shared memory"}.get(slot, f"argument {slot}")
    raise OutOfBoundsError(
        f"kernel {name}: a {ACCESSES[access]} at element {index} of {what}, which has {size}. "
        "An index computed from data (a gather) may be out of range; else the code is wrong: "
        "DEBUG=4 prints it, NOOPT=1 tells whether an optimisation is at fault"
    )
