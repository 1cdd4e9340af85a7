"""Methods for `manygrad.linalg`: factorisations, determinants, inverses, solutions;
and products that are not plain matmuls."""

from __future__ import annotations

from math import prod
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from manygrad.tensor.tensor import Tensor


class QR(NamedTuple):
    Q: Any
    R: Any


class SVD(NamedTuple):
    U: Any
    S: Any
    V: Any


class SLogDet(NamedTuple):
    sign: Any
    logabsdet: Any


class DecompositionMixin:
    def cholesky(self: Tensor, upper: bool = False) -> Tensor:
        return _linalg().cholesky(self, upper)

    def cholesky_inverse(self: Tensor, upper: bool = False) -> Tensor:
        return _linalg().cholesky_inverse(self, upper)

    def cholesky_solve(self: Tensor, input2: Tensor, upper: bool = False) -> Tensor:
        return _linalg().cholesky_solve(self, input2, upper)

    def triangular_solve(
        self: Tensor, A: Tensor, upper: bool = True, transpose: bool = False, unitriangular: bool = False
    ) -> Any:
        return _linalg().triangular_solve(self, A, upper, transpose, unitriangular)

    def det(self: Tensor) -> Tensor:
        return _linalg().det(self)

    def slogdet(self: Tensor) -> SLogDet:
        return SLogDet(*_linalg().slogdet(self))

    def logdet(self: Tensor) -> Tensor:
        """log det; NaN where it is negative."""
        sign, value = self.slogdet()
        return (sign < 0)._where(float("nan"), value)

    def inverse(self: Tensor) -> Tensor:
        return _linalg().inv(self)

    def pinverse(self: Tensor, rcond: float | None = None) -> Tensor:
        return _linalg().pinv(self, rcond)

    def lu_unpack(self: Tensor, LU_pivots: Tensor, unpack_data: bool = True, unpack_pivots: bool = True) -> Any:
        """(P, L, U) of `LU, pivots = a.lu()`, called as `LU.lu_unpack(pivots)`."""
        return _linalg().lu_unpack(self, LU_pivots, unpack_data, unpack_pivots)

    def solve(self: Tensor, B: Tensor) -> Tensor:
        """x with self @ x = B (torch.linalg.solve)."""
        return _linalg().solve(self, B)

    def lu(self: Tensor, pivot: bool = True, get_infos: bool = False) -> Any:
        """(LU, pivots) as `manygrad.linalg.lu_factor`; with `get_infos` its info, too."""
        found = _linalg().lu_factor_ex(self, pivot=pivot)
        return found if get_infos else tuple(found[:2])

    def lu_solve(self: Tensor, LU_data: Tensor, LU_pivots: Tensor) -> Tensor:
        return _linalg().lu_solve(LU_data, LU_pivots, self)

    def qr(self: Tensor, some: bool = True) -> QR:
        return QR(*_linalg().qr(self, "reduced" if some else "complete"))

    def geqrf(self: Tensor) -> Any:
        return _linalg().geqrf(self)

    def orgqr(self: Tensor, input2: Tensor) -> Tensor:
        return _linalg().orgqr(self, input2)

    def ormqr(self: Tensor, input2: Tensor, input3: Tensor, left: bool = True, transpose: bool = False) -> Tensor:
        return _linalg().ormqr(self, input2, input3, left, transpose)

    def svd(self: Tensor, some: bool = True, compute_uv: bool = True) -> SVD:
        """(U, S, V) with self = U diag(S) Vᵀ (torch.Tensor.svd; `manygrad.linalg.svd` gives Vᵀ)."""
        u, s, vt = _linalg().svd(self, full_matrices=not some)
        return SVD(u, s, vt.mT) if compute_uv else SVD(u.zeros_like(), s, vt.mT.zeros_like())

    def matrix_power(self: Tensor, n: int) -> Tensor:
        return _linalg().matrix_power(self, n)

    def matrix_exp(self: Tensor) -> Tensor:
        return _linalg().matrix_exp(self)

    # *** products ***

    def kron(self: Tensor, other: Tensor) -> Tensor:
        """The Kronecker product: every element of self times all of other."""
        n = max(self.ndim, other.ndim)
        a, b = (t.reshape((1,) * (n - t.ndim) + t.shape) for t in (self, other))
        left = a.reshape(tuple(d for s in a.shape for d in (s, 1)))
        right = b.reshape(tuple(d for s in b.shape for d in (1, s)))
        return (left * right).reshape(tuple(p * q for p, q in zip(a.shape, b.shape)))

    def cross(self: Tensor, other: Tensor, dim: int | None = None) -> Tensor:
        """The cross product along `dim` (of size 3; by default the first such dim)."""
        if dim is None:
            found = [i for i, s in enumerate(self.shape) if s == 3]
            if not found:
                raise ValueError(f"cross: no dim of {self.shape} has size 3")
            dim = found[0]
        d = self._dim(dim)
        if self.shape[d] != 3 or other.shape[d - self.ndim] != 3:
            raise ValueError(f"cross: dim {dim} of {self.shape} and {other.shape} must have size 3")
        a, b = self.movedim(d, -1), other.movedim(d - self.ndim, -1)
        first, second = (a.roll(-1, -1), b.roll(-2, -1)), (a.roll(-2, -1), b.roll(-1, -1))
        return (first[0] * first[1] - second[0] * second[1]).movedim(-1, d)

    def tensordot(self: Tensor, other: Tensor, dims: Any = 2) -> Tensor:
        """Σ over pairs of dims: a number n (the last n of self with the first n of other), or two lists. A dim of 1
        broadcasts to the other one."""
        mine, theirs = (
            (list(range(self.ndim - dims, self.ndim)), list(range(dims)))
            if isinstance(dims, int)
            else ([self._dim(d) for d in dims[0]], [other._dim(d) for d in dims[1]])
        )
        keep, rest = [d for d in range(self.ndim) if d not in mine], [d for d in range(other.ndim) if d not in theirs]
        x, y = self, other
        for i, j in zip(mine, theirs):  # (of a dim that broadcasts, the other one is summed up)
            if 1 in (x.shape[i], y.shape[j]) and x.shape[i] != y.shape[j]:
                x, y = (x, y.sum(j, keepdim=True)) if x.shape[i] == 1 else (x.sum(i, keepdim=True), y)
        sizes = [x.shape[d] for d in mine]
        if len(mine) != len(theirs) or sizes != [y.shape[d] for d in theirs]:
            raise ValueError(f"tensordot: dims {mine} of {self.shape} and {theirs} of {other.shape} differ in size")
        a = x.permute(*keep, *mine).reshape(prod(self.shape[d] for d in keep), prod(sizes))
        b = y.permute(*theirs, *rest).reshape(prod(sizes), prod(other.shape[d] for d in rest))
        return (a @ b).reshape(tuple(self.shape[d] for d in keep) + tuple(other.shape[d] for d in rest))


def _linalg() -> Any:
    from manygrad.tensor import linalg

    return linalg
