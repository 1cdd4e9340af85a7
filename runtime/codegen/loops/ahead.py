"""Asynchronous copies into the memory that a group shares: a ring of blocks, in which some are on their way while the
group computes with one.

before:  for 32 of k: { share a; barrier; accumulate; barrier }
after:   block 0, block 1: start copies; commit
         for 32 of k:
           wait for this block's; barrier; start copies of the second block after this; commit
           accumulate
         barrier

At the barrier each work item's part of this block is there, and all are done with the block before, whose place the new
copies take.
"""

from __future__ import annotations

from collections.abc import Callable

from manygrad.runtime.codegen.loops import index
from manygrad.runtime.codegen.loops.index import Index
from manygrad.runtime.codegen.loops.tiles import Tiler
from manygrad.runtime.codegen.loops.tree import AwaitCopies, Barrier, BlockLoop, CommitCopies, For, If, Nodes
from manygrad.tensor.uop.uop import UOp

AtBlock = Callable[[Index], Nodes]  # what happens to the block that begins there


def copied_ahead(
    t: Tiler, k: UOp, iterations: int, copies: AtBlock, inner: AtBlock, fetched: AtBlock, shared: AtBlock
) -> Nodes:
    """The loop over `k` in blocks of so many iterations: `copies` starts those of a block, `inner` computes with it.
    What is not copied is `fetched` into registers meanwhile, a block ahead, and `shared` from there."""
    size, blocks, counter = k.src[0].arg, t.kernel.nest.ring[k], t.counters.new()

    def block(begin: Index, body: AtBlock) -> Nodes:
        place = index.mod(index.div(begin, index.const(iterations)), index.const(blocks))
        nodes = body(begin)
        return (BlockLoop(k, begin, nodes, place),) if nodes else ()

    def within(begin: Index, nodes: Nodes) -> Nodes:
        return (If(index.less(begin, index.const(size)), nodes),) if nodes else ()

    zero, following = index.const(0), index.add(counter, index.const(iterations))
    ahead = index.add(counter, index.const(iterations * (blocks - 1)))
    first = [n for i in range(blocks - 1) for n in (*block(index.const(i * iterations), copies), CommitCopies())]
    body = (
        AwaitCopies(blocks - 2),
        Barrier(),
        *within(ahead, block(ahead, copies)),
        CommitCopies(),
        *within(following, fetched(following)),
        *block(counter, inner),
        *block(following, shared),
    )
    loop = For(counter, zero, index.const(size), iterations, body)
    return (*first, *fetched(zero), *block(zero, shared), loop, Barrier())
