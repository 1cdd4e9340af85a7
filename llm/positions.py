"""Where the tokens of a step stand in the KV cache: what they write there, and what they see of it.

Positions and the numbers of pages in a layer's `KVCache` are symbolic variables or tensors, so that one capture serves
all of them. `TokenPerText` is for texts that have a page each; those of `PromptPart` and `Ends` have several, in any
order.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

from manygrad import Tensor, Variable
from manygrad.llm.kv_cache import KVCache

Score = Callable[[Tensor], Tensor]  # of products of queries and keys
HIDDEN = float("-inf")
AT_ONCE = 128  # tokens whose scores are computed together: the first ones read no keys that only later ones see


class Positions(Protocol):
    def rotations(self, table: Tensor) -> Tensor:
        """A table of `Rope` (2, positions, head_dim / 2) at these positions: (2, ..., t, head_dim / 2)."""

    def write(self, cache: KVCache, found: Tensor) -> None:
        """`found` (2, b, kv_heads, t, head_dim) to its place."""

    def attend(self, q: Tensor, cache: KVCache, window: int | None, score: Score) -> Tensor:
        """q (b, kv_heads, group · t, head_dim) -> the same: what it sees of the values."""


def bound(position: int, unit: int, last: int, window: int | None, name: str) -> tuple[Any, Any]:
    """A position of at most `last`, both multiples of `unit`, and one from which on a window shows what is seen there,
    as integers that are bound for a step."""
    at, most = position // unit, last // unit
    behind = most if window is None else -(-(window - 1) // unit)
    if behind >= most:
        return unit * Variable(f"position{name}", 0, most).bind(at), 0
    first = max(0, at - behind)
    begin = unit * Variable(f"first{name}", 0, most - behind).bind(first)
    return begin + unit * Variable(f"behind{name}", 0, behind).bind(at - first), begin


class PositionRun:
    """t tokens one after another, the first at `position`; a window shows them nothing that stands before `begin`."""

    def __init__(self, t: int, position: Any, begin: Any):
        self.t, self.position, self.begin, self.end = t, position, begin, position + t

    def seen(self, window: int | None) -> slice:
        """Keys and values that some of them see."""
        return slice(self.begin if window else 0, self.end)

    def rotations(self, table: Tensor) -> Tensor:
        return table[:, self.position : self.end]

    def attend_to(
        self, keys: Tensor, values: Tensor, q: Tensor, length: int, cache: KVCache, window: int | None, score: Score
    ) -> Tensor:
        """Their view of keys and values (..., kv_heads, n, head_dim), all that are `seen` in a KV cache for `length`
        tokens; some at a time."""
        parts, group, first = [], q.shape[2] // self.t, self.seen(window).start
        for done in range(0, self.t, AT_ONCE):
            count = min(AT_ONCE, self.t - done)
            end = self.position + done + count
            part = q.unflatten(2, (group, self.t))[:, :, :, done : done + count].flatten(2, 3)
            scores = score(cache.rounded(part).matmul(keys[..., : end - first, :].transpose(-1, -2)))
            query = q.arange(count).repeat(group).unsqueeze(1) + (self.position + done)
            scores = inside(q.arange(length)[first:end].unsqueeze(0), query, window).where(scores, HIDDEN)
            parts.append(mean_of(values[..., : end - first, :], scores, cache).unflatten(2, (group, count)))
        return Tensor.cat(*parts, dim=3).flatten(2, 3)


class TokenPerText(PositionRun):
    """Positions of all texts, in a page each."""

    def write(self, cache: KVCache, found: Tensor) -> None:
        cache.write((slice(None), slice(None), slice(None), slice(self.position, self.end)), found)

    def attend(self, q: Tensor, cache: KVCache, window: int | None, score: Score) -> Tensor:
        there = slice(None), slice(None), self.seen(window)
        keys, values = cache.read((0, *there)), cache.read((1, *there))
        hidden = window and isinstance(self.begin, int) and cache.page > window  # (read from the first one on)
        if self.t > 1 or hidden or isinstance(self.end, int):
            return self.attend_to(keys, values, q, cache.page, cache, window, score)
        return mean_of(values, score(q.matmul(keys.transpose(-1, -2))), cache)  # (it sees all that there is)


class PromptPart(PositionRun):
    """Positions of one text, which fill pages. `pages` (most,): the numbers of all of them."""

    def __init__(self, t: int, position: Any, begin: Any, page: int, pages: Tensor):
        super().__init__(t, position, begin)
        self.here, self.length = pages[position // page : (position + t) // page], pages.shape[0] * page
        self.page = pages.unsqueeze(1).expand(pages.shape[0], page).flatten()  # of each token
        self.row = pages.arange(page).repeat(pages.shape[0])  # in its page

    def write(self, cache: KVCache, found: Tensor) -> None:
        cache.write((slice(None), self.here), found[:, 0].unflatten(2, (-1, cache.page)).transpose(1, 2))

    def attend(self, q: Tensor, cache: KVCache, window: int | None, score: Score) -> Tensor:
        """Its pages are copied to where they stand side by side: each is read by many tokens."""
        seen = self.seen(window)
        there = self.page[seen], slice(None), self.row[seen]
        keys, values = (cache.read((i, *there), lambda x: x.transpose(0, 1).contiguous()) for i in (0, 1))
        return self.attend_to(keys, values, q, self.length, cache, window, score)


class Ends:
    """One token each of n texts, at `positions` (n,), which are in the pages `here` (n,). `pages` (n, count): the
    numbers of all pages of each, as many as the longest text has, `most` at most. `near`: the same of those that a
    window may show, and the first page (n, 1) of them; None where it may show all."""

    def __init__(
        self, positions: Tensor, here: Tensor, pages: Tensor, most: int, near: tuple[Tensor, Tensor, int] | None = None
    ):
        self.positions, self.here = positions, here
        self.all: tuple[Tensor, Tensor | int, int] = pages, 0, most
        self.near = near or self.all

    def rotations(self, table: Tensor) -> Tensor:
        """(2, n, 1, 1, 1, head_dim / 2), a row a text."""
        return table[:, self.positions].reshape(2, self.positions.shape[0], 1, 1, 1, -1)

    def write(self, cache: KVCache, found: Tensor) -> None:
        where = slice(None), self.here, slice(None), self.positions % cache.page
        cache.write(where, found.squeeze(3).transpose(0, 1))

    def attend(self, q: Tensor, cache: KVCache, window: int | None, score: Score) -> Tensor:
        """Pages are read where they are: (n, pages, kv_heads, group, page), softmax over pages and what is in them."""
        pages, first, most = self.near if window else self.all
        keys, values = cache.read((0, pages)).unsqueeze(3), cache.read((1, pages)).unsqueeze(3)
        scores = score((keys * q.unsqueeze(1).unsqueeze(4)).sum(-1))
        page = q.arange(most)[: pages.shape[1]].unsqueeze(0) + first
        key = (page * cache.page)[:, :, None, None, None] + q.arange(cache.page)
        # (what stands behind a text's own end was left by another one)
        scores = inside(key, self.positions.reshape(-1, 1, 1, 1, 1), window).where(scores, HIDDEN)
        share = (scores - scores.amax((1, 4), keepdim=True)).exp()
        share = share / share.sum((1, 4), keepdim=True)
        return (share.unsqueeze(-1) * values).sum((1, 4))


def mean_of(values: Tensor, scores: Tensor, cache: KVCache) -> Tensor:
    """Weighted by the softmax of their scores (..., rows, number of values)."""
    found = cache.rounded(scores.softmax(-1)).matmul(values)
    return found.contiguous() if cache.rounds else found  # (rounded as one with the product, it would be none)


def inside(key: Tensor, query: Tensor, window: int | None) -> Tensor:
    """Whether the key of a position is seen from the position of a query: not after it, and inside the window."""
    found = key <= query
    return found & (key > query - window) if window else found
