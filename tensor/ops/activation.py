"""Activations. Those with an argument `inplace` in torch.nn.functional have it in `manygrad.nn.functional`."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from manygrad.tensor.dtype import DType, dtypes
from manygrad.tensor.ops.elementary import elementary, fma, polynomial, with_gradient
from manygrad.tensor.ops.error_function import FAR, normal_tail
from manygrad.tensor.ops.representation import magnitude

if TYPE_CHECKING:
    from manygrad.tensor.tensor import Tensor

TANH_SLOPE = 2 * math.sqrt(2 / math.pi)  # 2z = TANH_SLOPE · x + TANH_CUBE · x³
TANH_CUBE = 0.044715 * TANH_SLOPE
SELU_ALPHA, SELU_SCALE = 1.6732632423543772848170429916717, 1.0507009873554804934193349852946


def _silu_slope(x: Tensor) -> Tensor:
    s = x.sigmoid()
    return s * (1 + x * (1 - s))


def _gelu_slope(x: Tensor, approximate: str = "none") -> Tensor:
    if approximate == "none" and x.dtype is dtypes.float64:
        return 0.5 * (1 + (x * math.sqrt(0.5)).erf()) + x * _normal_density(x)
    a = _near(x)
    tail = _gelu_tail(a, approximate)
    steep = (
        tail * (1 - tail) * polynomial(a * a, (3 * TANH_CUBE, TANH_SLOPE))
        if approximate == "tanh"
        else _normal_density(a)
    )
    below = (magnitude(x) > FAR)._where(0.0, fma(-a, steep, tail))  # at −|x|
    return (x < 0)._where(below, 1 - below)


def _gelu_tail(a: Tensor, approximate: str) -> Tensor:
    """gelu(−a) / −a for 0 <= a < FAR; tanh's is sigmoid(−2z)."""
    if approximate == "tanh":
        return ((a * polynomial(a * a, (TANH_CUBE, TANH_SLOPE))).exp() + 1).reciprocal()
    return normal_tail(a)


def _near(x: Tensor) -> Tensor:
    """|x|, but 0 where Φ(−|x|) is as good as 0."""
    a = magnitude(x)
    return (a > FAR)._where(0.0, a)


def _normal_density(x: Tensor) -> Tensor:
    return (x * x * -0.5).exp() * (1 / math.sqrt(2 * math.pi))


