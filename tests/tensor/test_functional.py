"""Activations, normalisation, losses, convolution and pooling against plain NumPy, most of it written as loops."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

from manygrad import Context, Tensor, nn
from manygrad.nn import functional as F
from manygrad.tensor.ops.error_function import FAR, normal_tail
from tests.tensor.oracle import check, numbers

RNG = np.random.default_rng(0)
X = numbers(RNG, "float64", (4, 6))


@pytest.fixture(autouse=True, params=["PYTHON", "CPU"])
def device(request: pytest.FixtureRequest) -> Iterator[str]:
    with Context(DEVICE=request.param):
        yield request.param


def softmax(a: np.ndarray, axis: int = -1) -> np.ndarray:
    e = np.exp(a - a.max(axis, keepdims=True))
    return e / e.sum(axis, keepdims=True)


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


def test_gelu_and_erf_of_float32() -> None:
    """Digit for digit where the result is not small; where it is,
    gelu keeps more than Φ as a difference from 1 would."""
    x = np.float32([*np.linspace(-12, 12, 4801), 0.0, -0.0, 1e4, -1e4, np.inf, -np.inf, np.nan])
    wide = x.astype(np.float64)
    tail = np.array([math.erfc(abs(v) / math.sqrt(2)) / 2 for v in wide])
    with np.errstate(invalid="ignore"):
        want = np.where(wide > 0, wide * (1 - tail), np.where(tail > 0, wide * tail, 0 * tail))
    got = Tensor(x).gelu().numpy()
    np.testing.assert_allclose(got[x > 0], want[x > 0], rtol=3e-7)
    for limit, error in ((2, 2e-6), (5, 5e-3)):
        near = (x <= 0) & (x >= -limit)
        np.testing.assert_allclose(got[near], want[near], rtol=error)
    np.testing.assert_allclose(got[x < -5], 0, atol=2e-6)
    assert got[x < -FAR].tolist() == [0] * int((x < -FAR).sum())
    # nothing underflows, which is slow
    assert np.isnan(got[-1]) and normal_tail(Tensor([FAR])).item() > np.finfo(np.float32).tiny
    want = np.array([math.erf(v) for v in wide])
    np.testing.assert_allclose(Tensor(x).erf().numpy(), want, rtol=3e-7)


def test_small_values_keep_their_digits() -> None:
    x = np.float32([1e-30, 1e-6, -3e-5, 2e-4, -0.0])
    wide = x.astype(np.float64)
    for name, want in (
        ("log1p", np.log1p(wide)),
        ("expm1", np.expm1(wide)),
        ("tanh", np.tanh(wide)),
        ("erf", 2 / math.sqrt(math.pi) * wide),
        ("asinh", np.arcsinh(wide)),
    ):
        got = getattr(Tensor(x), name)()
        check(got, want.astype(np.float32), rtol=3e-7, atol=0)
        assert got.signbit().tolist()[-1] is True


def test_errors_of_normalization() -> None:
    with pytest.raises(ValueError, match=r"layer_norm over \(5,\), but the input's last dims are \(6,\)"):
        Tensor(X).layer_norm(5)
    with pytest.raises(ValueError, match=r"group_norm: 4 groups do not divide the channels \(dim 1\) of \(4, 6\)"):
        Tensor(X).group_norm(4)
    with pytest.raises(ValueError, match="batch_norm outside training needs running_mean and running_var"):
        Tensor(X).batch_norm(None, None)


def test_batch_norm_moves_the_running_statistics() -> None:
    mean, var = Tensor.zeros(6, dtype="float64").contiguous(), Tensor.ones(6, dtype="float64").contiguous()
    Tensor(X).batch_norm(mean, var, training=True, momentum=0.25).realize(mean, var)
    check(mean, 0.25 * X.mean(0))
    check(var, 0.75 + 0.25 * X.var(0, ddof=1))


# *** losses ***


def test_losses_of_the_half_types_keep_the_type_and_count_beyond_its_range() -> None:
    n = 1 << 17  # more samples than the largest float16
    x, y = Tensor(np.zeros((n, 2), np.float16), device="CPU"), Tensor(np.zeros(n, np.int64), device="CPU")
    loss = x.cross_entropy(y)
    assert loss.dtype.name == "float16" and loss.item() == pytest.approx(math.log(2), rel=1e-3)


@pytest.mark.parametrize("loss", [F.cross_entropy, F.nll_loss])
@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_all_targets_count_without_an_ignored_one(loss: Any, weighted: bool, reduction: str) -> None:
    x, y = Tensor(X).log_softmax(1), Tensor(np.arange(len(X)) % X.shape[1])
    weight = Tensor(np.arange(1.0, X.shape[1] + 1)) if weighted else None
    for more in ({}, {"label_smoothing": 0.3}) if loss is F.cross_entropy else ({},):
        want, got = (loss(x, y, weight, ignore_index=i, reduction=reduction, **more) for i in (-100, None))
        check(got, want.numpy())
    with pytest.raises(IndexError, match="class -100 "):
        loss(x, y * 0 - 100, ignore_index=None).item()


def test_names_of_the_loss_with_a_layer_of_its_own() -> None:
    loss = nn.LinearCrossEntropyLoss(3, 4, weight=Tensor.ones(4), bias=True)
    assert list(loss.state_dict()) == ["weight", "linear.weight", "linear.bias"]
    with pytest.raises(ValueError, match=r"weight has shape \(3,\), expected \(4,\)"):
        nn.LinearCrossEntropyLoss(3, 4, weight=Tensor.ones(3))


def test_errors_of_losses() -> None:
    x = Tensor(np.zeros((5, 4)))
    with pytest.raises(ValueError, match="ignore_index 2 is for class numbers; probabilities all count"):
        x.cross_entropy(Tensor(np.full((5, 4), 0.25)), ignore_index=2)
    with pytest.raises(
        ValueError, match=r"cross_entropy: an input of shape \(5, 4\) needs targets of shape \(5,\), got \(4,\)"
    ):
        x.cross_entropy(Tensor([0, 1, 2, 3]))
    with pytest.raises(TypeError, match="targets are class numbers.*float32"):
        x.cross_entropy(Tensor([0.0] * 5))
    with pytest.raises(ValueError, match='reduction is "mean", "sum" or "none", not \'avg\''):
        x.cross_entropy(Tensor([0] * 5), reduction="avg")
    with pytest.raises(ValueError, match="gelu: approximate"):
        x.gelu("fast")


# *** convolution and pooling ***


def conv(
    x: np.ndarray,
    w: np.ndarray,
    b: np.ndarray | None,
    s: tuple[int, ...],
    p: tuple[int, ...],
    d: tuple[int, ...],
    groups: int,
) -> np.ndarray:
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
    check(
        Tensor(x).conv2d(Tensor(w), Tensor(b), s, p, d, groups),
        conv(x, w, b, pair(s), pair(p), pair(d), groups),
        rtol=1e-10,
    )


@pytest.mark.parametrize("spatial", [(9,), (4, 5, 3)])
def test_conv_over_other_numbers_of_dims(spatial: tuple[int, ...]) -> None:
    n = len(spatial)
    x, w = numbers(RNG, "float64", (2, 3, *spatial)), numbers(RNG, "float64", (2, 3, *(2,) * n))
    check(
        Tensor(x).conv2d(Tensor(w), stride=2, padding=1), conv(x, w, None, (2,) * n, (1,) * n, (1,) * n, 1), rtol=1e-10
    )


def test_errors_of_convolution() -> None:
    x = Tensor(np.zeros((1, 3, 4, 4)))
    with pytest.raises(
        ValueError,
        match=(
            r"conv: input \(1, 3, 4, 4\) and weight \(2, 2, 3, 3\) with groups=1 do not fit; "
            r"expected weight \(Cout, 3 // 1"
        ),
    ):
        x.conv2d(Tensor(np.zeros((2, 2, 3, 3))))
    with pytest.raises(
        ValueError, match=r"window \(5, 5\) \(dilation \(1, 1\)\) is larger than the input's \(4, 4\); add padding"
    ):
        x.conv2d(Tensor(np.zeros((2, 3, 5, 5))))


def pool(
    x: np.ndarray,
    k: tuple[int, int],
    s: tuple[int, int],
    p: tuple[int, int],
    d: tuple[int, int],
    f: Callable,
    fill: float,
) -> np.ndarray:  # type: ignore[type-arg]
    x = np.pad(x, ((0, 0), (0, 0), *((q, q) for q in p)), constant_values=fill)
    outs = [(n - e * (j - 1) - 1) // t + 1 for n, j, t, e in zip(x.shape[2:], k, s, d)]
    out = np.zeros((*x.shape[:2], *outs), x.dtype)
    for i, j in np.ndindex(*outs):
        window = x[
            :, :, i * s[0] : i * s[0] + d[0] * (k[0] - 1) + 1 : d[0], j * s[1] : j * s[1] + d[1] * (k[1] - 1) + 1 : d[1]
        ]
        out[:, :, i, j] = f(window, axis=(2, 3))
    return out


POOLS = [
    (2, None, 0, 1),
    (3, 1, 0, 1),
    (3, 2, 1, 1),
    (2, 1, 1, 1),
    ((2, 3), (1, 2), (0, 1), 1),
    (2, 2, 0, 2),
    (1, 2, 0, 1),
    (2, 2, 1, 1),
]


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
    check(
        Tensor(q).scaled_dot_product_attention(Tensor(k), Tensor(v), Tensor(mask)),
        softmax(np.where(mask, scores, -np.inf)) @ v,
        rtol=1e-10,
    )
    check(
        Tensor(q).scaled_dot_product_attention(Tensor(k), Tensor(v), Tensor(bias)),
        softmax(scores + bias) @ v,
        rtol=1e-10,
    )
    with pytest.raises(ValueError, match="attn_mask or is_causal, not both"):
        Tensor(q).scaled_dot_product_attention(Tensor(k), Tensor(v), Tensor(mask), is_causal=True)


def test_sequential() -> None:
    assert Tensor([1.0]).sequential([lambda t: t + 1, lambda t: t * 3]).tolist() == [6.0]
