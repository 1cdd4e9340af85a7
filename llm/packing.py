"""Texts of many lengths one after another in rows of a fixed number of tokens: what is computed token by token is
computed for next to none that are not there, and attention alone is given a text a row.

    tokens   a a a a a b b b c c c d d .        13 of 14 are there
    texts    a a a a a, b b b . ., c c c . ., d d . . .
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np

# tokens that texts are filled up to for attention
WIDTHS = (*range(4, 64, 4), *range(64, 128, 8), *range(128, 256, 16), *range(256, 513, 32))
SMALL = 4  # a batch of few texts has a row of so small a part
SHORTER = 2  # texts of a row, beside those of its width
LEAST = 4  # tokens that a text is taken to have, at least: the marks of begin and end, and some


class Packed(NamedTuple):
    """Where the texts of a batch are, for each device: `tokens`, `places` and `back` (devices, tokens of a row), the
    others (devices, texts of a row). What is not there is text 0's first token, again."""

    tokens: np.ndarray
    places: np.ndarray  # of a token in its text
    back: np.ndarray  # a token's number among those of all texts, each filled up to `width`
    begins: np.ndarray  # of a text in the row
    lengths: np.ndarray


class PackedBatch(NamedTuple):
    rows: list[list[int]]  # the numbers of the texts, for each device
    capacity: int  # tokens of a row
    width: int  # of the longest text, rounded up

    @property
    def slots(self) -> int:
        """Texts that a row may have: were all as short as the width allows, and some shorter ones that fill it."""
        least = max(LEAST, 1 + max((w for w in WIDTHS if w < self.width), default=0))
        return self.capacity // least + SHORTER

    def packed(self, texts: Sequence[Sequence[int]]) -> Packed:
        tokens, places, back = np.zeros((3, len(self.rows), self.capacity), np.int64)
        begins, lengths = np.zeros((2, len(self.rows), self.slots), np.int64)
        lengths += 1
        for d, row in enumerate(self.rows):
            at = 0
            for slot, text in enumerate(row):
                end = at + len(texts[text])
                tokens[d, at:end], places[d, at:end] = texts[text], np.arange(end - at)
                back[d, at:end] = slot * self.width + places[d, at:end]
                begins[d, slot], lengths[d, slot] = at, end - at
                at = end
        return Packed(tokens, places, back, begins, lengths)


def batches(lengths: Sequence[int], capacity: int, devices: int = 1) -> Iterator[PackedBatch]:
    """All texts, from the longest on, `capacity` tokens on each device at once, or what one text has."""
    left, total = sorted((n, i) for i, n in enumerate(lengths)), sum(lengths)
    while left:
        longest = left[-1][0]
        width = next((w for w in WIDTHS if w >= longest), longest)
        few = capacity // SMALL
        batch = PackedBatch(
            [[] for _ in range(devices)], max(few if total <= few * devices else capacity, width), width
        )
        free = [batch.capacity] * devices
        while left:
            d = max((d for d in range(devices) if len(batch.rows[d]) < batch.slots), key=free.__getitem__, default=None)
            at = -1 if d is None else bisect_right(left, (free[d], len(lengths))) - 1  # the longest one that fits
            if d is None or at < 0:
                break
            n, text = left.pop(at)
            batch.rows[d].append(text)
            free[d] -= n
            total -= n
        yield batch
