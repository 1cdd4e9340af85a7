"""Pooling to a given output size, adaptive or at random.
Part i of n along a dim of size s is [⌊i·s/n⌋, ⌈(i+1)·s/n⌉)."""

from __future__ import annotations

from math import prod
from typing import TYPE_CHECKING, Any

from manygrad.tensor.ops.convolution import Pair, numbers
from manygrad.tensor.ops.dims import of_all_dims, of_dims
from manygrad.tensor.ops.pooling import largest

if TYPE_CHECKING:
    from manygrad.tensor.tensor import Tensor


def _sizes(name: str, x: Tensor, n: int, output_size: Any) -> tuple[int, ...]:
    """The output's spatial dims; None keeps one."""
    if x.ndim not in (n + 1, n + 2):
        raise ValueError(f"{name}: expected (N, C, {n} dims) or (C, {n} dims), got {x.shape}")
    given = (output_size,) * n if output_size is None or isinstance(output_size, int) else tuple(output_size)
    if len(given) == 1:
        given = given * n
    if len(given) != n or any(g is not None and g < 0 for g in given):
        raise ValueError(f"{name}: output_size is a number or {n} of them (None keeps a dim), not {output_size!r}")
    return tuple(s if g is None else g for g, s in zip(given, x.shape[-n:]))


