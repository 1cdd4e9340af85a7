"""Training steps in tinygrad on its CPU backend, under its TinyJit: the multilayer perceptron and the GPT."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from tinygrad import Context, Tensor, TinyJit, nn

from sides.data import CONTEXT, DIM, HEADS, LAYERS, TOKENS


class MLP:
    def __init__(self) -> None:
        self.layers = [nn.Linear(784, 512), nn.Linear(512, 512), nn.Linear(512, 10)]

    def __call__(self, x: Tensor) -> Tensor:
        return self.layers[2](self.layers[1](self.layers[0](x).relu()).relu())


class Block:
    def __init__(self) -> None:
        self.ln1, self.ln2 = nn.LayerNorm(DIM), nn.LayerNorm(DIM)
        self.qkv, self.out = nn.Linear(DIM, 3 * DIM), nn.Linear(DIM, DIM)
        self.up, self.down = nn.Linear(DIM, 4 * DIM), nn.Linear(4 * DIM, DIM)

    def __call__(self, x: Tensor) -> Tensor:
        b, t, c = x.shape
        q, k, v = (y.reshape(b, t, HEADS, c // HEADS).transpose(1, 2) for y in self.qkv(self.ln1(x)).chunk(3, dim=-1))
        y = q.scaled_dot_product_attention(k, v, is_causal=True)
        x = x + self.out(y.transpose(1, 2).reshape(b, t, c))
        return x + self.down(self.up(self.ln2(x)).gelu())


class GPT:
    def __init__(self) -> None:
        self.tokens, self.positions = nn.Embedding(TOKENS, DIM), nn.Embedding(CONTEXT, DIM)
        self.blocks = [Block() for _ in range(LAYERS)]
        self.norm, self.head = nn.LayerNorm(DIM), nn.Linear(DIM, TOKENS, bias=False)

    def __call__(self, x: Tensor) -> Tensor:
        x = self.tokens(x) + self.positions.weight[: x.shape[1]]
        return self.head(self.norm(x.sequential(self.blocks)))


def training(model: str) -> tuple[Callable[[Tensor, Tensor], Tensor], list[Tensor], Any]:
    """The loss of a batch, what is trained, and the optimiser."""
    net = GPT() if model == "gpt" else MLP()
    parameters = nn.state.get_parameters(net)
    optimizer = (
        nn.optim.AdamW(parameters, lr=1e-3) if model == "gpt" else nn.optim.SGD(parameters, lr=0.01, momentum=0.9)
    )

    def loss_of(x: Tensor, y: Tensor) -> Tensor:
        out = net(x)
        return out.reshape(-1, out.shape[-1]).sparse_categorical_crossentropy(y.reshape(-1))

    return loss_of, parameters, optimizer


def trainer(model: str) -> tuple[Callable[[np.ndarray, np.ndarray], float], int]:
    """A step that takes a batch and gives its loss; and how many numbers are trained."""
    loss_of, parameters, optimizer = training(model)

    @TinyJit
    def step(x: Tensor, y: Tensor) -> Tensor:
        optimizer.zero_grad()
        loss = loss_of(x, y).backward()
        return loss.realize(*optimizer.schedule_step())

    def run(a: np.ndarray, b: np.ndarray) -> float:
        with Context(TRAINING=1):
            return float(step(Tensor(a).realize(), Tensor(b).realize()).item())

    return run, sum(int(np.prod(p.shape)) for p in parameters)
