"""Convolution."""

from __future__ import annotations

from math import prod
from typing import TYPE_CHECKING

from manygrad.tensor.dtype import contraction_dtype
from manygrad.tensor.gradient import CustomGrad
from manygrad.tensor.ops.broadcast import expect_shape, result_type
from manygrad.tensor.ops.dims import of_all_dims
from manygrad.tensor.uop import Ops, UOp

if TYPE_CHECKING:
    from manygrad.tensor.tensor import Tensor


Pair = int | tuple[int, ...]


def _pair(x: Pair, n: int = 2) -> tuple[int, ...]:
    return (x,) * n if isinstance(x, int) else tuple(x)


def numbers(x: Pair, n: int, name: str) -> tuple[int, ...]:
    """One number for all spatial dims, or one for each: from 1, paddings and the sizes of outputs from 0."""
    out = _pair(x, n)
    if len(out) == 1:
        out = out * n
    if len(out) != n or any(not isinstance(v, int) for v in out):
        raise ValueError(f"{name} is a whole number or {n} of them, not {x!r}")
    least = 0 if "padding" in name or "output" in name else 1
    if any(v < least for v in out):
        raise ValueError(f"{name} is at least {least}, not {x!r}")
    return out


class ConvolutionMixin:
    def conv2d(
        self: Tensor,
        weight: Tensor,
        bias: Tensor | None = None,
        stride: Pair = 1,
        padding: Pair | str = 0,
        dilation: Pair = 1,
        groups: int = 1,
    ) -> Tensor:
        """(N, Cin, H, W) with weight (Cout, Cin / groups, KH, KW) -> (N, Cout, OH, OW); any number of spatial dims."""
        return convolution(self, weight, bias, stride, padding, dilation, groups)

    def conv_transpose2d(
        self: Tensor,
        weight: Tensor,
        bias: Tensor | None = None,
        stride: Pair = 1,
        padding: Pair = 0,
        output_padding: Pair = 0,
        groups: int = 1,
        dilation: Pair = 1,
    ) -> Tensor:
        """(N, Cin, H, W) with weight (Cin, Cout / groups, KH, KW); any number of spatial dims."""
        return transposed_convolution(self, weight, bias, stride, padding, output_padding, groups, dilation)


def _conv_nd(n: int, input: Tensor, weight: Tensor, bias: Tensor | None = None, stride: Pair = 1,
             padding: Pair | str = 0, dilation: Pair = 1, groups: int = 1) -> Tensor:  # fmt: skip
    return convolution(input, weight, bias, stride, padding, dilation, groups, n)


def _conv_transpose_nd(n: int, input: Tensor, weight: Tensor, bias: Tensor | None = None, stride: Pair = 1,
                       padding: Pair = 0, output_padding: Pair = 0, groups: int = 1,
                       dilation: Pair = 1) -> Tensor:  # fmt: skip
    return transposed_convolution(input, weight, bias, stride, padding, output_padding, groups, dilation, n)


conv1d, conv2d, conv3d = of_all_dims(_conv_nd)
conv_transpose1d, conv_transpose2d, conv_transpose3d = of_all_dims(_conv_transpose_nd)


def convolution(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    stride: Pair,
    padding: Pair | str,
    dilation: Pair,
    groups: int,
    spatial: int | None = None,
) -> Tensor:
    """(N, Cin, *in) or (Cin, *in) with weight (Cout, Cin / groups, *k): out = (in + 2·padding − dilation·(k − 1) − 1)
    / stride + 1."""
    n = weight.ndim - 2 if spatial is None else spatial
    if weight.ndim != n + 2 or x.ndim not in (n + 1, n + 2):
        raise ValueError(
            f"conv{n}d: input {x.shape} and weight {weight.shape} do not fit; expected (N, Cin, {n} dims) or (Cin, {n} "
            f"dims), and (Cout, Cin / groups, {n} dims)"
        )
    if x.ndim == n + 1:
        return convolution(x.unsqueeze(0), weight, bias, stride, padding, dilation, groups, n).squeeze(0)
    if x.shape[1] != weight.shape[1] * groups or weight.shape[0] % groups:
        raise ValueError(
            f"conv: input {x.shape} and weight {weight.shape} with groups={groups} do not fit; "
            f"expected weight (Cout, {x.shape[1]} // {groups}, ...) with Cout divisible by groups"
        )
    expect_shape(f"conv{n}d", weight.shape[:1], bias=bias)
    s, d = numbers(stride, n, "stride"), numbers(dilation, n, "dilation")
    if isinstance(padding, str):
        x, padding = _padded_by_name(x, padding, weight.shape[2:], s, d)
    out = _convolve(x, weight, s, numbers(padding, n, "padding"), d, groups)
    return out if bias is None else out + bias.reshape(1, -1, *(1,) * n)


