"""Functions of the array API standard (2023.12), under the names they have here, against NumPy.

Reductions, searching, sorting, sets, manipulation, creation, indexing, promotion, linear algebra: of shapes that
nothing divides, of no dims, without elements, along each dim from both ends. docs/pytorch.md says
what is meant to differ.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from manygrad import Tensor, dtypes, linalg
from tests.tensor.oracle import ALL, FLOATS, INTS, SHAPES, numbers, same_values, special, wide

REAL = [*INTS, *FLOATS]
F = Callable[..., Any]


def axes(shape: tuple[int, ...]) -> list[Any]:
    """None, each dim from the front and the back, and two of them."""
    n = len(shape)
    return [None, *range(-n, n), *([(0, -1)] if n > 1 else [])]


REDUCTIONS: dict[str, tuple[F, F, list[str], bool]] = {  # ours, NumPy's, types, whether of no elements, too
    "all": (lambda t, d, k: t.all(d, k), lambda a, d, k: truth(np.all, a, d, k), ALL, True),
    "any": (lambda t, d, k: t.any(d, k), lambda a, d, k: truth(np.any, a, d, k), ALL, True),
    "max": (lambda t, d, k: t.amax(d, k), lambda a, d, k: np.max(a, d, keepdims=k), REAL, False),
    "mean": (lambda t, d, k: t.mean(d, k), lambda a, d, k: np.mean(a, d, keepdims=k), ["float32", "float64"], True),
    "min": (lambda t, d, k: t.amin(d, k), lambda a, d, k: np.min(a, d, keepdims=k), REAL, False),
    "prod": (lambda t, d, k: t.prod(d, k), lambda a, d, k: np.prod(a, d, keepdims=k, dtype=summed(a)), REAL, True),
    "std": (
        lambda t, d, k: t.std(d, correction=0, keepdim=k),
        lambda a, d, k: np.std(a, d, keepdims=k),
        ["float32", "float64"],
        True,
    ),
    "sum": (lambda t, d, k: t.sum(d, k), lambda a, d, k: np.sum(a, d, keepdims=k, dtype=summed(a)), ALL, True),
    "var": (
        lambda t, d, k: t.var(d, correction=0, keepdim=k),
        lambda a, d, k: np.var(a, d, keepdims=k),
        ["float32", "float64"],
        True,
    ),
    "count_nonzero": (lambda t, d, k: t.count_nonzero(d), lambda a, d, k: np.count_nonzero(a, d), ALL, True),
    "vector_norm": (
        lambda t, d, k: t.norm(2, d, k),
        lambda a, d, k: np.sqrt((a * a).sum(d, keepdims=k)),
        ["float32", "float64"],
        True,
    ),
}


def summed(a: np.ndarray) -> Any:
    """Whole numbers are summed in int64, as in PyTorch (the standard takes uint64 for unsigned ones)."""
    return np.int64 if a.dtype.kind in "biu" else a.dtype


def truth(f: F, a: np.ndarray, dim: Any, keepdims: bool) -> np.ndarray:
    """A bool; of uint8, PyTorch's bool of old, a uint8."""
    return np.asarray(f(a, dim, keepdims=keepdims)).astype(np.uint8 if a.dtype == np.uint8 else bool)


@pytest.mark.parametrize("name", REDUCTIONS)
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_reductions_over_every_dim(name: str) -> None:
    ours, numpy, kinds, of_none = REDUCTIONS[name]
    for i, kind in enumerate(kinds):
        half = kind in ("float16", "bfloat16")
        for shape in SHAPES if kind in ("float32", "int64") else SHAPES[-2 + i % 2 :][:1]:
            a = numbers(np.random.default_rng(i), kind, shape)
            for dim in axes(shape):
                if name == "prod" and isinstance(dim, tuple):  # (PyTorch's takes one)
                    continue
                whole = shape if dim is None else [shape[d] for d in ([dim] if isinstance(dim, int) else dim)]
                if not of_none and 0 in whole:
                    with pytest.raises((ValueError, IndexError)):
                        ours(Tensor(a), dim, False).numpy()
                    continue
                for keep in (False, True):
                    if name == "prod" and dim is None and keep:
                        continue
                    if name == "count_nonzero" and keep:
                        continue
                    want = numpy(wide(a).astype(np.float32) if half else a, dim, keep)
                    got = ours(Tensor(a), dim, keep)
                    same_values(
                        got,
                        np.asarray(want).astype(a.dtype) if half and want.dtype == np.float32 else want,
                        kind,
                        shape,
                        dim,
                        keep,
                    )


