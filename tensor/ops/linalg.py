"""Contractions: matmul of any rank, linear, einsum."""

from __future__ import annotations

from typing import TYPE_CHECKING

from manygrad.tensor.ops.elementwise import broadcast_shape, result_type

if TYPE_CHECKING:
    from manygrad.tensor.tensor import Tensor


class LinalgMixin:
    def matmul(self: Tensor, other: Tensor) -> Tensor:
        """(..., m, k) @ (..., k, n) -> (..., m, n); 1-d operands as in torch.matmul. 2·m·n·k flops."""
        if self.ndim == 0 or other.ndim == 0:
            raise ValueError(f"matmul: both operands need at least 1 dim, got {self.shape} and {other.shape}")
        x = self.unsqueeze(0) if self.ndim == 1 else self
        w = other.unsqueeze(1) if other.ndim == 1 else other
        if x.shape[-1] != w.shape[-2]:
            raise ValueError(f"matmul: {self.shape} @ {other.shape}: inner dims {x.shape[-1]} and {w.shape[-2]} differ")
        kind = result_type(x, w)
        x, w = x.cast(kind), w.cast(kind)
        if w.ndim == 2 and x.ndim > 2:  # one product over all leading dims
            rows = x.reshape(-1, x.shape[-1]) if all(isinstance(d, int) and d for d in x.shape) else x
            if rows.ndim == 2:
                return rows.matmul(w).reshape(*x.shape[:-1], w.shape[-1]) if other.ndim > 1 else rows.matmul(w).reshape(x.shape[:-1])
        lead = broadcast_shape(x.shape[:-2], w.shape[:-2])
        m, k, n = x.shape[-2], x.shape[-1], w.shape[-1]
        a = x.reshape(*x.shape[:-1], 1, k)._broadcast((*lead, m, n, k)) if x.ndim == len(lead) + 2 else x.reshape((1,) * (len(lead) + 2 - x.ndim) + (*x.shape[:-1], 1, k))._broadcast((*lead, m, n, k))
        t = w.transpose(-1, -2)
        b = t.reshape((1,) * (len(lead) + 2 - w.ndim) + (*t.shape[:-2], 1, n, k))._broadcast((*lead, m, n, k))
        out = (a * b).sum(-1) if kind.is_float else (a * b).sum(-1).cast(kind)
        if self.ndim == 1:
            out = out.squeeze(-2)
        return out.squeeze(-1) if other.ndim == 1 else out

    dot = matmul

    def __matmul__(self: Tensor, other: Tensor) -> Tensor:
        return self.matmul(other)

    def __rmatmul__(self: Tensor, other: Tensor) -> Tensor:
        from manygrad.tensor.tensor import Tensor

        return Tensor(other).matmul(self)

    def linear(self: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        """x @ weight.T + bias, weight of shape (out, in) as in torch.nn.functional.linear."""
        out = self.matmul(weight.T)
        return out if bias is None else out + bias

    def einsum(self: Tensor, formula: str, *others: Tensor) -> Tensor:
        """`x.einsum("ij,jk->ik", y)`: operands lined up on the letters, multiplied, summed over what the output lacks."""
        operands = [self, *others]
        text = formula.replace(" ", "")
        left, arrow, out = text.partition("->")
        names = left.split(",")
        if len(names) != len(operands):
            raise ValueError(f"einsum {formula!r} names {len(names)} operands, got {len(operands)}")
        letters = sorted(set("".join(names)))
        if not arrow:
            joined = "".join(names)
            out = "".join(c for c in letters if joined.count(c) == 1)
        order = [*out, *[c for c in letters if c not in out]]
        total: Tensor | None = None
        for t, n in zip(operands, names):
            if len(n) != t.ndim:
                raise ValueError(f"einsum {formula!r}: operand {n!r} has {t.ndim} dims")
            for i, c in enumerate(n):  # a letter that stands twice: the diagonal
                if n.index(c) != i:
                    raise ValueError(f"einsum {formula!r}: letter {c!r} stands twice in {n!r}; take the diagonal first")
            at = sorted(range(len(n)), key=lambda i: order.index(n[i]))
            p = t.permute(at) if at else t
            sizes = {n[i]: t.shape[i] for i in range(len(n))}
            p = p.reshape(tuple(sizes.get(c, 1) for c in order))
            total = p if total is None else total * p
        assert total is not None
        extra = tuple(range(len(out), len(order)))
        return total.sum(extra) if extra else total
