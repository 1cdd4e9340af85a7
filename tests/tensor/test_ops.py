"""Every operator's cases (tests/tensor/cases/): forward against NumPy, backward against differences,
and sharded unevenly."""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import tests.tensor.cases
from manygrad import Context, Tensor, dtypes, nn
from tests.tensor.cases.case import Case, Library, Sample
from tests.tensor.oracle import check

MANYGRAD = Library("manygrad", Tensor, nn.functional)
CASES: list[Case] = [
    case
    for module in pkgutil.iter_modules(tests.tensor.cases.__path__)
    for case in getattr(importlib.import_module(f"tests.tensor.cases.{module.name}"), "CASES", [])
]
EVERY = pytest.mark.parametrize("case", CASES, ids=lambda c: c.name)
DIFFERENTIABLE = pytest.mark.parametrize("case", [c for c in CASES if c.grad], ids=lambda c: c.name)
# (the second derivative of 14 products and 16 squarings takes the interpreter minutes; benchmarks/opinfo.py has it)
TWICE = pytest.mark.parametrize(
    "case", [c for c in CASES if c.grad and c.op != "Tensor.matrix_exp"], ids=lambda c: c.name
)
ZERO_BY_DEFINITION = {"functional.embedding[padding_idx]"}  # the padding row gets none
NOT_COMPARED = pytest.mark.parametrize(
    "case", [c for c in CASES if not c.grad and c.name not in ZERO_BY_DEFINITION], ids=lambda c: c.name
)
SHARDED = pytest.mark.parametrize("case", [c for c in CASES if c.shard], ids=lambda c: c.name)
LOOSE = {"float16": 2e-2, "bfloat16": 6e-2, "float32": 4e-6, "float64": 1e-11}


def test_names_are_unique() -> None:
    names = [c.name for c in CASES]
    assert len(set(names)) == len(names), sorted({n for n in names if names.count(n) > 1})


def as_type(a: np.ndarray, kind: str) -> np.ndarray:
    return a.astype(getattr(dtypes, kind).np) if a.dtype.kind == "f" else a


def flat(result: Any) -> list[Any]:
    """The results of a call as a list: one value, or those of a tuple or list, nested ones too."""
    return [y for x in result for y in flat(x)] if isinstance(result, (tuple, list)) else [result]


def agree(got: Sequence[Any], want: Sequence[Any], tolerance: float) -> None:
    assert len(got) == len(want), f"{len(got)} results, expected {len(want)}"
    for g, w in zip(got, want):
        if isinstance(g, Tensor):
            w = np.asarray(w)
            check(g, w if w.dtype.kind != "f" else w.astype(g.dtype.np), rtol=tolerance, atol=tolerance)
        else:
            assert g == w, f"{g} is not {w}"


@EVERY
@settings(max_examples=8)
@given(data=st.data())
def test_forward(case: Case, data: st.DataObject) -> None:
    sample = case.samples(data.draw)
    kind = data.draw(st.sampled_from(list(case.dtypes)))
    device = data.draw(st.sampled_from(["CPU", "PYTHON"]))
    arrays = [as_type(a, kind) for a in sample.arrays]
    exact = [a.astype(np.float64) if a.dtype.kind == "f" or a.dtype == dtypes.bfloat16.np else a for a in arrays]
    want = flat(case.oracle(*exact, *sample.args, **sample.kwargs))
    with Context(DEVICE=device):
        agree(flat(case.run(MANYGRAD, [Tensor(a) for a in arrays], sample)), want, case.rtol.get(kind, LOOSE[kind]))


def loss(results: list[Any], weights: list[np.ndarray]) -> float:
    return float(sum((np.asarray(r, dtype=np.float64) * w).sum() for r, w in zip(results, weights)))


