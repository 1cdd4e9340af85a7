"""Values of expressions at a position of the open tiles: arithmetic and indices.

A value is a scalar where all lanes agree and a vector elsewhere. Each is remembered under what of the position it
depends on, in the block in which it holds (`Emission.remember`).
"""

from __future__ import annotations

import operator
from typing import Any

from manygrad.runtime.codegen.analysis.affine import Affine, Atom, Position
from manygrad.runtime.codegen.emit.emission import INDEX, Emission
from manygrad.runtime.codegen.kernel.dots import is_dot
from manygrad.runtime.codegen.kernel.transcendental import SELDOM, Lookup
from manygrad.runtime.codegen.lowered import Inst, Low
from manygrad.tensor.dtype import dtypes
from manygrad.tensor.uop.intervals import bounds
from manygrad.tensor.uop.ops import GroupOp, Ops
from manygrad.tensor.uop.ranges import ranges_of
from manygrad.tensor.uop.uop import UOp

FOLDED = {Ops.CAST: int, Ops.MUL: operator.mul, Ops.ADD: operator.add}
CUSTOM = {"round": Low.ROUND, "scale": Low.SCALE, "within": Low.WITHIN}


def value(e: Emission, root: UOp, position: Position) -> Inst:
    """The value of `root` at a tile position: a scalar where all lanes agree, else a vector."""
    known = find(e, root, position)
    if known is not None:
        return known
    stack, tried = [root], set[UOp]()
    while True:
        u = stack[-1]
        under = key(e, u, position)
        inst = e.find(u, under)
        if inst is None:
            if u not in tried:
                inst = e.leaf(e, u, position)
            if inst is None:
                seldom = u.op is Ops.CUSTOM and u.arg == SELDOM
                needed = u.src[:-1] if seldom else u.src
                src: list[Inst] = [find(e, s, position) for s in needed]  # type: ignore[misc]
                if None in src:
                    tried.add(u)
                    stack += [s for s, there in zip(needed, src) if there is None]
                    continue
                inst = branch_of_few(e, u, *src) if seldom else combine(e, u, src)
            e.computed(e, u, position, inst)
            e.remember(u, under, inst)
        stack.pop()
        if not stack:
            return inst


def find(e: Emission, u: UOp, position: Position) -> Inst | None:
    return e.find(u, key(e, u, position))


def remember(e: Emission, u: UOp, position: Position, inst: Inst) -> None:
    e.remember(u, key(e, u, position), inst)


def key(e: Emission, u: UOp, position: Position) -> tuple[Atom, UOp | Inst | None]:
    """Key under which a value is remembered: vectors along one range are not those along another."""
    scope = e.scope
    return scope.analysis.at(u, position), scope.along if scope.vectors.range in ranges_of(u) else None


def combine(e: Emission, u: UOp, src: list[Inst]) -> Inst:
    if is_dot(u):
        return e.alu(Ops.MUL, u.dtype, *(e.alu(Ops.CAST, u.dtype, s) for s in src))
    if u.op is Ops.CUSTOM:
        if u.arg == SELDOM:
            condition, usual, _, unusual = src
            return e.alu(Ops.WHERE, u.dtype, condition, unusual, usual)
        if isinstance(u.arg, Lookup):
            return e.alu(Low.LOOKUP, u.dtype, *src, arg=u.arg.values)
        return e.alu(CUSTOM[u.arg], u.dtype, *src)
    if u.op is Ops.FMA:
        return e.alu(Low.FMA, u.dtype, *src)
    if u.op not in GroupOp.ELEMENTWISE:
        _unknown(u)
    known = all(s.op is Low.CONST and isinstance(s.arg, int) for s in src)
    if u.op in FOLDED and u.dtype.is_int and known:  # (a shift by 4 · 1 is one by 4)
        number = FOLDED[u.op](*(s.arg for s in src))
        if isinstance(number, int) and u.dtype.min <= number <= u.dtype.max:
            return e.const(number, u.dtype)
    return e.alu(u.op, u.dtype, *src, arg=_sign(u) if u.dtype is INDEX else None)


