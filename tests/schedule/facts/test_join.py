"""Sums of values that zeros are padded to: the gradients of parts of a value, written side by side."""

from __future__ import annotations

import numpy as np
import pytest

from manygrad import Context, Tensor
from manygrad.schedule.kernels import chain_kernels
from manygrad.tensor.uop import Ops
from tests.schedule.programs import kernels_of, linear_of, stored

RNG = np.random.default_rng(0)


def padded_products(order: tuple[int, ...] = (0, 1, 2), widths: tuple[int, ...] = (3, 5, 4)) -> Tensor:
    """(6, 12): products of different widths, each padded to its place, added in some order."""
    starts = [sum(widths[:i]) for i in range(len(widths))]
    parts = [
        (stored(6, 2) @ stored(2, n) * (i + 1)).pad(((0, 0), (starts[i], sum(widths) - starts[i] - n)))
        for i, n in enumerate(widths)
    ]
    total = parts[order[0]]
    for i in order[1:]:
        total = total + parts[i]
    return total


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 0, 1), (1, 2, 0)])
def test_each_part_is_written_where_it_belongs(order: tuple[int, ...]) -> None:
    kernels = kernels_of(padded_products(order))
    assert len(kernels) == 3  # and none that adds them
    assert not any(u.op is Ops.WHERE for k in kernels for u in k.toposort())
    np.testing.assert_array_equal(
        padded_products(order).numpy(), np.repeat([2.0, 4.0, 6.0], [3, 5, 4])[None].repeat(6, 0).astype(np.float32)
    )


def test_parts_that_overlap_leave_a_gap_or_are_no_reductions_are_added() -> None:
    a, b = stored(6, 2) @ stored(2, 3), stored(6, 2) @ stored(2, 3)
    for left, right, width in ((0, 2, 5), (0, 4, 7), (0, 3, 7)):
        value = a.pad(((0, 0), (left, width - 3 - left))) + b.pad(((0, 0), (right, width - 3 - right)))
        assert len({call.src[1] for call in linear_of(value).src}) > 1  # not all into one buffer
        want = np.zeros((6, width))
        want[:, left : left + 3] += 2
        want[:, right : right + 3] += 2
        np.testing.assert_array_equal(value.numpy(), want.astype(np.float32))
    x, y = stored(6, 3), stored(6, 3)
    assert len(kernels_of((x * 2).pad(((0, 0), (0, 3))) + (y * 3).pad(((0, 0), (3, 0))))) == 1
    assert len(kernels_of((x @ stored(3, 3)).pad(((0, 0), (0, 3))) + (y * 3).pad(((0, 0), (3, 0))))) == 2


def test_a_reduction_keeps_its_own_loops_where_its_part_is_turned() -> None:
    """The gradients of a layer's heads: (batch, heads, tokens, width) into (batch, tokens, 3 * heads * width)."""
    b, h, t, d = 2, 3, 4, 5
    x = Tensor(RNG.standard_normal((b, t, 3 * h * d)).astype(np.float32)).realize().requires_grad_()
    w = Tensor(RNG.standard_normal((t, t)).astype(np.float32)).realize()
    q, k, v = (y.reshape(b, t, h, d).transpose(1, 2) for y in x.chunk(3, dim=-1))
    ((w @ q).square() + (w.T @ k).square() * 3 + (w @ v).square() * 5).sum().backward()
    assert x.grad is not None
    kernels = kernels_of(x.grad)  # three products, and one for the gradient of each
    loops = [tuple(r.src[0].arg for r in k.src[0].src[2:]) for k in kernels]
    assert len(loops) == 6 and set(loops) == {(b, h, t, d), (b, h, d, t)}
    a, parts = w.numpy().astype(np.float64), np.split(x.numpy().astype(np.float64), 3, axis=-1)
    both = [2 * a.T @ a, 6 * a @ a.T, 10 * a.T @ a]
    want = np.concatenate([np.einsum("st,btc->bsc", m, part) for m, part in zip(both, parts)], axis=-1)
    np.testing.assert_allclose(x.grad.numpy(), want, rtol=1e-4, atol=1e-5)


def test_a_chain_writes_all_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Attention's gradients of queries, keys and values, which one product made,
    are written side by side by one chain."""
    b, h, t, d = 8, 4, 64, 32

    def gradient(x: np.ndarray) -> Tensor:
        both = Tensor(x).realize().requires_grad_()
        q, k, v = (y.reshape(b, t, h, d).transpose(1, 2) for y in both.chunk(3, dim=-1))
        q.scaled_dot_product_attention(k, v, is_causal=True).square().sum().backward()
        assert both.grad is not None
        return both.grad

    x = RNG.standard_normal((b, t, 3 * h * d)).astype(np.float32)
    monkeypatch.setattr(chain_kernels, "MIN_BLOCKS", 8)
    found = []
    for least, lengths in ((1 << 14, {5}), (1 << 40, set())):
        monkeypatch.setattr(chain_kernels, "SAVED_BYTES", least)
        with Context(SCACHE=0):
            assert {
                len(call.src[0].src) for call in linear_of(gradient(x)).src if call.src[0].op is Ops.CHAIN
            } >= lengths
            assert bool(lengths) == any(call.src[0].op is Ops.CHAIN for call in linear_of(gradient(x)).src)
            found.append(gradient(x).numpy())
    np.testing.assert_array_equal(*found)
