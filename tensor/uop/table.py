"""What is found out about nodes, or kept beside them: a typed table for each thing, whose entries go with their nodes.

    LINE = Table[str]("line")                LINE[u] = "train.py:7"; LINE.get(u)
    @memo                                    a function of a node, computed once for each
    @inferred                                a property that follows from those of the sources

No entry may hold its own node, which would then live until a garbage collection.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import update_wrapper
from typing import TYPE_CHECKING, Generic, TypeVar, cast

if TYPE_CHECKING:
    from manygrad.tensor.uop.uop import UOp

T = TypeVar("T")


class Table(Generic[T]):
    """A T beside each of some nodes."""

    def __init__(self, name: str) -> None:
        self.name = name

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.name})"

    def get(self, u: UOp) -> T | None:
        return u._beside.get(self)

    def __getitem__(self, u: UOp) -> T:
        return cast(T, u._beside[self])

    def __setitem__(self, u: UOp, value: T) -> None:
        u._beside[self] = value

    def __contains__(self, u: UOp) -> bool:
        return self in u._beside

    def setdefault(self, u: UOp, value: T) -> T:
        return cast(T, u._beside.setdefault(self, value))

    def pop(self, u: UOp) -> T | None:
        return u._beside.pop(self, None)


class Memo(Table[T]):
    """A function of a node, computed once for each."""

    def __init__(self, rule: Callable[[UOp], T]) -> None:
        super().__init__(rule.__name__)
        update_wrapper(self, rule)
        self.rule = rule

    def __call__(self, u: UOp) -> T:
        kept = u._beside
        if self not in kept:
            kept[self] = self.rule(u)
        return cast(T, kept[self])


class Inferred(Table[T]):
    """A property of every node, which its rule finds from the node and the properties of its sources."""

    rule: Callable[[UOp], T]

    def by(self, rule: Callable[[UOp], T]) -> Inferred[T]:
        """Sets the rule; a decorator."""
        self.rule = rule
        return self

    def __call__(self, u: UOp) -> T:
        kept, rule = u._beside, self.rule
        if self not in kept:
            stack = [s for s in u.src if self not in s._beside]
            while stack:
                x = stack[-1]
                if self in x._beside:
                    stack.pop()
                elif missing := [s for s in x.src if self not in s._beside]:
                    stack += missing
                else:
                    x._beside[self] = rule(x)
                    stack.pop()
            kept[self] = rule(u)
        return cast(T, kept[self])


def memo(rule: Callable[[UOp], T]) -> Memo[T]:
    return Memo(rule)


def inferred(rule: Callable[[UOp], T]) -> Inferred[T]:
    found: Inferred[T] = Inferred(rule.__name__)
    update_wrapper(found, rule)
    return found.by(rule)
