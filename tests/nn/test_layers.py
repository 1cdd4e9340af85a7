"""Layers against NumPy: values, initialisation, gradients reaching every parameter."""

from __future__ import annotations

import math

import numpy as np
import pytest

from manygrad import Tensor, nn
from manygrad.nn.state import get_parameters
from tests.tensor.oracle import check, numbers

RNG = np.random.default_rng(0)


def test_linear() -> None:
    x, layer = numbers(RNG, "float32", (5, 3)), nn.Linear(3, 4)
    assert layer.weight.shape == (4, 3) and layer.bias is not None
    check(layer(Tensor(x)), x @ layer.weight.numpy().T + layer.bias.numpy(), rtol=1e-5)
    check(nn.Linear(3, 4, bias=False)(Tensor(np.zeros((2, 3), np.float32))), np.zeros((2, 4), np.float32))


@pytest.mark.parametrize(
    "layer, fan", [(nn.Linear(400, 90), 400), (nn.Conv2d(8, 60, 5), 200), (nn.Conv2d(8, 60, 5, groups=4), 50)]
)
def test_initialisation_is_that_of_pytorch(layer: nn.Linear | nn.Conv2d, fan: int) -> None:
    """Uniform in ±1/√fan_in, weight and bias (torch's kaiming_uniform with a = √5)."""
    for t in get_parameters(layer):
        a, bound = t.numpy(), 1 / math.sqrt(fan)
        assert np.abs(a).max() <= bound and np.abs(a).max() > 0.9 * bound
        assert abs(a.mean()) < 6 * bound / math.sqrt(3 * a.size) and t.requires_grad


def test_conv2d() -> None:
    layer = nn.Conv2d(4, 6, (3, 2), stride=2, padding=1, dilation=1, groups=2)
    x = Tensor(numbers(RNG, "float32", (2, 4, 7, 8)))
    assert layer.weight.shape == (6, 2, 3, 2)
    np.testing.assert_array_equal(layer(x).numpy(), x.conv2d(layer.weight, layer.bias, 2, 1, 1, 2).numpy())
    assert nn.Conv2d(4, 6, 3, bias=False).bias is None


def test_layer_norm() -> None:
    x = numbers(RNG, "float64", (3, 4, 5))
    layer = nn.LayerNorm((4, 5), eps=1e-3)
    want = (x - x.mean((1, 2), keepdims=True)) / np.sqrt(x.var((1, 2), keepdims=True) + 1e-3)
    check(layer(Tensor(x)), want, rtol=1e-6)
    assert nn.LayerNorm(5, elementwise_affine=False).weight is None and layer.weight.shape == (4, 5)  # type: ignore[union-attr]


def test_embedding_gathers_rows_and_scatters_their_gradient() -> None:
    layer = nn.Embedding(7, 3)
    i = np.array([[1, 1, 6], [0, 1, 2]])
    out = layer(Tensor(i))
    check(out, layer.weight.numpy()[i])
    g = numbers(RNG, "float32", (2, 3, 3))
    (out * Tensor(g)).sum().backward()
    want = np.zeros((7, 3), np.float32)
    np.add.at(want, i, g)
    check(layer.weight.grad, want, rtol=1e-6)  # type: ignore[arg-type]


def test_batch_norm_trains_on_the_batch_and_then_uses_what_it_tracked() -> None:
    layer = nn.BatchNorm(3, eps=1e-4, momentum=0.2)
    mean, var = np.zeros(3), np.ones(3)
    layer.weight.assign(Tensor([1.0, 2.0, 0.5]))  # type: ignore[union-attr]
    layer.bias.assign(Tensor([0.0, -1.0, 1.0]))  # type: ignore[union-attr]
    w, b = np.array([1, 2, 0.5]).reshape(1, 3, 1, 1), np.array([0, -1, 1]).reshape(1, 3, 1, 1)
    for _ in range(3):
        x = numbers(RNG, "float64", (4, 3, 2, 5))
        with Tensor.train():
            got = layer(Tensor(x.astype(np.float32)))
        m, v = x.mean((0, 2, 3)), x.var((0, 2, 3))
        check(
            got,
            ((x - m.reshape(1, 3, 1, 1)) / np.sqrt(v.reshape(1, 3, 1, 1) + 1e-4) * w + b).astype(np.float32),
            rtol=1e-5,
        )
        mean, var = mean * 0.8 + m * 0.2, var * 0.8 + v * 0.2 * 40 / 39
    check(layer.running_mean, mean.astype(np.float32), rtol=1e-5)
    check(layer.running_var, var.astype(np.float32), rtol=1e-5)
    x = numbers(RNG, "float64", (2, 3, 4, 4))
    want = (x - mean.reshape(1, 3, 1, 1)) / np.sqrt(var.reshape(1, 3, 1, 1) + 1e-4) * w + b
    check(layer.eval()(Tensor(x.astype(np.float32))), want.astype(np.float32), rtol=1e-5)
    check(layer.running_mean, mean.astype(np.float32), rtol=1e-5)  # untouched outside training


def test_batch_norm_without_tracking_or_affine() -> None:
    layer = nn.BatchNorm(2, affine=False, track_running_stats=False)
    x = numbers(RNG, "float64", (6, 2))
    check(layer(Tensor(x)), (x - x.mean(0)) / np.sqrt(x.var(0) + 1e-5), rtol=1e-6)
    assert get_parameters(layer) == []


def test_every_parameter_gets_a_gradient() -> None:
    layers = [
        nn.Conv2d(1, 4, 3),
        nn.BatchNorm(4),
        lambda t: t.relu().max_pool2d(2).flatten(1),
        nn.Linear(36, 8),
        nn.LayerNorm(8),
        nn.Linear(8, 3),
    ]
    with Tensor.train():
        loss = Tensor(numbers(RNG, "float32", (5, 1, 8, 8))).sequential(layers).cross_entropy(Tensor([0, 1, 2, 0, 1]))
        loss.backward()
    params = [p for p in get_parameters(layers) if p.requires_grad]
    assert len(params) == 10
    for p in params:
        assert (p.grad is not None and p.grad.shape == p.shape and np.abs(p.grad.numpy()).max() > 0) or p.shape == (4,)
