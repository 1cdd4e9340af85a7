"""Facts about a stored value beside its BUFFER, or of memory that is to become one."""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Iterable
from typing import Any, Protocol

from manygrad.tensor.uop import Ops, UOp
from manygrad.tensor.uop.table import Table
from manygrad.tensor.uop.views import HIDDEN, memory


class LeafTensor(Protocol):
    """A tensor to train."""

    uop: UOp
    _requires_grad: bool | None
    _leaf: OwnNumber | None


class Sources:
    """The values that one was computed from, which are not kept for that: where one of them is gone, so are its own."""

    def __init__(self, value: UOp, below: Iterable[Sources] = ()) -> None:
        self._value, self.below = weakref.ref(value), set[Sources]()
        if below:
            self.add(below)

    def add(self, below: Iterable[Sources]) -> None:
        self.below.update(below)
        for s in [s for x in self.below if x.below for s in (x, *x.below) if s.below]:
            s.drop_dead()

    def value(self) -> UOp | None:
        """The node, as long as it stands for that value: one that a replay stores in has another each time."""
        u = self._value()
        return u if u is not None and SOURCES.get(u) is self else None

    def drop_dead(self) -> None:
        """What no tensor can be any more makes way for its own sources, so that a long computation stays short."""
        while dead := {s for s in self.below if s.value() is None}:
            self.below = self.below - dead | {x for s in dead for x in s.below}

    @classmethod
    def of(cls, u: UOp) -> Sources:
        """The sources of the value that the node stands for now."""
        return SOURCES.get(u) or SOURCES.setdefault(u, cls(u))

    def __contains__(self, u: UOp) -> bool:
        todo, seen = [*self.below], set(self.below)
        while todo:
            s = todo.pop()
            if s.value() is u:
                return True
            todo += s.below - seen
            seen |= s.below
        return False


# The graph a stored value was computed by, over what was stored then, and when (the engine's clock): backward() follows
# it. No graph: what it was computed from has been overwritten since.
HISTORY: Table[tuple[UOp | None, int]] = Table("history")
# Why no gradient flows on from a stored value that is no constant: it was computed from leaves that had been written
# to, or written itself with what has a gradient. Only backward() through it asks; a metric is read as any number.
ENDED: Table[str] = Table("ended")
# The memory of a value that was written with what has a gradient: no replay takes it for free while the value lives.
HELD: Table[Any] = Table("held")
WRITTEN: Table[int] = Table("written")  # when an assignment last wrote here
SOURCES: Table[Sources] = Table("sources")  # what a gradient does not see, as there is no history
ORIGIN: Table[UOp] = Table("origin")  # the value that memory is to hold which nothing is stored in yet
LOST: Table[str] = Table("lost")  # why there is no value: what whoever reads it is told


# Leaves whose node this was until they were written to, or moved: what was computed before flows back to them.
FORMER: Table[list[weakref.ref[LeafTensor]]] = Table("former")


class OwnNumber(int):
    """arg of a node that is one tensor's own, a leaf's say. It stays when what is below the node is stored."""

    _count = itertools.count(1)
    leaf: weakref.ref[LeafTensor] | None = None  # whose number it was

    @classmethod
    def new(cls) -> OwnNumber:
        return cls(next(cls._count))

    def __reduce__(self) -> Any:
        return OwnNumber, (int(self),)


def note_former(leaf: LeafTensor) -> None:
    """A leaf is about to have another node."""
    others = [ref for ref in FORMER.get(leaf.uop) or () if (t := ref()) is not None and t is not leaf]
    FORMER[leaf.uop] = [*others, weakref.ref(leaf)]
    for number in (leaf._leaf, leaf.uop.arg):
        if isinstance(number, OwnNumber):
            number.leaf = weakref.ref(leaf)


def leaves_before(u: UOp) -> list[Any]:
    """The leaves to train whose node this was, or whose number it has."""
    refs = list(FORMER.get(u) or ())
    if isinstance(u.arg, OwnNumber) and u.arg.leaf is not None:
        refs.append(u.arg.leaf)
    found = {id(t): t for ref in refs if (t := ref()) is not None}
    return [t for t in found.values() if t._requires_grad and t.uop is not u]


def was_leaf(u: UOp) -> bool:
    """Whether a leaf to train had this node before."""
    return (u in FORMER or isinstance(u.arg, OwnNumber)) and bool(leaves_before(u))


def carries(u: UOp) -> bool:
    """Whether a gradient can go through `u`: not through what is detached, whole numbers and truths."""
    return u.op is not Ops.DETACH and not (u.dtype.is_int or u.dtype.is_bool)


def is_hidden(u: UOp) -> bool:
    """Whether `u` is a DETACH, of memory that others have a gradient through, behind which it was written to with what
    has one."""
    return u.op is Ops.DETACH and u.arg == HIDDEN


def has_ended(u: UOp) -> bool:
    """Whether a stored value had a gradient, and has none any more."""
    return u in ENDED or (u in HISTORY and HISTORY[u][0] is None)


def was_written(u: UOp) -> bool:
    """Whether the history of a stored value is one of writes to it: what was there before is gone."""
    graph, _ = HISTORY.get(u) or (None, 0)
    return graph is not None and graph.op is Ops.AFTER


def is_overwritten(graph: UOp | None, clock: int) -> bool:
    """Whether something that a value with this history was computed from has been overwritten since, wherever a leaf
    lies by now: it has no gradient any more."""
    if graph is None:
        return True
    for x in graph.toposort(lambda x: x not in HISTORY):
        if (WRITTEN.get(x) or 0) > clock:
            return True
        # (what was written at the same time, elsewhere, is newer than what was read here)
        if was_leaf(x) and any((WRITTEN.get(memory(t.uop)) or -1) >= clock for t in leaves_before(x)):
            return True
    return False


def has_live_history(u: UOp) -> bool:
    """Whether a gradient flows on from a stored value, through all that it was computed from. One that has ended holds
    no graph from then on."""
    if u not in HISTORY:
        return False
    todo, seen = [u], {u}
    while todo:
        graph, clock = HISTORY[todo.pop()]
        if graph is None or is_overwritten(graph, clock):
            HISTORY[u] = (None, HISTORY[u][1])
            return False
        below = [x for x in graph.toposort(lambda x: x not in HISTORY and carries(x)) if carries(x) and x not in seen]
        if any(x in ENDED for x in below):
            HISTORY[u] = (None, HISTORY[u][1])
            return False
        todo += [x for x in below if x in HISTORY]
        seen.update(below)
    return True
