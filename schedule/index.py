"""Index maths of movement ops: from the indices of a view to those of what it views."""

from __future__ import annotations

from typing import Any

from manygrad.tensor.dtype import dtypes
from manygrad.tensor.uop import GroupOp, Ops, UOp
from manygrad.tensor.uop import symbolic as sym

Index = tuple[UOp, ...]


def flat_index(idx: Index, shape: tuple[Any, ...]) -> UOp:
    """Row-major offset."""
    out = sym.iconst(0)
    stride: UOp = sym.iconst(1)
    for i, d in zip(reversed(idx), reversed(shape)):
        out = sym.add(out, sym.mul(i, stride))
        stride = sym.mul(stride, sym.as_index(d))
    return out


def unflatten_index(idx: Index, shape: tuple[Any, ...], into: tuple[Any, ...]) -> Index:
    """Indices of `into` for indices of `shape` (same elements); dims are matched in the smallest groups that agree."""
    out: list[UOp] = []
    i = j = 0
    while i < len(shape) or j < len(into):
        gi, gj = [], []
        pi, pj = sym.iconst(1), sym.iconst(1)
        if i < len(shape):
            gi.append(i)
            pi = sym.as_index(shape[i])
            i += 1
        if j < len(into):
            gj.append(j)
            pj = sym.as_index(into[j])
            j += 1
        while pi is not pj:
            ni, nj = sym.vmax(pi), sym.vmax(pj)
            if (ni < nj or j >= len(into)) and i < len(shape):
                gi.append(i)
                pi = sym.mul(pi, sym.as_index(shape[i]))
                i += 1
            elif j < len(into):
                gj.append(j)
                pj = sym.mul(pj, sym.as_index(into[j]))
                j += 1
            else:
                break
        if len(gi) == 1 and len(gj) == 1:
            out.append(idx[gi[0]])
            continue
        rest = flat_index(tuple(idx[k] for k in gi), tuple(shape[k] for k in gi))
        part: list[UOp] = []
        for k in reversed(gj[1:]):
            part.append(sym.mod(rest, sym.as_index(into[k])))
            rest = sym.floordiv(rest, sym.as_index(into[k]))
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
        return tuple(sym.iconst(0) if isinstance(d, int) and d == 1 else i for i, d in zip(idx, src)), valid
    if u.op is Ops.SHRINK:
        return tuple(sym.add(i, sym.as_index(b)) for i, (b, _) in zip(idx, u.arg)), valid
    if u.op is Ops.FLIP:
        return tuple(sym.add(sym.mul(i, -1), sym.add(sym.as_index(d), -1)) if f else i for i, d, f in zip(idx, src, u.arg)), valid
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
    idx: Index = tuple(UOp(Ops.RANGE, dtypes.index, (sym.as_index(d),), (i, "loop")) if d > 1 else sym.iconst(0) for i, d in enumerate(view.shape))
    at, valid, u = idx, sym.TRUE, view
    while u is not base:
        assert u.op in GroupOp.MOVEMENT
        at, valid = move_index(u, at, valid)
        u = u.src[0]
    start = sym.add(flat_index(at, base.shape), sym.mul(flat_index(idx, view.shape), -1))
    return int(start.arg) if valid is sym.TRUE and start.op is Ops.CONST else None
