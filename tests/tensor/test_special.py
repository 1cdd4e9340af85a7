"""`manygrad.special`: values against `math` and slow sums; first and second derivatives against differences."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from fractions import Fraction
from statistics import NormalDist

import numpy as np
import pytest

from manygrad import Tensor, special

INF, NAN = math.inf, math.nan


def bessel(order: int) -> Callable[[float], float]:
    """Its power series."""
    return lambda x: math.fsum(
        (x / 2) ** (2 * k + order) / (math.factorial(k) * math.factorial(k + order)) for k in range(60)
    )


I0, I1 = bessel(0), bessel(1)
FUNCTIONS: dict[str, tuple[Callable[[float], float], list[float]]] = {
    "i0e": (lambda x: math.exp(-abs(x)) * I0(x), [-9.5, -1.0, 0.25, 3.0, 12.0]),
    "i1": (I1, [-9.5, -1.0, 0.25, 3.0, 12.0]),
    "i1e": (lambda x: math.exp(-abs(x)) * I1(x), [-9.5, -1.0, 0.25, 3.0, 12.0]),
    "entr": (lambda x: -x * math.log(x), [0.1, 0.5, 1.0, 4.0]),
    "ndtr": (lambda x: math.erfc(-x / math.sqrt(2)) / 2, [-9.0, -1.5, 0.0, 0.7, 5.0]),
    "erfcx": (lambda x: math.exp(x * x) * math.erfc(x), [-2.5, -0.5, 0.0, 1.0, 3.0, 5.0]),
    "log_ndtr": (lambda x: math.log(math.erfc(-x / math.sqrt(2)) / 2), [-9.0, -1.5, -1.0, 0.0, 0.7, 3.0]),
    "ndtri": (NormalDist().inv_cdf, [0.1, 0.125, 0.25, 0.375, 0.625, 0.85]),
}


@pytest.mark.parametrize("name", FUNCTIONS)
@pytest.mark.parametrize("kind", ["float16", "float32", "float64", "int64"])
def test_values(name: str, kind: str) -> None:
    exact, points = FUNCTIONS[name]
    x = Tensor([p for p in points if kind != "int64" or p == int(p)]).cast(kind)
    got = getattr(special, name)(x)
    assert got.dtype.name == ("float32" if kind == "int64" else kind)
    want = [exact(v) for v in x.double().tolist()]
    loose = {"float16": 1e-3, "float64": 1e-13}.get(kind, 1e-6)
    np.testing.assert_allclose(got.double().numpy(), want, rtol=loose, atol=6e-8 if kind == "float16" else 1e-25)


@pytest.mark.parametrize("name", FUNCTIONS)
def test_first_and_second_derivatives(name: str) -> None:
    exact, points = FUNCTIONS[name]
    x = Tensor(np.array(points), requires_grad=True)
    (first,) = getattr(special, name)(x).sum().gradient(x)
    (second,) = first.sum().gradient(x)
    h = 3e-5
    wanted = np.array([[exact(p + s * h) for s in (-1, 0, 1)] for p in points])
    scale = np.abs(wanted).max(1) + 1e-3
    assert (np.abs(first.numpy() - (wanted[:, 2] - wanted[:, 0]) / (2 * h)) < 1e-6 * scale).all()
    assert (np.abs(second.numpy() - (wanted[:, 2] - 2 * wanted[:, 1] + wanted[:, 0]) / h**2) < 1e-5 * scale).all()


def test_at_the_ends() -> None:
    def same(got: Tensor, want: list[float]) -> None:
        np.testing.assert_allclose(got.numpy(), want, rtol=1e-6)

    same(special.entr(Tensor([-1.0, 0.0, NAN, INF])), [-INF, 0, NAN, -INF])
    same(special.ndtr(Tensor([-INF, INF, NAN])), [0, 1, NAN])
    same(special.i0e(Tensor([0.0, 1e4])), [1, 0.00398947229])
    same(special.i1(Tensor([0.0])), [0])
    same(special.xlog1py(Tensor([0.0, 0.0, 2.0, 0.0]), Tensor([-1.0, NAN, -1.0, INF])), [0, NAN, -INF, 0])
    same(special.xlog1py(2.0, Tensor([1e-8])), [2e-8])
    same(special.xlog1py(Tensor([1.0, 3.0]), 1.0), [math.log(2), 3 * math.log(2)])
    x = Tensor([0.0], requires_grad=True)
    for f, slope in ((special.i1, 0.5), (special.i1e, 0.5), (special.i0e, 0.0)):
        (first,) = f(x).gradient(x)
        assert first.tolist() == [slope] and (f is special.i0e or first.gradient(x)[0].tolist() == [0.0])


def test_those_of_tensors_have_torch_special_s_names() -> None:
    x = Tensor([0.3, 0.6])
    assert special.expit(x).tolist() == x.sigmoid().tolist() and special.gammaln(x).tolist() == x.lgamma().tolist()
    assert special.polygamma(1, x).tolist() == x.polygamma(1).tolist()


def test_tails_of_the_normal_distribution_have_all_digits() -> None:
    """By the asymptotic series far out; ndtri is the inverse of ndtr, by its logarithm where that underflows."""
    far = np.array([60.0, 300.0, 1e4])
    series = 1 - 1 / far**2 + 3 / far**4 - 15 / far**6 + 105 / far**8
    want = -(far**2) / 2 - np.log(far * math.sqrt(2 * math.pi)) + np.log(series)
    np.testing.assert_allclose(special.log_ndtr(Tensor(-far)).numpy(), want, rtol=1e-15)
    half = far / math.sqrt(2)
    np.testing.assert_allclose(special.erfcx(Tensor(half)).numpy(), series / (half * math.sqrt(math.pi)), rtol=1e-14)
    assert special.erfcx(Tensor([-INF, -30.0, INF])).tolist() == [INF, INF, 0]
    small = 10.0 ** -np.arange(1.0, 307.0, 5)
    x = special.ndtri(Tensor(small))
    np.testing.assert_allclose(special.log_ndtr(x).numpy(), np.log(small), rtol=1e-15)
    near = 2.0 ** -np.arange(3.0, 50.0)
    assert (special.ndtri(Tensor(1 - near)) == -special.ndtri(Tensor(near))).all().item()
    np.testing.assert_allclose(special.ndtri(Tensor(0.5 + near)).numpy()[30:], near[30:] * math.sqrt(2 * math.pi))
    assert special.ndtri(Tensor([0.0, 1.0])).tolist() == [-INF, INF]
    assert special.ndtri(Tensor([-0.1, 1.1, NAN])).isnan().all().item()


def test_zeta() -> None:
    def exact(s: int, q: Fraction) -> float:
        """60 terms, then Euler and Maclaurin's series in fractions."""
        terms, y = sum(1 / (q + k) ** s for k in range(60)), q + 60
        rest = 1 / y ** (s - 1) / (s - 1) + 1 / y**s / 2 + s / y ** (s + 1) / 12
        return float(terms + rest - Fraction(s * (s + 1) * (s + 2), 720) / y ** (s + 3))

    points = [(s, Fraction(q, 8)) for s, q in itertools.product((2, 3, 5, 12), (1, 8, 20, 333, -3, -13, -101))]
    points = [(s, q) for s, q in points if q > 0 or q.denominator > 1]
    s, q = (
        Tensor([float(s) for s, _ in points], dtype="float64"),
        Tensor([float(q) for _, q in points], dtype="float64"),
    )
    np.testing.assert_allclose(special.zeta(s, q).numpy(), [exact(s, q) for s, q in points], rtol=1e-13)
    got = special.zeta(Tensor([1.5, 3.5], dtype="float64"), Tensor([1.0, 1.0], dtype="float64"))
    np.testing.assert_allclose(got.numpy(), [2.612375348685488, 1.1267338673170566], rtol=1e-14)
    ends = special.zeta(Tensor([1.0, 0.5, 2.0, 2.5, INF, INF, INF, NAN]), Tensor([2.0, 2, -3, -0.5, 0.5, 1, 2, 1]))
    np.testing.assert_array_equal(ends.numpy(), [INF, NAN, INF, NAN, INF, 1, 0, NAN])
    assert special.zeta(2.0, Tensor([1, 1])).dtype.name == "float32"
    (slope,) = special.zeta(s, q.requires_grad_()).sum().gradient(q)
    np.testing.assert_allclose(slope.numpy(), [-s * exact(s + 1, q) for s, q in points], rtol=1e-12)