@DIFFERENTIABLE
@settings(max_examples=4)
@given(data=st.data())
def test_gradient(case: Case, data: st.DataObject) -> None:
    """d(sum(result * weight)) / d(each float array) by backward()
    and by central differences of the oracle, in float64."""
    sample = case.samples(data.draw)
    arrays = [a.astype(np.float64) if a.dtype.kind == "f" else a for a in sample.arrays]

    def oracle(xs: Sequence[np.ndarray]) -> list[Any]:
        return [r for r in flat(case.oracle(*xs, *sample.args, **sample.kwargs)) if np.asarray(r).dtype.kind == "f"]

    rng = np.random.default_rng(0)
    weights = [rng.uniform(0.5, 1.5, np.shape(r)) for r in oracle(arrays)]
    with Context(DEVICE="PYTHON"):
        tensors = [Tensor(a, requires_grad=a.dtype.kind == "f") for a in arrays]
        results = [r for r in flat(case.run(MANYGRAD, tensors, sample)) if isinstance(r, Tensor) and r.dtype.is_float]
        assert len(results) == len(weights)
        total = sum(((r * Tensor(w)).sum() for r, w in zip(results, weights)), Tensor(0.0, dtype="float64"))
        trained = [i for i, a in enumerate(arrays) if a.dtype.kind == "f"]
        got = total.gradient(*(tensors[i] for i in trained))
        for i, g in zip(trained, got):
            assert (g.shape, g.dtype) == (arrays[i].shape, dtypes.float64)
            np.testing.assert_allclose(g.numpy(), differences(oracle, arrays, i, weights), rtol=1e-5, atol=1e-5)


@TWICE
@settings(max_examples=2)
@given(data=st.data())
def test_gradient_of_the_gradient(case: Case, data: st.DataObject) -> None:
    """Of each array along one direction, against the difference of two first gradients, in float64; or the operator
    refuses. (Not of all together: a float among them may be a class.)"""
    sample = case.samples(data.draw)
    arrays = [np.asarray(a.astype(np.float64)) if a.dtype.kind == "f" else a for a in sample.arrays]
    trained = [i for i, a in enumerate(arrays) if a.dtype.kind == "f" and a.size]
    rng = np.random.default_rng(0)
    pushes, moves = ([np.asarray(rng.uniform(0.5, 1.5, arrays[i].shape)) for i in trained] for _ in range(2))

    def slope(moved: int, step: float) -> tuple[Tensor, list[Tensor]]:
        """Σ push · d(sum(result * weight)) / d(array) with step · move added to one array, and the arrays."""
        there = [np.asarray(a + step * moves[trained.index(i)]) if i == moved else a for i, a in enumerate(arrays)]
        tensors = [Tensor(a, requires_grad=i in trained) for i, a in enumerate(there)]
        results = [r for r in flat(case.run(MANYGRAD, tensors, sample)) if isinstance(r, Tensor) and r.dtype.is_float]
        weights = np.random.default_rng(1)
        loss = sum(
            ((r * Tensor(np.asarray(weights.uniform(0.5, 1.5, r.shape)))).sum() for r in results),
            Tensor(0.0, dtype="float64"),
        )
        leaves = [tensors[i] for i in trained]
        parts = ((g * Tensor(p)).sum() for g, p in zip(loss.gradient(*leaves), pushes))
        return sum(parts, Tensor(0.0, dtype="float64")), leaves

    if not trained:
        return
    with Context(DEVICE="PYTHON"):
        here, leaves = slope(-1, 0.0)
        try:
            second = here.gradient(*leaves)
        except NotImplementedError as e:
            assert "no gradient" in str(e)
            return
        for i, g, move in zip(trained, second, moves):
            want = (slope(i, h := 1e-7)[0].item() - slope(i, -h)[0].item()) / (2 * h)
            np.testing.assert_allclose((g.numpy() * move).sum(), want, rtol=1e-4, atol=1e-4)


