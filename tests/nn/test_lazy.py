"""Lazy layers: what they are before the first call, that they become the ordinary layer then,
and what reaches them before."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from manygrad import Context, Tensor, nn
from tests.nn.layers.layer import data
from tests.tensor.cases.convolution import conv, conv_transpose

# the layer, what it becomes, its constructor's arguments, the first input, the weight's shape then
LAYERS: list[tuple[Any, Any, tuple[Any, ...], np.ndarray, tuple[int, ...]]] = [
    (nn.LazyLinear, nn.Linear, (4,), data(3, 2, 5), (4, 5)),
    (nn.LazyConv1d, nn.Conv1d, (4, 2), data(3, 2, 4), (4, 2, 2)),
    (nn.LazyConv2d, nn.Conv2d, (4, (2, 1), 1, 0, 1, 2), data(3, 2, 2, 3), (4, 1, 2, 1)),
    (nn.LazyConv3d, nn.Conv3d, (1, 2), data(3, 2, 2, 2, 3), (1, 2, 2, 2, 2)),
    (nn.LazyConvTranspose1d, nn.ConvTranspose1d, (3, 2), data(3, 2, 4), (2, 3, 2)),
    (nn.LazyConvTranspose2d, nn.ConvTranspose2d, (4, (2, 1), 2, 0, 0, 2), data(3, 2, 2, 3), (2, 2, 2, 1)),
    (nn.LazyConvTranspose3d, nn.ConvTranspose3d, (1, 2), data(3, 2, 2, 1, 2), (2, 1, 2, 2, 2)),
    (nn.LazyBatchNorm1d, nn.BatchNorm1d, (1e-3,), data(3, 2, 2), (2,)),
    (nn.LazyBatchNorm2d, nn.BatchNorm2d, (), data(3, 2, 2, 1), (2,)),
    (nn.LazyBatchNorm3d, nn.BatchNorm3d, (), data(3, 2, 1, 2, 2), (2,)),
    (nn.LazyInstanceNorm1d, nn.InstanceNorm1d, (), data(2, 4), (2,)),
    (nn.LazyInstanceNorm2d, nn.InstanceNorm2d, (), data(3, 2, 2, 2), (2,)),
    (nn.LazyInstanceNorm3d, nn.InstanceNorm3d, (), data(3, 2, 1, 2, 2), (2,)),
]
NORM = ["weight", "bias", "running_mean", "running_var", "num_batches_tracked"]
EVERY = pytest.mark.parametrize(
    "lazy, whole, args, x, shape", LAYERS, ids=lambda v: v.__name__ if isinstance(v, type) else ""
)


@EVERY
def test_the_first_call_makes_the_layer(lazy: Any, whole: Any, args: Any, x: np.ndarray, shape: Any) -> None:
    with Context(DEVICE="PYTHON"):
        layer = lazy(*args).double()
        assert (
            list(layer.parameters()) == []
            and layer.has_uninitialized_params()
            and repr(layer).startswith(f"{lazy.__name__}(")
        )
        assert isinstance(layer.weight, nn.UninitializedParameter) and "without a shape" in repr(layer.weight)
        out = layer(Tensor(x))
        assert (
            type(layer) is whole
            and isinstance(layer.weight, nn.Parameter)
            and layer.weight.shape == shape
            and repr(layer).startswith(f"{whole.__name__}(")
        )
        assert list(layer.state_dict()) == (NORM if "Norm" in whole.__name__ else ["weight", "bias"])
        other = whole(
            layer.weight.shape[1] if whole is nn.Linear else 2,
            *args,
            **({"affine": True, "track_running_stats": True} if "Instance" in whole.__name__ else {}),
        ).double()
        other.load_state_dict(
            {
                k: t if "running" not in k and "num" not in k else o
                for (k, t), o in zip(layer.state_dict().items(), other.state_dict().values())
            }
        )
        np.testing.assert_allclose(out.numpy(), other(Tensor(x)).numpy(), rtol=1e-12)
        out.square().sum().backward()
        assert all(p.grad is not None and np.isfinite(p.grad.numpy()).all() for p in layer.parameters())


@EVERY
def test_state_can_be_loaded_before_the_first_call(lazy: Any, whole: Any, args: Any, x: np.ndarray, shape: Any) -> None:
    with Context(DEVICE="PYTHON"):
        first, layer = nn.Sequential(lazy(*args)), nn.Sequential(lazy(*args))
        first.double().eval()(Tensor(x))
        layer.double().eval().load_state_dict(first.state_dict())
        assert type(layer[0]) is whole and layer[0].weight.dtype.np == x.dtype and not layer[0].training
        np.testing.assert_array_equal(layer(Tensor(x)).numpy(), first(Tensor(x)).numpy())


def test_the_values_are_those_of_the_formulas() -> None:
    with Context(DEVICE="PYTHON"):
        for layer, f, x in (
            (nn.LazyConv2d(2, 2, stride=2), conv, data(3, 2, 4, 3)),
            (nn.LazyConvTranspose2d(2, 2, stride=2), conv_transpose, data(3, 2, 2, 1)),
        ):
            got = layer.double()(Tensor(x))
            np.testing.assert_allclose(
                got.numpy(), f(x, layer.weight.numpy(), layer.bias.numpy(), stride=2), rtol=1e-10
            )


def test_what_is_done_before_the_first_call_holds_after_it() -> None:
    """Type, devices, mode and hooks; a shared copy stays lazy by itself."""
    names, calls = ("PYTHON:0", "PYTHON:1"), []
    with Context(DEVICE="PYTHON"):
        net = nn.Sequential(nn.LazyLinear(2), nn.LazyBatchNorm1d()).double().to(names).eval()
        net[0].register_forward_hook(lambda *_: calls.append(1))
        x = data(3, 4)
        out = net(Tensor(x).shard(names, 0))
        assert (
            net[0].weight.device == names
            and net[1].running_mean.device == names
            and not net[1].training
            and calls == [1]
        )
        np.testing.assert_allclose(
            out.numpy(), (x @ net[0].weight.numpy().T + net[0].bias.numpy()) / np.sqrt(1 + 1e-5), rtol=1e-10
        )


def test_errors_and_places_without_a_shape() -> None:
    with pytest.raises(ValueError, match="has too few dims"):
        nn.LazyConv2d(3, 2)(Tensor.zeros(4, 5))
    with pytest.raises(ValueError, match="BatchNorm2d takes 4 dims"):
        nn.LazyBatchNorm2d()(Tensor.zeros(4, 5))
    assert issubclass(nn.UninitializedBuffer, nn.UninitializedParameter) and not isinstance(
        nn.UninitializedBuffer(), Tensor
    )
