"""Gradients limited in size. Sums run over the whole gradient however it is sharded."""

from __future__ import annotations

import math
from collections.abc import Iterable

from manygrad.tensor.dtype import dtypes
from manygrad.tensor.tensor import Tensor


def _with_gradient(parameters: Tensor | Iterable[Tensor]) -> list[Tensor]:
    found = [parameters] if isinstance(parameters, Tensor) else list(parameters)
    return list({id(p): p for p in found if p.grad is not None}.values())


def get_total_norm(tensors: Iterable[Tensor], norm_type: float = 2.0, error_if_nonfinite: bool = False) -> Tensor:
    """The p-norm of all elements of all tensors as if they were one."""
    parts = [t.reshape(-1).cast(dtypes.float64 if t.dtype is dtypes.float64 else dtypes.float32) for t in tensors]
    if not parts:
        return Tensor(0.0)
    norm_type = float(norm_type)
    each = [
        p.abs().amax()
        if norm_type == math.inf
        else p.square().sum()
        if norm_type == 2
        else (p.abs() ** norm_type).sum()
        for p in parts
    ]
    total = each[0]
    for e in each[1:]:
        e = e if e.device == total.device else e.to(total.device)
        total = total.maximum(e) if norm_type == math.inf else total + e
    total = total if norm_type == math.inf else total.sqrt() if norm_type == 2 else total ** (1 / norm_type)
    if error_if_nonfinite and not math.isfinite(float(total.item())):
        raise RuntimeError(
            f"the gradients' norm of order {norm_type} is {total.item()}; look for a loss that overflows, or pass "
            "error_if_nonfinite=False"
        )
    return total


def clip_grads_with_norm_(parameters: Tensor | Iterable[Tensor], max_norm: float, total_norm: Tensor) -> None:
    """Gradients times min(1, max_norm / (total_norm + 1e-6))."""
    factor = (max_norm / (total_norm + 1e-6)).minimum(1.0)
    for p in _with_gradient(parameters):
        g = p.grad
        assert g is not None
        p.grad = g * (factor if factor.device == g.device else factor.to(g.device)).cast(g.dtype)


def clip_grad_norm_(
    parameters: Tensor | Iterable[Tensor], max_norm: float, norm_type: float = 2.0, error_if_nonfinite: bool = False
) -> Tensor:
    """Scales all gradients so that their common norm is at most max_norm; returns the norm before.
    Works inside a TinyJit step."""
    params = _with_gradient(parameters)
    total = get_total_norm([p.grad for p in params if p.grad is not None], norm_type, error_if_nonfinite)
    clip_grads_with_norm_(params, max_norm, total)
    return total


def clip_grad_value_(parameters: Tensor | Iterable[Tensor], clip_value: float) -> None:
    """Clamps every element of every gradient to ±clip_value."""
    for p in _with_gradient(parameters):
        assert p.grad is not None
        p.grad = p.grad.maximum(-clip_value).minimum(clip_value)
