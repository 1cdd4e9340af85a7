"""Gradients against finite differences in float64."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from manygrad import Context, Tensor, autograd, dtypes, linalg
from manygrad.nn import functional as F
from manygrad.tensor.ops.elementary import fma
from tests.tensor.oracle import check, finite_difference, numbers

RNG = np.random.default_rng(0)
I = Tensor
Fn = Callable[..., Tensor]


@pytest.fixture(autouse=True, scope="module")
def interpreter() -> Iterator[None]:
    with Context(DEVICE="PYTHON"):
        yield


def agree(f: Fn, arrays: list[np.ndarray], tolerance: float = 1e-6) -> None:
    """d(sum(f * w)) / d(each array) by backward() and by differences."""
    tensors = [Tensor(a, requires_grad=True) for a in arrays]
    out = f(*tensors)
    w = numbers(RNG, "float64", out.shape)
    (out * Tensor(w)).sum().backward()
    for i, (t, a) in enumerate(zip(tensors, arrays)):
        want = finite_difference(lambda *xs: f(*map(Tensor, xs)).numpy(), arrays, i, w)
        got = np.zeros(a.shape) if t.grad is None else t.grad.numpy()
        assert t.grad is None or (t.grad.shape, t.grad.dtype) == (t.shape, t.dtype)
        np.testing.assert_allclose(got, want, rtol=tolerance, atol=tolerance)


def data(*shapes: tuple[int, ...], low: float = -2, high: float = 2) -> list[np.ndarray]:
    return [numbers(RNG, "float64", s, low, high) for s in shapes]


UNARY: dict[str, tuple[Fn, float, float]] = {
    "neg": (lambda x: -x, -2, 2), "abs": (lambda x: x.abs(), -2, 2), "square": (lambda x: x.square(), -2, 2),
    "reciprocal": (lambda x: 1 / x, 0.5, 2),
    "sqrt": (lambda x: x.sqrt(), 0.5, 2), "rsqrt": (lambda x: x.rsqrt(), 0.5, 2), "exp": (lambda x: x.exp(), -2, 2),
    "exp2": (lambda x: x.exp2(), -2, 2),
    "log": (lambda x: x.log(), 0.5, 2), "log2": (lambda x: x.log2(), 0.5, 2), "log1p": (lambda x: x.log1p(), -0.5, 2),
    "sin": (lambda x: x.sin(), -2, 2),
    "cos": (lambda x: x.cos(), -2, 2), "tan": (lambda x: x.tan(), -1, 1), "cube": (lambda x: x**3, -2, 2),
    "power": (lambda x: x**1.7, 0.5, 2),
    "power -2": (lambda x: x**-2, 0.5, 2), "2 **": (lambda x: 2.0**x, -2, 2), "relu": (lambda x: x.relu(), -2, 2),
    "leaky": (lambda x: x.leaky_relu(), -2, 2),
    "sigmoid": (lambda x: x.sigmoid(), -2, 2), "tanh": (lambda x: x.tanh(), -2, 2), "silu": (lambda x: x.silu(), -2, 2),
    "softplus": (lambda x: x.softplus(), -2, 2),
    "gelu tanh": (lambda x: x.gelu("tanh"), -2, 2), "clamp": (lambda x: x.clamp(-0.7, 0.9), -2, 2),
    "where": (lambda x: (x > 0).where(x * 2, x * x), -2, 2),
    "floor": (lambda x: x.floor() * x, -2, 2), "cast": (lambda x: x.cast("float64") * 2, -2, 2),
    "division": (lambda x: x / 3, -2, 2), "mod": (lambda x: x % 0.75, 0.8, 1.4),
    "fmod": (lambda x: x.fmod(0.75), 0.8, 1.4), "masked_fill": (lambda x: x.masked_fill(x > 1, 0.0), -2, 2),
}  # fmt: skip


@pytest.mark.parametrize("name", UNARY)
def test_unary(name: str) -> None:
    f, low, high = UNARY[name]
    agree(f, data((2, 3), low=low, high=high))


def test_erf_and_gelu() -> None:
    """Their forward is an approximation, so the derivative of it is compared with the exact one;
    gelu's is another one in float32."""
    x = numbers(RNG, "float64", (7,))
    t = Tensor(x, requires_grad=True)
    t.erf().sum().backward()
    check(t.grad, 2 / np.sqrt(np.pi) * np.exp(-x * x), rtol=1e-5)  # type: ignore[arg-type]
    x = np.float32([*np.linspace(-12, 12, 401), 0, 1e4, -1e4, np.inf, -np.inf, np.nan])
    slopes = []
    for kind in ("float32", "float64"):
        t = Tensor(x, requires_grad=True, dtype=kind)
        t.gelu().sum().backward()
        slopes.append(t.grad.numpy())  # type: ignore[union-attr]
    np.testing.assert_allclose(slopes[0][:-3], slopes[1][:-3], rtol=0, atol=3e-7)
    assert slopes[0][-6:-1].tolist() == [0.5, 1, 0, 1, 0] and np.isnan(slopes[0][-1])