def branch_of_few(e: Emission, u: UOp, condition: Inst, usual: Inst, x: Inst) -> Inst:
    """See `seldom`: a branch, taken where any lane needs it, in the block of the values that it depends on."""
    lanes, depth = max(i.lanes for i in (condition, usual, x)), max(i.depth for i in (condition, usual, x))
    inner = e.blocks[depth + 1 :]
    del e.blocks[depth + 1 :]
    condition, usual, x = (e.splat(i, lanes) for i in (condition, usual, x))
    found, given = (e.emit(Low.ACC, i.dtype, (i,), None, lanes, here=True) for i in (usual, x))
    e.open(Low.IF, (condition if lanes == 1 else e.emit(Low.ANY, dtypes.bool, (condition,)),))
    # (read again in the branch: what is made of it then stands there, too)
    unusual = value_of(e, u.src[3], u.src[2], e.emit(Low.GET, x.dtype, (given,), None, lanes, here=True))
    chosen = e.alu(Ops.WHERE, u.dtype, condition, unusual, usual)
    e.emit(Low.SET, dtypes.void, (found, chosen), here=True)
    e.close()
    result = e.emit(Low.GET, u.dtype, (found,), None, lanes, here=True)
    e.blocks.extend(inner)
    return result


def value_of(e: Emission, root: UOp, x: UOp, inst: Inst) -> Inst:
    """The value of `root`, which is made of `x` and constants, where that of `x` is `inst`."""
    known = {x: inst}
    for u in root.toposort(lambda u: u is not x):
        if u not in known:
            known[u] = e.const(u.arg, u.dtype) if u.op is Ops.CONST else combine(e, u, [known[s] for s in u.src])
    return known[root]


def index_value(e: Emission, u: UOp, position: Position) -> Inst | None:
    """An index, or a comparison of two, by its affine form."""
    if u.dtype is INDEX:
        a = e.scope.analysis.affine(u, position)
        if a is not None and (u.op is Ops.RANGE or a != Affine(((e.scope.analysis.at(u, position), 1),), 0, 0)):
            return affine_value(e, a)
    elif u.op in GroupOp.COMPARE and u.src[0].dtype is INDEX:
        return compare(e, u, position)
    return None


def scalar(e: Emission, u: UOp, position: Position | None = None) -> Inst:
    """An index expression at lane 0 of the tile's origin, or of a position in it."""
    at = position or {}
    if u.op is Ops.RANGE:
        return e.add(e.scope.origin[u], e.const(at.get(u, 0)))
    if (
        e.scope.vectorized is None
        or e.scope.vectorized not in ranges_of(u)
        or u.op not in (Ops.ADD, Ops.SUB, Ops.MUL, Ops.NEG, Ops.IDIV, Ops.MOD)
    ):
        inst = value(e, u, at)
        if inst.lanes == 1:
            return inst
        # (what is kept in scratch memory is loaded as a vector, also where its lanes agree)
        return e.emit(Low.EXTRACT, inst.dtype, (inst,), 0)
    return e.emit(u.op, u.dtype, tuple(scalar(e, s, at) for s in u.src), _sign(u))


def atom(e: Emission, atom: Atom) -> Inst:
    u = atom.expr
    if u.op is Ops.RANGE:
        return e.scope.origin[u]
    if u in e.scope.analysis.normal:
        return e.emit(u.op, INDEX, tuple(scalar(e, s) for s in u.src), _sign(u))
    position = dict(atom.position)
    # (an atom is the same in all lanes, also where its parts, such as lane // 192, are vectors: one lane is enough)
    inst = scalar(e, u, position) if e.scope.vectorized in ranges_of(u) else value(e, u, position)
    assert inst.lanes == 1, "an atom must not change with the lane"
    return inst if inst.dtype is INDEX else e.emit(Ops.CAST, INDEX, (inst,))


