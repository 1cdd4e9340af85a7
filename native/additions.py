"""Amounts that native code adds to counters, which are fields of ctypes structures (`ir/additions.ll`)."""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Sequence
from typing import Any

from manygrad.native.memory import table

TEXT_BITS = 20  # of the number of a collective's text, below the count in the word that says what has been entered
AMOUNT_WORDS = 3  # of a row: address of the counter, bits of the amount, whether they are floats


def place(of: ctypes.Structure, name: str) -> int:
    """The address of a field."""
    return ctypes.addressof(of) + int(getattr(type(of), name).offset)


class Additions:
    """The rows of (structure, field, amount) that are not 0."""

    def __init__(self, amounts: Sequence[tuple[ctypes.Structure, str, float]]) -> None:
        self.amounts, rows = list(amounts), list[int]()
        for of, name, amount in amounts:
            is_float = (name, ctypes.c_double) in of._fields_
            bits = struct.unpack("<q", struct.pack("<d" if is_float else "<q", amount))[0]
            rows += [place(of, name), bits, int(is_float)] if amount else []
        self.count = len(rows) // AMOUNT_WORDS
        self.rows: Any = table(max(1, len(rows)))
        self.rows[: len(rows)] = rows
        self.address = ctypes.addressof(self.rows)
