"""How an integer expression changes inside one tile: the analysis behind vector loads and shared addresses.

A tile binds every range `r` to `origin(r) + position(r) + lane` (the lane for one range only), where `origin(r)` is a
multiple of the tile's extent along `r`. An expression is *affine* there when it is

    sum(coefficient * atom) + constant + stride * lane  (or table[lane] in place of the last)

with atoms that do not change with the lane. A quotient or remainder stays affine when no carry can happen inside the
tile: the atoms' sum is a multiple of g, g divides the divisor, and what is added stays within [0, g). Where g is the
divisor itself, the carries are known for every lane: then the lanes' offsets are a table.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import NamedTuple

from manygrad.tensor.dtype import dtypes
from manygrad.tensor.uop.intervals import bounds
from manygrad.tensor.uop.ops import GroupOp, Ops
from manygrad.tensor.uop.ranges import ranges_of
from manygrad.tensor.uop.uop import UOp

Position = Mapping[UOp, int]  # range -> elements after the tile's origin; absent: 0


class Atom(NamedTuple):
    """An expression at a tile position, the same for all lanes."""

    expr: UOp
    position: tuple[tuple[UOp, int], ...]


class Affine(NamedTuple):
    terms: tuple[tuple[Atom, int], ...]
    constant: int
    stride: int
    table: tuple[int, ...] = ()  # offset of every lane, where they are not multiples of a stride (which is then 0)

    @property
    def uniform(self) -> bool:
        return not self.stride and not self.table

    def offsets(self, lanes: int) -> tuple[int, ...]:
        """Amount that each lane adds to the value of the atoms and the constant."""
        return self.table or tuple(self.stride * i for i in range(lanes))


def _with_offsets(terms: tuple[tuple[Atom, int], ...], constant: int, offsets: tuple[int, ...]) -> Affine:
    first = offsets[0]
    step = offsets[1] - first if len(offsets) > 1 else 0
    if all(o == first + step * i for i, o in enumerate(offsets)):
        return Affine(terms, constant + first, step)
    return Affine(terms, constant, 0, offsets)


def _merge(a: Affine, b: Affine, scale: int = 1) -> Affine:
    """a + scale * b"""
    terms = a.terms
    if b.terms:
        sums = dict(a.terms)
        for atom, c in b.terms:
            sums[atom] = sums.get(atom, 0) + scale * c
        terms = tuple(t for t in sums.items() if t[1])
    constant = a.constant + scale * b.constant
    if not a.table and not b.table:
        return Affine(terms, constant, a.stride + scale * b.stride)
    lanes = len(a.table or b.table)
    return _with_offsets(terms, constant, tuple(x + scale * y for x, y in zip(a.offsets(lanes), b.offsets(lanes))))


def index_sum(terms: tuple[tuple[UOp, int], ...], constant: int) -> UOp:
    """The expression sum(c * x) + constant on dtypes.index."""
    total: UOp | None = None
    for x, c in terms:
        x = x if x.dtype is dtypes.index else UOp(Ops.CAST, dtypes.index, (x,))  # (an affine form sees through casts)
        product = x if c == 1 else x.alu(Ops.MUL, UOp.const(dtypes.index, c))
        total = product if total is None else total.alu(Ops.ADD, product)
    if total is None:
        return UOp.const(dtypes.index, constant)
    return total if constant == 0 else total.alu(Ops.ADD, UOp.const(dtypes.index, constant))


class TileAnalysis:
    """`aligned[r]`: what the origin of a tiled range `r` is a multiple of; `vectorized`: the range of
    the lanes.

    `whole`: ranges that are one tile, whose origin is 0.
    """

    def __init__(
        self, aligned: Mapping[UOp, int], vectorized: UOp | None, lanes: int, whole: frozenset[UOp] = frozenset()
    ) -> None:
        self.aligned, self.vectorized, self.lanes, self.whole = aligned, vectorized, lanes, whole
        tiled = frozenset(aligned) | ({vectorized} if vectorized is not None else frozenset())
        self.tiled = sorted(tiled, key=lambda r: r.arg)  # one order in all analyses of a kernel: positions are keys
        self.step: dict[UOp, int] = {}  # remainder made here -> what its value is a multiple of
        self.normal: set[UOp] = set()  # quotients and remainders made here: they stand for their value at the origin
        self._affine: dict[Atom, Affine | None] = {}
        self._uniform: dict[Atom, bool] = {}
        self._touches: dict[UOp, tuple[Atom, tuple[UOp, ...]]] = {}  # it at the origin, and its tiled ranges

    def at(self, u: UOp, position: Position) -> Atom:
        """`u` with what matters to it of `position`."""
        found = self._touches.get(u)
        if found is None:
            found = self._touches[u] = Atom(u, ()), tuple(r for r in self.tiled if r in ranges_of(u))
        origin, touches = found
        if not position or not touches:
            return origin
        moved = [(r, p) for r in touches if (p := position.get(r, 0))]
        return Atom(u, tuple(moved)) if moved else origin

    def alignment(self, terms: tuple[tuple[Atom, int], ...]) -> int:
        """Number that the sum of `terms` is a multiple of (0: it is 0)."""
        g = 0
        for atom, c in terms:
            u = atom.expr
            g = math.gcd(g, c * (self.aligned.get(u, 1) if u.op is Ops.RANGE else self.step.get(u, 1)))
        return g

    def affine(self, u: UOp, position: Position) -> Affine | None:
        """The affine form of an integer expression, or None where it has none."""
        key = self.at(u, position)
        if key not in self._affine:
            self._affine[key] = self._derive(u, position, key)
        return self._affine[key]

    def _derive(self, u: UOp, position: Position, key: Atom) -> Affine | None:
        if u.op is Ops.CONST:
            return Affine((), int(u.arg), 0)
        if u.op is Ops.RANGE:
            origin = () if u in self.whole else ((Atom(u, ()), 1),)
            return Affine(origin, position.get(u, 0), 1 if u is self.vectorized else 0)
        exact = u.dtype is dtypes.index or (u.dtype.is_int and bounds(u) != (u.dtype.min, u.dtype.max))
        if exact and u.op in (Ops.ADD, Ops.SUB, Ops.MUL, Ops.NEG, Ops.IDIV, Ops.MOD):
            a = self.affine(u.src[0], position)
            b = self.affine(u.src[-1], position)
            if a is not None and b is not None:
                found = self._combine(u, a, b)
                if found is not None:
                    return found
        elif exact and u.op is Ops.CAST and u.src[0].dtype.is_int and _widens(u):
            return self.affine(u.src[0], position)
        return Affine(((key, 1),), 0, 0) if self.uniform(u, position) else None

    def _combine(self, u: UOp, a: Affine, b: Affine) -> Affine | None:
        match u.op:
            case Ops.ADD:
                return _merge(a, b)
            case Ops.SUB:
                return _merge(a, b, -1)
            case Ops.NEG:
                return _merge(Affine((), 0, 0), a, -1)
            case Ops.MUL if not b.terms and b.uniform:
                return _merge(Affine((), 0, 0), a, b.constant)
            case Ops.MUL if not a.terms and a.uniform:
                return _merge(Affine((), 0, 0), b, a.constant)
            case Ops.IDIV | Ops.MOD if not b.terms and b.uniform and b.constant > 0:
                if u.dtype is dtypes.index or bounds(u.src[0])[0] >= 0:  # C's division is floor's only from 0 on
                    return self._divide(u.op, a, b.constant)
        return None

    def _divide(self, op: Ops, a: Affine, d: int) -> Affine | None:
        """floor(a / d) or a mod d, where the lanes' carries are known."""
        whole = tuple((x, c // d) for x, c in a.terms if c % d == 0)
        rest = tuple((x, c) for x, c in a.terms if c % d)
        g = math.gcd(self.alignment(rest), d)
        base = a.constant // g * g  # a = d * whole + (rest + base) + added, with rest + base a multiple of g
        added = tuple(a.constant - base + o for o in a.offsets(self.lanes))
        if min(added) >= 0 and max(added) < g:
            quotients, remainders = (0,) * self.lanes, added
        elif g == d:
            quotients, remainders = tuple(o // d for o in added), tuple(o % d for o in added)
        elif not a.table and a.stride % d == 0 and 0 <= added[0] < g:
            quotients, remainders = tuple(o // d for o in added), (added[0],) * self.lanes
        else:
            return None
        whole_base, base = divmod(base, d)
        terms: tuple[tuple[Atom, int], ...] = ()
        if rest and (op is Ops.IDIV or g != d):
            if any(x.position for x, _ in rest):
                return None
            inner = index_sum(tuple((x.expr, c) for x, c in rest), base)
            node = inner.alu(op, UOp.const(dtypes.index, d))
            if op is Ops.MOD:
                self.step[node] = g
            self.normal.add(node)
            terms = ((Atom(node, ()), 1),)
            base = 0
        if op is Ops.IDIV:
            return _merge(_with_offsets(whole, whole_base, quotients), Affine(terms, 0, 0))
        return _with_offsets(terms, base % d if not terms else 0, remainders)

    def uniform(self, u: UOp, position: Position) -> bool:
        """Whether all lanes see the same value."""
        if self.vectorized is None or self.lanes == 1 or self.vectorized not in ranges_of(u):
            return True
        key = self.at(u, position)
        if key not in self._uniform:
            self._uniform[key] = self._is_uniform(u, position)
        return self._uniform[key]

    def _is_uniform(self, u: UOp, position: Position) -> bool:
        if u.op is Ops.RANGE:
            return False
        if u.dtype is dtypes.index and u.op in (Ops.ADD, Ops.SUB, Ops.MUL, Ops.NEG, Ops.IDIV, Ops.MOD):
            a, b = self.affine(u.src[0], position), self.affine(u.src[-1], position)
            found = self._combine(u, a, b) if a is not None and b is not None else None
            if found is not None:
                return found.uniform
        if u.op in GroupOp.COMPARE and u.src[0].dtype is dtypes.index:
            return self.compare(u, position) is not None
        if u.op in (Ops.LOAD, Ops.INDEX) or u.op in GroupOp.ELEMENTWISE:
            return all(self.uniform(s, position) for s in u.src if s.op is not Ops.PARAM)
        return False  # a REDUCE that depends on the lane

    def extremes(self, terms: tuple[tuple[Atom, int], ...]) -> tuple[int, int]:
        """The least and greatest value of the sum of `terms`."""
        low = high = 0
        for atom, c in terms:
            a, b = bounds(atom.expr)
            if atom.expr.op is Ops.RANGE:
                b -= b % self.aligned.get(atom.expr, 1)
            low, high = low + min(a * c, b * c), high + max(a * c, b * c)
        return low, high

    def compare(self, u: UOp, position: Position) -> Affine | bool | None:
        """A comparison of indices as the same for all lanes: `x` (of "x < 0", "x == 0", ...), True, False, or None."""
        a, b = self.affine(u.src[0], position), self.affine(u.src[1], position)
        if a is None or b is None:
            return None
        d = _merge(a, b, -1)
        g = self.alignment(d.terms)
        offsets = tuple(d.constant + o for o in d.offsets(self.lanes))
        least, most = min(offsets), max(offsets)
        if not d.terms:  # decided now, if all lanes agree
            if u.op is Ops.CMPLT:
                return most < 0 if (most < 0) == (least < 0) else None
            zeros = {o == 0 for o in offsets}
            return zeros.pop() == (u.op is Ops.CMPEQ) if len(zeros) == 1 else None
        low, high = self.extremes(d.terms)
        if low + least > 0 or high + most < 0:  # for all origins
            return u.op is Ops.CMPNE if u.op is not Ops.CMPLT else high + most < 0
        if u.op is Ops.CMPLT and low + least == 0:
            return False
        base = least // g * g
        if u.op is Ops.CMPLT:
            return Affine(d.terms, base, 0) if most < base + g else None
        if d.uniform:
            return d if d.constant % g == 0 else u.op is Ops.CMPNE
        return None


def _widens(u: UOp) -> bool:
    """A cast between integers that keeps the value."""
    lo, hi = bounds(u.src[0])
    return (u.dtype is dtypes.index and u.src[0].dtype is not dtypes.uint64) or (
        u.dtype.min <= lo and hi <= u.dtype.max
    )
