"""A script for `test_same_bits.py`: trains a network whose gradients are long enough to be cut and overlapped, and
writes a digest of what came of it to FILE, with collectives beside kernels and without: `training.py FILE`."""

from __future__ import annotations

import hashlib
import json
import sys
from pathlib import Path

import numpy as np

from manygrad import Tensor, TinyJit, nn, world
from manygrad.nn.optim import AdamW
from manygrad.nn.state import get_parameters
from manygrad.runtime.current import current
from manygrad.runtime.executors import overlap

STEPS, ROWS = 5, 64


class Net:
    def __init__(self) -> None:
        self.layers = [nn.Linear(48, 1024), nn.Linear(1024, 1280), nn.Linear(1280, 10)]

    def __call__(self, x: Tensor) -> Tensor:
        for layer in self.layers[:-1]:
            x = layer(x).relu()
        return self.layers[-1](x)


def digest() -> str:
    """Of all losses and of the trained weights."""
    Tensor.manual_seed(3)
    net = Net()
    parameters = get_parameters(net)
    for p in parameters:
        p.shard_(world.devices)
    optimizer = AdamW(parameters, lr=1e-3)

    @TinyJit
    def step(x: Tensor, y: Tensor) -> Tensor:
        optimizer.zero_grad()
        loss = net(x).cross_entropy(y)
        loss.backward()
        optimizer.step()
        return loss

    random, found = np.random.default_rng(5), hashlib.sha256()
    with Tensor.train():
        for _ in range(STEPS):
            x = Tensor(random.standard_normal((ROWS, 48), np.float32)).shard(world.devices, axis=0)
            y = Tensor(random.integers(0, 10, ROWS)).shard(world.devices, axis=0)
            found.update(step(x, y).numpy().tobytes())
    for p in parameters:
        found.update(p.numpy().tobytes())
    return found.hexdigest()


def main() -> None:
    beside = digest()
    overlap.overlapped = list  # every collective where it stands
    one_by_one = digest()
    endpoint = current().communication.endpoint
    routes = {} if endpoint is None else endpoint.routes
    if world.rank == 0:
        what = {"beside": beside, "one by one": one_by_one, "routes": sorted(set(routes.values()))}
        Path(sys.argv[1]).write_text(json.dumps(what))


if __name__ == "__main__":
    main()
