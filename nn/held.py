"""`Held`: a module that only holds the arguments of a function of `nn.functional`. One line a layer: the function,
PyTorch's constructor arguments and their defaults.

    class ELU(Held, of="elu", alpha=1.0, inplace=False): ...

makes `ELU(alpha=1.0, inplace=False)`, whose forward is `functional.elu(x, alpha=...)`.
"""

from __future__ import annotations

import inspect
from typing import Any

from manygrad.nn import functional as F
from manygrad.nn.module import Module
from manygrad.nn.parameter import Buffer
from manygrad.tensor.tensor import Tensor

REQUIRED = inspect.Parameter.empty
# lazy values are never overwritten; the other two are folded into `reduction`
_NOT_PASSED = ("inplace", "size_average", "reduce")


class Held(Module):
    _function: str = ""
    _fixed: dict[str, Any] = {}
    _shown: tuple[str, ...] | None = None
    _signature = inspect.Signature()

    def __init_subclass__(
        cls,
        of: str | None = None,
        fixed: dict[str, Any] | None = None,
        show: str | None = None,
        keyword_only: bool = False,
        **arguments: Any,
    ):
        """`fixed`: arguments of the function that the constructor does not take;
        `show`: the arguments in repr(), all if not given."""
        super().__init_subclass__()
        if of is None:
            return
        cls._function, cls._fixed, cls._shown = of, fixed or {}, None if show is None else tuple(show.split())
        kind = inspect.Parameter.KEYWORD_ONLY if keyword_only else inspect.Parameter.POSITIONAL_OR_KEYWORD
        parameters = [inspect.Parameter(k, kind, default=v) for k, v in arguments.items()]
        cls._signature = cls.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]

    def __init__(self, *args: Any, **kwargs: Any):
        try:
            bound = self._signature.bind(*args, **kwargs)
        except TypeError as error:
            raise TypeError(f"{type(self).__name__}{self._signature}: {error}") from None
        bound.apply_defaults()
        values = bound.arguments
        if values.get("size_average") is not None or values.get("reduce") is not None:
            values["reduction"] = (
                "none" if values["reduce"] is False else "sum" if values["size_average"] is False else "mean"
            )
        for k, v in values.items():
            setattr(self, k, Buffer(v) if isinstance(v, Tensor) else v)

    def _arguments(self) -> dict[str, Any]:
        return {**{k: getattr(self, k) for k in self._signature.parameters if k not in _NOT_PASSED}, **self._fixed}

    def forward(self, *inputs: Any, **more: Any) -> Any:
        return getattr(F, self._function)(*inputs, **self._arguments(), **more)

    def extra_repr(self) -> str:
        names = (
            self._shown
            if self._shown is not None
            else [k for k in self._signature.parameters if k != "inplace" or self.__dict__[k]]
        )
        return ", ".join(f"{k}={getattr(self, k)!r}" for k in names)


class HeldInTraining(Held):
    """The function has an argument `training`: the module's mode."""

    def _arguments(self) -> dict[str, Any]:
        return {**super()._arguments(), "training": self._is_training}
