"""Modules that hold the arguments of a function: the function is there and takes what they pass."""

from __future__ import annotations

import inspect
from typing import Any

import pytest

from manygrad import Tensor, nn
from manygrad.nn import functional as F
from manygrad.nn.held import REQUIRED, Held, HeldInTraining

GIVEN = {
    "kernel_size": 2,
    "output_size": 2,
    "norm_type": 2.0,
    "padding": 1,
    "value": 1.0,
    "threshold": 1.0,
    "size": 3,
    "upscale_factor": 2,
    "downscale_factor": 2,
    "groups": 2,
}
LAYERS = sorted((c for c in vars(nn).values() if isinstance(c, type) and issubclass(c, Held)), key=lambda c: c.__name__)
INPUTS = {
    "TripletMargin": 3,
    "Ranking": 3,
    "CosineEmbedding": 3,
    "GaussianNLL": 3,
    "CTC": 4,
    "Loss": 2,
    "Unpool": 2,
    "Cosine": 2,
    "Pairwise": 2,
}


@pytest.mark.parametrize("layer", LAYERS, ids=lambda c: c.__name__)
def test_the_function_takes_the_arguments(layer: Any) -> None:
    required = {k: GIVEN[k] for k, p in layer._signature.parameters.items() if p.default is REQUIRED}
    if "output_ratio" in layer._signature.parameters:  # (or output_size)
        required["output_ratio"] = 0.5
    module = layer(**required)
    function = getattr(F, module._function)
    count = next((n for k, n in INPUTS.items() if k in layer.__name__), 1)
    if "Unpool" not in layer.__name__:
        inspect.signature(function).bind(*[None] * count, **module._arguments())
    assert repr(module).startswith(f"{layer.__name__}(") and module.state_dict() == {} and layer.__doc__
    assert isinstance(module, HeldInTraining) == ("training" in inspect.signature(function).parameters)


def test_tensors_among_the_arguments_are_buffers() -> None:
    loss = nn.BCEWithLogitsLoss(pos_weight=Tensor([2.0]))
    assert list(loss.state_dict()) == ["pos_weight"] and isinstance(loss.pos_weight, nn.Buffer)  # type: ignore[attr-defined]
    loss.to(("CPU:0", "CPU:1"))
    assert loss.pos_weight.device == ("CPU:0", "CPU:1")  # type: ignore[attr-defined]
    want = F.binary_cross_entropy_with_logits(Tensor([0.5]), Tensor([1.0]), pos_weight=Tensor([2.0])).item()
    x, y = (Tensor([v]).to(("CPU:0", "CPU:1")) for v in (0.5, 1.0))
    assert loss(x, y).item() == pytest.approx(want)
