"""Samples of distributions, by transforming uniform words; the same numbers at any sharding."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from manygrad.tensor.dtype import dtypes
from manygrad.tensor.ops.checking import checked
from manygrad.tensor.ops.creation import asking

if TYPE_CHECKING:
    from manygrad.tensor.tensor import Tensor


class DistributionsMixin:
    def _placed_like(self: Tensor, t: Tensor) -> Tensor:
        """`t`, of self's shape and on its devices, cut as self is: each device then computes its own part only."""
        return t._shard_like(self) if isinstance(self.device, tuple) else t

    def _drawn_like(
        self: Tensor, draw: Any, dtype: Any, device: Any, requires_grad: bool | None, **named: Any
    ) -> Tensor:
        """What `draw` gives in self's shape and, unless given, its type and place."""
        t = draw(*self.shape, dtype=dtype or self.dtype, device=device or self.device, **named)
        return asking(self._placed_like(t) if device is None else t, requires_grad)

    def rand_like(self: Tensor, dtype: Any = None, device: Any = None, requires_grad: bool | None = None) -> Tensor:
        """Uniform numbers in [0, 1) in this tensor's shape and, unless given, its type and place."""
        return self._drawn_like(self.rand, dtype, device, requires_grad)

    def randn_like(self: Tensor, dtype: Any = None, device: Any = None, requires_grad: bool | None = None) -> Tensor:
        """Normal numbers in this tensor's shape and, unless given, its type and place."""
        return self._drawn_like(self.randn, dtype, device, requires_grad)

    def randint_like(self: Tensor, low: int, high: int | None = None, dtype: Any = None, device: Any = None,
                     requires_grad: bool | None = None) -> Tensor:  # fmt: skip
        """Whole numbers in [low, high), or in [0, low)."""
        a, b = (0, low) if high is None else (low, high)
        return self._drawn_like(self.randint, dtype, device, requires_grad, low=a, high=b)

    def bernoulli(self: Tensor, p: float | None = None) -> Tensor:
        """1 with the probability that the element holds (or `p`), else 0."""
        if not self.dtype.is_float:
            raise TypeError(f"bernoulli: probabilities are floats, not {self.dtype.name}")
        _check_probability("bernoulli", p)
        return self._hits(self.rand_like(dtypes.float32), self if p is None else p).cast(self.dtype)

    def _hits(self: Tensor, u: Tensor, p: Any) -> Tensor:
        """Where a uniform number lies below the probability `p`, of which tensors are looked at as indices are."""
        if isinstance(p, (int, float)):
            return u < p
        what = "bernoulli: of a probability outside [0, 1], outcome"
        return checked(((p >= 0) & (p <= 1))._where((u < p).cast(dtypes.int64), 2), what, 2, self).cast(dtypes.bool)

    def multinomial(self: Tensor, num_samples: int, replacement: bool = False) -> Tensor:
        """int64 positions drawn along the last dim with probabilities proportional to self: (n,) -> (num_samples,),
        (m, n) -> (m, num_samples).

        With replacement by searching uniform numbers in the running sum; without by the largest of weight-scaled
        exponential keys (Efraimidis and Spirakis, 2006). Weights that are negative or not finite, or of which fewer are
        above 0 than are needed, are an IndexError when a value is read next.
        """
        if self.ndim not in (1, 2) or not self.dtype.is_float:
            raise ValueError(f"multinomial: expected float weights (n,) or (m, n), got {self.shape} {self.dtype.name}")
        n = self.shape[-1]
        if num_samples < 1 or (not replacement and num_samples > n):
            raise ValueError(
                f"multinomial: {num_samples} samples of {n} without replacement; pass replacement=True, or 1..{n}"
            )
        sound = ((self >= 0) & (self < math.inf)).all(-1, keepdim=True)
        sound = sound & ((self > 0).sum(-1, keepdim=True) >= (1 if replacement else num_samples))
        if replacement:
            sums = self.cast(dtypes.float64).cumsum(-1)
            u = self.rand(*self.shape[:-1], num_samples, device=self.device).cast(dtypes.float64) * sums[..., -1:]
            drawn = (sums.unsqueeze(-2) <= u.unsqueeze(-1)).cast(dtypes.int64).sum(-1).clamp(max=n - 1)
        else:
            keys = (1 - self.rand_like(dtypes.float32)).log() / self
            drawn = (self > 0)._where(keys, -math.inf).topk(num_samples, -1)[1]
        what = "multinomial: of weights that are negative, not finite, or too few of them above 0, position"
        return checked(sound._where(drawn, n), what, n, self)

    # *** in place: self's shape, type and place, new values ***

    def _filled_with(self: Tensor, t: Tensor) -> Tensor:
        return self.assign(t.cast(self.dtype))

    def _of_floats(self: Tensor, name: str) -> Tensor:
        if not self.dtype.is_float:
            raise TypeError(f"{name} draws floats, this tensor is of {self.dtype.name}; random_ draws whole numbers")
        return self

    def _unit(self: Tensor) -> Tensor:
        """Uniform on [0, 1), float32 or wider, where self is."""
        return self.rand_like(self.dtype if self.dtype.is_float and not self.dtype.is_half else dtypes.float32)

    def uniform_(self: Tensor, from_: float = 0.0, to: float = 1.0) -> Tensor:
        if not from_ <= to:
            raise ValueError(f"uniform_: the range [{from_}, {to}) is empty")
        return self._of_floats("uniform_")._filled_with(self._unit() * (to - from_) + from_)

    def normal_(self: Tensor, mean: float = 0.0, std: float = 1.0) -> Tensor:
        if not std >= 0:
            raise ValueError(f"normal_: the standard deviation must not be negative, got {std}")
        return self._of_floats("normal_")._filled_with(self.randn_like(dtypes.float32) * std + mean)

    def log_normal_(self: Tensor, mean: float = 1.0, std: float = 2.0) -> Tensor:
        _check_above_0("log_normal_", "std", std)
        return self._of_floats("log_normal_")._filled_with((self.randn_like(dtypes.float32) * std + mean).exp())

    def exponential_(self: Tensor, lambd: float = 1.0) -> Tensor:
        """Density lambd · exp(−lambd · x)."""
        _check_above_0("exponential_", "lambd", lambd)
        return self._of_floats("exponential_")._filled_with(-(1 - self._unit()).log() / lambd)

    def cauchy_(self: Tensor, median: float = 0.0, sigma: float = 1.0) -> Tensor:
        _check_above_0("cauchy_", "sigma", sigma)
        return self._of_floats("cauchy_")._filled_with(((self._unit() - 0.5) * math.pi).tan() * sigma + median)

    def geometric_(self: Tensor, p: float) -> Tensor:
        """The number of trials up to the first success, from 1."""
        if not 0 < p < 1:
            raise ValueError(f"geometric_: the probability must lie in (0, 1), got {p}")
        return self._filled_with(((1 - self._unit()).log() / math.log1p(-p)).ceil().clamp(min=1))

    def bernoulli_(self: Tensor, p: Any = 0.5) -> Tensor:
        _check_probability("bernoulli_", p)
        return self._filled_with(self._hits(self._unit(), p))

    def random_(self: Tensor, from_: int | None = None, to: int | None = None) -> Tensor:
        """Whole numbers in [from_, to), given one number in [0, that), given none as far as the type counts exactly."""
        if to is None and from_ is not None:
            from_, to = 0, from_
        if to is None:
            bits = (
                self.dtype.bits - (self.dtype.kind == "i")
                if not self.dtype.is_float
                else {2: 11 if self.dtype.name == "float16" else 8, 4: 24, 8: 53}[self.dtype.itemsize]
            )
            to = min(1 << bits, (1 << 63) - 1)
        return self._filled_with(self.randint_like(from_ or 0, to, dtypes.int64))


def _check_above_0(function: str, name: str, number: float) -> None:
    if not number > 0:
        raise ValueError(f"{function}: {name} is above 0, not {number}")


def _check_probability(function: str, p: Any) -> None:
    """Probabilities that are tensors are looked at where they are used."""
    if isinstance(p, (int, float)) and not 0 <= p <= 1:
        raise ValueError(f"{function}: the probability must lie in [0, 1], got {p}")
