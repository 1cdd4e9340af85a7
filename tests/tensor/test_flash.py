"""Attention whose gradient computes the weights again: values, memory, types, shards, gradients of gradients."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest

from manygrad import Tensor, TinyJit
from manygrad.schedule.facts.buffers import nbytes_of
from manygrad.schedule.kernels import chain_kernels
from manygrad.tensor.autograd import grad
from manygrad.tensor.environment import Context
from manygrad.tensor.ops import flash
from manygrad.tensor.uop import Ops, UOp
from manygrad.tensor.uop.shape import numel
from tests.schedule.programs import linear_of

RNG = np.random.default_rng(0)
# batch, heads of keys, queries' per key's, L, S, E, Ev
SHAPES = [(2, 2, 1, 64, 64, 8, 8), (1, 2, 2, 48, 80, 8, 4), (1, 1, 1, 200, 200, 16, 16)]
KINDS = ["none", "causal", "bools", "floats"]


def expected(
    q: np.ndarray, k: np.ndarray, v: np.ndarray, g: np.ndarray, mask: np.ndarray | None, scale: float
) -> list[np.ndarray]:
    """(out, dq, dk, dv, dmask), all heads in full."""
    s = q @ k.swapaxes(-1, -2) * scale
    if mask is not None:
        s = np.where(mask, s, -np.inf) if mask.dtype == bool else s + mask
    e = np.exp(s - np.maximum(s.max(-1, keepdims=True), -1e300))
    total = e.sum(-1, keepdims=True)
    p = e / np.where(total == 0, 1, total)
    out = p @ v
    ds = p * (g @ v.swapaxes(-1, -2) - (g * out).sum(-1, keepdims=True))
    return [out, ds @ k * scale, ds.swapaxes(-1, -2) @ q * scale, p.swapaxes(-1, -2) @ g, ds]


def sample(shape: tuple[int, ...], kind: str) -> tuple[list[np.ndarray], np.ndarray | None]:
    b, h, group, n, m, e, ev = shape
    arrays = [
        RNG.standard_normal(s) for s in ((b, h * group, n, e), (b, h, m, e), (b, h, m, ev), (b, h * group, n, ev))
    ]
    if kind == "bools":
        mask = RNG.random((n, m)) > 0.5
        mask[3] = False  # a query that sees nothing
        return arrays, mask
    if kind == "floats":
        mask = RNG.standard_normal((b, h * group, n, m))
        mask[:, :, 2] = -np.inf
        return arrays, mask
    return arrays, None


@pytest.fixture
def small_chains(monkeypatch: pytest.MonkeyPatch):  # type: ignore[no-untyped-def]
    """Chains for arrays as small as a test's, in several blocks."""
    for name, value in {"SAVED_BYTES": 0, "MIN_BLOCKS": 4, "MIN_ROWS": 1, "AGAIN": 1000}.items():
        monkeypatch.setattr(chain_kernels, name, value)
    with Context(SCACHE=0):
        yield


@pytest.mark.parametrize("device", ["CPU", "PYTHON"])
@pytest.mark.parametrize("dtype, rtol", [("float64", 1e-9), ("float32", 5e-4)])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_values_and_gradients(
    shape: tuple[int, ...], kind: str, dtype: str, rtol: float, device: str, small_chains: None
) -> None:
    found = check(shape, kind, *sample(shape, kind), dtype, rtol, device)
    assert any(c.src[0].op is Ops.CHAIN for c in found.src)


def check(
    shape: tuple[int, ...],
    kind: str,
    arrays: list[np.ndarray],
    mask: np.ndarray | None,
    dtype: str,
    rtol: float,
    device: str,
) -> UOp:
    """Values and gradients are right; gives their LINEAR."""
    group = shape[2]
    full = [np.repeat(x, group, 1) if i in (1, 2) else x for i, x in enumerate(arrays)]
    seen = np.tril(np.ones((shape[3], shape[4]), bool)) if kind == "causal" else mask
    out, dq, dk, dv, dmask = expected(*full, seen, 0.3)
    dk, dv = (x.reshape(shape[0], shape[1], group, *x.shape[2:]).sum(2) for x in (dk, dv))
    q, k, v, g = (Tensor(x.astype(dtype), device=device).realize() for x in arrays)
    m = None if mask is None else Tensor(mask if mask.dtype == bool else mask.astype(dtype), device=device).realize()
    inputs = [q, k, v, *([m] if kind == "floats" else [])]
    for t in inputs:
        assert t is not None
        t.requires_grad = True
    got = q.scaled_dot_product_attention(k, v, m, is_causal=kind == "causal", scale=0.3, enable_gqa=group > 1)
    found = [got, *grad(got, inputs, g)]  # type: ignore[arg-type]
    linear = linear_of(found)  # type: ignore[arg-type]
    got.realize(*found[1:])
    for x, want in zip(found, [out, dq, dk, dv, dmask]):
        assert x is not None
        np.testing.assert_allclose(x.numpy(), want, rtol=rtol, atol=rtol / 10)
    return linear


