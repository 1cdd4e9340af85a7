"""Walks over graphs of nodes, without recursion: graphs may be of any depth."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, TypeVar

from manygrad.tensor.uop.ops import Ops

if TYPE_CHECKING:
    from manygrad.tensor.uop.uop import UOp

T = TypeVar("T")


def toposort(roots: Iterable[UOp], enter: Callable[[UOp], bool] | None = None) -> list[UOp]:
    """Nodes reachable from `roots`, sources first, each once; iterative."""
    done: dict[UOp, None] = {}
    stack: list[UOp | None] = [*roots]
    stack.reverse()
    path: list[UOp] = []  # entered, their sources not all done; a None on the stack stands for the last of them
    pop, push = stack.pop, stack.append
    while stack:
        u = pop()
        if u is None:
            done[path.pop()] = None
        elif u not in done:
            src = u.src
            if src and (enter is None or enter(u)):
                path.append(u)
                push(None)
                if len(src) == 1:
                    push(src[0])
                else:
                    stack += src[::-1]
            else:
                done[u] = None
    return list(done)


def standing_on(
    roots: Iterable[UOp], found: Callable[[UOp], bool], opaque: Ops | Callable[[UOp], bool] = lambda u: False
) -> set[UOp]:
    """The nodes below `roots` that are `found` or have such a one below them;
    nothing is seen through `opaque` nodes."""
    blind = (lambda u: u.op is opaque) if isinstance(opaque, Ops) else opaque
    out: set[UOp] = set()
    for u in toposort(roots, lambda u: not blind(u)):
        if found(u) or (not blind(u) and any(s in out for s in u.src)):
            out.add(u)
    return out


def together(sets: Iterable[frozenset[T]]) -> frozenset[T]:
    """The union of sets, which is one of them where that has all: what nodes stand on is mostly what a source does."""
    out: frozenset[T] = frozenset()
    for s in sets:
        if s is not out and not s <= out:
            out = s if out <= s else out | s
    return out
