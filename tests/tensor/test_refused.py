"""What PyTorch refuses is refused here, and what says nothing has no value: numbers that a type does not hold, sizes of
windows, weights, ranges, targets."""

from __future__ import annotations

import operator
from collections.abc import Callable

import numpy as np
import pytest

from manygrad import Tensor, nn
from manygrad.nn import functional as F

NAN, INF = float("nan"), float("inf")
X3, X4 = Tensor.ones(1, 1, 8), Tensor.ones(1, 1, 8, 8)
WIDE = Tensor.ones(2, 4, 8, 8)
W3, W4 = Tensor.ones(1, 1, 3), Tensor.ones(1, 1, 3, 3)

# calls with a parameter of one element for four channels, which would broadcast
PARAMETERS: dict[str, Callable[[Tensor], object]] = {
    "conv2d's bias": lambda t: F.conv2d(WIDE, W4.expand(4, 4, 3, 3), t),
    "conv_transpose2d's bias": lambda t: F.conv_transpose2d(WIDE, W4.expand(4, 4, 3, 3), t),
    **{f"layer_norm's {name}": lambda t, name=name: WIDE.mean((2, 3)).layer_norm(4, **{name: t})
       for name in ("weight", "bias")},
    "rms_norm's weight": lambda t: WIDE.mean((2, 3)).rms_norm(4, t),
    **{f"group_norm's {name}": lambda t, name=name: WIDE.group_norm(2, **{name: t}) for name in ("weight", "bias")},
    **{f"{norm.__name__}'s {name}": lambda t, norm=norm, flag=flag, name=name: norm(
           WIDE, **{"running_mean": None, "running_var": None, name: t}, **{flag: True})
       for norm, flag in ((Tensor.batch_norm, "training"), (Tensor.instance_norm, "use_input_stats"))
       for name in ("running_mean", "running_var", "weight", "bias")},
    "bilinear's bias": lambda t: F.bilinear(X4[0, 0], X4[0, 0], Tensor.ones(4, 8, 8), t),
    "cross_entropy's weight": lambda t: F.cross_entropy(WIDE, WIDE[:, 0].int(), weight=t),
    "LinearCrossEntropyLoss's weight": lambda t: nn.LinearCrossEntropyLoss(3, 4, weight=t),
}  # fmt: skip

