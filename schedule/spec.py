"""Specs of the graph after each pass of the schedule, of kernels, and of the LINEAR: rules by op.

Each spec is the one before it less the ops that its pass lowers, and with the forms that they became.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from manygrad.schedule.facts.chain import ChainSpec, Temporary
from manygrad.schedule.facts.items import Item
from manygrad.tensor.dtype import dtypes
from manygrad.tensor.uop import GroupOp, Members, MessageArg, Ops, RangeArg, UOp, ViewArg
from manygrad.tensor.uop.args import (
    AllGatherArg,
    AllReduceArg,
    AllToAllArg,
    BroadcastArg,
    FinishArg,
    PointToPointArg,
    ReduceScatterArg,
    finish_of,
)
from manygrad.tensor.uop.ranges import ranges_of
from manygrad.tensor.uop.shape import is_buffer
from manygrad.tensor.uop.spec import (
    A_NAME,
    A_VALUE,
    ARITHMETIC,
    INDEX,
    LEAF,
    LIKE_FIRST,
    NO_ARG,
    REDUCES,
    SCATTERS,
    STORABLE,
    STORES,
    TENSOR,
    VALUES,
    VOID,
    GraphSpec,
    Need,
    also,
    are_ints,
    are_names,
    at_least,
    is_place,
    is_shape,
    kinds,
    plus,
    rule,
    sources,
    spec_of,
    verify,
    without,
)

_ON_SEVERAL = GroupOp.COLLECTIVE | {Ops.PARAM, Ops.BUFFER, Ops.MSTACK, Ops.SINK, Ops.CALL}
_ONE_DEVICE: Need = ("one device", lambda u: not isinstance(u.device, tuple))


def _is_members(m: Any) -> bool:
    return (
        type(m) is Members
        and are_names(m.devices)
        and are_ints(m.mine)
        and are_ints(m.counts)
        and len(m.mine) == len(m.counts)
        and type(m.part) is int
    )


def _is_what(op: Ops, arg: Any) -> bool:
    """Whether the arg tells, besides the members, what a collective of this op does."""
    match op, arg:
        case Ops.ALLREDUCE, AllReduceArg():
            return arg.op in REDUCES and type(arg.size) is int
        case Ops.REDUCESCATTER, ReduceScatterArg():
            return arg.op in REDUCES and are_ints(arg.bounds)
        case Ops.ALLGATHER, AllGatherArg():
            return are_ints(arg.bounds)
        case Ops.ALLTOALL, AllToAllArg():
            return are_ints(arg.rows) and are_ints(arg.columns)
        case Ops.BROADCAST, BroadcastArg():
            return type(arg.root) is type(arg.size) is int
        case Ops.POINT_TO_POINT, PointToPointArg():
            return type(arg.size) is int
    return False


def _of_how_many(u: UOp) -> int:
    """How many values an MSELECT chooses from."""
    x = u.src[0]
    return len(x.src if x.op is Ops.MSTACK else x.arg.members.mine if x.op in GroupOp.COLLECTIVE else x.arg.device)


_COLLECTIVE: Need = (
    "the arg of its op, with its Members",
    lambda u: _is_what(u.op, u.arg) and _is_members(u.arg.members),
)
_RESULT: Need = (
    "the dtype of its source, or of what the sum is finished to",
    lambda u: u.dtype is (u.src[0].dtype if (f := finish_of(u.arg)) is None else f.dtype),
)
_OWN: Need = ("a number of one of its parts as arg", lambda u: type(u.arg) is int and 0 <= u.arg < _of_how_many(u))


def _is_part(u: UOp) -> bool:
    return isinstance(u.arg, ViewArg) and type(u.arg.offset) is int and u.arg.offset >= 0 and is_shape(u.arg.shape)


def _ready(u: UOp) -> bool:
    """Whether a CALL is given memory: as it is, a part of it, or a value that is stored first."""
    return all(is_place(s) or s.op in (Ops.CONTIGUOUS, Ops.VIEW) for s in u.src[1:])


def _has_arguments(u: UOp) -> bool:
    """A result and a source of a COPY; as many results as sources of a collective, and what its calls need besides."""
    count, what = len(u.src) - 1, u.src[0]
    if what.op is Ops.COPY:
        return count == 2
    ends = 2 * len(what.arg.members.mine)
    return count >= ends if what.src else count == ends


_CALLS: tuple[Need, ...] = (
    VOID, NO_ARG, at_least(1),
    ("a COPY or a collective first", lambda u: u.src[0].op is Ops.COPY or u.src[0].op in GroupOp.COLLECTIVE),
    ("results and sources", _has_arguments),
)  # fmt: skip
_CALLED = (
    rule("COPY is called", Ops.COPY, LEAF, A_VALUE, A_NAME),
    rule("a collective is called, as it is or as a LINEAR of its calls", GroupOp.COLLECTIVE,
         A_VALUE, _COLLECTIVE, sources(0, 1), kinds("a LINEAR as source", {Ops.LINEAR})),
)  # fmt: skip

GRAPH = without(TENSOR, Ops.BIND, Ops.FUNCTION, Ops.RESULT)

CLEAN = without(GRAPH, Ops.DETACH, Ops.CUSTOM)

FINISHED = plus(
    CLEAN,
    rule("FINISH is computed of a sum over devices", Ops.FINISH,
         sources(1), VALUES, A_VALUE, ("a FinishArg of its dtype",
         lambda u: isinstance(u.arg, FinishArg) and u.arg.value.dtype is u.dtype)),
)  # fmt: skip

PER_DEVICE = also(
    plus(
        without(CLEAN, Ops.SHARD, Ops.WIRE),
        rule("a collective takes an MSTACK", GroupOp.COLLECTIVE,
             sources(1), kinds("an MSTACK as source", {Ops.MSTACK}), _COLLECTIVE, _RESULT),
        rule("MSTACK holds a value a device", Ops.MSTACK,
             at_least(1), NO_ARG, VALUES, LIKE_FIRST,
             ("sources of its dtype", lambda u: all(s.dtype is u.dtype for s in u.src))),
        rule("MSELECT is one of several", Ops.MSELECT,
             sources(1), LIKE_FIRST,
             kinds("what is on several devices as source", GroupOp.COLLECTIVE | {Ops.PARAM, Ops.BUFFER, Ops.MSTACK}),
             _OWN),
    ),
    _ONE_DEVICE,
    but=_ON_SEVERAL,
)  # fmt: skip

UNCHECKED = without(PER_DEVICE, Ops.CHECK)

STORAGE = plus(
    without(UNCHECKED, Ops.CAT, Ops.SCATTER),
    *_CALLED,
    rule("CALL copies or communicates", Ops.CALL, *_CALLS, ("memory as arguments", _ready)),
    rule("VIEW is a part of memory", Ops.VIEW,
         sources(1), LIKE_FIRST, ("memory as source", lambda u: is_place(u.src[0])),
         ("a ViewArg", _is_part)),
    rule("STORE writes memory", Ops.STORE,
         *STORES, ("no arg, or the way to combine where indices pick",
                   lambda u: u.arg is None or (u.arg in SCATTERS and u.src[0].op is Ops.GATHER))),
    rule("MSELECT is a part of memory", Ops.MSELECT,
         sources(1), LIKE_FIRST, kinds("memory on several devices as source", {Ops.PARAM, Ops.BUFFER}), _OWN),
)  # fmt: skip

STORED = without(STORAGE, Ops.CONTIGUOUS, Ops.BARRIER)


# *** kernels ***


def _ends_its_ranges(u: UOp) -> bool:
    return (ranges_of(u.src[0]) | ranges_of(u.src[1])) <= frozenset(u.src[2:])


def _is_range(arg: Any) -> bool:
    return isinstance(arg, RangeArg) and type(arg.id) is int and arg.kind in ("loop", "reduce")


KERNEL = spec_of(
    *ARITHMETIC,
    rule("PARAM is an argument", Ops.PARAM,
         LEAF, STORABLE, ("its place as arg", lambda u: type(u.arg) is int and u.arg >= 0)),
    rule("RANGE counts to a size", Ops.RANGE,
         sources(1), INDEX, ("a size of dtype index", lambda u: u.src[0].dtype is dtypes.index),
         ('a RangeArg of kind "loop" or "reduce"', lambda u: _is_range(u.arg))),
    rule("INDEX is a PARAM, an offset and maybe a condition", Ops.INDEX,
         sources(2, 3), NO_ARG, LIKE_FIRST, ("a PARAM first", lambda u: u.src[0].op is Ops.PARAM),
         ("an offset of dtype index", lambda u: u.src[1].dtype is dtypes.index),
         ("a condition of dtype bool", lambda u: all(s.dtype is dtypes.bool for s in u.src[2:]))),
    rule("LOAD reads an INDEX", Ops.LOAD, sources(1), NO_ARG, LIKE_FIRST, kinds("an INDEX as source", {Ops.INDEX})),
    rule("REDUCE adds, multiplies or takes the largest over RANGEs", Ops.REDUCE,
         at_least(2), LIKE_FIRST, VALUES, ("ADD, MUL or MAX as arg", lambda u: u.arg in REDUCES),
         ("RANGEs of reductions", lambda u: all(r.op is Ops.RANGE and r.arg.kind == "reduce" for r in u.src[1:]))),
    rule("STORE writes an INDEX of its type and ends RANGEs", Ops.STORE,
         at_least(2), VOID, ("no arg, or the way to combine", lambda u: u.arg is None or u.arg in SCATTERS),
         ("an INDEX first", lambda u: u.src[0].op is Ops.INDEX),
         ("a value of its dtype", lambda u: u.src[0].dtype is u.src[1].dtype),
         ("RANGEs at the end", lambda u: all(r.op is Ops.RANGE for r in u.src[2:])),
         ("all RANGEs that it changes with", _ends_its_ranges)),
    rule("SINK holds STOREs", Ops.SINK, at_least(1), VOID, NO_ARG, kinds("STOREs as sources", {Ops.STORE})),
)  # fmt: skip

# *** the calls, without the kernels that they call ***


def _as_many_as_params(u: UOp) -> bool:
    kernel = u.src[0]
    return len(u.src) - 1 == 1 + max(p.arg for p in kernel.toposort() if p.op is Ops.PARAM)


def _are_given(u: UOp) -> bool:
    return {i for own in u.src[0].arg.slots for i in own} == set(range(len(u.src) - 1))


def _memory(u: UOp) -> bool:
    return all(is_buffer(a) or a.op is Ops.VIEW for a in u.src[1:])


def _is_message(m: Any) -> bool:
    return type(m) is MessageArg and type(m.peer) is int and type(m.number) is int


def _are_messages(u: UOp) -> bool:
    return type(u.arg) is tuple and len(u.arg) > 0 and all(map(_is_message, u.arg))


def _is_given_memory(u: UOp) -> bool:
    """One argument of a message; of a SETTLE one for each."""
    what, count = u.src[0], len(u.src) - 1
    return count == (len(what.arg) if what.op is Ops.SETTLE else 1)


_MEMORY: Need = ("buffers, or VIEWs of them, as arguments", _memory)
_MESSAGES = frozenset({Ops.SEND, Ops.RECEIVE, Ops.RELEASE, Ops.SETTLE})
_IS_MESSAGE: Need = ("a SEND, RECEIVE, RELEASE or SETTLE first", lambda u: u.src[0].op in _MESSAGES)
LINEAR: GraphSpec = GraphSpec({
    **spec_of(
        *_CALLED,
        rule("CALL of a kernel", Ops.CALL,
             VOID, NO_ARG, at_least(2), ("a SINK first", lambda u: u.src[0].op is Ops.SINK), _MEMORY,
             ("an argument for each PARAM", _as_many_as_params)),
        rule("CALL of a CHAIN", Ops.CALL,
             VOID, NO_ARG, at_least(2), ("a CHAIN first", lambda u: u.src[0].op is Ops.CHAIN), _MEMORY,
             ("arguments that its kernels are given", _are_given)),
        rule("CALL copies or communicates", Ops.CALL, *_CALLS, _MEMORY),
        rule("CALL sends or receives", Ops.CALL,
             VOID, NO_ARG, at_least(1), _IS_MESSAGE, ("an argument for each message", _is_given_memory), _MEMORY),
        rule("SEND and RECEIVE are of a message", {Ops.SEND, Ops.RECEIVE},
             LEAF, A_VALUE, ("a MessageArg", lambda u: _is_message(u.arg))),
        rule("RELEASE is of an argument", Ops.RELEASE, LEAF, A_VALUE, NO_ARG),
        rule("SETTLE is of messages", Ops.SETTLE, LEAF, VOID, ("a MessageArg for each message", _are_messages)),
        rule("VIEW is a part of memory", Ops.VIEW,
             sources(1), LIKE_FIRST, ("memory as source", lambda u: is_buffer(u.src[0])),
             ("a ViewArg", _is_part)),
        rule("CHAIN holds kernels", Ops.CHAIN,
             at_least(2), VOID, kinds("kernels as sources", {Ops.SINK}),
             ("a ChainSpec with the slots of each kernel",
              lambda u: isinstance(u.arg, ChainSpec) and len(u.arg.slots) == len(u.src)),
             ("Temporaries", lambda u: all(isinstance(t, Temporary) for t in u.arg.temps))),
        rule("a kernel", Ops.SINK, VOID, NO_ARG, at_least(1)),
        rule("LINEAR holds CALLs", Ops.LINEAR, VOID, kinds("CALLs as sources", {Ops.CALL})),
    ),
    **{op: STORED[op] for op in (Ops.PARAM, Ops.BUFFER, Ops.MSELECT)},
})  # fmt: skip

# pass -> what it leaves
GRAPHS = {
    "normalize": GRAPH,
    "clean": CLEAN,
    "merge_reductions": CLEAN,
    "finish_sums": FINISHED,
    "cut_sums": FINISHED,
    "lower_shards": PER_DEVICE,
    "lower_checks": UNCHECKED,
    "simplify": UNCHECKED,
    "split_reductions": UNCHECKED,
    "compute_in_parts": UNCHECKED,
    "lower_storage": STORAGE,
    "copy_old_values": STORAGE,
    "split_updates": STORAGE,
    "insert_stores": STORED,
}


def graph_spec(graph: UOp, name: str) -> None:
    verify(graph, GRAPHS[name], name)


def stores_spec(items: Sequence[Item], name: str) -> None:
    """The STOREs that are to become kernels; the other calls as those of a LINEAR."""
    stores = [i.what for i in items if i.what.op is Ops.STORE]
    verify(UOp(Ops.SINK, dtypes.void, tuple(stores)), GRAPHS["insert_stores"], name)
    items_spec([i for i in items if i.what.op is not Ops.STORE], name)


def items_spec(items: Sequence[Item], name: str) -> None:
    """Each kernel by itself, and the calls as those of a LINEAR."""
    for item in items:
        kernels = item.what.src if item.what.op is Ops.CHAIN else (item.what,) if item.what.op is Ops.SINK else ()
        for kernel in kernels:
            verify(kernel, KERNEL, name)
    calls = (UOp(Ops.CALL, dtypes.void, (i.what, *i.args)) for i in items)
    linear_spec(UOp(Ops.LINEAR, dtypes.void, tuple(calls)), name)


def linear_spec(linear: UOp, name: str) -> None:
    verify(linear, LINEAR, name, lambda u: u.op is not Ops.SINK and u.op is not Ops.CHAIN)
