"""Convolutions and transposed ones over 1 to 3 dims: strides, dilation, groups, ways to pad, sizes asked for."""

from __future__ import annotations

from typing import Any

import numpy as np

from tests.nn.layers.layer import Layer, data
from tests.tensor.cases.convolution import conv, conv_transpose
from tests.tensor.cases.joining import np_pad

BOTH = ("weight", "bias")
EDGES = {"reflect": "reflect", "replicate": "replicate", "circular": "circular"}


def f(
    dims: int, x: np.ndarray, args: tuple[Any, ...], variant: str = "", padded: tuple[int, ...] = (), **kwargs: Any
) -> Layer:
    """`padded`: what a padding_mode other than zeros puts around the input before a convolution without padding."""

    def oracle(w: dict[str, np.ndarray], a: np.ndarray) -> np.ndarray:
        named = {k: v for k, v in kwargs.items() if k not in ("bias", "padding_mode")}
        if padded:
            a, named["padding"] = np_pad(a, padded, kwargs["padding_mode"]), 0
        return conv(a, w["weight"], w.get("bias"), **named)

    return Layer(f"Conv{dims}d", (x,), oracle, args, kwargs, BOTH if kwargs.get("bias", True) else BOTH[:1], variant)


def t(
    dims: int,
    x: np.ndarray,
    args: tuple[Any, ...],
    variant: str = "",
    output_size: list[int] | None = None,
    extra: int | tuple[int, ...] = 0,
    **kwargs: Any,
) -> Layer:
    """`extra`: the output padding that `output_size` comes to."""

    def oracle(w: dict[str, np.ndarray], a: np.ndarray) -> np.ndarray:
        named = {k: v for k, v in kwargs.items() if k not in ("bias", "output_padding")}
        out = conv_transpose(
            a if a.ndim == dims + 2 else a[None],
            w["weight"],
            w.get("bias"),
            output_padding=kwargs.get("output_padding", extra),
            **named,
        )
        return out if a.ndim == dims + 2 else out[0]

    call = None if output_size is None else lambda module, a: module(a, output_size)
    return Layer(
        f"ConvTranspose{dims}d",
        (x,),
        oracle,
        args,
        kwargs,
        BOTH if kwargs.get("bias", True) else BOTH[:1],
        variant,
        call=call,
    )


LAYERS = [
    f(1, data(3, 2, 6), (2, 3, 3)), f(1, data(3, 2, 7), (2, 4, 2), "all", stride=2, padding=1, dilation=2, groups=2),
    f(1, data(2, 5), (2, 1, 3), "no batch", bias=False),
    f(1, data(3, 2, 5), (2, 1, 4), "same", padding="same"), f(1, data(3, 1, 5), (1, 2, 3), "valid", padding="valid"),
    *(f(1, data(3, 2, 4), (2, 1, 3), mode, (2, 2), padding=2, padding_mode=mode) for mode in EDGES),
    f(1, data(3, 1, 5), (1, 1, 4), "same, circular", (1, 2), padding="same", padding_mode="circular"),
    f(2, data(3, 2, 4, 3), (2, 2, (3, 2))),
    f(2, data(3, 2, 5, 4), (2, 2, 2), "all", stride=(2, 1), padding=(1, 0), dilation=(1, 2), groups=2, bias=False),
    f(2, data(3, 1, 3, 4), (1, 2, (2, 3)), "same", padding="same", dilation=(2, 1)),
    f(2, data(3, 1, 3, 4), (1, 1, 2), "reflect", (2, 2, 1, 1), padding=(1, 2), padding_mode="reflect"),
    f(3, data(3, 2, 2, 3, 2), (2, 2, (2, 2, 1))),
    f(3, data(3, 2, 3, 2, 3), (2, 2, 2), "all", stride=(1, 2, 1), padding=1, groups=2),
    f(3, data(3, 1, 2, 2, 3), (1, 1, 2), "replicate", (1, 1, 1, 1, 0, 0), padding=(0, 1, 1), padding_mode="replicate"),
    t(1, data(3, 2, 4), (2, 3, 3)),
    t(1, data(3, 2, 3), (2, 4, 3), "all", stride=3, padding=1, output_padding=1, groups=2, dilation=2),
    t(1, data(2, 3), (2, 1, 2), "no batch", bias=False),
    t(1, data(3, 2, 3), (2, 1, 3), "output_size", [8], 1, stride=3, padding=1),
    t(2, data(3, 2, 2, 3), (2, 2, (3, 2))),
    t(2, data(3, 2, 3, 2), (2, 2, 2), "all", stride=(2, 3), padding=(1, 0), output_padding=(0, 1), groups=2,
      bias=False),
    t(2, data(3, 1, 2, 2), (1, 2, 3), "output_size", [4, 3], (1, 0), stride=2, padding=1),
    t(2, data(3, 1, 2, 2), (1, 1, 2), "whole output_size", [3, 1, 5, 4], (1, 0), stride=2),
    t(3, data(3, 2, 2, 1, 2), (2, 1, (2, 1, 2))),
    t(3, data(3, 2, 1, 2, 2), (2, 2, 2), "all", stride=2, padding=(1, 0, 0), output_padding=1, groups=2),
    t(3, data(3, 1, 2, 1, 2), (1, 1, 2), "output_size", [5, 2, 4], (1, 0, 0), stride=2),
]  # fmt: skip
