"""The float8 types: stored, moved and cast as ml_dtypes does; nothing else."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest

from manygrad import Context, Tensor, dtypes

SPECIAL = [
    0.0,
    -0.0,
    np.inf,
    -np.inf,
    np.nan,
    448,
    464,
    465,
    479,
    1e5,
    57344,
    61439,
    61440,
    1e-9,
    2.0**-9,
    2.0**-10,
    1.5 * 2.0**-9,
    2.0**-16,
    3 * 2.0**-17,
]
VALUES = np.concatenate([np.random.default_rng(0).normal(0, 30, 500), 2.0 ** np.arange(-20, 18), SPECIAL]).astype(
    np.float32
)


@pytest.mark.parametrize("device", ["CPU", "PYTHON"])
@pytest.mark.parametrize("name", ["float8_e4m3fn", "float8_e5m2"])
def test_casts_both_ways(name: str, device: str) -> None:
    with Context(DEVICE=device):
        kept = np.clip(VALUES, -448, 448) if name == "float8_e4m3fn" else VALUES  # (which has no infinity)
        want = kept.astype(getattr(ml_dtypes, name))
        stored = Tensor(VALUES).cast(name).realize()
        assert (
            stored.dtype is getattr(dtypes, name)
            and stored.nbytes == VALUES.size
            and stored.numpy().dtype == want.dtype
        )
        np.testing.assert_array_equal(stored.numpy().astype(np.float32), want.astype(np.float32))
        np.testing.assert_array_equal(Tensor(want).float().numpy(), want.astype(np.float32))
        every = np.arange(256, dtype=np.uint8).view(want.dtype)
        np.testing.assert_array_equal(Tensor(every).double().numpy(), every.astype(np.float64))
        assert stored[:4].reshape(2, 2).T.pad((0, 1)).float().tolist() == [
            [*want[[0, 2]].astype(float), 0.0],
            [*want[[1, 3]].astype(float), 0.0],
        ]


def test_what_is_too_large_saturates_or_is_infinite() -> None:
    """As torch 2.13 has it, wherever the value comes from: a kernel, a list, an array, a constant."""
    given = [448.0, 449.0, 1000.0, 1e30, np.inf, -np.inf, np.nan, -1000.0, 57344.0, 61439.0, 61440.0]
    want = {
        "float8_e4m3fn": [448, 448, 448, 448, 448, -448, np.nan, -448, 448, 448, 448],
        "float8_e5m2": [448, 448, 1024, np.inf, np.inf, -np.inf, np.nan, -1024, 57344, 57344, np.inf],
    }
    for name, values in want.items():
        for made in (
            Tensor(given).cast(name),
            Tensor(given, dtype=name),
            Tensor(np.array(given), dtype=name),
            Tensor.stack(*[Tensor.full((), x, dtype=name).float() for x in given]).cast(name),
        ):
            np.testing.assert_array_equal(made.float().numpy(), np.array(values, np.float32))
    assert Tensor([10000, -500]).cast("float8_e4m3fn").float().tolist() == [448, -448]


def test_arithmetic_is_refused() -> None:
    x = Tensor([1.0, 2.0]).cast(dtypes.float8_e5m2)
    for wrong in (lambda: x + x, lambda: x * 2, lambda: x.exp(), lambda: x < x):
        with pytest.raises(
            TypeError, match=r"of float8_e5m2: float8 is for storage; cast with .float\(\) or .bfloat16\(\) first"
        ):
            wrong()
    with pytest.raises(TypeError, match="float8_e5m2 and float32 have no common type"):
        x + Tensor([1.0, 2.0])


def test_the_gradient_passes_through_the_cast() -> None:
    x = Tensor([1.0, 2.0, 3.0], requires_grad=True)
    (x.cast("float8_e4m3fn").float() * Tensor([1.0, 2.0, 3.0])).sum().backward()
    assert x.grad is not None and x.grad.tolist() == [1, 2, 3]
