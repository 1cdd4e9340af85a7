"""Products of float32 whose factors are rounded to tf32, where the user allows it: exactly that, in every layout, and
nothing where it is not allowed."""

from __future__ import annotations

import re
from collections.abc import Iterator
from fractions import Fraction

import numpy as np
import pytest

from manygrad import Context, Tensor, dtypes, get_float32_matmul_precision, set_float32_matmul_precision
from manygrad.runtime.codegen.pipeline import prepare
from manygrad.runtime.codegen.render.llvm.nvptx import NVPTXTarget, render
from manygrad.runtime.devices.cuda.ptx import ptx_of
from manygrad.tensor.dtype import DType
from manygrad.tensor.environment import FLOAT32_MATMUL_PRECISION
from tests.cuda.install import emulated
from tests.cuda.matrix import rounded_to_tf32
from tests.cuda.test_copy_ahead import GPU, arrays_of, without_ring
from tests.cuda.test_emulator import result
from tests.cuda.test_warp_matrix import LAYOUTS, made_ptx
from tests.runtime.codegen.kernels import gemm

RNG = np.random.default_rng(0)
SIZES = [(128, 128, 96), (72, 40, 136), (130, 66, 104), (63, 65, 50), (7, 9, 17)]


@pytest.fixture(params=["high", "medium"])
def allowed(request: pytest.FixtureRequest) -> Iterator[str]:
    with Context(FLOAT32_MATMUL_PRECISION=request.param):
        yield request.param


@pytest.fixture
def as_before() -> Iterator[None]:
    before = FLOAT32_MATMUL_PRECISION.common
    yield
    FLOAT32_MATMUL_PRECISION.common = before


def tf32(a: np.ndarray) -> np.ndarray:
    return rounded_to_tf32(a).view(np.float32).astype(np.float64)


def product_of(sizes: tuple[int, int, int], layout: str, arrays: list[np.ndarray]) -> np.ndarray:
    m, n, k = sizes
    a = arrays[1].reshape(m, k) if layout[0] == "N" else arrays[1].reshape(k, m).T
    b = arrays[2].reshape(k, n) if layout[1] == "N" else arrays[2].reshape(n, k).T
    return tf32(a) @ tf32(b)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_factors_are_rounded_and_nothing_else(sizes: tuple[int, int, int], layout: str, allowed: str) -> None:
    """The sum is of float32: far nearer to that of rounded factors than these are to what they were."""
    ast, arrays = gemm(*sizes, layout), arrays_of(sizes, dtypes.float32)
    assert any(o.kind == "warp_matrix" for o in prepare(ast, GPU).opts)
    got = result(ast, arrays, None, machine=GPU)
    assert got.tobytes() == result(ast, arrays, without_ring(ast), machine=GPU).tobytes()
    np.testing.assert_allclose(got.reshape(sizes[:2]), product_of(sizes, layout, arrays), rtol=1e-6, atol=2e-5)


def test_a_factor_that_is_not_rounded_is_noticed(allowed: str) -> None:
    """The instruction itself cuts off what it does not read."""
    sizes = (128, 64, 64)
    ast, arrays = gemm(*sizes), arrays_of(sizes, dtypes.float32)
    got = result(ast, arrays, None, lambda ptx: re.sub(r"cvt\.rna\.tf32\.f32", "mov.b32", ptx), GPU)
    assert np.abs(got.reshape(128, 64) - product_of(sizes, "NN", arrays)).max() > 1e-3


def ptx(layout: str, dtype: DType = dtypes.float32) -> str:
    return ptx_of(render(prepare(gemm(128, 128, 128, layout, dtype), GPU).program(), NVPTXTarget()), 80)


def test_it_has_to_be_allowed() -> None:
    assert FLOAT32_MATMUL_PRECISION.default == "highest"
    for precision, has in (("highest", False), ("", False), ("high", True), ("medium", True)):
        with Context(FLOAT32_MATMUL_PRECISION=precision):
            assert ("mma.sync.aligned.m16n8k8" in ptx("NT")) == has
            assert ("m16n8k16" in ptx("NT", dtypes.bfloat16)) and "mma" not in ptx("NT", dtypes.float64)


def test_rounding_is_to_the_nearest_and_ties_go_away_from_zero() -> None:
    numbers = np.array([1, 1 + 2**-11, 1 + 2**-11 + 2**-23, 1 + 2**-11 - 2**-23, -1 - 2**-11, 3e38, 1e-40], np.float32)
    drawn = RNG.integers(0, 1 << 32, 2000, np.uint32).view(np.float32)
    some = np.concatenate([numbers, drawn[np.isfinite(drawn) & (np.abs(drawn) < 3e38)]])
    for a, got in zip(some, tf32(some)):
        exact, near = Fraction(float(a)), Fraction(float(got))
        exponent = max(int(np.floor(np.log2(abs(float(a))))) if a else -126, -126)
        step = Fraction(2) ** (exponent - 10)
        assert near / step == int(near / step) and abs(near - exact) <= step / 2
        assert abs(near - exact) < step / 2 or abs(near) > abs(exact)
    special = rounded_to_tf32(np.array([np.inf, -np.inf, np.nan], np.float32)).view(np.float32)
    assert special[0] == np.inf and special[1] == -np.inf and np.isnan(special[2])


def test_the_choice_is_pytorchs(as_before: None) -> None:
    set_float32_matmul_precision("high")
    assert get_float32_matmul_precision() == "high"
    with Context(FLOAT32_MATMUL_PRECISION="highest"):
        assert get_float32_matmul_precision() == "highest"
    with pytest.raises(ValueError, match="one of highest, high, medium, not 'low'"):
        set_float32_matmul_precision("low")
    set_float32_matmul_precision("highest")


@emulated
def test_tensors_are_multiplied_so_after_the_call(as_before: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Forward and backward; what was made before is made anew, and back."""
    found = made_ptx(monkeypatch)
    a, b = (RNG.standard_normal((96, 96)).astype(np.float32) for _ in range(2))
    exact, rounded = a.astype(np.float64) @ b, tf32(a) @ tf32(b)

    def step() -> tuple[np.ndarray, np.ndarray]:
        x, y = (Tensor(v, device="CUDA:0").realize() for v in (a, b))
        x.requires_grad = True
        z = x @ y
        z.square().sum().backward()
        assert x.grad is not None
        return z.numpy(), x.grad.numpy()

    first, gradient = step()
    np.testing.assert_allclose(first, exact, rtol=1e-5, atol=1e-4)
    set_float32_matmul_precision("high")
    z, grad = step()
    np.testing.assert_allclose(z, rounded, rtol=1e-6, atol=2e-5)
    assert np.abs(z - exact).max() > 1e-3 and np.abs(grad - gradient).max() > 1e-4
    set_float32_matmul_precision("highest")
    assert step()[0].tobytes() == first.tobytes()
    assert not found or any("tf32" in text for text in found)
