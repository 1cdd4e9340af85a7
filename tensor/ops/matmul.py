"""Products of vectors and matrices; all are one contraction, `matmul`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from manygrad.tensor.dtype import contraction_dtype
from manygrad.tensor.ops.broadcast import broadcast_shape, result_type
from manygrad.tensor.ops.elementary import without_slope

if TYPE_CHECKING:
    from manygrad.tensor.tensor import Tensor


class MatmulMixin:
    def matmul(self: Tensor, other: Tensor) -> Tensor:
        """(..., m, k) @ (..., k, n) -> (..., m, n); 1-d operands as in torch.matmul. 2·m·n·k flops."""
        if self.ndim == 0 or other.ndim == 0:
            raise ValueError(f"matmul: both operands need at least 1 dim, got {self.shape} and {other.shape}")
        x = self.unsqueeze(0) if self.ndim == 1 else self
        w = other.unsqueeze(1) if other.ndim == 1 else other
        if x.shape[-1] != w.shape[-2]:
            raise ValueError(f"matmul: {self.shape} @ {other.shape}: inner dims {x.shape[-1]} and {w.shape[-2]} differ")
        kind = result_type(x, w)
        wide = contraction_dtype(kind)
        x, w = x.cast(kind).cast(wide), w.cast(kind).cast(wide)
        if w.ndim == 2 and x.ndim > 2:  # one product over all leading dims
            rows = x.reshape(-1, x.shape[-1]) if all(isinstance(d, int) and d for d in x.shape) else x
            if rows.ndim == 2:
                flat = rows.matmul(w).cast(kind)
                return flat.reshape(*x.shape[:-1], w.shape[-1]) if other.ndim > 1 else flat.reshape(x.shape[:-1])
        lead = broadcast_shape(x.shape[:-2], w.shape[:-2])
        m, k, n = x.shape[-2], x.shape[-1], w.shape[-1]
        a = (
            x.reshape(*x.shape[:-1], 1, k)._broadcast((*lead, m, n, k))
            if x.ndim == len(lead) + 2
            else x.reshape((1,) * (len(lead) + 2 - x.ndim) + (*x.shape[:-1], 1, k))._broadcast((*lead, m, n, k))
        )
        t = w.transpose(-1, -2)
        b = t.reshape((1,) * (len(lead) + 2 - w.ndim) + (*t.shape[:-2], 1, n, k))._broadcast((*lead, m, n, k))
        out = (a * b).sum(-1, dtype=wide).cast(kind)
        if self.ndim == 1:
            out = out.squeeze(-2)
        return out.squeeze(-1) if other.ndim == 1 else out

    def mm(self: Tensor, mat2: Tensor) -> Tensor:
        """(m, k) @ (k, n)."""
        return _of_rank("mm", self, 2).matmul(_of_rank("mm", mat2, 2))

    def bmm(self: Tensor, mat2: Tensor) -> Tensor:
        """(b, m, k) @ (b, k, n)."""
        if _of_rank("bmm", self, 3).shape[0] != _of_rank("bmm", mat2, 3).shape[0]:
            raise ValueError(
                f"bmm: {self.shape} and {mat2.shape} hold {self.shape[0]} and {mat2.shape[0]} matrices; "
                "matmul broadcasts"
            )
        return self.matmul(mat2)

    def mv(self: Tensor, vec: Tensor) -> Tensor:
        """(m, k) @ (k,)."""
        return _of_rank("mv", self, 2).matmul(_of_rank("mv", vec, 1))

    def dot(self: Tensor, tensor: Tensor) -> Tensor:
        """The inner product of two vectors; of other ranks `matmul`, as in NumPy and tinygrad."""
        return self.matmul(tensor)

    def vdot(self: Tensor, tensor: Tensor) -> Tensor:
        return _of_rank("vdot", self, 1).matmul(_of_rank("vdot", tensor, 1))

    def inner(self: Tensor, other: Tensor) -> Tensor:
        """Σ over the last dim of both: (*a, k) and (*b, k) -> (*a, *b)."""
        if self.ndim == 0 or other.ndim == 0:
            return self * other
        if self.shape[-1] != other.shape[-1]:
            raise ValueError(f"inner: last dims of {self.shape} and {other.shape} differ")
        rows = self.reshape((*self.shape[:-1], *(1,) * (other.ndim - 1), self.shape[-1]))
        kind = result_type(self, other)
        wide = contraction_dtype(kind)
        return (rows.cast(kind).cast(wide) * other.cast(kind).cast(wide)).sum(-1, dtype=wide).cast(kind)

    def outer(self: Tensor, vec2: Tensor) -> Tensor:
        """(m,) and (n,) -> (m, n)."""
        return _of_rank("outer", self, 1).unsqueeze(1) * _of_rank("outer", vec2, 1)

    ger = outer

    # *** beta · self + alpha · product ***

    def addmm(self: Tensor, mat1: Tensor, mat2: Tensor, *, beta: Any = 1, alpha: Any = 1) -> Tensor:
        """beta · self + alpha · (mat1 @ mat2)."""
        return _plus(self, mat1.mm(mat2), beta, alpha)

    def addmv(self: Tensor, mat: Tensor, vec: Tensor, *, beta: Any = 1, alpha: Any = 1) -> Tensor:
        return _plus(self, mat.mv(vec), beta, alpha)

    def addr(self: Tensor, vec1: Tensor, vec2: Tensor, *, beta: Any = 1, alpha: Any = 1) -> Tensor:
        return _plus(self, vec1.outer(vec2), beta, alpha)

    def baddbmm(self: Tensor, batch1: Tensor, batch2: Tensor, *, beta: Any = 1, alpha: Any = 1) -> Tensor:
        return _plus(self, batch1.bmm(batch2), beta, alpha)

    def addbmm(self: Tensor, batch1: Tensor, batch2: Tensor, *, beta: Any = 1, alpha: Any = 1) -> Tensor:
        """beta · self + alpha · Σ over the batch of batch1 @ batch2: one product of long rows."""
        b, m, k = _of_rank("addbmm", batch1, 3).shape
        if _of_rank("addbmm", batch2, 3).shape[:2] != (b, k):
            raise ValueError(f"addbmm: {batch1.shape} and {batch2.shape} do not fit; expected ({b}, {k}, n)")
        return _plus(
            self, batch1.transpose(0, 1).reshape(m, b * k).mm(batch2.reshape(b * k, batch2.shape[2])), beta, alpha
        )

    def __matmul__(self: Tensor, other: Tensor) -> Tensor:
        return self.matmul(other)

    def __rmatmul__(self: Tensor, other: Tensor) -> Tensor:
        from manygrad.tensor.tensor import Tensor

        return Tensor(other).matmul(self)

    def linear(self: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        """x @ weight.T + bias, weight of shape (out, in) as in torch.nn.functional.linear."""
        out = self.matmul(weight.T)
        return out if bias is None else out + bias


def _of_rank(name: str, t: Tensor, rank: int) -> Tensor:
    if t.ndim != rank:
        raise ValueError(f"{name}: expected a tensor of {rank} dims, got shape {t.shape}; matmul takes any")
    return t


def _plus(x: Tensor, product: Tensor, beta: Any, alpha: Any) -> Tensor:
    if not (x.dtype.is_float or product.dtype.is_float):
        for name, factor in (("beta", beta), ("alpha", alpha)):
            if isinstance(factor, float):
                raise TypeError(
                    f"{name}={factor} for tensors of whole numbers; pass a whole one, or cast to a float type first"
                )
        if x.dtype.is_bool and product.dtype.is_bool:  # (factors say whether a term is there, as in PyTorch's addr)
            beta, alpha = bool(beta), bool(alpha)
    scaled = product if alpha == 1 else product * alpha
    if beta == 0:  # (what x holds does not matter then, not even NaN)
        return without_slope(scaled._broadcast(broadcast_shape(x.shape, scaled.shape)), x)
    return (x if beta == 1 else x * beta) + scaled