def sum_of_terms(e: Emission, a: Affine) -> Inst:
    """The sum of the atoms, those of outer blocks first."""
    parts = [(atom(e, x), c) for x, c in a.terms]
    total = e.const(0)
    for inst, c in sorted(parts, key=lambda p: p[0].depth):
        total = e.add(total, inst if c == 1 else e.emit(Ops.MUL, INDEX, (inst, e.const(c))))
    return total


def affine_value(e: Emission, a: Affine) -> Inst:
    total = e.add(sum_of_terms(e, a), e.const(a.constant))
    if a.uniform or e.scope.lanes == 1:
        return total
    return e.alu(Ops.ADD, INDEX, e.splat(total, e.scope.lanes), ramp(e, a))


def ramp(e: Emission, a: Affine) -> Inst:
    """The vector of what each lane adds."""
    if a.table or a.stride != 1:
        return e.emit(Low.TABLE, INDEX, (), a.offsets(e.scope.lanes), e.scope.lanes)
    return iota(e)


def iota(e: Emission) -> Inst:
    return e.emit(Low.IOTA, INDEX, (), None, e.scope.lanes)


def compare(e: Emission, u: UOp, position: Position) -> Inst | None:
    """A comparison of indices: scalar where the lanes agree, else a constant ramp against a broadcast bound."""
    same = e.scope.analysis.compare(u, position)
    if isinstance(same, bool):
        return e.const(same, dtypes.bool)
    if same is not None:
        left = sum_of_terms(e, same)
        return e.emit(u.op, dtypes.bool, (left, e.const(-same.constant)))
    a, b = (e.scope.analysis.affine(s, position) for s in u.src)
    if a is None or b is None or e.scope.lanes == 1:
        return None
    left, right = sum_of_terms(e, a), sum_of_terms(e, b)
    bound = e.add(e.emit(Ops.SUB, INDEX, (right, left)), e.const(b.constant - a.constant))
    offsets = tuple(x - y for x, y in zip(a.offsets(e.scope.lanes), b.offsets(e.scope.lanes)))
    return e.alu(u.op, dtypes.bool, e.emit(Low.TABLE, INDEX, (), offsets, e.scope.lanes), bound)


def ragged_mask(e: Emission, position: Position) -> Inst | None:
    """The lanes at `position` that are within the vectorized range; None: all."""
    if e.scope.vectorized is None or e.scope.vectorized not in e.scope.ragged:
        return None
    at, size = position.get(e.scope.vectorized, 0), e.scope.ragged[e.scope.vectorized]
    if size is None:
        active = e.scope.tile[e.scope.vectorized] + e.scope.reach - at
        return None if active >= e.scope.lanes else e.emit(Low.FIRST, dtypes.bool, (), active, e.scope.lanes)
    left = lanes_left(e)
    left = left if at == 0 else e.add(left, e.const(-at))
    return e.alu(Ops.CMPLT, dtypes.bool, iota(e), left)


def lanes_left(e: Emission) -> Inst:
    """How many iterations of the lanes' range there are from the tile's first one on, of a size known when it runs."""
    size = e.scope.ragged[e.scope.vectorized] if e.scope.vectorized is not None else None
    assert e.scope.vectorized is not None and size is not None
    return e.emit(Ops.SUB, INDEX, (size, e.scope.origin[e.scope.vectorized]))


def _sign(u: UOp) -> bool | None:
    """For quotients and remainders of indices: whether the dividend is known not to be negative."""
    return bounds(u.src[0])[0] >= 0 if u.op in (Ops.IDIV, Ops.MOD) else None


def _unknown(u: UOp) -> Any:
    raise NotImplementedError(f"{u.op.name} has no meaning inside a kernel")
