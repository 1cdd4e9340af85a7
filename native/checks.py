"""Comparisons with what was, which native code makes (`ir/checks.ll`): a row for each thing that Python could read.

| kind | what must be the value |
|---|---|
| WORD | the 64-bit word at an address |
| ITEM, ELEMENT, MAPPED | an item of a dict, of a list, of another mapping |
| ATTRIBUTE | an attribute |
| SIZE | the length of a container |
| VARIABLE | a context variable |
| REFERRED | an attribute of what a weak reference refers to |
| CALLED | what a function gives that is called without arguments |

Objects are compared by identity.
"""

from __future__ import annotations

import ctypes
from bisect import bisect_right
from collections.abc import Sequence
from itertools import accumulate
from typing import Any, NamedTuple

from manygrad.native.memory import table
from manygrad.native.words import signed

KINDS = ("WORD", "ITEM", "ELEMENT", "MAPPED", "ATTRIBUTE", "SIZE", "VARIABLE", "REFERRED", "CALLED")
WORD, ITEM, ELEMENT, MAPPED, ATTRIBUTE, SIZE, VARIABLE, REFERRED, CALLED = range(len(KINDS))
CHECK_WORDS = 4  # of a row: kind, object, key, value
CONSTANTS = {kind: n for n, kind in enumerate(KINDS)} | {"CHECK_WORDS": CHECK_WORDS}
MISSING = object()  # in place of a value: there is none


class Check(NamedTuple):
    """One row. `of`: an object, an address for WORD; `key`: a name, a key, a number for ELEMENT; `value`: an object, a
    number for WORD and SIZE."""

    kind: int
    of: Any
    key: Any = None
    value: Any = None

    def words(self) -> tuple[int, int, int, int]:
        of = self.of if self.kind == WORD else id(self.of)
        key = 0 if self.key is None else self.key if self.kind == ELEMENT else id(self.key)
        is_number = self.kind in (WORD, SIZE)
        value = self.value if is_number else 0 if self.value is MISSING else id(self.value)
        return self.kind, signed(of), signed(key), signed(value)


def words_of(checks: Sequence[Check]) -> list[int]:
    """The rows of a table."""
    return [w for check in checks for w in check.words()]


class CheckTable:
    """The table of some rows, in parts that are replaced on their own, each by as many rows. Whoever makes it keeps
    what the rows read and compare with: a reference from here would be one more than they count."""

    def __init__(self, parts: Sequence[Sequence[int]]) -> None:
        """`parts`: the words of each."""
        self.begins = [0, *accumulate(map(len, parts))]
        self.count = self.begins[-1] // CHECK_WORDS
        self.rows: Any = table(max(1, self.begins[-1]))
        self.address = ctypes.addressof(self.rows)
        for n, part in enumerate(parts):
            self.put(n, part)

    def put(self, n: int, part: Sequence[int]) -> None:
        """Part n is compared with these values from now on."""
        self.rows[self.begins[n] : self.begins[n + 1]] = part  # (ValueError: there are more or fewer)

    def part_of(self, row: int) -> int:
        """The number of the part that has a row."""
        return bisect_right(self.begins, row * CHECK_WORDS) - 1
