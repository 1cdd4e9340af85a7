"""Images and their parts: pixel and channel shuffles, windows as columns (unfold, fold), bilinear forms."""

from __future__ import annotations

from math import prod
from typing import TYPE_CHECKING, Any

from manygrad.tensor.ops.broadcast import expect_shape
from manygrad.tensor.ops.convolution import Pair, numbers

if TYPE_CHECKING:
    from manygrad.tensor.tensor import Tensor


def pixel_shuffle(input: Tensor, upscale_factor: int) -> Tensor:
    """(..., C·r², H, W) -> (..., C, H·r, W·r)."""
    r = upscale_factor
    if input.ndim < 3 or r < 1 or input.shape[-3] % (r * r):
        raise ValueError(f"pixel_shuffle: the channels of {input.shape} do not divide by {r}²")
    *lead, c, h, w = input.shape
    k = len(lead)
    t = input.reshape((*lead, c // (r * r), r, r, h, w)).permute(*range(k), k, k + 3, k + 1, k + 4, k + 2)
    return t.reshape((*lead, c // (r * r), h * r, w * r))._copied()


def pixel_unshuffle(input: Tensor, downscale_factor: int) -> Tensor:
    """(..., C, H·r, W·r) -> (..., C·r², H, W)."""
    r = downscale_factor
    if input.ndim < 3 or r < 1 or input.shape[-1] % r or input.shape[-2] % r:
        raise ValueError(f"pixel_unshuffle: height and width of {input.shape} do not divide by {r}")
    *lead, c, h, w = input.shape
    k = len(lead)
    t = input.reshape((*lead, c, h // r, r, w // r, r)).permute(*range(k), k, k + 2, k + 4, k + 1, k + 3)
    return t.reshape((*lead, c * r * r, h // r, w // r))._copied()


def channel_shuffle(input: Tensor, groups: int) -> Tensor:
    """(N, C, ...): channel c of group g, number g·C/groups + c, becomes number c·groups + g."""
    if input.ndim < 3 or input.shape[1] % groups:
        raise ValueError(f"channel_shuffle: the channels of {input.shape} do not divide by {groups} groups")
    n, c, *rest = input.shape
    return input.reshape((n, groups, c // groups, *rest)).transpose(1, 2).reshape(input.shape)._copied()


def unfold(input: Tensor, kernel_size: Pair, dilation: Pair = 1, padding: Pair = 0, stride: Pair = 1) -> Tensor:
    """(N, C, H, W) -> (N, C·KH·KW, L): every window as a column. (C, H, W) without N."""
    if input.ndim == 3:
        return unfold(input.unsqueeze(0), kernel_size, dilation, padding, stride).squeeze(0)
    if input.ndim != 4:
        raise ValueError(f"unfold: expected (N, C, H, W) or (C, H, W), got {input.shape}")
    k, d, p, s = (
        numbers(v, 2, name)
        for v, name in ((kernel_size, "kernel_size"), (dilation, "dilation"), (padding, "padding"), (stride, "stride"))
    )
    x = input.pad(((0, 0), (0, 0), (p[0], p[0]), (p[1], p[1])))
    windows = x.unfold_windows(k, s, d)  # (N, C, OH, OW, KH, KW)
    n, c, oh, ow = windows.shape[:4]
    return windows.permute(0, 1, 4, 5, 2, 3).reshape(n, c * prod(k), oh * ow)


def fold(
    input: Tensor, output_size: Any, kernel_size: Pair, dilation: Pair = 1, padding: Pair = 0, stride: Pair = 1
) -> Tensor:
    """The transpose of unfold: columns (N, C·KH·KW, L) added up where their windows lie -> (N, C, *output_size)."""
    if input.ndim == 2:
        return fold(input.unsqueeze(0), output_size, kernel_size, dilation, padding, stride).squeeze(0)
    size = numbers(output_size, 2, "output_size")
    k, d, p, s = (
        numbers(v, 2, name)
        for v, name in ((kernel_size, "kernel_size"), (dilation, "dilation"), (padding, "padding"), (stride, "stride"))
    )
    outs = [(size[i] + 2 * p[i] - d[i] * (k[i] - 1) - 1) // s[i] + 1 for i in range(2)]
    if input.ndim != 3 or input.shape[1] % prod(k) or input.shape[2] != prod(outs):
        raise ValueError(
            f"fold: columns {input.shape} do not fit; expected (N, C·{prod(k)}, "
            f"{prod(outs)}) for output {size} and windows {k}"
        )
    n, c = input.shape[0], input.shape[1] // prod(k)
    padded = [size[i] + 2 * p[i] for i in range(2)]
    rows, cols = (
        (input.arange(k[i]) * d[i]).unsqueeze(1) + input.arange(outs[i]) * s[i]
        for i in range(2)  # (K, O) each: the padded position
    )
    at = (rows.reshape(k[0], 1, outs[0], 1) * padded[1] + cols.reshape(1, k[1], 1, outs[1])).flatten()
    flat = input.new_zeros((n, c, prod(padded))).index_add(2, at, input.reshape(n, c, -1))
    return flat.reshape(n, c, *padded)[:, :, p[0] : p[0] + size[0], p[1] : p[1] + size[1]]


def bilinear(input1: Tensor, input2: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """x1ᵀ W[o] x2 + b[o]: (..., in1), (..., in2), weight (out, in1, in2) -> (..., out)."""
    if (
        weight.ndim != 3
        or input1.shape[-1] != weight.shape[1]
        or input2.shape[-1] != weight.shape[2]
        or input1.shape[:-1] != input2.shape[:-1]
    ):
        raise ValueError(
            f"bilinear: {input1.shape}, {input2.shape} and weight {weight.shape} do not fit; "
            "expected (..., in1), (..., in2), (out, in1, in2)"
        )
    out, in1, in2 = weight.shape
    expect_shape("bilinear", (out,), bias=bias)
    left = input1.matmul(weight.permute(1, 0, 2).reshape(in1, out * in2)).reshape((*input1.shape[:-1], out, in2))
    y = (left * input2.unsqueeze(-2)).sum(-1)
    return y if bias is None else y + bias
