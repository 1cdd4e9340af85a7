"""Pooling as layers, its inverse, and fractional pooling with given samples."""

from __future__ import annotations

from typing import Any

import numpy as np

from tests.nn.layers.layer import FUNCTION, Layer, data, distinct
from tests.tensor.cases.pooling import boxes, largest

SIZES = {1: (3, 2, 5), 2: (3, 1, 4, 3), 3: (3, 1, 3, 3, 3)}


def f(name: str, x: np.ndarray, *args: Any, oracle: str = "", variant: str = "", **kwargs: Any) -> Layer:
    """The oracle (the function's of the same name unless given) takes the constructor's arguments."""
    function = oracle or name.replace("MaxPool", "_max_pool").replace("AvgPool", "_avg_pool").replace(
        "LPPool", "lp_pool"
    ).lower().strip("_")
    named = {k: v for k, v in kwargs.items() if k != "return_indices"}
    return Layer(name, (x,), lambda a: FUNCTION[function](a, *args, **named), args, kwargs, variant=variant)


def unpool(n: int, size: tuple[int, ...], variant: str = "", **kwargs: Any) -> Layer:
    """Windows of 2 of (3, 1, *size), put back."""
    values, indices = largest(distinct(3, 1, *size), n, boxes(size, 2), True)
    call = (lambda module, x, i: module(x, i, output_size=size)) if variant else None
    return Layer(
        f"MaxUnpool{n}d",
        (values, indices),
        lambda x, i: FUNCTION[f"max_unpool{n}d"](x, i, 2, size),
        (2,),
        variant=variant,
        call=call,
    )


def fractional(n: int) -> Layer:
    x, u = distinct(3, 2, *(5, 4, 4)[:n]), data(3, 2, n, low=0.1, high=0.9)
    size = (3, 2, 2)[:n]
    return Layer(f"FractionalMaxPool{n}d", (x[:2],),
                 lambda w, a: FUNCTION[f"fractional_max_pool{n}d"](a, 2, size, w["_random_samples"]), (2, size),
                 {"_random_samples": u[:2]},
                 ("_random_samples",), axes=(None,))  # fmt: skip


LAYERS = [
    *(f(f"MaxPool{n}d", distinct(*s), 2) for n, s in SIZES.items()),
    *(f(f"MaxPool{n}d", distinct(*s), 2, 1, 1, 2, ceil_mode=True, variant="all") for n, s in SIZES.items()),
    *(f(f"MaxPool{n}d", distinct(*s), 3, 2, padding=1, return_indices=True, oracle=f"max_pool{n}d_with_indices",
        variant="indices") for n, s in SIZES.items()),
    *(f(f"AvgPool{n}d", data(*s), 2) for n, s in SIZES.items()),
    *(f(f"AvgPool{n}d", data(*s), 3, 2, 1, True, False, variant="all") for n, s in SIZES.items()),
    *(f(f"AvgPool{n}d", data(*SIZES[n]), 2, 1, divisor_override=3, variant="divisor") for n in (2, 3)),
    *(f(f"LPPool{n}d", data(*s, low=0.5), 3.0, 2) for n, s in SIZES.items()),
    *(f(f"LPPool{n}d", data(*s, low=0.5), 2.0, 2, 1, variant="stride") for n, s in SIZES.items()),
    *(f(f"AdaptiveAvgPool{n}d", data(*s), 2, oracle=f"adaptive_avg_pool{n}d") for n, s in SIZES.items()),
    f("AdaptiveAvgPool2d", data(*SIZES[2]), (3, None), oracle="adaptive_avg_pool2d", variant="None"),
    *(f(f"AdaptiveMaxPool{n}d", distinct(*s), 2, oracle=f"adaptive_max_pool{n}d") for n, s in SIZES.items()),
    *(f(f"AdaptiveMaxPool{n}d", distinct(*s), 2, return_indices=True, oracle=f"adaptive_max_pool{n}d_with_indices",
        variant="indices") for n, s in SIZES.items()),
    unpool(1, (4,)), unpool(2, (4, 2)), unpool(3, (2, 4, 2)), unpool(1, (5,), "output_size"),
    unpool(2, (4, 3), "output_size"), unpool(3, (2, 3, 3), "output_size"), fractional(2), fractional(3),
]  # fmt: skip
