"""Gradients limited in size. Sums run over the whole gradient however it is sharded."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

from manygrad.tensor.dtype import dtypes
from manygrad.tensor.grad_mode import no_grad
from manygrad.tensor.tensor import Tensor


def _with_gradient(parameters: Tensor | Iterable[Tensor]) -> list[Tensor]:
    found = [parameters] if isinstance(parameters, Tensor) else list(parameters)
    return list({id(p): p for p in found if p.grad is not None}.values())


def get_total_norm(tensors: Iterable[Tensor], norm_type: float = 2.0, error_if_nonfinite: bool = False) -> Tensor:
    """The p-norm of all elements of all tensors as if they were one."""
    parts = [t.cast(dtypes.float64 if t.dtype is dtypes.float64 else dtypes.float32) for t in tensors]
    if not parts:
        return Tensor(0.0)
    norm_type = float(norm_type)
    of_part, together, root = _norm(norm_type)
    total = of_part(parts[0])
    for p in parts[1:]:
        e = of_part(p)
        total = together(total, e if e.device == total.device else e.to(total.device))
    total = root(total)
    if error_if_nonfinite and not math.isfinite(float(total.item())):
        raise RuntimeError(
            f"the gradients' norm of order {norm_type} is {total.item()}; look for a loss that overflows, or pass "
            "error_if_nonfinite=False"
        )
    return total


def _norm(p: float) -> tuple[Any, Any, Any]:
    """(what is computed of a tensor, how two of them become one, and the norm of all)."""
    if math.isnan(p):
        raise ValueError("norm_type is a number or inf, not nan")
    if math.isinf(p):
        return (
            (lambda t: t.abs().amax(), Tensor.maximum, _same)
            if p > 0
            else (lambda t: t.abs().amin(), Tensor.minimum, _same)
        )
    if p == 0:  # PyTorch's: the number of tensors that are not all 0
        return lambda t: (t != 0).any().cast(t.dtype), Tensor.add, _same
    if p == 2:
        return lambda t: t.square().sum(), Tensor.add, Tensor.sqrt
    return lambda t: (t.abs() ** p).sum(), Tensor.add, lambda total: total ** (1 / p)


def _same(total: Tensor) -> Tensor:
    return total


def clip_grads_with_norm_(parameters: Tensor | Iterable[Tensor], max_norm: float, total_norm: Tensor) -> None:
    """Gradients times min(1, max_norm / (total_norm + 1e-6))."""
    if not isinstance(max_norm, Tensor) and not max_norm >= 0:
        raise ValueError(f"clip_grad_norm_: max_norm must not be negative, got {max_norm}")
    factor = (max_norm / (total_norm + 1e-6)).minimum(1.0)
    for p in _with_gradient(parameters):
        g = p.grad
        assert g is not None
        with no_grad():
            g.mul_((factor if factor.device == g.device else factor.to(g.device)).cast(g.dtype))


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
    if not clip_value >= 0:
        raise ValueError(f"clip_grad_value_: clip_value must not be negative, got {clip_value}")
    for p in _with_gradient(parameters):
        assert p.grad is not None
        with no_grad():
            p.grad.clamp_(-clip_value, clip_value)
