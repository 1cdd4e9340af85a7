"""Cases of attention."""

from __future__ import annotations

from typing import Any

import numpy as np
from hypothesis import strategies as st

from tests.tensor.cases.case import Case, Draw, Sample, array


def softmax(x: np.ndarray) -> np.ndarray:
    top = np.maximum(x.max(-1, keepdims=True), -1e300)
    e = np.exp(x - top)
    return e / np.where(e.sum(-1, keepdims=True) == 0, 1, e.sum(-1, keepdims=True))


def attention(
    q: np.ndarray,
    k: np.ndarray,
    v: np.ndarray,
    mask: np.ndarray | None = None,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> np.ndarray:
    if enable_gqa:
        k, v = (np.repeat(t, q.shape[-3] // t.shape[-3], -3) for t in (k, v))
    s = q @ np.swapaxes(k, -1, -2) * (1 / np.sqrt(q.shape[-1]) if scale is None else scale)
    if is_causal:
        mask = np.tril(np.ones(s.shape[-2:], bool))
    if mask is not None:
        s = np.where(mask, s, -np.inf) if mask.dtype == bool else s + mask
    return softmax(s) @ v


def heads(draw: Draw) -> Sample:
    gqa = draw(st.booleans())
    own = draw(st.integers(1, 2))
    batch, h, e = draw(st.integers(1, 2)), own * (draw(st.integers(1, 2)) if gqa else 1), draw(st.integers(1, 4))
    lq, lk, ev = draw(st.integers(1, 4)), draw(st.integers(1, 4)), draw(st.integers(1, 3))
    arrays = [array(draw, s, low=-2, high=2) for s in ((batch, h, lq, e), (batch, own, lk, e), (batch, own, lk, ev))]
    kwargs: dict[str, Any] = {}
    if gqa:
        kwargs["enable_gqa"] = True
    if draw(st.booleans()):
        kwargs["scale"] = 0.3
    kind = draw(st.sampled_from(["none", "causal", "bools", "floats"]))
    if kind == "causal":
        kwargs["is_causal"] = True
    if kind == "bools":  # a row may see nothing
        arrays.append(array(draw, (lq, lk), "bool"))
    if kind == "floats":
        arrays.append(array(draw, (batch, 1, lq, lk)))
    return Sample(tuple(arrays), (), kwargs)


def multi_head(
    q: np.ndarray,
    k: np.ndarray,
    v: np.ndarray,
    w: np.ndarray,
    b: np.ndarray,
    wo: np.ndarray,
    bo: np.ndarray,
    heads: int,
    padding: np.ndarray,
) -> tuple[np.ndarray, np.ndarray]:
    width = q.shape[-1]
    parts = [t @ w[i * width : (i + 1) * width].T + b[i * width : (i + 1) * width] for i, t in enumerate((q, k, v))]
    split = [p.reshape(p.shape[0], p.shape[1], heads, -1).transpose(1, 2, 0, 3) for p in parts]
    s = split[0] @ split[1].swapaxes(-1, -2) / np.sqrt(width // heads)
    s = np.where(padding[:, None, None], -np.inf, s)
    weights = softmax(s)
    out = (weights @ split[2]).transpose(2, 0, 1, 3).reshape(q.shape)
    return out @ wo.T + bo, weights.mean(1)


def multi_heads(draw: Draw) -> Sample:
    heads, n, lq, lk = draw(st.integers(1, 2)), 2, draw(st.integers(1, 3)), draw(st.integers(1, 3))
    e = heads * draw(st.integers(1, 2))
    arrays = [
        array(draw, s, low=-1, high=1) for s in ((lq, n, e), (lk, n, e), (lk, n, e), (3 * e, e), (3 * e,), (e, e), (e,))
    ]
    padding = array(draw, (n, lk), "bool")
    padding[:, 0] = False
    return Sample((*arrays, padding), (heads,))


CASES = [
    Case("functional.scaled_dot_product_attention", attention, heads),
    Case("functional.multi_head_attention_forward",
         lambda q, k, v, w, b, wo, bo, padding, heads: multi_head(q, k, v, w, b, wo, bo, heads, padding), multi_heads,
         call=lambda lib, q, k, v, w, b, wo, bo, padding, heads: lib.functional.multi_head_attention_forward(
             q, k, v, q.shape[-1], heads, w, b, None, None, False, 0.0, wo, bo, key_padding_mask=padding)),
]  # fmt: skip
