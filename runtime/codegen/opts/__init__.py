"""Optimisation decisions: named and inspectable, so that a heuristic or a search can pick them.

A kernel is a nest of loops around its reductions. A list of `Opt`s says how the nest is run; without any it is run as
written, one iteration after the other. One file a kind; `kinds.py` lists them.

What is masked out is skipped as if it were 0 times a number: an infinity or a NaN on the other side does not show.

The order in which a reduction is added up, and with it the bits, follows from the kinds with `changes_sums` (`sums`);
the rest changes only when and where things are computed.
"""

from manygrad.runtime.codegen.opts.align import Align
from manygrad.runtime.codegen.opts.bind import Bind
from manygrad.runtime.codegen.opts.bind_reduce import BindReduce
from manygrad.runtime.codegen.opts.block import Block
from manygrad.runtime.codegen.opts.cache_read import CacheRead
from manygrad.runtime.codegen.opts.compute_at import ComputeAt
from manygrad.runtime.codegen.opts.copy_ahead import CopyAhead
from manygrad.runtime.codegen.opts.float32_parts import Float32Parts
from manygrad.runtime.codegen.opts.kinds import KINDS, canonical, legal, loop_nest, named, neighbours, sums
from manygrad.runtime.codegen.opts.matrix import Matrix
from manygrad.runtime.codegen.opts.nest import LoopNest
from manygrad.runtime.codegen.opts.nontemporal_store import NontemporalStore
from manygrad.runtime.codegen.opts.online import Online
from manygrad.runtime.codegen.opts.opt import Opt, Opts
from manygrad.runtime.codegen.opts.parallel import Parallel
from manygrad.runtime.codegen.opts.prefetch import Prefetch
from manygrad.runtime.codegen.opts.read_ahead import ReadAhead
from manygrad.runtime.codegen.opts.reduce_block import ReduceBlock
from manygrad.runtime.codegen.opts.reorder import Reorder
from manygrad.runtime.codegen.opts.rfactor import RFactor
from manygrad.runtime.codegen.opts.skip import Skip
from manygrad.runtime.codegen.opts.tensorize import Tensorize
from manygrad.runtime.codegen.opts.tile import Tile
from manygrad.runtime.codegen.opts.unroll import Unroll
from manygrad.runtime.codegen.opts.vectorize import Vectorize
from manygrad.runtime.codegen.opts.warp_matrix import WarpMatrix

__all__ = [
    "KINDS",
    "Align",
    "Bind",
    "BindReduce",
    "Block",
    "CacheRead",
    "ComputeAt",
    "CopyAhead",
    "Float32Parts",
    "LoopNest",
    "Matrix",
    "NontemporalStore",
    "Online",
    "Opt",
    "Opts",
    "Parallel",
    "Prefetch",
    "RFactor",
    "ReadAhead",
    "ReduceBlock",
    "Reorder",
    "Skip",
    "Tensorize",
    "Tile",
    "Unroll",
    "Vectorize",
    "WarpMatrix",
    "canonical",
    "legal",
    "loop_nest",
    "named",
    "neighbours",
    "sums",
]
