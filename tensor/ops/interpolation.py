"""Resizing and sampling of images: interpolate, grid_sample, affine_grid. Dims are resized one after the other."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from manygrad.tensor.dtype import accumulate_dtype, dtypes
from manygrad.tensor.ops.adaptive_pooling import adaptive_avg_pool_nd

if TYPE_CHECKING:
    from manygrad.tensor.tensor import Tensor

SPATIAL = {"linear": 1, "bilinear": 2, "trilinear": 3, "bicubic": 2}
CUBIC_A = -0.75  # Keys' parameter as PyTorch has it; −0.5 when antialiasing


def interpolate(input: Tensor, size: Any = None, scale_factor: Any = None, mode: str = "nearest",
                align_corners: bool | None = None, recompute_scale_factor: bool | None = None,
                antialias: bool = False) -> Tensor:  # fmt: skip
    """(N, C, *in) -> (N, C, *size), or to sizes ⌊in · scale_factor⌋. Modes: nearest, nearest-exact, linear (1 spatial
    dim), bilinear, bicubic (2), trilinear (3), area. All but the nearest ones take float types; bilinear and bicubic
    also uint8, rounded to the nearest."""
    n = input.ndim - 2
    if n < 1 or (mode not in ("nearest", "nearest-exact", "area") and SPATIAL.get(mode) != n):
        known = [m for m, k in SPATIAL.items() if k == n]
        raise ValueError(
            f"interpolate: input {input.shape} and mode {mode!r} do not fit; with {n} spatial dims there are nearest, "
            f"nearest-exact, area {known}"
        )
    if (size is None) == (scale_factor is None):
        raise ValueError("interpolate: give size or scale_factor, one of them")
    if align_corners is not None and mode in ("nearest", "nearest-exact", "area"):
        raise ValueError(f"interpolate: align_corners has no meaning with mode {mode!r}")
    if antialias and mode not in ("bilinear", "bicubic"):
        raise ValueError(f"interpolate: antialias works with bilinear and bicubic, not {mode!r}")
    ins = input.shape[2:]
    if size is not None:
        outs = (size,) * n if isinstance(size, int) else tuple(size)
        scales: list[Any] = [None] * n
    else:
        factors = (scale_factor,) * n if isinstance(scale_factor, (int, float)) else tuple(scale_factor)
        outs = tuple(math.floor(i * f) for i, f in zip(ins, factors))
        scales = [None] * n if recompute_scale_factor else list(factors)
    if len(outs) != n or any(o < 1 for o in outs):
        raise ValueError(f"interpolate: {ins} cannot become {outs}; expected {n} positive sizes")
    kind = input.dtype
    if not (kind.is_float or mode.startswith("nearest") or (kind is dtypes.uint8 and n == 2 and mode != "area")):
        ways = "nearest or nearest-exact" + (", or for uint8 bilinear or bicubic" if n == 2 else "")
        raise TypeError(
            f"interpolate: mode {mode!r} averages elements and {kind.name} has no fractions; "
            f"cast with .float() first, or use {ways}"
        )
    if mode == "area":
        return adaptive_avg_pool_nd(n, input, outs)
    averages = not mode.startswith("nearest")
    x = input.cast(dtypes.float32) if averages and (kind.is_half or kind is dtypes.uint8) else input
    for i, (size_in, out, factor) in enumerate(zip(ins, outs, scales)):
        if size_in == out and (factor is None or factor == 1):
            continue
        ratio = _ratio(size_in, out, factor, bool(align_corners))
        d = 2 + i
        if mode.startswith("nearest"):
            x = _nearest(x, d, out, ratio, mode == "nearest-exact")
        elif antialias:
            x = _filtered(x, d, out, ratio, mode == "bicubic")
        else:
            x = (
                _cubic(x, d, out, ratio, bool(align_corners))
                if mode == "bicubic"
                else _linear(x, d, out, ratio, bool(align_corners))
            )
    if x is input:
        return x._copied()
    return (x + 0.5).floor().clamp(0, 255).cast(kind) if averages and kind is dtypes.uint8 else x.cast(kind)


def _ratio(size: int, out: int, factor: float | None, align_corners: bool) -> float:
    """Input positions a step of the output."""
    if align_corners:
        return (size - 1) / (out - 1) if out > 1 else 0.0
    return 1.0 / factor if factor is not None else size / out


def _nearest(x: Tensor, d: int, out: int, ratio: float, exact: bool) -> Tensor:
    size = x.shape[d]
    if out % size == 0 and abs(ratio * out - size) < 1e-6:  # each element so many times: no positions to read
        return x.repeat_interleave(out // size, dim=d)
    at = x.arange(out).cast("float32")
    at = (((at + 0.5) if exact else at) * ratio).floor().clamp(max=size - 1)
    return x._gather({d: at.cast("int64")})


def _source(x: Tensor, out: int, ratio: float, align_corners: bool, clamp: bool) -> Tensor:
    """Where in the input the output's elements lie: (out,)."""
    at = x.arange(out).cast("float64" if x.dtype.name == "float64" else "float32")
    place = at * ratio if align_corners else (at + 0.5) * ratio - 0.5
    return place.clamp(min=0.0) if clamp else place


