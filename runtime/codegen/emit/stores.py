"""Stores of the tile, at each of its positions."""

from __future__ import annotations

from collections.abc import Callable

from manygrad.runtime.codegen.analysis.affine import Affine, Position
from manygrad.runtime.codegen.emit.emission import Emission
from manygrad.runtime.codegen.emit.memory import argument
from manygrad.runtime.codegen.emit.transposed import runs_of_stores, store_transposed
from manygrad.runtime.codegen.emit.values import ragged_mask, sum_of_terms, value
from manygrad.runtime.codegen.loops.tree import Store, StorePart
from manygrad.runtime.codegen.lowered import Inst, Low
from manygrad.tensor.dtype import dtypes
from manygrad.tensor.uop.ops import Ops
from manygrad.tensor.uop.uop import UOp

# a STORE's arg: how the value meets what is there ("set": it takes its place)
COMBINE = {"add": Ops.ADD, "mul": Ops.MUL, "max": Ops.MAX}


def store(e: Emission, node: Store) -> None:
    """All STOREs at all positions of the tile; at one position, every value is computed before the first is
    stored."""
    if node.at_lines:
        for position in e.positions(frozenset(e.tiling.loops)):
            if (at := moved(e, node, position)) is not None:
                prepare_store(e, node, e.sig.stores[0], *at)()
        return
    runs, rest = runs_of_stores(e)
    for run in runs:
        store_transposed(e, e.sig.stores[0], run)
    row = dict(node.row)
    for position in (p for p in rest if row.items() <= p.items()):
        ready = [prepare_store(e, node, u, position) for u in e.sig.stores]
        for write in ready:
            write()


def prepare_store(e: Emission, node: Store, u: UOp, position: Position, some: Inst | None = None) -> Callable[[], None]:
    """`some`: the lanes that are stored, if not those of the range."""
    index = u.src[0]
    found = value(e, u.src[1], position)
    valid = e.conjunction(value(e, index.src[2], position)) if len(index.src) == 3 else None
    if valid is not None and valid.op is Low.CONST:
        return lambda: None
    a = e.scope.analysis.affine(index.src[1], position)
    to = argument(e, index.src[0])
    if e.scope.vectorized is None:
        lanes, guard = 1, valid
    else:
        lanes, guard = e.scope.lanes, e.conjunction(valid, some or ragged_mask(e, position))
    stream = guard is None and a is not None and streams(e, node, u, a)
    if a is not None and (lanes == 1 or a.stride == 1):
        offset, constant = sum_of_terms(e, a), a.constant
    else:
        offset, constant = e.splat(value(e, index.src[1], position), lanes), 0
    if guard is not None and offset.lanes > 1:
        guard = e.splat(guard, lanes)
    guards = () if guard is None else (guard,)
    found = e.splat(found, lanes)

    def write() -> None:
        new = found
        if u.arg in COMBINE:
            old = e.emit(Low.LOAD, found.dtype, (to, offset, *guards), constant, lanes, here=True)
            terms = [old, found]
            if found.dtype.is_half:
                terms = [e.emit(Ops.CAST, dtypes.float32, (x,), None, lanes, here=True) for x in terms]
            new = e.emit(COMBINE[u.arg], terms[0].dtype, tuple(terms), None, lanes, here=True)
            if found.dtype.is_half:
                new = e.emit(Ops.CAST, found.dtype, (new,), None, lanes, here=True)
        op = Low.STREAM if stream else Low.STORE
        e.emit(op, dtypes.void, (to, offset, new, *guards), constant, lanes, here=True)

    return write


def streams(e: Emission, node: Store, u: UOp, a: Affine) -> bool:
    """Whether a STORE goes past the caches: planned so, a whole vector, at a multiple of it."""
    if u.src[0].src[0].arg not in node.past_caches or a.stride != 1:
        return False
    at = e.scope
    whole = at.analysis.alignment(a.terms) % at.lanes == 0 and a.constant % at.lanes == 0
    return node.stored is StorePart.LINES or whole


def moved(e: Emission, node: Store, position: Position) -> tuple[Position, Inst | None] | None:
    """Where the vector at `position` is stored, if vectors begin at lines, and which lanes of it, if not all; None: it
    is not stored."""
    vectorized, n = e.scope.vectorized, e.scope.lanes
    form = e.scope.analysis.affine(e.sig.stores[0].src[0].src[1], position)
    assert vectorized is not None and form is not None
    shift = -form.constant % n
    if node.stored is StorePart.BEFORE:
        return (position, e.emit(Low.FIRST, dtypes.bool, (), shift, n)) if shift else None
    position = {**position, vectorized: position.get(vectorized, 0) + shift}
    inside = position[vectorized] < e.scope.tile[vectorized] + e.scope.reach
    return (position, ragged_mask(e, position)) if inside else None
