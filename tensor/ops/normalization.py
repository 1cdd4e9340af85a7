"""Normalisation: by the statistics of a layer, a batch, a channel; by a norm. Statistics of half types are float32."""

from __future__ import annotations

from math import prod
from typing import TYPE_CHECKING, Any

from manygrad.tensor.dtype import accumulate_dtype, finfo
from manygrad.tensor.ops.broadcast import expect_shape
from manygrad.tensor.ops.elementary import with_gradient

if TYPE_CHECKING:
    from manygrad.tensor.tensor import Tensor

ROW = 64  # elements of which a mean of their own is worth it


def _per_channel(t: Tensor, ndim: int) -> Tensor:
    return t.reshape(tuple(-1 if i == 1 else 1 for i in range(ndim)))


def _scaled(out: Tensor, weight: Tensor | None, bias: Tensor | None) -> Tensor:
    out = out if weight is None else out * weight
    return out if bias is None else out + bias


def _track(running: Tensor | None, now: Tensor, momentum: float) -> None:
    """running ← (1 − momentum) · running + momentum · now."""
    if running is not None:
        running._store()
        running.assign(running * (1 - momentum) + now.detach().cast(running.dtype) * momentum)


class NormalizationMixin:
    def _standardized(
        self: Tensor, dims: tuple[int, ...], eps: float, weight: Tensor | None = None, bias: Tensor | None = None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """((x − mean) / √(var + eps) · weight + bias, mean, var) over `dims`, which are kept; var is the biased one.
        Weight and bias are the same along `dims`: then the sums of their gradients are those that the gradient of x
        needs."""
        mean, var = self._moments(dims)
        scales = [t for t in (weight, bias) if t is not None]

        def backward(g: Tensor, x: Tensor, *given: Tensor) -> tuple[Tensor, ...]:
            mean, var = x._moments(dims)
            factor = (var + eps).rsqrt()
            normal = (x - mean) * factor
            total, along = g.sum(dims, keepdim=True), (g * normal).sum(dims, keepdim=True)
            n = prod(x.shape[d] for d in dims)
            own = (g - (total + normal * along) * (1 / n)) * (factor if weight is None else factor * given[0])
            return (own, *([along] if weight is not None else []), *([total] if bias is not None else []))

        out = _scaled((self - mean) * (var + eps).rsqrt(), weight, bias)
        return (
            with_gradient(out, "standardized", (dims, eps, weight is None, bias is None), backward, self, *scales),
            mean,
            var,
        )

    def _moments(self: Tensor, dims: tuple[int, ...]) -> tuple[Tensor, Tensor]:
        """(mean, biased variance) over `dims`, which are kept. Where rows of the last ones are long enough, each row's
        first, from which those of all follow (Chan et al., 1979): memory is read once."""
        last = tuple(d for i, d in enumerate(dims) if dims[i:] == tuple(range(d, self.ndim)))
        rest = tuple(d for d in dims if d not in last)
        if rest and isinstance(n := prod(self.shape[d] for d in last), int) and n >= ROW:
            mean, var = self._moments(last)
            center = mean.mean(rest, keepdim=True)
            return center, var.mean(rest, keepdim=True) + (mean - center).square().mean(rest, keepdim=True)
        mean = self.mean(dims, keepdim=True)
        return mean, (self - mean).square().mean(dims, keepdim=True)

    def layer_norm(
        self: Tensor,
        normalized_shape: int | tuple[int, ...],
        weight: Tensor | None = None,
        bias: Tensor | None = None,
        eps: float = 1e-5,
    ) -> Tensor:
        """Mean 0 and variance 1 over the last dims, which are `normalized_shape`; then · weight + bias."""
        dims = self._last_dims("layer_norm", normalized_shape)
        expect_shape("layer_norm", self.shape[dims[0] :], weight=weight, bias=bias)
        x = self.cast(accumulate_dtype(self.dtype))
        return _scaled(x._standardized(dims, eps)[0], weight, bias).cast(self.dtype)

    def rms_norm(
        self: Tensor, normalized_shape: int | tuple[int, ...], weight: Tensor | None = None, eps: float | None = None
    ) -> Tensor:
        """x / √(mean(x²) + eps) over the last dims; eps is by default that of the type."""
        dims = self._last_dims("rms_norm", normalized_shape)
        expect_shape("rms_norm", self.shape[dims[0] :], weight=weight)
        x = self.cast(accumulate_dtype(self.dtype))
        out = x * (x.square().mean(dims, keepdim=True) + (finfo(x.dtype).eps if eps is None else eps)).rsqrt()
        return _scaled(out, weight, None).cast(self.dtype)

    def _last_dims(self: Tensor, name: str, normalized_shape: int | tuple[int, ...]) -> tuple[int, ...]:
        shape = (normalized_shape,) if isinstance(normalized_shape, int) else tuple(normalized_shape)
        if not shape or self.shape[-len(shape) :] != shape:
            raise ValueError(f"{name} over {shape}, but the input's last dims are {self.shape[-len(shape) :]}")
        return tuple(range(-len(shape), 0))

    def batch_norm(self: Tensor, running_mean: Tensor | None, running_var: Tensor | None, weight: Tensor | None = None,
                   bias: Tensor | None = None, training: bool = False, momentum: float = 0.1,
                   eps: float = 1e-5) -> Tensor:  # fmt: skip
        """Each channel (dim 1) normalised over all other dims: in training by the global batch's statistics, at any
        sharding, which also move the running ones (with the unbiased variance); else by the running ones."""
        if self.ndim < 2:
            raise ValueError(f"batch_norm needs a batch and a channel dim, the input has shape {self.shape}")
        expect_shape("batch_norm", self.shape[1:2], weight=weight, bias=bias, running_mean=running_mean,
                     running_var=running_var)  # fmt: skip
        x = self.cast(accumulate_dtype(self.dtype))
        w, b = (None if t is None else _per_channel(t, self.ndim) for t in (weight, bias))
        if not training:
            if running_mean is None or running_var is None:
                raise ValueError("batch_norm outside training needs running_mean and running_var")
            centred = x - _per_channel(running_mean, self.ndim)
            return _scaled(centred * (_per_channel(running_var, self.ndim) + eps).rsqrt(), w, b).cast(self.dtype)
        dims = tuple(i for i in range(self.ndim) if i != 1)
        n = prod(self.shape[d] for d in dims)
        if n == 1:
            raise ValueError(
                f"batch_norm in training needs more than 1 value per channel, the input has shape {self.shape}"
            )
        if not eps > 0:
            raise ValueError(f"batch_norm in training needs a positive eps, got {eps}")
        out, mean, var = x._standardized(dims, eps, w, b)
        if n == 0:  # an empty batch says nothing about the data
            return out.cast(self.dtype)
        _track(running_mean, mean.reshape(-1), momentum)
        _track(running_var, var.reshape(-1) * (n / (n - 1)), momentum)
        return out.cast(self.dtype)

    def instance_norm(self: Tensor, running_mean: Tensor | None = None, running_var: Tensor | None = None,
                      weight: Tensor | None = None, bias: Tensor | None = None, use_input_stats: bool = True,
                      momentum: float = 0.1, eps: float = 1e-5) -> Tensor:  # fmt: skip
        """Each channel of each sample (N, C, ...) normalised over its own positions."""
        if not use_input_stats:
            return self.batch_norm(running_mean, running_var, weight, bias, False, momentum, eps)
        if self.ndim < 3 or prod(self.shape[2:]) == 1:
            raise ValueError(
                f"instance_norm needs (N, C, ...) with more than 1 position, the input has shape {self.shape}"
            )
        expect_shape("instance_norm", self.shape[1:2], weight=weight, bias=bias, running_mean=running_mean,
                     running_var=running_var)  # fmt: skip
        x = self.cast(accumulate_dtype(self.dtype))
        n = prod(self.shape[2:])
        out, mean, var = x._standardized(tuple(range(2, self.ndim)), eps)
        if self.numel():
            _track(running_mean, mean.reshape(self.shape[:2]).mean(0), momentum)
            _track(running_var, var.reshape(self.shape[:2]).mean(0) * (n / (n - 1)), momentum)
        w, b = (None if t is None else _per_channel(t, self.ndim) for t in (weight, bias))
        return _scaled(out, w, b).cast(self.dtype)

    def group_norm(
        self: Tensor, num_groups: int, weight: Tensor | None = None, bias: Tensor | None = None, eps: float = 1e-5
    ) -> Tensor:
        """The channels (dim 1) of each sample in `num_groups` groups,
        each normalised over its channels and positions."""
        if self.ndim < 2 or self.shape[1] % num_groups:
            raise ValueError(f"group_norm: {num_groups} groups do not divide the channels (dim 1) of {self.shape}")
        expect_shape("group_norm", self.shape[1:2], weight=weight, bias=bias)
        x = self.cast(accumulate_dtype(self.dtype)).reshape(
            self.shape[0], num_groups, self.shape[1] // num_groups, *self.shape[2:]
        )
        out = x._standardized(tuple(range(2, x.ndim)), eps)[0].reshape(self.shape)
        w, b = (None if t is None else _per_channel(t, self.ndim) for t in (weight, bias))
        return _scaled(out, w, b).cast(self.dtype)

    def local_response_norm(self: Tensor, size: int, alpha: float = 1e-4, beta: float = 0.75, k: float = 1.0) -> Tensor:
        """x / (k + alpha · mean of x² over `size` channels around) ** beta."""
        if self.ndim < 3:
            raise ValueError(
                f"local_response_norm needs (N, C, ...) with at least 3 dims, the input has shape {self.shape}"
            )
        if _is_empty(self):
            return self
        square = self.square().pad(tuple((size // 2, (size - 1) // 2) if i == 1 else (0, 0) for i in range(self.ndim)))
        total = square._take(1, 0, self.shape[1])
        for i in range(1, size):
            total = total + square._take(1, i, i + self.shape[1])
        return self / (total * (alpha / size) + k).pow(beta)

    def normalize(self: Tensor, p: float = 2.0, dim: Any = 1, eps: float = 1e-12) -> Tensor:
        """x / max(‖x‖ₚ, eps) along `dim`."""
        return self / self.norm(p, dim, keepdim=True).clamp(min=eps)


def _is_empty(t: Tensor) -> bool:
    return any(isinstance(d, int) and d == 0 for d in t.shape)
