"""Pooling as modules; `stride=None` means the kernel size."""

from __future__ import annotations

from typing import Any

from manygrad.nn import functional as F
from manygrad.nn.held import REQUIRED, Held
from manygrad.tensor.tensor import Tensor


class _Pool(Held):
    """`stride` is the kernel size unless given, and reads so."""

    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__(*args, **kwargs)
        if self.stride is None:
            self.stride: Any = self.kernel_size  # type: ignore[attr-defined]


MAX: dict[str, Any] = {
    "kernel_size": REQUIRED,
    "stride": None,
    "padding": 0,
    "dilation": 1,
    "return_indices": False,
    "ceil_mode": False,
}
AVG: dict[str, Any] = {
    "kernel_size": REQUIRED,
    "stride": None,
    "padding": 0,
    "ceil_mode": False,
    "count_include_pad": True,
}
_MAX_SHOWN, _AVG_SHOWN = "kernel_size stride padding dilation ceil_mode", "kernel_size stride padding"


class MaxPool1d(_Pool, of="max_pool1d", show=_MAX_SHOWN, **MAX):
    """The largest of each window of (N, C, L)."""


class MaxPool2d(_Pool, of="max_pool2d", show=_MAX_SHOWN, **MAX):
    """The largest of each window of (N, C, H, W)."""


class MaxPool3d(_Pool, of="max_pool3d", show=_MAX_SHOWN, **MAX):
    """The largest of each window of (N, C, D, H, W)."""


class AvgPool1d(_Pool, of="avg_pool1d", show=_AVG_SHOWN, **AVG):
    """The mean of each window of (N, C, L)."""


class AvgPool2d(_Pool, of="avg_pool2d", show=_AVG_SHOWN, **AVG, divisor_override=None):
    """The mean of each window of (N, C, H, W)."""


class AvgPool3d(_Pool, of="avg_pool3d", show=_AVG_SHOWN, **AVG, divisor_override=None):
    """The mean of each window of (N, C, D, H, W)."""


class LPPool1d(Held, of="lp_pool1d", norm_type=REQUIRED, kernel_size=REQUIRED, stride=None, ceil_mode=False):
    """The p-norm of each window."""


class LPPool2d(Held, of="lp_pool2d", norm_type=REQUIRED, kernel_size=REQUIRED, stride=None, ceil_mode=False):
    """The p-norm of each window."""


class LPPool3d(Held, of="lp_pool3d", norm_type=REQUIRED, kernel_size=REQUIRED, stride=None, ceil_mode=False):
    """The p-norm of each window."""


class AdaptiveAvgPool1d(Held, of="adaptive_avg_pool1d", output_size=REQUIRED):
    """Means of as many parts as output_size says."""


class AdaptiveAvgPool2d(Held, of="adaptive_avg_pool2d", output_size=REQUIRED):
    """Means of as many parts as output_size says."""


class AdaptiveAvgPool3d(Held, of="adaptive_avg_pool3d", output_size=REQUIRED):
    """Means of as many parts as output_size says."""


class AdaptiveMaxPool1d(Held, of="adaptive_max_pool1d", show="output_size", output_size=REQUIRED, return_indices=False):
    """The largest of each part."""


class AdaptiveMaxPool2d(Held, of="adaptive_max_pool2d", show="output_size", output_size=REQUIRED, return_indices=False):
    """The largest of each part."""


class AdaptiveMaxPool3d(Held, of="adaptive_max_pool3d", show="output_size", output_size=REQUIRED, return_indices=False):
    """The largest of each part."""


FRACTIONAL: dict[str, Any] = {
    "kernel_size": REQUIRED,
    "output_size": None,
    "output_ratio": None,
    "return_indices": False,
    "_random_samples": None,
}


class _Fractional(Held):
    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__(*args, **kwargs)
        name, size, ratio = type(self).__name__, self.output_size, self.output_ratio  # type: ignore[attr-defined]
        if (size is None) == (ratio is None):
            raise ValueError(
                f"{name}: give output_size or output_ratio, not {'both' if size is not None else 'neither'}"
            )
        ratios = ratio if isinstance(ratio, (tuple, list)) else (ratio,)
        if ratio is not None and not all(0 < r < 1 for r in ratios):
            raise ValueError(f"{name}: output_ratio must lie between 0 and 1, got {ratio}")


class FractionalMaxPool2d(_Fractional, of="fractional_max_pool2d", show="kernel_size", **FRACTIONAL):
    """The largest of windows at random, uneven steps."""


class FractionalMaxPool3d(_Fractional, of="fractional_max_pool3d", show="kernel_size", **FRACTIONAL):
    """The largest of windows at random, uneven steps."""


class _MaxUnpool(_Pool):
    """Values back at the places (indices) that MaxPool took them from, zeros elsewhere."""

    def forward(self, input: Tensor, indices: Tensor, output_size: Any = None) -> Tensor:
        return getattr(F, self._function)(input, indices, self.kernel_size, self.stride, self.padding, output_size)  # type: ignore[attr-defined]


class MaxUnpool1d(_MaxUnpool, of="max_unpool1d", show=_AVG_SHOWN, kernel_size=REQUIRED, stride=None, padding=0):
    """The inverse of MaxPool1d."""


class MaxUnpool2d(_MaxUnpool, of="max_unpool2d", show=_AVG_SHOWN, kernel_size=REQUIRED, stride=None, padding=0):
    """The inverse of MaxPool2d."""


class MaxUnpool3d(_MaxUnpool, of="max_unpool3d", show=_AVG_SHOWN, kernel_size=REQUIRED, stride=None, padding=0):
    """The inverse of MaxPool3d."""
