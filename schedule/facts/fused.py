"""Fused: what the kernel of each value has in it while fusion is decided, and the ways to store a value.

`graph_facts` is what can be known of a graph before anything is decided; a `Contents` is what a kernel that computes a
value would hold, down to what is stored by then. Only `Fused` changes, and only by storing a value more.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod
from typing import NamedTuple

from manygrad.schedule.facts.index import dim_groups
from manygrad.schedule.facts.rows import Rows
from manygrad.schedule.facts.work import CHEAP, NUMBERS, is_leaf, work
from manygrad.tensor.dtype import dtypes
from manygrad.tensor.uop import GroupOp, Ops, UOp
from manygrad.tensor.uop.shape import numel

TRANSPARENT = frozenset({Ops.RESHAPE, Ops.PERMUTE, Ops.FLIP})  # every element once, in another place
SAME_AXES = GroupOp.ELEMENTWISE | {Ops.EXPAND}
PURE = GroupOp.ELEMENTWISE | GroupOp.MOVEMENT
NO_AXES: frozenset[int] = frozenset()
BLOCK_TERMS = 64  # of a sum of bytes that stays in a sum of such sums
SHAREABLE = GroupOp.ELEMENTWISE | TRANSPARENT | {Ops.REDUCE}  # what is worth storing for several readers


@dataclass(frozen=True)
class GraphFacts:
    """`readers`: how many nodes read one. `feeds_reduce`: a REDUCE is reached without passing a store.

    `only_reduced`: movement ops from which, by others, nothing but REDUCEs are reached (a sum in blocks is to be made
    as one without). `summed`: of what REDUCEs take, elementwise or broadcast, the axes that all of them reduce.
    `multiplied`: what is read for short sums of bytes alone."""

    readers: dict[UOp, int]
    feeds_reduce: frozenset[UOp]
    only_reduced: frozenset[UOp]
    summed: dict[UOp, frozenset[int]]
    multiplied: frozenset[UOp]


def graph_facts(order: list[UOp]) -> GraphFacts:
    """`order`: the nodes, sources first."""
    readers: dict[UOp, int] = {}
    for u in order:
        for s in set(u.src):
            readers[s] = readers.get(s, 0) + 1
    feeds: set[UOp] = set()
    otherwise: set[UOp] = set()  # read by something that is neither a REDUCE nor leads to REDUCEs only
    summed: dict[UOp, frozenset[int]] = {}
    multiplied: dict[UOp, bool] = {}
    for u in reversed(order):
        bytes_only = is_short_sum_of_bytes(u) if u.op is Ops.REDUCE else multiplied.get(u, False) and u.op in PURE
        for s in u.src:
            multiplied[s] = bytes_only and multiplied.get(s, True)
        axes = frozenset(u.arg.axes) if u.op is Ops.REDUCE else _axes_below(u, summed.get(u, NO_AXES))
        for s in u.src:
            summed[s] = axes & summed.get(s, axes)
        if u.op is Ops.REDUCE or (u in feeds and not is_leaf(u) and u.op is not Ops.CONTIGUOUS):
            feeds.update(u.src)
        if not (u.op is Ops.REDUCE or (u.op in TRANSPARENT and u not in otherwise)):
            otherwise.update(u.src)
    only = frozenset(u for u in order if u.op in TRANSPARENT and u not in otherwise)
    return GraphFacts(readers, frozenset(feeds), only, summed, frozenset(u for u, found in multiplied.items() if found))


def _axes_below(u: UOp, axes: frozenset[int]) -> frozenset[int]:
    """The axes of `u` as axes of its sources; those of a RESHAPE's source become dims that are all among them, but for
    dims of size 1."""
    if u.op in SAME_AXES or not axes or u.op is not Ops.RESHAPE:
        return axes if u.op in SAME_AXES else NO_AXES
    before, after = u.src[0].shape, u.shape
    return frozenset(
        axis
        for sources, results in dim_groups(before, after)
        if (larger := [a for a in results if after[a] != 1]) and axes.issuperset(larger)
        for axis in sources
        if before[axis] != 1
    )


class Contents(NamedTuple):
    """The kernel that computes a value: whether it reduces, the buffers it reads, its depth, its contractions."""

    reduces: bool
    leaves: frozenset[UOp]
    depth: int
    contractions: frozenset[UOp]
    stored: int  # how many values were stored when this was found: by more, there may be less in it


class StoredValue(NamedTuple):
    """Why a value is stored: the rule's name, the node at which it held, and, where known, how many kernels read it."""

    rule: str
    at: UOp
    kernels: int | None = None


_NONE: frozenset[UOp] = frozenset()


