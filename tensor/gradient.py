"""Reverse-mode differentiation as a rewrite of the graph: gradients are more UOps.

`compute_gradients` walks the graph from the root back, one rule an op (the table stands last), and adds up what reaches
each node. Nodes that no target stands below are not visited.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

from manygrad.tensor.dtype import dtypes
from manygrad.tensor.uop import GroupOp, Ops, UOp
from manygrad.tensor.uop.rewrite import substitute
from manygrad.tensor.uop.show import text_of_index
from manygrad.tensor.uop.symbolic import to_sint

if TYPE_CHECKING:
    from manygrad.tensor.tensor import Tensor

Grads = tuple["Tensor | None", ...]


class CustomGrad:
    """A user's backward: `fn(grad, *inputs) -> gradients`. Equal by (name, params), so equal nodes intern."""

    def __init__(self, name: str, params: Any, fn: Callable[..., Any]):
        self.name, self.params, self.fn = name, params, fn

    def __eq__(self, other: object) -> bool:
        return isinstance(other, CustomGrad) and (self.name, self.params) == (other.name, other.params)

    def __hash__(self) -> int:
        return hash((self.name, self.params))

    def __repr__(self) -> str:
        return f"{self.name}{self.params}"


def compute_gradients(root: UOp, start: UOp, targets: set[UOp], stored: dict[UOp, UOp]) -> dict[UOp, UOp]:
    """d(root)/d(target) for every target that something reaches; `start` is d/d(root). What is `stored` is read, not computed again."""
    from manygrad.tensor.tensor import Tensor

    order = root.toposort(lambda u: u.op not in (Ops.DETACH, Ops.STORE) and u not in targets)
    needed: set[UOp] = set()
    for u in order:
        if u in targets or (u.op not in (Ops.DETACH, Ops.STORE) and any(s in needed for s in u.src)):
            needed.add(u)
    grads: dict[UOp, Tensor] = {root: Tensor(start)}
    for u in reversed(order):
        g = grads.get(u)
        if g is None or u not in needed or u in targets or u.op in (Ops.DETACH, Ops.STORE):
            continue
        rule = RULES.get(u.op)
        if rule is None:
            raise NotImplementedError(f"{u.op.name} has no gradient (shape {u.shape}, {u.dtype.name}); detach() it if none is wanted")
        g.uop._cache.setdefault("line", u._cache.get("line", "?"))
        for s, gs in zip(u.src, rule(g, u)):
            if gs is not None and s in needed and s.dtype.is_float:
                assert gs.shape == s.shape, f"gradient of {u.op}: {gs.shape} for a source of {s.shape}"
                grads[s] = gs if s not in grads else grads[s] + gs
    found = [t for t in targets if t in grads]
    read = substitute(UOp(Ops.SINK, dtypes.void, tuple(grads[t].uop for t in found)), stored).src
    return dict(zip(found, read))


def with_history(root: UOp, leaves: Iterable[Tensor]) -> tuple[UOp, dict[UOp, UOp]]:
    """`root` with computed values that still have their graph replaced by it, down to the leaves (by number, where stored since);
    and the storage of each such graph's value.
    """
    done: dict[UOp, UOp] = {t.uop: t.uop for t in leaves}
    numbered = {t._leaf: t.uop for t in leaves if t._leaf is not None}
    stored: dict[UOp, UOp] = {}
    stack = [root]
    while stack:
        u = stack[-1]
        if u in done:
            stack.pop()
            continue
        if u.op is Ops.CONTIGUOUS and u.arg in numbered:
            done[u] = numbered[u.arg]
            continue
        history = _history(u)
        below = (history,) if history is not None else u.src
        missing = [s for s in below if s not in done]
        if missing:
            stack += missing
            continue
        src = tuple(done[s] for s in below)
        done[u] = src[0] if history is not None else u if src == u.src else u.replace(src=src)
        if history is not None:
            stored[done[u]] = u
        stack.pop()
    return done[root], stored


def _history(u: UOp) -> UOp | None:
    """The graph a stored value was computed by; RuntimeError if something it reads has been overwritten since."""
    graph, clock = u._cache.get("history", (None, 0))
    if "history" in u._cache and (graph is None or any(x._cache.get("written", 0) > clock for x in graph.toposort(lambda x: "history" not in x._cache))):
        raise RuntimeError(
            f"backward(): a value of shape {u.shape} was computed and then what it was computed from was overwritten (an assignment, an optimiser "
            "step), so its gradient cannot be had any more; call backward() before that, or detach() the value"
        )
    return graph


def _t(u: UOp) -> Tensor:
    from manygrad.tensor.tensor import Tensor

    return Tensor(u)


def _max(g: Tensor, u: UOp) -> Grads:
    a, b = _t(u.src[0]), _t(u.src[1])
    if u.src[1].op is Ops.CONST or (u.src[1].op in GroupOp.MOVEMENT and _base(u.src[1]).op is Ops.CONST):
        return (b < a).where(g, 0.0), None  # relu-like: nothing at the tie
    tie = a.eq(b).where(g * 0.5, 0.0)
    return (b < a).where(g, tie), (a < b).where(g, tie)


def _base(u: UOp) -> UOp:
    while u.op in GroupOp.MOVEMENT:
        u = u.src[0]
    return u