class ActivationMixin:
    """Activations, by PyTorch's names. Large: PyTorch has that many."""

    # *** rectifiers ***

    def relu(self: Tensor) -> Tensor:
        """x where positive, else 0; the gradient at 0 is 0."""
        if not self.dtype.is_float:
            return self.maximum(0)
        # by the result, so that the operand need not be kept
        return with_gradient(self.maximum(0), "relu", None, lambda g, x: (x.relu().eq(0)._where(0.0, g),), self)

    def relu6(self: Tensor) -> Tensor:
        return self.hardtanh(0, 6)

    def threshold(self: Tensor, threshold: float, value: float) -> Tensor:
        """`value` where x <= threshold, else x; of NaN too."""
        return (self <= threshold)._where(value, self).cast(self.dtype)

    def leaky_relu(self: Tensor, negative_slope: float = 0.01) -> Tensor:
        return (self > 0)._where(self, self * negative_slope)

    def prelu(self: Tensor, weight: Tensor) -> Tensor:
        """leaky_relu with a learned slope: one for all, or one a channel (dim 1)."""
        if weight.ndim > 1 or (weight.numel() != 1 and (self.ndim < 2 or weight.shape[0] != self.shape[1])):
            raise ValueError(
                f"prelu: weight {weight.shape} is neither one slope nor one for each channel (dim 1) of {self.shape}"
            )
        slope = (
            weight.reshape(())
            if weight.numel() == 1
            else weight.reshape(tuple(-1 if i == 1 else 1 for i in range(self.ndim)))
        )
        return (self > 0)._where(self, self * slope)

    def rrelu(self: Tensor, lower: float = 1 / 8, upper: float = 1 / 3, training: bool = False) -> Tensor:
        """leaky_relu, in training with a slope drawn for each element, else with the mean slope."""
        if not lower <= upper:
            raise ValueError(f"rrelu: lower must not be above upper, got {lower} and {upper}")
        if not training:
            return self.leaky_relu((lower + upper) / 2)
        slope = self.detach().rand_like() * (upper - lower) + lower
        return (self > 0)._where(self, self * slope)

    def elu(self: Tensor, alpha: float = 1.0) -> Tensor:
        """x where positive, else alpha · (exp(x) − 1)."""
        return (self > 0)._where(self, self.clamp(max=0).expm1() * alpha)

    def selu(self: Tensor) -> Tensor:
        return self.elu(SELU_ALPHA) * SELU_SCALE

    def celu(self: Tensor, alpha: float = 1.0) -> Tensor:
        if alpha == 0:
            raise ValueError("celu: alpha must not be 0, it divides")
        return (self > 0)._where(self, (self.clamp(max=0) / alpha).expm1() * alpha)

    def glu(self: Tensor, dim: int = -1) -> Tensor:
        """a · sigmoid(b) for the halves a and b along `dim`."""
        d = self._dim(dim)
        if not self.ndim or self.shape[d] % 2:
            raise ValueError(f"glu halves dim {dim} of {self.shape}; its size must be even")
        a, b = self.split([self.shape[d] // 2] * 2, d)
        return a * b.sigmoid()

    # *** sigmoids ***

    @elementary(lambda x: x.sigmoid() * (1 - x.sigmoid()))
    def sigmoid(self: Tensor) -> Tensor:
        return (
            (-self).maximum(-40.0).exp() + 1
        ).reciprocal()  # 1 from there on; further out exp would underflow, which is slow

    def logsigmoid(self: Tensor) -> Tensor:
        return -(-self)._softplus()

    def hardsigmoid(self: Tensor) -> Tensor:
        return self.hardtanh(-3, 3) / 6 + 0.5

    @elementary()
    def logit(self: Tensor, eps: float | None = None) -> Tensor:
        """log(x / (1 − x)), x first clamped to [eps, 1 − eps] if eps is given."""
        x = self if eps is None else self.clamp(eps, 1 - eps)
        return (x / (1 - x)).log()

    @elementary(_silu_slope)
    def silu(self: Tensor) -> Tensor:
        return self * self.sigmoid()

    swish = silu

    def hardswish(self: Tensor) -> Tensor:
        return self * (self + 3).hardtanh(0, 6) / 6

    @elementary()
    def mish(self: Tensor) -> Tensor:
        """x · tanh(softplus(x)) = x · n / (n + 2) with n = eˣ(eˣ + 2)."""
        e = self.clamp(max=20).exp()
        n = e * (e + 2)
        return self * (n / (n + 2))

    @elementary(_gelu_slope)
    def gelu(self: Tensor, approximate: str = "none") -> Tensor:
        """x · Φ(x), Φ of the normal distribution; `approximate="tanh"` for the usual approximation of it:
        (1 + tanh(z)) / 2."""
        if approximate not in ("none", "tanh"):
            raise ValueError(f'gelu: approximate is "none" or "tanh", not {approximate!r}')
        if approximate == "none" and self.dtype is dtypes.float64:
            return 0.5 * self * (1 + (self * math.sqrt(0.5)).erf())
        a = _near(self)
        return fma(-a, _gelu_tail(a, approximate), self.relu())  # Φ(x) is 1 − Φ(−x)

    # *** other shapes ***

    def hardtanh(self: Tensor, min_val: float = -1.0, max_val: float = 1.0) -> Tensor:
        """x clamped to [min_val, max_val]; the gradient is 0 at the limits."""
        if min_val > max_val:
            raise ValueError(f"hardtanh: min_val {min_val} is above max_val {max_val}; swap them")
        low, high = self._const_like(min_val, self.dtype), self._const_like(max_val, self.dtype)
        return (self > low)._where((self < high)._where(self, high), self.isnan()._where(self, low))

    @elementary(lambda x: x.sigmoid())
    def _softplus(self: Tensor) -> Tensor:
        return self.maximum(0) + (-self.abs()).exp().log1p()

    def softplus(self: Tensor, beta: float = 1.0, threshold: float = 20.0) -> Tensor:
        """log(1 + exp(beta · x)) / beta, and x itself where beta · x > threshold."""
        z = self if beta == 1 else self * beta
        return (z > threshold)._where(self, z._softplus() if beta == 1 else z._softplus() / beta)

    def softsign(self: Tensor) -> Tensor:
        return self / (self.abs() + 1)

    def tanhshrink(self: Tensor) -> Tensor:
        return self - self.tanh()

    def hardshrink(self: Tensor, lambd: float = 0.5) -> Tensor:
        return (self.abs() <= lambd)._where(0.0, self)

    def softshrink(self: Tensor, lambd: float = 0.5) -> Tensor:
        """x moved by lambd towards 0; 0 within."""
        if not 0 <= lambd < math.inf:
            raise ValueError(f"softshrink: lambd is a number from 0, not {lambd}")
        return (self > lambd)._where(self - lambd, (self < -lambd)._where(self + lambd, self.isnan()._where(self, 0.0)))

    # *** over a dim ***

    def softmax(self: Tensor, dim: int = -1, dtype: DType | str | None = None) -> Tensor:
        """exp(x) / Σ exp(x) along `dim`."""
        return (self if dtype is None else self.cast(dtype))._softmax(self._dim(dim))

    def log_softmax(self: Tensor, dim: int = -1, dtype: DType | str | None = None) -> Tensor:
        return (self if dtype is None else self.cast(dtype))._log_softmax(self._dim(dim))

    def softmin(self: Tensor, dim: int = -1, dtype: DType | str | None = None) -> Tensor:
        return (-self).softmax(dim, dtype)

    @elementary()
    def _softmax(self: Tensor, dim: int) -> Tensor:
        if _is_empty(self):
            return self
        e = (self - self.amax(dim, keepdim=True).detach()).exp()
        total = e.sum(dim, keepdim=True)
        # one division a row; a half's would be rounded twice
        return e / total if e.dtype.is_half else e * total.reciprocal()

    @elementary()
    def _log_softmax(self: Tensor, dim: int) -> Tensor:
        if _is_empty(self):
            return self
        m = self - self.amax(dim, keepdim=True).detach()
        return m - m.exp().sum(dim, keepdim=True).log()

    def gumbel_softmax(self: Tensor, tau: float = 1, hard: bool = False, dim: int = -1) -> Tensor:
        """A softmax of self plus Gumbel noise; `hard`: one-hot, with the gradient of the soft one."""
        noise = -(-(self.detach().rand_like().clamp(min=1e-20)).log()).log()
        soft = ((self + noise) / tau).softmax(dim)
        if not hard:
            return soft
        d = self._dim(dim)
        n: Any = self.shape[d]
        places = self.arange(n).reshape(tuple(n if i == d else 1 for i in range(self.ndim)))
        one_hot = soft.argmax(d, keepdim=True).eq(places).cast(soft.dtype)
        return with_gradient(one_hot, "straight_through", None, lambda g, x: (g,), soft)


def _is_empty(t: Tensor) -> bool:
    return any(isinstance(d, int) and d == 0 for d in t.shape)
