"""Spec of asynchronous copies: whatever a group reads of its ring of blocks is there, and nobody writes to what others
may still read.

The loops over blocks are run, with numbers in place of their counters, twice: a group may have several tiles one after
the other. Raises AssertionError, which names the rule.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from manygrad.runtime.codegen.loops.index import Index, Of
from manygrad.runtime.codegen.loops.local import FragmentStage, GroupStage
from manygrad.runtime.codegen.loops.show import SIGNS, text
from manygrad.runtime.codegen.loops.tree import (
    Accumulate,
    AwaitCopies,
    Barrier,
    BlockLoop,
    CommitCopies,
    For,
    If,
    Node,
    Nodes,
    ReduceLoop,
    Share,
    StartCopies,
    Tree,
    every,
)
from manygrad.tensor.uop.ops import Ops

Place = tuple[int, int]  # (where a stage's memory begins, which of its blocks)
Counters = Mapping[Index, int]


@dataclass
class Ring:
    """State of what a group shares, as one of its work items knows it."""

    stages: tuple[GroupStage | FragmentStage, ...]
    holds: dict[Place, int] = field(default_factory=dict)  # the first iteration of the block that is there, or arrives
    open: set[Place] = field(default_factory=set)  # copies that are in no set yet
    sets: list[set[Place]] = field(default_factory=list)  # that are on their way
    own: set[Place] = field(default_factory=set)  # written since the last barrier: the others do not know
    read: set[Place] = field(default_factory=set)  # since the last barrier: others may read it still

    @property
    def arriving(self) -> set[Place]:
        return self.open.union(*self.sets)

    def check(self, rule: str, broken: bool, at: str) -> None:
        if broken:
            raise AssertionError(f"loop tree: {rule}: {at}")

    def write(self, place: Place, begin: int, at: str) -> None:
        self.check("nobody reads where a block is written", place in self.read, at)
        self.check("a block is written where no other arrives", place in self.arriving, at)
        self.holds[place] = begin

    def reads(self, number: int, begin: int, at: str) -> None:
        for stage in self.stages:
            place = stage.offset_bytes, number
            self.check("what is read is the block around", self.holds.get(place) != begin, at)
            self.check("a block is waited for before it is read", place in self.arriving, at)
            self.check("a barrier lies between what others wrote and a read", place in self.own, at)
            self.read.add(place)

    def wait(self, pending: int) -> None:
        done = self.sets[: max(0, len(self.sets) - pending)]
        self.own.update(*done)
        del self.sets[: len(done)]


@dataclass(frozen=True)
class LoopState:
    """What is open at a node."""

    counters: Counters
    begin: int = -1  # of the block
    place: int = 0


def verify(tree: Tree) -> None:
    """Each reduction that has a ring."""
    for node in every(tree.nodes):
        if isinstance(node, ReduceLoop) and any(isinstance(n, StartCopies) for n in every(node.body)):
            stages: list[GroupStage | FragmentStage] = [*tree.local.shared.values(), *tree.local.fragments.values()]
            ring = Ring(tuple(s for s in stages if s.ring > 1))
            for _ in range(2):
                _run(ring, node.body, LoopState({}))
            ring.check("all copies are waited for", any(ring.arriving), "at the end")


def _run(ring: Ring, nodes: Nodes, o: LoopState) -> None:
    for node in nodes:
        _step(ring, node, o)


def _step(ring: Ring, node: Node, o: LoopState) -> None:
    match node:
        case BlockLoop():
            assert node.place is not None
            begin, number = (evaluate(x, o.counters) for x in (node.begin, node.place))
            _run(ring, node.body, replace(o, begin=begin, place=number))
        case If():
            _run(ring, node.body if evaluate(node.condition, o.counters) else node.otherwise, o)
        case StartCopies():
            place = node.stage.offset_bytes, o.place
            ring.write(place, o.begin, f"a copy of the block from {o.begin}")
            ring.open.add(place)
        case Share():
            place = node.stage.offset_bytes, o.place
            ring.write(place, o.begin, f"the block from {o.begin}")
            ring.own.add(place)
        case CommitCopies():
            ring.sets.append(ring.open)
            ring.open = set()
        case AwaitCopies():
            ring.wait(node.pending)
        case Barrier():
            ring.own, ring.read = set(), set()
        case For() if o.begin < 0:
            for i in range(evaluate(node.begin, o.counters), evaluate(node.end, o.counters), node.step):
                _run(ring, node.body, replace(o, counters={**o.counters, node.counter: i}))
        case _ if o.begin >= 0 and any(isinstance(n, Accumulate) for n in every((node,))):
            ring.reads(o.place, o.begin, f"the block from {o.begin}")


def evaluate(x: Index, counters: Counters) -> int:
    """Its value where loops' counters are known."""
    if (known := x.number) is not None:
        return known
    if x.op is Of.COUNTER:
        return counters[x]
    if x.op is Ops.WHERE:
        return evaluate(x.src[1 if evaluate(x.src[0], counters) else 2], counters)
    assert isinstance(x.op, Ops), f"no number: {text(x)}"
    return SIGNS[x.op][1](*(evaluate(s, counters) for s in x.src))
