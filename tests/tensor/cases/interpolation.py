"""Cases of resizing and sampling images, against the formulas element by element."""

from __future__ import annotations

from itertools import product
from math import floor
from typing import Any

import numpy as np
from hypothesis import strategies as st

from tests.tensor.cases.case import Case, Draw, Sample, array

MODES = {
    1: ["nearest", "nearest-exact", "linear", "area"],
    2: ["nearest", "nearest-exact", "bilinear", "bicubic", "area"],
    3: ["nearest", "trilinear", "area"],
}


def cubic(t: float, a: float) -> float:
    t = abs(t)
    return ((a + 2) * t - (a + 3)) * t * t + 1 if t < 1 else ((a * t - 5 * a) * t + 8 * a) * t - 4 * a if t < 2 else 0.0


def weights(size: int, out: int, ratio: float, mode: str, align: bool, antialias: bool) -> np.ndarray:
    """(out, size): how much of each input element every output element takes."""
    w = np.zeros((out, size))
    for o in range(out):
        if mode == "area":
            begin, end = o * size // out, -(-(o + 1) * size // out)
            w[o, begin:end] = 1 / (end - begin)
        elif mode.startswith("nearest"):
            w[o, min(floor(np.float32(o + 0.5 * (mode == "nearest-exact")) * np.float32(ratio)), size - 1)] = 1
        elif antialias:
            scale, centre = max(ratio, 1.0), (o + 0.5) * ratio
            reach = (2.0 if mode == "bicubic" else 1.0) * scale
            at = range(max(int(centre - reach + 0.5), 0), min(int(centre + reach + 0.5), size))
            for i in at:
                t = (i + 0.5 - centre) / scale
                w[o, i] = cubic(t, -0.5) if mode == "bicubic" else max(0.0, 1 - abs(t))
            w[o] /= w[o].sum()
        else:
            place = o * ratio if align else (o + 0.5) * ratio - 0.5
            if mode == "bicubic":
                low = floor(place)
                for k in range(-1, 3):
                    w[o, min(max(low + k, 0), size - 1)] += cubic(place - low - k, -0.75)
            else:
                place = max(place, 0.0)
                low = min(floor(place), size - 1)
                w[o, low] += 1 - (place - low)
                w[o, min(low + 1, size - 1)] += place - low
    return w


def interpolate(
    x: np.ndarray,
    size: Any = None,
    scale_factor: Any = None,
    mode: str = "nearest",
    align_corners: bool | None = None,
    antialias: bool = False,
) -> np.ndarray:
    for d in range(2, x.ndim):
        n = x.shape[d]
        factor = None if scale_factor is None else scale_factor
        out = size[d - 2] if size is not None else floor(n * scale_factor)
        ratio = (
            ((n - 1) / (out - 1) if out > 1 else 0.0) if align_corners else n / out if factor is None else 1 / factor
        )
        if n == out and factor in (None, 1):
            continue
        x = np.moveaxis(np.moveaxis(x, d, -1) @ weights(n, out, ratio, mode, bool(align_corners), antialias).T, -1, d)
    return x


def images(draw: Draw) -> Sample:
    n = draw(st.integers(1, 3))
    x = array(draw, (draw(st.integers(1, 2)), 2, *(draw(st.integers(2, 5)) for _ in range(n))), low=-2, high=2)
    mode = draw(st.sampled_from(MODES[n]))
    kwargs: dict[str, Any] = {"mode": mode}
    if draw(st.booleans()):
        kwargs["size"] = tuple(draw(st.integers(1, 7)) for _ in range(n))
    else:
        kwargs["scale_factor"] = draw(st.sampled_from([0.5, 1.5, 2.0]))
    if mode.endswith("linear") or mode == "bicubic":
        if draw(st.booleans()):
            kwargs["align_corners"] = True
        elif n == 2 and draw(st.booleans()):
            kwargs["antialias"] = True
    return Sample((x,), (), kwargs)


def upsampled(draw: Draw) -> Sample:
    return Sample(
        (array(draw, (1, 2, draw(st.integers(2, 4)), draw(st.integers(2, 4))), low=-2, high=2),),
        (),
        {"scale_factor": 2},
    )


