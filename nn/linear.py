"""Linear layers."""

from __future__ import annotations

import math
from typing import Any

from manygrad.nn import functional as F
from manygrad.nn.module import Module
from manygrad.nn.parameter import Parameter
from manygrad.tensor.tensor import Tensor


def uniform(shape: tuple[int, ...], bound: float, device: Any = None, dtype: Any = None) -> Parameter:
    """A parameter from U(−bound, bound)."""
    return Parameter(Tensor.rand(*shape, dtype=dtype, device=device) * (2 * bound) - bound)


class Identity(Module):
    """The input itself; takes and ignores any arguments."""

    def __init__(self, *args: Any, **kwargs: Any):
        pass

    def forward(self, input: Tensor) -> Tensor:
        return input


class Linear(Module):
    """y = x Wᵀ + b; weight (out_features, in_features), bias (out_features,)."""

    def __init__(self, in_features: int, out_features: int, bias: bool = True, device: Any = None, dtype: Any = None):
        self.in_features, self.out_features = in_features, out_features
        bound = 1 / math.sqrt(in_features) if in_features else 0.0
        self.weight = uniform((out_features, in_features), bound, device, dtype)
        self.bias = uniform((out_features,), bound, device, dtype) if bias else None

    def forward(self, input: Tensor) -> Tensor:
        return F.linear(input, self.weight, self.bias)

    def extra_repr(self) -> str:
        return f"in_features={self.in_features}, out_features={self.out_features}, bias={self.bias is not None}"


class Bilinear(Module):
    """y[o] = x1ᵀ W[o] x2 + b[o]; weight (out, in1, in2)."""

    def __init__(
        self,
        in1_features: int,
        in2_features: int,
        out_features: int,
        bias: bool = True,
        device: Any = None,
        dtype: Any = None,
    ):
        self.in1_features, self.in2_features, self.out_features = in1_features, in2_features, out_features
        if in1_features < 1:
            raise ValueError(f"Bilinear: in1_features must be positive, got {in1_features}")
        bound = 1 / math.sqrt(in1_features)
        self.weight = uniform((out_features, in1_features, in2_features), bound, device, dtype)
        self.bias = uniform((out_features,), bound, device, dtype) if bias else None

    def forward(self, input1: Tensor, input2: Tensor) -> Tensor:
        """(*, in1), (*, in2) -> (*, out): one product with W as (in1, out·in2), then a sum over in2."""
        o, a, b = self.weight.shape
        half = input1.matmul(self.weight.permute(1, 0, 2).reshape(a, o * b)).reshape(*input1.shape[:-1], o, b)
        out = (half * input2.unsqueeze(-2)).sum(-1)
        return out if self.bias is None else out + self.bias

    def extra_repr(self) -> str:
        return (
            f"in1_features={self.in1_features}, in2_features={self.in2_features}, "
            f"out_features={self.out_features}, bias={self.bias is not None}"
        )
