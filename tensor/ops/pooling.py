"""Pooling: the mean, the largest element or the p-norm of windows.
(N, C, *in) or (C, *in), any number of spatial dims."""

from __future__ import annotations

from math import prod
from typing import TYPE_CHECKING, Any

from manygrad.tensor.dtype import dtypes
from manygrad.tensor.ops.convolution import Pair, numbers
from manygrad.tensor.ops.dims import of_all_dims, of_dims
from manygrad.tensor.ops.elementary import with_gradient

if TYPE_CHECKING:
    from manygrad.tensor.tensor import Tensor


class PoolingMixin:
    def _pool(self: Tensor, kernel: tuple[int, ...], stride: tuple[int, ...], dilation: tuple[int, ...]) -> Tensor:
        """(..., *spatial) -> (..., *out, *kernel); without overlap a plain reshape."""
        n = len(kernel)
        if kernel == stride and dilation == (1,) * n and all(size >= k for size, k in zip(self.shape[-n:], kernel)):
            lead = self.shape[:-n]
            outs = [size // k for size, k in zip(self.shape[-n:], kernel)]
            t = self.shrink((None,) * len(lead) + tuple((0, o * k) for o, k in zip(outs, kernel)))
            t = t.reshape(*lead, *[x for o, k in zip(outs, kernel) for x in (o, k)])
            base = len(lead)
            return t.permute(*range(base), *[base + 2 * i for i in range(n)], *[base + 2 * i + 1 for i in range(n)])
        return self.unfold_windows(kernel, stride, dilation)

    def max_pool2d(
        self: Tensor,
        kernel_size: Pair = 2,
        stride: Pair | None = None,
        padding: Pair = 0,
        dilation: Pair = 1,
        ceil_mode: bool = False,
        return_indices: bool = False,
    ) -> Any:
        return max_pool2d(self, kernel_size, stride, padding, dilation, ceil_mode, return_indices)

    def avg_pool2d(
        self: Tensor,
        kernel_size: Pair = 2,
        stride: Pair | None = None,
        padding: Pair = 0,
        ceil_mode: bool = False,
        count_include_pad: bool = True,
        divisor_override: int | None = None,
    ) -> Tensor:
        return avg_pool2d(self, kernel_size, stride, padding, ceil_mode, count_include_pad, divisor_override)


class _Windows:
    """Where the windows of a pooling lie, per spatial dim."""

    def __init__(
        self,
        name: str,
        x: Tensor,
        n: int,
        kernel: Pair,
        stride: Pair | None,
        padding: Pair,
        dilation: Pair,
        ceil_mode: bool,
    ):
        if x.ndim not in (n + 1, n + 2):
            raise ValueError(f"{name}: expected (N, C, {n} dims) or (C, {n} dims), got {x.shape}")
        self.kernel, self.padding, self.dilation = (
            numbers(kernel, n, "kernel_size"),
            numbers(padding, n, "padding"),
            numbers(dilation, n, "dilation"),
        )
        self.stride = self.kernel if stride is None or stride == () or stride == [] else numbers(stride, n, "stride")
        self.sizes = x.shape[-n:]
        if any(2 * p > k for p, k in zip(self.padding, self.kernel)):
            raise ValueError(f"{name}: padding {self.padding} must be at most half of the window {self.kernel}")
        self.outs = []
        for size, k, s, p, d in zip(self.sizes, self.kernel, self.stride, self.padding, self.dilation):
            room = size + 2 * p - d * (k - 1) - 1
            out = (-(-room // s) if ceil_mode else room // s) + 1
            if ceil_mode and (out - 1) * s >= size + p:  # no window starts behind the input
                out -= 1
            if out < 1:
                raise ValueError(
                    f"{name}: a window of {self.kernel} (dilation {self.dilation}) is larger than the input's "
                    f"{self.sizes} with padding {self.padding}"
                )
            self.outs.append(out)

    def of(self, x: Tensor, value: float) -> Tensor:
        """(..., *out, *kernel), what lies outside the input being `value`."""
        ends = [
            (o - 1) * s + d * (k - 1) + 1 - size - p
            for o, s, d, k, size, p in zip(self.outs, self.stride, self.dilation, self.kernel, self.sizes, self.padding)
        ]
        if any(self.padding) or any(e > 0 for e in ends):
            x = x.pad(
                (*((0, 0),) * (x.ndim - len(self.outs)), *((p, max(e, 0)) for p, e in zip(self.padding, ends))),
                value=value,
            )
        return x._pool(self.kernel, self.stride, self.dilation).shrink(
            (*(None,) * (x.ndim - len(self.outs)), *((0, o) for o in self.outs), *(None,) * len(self.outs))
        )

    def positions(self, inside: Tensor) -> Tensor:
        """The flat position in the input of element number `inside` (row-major in its window), `inside` (..., *out)."""
        flat, rest = inside * 0, inside
        for i in reversed(range(len(self.outs))):
            at = rest % self.kernel[i]
            rest = rest // self.kernel[i]
            start = (inside.arange(self.outs[i]) * self.stride[i] - self.padding[i]).reshape(
                (self.outs[i], *(1,) * (len(self.outs) - 1 - i))
            )
            flat = flat + (start + at * self.dilation[i]) * prod(self.sizes[i + 1 :])
        return flat

    def divisors(self, x: Tensor, include_pad: bool) -> Tensor | int:
        """How many elements each window counts: (*out), or one number where all count the same."""
        per_dim = []
        for size, k, s, p, o in zip(self.sizes, self.kernel, self.stride, self.padding, self.outs):
            ends = [(i * s - p, min(i * s - p + k, size + p)) for i in range(o)]
            per_dim.append([e - b if include_pad else min(e, size) - max(b, 0) for b, e in ends])
        if all(len(set(c)) == 1 for c in per_dim):
            return prod(c[0] for c in per_dim)
        total: Any = None
        for i, (counts, s, p, k, size) in enumerate(zip(per_dim, self.stride, self.padding, self.kernel, self.sizes)):
            start = x.arange(len(counts)) * s - p
            count = (
                (start + k).clamp(max=size + p) - start
                if include_pad
                else (start + k).clamp(max=size) - start.clamp(min=0)
            )
            count = count.reshape((len(counts), *(1,) * (len(per_dim) - 1 - i)))
            total = count if total is None else total * count
        return total


# *** the largest element ***


def _max_pool_nd(n: int, input: Tensor, kernel_size: Pair, stride: Pair | None = None, padding: Pair = 0,
                 dilation: Pair = 1, ceil_mode: bool = False, return_indices: bool = False) -> Any:  # fmt: skip
    """The largest element of each window; with `return_indices` also its flat position in the input (int64)."""
    w = _Windows(f"max_pool{n}d", input, n, kernel_size, stride, padding, dilation, ceil_mode)
    windows = w.of(input, input.dtype.min)
    values = largest(windows, n)
    return (values, w.positions(windows.flatten(-n).detach().argmax(-1))) if return_indices else values


def _max_pool_nd_with_indices(n: int, input: Tensor, kernel_size: Pair, stride: Pair | None = None, padding: Pair = 0,
                              dilation: Pair = 1, ceil_mode: bool = False,
                              return_indices: bool = False) -> Any:  # fmt: skip
    return _max_pool_nd(n, input, kernel_size, stride, padding, dilation, ceil_mode, True)


max_pool1d, max_pool2d, max_pool3d = of_all_dims(_max_pool_nd)
max_pool1d_with_indices, max_pool2d_with_indices, max_pool3d_with_indices = of_all_dims(_max_pool_nd_with_indices)


def largest(windows: Tensor, n: int) -> Tensor:
    """The largest over the last `n` dims; of equal ones the first has the gradient."""
    dims, kernel = tuple(range(-n, 0)), windows.shape[-n:]
    values = windows.amax(dims)
    if not windows.dtype.is_float:
        return values

    def backward(g: Tensor, windows: Tensor) -> tuple[Tensor]:
        value, g = (t.reshape((*t.shape, *(1,) * n)) for t in (largest(windows, n), g))
        order = windows.arange(prod(kernel)).cast(dtypes.int32).reshape(kernel)
        found = (windows.eq(value) | windows.isnan())._where(-order, -prod(kernel))
        return (order.eq(-found.amax(dims, keepdim=True))._where(g, 0.0),)

    return with_gradient(values, "max_pool", (n, kernel), backward, windows)


def _max_unpool_nd(n: int, input: Tensor, indices: Tensor, kernel_size: Pair, stride: Pair | None = None,
                   padding: Pair = 0, output_size: Any = None) -> Tensor:  # fmt: skip
    """Values back at the positions that max_pool gave, zeros elsewhere."""
    x, name = input, f"max_unpool{n}d"
    k = numbers(kernel_size, n, "kernel_size")
    s = k if stride is None else numbers(stride, n, "stride")
    p = numbers(padding, n, "padding")
    if indices.shape != x.shape or x.ndim not in (n + 1, n + 2):
        raise ValueError(
            f"{name}: values {x.shape} and indices {indices.shape} must have one shape, (N, C, {n} dims) or (C, "
            f"{n} dims)"
        )
    outs = (
        tuple((i - 1) * b - 2 * c + a for i, a, b, c in zip(x.shape[-n:], k, s, p))
        if output_size is None
        else tuple(output_size)[-n:]
    )
    lead = x.shape[:-n]
    at, values = indices.flatten(-n), x.flatten(-n)
    out = x.new_zeros((*lead, prod(outs))).scatter(-1, at, values)

    # of values for one place, which max_pool took from it, each has the gradient
    def backward(g: Tensor, values: Tensor, at: Tensor) -> tuple[Tensor, None]:
        return g._gather_along(-1, at), None

    if x.dtype.is_float:
        out = with_gradient(out, "max_unpool", None, backward, values, at)
    return out.reshape((*lead, *outs))


max_unpool1d, max_unpool2d, max_unpool3d = of_all_dims(_max_unpool_nd)


# *** means ***


def _avg_pool_nd(n: int, input: Tensor, kernel_size: Pair, stride: Pair | None = None, padding: Pair = 0,
                 ceil_mode: bool = False, count_include_pad: bool = True,
                 divisor_override: int | None = None) -> Tensor:  # fmt: skip
    """The mean of each window; padding counts as zeros, or with count_include_pad=False not at all."""
    x, name = input, f"avg_pool{n}d"
    w = _Windows(name, x, n, kernel_size, stride, padding, 1, ceil_mode)
    if divisor_override == 0:
        raise ValueError(f"{name}: divisor_override is 0")
    total = w.of(x, 0.0 if x.dtype.is_float else 0).sum(tuple(range(-n, 0)))
    count = divisor_override if divisor_override is not None else w.divisors(x, count_include_pad)
    if x.dtype.is_int:  # (whole numbers, towards zero, as in PyTorch)
        return total.div(count, rounding_mode="trunc").cast(x.dtype)
    return total * (1.0 / count) if isinstance(count, int) else total / count.cast(total.dtype)


def avg_pool1d(input: Tensor, kernel_size: Pair, stride: Pair | None = None, padding: Pair = 0,
               ceil_mode: bool = False, count_include_pad: bool = True) -> Tensor:  # fmt: skip
    """The mean of each window; padding counts as zeros, or with count_include_pad=False not at all."""
    return _avg_pool_nd(1, input, kernel_size, stride, padding, ceil_mode, count_include_pad)


avg_pool2d, avg_pool3d = of_dims(2, _avg_pool_nd), of_dims(3, _avg_pool_nd)


def _lp_pool_nd(n: int, input: Tensor, norm_type: float, kernel_size: Pair, stride: Pair | None = None,
                ceil_mode: bool = False) -> Tensor:  # fmt: skip
    """(Σ xᵖ over each window)^(1/p), as PyTorch has it: windows cut off by
    ceil_mode are scaled up to their full size."""
    mean = _avg_pool_nd(n, input.pow(norm_type), kernel_size, stride, 0, ceil_mode)
    return (mean.sign() * mean.abs().relu() * prod(numbers(kernel_size, n, "kernel_size"))).pow(1.0 / norm_type)


lp_pool1d, lp_pool2d, lp_pool3d = of_all_dims(_lp_pool_nd)
