"""Linear and bilinear layers, tables of rows, steps of recurrent layers, the decoder of a transformer."""

from __future__ import annotations

from typing import Any

import numpy as np

from tests.nn.layers.layer import Layer, data
from tests.nn.test_attention import numpy_attention
from tests.nn.test_recurrent import numpy_step
from tests.tensor.cases.embedding import bags_oracle, offsets_oracle

BOTH = ("weight", "bias")
CELL = ("weight_ih", "weight_hh", "bias_ih", "bias_hh")
ROWS = np.array([[1, 1, 6], [0, 2, 1], [5, 6, 6]])
DECODER = (
    *(f"{a}.{k}" for a in ("self_attn", "multihead_attn")
      for k in ("in_proj_weight", "in_proj_bias", "out_proj.weight", "out_proj.bias")),
    *(f"{m}.{k}" for m in ("linear1", "linear2", "norm1", "norm2", "norm3") for k in BOTH),
)  # fmt: skip
State = dict[str, np.ndarray]


def decoder(w: State, x: np.ndarray, memory: np.ndarray, first: bool, end: str = "") -> np.ndarray:
    """(N, T, E) -> the same; self-attention, attention to memory, two linear layers, each in its residual and norm."""
    w = {k.removeprefix(end): a for k, a in w.items() if k.startswith(end)}
    own, other = (
        {k.removeprefix(f"{a}."): t for k, t in w.items() if k.startswith(a)} for a in ("self_attn", "multihead_attn")
    )
    blocks: list[Any] = [
        lambda a: numpy_attention(own, a, a, a, 2)[0],
        lambda a: numpy_attention(other, a, memory, memory, 2)[0],
        lambda a: (
            np.maximum(a @ w["linear1.weight"].T + w["linear1.bias"], 0) @ w["linear2.weight"].T + w["linear2.bias"]
        ),
    ]
    for i, block in enumerate(blocks, 1):
        norm = lambda a, i=i: (  # noqa: E731
            (a - a.mean(-1, keepdims=True)) / np.sqrt(a.var(-1, keepdims=True) + 1e-5) * w[f"norm{i}.weight"]
            + w[f"norm{i}.bias"]
        )
        x = x + block(norm(x)) if first else norm(x + block(x))
    return x


def cell(name: str, mode: str, *args: Any) -> Layer:
    def oracle(w: State, x: np.ndarray, h: np.ndarray, *c: np.ndarray) -> Any:
        new = numpy_step(mode, x, h, c[0] if c else h, w, "")
        return new if c else new[0]

    call = (lambda module, x, h, c: module(x, (h, c))) if mode == "LSTM" else None
    states = tuple(data(3, 4, low=-1, high=1, seed=i) for i in range(2 if mode == "LSTM" else 1))
    return Layer(name, (data(3, 2), *states), oracle, (2, 4, *args), keys=CELL, call=call, variant=mode)


MEMORY = (data(3, 2, 4, low=-1, high=1), data(3, 3, 4, low=-1, high=1))

LAYERS = [
    Layer("Linear", (data(3, 2),), lambda w, x: x @ w["weight"].T + w["bias"], (2, 4), keys=BOTH),
    Layer("Linear", (data(3, 1, 2),), lambda w, x: x @ w["weight"].T, (2, 4, False), keys=BOTH[:1], variant="no bias"),
    Layer("Bilinear", (data(3, 2), data(3, 4)),
          lambda w, a, b: np.einsum("ni,oij,nj->no", a, w["weight"], b) + w["bias"], (2, 4, 3), keys=BOTH),
    Layer("Bilinear", (data(3, 2, 2), data(3, 2, 4)),
          lambda w, a, b: np.einsum("...i,oij,...j->...o", a, w["weight"], b), (2, 4, 1, False), keys=BOTH[:1],
          variant="no bias"),
    Layer("Embedding", (ROWS,), lambda w, i: w["weight"][i], (7, 2), keys=("weight",)),
    *(Layer("EmbeddingBag", (ROWS,), lambda w, i, m=m: bags_oracle(i, w["weight"], m, None), (7, 2), {"mode": m},
            ("weight",), m) for m in ("sum", "mean", "max")),
    Layer("EmbeddingBag", (ROWS.reshape(-1), np.array([0, 2, 2, 7])),
          lambda w, i, o: offsets_oracle(i, w["weight"], o, "mean", False), (7, 2), keys=("weight",),
          variant="offsets"),
    Layer("EmbeddingBag", (ROWS.reshape(-1), np.array([0, 4, 9])),
          lambda w, i, o: offsets_oracle(i, w["weight"], o, "sum", True), (7, 2),
          {"mode": "sum", "include_last_offset": True}, ("weight",), "last offset", axes=(0, None)),
    Layer("EmbeddingBag", (ROWS, data(3, 3)), lambda w, i, s: (w["weight"][i] * s[..., None]).sum(1), (7, 2),
          {"mode": "sum"}, ("weight",), "per_sample_weights",
          call=lambda module, i, s: module(i, per_sample_weights=s)),
    Layer("EmbeddingBag", (ROWS,), lambda w, i: bags_oracle(i, w["weight"], "mean", 6), (7, 2), {"padding_idx": 6},
          ("weight",), "padding_idx"),
    cell("RNNCell", "RNN_TANH"), cell("RNNCell", "RNN_RELU", True, "relu"), cell("GRUCell", "GRU"),
    cell("LSTMCell", "LSTM"),
    *(Layer("TransformerDecoderLayer", MEMORY, lambda w, x, m, first=first: decoder(w, x, m, first), (4, 2, 3, 0.0),
            {"batch_first": True, "norm_first": first}, DECODER, variant)
      for first, variant in ((False, ""), (True, "norm_first"))),
]  # fmt: skip
