"""The calls of a collective as text, a line each: for DEBUG=3 and the docs."""

from __future__ import annotations

from manygrad.collectives.reduction import OPS
from manygrad.tensor.uop import MessageArg, Ops, UOp
from manygrad.tensor.uop.shape import numel

_SIGNS = {Ops.ADD: "+", Ops.MUL: "*", Ops.OR: "|", Ops.AND: "&"}


def show_calls(linear: UOp, ranks: int) -> list[str]:
    """A line for each call of a worker with so many ranks: `out0` is the result of the first, `in0` its source, `t0` a
    temporary, `m1` a message that is borrowed."""
    return [_line(call.src[0], [_name(a, ranks) for a in call.src[1:]], call) for call in linear.src]


def _line(what: UOp, args: list[str], call: UOp) -> str:
    if what.op is Ops.SEND:
        return f"SEND {args[0]} to {_message(what.arg)}{', to be written' * what.arg.is_written}"
    if what.op is Ops.RECEIVE:
        size = f"{numel(call.src[1].shape)} {call.src[1].dtype.name}{', to be written' * what.arg.is_written}"
        return f"{args[0]} = RECEIVE from {_message(what.arg)}, {size}"
    if what.op is Ops.RELEASE:
        return f"RELEASE {args[0]}"
    if what.op is Ops.SETTLE:
        return f"SETTLE {'; '.join(map(_message, what.arg))}"
    if what.op is Ops.COPY:
        return f"{args[0]} = COPY {args[1]}"
    return f"{' = '.join(args[: len(what.src)])} = {_value(what.src[0].src[1], args)}"


def _message(m: MessageArg) -> str:
    return f"worker {m.peer}, message {m.number}"


def _name(u: UOp, ranks: int) -> str:
    buffer, start = (u.src[0], u.arg.offset) if u.op is Ops.VIEW else (u, 0)
    slot = buffer.arg.uid
    if buffer.op is Ops.BUFFER:
        return f"m{-slot}"
    kind, number = (
        ("out", slot) if slot < ranks else ("in", slot - ranks) if slot < 2 * ranks else ("t", slot - 2 * ranks)
    )
    return f"{kind}{number}[{start}:{start + numel(u.shape)}]"


def _value(u: UOp, args: list[str]) -> str:
    """A kernel of `reduction.py` as text."""
    if u.op is Ops.LOAD:
        return args[u.src[0].src[0].arg]
    if u.op is Ops.CONST:
        return str(u.arg)
    if u.op is Ops.CAST:
        return f"{u.dtype.name}({_value(u.src[0], args)})"
    terms = [_value(s, args) for s in u.src]
    name = {op: name for name, op in OPS.items()}.get(u.op, u.op.name.lower())
    return f"({f' {_SIGNS[u.op]} '.join(terms)})" if u.op in _SIGNS else f"{name}({', '.join(terms)})"
