"""`manygrad.linalg`, cdist and trapezoid: values against NumPy; first and second derivatives against differences."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from manygrad import Tensor, linalg
from tests.tensor.oracle import finite_difference

RNG = np.random.default_rng(7)
INF = float("inf")
L = np.linalg


def drawn(*shape: int) -> np.ndarray:
    return RNG.uniform(-2, 2, shape)


def square(*shape: int) -> np.ndarray:
    return drawn(*shape, shape[-1]) + 4 * np.eye(shape[-1])


def positive(a: Any) -> Any:
    """Symmetric and positive definite, of any square matrix."""
    swapped = a.mT if isinstance(a, Tensor) else np.swapaxes(a, -1, -2)
    return a @ swapped


def rebuilt(factors: Any) -> Any:
    p, low, up = factors
    return p @ low @ up


def cumulative(y: np.ndarray, x: np.ndarray) -> np.ndarray:
    return np.cumsum((y[..., 1:] + y[..., :-1]) / 2 * np.diff(x), -1)


def distances(p: float) -> Callable[..., np.ndarray]:
    return lambda a, b: (np.abs(a[..., :, None, :] - b[..., None, :, :]) ** p).sum(-1) ** (1 / p)


def norms(order: Any) -> tuple[Callable[..., Any], Callable[..., Any], list[np.ndarray]]:
    return (
        lambda a: linalg.matrix_norm(a, order),
        lambda a: np.stack([np.asarray(L.norm(m, order)) for m in a]),
        [drawn(2, 3, 4)],
    )


CASES: dict[str, tuple[Callable[..., Any], Callable[..., Any], list[np.ndarray]]] = {
    **{f"matrix_norm {order}": norms(order) for order in ("fro", "nuc", 2, -2, 1, -1, INF, -INF)},
    **{f"vector_norm {p}": (
        lambda a, p=p: linalg.vector_norm(a, p, 1), lambda a, p=p: L.norm(a, p, 1), [drawn(3, 5)])
       for p in (1, 2, 2.5, -1.5, INF, -INF)},
    "vector_norm of all": (lambda a: linalg.vector_norm(a, 3), lambda a: L.norm(a.reshape(-1), 3), [drawn(3, 2)]),
    "norm": (linalg.norm, lambda a: np.sqrt((a * a).sum()), [drawn(2, 3, 4)]),
    "norm of matrices": (
        lambda a: linalg.norm(a, 1, (0, 2)), lambda a: np.abs(a).sum(0).max(-1), [drawn(2, 3, 4)]),
    **{f"cond {p}": (lambda a, p=p: linalg.cond(a, p), lambda a, p=p: L.cond(a, p), [square(3)])
       for p in (None, -2, "fro", "nuc", 1, INF)},
    "svdvals": (linalg.svdvals, lambda a: L.svd(a, compute_uv=False), [drawn(2, 3, 4)]),
    "eigvalsh": (lambda a: linalg.eigvalsh(a + a.mT), lambda a: L.eigvalsh(a + a.T), [drawn(3, 3)]),
    "eigvalsh, upper": (
        lambda a: linalg.eigvalsh(a + a.mT, "U"), lambda a: L.eigvalsh(a + a.T, "U"), [drawn(3, 3)]),
    **{f"lu of {m}, {n}": (lambda a: rebuilt(linalg.lu(a)), lambda a: a, [drawn(2, m, n)])
       for m, n in ((3, 3), (2, 4), (4, 2))},
    "lu_unpack": (lambda a: rebuilt(linalg.lu_unpack(*linalg.lu_factor(a))), lambda a: a, [drawn(2, 4, 3)]),
    "lu_solve": (lambda a, b: linalg.lu_solve(*linalg.lu_factor(a), b), L.solve, [square(2, 3), drawn(2, 3, 2)]),
    "lu_solve, one matrix": (
        lambda a, b: linalg.lu_solve(*linalg.lu_factor(a), b), L.solve, [square(3), drawn(2, 3, 2)]),
    "lu_solve, adjoint": (
        lambda a, b: linalg.lu_solve(*linalg.lu_factor(a), b, adjoint=True), lambda a, b: L.solve(a.T, b),
        [square(3), drawn(3, 2)]),
    "lu_solve, right": (
        lambda a, b: linalg.lu_solve(*linalg.lu_factor(a), b, left=False), lambda a, b: b @ L.inv(a),
        [square(3), drawn(2, 3)]),
    "inv_ex": (lambda a: linalg.inv_ex(a).inverse, L.inv, [square(3)]),
    "solve, right": (lambda a, b: linalg.solve(a, b, left=False), lambda a, b: b @ L.inv(a), [square(3), drawn(2, 3)]),
    "solve_ex": (lambda a, b: linalg.solve_ex(a, b).result, L.solve, [square(3), drawn(3, 2)]),
    "cholesky_ex": (
        lambda a: linalg.cholesky_ex(positive(a)).L, lambda a: L.cholesky(positive(a)), [square(2, 3)]),
    "solve_triangular": (
        lambda a, b: linalg.solve_triangular(a, b, upper=True), lambda a, b: L.solve(np.triu(a), b),
        [square(3), drawn(3, 2)]),
    "solve_triangular, right, unit": (
        lambda a, b: linalg.solve_triangular(a, b, upper=False, left=False, unitriangular=True),
        lambda a, b: b @ L.inv(np.tril(a, -1) + np.eye(3)), [square(3), drawn(2, 3)]),
    "lstsq, tall": (
        lambda a, b: linalg.lstsq(a, b).solution, lambda a, b: L.lstsq(a, b)[0], [drawn(5, 3), drawn(5, 2)]),
    "lstsq, wide": (lambda a, b: linalg.lstsq(a, b).solution, lambda a, b: L.lstsq(a, b)[0], [drawn(2, 3), drawn(2)]),
    "lstsq, residuals": (
        lambda a, b: linalg.lstsq(a, b).residuals, lambda a, b: L.lstsq(a, b)[1], [drawn(5, 3), drawn(5, 2)]),
    "pinv": (linalg.pinv, L.pinv, [drawn(2, 3, 2)]),
    "pinv, atol": (lambda a: linalg.pinv(a, atol=1e-3), L.pinv, [drawn(3, 2)]),
    "pinv, hermitian": (
        lambda a: linalg.pinv(a + a.mT, hermitian=True), lambda a: L.pinv(a + a.T), [square(3)]),
    "multi_dot": (
        lambda *m: linalg.multi_dot(m), lambda *m: L.multi_dot(m), [drawn(4), drawn(4, 2), drawn(2, 5), drawn(5)]),
    "vecdot": (lambda a, b: linalg.vecdot(a, b, dim=0), lambda a, b: (a * b).sum(0), [drawn(3, 2), drawn(3, 1)]),
    "cross": (linalg.cross, np.cross, [drawn(2, 3), drawn(1, 3)]),
    "diagonal": (lambda a: linalg.diagonal(a, offset=1), lambda a: np.diagonal(a, 1, -2, -1), [drawn(2, 3, 4)]),
    "vander": (lambda a: linalg.vander(a, 4), lambda a: np.vander(a, 4, increasing=True), [drawn(3)]),
    "tensorinv": (lambda a: linalg.tensorinv(a, 1), lambda a: L.tensorinv(a, 1), [drawn(4, 2, 2)]),
    "tensorsolve": (
        lambda a, b: linalg.tensorsolve(a, b, (1,)), lambda a, b: L.tensorsolve(a, b, (1,)),
        [drawn(2, 4, 2), drawn(2, 2)]),
    "householder_product": (
        lambda a: linalg.householder_product(*linalg.geqrf(a)), lambda a: L.qr(a)[0], [drawn(4, 2)]),
    **{f"cdist {p}": (lambda a, b, p=p: a.cdist(b, p), distances(p), [drawn(2, 3, 4), drawn(5, 4)])
       for p in (1, 2, 3.5)},
    "trapezoid": (lambda y, x: y.trapezoid(x), lambda y, x: np.trapezoid(y, x), [drawn(3, 4), drawn(4)]),
    "trapezoid, dx": (lambda y: y.trapezoid(dx=0.5, dim=0), lambda y: np.trapezoid(y, dx=0.5, axis=0), [drawn(3, 4)]),
    "cumulative_trapezoid": (lambda y, x: y.cumulative_trapezoid(x), cumulative, [drawn(3, 4), drawn(3, 4)]),
}  # fmt: skip


def pulled(name: str, tensors: list[Tensor], weight: np.ndarray, push: list[np.ndarray]) -> tuple[list[Tensor], Tensor]:
    """The gradients of Σ f · weight, and their product with `push`."""
    slopes = (CASES[name][0](*tensors) * Tensor(weight)).sum().gradient(*tensors)
    return slopes, sum(((g * Tensor(p)).sum() for g, p in zip(slopes, push)), Tensor(0.0, dtype="float64"))


@pytest.mark.parametrize("name", CASES)
def test_values_and_derivatives(name: str) -> None:
    ours, numpy, arrays = CASES[name]
    want = np.asarray(numpy(*arrays))
    got = ours(*map(Tensor, arrays))
    assert got.shape == want.shape and got.dtype.name == "float64"
    np.testing.assert_allclose(got.numpy(), want, rtol=1e-9, atol=1e-9)
    rng = np.random.default_rng(0)
    weight, push = rng.uniform(0.5, 1.5, want.shape), [rng.uniform(0.5, 1.5, a.shape) for a in arrays]
    tensors = [Tensor(a, requires_grad=True) for a in arrays]
    slopes, along = pulled(name, tensors, weight, push)
    for i, slope in enumerate(slopes):
        expected = finite_difference(numpy, list(arrays), i, weight)
        np.testing.assert_allclose(slope.numpy(), expected, rtol=2e-5, atol=2e-5, err_msg=f"of input {i}")
    # along one direction, of the first derivatives that were just held to differences
    h, steps = 1e-5, [rng.uniform(-1, 1, a.shape) for a in arrays]
    up, down = (
        pulled(name, [Tensor(a + s * step, requires_grad=True) for a, step in zip(arrays, steps)], weight, push)[
            1
        ].item()
        for s in (h, -h)
    )
    second = along.gradient(*tensors)
    mine = sum(float((g.numpy() * step).sum()) for g, step in zip(second, steps))
    np.testing.assert_allclose(mine, (up - down) / (2 * h), rtol=1e-4, atol=1e-4)


def test_ranks_and_infos() -> None:
    one = drawn(2, 4, 1) @ drawn(2, 1, 3)
    assert linalg.matrix_rank(Tensor(one)).tolist() == [1, 1]
    assert linalg.matrix_rank(Tensor(np.eye(4))).item() == 4
    assert linalg.matrix_rank(Tensor(np.diag([1.0, 0.1, 0.0])), atol=0.5).item() == 1
    assert linalg.matrix_rank(Tensor(np.diag([1.0, -0.1, 0.0])), rtol=0.01, hermitian=True).item() == 2
    found = linalg.lstsq(Tensor(one[0]), Tensor(drawn(4, 2)), driver="gelsd")
    assert found.rank.item() == 1 and found.singular_values.shape == (3,)
    for driver, shapes in {
        "gels": [(2,), (0,), (0,)], "gelsy": [(0,), (), (0,)], "gelsd": [(2,), (), (3,)], "gelss": [(2,), (), (3,)]
    }.items():  # fmt: skip
        found = linalg.lstsq(Tensor(one[0]), Tensor(drawn(4, 2)), driver=driver)
        assert [t.shape for t in found[1:]] == shapes
    assert linalg.lu_factor_ex(Tensor([[0.0, 1.0], [0.0, 2.0]])).info.item() == 1
    assert linalg.inv_ex(Tensor([[[1.0, 2.0], [2.0, 4.0]], [[1.0, 0.0], [0.0, 1.0]]])).info.tolist() == [2, 0]
    assert linalg.cholesky_ex(Tensor([[1.0, 0.0], [0.0, -1.0]])).info.item() == 2
    packed, pivots = linalg.lu_factor(Tensor([[0.0, 1.0], [2.0, 3.0]]))
    assert pivots.dtype.name == "int32" and pivots.tolist() == [2, 2] and packed.tolist() == [[2, 3], [0, 1]]
    assert linalg.cond(Tensor([[1.0, 2.0], [2.0, 4.0]]), 1).item() == INF


@pytest.mark.parametrize(
    "f", [linalg.eigh, linalg.svd, linalg.lu, linalg.qr, linalg.pinv, linalg.matrix_rank, linalg.inv]
)
def test_matrices_without_elements(f: Any) -> None:
    for shape in ((0, 0), (2, 0, 0), (0, 3, 3)):
        out = f(Tensor(np.zeros(shape)))
        for t in out if isinstance(out, tuple) else (out,):
            assert np.isfinite(t.numpy()).all()


def test_logspace() -> None:
    for args in ((0, 3, 4), (1.5, -2, 7), (0, 1, 0), (2, 2, 1), (0, 5, 6, 2.0), (0, 4, 5, 5.0)):
        np.testing.assert_allclose(
            Tensor.logspace(*args, dtype="float64").numpy(), np.logspace(*args[:3], base=(*args, 10.0)[3]), rtol=1e-13
        )
    assert Tensor.logspace(0, 4, 5, 5.0, dtype="int64").tolist() == [1, 5, 25, 125, 625]
    assert (Tensor([5.0, 3.0, 7.0]).double() ** Tensor([2.0, 33.0, -3.0]).double()).tolist() == [25, 3.0**33, 7.0**-3]


X = Tensor.ones(2, 3)
REFUSED: list[tuple[Callable[[], object], type[Exception], str]] = [
    (lambda: linalg.matrix_norm(X, 3), ValueError, "ord is"),
    (lambda: linalg.matrix_norm(X, dim=(0, -2)), ValueError, "the same dim twice"),
    (lambda: linalg.norm(Tensor.ones(2, 2, 2), 1), ValueError, "over one dim or two"),
    (lambda: linalg.vector_norm(X.long()), TypeError, "norm needs a float tensor"),
    (lambda: linalg.vector_norm(Tensor.ones(0), INF), ValueError, "no elements"),
    (lambda: linalg.solve_triangular(Tensor.ones(2, 2), Tensor.ones(3, 1), upper=True), ValueError, "do not fit"),
    (lambda: linalg.lstsq(X, Tensor.ones(3)), ValueError, "the right side has 2 rows"),
    (lambda: linalg.lstsq(X, Tensor.ones(2), driver="qr"), ValueError, "driver is one of"),
    (lambda: linalg.eigh(Tensor.ones(2, 2), "X"), ValueError, "UPLO"),
    (lambda: linalg.lu(X, pivot=False), NotImplementedError, "pivot=False"),
    (lambda: linalg.cond(X, 1), ValueError, "expected square matrices"),
    (lambda: linalg.multi_dot([X]), ValueError, "at least 2 tensors"),
    (lambda: linalg.multi_dot([X, X]), ValueError, "no chain"),
    (lambda: linalg.tensorinv(X), ValueError, "hold"),
    (lambda: linalg.tensorsolve(X, X), ValueError, "do not fit"),
    (lambda: linalg.vander(X, 1), ValueError, "at least 2"),
    (lambda: linalg.inv_ex(Tensor.zeros(2, 2), check_errors=True), ValueError, "a singular matrix"),
    (lambda: X.cdist(Tensor.ones(2, 4)), ValueError, "expected"),
    (lambda: X.trapezoid(Tensor.ones(4)), ValueError, "does not fit"),
    (lambda: X.trapezoid(X, dx=1.0), TypeError, "not both"),
]


@pytest.mark.parametrize("case", REFUSED, ids=lambda case: case[2])
def test_what_is_refused(case: tuple[Callable[[], object], type[Exception], str]) -> None:
    f, kind, words = case
    with pytest.raises(kind, match=words):
        f()
