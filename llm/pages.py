"""Which pages of the KV cache belong to which text.

A text gets a page when it writes into it, and gives all of them back when it ends. When it is admitted, as many are
promised to it as it may need, and no more are promised than there are: no text waits for a page once it runs.
"""

from __future__ import annotations

import numpy as np

PAGE = 32  # tokens: the smallest block of a prompt fills one
NOBODY = 0  # the page that rows without a text write to; what is read of it, nobody may see


def pages_of(tokens: int) -> int:
    """That so many tokens need."""
    return -(-tokens // PAGE)


class Pages:
    """`count` pages for texts, numbered from 1 on; `rows` (slots, most): the numbers of those that the text in a slot
    has so far, NOBODY after them."""

    def __init__(self, count: int, slots: int, most: int):
        self.count = count
        self.free = list(range(count, 0, -1))  # the next one last
        self.rows = np.full((slots, most), NOBODY, np.int32)
        self.held: list[list[int]] = [[] for _ in range(slots)]  # the same numbers
        self.promised = [0] * slots

    @property
    def unpromised(self) -> int:
        return self.count - sum(self.promised)

    def promise(self, slot: int, pages: int) -> None:
        self.promised[slot] = pages
        assert self.unpromised >= 0, (self.promised, self.count)

    def grow(self, slot: int, tokens: int) -> None:
        """The text in the slot has so many tokens now."""
        held, needed = self.held[slot], pages_of(tokens)
        assert needed <= self.promised[slot], (slot, tokens, self.promised[slot])
        while len(held) < needed:
            self.rows[slot, len(held)] = self.free[-1]
            held.append(self.free.pop())

    def give_back(self, slot: int) -> None:
        self.free += self.held[slot][::-1]
        self.rows[slot], self.held[slot], self.promised[slot] = NOBODY, [], 0

    def move(self, source: int, target: int) -> None:
        """A text to a slot that has none."""
        self.held[source], self.held[target] = self.held[target], self.held[source]
        self.promised[source], self.promised[target] = self.promised[target], self.promised[source]
        self.rows[[source, target]] = self.rows[[target, source]]
