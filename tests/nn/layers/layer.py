"""A `Layer` says once how a module is made and called, what NumPy makes of the same input,
and the names of what it holds.

`tests/nn/test_every_layer.py` runs every one forward, backward, and sharded over devices with uneven parts.
Constructor arguments, inputs and state_dict keys are PyTorch's.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from math import prod
from typing import Any

import numpy as np

from manygrad import Tensor, nn
from tests.tensor.cases import activation, loss, normalization, pooling
from tests.tensor.oracle import numbers

FUNCTION: dict[str, Callable[..., Any]] = {
    c.name.removeprefix("functional."): c.oracle for m in (activation, loss, normalization, pooling) for c in m.CASES
}


@dataclass(frozen=True)
class Layer:
    """`oracle(*inputs)`, or `oracle(state, *inputs)` where `keys` (of state_dict, in order) are not empty,
    gives the result or a tuple.

    `axes`: the dim along which each input is cut when sharded (None: replicated), dim 0 unless given.
    """

    name: str
    inputs: tuple[np.ndarray, ...]
    oracle: Callable[..., Any]
    args: tuple[Any, ...] = ()
    kwargs: dict[str, Any] = field(default_factory=dict)
    keys: tuple[str, ...] = ()
    variant: str = ""
    training: bool = False
    fixed: tuple[int, ...] = ()  # inputs of float numbers that say a choice (±1): no gradient
    axes: Sequence[int | None] | None = None
    call: Callable[..., Any] | None = None  # only where module(*inputs) will not do

    @property
    def id(self) -> str:
        return f"{self.name}[{self.variant}]" if self.variant else self.name

    def make(self) -> nn.Module:
        """The layer in float64, its state replaced by numbers that no initialisation gives."""
        given = [Tensor(a) if isinstance(a, np.ndarray) else a for a in self.args]
        named = {k: Tensor(a) if isinstance(a, np.ndarray) else a for k, a in self.kwargs.items()}
        module = getattr(nn, self.name)(*given, **named).double().train(self.training)
        module.load_state_dict({k: Tensor(a) for k, a in self.state(module).items()})
        return module

    def state(self, module: nn.Module) -> dict[str, np.ndarray]:
        """Parameters in ±1, buffers in (0.2, 0.9) (a variance, weights of classes), counts 3;
        the same at every call."""
        trained = {k for k, _ in module.named_parameters()}
        out = {}
        for k, t in module.state_dict().items():
            rng = np.random.default_rng(zlib.crc32(f"{self.id}.{k}".encode()))
            out[k] = (
                numbers(rng, "float64", t.shape, *((-1, 1) if k in trained else (0.2, 0.9)))
                if t.dtype.is_float
                else np.full(t.shape, 3)
            )
        return out

    def run(self, module: nn.Module, inputs: Sequence[Any]) -> list[Any]:
        return flat(self.call(module, *inputs) if self.call is not None else module(*inputs))

    def expected(self, state: dict[str, np.ndarray], inputs: Sequence[np.ndarray]) -> list[Any]:
        return flat(self.oracle(state, *inputs) if self.keys else self.oracle(*inputs))


def flat(result: Any) -> list[Any]:
    return [y for x in result for y in flat(x)] if isinstance(result, (tuple, list)) else [result]


def data(*shape: int, low: float = -4, high: float = 4, seed: int = 0) -> np.ndarray:
    """Numbers that depend on the shape and the seed only."""
    return numbers(np.random.default_rng([seed, *shape]), "float64", shape, low, high)


def distinct(*shape: int) -> np.ndarray:
    """No two values are equal or near, so the place of the largest is one."""
    return ((np.random.default_rng(shape).permutation(prod(shape)) - prod(shape) / 2 + 0.25) / 4).reshape(shape)
