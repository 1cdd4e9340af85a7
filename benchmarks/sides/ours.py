"""Training steps in this project."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from typing import Any

import numpy as np

sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "..", "examples"))

from resnet18 import resnet18
from train_gpt import GPT

from manygrad import Tensor, TinyJit, nn, world
from manygrad.nn.optim import SGD, AdamW
from manygrad.nn.state import get_parameters
from sides.data import CONTEXT, DIM, HEADS, LAYERS, TOKENS


class MLP:
    def __init__(self) -> None:
        self.layers = [nn.Linear(784, 512), nn.Linear(512, 512), nn.Linear(512, 10)]

    def __call__(self, x: Tensor) -> Tensor:
        return self.layers[2](self.layers[1](self.layers[0](x).relu()).relu())


class Conv:
    def __init__(self) -> None:
        self.c1, self.c2, self.out = nn.Conv2d(1, 16, 3), nn.Conv2d(16, 32, 3), nn.Linear(800, 10)

    def __call__(self, x: Tensor) -> Tensor:
        x = self.c1(x).relu().max_pool2d(2)
        return self.out(self.c2(x).relu().max_pool2d(2).flatten(1))


def training(model: str, cut: bool = False) -> tuple[Callable[[Tensor, Tensor], Tensor], list[Tensor], Any]:
    """The loss of a batch, what is trained, and the optimiser. Over all devices of `manygrad.world`, where each has a
    copy of the parameters, or a part of each (`cut`)."""
    net = {
        "conv": Conv,
        "gpt": lambda: GPT(TOKENS, CONTEXT, LAYERS, HEADS, DIM),
        "resnet": lambda: resnet18(64, 10),
    }.get(model, MLP)()
    parameters = get_parameters(net)
    if len(world.devices) > 1:
        for p in parameters:
            p.shard_(world.devices, axis=0 if cut else None)
    trained = [p for p in parameters if p.requires_grad]

    def loss_of(x: Tensor, y: Tensor) -> Tensor:
        out = net(x)
        return out.reshape(-1, out.shape[-1]).cross_entropy(y.reshape(-1), ignore_index=None)

    return loss_of, trained, AdamW(trained, lr=1e-3) if model == "gpt" else SGD(trained, lr=0.01, momentum=0.9)


def trainer(model: str, cut: bool = False) -> tuple[Callable[[np.ndarray, np.ndarray], float], int]:
    """A step that takes a global batch and gives its loss; and how many numbers are trained."""
    loss_of, trained, optimizer = training(model, cut)

    @TinyJit
    def step(x: Tensor, y: Tensor) -> Tensor:
        optimizer.zero_grad()
        loss = loss_of(x, y)
        loss.backward()
        optimizer.step()
        return loss

    def placed(a: np.ndarray) -> Tensor:
        t = Tensor.from_numpy(a)
        return t.shard(world.devices, axis=0) if len(world.devices) > 1 else t

    def run(a: np.ndarray, b: np.ndarray) -> float:
        with Tensor.train():
            return float(step(placed(a), placed(b)).item())

    return run, sum(p.numel() for p in trained)