@pytest.mark.parametrize("name", ["max", "min", "sum", "prod", "mean", "var", "std", "all", "any"])
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_reductions_of_special_values(name: str) -> None:
    ours, numpy, kinds, _ = REDUCTIONS[name]
    for kind in ("float32", "float64", "int8", "int64"):
        if kind not in kinds:
            continue
        odd = special(kind)
        rows = np.stack(
            [np.full(5, odd[0]), *(np.array([x, y, z, x, y]) for x, y, z in zip(odd, odd[::-1], odd[3:]))]
        ).astype(odd.dtype)
        if name in ("var", "std", "prod"):  # (overflow on the way depends on the order)
            rows = rows[(np.abs(rows.astype(np.float64)) < 1e3).all(1) | ~np.isfinite(rows).all(1)]
        same_values(
            ours(Tensor(rows), 1, False), numpy(rows, 1, False), kind, tolerance=1e-5 if kind == "float32" else 1e-12
        )


@pytest.mark.parametrize("kind", ["bool", "int8", "int64", "uint8", "float32", "float64", "bfloat16"])
def test_cumulative_functions_and_differences(kind: str) -> None:
    for shape in SHAPES[1:]:
        a = numbers(np.random.default_rng(0), kind, shape, -2, 2)
        x = wide(a).astype(np.float32) if kind == "bfloat16" else a
        for d in range(-len(shape), len(shape)):
            for ours, theirs in ((Tensor.cumsum, np.cumsum), (Tensor.cumprod, np.cumprod)):
                want = theirs(x, d, dtype=summed(x))
                same_values(
                    ours(Tensor(a), d),
                    want.astype(a.dtype) if kind == "bfloat16" else want,
                    kind,
                    shape,
                    d,
                    tolerance=2e-2 if kind == "bfloat16" else 1e-5,
                )
            if kind not in ("bool", "bfloat16"):
                for n in (0, 1, 2):
                    same_values(Tensor(a).diff(n, d), np.diff(a, n, d), kind, shape, d, n, tolerance=1e-5)


@pytest.mark.parametrize("kind", ALL)
def test_searching_and_sorting(kind: str) -> None:
    rng = np.random.default_rng(0)
    for shape in SHAPES if kind in ("int32", "float32") else [(3, 5), (1,)]:
        a = numbers(rng, kind, shape, -3, 3)
        if kind == "float32" and a.ndim == 2 and a.size > 4:
            a[1, 2], a[0, 3], a[2, 1] = np.nan, np.inf, -np.inf
        x, t = wide(a), Tensor(a)
        if kind != "bool":
            for d in range(-len(shape), len(shape)):
                for down in (False, True):
                    want = np.sort(x, d, kind="stable")
                    want = np.flip(want, d) if down else want
                    order = np.argsort(x, d, kind="stable")
                    if down:  # (equal ones stay in order)
                        order = x.shape[d] - 1 - np.flip(np.argsort(np.flip(x, d), d, kind="stable"), d)
                    values, index = t.sort(d, down, stable=True)
                    same_values(values, want.astype(a.dtype), kind, shape, d, down)
                    same_values(index, order, kind, shape, d, down)
                    same_values(t.argsort(d, down, stable=True), order, kind, shape, d, down)
                if shape[d]:
                    same_values(t.argmax(d), np.argmax(x, d), kind, shape, d)
                    same_values(t.argmin(d), np.argmin(x, d), kind, shape, d)
            if a.size:
                same_values(t.argmax(), np.argmax(x), kind, shape)
                same_values(t.argmin(keepdim=True), np.argmin(x, keepdims=True), kind, shape)
            edges = np.sort(a.reshape(-1)[:7])
            if not np.isnan(wide(edges)).any():
                for right in (False, True):
                    want = np.searchsorted(wide(edges), np.nan_to_num(x), "right" if right else "left")
                    same_values(
                        Tensor.searchsorted(Tensor(edges), Tensor(np.nan_to_num(x).astype(a.dtype)), right=right),
                        want,
                        kind,
                        shape,
                    )
        a0 = np.where(rng.integers(0, 2, shape), a, np.zeros((), a.dtype)).astype(a.dtype)
        if shape:
            same_values(Tensor(a0).nonzero(), np.stack(np.nonzero(a0), -1), kind, shape)
        other = numbers(rng, kind, shape[-1:])
        same_values(Tensor.where(Tensor(a0 != 0), t, Tensor(other)), np.where(a0 != 0, a, other), kind, shape)