def grid(x: np.ndarray, g: np.ndarray, mode: str, padding_mode: str, align_corners: bool) -> np.ndarray:
    n = x.ndim - 2
    out = np.zeros((*x.shape[:2], *g.shape[1:-1]))

    def place(v: float, size: int) -> float:
        return (v + 1) * (size - 1) / 2 if align_corners else ((v + 1) * size - 1) / 2

    def border(p: float, size: int) -> float:
        if padding_mode == "reflection":
            low, high = (0.0, size - 1.0) if align_corners else (-0.5, size - 0.5)
            span = high - low
            if span <= 0:
                return 0.0
            away = abs(p - low)
            extra = away % span
            p = extra + low if int(away // span) % 2 == 0 else span - extra + low
        return p if padding_mode == "zeros" else min(max(p, 0), size - 1)

    def read(b: int, at: tuple[int, ...]) -> np.ndarray:
        if mode == "bicubic":
            at = tuple(int(border(a, s)) if padding_mode != "zeros" else a for a, s in zip(at, x.shape[2:]))
        return x[(b, slice(None), *at)] if all(0 <= a < s for a, s in zip(at, x.shape[2:])) else np.zeros(x.shape[1])

    for at in np.ndindex(*g.shape[:-1]):
        p = [place(g[at][n - 1 - i], x.shape[2 + i]) for i in range(n)]
        p = p if mode == "bicubic" else [border(v, s) for v, s in zip(p, x.shape[2:])]
        if mode == "nearest":
            value = read(at[0], tuple(int(np.round(v)) for v in p))
        else:
            reach = range(-1, 3) if mode == "bicubic" else range(2)
            value = np.zeros(x.shape[1])
            for k in product(reach, repeat=n):
                w = 1.0
                for v, j in zip(p, k):
                    t = v - floor(v) - j
                    w *= cubic(t, -0.75) if mode == "bicubic" else 1 - abs(t)
                value = value + read(at[0], tuple(floor(v) + j for v, j in zip(p, k))) * w
        out[(at[0], slice(None), *at[1:])] = value
    return out


def sampled(draw: Draw) -> Sample:
    n = draw(st.integers(2, 3))
    mode = draw(st.sampled_from(["bilinear", "nearest", *(["bicubic"] if n == 2 else [])]))
    x = array(draw, (2, 2, *(draw(st.integers(2, 4)) for _ in range(n))), low=-2, high=2)
    g = np.random.default_rng(draw(st.integers(0, 1000))).uniform(
        -1.4, 1.4, (2, *(draw(st.integers(1, 3)) for _ in range(n)), n)
    )
    return Sample(
        (x, g),
        (),
        {
            "mode": mode,
            "padding_mode": draw(st.sampled_from(["zeros", "border", "reflection"])),
            "align_corners": draw(st.booleans()),
        },
    )


def affine(theta: np.ndarray, size: tuple[int, ...], align_corners: bool) -> np.ndarray:
    outs, n = size[2:], len(size) - 2
    lines = [
        np.linspace(-1, 1, o)
        if align_corners and o > 1
        else np.zeros(o)
        if align_corners
        else (2 * np.arange(o) + 1) / o - 1
        for o in outs
    ]
    mesh = np.meshgrid(*lines, indexing="ij")
    base = np.stack([*reversed(mesh), np.ones(outs)], -1).reshape(-1, n + 1)
    return (base @ np.swapaxes(theta, -1, -2)).reshape(theta.shape[0], *outs, n)


def thetas(draw: Draw) -> Sample:
    n = draw(st.integers(2, 3))
    return Sample(
        (array(draw, (2, n, n + 1)),), ((2, 3, *(draw(st.integers(1, 4)) for _ in range(n))), draw(st.booleans()))
    )


CASES = [
    Case("functional.interpolate", interpolate, images),
    Case("functional.upsample", lambda x, scale_factor: interpolate(x, scale_factor=scale_factor), upsampled),
    Case("functional.upsample_nearest", lambda x, scale_factor: interpolate(x, scale_factor=scale_factor), upsampled),
    Case(
        "functional.upsample_bilinear",
        lambda x, scale_factor: interpolate(x, scale_factor=scale_factor, mode="bilinear", align_corners=True),
        upsampled,
    ),
    # places near a whole number round either way
    Case("functional.grid_sample", grid, sampled, rtol={"float32": 1e-3}, dtypes=("float32", "float64")),
    Case("functional.affine_grid", affine, thetas),
]