def _even(x: Tensor, outs: tuple[int, ...]) -> tuple[int, ...] | None:
    """The window of a plain pooling, where the sizes divide."""
    n = len(outs)
    if all(o and s % o == 0 for s, o in zip(x.shape[-n:], outs)):
        return tuple(s // o for s, o in zip(x.shape[-n:], outs))
    return None


def adaptive_avg_pool_nd(n: int, input: Tensor, output_size: Any) -> Tensor:
    x, name = input, f"adaptive_avg_pool{n}d"
    if not x.dtype.is_float:
        raise TypeError(f"{name} needs a float tensor, not {x.dtype.name}; cast with .float() first")
    outs = _sizes(name, x, n, output_size)
    window = _even(x, outs)
    if window is not None:
        return x._pool(window, window, (1,) * n).mean(tuple(range(-n, 0)))
    for i, out in enumerate(outs):  # one dim after the other: the mean of means over a box
        d = x.ndim - n + i
        size = x.shape[d]
        begin, end = x.arange(out) * size // max(out, 1), -(-((x.arange(out) + 1) * size) // max(out, 1))
        at = x.arange(size)
        inside = (at >= begin.unsqueeze(1)) & (at < end.unsqueeze(1))  # (out, size)
        weight = inside.cast(x.dtype) / (end - begin).unsqueeze(1).cast(x.dtype)
        x = x.movedim(d, -1).matmul(weight.T).movedim(-1, d)
    return x


adaptive_avg_pool1d, adaptive_avg_pool2d, adaptive_avg_pool3d = of_all_dims(adaptive_avg_pool_nd)


def _largest_of_parts(
    x: Tensor, starts: list[Tensor], counts: list[Tensor], widths: list[int], return_indices: bool
) -> Any:
    """The largest of boxes: along spatial dim i part o has `counts[i][o]` ≤ widths[i] elements from `starts[i][o]` on.

    `starts` (out,) or (N, C, out) each. Dims are read by position, one after the other: (N, C, *out, *width).
    """
    n = len(starts)
    sizes = x.shape[-n:]
    lead = x.shape[:-n]
    for i in range(n):  # x: (*lead, out and width of the dims before i, the dims from i on)
        out, width = starts[i].shape[-1], widths[i]
        step = x.arange(width)
        at = (starts[i].unsqueeze(-1) + step).clamp(max=sizes[i] - 1)  # (..., out, width)
        inside = step < counts[i].unsqueeze(-1)
        before, after = x.shape[len(lead) : len(lead) + 2 * i], x.shape[len(lead) + 2 * i + 1 :]
        flat = at.reshape((*at.shape[:-2], out * width))
        if flat.ndim == 1:
            x = x._gather({len(lead) + 2 * i: flat})
        else:
            index = flat.reshape((*lead, *(1,) * len(before), out * width, *(1,) * len(after)))
            x = x._gather_along(len(lead) + 2 * i, index.expand((*lead, *before, out * width, *after)))
        x = x.reshape((*lead, *before, out, width, *after))
        valid = inside.reshape(
            (*(lead if inside.ndim > 2 else ()), *(1,) * len(before), out, width, *(1,) * len(after))
        )
        x = valid._where(x, x.dtype.min).cast(x.dtype)
    k = len(lead)
    x = x.permute(*range(k), *[k + 2 * i for i in range(n)], *[k + 2 * i + 1 for i in range(n)])
    values = largest(x, n)
    if not return_indices:
        return values
    rest = x.flatten(-n).detach().argmax(-1)
    flat, where = rest * 0, rest
    for i in reversed(range(n)):
        at, where = where % widths[i], where // widths[i]
        out = starts[i].shape[-1]
        begin = starts[i].reshape((*(lead if starts[i].ndim > 1 else ()), *(1,) * i, out, *(1,) * (n - 1 - i)))
        flat = flat + (begin + at) * prod(sizes[i + 1 :])
    return values, flat


def _adaptive_max_pool_nd(n: int, input: Tensor, output_size: Any, return_indices: bool = False) -> Any:
    x = input
    outs = _sizes(f"adaptive_max_pool{n}d", x, n, output_size)
    sizes = x.shape[-n:]
    starts = [x.arange(o) * s // max(o, 1) for o, s in zip(outs, sizes)]
    ends = [-(-((x.arange(o) + 1) * s) // max(o, 1)) for o, s in zip(outs, sizes)]
    widths = [max((-(-(i + 1) * s // o) - i * s // o for i in range(o)), default=1) for o, s in zip(outs, sizes)]
    window = _even(x, outs)
    if window is not None and not return_indices:
        return largest(x._pool(window, window, (1,) * n), n)
    return _largest_of_parts(x, starts, [e - b for b, e in zip(starts, ends)], widths, return_indices)


def _adaptive_max_pool_nd_with_indices(n: int, input: Tensor, output_size: Any, return_indices: bool = False) -> Any:
    return _adaptive_max_pool_nd(n, input, output_size, True)


adaptive_max_pool1d, adaptive_max_pool2d, adaptive_max_pool3d = of_all_dims(_adaptive_max_pool_nd)
adaptive_max_pool1d_with_indices, adaptive_max_pool2d_with_indices, adaptive_max_pool3d_with_indices = of_all_dims(
    _adaptive_max_pool_nd_with_indices
)


def _fractional_max_pool_nd(n: int, input: Tensor, kernel_size: Pair, output_size: Any = None, output_ratio: Any = None,
                            return_indices: bool = False, _random_samples: Tensor | None = None) -> Any:  # fmt: skip
    """Windows at pseudo-random places, in order, of which the last ends at the border (Graham, 2014). `_random_samples`
    (N, C, n) uniform on [0, 1): as in PyTorch, of images samples[..., 0] places along W and [..., 1] along H, of
    volumes 0, 1, 2 along D, H, W."""
    x, name, samples = input, f"fractional_max_pool{n}d", _random_samples
    if (output_size is None) == (output_ratio is None):
        raise ValueError(f"{name}: give output_size or output_ratio, one of them")
    k, sizes, lead = numbers(kernel_size, n, "kernel_size"), x.shape[-n:], x.shape[:-n]
    ratio = (output_ratio,) * n if isinstance(output_ratio, float) else output_ratio
    outs = (
        numbers(output_size, n, "output_size")
        if output_size is not None
        else tuple(int(s * r) for s, r in zip(sizes, ratio))
    )
    if any(o + w - 1 > s for o, w, s in zip(outs, k, sizes)):
        raise ValueError(f"{name}: {outs} windows of {k} do not fit into {sizes}")
    shape = lead if len(lead) == 2 else (1, *lead)
    u = x.rand(*shape, n, device=x.device) if samples is None else samples
    u = u.reshape((*lead, n)).cast("float64")
    starts = []
    for i, (size, out, width) in enumerate(zip(sizes, outs, k)):
        mine = u[..., i if n == 3 else n - 1 - i].unsqueeze(-1)  # (*lead, 1)
        alpha = (size - width) / (out - 1) if out > 1 else 0.0
        at = x.arange(out)
        place = ((at + mine) * alpha).trunc() - (mine * alpha).trunc()
        starts.append(at.eq(out - 1)._where(float(size - width), place).cast("int64"))
    counts = [s * 0 + w for s, w in zip(starts, k)]
    return _largest_of_parts(x, starts, counts, list(k), return_indices)


def _fractional_max_pool_nd_with_indices(n: int, input: Tensor, kernel_size: Pair, output_size: Any = None,
                                         output_ratio: Any = None, return_indices: bool = False,
                                         _random_samples: Tensor | None = None) -> Any:  # fmt: skip
    return _fractional_max_pool_nd(n, input, kernel_size, output_size, output_ratio, True, _random_samples)


fractional_max_pool2d, fractional_max_pool3d = (of_dims(n, _fractional_max_pool_nd) for n in (2, 3))
fractional_max_pool2d_with_indices, fractional_max_pool3d_with_indices = (
    of_dims(n, _fractional_max_pool_nd_with_indices) for n in (2, 3)
)