@NOT_COMPARED
@settings(max_examples=4)
@given(data=st.data())
def test_a_gradient_is_not_zero_without_a_word(case: Case, data: st.DataObject) -> None:
    """Where no gradient is compared (ties, NaN, none defined): if it is zero everywhere, so are the differences,
    or the operator refuses.

    A difference across a jump (`floor`) says nothing, nor one of rounding: only those of ordinary size count.
    """
    sample = case.samples(data.draw)
    arrays = [np.asarray(a.astype(np.float64)) if a.dtype.kind == "f" else a for a in sample.arrays]

    def oracle(xs: Sequence[np.ndarray]) -> list[Any]:
        return [r for r in flat(case.oracle(*xs, *sample.args, **sample.kwargs)) if np.asarray(r).dtype.kind == "f"]

    rng = np.random.default_rng(0)
    weights = [rng.uniform(0.5, 1.5, np.shape(r)) for r in oracle(arrays)]
    trained = [i for i, a in enumerate(arrays) if a.dtype.kind == "f" and a.size]
    with Context(DEVICE="PYTHON"):
        tensors = [Tensor(a, requires_grad=a.dtype.kind == "f") for a in arrays]
        results = [r for r in flat(case.run(MANYGRAD, tensors, sample)) if isinstance(r, Tensor) and r.dtype.is_float]
        # (nothing is computed from floats, or NumPy and PyTorch give different types)
        if not trained or len(results) != len(weights):
            return
        total = sum(((r * Tensor(w)).sum() for r, w in zip(results, weights)), Tensor(0.0, dtype="float64"))
        try:
            got = [g.numpy() for g in total.gradient(*(tensors[i] for i in trained))]
        except NotImplementedError as e:
            assert "no gradient" in str(e)
            return
    for i, g in zip(trained, got):
        if not g.any():
            want = differences(oracle, arrays, i, weights)
            assert not ((np.abs(want) > 1e-3) & (np.abs(want) < 1e3)).any(), (
                f"zero, the differences of argument {i} are {want}"
            )


def differences(
    oracle: Any, arrays: list[np.ndarray], which: int, weights: list[np.ndarray], h: float = 1e-6
) -> np.ndarray:
    out = np.zeros(arrays[which].shape)
    for at in np.ndindex(*arrays[which].shape):
        up, down = [a.copy() for a in arrays], [a.copy() for a in arrays]
        up[which][at] += h
        down[which][at] -= h
        out[at] = (loss(oracle(up), weights) - loss(oracle(down), weights)) / (2 * h)
    return out


@SHARDED
@settings(max_examples=4)
@given(data=st.data())
def test_sharded(case: Case, data: st.DataObject) -> None:
    """Each array is cut along a dim of its own choice, or replicated, over 2 or 3 devices: parts differ in size,
    some are empty."""
    sample: Sample = case.samples(data.draw)
    devices = tuple(f"PYTHON:{i}" for i in range(data.draw(st.integers(2, 3))))
    want = flat(case.oracle(*sample.arrays, *sample.args, **sample.kwargs))
    tensors = []
    for a in sample.arrays:
        axis = data.draw(st.one_of(st.none(), st.integers(0, a.ndim - 1))) if a.ndim else None
        tensors.append(Tensor(a, device="PYTHON").shard(devices, axis=axis))
    with Context(DEVICE="PYTHON"):
        agree(flat(case.run(MANYGRAD, tensors, sample)), want, case.rtol.get("float64", LOOSE["float64"]))


@EVERY
@settings(max_examples=2)
@given(data=st.data())
def test_a_dim_out_of_range_is_refused(case: Case, data: st.DataObject) -> None:
    """When the operator is written, not when it is computed. (Cases without a keyword `dim` have nothing to try.)"""
    sample = case.samples(data.draw)
    if not isinstance(sample.kwargs.get("dim"), int):
        return
    for dim in (7, -8):
        wrong = Sample(sample.arrays, sample.args, {**sample.kwargs, "dim": dim})
        with Context(DEVICE="PYTHON"), pytest.raises((IndexError, ValueError)):
            case.run(MANYGRAD, [Tensor(a) for a in sample.arrays], wrong)
