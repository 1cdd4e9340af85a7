"""Loops that go on without being read: a sampler's steps, a simulation.

    for t in reversed(range(1000)):
        x = (x - beta[t] * model(x, Tensor([t] * n))) / alpha[t]

Nothing in there ends a trace. So one that has become long is looked at: numbers that are others in each round of a loop
become inputs, and a call that comes once a round is where the trace ends from then on, every few rounds: what lives is
computed, and the rounds after that are replays. (Layers, one after the other, are no rounds: each has its own weights.)
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import pairwise
from typing import Any, Protocol

from manygrad.tensor.deferred.arguments import External, most_carried, nbytes
from manygrad.tensor.deferred.calls import TraceValues
from manygrad.tensor.deferred.tensors import is_placed
from manygrad.tensor.deferred.tree import Key, TraceNode, TraceTree
from manygrad.tensor.deferred.varying import MOST_NUMBERS, numbers_of, takes_numbers
from manygrad.tensor.engine import engine

FIRST_LOOK = 64  # at a trace of so many calls, and then at one of four times as many, and so on
LEAST_CALLS = 256  # of a trace that ends with a round: fewer may be one call of a long function
LEAST_ROUNDS = 3
CALLS = 64  # of a trace of such a loop, about


class CallsSoFar(Protocol):
    """A trace."""

    tree: TraceTree
    node: TraceNode
    values: TraceValues
    external: External


class Rounds:
    """Where a trace ends that nobody reads."""

    __slots__ = ("begins_with", "every", "is_held", "left", "look_at", "was_met")

    def __init__(self, begins_with: Key | None = None, every: int = 1) -> None:
        """`begins_with`: a place in the code that a round begins with, and `every` so many of which the trace ends."""
        self.begins_with, self.every, self.left = begins_with, every, every
        self.was_met = False  # since the trace was looked at last
        self.look_at = FIRST_LOOK
        self.is_held = False  # in the middle of an operator in place

    @contextmanager
    def in_one_piece(self) -> Iterator[None]:
        """The trace does not end with a call inside, whose result goes on to be used by it."""
        self.is_held = True
        try:
            yield
        finally:
            self.is_held = False

    def look(self, trace: CallsSoFar) -> None:
        """A trace has become long."""
        self.look_at *= 4
        if engine().workers()[1] > 1:  # (the others' traces may be of other lengths)
            return
        node = trace.node
        if node.round is None:
            path = list(_path(node))[::-1]
            note_numbers(path, trace.tree)
            node.round = round_of(path)
        place, every = node.round
        is_long = node.depth >= LEAST_CALLS or self.begins_with is not None
        if place is not None and is_long and not self.was_met and can_be_stored(trace):
            self.begins_with, self.every, self.left = place, every, 0
        self.was_met = False

    def is_over(self, trace: CallsSoFar) -> bool:
        """Asked before a call at the place that a round begins with: whether the trace ends there."""
        self.left -= 1
        self.was_met = True
        if self.left >= 0:
            return False
        if not can_be_stored(trace):
            self.begins_with = None
            return False
        return True


def note_numbers(path: Sequence[TraceNode], tree: TraceTree) -> None:
    """Numbers that differ in the calls of one place are inputs from now on."""
    numbers: dict[Key, tuple[TraceNode, set[Any]]] = {}
    for node in path:
        if takes_numbers(node.key):
            numbers.setdefault(node.place, (node, set()))[1].add(numbers_of(node.key))
    for place, (node, found) in numbers.items():
        if len(found) > MOST_NUMBERS and node.code is not None:
            tree.note_varying(place, node.code)


def can_be_stored(trace: CallsSoFar) -> bool:
    """Whether what lives of its values can be stored: no gradient flows through it, and nothing is large that may be
    meant never to be."""
    most = most_carried(trace.external.nodes)
    for _, t in trace.values.living():
        if t.requires_grad or (is_placed(t) and nbytes(t.shape, t.dtype) > most):
            return False
    return True


def round_of(path: list[TraceNode]) -> tuple[Key | None, int]:
    """The place of the call that comes least often of those that come again and again, with the same tensors from
    before; and how many rounds a trace is to have."""
    if any("s" in node.key for node in path[len(path) // 2 :]):  # weights that come for the first time: layers
        return None, 1
    found: dict[Key, list[tuple[int, ...]]] = {}
    for node in path:
        if node.place:
            found.setdefault(node.place, []).append(known_tensors(node.key))
    rounds = {
        place: len(calls) for place, calls in found.items() if len(calls) >= LEAST_ROUNDS and len({*calls[1:]}) == 1
    }
    if not rounds:
        return None, 1
    place = min(rounds, key=lambda p: rounds[p])
    return place, max(1, CALLS * rounds[place] // len(path))


def known_tensors(key: Key) -> tuple[int, ...]:
    """The numbers of the tensors from before the trace that it had met before this call."""
    return tuple(x for kind, x in pairwise(key) if kind == "e" and type(x) is int)


def _path(node: TraceNode | None) -> Iterator[TraceNode]:
    """From this one up."""
    while node is not None:
        yield node
        node = node.parent


__all__ = ["Rounds"]
