"""Activations as modules; the formulas are in `functional`."""

from __future__ import annotations

from typing import Any

from manygrad.nn import functional as F
from manygrad.nn.held import REQUIRED, Held, HeldInTraining
from manygrad.nn.module import Module
from manygrad.nn.parameter import Parameter
from manygrad.tensor.tensor import Tensor


class ReLU(Held, of="relu", inplace=False):
    """max(x, 0)."""


class ReLU6(Held, of="relu6", inplace=False):
    """min(max(x, 0), 6)."""


class ELU(Held, of="elu", alpha=1.0, inplace=False):
    """x, below 0 alpha (exp(x) − 1)."""


class CELU(Held, of="celu", alpha=1.0, inplace=False):
    """x, below 0 alpha (exp(x / alpha) − 1)."""


class SELU(Held, of="selu", inplace=False):
    """The self-normalising ELU."""


class GELU(Held, of="gelu", approximate="none"):
    """x Φ(x); approximate="tanh" for the cheaper formula."""


class SiLU(Held, of="silu", inplace=False):
    """x sigmoid(x)."""


class Mish(Held, of="mish", inplace=False):
    """x tanh(softplus(x))."""


class LeakyReLU(Held, of="leaky_relu", negative_slope=0.01, inplace=False):
    """x, below 0 negative_slope x."""


class RReLU(HeldInTraining, of="rrelu", lower=1 / 8, upper=1 / 3, inplace=False):
    """x, below 0 a random slope in training and the middle one after."""


class Sigmoid(Held, of="sigmoid"):
    """1 / (1 + exp(−x))."""


class LogSigmoid(Held, of="logsigmoid"):
    """log(sigmoid(x))."""


class Hardsigmoid(Held, of="hardsigmoid", inplace=False):
    """x / 6 + 1/2, clamped to [0, 1]."""


class Hardswish(Held, of="hardswish", inplace=False):
    """x hardsigmoid(x)."""


class Hardshrink(Held, of="hardshrink", lambd=0.5):
    """x, 0 where |x| ≤ lambd."""


class Softshrink(Held, of="softshrink", lambd=0.5):
    """x moved towards 0 by lambd."""


class Softplus(Held, of="softplus", beta=1.0, threshold=20.0):
    """log(1 + exp(beta x)) / beta; x where beta x is above the threshold."""


class Softsign(Held, of="softsign"):
    """x / (1 + |x|)."""


class Tanh(Held, of="tanh"):
    """The hyperbolic tangent."""


class Tanhshrink(Held, of="tanhshrink"):
    """x − tanh(x)."""


class Threshold(Held, of="threshold", threshold=REQUIRED, value=REQUIRED, inplace=False):
    """x above the threshold, else value."""


class GLU(Held, of="glu", dim=-1):
    """a sigmoid(b), with x cut in halves a and b along dim."""


class Softmax(Held, of="softmax", dim=None):
    """exp(x) / Σ exp(x) along dim."""


class LogSoftmax(Held, of="log_softmax", dim=None):
    """log(softmax(x)) along dim."""


class Softmin(Held, of="softmin", dim=None):
    """softmax(−x) along dim."""


class Softmax2d(Held, of="softmax", fixed={"dim": -3}):
    """softmax over the channels of (N, C, H, W)."""


class Hardtanh(Held, of="hardtanh", show="min_val max_val", min_val=-1.0, max_val=1.0, inplace=False):
    """x clamped to [min_val, max_val]."""

    min_val: float
    max_val: float

    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__(*args, **kwargs)
        if self.max_val <= self.min_val:
            raise ValueError(f"Hardtanh: max_val {self.max_val} must be above min_val {self.min_val}")


class PReLU(Module):
    """x, below 0 weight · x with a trained weight, one or one a channel (dim 1)."""

    def __init__(self, num_parameters: int = 1, init: float = 0.25, device: Any = None, dtype: Any = None):
        self.num_parameters, self.init = num_parameters, init
        self.weight = Parameter(Tensor.full((num_parameters,), float(init), dtype=dtype, device=device))

    def forward(self, input: Tensor) -> Tensor:
        return F.prelu(input, self.weight)

    def extra_repr(self) -> str:
        return f"num_parameters={self.num_parameters}"
