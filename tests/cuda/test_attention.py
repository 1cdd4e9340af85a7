"""Attention of half types on CUDA, on a GPU where there is one: its products are matrix instructions, forward and
backward, each kernel runs once over the whole grid, and the values are those of float64."""

from __future__ import annotations

import math

import numpy as np
import pytest

from manygrad import Tensor, dtypes
from manygrad.nn import functional as F
from manygrad.tensor.dtype import DType
from manygrad.tensor.ops import flash
from tests.cuda.install import REAL, emulator
from tests.cuda.test_warp_matrix import made_ptx

RNG = np.random.default_rng(0)
Arrays = tuple[np.ndarray, ...]


def exact(q: np.ndarray, k: np.ndarray, v: np.ndarray, g: np.ndarray, mask: np.ndarray) -> Arrays:
    """What attention gives, and the gradients of q, k and v from `g`."""
    turned = lambda x: x.swapaxes(-1, -2)  # noqa: E731
    scale = 1 / math.sqrt(q.shape[-1])
    scores = q @ turned(k) * scale + mask
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    weights /= weights.sum(-1, keepdims=True)
    flowing = weights * (g @ turned(v) - (g @ turned(v) * weights).sum(-1, keepdims=True))
    return weights @ v, flowing @ k * scale, turned(flowing) @ q * scale, turned(weights) @ g


def arguments(dtype: DType, queries: int, keys: int, width: int) -> tuple[list[Tensor], Arrays]:
    shapes = [(2, queries, width), (2, keys, width), (2, keys, width), (2, queries, width)]
    made = [Tensor(RNG.standard_normal(s).astype(np.float32)).cast(dtype).realize() for s in shapes]
    there = [t.to("CUDA:0").realize().requires_grad_(i < 3) for i, t in enumerate(made)]
    return there, tuple(t.float().numpy().astype(np.float64) for t in made)


@pytest.mark.parametrize("dtype", [dtypes.bfloat16, dtypes.float16])
@pytest.mark.parametrize("kind", ["causal", "a mask", "short", "keys in parts"])
def test_every_product_is_a_matrix_instruction(kind: str, dtype: DType, monkeypatch: pytest.MonkeyPatch) -> None:
    queries, keys, width = {"a mask": (33, 47, 24), "short": (16, 40, 16), "keys in parts": (40, 70, 8)}.get(
        kind, (256, 256, 16)
    )
    if kind == "keys in parts":
        monkeypatch.setattr(flash, "PART", 32)
    (q, k, v, g), numbers = arguments(dtype, queries, keys, width)
    seen = RNG.random((queries, keys)) < 0.7
    seen[:, 0] = True
    mask = np.zeros((queries, keys))
    if kind == "causal":
        mask = np.where(np.tril(np.ones((queries, keys))) > 0, 0.0, -np.inf)
    elif kind == "a mask":
        mask = np.where(seen, 0.0, -np.inf)
    given = Tensor(seen, device="CUDA:0").realize() if kind == "a mask" else None
    found, before = made_ptx(monkeypatch), 0 if REAL else emulator().counts["kernels"]
    out = F.scaled_dot_product_attention(q, k, v, attn_mask=given, is_causal=kind == "causal")
    gradients = out.gradient(q, k, v, gradient=g)
    Tensor.realize(out, *gradients)
    started = 0 if REAL else emulator().counts["kernels"] - before
    for name, got, right in zip(("out", "q", "k", "v"), (out, *gradients), exact(*numbers, mask)):
        scale = (2.0**-7 if dtype is dtypes.bfloat16 else 2.0**-10) * np.abs(right).max()
        np.testing.assert_allclose(got.float().numpy(), right, atol=scale, rtol=0, err_msg=name)
    if kind != "keys in parts":
        products = sum("mma.sync" in text for text in found)
        assert not found or products >= (6 if kind == "short" else 7), [len(found), products]
        assert started < 20, "a kernel for each block of rows"
