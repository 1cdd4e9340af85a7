"""The base of a view, read off the graph: which node's memory a value lies in,
and how a view is put on another base.

PyTorch's rules decide: reshapes that keep strides, permute, expand, slices, detach and `view(dtype)` are views; a
reshape that would have to move elements is a copy, and so are `flip` and `clone`.

    memory(RESHAPE(SHRINK(b, ...), ...))        b
    memory(RESHAPE(PERMUTE(b, (1, 0)), (n,)))   that RESHAPE: a value of its own
"""

from __future__ import annotations

from typing import Any

from manygrad.tensor.uop.ops import GroupOp, Ops
from manygrad.tensor.uop.table import Table
from manygrad.tensor.uop.uop import UOp

Strides = tuple[int, ...]
# what may stand on the way from a view to its base
ALIASES = GroupOp.VIEW | {Ops.DETACH, Ops.BITCAST, Ops.CONTIGUOUS, Ops.CUSTOM}
STEPS = GroupOp.VIEW | {Ops.DETACH, Ops.BITCAST}  # of them those that always do


class Copied:
    """arg of a CUSTOM: src[0], which moves elements of memory, as a value of its own (`flip`).
    A marker: identity, also to gradients."""

    @staticmethod
    def gradients(g: Any, u: UOp) -> tuple[Any, ...]:
        return (g,)

    def __repr__(self) -> str:
        return "copied"


class OtherWidth:
    """arg of a CUSTOM: src[0] computes the bits of src[1] as elements of another width (`view(dtype)`).
    No gradient goes through bits."""

    @staticmethod
    def gradients(g: Any, u: UOp) -> tuple[Any, ...]:
        return (None, None)

    def __repr__(self) -> str:
        return "other width"


class Strided:
    """arg of a CUSTOM: src[0], made of src[1] by movement ops, as the view with strides that these come to, though one
    of them alone would be a copy (`diagonal`)."""

    @staticmethod
    def gradients(g: Any, u: UOp) -> tuple[Any, ...]:
        return (g, None)

    def __repr__(self) -> str:
        return "strided"


class Apart:
    """arg of a CUSTOM: src[0], told from other values of its graph by its gradient: one with a hook. Each is another
    one, and a view."""

    @staticmethod
    def gradients(g: Any, u: UOp) -> tuple[Any, ...]:
        return (g,)

    def __repr__(self) -> str:
        return "apart"


COPIED, OTHER_WIDTH, STRIDED = Copied(), OtherWidth(), Strided()
HIDDEN = "hidden"  # arg of a DETACH behind which what has a gradient was written, in memory with another one


def below(u: UOp) -> UOp | None:
    """The node that `u` is a view of, one step down; None where it is a value of its own."""
    op = u.op
    if op in GroupOp.VIEW or op is Ops.DETACH or op is Ops.BITCAST:
        return u.src[0]
    if op is Ops.CONTIGUOUS:
        return u.src[0] if u.arg is not None else None  # a leaf's number
    if op is Ops.CUSTOM and (u.arg is STRIDED or type(u.arg) is Apart):
        return u.src[0]
    return u.src[1] if op is Ops.CUSTOM and u.arg is OTHER_WIDTH else None


_MEMORY: Table[tuple[UOp | None, bool]] = Table("memory")  # (None: itself)


def memory(u: UOp) -> UOp:
    """The node whose memory `u` lies in: itself, if it is no view."""
    return _lies_in(u)[0] if u.op in ALIASES else u


def overlaps(u: UOp) -> bool:
    """Whether elements of `u` share memory with one another, as those of an expanded view do."""
    return _lies_in(u)[1]


def _lies_in(u: UOp) -> tuple[UOp, bool]:
    found = _MEMORY.get(u)
    if found is not None:
        return found[0] or u, found[1]
    path, x = [u], below(u)
    while x is not None:
        path.append(x)
        x = below(x)
    at = len(path) - 1  # of the base in the path
    if path[at].op is Ops.CONST:  # a full tensor is the first EXPAND of a constant
        at = next((i for i in range(at, -1, -1) if path[i].op is Ops.EXPAND), at)
    overlap = False
    if all(isinstance(d, int) for x in path for d in x.shape):
        strides = contiguous_strides(path[at].shape)
        free = {id(x) for p in path if p.arg is STRIDED for x in _between(p)}
        for i in range(at - 1, -1, -1):
            new = _strides_of(path[i], path[i + 1], strides)
            if new is None and id(path[i]) in free:
                new = contiguous_strides(path[i].shape)
            if new is None:
                at, new = i, contiguous_strides(path[i].shape)
            strides = new
        overlap = any(s == 0 and d > 1 for s, d in zip(strides, u.shape))
    _MEMORY[u] = (path[at] if at else None, overlap)  # (not itself: a node that refers to itself would not die)
    return path[at], overlap


