"""An oracle for gradients of programs that write in place, of lists of numbers that each know what they were computed
from: PyTorch's rules, without a graph of tensors.

A tensor is places in a memory, seen as one family: itself and its views. What `detach()` gives, or a view that is made
under no_grad(), is another family of the same memory. A write puts numbers in memory for all families; the history of
what lies there is the writer's family's own, and no history is changed under no_grad().
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any


class Mode:
    on = True


@contextmanager
def eager_no_grad() -> Iterator[None]:
    Mode.on, before = False, Mode.on
    try:
        yield
    finally:
        Mode.on = before


class Scalar:
    """A number, and the numbers that it was computed from, each with the derivative."""

    def __init__(self, value: float, below: Sequence[tuple[Scalar, float]] = ()) -> None:
        self.value, self.gradient = float(value), 0.0
        self.below = [(s, d) for s, d in below if s.reaches] if Mode.on else []
        self.reaches = bool(self.below)  # a leaf

    def __add__(self, other: Scalar) -> Scalar:
        return Scalar(self.value + other.value, [(self, 1.0), (other, 1.0)])

    def __mul__(self, other: Scalar) -> Scalar:
        if not isinstance(other, Scalar):
            return NotImplemented
        return Scalar(self.value * other.value, [(self, other.value), (other, self.value)])

    def backward(self) -> None:
        order: list[Scalar] = []
        seen, stack = set[int](), [(self, False)]
        while stack:
            s, is_done = stack.pop()
            if is_done:
                order.append(s)
            elif id(s) not in seen:
                seen.add(id(s))
                stack += [(s, True), *((b, False) for b, _ in s.below)]
        self.gradient = 1.0
        for s in reversed(order):
            for b, d in s.below:
                b.gradient += s.gradient * d


class Family:
    """What is known of the numbers in a memory: `histories`, of each. Those of leaves are not written to."""

    def __init__(self, histories: list[Scalar], is_leaf: bool = False) -> None:
        self.histories, self.is_leaf = histories, is_leaf


class Eager:
    """A tensor of one dim, in float64."""

    def __init__(self, values: Sequence[float], is_leaf: bool = False) -> None:
        scalars = [Scalar(v) for v in values]
        for s in scalars:
            s.reaches = is_leaf
        self._is(scalars, [*values], Family([*scalars], is_leaf), range(len(scalars)))

    def _is(self, leaves: list[Scalar], memory: list[float], family: Family, places: Sequence[int]) -> Eager:
        self.leaves, self.memory, self.family, self.places = leaves, memory, family, places
        return self

    @classmethod
    def of(cls, scalars: list[Scalar]) -> Eager:
        return cls.__new__(cls)._is([], [s.value for s in scalars], Family(scalars), range(len(scalars)))

    def view(self, places: Sequence[int]) -> Eager:
        family = self.family
        if not Mode.on:
            family = Family([Scalar(v) for v in self.memory])
        return Eager.__new__(Eager)._is([], self.memory, family, places)

    def detach(self) -> Eager:
        with eager_no_grad():
            return self.view(self.places)

    def requires_grad_(self) -> Eager:
        """This view, which has no history, as a leaf."""
        scalars = [Scalar(v) for v in self.memory]
        for s in scalars:
            s.reaches = True
        return self._is([scalars[k] for k in self.places], self.memory, Family(scalars, True), self.places)

    def scalars(self) -> list[Scalar]:
        """The numbers that lie there now, with the histories of this family."""
        found = []
        for k in self.places:
            s = self.family.histories[k]
            found.append(s if s.value == self.memory[k] and Mode.on else Scalar(self.memory[k], [(s, 1.0)]))
        return found

    def write(self, scalars: Sequence[Scalar]) -> None:
        if self.family.is_leaf and Mode.on:
            raise RuntimeError("a leaf is written to")
        for k, s in zip(self.places, scalars, strict=True):
            self.memory[k] = s.value
            if Mode.on:
                self.family.histories[k] = s

    @property
    def requires_grad(self) -> bool:
        return any(s.reaches for s in self.family.histories)

    def gradient(self) -> list[float]:
        return [s.gradient for s in self.leaves]

    def _with(self, other: Any) -> list[tuple[Scalar, Scalar]]:
        mine = self.scalars()
        if isinstance(other, Eager):
            return list(zip(mine, other.scalars(), strict=True))
        return [(s, other if isinstance(other, Scalar) else Scalar(other)) for s in mine]

    def __add__(self, other: Any) -> Eager:
        return Eager.of([a + b for a, b in self._with(other)])

    def __mul__(self, other: Any) -> Eager:
        return Eager.of([a * b for a, b in self._with(other)])

    __rmul__ = __mul__

    def sum(self) -> Scalar:
        total = Scalar(0.0)
        for s in self.scalars():
            total = total + s
        return total

    def clone(self) -> Eager:
        return self * 1

    def __getitem__(self, at: slice) -> Eager:
        return self.view(self.places[at])

    def __setitem__(self, at: Any, value: Any) -> None:
        part = self.view(self.places[at] if isinstance(at, slice) else [self.places[at]])
        part.write(value.scalars() if isinstance(value, Eager) else [Scalar(value)] * len(part.places))

    def add_(self, other: Eager) -> None:
        self.write((self + other).scalars())

    def mul_(self, number: float) -> None:
        self.write((self * number).scalars())

    def copy_(self, other: Eager) -> None:
        self.write(other.scalars())

    def tolist(self) -> list[float]:
        return [self.memory[k] for k in self.places]
