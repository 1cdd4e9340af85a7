"""The IR: ops, nodes, shapes, symbolic integers, pattern matching, specs and printing."""

import manygrad.tensor.uop.shape  # noqa: F401  (the rules of UOp.shape and UOp.device)
from manygrad.tensor.uop.args import (
    AllGatherArg,
    AllReduceArg,
    AllToAllArg,
    BroadcastArg,
    BufferSpec,
    CheckArg,
    CollectiveArg,
    Members,
    MessageArg,
    PointToPointArg,
    RangeArg,
    ReduceArg,
    ReduceScatterArg,
    ShardArg,
    VarArg,
    ViewArg,
    even_bounds,
)
from manygrad.tensor.uop.ops import GroupOp, Ops
from manygrad.tensor.uop.rewrite import PatternMatcher, UPat, graph_rewrite
from manygrad.tensor.uop.uop import UOp
from manygrad.tensor.uop.walk import standing_on, toposort

__all__ = [
    "AllGatherArg",
    "AllReduceArg",
    "AllToAllArg",
    "BroadcastArg",
    "BufferSpec",
    "CheckArg",
    "CollectiveArg",
    "GroupOp",
    "Members",
    "MessageArg",
    "Ops",
    "PatternMatcher",
    "PointToPointArg",
    "RangeArg",
    "ReduceArg",
    "ReduceScatterArg",
    "ShardArg",
    "UOp",
    "UPat",
    "VarArg",
    "ViewArg",
    "even_bounds",
    "graph_rewrite",
    "standing_on",
    "toposort",
]
