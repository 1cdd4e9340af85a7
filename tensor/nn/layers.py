"""Layers with PyTorch's names, shapes and initialisation."""

from __future__ import annotations

import math
from math import prod
from typing import Any

from manygrad.tensor.tensor import Tensor


def _pair(x: int | tuple[int, ...]) -> tuple[int, ...]:
    return (x, x) if isinstance(x, int) else tuple(x)


class Linear:
    """y = x Wᵀ + b; weight (out_features, in_features), bias (out_features,)."""

    def __init__(self, in_features: int, out_features: int, bias: bool = True):
        bound = 1 / math.sqrt(in_features)
        self.weight = Tensor.uniform(out_features, in_features, low=-bound, high=bound, requires_grad=True)
        self.bias = Tensor.uniform(out_features, low=-bound, high=bound, requires_grad=True) if bias else None

    def __call__(self, x: Tensor) -> Tensor:
        return x.linear(self.weight, self.bias)


class Conv2d:
    """(N, Cin, H, W) -> (N, Cout, OH, OW); weight (Cout, Cin / groups, KH, KW)."""

    def __init__(self, in_channels: int, out_channels: int, kernel_size: int | tuple[int, ...], stride: int | tuple[int, ...] = 1,
                 padding: int | tuple[int, ...] = 0, dilation: int | tuple[int, ...] = 1, groups: int = 1, bias: bool = True):  # fmt: skip
        k = _pair(kernel_size)
        self.stride, self.padding, self.dilation, self.groups = stride, padding, dilation, groups
        bound = 1 / math.sqrt(in_channels // groups * prod(k))
        self.weight = Tensor.uniform(out_channels, in_channels // groups, *k, low=-bound, high=bound, requires_grad=True)
        self.bias = Tensor.uniform(out_channels, low=-bound, high=bound, requires_grad=True) if bias else None

    def __call__(self, x: Tensor) -> Tensor:
        return x.conv2d(self.weight, self.bias, self.stride, self.padding, self.dilation, self.groups)


class LayerNorm:
    """Normalises the last dims to mean 0 and variance 1, then scales and shifts."""

    def __init__(self, normalized_shape: int | tuple[int, ...], eps: float = 1e-5, elementwise_affine: bool = True):
        self.normalized_shape = (normalized_shape,) if isinstance(normalized_shape, int) else tuple(normalized_shape)
        self.eps = eps
        self.weight = Tensor.ones(*self.normalized_shape, requires_grad=True) if elementwise_affine else None
        self.bias = Tensor.zeros(*self.normalized_shape, requires_grad=True) if elementwise_affine else None

    def __call__(self, x: Tensor) -> Tensor:
        return x.layer_norm(self.normalized_shape, self.weight, self.bias, self.eps)


class Embedding:
    """Rows of weight (num_embeddings, embedding_dim) by integer index; the gradient is a scatter-add."""

    def __init__(self, num_embeddings: int, embedding_dim: int):
        self.num_embeddings = num_embeddings
        self.weight = Tensor.randn(num_embeddings, embedding_dim, requires_grad=True)

    def __call__(self, index: Tensor) -> Tensor:
        return self.weight[index]


class BatchNorm:
    """Normalises each channel (dim 1) over all other dims; while `Tensor.training`, over the global batch at any sharding."""

    def __init__(self, num_features: int, eps: float = 1e-5, momentum: float = 0.1, affine: bool = True, track_running_stats: bool = True):
        self.eps, self.momentum, self.track_running_stats = eps, momentum, track_running_stats
        self.weight = Tensor.ones(num_features, requires_grad=True) if affine else None
        self.bias = Tensor.zeros(num_features, requires_grad=True) if affine else None
        if track_running_stats:
            self.running_mean = Tensor.zeros(num_features).contiguous()
            self.running_var = Tensor.ones(num_features).contiguous()

    def __call__(self, x: Tensor) -> Tensor:
        dims = tuple(i for i in range(x.ndim) if i != 1)
        shape = tuple(-1 if i == 1 else 1 for i in range(x.ndim))
        if Tensor.training or not self.track_running_stats:
            mean = x.mean(dims)
            centred = x - mean.reshape(shape)
            var = centred.square().mean(dims)
            if self.track_running_stats:
                n = prod(x.shape[d] for d in dims)
                self._track(mean.detach(), var.detach() * (n / max(n - 1, 1)))
        else:
            mean, var = self.running_mean, self.running_var
            centred = x - mean.reshape(shape)
        out = centred * (var + self.eps).rsqrt().reshape(shape)
        out = out if self.weight is None else out * self.weight.reshape(shape)
        return out if self.bias is None else out + self.bias.reshape(shape)

    def _track(self, mean: Tensor, var: Tensor) -> None:
        m: Any = self.momentum
        if not self.running_mean.is_realized:
            self.running_mean.realize(self.running_var)
        self.running_mean.assign(self.running_mean * (1 - m) + mean * m)
        self.running_var.assign(self.running_var * (1 - m) + var * m)


BatchNorm2d = BatchNorm
