"""Normalisation layers. Statistics are of the global batch at any sharding, so SyncBatchNorm is BatchNorm."""

from __future__ import annotations

from typing import Any

from manygrad.nn import functional as F
from manygrad.nn.held import REQUIRED, Held
from manygrad.nn.module import Module
from manygrad.nn.parameter import Buffer, Parameter
from manygrad.tensor.dtype import accumulate_dtype, dtypes
from manygrad.tensor.tensor import Tensor


def _affine(
    shape: tuple[int, ...], affine: bool, bias: bool, device: Any, dtype: Any
) -> tuple[Parameter | None, Parameter | None]:
    return (
        Parameter(Tensor.ones(*shape, dtype=dtype, device=device)) if affine else None,
        Parameter(Tensor.zeros(*shape, dtype=dtype, device=device)) if affine and bias else None,
    )


class _Tracking(Module):
    """Scale, shift, and running statistics of `num_features` channels (dim 1). `dims`: how many dims an input may have;
    None: any."""

    dims: tuple[int, ...] | None = None
    _batch_at_front = True  # always; else an input with a dim less has no batch dim

    def __init__(self, num_features: int, eps: float = 1e-5, momentum: float | None = 0.1, affine: bool = True,
                 track_running_stats: bool = True, device: Any = None, dtype: Any = None, *,
                 bias: bool = True):  # fmt: skip
        self.num_features, self.eps, self.momentum = num_features, eps, momentum
        self.affine, self.track_running_stats = affine, track_running_stats
        self.weight, self.bias = _affine((num_features,), affine, bias, device, dtype)
        self.running_mean = self.running_var = self.num_batches_tracked = None
        if track_running_stats:
            self.running_mean = Buffer(Tensor.zeros(num_features, dtype=dtype, device=device).contiguous())
            self.running_var = Buffer(Tensor.ones(num_features, dtype=dtype, device=device).contiguous())
            self.num_batches_tracked = Buffer(Tensor.full((), 0, dtype=dtypes.int64, device=device).contiguous())

    def _check(self, x: Tensor) -> None:
        if self.dims is not None and x.ndim not in self.dims:
            raise ValueError(
                f"{type(self).__name__} takes {' or '.join(map(str, self.dims))} dims, not shape {x.shape}"
            )
        at = 1 if self.dims is None or x.ndim == max(self.dims) or self._batch_at_front else 0
        if x.ndim <= at or x.shape[at] != self.num_features:
            raise ValueError(
                f"{type(self).__name__} of {self.num_features} features got {x.shape}, whose dim {at} differs"
            )

    def reset_running_stats(self) -> None:
        if self.running_mean is not None:
            for t, v in ((self.running_mean, 0.0), (self.running_var, 1.0), (self.num_batches_tracked, 0)):
                t.assign(v)  # type: ignore[union-attr]

    def reset_parameters(self) -> None:
        self.reset_running_stats()
        for t, v in ((self.weight, 1.0), (self.bias, 0.0)):
            if t is not None:
                t.assign(v)

    def extra_repr(self) -> str:
        return (
            f"{self.num_features}, eps={self.eps}, momentum={self.momentum}, affine={self.affine}, "
            f"bias={self.bias is not None}, track_running_stats={self.track_running_stats}"
        )


class BatchNorm(_Tracking):
    """Normalises each channel (dim 1) over all other dims; in training by the batch, after that by what was tracked."""

    def forward(self, input: Tensor) -> Tensor:
        self._check(input)
        training = self._is_training
        momentum: Any = self.momentum
        if training and self.running_mean is not None:
            count = self.num_batches_tracked
            assert count is not None and self.running_var is not None
            self.running_mean._store(self.running_var, count)
            count.assign(count + 1)
            if momentum is None:  # plain means of all batches
                momentum = count.cast(accumulate_dtype(self.running_mean.dtype)).reciprocal()
        by_batch = training or self.running_mean is None
        return F.batch_norm(
            input,
            self.running_mean,
            self.running_var,
            self.weight,
            self.bias,
            by_batch,
            0.0 if momentum is None else momentum,
            self.eps,
        )


class BatchNorm1d(BatchNorm):
    """BatchNorm of (N, C) or (N, C, L)."""

    dims = (2, 3)


class BatchNorm2d(BatchNorm):
    """BatchNorm of (N, C, H, W)."""

    dims = (4,)


class BatchNorm3d(BatchNorm):
    """BatchNorm of (N, C, D, H, W)."""

    dims = (5,)


class SyncBatchNorm(BatchNorm):
    """BatchNorm: it counts the global batch at any sharding."""

    def __init__(self, num_features: int, eps: float = 1e-5, momentum: float | None = 0.1, affine: bool = True,
                 track_running_stats: bool = True, process_group: Any = None, device: Any = None, dtype: Any = None, *,
                 bias: bool = True):  # fmt: skip
        super().__init__(num_features, eps, momentum, affine, track_running_stats, device, dtype, bias=bias)

    @classmethod
    def convert_sync_batchnorm(cls, module: Module, process_group: Any = None) -> Module:
        """Nothing to convert."""
        return module


