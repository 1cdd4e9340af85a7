"""`manygrad.special`: values against `math` and slow sums; first and second derivatives against differences."""

from __future__ import annotations

import math
from collections.abc import Callable

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
