"""What is legal after each stage: tables of rules, checked with SPEC=1 after every pass.

A violation names the pass, the rule and the op; it is a fault of ours, not of the user.
"""

from __future__ import annotations

from collections.abc import Callable

from manygrad.tensor.dtype import dtypes
from manygrad.tensor.uop.ops import GroupOp, Ops
from manygrad.tensor.uop.uop import UOp

Rule = tuple[str, Callable[[UOp], bool]]


def _same_dtypes(u: UOp) -> bool:
    src = u.src[1:] if u.op is Ops.WHERE else u.src
    return all(s.dtype is src[0].dtype for s in src)


def _same_shapes(u: UOp) -> bool:
    return all(s.shape == u.shape for s in u.src)


TENSOR: list[Rule] = [
    ("ALU sources have one dtype", lambda u: u.op not in GroupOp.ALU or _same_dtypes(u)),
    ("ALU sources have one shape", lambda u: u.op not in GroupOp.ELEMENTWISE or _same_shapes(u)),
    ("comparisons give bool", lambda u: u.op not in GroupOp.COMPARE or u.dtype is dtypes.bool),
    ("WHERE chooses by a bool", lambda u: u.op is not Ops.WHERE or u.src[0].dtype is dtypes.bool),
    ("movement keeps the dtype", lambda u: u.op not in GroupOp.MOVEMENT or u.src[0].dtype is u.dtype),
    (
        "PERMUTE names every dim once",
        lambda u: u.op is not Ops.PERMUTE or sorted(u.arg) == list(range(len(u.src[0].shape))),
    ),
    (
        "PAD and SHRINK have a pair a dim",
        lambda u: u.op not in (Ops.PAD, Ops.SHRINK) or len(u.arg) == len(u.src[0].shape),
    ),
    (
        "EXPAND grows only dims of 1",
        lambda u: u.op is not Ops.EXPAND or all(a == b or a is b or a == 1 for a, b in zip(u.src[0].shape, u.arg)),
    ),
    ("REDUCE axes exist", lambda u: u.op is not Ops.REDUCE or all(0 <= a < len(u.src[0].shape) for a in u.arg[1])),
    (
        "STORE fits its target",
        lambda u: u.op is not Ops.STORE or (u.src[0].shape == u.src[1].shape and u.src[0].dtype is u.src[1].dtype),
    ),
    (
        "GATHER indices have one shape",
        lambda u: u.op is not Ops.GATHER or all(i.shape == u.src[1].shape for i in u.src[1:]),
    ),
    (
        "CHECK looks at integers and has a word",
        lambda u: (
            u.op is not Ops.CHECK
            or (u.dtype.is_int and u.src[1].op in (Ops.BUFFER, Ops.PARAM, Ops.MSELECT) and len(u.arg) == 3)
        ),
    ),
    ("kernel ops do not stand in a tensor graph", lambda u: u.op not in (Ops.RANGE, Ops.INDEX, Ops.LOAD)),
]

CLEAN: list[Rule] = [*TENSOR, ("no gradient markers are left", lambda u: u.op not in (Ops.DETACH, Ops.CUSTOM))]

PER_DEVICE: list[Rule] = [
    *CLEAN,
    ("no SHARD is left", lambda u: u.op is not Ops.SHARD),
    (
        "only buffers, MSTACK and collectives are on several devices",
        lambda u: (
            not isinstance(u.device, tuple)
            or u.op in (Ops.PARAM, Ops.BUFFER, Ops.MSTACK, Ops.SINK, Ops.CALL)
            or u.op in GroupOp.COLLECTIVE
        ),
    ),
]

UNCHECKED: list[Rule] = [*PER_DEVICE, ("no CHECK is left", lambda u: u.op is not Ops.CHECK)]

STORAGE: list[Rule] = [
    *UNCHECKED,
    ("no CAT or SCATTER is left", lambda u: u.op not in (Ops.CAT, Ops.SCATTER)),
    (
        "COPY and collectives stand in a CALL",
        lambda u: not (u.op in GroupOp.COLLECTIVE or u.op is Ops.COPY) or not u.src,
    ),
]

