"""Layers that move elements: padding, shuffles, windows as columns, resizing, views."""

from __future__ import annotations

from typing import Any

import numpy as np

from tests.nn.layers.layer import Layer, data
from tests.tensor.cases.interpolation import interpolate
from tests.tensor.cases.joining import np_pad
from tests.tensor.cases.shuffling import channel_shuffle, fold, pixel_shuffle, pixel_unshuffle, unfold

IMAGES = {1: data(3, 2, 4), 2: data(3, 1, 3, 4), 3: data(3, 1, 2, 3, 2)}
MODES = {
    "Zero": "constant",
    "Constant": "constant",
    "Reflection": "reflect",
    "Replication": "replicate",
    "Circular": "circular",
}
UNEVEN = {1: (2, 1), 2: (1, 2, 0, 2), 3: (1, 0, 2, 1, 0, 1)}


def pads(kind: str, n: int) -> list[Layer]:
    """The same number on all sides, and uneven ones."""
    value = (1.5,) if kind == "Constant" else ()
    named = {"mode": MODES[kind]} | ({"value": 1.5} if value else {})
    both: list[tuple[Any, tuple[int, ...], str]] = [(1, (1,) * 2 * n, ""), (UNEVEN[n], UNEVEN[n], "uneven")]
    return [
        Layer(f"{kind}Pad{n}d", (IMAGES[n],), lambda x, p=p: np_pad(x, p, **named), (given, *value), variant=variant)
        for given, p, variant in both
    ]


def f(name: str, x: np.ndarray, oracle: Any, *args: Any, variant: str = "", **kwargs: Any) -> Layer:
    return Layer(name, (x,), oracle, args, kwargs, variant=variant)


COLUMNS: dict[str, Any] = {"kernel_size": (2, 3), "dilation": (2, 1), "padding": 1, "stride": (1, 2)}

LAYERS = [
    *(layer for kind in MODES for n in IMAGES for layer in pads(kind, n)),
    f("Flatten", data(3, 2, 2), lambda x: x.reshape(3, 4)),
    f("Flatten", data(3, 2, 2), lambda x: x.reshape(6, 2), 0, 1, variant="0, 1"),
    f("Unflatten", data(3, 6), lambda x: x.reshape(3, 2, 3), 1, (2, 3)),
    f("Unflatten", data(3, 6), lambda x: x.reshape(3, 3, 2), -1, (3, -1), variant="-1"),
    f("Unfold", data(3, 2, 4, 3), lambda x: unfold(x, 2), 2),
    f("Unfold", data(3, 1, 5, 4), lambda x: unfold(x, **COLUMNS), **COLUMNS, variant="all"),
    f("Fold", data(3, 8, 6), lambda x: fold(x, (4, 3), 2), (4, 3), 2),
    f("Fold", data(3, 6, 10), lambda x: fold(x, (5, 4), **COLUMNS), (5, 4), **COLUMNS, variant="all"),
    f("PixelShuffle", data(3, 8, 2, 1), lambda x: pixel_shuffle(x, 2), 2),
    f("PixelUnshuffle", data(3, 1, 4, 2), lambda x: pixel_unshuffle(x, 2), 2),
    f("ChannelShuffle", data(3, 6, 2), lambda x: channel_shuffle(x, 3), 3),
    f("Upsample", data(3, 1, 3), lambda x: interpolate(x, size=(5,)), 5),
    f("Upsample", data(3, 1, 3), lambda x: interpolate(x, scale_factor=2, mode="linear"), scale_factor=2, mode="linear",
      variant="linear"),
    f("Upsample", data(3, 1, 3, 2), lambda x: interpolate(x, scale_factor=2, mode="bicubic", align_corners=True),
      scale_factor=2, mode="bicubic", align_corners=True, variant="bicubic"),
    f("Upsample", data(3, 1, 2, 2, 1), lambda x: interpolate(x, (3, 4, 2), mode="trilinear"), (3, 4, 2),
      mode="trilinear", variant="trilinear"),
    f("UpsamplingNearest2d", data(3, 1, 2, 3), lambda x: interpolate(x, scale_factor=2), scale_factor=2),
    f("UpsamplingNearest2d", data(3, 1, 2, 3), lambda x: interpolate(x, (3, 4)), (3, 4), variant="size"),
    f("UpsamplingBilinear2d", data(3, 1, 2, 3),
      lambda x: interpolate(x, scale_factor=2, mode="bilinear", align_corners=True), scale_factor=2),
    f("UpsamplingBilinear2d", data(3, 1, 2, 3), lambda x: interpolate(x, (3, 4), mode="bilinear", align_corners=True),
      (3, 4), variant="size"),
    f("Identity", data(3, 2), lambda x: x), f("Identity", data(3, 2), lambda x: x, 54, unused=0.1, variant="arguments"),
]  # fmt: skip
