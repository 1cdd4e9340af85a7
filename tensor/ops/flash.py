"""Attention of which only the outcome is kept: what softmax gives is computed again for the gradient.

After Dao, FlashAttention-2 (arXiv 2307.08691). Forward leaves out and, for each query, the logarithm of its weights'
sum; backward makes the weights from those, once by queries, for their gradient, and once by keys, for the gradients of
keys and values. Each of the three is a few contractions over rows that share one dim, which the scheduler runs a block
of rows at a time (`schedule/kernels/chain_kernels.py`), so that no array of queries x keys is ever in memory. Many keys
(queries) are gone over in parts, whose outcomes are joined by their largest scores. Where that array is no larger than
keys and values, as with short sequences, backward makes it once, for all three. It is written in tensors: shards,
types and gradients of gradients follow.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from manygrad.tensor.dtype import DType, dtypes, promote
from manygrad.tensor.gradient import CustomGrad, Grads
from manygrad.tensor.recompute import later
from manygrad.tensor.uop import Ops, UOp

if TYPE_CHECKING:
    from manygrad.tensor.tensor import Tensor


WHOLE = slice(None)
# keys, or queries, of one chain: with more, fewer rows fit beside them, and the keys are packed again for each few rows
PART = 1024


def causal(q: Tensor, k: Tensor, queries: slice = WHOLE, keys: slice = WHOLE) -> Tensor:
    """(L, S), True where key j may be seen by query i: j ≤ i; of parts of them."""
    j, i = (
        x.arange(x.shape[-2]) + of.start if of.start else x.arange(x.shape[-2]) for x, of in ((k, keys), (q, queries))
    )
    return j.unsqueeze(0) <= i.unsqueeze(1)


def parts(n: Any) -> list[slice]:
    """A long dim in parts; one where its size is not known."""
    return [slice(i, min(n, i + PART)) for i in range(0, n, PART)] if isinstance(n, int) and n > PART else [WHOLE]


def attend(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, is_causal: bool, scale: float) -> Tensor:
    """softmax(q kᵀ · scale + mask) v of q (..., L, E), k (..., S, E), v (..., S, Ev), mask (..., L, S),
    all of the same leading dims."""
    kind = promote(promote(q.dtype, k.dtype), v.dtype)
    if mask is not None and not mask.dtype.is_bool:
        kind = promote(kind, mask.dtype)
    kind = kind if kind.is_float else dtypes.default_float
    wide = dtypes.float32 if kind.is_half else kind
    wq, wk, wv = (t.cast(wide) for t in (q, k, v))
    found = [_partial(wq, wk, wv, mask, is_causal, scale, kind, of) for of in parts(k.shape[-2])]
    top, total, out = functools.reduce(_join, found)
    if mask is not None:  # a query may see nothing
        top, total = _finite(top), (total > 0)._where(total, 1.0)
    out = (out / total).cast(kind)
    logsum = (top + total.log()).contiguous()
    inputs = [t.uop for t in (q, k, v, logsum, *(() if mask is None else (mask,)))]
    return out._new(UOp(Ops.CUSTOM, out.dtype, (out.uop, *inputs), _AttentionGrad(is_causal, scale)))


# of each query: the largest score, the sum of exp(score − that), the same sum of values
Partial = tuple["Tensor", "Tensor", "Tensor"]


def _partial(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, is_causal: bool, scale: float, kind: DType, keys: slice
) -> Partial:
    scores, seen = _scores(q, k, mask, is_causal, scale, keys)
    top = (scores if seen is None else seen._where(scores, -math.inf)).amax(-1, keepdim=True).detach()
    weights = _seen(scores - (top if mask is None else _finite(top)), seen)
    return top, weights.sum(-1, keepdim=True), _rounded(weights, kind).matmul(v[..., keys, :])


def _rounded(x: Tensor, kind: DType) -> Tensor:
    """A factor of a product as the type of the inputs has it, as in PyTorch: that is what matrix instructions multiply.
    A CPU multiplies float16 as float32."""
    devices = x.device if isinstance(x.device, tuple) else (x.device,)
    is_taken = kind is dtypes.bfloat16 or (kind is dtypes.float16 and all(d.startswith("CUDA") for d in devices))
    return x.cast(kind).cast(x.dtype) if is_taken else x


def _join(a: Partial, b: Partial) -> Partial:
    """Partial result over the keys of both."""
    (top_a, total_a, out_a), (top_b, total_b, out_b) = (tuple(x.contiguous() for x in y) for y in (a, b))
    top = top_a.maximum(top_b)
    of_a, of_b = ((t - _finite(top)).exp() for t in (top_a, top_b))
    return top, total_a * of_a + total_b * of_b, out_a * of_a + out_b * of_b


def _finite(top: Tensor) -> Tensor:
    """The largest score, 0 where a query sees nothing."""
    return (top > -math.inf)._where(top, 0.0)


def _scores(
    q: Tensor, k: Tensor, mask: Tensor | None, is_causal: bool, scale: float, keys: slice
) -> tuple[Tensor, Tensor | None]:
    """q kᵀ · scale (+ mask) of some keys, and what of it is seen (None: all)."""
    k, mask = k[..., keys, :], None if mask is None else mask[..., keys]
    scores = q.matmul(_t(k)) * scale
    if is_causal:
        return scores, causal(q, k, keys=keys)._broadcast(scores.shape)
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

        these, keys = (q, k, v, mask, start, delta, logsum, g.dtype), parts(k.shape[-2])
        weights, by_query = zip(*(self.by_queries(*these, of) for of in keys))
        factors = [_rounded(d, g.dtype) for d in by_query]
        dq = _sum([d.matmul(k[..., of, :]) for d, of in zip(factors, keys)]) * self.scale
        if _is_short(q, v):
            dk = _side_by_side([_t(d).matmul(q) for d in factors], -2) * self.scale
            dv = _side_by_side([_t(w).matmul(start) for w in weights], -2)
        else:
            dk, dv = (_sum(list(x)) for x in zip(*(self.by_keys(*these, of) for of in parts(q.shape[-2]))))

        found: list[Any] = [x.cast(s.dtype) for x, s in zip((dq, dk, dv), u.src[1:])]
        dmask = () if mask is None else (_side_by_side(by_query, -1).cast(mask.dtype) if mask.dtype.is_float else None,)
        return (None, *found, None, *dmask)

    def by_queries(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        mask: Tensor | None,
        start: Tensor,
        delta: Tensor,
        logsum: Tensor,
        kind: DType,
        keys: slice,
    ) -> tuple[Tensor, Tensor]:
        """The weights of some keys, and the gradient of their scores."""
        scores, seen = _scores(q, k, mask, self.is_causal, self.scale, keys)
        weights = _seen(scores - logsum, seen).contiguous()
        flowing = weights * (start.matmul(_t(v[..., keys, :])) - delta)  # one contraction a kernel
        return _rounded(weights, kind), flowing

    def by_keys(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        mask: Tensor | None,
        start: Tensor,
        delta: Tensor,
        logsum: Tensor,
        kind: DType,
        queries: slice,
    ) -> tuple[Tensor, Tensor]:
        """Gradients of keys and values from some queries, the weights computed once more, a row for each key."""
        q, start, delta, logsum = (x[..., queries, :] for x in (q, start, delta, logsum))
        scores, seen = k.matmul(_t(q)) * self.scale, None
        if self.is_causal:
            seen = _t(causal(q, k, queries=queries))
        elif mask is not None:
            turned = _t(mask[..., queries, :])
            scores, seen = (scores, turned) if mask.dtype.is_bool else (scores + turned, None)
        weights = _seen(scores - _t(logsum), seen)
        flowing = weights * (v.matmul(_t(start)) - _t(delta))
        return _rounded(flowing, kind).matmul(q) * self.scale, _rounded(weights, kind).matmul(start)


def _sum(found: list[Tensor]) -> Tensor:
    """One after the other, so that no more than two are stored at a time."""
    return functools.reduce(lambda a, b: a.contiguous() + b, found)


def _side_by_side(found: Sequence[Tensor], dim: int) -> Tensor:
    return found[0] if len(found) == 1 else found[0].cat(*found[1:], dim=dim)


def _is_short(q: Tensor, v: Tensor) -> bool:
    """Whether queries x keys are no more than keys and values."""
    queries, width = q.shape[-2], (q.shape[-1], v.shape[-1])
    return isinstance(queries, int) and all(isinstance(n, int) for n in width) and queries <= sum(width)


def _t(x: Tensor) -> Tensor:
    return x.transpose(-1, -2)
