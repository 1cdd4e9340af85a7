"""An Opt: one named decision about how a kernel's loop nest is run, which a heuristic or a search picks.

A kind is a frozen dataclass in a file of its own. It says what it means (its docstring), how it changes the nest
(`apply`), where it is not legal and why (`illegal`), and which lists the search tries next (`neighbours`). The kinds
are listed in `kinds.py`, in the order in which they are applied.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import ClassVar, Self, TypeVar

from manygrad.runtime.codegen.analysis.describe import Signature
from manygrad.runtime.codegen.opts.nest import LoopNest
from manygrad.tensor.uop.uop import UOp

MAX_WIDTH = 64  # lanes of a vector


@dataclass(frozen=True, repr=False)
class Opt:
    """One decision; its fields are integers: ids of ranges, slots of arguments, amounts."""

    kind: ClassVar[str]
    changes_sums: ClassVar[bool] = (
        False  # whether it may change the order in which a reduction is added up, and with it the bits
    )
    shapes: ClassVar[bool] = False  # whether it says how a range's iterations stand in registers
    needs_vectors: ClassVar[bool] = False  # whether it is of use only with vectors along a loop
    needs_block: ClassVar[bool] = False  # whether it is of use only with a `block`

    def __repr__(self) -> str:
        return f"{self.kind}({', '.join(map(str, self.values))})"

    @property
    def values(self) -> tuple[int, ...]:
        return tuple([getattr(self, f.name) for f in fields(self)])

    @property
    def unique(self) -> Hashable:
        """Key of which a list may hold one Opt; None: any number."""
        return (self.kind, *self.values)

    def wrong(self) -> str | None:
        """Why no kernel can take it, whatever its loops are."""
        return None

    def apply(self, nest: LoopNest, ranges: Mapping[int, UOp]) -> LoopNest:
        """The nest with this decision; `ranges`: the kernel's, by id. Raises ValueError for one that does not fit
        it."""
        raise NotImplementedError

    @classmethod
    def illegal(cls, sig: Signature, mine: Sequence[Self], nest: LoopNest) -> str | None:
        """Why the kernel cannot take those of this kind; `nest`: with the whole list applied."""
        return None

    @classmethod
    def of(cls, nest: LoopNest) -> list[Opt]:
        """The shortest list of this kind that makes the nest what it is, in a fixed order: equal nests give equal
        lists."""
        raise NotImplementedError

    @classmethod
    def neighbours(cls, search: Neighbourhood) -> Iterator[Opts]:
        """Lists that differ by one decision of this kind, legal or not."""
        raise NotImplementedError

    # *** for the kinds' own use ***

    def range_of(self, id: int, ranges: Mapping[int, UOp]) -> UOp:
        if id not in ranges:
            raise ValueError(f"{self}: the kernel has no range {id}; it has {sorted(ranges)}")
        return ranges[id]

    def loop(self, id: int, ranges: Mapping[int, UOp]) -> UOp:
        return self._of_kind("loop", self.range_of(id, ranges))

    def reduced(self, id: int, ranges: Mapping[int, UOp]) -> UOp:
        return self._of_kind("reduce", self.range_of(id, ranges))

    def _of_kind(self, kind: str, r: UOp) -> UOp:
        if r.arg.kind != kind:
            raise ValueError(f"{self} does not apply to a {r.arg.kind} range")
        return r


@dataclass(frozen=True, repr=False)
class RangeOpt(Opt):
    """One about the range with the id `axis`."""

    axis: int


Opts = tuple[Opt, ...]
Kind = TypeVar("Kind", bound=Opt)


@dataclass(frozen=True)
class Neighbourhood:
    """Where a search stands: a kernel and a list in canonical form. `lanes`: of a vector register; `sums`: whether the
    order in which a reduction is added up may change, too; `group_items`: work items that a group may have."""

    sig: Signature
    opts: Opts
    nest: LoopNest
    lanes: int
    sums: bool
    group_items: int = 1

    @property
    def reduced(self) -> list[UOp]:
        """The ranges of the REDUCEs."""
        return list(dict.fromkeys(r for u in self.sig.reduces for r in u.src[1:]))

    @property
    def scalar(self) -> Opts:
        """The list without vectors along a loop, and without what shaped that loop's tile."""
        return self.opts if self.nest.vectorized is None else unshaped(self.opts, self.nest.vectorized.arg.id)

    def toggled(self, opts: Sequence[Opt]) -> Iterator[Opts]:
        """For each of `opts` the list without it, or with it."""
        for opt in opts:
            yield tuple(o for o in self.opts if o != opt) if opt in self.opts else (*self.opts, opt)


def width_is_wrong(opt: Opt, what: str, width: int, most: int = MAX_WIDTH) -> str | None:
    powers = 2 <= width <= most and width & (width - 1) == 0
    return None if powers else f"{opt}: {what} are a power of two, 2 to {most}"


def at_least_one(opt: Opt, amount: int) -> str | None:
    return None if amount >= 1 else f"{opt}: at least 1"


def is_on(opt: Opt, axis: int) -> bool:
    """Whether it is about the range with the id `axis`."""
    return isinstance(opt, RangeOpt) and opt.axis == axis


def chosen(opts: Sequence[Opt], kind: type[Kind], axis: int | None = None) -> Kind | None:
    """The first Opt of a kind, on the range `axis` unless that is None."""
    return next((o for o in opts if isinstance(o, kind) and (axis is None or is_on(o, axis))), None)


def unshaped(opts: Sequence[Opt], axis: int) -> Opts:
    """The list without what says how the iterations of a range stand in registers."""
    return tuple(o for o in opts if not (o.shapes and is_on(o, axis)))


def without(opts: Sequence[Opt], *kinds: type[Opt], axis: int | None = None) -> Opts:
    """The list without those of `kinds`, of those on the range `axis` unless that is None."""
    return tuple(o for o in opts if not (isinstance(o, kinds) and (axis is None or is_on(o, axis))))
