"""Stacks of decoder layers, masks in them, and their gradients."""

from __future__ import annotations

import numpy as np

from manygrad import Context, Tensor, nn
from tests.nn.layers.layer import data
from tests.nn.layers.linear import DECODER, decoder


def test_decoder_is_its_layers_one_after_another() -> None:
    x, memory = data(3, 2, 4, low=-1, high=1), data(3, 3, 4, low=-1, high=1)
    with Context(DEVICE="PYTHON"):
        stack = nn.TransformerDecoder(nn.TransformerDecoderLayer(4, 2, 3, 0.0), 2, nn.LayerNorm(4)).double()
        assert list(stack.state_dict()) == [f"layers.{i}.{k}" for i in range(2) for k in DECODER] + [
            "norm.weight",
            "norm.bias",
        ] and repr(stack).startswith("TransformerDecoder(")
        for p in stack.layers[1].parameters():
            nn.init.normal_(p, 0, 0.5)
        w = {k: t.numpy() for k, t in stack.state_dict().items()}
        out = stack(Tensor(x.swapaxes(0, 1)), Tensor(memory.swapaxes(0, 1)))  # (T, N, E), the default
        out.square().sum().backward()
        assert all(p.grad is not None for p in stack.parameters())
        out.realize(*(p.grad for p in stack.parameters()))  # type: ignore[arg-type]
        want = decoder(w, decoder(w, x, memory, False, "layers.0."), memory, False, "layers.1.")
        want = (want - want.mean(-1, keepdims=True)) / np.sqrt(want.var(-1, keepdims=True) + 1e-5)
        np.testing.assert_allclose(out.numpy(), want.swapaxes(0, 1), rtol=1e-8, atol=1e-10)
        assert all(np.isfinite(p.grad.numpy()).all() for p in stack.parameters())  # type: ignore[union-attr]


def test_masks_of_a_decoder_layer() -> None:
    """With a causal mask a position does not depend on later ones; padded memory counts for nothing."""
    x, memory = data(1, 3, 4), data(1, 3, 4, seed=1)
    with Context(DEVICE="PYTHON"):
        layer = nn.TransformerDecoderLayer(4, 2, 3, 0.0, "gelu", batch_first=True).double()
        causal = nn.Transformer.generate_square_subsequent_mask(3).double()
        whole = layer(Tensor(x), Tensor(memory), tgt_mask=causal).numpy()
        np.testing.assert_allclose(
            layer(Tensor(x[:, :2]), Tensor(memory), tgt_mask=causal[:2, :2]).numpy(), whole[:, :2], rtol=1e-9
        )
        padded = layer(Tensor(x), Tensor(memory), memory_key_padding_mask=Tensor([[False, False, True]])).numpy()
        np.testing.assert_allclose(padded, layer(Tensor(x), Tensor(memory[:, :2])).numpy(), rtol=1e-9)
