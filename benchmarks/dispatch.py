"""The cost of a replayed step besides its arithmetic: many tiny kernels, and a small network's step on one sample.

    python benchmarks/dispatch.py [--kernels 200] [--repeats 200]

`a kernel`: the time of a replayed graph of tiny kernels, a kernel, each of which reads and writes 16 numbers, less the
same arithmetic in one NumPy pass (which is next to nothing). `mlp batch 1`: forward, backward and SGD of 784-512-512-10
on one sample, ours replayed and torch eager. Medians, repeats interleaved.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import sys
from typing import Any

import numpy as np

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))

from sides.turns import Run, measure

from manygrad import Tensor, TinyJit, nn
from manygrad.nn.functional import cross_entropy
from manygrad.nn.optim import SGD


def tiny(count: int) -> Run:
    x = Tensor(np.ones(16, np.float32)).realize()

    def step() -> Tensor:
        y = x
        for _ in range(count):
            y = (y * 0.5 + 1.0).contiguous()  # each stored: a kernel of its own
        return y.realize()

    return TinyJit(step)


def mlp() -> Run:
    Tensor.manual_seed(0)
    model = nn.Sequential(nn.Linear(784, 512), nn.ReLU(), nn.Linear(512, 512), nn.ReLU(), nn.Linear(512, 10))
    optimizer = SGD(list(model.parameters()), lr=0.01)
    x, y = Tensor.randn(1, 784).realize(), Tensor([3]).realize()

    def step() -> Tensor:
        with Tensor.train():
            optimizer.zero_grad()
            loss = cross_entropy(model(x), y)
            loss.backward()
            optimizer.step()
        return loss.realize()

    return TinyJit(step)


def torch_mlp(torch: Any) -> Run:
    m = torch.nn
    model = m.Sequential(m.Linear(784, 512), m.ReLU(), m.Linear(512, 512), m.ReLU(), m.Linear(512, 10))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    x, y = torch.randn(1, 784), torch.tensor([3])

    def step() -> None:
        optimizer.zero_grad()
        m.functional.cross_entropy(model(x), y).backward()
        optimizer.step()

    return step


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kernels", type=int, default=200)
    parser.add_argument("--repeats", type=int, default=200)
    options = parser.parse_args()
    (whole,) = measure([tiny(options.kernels)], options.repeats)
    print(f"{options.kernels} tiny kernels: {whole * 1e6:.1f} us, {whole / options.kernels * 1e6:.3f} us a kernel")
    runs = [mlp()]
    if importlib.util.find_spec("torch") is not None:
        import torch

        runs.append(torch_mlp(torch))
    mine, *other = measure(runs, options.repeats)
    print(
        f"mlp batch 1: ours {mine * 1e6:.0f} us"
        + (
            f", torch {other[0] * 1e6:.0f} us, torch/ours {other[0] / mine:.2f}"
            if other
            else ", torch is not installed"
        )
    )


if __name__ == "__main__":
    main()
