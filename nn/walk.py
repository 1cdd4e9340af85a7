"""How tensors and modules below an object are found and named: by its attributes, list positions and dict keys,
joined by dots.

Any object may be a model. In a `Module` the rule is PyTorch's: its parameters first, then its buffers, then what is in
its children; a plain tensor that requires no gradient is a value, not state. In any other object every tensor counts.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from manygrad.nn.parameter import Buffer, Parameter
from manygrad.tensor.tensor import Tensor

INTERNAL = ("_hooks", "_jit_")


def entries(obj: Any) -> list[tuple[str, Any]]:
    """The named things directly below `obj`."""
    if isinstance(obj, (list, tuple)):
        return [(str(i), v) for i, v in enumerate(obj)]
    if isinstance(obj, dict):
        return [(str(k), v) for k, v in obj.items()]
    if isinstance(obj, (Tensor, type)) or (callable(obj) and hasattr(obj, "__code__")) or not hasattr(obj, "__dict__"):
        return []
    return [(k, v) for k, v in vars(obj).items() if not k.startswith(INTERNAL)]


def is_parameter(t: Any) -> bool:
    """Whether a module counts this attribute as its parameter."""
    return isinstance(t, Parameter) or (isinstance(t, Tensor) and not isinstance(t, Buffer) and bool(t._requires_grad))


def tensors(obj: Any, prefix: str = "") -> Iterator[tuple[str, Tensor]]:
    """(path, tensor) of all state below `obj`; an object that contains itself is entered once."""
    return _tensors(obj, prefix, set())


def _tensors(obj: Any, prefix: str, above: set[int]) -> Iterator[tuple[str, Tensor]]:
    if isinstance(obj, Tensor):
        yield prefix.strip("."), obj
        return
    if id(obj) in above:
        return
    from manygrad.nn.module import Module

    below = entries(obj)
    if isinstance(obj, Module):
        yield from ((prefix + k, v) for k, v in below if is_parameter(v))
        yield from ((prefix + k, v) for k, v in below if isinstance(v, Buffer))
        below = [(k, v) for k, v in below if not isinstance(v, Tensor)]
    for k, v in below:
        yield from _tensors(v, f"{prefix}{k}.", above | {id(obj)})


def modules(obj: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """(path, module) of every `Module` at or below `obj`, each as often as it stands there."""
    return _modules(obj, prefix, set())


def _modules(obj: Any, prefix: str, above: set[int]) -> Iterator[tuple[str, Any]]:
    from manygrad.nn.module import Module

    if id(obj) in above or isinstance(obj, Tensor):
        return
    if isinstance(obj, Module):
        yield prefix, obj
    for k, v in entries(obj):
        yield from _modules(v, f"{prefix}.{k}" if prefix else k, above | {id(obj)})


def child_modules(obj: Any) -> Iterator[tuple[str, Any]]:
    """(path, module) of the modules below `obj` with no other module between."""
    from manygrad.nn.module import Module

    for k, v in entries(obj):
        if isinstance(v, Module):
            yield k, v
        elif isinstance(v, (list, tuple, dict)):
            yield from ((f"{k}.{name}", m) for name, m in child_modules(v))
