"""The IR: ops, nodes, shapes, symbolic integers, pattern matching, specs and printing."""

import manygrad.tensor.uop.shape  # noqa: F401  (the rules of UOp.shape and UOp.device)
from manygrad.tensor.uop.ops import GroupOp, Ops
from manygrad.tensor.uop.rewrite import PatternMatcher, UPat, graph_rewrite
from manygrad.tensor.uop.uop import BufferSpec, Members, UOp
from manygrad.tensor.uop.walk import standing_on, toposort

__all__ = [
    "BufferSpec",
    "GroupOp",
    "Members",
    "Ops",
    "PatternMatcher",
    "UOp",
    "UPat",
    "graph_rewrite",
    "standing_on",
    "toposort",
]