def _along(x: Tensor, weights: Tensor, d: int) -> Tensor:
    return weights.cast(x.dtype).reshape((-1, *(1,) * (x.ndim - 1 - d)))


def _linear(x: Tensor, d: int, out: int, ratio: float, align_corners: bool) -> Tensor:
    size = x.shape[d]
    place = _source(x, out, ratio, align_corners, clamp=not align_corners)
    low = place.floor().clamp(max=size - 1)
    first = low.cast("int64")
    left, right = x._gather({d: first}), x._gather({d: (first + 1).clamp(max=size - 1)})
    part = _along(x, place - low, d)
    return left * (1 - part) + right * part


def _cubic_weights(t: Tensor) -> list[Tensor]:
    """Weights of the elements at −1, 0, 1, 2 around a place t past element 0."""
    a = CUBIC_A

    def near(x: Tensor) -> Tensor:
        return ((a + 2) * x - (a + 3)) * x * x + 1

    def far(x: Tensor) -> Tensor:
        return ((a * x - 5 * a) * x + 8 * a) * x - 4 * a

    return [far(t + 1), near(t), near(1 - t), far(2 - t)]


def _cubic(x: Tensor, d: int, out: int, ratio: float, align_corners: bool) -> Tensor:
    size = x.shape[d]
    place = _source(x, out, ratio, align_corners, clamp=False)
    low = place.floor()
    first, total = low.cast("int64"), None
    for k, w in enumerate(_cubic_weights(place - low)):
        part = x._gather({d: (first + (k - 1)).clamp(0, size - 1)}) * _along(x, w, d)
        total = part if total is None else total + part
    assert total is not None
    return total


def _filtered(x: Tensor, d: int, out: int, ratio: float, cubic: bool) -> Tensor:
    """Antialiased: the filter is as wide as the output's step, where that is wider than the input's;
    a product with (out, in) weights."""
    size = x.shape[d]
    scale = max(ratio, 1.0)
    centre = ((x.arange(out).cast("float64") + 0.5) * ratio).unsqueeze(1)
    support = (2.0 if cubic else 1.0) * scale
    at = x.arange(size).cast("float64")
    begin, end = (centre - support + 0.5).trunc().clamp(min=0), (centre + support + 0.5).trunc().clamp(max=size)
    distance = ((at + 0.5 - centre) / scale).abs()
    if cubic:
        a = -0.5
        near, far = (
            ((a + 2) * distance - (a + 3)) * distance * distance + 1,
            ((a * distance - 5 * a) * distance + 8 * a) * distance - 4 * a,
        )
        weight = (distance < 1)._where(near, (distance < 2)._where(far, 0.0))
    else:
        weight = (1 - distance).clamp(min=0.0)
    weight = ((at >= begin) & (at < end))._where(weight, 0.0)
    weight = (weight / weight.sum(1, keepdim=True)).cast(x.dtype)
    return x.movedim(d, -1).matmul(weight.T).movedim(-1, d)


def upsample(
    input: Tensor, size: Any = None, scale_factor: Any = None, mode: str = "nearest", align_corners: bool | None = None
) -> Tensor:
    return interpolate(input, size, scale_factor, mode, align_corners)


def upsample_nearest(input: Tensor, size: Any = None, scale_factor: Any = None) -> Tensor:
    return interpolate(input, size, scale_factor, "nearest")


def upsample_bilinear(input: Tensor, size: Any = None, scale_factor: Any = None) -> Tensor:
    return interpolate(input, size, scale_factor, "bilinear", align_corners=True)


# *** sampling at any place ***


def affine_grid(theta: Tensor, size: Any, align_corners: bool | None = None) -> Tensor:
    """Places for grid_sample: theta (N, 2, 3) and size (N, C, H, W) -> (N, H, W, 2);
    theta (N, 3, 4) and (N, C, D, H, W) -> (N, D, H, W, 3)."""
    n = len(size) - 2
    if n not in (2, 3) or theta.shape[1:] != (n, n + 1):
        raise ValueError(
            f"affine_grid: theta {theta.shape} and size {tuple(size)} do not fit; "
            "expected (N, 2, 3) with 4 sizes or (N, 3, 4) with 5"
        )
    outs = tuple(size)[2:]
    axes = []
    for i, o in enumerate(outs):
        at = theta.arange(o).cast(theta.dtype)
        line = (
            (at * (2.0 / (o - 1) if o > 1 else 0.0) - (1.0 if o > 1 else 0.0))
            if align_corners
            else (at * 2 + 1) / o - 1
        )
        axes.append(line.reshape(tuple(o if j == i else 1 for j in range(n)))._broadcast(outs))
    base = axes[-1].stack(*reversed(axes[:-1]), axes[0].ones_like(), dim=-1).reshape(-1, n + 1)  # x, y(, z), 1
    return base.matmul(theta.mT).reshape((theta.shape[0], *outs, n))


