"""Readable text of a graph: one numbered line a node, sources first."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from manygrad.tensor.uop.args import AllReduceArg, BufferSpec, FinishArg, Members, ReduceArg, ReduceScatterArg
from manygrad.tensor.uop.ops import Ops
from manygrad.tensor.uop.uop import UOp


def text_of_index(u: UOp) -> str:
    """An index expression in ordinary notation."""
    s = [text_of_index(x) for x in u.src] if u.op not in (Ops.RANGE, Ops.LOAD, Ops.BIND) else []
    if u.op is Ops.CONST:
        return str(u.arg)
    if u.op is Ops.RANGE:
        return f"r{u.arg.id}"
    if u.op is Ops.DEFINE_VAR:
        return str(u.arg.name)
    if u.op is Ops.BIND:
        return f"{u.src[0].arg.name}={u.src[1].arg}"
    if u.op is Ops.PARAM:  # of what is made of a sum over devices
        return "x"
    if u.op is Ops.CAST:
        return f"{u.dtype.name}({s[0]})"
    if u.op in _SIGN and len(s) == 2:
        return f"({s[0]}{_SIGN[u.op]}{s[1]})"
    if u.op is Ops.LOAD:
        return f"buf{u.src[0].src[0].arg}[{text_of_index(u.src[0].src[1])}]"
    return f"{u.op.name.lower()}({', '.join(s)})"


def text_of_shape(shape: tuple[Any, ...]) -> str:
    return "[" + ", ".join(str(d) if isinstance(d, int) else text_of_index(d) for d in shape) + "]"


_SIGN = {Ops.ADD: "+", Ops.MUL: "*", Ops.IDIV: "//", Ops.MOD: "%", Ops.CMPLT: "<", Ops.AND: "&"}


def show_arg(x: Any) -> str:
    if isinstance(x, UOp):
        return text_of_index(x)
    if isinstance(x, BufferSpec):
        where = x.device if isinstance(x.device, str) else f"{len(x.device)} devices, axis {x.axis}"
        return f"#{x.uid} {tuple(x.shape)} on {where}"
    if isinstance(x, Members):
        own = f"own {show_arg(x.mine)} get {show_arg(x.counts)}{', stored' if x.stored else ''}"
        return f"no. {x.number} over {show_arg(x.devices)}, {own}"
    if isinstance(x, Ops):
        return x.name
    if isinstance(x, ReduceArg) and x.blocks is None:
        return show_arg((x.op, x.axes))
    if isinstance(x, AllReduceArg | ReduceScatterArg | FinishArg):  # (what is not there is not told)
        return show_arg(tuple(y for y in x if y is not None and y != ()))
    if isinstance(x, tuple):
        return f"({', '.join(show_arg(y) for y in x[:8])}{', ...' if len(x) > 8 else ''})"
    return str(x)


def show_node(u: UOp, numbers: Mapping[UOp, int]) -> str:
    """One line: `%3 = ADD f32 (4, 8) %1 %2`."""
    parts = [f"%{numbers[u]} =", u.op.name]
    if u.dtype.name != "void":
        parts.append(u.dtype.name)
    if u.shape:
        parts.append(show_arg(u.shape).replace(",)", ")"))
    parts += [f"%{numbers[s]}" for s in u.src]
    if u.arg is not None:
        parts.append(f"[{show_arg(u.arg)}]")
    return " ".join(parts)


def show(root: UOp) -> str:
    """The graph below `root`."""
    numbers = {u: i for i, u in enumerate(root.toposort())}
    return "\n".join(show_node(u, numbers) for u in numbers)
