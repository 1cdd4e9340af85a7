"""What is asked of a kernel again and again while it is decided what runs together, found once."""

from __future__ import annotations

from manygrad.tensor.uop import Ops, UOp


def nodes_of(kernel: UOp) -> tuple[UOp, ...]:
    """All nodes of a kernel, sources first, without itself: it would keep itself alive."""
    found: tuple[UOp, ...] | None = kernel._cache.get("nodes")
    if found is None:
        found = kernel._cache["nodes"] = tuple(kernel.toposort()[:-1])
    return found


def indices(kernel: UOp) -> list[UOp]:
    found: list[UOp] | None = kernel._cache.get("indices")
    if found is None:
        found = kernel._cache["indices"] = [u for u in nodes_of(kernel) if u.op is Ops.INDEX]
    return found


def reductions(kernel: UOp) -> list[UOp]:
    found: list[UOp] | None = kernel._cache.get("reductions")
    if found is None:
        found = kernel._cache["reductions"] = [u for u in nodes_of(kernel) if u.op is Ops.REDUCE]
    return found
