"""Reductions and contractions against NumPy."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from manygrad import Context, Tensor, dtypes
from tests.tensor.oracle import check, numbers, wide

RNG = np.random.default_rng(0)
KINDS = ["bool", "int8", "int32", "int64", "uint8", "uint64", "float16", "bfloat16", "float32", "float64"]


def np_sum(a: np.ndarray, **k: Any) -> np.ndarray:
    return np.sum(a, dtype=a.dtype if a.dtype.kind == "f" else np.int64, **k)


def np_prod(a: np.ndarray, **k: Any) -> np.ndarray:
    return np.prod(a, dtype=a.dtype if a.dtype.kind == "f" else np.int64, **k)


REDUCTIONS: dict[str, Callable[..., np.ndarray]] = {
    "sum": np_sum, "prod": np_prod, "amax": np.max, "amin": np.min, "any": np.any, "all": np.all,
}  # fmt: skip
FLOAT_REDUCTIONS: dict[str, Callable[..., np.ndarray]] = {
    "mean": np.mean,
    "var": lambda a, **k: np.var(a, ddof=1, **k),
    "std": lambda a, **k: np.std(a, ddof=1, **k),
    "logsumexp": lambda a, **k: np.log(np.sum(np.exp(a), **k)),
    "norm": lambda a, **k: np.sqrt(np.sum(a * a, **k)),
}
DIMS: list[Any] = [None, 0, 1, -1, (0, 2), (-1, 0), (0, 1, 2)]


@pytest.mark.parametrize("name", [*REDUCTIONS, *FLOAT_REDUCTIONS])
def test_dims(name: str) -> None:
    a = numbers(RNG, "float64", (3, 2, 5), -2, 2)
    f = REDUCTIONS.get(name) or FLOAT_REDUCTIONS[name]
    with Context(DEVICE="PYTHON"):
        t = Tensor(a)
        for dim, keep in itertools.product(DIMS, (False, True)):
            check(getattr(t, name)(dim=dim, keepdim=keep), f(a, axis=dim, keepdims=keep), rtol=1e-12)


@pytest.mark.parametrize("device", ["PYTHON", "CPU"])
@pytest.mark.parametrize("name", REDUCTIONS)
def test_types(name: str, device: str) -> None:
    for kind in KINDS if device == "PYTHON" else ["bool", "int8", "uint64", "bfloat16", "float32"]:
        a = numbers(RNG, kind, (5, 7), -2, 2)
        if name == "prod":
            a[0, 0] = 1
        want = REDUCTIONS[name](
            wide(a).astype(np.float32) if a.dtype.itemsize == 2 and "float" in kind else wide(a), axis=1
        )
        t = Tensor(a, device=device)
        check(
            getattr(t, name)(1),
            want if want.dtype.kind != "f" else want.astype(a.dtype),
            rtol=2e-2 if "16" in kind else 2e-6,
        )


@pytest.mark.parametrize("device", ["PYTHON", "CPU"])
def test_sizes_that_nothing_divides(device: str) -> None:
    for n in (1, 2, 3, 17, 1023, 40_001) if device == "CPU" else (1, 3, 17):
        a = RNG.integers(-100, 100, (n,)).astype(np.float64)
        t = Tensor(a, device=device)
        check(t.sum(), a.sum())  # whole numbers: exact in any order
        check(t.max(), a.max())
        check(t.min(), a.min())
        check(Tensor(a.astype(np.int64), device=device).sum(), a.astype(np.int64).sum())


def test_empty() -> None:
    e = Tensor(np.zeros((0, 3), np.float32))
    check(e.sum(), np.float32(0))
    check(e.sum(0), np.zeros(3, np.float32))
    check(e.sum(1), np.zeros(0, np.float32))
    check(e.prod(0, keepdim=True), np.ones((1, 3), np.float32))
    assert np.isnan(e.mean().item()) and np.isnan(e.mean(0).numpy()).all()
    assert e.any().item() is False and e.all().item() is True
    with pytest.raises(ValueError, match=r"amax over dims \(0, 1\) of the empty shape \(0, 3\) has no value"):
        e.max()
    with pytest.raises(ValueError, match="has no value"):
        e.min(0)
    check(e.amax(1), np.zeros(0, np.float32))


def test_zero_dims() -> None:
    t = Tensor(3.0)
    for name in ("sum", "prod", "amax", "amin", "mean", "logsumexp", "norm"):
        check(getattr(t, name)(), np.float32(3), rtol=1e-6)
    check(t.sum(0), np.float32(3))
    assert t.argmax().item() == 0


def test_special_values() -> None:
    for row in ([1.0, np.inf, 2.0], [np.inf, -np.inf], [np.nan, 1.0, np.inf], [-np.inf, -np.inf], [-0.0, -1.0]):
        a = np.float32(row)
        with np.errstate(all="ignore"):
            for name in ("sum", "prod", "amax", "amin"):
                check(getattr(Tensor(a), name)(), REDUCTIONS[name](a))
    check(Tensor([-np.inf, -np.inf]).logsumexp(), np.float32(-np.inf))
    check(Tensor([1000.0, 1000.0]).logsumexp(0), np.float32(1000 + np.log(2)))
    check(Tensor([np.inf, 1.0]).logsumexp(0), np.float32(np.inf))


def test_half_types_are_summed_in_float32() -> None:
    for kind in ("float16", "bfloat16"):
        a = np.ones(5000).astype(dtypes.float16.np if kind == "float16" else dtypes.bfloat16.np)
        # adding 1 to 2048 (256) in the half type would stay there
        assert Tensor(a).sum().item() == pytest.approx(5000, rel=4e-3)
        assert Tensor(a).mean().item() == 1.0


def test_sum_into_another_type() -> None:
    a = np.full(4, 200, np.uint8)
    check(Tensor(a).sum(), np.int64(800))
    check(Tensor(a).sum(dtype="uint8"), np.uint8(32))
    check(Tensor(a).sum(dtype="float32"), np.float32(800))


@pytest.mark.parametrize("kind", ["float32", "int32", "uint8", "bool"])
def test_arg_max_and_min(kind: str) -> None:
    a = numbers(RNG, kind, (4, 6), -2, 2)
    for dim in (0, 1, -1):
        check(Tensor(a).argmax(dim), a.argmax(dim))
        check(Tensor(a).argmin(dim), a.argmin(dim))
    check(Tensor(a).argmax(), np.int64(a.argmax()))
    check(Tensor(a).argmax(1, keepdim=True), a.argmax(1)[:, None])
    check(Tensor(a).argmin(), np.int64(a.argmin()))


def test_arg_max_takes_the_first_and_nans_first_of_all() -> None:
    assert Tensor([1.0, 3.0, 3.0]).argmax().item() == 1 and Tensor([2.0, -1.0, -1.0]).argmin().item() == 1
    assert Tensor([1.0, np.nan, 3.0]).argmax().item() == 1 and Tensor([1.0, np.nan, -3.0]).argmin().item() == 1
    assert Tensor([-np.inf, -np.inf]).argmax().item() == 0


def test_cumsum() -> None:
    a = numbers(RNG, "float64", (4, 5))
    for dim in (0, 1, -1):
        check(Tensor(a).cumsum(dim), a.cumsum(dim))
    check(Tensor([1, 2, 3], dtype="int32").cumsum(0), np.array([1, 3, 6]))
    check(Tensor([True, True]).cumsum(), np.array([1, 2]))


def test_var_with_correction() -> None:
    a = numbers(RNG, "float64", (4, 5))
    check(Tensor(a).var(1, correction=0), a.var(1))
    assert np.isnan(Tensor([1.0]).var().item())


@settings(max_examples=60)
@given(st.lists(st.integers(1, 4), min_size=1, max_size=4), st.data())
def test_reductions_of_moved_values(shape: list[int], data: st.DataObject) -> None:
    """Any reduction of a permuted, flipped, broadcast value, reduced again."""
    a = numbers(RNG, "float64", tuple(shape))
    order = data.draw(st.permutations(range(len(shape))))
    dims = tuple(sorted(data.draw(st.sets(st.integers(0, len(shape) - 1), min_size=1))))
    with Context(DEVICE="PYTHON"):
        t = Tensor(a).permute(order).flip(0)
        b = np.flip(a.transpose(order), 0)
        check((t * 2 + t.sum(dims, keepdim=True)).amax(dims), (b * 2 + b.sum(dims, keepdims=True)).max(dims))


MATMULS = [
    ((3, 4), (4, 5)), ((4,), (4,)), ((4,), (4, 3)), ((3, 4), (4,)), ((2, 3, 4), (4, 5)), ((2, 3, 4), (2, 4, 5)),
    ((4,), (2, 4, 3)),
    ((2, 3, 4), (4,)), ((2, 1, 3, 4), (5, 4, 2)), ((1, 1), (1, 1)), ((3, 0), (0, 4)), ((0, 3), (3, 2)),
    ((2, 0, 3), (3, 1)), ((17, 33), (33, 10)),
]  # fmt: skip


@pytest.mark.parametrize("left, right", MATMULS)
def test_matmul(left: tuple[int, ...], right: tuple[int, ...]) -> None:
    for kind in ("float32", "int32"):
        a, b = numbers(RNG, kind, left), numbers(RNG, kind, right)
        check(Tensor(a) @ Tensor(b), a @ b, rtol=1e-5)


def test_matmul_of_integers_with_one_column_left_over() -> None:
    a, b = numbers(RNG, "int32", (17, 33)), numbers(RNG, "int32", (33, 9))
    check(Tensor(a) @ Tensor(b), a @ b)


def test_matmul_types_and_transposes() -> None:
    a, b = numbers(RNG, "float64", (5, 6)), numbers(RNG, "float64", (7, 6))
    check(Tensor(a) @ Tensor(b).T, a @ b.T)
    check(Tensor(b).matmul(Tensor(a).T).T, (b @ a.T).T)
    check(Tensor(a).linear(Tensor(b), Tensor(b[:, 0])), a @ b.T + b[:, 0])
    check(a @ Tensor(b).T, a @ b.T)
    assert (Tensor(a).half() @ Tensor(b).half().T).dtype is dtypes.float16
    assert (Tensor(a).float() @ Tensor(b).half().T).dtype is dtypes.float32
    i8 = numbers(RNG, "int8", (3, 3))
    check(Tensor(i8) @ Tensor(i8), i8 @ i8)  # PyTorch keeps int8 here, as NumPy does


@pytest.mark.parametrize(
    "formula, shapes",
    [
        ("ij,jk->ik", [(2, 3), (3, 4)]), ("ij->ji", [(2, 3)]), ("ij->", [(2, 3)]), ("i,j->ij", [(2,), (3,)]),
        ("bij,bjk->bik", [(2, 3, 4), (2, 4, 5)]),
        ("bhid,bhjd->bhij", [(2, 2, 3, 4), (2, 2, 5, 4)]), ("ij,jk", [(2, 3), (3, 4)]), ("i,i", [(3,), (3,)]),
        ("abc,cd,be->ade", [(2, 3, 4), (4, 2), (3, 5)]),
    ],
)  # fmt: skip
def test_einsum(formula: str, shapes: list[tuple[int, ...]]) -> None:
    arrays = [numbers(RNG, "float64", s) for s in shapes]
    first, *rest = map(Tensor, arrays)
    check(first.einsum(formula, *rest), np.einsum(formula, *arrays), rtol=1e-10)


def test_the_three_forms_of_max_and_min() -> None:
    a = np.float32([[1, 5, 2], [7, 0, 7]])
    t = Tensor(a)
    assert (t.max().item(), t.min().item()) == (7, 0)
    found = t.max(1)
    assert found.values.tolist() == [5, 7] and found.indices.tolist() == [1, 0]
    assert [x.tolist() for x in t.min(0, keepdim=True)] == [[[1, 0, 2]], [[0, 1, 0]]]
    check(t.max(Tensor(a[::-1].copy())), np.maximum(a, a[::-1]))
    with pytest.raises(TypeError, match=r"max: dim is one int, not \(0, 1\); amax\(dim\) takes several dims"):
        t.max((0, 1))


def test_nan_is_the_largest_and_the_smallest() -> None:
    t = Tensor([[1.0, np.nan, 3.0], [1.0, 2.0, 3.0]])
    check(t.amax(1), np.float32([np.nan, 3]))
    check(t.amin(1), np.float32([np.nan, 1]))
    assert t.max(1).indices.tolist() == [1, 2] and t.min(1).indices.tolist() == [1, 0]
    assert t.cummax(1).indices.tolist() == [[0, 1, 1], [0, 1, 2]]


def test_gradients_at_ties() -> None:
    for f, want in (
        (lambda t: t.max(), [0, 0.5, 0.5]),
        (lambda t: t.amax(), [0, 0.5, 0.5]),
        (lambda t: t.max(0).values, [0, 1, 0]),
    ):
        x = Tensor([1.0, 3.0, 3.0], requires_grad=True)
        f(x).backward()
        assert x.grad is not None and x.grad.tolist() == want
    for f in (lambda t: t.norm(), lambda t: t.std(), lambda t: t.norm(3)):
        x = Tensor([0.0, 0.0], requires_grad=True)
        f(x).backward()
        assert x.grad is not None and x.grad.tolist() == [0, 0]