def test_fma() -> None:
    agree(fma, data((2, 3), (2, 3), (2, 3)))


BINARY: dict[str, Fn] = {
    "add": lambda x, y: x + y, "sub": lambda x, y: x - y, "mul": lambda x, y: x * y, "div": lambda x, y: x / y,
    "maximum": lambda x, y: x.maximum(y),
    "minimum": lambda x, y: x.minimum(y), "pow": lambda x, y: x.abs() ** y,
    "where": lambda x, y: (x < y).where(x * y, y), "lerp": lambda x, y: x.lerp(y, 0.3),
    "fmod": lambda x, y: x.fmod(y.abs() + 5),
}  # fmt: skip


@pytest.mark.parametrize("name", BINARY)
@pytest.mark.parametrize("shapes", [((2, 3), (2, 3)), ((2, 3), (3,)), ((2, 1), (1, 3)), ((), (2,))], ids=str)
def test_binary_with_broadcasting(name: str, shapes: tuple[tuple[int, ...], tuple[int, ...]]) -> None:
    agree(BINARY[name], data(*shapes, low=0.5))


MOVEMENT: dict[str, Fn] = {
    "reshape": lambda x: x.reshape(4, 3) * x.reshape(2, 6).reshape(4, 3), "permute": lambda x: x.permute(2, 0, 1),
    "expand": lambda x: x.unsqueeze(1).expand(2, 3, 3, 2),
    "pad": lambda x: x.pad((1, 2, 0, 1)), "pad value": lambda x: x.pad((1, 0), value=3.0),
    "shrink": lambda x: x.shrink(((0, 1), (1, 3), (0, 2))), "flip": lambda x: x.flip(0, 2),
    "cat": lambda x: x.cat(x * x, dim=1), "stack": lambda x: x.stack(x.exp(), dim=-1),
    "split": lambda x: x.split([1, 2], 1)[1] * 2, "repeat": lambda x: x.repeat(1, 2, 2),
    "roll": lambda x: x.roll(1, 1), "tril": lambda x: x.tril(), "step": lambda x: x[:, ::2, ::-1],
    "int": lambda x: x[1, :, 0], "windows": lambda x: x.unfold_windows((2, 2), (1, 1), (1, 1)),
    "contiguous": lambda x: x.contiguous().T, "transpose": lambda x: x.mT @ x.transpose(0, 2).permute(2, 1, 0),
}  # fmt: skip


@pytest.mark.parametrize("name", MOVEMENT)
def test_movement(name: str) -> None:
    agree(MOVEMENT[name], data((2, 3, 2)))


IDX = np.array([[2, 0], [2, 1]])
INDEXING: dict[str, Fn] = {
    "rows": lambda x: x[I(IDX)], "twice the same": lambda x: x[I([1, 1, 1])], "both": lambda x: x[I(IDX), I([0, 3])],
    "column": lambda x: x[:, I([3, 0])],
    "negative": lambda x: x[I([-1, -3])], "gather": lambda x: x.gather(1, I(IDX)),
    "index_select": lambda x: x.index_select(1, I([0, 0, 2])),
    "scatter_add": lambda x: x.scatter_add(0, I(IDX), x[:2, :2] * 3),
}  # fmt: skip


