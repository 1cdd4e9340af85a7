"""Walks a loop tree and writes its instructions.

The expression graph is evaluated once per position of the tiles. What does not depend on a position is shared through
a memo; what does not depend on an inner loop is emitted in the block of the outermost loop it does depend on. So of a
matrix product only the FMA is emitted per pair (row, column vector), a row's broadcast load once per row, and its
address outside the reduction.

before:  STORE(INDEX(c, m*N+n), REDUCE(MUL(LOAD(INDEX(a, m*K+k)), LOAD(INDEX(b, k*N+n))), k), m, n)
after:   LOOP m.. LOOP n.. ACC x 24; LOOP k.. LOAD b x 4, LOAD a x 6, FMA x 24; END; STORE x 24; END END

Order of a reduction: ascending in its ranges; with `rfactor`, element k goes to partial sum k mod tile, and the partial
sums are folded pairwise at the end. It does not depend on the tiles of the loops.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from manygrad.runtime.codegen.analysis.affine import Position
from manygrad.runtime.codegen.emit.copies import copy_part
from manygrad.runtime.codegen.emit.emission import INDEX, Emission
from manygrad.runtime.codegen.emit.fragments import declare, fetch_part, share_part
from manygrad.runtime.codegen.emit.indices import instruction
from manygrad.runtime.codegen.emit.local import held, keep
from manygrad.runtime.codegen.emit.memory import load
from manygrad.runtime.codegen.emit.online import online
from manygrad.runtime.codegen.emit.pack import pack
from manygrad.runtime.codegen.emit.shared import copy, shared
from manygrad.runtime.codegen.emit.stores import store
from manygrad.runtime.codegen.emit.sums import reduce
from manygrad.runtime.codegen.emit.values import index_value, remember
from manygrad.runtime.codegen.loops.lanes import Lanes
from manygrad.runtime.codegen.loops.tree import (
    Accumulate,
    AwaitCopies,
    Barrier,
    BlockLoop,
    CommitCopies,
    CopyElement,
    CopyPart,
    Fetch,
    FetchPart,
    For,
    Holds,
    If,
    Kind,
    Node,
    Nodes,
    OnlineReduce,
    Pack,
    PackStage,
    PrefetchAhead,
    PrefetchLoads,
    Ragged,
    ReduceLoop,
    Scope,
    Share,
    SharePart,
    StartCopies,
    Store,
    TileLoop,
    Tree,
    Vectors,
)
from manygrad.runtime.codegen.lowered import Inst, Low, LoweredProgram
from manygrad.tensor.dtype import dtypes
from manygrad.tensor.uop.ops import Ops
from manygrad.tensor.uop.uop import UOp


def emit(tree: Tree, name: str) -> LoweredProgram:
    e = Emission(tree, leaf, keep)
    walk(e, tree.nodes)
    sig = e.sig
    memory = e.local
    insts = tuple(e.blocks[0].insts)
    return LoweredProgram(
        name, insts, sig.variables, sig.slots, tree.counts, memory.nbytes, tree.group, memory.shared_bytes
    )


def leaf(e: Emission, u: UOp, position: Position) -> Inst | None:
    """Lowers what needs more than the values of its sources; None for plain arithmetic."""
    if (found := held(e, u, position)) is not None or (found := shared(e, u, position)) is not None:
        return found
    match u.op:
        case Ops.CONST:
            return e.const(u.arg, u.dtype)
        case Ops.DEFINE_VAR:
            return e.emit(Low.VAR, INDEX, (), e.sig.variables.index(u))
        case Ops.LOAD:
            return load(e, u, position)
        case Ops.REDUCE:
            raise AssertionError("a REDUCE is used outside the loops it depends on")
    return index_value(e, u, position)


# *** the tree ***


def walk(e: Emission, nodes: Nodes) -> None:
    for node in nodes:
        WALK[type(node)](e, node)


def _for(e: Emission, n: For) -> None:
    if n.kind is Kind.GROUP:
        e.counters[n.counter] = e.emit(Low.ITEM, INDEX, (), n.dim)
        walk(e, n.body)
        return
    begin, end = instruction(e, n.begin), instruction(e, n.end)
    counter = e.open(Low.LOOP, (begin, end), n.step)
    assert counter is not None
    e.counters[n.counter] = counter
    walk(e, n.body)
    e.close()


def _scope(e: Emission, n: Scope) -> None:
    e.open()
    walk(e, n.body)
    e.close()


def _fetch(e: Emission, n: Fetch) -> None:
    declare(e, n)
    walk(e, n.body)


def _if(e: Emission, n: If) -> None:
    condition = instruction(e, n.condition)
    if n.otherwise:
        e.branch(condition, lambda: walk(e, n.body), lambda: walk(e, n.otherwise))
        return
    e.open(Low.IF, (condition,))
    walk(e, n.body)
    e.close()


def _tile(e: Emission, n: TileLoop) -> None:
    r, at = n.range, e.scope
    origin = instruction(e, n.origin)
    inner = replace(e.with_tile(r, origin), tile={**at.tile, r: n.extent}, reach=n.reach or at.reach)
    if n.ragged is not Ragged.NO:
        inner = replace(inner, ragged={**at.ragged, r: None if n.size is None else instruction(e, n.size)})
    if n.vector is not None:
        counter = e.counters[n.vector]
        inner = replace(inner, vector=(r, at.origin[r], counter), along=counter)
    waiting = set(e.waiting)
    with e.within(inner):
        walk(e, n.body)
    e.waiting = waiting


def _block(e: Emission, n: BlockLoop) -> None:
    place = instruction(e, n.place) if n.place is not None else None
    with e.within(replace(e.scope, block={**e.scope.block, n.range: instruction(e, n.begin)}, place=place)):
        walk(e, n.body)


def _cache_read(e: Emission, n: PackStage) -> None:
    for part in n.parts:
        e.packed.discard(part.stage.value)
        with e.within(e.with_lanes(part.lanes)):
            walk(e, part.body)
    e.packed.update(part.stage.value for part in n.parts)


def _share(e: Emission, n: Share | StartCopies) -> None:
    e.packed.discard(n.stage.value)
    with e.within(e.with_lanes(Lanes())):
        walk(e, n.body)
    e.packed.add(n.stage.value)


def _effect(e: Emission, op: Low, arg: int | None = None) -> None:
    e.emit(op, dtypes.void, (), arg, here=True)


def _reduce(e: Emission, n: ReduceLoop) -> None:
    e.waiting.difference_update(n.group)
    e.running.update(n.group)
    reduce(e, n, lambda: walk(e, n.body))
    e.running.difference_update(n.group)


def _online(e: Emission, n: OnlineReduce) -> None:
    both = (n.pair.maximum, n.pair.total)
    e.waiting.difference_update(both)
    online(e, n, lambda: walk(e, n.body), lambda: walk(e, n.otherwise))


def _holds(e: Emission, n: Holds) -> None:
    with e.conditions():
        for condition, position, true in n.facts:
            remember(e, condition, dict(position), e.const(true, dtypes.bool))
        walk(e, n.body)


def _vectors(e: Emission, n: Vectors) -> None:
    with e.within(e.with_lanes(n.lanes)):
        walk(e, n.body)


def _prefetch(e: Emission, n: PrefetchLoads) -> None:
    with e.within(replace(e.scope, prefetches=(*e.scope.prefetches, n))):
        walk(e, n.body)


def _read_ahead(e: Emission, n: PrefetchAhead) -> None:
    with e.within(replace(e.scope, read_ahead=(*e.scope.read_ahead, n))):
        walk(e, n.body)


WALK: dict[type[Node], Callable[[Emission, Any], None]] = {
    For: _for,
    Scope: _scope,
    If: _if,
    TileLoop: _tile,
    BlockLoop: _block,
    PackStage: _cache_read,
    Pack: pack,
    Share: _share,
    CopyElement: lambda e, n: copy(e, n.stage),
    Fetch: _fetch,
    FetchPart: fetch_part,
    SharePart: share_part,
    StartCopies: _share,
    CopyPart: copy_part,
    CommitCopies: lambda e, n: _effect(e, Low.COMMIT),
    AwaitCopies: lambda e, n: _effect(e, Low.AWAIT, n.pending),
    Barrier: lambda e, n: _effect(e, Low.BARRIER),
    ReduceLoop: _reduce,
    Accumulate: lambda e, n: e.adding[-1](),
    OnlineReduce: _online,
    Holds: _holds,
    Vectors: _vectors,
    PrefetchLoads: _prefetch,
    PrefetchAhead: _read_ahead,
    Store: store,
}
