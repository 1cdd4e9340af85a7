"""Initialisers with torch.nn.init's names: each overwrites its tensor and returns it. No gradient flows through one."""

from __future__ import annotations

import math
from math import prod

from manygrad.tensor.tensor import Tensor


def calculate_gain(nonlinearity: str, param: float | None = None) -> float:
    """The factor that keeps the variance of a layer's output through a nonlinearity."""
    if nonlinearity in ("linear", "sigmoid", *(f"conv{t}{n}d" for t in ("", "_transpose") for n in (1, 2, 3))):
        return 1.0
    if nonlinearity == "leaky_relu":
        return math.sqrt(2 / (1 + (0.01 if param is None else param) ** 2))
    known = {"tanh": 5 / 3, "relu": math.sqrt(2), "selu": 3 / 4}
    if nonlinearity not in known:
        raise ValueError(
            f"calculate_gain does not know {nonlinearity!r}; it knows linear, conv*d, sigmoid, leaky_relu, "
            f"{', '.join(known)}"
        )
    return known[nonlinearity]


def _set(tensor: Tensor, value: Tensor) -> Tensor:
    value = value.detach().cast(tensor.dtype)
    if isinstance(tensor.device, tuple):
        value = value._broadcast(tensor.shape)._shard_like(tensor)
    elif value.device != tensor.device:
        value = value.to(tensor.device)
    return tensor.assign(value._broadcast(tensor.shape))


def uniform_(tensor: Tensor, a: float = 0.0, b: float = 1.0) -> Tensor:
    """From U(a, b)."""
    return _set(tensor, Tensor.rand(*tensor.shape) * (b - a) + a)


def normal_(tensor: Tensor, mean: float = 0.0, std: float = 1.0) -> Tensor:
    """From N(mean, std²)."""
    return _set(tensor, Tensor.randn(*tensor.shape) * std + mean)


def trunc_normal_(tensor: Tensor, mean: float = 0.0, std: float = 1.0, a: float = -2.0, b: float = 2.0) -> Tensor:
    """From N(mean, std²) cut to [a, b], by the inverse of the distribution function at uniform points."""
    if a >= b or std <= 0:
        raise ValueError(f"trunc_normal_ needs a < b and std > 0, got a={a}, b={b}, std={std}")
    low, high = (0.5 * (1 + math.erf((x - mean) / (std * math.sqrt(2)))) for x in (a, b))
    if high <= low:
        raise ValueError(f"trunc_normal_: [{a}, {b}] holds next to nothing of N({mean}, {std}²)")
    u = Tensor.rand(*tensor.shape).double() * (high - low) + low
    return _set(tensor, (_normal_quantile(u) * std + mean).maximum(a).minimum(b))


def _normal_quantile(u: Tensor) -> Tensor:
    """The inverse of the normal distribution function, to about 1e-9 of float64 (Acklam's rational approximations)."""
    tail = 0.02425
    c = (
        -7.784894002430293e-03,
        -3.223964580411365e-01,
        -2.400758277161838,
        -2.549732539343734,
        4.374664141464968,
        2.938163982698783,
    )
    d = (7.784695709041462e-03, 3.224671290700398e-01, 2.445134137142996, 3.754408661907416, 1.0)
    a = (
        -3.969683028665376e01,
        2.209460984245205e02,
        -2.759285104469687e02,
        1.383577518672690e02,
        -3.066479806614716e01,
        2.506628277459239,
    )
    b = (
        -5.447609879822406e01,
        1.615858368580409e02,
        -1.556989798598866e02,
        6.680131188771972e01,
        -1.328068155288572e01,
        1.0,
    )

    def poly(x: Tensor, terms: tuple[float, ...]) -> Tensor:
        out = x * terms[0] + terms[1]
        for t in terms[2:]:
            out = out * x + t
        return out

    near = u.minimum(1 - u)  # distance to the nearer end
    q = (near.maximum(1e-300).log() * -2).sqrt()
    at_end = poly(q, c) / poly(q, d)
    h = u - 0.5
    r = h * h
    middle = h * poly(r, a) / poly(r, b)
    return (near < tail)._where((u < 0.5)._where(at_end, -at_end), middle)


def constant_(tensor: Tensor, val: float) -> Tensor:
    return _set(tensor, tensor.detach().full_like(val))


def ones_(tensor: Tensor) -> Tensor:
    return constant_(tensor, 1.0)


def zeros_(tensor: Tensor) -> Tensor:
    return constant_(tensor, 0.0)


def eye_(tensor: Tensor) -> Tensor:
    """The identity, of a matrix."""
    _needs_dims("eye_", tensor, 2)
    return _set(tensor, Tensor.eye(*tensor.shape))