def _reduce(g: Tensor, u: UOp) -> Grads:
    op, _ = u.arg
    x = u.src[0]
    wide = g._broadcast(x.shape)
    if op is Ops.ADD:
        return (wide,)
    t, out = _t(x), _t(u)
    if op is Ops.MAX:
        hit = t.eq(out._broadcast(x.shape)).cast(x.dtype)
        return (wide * (hit / hit.sum(u.arg[1], keepdim=True)),)
    return (wide * out._broadcast(x.shape) / t,)


def _expand(g: Tensor, u: UOp) -> Grads:
    grown = tuple(i for i, (a, b) in enumerate(zip(u.src[0].shape, u.shape)) if a is not b and a != b)
    return (g.cast(dtypes.float32).sum(grown, keepdim=True).cast(g.dtype) if g.dtype.is_half else g.sum(grown, keepdim=True),)


def _shrink(g: Tensor, u: UOp) -> Grads:
    pads = []
    for (b, e), d in zip(u.arg, u.src[0].shape):
        if not all(isinstance(v, int) for v in (b, e, d)):
            if b == 0 and e is d:
                pads.append((0, 0))
                continue
            text = ", ".join(str(v) if isinstance(v, int) else text_of_index(v) for v in (b, e))
            raise NotImplementedError(f"a slice with symbolic bounds [{text}) has no gradient; detach() what it is cut from, or mask with where(...)")
        pads.append((b, d - e))
    return (g._op(Ops.PAD, tuple(pads)),)


def _gather(g: Tensor, u: UOp) -> Grads:
    zeros = _t(UOp.const(g.dtype, 0.0))._broadcast(u.src[0].shape)
    if u.device is not None:
        zeros._device = u.device
    return (g._new(UOp(Ops.SCATTER, g.dtype, (zeros.uop, g.uop, *u.src[1:]), "add")), *(None for _ in u.src[1:]))


def _scatter(g: Tensor, u: UOp) -> Grads:
    value = g._new(UOp(Ops.GATHER, g.dtype, (g.uop, *u.src[2:])))
    if u.arg == "add":
        return g, value
    zero = _t(UOp.const(g.dtype, 0.0))._broadcast(u.src[1].shape)
    return g._new(UOp(Ops.SCATTER, g.dtype, (g.uop, zero.uop, *u.src[2:]), "set")), value


def _cat(g: Tensor, u: UOp) -> Grads:
    return tuple(g.split([s.shape[u.arg] for s in u.src], u.arg))


def _move_back(g: Tensor, u: UOp) -> Grads:
    d = u.src[0].device
    if d is None or g.device == d:
        return (g,)
    if isinstance(d, tuple):
        raise NotImplementedError("gradient of a copy from several devices to one; keep the loss on the devices of the model")
    return (g.to(d),)


def _custom(g: Tensor, u: UOp) -> Grads:
    return (None, *u.arg.fn(g, *(_t(s) for s in u.src[1:])))


def _inverse(order: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(sorted(range(len(order)), key=order.__getitem__))


RULES: dict[Ops, Callable[[Any, UOp], Grads]] = {
    Ops.ADD: lambda g, u: (g, g),
    Ops.SUB: lambda g, u: (g, -g),
    Ops.MUL: lambda g, u: (g * _t(u.src[1]), g * _t(u.src[0])),
    Ops.FDIV: lambda g, u: (g / _t(u.src[1]), -g * _t(u) / _t(u.src[1])),
    Ops.MAX: _max,
    Ops.NEG: lambda g, u: (-g,),
    Ops.RECIP: lambda g, u: (-g * _t(u) * _t(u),),
    Ops.SQRT: lambda g, u: (g / (_t(u) * 2),),
    Ops.EXP: lambda g, u: (g * _t(u),),
    Ops.LOG: lambda g, u: (g / _t(u.src[0]),),
    Ops.SIN: lambda g, u: (g * (_t(u.src[0]) + math.pi / 2).sin(),),
    Ops.TRUNC: lambda g, u: (None,),
    Ops.CMPLT: lambda g, u: (None, None),
    Ops.CMPEQ: lambda g, u: (None, None),
    Ops.CMPNE: lambda g, u: (None, None),
    Ops.WHERE: lambda g, u: (None, _t(u.src[0]).where(g, 0.0), _t(u.src[0]).where(0.0, g)),
    Ops.CAST: lambda g, u: (g.cast(u.src[0].dtype) if u.src[0].dtype.is_float else None,),
    Ops.BITCAST: lambda g, u: (None,),
    Ops.RESHAPE: lambda g, u: (g.reshape(u.src[0].shape),),
    Ops.PERMUTE: lambda g, u: (g.permute(_inverse(u.arg)),),
    Ops.EXPAND: _expand,
    Ops.PAD: lambda g, u: (g.shrink(tuple((b, to_sint(b + d)) for (b, _), d in zip(u.arg, u.src[0].shape))),),
    Ops.SHRINK: _shrink,
    Ops.FLIP: lambda g, u: (g._op(Ops.FLIP, u.arg),),
    Ops.REDUCE: _reduce,
    Ops.GATHER: _gather,
    Ops.SCATTER: _scatter,
    Ops.CAT: _cat,
    Ops.CONTIGUOUS: lambda g, u: (g,),
    Ops.COPY: _move_back,
    Ops.SHARD: _move_back,
    Ops.AFTER: lambda g, u: (g,),
    Ops.CUSTOM: _custom,
}
