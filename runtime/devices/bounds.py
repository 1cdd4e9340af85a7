"""CHECK_OOB=1: what a bounds-checked kernel is given, and what it reports.

Such a kernel compares the index of every load and store, lane by lane where it is a vector, with the size of the
buffer. At the first violation of a call it fills in a record and returns without making the access; the device reads
the record after the call and raises. Its array of buffers is longer for that:

    address of slot 0, ..., of slot n-1 | bytes of slot 0, ..., of slot n-1 | address of the record
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

from manygrad.runtime.devices.host import Memory

ACCESSES = ("", "load", "store")
LOCAL = -1  # the slot of a thread's scratch memory


class OutOfBoundsError(IndexError):
    """A kernel's load or store lies outside of its buffer; it was not made, and the kernel's outputs are incomplete."""


class Record:
    """Four words: access (0: none), slot, index, size in elements. The first violation stays."""

    def __init__(self) -> None:
        self.words = (ctypes.c_int64 * 4)()

    def arguments(self, handles: Sequence[Memory], slots: int) -> ctypes.Array[ctypes.c_void_p]:
        """The array of buffers of a checked kernel that takes `slots`."""
        known = handles[:slots]
        words = [*(h.address for h in known), *(h.nbytes for h in known), ctypes.addressof(self.words)]
        return (ctypes.c_void_p * len(words))(*words)

    def check(self, name: str) -> None:
        """Raises OutOfBoundsError, and clears the record, if kernel `name` has reported."""
        if not self.words[0]:
            return
        access, slot, index, size = self.words
        self.words[0] = 0
        what = "local memory" if slot == LOCAL else f"argument {slot}"
        raise OutOfBoundsError(
            f"kernel {name}: a {ACCESSES[access]} at element {index} of {what}, which has {size}. "
            "An index computed from data (a gather) may be out of range; else the code is wrong: "
            "DEBUG=4 prints it, NOOPT=1 tells whether an optimisation is at fault"
        )
