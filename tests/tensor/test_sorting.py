"""Long rows (the radix sort), results whose shape depends on data, and errors;
the cases are in tests/tensor/cases/sorting.py."""

from __future__ import annotations

import numpy as np
import pytest

from manygrad import Tensor, TinyJit, dtypes
from manygrad.runtime.profile.counters import GlobalCounters
from manygrad.tensor.ops import sorting


def numbers(kind: str, shape: tuple[int, ...]) -> np.ndarray:
    rng = np.random.default_rng(3)
    d = getattr(dtypes, kind)
    if d.is_float:
        return np.asarray(
            rng.choice([np.nan, np.inf, -np.inf, -0.0, 0.0, 1.5], shape)
            + np.where(rng.random(shape) < 0.5, rng.standard_normal(shape), 0)
        ).astype(d.np)
    return (
        rng.integers(0, 2, shape).astype(bool)
        if d.is_bool
        else rng.integers(d.min, d.max, shape, dtype=d.np, endpoint=True)
    )


@pytest.mark.parametrize(
    "kind", [d.name for d in dtypes.all if d.itemsize < 8 or d.name in ("float64", "int64", "uint64")]
)
def test_radix_sort_of_every_type(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sorting, "SHORT", 100)
    monkeypatch.setattr(sorting, "PAIRS", 0)
    a = numbers(kind, (2, 389))
    wide = a.astype(np.float32) if kind == "bfloat16" else a
    for descending in (False, True):
        sign = -1 if descending else 1
        order = []
        for v in wide:
            nans = [i for i in range(389) if v[i] != v[i]]
            ranked = sorted((i for i in range(389) if v[i] == v[i]), key=lambda i: sign * v[i].item())
            order.append(nans + ranked if descending else ranked + nans)
        got = Tensor(a).sort(descending=descending)
        np.testing.assert_array_equal(got.indices.numpy(), np.array(order))
        np.testing.assert_array_equal(
            got.values.numpy().astype(wide.dtype), np.take_along_axis(wide, np.array(order), 1)
        )


@pytest.mark.parametrize("k", [1, 7, 20])
def test_a_few_of_many_are_found_by_blocks(k: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sorting, "SHORT", 30)
    monkeypatch.setattr(sorting, "PAIRS", 0)
    monkeypatch.setattr(sorting, "BLOCK", 48)
    a = np.random.default_rng(k).integers(0, 9, (2, 500))
    for largest in (True, False):
        got = Tensor(a).topk(k, largest=largest)
        order = np.argsort(-a if largest else a, 1, kind="stable")[:, :k]
        np.testing.assert_array_equal(got.indices.numpy(), order)
        np.testing.assert_array_equal(got.values.numpy(), np.take_along_axis(a, order, 1))


def test_radix_sort_along_a_sharded_dim(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sorting, "PAIRS", 0)
    a = np.random.default_rng(0).standard_normal((1500, 3)).astype(np.float32)
    for axis in (0, 1):
        t = Tensor(a).shard(("CPU:0", "CPU:1"), axis=axis)
        np.testing.assert_array_equal(t.sort(0).values.numpy(), np.sort(a, 0))


def test_work_does_not_grow_with_the_square() -> None:
    """Four times the elements, at most five times the operations."""
    counts = []
    for n in (1 << 14, 1 << 16):
        t = Tensor(np.random.default_rng(0).standard_normal(n).astype(np.float32)).realize()
        GlobalCounters.reset()
        t.argsort().realize()
        counts.append(GlobalCounters.global_ops)
    assert counts[1] < 5 * counts[0]


def test_permutations_of_many() -> None:
    assert sorted(Tensor.randperm(5000).tolist()) == list(range(5000))


def test_a_given_size_stays_lazy_inside_a_jit() -> None:
    @TinyJit
    def positions(x: Tensor) -> Tensor:
        return x.nonzero(size=3).realize()

    for row in ([0, 1, 1, 0], [1, 1, 1, 1], [0, 0, 0, 1], [1, 0, 0, 0]):
        want = np.concatenate([np.argwhere(row), np.full((3, 1), -1)])[:3]
        np.testing.assert_array_equal(positions(Tensor(row)).numpy(), want)
    assert Tensor([1.0, 2.0, 3.0]).masked_select(Tensor([True, False, True]), size=3, fill_value=-1).tolist() == [
        1.0,
        3.0,
        -1.0,
    ]
    assert Tensor([5, 5, 2]).unique(size=2).tolist() == [2, 5] and Tensor([1, 1, 3]).bincount(size=3).tolist() == [
        0,
        2,
        0,
    ]


def test_a_shape_that_depends_on_data_is_refused_inside_a_jit() -> None:
    step = TinyJit(lambda x: x[x > 0].sum().realize())
    step(Tensor([1.0, -1.0]))
    with pytest.raises(RuntimeError, match="the shape of the result depends on data"):
        step(Tensor([1.0, -1.0]))


def test_gradient_of_values_is_a_gather() -> None:
    x = Tensor([3.0, 1.0, 2.0], requires_grad=True)
    (x.sort().values * Tensor([1.0, 10.0, 100.0])).sum().backward()
    assert x.grad is not None and x.grad.tolist() == [100.0, 1.0, 10.0]


def test_errors() -> None:
    t = Tensor([[1.0, 2.0]])
    for call, message in [
        (lambda: t.topk(3), r"topk: k = 3 of dim 1 of \(1, 2\); it must lie in 0..2"),
        (lambda: t.kthvalue(0), r"kthvalue: k = 0"),
        (lambda: t.quantile(1.5), r"quantile: q .*\[0, 1\].* 1.5"),
        (lambda: t.quantile(0.5, interpolation="cubic"), "interpolation is one of"),
        (lambda: t.sort(2), r"dim 2 is outside -2..1 for shape \(1, 2\)"),
        (lambda: Tensor([-1, 2]).bincount(), "must not be negative, the smallest is -1"),
        (lambda: t.searchsorted(Tensor([[1.0], [2.0]])), r"searchsorted: rows \(1, 2\) and values \(2, 1\)"),
        (lambda: t.histc(0), "the number of bins must be positive"),
    ]:
        with pytest.raises((ValueError, IndexError), match=message):
            call()


@pytest.mark.parametrize("shape", [(), (0,), (1,), (1, 2), (2, 1), (3,)])
@pytest.mark.parametrize("axis", [None, 0, -1])
def test_few_values_on_several_devices(shape: tuple[int, ...], axis: int | None) -> None:
    """Of one element all is known without looking; what stands for it lies where the element does."""
    a = np.full(shape, 2.0, np.float32)
    x = Tensor(a).shard(("CPU:0", "CPU:1", "CPU:2"), axis=axis if shape else None)
    for ask in (Tensor.unique, Tensor.unique_consecutive):
        values, places, counts = ask(x, return_inverse=True, return_counts=True)
        n = min(a.size, 1)
        assert values.tolist() == [2.0] * n and counts.tolist() == [a.size] * n
        assert places.shape == shape and not places.numpy().any()
        assert (values + x.sum()).tolist() == [2.0 + 2.0 * a.size] * n
    assert x.nonzero().tolist() == np.argwhere(a).tolist() and x[x > 1].tolist() == [2.0] * a.size
