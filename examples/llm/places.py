"""Where the tokens of a step stand in the room for keys and values: what they write there, and what they see of it.

Positions and the numbers of pages in a layer's `Room` are symbolic variables or tensors, so that one capture serves all
of them. `Block` is for texts that have a page each; those of `Part` and `Ends` have several, in any order.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

from room import Room

from manygrad import Tensor

Score = Callable[[Tensor], Tensor]  # of products of queries and keys
HIDDEN = float("-inf")
AT_ONCE = 128  # tokens whose scores are computed together: the first ones read no keys that only later ones see


class Place(Protocol):
    def turns(self, table: Tensor) -> Tensor:
        """A table of `Rope` (2, positions, head_dim / 2) at these positions: (2, ..., t, head_dim / 2)."""

    def write(self, cache: Room, found: Tensor) -> None:
        """`found` (2, b, kv_heads, t, head_dim) to its place."""

    def attend(self, q: Tensor, cache: Room, window: int | None, score: Score) -> Tensor:
        """q (b, kv_heads, group · t, head_dim) -> the same: what it sees of the values."""


class Run:
    """t tokens one after another, the first at `position`."""

    def __init__(self, t: int, position: Any):
        self.t, self.position, self.end = t, position, position + t

    def turns(self, table: Tensor) -> Tensor:
        return table[:, self.position : self.end]

    def attend_to(
        self, keys: Tensor, values: Tensor, q: Tensor, length: int, cache: Room, window: int | None, score: Score
    ) -> Tensor:
        """What they see of keys and values (..., kv_heads, end, head_dim), end <= `length`; some at a time."""
        parts, group = [], q.shape[2] // self.t
        for begin in range(0, self.t, AT_ONCE):
            count = min(AT_ONCE, self.t - begin)
            end = self.position + begin + count
            part = q.unflatten(2, (group, self.t))[:, :, :, begin : begin + count].flatten(2, 3)
            scores = score(cache.rounded(part).matmul(keys[..., :end, :].transpose(-1, -2)))
            query = q.arange(count).repeat(group).unsqueeze(1) + (self.position + begin)
            scores = inside(q.arange(length)[:end].unsqueeze(0), query, window).where(scores, HIDDEN)
            parts.append(mean_of(values[..., :end, :], scores, cache).unflatten(2, (group, count)))
        return Tensor.cat(*parts, dim=3).flatten(2, 3)


class Block(Run):
    """Of all texts, in a page each."""

    def write(self, cache: Room, found: Tensor) -> None:
        cache.write((slice(None), slice(None), slice(None), slice(self.position, self.end)), found)

    def attend(self, q: Tensor, cache: Room, window: int | None, score: Score) -> Tensor:
        there = slice(None), slice(None), slice(None, self.end)
        keys, values = cache.read((0, *there)), cache.read((1, *there))
        if self.t > 1 or window or isinstance(self.end, int):
            return self.attend_to(keys, values, q, cache.page, cache, window, score)
        return mean_of(values, score(q.matmul(keys.transpose(-1, -2))), cache)  # (it sees all that there is)


class Part(Run):
    """Of one text, which fill pages: those from `first` on. `pages` (most,): the numbers of all of them."""

    def __init__(self, t: int, page: int, first: Any, pages: Tensor):
        super().__init__(t, first * page)
        self.here, self.length = pages[first : first + t // page], pages.shape[0] * page
        self.page = pages.unsqueeze(1).expand(pages.shape[0], page).flatten()[: self.end]  # of each token
        self.row = pages.arange(page).repeat(pages.shape[0])[: self.end]  # in its page

    def write(self, cache: Room, found: Tensor) -> None:
        cache.write((slice(None), self.here), found[:, 0].unflatten(2, (-1, cache.page)).transpose(1, 2))

    def attend(self, q: Tensor, cache: Room, window: int | None, score: Score) -> Tensor:
        """Its pages are copied to where they stand side by side: each is read by many tokens."""
        there = self.page, slice(None), self.row
        keys, values = (cache.read((i, *there), lambda x: x.transpose(0, 1).contiguous()) for i in (0, 1))
        return self.attend_to(keys, values, q, self.length, cache, window, score)


class Ends:
    """One token each of n texts, at `positions` (n,), which are in the pages `here` (n,). `pages` (n, count): the
    numbers of all pages of each, as many as the longest text has, `most` at most."""

    def __init__(self, positions: Tensor, here: Tensor, pages: Tensor, most: int):
        self.positions, self.here, self.pages, self.most = positions, here, pages, most

    def turns(self, table: Tensor) -> Tensor:
        """(2, n, 1, 1, 1, head_dim / 2), a row a text."""
        return table[:, self.positions].reshape(2, self.positions.shape[0], 1, 1, 1, -1)

    def write(self, cache: Room, found: Tensor) -> None:
        where = slice(None), self.here, slice(None), self.positions % cache.page
        cache.write(where, found.squeeze(3).transpose(0, 1))

    def attend(self, q: Tensor, cache: Room, window: int | None, score: Score) -> Tensor:
        """Pages are read where they are: (n, pages, kv_heads, group, page), softmax over pages and what is in them."""
        keys, values = cache.read((0, self.pages)).unsqueeze(3), cache.read((1, self.pages)).unsqueeze(3)
        scores = score((keys * q.unsqueeze(1).unsqueeze(4)).sum(-1))
        first = (q.arange(self.most) * cache.page)[: self.pages.shape[1]]
        key = first[None, :, None, None, None] + q.arange(cache.page)
        # (what stands behind a text's own end was left by another one)
        scores = inside(key, self.positions.reshape(-1, 1, 1, 1, 1), window).where(scores, HIDDEN)
        share = (scores - scores.amax((1, 4), keepdim=True)).exp()
        share = share / share.sum((1, 4), keepdim=True)
        return (share.unsqueeze(-1) * values).sum((1, 4))


def mean_of(values: Tensor, scores: Tensor, cache: Room) -> Tensor:
    """Weighted by the softmax of their scores (..., rows, number of values)."""
    found = cache.rounded(scores.softmax(-1)).matmul(values)
    return found.contiguous() if cache.rounds else found  # (rounded as one with the product, it would be none)


def inside(key: Tensor, query: Tensor, window: int | None) -> Tensor:
    """Whether the key of a position is seen from the position of a query: not after it, and inside the window."""
    found = key <= query
    return found & (key > query - window) if window else found
