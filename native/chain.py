"""The table of a chain: kernels that run one after the other for one block, then for the next (`ir/chain.ll`).

    kernels | moves | words                                    counts
    (function, first word, totals, pitch) a kernel            the total of its loop is at address totals + block * pitch
    which words are offsets into the thread's memory           one number a move
    the words: the pointers that all kernels take              an offset is counted from where `own_bytes` begins

Its threads keep behind their scratch memory: the number of the block, the words as addresses, then (from a page on)
temporaries.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterable, Sequence
from typing import NamedTuple

CHAIN_BYTES = 16 << 20  # of a thread, for all of this; the system provides what is written
PAGE_BYTES = 4096


class Row(NamedTuple):
    """One kernel: its function, where its words begin, the address of the totals of its loop, bytes from one block's to
    the next one's."""

    function: int
    first_word: int
    totals: int
    pitch: int


def temporaries_at(words: int) -> int:
    """The offset in a thread's memory from which temporaries may lie, if kernels take `words` pointers together."""
    return -(-8 * (1 + words) // PAGE_BYTES) * PAGE_BYTES


def chain_table(rows: Sequence[Row], moves: Sequence[int], words: Sequence[int]) -> ctypes.Array[ctypes.c_int64]:
    flat: Iterable[int] = (len(rows), len(moves), len(words), *(x for row in rows for x in row), *moves, *words)
    flat = tuple(flat)
    return (ctypes.c_int64 * len(flat))(*flat)