@pytest.mark.parametrize("name", INDEXING)
def test_indexing(name: str) -> None:
    agree(INDEXING[name], data((3, 4)))


REDUCTIONS: dict[str, Fn] = {
    "sum": lambda x: x.sum(), "sum dim": lambda x: x.sum(1), "mean": lambda x: x.mean((0, 2), keepdim=True),
    "max": lambda x: x.amax(1), "min": lambda x: x.min(), "prod": lambda x: x.prod(1),
    "var": lambda x: x.var(1), "std": lambda x: x.std((0, 1)), "logsumexp": lambda x: x.logsumexp(1),
    "norm": lambda x: x.norm(2, 2), "cumsum": lambda x: x.cumsum(1),
    "softmax": lambda x: x.softmax(1), "log_softmax": lambda x: x.log_softmax(-1),
    "layer_norm": lambda x: x.layer_norm((3, 2)), "max of sums": lambda x: x.sum(0).amax(0),
}  # fmt: skip


@pytest.mark.parametrize("name", REDUCTIONS)
def test_reductions(name: str) -> None:
    agree(REDUCTIONS[name], data((2, 3, 2)))


CONTRACTIONS: dict[str, tuple[Fn, list[tuple[int, ...]]]] = {
    "matmul": (lambda x, y: x @ y, [(2, 3), (3, 2)]),
    "batched": (lambda x, y: x @ y, [(2, 1, 2, 3), (2, 3, 2)]),
    "batch by matrix": (lambda x, y: x @ y, [(2, 2, 3), (3, 2)]),
    "dot": (lambda x, y: x @ y, [(3,), (3,)]),
    "linear": (lambda x, w, b: x.linear(w, b), [(2, 3), (4, 3), (4,)]),
    "einsum": (lambda x, y: x.einsum("bi,bj->ij", y), [(2, 3), (2, 2)]),
    "layer_norm": (lambda x, w, b: x.layer_norm(3, w, b), [(2, 3), (3,), (3,)]),
    "attention": (
        lambda q, k, v: q.scaled_dot_product_attention(k, v, is_causal=True),
        [(1, 3, 2), (1, 3, 2), (1, 3, 2)],
    ),
    "conv": (lambda x, w, b: x.conv2d(w, b), [(1, 2, 4, 4), (2, 2, 3, 3), (2,)]),
    "conv strided": (lambda x, w: x.conv2d(w, stride=2, padding=1), [(1, 2, 5, 4), (2, 2, 3, 3)]),
    "conv dilated": (lambda x, w: x.conv2d(w, dilation=2, padding=(2, 1)), [(1, 1, 5, 5), (1, 1, 2, 3)]),
    "conv grouped": (lambda x, w: x.conv2d(w, groups=2), [(2, 2, 3, 3), (4, 1, 2, 2)]),
    "conv with rest": (lambda x, w: x.conv2d(w, stride=3), [(1, 1, 6, 7), (1, 1, 2, 2)]),
    "conv 1d": (lambda x, w: x.conv2d(w, padding=1), [(2, 2, 5), (1, 2, 3)]),
}


@pytest.mark.parametrize("name", CONTRACTIONS)
def test_contractions(name: str) -> None:
    f, shapes = CONTRACTIONS[name]
    agree(f, data(*shapes))


@pytest.mark.parametrize("case", [(2, None, 0), (3, 1, 0), (2, 1, 1), (3, 2, 1)], ids=str)
def test_pooling(case: tuple) -> None:  # type: ignore[type-arg]
    agree(lambda x: x.max_pool2d(*case), data((1, 2, 4, 5)))
    agree(lambda x: x.avg_pool2d(*case), data((1, 2, 4, 5)))


def test_losses() -> None:
    y = Tensor([1, -100, 3, 0])
    for smoothing in (0.0, 0.2):
        agree(lambda x, s=smoothing: x.cross_entropy(y, label_smoothing=s), data((4, 4)))  # type: ignore[misc]
    agree(lambda x, p: x.mse_loss(p), data((3, 2), (3, 2)))
    agree(lambda x, p: x.binary_cross_entropy_with_logits(p), data((3,), (3,)))


