"""Attention, ours against torch: time and memory, forward and with its gradients.

    python benchmarks/attention.py [--shapes 16,4,128,64 1,8,2048,64 1,8,4096,64] [--repeats 15]

Shapes are (batch, heads, length, width of a head). Printed: best milliseconds of a replayed step and of torch's, in
turns, their ratio (above 1: ours is faster), the most bytes our device held at once, and those of one array of queries
x keys. Without torch only our side is printed. Both sides use as many threads.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable
from typing import Any

import numpy as np

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))

from sides.turns import samples

from manygrad import Tensor, TinyJit
from manygrad.runtime.devices import get_device
from manygrad.runtime.devices.cpu.threads import wanted_threads
from manygrad.tensor.autograd import grad


def ours(arrays: list[np.ndarray], is_causal: bool, backward: bool) -> Callable[[], Any]:
    tensors = [Tensor(a).realize() for a in arrays]
    for t in tensors[:3]:
        t.requires_grad = True

    @TinyJit
    def step(q: Tensor, k: Tensor, v: Tensor, g: Tensor) -> Any:
        out = q.scaled_dot_product_attention(k, v, is_causal=is_causal)
        return (out, *grad(out, [q, k, v], g)) if backward else out

    for _ in range(3):
        step(*tensors)
    return lambda: step(*tensors)


def torchs(arrays: list[np.ndarray], is_causal: bool, backward: bool) -> Callable[[], Any] | None:
    try:
        import torch
    except ImportError:
        return None
    torch.set_num_threads(wanted_threads())
    q, k, v, g = (torch.tensor(a) for a in arrays)
    for t in (q, k, v):
        t.requires_grad_(backward)

    def step() -> Any:
        out = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=is_causal)
        return torch.autograd.grad(out, [q, k, v], g) if backward else out

    return step


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", nargs="+", default=["16,4,128,64", "1,8,2048,64", "1,8,4096,64"], metavar="B,H,T,D")
    parser.add_argument("--repeats", type=int, default=15)
    args = parser.parse_args()
    device = get_device("CPU")
    print(f"{'shape':<16}{'what':<26}{'ours ms':>10}{'torch ms':>10}{'torch/ours':>12}{'ours MB':>10}{'T x T MB':>10}")
    for text in args.shapes:
        shape = tuple(map(int, text.split(",")))
        arrays = [np.random.default_rng(i).standard_normal(shape).astype(np.float32) for i in range(4)]
        for is_causal in (False, True):
            for backward in (False, True):
                device.memory.peak = before = device.allocated
                mine = ours(arrays, is_causal, backward)
                torch_side = torchs(arrays, is_causal, backward)
                times = [
                    min(t) * 1e3 for t in samples([mine] if torch_side is None else [mine, torch_side], args.repeats)
                ]
                what = ("causal " if is_causal else "") + ("with gradients" if backward else "forward")
                other = f"{times[1]:>10.2f}{times[1] / times[0]:>12.2f}" if torch_side is not None else f"{'':>22}"
                del mine
                print(
                    f"{text:<16}{what:<26}{times[0]:>10.2f}{other}{(device.peak - before) / 1e6:>10.1f}"
                    f"{4e-6 * shape[0] * shape[1] * shape[2] ** 2:>10.1f}",
                    flush=True,
                )


if __name__ == "__main__":
    main()
