"""Multi-head attention and transformer layers against NumPy."""

from __future__ import annotations

import numpy as np
import pytest

from manygrad import Tensor, nn
from tests.tensor.oracle import numbers

RNG = np.random.default_rng(0)


def softmax(x: np.ndarray) -> np.ndarray:
    e = np.exp(x - x.max(-1, keepdims=True))
    return e / e.sum(-1, keepdims=True)


def numpy_attention(
    w: dict[str, np.ndarray], q: np.ndarray, k: np.ndarray, v: np.ndarray, heads: int, mask: np.ndarray | float = 0.0
) -> tuple[np.ndarray, np.ndarray]:
    """(N, L, E); mask is added to the scores (N, heads, L, S)."""
    e = q.shape[-1]
    q, k, v = (
        x @ w["in_proj_weight"][i * e : (i + 1) * e].T + w["in_proj_bias"][i * e : (i + 1) * e]
        for i, x in enumerate((q, k, v))
    )
    q, k, v = (x.reshape(len(x), x.shape[1], heads, e // heads).swapaxes(1, 2) for x in (q, k, v))
    weights = softmax(q @ k.swapaxes(-1, -2) / np.sqrt(e // heads) + mask)
    out = (weights @ v).swapaxes(1, 2).reshape(len(q), -1, e)
    return out @ w["out_proj.weight"].T + w["out_proj.bias"], weights


def made() -> tuple[nn.MultiheadAttention, dict[str, np.ndarray]]:
    layer = nn.MultiheadAttention(8, 2, batch_first=True).double()
    for p in layer.parameters():
        nn.init.normal_(p, 0, 0.5)
    return layer, {k: t.numpy() for k, t in layer.state_dict().items()}


def test_attention() -> None:
    layer, w = made()
    q, kv = numbers(RNG, "float64", (2, 3, 8)), numbers(RNG, "float64", (2, 5, 8))
    out, weights = layer(Tensor(q), Tensor(kv), Tensor(kv), average_attn_weights=False)
    want, want_weights = numpy_attention(w, q, kv, kv, 2)
    np.testing.assert_allclose(out.numpy(), want, rtol=1e-9)
    np.testing.assert_allclose(weights.numpy(), want_weights, rtol=1e-9)
    np.testing.assert_allclose(layer(Tensor(q), Tensor(kv), Tensor(kv))[1].numpy(), want_weights.mean(1), rtol=1e-9)
    t = Tensor(q)
    np.testing.assert_allclose(
        layer(t, t, t, need_weights=False)[0].numpy(), numpy_attention(w, q, q, q, 2)[0], rtol=1e-9
    )
    layer.batch_first = False
    np.testing.assert_allclose(
        layer(t.transpose(0, 1), t.transpose(0, 1), t.transpose(0, 1))[0].numpy(),
        numpy_attention(w, q, q, q, 2)[0].swapaxes(0, 1),
        rtol=1e-9,
    )
    one = Tensor(q[0])
    np.testing.assert_allclose(layer(one, one, one)[0].numpy(), numpy_attention(w, q, q, q, 2)[0][0], rtol=1e-9)


@pytest.mark.parametrize("need_weights", [False, True])
def test_masks(need_weights: bool) -> None:
    layer, w = made()
    q = numbers(RNG, "float64", (2, 4, 8))
    later, padding = np.triu(np.ones((4, 4), bool), 1), np.array([[0, 0, 0, 1], [0, 0, 0, 0]], bool)
    added = np.where(later, -np.inf, 0)[None, None] + np.where(padding, -np.inf, 0)[:, None, None]
    t = Tensor(q)
    got = layer(t, t, t, key_padding_mask=Tensor(padding), need_weights=need_weights, attn_mask=Tensor(later))[0]
    np.testing.assert_allclose(got.numpy(), numpy_attention(w, q, q, q, 2, added)[0], rtol=1e-9)
    each = numbers(RNG, "float64", (4, 4, 4))
    got = layer(t, t, t, need_weights=need_weights, attn_mask=Tensor(each))[0]
    np.testing.assert_allclose(got.numpy(), numpy_attention(w, q, q, q, 2, each.reshape(2, 2, 4, 4))[0], rtol=1e-9)


def test_sharded_over_the_batch_gives_the_same_values_and_gradients() -> None:
    x, y = numbers(RNG, "float32", (3, 4, 8)), numbers(RNG, "float32", (3, 5, 8))
    layer = nn.Transformer(8, 2, 1, 1, 16, dropout=0.0, batch_first=True)
    mask = nn.Transformer.generate_square_subsequent_mask(5)
    out = layer(Tensor(x), Tensor(y), tgt_mask=mask)
    out.square().sum().backward()
    out.realize(*(p.grad for p in layer.parameters()))  # type: ignore[arg-type]
    want, grads = out.numpy(), {k: p.grad.numpy() for k, p in layer.named_parameters()}  # type: ignore[union-attr]
    layer.zero_grad()
    names = ("CPU:0", "CPU:1")
    layer.to(names)
    out = layer(Tensor(x).shard(names, 0), Tensor(y).shard(names, 0), tgt_mask=mask.to(names))
    out.square().sum().backward()
    out.realize(*(p.grad for p in layer.parameters()))  # type: ignore[arg-type]
    np.testing.assert_allclose(out.numpy(), want, rtol=1e-4, atol=1e-5)
    for k, p in layer.named_parameters():
        np.testing.assert_allclose(p.grad.numpy(), grads[k], rtol=1e-3, atol=1e-4, err_msg=k)  # type: ignore[union-attr]


@pytest.mark.parametrize("norm_first", [False, True])
def test_encoder_layer(norm_first: bool) -> None:
    layer = nn.TransformerEncoderLayer(8, 2, 16, 0.0, norm_first=norm_first, batch_first=True).double()
    w = {k: t.numpy() for k, t in layer.state_dict().items()}
    x = numbers(RNG, "float64", (2, 3, 8))
    norm = lambda a: (a - a.mean(-1, keepdims=True)) / np.sqrt(a.var(-1, keepdims=True) + 1e-5)  # noqa: E731
    own = {k.removeprefix("self_attn."): v for k, v in w.items()}
    attend = lambda a: numpy_attention(own, a, a, a, 2)[0]  # noqa: E731
    feed = lambda a: (  # noqa: E731
        np.maximum(a @ w["linear1.weight"].T + w["linear1.bias"], 0) @ w["linear2.weight"].T + w["linear2.bias"]
    )
    if norm_first:
        h = x + attend(norm(x))
        want = h + feed(norm(h))
    else:
        h = norm(x + attend(x))
        want = norm(h + feed(h))
    np.testing.assert_allclose(layer(Tensor(x)).numpy(), want, rtol=1e-8, atol=1e-10)


def test_copies_of_a_layer_are_separate() -> None:
    stack = nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2, 16), 2, nn.LayerNorm(8))
    a, b = stack.layers[0].linear1.weight, stack.layers[1].linear1.weight
    assert a is not b and isinstance(a, nn.Parameter)
    stack.eval()(Tensor.ones(3, 1, 8)).square().sum().backward()
    assert all(p.grad is not None for p in stack.parameters()) and len(list(stack.parameters())) == 26


def test_errors() -> None:
    with pytest.raises(ValueError, match="embed_dim 7 must be a multiple of num_heads 2"):
        nn.MultiheadAttention(7, 2)
    layer, x = nn.MultiheadAttention(8, 2), Tensor.zeros(3, 2, 8)
    with pytest.raises(ValueError, match=r"attn_mask has shape \(3, 4\), needed is \(3, 3\) or \(4, 3, 3\)"):
        layer(x, x, x, attn_mask=Tensor.zeros(3, 4))
    with pytest.raises(ValueError, match=r"key_padding_mask has shape \(3, 2\), needed is \(2, 3\)"):
        layer(x, x, x, key_padding_mask=Tensor.zeros(3, 2))
    with pytest.raises(ValueError, match="the last dims of query, key, value are 8, 8, 8"):
        layer(x, x, Tensor.zeros(3, 2, 4))
