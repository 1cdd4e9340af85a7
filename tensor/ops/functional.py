"""Activations, normalisation, losses, convolution, pooling, attention."""

from __future__ import annotations

import math
from math import prod
from typing import TYPE_CHECKING, Any

from manygrad.tensor.dtype import accumulate_dtype, dtypes
from manygrad.tensor.gradient import CustomGrad
from manygrad.tensor.uop import Ops, UOp

if TYPE_CHECKING:
    from manygrad.tensor.tensor import Tensor

Pair = int | tuple[int, ...]


def _pair(x: Pair, n: int = 2) -> tuple[int, ...]:
    return (x,) * n if isinstance(x, int) else tuple(x)


class FunctionalMixin:
    # *** activations ***

    def relu(self: Tensor) -> Tensor:
        return self.maximum(0)

    def leaky_relu(self: Tensor, negative_slope: float = 0.01) -> Tensor:
        return (self > 0).where(self, self * negative_slope)

    def sigmoid(self: Tensor) -> Tensor:
        return ((-self).exp() + 1).reciprocal()

    def tanh(self: Tensor) -> Tensor:
        return (self * 2).sigmoid() * 2 - 1

    def silu(self: Tensor) -> Tensor:
        return self * self.sigmoid()

    swish = silu

    def softplus(self: Tensor) -> Tensor:
        return self.maximum(0) + (-self.abs()).exp().log1p()

    def erf(self: Tensor) -> Tensor:
        """Abramowitz and Stegun 7.1.26, absolute error below 1.5e-7."""
        t = 1.0 / (1.0 + 0.3275911 * self.abs())
        poly = t * (0.254829592 + t * (-0.284496736 + t * (1.421413741 + t * (-1.453152027 + t * 1.061405429))))
        return self.sign() * (1.0 - poly * (-self * self).exp())

    def gelu(self: Tensor, approximate: str = "none") -> Tensor:
        if approximate == "tanh":
            return 0.5 * self * (1 + (math.sqrt(2 / math.pi) * (self + 0.044715 * self * self * self)).tanh())
        if approximate != "none":
            raise ValueError(f'gelu: approximate is "none" or "tanh", not {approximate!r}')
        return 0.5 * self * (1 + (self * (1 / math.sqrt(2))).erf())

    def softmax(self: Tensor, dim: int = -1) -> Tensor:
        x = self._float()
        e = (x - x.max(dim, keepdim=True).detach()).exp()
        return e / e.sum(dim, keepdim=True)

    def log_softmax(self: Tensor, dim: int = -1) -> Tensor:
        x = self._float()
        m = x - x.max(dim, keepdim=True).detach()
        return m - m.exp().sum(dim, keepdim=True).log()

    # *** normalisation ***

    def layer_norm(self: Tensor, normalized_shape: int | tuple[int, ...], weight: Tensor | None = None, bias: Tensor | None = None, eps: float = 1e-5) -> Tensor:
        shape = _pair(normalized_shape, 1)
        if self.shape[-len(shape) :] != shape:
            raise ValueError(f"layer_norm over {shape}, but the input's last dims are {self.shape[-len(shape):]}")
        dims = tuple(range(-len(shape), 0))
        centred = self - self.mean(dims, keepdim=True)
        out = centred * (centred.square().mean(dims, keepdim=True) + eps).rsqrt()
        out = out if weight is None else out * weight
        return out if bias is None else out + bias

    # *** losses ***

    def cross_entropy(self: Tensor, target: Tensor, reduction: str = "mean", label_smoothing: float = 0.0, ignore_index: int = -100) -> Tensor:
        """self: logits (N, C) or (N, C, ...); target: class numbers (N, ...). The mean divides by the global count of targets."""
        if self.ndim < 2 or target.shape != (self.shape[0], *self.shape[2:]):
            raise ValueError(f"cross_entropy: logits {self.shape} need targets of shape {(self.shape[0], *self.shape[2:])}, got {target.shape}")
        if not target.dtype.is_int:
            raise TypeError(f"cross_entropy: targets are class numbers (integers), not {target.dtype.name}")
        logits = self if self.ndim == 2 else self.permute(0, *range(2, self.ndim), 1).reshape(-1, self.shape[1])
        y = target.reshape(-1) if target.ndim != 1 else target
        logp = logits.log_softmax(1)
        hit = y.unsqueeze(1).eq(self.arange(logits.shape[1]).cast(y.dtype))
        counted = y.ne(ignore_index)
        loss = -hit.where(logp, 0.0).sum(1)
        if label_smoothing:
            loss = loss * (1 - label_smoothing) - logp.mean(1) * label_smoothing
        loss = counted.where(loss, 0.0)
        return _finish(loss, counted, reduction, (self.shape[0], *self.shape[2:]))

    sparse_categorical_crossentropy = cross_entropy

    def nll_loss(self: Tensor, target: Tensor, reduction: str = "mean", ignore_index: int = -100) -> Tensor:
        hit = target.unsqueeze(1).eq(self.arange(self.shape[1]).cast(target.dtype))
        counted = target.ne(ignore_index)
        return _finish(counted.where(-hit.where(self, 0.0).sum(1), 0.0), counted, reduction, target.shape)

    def mse_loss(self: Tensor, target: Tensor, reduction: str = "mean") -> Tensor:
        loss = (self - target).square()
        return loss.mean() if reduction == "mean" else loss.sum() if reduction == "sum" else loss

    def binary_cross_entropy_with_logits(self: Tensor, target: Tensor, reduction: str = "mean") -> Tensor:
        loss = self.maximum(0) - self * target + (-self.abs()).exp().log1p()
        return loss.mean() if reduction == "mean" else loss.sum() if reduction == "sum" else loss

    # *** convolution ***

    def conv2d(self: Tensor, weight: Tensor, bias: Tensor | None = None, stride: Pair = 1, padding: Pair = 0, dilation: Pair = 1, groups: int = 1) -> Tensor:
        """(N, Cin, H, W) with weight (Cout, Cin / groups, KH, KW) -> (N, Cout, OH, OW); any number of spatial dims."""
        n = self.ndim - 2
        if weight.ndim != self.ndim or self.shape[1] != weight.shape[1] * groups or weight.shape[0] % groups:
            raise ValueError(
                f"conv: input {self.shape} and weight {weight.shape} with groups={groups} do not fit; "
                f"expected weight (Cout, {self.shape[1]} // {groups}, ...) with Cout divisible by groups"
            )
        s, p, d = _pair(stride, n), _pair(padding, n), _pair(dilation, n)
        out = _convolve(self, weight, s, p, d, groups)
        return out if bias is None else out + bias.reshape(1, -1, *(1,) * n)

    # *** pooling ***

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

    def max_pool2d(self: Tensor, kernel_size: Pair = 2, stride: Pair | None = None, padding: Pair = 0, dilation: Pair = 1) -> Tensor:
        k = _pair(kernel_size)
        s, p = _pair(stride if stride is not None else k), _pair(padding)
        lowest = self.dtype.min
        t = self.pad(((0, 0),) * (self.ndim - 2) + tuple((q, q) for q in p), value=lowest) if any(p) else self
        return t._pool(k, s, _pair(dilation)).max((-2, -1))

    def avg_pool2d(self: Tensor, kernel_size: Pair = 2, stride: Pair | None = None, padding: Pair = 0) -> Tensor:
        k = _pair(kernel_size)
        s, p = _pair(stride if stride is not None else k), _pair(padding)
        t = self.pad(((0, 0),) * (self.ndim - 2) + tuple((q, q) for q in p)) if any(p) else self
        return t._pool(k, s, (1, 1)).mean((-2, -1))

    # *** attention ***

    def scaled_dot_product_attention(self: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = None, dropout_p: float = 0.0, is_causal: bool = False) -> Tensor:
        """softmax(q kᵀ / √d) v over (..., T, d); `is_causal` hides later positions."""
        scores = self.matmul(key.transpose(-1, -2)) * (1.0 / math.sqrt(self.shape[-1]))
        if is_causal:
            if attn_mask is not None:
                raise ValueError("scaled_dot_product_attention: give attn_mask or is_causal, not both")
            rows, cols = self.arange(self.shape[-2]).unsqueeze(1), self.arange(key.shape[-2]).unsqueeze(0)
            attn_mask = cols <= rows
        if attn_mask is not None:
            scores = attn_mask.where(scores, -math.inf) if attn_mask.dtype.is_bool else scores + attn_mask
        return scores.softmax(-1).dropout(dropout_p).matmul(value)

    def sequential(self: Tensor, layers: list[Any]) -> Tensor:
        x = self
        for layer in layers:
            x = layer(x)
        return x