def _between(u: UOp) -> list[UOp]:
    """The movement ops that a STRIDED node stands for."""
    out, x = [], u.src[0]
    while x is not u.src[1]:
        out.append(x)
        x = x.src[0]
    return out


def contiguous_strides(shape: tuple[Any, ...]) -> Strides:
    out = [1] * len(shape)
    for i in range(len(shape) - 2, -1, -1):
        out[i] = out[i + 1] * max(shape[i + 1], 1)
    return tuple(out)


def _strides_of(u: UOp, source: UOp, strides: Strides) -> Strides | None:
    """Strides of `u`, a view of `source`, which has `strides`; None where it cannot be one without moving elements."""
    if u.op is Ops.RESHAPE:
        stepped = _stepped(u, source, strides)
        return stepped if stepped is not None else reshaped(source.shape, strides, u.shape)
    if u.op is Ops.PERMUTE:
        return tuple(strides[i] for i in u.arg)
    if u.op is Ops.EXPAND:
        return tuple(0 if d != n else s for s, d, n in zip(strides, source.shape, u.shape))
    if u.op is Ops.FLIP:
        return tuple(-s if f else s for s, f in zip(strides, u.arg))
    return _of_other_width(u, source, strides) if u.op is Ops.CUSTOM and u.arg is OTHER_WIDTH else strides


def _of_other_width(u: UOp, source: UOp, strides: Strides) -> Strides | None:
    """Counted in elements of the new width; along the last dim they lie side by side."""
    old, new = source.dtype.itemsize, u.dtype.itemsize
    if not strides or any(s * old % new for s in strides[:-1]):
        return None if strides else ()
    return (*(s * old // new for s in strides[:-1]), 1)


def _stepped(u: UOp, source: UOp, strides: Strides) -> Strides | None:
    """Strides of the rows that every step-th element of is taken: (.., n, ..) is expanded to (.., step, n, ..), seen as
    (.., n, step, ..), of which the first column is kept (`IndexingMixin._every`)."""
    while source.op is Ops.DETACH:
        source = source.src[0]
    if source.op is not Ops.EXPAND:
        return None
    grown = [i for i, (a, b) in enumerate(zip(source.src[0].shape, source.shape)) if a != b]
    if len(grown) != 1 or grown[0] + 1 >= len(source.shape):
        return None
    d, shape = grown[0], source.shape
    if u.shape != (*shape[:d], shape[d + 1], shape[d], *shape[d + 2 :]):
        return None
    s = strides[d + 1]
    return (*strides[:d], s * shape[d], s, *strides[d + 2 :])


def reshaped(shape: tuple[int, ...], strides: Strides, new: tuple[int, ...]) -> Strides | None:
    """Strides of a reshape of strided memory that moves nothing, None if there are none (PyTorch's `computeStride`)."""
    if 0 in shape or not shape:
        return contiguous_strides(new)
    out = [1] * len(new)
    at, base, have, want = len(new) - 1, strides[-1], 1, 1
    for d in range(len(shape) - 1, -1, -1):
        have *= shape[d]
        if d == 0 or (shape[d - 1] != 1 and strides[d - 1] != have * base):
            while at >= 0 and (want < have or new[at] == 1):
                out[at] = want * base
                want *= new[at]
                at -= 1
            if want != have:
                return None
            if d:
                base, have, want = strides[d - 1], 1, 1
    return tuple(out) if at < 0 else None


def rebased(u: UOp, base: UOp, new: UOp, leaf: bool = False) -> UOp:
    """The view `u` of `base`, as the same view of `new`.
    A leaf's number goes (it is in memory then), unless it is still to be a `leaf`."""
    if u is base:
        return new
    if u.op is Ops.CUSTOM and type(u.arg) is not Apart:
        return widened(rebased(u.src[1], base, new, leaf), u)
    source = rebased(u.src[0], base, new, leaf)
    return source if u.op is Ops.CONTIGUOUS and not leaf else u.replace(src=(source,))


def widened(source: UOp, like: UOp) -> UOp:
    """The OTHER_WIDTH or STRIDED node `like`, of `source` instead."""
    from manygrad.tensor.uop.rewrite import substitute

    return substitute(like, {like.src[1]: source})
