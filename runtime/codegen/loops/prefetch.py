"""Prefetches of a tile's loads: the same, a tile further along a loop around.

before:  for m: for k: { tile k: accumulate a[m, k] }
after:   for m: for k: { tile k: prefetch a, a tile of m ahead: accumulate a[m, k] }
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator

from manygrad.runtime.codegen.analysis.describe import Signature
from manygrad.runtime.codegen.loops.context import KernelContext
from manygrad.runtime.codegen.loops.tree import Accumulate, Nodes, OnlineReduce, Pack, PrefetchLoads, ReduceLoop, Store
from manygrad.tensor.uop.ops import Ops
from manygrad.tensor.uop.uop import UOp


def prefetched(kernel: KernelContext, r: UOp, tiles: Collection[UOp], body: Nodes, added: Iterable[UOp]) -> Nodes:
    """The body of a tile of `r`, in the nodes of what is prefetched since it is open; `tiles`: the ranges that are;
    `added`: what the innermost reduction around adds up."""
    for x, slot in reversed(kernel.nest.prefetched):
        ahead: dict[UOp, list[UOp]] = {}
        for u in loads(body, kernel.sig, added) if x in tiles else ():
            loop = kernel.nest.next_tile(u, x) if u.src[0].src[0].arg == slot else None
            if loop is not None and loop in tiles and r in (x, loop):
                ahead.setdefault(loop, []).append(u)
        for loop, own in reversed(ahead.items()):
            body = (PrefetchLoads(slot, tuple(own), loop, kernel.nest.tile_of(loop), body),)
    return body


def loads(nodes: Nodes, sig: Signature, added: Iterable[UOp]) -> list[UOp]:
    """The LOADs of what `nodes` compute, each once; `added`: what an Accumulate adds that is in no Reduce of theirs."""
    return list(dict.fromkeys(v for u in _computed(nodes, sig, added) for v in u.toposort() if v.op is Ops.LOAD))


def _computed(nodes: Nodes, sig: Signature, added: Iterable[UOp]) -> Iterator[UOp]:
    for node in nodes:
        inner = added
        match node:
            case Accumulate():
                yield from added
            case ReduceLoop():
                inner = [u.src[0] for u in node.group]
            case OnlineReduce():
                inner = [node.pair.maximum.src[0], node.pair.total.src[0]]
            case Pack():
                yield node.stage.value
            case Store():
                yield from sig.stores
        for body in ("body", "otherwise", "parts"):
            yield from _computed(getattr(node, body, ()), sig, inner)
