"""decide_stores: which values are stored, so that everything between two stores is one kernel.

Precondition: storage lowered. Postcondition: the nodes that get a buffer of their own, each with the rule that says so.

A value is stored where that moves fewer bytes or does far less work than computing it again. `RULES` say so of what
one node reads, `LIMITS` of a kernel that gets too large, `SHARED` of a value that several kernels read; what no rule
stores is fused into its readers. The reasons are in docs/decisions/0007; DEBUG=4 prints the rule of each stored value.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import NamedTuple

from manygrad.schedule.facts.fused import NO_AXES, TRANSPARENT, Fused, StoredValue, graph_facts, is_contraction
from manygrad.schedule.facts.work import CHEAP, EXPENSIVE, GATHERED, is_leaf, work
from manygrad.tensor.source import line_of
from manygrad.tensor.uop import GroupOp, Ops, UOp
from manygrad.tensor.uop.shape import numel

DECODED = 60  # weighted ops that are rather done for each block of a sum, or of what is read, than once and stored
DECODED_FOR = 16  # rows of a product that decode what is read in its kernel: a few tiles
UNPACKED = 40  # weighted ops on bytes that are rather done for each tile of a product than once and stored
BLOCK_ROWS = 2048  # of a product's blocks: a panel of its columns of so many rows stays in the second cache
MAX_LEAVES = 24  # buffers one kernel reads
MAX_DEPTH = 120  # nested ops in one kernel
EFFECTS = frozenset({Ops.STORE, Ops.CALL})
NOT_FUSED = EFFECTS | {Ops.SINK, Ops.MSTACK, Ops.CONTIGUOUS}  # no kernel goes through these


class OpRule(NamedTuple):
    """At a node of `ops`, each value that `values` gives is stored in the `way`, before the next is asked for."""

    name: str
    why: str
    ops: frozenset[Ops]
    values: Callable[[UOp, Fused], Iterable[UOp]]
    way: Callable[[Fused, UOp, StoredValue], None]


class SharedRule(NamedTuple):
    """A value that several kernels read is stored where `when` holds, or, with `stores` False, is not."""

    name: str
    why: str
    when: Callable[[SharedValue, Fused], bool]
    stores: bool = True


class SharedValue(NamedTuple):
    """A value, how many kernels read it, and how many of the buffers it is made of are about as large."""

    value: UOp
    kernels: int
    large: int


def decide_stores(order: list[UOp]) -> dict[UOp, StoredValue]:
    """`order`: the nodes of the graph, sources first."""
    fused = Fused(graph_facts(order))
    for u in order:
        if is_leaf(u):
            fused.add_leaf(u)
        elif u.op in NOT_FUSED:
            _apply(RULES_OF.get(u.op, ()), u, fused)
        else:
            for s in u.src:
                if fused.contents[s].reduces:
                    fused.refresh(s)
            _apply(RULES_OF.get(u.op, ()), u, fused)
            held = fused.measure(u)
            if len(held.leaves) > MAX_LEAVES or held.depth > MAX_DEPTH:
                _apply(LIMITS, u, fused)
            if u not in fused.stored:
                fused.rows.learn(u, fused.stored)
    _store_shared(order, fused)
    return fused.stored


def _apply(rules: Iterable[OpRule], u: UOp, fused: Fused) -> None:
    for rule in rules:
        for value in rule.values(u, fused):
            rule.way(fused, value, StoredValue(rule.name, u))


def _store_shared(order: list[UOp], fused: Fused) -> None:
    """Consumers first: whether a value has a kernel of its own decides how many kernels read what it is made of."""
    kernels: dict[UOp, set[UOp]] = {}
    for u in reversed(order):
        if u.op in (Ops.SINK, Ops.MSTACK, Ops.CALL) or is_leaf(u):
            continue
        mine = kernels.get(u, set())
        sources = u.src
        if u.op is Ops.STORE:
            mine, sources = {u}, (u.src[1], *indices_of(u.src[0]))
        elif u in fused.stored:
            mine = {u}
        elif len(mine) > 1 and u.op not in GroupOp.MOVEMENT:
            large = sum(1 for x in fused.contents[u].leaves if numel(x.shape) * 2 >= numel(u.shape))
            shared = SharedValue(u, len(mine), large)
            rule = next((r for r in SHARED if r.when(shared, fused)), None)
            if rule is not None and rule.stores:
                fused.stored[u] = StoredValue(rule.name, u, len(mine))
                mine = {u}
        for s in sources:
            kernels.setdefault(s, set()).update(mine)


def indices_of(target: UOp) -> list[UOp]:
    """The index values in a store's target."""
    out = []
    while target.op in GroupOp.MOVEMENT or target.op is Ops.GATHER:
        out += list(target.src[1:])
        target = target.src[0]
    return out


# *** what one node reads ***


def asked_for(u: UOp, fused: Fused) -> Iterable[UOp]:
    yield u


