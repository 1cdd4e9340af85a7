"""POW in kernels: all special values, results that can be given exactly, and the last bit of the others."""

import itertools
from decimal import Decimal, localcontext

import numpy as np
import pytest

from manygrad.runtime.codegen.kernel.legalize import legalize
from manygrad.runtime.devices.target import host_target
from manygrad.tensor.dtype import DType, dtypes
from manygrad.tensor.uop.ops import Ops
from tests.runtime.codegen.kernels import elementwise, f32, run

FLOATS = [f32, dtypes.float64]
SPECIAL = [0.0, 1.0, 2.0, 0.5, 3.0, 1.5, np.inf, 1e-45, 5e-324, 3.4e38, 1.7e308, 1e38, 1e-38, 127.0, 128.0, 129.0,
           149.0, 150.0, 151.0, 1023.0, 1024.0, 1074.0, 1075.0, 2.0**23, 2.0**24 - 1, 2.0**24, 2.0**53 - 1, 2.0**53,
           1 + 2.0**-23, 1 - 2.0**-24, 1 + 2.0**-52]  # fmt: skip


@pytest.fixture(params=[True, False], ids=["scales", "plain"])
def scales(request: pytest.FixtureRequest) -> bool:
    if request.param and not host_target().machine.scales:
        pytest.skip("the processor has no instructions for it")
    return bool(request.param)


def power(x: np.ndarray, y: np.ndarray, d: DType, scales: bool) -> np.ndarray:
    x, y = x.astype(d.np), y.astype(d.np)
    ast = legalize(elementwise(lambda a, b: a.alu(Ops.POW, b), [d, d], len(x)), scales).ast
    return run(ast, [np.zeros_like(x), x, y], device="CPU")[0]


@pytest.mark.parametrize("d", FLOATS, ids=lambda d: d.name)
def test_special_values_are_numpys(d: DType, scales: bool) -> None:
    with np.errstate(all="ignore"):
        values = np.array([*SPECIAL, *(-v for v in SPECIAL), np.nan]).astype(d.np)
        x, y = (v.reshape(-1) for v in np.meshgrid(values, values))
        want = np.power(x.astype(np.float64), y.astype(np.float64)).astype(d.np)
    got = power(x, y, d, scales)
    known = ~np.isnan(want)
    np.testing.assert_array_equal(np.isnan(got), ~known)
    np.testing.assert_array_equal(np.signbit(got)[known], np.signbit(want)[known])
    np.testing.assert_allclose(got, want, rtol=1.2 * np.finfo(d.np).eps, atol=2 * np.finfo(d.np).smallest_subnormal)


@pytest.mark.parametrize("d", FLOATS, ids=lambda d: d.name)
def test_a_result_that_is_a_number_of_the_type_is_exact(d: DType, scales: bool) -> None:
    digits = 24 if d is f32 else 53
    pairs = [(x, y) for x, y in itertools.product(range(-40, 41), range(54)) if abs(x**y) < 2**digits]
    pairs += [(2, y) for y in range(-149, 128)] + [(k * k, 0.5) for k in range(1, 4096)]
    want = [float(x) ** y for x, y in pairs]
    got = power(np.array([x for x, _ in pairs]), np.array([y for _, y in pairs]), d, scales)
    assert got.tolist() == want


def bases_and_exponents(d: DType, n: int) -> tuple[np.ndarray, np.ndarray]:
    """Numbers of all magnitudes, denormal ones, and near 1, to exponents that give all magnitudes."""
    rng = np.random.default_rng(4)
    info = np.finfo(d.np)
    low, high = float(np.log(float(info.smallest_subnormal))), float(np.log(float(info.max)))
    x = np.exp(np.concatenate([rng.uniform(low, high, n), rng.uniform(-1e-4, 1e-4, n), rng.uniform(-2, 2, n)]))
    x = x.astype(d.np)
    x = x[x != 1]
    y = rng.uniform(low, high, x.size) / np.log(x.astype(np.float64))
    y[::3] = np.round(y[::3])
    return x, y.astype(d.np)


def test_float32_is_right_to_the_last_bit(scales: bool) -> None:
    """exp(y · log(x)) in float32 is off by more than 100."""
    x, y = bases_and_exponents(f32, 200_000)
    with np.errstate(all="ignore"):
        want = np.power(x.astype(np.float64), y.astype(np.float64))
        error = np.abs(power(x, y, f32, scales) - want) / np.spacing(want.astype(np.float32)).astype(np.float64)
    usual = want > np.finfo(np.float32).tiny
    assert np.nanmax(error[usual]) < 0.7 and np.nanmax(error[want < 3.4e38]) < 1


def test_float64_is_right_to_the_last_bit(scales: bool) -> None:
    x, y = bases_and_exponents(dtypes.float64, 700)
    got = power(x, y, dtypes.float64, scales)
    with localcontext() as context:
        context.prec = 60
        for a, b, found in zip(x.tolist(), y.tolist(), got.tolist()):
            want = Decimal(a) ** Decimal(b)
            if want < Decimal("1.7e308"):
                assert abs(Decimal(found) - want) < Decimal("0.8") * Decimal(float(np.spacing(found))), (a, b)