def grid_sample(
    input: Tensor, grid: Tensor, mode: str = "bilinear", padding_mode: str = "zeros", align_corners: bool | None = None
) -> Tensor:
    """input (N, C, *in) at the places grid (N, *out, 2 or 3), x first, −1 and 1 being the borders -> (N, C, *out)."""
    n = input.ndim - 2
    if n not in (2, 3) or grid.ndim != n + 2 or grid.shape[-1] != n or grid.shape[0] != input.shape[0]:
        raise ValueError(
            f"grid_sample: input {input.shape} and grid {grid.shape} do not fit; expected (N, C, H, W) with (N, *, *, "
            "2) or (N, C, D, H, W) with (N, *, *, *, 3)"
        )
    if mode not in ("bilinear", "nearest", "bicubic") or (mode == "bicubic" and n != 2):
        raise ValueError(f"grid_sample: mode is bilinear, nearest or (for images) bicubic, not {mode!r}")
    if padding_mode not in ("zeros", "border", "reflection"):
        raise ValueError(f"grid_sample: padding_mode is zeros, border or reflection, not {padding_mode!r}")
    sizes, outs = input.shape[2:], grid.shape[1:-1]
    places = []
    for i, size in enumerate(sizes):
        g = grid[..., n - 1 - i].reshape(grid.shape[0], -1)  # (N, P)
        place = (g + 1) * ((size - 1) / 2) if align_corners else ((g + 1) * size - 1) * 0.5
        places.append(place if mode == "bicubic" else _bordered(place, size, padding_mode, bool(align_corners)))
    flat = input.flatten(2)  # (N, C, prod(sizes))

    def read(index: list[Tensor]) -> Tensor:
        """(N, C, P): the elements at whole positions, 0 outside."""
        position, inside = None, None
        for at, size in zip(index, sizes):
            at = _bordered(at, size, padding_mode, bool(align_corners)) if mode == "bicubic" else at
            valid = (at >= 0) & (at <= size - 1)
            whole = at.clamp(0, size - 1).cast("int64")
            position = whole if position is None else position * size + whole
            inside = valid if inside is None else inside & valid
        assert position is not None and inside is not None
        picked = flat._gather_along(2, position.unsqueeze(1).expand((flat.shape[0], flat.shape[1], position.shape[1])))
        return inside.unsqueeze(1)._where(picked, 0.0).cast(input.dtype)

    if mode == "nearest":
        out = read([p.round() for p in places])
    else:
        reach = range(-1, 3) if mode == "bicubic" else range(2)
        lows = [p.floor().detach() for p in places]
        wide = accumulate_dtype(input.dtype)  # (places and weights are of the grid's type, as in PyTorch; sums wider)
        weights = [
            [w.cast(wide) for w in (_cubic_weights(x) if mode == "bicubic" else [1 - x, x])]
            for x in (p - low for p, low in zip(places, lows))
        ]
        corners: list[Any] = [([], [])]
        for i in range(n):
            corners = [([*at, lows[i] + k], [*ws, weights[i][j]]) for at, ws in corners for j, k in enumerate(reach)]
        total: Any = None
        for at, ws in corners:
            weight = math.prod(ws[1:], start=ws[0])
            part = read(at) * weight.unsqueeze(1)
            total = part if total is None else total + part
        out = total.cast(input.dtype)
    return out.reshape((*input.shape[:2], *outs))


def _bordered(place: Tensor, size: int, padding_mode: str, align_corners: bool) -> Tensor:
    """Places outside the input moved to its border, or reflected into it."""
    if padding_mode == "reflection":
        low, high = (0.0, size - 1.0) if align_corners else (-0.5, size - 0.5)
        span = high - low
        if span <= 0:
            return place * 0
        away = place - low
        away = (away < 0)._where(-away, away)
        extra = away.fmod(span)
        flips = (away / span).floor()
        place = (flips.fmod(2.0).eq(0))._where(extra + low, span - extra + low)
    return (
        place if padding_mode == "zeros" else place.hardtanh(0, size - 1)
    )  # (no gradient at the border, as in PyTorch)
