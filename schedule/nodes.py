"""What is asked of a kernel again and again while it is decided what runs together, found once."""

from __future__ import annotations

from manygrad.tensor.uop import Ops, UOp


def indices(kernel: UOp) -> list[UOp]:
    found: list[UOp] | None = kernel._cache.get("indices")
    if found is None:
        found = kernel._cache["indices"] = [u for u in kernel.below() if u.op is Ops.INDEX]
    return found


def reductions(kernel: UOp) -> list[UOp]:
    found: list[UOp] | None = kernel._cache.get("reductions")
    if found is None:
        found = kernel._cache["reductions"] = [u for u in kernel.below() if u.op is Ops.REDUCE]
    return found
