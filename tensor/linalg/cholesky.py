"""Cholesky factorisation, and solutions from it."""

from __future__ import annotations

from typing import NamedTuple

from manygrad.tensor.autograd import Context, Function
from manygrad.tensor.linalg.steps import first_bad, floats, refuse_bad, repeat, square
from manygrad.tensor.linalg.triangular import lower_inverse, upper_inverse
from manygrad.tensor.tensor import Tensor


def _step(k: Tensor, a: Tensor, out: Tensor) -> tuple[Tensor, Tensor]:
    """Column k: divided by the root of its pivot, and its square taken from what is left."""
    n = a.shape[-1]
    row = Tensor.arange(n)
    here = row.eq(k)
    column = (here._where(a, 0.0)).sum(-1)
    pivot = here._where(column, 0.0).sum(-1, keepdim=True)
    column = (row < k)._where(0.0, column / pivot.sqrt())
    return a - column.unsqueeze(-1) * column.unsqueeze(-2), here._where(column.unsqueeze(-1), out)


class _Cholesky(Function):
    """The gradient: Murray, "Differentiation of the Cholesky decomposition", 2016."""

    @staticmethod
    def forward(ctx: Context, a: Tensor) -> Tensor:
        out = repeat(_step, a.shape[-1], a.contiguous(), a.zeros_like().contiguous())[1]
        ctx.save_for_backward(out)
        return out

    @staticmethod
    def backward(ctx: Context, g: Tensor) -> Tensor:
        (low,) = ctx.saved_tensors
        inner = (low.mT @ g).tril()
        inner = inner - inner.diagonal(0, -2, -1).diag_embed() * 0.5
        inverse = lower_inverse(low)
        s = inverse.mT @ inner @ inverse
        return (s + s.mT) * 0.5


def cholesky(a: Tensor, upper: bool = False) -> Tensor:
    """L with L Lᵀ = a, lower triangular, for symmetric positive definite (..., n, n); NaN where it is not.
    `upper`: Lᵀ."""
    out = _Cholesky.apply(square("cholesky", a))
    return out.mT if upper else out


class CholeskyAndInfo(NamedTuple):
    L: Tensor
    info: Tensor


def cholesky_ex(a: Tensor, *, upper: bool = False, check_errors: bool = False) -> CholeskyAndInfo:
    """(L, info): `cholesky`, and the order of the first leading part that is not positive definite (0: all are). With
    `check_errors` such a matrix is a ValueError."""
    out = cholesky(a, upper)
    info = first_bad((out.detach().diagonal(0, -2, -1) > 0).logical_not())
    return CholeskyAndInfo(out, refuse_bad("cholesky_ex", "a matrix is not positive definite", info, check_errors))


def cholesky_inverse(factor: Tensor, upper: bool = False) -> Tensor:
    """The inverse of L Lᵀ from its factor L."""
    inverse = lower_inverse(square("cholesky_inverse", factor.mT if upper else factor))
    return inverse.mT @ inverse


def cholesky_solve(b: Tensor, factor: Tensor, upper: bool = False) -> Tensor:
    """x with L Lᵀ x = b, b (..., n, k)."""
    inverse = lower_inverse(square("cholesky_solve", factor.mT if upper else factor))
    return inverse.mT @ (inverse @ b)


def triangular_solve(
    b: Tensor, a: Tensor, upper: bool = True, transpose: bool = False, unitriangular: bool = False
) -> tuple[Tensor, Tensor]:
    """(x with a @ x = b for a triangle of `a`, `a`), as torch.triangular_solve."""
    square("triangular_solve", a)
    inverse = upper_inverse(a, unitriangular) if upper else lower_inverse(a, unitriangular)
    return (inverse.mT if transpose else inverse) @ b, a._copied()


def solve_triangular(a: Tensor, b: Tensor, *, upper: bool, left: bool = True, unitriangular: bool = False) -> Tensor:
    """x with a @ x = b for the upper or lower triangle of (..., n, n), b (..., n, k); without `left` x with x @ a = b,
    b (..., k, n). `unitriangular`: the diagonal of a counts as ones.

    Cost: O(n³) for the triangle's inverse, in log₂ n steps. ValueError where shapes do not fit.
    """
    square("solve_triangular", a)
    floats("solve_triangular", b)
    if b.shape[-2 if left else -1] != a.shape[-1]:
        raise ValueError(
            f"solve_triangular: {a.shape} and {b.shape} do not fit; the right side has {a.shape[-1]} "
            f"{'rows' if left else 'columns'}"
        )
    inverse = upper_inverse(a, unitriangular) if upper else lower_inverse(a, unitriangular)
    return inverse @ b if left else b @ inverse
