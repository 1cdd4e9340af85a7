"""Graphs as bytes, and back: for digests that hold in every process and for what is kept on disk.

    encode(a + a * 2)  ==>  a JSON head (tables of ops, dtypes and args) and a flat array of node numbers, sources
                           first; then a table of lines and the number of each node's

Nothing is executed when it is read: an arg is None, a number, a text, an `Ops`, a `DType`, a node, a tuple of these, or
one of the classes named to `register`. Two graphs have equal bytes exactly when they are the same graph (and, with
`lines`, of the same lines).
"""

from __future__ import annotations

import json
from array import array
from collections.abc import Callable
from dataclasses import fields
from typing import Any, TypeVar

from manygrad.tensor.dtype import DType, to_dtype
from manygrad.tensor.uop.args import ARGS, BufferSpec
from manygrad.tensor.uop.ops import Ops
from manygrad.tensor.uop.uop import UOp

T = TypeVar("T")
_CLASSES: dict[str, type] = {}
_BY_NAME = {op.name: op for op in Ops}
_HEAD_BYTES = 4
_SHAPES = frozenset({Ops.RESHAPE, Ops.EXPAND, Ops.PERMUTE, Ops.SHRINK})  # their args are tuples of ints and nodes


class NotStorable(ValueError):
    """An arg that has no form in bytes."""


def register(cls: type[T]) -> type[T]:
    """A frozen dataclass or NamedTuple that may stand in a node's arg."""
    _CLASSES[cls.__name__] = cls
    return cls


for _cls in ARGS:
    register(_cls)


def _nodes_in(arg: Any, out: list[UOp]) -> None:
    """The nodes that an arg holds (symbolic dims)."""
    kind = type(arg)
    if kind is UOp:
        out.append(arg)
    elif isinstance(arg, tuple):
        for x in arg:
            if type(x) is not int:
                _nodes_in(x, out)
    elif kind is BufferSpec:
        _nodes_in(arg.shape, out)


def _plain(x: Any, number: dict[UOp, int]) -> Any:
    """An arg as JSON holds it: numbers and texts as they are, a tuple as a list, all else {its kind: its value}."""
    kind = type(x)
    if x is None or kind is int or kind is float or kind is str or kind is bool:
        return x
    if kind is tuple:
        return [_plain(y, number) for y in x]
    if kind is UOp:
        return {"node": number[x]}
    if kind is Ops:
        return {"op": x.name}
    if kind is DType:
        return {"dtype": x.name}
    if _CLASSES.get(kind.__name__) is kind:
        parts = x if isinstance(x, tuple) else [getattr(x, f.name) for f in fields(x)]
        return {kind.__name__: [_plain(y, number) for y in parts]}
    raise NotStorable(f"an arg of type {kind.__name__} has no form in bytes; see tensor/uop/serial.py")


def _order(root: UOp) -> dict[UOp, int]:
    """Nodes in the order in which they are written: sources and the nodes of an arg before their user."""
    number: dict[UOp, int] = {}
    plain: set[Any] = set()  # args without nodes
    stack: list[UOp | None] = [root]
    path: list[UOp] = []
    pop, push = stack.pop, stack.append
    while stack:
        u = pop()
        if u is None:
            u = path.pop()
            if u not in number:
                number[u] = len(number)
            continue
        if u in number:
            continue
        below, arg = u.src, u.arg
        if arg is not None and arg not in plain:
            found: list[UOp] = []
            _nodes_in(arg, found)
            if found:
                below = (*below, *found)
            else:
                plain.add(arg)
        if below:
            path.append(u)
            push(None)
            stack += below[::-1]
        else:
            number[u] = len(number)
    return number


def encode(root: UOp, line: Callable[[UOp], str] | None = None) -> bytes:
    """The graph below `root`, with `line(u)` beside each node. Raises NotStorable."""
    return b"".join(encoded(root, line))


def encoded(root: UOp, line: Callable[[UOp], str] | None = None) -> tuple[bytes, bytes]:
    """`encode` in two parts: the graph, and its lines. Equal graphs on other lines differ in the second alone."""
    number = _order(root)
    ops: dict[Ops, int] = {}
    dtypes: dict[DType, int] = {}
    args: dict[str, int] = {"null": 0}
    lines: dict[str, int] = {"": 0}
    flat: list[int] = []
    places: list[int] = []
    dumps = json.JSONEncoder(separators=(",", ":")).encode
    shapes: dict[Any, int] = {}  # tuples of ints, many of which are alike
    for u in number:
        op, given, src = u.op, u.arg, u.src
        if given is None:
            arg = 0
        elif op in _SHAPES:
            found = shapes.get(given)
            if found is None:
                found = shapes[given] = args.setdefault(dumps(_plain(given, number)), len(args))
            arg = found
        else:
            arg = args.setdefault(dumps(_plain(given, number)), len(args))
        if line is not None:
            places.append(lines.setdefault(line(u), len(lines)))
        flat += (ops.setdefault(op, len(ops)), dtypes.setdefault(u.dtype, len(dtypes)), arg, len(src))
        flat += [number[s] for s in src]
    names = dumps([[o.name for o in ops], [d.name for d in dtypes]])
    graph = _part(f"[{names},[{','.join(args)}]]", flat)
    return graph, _part(dumps(list(lines)), places)


def _part(head: str, numbers: list[int]) -> bytes:
    """A text and numbers, after their lengths in bytes."""
    text, flat = head.encode(), array("i", numbers).tobytes()
    sizes = [len(x).to_bytes(_HEAD_BYTES, "little") for x in (text, flat)]
    return b"".join([*sizes, text, flat])


def _read(data: memoryview) -> tuple[Any, array[int], memoryview]:
    """A part's text, as JSON, its numbers, and what follows it."""
    begin = 2 * _HEAD_BYTES
    middle = begin + int.from_bytes(data[:_HEAD_BYTES], "little")
    end = middle + int.from_bytes(data[_HEAD_BYTES:begin], "little")
    flat = array("i")
    flat.frombytes(data[middle:end])
    return json.loads(bytes(data[begin:middle])), flat, data[end:]


def decode(data: bytes | memoryview) -> tuple[UOp, list[tuple[UOp, str]]]:
    """Reads what `encode` wrote: the root, and (node, line) of the nodes that have one.
    Raises ValueError where it is anything else."""
    ((op_names, dtype_names), plain), flat, rest = _read(memoryview(data))
    lines, places, _ = _read(rest)
    ops, dtypes = [_BY_NAME[o] for o in op_names], [to_dtype(d) for d in dtype_names]
    nodes: list[UOp] = []
    args: list[Any] = [None] * len(plain)
    known = [x is None for x in plain]
    at, end = 0, len(flat)
    while at < end:
        op, dtype, arg, count = flat[at : at + 4]
        at += 4
        if not known[arg]:
            args[arg], known[arg] = _live(plain[arg], nodes), True
        node = UOp(ops[op], dtypes[dtype], tuple([nodes[i] for i in flat[at : at + count]]), args[arg])
        at += count
        nodes.append(node)
    return nodes[-1], [(node, lines[i]) for node, i in zip(nodes, places) if i]


def _live(x: Any, nodes: list[UOp]) -> Any:
    if type(x) is list:
        return tuple([_live(y, nodes) for y in x])
    if type(x) is not dict:
        return x
    ((kind, value),) = x.items()
    if kind == "node":
        return nodes[value]
    if kind == "op":
        return _BY_NAME[value]
    if kind == "dtype":
        return to_dtype(value)
    return _CLASSES[kind](*[_live(y, nodes) for y in value])