class Fused:
    def __init__(self, facts: GraphFacts) -> None:
        self.facts = facts
        self.stored: dict[UOp, StoredValue] = {}
        self.contents: dict[UOp, Contents] = {}
        self.rows = Rows()

    def reduces(self, u: UOp) -> bool:
        found = self.contents.get(u)
        return found is not None and found.reduces

    # *** what a kernel holds ***

    def add_leaf(self, u: UOp) -> None:
        leaves = _NONE if u.op in NUMBERS else frozenset((u,))
        self.contents[u] = Contents(False, leaves, 0, _NONE, len(self.stored))

    def measure(self, u: UOp) -> Contents:
        """The contents of a fused value, from those of its sources."""
        of = self.contents
        if len(u.src) == 1:
            below = of[u.src[0]]
            if u.op is Ops.REDUCE:
                contractions = frozenset((u,)) if is_contraction(u) else below.contractions
                found = Contents(True, below.leaves, below.depth + 1, contractions, len(self.stored))
            else:
                found = Contents(below.reduces, below.leaves, below.depth + 1, below.contractions, len(self.stored))
        else:
            found = self._joined([of[s] for s in u.src])
        of[u] = found
        return found

    def _joined(self, parts: list[Contents]) -> Contents:
        leaves = parts[0].leaves
        reduces, depth, contractions = False, 0, _NONE
        for p in parts:
            reduces = reduces or p.reduces
            depth = max(depth, p.depth)
            if not p.leaves <= leaves:
                leaves = leaves | p.leaves
            if p.contractions:
                contractions = contractions | p.contractions if contractions else p.contractions
        return Contents(reduces, leaves, depth + 1, contractions, len(self.stored))

    def refresh(self, s: UOp) -> None:
        """Measure again what was measured before something below it was stored."""
        found = self.contents[s]
        if found.reduces and found.stored != len(self.stored):
            for u in s.toposort(lambda u: self.reduces(u) and u not in self.stored):
                if self.reduces(u) and u not in self.stored:
                    self.measure(u)

    def only_bytes(self, u: UOp) -> bool:
        """Whether the reductions in `u` are short sums of products of bytes, which processors have instructions for."""
        inside = u.toposort(lambda x: self.reduces(x) and x.op is not Ops.REDUCE)
        return all(is_short_sum_of_bytes(x) for x in inside if x.op is Ops.REDUCE and x not in self.stored)

    # *** ways to store ***

    def store(self, s: UOp, why: StoredValue) -> None:
        self.stored.setdefault(s, why)
        self.contents[s] = Contents(False, frozenset((s,)), 0, _NONE, len(self.stored))

    def store_below(self, s: UOp, why: StoredValue) -> None:
        """The value under movement ops: zeros around it are not worth memory, nor is a part beside the whole."""
        top, path = s, []
        while not is_leaf(s) and (
            s.op in TRANSPARENT or s.op is Ops.PAD or (s.op is Ops.SHRINK and self.facts.readers[s.src[0]] > 1)
        ):
            path.append(s)
            s = s.src[0]
        if not is_leaf(s) and s not in self.stored:
            self.store(s, why)
        for x in reversed(path):
            self.measure(x)
        self.refresh(top)

    def store_parts(self, s: UOp, why: StoredValue) -> None:
        """Sources of a value that is reduced, so that it holds no reduction any more."""
        for part in self.shared_below(s):
            if not self._store_statistics(part, why):
                self.store_below(part, why)
        self.refresh(s)

    def _store_statistics(self, s: UOp, why: StoredValue) -> bool:
        """The statistics, which are few, of a value made of them and of one array by rows; the rest is done again."""
        found = self.rows.statistics(s, self.stored)
        large = sum(numel(x.shape) * 2 >= numel(s.shape) for x in self.contents[s].leaves)
        if not found or large > 1 or work(s, {*self.stored, *found}, CHEAP) > CHEAP:
            return False
        for x in found:
            self.refresh(x)
            self.store(x, why)
        self.rows.close(s, self.stored)
        self.refresh(s)
        return True

    def shared_below(self, s: UOp) -> tuple[UOp, ...]:
        """Values to store below one that reduces: the lowest above the reductions that others read, else `s`."""
        readers = self.facts.readers
        best, u = (s,), s
        while u.op is not Ops.REDUCE and u.op in GroupOp.ELEMENTWISE | TRANSPARENT:
            below = [x for x in dict.fromkeys(u.src) if self.reduces(x)]
            if not below:
                break
            if len(below) > 1:
                if best != (s,) or readers.get(s, 0) > 1:
                    return best
                parts = tuple(dict.fromkeys(p for x in below for p in self.shared_below(x)))
                return parts if all(self._is_shared(p) for p in parts) else best
            u = below[0]
            if self._is_shared(u):
                best = (u,)
        return best

    def _is_shared(self, u: UOp) -> bool:
        return u.op in SHAREABLE and self.facts.readers.get(u, 0) > 1


def is_contraction(u: UOp) -> bool:
    """A sum of products both of whose factors are used many times over; its rows may be seen as blocks."""
    product = u.src[0].src[0] if u.src[0].op is Ops.RESHAPE else u.src[0]
    return u.arg.op is Ops.ADD and product.op is Ops.MUL and all(_spread(f) >= 8 for f in product.src)


def is_short_sum_of_bytes(u: UOp) -> bool:
    """A sum of at most BLOCK_TERMS products of bytes in int32."""
    product, terms = u.src[0], prod(u.src[0].shape[a] for a in u.arg.axes)
    return (
        u.arg.op is Ops.ADD
        and u.dtype is dtypes.int32
        and product.op is Ops.MUL
        and all(_is_byte(s) for s in product.src)
        and isinstance(terms, int)
        and terms <= BLOCK_TERMS
    )


def _is_byte(u: UOp) -> bool:
    """An integer that was a byte, before movement ops."""
    while u.op in GroupOp.MOVEMENT:
        u = u.src[0]
    return u.op is Ops.CAST and u.src[0].dtype in (dtypes.int8, dtypes.uint8)


def _spread(u: UOp) -> float:
    """How many times over movement ops repeat the value they stand on; 1 for sizes that are not known."""
    times = 1.0
    while u.op in GroupOp.MOVEMENT or u.op is Ops.CAST:
        if u.op is Ops.EXPAND:
            wide, narrow = numel(u.shape), numel(u.src[0].shape)
            times *= wide / narrow if isinstance(wide, int) and isinstance(narrow, int) and narrow else 1
        u = u.src[0]
    return times
