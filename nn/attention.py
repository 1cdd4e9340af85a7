"""Multi-head attention."""

from __future__ import annotations

import math
from typing import Any

from manygrad.nn import functional as F
from manygrad.nn import init
from manygrad.nn.linear import Linear
from manygrad.nn.module import Module
from manygrad.nn.parameter import Parameter
from manygrad.tensor.tensor import Tensor


class MultiheadAttention(Module):
    """softmax(q kᵀ / √(E / heads)) v in `num_heads` heads; (L, N, E), or (N, L, E) with batch_first, or (L, E).

    The three projections are one weight in_proj_weight (3E, E), unless keys or values have sizes of their own.

    Large: PyTorch's parameters.
    """

    def __init__(self, embed_dim: int, num_heads: int, dropout: float = 0.0, bias: bool = True,
                 add_bias_kv: bool = False, add_zero_attn: bool = False, kdim: int | None = None,
                 vdim: int | None = None, batch_first: bool = False, device: Any = None,
                 dtype: Any = None):  # fmt: skip
        if embed_dim <= 0 or num_heads <= 0 or embed_dim % num_heads:
            raise ValueError(
                f"MultiheadAttention: embed_dim {embed_dim} must be a multiple of num_heads {num_heads}, both positive"
            )
        self.embed_dim, self.num_heads, self.dropout, self.batch_first, self.add_zero_attn = (
            embed_dim,
            num_heads,
            dropout,
            batch_first,
            add_zero_attn,
        )
        self.kdim, self.vdim, self.head_dim = kdim or embed_dim, vdim or embed_dim, embed_dim // num_heads
        self.in_proj_weight = self.q_proj_weight = self.k_proj_weight = self.v_proj_weight = self.in_proj_bias = (
            self.bias_k
        ) = self.bias_v = None
        new = lambda *shape: Parameter(Tensor.zeros(*shape, dtype=dtype, device=device))  # noqa: E731
        if self.kdim == self.vdim == embed_dim:
            self.in_proj_weight = init.xavier_uniform_(new(3 * embed_dim, embed_dim))
        else:
            self.q_proj_weight = init.xavier_uniform_(new(embed_dim, embed_dim))
            self.k_proj_weight = init.xavier_uniform_(new(embed_dim, self.kdim))
            self.v_proj_weight = init.xavier_uniform_(new(embed_dim, self.vdim))
        if bias:
            self.in_proj_bias = new(3 * embed_dim)
        if add_bias_kv:
            self.bias_k, self.bias_v = (
                init.xavier_normal_(new(1, 1, embed_dim)),
                init.xavier_normal_(new(1, 1, embed_dim)),
            )
        self.out_proj = Linear(embed_dim, embed_dim, bias, device, dtype)
        if bias:
            init.zeros_(self.out_proj.bias)  # type: ignore[arg-type]

    def forward(self, query: Tensor, key: Tensor, value: Tensor, key_padding_mask: Tensor | None = None,
                need_weights: bool = True, attn_mask: Tensor | None = None, average_attn_weights: bool = True,
                is_causal: bool = False) -> tuple[Tensor, Tensor | None]:  # fmt: skip
        """-> (output like query, weights (N, L, S), or (N, heads, L, S) if they are not averaged, None if not needed).

        Masks: True, or −inf to be added, hides. attn_mask (L, S) or (N·heads, L, S); key_padding_mask (N, S).
        """
        alone = query.ndim == 2
        if query.ndim not in (2, 3) or not query.ndim == key.ndim == value.ndim:
            raise ValueError(
                f"MultiheadAttention: query, key and value need 3 dims (2 without a batch), got {query.shape}, "
                f"{key.shape}, {value.shape}"
            )
        if query.shape[-1] != self.embed_dim or key.shape[-1] != self.kdim or value.shape[-1] != self.vdim:
            raise ValueError(
                f"MultiheadAttention: the last dims of query, key, value are {self.embed_dim}, {self.kdim}, "
                f"{self.vdim}, not those of {query.shape}, {key.shape}, {value.shape}"
            )
        if is_causal and attn_mask is None:
            raise ValueError(
                "MultiheadAttention: is_causal is a hint about attn_mask; "
                "give the mask too (Transformer.generate_square_subsequent_mask)"
            )
        if alone:
            query, key, value = (t.unsqueeze(0) for t in (query, key, value))
            key_padding_mask = None if key_padding_mask is None else key_padding_mask.unsqueeze(0)
        elif not self.batch_first:
            same_kv, same_qk = key is value, query is key
            query = query.transpose(0, 1)
            key = query if same_qk else key.transpose(0, 1)
            value = key if same_kv else value.transpose(0, 1)
        q, k, v = self._projected(query, key, value)
        n, source = k.shape[0], k.shape[1]
        if self.bias_k is not None and self.bias_v is not None:
            k, v = (t.cat(b.expand(n, 1, self.embed_dim), dim=1) for t, b in ((k, self.bias_k), (v, self.bias_v)))
        if self.add_zero_attn:
            k, v = k.pad((0, 0, 0, 1)), v.pad((0, 0, 0, 1))
        mask = self._mask(attn_mask, key_padding_mask, (n, q.shape[1], source), k.shape[1] - source, q)
        q, k, v = (t.reshape(t.shape[0], t.shape[1], self.num_heads, self.head_dim).transpose(1, 2) for t in (q, k, v))
        p = self.dropout if self._is_training else 0.0
        weights = None
        if need_weights or p:
            scores = q.matmul(k.transpose(-1, -2)) * (1 / math.sqrt(self.head_dim))
            weights = (scores if mask is None else scores + mask).softmax(-1)
            weights = F.dropout(weights, p, True)
            out = weights.matmul(v)
        else:
            out = F.scaled_dot_product_attention(q, k, v, mask)
        out = self.out_proj(out.transpose(1, 2).reshape(n, -1, self.embed_dim))
        if not need_weights:
            weights = None
        elif average_attn_weights:
            weights = weights.mean(1)  # type: ignore[union-attr]
        if alone:
            return out.squeeze(0), None if weights is None else weights.squeeze(0)
        return out if self.batch_first else out.transpose(0, 1), weights

    def _projected(self, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, ...]:
        """Queries, keys and values (N, L, E); from one input by one product."""
        e = self.embed_dim
        biases = (
            (None,) * 3
            if self.in_proj_bias is None
            else tuple(self.in_proj_bias[i * e : (i + 1) * e] for i in range(3))
        )
        if self.in_proj_weight is not None:
            if query is key and key is value:
                return tuple(F.linear(query, self.in_proj_weight, self.in_proj_bias).contiguous().chunk(3, -1))
            weights = tuple(self.in_proj_weight[i * e : (i + 1) * e] for i in range(3))
        else:
            weights = (self.q_proj_weight, self.k_proj_weight, self.v_proj_weight)  # type: ignore[assignment]
        return tuple(F.linear(x, w, b) for x, w, b in zip((query, key, value), weights, biases))

    def _mask(
        self, attn_mask: Tensor | None, padding: Tensor | None, shape: tuple[int, int, int], extra: int, like: Tensor
    ) -> Tensor | None:
        """Both masks as one to be added to the scores (N, heads, L, S + extra); the extra keys are never hidden."""
        n, target, source = shape
        out: Any = None
        if attn_mask is not None:
            if attn_mask.shape not in ((target, source), (n * self.num_heads, target, source)):
                raise ValueError(
                    f"MultiheadAttention: attn_mask has shape {attn_mask.shape}, needed is {(target, source)} or "
                    f"{(n * self.num_heads, target, source)}"
                )
            out = additive(attn_mask, like)
            out = out if out.ndim == 2 else out.reshape(n, self.num_heads, target, source)
        if padding is not None:
            if padding.shape != (n, source):
                raise ValueError(
                    f"MultiheadAttention: key_padding_mask has shape {padding.shape}, needed is {(n, source)}"
                )
            hidden = additive(padding, like).reshape(n, 1, 1, source)
            out = hidden if out is None else out + hidden
        return out.pad((0, extra)) if out is not None and extra else out


def additive(mask: Tensor, like: Tensor) -> Tensor:
    """A mask to be added to scores: −inf where a bool mask is True."""
    return mask._where(-math.inf, 0.0).cast(like.dtype) if mask.dtype.is_bool else mask