STORED: list[Rule] = [
    *STORAGE,
    ("no CONTIGUOUS or BARRIER is left", lambda u: u.op not in (Ops.CONTIGUOUS, Ops.BARRIER)),
]

KERNEL_OPS = GroupOp.ELEMENTWISE | {
    Ops.SINK, Ops.STORE, Ops.LOAD, Ops.INDEX, Ops.PARAM, Ops.RANGE, Ops.REDUCE, Ops.CONST, Ops.DEFINE_VAR,
}  # fmt: skip

KERNEL: list[Rule] = [
    ("only kernel ops stand in a kernel", lambda u: u.op in KERNEL_OPS),
    ("ALU sources have one dtype", lambda u: u.op not in GroupOp.ALU or _same_dtypes(u)),
    (
        "STORE writes an INDEX of its type and ends RANGEs",
        lambda u: (
            u.op is not Ops.STORE
            or (
                u.src[0].op is Ops.INDEX
                and u.src[0].dtype is u.src[1].dtype
                and all(r.op is Ops.RANGE for r in u.src[2:])
            )
        ),
    ),
    ("LOAD reads an INDEX", lambda u: u.op is not Ops.LOAD or u.src[0].op is Ops.INDEX),
    (
        "INDEX is a PARAM, an offset and maybe a condition",
        lambda u: (
            u.op is not Ops.INDEX
            or (
                u.src[0].op is Ops.PARAM
                and u.src[1].dtype is dtypes.index
                and all(s.dtype is dtypes.bool for s in u.src[2:])
            )
        ),
    ),
    (
        "REDUCE adds, multiplies or takes the largest over RANGEs",
        lambda u: (
            u.op is not Ops.REDUCE
            or (
                u.arg in (Ops.ADD, Ops.MUL, Ops.MAX)
                and all(r.op is Ops.RANGE and r.arg[1] == "reduce" for r in u.src[1:])
            )
        ),
    ),
    ("RANGE has one size", lambda u: u.op is not Ops.RANGE or (len(u.src) == 1 and u.src[0].dtype is dtypes.index)),
]

LINEAR: list[Rule] = [
    ("a LINEAR holds CALLs", lambda u: u.op is not Ops.LINEAR or all(c.op is Ops.CALL for c in u.src)),
    (
        "a CALL's arguments are buffers or VIEWs of buffers",
        lambda u: (
            u.op is not Ops.CALL or all(a.op in (Ops.PARAM, Ops.BUFFER, Ops.MSELECT, Ops.VIEW) for a in u.src[1:])
        ),
    ),
    (
        "a kernel has as many arguments as PARAMs",
        lambda u: (
            u.op is not Ops.CALL
            or u.src[0].op is not Ops.SINK
            or len(u.src) - 1 == 1 + max(p.arg for p in u.src[0].toposort() if p.op is Ops.PARAM)
        ),
    ),
    (
        "a CHAIN's kernels are given the CALL's arguments",
        lambda u: (
            u.op is not Ops.CALL
            or u.src[0].op is not Ops.CHAIN
            or {i for own in u.src[0].arg.slots for i in own} == set(range(len(u.src) - 1))
        ),
    ),
]

SPECS: dict[str, list[Rule]] = {
    "tensor": TENSOR,
    "clean": CLEAN,
    "lower_shards": PER_DEVICE,
    "lower_checks": UNCHECKED,
    "simplify": UNCHECKED,
    "compute_in_parts": UNCHECKED,
    "lower_storage": STORAGE,
    "copy_old_values": STORAGE,
    "split_updates": STORAGE,
    "insert_stores": STORED,
    "rangeify": KERNEL,
    "linear": LINEAR,
}


def verify(root: UOp, rules: str, name: str | None = None) -> None:
    """AssertionError naming pass, rule and op where a graph breaks the table `rules`;
    `name` is the pass, if it is called otherwise."""
    for u in root.toposort(lambda u: rules != "linear" or u.op is not Ops.SINK):
        for text, holds in SPECS[rules]:
            assert holds(u), (
                f"after pass {name or rules!r}: rule {text!r} is broken by {u!r} of shape {u.shape}, sources "
                f"{[(s.op.name, s.dtype.name, s.shape) for s in u.src]}"
            )
