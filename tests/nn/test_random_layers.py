"""Layers with chance in them: dropout in its forms, RReLU, FractionalMaxPool. What is always true of them."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from manygrad import Tensor, nn
from tests.nn.layers.layer import distinct

X = np.random.default_rng(0).standard_normal((300, 20, 4)).astype(np.float32)
CHANNELS = {
    nn.Dropout1d: (60, 20, 4),
    nn.Dropout2d: (60, 20, 2, 2),
    nn.Dropout3d: (60, 20, 1, 2, 2),
    nn.FeatureAlphaDropout: (60, 20, 4),
}


@pytest.mark.parametrize("kind", [nn.Dropout, nn.AlphaDropout, *CHANNELS], ids=lambda k: k.__name__)
def test_dropout(kind: Any) -> None:
    """Off after training and at p = 0; at p it drops that share, whole channels where it says so;
    the gradient is where the values are."""
    x = Tensor(X[:60].reshape(CHANNELS.get(kind, X[:60].shape)), requires_grad=True)
    layer = kind(0.3)
    assert repr(layer) == f"{kind.__name__}(p=0.3, inplace=False)" and layer.state_dict() == {} and kind().p == 0.5
    assert layer.eval()(x) is x
    np.testing.assert_array_equal(kind(0.0)(x).numpy(), x.numpy())
    out = layer.train()(x)
    out.sum().backward()
    assert x.grad is not None
    out.realize(x.grad)
    dropped = x.grad.numpy() == 0
    if kind in CHANNELS:
        whole = dropped.reshape(60, 20, -1)
        assert (whole == whole[..., :1]).all()
    assert np.mean(dropped) == pytest.approx(0.3, abs=0.04)
    assert len(np.unique(out.numpy()[dropped])) == 1 and (out.numpy()[dropped][0] == 0) == (
        "Alpha" not in kind.__name__
    )
    assert not np.array_equal(layer(x).numpy(), out.numpy())  # another mask at each call
    with pytest.raises(ValueError, match=rf"{kind.__name__}: the probability must lie in \[0, 1\], got 1.5"):
        kind(1.5)


@pytest.mark.parametrize("kind", [nn.AlphaDropout, nn.FeatureAlphaDropout])
def test_alpha_dropout_keeps_mean_and_variance(kind: Any) -> None:
    got = kind(0.2)(Tensor(X)).numpy()
    assert got.mean() == pytest.approx(0, abs=0.05) and got.var() == pytest.approx(1, abs=0.06)


def test_rrelu_draws_a_slope_for_each_element_in_training() -> None:
    layer, x = nn.RReLU(0.1, 0.4), Tensor(X, requires_grad=True)
    out = layer(x)
    out.sum().backward()
    assert x.grad is not None
    out.realize(x.grad)
    slope = out.numpy()[X < 0] / X[X < 0]
    assert (out.numpy()[X >= 0] == X[X >= 0]).all() and slope.min() >= 0.1 - 1e-6 and slope.max() <= 0.4 + 1e-6
    assert slope.mean() == pytest.approx(0.25, abs=0.01) and slope.std() == pytest.approx(0.3 / np.sqrt(12), abs=0.01)
    np.testing.assert_allclose(x.grad.numpy()[X < 0], slope, rtol=1e-5)
    np.testing.assert_allclose(layer.eval()(x).numpy(), np.where(X > 0, X, 0.25 * X), rtol=1e-6)


@pytest.mark.parametrize(
    "kind, spatial",
    [(nn.FractionalMaxPool2d, (9, 7)), (nn.FractionalMaxPool3d, (6, 5, 7))],
    ids=lambda v: getattr(v, "__name__", ""),
)
def test_fractional_pooling(kind: Any, spatial: tuple[int, ...]) -> None:
    """Every output is an input, at the index it says; outputs along a dim do not go back;
    the last window ends at the border."""
    x = distinct(2, 2, *spatial)
    values, indices = (t.numpy() for t in kind(2, output_ratio=0.6, return_indices=True)(Tensor(x)))
    assert values.shape == (2, 2, *(int(s * 0.6) for s in spatial))
    np.testing.assert_array_equal(
        np.take_along_axis(x.reshape(2, 2, -1), indices.reshape(2, 2, -1), -1).reshape(values.shape), values
    )
    rows = indices // int(np.prod(spatial[1:]))
    assert (np.diff(rows, axis=2) >= 0 - 1).all() and rows[:, :, -1].min() >= spatial[0] - 2
    assert (
        kind(2, (1,) * len(spatial))(Tensor(x)).numpy().reshape(2, 2)
        == x[(..., *(slice(s - 2, s) for s in spatial))].reshape(2, 2, -1).max(-1)
    ).all()
    with pytest.raises(ValueError, match="give output_size or output_ratio"):
        kind(2)(Tensor(x))
