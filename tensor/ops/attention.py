"""Attention."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from manygrad.tensor.ops.broadcast import broadcast_shape
from manygrad.tensor.ops.dropout import dropout
from manygrad.tensor.ops.flash import attend, causal

if TYPE_CHECKING:
    from manygrad.tensor.tensor import Tensor


def scaled_dot_product_attention(query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = None,
                                 dropout_p: float = 0.0, is_causal: bool = False, scale: float | None = None,
                                 enable_gqa: bool = False) -> Tensor:  # fmt: skip
    """softmax(q kᵀ · scale + mask) v: query (..., L, E), key (..., S, E), value (..., S, Ev) -> (..., L, Ev).

    `scale` is 1/√E unless given. `attn_mask` is added, or, of bools, True where a key may be seen; a row that may see
    none gives zeros. `is_causal`: key j for query i only where j ≤ i.
    `enable_gqa`: query (..., H, L, E) has a multiple of the heads of key and value.
    """
    if query.shape[-1] != key.shape[-1] or key.shape[-2] != value.shape[-2]:
        raise ValueError(
            f"scaled_dot_product_attention: query {query.shape}, key {key.shape} and value {value.shape} do not fit; "
            "expected (..., L, E), (..., S, E), (..., S, Ev)"
        )
    if is_causal and attn_mask is not None:
        raise ValueError("scaled_dot_product_attention: give attn_mask or is_causal, not both")
    if enable_gqa:
        heads, own = query.shape[-3], key.shape[-3]
        if heads % own or value.shape[-3] != own:
            raise ValueError(
                f"scaled_dot_product_attention: {heads} query heads are not a multiple of {own} key and "
                f"{value.shape[-3]} value heads"
            )
        out = scaled_dot_product_attention(
            query.unflatten(-3, (own, heads // own)),
            key.unsqueeze(-3),
            value.unsqueeze(-3),
            None if attn_mask is None else _grouped(attn_mask, own),
            dropout_p,
            is_causal,
            scale,
        )
        return out.flatten(-4, -3)
    factor = 1.0 / math.sqrt(query.shape[-1]) if scale is None else scale
    lead = broadcast_shape(query.shape[:-2], key.shape[:-2], value.shape[:-2])
    q, k, v = (t._broadcast((*lead, *t.shape[-2:])) for t in (query, key, value))
    if dropout_p > 0:
        return _plainly(q, k, v, attn_mask, dropout_p, is_causal, factor)
    mask = None if attn_mask is None else attn_mask._broadcast((*lead, q.shape[-2], k.shape[-2]))
    return attend(q, k, v, mask, is_causal, factor)


def _plainly(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, dropout_p: float, is_causal: bool, scale: float
) -> Tensor:
    """With all weights in memory, and the gradient that follows from how they are computed."""
    scores = q.matmul(k.transpose(-1, -2)) * scale
    if is_causal:
        mask = causal(q, k)
    if mask is not None:
        scores = mask._where(scores, -math.inf) if mask.dtype.is_bool else scores + mask
    weights = scores.softmax(-1)
    if mask is not None and not is_causal:
        weights = (scores.amax(-1, keepdim=True).detach() > -math.inf)._where(weights, 0.0).cast(weights.dtype)
    return dropout(weights, dropout_p, True).matmul(v)


def _grouped(mask: Tensor, own: int) -> Tensor:
    """A mask (..., H or 1, L, S) for heads in groups."""
    if mask.ndim < 3:
        return mask
    return mask.unsqueeze(-3) if mask.shape[-3] == 1 else mask.unflatten(-3, (own, mask.shape[-3] // own))


def multi_head_attention_forward(
    query: Tensor, key: Tensor, value: Tensor, embed_dim_to_check: int, num_heads: int, in_proj_weight: Tensor | None,
    in_proj_bias: Tensor | None, bias_k: Tensor | None, bias_v: Tensor | None, add_zero_attn: bool, dropout_p: float,
    out_proj_weight: Tensor, out_proj_bias: Tensor | None, training: bool = True,
    key_padding_mask: Tensor | None = None, need_weights: bool = True, attn_mask: Tensor | None = None,
    use_separate_proj_weight: bool = False, q_proj_weight: Tensor | None = None, k_proj_weight: Tensor | None = None,
    v_proj_weight: Tensor | None = None, static_k: Tensor | None = None, static_v: Tensor | None = None,
    average_attn_weights: bool = True, is_causal: bool = False,
) -> tuple[Tensor, Any]:  # fmt: skip
    """Multi-head attention over (L, N, E) or (L, E) (torch.nn.functional.multi_head_attention_forward):
    (output, weights or None)."""
    if query.ndim == 2:
        mask = None if key_padding_mask is None else key_padding_mask.unsqueeze(0)
        out, weights = multi_head_attention_forward(
            query.unsqueeze(1), key.unsqueeze(1), value.unsqueeze(1), embed_dim_to_check, num_heads, in_proj_weight,
            in_proj_bias, bias_k, bias_v, add_zero_attn,
            dropout_p, out_proj_weight, out_proj_bias, training, mask, need_weights, attn_mask,
            use_separate_proj_weight, q_proj_weight, k_proj_weight,
            v_proj_weight, static_k, static_v, average_attn_weights, is_causal)  # fmt: skip
        return out.squeeze(1), None if weights is None else weights.squeeze(0)
    length, batch, width = query.shape
    if width != embed_dim_to_check or width % num_heads:
        raise ValueError(
            f"multi_head_attention_forward: {width} features, expected {embed_dim_to_check}, "
            f"a multiple of {num_heads} heads"
        )
    if use_separate_proj_weight:
        assert q_proj_weight is not None and k_proj_weight is not None and v_proj_weight is not None
        projections = [q_proj_weight, k_proj_weight, v_proj_weight]
    else:
        assert in_proj_weight is not None
        projections = list(in_proj_weight.chunk(3))
    biases = [None] * 3 if in_proj_bias is None else list(in_proj_bias.chunk(3))
    q, k, v = (t.linear(w, b) for t, w, b in zip((query, key, value), projections, biases))
    if bias_k is not None and bias_v is not None:
        k, v = k.cat(bias_k.expand(1, batch, width)), v.cat(bias_v.expand(1, batch, width))
    head = width // num_heads
    q, k, v = (t.reshape(t.shape[0], batch, num_heads, head).permute(1, 2, 0, 3) for t in (q, k, v))  # (N, H, L, E/H)
    k = k if static_k is None else static_k.reshape(batch, num_heads, -1, head)
    v = v if static_v is None else static_v.reshape(batch, num_heads, -1, head)
    if add_zero_attn:
        zeros = k.new_zeros((batch, num_heads, 1, head))
        k, v = k.cat(zeros, dim=2), v.cat(zeros, dim=2)
    extra = k.shape[2] - key.shape[0] if static_k is None else 0
    bias: Tensor | None = None
    for mask, shape in ((attn_mask, None), (key_padding_mask, (batch, 1, 1, -1))):
        if mask is None:
            continue
        added = mask._where(-math.inf, 0.0) if mask.dtype.is_bool else mask
        added = added.pad((0, extra)) if extra else added
        if shape is None:
            added = added.reshape((batch, num_heads, *added.shape[-2:])) if added.ndim == 3 else added
        else:
            added = added.reshape((batch, 1, 1, added.shape[-1]))
        bias = added if bias is None else bias + added
    p = dropout_p if training else 0.0
    if not need_weights:
        out = scaled_dot_product_attention(q, k, v, bias, p, is_causal and bias is None)
        weights = None
    else:
        scores = q.matmul(k.transpose(-1, -2)) * (1.0 / math.sqrt(head))
        weights = (scores if bias is None else scores + bias).softmax(-1)
        out = (dropout(weights, p, True) if p > 0 else weights).matmul(v)
        weights = weights.mean(1) if average_attn_weights else weights
    out = out.permute(2, 0, 1, 3).reshape(length, batch, width).linear(out_proj_weight, out_proj_bias)
    return out, weights


class AttentionMixin:
    scaled_dot_product_attention = scaled_dot_product_attention
