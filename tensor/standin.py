"""Values of tensors for one thread while that traces or captures; to all others it stays what it was.

An argument of a traced function is a PARAM to it, and the very tensor may be read by other threads meanwhile. So for
that time it is of a subclass that looks who asks; plain tensors pay nothing for it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import cache
from threading import get_ident
from typing import Any

from manygrad.tensor.tensor import Tensor
from manygrad.tensor.uop import UOp


def _get(t: Any) -> UOp:
    d = t.__dict__
    return d["_stand_in"] if d.get("_owner") == get_ident() else d["uop"]


def _set(t: Any, uop: UOp) -> None:
    d = t.__dict__
    d["_stand_in" if d.get("_owner") == get_ident() else "uop"] = uop


@cache
def _twofold(kind: type) -> type:
    return type(kind)(
        kind.__name__, (kind,), {"uop": property(_get, _set), "is_twofold": True, "__module__": kind.__module__}
    )


def part(tensors: Iterable[Tensor]) -> Callable[[], None]:
    """From now on what this thread sets as the `uop` of `tensors` is seen by it alone,
    until what is returned is called. (With the lock held.)"""
    parted = []
    for t in tensors:
        if not hasattr(t, "is_twofold"):
            t.__dict__["_stand_in"], t.__dict__["_owner"] = t.uop, get_ident()
            parted.append((t, type(t)))
            t.__class__ = _twofold(type(t))

    def join() -> None:
        for t, kind in parted:
            if hasattr(t, "is_twofold"):  # (a lazy parameter may have become another class)
                t.__class__ = kind
            del t.__dict__["_stand_in"], t.__dict__["_owner"]

    return join