def dirac_(tensor: Tensor, groups: int = 1) -> Tensor:
    """A convolution that keeps its channels: 1 at the middle of filter i for channel i, of each group."""
    if tensor.ndim not in (3, 4, 5) or tensor.shape[0] % groups:
        raise ValueError(
            f"dirac_ needs filters (Cout, Cin, *1 to 3 dims) with Cout a multiple of groups={groups}, "
            f"not {tensor.shape}"
        )
    rows, columns = tensor.shape[0] // groups, tensor.shape[1]
    eye = (
        Tensor.eye(rows, columns)
        .reshape(1, rows, columns, *(1,) * (tensor.ndim - 2))
        ._broadcast((groups, rows, columns, *(1,) * (tensor.ndim - 2)))
    )
    eye = eye.reshape(groups * rows, columns, *(1,) * (tensor.ndim - 2))
    return _set(tensor, eye.pad(((0, 0), (0, 0), *((k // 2, k - k // 2 - 1) for k in tensor.shape[2:]))))


def _needs_dims(name: str, tensor: Tensor, n: int, at_least: bool = False) -> None:
    if tensor.ndim < n or (tensor.ndim != n and not at_least):
        raise ValueError(f"{name} needs {'at least ' if at_least else ''}{n} dims, not shape {tensor.shape}")


def _fans(tensor: Tensor) -> tuple[int, int]:
    """(fan in, fan out) of a weight (out, in, *window)."""
    _needs_dims("an initialiser by fan", tensor, 2, at_least=True)
    window = prod(tensor.shape[2:])
    return tensor.shape[1] * window, tensor.shape[0] * window


def _fan(tensor: Tensor, mode: str) -> int:
    if mode not in ("fan_in", "fan_out"):
        raise ValueError(f'mode is "fan_in" or "fan_out", not {mode!r}')
    return _fans(tensor)[mode == "fan_out"]


def xavier_uniform_(tensor: Tensor, gain: float = 1.0) -> Tensor:
    """U(±gain √(6 / (fan in + fan out))) (Glorot and Bengio, 2010)."""
    bound = gain * math.sqrt(6 / sum(_fans(tensor)))
    return uniform_(tensor, -bound, bound)


def xavier_normal_(tensor: Tensor, gain: float = 1.0) -> Tensor:
    """N(0, gain² 2 / (fan in + fan out))."""
    return normal_(tensor, 0.0, gain * math.sqrt(2 / sum(_fans(tensor))))


def kaiming_uniform_(tensor: Tensor, a: float = 0, mode: str = "fan_in", nonlinearity: str = "leaky_relu") -> Tensor:
    """U(±gain √(3 / fan)) (He et al., 2015)."""
    bound = calculate_gain(nonlinearity, a) * math.sqrt(3 / max(_fan(tensor, mode), 1))
    return uniform_(tensor, -bound, bound)


def kaiming_normal_(tensor: Tensor, a: float = 0, mode: str = "fan_in", nonlinearity: str = "leaky_relu") -> Tensor:
    """N(0, gain² / fan)."""
    return normal_(tensor, 0.0, calculate_gain(nonlinearity, a) / math.sqrt(max(_fan(tensor, mode), 1)))


def orthogonal_(tensor: Tensor, gain: float = 1.0) -> Tensor:
    """Rows (or columns, whichever are fewer) that are orthonormal, times gain; dims after the first count as one.

    By Newton's iteration towards the polar factor of a random normal matrix, which is uniform over such matrices.
    """
    _needs_dims("orthogonal_", tensor, 2, at_least=True)
    rows, columns = tensor.shape[0], prod(tensor.shape[1:])
    if not rows or not columns:
        return tensor
    a = Tensor.randn(rows, columns).double()
    a = a.transpose(0, 1) if rows < columns else a
    a = (a / a.square().sum().sqrt()).contiguous()
    for _ in range(40):  # a (15 − 10 aᵀa + 3 (aᵀa)²) / 8: every singular value goes to 1
        g = a.transpose(0, 1).matmul(a).contiguous()
        a = (a * 1.875 - a.matmul(g) * 1.25 + a.matmul(g).matmul(g) * 0.375).contiguous()
    return _set(tensor, (a.transpose(0, 1) if rows < columns else a).reshape(tensor.shape) * gain)


def sparse_(tensor: Tensor, sparsity: float, std: float = 0.01) -> Tensor:
    """N(0, std²) with a share `sparsity` of each column (rounded up) zero."""
    _needs_dims("sparse_", tensor, 2)
    rows, columns = tensor.shape
    order = Tensor.rand(rows, columns).contiguous()
    ties = Tensor.arange(rows)
    before = (order.unsqueeze(0) < order.unsqueeze(1)) | (
        order.unsqueeze(0).eq(order.unsqueeze(1)) & (ties.unsqueeze(0) < ties.unsqueeze(1)).unsqueeze(-1)
    )
    rank = before.long().sum(1)
    return _set(tensor, (rank < math.ceil(sparsity * rows))._where(0.0, Tensor.randn(rows, columns) * std))
