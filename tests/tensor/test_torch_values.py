"""Results that torch 2.13 gives, written down, where ours were others."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from manygrad import Tensor, dtypes, linalg
from manygrad.nn import functional as F

X = [[1.0, 2, 4], [3, 1, 7]]
ROWS = [[1.0, 2, 3], [4, 5, 6], [7, 8, 9]]

VALUES: dict[str, tuple[Callable[[], Tensor], Any]] = {
    "cov, fweights": (
        lambda: Tensor(X).cov(fweights=Tensor([1, 2, 3])), [[1.7666667, 3.4666667], [3.4666667, 9.0666667]]),
    "cov, fweights and aweights": (
        lambda: Tensor(X[:1]).cov(fweights=Tensor([1, 2, 3]), aweights=Tensor([0.5, 1, 2])), 1.3103448),
    "cov of one row": (lambda: Tensor([[1.0, 2, 4]]).cov(), 2.3333333),
    "corrcoef of one row": (lambda: Tensor([[1.0, 2, 4]]).corrcoef(), 1.0),
    "histogram": (lambda: Tensor([-2.3250308, 0.1, 0.2, 2.0023925]).histogram(3).hist, [1, 2, 1]),
    "histogram of nothing": (lambda: Tensor([]).histogram(2).bin_edges, [0, 0.5, 1]),
    "histc of an empty range": (lambda: Tensor.arange(10.0).histc(3, 2, 2), [3, 3, 4]),
    "ctc_loss of no frames": (
        lambda: F.ctc_loss(Tensor.ones(3, 4, 3).log_softmax(-1), Tensor([[1], [1], [1], [1]]), Tensor([0, 0, 1, 1]),
                           Tensor([0, 1, 0, 1]), reduction="none"), [0, math.inf, math.log(3), math.log(3)]),
    "pinv": (lambda: linalg.pinv(Tensor([[1.0, 2], [2, 4]])), [[0.04, 0.08], [0.08, 0.16]]),
    "pinverse": (
        lambda: Tensor([[1.0, 2], [2, 4], [3, 6]]).pinverse(), [[1 / 70, 2 / 70, 3 / 70], [2 / 70, 4 / 70, 6 / 70]]),
    "diff(n=0)": (lambda: Tensor([1.0, 2, 4]).diff(n=0, prepend=Tensor([9.0])), [1, 2, 4]),
    "gather of no dims": (lambda: Tensor(3.0).gather(0, Tensor([0, 0])), [3, 3]),
    "gather of one place": (lambda: Tensor([3.0, 4.0]).gather(0, Tensor(1)), 4),
    "gather of no dims at one place": (lambda: Tensor(3.0).gather(0, Tensor([0])), [3]),
    "kl_div of no dims": (lambda: F.kl_div(Tensor(1.0), Tensor(1.0), reduction="batchmean"), -1),
    "tensordot with 1": (
        lambda: Tensor(ROWS).tensordot(Tensor([[1.0, 2]]), ([0], [0])), [[12, 24], [15, 30], [18, 36]]),
    "1 with tensordot": (lambda: Tensor([[1.0, 2]]).tensordot(Tensor(ROWS), ([0], [0])), [[12, 15, 18], [24, 30, 36]]),
    "gaussian_nll_loss, var (1, n)": (
        lambda: F.gaussian_nll_loss(Tensor(X), Tensor(X) + 1, Tensor([[1.0, 2, 4]]), reduction="none"),
        [[0.5, 0.5965736, 0.8181472], [0.5, 0.5965736, 0.8181472]]),
    "[slice, slice]": (lambda: Tensor(ROWS)[[slice(0, 2), slice(1, 3)]], [[2, 3], [5, 6]]),
    "[list, slice]": (lambda: Tensor(ROWS)[[[0, 2], slice(0, 2)]], [[1, 2], [7, 8]]),
    "[None, list]": (lambda: Tensor(ROWS)[[None, [0, 2]]], [[[1, 2, 3], [7, 8, 9]]]),
    "[..., 0]": (lambda: Tensor(ROWS)[[..., 0]], [1, 4, 7]),
    "rearrange": (lambda: Tensor([[[1.0], [2.0]]]).rearrange("a b () -> a b"), [[1, 2]]),
    "rearrange back": (lambda: Tensor([[1.0, 2.0]]).rearrange("a b -> a () b ()"), [[[[1], [2]]]]),
    "where of bools": (
        lambda: Tensor.where(Tensor([True, False]), Tensor([False, False]), Tensor([True, True])), [False, True]),
    "where, the method": (
        lambda: Tensor([False, False]).where(Tensor([True, False]), Tensor([True, True])), [False, True]),
    "bfloat16 pow": (
        lambda: Tensor([9.0, 3.0, 2.0]).bfloat16() ** Tensor([8.0, 4.0, 10.0]).bfloat16(), [42991616, 81, 1024]),
    "bfloat16 pow of a number": (lambda: 2 ** Tensor([8.0, 10.0]).bfloat16(), [256, 1024]),
    "addcmul, rounded once": (
        lambda: Tensor(-8.5).bfloat16().addcmul(Tensor(-1.765625).bfloat16(), Tensor(-4.3125).bfloat16()), -0.88671875),
    "addcdiv, rounded once": (
        lambda: Tensor(-8.5).bfloat16().addcdiv(Tensor(33.0).bfloat16(), Tensor(4.3125).bfloat16()), -0.84765625),
    "grid_sample, bicubic, rounded once": (
        lambda: F.grid_sample(
            Tensor([[[[-1.0, 64.5], [0.25, -63.5]]]]).bfloat16(), Tensor([[[[0.0, 0.0]]]]).bfloat16(), "bicubic",
            "border", True), [[[[0.0625]]]]),
    "lerp, rounded once": (lambda: Tensor(0.5).bfloat16().lerp(Tensor(3.015625).bfloat16(), 0.3), 1.2578125),
    "log1p of the largest": (lambda: Tensor([3e38, 1e30]).log1p(), [88.596848, 69.077553]),
    "hypot of an infinity and NaN": (
        lambda: Tensor([math.nan, math.inf]).hypot(Tensor([math.inf, math.nan])), [math.inf, math.inf]),
    "clamp to NaN": (
        lambda: Tensor([0.0, 1.0, 3.0]).clamp(Tensor([math.nan, 0.0, 2.0]), Tensor([1.0, math.nan, 2.5])),
        [math.nan, math.nan, 2.5]),
    "clamp to the number NaN": (lambda: Tensor([0.0, 1.0]).clamp(max=math.nan), [math.nan, math.nan]),
    "logaddexp, rounded once": (
        lambda: Tensor(-0.7).half().logaddexp(Tensor(-0.7).half()), -0.0070495605),
    "pow in float32": (
        lambda: Tensor([10.0, 1.5]).pow(Tensor([38.0, 200.0])) / Tensor([1e38, 1.6529199107882081e+35]), [1, 1]),
    "linspace of whole numbers": (lambda: Tensor.linspace(4.3, 0, 5, dtype="int64"), [4, 3, 2, 1, 0]),
    "quantile of no dims": (lambda: Tensor(3.0).quantile(Tensor([0.2, 0.5]), dim=-1), [3, 3]),
    "multilabel_margin_loss of no dims": (lambda: F.multilabel_margin_loss(Tensor(3.0), Tensor(0)), 0),
    "multi_margin_loss of no dims": (lambda: F.multi_margin_loss(Tensor(3.0), Tensor(0)), 0),
    "gather of nothing": (lambda: Tensor([3.0]).gather(0, Tensor([[], []]).long()), [[], []]),
    "float16 pow": (lambda: Tensor([2.0, 3.0]).half() ** Tensor([10.0, 4.0]).half(), [1024, 81]),
}  # fmt: skip

TYPES: dict[str, tuple[Callable[[], Tensor], str, Any]] = {
    "addr of bools": (
        lambda: Tensor([[True, False], [False, False]]).addr(
            Tensor([True, False]), Tensor([False, True]), beta=3, alpha=2
        ),
        "bool",
        [[True, True], [False, False]],
    ),
    "addr of bools, alpha=0": (
        lambda: Tensor([True, False]).addr(Tensor([True, False]), Tensor([False, True]), alpha=0),
        "bool",
        [[True, False], [True, False]],
    ),
    "cov of bfloat16, float32 weights": (
        lambda: Tensor([[1.0, 3.0]]).bfloat16().cov(aweights=Tensor([1.0, 1.0])),
        "float32",
        2.0,
    ),
    "cov of float32, float64 weights": (
        lambda: Tensor([[1.0, 3.0]]).cov(aweights=Tensor([1.0, 1.0], dtype="float64")),
        "float64",
        2.0,
    ),
    "arange(3.1, int64)": (lambda: Tensor.arange(3.1, dtype="int64"), "int64", [0, 1, 2]),
    "arange(1, 6.5, 1.5, int64)": (lambda: Tensor.arange(1, 6.5, 1.5, dtype="int64"), "int64", [1, 2, 3, 4, 5]),
    "arange(1, 6.5, 1.5, int32)": (lambda: Tensor.arange(1, 6.5, 1.5, dtype="int32"), "int32", [1, 2, 3, 4]),
    "avg_pool1d of integers": (lambda: F.avg_pool1d(Tensor([[-7, 0, 4, 5]]), 2), "int64", [[-3, 4]]),
    "avg_pool1d of integers, padded": (
        lambda: F.avg_pool1d(Tensor([[-7, 0, 4]]), 2, padding=1, count_include_pad=False),
        "int64",
        [[-7, 2]],
    ),
    "avg_pool3d of integers": (
        lambda: F.avg_pool3d(Tensor([[[[[1, 2], [3, 5]]]]]), (1, 2, 2), divisor_override=-2),
        "int64",
        [[[[[-5]]]]],
    ),
    "sum of bools": (lambda: Tensor([True, True]).sum(), "int64", 2),
    "einsum of bools": (lambda: Tensor.einsum("ij->i", Tensor([[True, True], [True, False]])), "int64", [2, 1]),
    "sum_to_size of bools to their own": (lambda: Tensor([True, False]).sum_to_size(2), "bool", [True, False]),
    "linspace between tensors": (
        lambda: Tensor.linspace(Tensor(49), Tensor(0), 50, dtype="float64"),
        "float64",
        [49.0 - i for i in range(50)],
    ),
    "linspace ends exactly": (lambda: Tensor.linspace(0.1, 0.7, 8, dtype="float64")[-1], "float64", 0.7),
    "sum_to_size of bools": (lambda: Tensor([[True, True], [True, False]]).sum_to_size(1, 2), "int64", [[2, 1]]),
    "where of Python's bools": (lambda: Tensor.where(Tensor([True, False]), True, False), "bool", [True, False]),
    "-1 of an unsigned type": (lambda: Tensor(-1, dtype="uint8"), "uint8", 255),
}


@pytest.mark.parametrize("name", VALUES)
def test_values(name: str) -> None:
    call, want = VALUES[name]
    got = call()
    want = np.array(want)
    assert got.shape == want.shape
    np.testing.assert_allclose(got.float().numpy(), want, rtol=2e-6)


@pytest.mark.parametrize("name", TYPES)
def test_types(name: str) -> None:
    call, kind, want = TYPES[name]
    assert (call().dtype.name, call().tolist()) == (kind, want)


@pytest.mark.parametrize("kind", ["float32", "float64"])
def test_tan_near_its_zeros_and_poles(kind: str) -> None:
    k = np.arange(-600, 600)
    x = np.concatenate([k * (np.pi / 2), k * 0.77, [0.0, -0.0, 1e-30, 8191.0, 9000.0]]).astype(kind)
    want = np.tan(x.astype(np.longdouble))
    got = Tensor(x).tan().numpy()
    near = np.abs(x) < 8192
    np.testing.assert_allclose(got[near], want[near], rtol=4 * np.finfo(kind).eps, atol=0)
    np.testing.assert_allclose(got[~near], want[~near], rtol=1e-5)
    assert np.array_equal(np.signbit(got), np.signbit(want))


def test_assign_takes_arrays() -> None:
    x = Tensor([[1.0, 2.0], [3.0, 4.0]]).realize()
    x.assign(np.array([[5.0, 6.0], [7.0, 8.0]]))
    assert x.dtype is dtypes.float32 and x.tolist() == [[5, 6], [7, 8]]
    x[0].assign([1, 2])
    assert x.tolist() == [[1, 2], [7, 8]]


def test_random_numbers_of_64_bits() -> None:
    x = Tensor.randint(2000, low=0, high=2**62).numpy()
    assert len(set(x.tolist())) == 2000 and 0 <= x.min() < 2**53 * 20 and x.max() > 2**62 * 0.99
    assert len(set((x & 0xFFFF).tolist())) > 1900  # (the lower bits are drawn, too)
    wide = Tensor.randint(2000, low=-(2**63), high=2**63 - 1).numpy() / 2**63
    assert wide.min() < -0.99 and wide.max() > 0.99 and abs(wide.mean()) < 0.06
    most = Tensor.randint(2000, low=0, high=2**64 - 1, dtype="uint64").numpy()
    assert most.dtype == np.uint64 and most.max() > np.uint64(2**64 - 2**58)
    whole = Tensor.uniform(500, low=2, high=5, dtype="int32")
    assert whole.dtype is dtypes.int32 and sorted(set(whole.tolist())) == [2, 3, 4]


def test_seeds_of_64_bits() -> None:
    drawn = []
    for seed in (1, 1 + 2**32, 1 + 2**40, 2**64 - 1, -1):
        Tensor.manual_seed(seed)
        drawn.append(Tensor.rand(8).tolist())
        assert Tensor.initial_seed() == seed % 2**64
    assert drawn[-1] == drawn[-2] and len({tuple(d) for d in drawn}) == 4


MADE: dict[str, Callable[..., Tensor]] = {
    "arange": lambda **k: Tensor.arange(0.0, 3.0, **k),
    "empty": lambda **k: Tensor.empty(2, 3, **k),
    "empty_like": lambda **k: Tensor.ones(2).empty_like(**k),
    "eye": lambda **k: Tensor.eye(3, **k),
    "full": lambda **k: Tensor.full((2, 3), 4.0, **k),
    "full_like": lambda **k: Tensor.ones(2).full_like(3.0, **k),
    "linspace": lambda **k: Tensor.linspace(0, 1, 3, **k),
    "logspace": lambda **k: Tensor.logspace(0, 1, 3, **k),
    "ones": lambda **k: Tensor.ones(2, **k),
    "ones_like": lambda **k: Tensor.ones(2).ones_like(**k),
    "rand": lambda **k: Tensor.rand(2, **k),
    "randn": lambda **k: Tensor.randn(2, **k),
    "rand_like": lambda **k: Tensor.ones(2).rand_like(**k),
    "randn_like": lambda **k: Tensor.ones(2).randn_like(**k),
    "scalar_tensor": lambda **k: Tensor.scalar_tensor(2, **k),
    "tensor": lambda **k: Tensor([1.0, 2.0], **k),
    "zeros": lambda **k: Tensor.zeros(2, **k),
    "zeros_like": lambda **k: Tensor.ones(2).zeros_like(**k),
}  # fmt: skip


@pytest.mark.parametrize("name", MADE)
def test_what_makes_tensors_takes_a_type_a_device_and_whether_it_has_a_gradient(name: str) -> None:
    made = MADE[name](dtype="float64", device="CPU:1", requires_grad=True)
    assert made.dtype is dtypes.float64 and made.device == "CPU:1" and made.requires_grad is True
    (made * 2).sum().backward()
    assert made.grad is not None and made.grad.tolist() == made.zeros_like().add(2).tolist()
    assert MADE[name](requires_grad=False).requires_grad is False
    assert not MADE[name]().requires_grad
