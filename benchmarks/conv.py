"""Two-dimensional convolutions of ResNet-18: forward, gradient of the input, gradient of the weights, each alone;
ours and torch in one run.

    python benchmarks/conv.py [--batch 64] [--image 32] [--width 64] [--only "3x3 s1"] [--repeats 20] [--channels-last]

GFLOPS count every tap of a filter, those that fall on padding too. Ours is a replayed step, torch calls oneDNN:
contiguous NCHW, or with `--channels-last` both of its operands in that layout. Results are compared before times count.
The sides alternate; best of each.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import sys
from typing import Any, NamedTuple

import numpy as np

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))

from sides.turns import Run, samples

from manygrad import Tensor, TinyJit

DIRECTIONS = ("forward", "to input", "to weights")


class Conv(NamedTuple):
    """(channels, size, size) -> (out, size / stride, size / stride)."""

    channels: int
    out: int
    size: int
    kernel: int
    stride: int

    def __str__(self) -> str:
        return f"{self.channels}->{self.out} {self.kernel}x{self.kernel} s{self.stride} @{self.size}"

    @property
    def padding(self) -> int:
        return self.kernel // 2

    def shapes(self, batch: int) -> tuple[tuple[int, ...], ...]:
        """Of the input, the weights and the output."""
        after = (self.size + 2 * self.padding - self.kernel) // self.stride + 1
        return (
            (batch, self.channels, self.size, self.size),
            (self.out, self.channels, self.kernel, self.kernel),
            (batch, self.out, after, after),
        )

    def flops(self, batch: int) -> float:
        _, weights, output = self.shapes(batch)
        return 2.0 * float(np.prod(output)) * float(np.prod(weights[1:]))


def resnet18(image: int, width: int) -> list[Conv]:
    """Its distinct convolutions: the first, and each stage's with and without stride, and the shortcut's."""
    found = [Conv(3, width, image, 7, 2)]
    channels, size = width, image // 4
    for stage in range(4):
        out = width * 2**stage
        if out != channels:
            found += [Conv(channels, out, size, 3, 2), Conv(channels, out, size, 1, 2)]
            channels, size = out, max(size // 2, 1)
        found.append(Conv(out, out, size, 3, 1))
    return found


def ours(conv: Conv, x: np.ndarray, w: np.ndarray, g: np.ndarray) -> tuple[Run, ...]:
    a, b = Tensor(x, requires_grad=True).realize(), Tensor(w, requires_grad=True).realize()
    gradient = Tensor(g).realize()
    forward = lambda: a.conv2d(b, stride=conv.stride, padding=conv.padding)  # noqa: E731
    backward = lambda of: forward().gradient(of, gradient=gradient)[0].realize()  # noqa: E731
    return TinyJit(lambda: forward().realize()), TinyJit(lambda: backward(a)), TinyJit(lambda: backward(b))


def theirs(torch: Any, channels_last: bool, conv: Conv, x: np.ndarray, w: np.ndarray, g: np.ndarray) -> tuple[Run, ...]:
    layout = torch.channels_last if channels_last else torch.contiguous_format
    a, b, gradient = (torch.from_numpy(v).contiguous(memory_format=layout) for v in (x, w, g))
    stride, padding = [conv.stride] * 2, [conv.padding] * 2

    def backward(mask: list[bool]) -> Any:
        return torch.ops.aten.convolution_backward(
            gradient, a, b, None, stride, padding, [1, 1], False, [0, 0], 1, mask
        )[mask.index(True)]

    forward = lambda: torch.nn.functional.conv2d(a, b, stride=stride, padding=padding)  # noqa: E731
    return forward, lambda: backward([True, False, False]), lambda: backward([False, True, False])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--image", type=int, default=32, help="height and width of the network's input")
    parser.add_argument("--width", type=int, default=64, help="channels of the first stage")
    parser.add_argument("--only", default="", help="part of a convolution's name")
    parser.add_argument("--repeats", type=int, default=20)
    parser.add_argument("--channels-last", action="store_true")
    options = parser.parse_args()
    torch = None
    if importlib.util.find_spec("torch") is not None:
        import torch  # type: ignore[no-redef]
    rng = np.random.default_rng(0)
    print(
        f"{'convolution':>22} {'direction':>11} {'ours us':>9} {'GFLOPS':>8} {'torch us':>9} {'GFLOPS':>8} "
        f"{'torch/ours':>11}"
    )
    for conv in resnet18(options.image, options.width):
        if options.only not in str(conv):
            continue
        arrays = [rng.standard_normal(s).astype(np.float32) for s in conv.shapes(options.batch)]
        mine = ours(conv, *arrays)
        others = theirs(torch, options.channels_last, conv, *arrays) if torch is not None else (None,) * 3
        for direction, run, other in zip(DIRECTIONS, mine, others):
            if other is not None:
                expected = other().numpy()
                np.testing.assert_allclose(
                    run().numpy(), expected, rtol=1e-3, atol=1e-4 * float(np.abs(expected).max())
                )
            times = [min(t) for t in samples([run, *([other] if other is not None else [])], options.repeats)]
            columns = "".join(f" {t * 1e6:9.0f} {conv.flops(options.batch) / t / 1e9:8.1f}" for t in times)
            ratio = f"{times[1] / times[0]:11.2f}" if other is not None else f" {'-':>9} {'-':>8} {'-':>11}"
            print(f"{conv!s:>22} {direction:>11}{columns} {ratio}", flush=True)


if __name__ == "__main__":
    main()
