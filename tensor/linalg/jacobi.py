"""Singular values and eigenvalues of symmetric matrices by Jacobi rotations.

One-sided Jacobi (Hestenes, 1958; Demmel and Veselić, 1992): rotations of pairs of columns make them orthogonal; their
norms are then the singular values. All n/2 disjoint pairs of a round are rotated at once; n − 1 rounds of a round-robin
tournament (a sweep) meet every pair; convergence is quadratic, so the number of sweeps is fixed.
"""

from __future__ import annotations

from typing import NamedTuple

from manygrad.tensor.autograd import Context, Function
from manygrad.tensor.linalg.qr import qr
from manygrad.tensor.linalg.steps import floats, repeat, square
from manygrad.tensor.ops.elementary import differentiated_as
from manygrad.tensor.tensor import Tensor

SWEEPS = {"float32": 9, "float64": 12}


def _partner(k: Tensor, n: int) -> Tensor:
    """Whom each of n players (n even) meets in round k: players stand on a circle of n − 1,
    the last one in the middle."""
    i, round = Tensor.arange(n), k % (n - 1)
    other = (2 * round - i + 2 * (n - 1)) % (n - 1)
    alone = i.eq(round)
    return i.eq(n - 1)._where(round, alone._where(n - 1, other))


def _round(k: Tensor, a: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """One rotation of every pair of columns of a (..., m, n), carried out on v (..., n, n) too."""
    n = a.shape[-1]
    mate = _partner(k, n)
    other = a._gather_along(-1, mate.expand(a.shape)).contiguous()
    mine, theirs = a.square().sum(-2, keepdim=True), other.square().sum(-2, keepdim=True)
    dot = (a * other).sum(-2, keepdim=True)
    first = Tensor.arange(n) < mate
    low, high = first._where(mine, theirs), first._where(theirs, mine)
    none = dot.abs() <= 1e-38
    zeta = (high - low) / (none._where(1.0, dot) * 2)
    t = (zeta < 0)._where(-1.0, 1.0).cast(a.dtype) / (zeta.abs() + (zeta.square() + 1).sqrt())
    cos = none._where(1.0, (t.square() + 1).rsqrt()).cast(a.dtype)
    sin = (none._where(0.0, t) * cos * first._where(-1.0, 1.0)).cast(a.dtype).contiguous()
    return a * cos + other * sin, v * cos + v._gather_along(-1, mate.expand(v.shape)) * sin


def _tall(a: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """(U, S, V) of (..., m, n) with m ≥ n, S falling."""
    m, n = a.shape[-2:]
    even = n + n % 2
    x = a.pad((0, even - n)).contiguous() if even > n else a.contiguous()
    v = Tensor.eye(even, dtype=a.dtype)._broadcast((*a.shape[:-2], even, even)).contiguous().to(a.device)
    if even > 1:
        x, v = repeat(_round, SWEEPS[a.dtype.name] * (even - 1), x, v)
    norms = x.square().sum(-2).sqrt()  # (..., even)
    padded = (v[..., n:, :].abs().sum(-2) > 0.5) if even > n else None  # the column that stands for nothing goes last
    key = norms if padded is None else padded._where(-1.0, norms).cast(a.dtype)
    s, order = key.sort(-1, descending=True)
    s, order = s[..., :n], order[..., :n]
    x = x._gather_along(-1, order.unsqueeze(-2).expand((*x.shape[:-1], n)))
    v = v[..., :n, :]._gather_along(-1, order.unsqueeze(-2).expand((*v.shape[:-2], n, n)))
    tiny = s <= s[..., :1] * (1e-7 if a.dtype.name == "float32" else 1e-15) * m
    u = tiny.unsqueeze(-2)._where(0.0, x / tiny._where(1.0, s).unsqueeze(-2)).cast(a.dtype)
    q, r = qr(u)  # columns of zero singular values: any orthonormal completion
    sign = (r.diagonal(0, -2, -1) < 0)._where(-1.0, 1.0).cast(a.dtype)
    return q * sign.unsqueeze(-2), s, v


class _SVD(Function):
    """The gradient: Townsend, "Differentiating the singular value decomposition", 2016."""

    @staticmethod
    def forward(ctx: Context, a: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        if a.shape[-2] >= a.shape[-1]:
            u, s, v = _tall(a)
        else:
            v, s, u = _tall(a.mT)
        ctx.save_for_backward(u, s, v)
        ctx.set_materialize_grads(False)
        return u, s, v

    @staticmethod
    def backward(ctx: Context, gu: Tensor | None, gs: Tensor | None, gv: Tensor | None) -> Tensor:
        u, s, v = ctx.saved_tensors
        if gs is not None:  # (of equal values, and of zeros, too)
            return (u * gs.unsqueeze(-2)) @ v.mT
        k = s.shape[-1]
        eye = Tensor.eye(k, dtype=s.dtype, device=s.device)
        gap = s.unsqueeze(-2).square() - s.unsqueeze(-1).square()
        f = (eye > 0)._where(0.0, 1.0 / (eye > 0)._where(1.0, gap))
        inverse = 1.0 / s
        if gu is not None:
            ju = u.mT @ gu
            out = u @ ((f * (ju - ju.mT)) * s.unsqueeze(-2)) @ v.mT
            return out + ((gu - u @ ju) * inverse.unsqueeze(-2)) @ v.mT if u.shape[-2] > k else out
        assert gv is not None
        jv = v.mT @ gv
        out = u @ (s.unsqueeze(-1) * (f * (jv - jv.mT))) @ v.mT
        return out + (u * inverse.unsqueeze(-2)) @ (gv - v @ jv).mT if v.shape[-2] > k else out


def svd(a: Tensor, full_matrices: bool = True) -> tuple[Tensor, Tensor, Tensor]:
    """(U, S, Vᵀ) as torch.linalg.svd: a = U[:, :k] diag(S) Vᵀ[:k], k = min(m, n), S falling.
    Signs of columns are not unique."""
    u, s, v = _SVD.apply(floats("svd", a))
    return (_completed(u), s, _completed(v).mT) if full_matrices else (u, s, v.mT)


def _completed(u: Tensor) -> Tensor:
    """Orthonormal columns, and enough more to make a square matrix."""
    if u.shape[-1] == u.shape[-2]:
        return u
    q, _ = qr(u.detach(), mode="complete")
    return u.cat(q[..., u.shape[-1] :], dim=-1)


class _Eigh(Function):
    @staticmethod
    def forward(ctx: Context, a: Tensor) -> tuple[Tensor, Tensor]:
        # Gershgorin: a + shift is positive, singular values are eigenvalues
        if not a.shape[-1]:
            return a.sum(-1), a
        shift = a.abs().sum(-1).amax(-1, keepdim=True).unsqueeze(-1)
        eye = Tensor.eye(a.shape[-1], dtype=a.dtype, device=a.device)
        _, s, v = _tall(a + eye * shift)
        values, vectors = (s - shift.squeeze(-1)).flip(-1), v.flip(-1)
        ctx.save_for_backward(values, vectors)
        ctx.set_materialize_grads(False)
        return values, vectors

    @staticmethod
    def backward(ctx: Context, gs: Tensor | None, gv: Tensor | None) -> Tensor:
        s, v = ctx.saved_tensors
        if gv is None:  # (of equal values, too)
            assert gs is not None
            return (v * gs.unsqueeze(-2)) @ v.mT
        eye = Tensor.eye(s.shape[-1], dtype=s.dtype, device=s.device)
        gap = s.unsqueeze(-2) - s.unsqueeze(-1)
        f = (eye > 0)._where(0.0, 1.0 / (eye > 0)._where(1.0, gap))
        out = v @ (f * (v.mT @ gv)) @ v.mT
        return (out + out.mT) * 0.5


class Eigen(NamedTuple):
    eigenvalues: Tensor
    eigenvectors: Tensor


def eigh(a: Tensor, UPLO: str = "L") -> Eigen:
    """(eigenvalues rising, eigenvectors as columns) of symmetric (..., n, n), of which the lower ("L") or the upper
    ("U") triangle is read. Signs of columns are not unique. ValueError for another `UPLO`."""
    if not isinstance(UPLO, str) or UPLO.upper() not in ("L", "U"):
        raise ValueError(f'eigh: UPLO is "L" or "U", not {UPLO!r}')
    return Eigen(*_Eigh.apply(symmetric(square("eigh", a), UPLO.upper() == "L")))


def symmetric(a: Tensor, lower: bool) -> Tensor:
    """The value is that of one triangle; the gradient is shared by both, as that of eigenvalues in PyTorch."""
    half = a.tril(-1) if lower else a.triu(1)
    own = a.diagonal(0, -2, -1).diag_embed()
    return differentiated_as(half + half.mT + own, "symmetric", None, lambda a: (a + a.mT) * 0.5, a)


def eigvalsh(a: Tensor, UPLO: str = "L") -> Tensor:
    """The eigenvalues of symmetric (..., n, n), rising: (..., n)."""
    return eigh(a, UPLO).eigenvalues


def svdvals(a: Tensor) -> Tensor:
    """The singular values of (..., m, n), falling: (..., min(m, n))."""
    return svd(a, full_matrices=False)[1]