REFUSED: dict[str, tuple[Callable[[], object], type[Exception], str]] = {
    "Tensor(2**63)": (lambda: Tensor(2**63), ValueError, "int64 does not hold 9223372036854775808"),
    "Tensor([2**63])": (lambda: Tensor([2**63]), ValueError, "int64 does not hold"),
    "Tensor(-2**63 - 1)": (lambda: Tensor(-(2**63) - 1), ValueError, "int64 does not hold"),
    "Tensor(300, uint8)": (lambda: Tensor(300, dtype="uint8"), ValueError, "uint8 does not hold 300, only 0 to 255"),
    "Tensor([300], uint8)": (lambda: Tensor([300], dtype="uint8"), ValueError, "uint8 does not hold 300"),
    **{f"{name}([t, None])": (lambda f=f: f([X3, None]), TypeError, f"{name} takes tensors, got NoneType")
       for name, f in (("cat", Tensor.cat), ("stack", Tensor.stack), ("hstack", Tensor.hstack))},
    "full": (lambda: Tensor.full((2,), 2**31, dtype="int32"), ValueError, "int32 does not hold 2147483648"),
    "full_like": (lambda: Tensor([1], dtype="int8").full_like(128), ValueError, "int8 does not hold 128"),
    "assign": (lambda: Tensor([1], dtype="int8").assign(128), ValueError, "int8 does not hold 128"),
    "Tensor([nan], int32)": (lambda: Tensor([NAN], dtype="int32"), ValueError, "int32 does not hold nan"),
    "Tensor([3e9], int32)": (lambda: Tensor([1.0, 3e9], dtype="int32"), ValueError, "int32 does not hold 3000000000.0"),
    **{f"{name} beyond 64 bits": (lambda f=f: f(Tensor([1]), 2**64), ValueError, "int64 does not hold 1844")
       for name, f in (("+", operator.add), ("-", lambda x, n: n - x), ("<", operator.lt), ("==", Tensor.eq),
                       ("&", operator.and_), ("pow", operator.pow), ("maximum", Tensor.maximum))},
    "uint64 + 2**64": (lambda: Tensor([1], dtype="uint64") + 2**64, ValueError, "uint64 does not hold"),
    **{f"{name}(300) of int8": (lambda f=f: f(Tensor([1], dtype="int8"), 300), ValueError, "int8 does not hold 300")
       for name, f in (("clamp(max)", lambda x, n: x.clamp(max=n)), ("clamp(min)", lambda x, n: x.clamp(n)),
                       ("masked_fill", lambda x, n: x.masked_fill(x > 0, n)), ("where", lambda x, n: x.where(x > 0, n)),
                       ("where, first", lambda x, n: (x > 0).where(n, x)))},
    "masked_fill(inf) of int64": (
        lambda: Tensor([1]).masked_fill(Tensor([True]), INF), ValueError, "int64 does not hold inf"),
    **{f"{name}, a dim twice": (lambda n=name: getattr(X4, n)((0, -4)), ValueError, "a dim stands twice")
       for name in ("flip", "squeeze", "sum", "amax", "all", "var", "logsumexp")},
    **{f"{name} of another shape": (lambda f=f: f(Tensor.ones(1)), ValueError, r"has shape \(1,\), expected \(4,\)")
       for name, f in PARAMETERS.items()},
    "conv2d, bias (1, 4)": (lambda: F.conv2d(WIDE, W4.expand(4, 4, 3, 3), Tensor.ones(1, 4)), ValueError, "bias has"),
    "conv1d, stride -1": (lambda: F.conv1d(X3, W3, stride=-1), ValueError, "stride is at least 1, not -1"),
    "conv2d, stride 0": (lambda: F.conv2d(X4, W4, stride=(1, 0)), ValueError, "stride is at least 1"),
    "conv2d, dilation 0": (lambda: F.conv2d(X4, W4, dilation=0), ValueError, "dilation is at least 1"),
    "conv2d, padding -1": (lambda: F.conv2d(X4, W4, padding=-1), ValueError, "padding is at least 0"),
    "conv_transpose1d": (lambda: F.conv_transpose1d(X3, W3, stride=0), ValueError, "stride is at least 1"),
    "output_padding": (
        lambda: F.conv_transpose1d(X3, W3, stride=2, output_padding=-1), ValueError, "output_padding is at least 0"),
    "max_pool1d, dilation 0": (lambda: F.max_pool1d(X3, 2, dilation=0), ValueError, "dilation is at least 1"),
    "max_pool2d, stride 0": (lambda: F.max_pool2d(X4, 2, stride=0), ValueError, "stride is at least 1"),
    "avg_pool2d, padding -1": (lambda: F.avg_pool2d(X4, 2, padding=-1), ValueError, "padding is at least 0"),
    "avg_pool1d, kernel 0": (lambda: F.avg_pool1d(X3, 0), ValueError, "kernel_size is at least 1"),
    "lp_pool1d": (lambda: F.lp_pool1d(X3, 2, 2, stride=-1), ValueError, "stride is at least 1"),
    "unfold": (lambda: F.unfold(X4, 2, dilation=0), ValueError, "dilation is at least 1"),
    "hardtanh": (lambda: F.hardtanh(X3, 1, -1), ValueError, "min_val 1 is above max_val -1"),
    "randint": (lambda: Tensor.randint(2, low=0, high=300, dtype="uint8"), ValueError, "uint8 holds 0 to 255"),
    "randint(2**64)": (lambda: Tensor.randint(2, low=0, high=2**64), ValueError, "int64 holds"),
    "rand of integers": (lambda: Tensor.rand(2, dtype="int64"), TypeError, "rand draws floats, not int64"),
    "randn of integers": (lambda: Tensor.randn(2, dtype="int64"), TypeError, "randn draws floats, not int64"),
    "normal_ of integers": (lambda: Tensor([1, 2]).normal_(), TypeError, "normal_ draws floats"),
    "uniform_ of integers": (lambda: Tensor([1, 2]).uniform_(), TypeError, "uniform_ draws floats"),
    "uniform, low above high": (lambda: Tensor.uniform(2, low=1, high=0), ValueError, r"the range \[1, 0\) is empty"),
    "uniform of integers": (lambda: Tensor.uniform(2, high=1.5, dtype="int32"), ValueError, "pass whole numbers"),
    "manual_seed": (lambda: Tensor.manual_seed(2**64), ValueError, "the seed has 64 bits"),
    "arange, the step's sign": (lambda: Tensor.arange(0, -3, 2), ValueError, "steps of 2 do not lead from 0 to -3"),
    "arange to inf": (lambda: Tensor.arange(0, float("inf"), 2), ValueError, "has no count"),
    "addr of bools": (
        lambda: Tensor([True]).addr(Tensor([True]), Tensor([True]), beta=1.5), TypeError, "beta=1.5 for tensors of"),
    "addmm of integers": (
        lambda: Tensor([[1]]).addmm(Tensor([[1]]), Tensor([[1]]), alpha=0.5), TypeError, "alpha=0.5 for tensors"),
    "linspace, steps": (lambda: Tensor.linspace(0, 3, 1.0), TypeError, "steps is a whole number, got 1.0"),
    "linspace, ends": (lambda: Tensor.linspace(Tensor([0, 1]), 2, 3), ValueError, "tensors without dims"),
    "narrow": (lambda: X4.narrow(0, Tensor(True), 1), TypeError, "start is a whole number, not a bool tensor"),
    "roll of no dims": (lambda: Tensor(1.0).roll(1, 0), IndexError, "of a tensor without dims"),
    "eye": (lambda: Tensor.eye(-1), ValueError, "sizes are not negative, got -1"),
    "isclose": (lambda: X3.isclose(X3, rtol=-1.0), ValueError, "rtol and atol are not negative"),
    "isclose, nan": (lambda: X3.isclose(X3, rtol=NAN), ValueError, "rtol and atol are not negative"),
    "softshrink": (lambda: X3.softshrink(NAN), ValueError, "lambd is a number from 0"),
    "renorm": (lambda: X3.renorm(2, 0, -1.0), ValueError, "maxnorm is at least 0"),
    "huber_loss": (lambda: F.huber_loss(X3, X3, delta=NAN), ValueError, "delta is above 0"),
    "smooth_l1_loss": (lambda: F.smooth_l1_loss(X3, X3, beta=NAN), ValueError, "beta is at least 0"),
    "cdist": (lambda: X3.cdist(X3, p=NAN), ValueError, "p"),
    **{f"{name}({arguments})": (lambda n=name, a=arguments: getattr(Tensor.empty(3), n)(*a), ValueError, name)
       for name, arguments in (("bernoulli", (1.5,)), ("bernoulli", (NAN,)), ("bernoulli_", (-0.1,)),
                               ("uniform_", (NAN, 1.0)), ("uniform_", (2.0, 1.0)), ("normal_", (0.0, NAN)),
                               ("log_normal_", (0.0, 0.0)), ("exponential_", (0.0,)), ("exponential_", (NAN,)),
                               ("cauchy_", (0.0, -1.0)), ("geometric_", (NAN,)))},
    "cov, fweights": (lambda: X4[0, 0].cov(fweights=Tensor.ones(8)), TypeError, "fweights are integers, not float32"),
    "cov, aweights": (lambda: X4[0, 0].cov(aweights=Tensor([1] * 8)), TypeError, "aweights are floats, not int64"),
    "histogram, range": (lambda: X3.histogram(3, range=(0, INF)), ValueError, "is not finite"),
    "quantile, dtype": (lambda: X3.quantile(Tensor([0.5]).double()), TypeError, "q is float64, the tensor float32"),
    "multi_margin_loss, targets": (
        lambda: F.multi_margin_loss(X4[0, 0], Tensor.ones(8)), TypeError, "targets are class numbers"),
    "multi_margin_loss, weight": (
        lambda: F.multi_margin_loss(X4[0, 0], Tensor([1] * 8), weight=Tensor(1.0)), ValueError,
        r"weight has shape \(\), expected \(8,\)"),
    "margin_ranking_loss": (
        lambda: F.margin_ranking_loss(X4[0, 0], X4[0, 0], Tensor(1.0)), ValueError, "equally many dims"),
    "triplet_margin_loss": (
        lambda: F.triplet_margin_loss(X4[0, 0], X3[0, 0], X4[0, 0]), ValueError, "equally many dims"),
    "gaussian_nll_loss": (lambda: F.gaussian_nll_loss(X3, X3, -1.0), ValueError, "a variance is not negative"),
    "tensordot": (lambda: X3.tensordot(W3, ([2], [2])), ValueError, "differ in size"),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_refused(name: str) -> None:
    call, error, message = REFUSED[name]
    with pytest.raises(error, match=message):
        call()


@pytest.mark.parametrize("replacement", [True, False])
@pytest.mark.parametrize("weights", [[1, NAN], [1, INF], [1, -1.0], [0.0, 0.0], [[1.0, 1.0], [0.0, 0.0]]])
def test_multinomial_of_what_is_no_weight(weights: list[float], replacement: bool) -> None:
    drawn = Tensor(np.array(weights, np.float32)).multinomial(1, replacement)
    with pytest.raises(IndexError, match=r"weights that are negative, not finite.*test_refused.py"):
        drawn.numpy()
    assert Tensor([0.0, 2.0]).multinomial(1, replacement).tolist() == [1]


@pytest.mark.parametrize("p", [-0.1, 1.5, NAN, INF])
def test_bernoulli_of_what_is_no_probability(p: float) -> None:
    for draw in (Tensor.bernoulli, lambda ps: Tensor.zeros(3).contiguous().bernoulli_(ps)):
        drawn = draw(Tensor(np.array([0.0, p, 1.0], np.float32)))
        with pytest.raises(IndexError, match=r"a probability outside \[0, 1\].*test_refused.py"):
            drawn.numpy()
    assert Tensor([0.0, 1.0]).bernoulli().tolist() == [0, 1]


@pytest.mark.parametrize(("frames", "labels"), [([6, 5], [2, 2]), ([5, -1], [2, 2]), ([5, 5], [3, 2])])
def test_ctc_loss_of_lengths_that_are_not_there(frames: list[int], labels: list[int]) -> None:
    for kind in (list, Tensor):
        loss = F.ctc_loss(Tensor.ones(5, 2, 3), Tensor([[1, 1], [1, 2]]), kind(frames), kind(labels))
        with pytest.raises(IndexError, match=r"ctc_loss: (input|target) length.*test_refused.py"):
            loss.numpy()


def test_multinomial_without_replacement_needs_as_many_weights_above_0() -> None:
    with pytest.raises(IndexError, match="too few of them above 0"):
        Tensor([0.0, 2.0, 1.0]).multinomial(3).numpy()
    assert sorted(Tensor([0.0, 2.0, 1.0]).multinomial(2).tolist()) == [1, 2]


def test_what_says_nothing_is_nan() -> None:
    """Where an error would have to wait for the values."""
    x = Tensor([[1.0, 2, 4], [3, 1, 7]])
    for kind in ({"fweights": Tensor([0, 0, 0])}, {"fweights": Tensor([1, -2, 3])}, {"aweights": Tensor([-0.5, 1, 2])}):
        assert np.isnan(x.cov(**kind).numpy()).all()
    assert np.isnan(Tensor([1.0, NAN]).histogram(3).hist.numpy()).all()
    assert np.isnan(Tensor([1.0, INF]).histc(3).numpy()).all()
    np.testing.assert_array_equal(Tensor([1.0, 3.0]).quantile(Tensor([-0.1, 0.5, 1.5])).numpy(), [NAN, 2, NAN])
    assert np.isnan(F.gaussian_nll_loss(x[0], x[1], Tensor([-1.0, 1, 1]), reduction="none").numpy()).tolist() == [
        1,
        0,
        0,
    ]
