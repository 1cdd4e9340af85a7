"""Layers with quantised weights, and `quantize`, which puts them in the place of a model's layers."""

from __future__ import annotations

from typing import Any, TypeVar

from manygrad.nn.embedding import Embedding
from manygrad.nn.linear import Linear
from manygrad.nn.module import Module
from manygrad.nn.parameter import Parameter
from manygrad.nn.quantized.blocks import NAMED
from manygrad.nn.quantized.encode import ENCODERS, encode
from manygrad.nn.quantized.weight import QuantizedWeight
from manygrad.tensor.tensor import Tensor

M = TypeVar("M")


class QuantizedLinear(Module):
    """y = x Wᵀ + b with a quantised W, which is not trained; gradients go to x and b."""

    def __init__(self, weight: QuantizedWeight, bias: Tensor | None = None):
        self.weight = weight
        self.bias = bias if bias is None or isinstance(bias, Parameter) else Parameter(bias)

    def forward(self, input: Tensor) -> Tensor:
        return self.weight.linear(input, self.bias)

    def extra_repr(self) -> str:
        rows, columns = self.weight.shape
        bias = self.bias is not None
        return f"in_features={columns}, out_features={rows}, bias={bias}, {self.weight.formats()}"


class QuantizedEmbedding(Module):
    """Rows of a quantised table by integer index."""

    def __init__(self, weight: QuantizedWeight):
        self.weight = weight

    def forward(self, input: Tensor) -> Tensor:
        return self.weight.rows(input)

    def extra_repr(self) -> str:
        rows, columns = self.weight.shape
        return f"{rows}, {columns}, {self.weight.formats()}"


def quantize(model: M, kind: str, activations: str = "float32") -> M:
    """Layers below `model`, `Linear` and `Embedding`, with weights in blocks of `kind`, in place; what it was given if
    that is no layer itself. `activations`: see `QuantizedWeight`.

    Layers whose rows are not whole blocks stay as they are, and so do an Embedding's with a padding row or a largest
    norm. A weight that two layers share stays shared. ValueError on a kind that cannot be made.
    """
    if kind not in ENCODERS:
        raise ValueError(f"nn.quantize: the kind {kind!r} cannot be made; these can: {', '.join(ENCODERS)}")
    return _quantized(model, kind, activations, {}, set())


def _quantized(x: Any, kind: str, activations: str, made: dict[int, QuantizedWeight], seen: set[int]) -> Any:
    if type(x) is Linear or (type(x) is Embedding and x.padding_idx is None and x.max_norm is None):
        if x.weight.shape[1] % NAMED[kind].size:
            return x
        weight = made.get(id(x.weight))
        if weight is None:
            weight = made[id(x.weight)] = QuantizedWeight(encode(x.weight, kind), kind, activations)
        return QuantizedLinear(weight, x.bias) if type(x) is Linear else QuantizedEmbedding(weight)
    if id(x) in seen or isinstance(x, (Tensor, QuantizedWeight)):
        return x
    seen.add(id(x))
    if isinstance(x, (list, dict)):
        for k, v in list(enumerate(x) if isinstance(x, list) else x.items()):
            x[k] = _quantized(v, kind, activations, made, seen)
    elif isinstance(x, tuple) and type(x) is tuple:
        return tuple(_quantized(v, kind, activations, made, seen) for v in x)
    elif isinstance(x, Module) or (hasattr(x, "__dict__") and not isinstance(x, type) and not callable(x)):
        for k, v in vars(x).items():
            if isinstance(v, (Module, list, dict, tuple)):
                setattr(x, k, _quantized(v, kind, activations, made, seen))
    return x
