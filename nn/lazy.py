"""Layers that learn the size of their input at the first call (or from the state they load),
and then are ordinary layers.

`_Lazy` remembers the constructor's arguments; the first forward finds the missing size in the input, builds the layer
and becomes it (`__class__` too, so hooks and names stay); `to()`, `double()` and the like before that are made up for.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

from manygrad.nn import convolution as conv
from manygrad.nn import normalization as norm
from manygrad.nn.linear import Linear
from manygrad.nn.module import Module
from manygrad.nn.parameter import UninitializedParameter
from manygrad.tensor.tensor import Tensor


class _Lazy(Module):
    _becomes: type[Module]
    _dims: int | None  # spatial dims after the one whose size is needed; None: it is the last

    def __init_subclass__(cls, of: type[Module], dims: int | None = None, **defaults: Any):
        super().__init_subclass__()
        parameters = [
            p.replace(default=defaults.get(p.name, p.default)) for p in inspect.signature(of).parameters.values()
        ]
        cls._becomes, cls._dims, cls._size = of, dims, parameters[0].name
        cls.__signature__ = inspect.Signature(parameters[1:])  # type: ignore[attr-defined]

    _size: str

    def __init__(self, *args: Any, **kwargs: Any):
        bound = inspect.signature(type(self)).bind(*args, **kwargs)
        bound.apply_defaults()
        self._arguments = (bound.args, bound.kwargs)
        self._changes: list[Callable[[Tensor], Tensor]] = []
        self.weight = UninitializedParameter()

    def has_uninitialized_params(self) -> bool:
        return True

    def initialize_parameters(self, input: Tensor) -> None:
        """Becomes the layer that fits `input`."""
        if self._dims is None:
            size = input.shape[-1]
        else:
            at = 1 if self._dims < 0 else input.ndim - self._dims - 1
            if not 0 <= at < input.ndim:
                raise ValueError(f"{type(self).__name__}: an input of shape {input.shape} has too few dims")
            size = input.shape[at]
        self.build(int(size))

    def build(self, size: int) -> None:
        (args, kwargs), changes = self.__dict__.pop("_arguments"), self.__dict__.pop("_changes")
        del self.weight
        becomes: Any = self._becomes
        made = becomes(size, *args, **kwargs)
        self.__dict__.update(vars(made))
        self.__class__ = self._becomes  # type: ignore[assignment]
        for change in changes:
            self._each(change)

    def _later(self, change: Callable[[Tensor], Tensor]) -> None:
        self._changes.append(change)

    def _before_load(self, state_dict: dict[str, Tensor], prefix: str) -> None:
        given = state_dict.get(f"{prefix}weight", state_dict.get(f"{prefix}running_mean"))
        if given is None:
            return
        if issubclass(self._becomes, Linear):
            self.build(given.shape[1])
        elif issubclass(self._becomes, conv._Conv):
            self.build(
                given.shape[1] * self._arguments[0][list(inspect.signature(type(self)).parameters).index("groups")]
            )
        else:
            self.build(given.shape[0])

    def forward(self, input: Tensor, *args: Any) -> Any:
        self.initialize_parameters(input)
        return self.forward(input, *args)  # now the layer's own

    def extra_repr(self) -> str:
        names = list(inspect.signature(type(self)).parameters)
        return ", ".join(
            [f"{self._size}=?", *(f"{k}={v!r}" for k, v in zip(names, self._arguments[0]) if v is not None)]
        )


class LazyLinear(_Lazy, of=Linear):
    """Linear; in_features is the last dim of the first input."""


class LazyConv1d(_Lazy, of=conv.Conv1d, dims=1):
    """Conv1d; in_channels from the first input."""


class LazyConv2d(_Lazy, of=conv.Conv2d, dims=2):
    """Conv2d; in_channels from the first input."""


class LazyConv3d(_Lazy, of=conv.Conv3d, dims=3):
    """Conv3d; in_channels from the first input."""


class LazyConvTranspose1d(_Lazy, of=conv.ConvTranspose1d, dims=1):
    """ConvTranspose1d; in_channels from the first input."""


class LazyConvTranspose2d(_Lazy, of=conv.ConvTranspose2d, dims=2):
    """ConvTranspose2d; in_channels from the first input."""


class LazyConvTranspose3d(_Lazy, of=conv.ConvTranspose3d, dims=3):
    """ConvTranspose3d; in_channels from the first input."""


class LazyBatchNorm1d(_Lazy, of=norm.BatchNorm1d, dims=-1):
    """BatchNorm1d; num_features is dim 1 of the first input."""


class LazyBatchNorm2d(_Lazy, of=norm.BatchNorm2d, dims=-1):
    """BatchNorm2d; num_features is dim 1 of the first input."""


class LazyBatchNorm3d(_Lazy, of=norm.BatchNorm3d, dims=-1):
    """BatchNorm3d; num_features is dim 1 of the first input."""


class LazyInstanceNorm1d(_Lazy, of=norm.InstanceNorm1d, dims=1, affine=True, track_running_stats=True):
    """InstanceNorm1d; num_features from the first input."""


class LazyInstanceNorm2d(_Lazy, of=norm.InstanceNorm2d, dims=2, affine=True, track_running_stats=True):
    """InstanceNorm2d; num_features from the first input."""


class LazyInstanceNorm3d(_Lazy, of=norm.InstanceNorm3d, dims=3, affine=True, track_running_stats=True):
    """InstanceNorm3d; num_features from the first input."""
