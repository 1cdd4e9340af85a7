"""Cases of pixel and channel shuffles, windows as columns, bilinear forms."""

from __future__ import annotations

from typing import Any

import numpy as np
from hypothesis import strategies as st

from tests.tensor.cases.case import Case, Draw, Sample, array
from tests.tensor.cases.convolution import tuples


def pixel_shuffle(x: np.ndarray, r: int) -> np.ndarray:
    *lead, c, h, w = x.shape
    out = np.zeros((*lead, c // r // r, h * r, w * r), x.dtype)
    for i, j in np.ndindex(r, r):
        out[..., i::r, j::r] = x[..., i * r + j :: r * r, :, :]
    return out


def pixel_unshuffle(x: np.ndarray, r: int) -> np.ndarray:
    *lead, c, h, w = x.shape
    out = np.zeros((*lead, c * r * r, h // r, w // r), x.dtype)
    for i, j in np.ndindex(r, r):
        out[..., i * r + j :: r * r, :, :] = x[..., i::r, j::r]
    return out


def channel_shuffle(x: np.ndarray, groups: int) -> np.ndarray:
    return x[:, [g * (x.shape[1] // groups) + c for c in range(x.shape[1] // groups) for g in range(groups)]]


def column(
    x_shape: tuple[int, ...], k: tuple[int, ...], d: tuple[int, ...], p: tuple[int, ...], s: tuple[int, ...]
) -> tuple[list[int], Any]:
    outs = [(x_shape[2 + i] + 2 * p[i] - d[i] * (k[i] - 1) - 1) // s[i] + 1 for i in range(2)]
    return outs, lambda o, i, j: (o[0] * s[0] + i * d[0], o[1] * s[1] + j * d[1])


def unfold(x: np.ndarray, kernel_size: Any, dilation: Any = 1, padding: Any = 0, stride: Any = 1) -> np.ndarray:
    k, d, p, s = (tuples(v, 2) for v in (kernel_size, dilation, padding, stride))
    outs, at = column(x.shape, k, d, p, s)
    padded = np.pad(x, [(0, 0), (0, 0), (p[0],) * 2, (p[1],) * 2])
    out = np.zeros((*x.shape[:2], *k, *outs), x.dtype)
    for i, j in np.ndindex(*k):
        for o in np.ndindex(*outs):
            out[:, :, i, j, o[0], o[1]] = padded[(slice(None), slice(None), *at(o, i, j))]
    return out.reshape(x.shape[0], -1, outs[0] * outs[1])


def fold(
    x: np.ndarray, output_size: Any, kernel_size: Any, dilation: Any = 1, padding: Any = 0, stride: Any = 1
) -> np.ndarray:
    size, k, d, p, s = (tuples(v, 2) for v in (output_size, kernel_size, dilation, padding, stride))
    c = x.shape[1] // (k[0] * k[1])
    outs, at = column((0, 0, *size), k, d, p, s)
    out = np.zeros((x.shape[0], c, size[0] + 2 * p[0], size[1] + 2 * p[1]), x.dtype)
    parts = x.reshape(x.shape[0], c, *k, *outs)
    for i, j in np.ndindex(*k):
        for o in np.ndindex(*outs):
            out[(slice(None), slice(None), *at(o, i, j))] += parts[:, :, i, j, o[0], o[1]]
    return out[:, :, p[0] : p[0] + size[0], p[1] : p[1] + size[1]]


def settings_of_windows(draw: Draw) -> dict[str, Any]:
    return {
        "kernel_size": (draw(st.integers(1, 3)), 2),
        "padding": draw(st.integers(0, 1)),
        "stride": draw(st.integers(1, 2)),
        "dilation": draw(st.integers(1, 2)),
    }


def unfolded(draw: Draw) -> Sample:
    return Sample((array(draw, (2, 2, draw(st.integers(5, 6)), 5)),), (), settings_of_windows(draw))


def folded(draw: Draw) -> Sample:
    kwargs, size = settings_of_windows(draw), (draw(st.integers(5, 6)), 5)
    shape = unfold(np.zeros((2, 2, *size)), **kwargs).shape
    return Sample((array(draw, shape),), (size,), kwargs)


def forms(draw: Draw) -> Sample:
    lead = tuple(draw(st.lists(st.integers(1, 3), max_size=2)))
    a, b, o = (draw(st.integers(1, 4)) for _ in range(3))
    arrays = [array(draw, (*lead, a)), array(draw, (*lead, b)), array(draw, (o, a, b))]
    return Sample((*arrays, array(draw, (o,))) if draw(st.booleans()) else tuple(arrays))


def with_factor(times: tuple[int, int, int]) -> Any:
    def samples(draw: Draw) -> Sample:
        r = draw(st.integers(1, 3))
        lead = tuple(draw(st.lists(st.integers(1, 2), max_size=2)))
        sizes = [draw(st.integers(1, 3)) * r**t for t in times]
        return Sample((array(draw, (*lead, *sizes)),), (r,))

    return samples


def grouped(draw: Draw) -> Sample:
    g = draw(st.integers(1, 3))
    return Sample((array(draw, (2, g * draw(st.integers(1, 3)), *draw(st.sampled_from([(3,), (2, 3)])))),), (g,))


CASES = [
    Case("functional.pixel_shuffle", pixel_shuffle, with_factor((2, 0, 0))),
    Case("functional.pixel_unshuffle", pixel_unshuffle, with_factor((0, 1, 1))),
    Case("functional.channel_shuffle", channel_shuffle, grouped),
    Case("functional.unfold", unfold, unfolded),
    Case("functional.fold", fold, folded),
    Case("functional.bilinear", lambda a, b, w, c=0.0: np.einsum("...i,oij,...j->...o", a, w, b) + c, forms),
]
