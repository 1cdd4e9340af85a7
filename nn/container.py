"""Modules and parameters in order or by name. What they hold are attributes with the names "0", "1", ...
or the keys."""

from __future__ import annotations

import numbers
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from manygrad.nn.module import Module
from manygrad.nn.parameter import Parameter
from manygrad.tensor.tensor import Tensor


class _Container(Module):
    """Items by attribute name, in order of insertion."""

    def _items(self) -> dict[str, Any]:
        return {k: v for k, v in vars(self).items() if k not in ("training", "_hooks")}

    def __len__(self) -> int:
        return len(self._items())


class _List(_Container):
    def _index(self, i: Any) -> int:
        n = len(self)
        at = i.__index__()
        if not -n <= at < n:
            raise IndexError(f"index {at} is outside a {type(self).__name__} of {n}")
        return at % n

    def _set_all(self, items: Iterable[Any]) -> None:
        items = list(items)
        for k in self._items():
            delattr(self, k)
        for i, v in enumerate(items):
            setattr(self, str(i), v)

    def __iter__(self) -> Iterator[Any]:
        return iter(self._items().values())

    def __getitem__(self, i: Any) -> Any:
        if isinstance(i, slice):
            return type(self)(*list(self)[i]) if isinstance(self, Sequential) else type(self)(list(self)[i])  # type: ignore[call-arg]
        return list(self)[self._index(i)]

    def __setitem__(self, i: Any, value: Any) -> None:
        setattr(self, list(self._items())[self._index(i)], self._wrapped(value))

    def __delitem__(self, i: Any) -> None:
        items = list(self)
        del items[i]
        self._set_all(items)

    def _wrapped(self, value: Any) -> Any:
        return value

    def append(self, value: Any) -> Any:
        setattr(self, str(len(self)), self._wrapped(value))
        return self

    def extend(self, values: Iterable[Any]) -> Any:
        for v in list(values):
            self.append(v)
        return self

    def insert(self, i: int, value: Any) -> Any:
        items = list(self)
        items.insert(i, self._wrapped(value))
        self._set_all(items)
        return self

    def pop(self, i: int = -1) -> Any:
        value = self[i]
        del self[i]
        return value

    def __iadd__(self, values: Iterable[Any]) -> Any:
        return self.extend(values)

    def __add__(self, values: Iterable[Any]) -> Any:
        both = [*self, *values]
        return type(self)(*both) if isinstance(self, Sequential) else type(self)(both)  # type: ignore[call-arg]


class Sequential(_List):
    """The modules one after another; `Sequential({"conv": ...})` names them."""

    def __init__(self, *args: Any):
        named = (
            args[0].items()
            if len(args) == 1 and isinstance(args[0], Mapping)
            else [(str(i), m) for i, m in enumerate(args)]
        )
        for k, m in named:
            self.add_module(k, m)

    def forward(self, input: Any) -> Any:
        for layer in self:
            input = layer(input)
        return input


class ModuleList(_List):
    """A list whose modules are found."""

    def __init__(self, modules: Iterable[Module] | None = None):
        self.extend(modules or [])

    def _wrapped(self, value: Any) -> Any:
        return _no_value("ModuleList", value)


def _no_value(owner: str, value: Any) -> Any:
    """TypeError on what can be no module. (Functions, and objects with tensors, can.)"""
    if isinstance(value, (Tensor, numbers.Number, str, bytes)):
        raise TypeError(f"{owner} holds modules, not a {type(value).__name__}; parameters go into a ParameterList")
    return value


class ParameterList(_List):
    """A list whose parameters are found; other tensors become parameters."""

    def __init__(self, values: Iterable[Any] | None = None):
        self.extend(values or [])

    def _wrapped(self, value: Any) -> Any:
        return Parameter(value) if isinstance(value, Tensor) and not isinstance(value, Parameter) else value


class _Dict(_Container):
    def __getitem__(self, key: str) -> Any:
        items = self._items()
        if key not in items:
            raise KeyError(f"{key!r} is not among {list(items)}")
        return items[key]

    def __setitem__(self, key: str, value: Any) -> None:
        self._check_name(type(self).__name__, key)
        setattr(self, key, self._wrapped(value))

    def _wrapped(self, value: Any) -> Any:
        return value

    def __delitem__(self, key: str) -> None:
        self[key]
        delattr(self, key)

    def __iter__(self) -> Iterator[str]:
        return iter(self._items())

    def __contains__(self, key: str) -> bool:
        return key in self._items()

    def keys(self) -> Iterable[str]:
        return self._items().keys()

    def values(self) -> Iterable[Any]:
        return self._items().values()

    def items(self) -> Iterable[tuple[str, Any]]:
        return self._items().items()

    def clear(self) -> None:
        for k in list(self):
            del self[k]

    def pop(self, key: str) -> Any:
        value = self[key]
        del self[key]
        return value

    def update(self, values: Any) -> None:
        for k, v in values.items() if hasattr(values, "items") else values:
            self[k] = v


class ModuleDict(_Dict):
    """A dict whose modules are found."""

    def __init__(self, modules: Any = None):
        self.update(modules or {})

    def _wrapped(self, value: Any) -> Any:
        return _no_value("ModuleDict", value)


class ParameterDict(_Dict):
    """A dict whose parameters are found; other tensors become parameters. Of a plain dict they are in the order of
    their keys, as PyTorch has it."""

    def __init__(self, parameters: Any = None):
        self.update(parameters or {})

    def update(self, values: Any) -> None:
        if isinstance(values, Mapping) and not isinstance(values, OrderedDict):
            values = sorted(values.items())
        super().update(values)

    def _wrapped(self, value: Any) -> Any:
        return Parameter(value) if isinstance(value, Tensor) and not isinstance(value, Parameter) else value

    def get(self, key: str, default: Any = None) -> Any:
        return self._items().get(key, default)