def rows_in_blocks(u: UOp, fused: Fused) -> Iterable[UOp]:
    return fused.rows.must_store(u, fused.stored) if u in fused.facts.only_reduced else ()


def rows_elsewhere(u: UOp, fused: Fused) -> Iterable[UOp]:
    return fused.rows.must_store(u, fused.stored) if u not in fused.facts.only_reduced else ()


def smaller_contractions(u: UOp, fused: Fused) -> Iterable[UOp]:
    """All but the source with the largest contraction, where an elementwise op reads several.

    In the order of the sources, so that all ranks decide alike."""
    if len(u.src) == 1:
        return ()
    found = {s: c for s in u.src if (c := fused.contents[s].contractions)}
    if len(found) < 2 or len(set(found.values())) < 2:
        return ()
    largest = max(found, key=lambda s: max(numel(r.src[0].shape) for r in found[s]))
    return [s for s in found if s is not largest]


def reduction_below(u: UOp, fused: Fused) -> Iterable[UOp]:
    """Sums of blocks that need not be stored stay together, those of a row that is given back to its elements, and sums
    of bytes in blocks that have a scale each."""
    s = u.src[0]
    stays = sums_blocks(u, fused) or fused.rows.fuses_reduce(u) or fused.only_bytes(s)
    return (s,) if fused.contents[s].reduces and not stays else ()


def sums_blocks(u: UOp, fused: Fused) -> bool:
    """Whether the REDUCE adds up blocks that need not be stored: sums of blocks, or of a product so few rows that what
    a tile reads of all of them stays in a cache."""
    s = u.src[0]
    if u.arg.blocks is None or s in fused.stored:
        return False
    if s.op is Ops.REDUCE:
        return True
    rows = s.src[0] if s.op is Ops.RESHAPE else s
    if rows in fused.stored or rows.op is not Ops.REDUCE or rows.arg.blocks is None or not is_contraction(rows):
        return False
    known = all(isinstance(d, int) for d in rows.src[0].shape)
    return known and numel(rows.src[0].shape) * rows.arg.blocks <= BLOCK_ROWS * numel(rows.shape)


def _repeats(u: UOp) -> bool:
    return bool(numel(u.shape) > numel(u.src[0].shape))


def broadcast_reduction(u: UOp, fused: Fused) -> Iterable[UOp]:
    s = u.src[0]
    return (s,) if fused.contents[s].reduces and _repeats(u) and not fused.rows.fuses_expand(u) else ()


def broadcast_work(u: UOp, fused: Fused) -> Iterable[UOp]:
    """Any work at all before a contraction, which reads each element many times over; else what is expensive."""
    s = u.src[0]
    held = fused.contents[s]
    if held.reduces or not held.leaves or not _repeats(u) or numel(s.shape) <= 1:
        return ()
    limit = 0 if u in fused.facts.feeds_reduce else EXPENSIVE
    if within_sum(u, fused) or decoded_for_few(u, fused):
        limit = DECODED
    if u in fused.facts.multiplied:
        limit = UNPACKED
    return (s,) if work(s, fused.stored, limit) > limit else ()


def within_sum(u: UOp, fused: Fused) -> bool:
    """Whether the EXPAND repeats a value along the innermost dims of a sum alone: its loops make it once, outside of
    these (the scale of a block of weights)."""
    summed = fused.facts.summed.get(u, ())
    sizes = list(zip(u.src[0].shape, u.shape))
    first = next(a for a, (d, n) in enumerate(sizes) if d != n)
    return all(d == 1 and (n == 1 or a in summed) for a, (d, n) in enumerate(sizes) if a >= first)


def decoded_for_few(u: UOp, fused: Fused) -> bool:
    """Whether the EXPAND repeats, for few rows of a product, what is decoded from at most half the bytes with something
    that belongs to a block of it (quantised weights): its kernel reads these, and a tile decodes for all rows that it
    has."""
    s, summed = u.src[0], fused.facts.summed.get(u, NO_AXES)
    rows = [n for a, (d, n) in enumerate(zip(s.shape, u.shape)) if d != n and a not in summed]
    read = sum(numel(x.shape) * x.dtype.itemsize for x in fused.contents[s].leaves)
    if not summed or 2 * read > numel(s.shape) * s.dtype.itemsize or numel(tuple(rows)) > DECODED_FOR:
        return False
    inside = s.toposort(lambda x: not is_leaf(x) and x not in fused.stored)
    return any(x.op is Ops.EXPAND and _repeats(x) and within_sum(x, fused) for x in inside)


def reduction_in_it(u: UOp, fused: Fused) -> Iterable[UOp]:
    return (u.src[0],) if fused.contents[u.src[0]].reduces else ()


def gathered_work(u: UOp, fused: Fused) -> Iterable[UOp]:
    return (u.src[0],) if work(u.src[0], fused.stored, GATHERED) > GATHERED else ()


def index_work(u: UOp, fused: Fused) -> Iterable[UOp]:
    return (i for i in u.src[1:] if fused.contents[i].reduces or work(i, fused.stored, EXPENSIVE) > EXPENSIVE)


