"""Where the tokens of a step stand in the room for keys and values: what they write there, and what they may see.

Positions in a layer's `Room` are symbolic variables or tensors, so that one capture serves all of them.
"""

from __future__ import annotations

from typing import Any

from room import Room

from manygrad import Tensor


class Block:
    """t tokens one after another, the first at `position`: of all texts, or of the text in `slot` alone."""

    def __init__(self, t: int, position: Any, slot: Any = None):
        self.t, self.position, self.end = t, position, position + t
        self.texts = slice(None) if slot is None else slice(slot, slot + 1)

    def turns(self, table: Tensor) -> Tensor:
        """A table of `Rope` at these positions: (2, t, head_dim / 2)."""
        return table[:, self.position : self.end]

    def write(self, cache: Room, found: Tensor) -> None:
        """`found` (2, b, kv_heads, t, head_dim) to its place."""
        cache.write((slice(None), self.texts, slice(None), slice(self.position, self.end)), found)

    def read(self, cache: Room) -> tuple[Tensor, Tensor]:
        """Keys and values that there are so far, (b, kv_heads, end, head_dim)."""
        there = self.texts, slice(None), slice(None, self.end)
        return cache.read((0, *there)), cache.read((1, *there))

    def seen(self, keys: Tensor, length: int, group: int, window: int | None) -> Tensor | None:
        """(group · t, end): whether a query may see a key: one that is not after it, and inside the window. None where
        it may see all of them."""
        end = keys.shape[2]
        if self.t == 1 and not window and not isinstance(end, int):
            return None
        key = keys.arange(length)[:end].unsqueeze(0)
        query = keys.arange(self.t).repeat(group).unsqueeze(1) + self.position
        return inside(key, query, window)


class Ends:
    """One token each of the first n texts, at `positions` (n,), all of them before `end`."""

    def __init__(self, positions: Tensor, end: Any):
        self.positions, self.end = positions, end

    def turns(self, table: Tensor) -> Tensor:
        """(2, n, 1, 1, 1, head_dim / 2), a row a text."""
        return table[:, self.positions].reshape(2, self.positions.shape[0], 1, 1, 1, -1)

    def write(self, cache: Room, found: Tensor) -> None:
        """`found` (2, n, kv_heads, 1, head_dim), each text's to its own place."""
        texts = self.positions.arange(self.positions.shape[0])
        cache.write((slice(None), texts, slice(None), self.positions), found.squeeze(3).transpose(0, 1))

    def read(self, cache: Room) -> tuple[Tensor, Tensor]:
        there = slice(None, self.positions.shape[0]), slice(None), slice(None, self.end)
        return cache.read((0, *there)), cache.read((1, *there))

    def seen(self, keys: Tensor, length: int, group: int, window: int | None) -> Tensor:
        """(n, 1, 1, end): what stands behind a text's own end was left by another text."""
        key = keys.arange(length)[: keys.shape[2]]
        return inside(key, self.positions.reshape(-1, 1, 1, 1), window)


def inside(key: Tensor, query: Tensor, window: int | None) -> Tensor:
    """Whether the key of a position is seen from the position of a query."""
    seen = key <= query
    return seen & (key > query - window) if window else seen