@pytest.mark.parametrize("kind", ["bool", "int8", "uint16", "int64", "float32", "float64"])
def test_sets(kind: str) -> None:
    for shape in SHAPES:
        a = numbers(np.random.default_rng(1), kind, shape, -3, 3)
        a = np.round(a) if a.dtype.kind == "f" else a
        a = np.asarray(a, dtype=a.dtype)
        values, inverse, counts = Tensor(a).unique(return_inverse=True, return_counts=True)
        want = np.unique(a, return_inverse=True, return_counts=True)
        same_values(values, want[0], kind, shape)
        same_values(inverse, want[1].reshape(shape), kind, shape)
        same_values(counts, want[2], kind, shape)
        if a.dtype.kind in "iu":
            tested = np.array([0, 2], a.dtype)
            same_values(Tensor.isin(Tensor(a), Tensor(tested)), np.isin(a, tested), kind, shape)


def test_manipulation() -> None:
    rng = np.random.default_rng(0)
    for kind in ("bool", "int8", "float32"):
        for shape in SHAPES:
            a, n = numbers(rng, kind, shape), len(shape)
            t = Tensor(a)
            same_values(t.broadcast_to((2, *shape)), np.broadcast_to(a, (2, *shape)), shape)
            same_values(t.flip(tuple(range(n))), np.flip(a), shape)
            same_values(t.reshape(-1) if a.size else t.reshape(0), a.reshape(-1), shape)
            same_values(t.roll(2), np.roll(a, 2), shape)
            same_values(t.tile((2, 1, 3)), np.tile(a, (2, 1, 3)), shape)
            same_values(t.repeat_interleave(2), np.repeat(a, 2), shape)
            for d in range(-n - 1, n + 1):
                same_values(t.unsqueeze(d), np.expand_dims(a, d), shape, d)
                same_values(Tensor.stack([t, t, t], d), np.stack([a, a, a], d), shape, d)
            for d in range(-n, n):
                same_values(Tensor.cat([t, t.flip(d), t], d), np.concatenate([a, np.flip(a, d), a], d), shape, d)
                same_values(t.flip(d), np.flip(a, d), shape, d)
                same_values(t.roll(-3, d), np.roll(a, -3, d), shape, d)
                same_values(t.repeat_interleave(3, d), np.repeat(a, 3, d), shape, d)
                counts = np.arange(shape[d])
                same_values(t.repeat_interleave(Tensor(counts), d), np.repeat(a, counts, d), shape, d)
                for e in range(-n, n):
                    same_values(t.movedim(d, e), np.moveaxis(a, d, e), shape, d, e)
                if shape[d] == 1:
                    same_values(t.squeeze(d), np.squeeze(a, d), shape, d)
                parts = t.unbind(d)
                assert len(parts) == shape[d]
                for part, want in zip(parts, np.moveaxis(a, d, 0)):
                    same_values(part, want, shape, d)
            order = rng.permutation(n)
            same_values(t.permute(*map(int, order)) if n else t, np.transpose(a, order), shape)
    a, b = numbers(rng, "float32", (3, 1)), numbers(rng, "float32", (4,))
    for got, want in zip(Tensor.broadcast_tensors(Tensor(a), Tensor(b)), np.broadcast_arrays(a, b)):
        same_values(got, want)