def _only(*ops: Ops) -> frozenset[Ops]:
    return frozenset(ops)


RULES = (
    OpRule("contiguous", "asked for, or what a copy or a collective is to read",
           _only(Ops.CONTIGUOUS), asked_for, Fused.store),
    OpRule("row under a sum in blocks", "the sum's loops would make the row's reduction again and again",
           TRANSPARENT, rows_in_blocks, Fused.store_parts),
    OpRule("row under other loops", "loops that do not run over just the row would make its reduction again and again",
           GroupOp.ELEMENTWISE | GroupOp.MOVEMENT | _only(Ops.GATHER), rows_elsewhere, Fused.store),
    OpRule("smaller contraction", "each contraction has loops and tiles of its own",
           GroupOp.ELEMENTWISE, smaller_contractions, Fused.store_below),
    OpRule("reduction of a reduction", "each step of the outer one would make the inner one again",
           _only(Ops.REDUCE), reduction_below, Fused.store_parts),
    OpRule("broadcast reduction", "each element that it is broadcast to would reduce again",
           _only(Ops.EXPAND), broadcast_reduction, Fused.store_below),
    OpRule("broadcast work", "each element that it is broadcast to would compute it again",
           _only(Ops.EXPAND), broadcast_work, Fused.store_below),
    OpRule("padded reduction", "loops over the zeros around it would reduce for nothing",
           _only(Ops.PAD), reduction_in_it, Fused.store_below),
    OpRule("gathered reduction", "each element that is picked would reduce again",
           _only(Ops.GATHER), reduction_in_it, Fused.store_below),
    OpRule("gathered work", "an element may be picked many times", _only(Ops.GATHER), gathered_work, Fused.store_below),
    OpRule("index of a gather", "an index is computed for each element that is picked with it",
           _only(Ops.GATHER), index_work, Fused.store_below),
)  # fmt: skip

RULES_OF = {op: tuple(r for r in RULES if op in r.ops) for op in {op for r in RULES for op in r.ops}}


# *** kernels that get too large ***


def large_sources(u: UOp, fused: Fused) -> Iterable[UOp]:
    of = fused.contents
    return (s for s in u.src if len(of[s].leaves) > 1 or of[s].depth > MAX_DEPTH // 2)


def still_too_deep(u: UOp, fused: Fused) -> Iterable[UOp]:
    return (u,) if fused.measure(u).depth > MAX_DEPTH else ()


LIMITS = (
    OpRule("large kernel", f"a kernel reads at most {MAX_LEAVES} buffers and nests at most {MAX_DEPTH} ops",
           _only(), large_sources, Fused.store_below),
    OpRule("deep kernel", f"a kernel nests at most {MAX_DEPTH} ops", _only(), still_too_deep, Fused.store),
)  # fmt: skip


# *** what several kernels read ***


def near_another(v: SharedValue, fused: Fused) -> bool:
    lower = fused.shared_below(v.value) if fused.reduces(v.value) else (v.value,)
    alone = len(lower) == 1 and lower[0] is not v.value
    return alone and work(v.value, fused.stored, CHEAP, lower[0]) <= CHEAP


def is_expensive(v: SharedValue, fused: Fused) -> bool:
    return v.large > 0 and work(v.value, fused.stored, EXPENSIVE) > EXPENSIVE


SHARED = (
    SharedRule("near another", "what it is made of is stored for others; a few ops are done again",
               near_another, stores=False),
    SharedRule("shared reduction", "each kernel would reduce again", lambda v, fused: fused.reduces(v.value)),
    SharedRule("shared work", "each kernel would compute it again", is_expensive),
    # each of k kernels reads `large` arrays, or: these are read once, the value is written once and read k times
    SharedRule("shared reads", "each kernel would read all that it is made of",
               lambda v, _: v.kernels * v.large > 1 + v.large + v.kernels),
)  # fmt: skip


# *** DEBUG=4 ***

WHY = {r.name: r.why for r in (*RULES, *LIMITS, *SHARED)}


def explain(stored: dict[UOp, StoredValue]) -> str:
    """A line for each stored value: shape, type, bytes to write, the user's line, the rule, and what reads it."""
    return "\n".join(_explained(u, found) for u, found in stored.items())


def _explained(u: UOp, found: StoredValue) -> str:
    count = numel(u.shape)
    nbytes = f"{count * u.dtype.itemsize:,} bytes" if isinstance(count, int) else "bytes not known"
    reader = f"; read by {found.kernels} kernels" if found.kernels else ""
    if found.at is not u and found.at.op not in EFFECTS:
        reader = f"; read by {found.at.op.name} {found.at.shape} of {line_of(found.at)}"
    return (
        f"stored {u.op.name} {u.shape} {u.dtype.name}, {nbytes}, {line_of(u)}: {found.rule} ({WHY[found.rule]}){reader}"
    )
