"""Activations, normalisation, losses, convolution and pooling against plain NumPy, most of it written as loops."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator

import numpy as np
import pytest

from manygrad import Context, Tensor
from tests.tensor.oracle import check, numbers

RNG = np.random.default_rng(0)
X = numbers(RNG, "float64", (4, 6))


@pytest.fixture(autouse=True, params=["PYTHON", "CPU"])
def device(request: pytest.FixtureRequest) -> Iterator[str]:
    with Context(DEVICE=request.param):
        yield request.param


erf = np.vectorize(math.erf)


def sigmoid(a: np.ndarray) -> np.ndarray:
    return 1 / (1 + np.exp(-a))


def softmax(a: np.ndarray, axis: int = -1) -> np.ndarray:
    e = np.exp(a - a.max(axis, keepdims=True))
    return e / e.sum(axis, keepdims=True)


ACTIVATIONS: dict[str, tuple[Callable[[Tensor], Tensor], Callable[[np.ndarray], np.ndarray], float]] = {
    "relu": (lambda t: t.relu(), lambda a: np.maximum(a, 0), 1e-12),
    "leaky_relu": (lambda t: t.leaky_relu(0.1), lambda a: np.where(a > 0, a, a * 0.1), 1e-12),
    "sigmoid": (lambda t: t.sigmoid(), sigmoid, 1e-12),
    "tanh": (lambda t: t.tanh(), np.tanh, 1e-12),
    "silu": (lambda t: t.silu(), lambda a: a * sigmoid(a), 1e-12),
    "softplus": (lambda t: t.softplus(), lambda a: np.log1p(np.exp(a)), 1e-12),
    "erf": (lambda t: t.erf(), erf, 2e-7),
    "gelu": (lambda t: t.gelu(), lambda a: a * 0.5 * (1 + erf(a / math.sqrt(2))), 1e-6),
    "gelu tanh": (lambda t: t.gelu("tanh"), lambda a: 0.5 * a * (1 + np.tanh(math.sqrt(2 / math.pi) * (a + 0.044715 * a**3))), 1e-12),
    "softmax": (lambda t: t.softmax(), softmax, 1e-12),
    "softmax 0": (lambda t: t.softmax(0), lambda a: softmax(a, 0), 1e-12),
    "log_softmax": (lambda t: t.log_softmax(-1), lambda a: np.log(softmax(a)), 1e-12),
}


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_activations(name: str) -> None:
    f, g, tolerance = ACTIVATIONS[name]
    check(f(Tensor(X)), g(X), rtol=tolerance)
    check(f(Tensor(X.astype(np.float32))), g(X).astype(np.float32), rtol=1e-5)


def test_extreme_values_do_not_overflow() -> None:
    big = Tensor([-1e4, -200.0, 0.0, 200.0, 1e4])
    assert big.sigmoid().tolist() == [0.0, 0.0, 0.5, 1.0, 1.0]
    assert big.tanh().tolist() == [-1.0, -1.0, 0.0, 1.0, 1.0]
    assert big.softplus().tolist() == pytest.approx([0.0, 0.0, math.log(2), 200.0, 1e4])
    assert big.silu().tolist() == [0.0, 0.0, 0.0, 200.0, 1e4]
    assert big.gelu().tolist() == [0.0, 0.0, 0.0, 200.0, 1e4]
    assert big.softmax().tolist() == [0.0, 0.0, 0.0, 0.0, 1.0]
    assert big.log_softmax().tolist()[0] == -2e4
    assert np.isfinite(big.cast("float16").softmax().numpy().astype(np.float32)).all()


def test_small_values() -> None:
    """log1p keeps its digits near 0; tanh and erf are right to the last bit of 1, as documented, not relative to x."""
    x = np.float32([1e-6, -3e-5, 2e-4])
    check(Tensor(x).log1p(), np.log1p(x.astype(np.float64)).astype(np.float32), rtol=1e-6, atol=0)
    check(Tensor(x).tanh(), np.tanh(x), rtol=0, atol=1.3e-7)
    check(Tensor(x).erf(), erf(x).astype(np.float32), rtol=0, atol=3e-7)


@pytest.mark.parametrize("shape", [(6,), (4, 6)])
def test_layer_norm(shape: tuple[int, ...]) -> None:
    a, w, b = numbers(RNG, "float64", (3, 4, 6)), numbers(RNG, "float64", shape), numbers(RNG, "float64", shape)
    axes = tuple(range(-len(shape), 0))
    want = (a - a.mean(axes, keepdims=True)) / np.sqrt(a.var(axes, keepdims=True) + 1e-5)
    check(Tensor(a).layer_norm(shape), want)
    check(Tensor(a).layer_norm(shape, Tensor(w), Tensor(b)), want * w + b)
    with pytest.raises(ValueError, match=r"layer_norm over \(5,\), but the input's last dims are \(6,\)"):
        Tensor(a).layer_norm(5)


# *** losses ***


def cross_entropy(x: np.ndarray, y: np.ndarray, smoothing: float, ignore: int, reduction: str) -> np.ndarray:
    """One sample at a time; with class weights 1 as in torch.nn.functional.cross_entropy."""
    rows = np.moveaxis(x, 1, -1).reshape(-1, x.shape[1])
    losses, counted = [], 0
    for row, target in zip(rows, y.reshape(-1)):
        logp = row - row.max() - np.log(np.exp(row - row.max()).sum())
        if target == ignore:
            losses.append(0.0)
            continue
        counted += 1
        losses.append(-(1 - smoothing) * logp[target] - smoothing * logp.mean())
    out = np.array(losses).reshape(y.shape)
    return out if reduction == "none" else out.sum() if reduction == "sum" else out.sum() / counted


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_cross_entropy(smoothing: float, reduction: str) -> None:
    for shape in ((5, 4), (2, 4, 3)):
        x = numbers(RNG, "float64", shape)
        y = RNG.integers(0, 4, (shape[0], *shape[2:]))
        check(Tensor(x).cross_entropy(Tensor(y), reduction, smoothing, ignore_index=int(y.reshape(-1)[1])), cross_entropy(x, y, smoothing, y.reshape(-1)[1], reduction))
        y.reshape(-1)[0] = -100
        check(Tensor(x).cross_entropy(Tensor(y), reduction, smoothing), cross_entropy(x, y, smoothing, -100, reduction))


def test_losses_of_the_half_types_keep_the_type_and_count_beyond_its_range() -> None:
    n = 1 << 17  # more samples than the largest float16
    x, y = Tensor(np.zeros((n, 2), np.float16), device="CPU"), Tensor(np.zeros(n, np.int64), device="CPU")
    loss = x.cross_entropy(y)
    assert loss.dtype.name == "float16" and loss.item() == pytest.approx(math.log(2), rel=1e-3)


def test_other_losses() -> None:
    p, q = numbers(RNG, "float64", (3, 4)), numbers(RNG, "float64", (3, 4), 0, 1)
    y = np.array([1, -100, 3])
    logp = np.log(softmax(p))
    check(Tensor(logp).nll_loss(Tensor(y)), -(logp[0, 1] + logp[2, 3]) / 2)
    check(Tensor(logp).nll_loss(Tensor(y), "none"), [-logp[0, 1], 0, -logp[2, 3]])
    check(Tensor(p).mse_loss(Tensor(q)), ((p - q) ** 2).mean())
    check(Tensor(p).mse_loss(Tensor(q), "sum"), ((p - q) ** 2).sum())
    check(Tensor(p).mse_loss(Tensor(q), "none"), (p - q) ** 2)
    bce = -(q * np.log(sigmoid(p)) + (1 - q) * np.log(1 - sigmoid(p)))
    check(Tensor(p).binary_cross_entropy_with_logits(Tensor(q)), bce.mean(), rtol=1e-10)
    check(Tensor(p).binary_cross_entropy_with_logits(Tensor(q), "none"), bce, rtol=1e-10)


def test_errors_of_losses() -> None:
    x = Tensor(np.zeros((5, 4)))
    with pytest.raises(ValueError, match=r"cross_entropy: logits \(5, 4\) need targets of shape \(5,\), got \(4,\)"):
        x.cross_entropy(Tensor([0, 1, 2, 3]))
    with pytest.raises(TypeError, match="targets are class numbers.*float32"):
        x.cross_entropy(Tensor([0.0] * 5))
    with pytest.raises(ValueError, match='reduction is "mean", "sum" or "none", not \'avg\''):
        x.cross_entropy(Tensor([0] * 5), reduction="avg")
    with pytest.raises(ValueError, match="gelu: approximate"):
        x.gelu("fast")


# *** convolution and pooling ***


def conv(x: np.ndarray, w: np.ndarray, b: np.ndarray | None, s: tuple[int, ...], p: tuple[int, ...], d: tuple[int, ...], groups: int) -> np.ndarray:
    """Cross-correlation, position by position."""
    n = x.ndim - 2
    x = np.pad(x, ((0, 0), (0, 0), *((q, q) for q in p)))
    outs = tuple((x.shape[2 + i] - d[i] * (w.shape[2 + i] - 1) - 1) // s[i] + 1 for i in range(n))
    out = np.zeros((x.shape[0], w.shape[0], *outs))
    per_in, per_out = x.shape[1] // groups, w.shape[0] // groups
    for o in range(w.shape[0]):
        channels = slice(o // per_out * per_in, (o // per_out + 1) * per_in)
        for at in np.ndindex(*outs):
            window = tuple(slice(at[i] * s[i], at[i] * s[i] + d[i] * (w.shape[2 + i] - 1) + 1, d[i]) for i in range(n))
            out[(slice(None), o, *at)] = (x[(slice(None), channels, *window)] * w[o]).reshape(x.shape[0], -1).sum(1)
        out[:, o] += 0 if b is None else b[o]
    return out


CONVS = [
    # input, weight, stride, padding, dilation, groups
    ((2, 3, 7, 6), (4, 3, 3, 3), 1, 0, 1, 1),
    ((1, 2, 6, 6), (2, 2, 1, 1), 1, 0, 1, 1),
    ((2, 4, 7, 8), (6, 2, 3, 2), 2, 1, 1, 2),
    ((1, 4, 9, 9), (4, 1, 3, 3), 1, 1, 2, 4),
    ((2, 2, 8, 7), (3, 2, 2, 3), (2, 3), (1, 2), (2, 1), 1),
    ((1, 1, 5, 5), (1, 1, 5, 5), 1, 0, 1, 1),
    ((1, 2, 5, 5), (2, 2, 3, 3), 4, 2, 1, 1),
]


def pair(x: int | tuple[int, int]) -> tuple[int, int]:
    return (x, x) if isinstance(x, int) else x


@pytest.mark.parametrize("case", CONVS, ids=str)
def test_conv2d(case: tuple) -> None:
    shape, filters, s, p, d, groups = case
    x, w, b = numbers(RNG, "float64", shape), numbers(RNG, "float64", filters), numbers(RNG, "float64", filters[:1])
    check(Tensor(x).conv2d(Tensor(w), Tensor(b), s, p, d, groups), conv(x, w, b, pair(s), pair(p), pair(d), groups), rtol=1e-10)


@pytest.mark.parametrize("spatial", [(9,), (4, 5, 3)])
def test_conv_over_other_numbers_of_dims(spatial: tuple[int, ...]) -> None:
    n = len(spatial)
    x, w = numbers(RNG, "float64", (2, 3, *spatial)), numbers(RNG, "float64", (2, 3, *(2,) * n))
    check(Tensor(x).conv2d(Tensor(w), stride=2, padding=1), conv(x, w, None, (2,) * n, (1,) * n, (1,) * n, 1), rtol=1e-10)


def test_errors_of_convolution() -> None:
    x = Tensor(np.zeros((1, 3, 4, 4)))
    with pytest.raises(ValueError, match=r"conv: input \(1, 3, 4, 4\) and weight \(2, 2, 3, 3\) with groups=1 do not fit; expected weight \(Cout, 3 // 1"):
        x.conv2d(Tensor(np.zeros((2, 2, 3, 3))))
    with pytest.raises(ValueError, match=r"window \(5, 5\) \(dilation \(1, 1\)\) is larger than the input's \(4, 4\); add padding"):
        x.conv2d(Tensor(np.zeros((2, 3, 5, 5))))


def pool(x: np.ndarray, k: tuple[int, int], s: tuple[int, int], p: tuple[int, int], d: tuple[int, int], f: Callable, fill: float) -> np.ndarray:  # type: ignore[type-arg]
    x = np.pad(x, ((0, 0), (0, 0), *((q, q) for q in p)), constant_values=fill)
    outs = [(n - e * (j - 1) - 1) // t + 1 for n, j, t, e in zip(x.shape[2:], k, s, d)]
    out = np.zeros((*x.shape[:2], *outs), x.dtype)
    for i, j in np.ndindex(*outs):
        window = x[:, :, i * s[0] : i * s[0] + d[0] * (k[0] - 1) + 1 : d[0], j * s[1] : j * s[1] + d[1] * (k[1] - 1) + 1 : d[1]]
        out[:, :, i, j] = f(window, axis=(2, 3))
    return out


POOLS = [(2, None, 0, 1), (3, 1, 0, 1), (3, 2, 1, 1), (2, 1, 1, 1), ((2, 3), (1, 2), (0, 1), 1), (2, 2, 0, 2), (1, 2, 0, 1), (2, 2, 1, 1)]


@pytest.mark.parametrize("case", POOLS, ids=str)
def test_pooling(case: tuple) -> None:
    k, s, p, d = case
    x = numbers(RNG, "float64", (2, 3, 7, 8))
    args = pair(k), pair(k if s is None else s), pair(p)
    check(Tensor(x).max_pool2d(k, s, p, d), pool(x, *args, pair(d), np.max, -np.inf))
    if d == 1:
        check(Tensor(x).avg_pool2d(k, s, p), pool(x, *args, (1, 1), np.mean, 0.0))


def test_pooling_of_integers() -> None:
    x = RNG.integers(-9, 9, (1, 1, 5, 5)).astype(np.int32)
    check(Tensor(x).max_pool2d(3, 2, 1), pool(x, (3, 3), (2, 2), (1, 1), (1, 1), np.max, -(2**31)))


# *** attention ***


def test_attention() -> None:
    q, k, v = (numbers(RNG, "float64", (2, 3, n, 4)) for n in (5, 6, 6))
    scores = q @ k.swapaxes(-1, -2) / 2
    check(Tensor(q).scaled_dot_product_attention(Tensor(k), Tensor(v)), softmax(scores) @ v, rtol=1e-10)
    causal = np.where(np.arange(6)[None, :] <= np.arange(5)[:, None], scores, -np.inf)
    check(Tensor(q).scaled_dot_product_attention(Tensor(k), Tensor(v), is_causal=True), softmax(causal) @ v, rtol=1e-10)
    mask, bias = RNG.integers(0, 2, (5, 6)).astype(bool), numbers(RNG, "float64", (5, 6))
    mask[:, 0] = True
    check(Tensor(q).scaled_dot_product_attention(Tensor(k), Tensor(v), Tensor(mask)), softmax(np.where(mask, scores, -np.inf)) @ v, rtol=1e-10)
    check(Tensor(q).scaled_dot_product_attention(Tensor(k), Tensor(v), Tensor(bias)), softmax(scores + bias) @ v, rtol=1e-10)
    with pytest.raises(ValueError, match="attn_mask or is_causal, not both"):
        Tensor(q).scaled_dot_product_attention(Tensor(k), Tensor(v), Tensor(mask), is_causal=True)


def test_sequential() -> None:
    assert Tensor([1.0]).sequential([lambda t: t + 1, lambda t: t * 3]).tolist() == [6.0]