P = np.polynomial
T = np.linspace(0.1, 3.0, 9)
POLYNOMIALS: dict[str, Callable[[np.ndarray, int], np.ndarray]] = {
    "chebyshev_polynomial_t": lambda x, n: P.Chebyshev.basis(n)(x),
    "chebyshev_polynomial_u": lambda x, n: np.sin((n + 1) * T) / np.sin(T),
    "chebyshev_polynomial_v": lambda x, n: np.cos((n + 0.5) * T) / np.cos(T / 2),
    "chebyshev_polynomial_w": lambda x, n: np.sin((n + 0.5) * T) / np.sin(T / 2),
    "hermite_polynomial_h": lambda x, n: P.Hermite.basis(n)(x),
    "hermite_polynomial_he": lambda x, n: P.HermiteE.basis(n)(x),
    "laguerre_polynomial_l": lambda x, n: P.Laguerre.basis(n)(x),
    "legendre_polynomial_p": lambda x, n: P.Legendre.basis(n)(x),
}


@pytest.mark.parametrize("name", [*POLYNOMIALS, *(f"shifted_{n}" for n in list(POLYNOMIALS)[:4])])
def test_orthogonal_polynomials(name: str) -> None:
    exact, f = POLYNOMIALS[name.removeprefix("shifted_")], getattr(special, name)
    x = np.cos(T)
    given = Tensor((x + 1) / 2 if name.startswith("shifted") else x)
    for n in (0, 1, 2, 5, 30):
        np.testing.assert_allclose(f(given, n).numpy(), exact(x, n), rtol=1e-10, atol=1e-11)
    degrees = np.array([0, 1, 2, 3, 4, 5, 6, 7, -1])
    got = f(given, Tensor(degrees))
    want = [0.0 if n < 0 else exact(x, n)[i] for i, n in enumerate(degrees.tolist())]
    np.testing.assert_allclose(got.numpy(), want, rtol=1e-12, atol=1e-12)
    assert f(given.float(), Tensor(degrees[:, None])).dtype.name == "float32"
    assert f(given.float(), Tensor(degrees[:, None])).shape == (9, 9)
    assert f(0.25, Tensor([1, 3])).tolist() == [f(Tensor(0.25), n).item() for n in (1, 3)]
    with pytest.raises(ValueError, match="the highest degree here"):
        f(given, 10**6)


def test_derivatives_of_a_polynomial() -> None:
    x = Tensor(np.linspace(-1.5, 1.5, 7), requires_grad=True)
    (slope,) = special.hermite_polynomial_h(x, 5).sum().gradient(x)
    np.testing.assert_allclose(slope.numpy(), 10 * P.Hermite.basis(4)(x.numpy()), rtol=1e-12)