def test_creation() -> None:
    for args in ((5,), (2, 9), (2, 9, 2), (9, 2, -3), (0,), (3, 3), (0.0, 1.0, 0.3), (1.5, -2, -0.5)):
        want = np.arange(*args)
        same_values(Tensor.arange(*args), want.astype(np.float32 if want.dtype.kind == "f" else np.int64), args)
    for kind in ("int8", "uint8", "float64", "float32"):
        same_values(Tensor.arange(1, 7, 2, dtype=kind), np.arange(1, 7, 2, dtype=kind), kind)
    for start, end, n in ((0, 1, 5), (-3, 7, 1), (2, 2, 4), (5, -5, 11), (0, 1, 0), (-1e30, 1e30, 3)):
        same_values(Tensor.linspace(start, end, n, dtype="float64"), np.linspace(start, end, n), start, end, n)
    for n, m, k in ((3, 3, 0), (3, 5, 1), (5, 3, -2), (0, 4, 0), (4, 0, 0), (1, 1, 0)):
        same_values(Tensor.eye(n, m, dtype="float32"), np.eye(n, m, dtype=np.float32), n, m)
        for a in (numbers(np.random.default_rng(0), "float32", (n, m)), np.full((2, n, m), np.nan, np.float32)):
            same_values(Tensor(a).tril(k), np.tril(a, k), n, m, k)
            same_values(Tensor(a).triu(k), np.triu(a, k), n, m, k)
    for shape in SHAPES:
        for kind in ("bool", "int8", "uint64", "bfloat16", "float64"):
            d = getattr(dtypes, kind).np
            same_values(Tensor.full(shape, 1, dtype=kind), np.full(shape, 1, d), shape)
            same_values(Tensor.zeros(shape, dtype=kind), np.zeros(shape, d), shape)
            same_values(Tensor.ones(shape, dtype=kind), np.ones(shape, d), shape)
            like = Tensor(np.zeros(shape, d))
            same_values(like.full_like(1), np.full(shape, 1, d), shape)
            same_values(like.ones_like(), np.ones(shape, d), shape)
            assert like.empty_like().shape == shape and like.empty_like().dtype.name == kind
    for indexing in ("ij", "xy"):
        for sizes in ((3,), (2, 4), (2, 1, 3), (0, 2)):
            arrays = [np.arange(n, dtype=np.float32) for n in sizes]
            for got, want in zip(
                Tensor.meshgrid(*map(Tensor, arrays), indexing=indexing), np.meshgrid(*arrays, indexing=indexing)
            ):
                same_values(got, want, indexing, sizes)


def test_indexing() -> None:
    a = numbers(np.random.default_rng(0), "float32", (4, 1, 5))
    t = Tensor(a)
    for key in (
        0, -1, (0, 0), (..., 2), (slice(None), 0), (slice(1, 3), ..., slice(None, None, 2)), (None, 1), (..., None),
        slice(-3, -1), slice(10, 20), slice(3, 1), (slice(None), None, ..., -2), (), ...,
        (slice(-100, 100), ..., slice(4, 9)),
        np.array([0, -1, 2]), (np.array([[0, 1], [3, -4]]), 0, np.array([4, -5])), (..., np.array([1, 1])),
        np.array([], np.int64), a[:, 0, 0] > 0, a > 0,
    ):  # fmt: skip
        ours = (
            tuple(Tensor(k) if isinstance(k, np.ndarray) else k for k in key)
            if isinstance(key, tuple)
            else Tensor(key)
            if isinstance(key, np.ndarray)
            else key
        )
        same_values(t[ours], a[key], key)
    for d in (0, 2, -1, -3):
        index = np.array([0, -1, 1, 0]) % a.shape[d]
        same_values(t.index_select(d, Tensor(index)), np.take(a, index, d), d)
        order = np.argsort(a, d)
        same_values(t.take_along_dim(Tensor(order), d), np.take_along_axis(a, order, d), d)
    for key in (4, -5, (0, 1), (0, 0, 5), (0, 0, 0, 0)):
        with pytest.raises(IndexError):
            t[key].numpy()


def test_promotion() -> None:
    """Types of one kind give what the standard says; uint64 with signed types int64, where NumPy takes float64."""
    for one in ALL:
        for other in ALL:
            pair = (getattr(dtypes, one), getattr(dtypes, other))
            if "bfloat16" in (one, other) or pair[0].is_float != pair[1].is_float or "bool" in (one, other):
                continue
            want = np.result_type(pair[0].np, pair[1].np)
            if want.kind == "f" and pair[0].is_int:
                want = np.dtype(np.int64)
            for f in (Tensor.add, Tensor.mul, Tensor.maximum):
                assert f(Tensor.ones(2, dtype=one), Tensor.ones(2, dtype=other)).dtype.np == want, (one, other)
    for kind in REAL:  # a Python number of the same kind or below does not change the type
        for number in (True, 2, 2.5) if kind in FLOATS else (True, 2):
            for f in (lambda t, n: t + n, lambda t, n: n - t, lambda t, n: t * n):
                assert f(Tensor.ones(2, dtype=kind), number).dtype.name == kind, (kind, number)


