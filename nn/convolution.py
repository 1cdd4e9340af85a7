"""Convolutions and transposed convolutions over 1 to 3 spatial dims."""

from __future__ import annotations

import math
from math import prod
from typing import Any

from manygrad.nn import functional as F
from manygrad.nn.linear import uniform
from manygrad.nn.module import Module
from manygrad.tensor.tensor import Tensor

Size = int | tuple[int, ...]
MODES = {"zeros": "constant", "reflect": "reflect", "replicate": "replicate", "circular": "circular"}


def tuple_of(x: Any, n: int) -> tuple[int, ...]:
    out = (x,) * n if isinstance(x, int) else tuple(x)
    if len(out) == 1 and n > 1:
        out = out * n
    if len(out) != n:
        raise ValueError(f"{x} is not a number or {n} numbers")
    return out


class _Convolution(Module):
    """The parameters of both kinds; weight (a, b / groups, *kernel), uniform in ±1/√(b / groups · window)."""

    dims: int
    transposed = False

    def _build(self, in_channels: int, out_channels: int, kernel_size: Size, stride: Size, padding: Size | str,
               dilation: Size, output_padding: Size, groups: int, bias: bool, padding_mode: str, device: Any,
               dtype: Any) -> None:  # fmt: skip
        name, n = type(self).__name__, self.dims
        if groups <= 0 or in_channels % groups or out_channels % groups:
            raise ValueError(
                f"{name}: in_channels {in_channels} and out_channels {out_channels} must be multiples of groups "
                f"{groups}"
            )
        if padding_mode not in MODES:
            raise ValueError(f"{name}: padding_mode is one of {list(MODES)}, not {padding_mode!r}")
        self.in_channels, self.out_channels = in_channels, out_channels
        self.groups, self.padding_mode = groups, padding_mode
        self.kernel_size, self.stride, self.dilation = (tuple_of(x, n) for x in (kernel_size, stride, dilation))
        self.output_padding = tuple_of(output_padding, n)
        if isinstance(padding, str):
            if padding not in ("same", "valid"):
                raise ValueError(f'{name}: padding is numbers, "same" or "valid", not {padding!r}')
            if padding == "same" and any(s != 1 for s in self.stride):
                raise ValueError(f'{name}: padding="same" needs stride 1, not {self.stride}')
        self.padding: tuple[int, ...] | str = padding if isinstance(padding, str) else tuple_of(padding, n)
        first, second = (in_channels, out_channels) if self.transposed else (out_channels, in_channels)
        bound = 1 / math.sqrt(max(second // groups * prod(self.kernel_size), 1))
        self.weight = uniform((first, second // groups, *self.kernel_size), bound, device, dtype)
        self.bias = uniform((out_channels,), bound, device, dtype) if bias else None

    def extra_repr(self) -> str:
        n = self.dims
        said = [f"{self.in_channels}, {self.out_channels}, kernel_size={self.kernel_size}, stride={self.stride}"]
        said += [f"padding={self.padding}"] if self.padding != (0,) * n else []
        said += [f"dilation={self.dilation}"] if self.dilation != (1,) * n else []
        said += [f"output_padding={self.output_padding}"] if self.output_padding != (0,) * n else []
        said += [f"groups={self.groups}"] if self.groups != 1 else []
        said += ["bias=False"] if self.bias is None else []
        return ", ".join(said + ([f"padding_mode={self.padding_mode}"] if self.padding_mode != "zeros" else []))


class _Conv(_Convolution):
    def __init__(self, in_channels: int, out_channels: int, kernel_size: Size, stride: Size = 1,
                 padding: Size | str = 0, dilation: Size = 1, groups: int = 1, bias: bool = True,
                 padding_mode: str = "zeros", device: Any = None, dtype: Any = None):  # fmt: skip
        self._build(in_channels, out_channels, kernel_size, stride, padding, dilation, 0, groups, bias,
                    padding_mode, device, dtype)  # fmt: skip

    def forward(self, input: Tensor) -> Tensor:
        pairs = self._pairs()
        padding = tuple(before for before, _ in pairs)
        if self.padding_mode != "zeros" or any(a != b for a, b in pairs):
            flat = [p for pair in reversed(pairs) for p in pair]
            input, padding = F.pad(input, flat, MODES[self.padding_mode]), (0,) * self.dims
        return getattr(F, f"conv{self.dims}d")(
            input, self.weight, self.bias, self.stride, padding, self.dilation, self.groups
        )

    def _pairs(self) -> list[tuple[int, int]]:
        """(before, after) of each spatial dim."""
        if self.padding == "same":
            whole = [d * (k - 1) for d, k in zip(self.dilation, self.kernel_size)]
            return [(w // 2, w - w // 2) for w in whole]
        return [(0, 0)] * self.dims if isinstance(self.padding, str) else [(p, p) for p in self.padding]


class Conv1d(_Conv):
    """(N, Cin, L) -> (N, Cout, L'); weight (Cout, Cin / groups, K)."""

    dims = 1


class Conv2d(_Conv):
    """(N, Cin, H, W) -> (N, Cout, H', W'); weight (Cout, Cin / groups, KH, KW)."""

    dims = 2


class Conv3d(_Conv):
    """(N, Cin, D, H, W) -> (N, Cout, D', H', W'); weight (Cout, Cin / groups, KD, KH, KW)."""

    dims = 3


class _ConvTranspose(_Convolution):
    transposed = True

    def __init__(self, in_channels: int, out_channels: int, kernel_size: Size, stride: Size = 1, padding: Size = 0,
                 output_padding: Size = 0, groups: int = 1, bias: bool = True, dilation: Size = 1,
                 padding_mode: str = "zeros", device: Any = None, dtype: Any = None):  # fmt: skip
        if padding_mode != "zeros":
            raise ValueError(f'{type(self).__name__}: padding_mode "zeros" only, not {padding_mode!r}')
        self._build(in_channels, out_channels, kernel_size, stride, padding, dilation, output_padding, groups, bias,
                    padding_mode, device, dtype)  # fmt: skip

    def forward(self, input: Tensor, output_size: list[int] | None = None) -> Tensor:
        extra = self.output_padding if output_size is None else self._extra(input, output_size)
        return getattr(F, f"conv_transpose{self.dims}d")(
            input, self.weight, self.bias, self.stride, self.padding, extra, self.groups, self.dilation
        )

    def _extra(self, x: Tensor, output_size: list[int]) -> tuple[int, ...]:
        """The output padding that gives `output_size` (of the spatial dims)."""
        assert not isinstance(self.padding, str)
        want = tuple(output_size)[-self.dims :]
        least = [
            (size - 1) * s - 2 * p + d * (k - 1) + 1
            for size, s, p, d, k in zip(
                x.shape[-self.dims :], self.stride, self.padding, self.dilation, self.kernel_size
            )
        ]
        if len(want) != self.dims or any(not 0 <= w - m < s for w, m, s in zip(want, least, self.stride)):
            raise ValueError(
                f"{type(self).__name__}: output_size {tuple(output_size)} cannot be made from {x.shape}; "
                f"from {least} on, less than the stride {self.stride} more"
            )
        return tuple(w - m for w, m in zip(want, least))


class ConvTranspose1d(_ConvTranspose):
    """The gradient of Conv1d as a layer; weight (Cin, Cout / groups, K)."""

    dims = 1


class ConvTranspose2d(_ConvTranspose):
    """The gradient of Conv2d as a layer; weight (Cin, Cout / groups, KH, KW)."""

    dims = 2


class ConvTranspose3d(_ConvTranspose):
    """The gradient of Conv3d as a layer; weight (Cin, Cout / groups, KD, KH, KW)."""

    dims = 3