@settings(max_examples=40)
@given(st.data())
def test_random_programs(draw: st.DataObject) -> None:
    """A few ops, values used more than once."""
    fs = [lambda a, b: a * b, lambda a, b: (a - b).exp() * 0.1, lambda a, b: a.sum(0, keepdim=True) * b,
          lambda a, b: a.T.reshape(b.shape) + b,
          lambda a, b: a.softmax(-1) * b.amax(1, keepdim=True), lambda a, b: (a @ b.T) @ a,
          lambda a, b: a.flip(0) / (b * b + 1)]  # fmt: skip
    program = draw.draw(
        st.lists(
            st.tuples(st.sampled_from(range(len(fs))), st.integers(0, 5), st.integers(0, 5)), min_size=1, max_size=5
        )
    )

    def f(x: Tensor, y: Tensor) -> Tensor:
        values = [x, y]
        for op, i, j in program:
            values.append(fs[op](values[i % len(values)], values[j % len(values)]).tanh() + 0.1)
        return values[-1]

    agree(f, data((2, 3), (2, 3)), tolerance=2e-5)


# *** second order ***

SECOND: dict[str, Fn] = {
    "polynomial": lambda x: x * x * x + x, "exp": lambda x: (x * x).exp(), "sigmoid": lambda x: x.sigmoid(),
    "log": lambda x: (x * x + 1).log(), "matmul": lambda x: (x @ x.T).tanh(),
    "softmax": lambda x: x.softmax(1), "index": lambda x: x[I([1, 1])] ** 3, "reciprocal": lambda x: 1 / (x * x + 1),
    "max": lambda x: x.amax(1) ** 3, "sin": lambda x: x.sin(), "sqrt": lambda x: (x * x + 1).sqrt(),
    "conv": lambda x: (x.reshape(1, 1, 2, 2).conv2d(x.reshape(1, 1, 2, 2), padding=1)) ** 2,
}  # fmt: skip


@pytest.mark.parametrize("name", SECOND)
def test_second_order(name: str) -> None:
    """The gradient of the gradient, against differences of the gradient."""
    f = SECOND[name]
    (a,) = data((2, 2))
    v = numbers(RNG, "float64", (2, 2))

    def slope(x: Tensor) -> Tensor:
        return f(x).sum().gradient(x)[0]

    x = Tensor(a)
    got = (slope(x) * Tensor(v)).sum().gradient(x)[0]
    want = finite_difference(lambda b: slope(Tensor(b)).numpy(), [a], 0, v)
    np.testing.assert_allclose(got.numpy(), want, rtol=1e-5, atol=1e-6)


def test_third_order() -> None:
    x = Tensor([1.5], requires_grad=True)
    y = x**4
    for want in (4 * 1.5**3, 12 * 1.5**2, 24 * 1.5):
        (y,) = y.sum().gradient(x)
        assert y.item() == pytest.approx(want)


# *** at edges ***


def test_a_tie_of_max_shares_the_gradient_and_relu_has_none_at_zero() -> None:
    x = Tensor([2.0, 2.0, 1.0], requires_grad=True)
    x.max().backward()
    assert x.grad.tolist() == [0.5, 0.5, 0.0]  # type: ignore[union-attr]
    z = Tensor([0.0, 1.0], requires_grad=True)
    z.relu().sum().backward()
    assert z.grad.tolist() == [0.0, 1.0]  # type: ignore[union-attr]


