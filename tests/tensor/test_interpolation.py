"""What `interpolate` makes of types without fractions; its values for floats are cases
(tests/tensor/cases/interpolation.py)."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from manygrad import Context, Tensor, dtypes, nn
from tests.tensor.cases.interpolation import interpolate

AVERAGING = {"linear": 1, "bilinear": 2, "bicubic": 2, "trilinear": 3, "area": 2}


@settings(max_examples=30)
@given(data=st.data())
def test_bytes_are_rounded_to_the_nearest(data: st.DataObject) -> None:
    """Also where bicubic overshoots 0..255. (A value within rounding errors of a half goes either way.)"""
    rng = np.random.default_rng(data.draw(st.integers(0, 1 << 20)))
    x = rng.choice(
        np.array([0, 255, *rng.integers(0, 256, 4)]), (1, 2, data.draw(st.integers(2, 6)), data.draw(st.integers(2, 6)))
    ).astype(np.uint8)
    options: dict[str, Any] = {
        "mode": data.draw(st.sampled_from(["bilinear", "bicubic"])),
        "size": tuple(data.draw(st.integers(1, 9)) for _ in range(2)),
    }
    options |= data.draw(st.sampled_from([{}, {"align_corners": True}, {"antialias": True}]))
    with Context(DEVICE=data.draw(st.sampled_from(["PYTHON", "CPU"]))):
        got = nn.functional.interpolate(Tensor(x), **options)
        assert got.dtype is dtypes.uint8
        exact = interpolate(x.astype(np.float64), **options).clip(0, 255)
        assert (np.abs(got.numpy() - exact) <= 0.5 + 1e-3).all(), f"{got.numpy()} of {exact}"


@pytest.mark.parametrize("kind", ["uint8", "int32", "int64", "bool"])
@pytest.mark.parametrize("mode", AVERAGING)
def test_what_has_no_fractions_is_not_averaged(mode: str, kind: str) -> None:
    x = Tensor(np.ones((1, 1, *(4,) * AVERAGING[mode]), kind))
    if kind == "uint8" and mode in ("bilinear", "bicubic"):
        return  # rounded: the test above
    with pytest.raises(TypeError, match=rf"interpolate: mode '{mode}'.*{kind}.*float\(\)"):
        nn.functional.interpolate(x, size=3, mode=mode)


@pytest.mark.parametrize("kind", ["uint8", "int32", "int64", "bool"])
@pytest.mark.parametrize("mode", ["nearest", "nearest-exact"])
def test_the_nearest_element_is_of_any_type(mode: str, kind: str) -> None:
    x = np.random.default_rng(0).integers(0, 256, (1, 2, 5, 4)).astype(kind)
    got = nn.functional.interpolate(Tensor(x), size=(3, 7), mode=mode)
    assert got.dtype.name == kind
    np.testing.assert_array_equal(got.numpy(), interpolate(x.astype(np.float64), size=(3, 7), mode=mode).astype(kind))


def test_the_average_of_parts_needs_floats() -> None:
    with pytest.raises(TypeError, match="adaptive_avg_pool2d needs a float tensor, not bool"):
        nn.functional.adaptive_avg_pool2d(Tensor(np.ones((1, 1, 4, 4), bool)), 3)
