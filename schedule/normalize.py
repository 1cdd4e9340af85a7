"""normalize: a graph that is its own key.

Precondition: the SINK of what is to be computed. Postcondition: PARAMs in place of BUFFERs, definitions in place of
bound variables; their values and the BUFFERs stand beside the graph.

    STORE(BUFFER #81, MUL(BUFFER #79, 2))  ==>  STORE(PARAM 0, MUL(PARAM 1, 2)), buffers 81 and 79
"""

from __future__ import annotations

from typing import Any, NamedTuple

from manygrad.tensor.source import LINE
from manygrad.tensor.uop import BufferSpec, Ops, UOp
from manygrad.tensor.uop import symbolic as sym

SHAPED = frozenset({Ops.RESHAPE, Ops.EXPAND, Ops.SHRINK})  # a symbolic dim may stand in their arg


class Normal(NamedTuple):
    """A graph that is its own key: programs that are equal but for their data and the values of variables give the same
    `graph`. `buffers` by PARAM slot, `values` of bound variables by name."""

    graph: UOp
    buffers: list[UOp]
    values: dict[str, int]


def normalize(sink: UOp) -> Normal:
    """Buffers become PARAMs numbered in graph order, bound variables their definitions; what matters to gradients alone
    goes. In one walk: a graph of its own for each of these would be most of the memory that a step takes."""
    walk = _Normalizing()
    return Normal(walk.walk(sink), walk.buffers, walk.values)


class _Normalizing:
    """(A class, not nested functions that call each other: those would keep the graph until a garbage collection.)"""

    def __init__(self) -> None:
        self.done: dict[UOp, UOp] = {}
        self.buffers: list[UOp] = []
        self.values: dict[str, int] = {}
        self.params: dict[tuple[int, Any], UOp] = {}  # by number and shape of the buffer

    def walk(self, root: UOp) -> UOp:
        done = self.done
        for u in root.toposort(lambda u: u not in done) if done else root.toposort():
            if u not in done:
                done[u] = self.of_node(u)
        return done[root]

    def of_node(self, u: UOp) -> UOp:
        op, arg = u.op, u.arg
        if op is Ops.BUFFER:
            return self.param(u)
        if op is Ops.BIND:
            return self.variable(u)
        src = tuple([self.done[s] for s in u.src])
        if op is Ops.DETACH or op is Ops.CUSTOM:  # as a leaf's number, these matter to gradients only
            return src[0]
        if op is Ops.CONTIGUOUS:
            arg = None
        elif op in SHAPED and _has_uop(arg):
            arg = self.of_arg(arg)
        if arg is not u.arg:
            normal = UOp(op, u.dtype, src, arg)
        elif src == u.src:
            return u
        else:
            normal = sym.simplified(u, src)
        if normal is not u:  # its line is that of this graph, not of an equal one before
            if (line := LINE.get(u)) is not None:
                LINE[normal] = line
            else:
                LINE.pop(normal)
        return normal

    def variable(self, u: UOp) -> UOp:
        name, n = u.src[0].arg.name, u.src[1].arg
        if self.values.setdefault(name, n) != n:
            raise ValueError(
                f"bind mismatch: variable {name!r} is bound to {self.values[name]} and to {n} in one graph; "
                "realize one of the tensors first"
            )
        return u.src[0]

    def param(self, u: UOp) -> UOp:
        b = u.arg
        shape = self.of_arg(b.shape) if _has_uop(b.shape) else b.shape
        found = self.params.get((b.uid, shape))
        if found is None:
            spec = BufferSpec(len(self.buffers), shape, b.dtype, b.device, b.axis, b.bounds)
            found = self.params[b.uid, shape] = UOp(Ops.PARAM, u.dtype, (), spec)
            self.buffers.append(u)
        return found

    def of_arg(self, x: Any) -> Any:
        if isinstance(x, UOp):
            return sym.to_sint(self.walk(x))
        return tuple([self.of_arg(y) for y in x]) if isinstance(x, tuple) else x


def _has_uop(arg: Any) -> bool:
    if type(arg) is tuple:
        return not {*map(type, arg)} <= {int} and True in map(_has_uop, arg)
    return isinstance(arg, UOp)


def as_param(buffer: UOp, slot: int) -> UOp:
    b = buffer.arg
    return UOp(Ops.PARAM, buffer.dtype, (), BufferSpec(slot, b.shape, b.dtype, b.device, b.axis, b.bounds))