NAN, INF = float("nan"), float("inf")
# (function, input, gradient of the sum): torch's at ties, limits, NaN and infinities
AT_EDGES: dict[str, tuple[Fn, Any, Any]] = {
    "maximum(number)": (lambda x: x.maximum(0), [0.0, 1.0, -1.0], [0.5, 1, 0]),
    "minimum(number)": (lambda x: x.minimum(0), [0.0, 1.0, -1.0], [0.5, 0, 1]),
    "maximum, NaN": (lambda x: x.maximum(0), [NAN, 1.0], [1, 1]),
    "relu": (lambda x: x.relu(), [0.0, 1.0, -1.0], [0, 1, 0]),
    "amax": (lambda x: x.amax(), [2.0, 2.0, 1.0], [0.5, 0.5, 0]),
    "max, NaN": (lambda x: x.max(), [1.0, NAN, 2.0], [0, 1, 0]),
    "max_pool1d": (lambda x: F.max_pool1d(x, 2), [[[1.0, 1, 2, 2, 0, 3]]], [[[1, 0, 1, 0, 0, 1]]]),
    "max_pool1d, NaN": (lambda x: F.max_pool1d(x, 3, 1), [[[1.0, NAN, 2, 2, 0, 3]]], [[[0, 2, 1, 0, 0, 1]]]),
    "max_pool2d": (lambda x: F.max_pool2d(x, 2), [[[1.0, 1], [1, 1]]], [[[1, 0], [0, 0]]]),
    "adaptive_max_pool1d": (lambda x: F.adaptive_max_pool1d(x, 2), [[[1.0, 1, 2, 2]]], [[[1, 0, 1, 0]]]),
    "adaptive_max_pool1d, uneven": (lambda x: F.adaptive_max_pool1d(x, 2), [[[1.0, 1, 1]]], [[[1, 1, 0]]]),
    "max_unpool1d": (lambda x: F.max_unpool1d(x, Tensor([[[1, 1]]]), 2), [[[3.0, 3]]], [[[1, 1]]]),
    "median": (lambda x: x.median(), [1.0, 2, 2, 2, 5], [0, 1 / 3, 1 / 3, 1 / 3, 0]),
    "median, NaN": (lambda x: x.median(), [1.0, NAN, NAN], [0, 0.5, 0.5]),
    "nanmedian": (lambda x: x.nanmedian(), [1.0, 2, 2, NAN], [0, 0.5, 0.5, 0]),
    "logsumexp, inf": (lambda x: x.logsumexp(0), [INF, 1.0], [NAN, 0]),
    "logsumexp, NaN": (lambda x: x.logsumexp(0), [NAN, 1.0], [NAN, NAN]),
    "logsumexp, -inf": (lambda x: x.logsumexp(0), [-INF, 1.0], [0, 1]),
    "norm(p=0)": (lambda x: x.norm(0), [0.0, 2.0], [0, 0]),
    "norm at 0": (lambda x: x.norm(), [0.0, 0.0], [0, 0]),
    "nuclear norm at 0": (lambda x: x.norm("nuc"), [[0.0, 0], [0, 0]], [[1, 0], [0, 1]]),
    "det, rank 1": (lambda x: x.det(), [[1.0, 2], [2, 4]], [[4, -2], [-2, 1]]),
    "det, rank 2": (lambda x: x.det(), [[0.0, 1, 0], [0, 2, 0], [0, 0, 3]], [[6, 0, 0], [-3, 0, 0], [0, 0, 0]]),
    "det, rank 0": (lambda x: x.det(), [[0.0, 0], [0, 0]], [[0, 0], [0, 0]]),
    "eigenvalues that are equal": (
        lambda x: linalg.eigh(x)[0] * Tensor(np.array([2.0, 2.0])), [[3.0, 0], [0, 3]], [[2, 0], [0, 2]]),
    "singular values that are equal": (lambda x: x.svd().S, [[3.0, 0], [0, 3]], [[1, 0], [0, 1]]),
}  # fmt: skip


@pytest.mark.parametrize("name", AT_EDGES)
def test_at_edges(name: str) -> None:
    f, x, want = AT_EDGES[name]
    (g,) = f(t := Tensor(np.array(x))).sum().gradient(t)
    np.testing.assert_allclose(g.numpy(), np.array(want, float), atol=1e-14)


@pytest.mark.parametrize("align", [True, False])
@pytest.mark.parametrize("mode", ["border", "reflection"])
def test_a_sample_at_the_limit_of_the_input_does_not_move(mode: str, align: bool) -> None:
    """As in PyTorch: beyond the limit it does not either. In between, with align_corners, it moves by (2 − 1) / 2."""
    image = Tensor(np.array([[[[1.0, 2], [3, 4]]]]))

    def slope(place: float) -> list[float]:
        grid = Tensor(np.full((1, 1, 1, 2), place))
        return (
            F.grid_sample(image, grid, padding_mode=mode, align_corners=align)
            .sum()
            .gradient(grid)[0]
            .flatten()
            .tolist()
        )

    for limit in (1.0, -1.0) if align else (0.5, -0.5):
        assert slope(limit) == [0, 0]
    np.testing.assert_allclose(slope(0.25), [0.5, 1] if align else [1, 2])


