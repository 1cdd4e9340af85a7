"""LU factorisations in the forms of torch.linalg, and solutions from them."""

from __future__ import annotations

from typing import NamedTuple

from manygrad.tensor.linalg.lu import inv, lu_rows, solve
from manygrad.tensor.linalg.steps import first_bad, floats, refuse_bad, square
from manygrad.tensor.linalg.triangular import lower_inverse, upper_inverse
from manygrad.tensor.tensor import Tensor


class LUFactors(NamedTuple):
    """L below the diagonal (its own is ones) and U on and above it, and LAPACK's pivots: row i was swapped with row
    pivots[i] − 1."""

    LU: Tensor
    pivots: Tensor


class LUFactorsAndInfo(NamedTuple):
    LU: Tensor
    pivots: Tensor
    info: Tensor


class PLU(NamedTuple):
    P: Tensor
    L: Tensor
    U: Tensor


class InverseAndInfo(NamedTuple):
    inverse: Tensor
    info: Tensor


class SolutionAndInfo(NamedTuple):
    result: Tensor
    info: Tensor


def _pivoted(name: str, pivot: bool) -> None:
    if not pivot:
        raise NotImplementedError(f"{name}: pivot=False is not there; rows are always swapped")


def lu(a: Tensor, *, pivot: bool = True) -> PLU:
    """(P, L, U) with a = P L U for (..., m, n): P a permutation (..., m, m), L (..., m, k) lower triangular with ones
    on its diagonal, U (..., k, n) upper triangular, k = min(m, n)."""
    _pivoted("lu", pivot)
    packed, rows = lu_rows(floats("lu", a))
    return PLU(_permutation(rows, a), *_triangles(packed))


def lu_factor(a: Tensor, *, pivot: bool = True) -> LUFactors:
    """(LU, pivots) of (..., m, n), int32 pivots (..., min(m, n)): what `lu_solve` and `lu_unpack` take."""
    _pivoted("lu_factor", pivot)
    packed, rows = lu_rows(floats("lu_factor", a))
    return LUFactors(packed, _pivots(rows, min(a.shape[-2:])))


def lu_factor_ex(a: Tensor, *, pivot: bool = True, check_errors: bool = False) -> LUFactorsAndInfo:
    """(LU, pivots, info): `lu_factor`, and the number, from 1, of the first column whose pivot is 0 (0: none is). With
    `check_errors` such a column is a ValueError."""
    packed, pivots = lu_factor(a, pivot=pivot)
    info = first_bad(packed.diagonal(0, -2, -1).eq(0))
    return LUFactorsAndInfo(packed, pivots, refuse_bad("lu_factor_ex", "a pivot of 0", info, check_errors))


def lu_unpack(LU_data: Tensor, LU_pivots: Tensor, unpack_data: bool = True, unpack_pivots: bool = True) -> PLU:
    """(P, L, U) of `LU, pivots = lu_factor(a)`; empty tensors instead of what is not to be unpacked."""
    none = LU_data.new_zeros(0)
    low, up = _triangles(floats("lu_unpack", LU_data)) if unpack_data else (none, none)
    return PLU(_permutation(_rows(LU_pivots, LU_data.shape[-2]), LU_data) if unpack_pivots else none, low, up)


def lu_solve(LU: Tensor, pivots: Tensor, B: Tensor, *, left: bool = True, adjoint: bool = False) -> Tensor:
    """X with a @ X = B for `LU, pivots = lu_factor(a)`, a (..., n, n), B (..., n, k). Without `left` X with X @ a = B,
    B (..., k, n); `adjoint` takes aᵀ for a."""
    square("lu_solve", LU)
    if not left:
        return lu_solve(LU, pivots, B.mT, adjoint=not adjoint).mT
    lead = (LU[..., :1] @ B[..., :1, :]).shape[:-2] if LU.shape[:-2] != B.shape[:-2] else B.shape[:-2]
    b = B._broadcast((*lead, *B.shape[-2:]))
    rows = _rows(pivots, LU.shape[-1])
    rows = rows._broadcast((*lead, rows.shape[-1]))
    low, up = lower_inverse(LU, unit=True), upper_inverse(LU)
    if adjoint:
        out, rows = low.mT @ (up.mT @ b), rows.argsort(-1)
        return out._gather_along(-2, rows.unsqueeze(-1).expand(out.shape))
    return up @ (low @ b._gather_along(-2, rows.unsqueeze(-1).expand(b.shape)))


def inv_ex(a: Tensor, *, check_errors: bool = False) -> InverseAndInfo:
    """(inverse, info): `inv`, and the number, from 1, of the first pivot that is 0 (0: none is). With `check_errors`
    such a matrix is a ValueError."""
    info = first_bad(lu_rows(square("inv_ex", a).detach())[0].diagonal(0, -2, -1).eq(0))
    return InverseAndInfo(inv(a), refuse_bad("inv_ex", "a singular matrix", info, check_errors))


def solve_ex(a: Tensor, b: Tensor, *, left: bool = True, check_errors: bool = False) -> SolutionAndInfo:
    """(result, info): `solve`, and the number, from 1, of the first pivot of `a` that is 0 (0: none is). With
    `check_errors` such a matrix is a ValueError."""
    info = first_bad(lu_rows(square("solve_ex", a).detach())[0].diagonal(0, -2, -1).eq(0))
    return SolutionAndInfo(solve(a, b, left=left), refuse_bad("solve_ex", "a singular matrix", info, check_errors))


def _triangles(packed: Tensor) -> tuple[Tensor, Tensor]:
    m, n = packed.shape[-2:]
    k = min(m, n)
    ones = Tensor.eye(m, k, dtype=packed.dtype, device=packed.device)
    return packed[..., :, :k].tril(-1) + ones, packed[..., :k, :].triu()


def _permutation(rows: Tensor, like: Tensor) -> Tensor:
    """P (..., m, m) with a 1 in row rows[i] of column i."""
    number = Tensor.arange(rows.shape[-1], device=rows.device)
    return rows.unsqueeze(-2).eq(number.unsqueeze(-1)).cast(like.dtype)


def _pivots(rows: Tensor, count: int) -> Tensor:
    """The swaps, as LAPACK counts them, that lead to an order of rows (..., m)."""
    number = Tensor.arange(rows.shape[-1], device=rows.device)
    where, pivots = number._broadcast(rows.shape), []
    for i in range(count):
        at = where.eq(rows[..., i : i + 1])._where(number, 0).sum(-1, keepdim=True)
        pivots.append(at + 1)
        first = where[..., i : i + 1]
        where = number.eq(at)._where(first, number.eq(i)._where(rows[..., i : i + 1], where))
    return (Tensor.cat(pivots, dim=-1) if pivots else rows[..., :0]).cast("int32")


def _rows(pivots: Tensor, m: int) -> Tensor:
    """The order of m rows after LAPACK's swaps (..., k)."""
    number = Tensor.arange(m, device=pivots.device)
    order = number._broadcast((*pivots.shape[:-1], m))
    for i in range(pivots.shape[-1]):
        at = pivots[..., i : i + 1].cast("int64") - 1
        other = number.eq(at)._where(order, 0).sum(-1, keepdim=True)
        order = number.eq(i)._where(other, number.eq(at)._where(order[..., i : i + 1], order))
    return order
