"""LU factorisation with partial pivoting (Doolittle), and what follows from it: determinants, inverses, solutions."""

from __future__ import annotations

from manygrad.tensor.autograd import Context, Function
from manygrad.tensor.dtype import finfo
from manygrad.tensor.linalg.steps import repeat, square
from manygrad.tensor.linalg.triangular import lower_inverse, upper_inverse
from manygrad.tensor.ops.elementary import without_slope
from manygrad.tensor.tensor import Tensor


def _step(k: Tensor, a: Tensor, perm: Tensor, swaps: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Column k of all matrices (..., n, n): the largest element below goes to the diagonal,
    and what is below is eliminated."""
    n, m = a.shape[-2:]
    row, col = Tensor.arange(n), Tensor.arange(m)
    here = col.eq(k)
    column = here._where(a, 0.0).sum(-1)  # (..., n)
    pivot = (row < k)._where(-1.0, column.abs()).argmax(-1, keepdim=True)  # (..., 1)
    order = row.eq(k)._where(pivot, row.eq(pivot)._where(k, row))  # (..., n)
    a = a._gather_along(-2, order.unsqueeze(-1).expand(a.shape)).contiguous()
    column, top = here._where(a, 0.0).sum(-1), row.eq(k).unsqueeze(-1)._where(a, 0.0).sum(-2)  # (..., n), (..., m)
    diagonal = here._where(top, 0.0).sum(-1, keepdim=True)
    factor = (row > k)._where(column / diagonal.eq(0)._where(1.0, diagonal), 0.0)
    a = a - factor.unsqueeze(-1) * (col > k)._where(top, 0.0).unsqueeze(-2)
    below = (row > k).unsqueeze(-1) & here
    return (
        below._where(factor.unsqueeze(-1), a),
        perm._gather_along(-1, order),
        swaps + pivot.squeeze(-1).ne(k).cast(swaps.dtype),
    )


def lu_packed(a: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """(L below the diagonal and U in one, (..., n) rows of `a` in their new order, number of swaps)."""
    n, m = a.shape[-2:]
    lead = a.shape[:-2]
    perm = Tensor.arange(n)._broadcast((*lead, n)).contiguous().to(a.device)
    swaps = Tensor.zeros(*lead, dtype="int64").contiguous().to(a.device)
    out = repeat(_step, min(n, m), a.detach().contiguous(), perm, swaps)
    return out[0], out[1], out[2]


class _LU(Function):
    """P a = L U for (..., m, n). The gradients of L and U are pulled back through the square part of k = min(m, n)
    rows and columns (Giles, 2008, section 2); the rows below and the columns beside it add theirs (as in PyTorch)."""

    @staticmethod
    def forward(ctx: Context, a: Tensor) -> tuple[Tensor, Tensor]:
        packed, perm, _ = lu_packed(a)
        ctx.save_for_backward(packed, perm)
        return packed, perm

    @staticmethod
    def backward(ctx: Context, g: Tensor, _: Tensor) -> Tensor:
        packed, perm = ctx.saved_tensors
        k = min(packed.shape[-2:])
        core, gcore = packed[..., :k, :k], g[..., :k, :k]
        low = core.tril(-1) + Tensor.eye(k, dtype=packed.dtype, device=packed.device)
        below, beside = low.mT @ gcore.tril(-1), gcore.triu() @ core.triu().mT
        if packed.shape[-1] > k:
            below = below - g[..., :, k:] @ packed[..., :, k:].mT
        if packed.shape[-2] > k:
            beside = beside - packed[..., k:, :].mT @ g[..., k:, :]
        left, right = lower_inverse(core, unit=True).mT, upper_inverse(core).mT
        rows = left @ (below.tril(-1) + beside.triu()) @ right  # of P a
        if packed.shape[-1] > k:
            rows = rows.cat(left @ g[..., :, k:], dim=-1)
        if packed.shape[-2] > k:
            rows = rows.cat(g[..., k:, :] @ right, dim=-2)
        back = perm.argsort(-1).unsqueeze(-1).expand(rows.shape)
        return rows._gather_along(-2, back)


def _solve(a: Tensor, b: Tensor) -> Tensor:
    packed, perm, _ = lu_packed(a)
    return _solve_packed(packed, perm, b)


def _solve_packed(packed: Tensor, perm: Tensor, b: Tensor) -> Tensor:
    rows = b._gather_along(-2, perm.unsqueeze(-1).expand(b.shape))
    return upper_inverse(packed) @ (lower_inverse(packed, unit=True) @ rows)


class _Inverse(Function):
    @staticmethod
    def forward(ctx: Context, a: Tensor) -> Tensor:
        out = _solve(a, Tensor.eye(a.shape[-1], dtype=a.dtype, device=a.device)._broadcast(a.shape))
        ctx.save_for_backward(out)
        return out

    @staticmethod
    def backward(ctx: Context, g: Tensor) -> Tensor:
        (inverse,) = ctx.saved_tensors
        return -(inverse.mT @ g @ inverse.mT)


class _Solve(Function):
    @staticmethod
    def forward(ctx: Context, a: Tensor, b: Tensor) -> Tensor:
        x = _solve(a, b)
        ctx.save_for_backward(a, x)
        return x

    @staticmethod
    def backward(ctx: Context, g: Tensor) -> tuple[Tensor, Tensor]:
        a, x = ctx.saved_tensors
        gb = _Solve.apply(a.mT, g)
        return -(gb @ x.mT), gb


class _LogDet(Function):
    """log|det|; its gradient is the transposed inverse."""

    @staticmethod
    def forward(ctx: Context, a: Tensor) -> Tensor:
        ctx.save_for_backward(a)
        return lu_packed(a)[0].diagonal(0, -2, -1).abs().log().sum(-1)

    @staticmethod
    def backward(ctx: Context, g: Tensor) -> Tensor:
        (a,) = ctx.saved_tensors
        return g.unsqueeze(-1).unsqueeze(-1) * inv(a).mT


class _Det(Function):
    @staticmethod
    def forward(ctx: Context, a: Tensor) -> Tensor:
        ctx.save_for_backward(a)
        packed, _, swaps = lu_packed(a)
        return packed.diagonal(0, -2, -1).prod(-1) * _parity(swaps, a)

    @staticmethod
    def backward(ctx: Context, g: Tensor) -> Tensor:
        (a,) = ctx.saved_tensors
        return g.unsqueeze(-1).unsqueeze(-1) * _Cofactors.apply(a)


class _Cofactors(Function):
    """det(a) · a⁻ᵀ, which singular matrices have, too.

    Pivots that are 0 count as rounding errors of the largest one: the inverse grows as the determinant falls, and the
    product is that of the matrix up to rounding. The gradient is that of a polynomial in the elements. Where a is
    U diag(s) Vᵀ its part for Uᵀ da V = e is, up to the sign of det(U) det(V), in row i and column j −eⱼᵢ times the
    product of the other values than i and j, on the diagonal the sum over k of eₖₖ times those other than i and k.
    """

    @staticmethod
    def forward(ctx: Context, a: Tensor) -> Tensor:
        ctx.save_for_backward(a)
        packed, perm, swaps = lu_packed(a)
        pivots = packed.diagonal(0, -2, -1)
        least = pivots.abs().amax(-1, keepdim=True) * finfo(a.dtype).eps if a.numel() else pivots
        least = least.eq(0)._where(finfo(a.dtype).eps, least)
        shift = pivots.eq(0)._where(least, 0.0)
        packed = packed + shift.diag_embed()
        det = packed.diagonal(0, -2, -1).prod(-1) * _parity(swaps, a)
        eye = Tensor.eye(a.shape[-1], dtype=a.dtype, device=a.device)._broadcast(a.shape)
        return det.unsqueeze(-1).unsqueeze(-1) * _solve_packed(packed, perm, eye).mT

    @staticmethod
    def backward(ctx: Context, g: Tensor) -> Tensor:
        from manygrad.tensor.linalg.jacobi import svd

        (a,) = ctx.saved_tensors
        n = a.shape[-1]
        u, s, vt = svd(a, full_matrices=False)
        own = Tensor.eye(n, dtype="bool", device=a.device)
        left_out = own.unsqueeze(0) | own.unsqueeze(1)  # (i, j, k): k is i or j
        product = left_out._where(1.0, s.unsqueeze(-2).unsqueeze(-2)).prod(-1)
        e = u.mT @ g @ vt.mT
        pairs = own._where(0.0, product)
        diagonal = (pairs * e.diagonal(0, -2, -1).unsqueeze(-2)).sum(-1)
        inner = diagonal.diag_embed() - e.mT * pairs
        return (det(u) * det(vt)).detach().unsqueeze(-1).unsqueeze(-1) * (u @ inner @ vt)


def _parity(swaps: Tensor, a: Tensor) -> Tensor:
    """1 where a number of swaps is even, else −1."""
    return (1 - 2 * (swaps % 2)).cast(a.dtype)


def lu_rows(a: Tensor) -> tuple[Tensor, Tensor]:
    """(L and U in one, the rows of (..., m, n) in their new order), with a gradient."""
    packed, perm = _LU.apply(a)
    return packed, perm


def inv(a: Tensor) -> Tensor:
    """The inverse of (..., n, n); infinities and NaNs where a matrix is singular."""
    return _Inverse.apply(square("inv", a))


def solve(a: Tensor, b: Tensor, *, left: bool = True) -> Tensor:
    """x with a @ x = b; a (..., n, n), b (..., n) or (..., n, k). Without `left`, x with x @ a = b, b (..., k, n).

    ValueError where shapes do not fit. Infinities and NaNs where a matrix is singular.
    """
    square("solve", a)
    if not left:
        return solve(a.mT, b.mT).mT if b.ndim > 1 else solve(a.mT, b)
    vector = b.ndim == 1 or (b.ndim == a.ndim - 1 and b.shape == a.shape[:-1])
    right = b.unsqueeze(-1) if vector else b
    if right.shape[-2] != a.shape[-1]:
        raise ValueError(f"solve: {a.shape} and {b.shape} do not fit; the right side has {a.shape[-1]} rows")
    if right.shape[:-2] != a.shape[:-2]:
        from manygrad.tensor.ops.broadcast import broadcast_shape

        lead = broadcast_shape(a.shape[:-2], right.shape[:-2])
        a, right = a._broadcast((*lead, *a.shape[-2:])), right._broadcast((*lead, *right.shape[-2:]))
    x = _Solve.apply(a, right)
    return x.squeeze(-1) if vector else x


def det(a: Tensor) -> Tensor:
    """Determinants of (..., n, n)."""
    return _Det.apply(square("det", a))


def slogdet(a: Tensor) -> tuple[Tensor, Tensor]:
    """(sign, log|det|)."""
    packed, _, swaps = lu_packed(square("slogdet", a))
    sign = packed.diagonal(0, -2, -1).sign().prod(-1) * _parity(swaps, a)
    return without_slope(sign.detach(), a), _LogDet.apply(a)
