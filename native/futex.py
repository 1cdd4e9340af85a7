"""Waiting on a word of memory: Linux's futex (the functions are in `ir/futex.ll`).

Kernel documentation: futex(2), https://man7.org/linux/man-pages/man2/futex.2.html.
"""

from __future__ import annotations

import sys

from manygrad.native.processor import processor

SYSTEM_CALL = {"x86_64": 202, "aarch64": 98}  # its number, by architecture
SHARED, PRIVATE = 0, 128  # a word of all processes that map it; of the threads of one process, which is cheaper


def available() -> bool:
    return sys.platform == "linux" and processor().architecture in SYSTEM_CALL


def constants() -> dict[str, int]:
    """Constants of `ir/futex.ll` and of what calls its functions."""
    return {"FUTEX": SYSTEM_CALL.get(processor().architecture, 0), "SHARED": SHARED, "PRIVATE": PRIVATE}
