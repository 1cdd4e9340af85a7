"""Modules that only move elements: flatten, fold, shuffle, upsample."""

from __future__ import annotations

from typing import Any

from manygrad.nn.held import REQUIRED, Held
from manygrad.nn.module import Module
from manygrad.tensor.tensor import Tensor


class Flatten(Module):
    """Dims start_dim..end_dim become one."""

    def __init__(self, start_dim: int = 1, end_dim: int = -1):
        self.start_dim, self.end_dim = start_dim, end_dim

    def forward(self, input: Tensor) -> Tensor:
        return input.flatten(self.start_dim, self.end_dim)

    def extra_repr(self) -> str:
        return f"start_dim={self.start_dim}, end_dim={self.end_dim}"


class Unflatten(Module):
    """Dim `dim` becomes the dims of unflattened_size."""

    def __init__(self, dim: int, unflattened_size: tuple[int, ...]):
        self.dim, self.unflattened_size = dim, tuple(unflattened_size)

    def forward(self, input: Tensor) -> Tensor:
        return input.unflatten(self.dim, self.unflattened_size)

    def extra_repr(self) -> str:
        return f"dim={self.dim}, unflattened_size={self.unflattened_size}"


class Fold(Held, of="fold", output_size=REQUIRED, kernel_size=REQUIRED, dilation=1, padding=0, stride=1):
    """Windows as columns, added up into an image."""


class Unfold(Held, of="unfold", kernel_size=REQUIRED, dilation=1, padding=0, stride=1):
    """The windows of an image as columns."""


class PixelShuffle(Held, of="pixel_shuffle", upscale_factor=REQUIRED):
    """(N, C r², H, W) -> (N, C, H r, W r)."""


class PixelUnshuffle(Held, of="pixel_unshuffle", downscale_factor=REQUIRED):
    """(N, C, H r, W r) -> (N, C r², H, W)."""


class ChannelShuffle(Held, of="channel_shuffle", groups=REQUIRED):
    """Channels of the groups in turn."""


class Upsample(
    Held,
    of="interpolate",
    size=None,
    scale_factor=None,
    mode="nearest",
    align_corners=None,
    recompute_scale_factor=None,
):
    """The image at another size."""

    def extra_repr(self) -> str:
        size: Any = self.size  # type: ignore[attr-defined]
        return f"{f'scale_factor={self.scale_factor}' if size is None else f'size={size}'}, mode={self.mode!r}"  # type: ignore[attr-defined]


class UpsamplingNearest2d(Upsample, of="interpolate", fixed={"mode": "nearest"}, size=None, scale_factor=None):
    """Upsample(mode="nearest")."""

    mode = "nearest"


class UpsamplingBilinear2d(
    Upsample, of="interpolate", fixed={"mode": "bilinear", "align_corners": True}, size=None, scale_factor=None
):
    """Upsample(mode="bilinear", align_corners=True)."""

    mode = "bilinear"