@pytest.mark.parametrize("kind", KINDS)
# (the last: fewer queries than keys are wide)
@pytest.mark.parametrize("shape", [SHAPES[1], SHAPES[2], (1, 1, 1, 5, 70, 8, 8)], ids=str)
def test_in_parts(shape: tuple[int, ...], kind: str, small_chains: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Keys, and queries, gone over 32 at a time; in the last row of the mask whole parts see nothing."""
    monkeypatch.setattr(flash, "PART", 32)
    arrays, mask = sample(shape, kind)
    if kind == "bools" and mask is not None:
        mask[-1, :60], mask[-1, 60:] = False, True
    check(shape, kind, arrays, mask, "float64", 1e-9, "CPU")


def step(q: Tensor, k: Tensor, v: Tensor, g: Tensor, **options: Any) -> list[Tensor]:
    out = q.scaled_dot_product_attention(k, v, **options)
    return [out, *grad(out, [q, k, v], g)]  # type: ignore[list-item]


def leaves(*shape: int, dtype: str = "float32") -> list[Tensor]:
    tensors = [Tensor(RNG.standard_normal(shape).astype(np.float32)).cast(dtype).realize() for _ in range(4)]
    for t in tensors[:3]:
        t.requires_grad = True
    return tensors


@pytest.mark.parametrize("is_causal", [False, True])
def test_no_array_of_queries_by_keys_is_in_memory(is_causal: bool) -> None:
    n, d = 2048, 16
    linear = linear_of(step(*leaves(1, 2, n, d), is_causal=is_causal))
    assert sum(c.src[0].op is Ops.CHAIN for c in linear.src) == 3  # forward, by queries, by keys
    assert all(numel(a.shape) < n * n // 8 for c in linear.src for a in c.src[1:])
    assert sum(p.nbytes for p in linear.arg.pools) < n * n * 4
    inside = [
        a
        for c in linear.src
        if c.src[0].op is Ops.CHAIN
        for i, a in enumerate(c.src[1:])
        if i in {t.argument for t in c.src[0].arg.temps}
    ]
    assert inside and max(map(nbytes_of, inside)) <= chain_kernels.BLOCK_BYTES


def test_replayed_the_same_bits_and_on_two_devices_the_same_numbers() -> None:
    """To the bit where a device holds whole heads or batches in tiles of one size, as on registers of 512 bits; with
    narrower ones half as many heads get another tile, and the keys are added up in another order."""
    arrays = [t.numpy() for t in leaves(2, 4, 256, 16)]

    def run(axis: int | None, jit: bool, sharded: bool) -> list[np.ndarray]:
        ts = [Tensor(a) for a in arrays]
        ts = [(t.shard(("CPU:0", "CPU:1"), axis).contiguous() if sharded else t).realize() for t in ts]
        for t in ts[:3]:
            t.requires_grad = True
        fn: Any = TinyJit(lambda *x: step(*x, is_causal=True)) if jit else lambda *x: step(*x, is_causal=True)
        for _ in range(3 if jit else 1):
            found = fn(*ts)
            # in one schedule, as the jit does: apart, forward alone is fused and tiled otherwise
            found[0].realize(*found[1:])
        return [t.numpy() for t in found]

    want = run(None, False, False)
    for axis, jit in itertools.product((0, 1, None), (False, True)):
        for a, b in zip(run(axis, jit, True), want):
            np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)
    for axis in (0, 1, None):
        for a, b in zip(run(axis, True, True), run(axis, False, True)):
            np.testing.assert_array_equal(a, b)


def test_gradients_of_gradients() -> None:
    q, k, v, g = leaves(1, 2, 24, 4, dtype="float64")
    keep = Tensor(np.tril(np.ones((24, 24), bool)))

    def second(out: Tensor) -> list[np.ndarray]:
        total = sum((x * x * x).sum() for x in grad(out, [q, k, v], g, create_graph=True))  # type: ignore[operator]
        return [x.numpy() for x in grad(total, [q, k, v])]  # type: ignore[union-attr, arg-type]

    plain = keep._where(q @ k.transpose(-1, -2) * 0.5, -np.inf).softmax(-1) @ v
    for a, b in zip(second(q.scaled_dot_product_attention(k, v, is_causal=True)), second(plain)):
        np.testing.assert_allclose(a, b, rtol=1e-8, atol=1e-10)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_halves_are_computed_in_float32(dtype: str) -> None:
    halves = leaves(1, 2, 96, 8, dtype=dtype)
    wide = [t.detach().cast("float32").realize() for t in halves]
    for t in wide[:3]:
        t.requires_grad = True
    for a, b in zip(step(*halves, is_causal=True), step(*wide, is_causal=True)):
        assert a.dtype.name == dtype and b.dtype.name == "float32"
        np.testing.assert_allclose(a.cast("float32").numpy(), b.numpy(), rtol=1e-2, atol=2e-2)


def test_backward_after_the_output_was_read() -> None:
    q, k, v, g = leaves(1, 1, 40, 8)
    want = [t.numpy() for t in step(q, k, v, g)]
    out = q.scaled_dot_product_attention(k, v)
    np.testing.assert_array_equal(out.numpy(), want[0])
    (out * g).sum().backward()
    for t, w in zip((q, k, v), want[1:]):
        assert t.grad is not None
        np.testing.assert_allclose(t.grad.numpy(), w, rtol=1e-5, atol=1e-6)
