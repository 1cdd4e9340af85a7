"""Every layer (tests/nn/layers/): forward against NumPy, backward to each parameter and input against
differences, sharded unevenly; state_dict keys and repr; and no layer of manygrad.nn without a row or a test of its
own."""

from __future__ import annotations

import importlib
import pkgutil
from typing import Any

import numpy as np
import pytest

import tests.nn.layers
from manygrad import Context, Tensor, nn
from manygrad.nn.held import Held
from tests.nn.layers.layer import Layer

LAYERS: list[Layer] = [
    layer
    for module in pkgutil.iter_modules(tests.nn.layers.__path__)
    for layer in getattr(importlib.import_module(f"tests.nn.layers.{module.name}"), "LAYERS", [])
]
EVERY = pytest.mark.parametrize("layer", LAYERS, ids=lambda c: c.id)
# test_random_layers.py
RANDOM = {"Dropout", "Dropout1d", "Dropout2d", "Dropout3d", "AlphaDropout", "FeatureAlphaDropout"}
CHANGING = {name for name in nn.__all__ if name.startswith("Lazy")}  # test_lazy.py
QUANTIZED = {"QuantizedWeight", "QuantizedLinear", "QuantizedEmbedding"}  # test_quantized.py
# a container, a base class, or a stack of layers: test_module.py, test_recurrent.py, test_attention.py,
# test_transformer.py
WHOLE = {
    "Module", "ModuleDict", "ModuleList", "ParameterDict", "ParameterList", "Sequential", "RNN", "LSTM", "GRU",
    "RNNBase", "RNNCellBase", "MultiheadAttention", "Transformer", "TransformerEncoder", "TransformerEncoderLayer",
    "TransformerDecoder",
}  # fmt: skip


def test_no_layer_is_forgotten() -> None:
    kinds = {k: v for k, v in vars(nn).items() if isinstance(v, type) and issubclass(v, nn.Module)}
    tabled = {layer.name for layer in LAYERS}
    assert set(kinds) - tabled - RANDOM - CHANGING - QUANTIZED - WHOLE == set()
    assert {k for k, v in kinds.items() if issubclass(v, Held)} - tabled == RANDOM
    assert len({layer.id for layer in LAYERS}) == len(LAYERS)


@EVERY
@pytest.mark.parametrize("kind", ["bfloat16", "float16"])
def test_half_types_have_values_and_gradients_in_their_type(layer: Layer, kind: str) -> None:
    with Context(DEVICE="PYTHON"):
        module = layer.make().to(dtype=kind)
        floats = [a.dtype.kind == "f" for a in layer.inputs]
        given = [
            Tensor(a, dtype=kind if f else None, requires_grad=f and i not in layer.fixed)
            for i, (a, f) in enumerate(zip(layer.inputs, floats))
        ]
        results = [t for t in layer.run(module, given) if t.dtype.is_float]
        sum((t.float() * t.float()).sum() for t in results).backward()
        for t in (*module.parameters(), *(t for t in given if t.requires_grad)):
            assert t.dtype.name == kind and (t.grad is None or (t.grad.dtype is t.dtype and t.grad.shape == t.shape))
        assert all(t.dtype.name == kind for t in results)


@EVERY
@pytest.mark.parametrize("sharded", [False, True], ids=["one device", "sharded"])
def test_values_and_gradients(layer: Layer, sharded: bool) -> None:
    with Context(DEVICE="PYTHON"):
        module = layer.make()
        state = {k: t.numpy() for k, t in module.state_dict().items()}
        tensors = [
            Tensor(a, requires_grad=a.dtype.kind == "f" and i not in layer.fixed) for i, a in enumerate(layer.inputs)
        ]
        given = tensors
        if sharded:
            names = tuple(f"PYTHON:{i}" for i in range(2 if layer.inputs[0].shape[0] % 2 else 3))
            module.to(names)
            given = [t.shard(names, axis) for t, axis in zip(tensors, layer.axes or (0,) * len(tensors))]
        want = layer.expected(state, layer.inputs)
        results = layer.run(module, given)
        weights = [np.random.default_rng(i).uniform(0.5, 1.5, np.shape(w)) for i, w in enumerate(want)]
        assert len(results) == len(want)
        smooth = [(r, w) for r, w in zip(results, weights) if r.dtype.is_float]
        trained = dict(module.named_parameters()) | {i: t for i, t in enumerate(tensors) if t.requires_grad}  # type: ignore[operator]
        sum(
            ((r * Tensor(w, device=r.device)).sum() for r, w in smooth),
            Tensor(0.0, dtype="float64", device=results[0].device),
        ).backward()
        grads = {k: t.grad for k, t in trained.items()}
        assert all(g is not None for g in grads.values()), [k for k, g in grads.items() if g is None]
        results[0].realize(*results[1:], *grads.values())  # type: ignore[arg-type]
        for r, w in zip(results, want):
            assert r.shape == np.shape(w)
            np.testing.assert_allclose(r.numpy(), w, rtol=1e-9, atol=1e-9)
        for k, g in grads.items():
            assert g is not None and g.shape == trained[k].shape
            slopes(layer, state, k, weights, g.numpy())


def slopes(
    layer: Layer,
    state: dict[str, np.ndarray],
    which: str | int,
    weights: list[np.ndarray],
    grad: np.ndarray,
    h: float = 1e-6,
) -> None:
    """A few elements of d(sum(results · weights)) / d(a parameter or an input) against central differences."""

    def moved(at: Any, by: float) -> float:
        s, x = dict(state), list(layer.inputs)
        place: Any = s if isinstance(which, str) else x
        place[which] = place[which].copy()
        place[which][at] += by
        return float(
            sum((r * w).sum() for r, w in zip(layer.expected(s, x), weights) if np.asarray(r).dtype.kind == "f")
        )

    assert np.isfinite(grad).all()
    rng = np.random.default_rng(0)
    for flat in rng.choice(grad.size, min(4, grad.size), replace=False):
        at = np.unravel_index(flat, grad.shape)
        np.testing.assert_allclose(
            grad[at],
            (moved(at, h) - moved(at, -h)) / (2 * h),
            rtol=1e-5,
            atol=1e-5,
            err_msg=f"d / d {which}{list(map(int, at))}",
        )


@EVERY
def test_names(layer: Layer) -> None:
    with Context(DEVICE="PYTHON"):
        module = layer.make()
    assert (
        tuple(module.state_dict()) == layer.keys
        and repr(module).startswith(f"{type(module).__name__}(")
        and type(module) is getattr(nn, layer.name)
    )
