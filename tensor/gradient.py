"""Reverse-mode differentiation as a rewrite of the graph: gradients are more UOps.

`compute_gradients` walks the graph from the root back, one rule an op (the table stands last), and adds up what reaches
each node. Nodes that no target stands below are not visited.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

from manygrad.tensor.dtype import dtypes
from manygrad.tensor.environment import DETECT_ANOMALY
from manygrad.tensor.source import LINE, line_of, standing_at
from manygrad.tensor.stored import ENDED, HISTORY, carries, is_hidden, is_overwritten, was_leaf
from manygrad.tensor.uop import Ops, UOp, toposort
from manygrad.tensor.uop.rewrite import substitute
from manygrad.tensor.uop.shape import numel
from manygrad.tensor.uop.symbolic import to_sint

if TYPE_CHECKING:
    from manygrad.tensor.tensor import Tensor

Grads = tuple["Tensor | NoGradient | ZeroGradient | None", ...]
Hooks = dict[UOp, list[Callable[["Tensor"], "Tensor | None"]]]
_NONE: set[UOp] = set()


class NoGradient:
    """In place of a gradient that a rule does not know, `why` naming the operator: an error where one is wanted.
    (None: there is none.)"""

    def __init__(self, why: str):
        self.why = why

    def at(self, u: UOp, source: UOp) -> NoGradient:
        """The same, saying where: from node `u` to its `source`."""
        return (
            self
            if "made at" in self.why
            else NoGradient(f"{self.why} (shape {source.shape}, {source.dtype.name}, made at {line_of(u)})")
        )


class ZeroGradient:
    """In place of a gradient of zeros, which costs nothing: where a step or a constant has no slope, but depends on its
    source. (None: it does not.)"""


FLAT = ZeroGradient()


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

    def inputs(self, u: UOp) -> tuple[UOp, ...]:
        """The sources of the node `u` that a gradient can reach."""
        return u.src[1:]

    def gradients(self, g: Tensor, u: UOp) -> Grads:
        """Gradients of the sources of the node `u`, given what reached it, each in its source's type: a backward may
        compute in a wider one."""
        found = self.fn(g, *(_t(s) for s in u.src[1:]))
        return (None, *(r.cast(s.dtype) if hasattr(r, "uop") else r for r, s in zip(found, u.src[1:], strict=True)))


def compute_gradients(
    root: UOp,
    start: UOp,
    targets: set[UOp],
    stored: dict[UOp, UOp],
    leaves: set[UOp] = _NONE,
    hooks: Hooks | None = None,
    unknown: dict[UOp, NoGradient] | None = None,
) -> dict[UOp, UOp]:
    """d(root)/d(target) for every target that something reaches; `start` is d/d(root).
    What is `stored` is read, not computed again.

    Nothing flows below `leaves`. `hooks` are called with the complete gradient of their node and may return another.
    """
    found = flow_back([(root, start)], targets, leaves, hooks, unknown)
    read = substitute(UOp(Ops.SINK, dtypes.void, tuple(found.values())), stored).src
    return dict(zip(found, read))


def flow_back(
    starts: list[tuple[UOp, UOp]],
    targets: set[UOp],
    leaves: set[UOp] = _NONE,
    hooks: Hooks | None = None,
    unknown: dict[UOp, NoGradient] | None = None,
) -> dict[UOp, UOp]:
    """target -> the sum over (root, start) of start · d(root)/d(target).

    `unknown`: where it is not yet known which targets are asked for (all arguments of a function's body), what has a
    gradient that no rule knows is left out and noted there, instead of an error.
    """
    from manygrad.tensor.function import gradients_of_call
    from manygrad.tensor.tensor import Tensor

    roots = UOp(Ops.SINK, dtypes.void, tuple(root for root, _ in starts))
    order = roots.toposort(lambda u: u.op is not Ops.DETACH and u not in leaves)[:-1]
    needed: set[UOp] = set()
    for u in order:
        if u in targets or (
            u.op is not Ops.DETACH
            and u not in leaves
            and any(s in needed for s in (u.src[1:] if u.op is Ops.STORE else u.src))
        ):
            needed.add(u)
    grads: dict[UOp, Tensor] = {}
    for root, start in starts:
        grads[root] = Tensor(start) if root not in grads else grads[root] + Tensor(start)
    of_results: dict[UOp, dict[int, Tensor]] = {}  # FUNCTION -> what reached its results
    flat: set[UOp] = set()  # what zeros reach

    def arrives(u: UOp, s: UOp, piece: Tensor | NoGradient | ZeroGradient) -> None:
        if isinstance(piece, ZeroGradient):
            flat.add(s)
        elif not isinstance(piece, NoGradient):
            assert piece.shape == s.shape, f"gradient of {u.op}: {piece.shape} for a source of {s.shape}"
            grads[s] = piece if s not in grads else grads[s] + piece
        elif unknown is None:
            raise NotImplementedError(f"{piece.at(u, s).why}; detach() it if none is wanted")
        else:
            unknown.setdefault(s, piece.at(u, s))

    for u in reversed(order):
        g = grads.get(u)
        if unknown and u in unknown and u.op is not Ops.DETACH and u not in leaves:
            for s in u.src:
                if s in needed:
                    unknown.setdefault(s, unknown[u])
        if u.op is Ops.FUNCTION and u in of_results:
            for s, gs in zip(u.src, gradients_of_call(u, of_results[u])):
                if gs is not None and s in needed:
                    arrives(u, s, gs)
        if g is None and u in flat and u not in of_results and u not in leaves:
            flat.update(s for s in _differentiable(u) if s in needed)
        if g is None or u not in needed:
            continue
        for hook in (hooks or {}).get(u, ()):
            g = grads[u] = hooked(hook, g)
        if u.op is Ops.RESULT:
            of_results.setdefault(u.src[0], {})[u.arg] = g
        if u.op is Ops.AFTER and u not in leaves:
            _flow_through_writes(g, u, needed, grads)
        if u in leaves or u.op in (Ops.DETACH, Ops.STORE, Ops.RESULT, Ops.AFTER) or not any(s in needed for s in u.src):
            continue
        rule = RULES.get(u.op)
        if rule is None:
            raise NotImplementedError(
                f"{u.op.name} has no gradient (shape {u.shape}, {u.dtype.name}); detach() it if none is wanted"
            )
        LINE.setdefault(g.uop, LINE.get(u) or "?")
        pieces = rule(g, u) if not DETECT_ANOMALY else _at_its_line(rule, g, u)
        for s, piece in zip(u.src, pieces):
            if piece is not None and s in needed and s.dtype.is_float:
                arrives(u, s, piece)
    zeros = {t: _t(t).zeros_like() for t in flat & targets if t not in grads}
    return {
        t: g.uop for t in targets if (g := grads.get(t, zeros.get(t))) is not None and not (unknown and t in unknown)
    }


def _at_its_line(rule: Callable[[Tensor, UOp], Grads], g: Tensor, u: UOp) -> Grads:
    """The rule's gradients, with the user's line of `u` in place of that of `backward()`."""
    line = line_of(u)
    with standing_at(f"{line}, in the gradient," if line != "?" else ""):
        return rule(g, u)


def _differentiable(u: UOp) -> tuple[UOp, ...]:
    """The sources through which the value of `u` can have a gradient."""
    if not carries(u):
        return ()
    return u.arg.inputs(u) if u.op is Ops.CUSTOM and isinstance(u.arg, CustomGrad) else u.src


def pullback(f: Callable[..., Tensor], g: Tensor, *inputs: Tensor) -> tuple[Tensor, ...]:
    """Σ g · d f(*inputs) / d(input) for each input; they count as independent, even if they are one node."""
    apart = [
        t._new(UOp(Ops.CUSTOM, t.dtype, (t.uop, t.uop), CustomGrad("input", i, _same))) for i, t in enumerate(inputs)
    ]
    nodes = {t.uop for t in apart}
    found = flow_back([(f(*apart).uop, g.uop)], nodes, nodes)
    return tuple(t._new(found[t.uop]) if t.uop in found else t.zeros_like() for t in apart)


def _same(g: Tensor, _: Tensor) -> tuple[Tensor]:
    return (g,)


def _flow_through_writes(g: Tensor, u: UOp, needed: set[UOp], grads: dict[UOp, Tensor]) -> None:
    """What was written into a stored tensor gets the gradient of the place where it lies,
    what was there before the rest."""
    before = u.src[0]
    for store in reversed(u.src[1:]):
        if store.op is not Ops.STORE or store.arg is not None or store not in needed:
            continue
        target, value = store.src
        part = g._new(_viewed_alike(target, before, g.uop))
        grads[value] = part if value not in grads else grads[value] + part
    if before in needed:
        for store in u.src[1:]:
            if store.op is Ops.STORE and store.arg is None:
                every = g.arange(numel(before.shape)).reshape(before.shape)
                written = _t(_viewed_alike(store.src[0], before, every.uop)).flatten()  # positions
                g = (
                    g.flatten()
                    ._scatter_at(_t(UOp.const(g.dtype, 0))._broadcast(written.shape), [written], "place")
                    .reshape(before.shape)
                )
        grads[before] = g if before not in grads else grads[before] + g


def _viewed_alike(view: UOp, base: UOp, other: UOp) -> UOp:
    """`other`, of the shape of `base`, seen as `view` sees `base`."""
    if view is base:
        return other
    return view.replace(dtype=other.dtype, src=(_viewed_alike(view.src[0], base, other),))


def hooked(hook: Callable[[Tensor], Tensor | None], g: Tensor) -> Tensor:
    """What a hook makes of a gradient."""
    new = hook(g)
    if new is not None and (new.shape, new.dtype) != (g.shape, g.dtype):
        raise RuntimeError(
            f"a gradient hook returned {new.shape} {new.dtype.name} for a gradient of {g.shape} {g.dtype.name}"
        )
    return g if new is None else new


def with_history(root: UOp, leaves: Iterable[Tensor]) -> tuple[UOp, dict[UOp, UOp], dict[UOp, UOp]]:
    """`root` with computed values that still have their graph replaced by it, down to the leaves (by number, where
    stored since); what every node below became; and the storage of each such graph's value.
    """
    done: dict[UOp, UOp] = {t.uop: t.uop for t in leaves}
    numbered = {t._leaf: t.uop for t in leaves if t._leaf is not None}
    stored: dict[UOp, UOp] = {}
    detached: list[UOp] = []
    stack = [root]
    while stack:
        u = stack[-1]
        if u in done:
            stack.pop()
            continue
        if u.op is Ops.CONTIGUOUS and u.arg in numbered:
            done[u] = numbered[u.arg]
            continue
        if is_hidden(u):
            raise RuntimeError(
                f"backward(): a value of shape {u.shape} was detached, and then written in place with what has a "
                "gradient, while what it was detached from is still there and shares its memory; use x = x + y where "
                "there is x += y, or clone() what is detached"
            )
        if not carries(u):  # (what is below counts as it is stored, unless something else stands on it)
            done[u] = u
            detached.append(u)
            continue
        if was_leaf(u):
            done[u] = u
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
    below_detached = toposort([s for u in detached for s in u.src], lambda x: x not in done)
    return done[root], {x: x for x in below_detached} | done, stored


def _history(u: UOp) -> UOp | None:
    """The graph a stored value was computed by; RuntimeError if something it reads has been overwritten since."""
    graph, clock = HISTORY.get(u) or (None, 0)
    if u in ENDED:
        raise RuntimeError(
            f"backward(): a value of shape {u.shape} {ENDED[u]}, so its gradient cannot be had any more; call "
            "backward() before that, or detach() the value"
        )
    if u in HISTORY and is_overwritten(graph, clock):
        raise RuntimeError(
            f"backward(): a value of shape {u.shape} was computed and then what it was computed from was overwritten "
            "(an assignment, an optimiser step, a call of a TinyJit, whose results these are, too), so its gradient "
            "cannot be had any more; call backward() before that, inside of the TinyJit, or detach() the value"
        )
    return graph


def _t(u: UOp) -> Tensor:
    from manygrad.tensor.tensor import Tensor

    return Tensor(u)


def _max(g: Tensor, u: UOp) -> Grads:
    """To the larger one, half to each where both are equal; where one is NaN to both, as the result is."""
    a, b = _t(u.src[0]), _t(u.src[1])
    either = a.eq(b)._where(g * 0.5, g)
    return (a < b)._where(0.0, either), (b < a)._where(0.0, either)


def _reduce(g: Tensor, u: UOp) -> Grads:
    """A sum's to all terms alike; a maximum's in equal parts to all that attain it; a product's times the others."""
    from manygrad.tensor.products import reduced

    op, axes = u.arg.op, u.arg.axes
    x = u.src[0]
    wide = g._broadcast(x.shape)
    if op is Ops.ADD:
        return (wide,)
    t, out = _t(x), _t(u)
    if op is Ops.MAX:
        hit = (t.eq(out._broadcast(x.shape)) | t.isnan()).cast(x.dtype)
        return (wide * (hit / hit.sum(axes, keepdim=True)),)
    return (reduced(g, t, axes),)


def _expand(g: Tensor, u: UOp) -> Grads:
    """The sum over the dims that were expanded; of half types taken in float32."""
    grown = tuple(i for i, (a, b) in enumerate(zip(u.src[0].shape, u.shape)) if a is not b and a != b)
    return (
        g.cast(dtypes.float32).sum(grown, keepdim=True).cast(g.dtype)
        if g.dtype.is_half
        else g.sum(grown, keepdim=True),
    )


def _shrink(g: Tensor, u: UOp) -> Grads:
    """Zeros around it, where the source was cut off."""
    pads = []
    for dim, ((before, _), size) in enumerate(zip(u.arg, u.src[0].shape)):
        after = size - (before + g.shape[dim])
        if isinstance(before, int) and isinstance(after, int):
            pads.append((before, after))
            continue
        pads.append((0, 0))
        around = [
            g._const_like(0, g.dtype)._broadcast((*g.shape[:dim], n, *g.shape[dim + 1 :])) for n in (before, after)
        ]
        g = around[0].cat(g, around[1], dim=dim)
    return (g._op(Ops.PAD, tuple(pads)),)


def _gather(g: Tensor, u: UOp) -> Grads:
    """Added up at the places that were read."""
    zeros = _t(UOp.const(g.dtype, 0.0))._broadcast(u.src[0].shape)
    if u.device is not None:
        zeros._device = u.device
    return (g._new(UOp(Ops.SCATTER, g.dtype, (zeros.uop, g.uop, *u.src[1:]), "add")), *(None for _ in u.src[1:]))


def _scatter(g: Tensor, u: UOp) -> Grads:
    """To the base where nothing was set, to the values read at their places."""
    value = g._new(UOp(Ops.GATHER, g.dtype, (g.uop, *u.src[2:])))
    if u.arg == "add":
        return g, value
    if u.arg == "max":
        return _scatter_max(g, u)
    if u.arg == "mul":
        from manygrad.tensor.products import scattered

        return scattered(g, _t(u.src[0]), _t(u.src[1]), [_t(i) for i in u.src[2:]])
    zero = _t(UOp.const(g.dtype, 0.0))._broadcast(u.src[1].shape)
    base = g._new(UOp(Ops.SCATTER, g.dtype, (g.uop, zero.uop, *u.src[2:]), "place"))
    return base, value if u.arg == "place" else _stays(g, u)._where(value, 0.0)


def _stays(g: Tensor, u: UOp) -> Tensor:
    """Which values of a SCATTER "set" stay, in the shape of the value:
    those whose number is found where they were set."""
    at = u.src[2:]
    number = g.arange(numel(at[0].shape)).reshape(at[0].shape)
    places = g._const_like(0, dtypes.int64)._broadcast(u.shape[: len(at)])
    last = g._new(
        UOp(Ops.GATHER, dtypes.int64, (UOp(Ops.SCATTER, dtypes.int64, (places.uop, number.uop, *at), "set"), *at))
    )
    return last.eq(number).reshape((*number.shape, *(1,) * (len(u.shape) - len(at))))._broadcast(u.src[1].shape)


def _scatter_max(g: Tensor, u: UOp) -> Grads:
    """The gradient of each maximum in equal parts to all that attain it."""
    base, v, indices = _t(u.src[0]), _t(u.src[1]), [_t(i) for i in u.src[2:]]

    def read(x: Tensor) -> Tensor:
        return x._new(UOp(Ops.GATHER, x.dtype, (x.uop, *u.src[2:])))

    mine, theirs = base.eq(_t(u)).cast(g.dtype), v.eq(read(_t(u))).cast(g.dtype)
    share = g / mine._scatter_at(theirs, indices, "add").maximum(1)
    return mine * share, theirs * read(share)


def _cat(g: Tensor, u: UOp) -> Grads:
    """Its parts."""
    parts, begin = [], 0
    for s in u.src:
        parts.append(g._take(u.arg, begin, begin + s.shape[u.arg]))
        begin = begin + s.shape[u.arg]
    return tuple(parts)


def _move_back(g: Tensor, u: UOp) -> Grads:
    """The same, on the device of the source."""
    d = u.src[0].device
    if d is None or g.device == d:
        return (g,)
    if isinstance(d, tuple):
        raise NotImplementedError(
            "gradient of a copy from several devices to one; keep the loss on the devices of the model"
        )
    return (g.to(d),)


def _pow(g: Tensor, u: UOp) -> Grads:
    """y · x ** (y − 1), 0 where y is 0; x ** y · log(x), 0 where x is 0 and y is not negative."""
    x, y = (_t(s) for s in u.src)
    to_exponent = (x.eq(0) & (y >= 0))._where(0.0, g * _t(u) * x.log())
    return y.eq(0)._where(0.0, g * y * x._op(Ops.POW, None, y - 1)), to_exponent


def _inverse(order: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(sorted(range(len(order)), key=order.__getitem__))


RULES: dict[Ops, Callable[[Any, UOp], Grads]] = {
    Ops.ADD: lambda g, u: (g, g),
    Ops.SUB: lambda g, u: (g, -g),
    Ops.MUL: lambda g, u: (g * _t(u.src[1]), g * _t(u.src[0])),
    Ops.FDIV: lambda g, u: (g / _t(u.src[1]), -g * _t(u) / _t(u.src[1])),
    Ops.POW: _pow,
    Ops.MAX: _max,
    Ops.NEG: lambda g, u: (-g,),
    Ops.RECIP: lambda g, u: (-g * _t(u) * _t(u),),
    Ops.SQRT: lambda g, u: (g / (_t(u) * 2),),
    Ops.EXP: lambda g, u: (g * _t(u),),
    Ops.LOG: lambda g, u: (g / _t(u.src[0]),),
    Ops.SIN: lambda g, u: (g * _t(u.src[0]).cos(),),
    Ops.TRUNC: lambda g, u: (FLAT,),
    Ops.CMPLT: lambda g, u: (None, None),
    Ops.CMPEQ: lambda g, u: (None, None),
    Ops.CMPNE: lambda g, u: (None, None),
    Ops.WHERE: lambda g, u: (None, _t(u.src[0])._where(g, 0.0), _t(u.src[0])._where(0.0, g)),
    Ops.FMA: lambda g, u: (g * _t(u.src[1]), g * _t(u.src[0]), g),
    Ops.CAST: lambda g, u: (g.cast(u.src[0].dtype) if u.src[0].dtype.is_float else None,),
    Ops.BITCAST: lambda g, u: (NoGradient(f"bitcast() to {u.dtype.name} has no gradient"),),
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
    Ops.WIRE: lambda g, u: (g,),
    Ops.COPY: _move_back,
    Ops.SHARD: _move_back,
    Ops.BARRIER: lambda g, u: (g, None),
    Ops.CHECK: lambda g, u: (g, None),
    Ops.CUSTOM: lambda g, u: u.arg.gradients(g, u),
}
