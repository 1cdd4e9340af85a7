"""Spec of a graph: for each op the forms that are legal, and nothing else. Checked with SPEC=1 after every pass.

A `Rule` is one form of some ops: a row of needs, each of which may rely on the ones before it. A node is legal where
all needs of one rule of its op hold. A violation names the pass, the node, and the rules that came nearest, each with
the need that is not met; it is a fault of ours, not of the user. `TENSOR` is the graph that the user's program builds;
the specs of the schedule's stages, which begin with it, stand in `schedule/spec.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from math import prod
from typing import Any, NamedTuple

from manygrad.tensor.dtype import DType, dtypes
from manygrad.tensor.uop.args import BufferSpec, CheckArg, ReduceArg, ShardArg, VarArg
from manygrad.tensor.uop.ops import GroupOp, Ops
from manygrad.tensor.uop.shape import is_buffer
from manygrad.tensor.uop.table import Table
from manygrad.tensor.uop.uop import UOp
from manygrad.tensor.uop.views import HIDDEN
from manygrad.tensor.uop.walk import toposort

Need = tuple[str, Callable[[UOp], bool]]


class Rule(NamedTuple):
    name: str
    ops: frozenset[Ops]
    needs: tuple[Need, ...]


class GraphSpec(dict[Ops, tuple[Rule, ...]]):
    """The rules by op; only these ops are legal. Nobody changes it."""

    __hash__ = object.__hash__  # type: ignore[assignment]


_HELD: Table[set[GraphSpec]] = Table("specs held")  # those that a node and all below it were found to hold
NEAREST = 3  # rules that a message tells of


def rule(name: str, ops: Ops | Iterable[Ops], *needs: Need) -> Rule:
    return Rule(name, frozenset((ops,)) if isinstance(ops, Ops) else frozenset(ops), needs)


def spec_of(*rules: Rule) -> GraphSpec:
    """The rules by op; only these ops are legal."""
    return GraphSpec({op: tuple(r for r in rules if op in r.ops) for op in Ops if any(op in r.ops for r in rules)})


def plus(spec: GraphSpec, *rules: Rule) -> GraphSpec:
    """The spec with these rules, which replace all others about their ops."""
    return GraphSpec({**spec, **spec_of(*rules)})


def without(spec: GraphSpec, *ops: Ops) -> GraphSpec:
    """The spec of a stage in which there are no `ops` any more."""
    return GraphSpec({op: rules for op, rules in spec.items() if op not in ops})


def also(spec: GraphSpec, *needs: Need, but: Iterable[Ops] = ()) -> GraphSpec:
    """The spec whose rules have more needs, those of the ops `but` apart."""
    apart = frozenset(but)
    return GraphSpec(
        {
            op: rules if op in apart else tuple(r._replace(needs=(*r.needs, *needs)) for r in rules)
            for op, rules in spec.items()
        }
    )


def verify(root: UOp, spec: GraphSpec, name: str, enter: Callable[[UOp], bool] | None = None) -> None:
    """AssertionError where a node below `root` is not legal after the pass `name`; `enter` false: do not look below a
    node, the same ones for each call with one spec. Sources are looked at first, so that a rule may rely on theirs.

    A rule is about the node and what stands below it, which does not change: what holds is not looked at again, so that
    after a pass that changes little, little is."""

    def is_new(u: UOp) -> bool:
        held = _HELD.get(u)
        return (held is None or spec not in held) and (enter is None or enter(u))

    for u in toposort((root,), is_new):
        held = _HELD.get(u)
        if held is not None and spec in held:
            continue
        assert _is_legal(u, spec.get(u.op, ())), f"after pass {name!r}: {_described(u)} {_broken(u, spec)}"
        if held is None:
            _HELD[u] = {spec}
        else:
            held.add(spec)


def _is_legal(u: UOp, rules: tuple[Rule, ...]) -> bool:
    try:
        for r in rules:
            for _, holds in r.needs:
                if not holds(u):
                    break
            else:
                return True
    except Exception:  # (the shape or device of a node that has none)
        return False
    return False


def _broken(u: UOp, spec: GraphSpec) -> str:
    rules = spec.get(u.op, ())
    if not rules:
        return "is not legal: no rule of this stage is about its op"
    lacks = sorted((_lacks(u, r) for r in rules), key=lambda found: -found[0])
    return "fits no rule of this stage; nearest: " + "; ".join(text for _, text in lacks[:NEAREST])


def _lacks(u: UOp, r: Rule) -> tuple[int, str]:
    """How many needs of a rule hold, and what it lacks."""
    for met, (text, holds) in enumerate(r.needs):
        try:
            if holds(u):
                continue
        except Exception:  # it cannot even be asked for
            pass
        return met, f"rule {r.name!r} needs {text}"
    raise AssertionError(f"{u!r} fits rule {r.name!r}")


def _described(u: UOp) -> str:
    return f"{_told(u)} with sources [{', '.join(map(_told, u.src))}]"


def _told(u: UOp) -> str:
    try:
        return f"{u!r} of shape {u.shape}"
    except Exception:  # (whatever a node that breaks a rule raises: it is described in the error that says which)
        return f"{u!r} of no shape"


# *** needs: of the sources ***


def sources(*counts: int) -> Need:
    return f"{' or '.join(map(str, counts)) or 'no'} sources", lambda u: len(u.src) in counts


def at_least(count: int) -> Need:
    return f"at least {count} sources", lambda u: len(u.src) >= count


def kinds(text: str, *groups: Iterable[Ops]) -> Need:
    """The ops of the sources; the last group is that of all further ones."""
    ops = [frozenset(g) for g in groups]
    return text, lambda u: all(s.op in ops[min(i, len(ops) - 1)] for i, s in enumerate(u.src))


LEAF: Need = ("no sources", lambda u: not u.src)
ONE_TYPE: Need = ("sources of one dtype", lambda u: all(s.dtype is u.src[0].dtype for s in u.src))
ONE_SHAPE: Need = ("sources of one shape", lambda u: all(s.shape == u.shape for s in u.src))
VALUES: Need = ("values as sources", lambda u: all(s.dtype is not dtypes.void for s in u.src))

# *** needs: of the dtype ***

VOID: Need = ("dtype void", lambda u: u.dtype is dtypes.void)
INDEX: Need = ("dtype index", lambda u: u.dtype is dtypes.index)
BOOL: Need = ("dtype bool", lambda u: u.dtype is dtypes.bool)
A_VALUE: Need = ("a dtype of values", lambda u: u.dtype is not dtypes.void)
LIKE_FIRST: Need = ("the dtype of its first source", lambda u: u.dtype is u.src[0].dtype)
FLOAT: Need = ("a float dtype", lambda u: u.dtype.is_float)
INTEGER: Need = ("an integer dtype", lambda u: u.dtype.is_int)
BITS: Need = ("an integer or bool dtype", lambda u: u.dtype.is_int or u.dtype.is_bool)
STORABLE: Need = ("a dtype that memory holds", lambda u: u.dtype is not dtypes.void and u.dtype is not dtypes.index)

# *** needs: of the arg ***

NO_ARG: Need = ("no arg", lambda u: u.arg is None)
A_NAME: Need = ("a device's name as arg", lambda u: type(u.arg) is str)


def _is_dim(d: Any) -> bool:
    return d >= 0 if type(d) is int else isinstance(d, UOp) and d.dtype is dtypes.index


def is_shape(x: Any) -> bool:
    return type(x) is tuple and all(map(_is_dim, x))


def _are_pairs(x: Any) -> bool:
    return type(x) is tuple and all(type(p) is tuple and len(p) == 2 and is_shape(p) for p in x)


def are_ints(x: Any) -> bool:
    return type(x) is tuple and all(type(i) is int for i in x)


def are_names(x: Any) -> bool:
    return type(x) is tuple and len(x) > 0 and all(type(d) is str for d in x)


def _is_buffer_spec(u: UOp) -> bool:
    b = u.arg
    if type(b) is not BufferSpec or type(b.uid) is not int or b.dtype is not u.dtype or not is_shape(b.shape):
        return False
    if type(b.device) is str:
        return b.axis is None and b.bounds == ()
    if not are_names(b.device) or b.axis is None:
        return are_names(b.device) and b.bounds == ()
    return 0 <= b.axis < len(b.shape) and are_ints(b.bounds) and len(b.bounds) == len(b.device) + 1


def is_number_of(value: Any, dtype: DType) -> bool:
    """Whether a constant is the Python value that a dtype holds."""
    return type(value) is (bool if dtype.is_bool else float if dtype.is_float else int if dtype.is_int else None)


def _is_variable(arg: Any) -> bool:
    return (
        isinstance(arg, VarArg)
        and type(arg.name) is str
        and type(arg.min) is type(arg.max) is int
        and arg.min <= arg.max
    )


SPEC_ARG: Need = ("a BufferSpec of its dtype as arg", _is_buffer_spec)
NUMBER: Need = ("the value of its dtype as arg", lambda u: is_number_of(u.arg, u.dtype))

# *** rules that hold from the user's graph to kernels ***

FLOATS = frozenset({Ops.RECIP, Ops.SQRT, Ops.EXP, Ops.LOG, Ops.SIN, Ops.FDIV, Ops.POW, Ops.FMA})
INTEGERS = frozenset({Ops.IDIV, Ops.SHL, Ops.SHR})
BITWISE = frozenset({Ops.NOT, Ops.AND, Ops.OR, Ops.XOR})
REDUCES = (Ops.ADD, Ops.MUL, Ops.MAX)
_ALU: tuple[Need, ...] = (NO_ARG, VALUES, ONE_TYPE, LIKE_FIRST)

ARITHMETIC = (
    rule("CONST is a number", Ops.CONST, LEAF, NUMBER),
    rule("DEFINE_VAR has a name and bounds", Ops.DEFINE_VAR,
         LEAF, INDEX, ("a VarArg, its min no larger than its max", lambda u: _is_variable(u.arg))),
    rule("arithmetic on one value", GroupOp.UNARY - FLOATS - BITWISE, sources(1), *_ALU),
    rule("arithmetic on two values", GroupOp.BINARY - FLOATS - INTEGERS - BITWISE - GroupOp.COMPARE,
         sources(2), *_ALU),
    rule("a float operation on one value", GroupOp.UNARY & FLOATS, sources(1), *_ALU, FLOAT),
    rule("a float operation on two values", GroupOp.BINARY & FLOATS, sources(2), *_ALU, FLOAT),
    rule("an integer operation", INTEGERS, sources(2), *_ALU, INTEGER),
    rule("NOT", Ops.NOT, sources(1), *_ALU, BITS),
    rule("a bitwise operation", BITWISE - {Ops.NOT}, sources(2), *_ALU, BITS),
    rule("a comparison gives bool", GroupOp.COMPARE, sources(2), NO_ARG, VALUES, ONE_TYPE, BOOL),
    rule("WHERE chooses by a bool", Ops.WHERE,
         sources(3), NO_ARG, VALUES,
         ("a bool first", lambda u: u.src[0].dtype is dtypes.bool),
         ("two values of its dtype", lambda u: u.src[1].dtype is u.src[2].dtype is u.dtype)),
    rule("FMA multiplies and adds floats", Ops.FMA, sources(3), *_ALU, FLOAT),
    rule("CAST gives another dtype", Ops.CAST, sources(1), NO_ARG, VALUES, A_VALUE),
    rule("BITCAST keeps the bits", Ops.BITCAST,
         sources(1), NO_ARG, VALUES, A_VALUE,
         ("a source of as many bytes", lambda u: u.src[0].dtype.itemsize == u.dtype.itemsize)),
)  # fmt: skip

# *** the user's graph ***


def is_place(u: UOp) -> bool:
    """Whether `u` is memory, or a view of memory: what can be stored to."""
    while u.op in GroupOp.VIEW or u.op is Ops.AFTER or u.op is Ops.GATHER:
        u = u.src[0]
    return is_buffer(u)


def _is_reduction(u: UOp) -> bool:
    arg, rank = u.arg, len(u.src[0].shape)
    return (
        isinstance(arg, ReduceArg)
        and arg.op in REDUCES
        and are_ints(arg.axes)
        and len(set(arg.axes)) == len(arg.axes)
        and all(0 <= a < rank for a in arg.axes)
        and (arg.blocks is None or (type(arg.blocks) is int and arg.blocks > 0))
    )


def _fits_in(begin: Any, end: Any, size: Any) -> bool:
    """(Of symbolic dims nothing is asked.)"""
    return not all(type(x) is int for x in (begin, end, size)) or 0 <= begin <= end <= size


def _is_check(arg: Any) -> bool:
    return (
        isinstance(arg, CheckArg)
        and type(arg.low) is type(arg.size) is int
        and (arg.spared is None or type(arg.spared) is int)
    )


def _is_shard(u: UOp) -> bool:
    arg = u.arg
    return (
        isinstance(arg, ShardArg)
        and are_names(arg.devices)
        and (arg.axis is None or (type(arg.axis) is int and 0 <= arg.axis < len(u.src[0].shape)))
    )


def _has_bounds(u: UOp) -> bool:
    devices, axis, bounds = u.arg
    if bounds == () or axis is None or not are_ints(bounds):
        return bool(bounds == ())
    ends = (bounds[0], bounds[-1]) == (0, u.src[0].shape[axis])
    return ends and len(bounds) == len(devices) + 1 and list(bounds) == sorted(bounds)


def _as_many(u: UOp) -> bool:
    a, b = u.src[0].shape, u.arg
    return not {*map(type, a), *map(type, b)} <= {int} or prod(a) == prod(b)


def _beside(shape: tuple[Any, ...], axis: int) -> tuple[Any, ...]:
    return shape[:axis] + shape[axis + 1 :]


EFFECTS_LAST: Need = ("effects after it", lambda u: all(s.op in (Ops.STORE, Ops.CALL) for s in u.src[1:]))
SCATTERS = ("set", "place", "add", "mul", "max")
_MOVES: tuple[Need, ...] = (sources(1), VALUES, LIKE_FIRST)
_PICKED: tuple[Need, ...] = (
    ("integer indices", lambda u: all(i.dtype.is_int for i in u.src[u.op is Ops.SCATTER :][1:])),
    ("indices of one shape", lambda u: len({i.shape for i in u.src[u.op is Ops.SCATTER :][1:]}) == 1),
    ("no more indices than dims", lambda u: len(u.src[u.op is Ops.SCATTER :]) - 1 <= len(u.src[0].shape)),
)
STORES: tuple[Need, ...] = (
    sources(2), VOID, ("a target in memory", lambda u: is_place(u.src[0])),
    ("a value of the target's dtype", lambda u: u.src[0].dtype is u.src[1].dtype),
    ("a value of the target's shape", lambda u: u.src[0].shape == u.src[1].shape),
)  # fmt: skip

TENSOR = spec_of(
    *(r._replace(needs=(*r.needs, ONE_SHAPE)) if r.ops <= GroupOp.ELEMENTWISE else r for r in ARITHMETIC),
    rule("memory", (Ops.BUFFER, Ops.PARAM), LEAF, STORABLE, SPEC_ARG),
    rule("IOTA counts", Ops.IOTA, LEAF, INTEGER, ("its length as arg", lambda u: _is_dim(u.arg))),
    rule("BIND gives a variable a value", Ops.BIND,
         sources(2), INDEX, NO_ARG,
         ("a DEFINE_VAR and a CONST", lambda u: (u.src[0].op, u.src[1].op) == (Ops.DEFINE_VAR, Ops.CONST)),
         ("a value of dtype index", lambda u: u.src[1].dtype is dtypes.index)),
    rule("RESHAPE keeps the elements", Ops.RESHAPE,
         *_MOVES, ("a shape as arg", lambda u: is_shape(u.arg)), ("as many elements", lambda u: _as_many(u))),
    rule("PERMUTE names every dim once", Ops.PERMUTE,
         *_MOVES, ("each dim once as arg",
                   lambda u: are_ints(u.arg) and sorted(u.arg) == list(range(len(u.src[0].shape))))),
    rule("EXPAND grows dims of 1", Ops.EXPAND,
         *_MOVES, ("a shape as arg", lambda u: is_shape(u.arg)),
         ("as many dims", lambda u: len(u.arg) == len(u.src[0].shape)),
         ("other sizes only of dims of 1",
          lambda u: all(a is b or a == b or a == 1 for a, b in zip(u.src[0].shape, u.arg)))),
    rule("PAD has a pair a dim", Ops.PAD,
         *_MOVES, ("pairs as arg", lambda u: _are_pairs(u.arg)),
         ("a pair a dim", lambda u: len(u.arg) == len(u.src[0].shape))),
    rule("SHRINK has a pair a dim", Ops.SHRINK,
         *_MOVES, ("pairs as arg", lambda u: _are_pairs(u.arg)),
         ("a pair a dim", lambda u: len(u.arg) == len(u.src[0].shape)),
         ("pairs within the dims", lambda u: all(_fits_in(b, e, d) for (b, e), d in zip(u.arg, u.src[0].shape)))),
    rule("FLIP has a bool a dim", Ops.FLIP,
         *_MOVES, ("bools as arg", lambda u: type(u.arg) is tuple and all(type(f) is bool for f in u.arg)),
         ("a bool a dim", lambda u: len(u.arg) == len(u.src[0].shape))),
    rule("REDUCE goes over dims", Ops.REDUCE,
         *_MOVES, ("a ReduceArg of its dims", _is_reduction)),
    rule("GATHER picks by indices", Ops.GATHER, at_least(2), NO_ARG, VALUES, LIKE_FIRST, *_PICKED),
    rule("SCATTER combines at indices", Ops.SCATTER,
         at_least(3), ("the way to combine as arg", lambda u: u.arg in SCATTERS), VALUES, LIKE_FIRST, *_PICKED,
         ("a value of its dtype", lambda u: u.src[1].dtype is u.dtype),
         ("a value for each index",
          lambda u: u.src[1].shape == u.src[2].shape + u.src[0].shape[len(u.src) - 2 :])),
    rule("CAT joins along a dim", Ops.CAT,
         at_least(1), ONE_TYPE, VALUES, LIKE_FIRST,
         ("a dim as arg", lambda u: type(u.arg) is int and 0 <= u.arg < len(u.src[0].shape)),
         ("equal shapes beside that dim", lambda u: len({_beside(s.shape, u.arg) for s in u.src}) == 1)),
    rule("CONTIGUOUS is stored", Ops.CONTIGUOUS,
         *_MOVES, ("no arg, or a leaf's number", lambda u: u.arg is None or isinstance(u.arg, int))),
    rule("DETACH has no gradient", Ops.DETACH,
         *_MOVES, ("no arg, a leaf's number, or HIDDEN", lambda u: u.arg in (None, HIDDEN) or isinstance(u.arg, int))),
    rule("CUSTOM has a gradient of its own", Ops.CUSTOM,
         at_least(1), VALUES, LIKE_FIRST, ("a gradient as arg", lambda u: u.arg is not None)),
    rule("CHECK looks at an index", Ops.CHECK,
         sources(2), LIKE_FIRST, INTEGER, ("a word in memory", lambda u: is_buffer(u.src[1])),
         ("a CheckArg", lambda u: _is_check(u.arg))),
    rule("WIRE says how a sum travels", Ops.WIRE,
         *_MOVES, ("the name of a half type as arg", lambda u: u.arg in ("float16", "bfloat16"))),
    rule("BARRIER waits", Ops.BARRIER, sources(2), NO_ARG, VALUES, LIKE_FIRST),
    rule("COPY goes to a device", Ops.COPY, *_MOVES, A_NAME),
    rule("SHARD goes to several devices", Ops.SHARD, *_MOVES,
         ("a ShardArg, its axis a dim or None", _is_shard), ("bounds of its parts, or none", _has_bounds)),
    rule("STORE writes memory", Ops.STORE, NO_ARG, *STORES),
    rule("AFTER waits for effects", Ops.AFTER,
         at_least(2), NO_ARG, A_VALUE, LIKE_FIRST, ("memory first", lambda u: is_place(u.src[0])), EFFECTS_LAST),
    rule("FUNCTION calls a body", Ops.FUNCTION,
         VOID, VALUES, ("a SINK as arg", lambda u: isinstance(u.arg, UOp) and u.arg.op is Ops.SINK)),
    rule("RESULT is a value of a FUNCTION", Ops.RESULT,
         sources(1), A_VALUE, kinds("a FUNCTION as source", {Ops.FUNCTION}),
         ("its number as arg", lambda u: type(u.arg) is int and 0 <= u.arg < len(u.src[0].arg.src)),
         ("the dtype of that value", lambda u: u.dtype is u.src[0].arg.src[u.arg].dtype)),
    rule("SINK holds effects", Ops.SINK, VOID, NO_ARG,
         kinds("effects as sources", GroupOp.COLLECTIVE | {Ops.AFTER, Ops.STORE, Ops.MSTACK})),
)  # fmt: skip
