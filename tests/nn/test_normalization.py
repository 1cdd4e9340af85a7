"""Running statistics of batch and instance normalisation: what training tracks, on one device and sharded unevenly,
and how it is used."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from manygrad import Context, GlobalCounters, Tensor, nn
from tests.nn.layers.layer import data

SHAPES: dict[Any, tuple[int, ...]] = {
    nn.BatchNorm1d: (5, 2),
    nn.BatchNorm2d: (3, 2, 2, 1),
    nn.BatchNorm3d: (3, 2, 1, 2, 2),
    nn.SyncBatchNorm: (3, 2, 3),
}
BY_SAMPLE: dict[Any, tuple[int, ...]] = {
    nn.InstanceNorm1d: (3, 2, 4),
    nn.InstanceNorm2d: (3, 2, 2, 2),
    nn.InstanceNorm3d: (3, 2, 1, 2, 2),
}
KINDS = pytest.mark.parametrize("kind", [*SHAPES, *BY_SAMPLE], ids=lambda k: k.__name__)


def statistics(kind: Any, x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Mean and unbiased variance of each channel: of the batch, or the average of the samples' own."""
    if kind in SHAPES:
        axes = tuple(i for i in range(x.ndim) if i != 1)
        return x.mean(axes), x.var(axes, ddof=1)
    axes = tuple(range(2, x.ndim))
    return x.mean(axes).mean(0), x.var(axes, ddof=1).mean(0)


@KINDS
@pytest.mark.parametrize("devices", [1, 2, 3])
def test_training_tracks(kind: Any, devices: int) -> None:
    names = tuple(f"PYTHON:{i}" for i in range(devices))
    shape = (SHAPES | BY_SAMPLE)[kind]
    mean, var = np.zeros(2), np.ones(2)
    with Context(DEVICE="PYTHON"):
        layer = kind(2, momentum=0.3, track_running_stats=True).double().to(names if devices > 1 else names[0])
        for step in range(2):
            x = data(*shape, seed=step)
            layer(Tensor(x) if devices == 1 else Tensor(x).shard(names, 0))
            m, v = statistics(kind, x)
            mean, var = 0.7 * mean + 0.3 * m, 0.7 * var + 0.3 * v
        np.testing.assert_allclose(layer.running_mean.numpy(), mean, rtol=1e-10)
        np.testing.assert_allclose(layer.running_var.numpy(), var, rtol=1e-10)
        assert layer.num_batches_tracked.item() == (2 if kind in SHAPES else 0)  # as in PyTorch
        got = layer.eval()(Tensor(x) if devices == 1 else Tensor(x).shard(names, 0))
        wide = (1, 2, *(1,) * (x.ndim - 2))
        y = (x - mean.reshape(wide)) / np.sqrt(var.reshape(wide) + 1e-5)
        np.testing.assert_allclose(got.numpy(), y, rtol=1e-10)
        np.testing.assert_allclose(layer.running_mean.numpy(), mean, rtol=1e-10)  # untouched
        layer.reset_running_stats()
        assert (
            layer.running_mean.tolist() == [0, 0]
            and layer.running_var.tolist() == [1, 1]
            and layer.num_batches_tracked.item() == 0
        )


@pytest.mark.parametrize("devices", [1, 2])
def test_the_first_batch_is_computed_once(devices: int) -> None:
    """Layers make memory for what they track without running those before them."""
    net = nn.Sequential(*(layer for _ in range(4) for layer in (nn.Conv2d(2, 2, 1), nn.BatchNorm2d(2))))
    for t in net.state_dict().values():
        t.realize()
        if devices > 1:
            t.shard_(tuple(f"CPU:{i}" for i in range(devices)))
    x = Tensor(np.ones((4, 2, 3, 3), np.float32)).realize()
    count = GlobalCounters.kernel_count
    out = net.train()(x.shard(tuple(f"CPU:{i}" for i in range(devices)), 0) if devices > 1 else x)
    stored = GlobalCounters.kernel_count - count
    assert stored <= 4 * 3 * devices
    out.realize()
    first = GlobalCounters.kernel_count - count - stored
    net(x.shard(tuple(f"CPU:{i}" for i in range(devices)), 0) if devices > 1 else x).realize()
    assert GlobalCounters.kernel_count - count - stored - first == first
    assert all(int(b.num_batches_tracked.item()) == 2 for b in net.modules() if isinstance(b, nn.BatchNorm2d))


def test_without_momentum_all_batches_count_the_same() -> None:
    with Context(DEVICE="PYTHON"):
        layer, means, variances = nn.BatchNorm1d(2, momentum=None).double(), [], []
        for step in range(3):
            x = data(4, 2, seed=step)
            layer(Tensor(x))
            m, v = statistics(nn.BatchNorm1d, x)
            means.append(m), variances.append(v)
        np.testing.assert_allclose(layer.running_mean.numpy(), np.mean(means, 0), rtol=1e-6)
        np.testing.assert_allclose(layer.running_var.numpy(), np.mean(variances, 0), rtol=1e-6)


def test_parameters_can_be_reset_and_nothing_is_to_convert() -> None:
    with Context(DEVICE="PYTHON"):
        layer = nn.BatchNorm2d(2)
        layer.weight.assign(Tensor([3.0, 4.0]))  # type: ignore[union-attr]
        layer.reset_parameters()
        assert layer.weight.tolist() == [1, 1] and layer.bias.tolist() == [0, 0]  # type: ignore[union-attr]
        net = nn.Sequential(layer)
        assert nn.SyncBatchNorm.convert_sync_batchnorm(net) is net


def test_errors() -> None:
    for kind, shape, said in (
        (nn.BatchNorm1d, (2, 3, 4, 5), "takes 2 or 3 dims"),
        (nn.BatchNorm3d, (2, 3, 4, 5), "takes 5 dims"),
        (nn.InstanceNorm2d, (2, 3), "takes 3 or 4 dims"),
    ):
        with pytest.raises(ValueError, match=said):
            kind(3)(Tensor.zeros(*shape))
    with pytest.raises(ValueError, match="BatchNorm2d of 4 features got"):
        nn.BatchNorm2d(4)(Tensor.zeros(2, 3, 4, 5))
    with pytest.raises(ValueError, match="num_channels 5 must be a multiple of num_groups 2"):
        nn.GroupNorm(2, 5)
