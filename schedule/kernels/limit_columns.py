"""limit_columns: the kernels of a chain leave out the columns that a mask makes zero in all rows of a block.

Precondition: items in order, the kernels of chains cut to blocks. Postcondition: the same values wherever something is
read.

    block of 64 rows, j < 2048: S[r, j] = ...;  P[r, j] = exp(S[r, j]) if j <= block * 64 + r else 0;
                                O[r, d] = sum(P[r, j] * V[j, d], j)
==> the same, with j < (block + 1) * 64 in all three

A sum leaves out what is 0, a maximum what is -inf; then a column that is read nowhere is not computed. Spans begin and
end at multiples of ALIGN, so that no partial sum gets other terms.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import lru_cache

from manygrad.schedule.facts.chain import ChainSpec
from manygrad.schedule.facts.items import Item
from manygrad.tensor.dtype import dtypes
from manygrad.tensor.uop import Ops, UOp
from manygrad.tensor.uop import symbolic as sym
from manygrad.tensor.uop.ranges import ranges_of
from manygrad.tensor.uop.rewrite import rebuild
from manygrad.tensor.uop.shape import numel
from manygrad.tensor.uop.track import made_from

ALIGN = 64  # a multiple of all lanes and of most tiles
Span = tuple[UOp, UOp]  # columns [begin, end), made of the block's number
Limits = dict[UOp, tuple[UOp, UOp]]  # RANGE x -> (begin, a shorter RANGE x'): begin + x' takes its place


def limit_columns(items: list[Item]) -> list[Item]:
    return [_of_chain(item) if item.what.op is Ops.CHAIN else item for item in items]


def _of_chain(item: Item) -> Item:
    limits = limits_of(item)
    if not any(limits):
        return item
    kernels = tuple(_limited(k, own) if own else k for k, own in zip(item.what.src, limits))
    what = item.what.replace(src=kernels)
    made_from(what, item.what, line=item.line)
    return replace(item, what=what)


def limits_of(chain: Item) -> list[Limits]:
    """For each kernel of a CHAIN the columns that can be fewer."""
    spec: ChainSpec = chain.what.arg
    steps = tuple((t.argument, numel(chain.args[t.argument].shape) // spec.rows) for t in spec.temps)
    return _limits(chain.what.src, spec.slots, steps)


@lru_cache(maxsize=256)  # (the layers of a model are alike)
def _limits(
    kernels: tuple[UOp, ...], slots: tuple[tuple[int, ...], ...], of_temporaries: tuple[tuple[int, int], ...]
) -> list[Limits]:
    """`slots`: which argument each PARAM is; `of_temporaries`: (argument, elements a row)."""
    steps = dict(of_temporaries)
    zero: dict[int, Span] = {}  # temporary -> the columns outside of which it is 0
    for kernel, own in zip(kernels, slots):
        for s in kernel.src:
            x = _column(s.src[0], own, steps)
            span = None if x is None else _support(s.src[1], x, lambda u, own=own: _known(u, own, steps, zero))
            if span is not None:
                zero[own[s.src[0].src[0].arg]] = span
    if not zero:
        return [{} for _ in kernels]
    read: dict[int, set[Span | None]] = {}  # temporary -> the columns that are read of it
    out: list[Limits] = []
    for kernel, own in zip(reversed(kernels), reversed(slots)):
        spans = {**_of_reductions(kernel, own, steps, zero), **_of_loops(kernel, own, steps, read)}
        for u in kernel.toposort():
            if u.op is Ops.LOAD and own[u.src[0].src[0].arg] in steps:
                x = _column(u.src[0], own, steps)
                read.setdefault(own[u.src[0].src[0].arg], set()).add(spans.get(x) if x is not None else None)
        out.append({x: (begin, _shorter(x, begin, end)) for x, (begin, end) in spans.items()})
    return out[::-1]


def _shorter(x: UOp, begin: UOp, end: UOp) -> UOp:
    return x.replace(src=(_most(sym.add(end, sym.mul(begin, -1)), sym.iconst(0)),))


def _column(index: UOp, own: Sequence[int], steps: Mapping[int, int]) -> UOp | None:
    """x where `index` is element (row, x) of a temporary, x running over a whole row."""
    step = steps.get(own[index.src[0].arg])
    terms, const = sym.linear(index.src[1])
    columns = [
        t
        for t, k in terms.items()
        if t.op is Ops.RANGE and k == 1 and t.src[0].op is Ops.CONST and t.src[0].arg == step
    ]
    others = [t for t, k in terms.items() if t not in columns and (t.op is not Ops.RANGE or k != step)]
    return columns[0] if len(columns) == 1 and not others and const == 0 and len(index.src) == 2 else None


def _known(
    load: UOp, own: Sequence[int], steps: Mapping[int, int], zero: Mapping[int, Span]
) -> tuple[UOp, Span] | None:
    """(column, the columns outside of which it is 0) of a LOAD of a temporary."""
    span = zero.get(own[load.src[0].src[0].arg])
    x = _column(load.src[0], own, steps) if span is not None else None
    return None if x is None or span is None else (x, span)


# *** where a value is zero ***


def _support(u: UOp, x: UOp, known: object) -> Span | None:
    """The span of `x` outside of which `u` is 0; None: nothing is known."""
    if x not in ranges_of(u):
        return None
    if u.op is Ops.LOAD:
        found = known(u)  # type: ignore[operator]
        return found[1] if found is not None and found[0] is x else None
    if u.op is Ops.CAST:
        return _support(u.src[0], x, known)
    if u.op is Ops.WHERE and u.src[2].op is Ops.CONST and u.src[2].arg == 0:
        return _where(u.src[0], x) or _support(u.src[1], x, known)
    if u.op is Ops.MUL and u.dtype.is_float:
        return _support(u.src[0], x, known) or _support(u.src[1], x, known)
    return None


def _where(condition: UOp, x: UOp) -> Span | None:
    """The span of `x` outside of which an inequality holds for no row."""
    if condition.op is not Ops.CMPLT or condition.src[0].dtype is not dtypes.index or x.src[0].op is not Ops.CONST:
        return None
    terms, const = sym.linear(sym.add(condition.src[0], sym.mul(condition.src[1], -1)))  # terms + const < 0
    if terms.get(x) not in (1, -1):
        return None
    least = sym.iconst(const)  # of the terms besides x
    for t, k in terms.items():
        if t.op is Ops.RANGE and t is not x:
            least = sym.add(least, min(0, k * (sym.vmax(t))))
        elif t is not x:
            if ranges_of(t):
                return None
            least = sym.add(least, sym.mul(t, k))
    size = x.src[0]
    if terms[x] == 1:  # x < -least
        end = sym.mul(sym.floordiv(sym.add(sym.mul(least, -1), ALIGN - 1), ALIGN), ALIGN)
        return sym.iconst(0), _least(_most(end, sym.iconst(0)), size)
    begin = sym.mul(sym.floordiv(sym.add(least, 1), ALIGN), ALIGN)  # x > least
    return _least(_most(begin, sym.iconst(0)), size), size


def _least(a: UOp, b: UOp) -> UOp:
    if sym.vmax(a) <= sym.vmin(b):
        return a
    return b if sym.vmax(b) <= sym.vmin(a) else UOp(Ops.WHERE, dtypes.index, (sym.lt(a, b), a, b))


def _most(a: UOp, b: UOp) -> UOp:
    if sym.vmin(a) >= sym.vmax(b):
        return a
    return b if sym.vmin(b) >= sym.vmax(a) else UOp(Ops.MAX, dtypes.index, (a, b))


# *** which ranges can be shorter ***


def _of_reductions(
    kernel: UOp, own: Sequence[int], steps: Mapping[int, int], zero: Mapping[int, Span]
) -> dict[UOp, Span]:
    found: dict[UOp, set[Span | None]] = {}
    for u in kernel.toposort():
        if u.op is not Ops.REDUCE:
            continue
        value = u.src[0]
        for x in u.src[1:]:
            span = None
            if u.arg is Ops.ADD:
                span = _support(value, x, lambda v: _known(v, own, steps, zero))
            elif (
                u.arg is Ops.MAX
                and value.op is Ops.WHERE
                and value.src[2].op is Ops.CONST
                and value.src[2].arg == u.dtype.min
            ):
                span = _where(value.src[0], x)
            found.setdefault(x, set()).add(span)
    return {x: span for x, spans in found.items() if len(spans) == 1 and (span := next(iter(spans))) is not None}


def _of_loops(
    kernel: UOp, own: Sequence[int], steps: Mapping[int, int], read: Mapping[int, set[Span | None]]
) -> dict[UOp, Span]:
    """The loop over columns that nobody reads, of a kernel that stores nothing else."""
    found: set[tuple[UOp | None, Span | None]] = set()
    for s in kernel.src:
        spans = read.get(own[s.src[0].src[0].arg], {None})
        found.add((_column(s.src[0], own, steps), next(iter(spans)) if len(spans) == 1 else None))
    x, span = found.pop()
    return {} if found or x is None or span is None else {x: span}


def _limited(kernel: UOp, limits: Limits) -> UOp:
    """The kernel with x -> begin + x'."""
    at = {x: sym.add(begin, shorter) for x, (begin, shorter) in limits.items()}

    def change(u: UOp) -> UOp | None:
        if u in at:
            return at[u]
        loops = {Ops.REDUCE: 1, Ops.STORE: 2}.get(u.op)
        return None if loops is None else u.replace(src=(*u.src[:loops], *map(_range_in, u.src[loops:])))

    return rebuild(kernel, change, sym.simplified)


def _range_in(u: UOp) -> UOp:
    return next(x for x in u.toposort() if x.op is Ops.RANGE)
