"""QR by Householder reflections, in LAPACK's form: H = I − τ v vᵀ with v[k] = 1, the rest of v below R's diagonal."""

from __future__ import annotations

from manygrad.tensor.autograd import Context, Function
from manygrad.tensor.linalg.steps import floats, repeat
from manygrad.tensor.linalg.triangular import upper_inverse
from manygrad.tensor.ops.elementary import without_slope
from manygrad.tensor.tensor import Tensor


def _step(k: Tensor, a: Tensor, tau: Tensor) -> tuple[Tensor, Tensor]:
    """The reflection that clears column k below the diagonal, applied to the columns after it."""
    m, n = a.shape[-2:]
    row, col = Tensor.arange(m), Tensor.arange(n)
    here = col.eq(k)
    column = here._where(a, 0.0).sum(-1)  # (..., m)
    alpha = row.eq(k)._where(column, 0.0).sum(-1, keepdim=True)
    rest = (row > k)._where(column, 0.0)
    below = rest.square().sum(-1, keepdim=True)
    nothing = below.eq(0)
    beta = (alpha < 0)._where(1.0, -1.0).cast(a.dtype) * nothing._where(1.0, alpha.square() + below).sqrt()
    beta = nothing._where(alpha, beta)
    t = nothing._where(0.0, (beta - alpha) / nothing._where(1.0, beta)).cast(a.dtype)
    v = (rest / nothing._where(1.0, alpha - beta) + row.eq(k).cast(a.dtype)).contiguous()  # (..., m)
    product = (v.unsqueeze(-1) * a).sum(-2, keepdim=True)  # vᵀ a: (..., 1, n)
    after = a - (col > k)._where(t.unsqueeze(-1) * v.unsqueeze(-1) * product, 0.0)
    stored = row.eq(k).unsqueeze(-1)._where(beta.unsqueeze(-1), (row > k).unsqueeze(-1)._where(v.unsqueeze(-1), a))
    return here._where(stored, after), Tensor.arange(tau.shape[-1]).eq(k)._where(t, tau)


def _apply(k: Tensor, out: Tensor, a: Tensor, tau: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """H of column number `count − 1 − k` applied from the left."""
    count = tau.shape[-1]
    at = count - 1 - k
    row, col = Tensor.arange(a.shape[-2]), Tensor.arange(a.shape[-1])
    column = col.eq(at)._where(a, 0.0).sum(-1)
    v = (row > at)._where(column, row.eq(at).cast(a.dtype)).contiguous()
    t = Tensor.arange(count).eq(at)._where(tau, 0.0).sum(-1, keepdim=True)
    product = (v.unsqueeze(-1) * out).sum(-2, keepdim=True)
    return out - t.unsqueeze(-1) * v.unsqueeze(-1) * product, a, tau


def geqrf(a: Tensor) -> tuple[Tensor, Tensor]:
    """(R with the reflections below its diagonal, τ), for (..., m, n)."""
    floats("geqrf", a)
    count = min(a.shape[-2:])
    tau = Tensor.zeros(*a.shape[:-2], count, dtype=a.dtype).contiguous().to(a.device)
    out = repeat(_step, count, a.contiguous(), tau)
    return out[0], out[1]


def reflected(c: Tensor, a: Tensor, tau: Tensor) -> Tensor:
    """Q @ c for the Q of `a, tau = geqrf(...)`, c (..., m, k)."""
    return repeat(_apply, tau.shape[-1], c.contiguous(), a, tau)[0]


def orgqr(a: Tensor, tau: Tensor) -> Tensor:
    """The first n columns of Q, for a (..., m, n)."""
    m, n = floats("orgqr", a).shape[-2:]
    eye = Tensor.eye(m, n, dtype=a.dtype)._broadcast((*a.shape[:-2], m, n)).contiguous().to(a.device)
    return reflected(eye, a, tau) if tau.shape[-1] else without_slope(eye, a, tau)


def ormqr(a: Tensor, tau: Tensor, other: Tensor, left: bool = True, transpose: bool = False) -> Tensor:
    """Q @ other, or with Qᵀ, or from the right."""
    m = floats("ormqr", a).shape[-2]
    q = reflected(Tensor.eye(m, dtype=a.dtype)._broadcast((*a.shape[:-2], m, m)).contiguous().to(a.device), a, tau)
    q = q.mT if transpose else q
    return q @ other if left else other @ q


class _QR(Function):
    """The gradient for m ≥ n, or of the complete Q of a square matrix (Walter and Lehmann, 2010)."""

    @staticmethod
    def forward(ctx: Context, a: Tensor, complete: bool) -> tuple[Tensor, Tensor]:
        m, n = a.shape[-2:]
        k = m if complete else min(m, n)
        packed, tau = geqrf(a)
        eye = Tensor.eye(m, k, dtype=a.dtype)._broadcast((*a.shape[:-2], m, k)).contiguous().to(a.device)
        q, r = reflected(eye, packed, tau), packed.triu()[..., :k, :]
        ctx.save_for_backward(q, r)
        return q, r

    @staticmethod
    def backward(ctx: Context, gq: Tensor, gr: Tensor) -> tuple[Tensor, None]:
        q, r = ctx.saved_tensors
        if q.shape[-2] < r.shape[-1] or r.shape[-1] != r.shape[-2]:
            raise NotImplementedError(
                "the gradient of qr needs a matrix with at least as many rows as columns, reduced; "
                f"this one is {(*q.shape[:-1], r.shape[-1])}"
            )
        m = r @ gr.mT - gq.mT @ q
        symmetric = m.tril() + m.tril(-1).mT
        return (gq + q @ symmetric) @ upper_inverse(r).mT, None


def qr(a: Tensor, mode: str = "reduced") -> tuple[Tensor, Tensor]:
    """(Q, R) with a = Q R, Q of orthonormal columns, R upper triangular;
    mode "reduced", "complete" or "r" (Q is then empty)."""
    floats("qr", a)
    if mode == "r":
        return a.new_zeros(0), _QR.apply(a, False)[1]
    if mode not in ("reduced", "complete"):
        raise ValueError(f'qr: mode is "reduced", "complete" or "r", not {mode!r}')
    return _QR.apply(a, mode == "complete")
