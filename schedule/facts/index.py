"""Index maths of movement ops: from the indices of a view to those of what it views."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

from manygrad.tensor.dtype import dtypes
from manygrad.tensor.uop import GroupOp, Ops, RangeArg, UOp
from manygrad.tensor.uop import symbolic as sym

Index = tuple[UOp, ...]


def flat_index(idx: Index, shape: tuple[Any, ...]) -> UOp:
    """Row-major offset."""
    terms: dict[UOp, int] = {}
    const, stride = 0, 1
    for at in range(len(idx) - 1, -1, -1):
        d, i = shape[at], idx[at]
        if i.op is Ops.RANGE:
            terms[i] = terms.get(i, 0) + stride
        elif i.op is Ops.CONST:
            const += i.arg * stride
        else:
            own, c = sym.linear(i)
            const += c * stride
            for t, k in own.items():
                terms[t] = terms.get(t, 0) + k * stride
        if type(d) is not int:
            return sym.add(
                sym.build({t: k for t, k in terms.items() if k}, const),
                _symbolic_offset(idx[:at], shape[:at], sym.mul(d, stride)),
            )
        stride *= d
    if 0 in terms.values():
        terms = {t: k for t, k in terms.items() if k}
    return sym.build(terms, const)


def _symbolic_offset(idx: Index, shape: tuple[Any, ...], stride: UOp) -> UOp:
    out = sym.iconst(0)
    for i, d in zip(reversed(idx), reversed(shape)):
        out = sym.add(out, sym.mul(i, stride))
        stride = sym.mul(stride, sym.as_index(d))
    return out


def dim_groups(shape: tuple[Any, ...], into: tuple[Any, ...]) -> list[tuple[tuple[int, ...], tuple[int, ...]]]:
    """Dims of `shape` and of `into` in the smallest groups that hold the same elements, from the outermost."""
    plain = {*map(type, shape), *map(type, into)} <= {int}
    return _int_groups(shape, into) if plain else _symbolic_groups(shape, into)


@lru_cache(4096)
def _int_groups(shape: tuple[int, ...], into: tuple[int, ...]) -> list[tuple[tuple[int, ...], tuple[int, ...]]]:
    out = []
    i = j = 0
    while i < len(shape) or j < len(into):
        i0, j0 = i, j
        pi = pj = 1
        if i < len(shape):
            pi, i = shape[i], i + 1
        if j < len(into):
            pj, j = into[j], j + 1
        while pi != pj:
            if (pi < pj or j >= len(into)) and i < len(shape):
                pi, i = pi * shape[i], i + 1
            elif j < len(into):
                pj, j = pj * into[j], j + 1
            else:
                break
        out.append((tuple(range(i0, i)), tuple(range(j0, j))))
    return out


def _symbolic_groups(shape: tuple[Any, ...], into: tuple[Any, ...]) -> list[tuple[tuple[int, ...], tuple[int, ...]]]:
    """Where dims are index expressions: products are compared as nodes."""
    out = []
    i = j = 0
    while i < len(shape) or j < len(into):
        i0, j0 = i, j
        pi, pj = sym.iconst(1), sym.iconst(1)
        if i < len(shape):
            pi, i = sym.as_index(shape[i]), i + 1
        if j < len(into):
            pj, j = sym.as_index(into[j]), j + 1
        while pi is not pj:
            if (sym.vmax(pi) < sym.vmax(pj) or j >= len(into)) and i < len(shape):
                pi, i = sym.mul(pi, sym.as_index(shape[i])), i + 1
            elif j < len(into):
                pj, j = sym.mul(pj, sym.as_index(into[j])), j + 1
            else:
                break
        out.append((tuple(range(i0, i)), tuple(range(j0, j))))
    return out


def unflatten_index(idx: Index, shape: tuple[Any, ...], into: tuple[Any, ...]) -> Index:
    """Indices of `into` for indices of `shape` (same elements); dims are matched in the smallest groups that agree."""
    out: list[UOp] = []
    for gi, gj in dim_groups(shape, into):
        if len(gi) == 1 and len(gj) == 1:
            out.append(idx[gi[0]])
            continue
        rest = (
            idx[gi[0]]
            if len(gi) == 1
            else flat_index(idx[gi[0] : gi[-1] + 1], shape[gi[0] : gi[-1] + 1])
            if gi
            else sym.iconst(0)
        )
        part: list[UOp] = []
        for k in reversed(gj[1:]):
            part.append(sym.mod(rest, into[k]))
            rest = sym.floordiv(rest, into[k])
        if gj:
            part.append(rest)
        out.extend(reversed(part))
    return tuple(out)


def move_index(u: UOp, idx: Index, valid: UOp) -> tuple[Index, UOp]:
    """Indices and validity with which movement op `u` asks its source."""
    src = u.src[0].shape
    if u.op is Ops.RESHAPE:
        return unflatten_index(idx, u.shape, src), valid
    if u.op is Ops.PERMUTE:
        out = [sym.iconst(0)] * len(idx)
        for at, d in enumerate(u.arg):
            out[d] = idx[at]
        return tuple(out), valid
    if u.op is Ops.EXPAND:
        return tuple([sym.iconst(0) if type(d) is int and d == 1 else i for i, d in zip(idx, src)]), valid
    if u.op is Ops.SHRINK:
        return tuple([i if type(b) is int and b == 0 else sym.add(i, b) for i, (b, _) in zip(idx, u.arg)]), valid
    if u.op is Ops.FLIP:
        return tuple(
            sym.add(sym.mul(i, -1), sym.add(sym.as_index(d), -1)) if f else i for i, d, f in zip(idx, src, u.arg)
        ), valid
    assert u.op is Ops.PAD
    out2 = []
    for i, d, (before, after) in zip(idx, src, u.arg):
        x = sym.add(i, -before)
        if before:
            valid = sym.both(valid, sym.ge(x, 0))
        if after:
            valid = sym.both(valid, sym.lt(x, sym.as_index(d)))
        out2.append(x)
    return tuple(out2), valid


def contiguous_offset(view: UOp, base: UOp) -> int | None:
    """Where in `base` the elements of `view` lie, if they lie there in one piece and in order."""
    idx: Index = tuple(
        UOp(Ops.RANGE, dtypes.index, (sym.as_index(d),), RangeArg(i, "loop")) if d > 1 else sym.iconst(0)
        for i, d in enumerate(view.shape)
    )
    at, valid, u = idx, sym.TRUE, view
    while u is not base:
        assert u.op in GroupOp.MOVEMENT
        at, valid = move_index(u, at, valid)
        u = u.src[0]
    start = sym.add(flat_index(at, base.shape), sym.mul(flat_index(idx, view.shape), -1))
    return int(start.arg) if valid is sym.TRUE and start.op is Ops.CONST else None