BY_HAND: dict[str, tuple[Fn, Any, Any]] = {  # of the sum, by the input; from paper
    "gelu": (lambda x: x.gelu(), [0.0, 0.5], [0.7978845608, 0.6161143219]),
    "gelu, float32": (lambda x: x.float().gelu(), [0.0, 0.5], [0.7978845608, 0.6161143219]),
    "gelu, tanh": (lambda x: x.gelu("tanh"), [0.0], [0.7978845608]),
    "huber_loss of equal numbers": (lambda x: F.huber_loss(x, Tensor([0.0, 3.0]).double(), "sum"), [0.0, 0.0], [1, 0]),
    "smooth_l1_loss of equal numbers": (lambda x: F.smooth_l1_loss(x, x.detach(), reduction="sum"), [0.5], [1]),
    "prod of one 0": (lambda x: x.prod(), [0.0, 2.0, 3.0], [5, 3, 2]),  # Σ over j of the product of the others
    "prod of two 0": (lambda x: x.prod(), [0.0, 0.0, 3.0], [3, 3, 0]),
    "prod of three 0": (lambda x: x.prod(), [0.0, 0.0, 0.0], [0, 0, 0]),
    "cumprod": (lambda x: x.cumprod(0), [0.0, 2.0, 3.0], [6, 4, 2]),
    "scatter_reduce(prod)": (
        lambda x: Tensor(np.ones(1)).scatter_reduce(0, Tensor([0, 0, 0]), x, "prod"), [0.0, 2.0, 3.0], [5, 3, 2]),
    "index_reduce(prod)": (
        lambda x: Tensor(np.ones(1)).index_reduce(0, Tensor([0, 0]), x, "prod"), [0.0, 0.0], [1, 1]),
    "det": (lambda x: x.det(), [[1.0, 2], [3, 4]], [[1, -1], [-1, 1]]),
    "det, rank 1": (lambda x: x.det(), [[1.0, 2], [2, 4]], [[1, -1], [-1, 1]]),
    "det, rank 0": (lambda x: x.det(), [[0.0, 0], [0, 0]], [[1, -1], [-1, 1]]),
    "the squares of eigenvalues": (
        lambda x: linalg.eigh((x + x.mT) / 2)[0].square(), [[2.0, 1], [1, 0]], [[2, 2], [2, 2]]),
    "the squares of singular values": (lambda x: x.svd().S.square(), [[2.0, 1], [0.5, 3]], [[2, 2], [2, 2]]),
    "R'R": (lambda x: (lambda r: r.mT @ r)(x.qr()[1]), [[2.0, 1], [0.5, 3]], [[4, 4], [4, 4]]),
}  # fmt: skip


@pytest.mark.parametrize("name", BY_HAND)
def test_second_derivatives(name: str) -> None:
    f, x, want = BY_HAND[name]
    t = Tensor(np.array(x))
    (g,) = f(t).sum().gradient(t)
    (gg,) = g.sum().gradient(t)
    np.testing.assert_allclose(gg.numpy(), np.array(want, float), atol=1e-5 if "float32" in name else 1e-9)


def test_a_gradient_of_a_gradient_sees_all_saved_outputs() -> None:
    class Both(autograd.Function):
        """x² and x³; the gradient of each is written with the other."""

        @staticmethod
        def forward(ctx: autograd.Context, x: Tensor) -> tuple[Tensor, Tensor]:
            two, three = x * x, x * x * x
            ctx.save_for_backward(x, two, three)
            return two, three

        @staticmethod
        def backward(ctx: autograd.Context, g2: Tensor, g3: Tensor) -> Tensor:
            _, two, three = ctx.saved_tensors
            return g2 * 2 * three / two + g3 * 3 * two

    x = Tensor([2.0, 3.0], requires_grad=True)
    for i, want in ((0, [2, 2]), (1, [12, 18])):
        (g,) = Both.apply(x)[i].sum().gradient(x)
        np.testing.assert_allclose(g.sum().gradient(x)[0].numpy(), want, rtol=1e-5)