def _padded_by_name(
    x: Tensor, padding: str, kernel: tuple[int, ...], s: tuple[int, ...], d: tuple[int, ...]
) -> tuple[Tensor, Pair]:
    if padding == "valid":
        return x, 0
    if padding != "same" or any(v != 1 for v in s):
        raise ValueError(f'conv: padding is numbers, "valid", or with stride 1 "same"; got {padding!r} and stride {s}')
    total = [dd * (k - 1) for k, dd in zip(kernel, d)]
    uneven = [t % 2 for t in total]
    if any(uneven):  # the extra element goes after
        x = x.pad(((0, 0), (0, 0), *[(0, u) for u in uneven]))
    return x, tuple(t // 2 for t in total)


def transposed_convolution(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    stride: Pair,
    padding: Pair,
    output_padding: Pair,
    groups: int,
    dilation: Pair,
    spatial: int | None = None,
) -> Tensor:
    """The gradient of a convolution by its input: (N, Cin, *in) with weight (Cin, Cout / groups, *k) to
    out = (in − 1)·stride − 2·padding + dilation·(k − 1) + output_padding + 1."""
    n = weight.ndim - 2 if spatial is None else spatial
    if (
        weight.ndim != n + 2
        or x.ndim not in (n + 1, n + 2)
        or x.shape[x.ndim - n - 1] != weight.shape[0]
        or weight.shape[0] % groups
    ):
        raise ValueError(
            f"conv_transpose{n}d: input {x.shape} and weight {weight.shape} with groups={groups} do not fit; "
            f"expected weight (Cin, Cout / groups, {n} dims)"
        )
    if x.ndim == n + 1:
        return transposed_convolution(
            x.unsqueeze(0), weight, bias, stride, padding, output_padding, groups, dilation, n
        ).squeeze(0)
    expect_shape(f"conv_transpose{n}d", (weight.shape[1] * groups,), bias=bias)
    s, p, d, o = (
        numbers(stride, n, "stride"),
        numbers(padding, n, "padding"),
        numbers(dilation, n, "dilation"),
        numbers(output_padding, n, "output_padding"),
    )
    if any(e >= max(a, b) for e, a, b in zip(o, s, d)):
        raise ValueError(
            f"conv_transpose{n}d: output_padding {o} must be smaller than the stride {s} or the dilation {d}"
        )
    outs = [
        (i - 1) * a - 2 * b + c * (k - 1) + e + 1 for i, a, b, c, e, k in zip(x.shape[2:], s, p, d, o, weight.shape[2:])
    ]
    out = _input_gradient(x, (x.shape[0], weight.shape[1] * groups, *outs), weight, s, p, d, groups)
    return out if bias is None else out + bias.reshape(1, -1, *(1,) * n)


def _convolve(x: Tensor, w: Tensor, s: tuple[int, ...], p: tuple[int, ...], d: tuple[int, ...], groups: int) -> Tensor:
    """The convolution with its own gradient: both gradients are again convolution-like contractions."""
    out = _contract_windows(x, w, s, p, d, groups)

    def backward(g: Tensor, x: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
        return _input_gradient(g, x.shape, w, s, p, d, groups), _weight_gradient(g, x, w, s, p, d, groups)

    return out._new(
        UOp(Ops.CUSTOM, out.dtype, (out.uop, x.uop, w.uop), CustomGrad("conv", (s, p, d, groups), backward))
    )


def _padded(x: Tensor, p: tuple[int, ...]) -> Tensor:
    return x.pad(((0, 0), (0, 0), *[(q, q) for q in p])) if any(p) else x


def _contract_windows(
    x: Tensor, w: Tensor, s: tuple[int, ...], p: tuple[int, ...], d: tuple[int, ...], groups: int
) -> Tensor:
    n, kind = len(s), result_type(x, w)
    batch, cin, cout = x.shape[0], x.shape[1], w.shape[0]
    wide = contraction_dtype(kind)
    x, w = x.cast(kind).cast(wide), w.cast(kind).cast(wide)
    win = _padded(x, p).unfold_windows(w.shape[2:], s, d)  # (N, Cin, *out, *k)
    outs, ks = win.shape[2 : 2 + n], win.shape[2 + n :]
    win = win.reshape(batch, groups, 1, cin // groups, *outs, *ks)
    win = win.permute(0, 1, 2, *range(4, 4 + n), 3, *range(4 + n, 4 + 2 * n))
    win = win._broadcast((batch, groups, cout // groups, *outs, cin // groups, *ks))
    filters = w.reshape(1, groups, cout // groups, *(1,) * n, cin // groups, *ks)._broadcast(win.shape)
    return (win * filters).sum(tuple(range(-1 - n, 0)), dtype=wide).cast(kind).reshape(batch, cout, *outs)


def _input_gradient(
    g: Tensor,
    shape: tuple[int, ...],
    w: Tensor,
    s: tuple[int, ...],
    p: tuple[int, ...],
    d: tuple[int, ...],
    groups: int,
) -> Tensor:
    """A convolution of the gradient (spread by the stride, padded) with the flipped, transposed filters."""
    n = len(s)
    ks = w.shape[2:]
    cin, cout = shape[1], w.shape[0]
    for i, step in enumerate(s):  # step-1 zeros between the elements of each spatial dim
        if step > 1:
            a = 2 + i
            size = g.shape[a]
            g = g.reshape(*g.shape[: a + 1], 1, *g.shape[a + 1 :]).pad(
                tuple((0, step - 1) if j == a + 1 else (0, 0) for j in range(g.ndim + 1))
            )
            g = g.reshape(*g.shape[:a], size * step, *g.shape[a + 2 :])._take(a, 0, (size - 1) * step + 1)
    grow = []
    for i in range(n):
        before = d[i] * (ks[i] - 1) - p[i]
        after = shape[2 + i] + 2 * p[i] - (g.shape[2 + i] + d[i] * (ks[i] - 1)) + before
        grow.append((before, after))
    g = g.pad(((0, 0), (0, 0), *grow))
    flipped = w._flipped(tuple(range(2, 2 + n))).reshape(groups, cout // groups, cin // groups, *ks)
    swapped = flipped.transpose(1, 2).reshape(cin, cout // groups, *ks)
    return _convolve(g, swapped, (1,) * n, (0,) * n, d, groups)


def _weight_gradient(
    g: Tensor, x: Tensor, w: Tensor, s: tuple[int, ...], p: tuple[int, ...], d: tuple[int, ...], groups: int
) -> Tensor:
    """sum over batch and positions of window × gradient: (G, Cout/G, Cin/G, *k)."""
    n, kind = len(s), w.dtype
    batch, cin, cout = x.shape[0], x.shape[1], w.shape[0]
    g, x = g.cast(contraction_dtype(kind)), x.cast(contraction_dtype(kind))
    win = _padded(x, p).unfold_windows(w.shape[2:], s, d)
    outs, ks = win.shape[2 : 2 + n], win.shape[2 + n :]
    win = win.reshape(batch, groups, 1, cin // groups, *outs, *ks).permute(
        1, 2, 3, *range(4 + n, 4 + 2 * n), 0, *range(4, 4 + n)
    )
    full = (groups, cout // groups, cin // groups, *ks, batch, *outs)
    gr = g.reshape(batch, groups, cout // groups, *outs).permute(1, 2, 0, *range(3, 3 + n))
    gr = gr.reshape(groups, cout // groups, 1, *(1,) * n, batch, *outs)._broadcast(full)
    out = (win._broadcast(full) * gr).sum(tuple(range(-1 - n, 0)))
    assert prod(out.shape) == prod(w.shape)
    return out.cast(kind).reshape(w.shape)
