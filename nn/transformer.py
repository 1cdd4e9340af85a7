"""Transformer encoder and decoder layers and their stacks (Vaswani et al., 2017), with PyTorch's names."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from typing import Any

from manygrad.nn import functional as F
from manygrad.nn import init
from manygrad.nn.attention import MultiheadAttention
from manygrad.nn.container import ModuleList
from manygrad.nn.dropout import Dropout
from manygrad.nn.linear import Linear
from manygrad.nn.module import Module
from manygrad.nn.normalization import LayerNorm
from manygrad.tensor.tensor import Tensor

Activation = str | Callable[[Tensor], Tensor]


def _activation(activation: Activation) -> Callable[[Tensor], Tensor]:
    if callable(activation):
        return activation
    if activation not in ("relu", "gelu"):
        raise ValueError(f'activation is "relu", "gelu" or a function, not {activation!r}')
    return F.relu if activation == "relu" else F.gelu


def _copies(layer: Module, n: int) -> ModuleList:
    return ModuleList([copy.deepcopy(layer) for _ in range(n)])


class _TransformerLayer(Module):
    """The parts that encoder and decoder layers share."""

    attentions: tuple[str, ...]

    def __init__(self, d_model: int, nhead: int, dim_feedforward: int = 2048, dropout: float = 0.1,
                 activation: Activation = "relu", layer_norm_eps: float = 1e-5, batch_first: bool = False,
                 norm_first: bool = False, bias: bool = True, device: Any = None, dtype: Any = None):  # fmt: skip
        for name in self.attentions:
            own = MultiheadAttention(d_model, nhead, dropout, bias, batch_first=batch_first, device=device, dtype=dtype)
            setattr(self, name, own)
        self.linear1, self.dropout = Linear(d_model, dim_feedforward, bias, device, dtype), Dropout(dropout)
        self.linear2 = Linear(dim_feedforward, d_model, bias, device, dtype)
        self.norm_first = norm_first
        for i in range(len(self.attentions) + 1):
            setattr(self, f"norm{i + 1}", LayerNorm(d_model, layer_norm_eps, bias=bias, device=device, dtype=dtype))
        for i in range(len(self.attentions) + 1):
            setattr(self, f"dropout{i + 1}", Dropout(dropout))
        self.activation = _activation(activation)

    def _around(self, x: Tensor, number: int, block: Callable[[Tensor], Tensor]) -> Tensor:
        """x plus a block, normalised before (norm_first) or after."""
        norm, drop = getattr(self, f"norm{number}"), getattr(self, f"dropout{number}")
        return x + drop(block(norm(x))) if self.norm_first else norm(x + drop(block(x)))

    def _feed_forward(self, x: Tensor) -> Tensor:
        return self.linear2(self.dropout(self.activation(self.linear1(x))))


class TransformerEncoderLayer(_TransformerLayer):
    """Self-attention, then two linear layers, each with a residual and a layer norm."""

    self_attn: MultiheadAttention
    attentions = ("self_attn",)

    def forward(
        self,
        src: Tensor,
        src_mask: Tensor | None = None,
        src_key_padding_mask: Tensor | None = None,
        is_causal: bool = False,
    ) -> Tensor:
        attend = lambda x: self.self_attn(x, x, x, src_key_padding_mask, False, src_mask)[0]  # noqa: E731
        return self._around(self._around(src, 1, attend), 2, self._feed_forward)


class TransformerDecoderLayer(_TransformerLayer):
    """Self-attention, attention to `memory`, then two linear layers."""

    self_attn: MultiheadAttention
    multihead_attn: MultiheadAttention
    attentions = ("self_attn", "multihead_attn")

    def forward(self, tgt: Tensor, memory: Tensor, tgt_mask: Tensor | None = None, memory_mask: Tensor | None = None,
                tgt_key_padding_mask: Tensor | None = None, memory_key_padding_mask: Tensor | None = None,
                tgt_is_causal: bool = False, memory_is_causal: bool = False) -> Tensor:  # fmt: skip
        attend = lambda x: self.self_attn(x, x, x, tgt_key_padding_mask, False, tgt_mask)[0]  # noqa: E731
        look = lambda x: self.multihead_attn(x, memory, memory, memory_key_padding_mask, False, memory_mask)[0]  # noqa: E731
        return self._around(self._around(self._around(tgt, 1, attend), 2, look), 3, self._feed_forward)


class TransformerEncoder(Module):
    """`num_layers` copies of a layer."""

    def __init__(
        self,
        encoder_layer: Module,
        num_layers: int,
        norm: Module | None = None,
        enable_nested_tensor: bool = True,
        mask_check: bool = True,
    ):
        self.layers, self.num_layers, self.norm = _copies(encoder_layer, num_layers), num_layers, norm

    def forward(
        self,
        src: Tensor,
        mask: Tensor | None = None,
        src_key_padding_mask: Tensor | None = None,
        is_causal: bool | None = None,
    ) -> Tensor:
        for layer in self.layers:
            src = layer(src, src_mask=mask, src_key_padding_mask=src_key_padding_mask)
        return src if self.norm is None else self.norm(src)


class TransformerDecoder(Module):
    """`num_layers` copies of a layer."""

    def __init__(self, decoder_layer: Module, num_layers: int, norm: Module | None = None):
        self.layers, self.num_layers, self.norm = _copies(decoder_layer, num_layers), num_layers, norm

    def forward(self, tgt: Tensor, memory: Tensor, tgt_mask: Tensor | None = None, memory_mask: Tensor | None = None,
                tgt_key_padding_mask: Tensor | None = None, memory_key_padding_mask: Tensor | None = None,
                tgt_is_causal: bool | None = None, memory_is_causal: bool = False) -> Tensor:  # fmt: skip
        for layer in self.layers:
            tgt = layer(tgt, memory, tgt_mask, memory_mask, tgt_key_padding_mask, memory_key_padding_mask)
        return tgt if self.norm is None else self.norm(tgt)


class Transformer(Module):
    """Encoder and decoder."""

    def __init__(self, d_model: int = 512, nhead: int = 8, num_encoder_layers: int = 6, num_decoder_layers: int = 6,
                 dim_feedforward: int = 2048, dropout: float = 0.1, activation: Activation = "relu",
                 custom_encoder: Module | None = None, custom_decoder: Module | None = None,
                 layer_norm_eps: float = 1e-5, batch_first: bool = False, norm_first: bool = False, bias: bool = True,
                 device: Any = None, dtype: Any = None):  # fmt: skip
        self.d_model, self.nhead, self.batch_first = d_model, nhead, batch_first
        args: tuple[Any, ...] = (d_model, nhead, dim_feedforward, dropout, activation, layer_norm_eps, batch_first)
        args += (norm_first, bias, device, dtype)
        norm = lambda: LayerNorm(d_model, layer_norm_eps, bias=bias, device=device, dtype=dtype)  # noqa: E731
        self.encoder = custom_encoder or TransformerEncoder(TransformerEncoderLayer(*args), num_encoder_layers, norm())
        self.decoder = custom_decoder or TransformerDecoder(TransformerDecoderLayer(*args), num_decoder_layers, norm())
        for p in self.parameters():
            if p.ndim > 1:
                init.xavier_uniform_(p)

    def forward(self, src: Tensor, tgt: Tensor, src_mask: Tensor | None = None, tgt_mask: Tensor | None = None,
                memory_mask: Tensor | None = None, src_key_padding_mask: Tensor | None = None,
                tgt_key_padding_mask: Tensor | None = None, memory_key_padding_mask: Tensor | None = None,
                src_is_causal: bool | None = None, tgt_is_causal: bool | None = None,
                memory_is_causal: bool = False) -> Tensor:  # fmt: skip
        if src.shape[-1] != self.d_model or tgt.shape[-1] != self.d_model:
            raise ValueError(
                f"Transformer: the last dims of src {src.shape} and tgt {tgt.shape} must be d_model {self.d_model}"
            )
        memory = self.encoder(src, mask=src_mask, src_key_padding_mask=src_key_padding_mask)
        return self.decoder(tgt, memory, tgt_mask, memory_mask, tgt_key_padding_mask, memory_key_padding_mask)

    @staticmethod
    def generate_square_subsequent_mask(sz: int, device: Any = None, dtype: Any = None) -> Tensor:
        """(sz, sz): −inf above the diagonal, 0 elsewhere: no position sees a later one."""
        return Tensor.full((sz, sz), -math.inf, dtype=dtype, device=device).triu(1)
