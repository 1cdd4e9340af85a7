"""Attention of which only the outcome is kept: what softmax gives is computed again for the gradient.

After Dao, FlashAttention-2 (arXiv 2307.08691). Forward leaves out and, for each query, the logarithm of its weights' sum; backward makes the
weights from those, once by queries, for their gradient, and once by keys, for the gradients of keys and values. Each of the three is a few
contractions over rows that share one dim, which the scheduler runs a block of rows at a time (`schedule/chain.py`), so that no array
of queries x keys is ever in memory. Where that array is no larger than keys and values, as with short sequences, backward makes it
once, for all three. It is written in tensors: shards, types and gradients of gradients follow.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from manygrad.tensor.dtype import dtypes, promote
from manygrad.tensor.gradient import CustomGrad, Grads
from manygrad.tensor.recompute import later
from manygrad.tensor.uop import Ops, UOp

if TYPE_CHECKING:
    from manygrad.tensor.tensor import Tensor


def causal(q: Tensor, k: Tensor) -> Tensor:
    """(L, S), True where key j may be seen by query i: j ≤ i."""
    return q.arange(k.shape[-2]).unsqueeze(0) <= q.arange(q.shape[-2]).unsqueeze(1)


def attend(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, is_causal: bool, scale: float) -> Tensor:
    """softmax(q kᵀ · scale + mask) v of q (..., L, E), k (..., S, E), v (..., S, Ev), mask (..., L, S), all of the same leading dims."""
    kind = promote(promote(q.dtype, k.dtype), v.dtype)
    if mask is not None and not mask.dtype.is_bool:
        kind = promote(kind, mask.dtype)
    kind = kind if kind.is_float else dtypes.default_float
    wide = dtypes.float32 if kind.is_half else kind
    scores, seen = _scores(q.cast(wide), k.cast(wide), mask, is_causal, scale)
    top = (scores if seen is None else seen._where(scores, -math.inf)).amax(-1, keepdim=True).detach()
    if mask is not None:  # a query may see nothing
        top = (top > -math.inf)._where(top, 0.0)
    weights = _seen((scores - top), seen)
    total = weights.sum(-1, keepdim=True)
    if mask is not None:
        total = (total > 0)._where(total, 1.0)
    out = (weights.matmul(v.cast(wide)) / total).cast(kind)
    logsum = (top + total.log()).contiguous()
    inputs = [t.uop for t in (q, k, v, logsum, *(() if mask is None else (mask,)))]
    return out._new(UOp(Ops.CUSTOM, out.dtype, (out.uop, *inputs), _AttentionGrad(is_causal, scale)))


def _scores(q: Tensor, k: Tensor, mask: Tensor | None, is_causal: bool, scale: float) -> tuple[Tensor, Tensor | None]:
    """q kᵀ · scale (+ mask), and what of it is seen (None: all)."""
    scores = q.matmul(k.transpose(-1, -2)) * scale
    if is_causal:
        return scores, causal(q, k)._broadcast(scores.shape)
    if mask is None or mask.dtype.is_bool:
        return scores, mask
    return scores + mask, None


def _seen(exponents: Tensor, seen: Tensor | None) -> Tensor:
    """exp, and 0 where nothing is seen (whatever its exponent)."""
    return exponents.exp() if seen is None else seen._where(seen._where(exponents, 0.0).exp(), 0.0)


class _AttentionGrad(CustomGrad):
    """Sources of its node: (out, q, k, v, logarithms of sums (..., L, 1)[, mask])."""

    def __init__(self, is_causal: bool, scale: float):
        super().__init__("attention", (is_causal, scale), lambda *_: ())
        self.is_causal, self.scale = is_causal, scale

    def gradients(self, g: Tensor, u: UOp) -> Grads:
        logsum = g._new(u.src[4])
        wide = logsum.dtype
        sources = [g._new(later(s, g.uop)) for s in (*u.src[1:4], *u.src[5:])]
        q, k, v = (t.cast(wide) for t in sources[:3])
        mask = sources[3] if len(sources) > 3 else None
        start = g.cast(wide)
        delta = (start * g._new(u).cast(wide)).sum(-1, keepdim=True).contiguous()

        scores, seen = _scores(q, k, mask, self.is_causal, self.scale)
        weights = _seen(scores - logsum, seen).contiguous()
        by_query = weights * (start.matmul(_t(v)) - delta)  # d scores; one contraction a kernel
        dq = by_query.matmul(k) * self.scale
        dk, dv = self.short(q, start, weights, by_query) if _is_short(q, v) else self.by_keys(q, k, v, mask, seen, start, delta, logsum)

        found: list[Any] = [x.cast(s.dtype) for x, s in zip((dq, dk, dv), u.src[1:])]
        dmask = () if mask is None else (by_query.cast(mask.dtype) if mask.dtype.is_float else None,)
        return (None, *found, None, *dmask)

    def short(self, q: Tensor, start: Tensor, weights: Tensor, by_query: Tensor) -> tuple[Tensor, Tensor]:
        """Gradients of keys and values, from what the one of the queries has made."""
        return _t(by_query).matmul(q) * self.scale, _t(weights).matmul(start)

    def by_keys(
        self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, seen: Tensor | None, start: Tensor, delta: Tensor, logsum: Tensor
    ) -> tuple[Tensor, Tensor]:
        """The same, with the weights computed once more, a row for each key."""
        turned = (k.matmul(_t(q)) * self.scale) if mask is None or mask.dtype.is_bool else k.matmul(_t(q)) * self.scale + _t(mask)
        weights = _seen(turned - _t(logsum), None if seen is None else _t(seen))
        dv = weights.matmul(start)
        return (weights * (v.matmul(_t(start)) - _t(delta))).matmul(q) * self.scale, dv


def _is_short(q: Tensor, v: Tensor) -> bool:
    """Whether queries x keys are no more than keys and values."""
    queries, width = q.shape[-2], (q.shape[-1], v.shape[-1])
    return isinstance(queries, int) and all(isinstance(n, int) for n in width) and queries <= sum(width)


def _t(x: Tensor) -> Tensor:
    return x.transpose(-1, -2)
