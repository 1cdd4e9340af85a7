"""Layouts of the tables of 64-bit words that Python fills in and native code reads (`ir/words.ll`)."""

from __future__ import annotations

import ctypes
from typing import Any

from manygrad.native.memory import table


class WordLayout(tuple[str, ...]):
    """The names of a table's words, in their order."""

    def table(self, **words: int) -> Any:
        """A new table of these words; those that are not given are 0."""
        made = table(len(self))
        self.put(made, **words)
        return made

    def put(self, words: Any, **values: int) -> None:
        """Sets words of a table: numbers, or addresses."""
        for name, value in values.items():
            words[self.index(name)] = signed(value)

    @property
    def numbers(self) -> dict[str, int]:
        """The constants of native code: the number of each word, by its name."""
        return {name: n for n, name in enumerate(self)}


def signed(value: int) -> int:
    """The word of a number of up to 64 bits."""
    return ctypes.c_int64(value).value