def test_linear_algebra() -> None:
    kind, rough, rng, L = "float64", 1e-10, np.random.default_rng(0), np.linalg

    def like(got: Any, want: Any, *inputs: Any) -> None:
        assert got.dtype.name == kind and tuple(got.shape) == np.shape(want), (got.shape, np.shape(want), inputs)
        np.testing.assert_allclose(got.numpy(), want, rtol=rough, atol=rough, err_msg=str(inputs))

    for left, right in (
        ((3,), (3,)),
        ((2, 3), (3,)),
        ((3,), (3, 4)),
        ((5, 2, 3), (3, 4)),
        ((2, 1, 2, 3), (3, 3, 1)),
        ((0, 3), (3, 2)),
        ((2, 0), (0, 3)),
    ):
        a, b = numbers(rng, kind, left), numbers(rng, kind, right)
        like(Tensor(a) @ Tensor(b), a @ b, left, right)
    for left, right, dims in (((2, 3), (4, 2), ([0], [1])), ((2, 3), (3, 2), 1), ((2, 3), (2, 3), 2), ((2,), (3,), 0)):
        a, b = numbers(rng, kind, left), numbers(rng, kind, right)
        like(Tensor(a).tensordot(Tensor(b), dims), np.tensordot(a, b, dims), left, right)
    for lead, orders in (((), (1,)), ((0,), (2,)), ((2, 1), (3,))):
        for n in orders:
            a = numbers(rng, kind, (*lead, n, n)) + n * 4 * np.eye(n, dtype=kind)
            b, s = numbers(rng, kind, (*lead, n, 3)), a @ np.swapaxes(a, -1, -2)
            t = Tensor(a)
            like(linalg.det(t), L.det(a), lead, n)
            for got, want in zip(linalg.slogdet(t), L.slogdet(a)):
                like(got, want, lead, n)
            like(linalg.inv(t), L.inv(a), lead, n)
            like(linalg.solve(t, Tensor(b)), L.solve(a, b), lead, n)
            like(linalg.cholesky(Tensor(s)), L.cholesky(s), lead, n)
            for p in (-2, 0, 1, 3):
                like(linalg.matrix_power(t, p), L.matrix_power(a, p), lead, n, p)
            w, v = linalg.eigh(Tensor(s))
            like(w, L.eigvalsh(s), lead, n)
            like((v * w.unsqueeze(-2)) @ v.mT, s, lead, n)
            like(t.mT, np.swapaxes(a, -1, -2), lead, n)
            for offset in (-1, 0, 1):
                like(t.diagonal(offset, -2, -1), np.diagonal(a, offset, -2, -1), lead, n, offset)
        for m, n in ((2, 3), (3, 2)) if lead == (2, 1) else ((2, 1),):
            a = numbers(rng, kind, (*lead, m, n))
            t = Tensor(a)
            for full in (False, True):
                u, s, vh = linalg.svd(t, full)
                like(s, L.svd(a, compute_uv=False), lead, m, n)
                assert u.shape == L.svd(a, full).U.shape and vh.shape == L.svd(a, full).Vh.shape
                k = min(m, n)
                like((u[..., :k] * s.unsqueeze(-2)) @ vh[..., :k, :], a, lead, m, n)
                like(u.mT @ u, np.broadcast_to(np.eye(u.shape[-1]), (*lead, u.shape[-1], u.shape[-1])), lead, m, n)
            like(linalg.pinv(t), L.pinv(a), lead, m, n)
            for mode in ("reduced", "complete"):
                q, r = linalg.qr(t, mode)
                assert q.shape == L.qr(a, mode).Q.shape and r.shape == L.qr(a, mode).R.shape
                like(q @ r, a, lead, m, n, mode)
    for axis in (0, -1):
        a, b = numbers(rng, kind, (3, 2, 3)), numbers(rng, kind, (3, 2, 3))
        like(Tensor(a).cross(Tensor(b), axis), np.cross(a, b, axis=axis), axis)
    a, b = numbers(rng, kind, (3,)), numbers(rng, kind, (4,))
    like(Tensor(a).outer(Tensor(b)), np.outer(a, b))
