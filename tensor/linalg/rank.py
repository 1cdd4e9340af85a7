"""What depends on which singular values count as 0: the rank, the pseudo-inverse, least squares; and conditions."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

from manygrad.tensor.autograd import Context, Function
from manygrad.tensor.dtype import finfo
from manygrad.tensor.linalg.jacobi import eigvalsh, svd, svdvals, symmetric
from manygrad.tensor.linalg.lu import inv
from manygrad.tensor.linalg.norms import matrix_norm
from manygrad.tensor.linalg.steps import floats, square
from manygrad.tensor.ops.elementary import without_slope
from manygrad.tensor.tensor import Tensor

Tolerance = float | Tensor | None
DRIVERS = (None, "gels", "gelsy", "gelsd", "gelss")


class LeastSquares(NamedTuple):
    solution: Tensor
    residuals: Tensor
    rank: Tensor
    singular_values: Tensor


def _limit(s: Tensor, a: Tensor, atol: Tolerance, rtol: Tolerance) -> Tensor:
    """(..., 1): the values of s (..., k) up to max(atol, rtol · the largest) count as 0. Where neither is given, or
    `atol` is 0, `rtol` is max(m, n) times the type's eps, which rounding makes of a 0."""
    largest = s.amax(-1, keepdim=True) if s.shape[-1] else s.sum(-1, keepdim=True)

    def each(value: float | Tensor) -> Tensor:
        if not isinstance(value, Tensor):
            return largest.full_like(float(value))
        return (value.unsqueeze(-1) if value.ndim else value).cast(s.dtype)

    least = each(0.0 if atol is None else atol)
    part = (least > 0)._where(0.0, max(a.shape[-2:]) * finfo(a.dtype).eps) if rtol is None else each(rtol)
    return least.maximum((part * largest).cast(s.dtype))


class _Pinv(Function):
    """The gradient, where the rank stays: Golub and Pereyra, "The differentiation of pseudo-inverses and nonlinear
    least squares problems whose variables separate", 1973."""

    @staticmethod
    def forward(ctx: Context, a: Tensor, atol: Tolerance, rtol: Tolerance) -> Tensor:
        u, s, vt = svd(a, full_matrices=False)
        small = s <= _limit(s, a, atol, rtol)
        out = (vt.mT * small._where(0.0, 1.0 / small._where(1.0, s)).unsqueeze(-2)) @ u.mT
        ctx.save_for_backward(a, out)
        return out

    @staticmethod
    def backward(ctx: Context, g: Tensor) -> tuple[Tensor, None, None]:
        a, p = ctx.saved_tensors
        left, right = p @ p.mT @ g, g @ p.mT @ p  # (..., n, m)
        rows, columns = left - left @ a @ p, right - p @ a @ right
        return rows.mT + columns.mT - p.mT @ g @ p.mT, None, None


def pinv(
    a: Tensor, rcond: Tolerance = None, hermitian: bool = False, *, atol: Tolerance = None, rtol: Tolerance = None
) -> Tensor:
    """The Moore–Penrose inverse (..., n, m) of (..., m, n). Singular values up to max(atol, rtol · the largest) are
    0; `rcond` is the older name of `rtol`. Without all of them, `rtol` is max(m, n) times the type's eps.
    `hermitian`: `a` is symmetric, its lower triangle is read."""
    x = symmetric(square("pinv", a), lower=True) if hermitian else floats("pinv", a)
    return _Pinv.apply(x, atol, rcond if rtol is None else rtol)


def matrix_rank(
    a: Tensor, tol: Tolerance = None, hermitian: bool = False, *, atol: Tolerance = None, rtol: Tolerance = None
) -> Tensor:
    """How many singular values of (..., m, n) are above max(atol, rtol · the largest): int64 (...). `tol` is the older
    name of `atol`. Without all of them, `rtol` is max(m, n) times the type's eps. `hermitian`: `a` is symmetric, its
    lower triangle is read."""
    x = floats("matrix_rank", a).detach()
    s = eigvalsh(x).abs() if hermitian else svdvals(x)
    if tol is not None:
        atol, rtol = tol, 0.0
    return (s > _limit(s, a, atol, rtol)).sum(-1)


def lstsq(a: Tensor, b: Tensor, rcond: Tolerance = None, *, driver: str | None = None) -> LeastSquares:
    """(solution, residuals, rank, singular_values): the x of least ‖a x − b‖ and, among those, of least ‖x‖, for a
    (..., m, n) and b (..., m) or (..., m, k).

    `residuals` (..., k) are the sums of squares of a x − b where m > n, else empty. Singular values up to `rcond` times
    the largest count as 0 (None: max(m, n) times the type's eps). They are given with the drivers "gelsd" and "gelss",
    the rank with all but "gels", residuals with all but "gelsy" (as LAPACK has them); computed is always by singular
    values. ValueError where shapes do not fit.
    """
    if driver not in DRIVERS:
        raise ValueError(f"lstsq: driver is one of {DRIVERS[1:]}, not {driver!r}")
    m, n = floats("lstsq", a).shape[-2:]
    vector = b.ndim == a.ndim - 1 and b.shape == a.shape[:-1]
    right = b.unsqueeze(-1) if vector else b
    if right.ndim < 2 or right.shape[-2] != m:
        raise ValueError(f"lstsq: {a.shape} and {b.shape} do not fit; the right side has {m} rows")
    if b.dtype is not a.dtype:
        raise TypeError(f"lstsq: {a.dtype.name} and {b.dtype.name}; cast one")
    x = pinv(a, rtol=rcond) @ right
    none = a.new_zeros(0)
    residuals = (a @ x - right).square().sum(-2) if m > n and driver != "gelsy" else without_slope(none, a, b)
    s = svdvals(a.detach())
    rank = (s > _limit(s, a, None, rcond)).sum(-1)
    return LeastSquares(
        x.squeeze(-1) if vector else x,
        residuals,
        none.cast("int64") if driver == "gels" else rank,
        s if driver in ("gelsd", "gelss") else none,
    )


def cond(a: Tensor, p: Any = None) -> Tensor:
    """The condition number ‖a‖ₚ · ‖a⁻¹‖ₚ of (..., m, n): (...). p None or 2: the largest singular value over the
    smallest, −2 the inverse of that; other norms, as in `matrix_norm`, are of square matrices, inf for singular ones.
    """
    floats("cond", a)
    if p in (None, 2, -2):
        if not a.numel():
            return a.new_zeros(a.shape[:-2])
        s = svdvals(a)
        return s[..., -1] / s[..., 0] if p == -2 else s[..., 0] / s[..., -1]
    out = matrix_norm(square("cond", a), p) * matrix_norm(inv(a), p)
    return (out.isnan() & matrix_norm(a.detach(), p).isfinite())._where(math.inf, out)
