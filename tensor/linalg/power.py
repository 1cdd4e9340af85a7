"""Powers and the exponential of matrices."""

from __future__ import annotations

from manygrad.tensor.linalg.lu import inv
from manygrad.tensor.linalg.steps import square
from manygrad.tensor.ops.elementary import without_slope
from manygrad.tensor.tensor import Tensor

DEGREE = {"float32": 8, "float64": 14}  # of the Taylor polynomial, exact to rounding where the norm is at most 1/2
SQUARINGS = 16  # norms up to 2¹⁵


def matrix_power(a: Tensor, n: int) -> Tensor:
    """aⁿ by squaring; negative n of the inverse."""
    square("matrix_power", a)
    if n < 0:
        return matrix_power(inv(a), -n)
    if n == 1:
        return a._copied()
    out: Tensor | None = None
    while n:
        if n & 1:
            out = a if out is None else out @ a
        n >>= 1
        a = a @ a if n else a
    if out is not None:
        return out
    return without_slope(Tensor.eye(a.shape[-1], dtype=a.dtype, device=a.device)._broadcast(a.shape).clone(), a)


def matrix_exp(a: Tensor) -> Tensor:
    """Σ aᵏ/k! by scaling and squaring: exp(a) = exp(a / 2ˢ)^(2ˢ) (Moler and Van Loan, 2003)."""
    square("matrix_exp", a)
    norm = a.detach().abs().sum(-1).amax(-1)
    squarings = norm.clamp(min=1e-30).log2().ceil().clamp(-1, SQUARINGS - 1) + 1  # (...): the norm is at most 1/2 after
    scale = (-squarings).exp2().unsqueeze(-1).unsqueeze(-1)
    x = a * scale
    eye = Tensor.eye(a.shape[-1], dtype=a.dtype, device=a.device)
    out = eye._broadcast(a.shape)
    for k in range(DEGREE[a.dtype.name], 0, -1):  # Horner
        out = x @ out * (1.0 / k) + eye
    for i in range(SQUARINGS):
        out = (squarings > i).unsqueeze(-1).unsqueeze(-1)._where(out @ out, out)
    return out
