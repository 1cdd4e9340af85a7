"""Tables of rows, read by number."""

from __future__ import annotations

from typing import Any

from manygrad.nn import functional as F
from manygrad.nn.module import Module
from manygrad.nn.parameter import Parameter
from manygrad.tensor.tensor import Tensor


def _table(
    rows: int, columns: int, padding_idx: int | None, weight: Tensor | None, device: Any, dtype: Any
) -> tuple[Parameter, int | None]:
    """Normal numbers with row `padding_idx` zero, or the given weight; the padding row counted from 0."""
    if padding_idx is not None and not -rows <= padding_idx < rows:
        raise ValueError(f"padding_idx {padding_idx} is no row of a table with {rows} rows")
    padding_idx = None if padding_idx is None else padding_idx % rows
    if weight is not None:
        if weight.shape != (rows, columns):
            raise ValueError(
                f"the weight has shape {weight.shape}, num_embeddings and embedding_dim say {(rows, columns)}"
            )
        return weight if isinstance(weight, Parameter) else Parameter(weight), padding_idx
    table = Tensor.randn(rows, columns, dtype=dtype, device=device)
    if padding_idx is not None:
        table = table.arange(rows).unsqueeze(1).eq(padding_idx)._where(0.0, table)
    return Parameter(table), padding_idx


class Embedding(Module):
    """Rows of weight (num_embeddings, embedding_dim) by integer index; the gradient is a scatter-add."""

    def __init__(self, num_embeddings: int, embedding_dim: int, padding_idx: int | None = None,
                 max_norm: float | None = None, norm_type: float = 2.0, scale_grad_by_freq: bool = False,
                 sparse: bool = False, _weight: Tensor | None = None, _freeze: bool = False, device: Any = None,
                 dtype: Any = None):  # fmt: skip
        self.num_embeddings, self.embedding_dim = num_embeddings, embedding_dim
        self.max_norm, self.norm_type, self.scale_grad_by_freq, self.sparse = (
            max_norm,
            norm_type,
            scale_grad_by_freq,
            sparse,
        )
        self.weight, self.padding_idx = _table(num_embeddings, embedding_dim, padding_idx, _weight, device, dtype)
        if _freeze:
            self.weight.requires_grad = False

    def forward(self, input: Tensor) -> Tensor:
        return F.embedding(
            input, self.weight, self.padding_idx, self.max_norm, self.norm_type, self.scale_grad_by_freq, self.sparse
        )

    @classmethod
    def from_pretrained(cls, embeddings: Tensor, freeze: bool = True, padding_idx: int | None = None,
                        max_norm: float | None = None, norm_type: float = 2.0, scale_grad_by_freq: bool = False,
                        sparse: bool = False) -> Embedding:  # fmt: skip
        """A layer over a table that is there; `freeze`: not trained."""
        if embeddings.ndim != 2:
            raise ValueError(f"from_pretrained needs a table (rows, columns), not {embeddings.shape}")
        return cls(
            embeddings.shape[0],
            embeddings.shape[1],
            padding_idx,
            max_norm,
            norm_type,
            scale_grad_by_freq,
            sparse,
            embeddings,
            freeze,
        )

    def extra_repr(self) -> str:
        said = f"{self.num_embeddings}, {self.embedding_dim}"
        said += f", padding_idx={self.padding_idx}" if self.padding_idx is not None else ""
        said += f", max_norm={self.max_norm}" if self.max_norm is not None else ""
        said += f", norm_type={self.norm_type}" if self.norm_type != 2 else ""
        return (
            said
            + (", scale_grad_by_freq=True" if self.scale_grad_by_freq else "")
            + (", sparse=True" if self.sparse else "")
        )


class EmbeddingBag(Module):
    """The sum, mean or max of bags of rows."""

    def __init__(self, num_embeddings: int, embedding_dim: int, max_norm: float | None = None, norm_type: float = 2.0,
                 scale_grad_by_freq: bool = False, mode: str = "mean", sparse: bool = False,
                 _weight: Tensor | None = None, include_last_offset: bool = False, padding_idx: int | None = None,
                 device: Any = None, dtype: Any = None):  # fmt: skip
        self.num_embeddings, self.embedding_dim, self.mode, self.sparse, self.include_last_offset = (
            num_embeddings,
            embedding_dim,
            mode,
            sparse,
            include_last_offset,
        )
        self.max_norm, self.norm_type, self.scale_grad_by_freq = max_norm, norm_type, scale_grad_by_freq
        self.weight, self.padding_idx = _table(num_embeddings, embedding_dim, padding_idx, _weight, device, dtype)

    def forward(self, input: Tensor, offsets: Tensor | None = None, per_sample_weights: Tensor | None = None) -> Tensor:
        return F.embedding_bag(input, self.weight, offsets, self.max_norm, self.norm_type, self.scale_grad_by_freq,
                               self.mode, self.sparse, per_sample_weights, self.include_last_offset,
                               self.padding_idx)  # fmt: skip

    def extra_repr(self) -> str:
        return f"{self.num_embeddings}, {self.embedding_dim}, mode={self.mode!r}" + (
            f", padding_idx={self.padding_idx}" if self.padding_idx is not None else ""
        )