class _InstanceNorm(_Tracking):
    """Normalises each channel of each sample."""

    _batch_at_front = False

    def __init__(self, num_features: int, eps: float = 1e-5, momentum: float = 0.1, affine: bool = False,
                 track_running_stats: bool = False, device: Any = None, dtype: Any = None, *,
                 bias: bool = True):  # fmt: skip
        super().__init__(num_features, eps, momentum, affine, track_running_stats, device, dtype, bias=bias)

    def forward(self, input: Tensor) -> Tensor:
        self._check(input)
        by_input = self._is_training or self.running_mean is None
        alone = self.dims is not None and input.ndim < max(self.dims)
        x = input.unsqueeze(0) if alone else input
        momentum = 0.0 if self.momentum is None else self.momentum
        out = F.instance_norm(
            x, self.running_mean, self.running_var, self.weight, self.bias, by_input, momentum, self.eps
        )
        return out.squeeze(0) if alone else out


class InstanceNorm1d(_InstanceNorm):
    """InstanceNorm of (N, C, L) or (C, L)."""

    dims = (2, 3)


class InstanceNorm2d(_InstanceNorm):
    """InstanceNorm of (N, C, H, W) or (C, H, W)."""

    dims = (3, 4)


class InstanceNorm3d(_InstanceNorm):
    """InstanceNorm of (N, C, D, H, W) or (C, D, H, W)."""

    dims = (4, 5)


class LayerNorm(Module):
    """Normalises the last dims to mean 0 and variance 1, then scales and shifts."""

    def __init__(self, normalized_shape: int | tuple[int, ...], eps: float = 1e-5, elementwise_affine: bool = True,
                 bias: bool = True, device: Any = None, dtype: Any = None):  # fmt: skip
        self.normalized_shape = (normalized_shape,) if isinstance(normalized_shape, int) else tuple(normalized_shape)
        self.eps, self.elementwise_affine = eps, elementwise_affine
        self.weight, self.bias = _affine(self.normalized_shape, elementwise_affine, bias, device, dtype)

    def forward(self, input: Tensor) -> Tensor:
        return F.layer_norm(input, self.normalized_shape, self.weight, self.bias, self.eps)

    def extra_repr(self) -> str:
        return (
            f"{self.normalized_shape}, eps={self.eps}, elementwise_affine={self.elementwise_affine}, "
            f"bias={self.bias is not None}"
        )


class RMSNorm(Module):
    """Divides by the root of the mean square over the last dims, then scales."""

    def __init__(
        self,
        normalized_shape: int | tuple[int, ...],
        eps: float | None = None,
        elementwise_affine: bool = True,
        device: Any = None,
        dtype: Any = None,
    ):
        self.normalized_shape = (normalized_shape,) if isinstance(normalized_shape, int) else tuple(normalized_shape)
        self.eps, self.elementwise_affine = eps, elementwise_affine
        self.weight, _ = _affine(self.normalized_shape, elementwise_affine, False, device, dtype)

    def forward(self, input: Tensor) -> Tensor:
        return F.rms_norm(input, self.normalized_shape, self.weight, self.eps)

    def extra_repr(self) -> str:
        return f"{self.normalized_shape}, eps={self.eps}, elementwise_affine={self.elementwise_affine}"


class GroupNorm(Module):
    """Normalises the channels (dim 1) of each sample in groups."""

    def __init__(
        self,
        num_groups: int,
        num_channels: int,
        eps: float = 1e-5,
        affine: bool = True,
        device: Any = None,
        dtype: Any = None,
        *,
        bias: bool = True,
    ):
        if num_groups < 1 or num_channels % num_groups:
            raise ValueError(
                f"GroupNorm: num_channels {num_channels} must be a multiple of num_groups {num_groups}, 1 or more"
            )
        self.num_groups, self.num_channels, self.eps, self.affine = num_groups, num_channels, eps, affine
        self.weight, self.bias = _affine((num_channels,), affine, bias, device, dtype)

    def forward(self, input: Tensor) -> Tensor:
        return F.group_norm(input, self.num_groups, self.weight, self.bias, self.eps)

    def extra_repr(self) -> str:
        return (
            f"{self.num_groups}, {self.num_channels}, eps={self.eps}, affine={self.affine}, "
            f"bias={self.bias is not None}"
        )


class LocalResponseNorm(Held, of="local_response_norm", size=REQUIRED, alpha=1e-4, beta=0.75, k=1.0):
    """Divides by a power of the mean square over `size` neighbouring channels."""


class CrossMapLRN2d(Held, of="local_response_norm", size=REQUIRED, alpha=1e-4, beta=0.75, k=1):
    """LocalResponseNorm of images. (PyTorch's own forgets to drop channel 0 from its running sum, so from
    channel (size + 1) / 2 on it differs.)"""
