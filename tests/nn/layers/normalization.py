"""Normalisation, in training and after, with and without scale and statistics, and distances."""

from __future__ import annotations

from typing import Any

import numpy as np

from tests.nn.layers.layer import Layer, data
from tests.tensor.cases.normalization import (
    batch_norm,
    cosine,
    distance,
    frozen,
    group_norm,
    layer_norm,
    local,
    rms_norm,
    standardized,
)

AFFINE = ("weight", "bias")
TRACKED = ("running_mean", "running_var", "num_batches_tracked")
State = dict[str, np.ndarray]


def scaled(y: np.ndarray, w: State) -> np.ndarray:
    """y (N, C, ...) times the weight plus the bias, where there are any."""
    shape = (1, -1, *(1,) * (y.ndim - 2))
    return y * w["weight"].reshape(shape) + (w["bias"].reshape(shape) if "bias" in w else 0.0)


def by_batch(w: State, x: np.ndarray) -> np.ndarray:
    return batch_norm(x, w["weight"], w["bias"])


def by_tracked(w: State, x: np.ndarray) -> np.ndarray:
    return frozen(x, w["weight"], w["bias"], w["running_mean"], w["running_var"])


def each(x: np.ndarray, eps: float = 1e-5) -> np.ndarray:
    """Every channel of every sample by itself."""
    return standardized(x, tuple(range(2, x.ndim)), eps)


def batch(name: str, x: np.ndarray) -> list[Layer]:
    c = x.shape[1]
    plain = lambda a: batch_norm(a, np.ones(c), np.zeros(c))  # noqa: E731
    return [
        Layer(name, (x,), by_batch, (c,), keys=AFFINE + TRACKED, training=True, variant="training"),
        Layer(name, (x,), by_tracked, (c,), keys=AFFINE + TRACKED),
        Layer(name, (x,), plain, (c,), {"affine": False, "track_running_stats": False}, variant="by the batch only"),
    ]


def instance(name: str, x: np.ndarray) -> list[Layer]:
    c = x.shape[1]
    return [
        Layer(name, (x,), each, (c,)),
        Layer(
            name,
            (x[0],),
            lambda w, a: scaled(each(a[None], 1e-2), w)[0],
            (c,),
            {"affine": True, "eps": 1e-2},
            keys=AFFINE,
            variant="no batch",
        ),
        Layer(
            name,
            (x,),
            lambda w, a: scaled(each(a), w),
            (c,),
            {"affine": True, "track_running_stats": True},
            keys=AFFINE + TRACKED,
            training=True,
            variant="training",
        ),
        Layer(name, (x,), by_tracked, (c, 1e-5, 0.1, True, True), keys=AFFINE + TRACKED, variant="tracked"),
    ]


def rms(w: State, x: np.ndarray, eps: float = 1e-5) -> np.ndarray:
    return (
        rms_norm(x, w["weight"], x, w["weight"].shape)
        if eps == 1e-5
        else x / np.sqrt((x * x).mean(-1, keepdims=True) + eps) * w["weight"]
    )


def f(name: str, x: Any, oracle: Any, *args: Any, **options: Any) -> Layer:
    return Layer(name, x if isinstance(x, tuple) else (x,), oracle, args, **options)


LAYERS = [
    *batch("BatchNorm", data(3, 2, 3, 1, 2)), *batch("BatchNorm1d", data(5, 2)),
    *batch("BatchNorm2d", data(3, 2, 2, 2)), *batch("BatchNorm3d", data(3, 2, 2, 1, 2)),
    *batch("SyncBatchNorm", data(3, 2, 4)),
    Layer("BatchNorm1d", (data(3, 2, 3),), by_batch, (2,), keys=AFFINE + TRACKED, training=True,
          variant="of (N, C, L)"),
    *instance("InstanceNorm1d", data(3, 2, 4)), *instance("InstanceNorm2d", data(3, 2, 2, 3)),
    *instance("InstanceNorm3d", data(3, 2, 2, 2, 1)),
    f("LayerNorm", data(3, 4), lambda w, x: layer_norm(x, w["weight"], w["bias"], (4,)), 4, keys=AFFINE),
    f("LayerNorm", data(3, 2, 4), lambda w, x: layer_norm(x, w["weight"], np.zeros(()), (2, 4)), (2, 4),
      kwargs={"bias": False}, keys=("weight",), variant="no bias"),
    f("RMSNorm", data(3, 2, 4), rms, (2, 4), 1e-5, keys=("weight",)),
    f("RMSNorm", data(3, 4), lambda w, x: rms(w, x, float(np.finfo(np.float64).eps)), 4, keys=("weight",),
      variant="eps of the type"),
    f("RMSNorm", data(3, 4), lambda x: x / np.sqrt((x * x).mean(-1, keepdims=True) + 0.1), 4, 0.1, False,
      variant="plain"),
    f("GroupNorm", data(3, 4, 3), lambda w, x: group_norm(x, w["weight"], w["bias"], 2), 2, 4, keys=AFFINE),
    f("GroupNorm", data(3, 4, 1, 2), lambda x: group_norm(x, np.ones(4), np.zeros(4), 4), 4, 4,
      kwargs={"affine": False}, variant="plain"),
    f("LocalResponseNorm", data(3, 4, 2), lambda x: local(x, 3, 0.1, 0.75, 1.0), 3, 0.1),
    f("LocalResponseNorm", data(3, 4, 2), lambda x: local(x, 2, 0.3, 0.5, 2.0), 2, 0.3, 0.5, 2.0, variant="2"),
    f("CrossMapLRN2d", data(3, 4, 2, 1), lambda x: local(x, 3, 0.1, 0.75, 1.0), 3, 0.1),
    f("CrossMapLRN2d", data(3, 4, 1, 2), lambda x: local(x, 5, 0.3, 0.5, 2.0), 5, 0.3, 0.5, 2.0, variant="5"),
    f("CosineSimilarity", (data(3, 4), data(3, 4, seed=1)), lambda x, y: cosine(x, y, 1)),
    f("CosineSimilarity", (data(3, 4), data(3, 4, seed=1)), lambda x, y: cosine(x, y, 0), 0, 1e-6, variant="0"),
    f("PairwiseDistance", (data(3, 4), data(3, 4, seed=1)), lambda x, y: distance(x, y, 2)),
    f("PairwiseDistance", (data(3, 4), data(3, 4, seed=1)), lambda x, y: distance(x, y, 3.0)[:, None], 3.0, 1e-6, True,
      variant="3"),
]  # fmt: skip