def test_what_is_no_gradient_of_a_tensor_is_refused() -> None:
    w = Tensor([[1.0, 2.0]], requires_grad=True)
    for wrong in (Tensor([1.0, 2.0]), Tensor([[1.0]]), Tensor([[1, 2]])):
        with pytest.raises(ValueError, match=r"does not fit a tensor of \(1, 2\) float32"):
            w.grad = wrong
    with pytest.raises(TypeError, match="grad is a Tensor or None, not float"):
        w.grad = 1.0  # type: ignore[assignment]
    w.grad = Tensor([[3.0, 4.0]])
    (w * 2).sum().backward()
    assert w.grad.tolist() == [[5, 6]]
    for shape in ((2,), (1, 1), ()):
        with pytest.raises(ValueError, match="does not fit the tensor it is of"):
            (w * 2).backward(Tensor.ones(*shape))
        with pytest.raises(ValueError, match="does not fit the tensor it is of"):
            autograd.grad(w * 2, w, Tensor.ones(*shape))


def test_errors() -> None:
    x = Tensor([1.0, 2.0], requires_grad=True)
    with pytest.raises(
        ValueError, match=r"backward\(\) starts at a scalar, this tensor has shape \(2,\); sum it, or pass gradient="
    ):
        x.backward()
    with pytest.raises(TypeError, match=r"backward\(\) needs a float tensor, this one is int64"):
        x.cast("int64").sum().backward()
    with pytest.raises(ValueError, match=r"a gradient of shape \(3,\) does not fit the tensor it is of, \(2,\)"):
        x.backward(Tensor([1.0, 2.0, 3.0]))


def test_integers_pass_no_gradient() -> None:
    x = Tensor([1.5, 2.5], requires_grad=True)
    (x + x.cast("int32").cast("float32")).sum().backward()
    assert x.grad.tolist() == [1.0, 1.0] and x.grad.dtype is dtypes.float32  # type: ignore[union-attr]


def test_gradient_of_a_mantissa() -> None:
    x = Tensor([3.0, -0.3, 100.0, 0.0], requires_grad=True)
    x.frexp()[0].sum().backward()
    assert x.grad is not None and x.grad.tolist() == [0.25, 2, 2.0**-7, 1]


def test_a_place_filled_twice_counts_once() -> None:
    value, x = Tensor(2.0, requires_grad=True), Tensor([[0.0] * 4] * 3, requires_grad=True)
    (x.index_fill(1, Tensor([0, 0, 2]), value) * Tensor([[1.0, 2, 3, 4]])).sum().backward()
    assert value.grad is not None and value.grad.item() == 12
    assert x.grad is not None and x.grad.tolist() == [[0, 2, 0, 4]] * 3


NO_GRADIENT: dict[str, Callable[[Tensor], Tensor]] = {
    "nextafter": lambda x: x.nextafter(x + 1),
    "igamma": lambda x: x.igamma(Tensor([1.0, 2.0])),
    "igammac": lambda x: x.igammac(x.detach()),
    "bitcast": lambda x: x.half().bitcast("bfloat16"),
}


@pytest.mark.parametrize("name", NO_GRADIENT)
def test_what_has_no_gradient_says_so(name: str) -> None:
    """Not zeros; and only where the gradient is wanted."""
    x = Tensor([0.5, 1.5], requires_grad=True)
    message = rf"{name}\(.*no gradient.*test_gradient\.py.*detach"
    with pytest.raises(NotImplementedError, match=message):
        NO_GRADIENT[name](x).sum().backward()
    with pytest.raises(NotImplementedError, match=message):
        NO_GRADIENT[name](x).sum().gradient(x)
    assert x.grad is None
    value = NO_GRADIENT[name](x.detach())
    np.testing.assert_array_equal((value.float() * x).sum().gradient(x)[0].numpy(), value.float().numpy())
    assert Tensor([0.5, 1.5]).igamma(x).sum().gradient(x)[0].numpy().all()  # to its second argument it has one