def _finish(loss: Tensor, counted: Tensor, reduction: str, shape: tuple[Any, ...]) -> Tensor:
    if reduction == "mean":
        return (loss.cast(accumulate_dtype(loss.dtype)).sum() / counted.cast(dtypes.float32).sum()).cast(loss.dtype)
    if reduction == "sum":
        return loss.sum()
    if reduction == "none":
        return loss.reshape(shape)
    raise ValueError(f'reduction is "mean", "sum" or "none", not {reduction!r}')


def _convolve(x: Tensor, w: Tensor, s: tuple[int, ...], p: tuple[int, ...], d: tuple[int, ...], groups: int) -> Tensor:
    """The convolution with its own gradient: both gradients are again convolution-like contractions."""
    out = _contract_windows(x, w, s, p, d, groups)

    def backward(g: Tensor, x: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
        return _input_gradient(g, x, w, s, p, d, groups), _weight_gradient(g, x, w, s, p, d, groups)

    return out._new(UOp(Ops.CUSTOM, out.dtype, (out.uop, x.uop, w.uop), CustomGrad("conv", (s, p, d, groups), backward)))


def _padded(x: Tensor, p: tuple[int, ...]) -> Tensor:
    return x.pad(((0, 0), (0, 0), *[(q, q) for q in p])) if any(p) else x


def _contract_windows(x: Tensor, w: Tensor, s: tuple[int, ...], p: tuple[int, ...], d: tuple[int, ...], groups: int) -> Tensor:
    n = len(s)
    batch, cin, cout = x.shape[0], x.shape[1], w.shape[0]
    win = _padded(x, p).unfold_windows(w.shape[2:], s, d)  # (N, Cin, *out, *k)
    outs, ks = win.shape[2 : 2 + n], win.shape[2 + n :]
    win = win.reshape(batch, groups, 1, cin // groups, *outs, *ks)
    win = win.permute(0, 1, 2, *range(4, 4 + n), 3, *range(4 + n, 4 + 2 * n))
    win = win._broadcast((batch, groups, cout // groups, *outs, cin // groups, *ks))
    filters = w.reshape(1, groups, cout // groups, *(1,) * n, cin // groups, *ks)._broadcast(win.shape)
    return (win * filters).sum(tuple(range(-1 - n, 0))).reshape(batch, cout, *outs)


def _input_gradient(g: Tensor, x: Tensor, w: Tensor, s: tuple[int, ...], p: tuple[int, ...], d: tuple[int, ...], groups: int) -> Tensor:
    """A convolution of the gradient (spread by the stride, padded) with the flipped, transposed filters."""
    n = len(s)
    ks = w.shape[2:]
    cin, cout = x.shape[1], w.shape[0]
    for i, step in enumerate(s):  # step-1 zeros between the elements of each spatial dim
        if step > 1:
            a = 2 + i
            size = g.shape[a]
            g = g.reshape(*g.shape[: a + 1], 1, *g.shape[a + 1 :]).pad(tuple((0, step - 1) if j == a + 1 else (0, 0) for j in range(g.ndim + 1)))
            g = g.reshape(*g.shape[:a], size * step, *g.shape[a + 2 :])._take(a, 0, (size - 1) * step + 1)
    grow = []
    for i in range(n):
        before = d[i] * (ks[i] - 1) - p[i]
        after = x.shape[2 + i] + 2 * p[i] - (g.shape[2 + i] + d[i] * (ks[i] - 1)) + before
        grow.append((before, after))
    g = g.pad(((0, 0), (0, 0), *grow))
    flipped = w.flip(tuple(range(2, 2 + n))).reshape(groups, cout // groups, cin // groups, *ks)
    swapped = flipped.transpose(1, 2).reshape(cin, cout // groups, *ks).contiguous()
    return _convolve(g, swapped, (1,) * n, (0,) * n, d, groups)


def _weight_gradient(g: Tensor, x: Tensor, w: Tensor, s: tuple[int, ...], p: tuple[int, ...], d: tuple[int, ...], groups: int) -> Tensor:
    """sum over batch and positions of window × gradient: (G, Cout/G, Cin/G, *k)."""
    n = len(s)
    batch, cin, cout = x.shape[0], x.shape[1], w.shape[0]
    win = _padded(x, p).unfold_windows(w.shape[2:], s, d)
    outs, ks = win.shape[2 : 2 + n], win.shape[2 + n :]
    win = win.reshape(batch, groups, 1, cin // groups, *outs, *ks).permute(1, 2, 3, *range(4 + n, 4 + 2 * n), 0, *range(4, 4 + n))
    full = (groups, cout // groups, cin // groups, *ks, batch, *outs)
    gr = g.reshape(batch, groups, cout // groups, *outs).permute(1, 2, 0, *range(3, 3 + n))
    gr = gr.reshape(groups, cout // groups, 1, *(1,) * n, batch, *outs)._broadcast(full)
    out = (win._broadcast(full) * gr).sum(tuple(range(-1 - n, 0)))
    assert prod(out.shape) == prod(w.shape)
    return out.reshape(w.shape)
