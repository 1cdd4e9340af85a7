"""What gradients are told of a capture's results that never had one: which values these were computed from."""

from __future__ import annotations

import weakref
from collections.abc import Sequence

from manygrad.runtime.jit.arguments import Input
from manygrad.runtime.jit.results import ResultMemory
from manygrad.tensor.stored import SOURCES, Sources
from manygrad.tensor.uop import UOp


class ResultSources:
    """The `SOURCES` of each result: arguments, other results, and what was there before, the function's state."""

    def __init__(self, inputs: list[Input], slots: list[ResultMemory], known: set[UOp]) -> None:
        """`known`: memory that there was before."""
        self.slots = [s for s in slots if s.now.node in SOURCES]
        found = [*(SOURCES.get(i.own.uop) for i in inputs), *(SOURCES[s.now.node] for s in self.slots)]
        numbers = {s: n for n, s in enumerate(found)}
        self.below = [_below(SOURCES[s.now.node], numbers, known) for s in self.slots]

    def note(self, arguments: Sequence[UOp | None]) -> None:
        """After a replay with these arguments."""
        if not self.slots:
            return
        for s in self.slots:
            SOURCES[s.now.node] = Sources(s.now.node)  # (another value in the same memory)
        nodes = [*arguments, *(s.now.node for s in self.slots)]
        for s, (numbers, state) in zip(self.slots, self.below):
            below = [*(nodes[n] for n in numbers), *(ref() for ref in state)]
            SOURCES[s.now.node].add(Sources.of(u) for u in below if u is not None)


def _below(
    sources: Sources, numbers: dict[Sources | None, int], known: set[UOp]
) -> tuple[list[int], list[weakref.ref[UOp]]]:
    """(numbers of arguments and results, nodes of state) that a value was computed from, seen through what the function
    has kept on the way."""
    found, state, todo = set[int](), dict[UOp, None](), [sources]
    seen = set(todo)
    while todo:
        for s in todo.pop().below - seen:
            seen.add(s)
            u = s.value()
            if s in numbers:
                found.add(numbers[s])
            elif u is not None and u in known:
                state[u] = None
            else:
                todo.append(s)
    return sorted(found), [weakref.ref(u) for u in state]
