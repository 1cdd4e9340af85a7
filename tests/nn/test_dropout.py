"""What dropout leaves to chance: how much it drops, what it keeps, whole channels, and the same at any sharding."""

from __future__ import annotations

import numpy as np
import pytest

from manygrad import Tensor, nn
from manygrad.nn import functional as F

X = np.random.default_rng(0).standard_normal((40, 50, 6)).astype(np.float32)


def test_elements() -> None:
    got = F.dropout(Tensor(X), 0.3).numpy()
    assert np.mean(got == 0) == pytest.approx(0.3, abs=0.02)
    np.testing.assert_allclose(got[got != 0], (X / 0.7)[got != 0], rtol=1e-6)


@pytest.mark.parametrize("layer, dims", [(nn.Dropout1d, 1), (nn.Dropout2d, 2), (nn.Dropout3d, 3)])
def test_whole_channels(layer: type[nn.Module], dims: int) -> None:
    x = Tensor.ones(40, 50, *(2,) * dims)
    got = layer(0.25)(x).numpy().reshape(40, 50, -1)  # type: ignore[call-arg]
    assert (
        set(np.unique(got)) == {0.0, np.float32(1 / 0.75)}
        and (got == got[..., :1]).all()
        and np.mean(got == 0) == pytest.approx(0.25, abs=0.05)
    )
    assert layer(0.25).eval()(x) is x  # type: ignore[call-arg]
    assert layer(0.5)(x[0]).shape == x.shape[1:]  # type: ignore[call-arg]
    with pytest.raises(ValueError, match="needs"):
        layer(0.5)(Tensor.ones(3))  # type: ignore[call-arg]


@pytest.mark.parametrize("drop", [F.alpha_dropout, F.feature_alpha_dropout])
def test_alpha_dropout_keeps_mean_and_variance(drop) -> None:  # type: ignore[no-untyped-def]
    x = Tensor(np.random.default_rng(1).standard_normal((300, 200, 2)).astype(np.float32))
    got = drop(x, 0.2, training=True).numpy()
    assert got.mean() == pytest.approx(0, abs=0.03) and got.var() == pytest.approx(1, abs=0.05)
    assert drop(x, 0.2) is x


def test_the_mask_does_not_depend_on_the_sharding_and_the_gradient_follows_it() -> None:
    masks = []
    for n in (1, 2, 3):
        devices = tuple(f"CPU:{i}" for i in range(n))
        Tensor.manual_seed(4)
        x = nn.Parameter(Tensor(X)).shard_(devices, 0)
        out = F.dropout(x, 0.5)
        out.sum().backward()
        assert x.grad is not None
        np.testing.assert_array_equal(x.grad.numpy() == 0, out.numpy() == 0)
        masks.append(out.numpy() == 0)
    np.testing.assert_array_equal(masks[0], masks[1])
    np.testing.assert_array_equal(masks[0], masks[2])
