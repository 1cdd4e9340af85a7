"""Facts about nodes, found out or kept beside them: a typed table for each thing, whose entries go with their nodes.

    LINE = Table[str]("line")                LINE[u] = "train.py:7"; LINE.get(u)
    @memo                                    a function of a node, computed once for each
    @inferred                                a property that follows from those of the sources

Entries stand in a dict of the node; those that most nodes have, in a slot of the node (`AttributeTable`): a fifth of
the memory.

No entry may hold its own node, which would then live until a garbage collection.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import update_wrapper
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Generic, TypeVar, cast

if TYPE_CHECKING:
    from manygrad.tensor.uop.uop import UOp

T = TypeVar("T")
# beside the many nodes that have no entry (a dict is as large as a node); also: no entry found
NOTHING: Any = MappingProxyType({})
_FIRST = threading.Lock()  # held where a node gets its first one


def _beside(u: UOp) -> Any:
    """Where entries of `u` are put."""
    if u._beside is NOTHING:
        made: dict[Any, Any] = {}  # (under the lock nothing is made: a garbage collection might ask for it)
        with _FIRST:
            if u._beside is NOTHING:
                u._beside = made
    return u._beside


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
        _beside(u)[self] = value

    def __contains__(self, u: UOp) -> bool:
        return self in u._beside

    def setdefault(self, u: UOp, value: T) -> T:
        return cast(T, _beside(u).setdefault(self, value))

    def pop(self, u: UOp) -> T | None:
        return u._beside.pop(self) if self in u._beside else None


class Memo(Table[T]):
    """A function of a node, computed once for each."""

    def __init__(self, rule: Callable[[UOp], T]) -> None:
        super().__init__(rule.__name__)
        update_wrapper(self, rule)
        self.rule = rule

    def __call__(self, u: UOp) -> T:
        found: T = u._beside.get(self, NOTHING)
        if found is NOTHING:
            found = _beside(u)[self] = self.rule(u)
        return found


class Inferred(Table[T]):
    """A property of every node, which its rule finds from the node and the properties of its sources."""

    rule: Callable[[UOp], T]

    def by(self, rule: Callable[[UOp], T]) -> Inferred[T]:
        """Sets the rule; a decorator."""
        self.rule = rule
        return self

    def __call__(self, u: UOp) -> T:
        found: T = u._beside.get(self, NOTHING)
        if found is NOTHING:
            rule = self.rule
            stack = [s for s in u.src if self not in s._beside]
            while stack:
                x = stack[-1]
                if self in x._beside:
                    stack.pop()
                elif missing := [s for s in x.src if self not in s._beside]:
                    stack += missing
                else:
                    _beside(x)[self] = rule(x)
                    stack.pop()
            found = _beside(u)[self] = rule(u)
        return found


class AttributeTable(Inferred[T]):
    """A table whose entries are attributes of the nodes, called `attribute`."""

    def __init__(self, name: str, attribute: str) -> None:
        super().__init__(name)
        self.attribute = attribute

    def get(self, u: UOp) -> T | None:
        return getattr(u, self.attribute, None)

    def __getitem__(self, u: UOp) -> T:
        if not hasattr(u, self.attribute):
            raise KeyError(self)
        return cast(T, getattr(u, self.attribute))

    def __setitem__(self, u: UOp, value: T) -> None:
        setattr(u, self.attribute, value)

    def __contains__(self, u: UOp) -> bool:
        return hasattr(u, self.attribute)

    def setdefault(self, u: UOp, value: T) -> T:
        if not hasattr(u, self.attribute):
            setattr(u, self.attribute, value)
        return cast(T, getattr(u, self.attribute))

    def pop(self, u: UOp) -> T | None:
        found = getattr(u, self.attribute, None)
        if hasattr(u, self.attribute):
            delattr(u, self.attribute)
        return found

    def __call__(self, u: UOp) -> T:
        name = self.attribute
        found: T = getattr(u, name, NOTHING)
        if found is NOTHING:
            rule = self.rule
            stack = [s for s in u.src if not hasattr(s, name)]
            while stack:
                x = stack[-1]
                if hasattr(x, name):
                    stack.pop()
                elif missing := [s for s in x.src if not hasattr(s, name)]:
                    stack += missing
                else:
                    setattr(x, name, rule(x))
                    stack.pop()
            found = rule(u)
            setattr(u, name, found)
        return found


def memo(rule: Callable[[UOp], T]) -> Memo[T]:
    return Memo(rule)


def inferred(rule: Callable[[UOp], T]) -> Inferred[T]:
    found: Inferred[T] = Inferred(rule.__name__)
    update_wrapper(found, rule)
    return found.by(rule)
