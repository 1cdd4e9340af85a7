"""Nested state as JSON that names its tensors, and back.

    {"step": 3, "w": Tensor}  ==>  {"dict": [["step", {"value": 3}], ["w", {"tensor": "w"}]]}  and  {"w": Tensor}

A dict's keys (an optimiser's are numbers) and the difference of lists and tuples stay.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from manygrad.nn.optim.diloco import StateOfOneWorker
from manygrad.nn.optim.optimizer import Optimizer
from manygrad.nn.state import get_state_dict, load_state_dict
from manygrad.nn.state.casts import array_loses
from manygrad.tensor.tensor import Tensor

MISSING = object()
VALUES = (int, float, str, np.generic, type(None))
PLAIN = (dict, list, tuple, Tensor, np.ndarray, np.generic, int, float, str, type(None))


def state_of(x: Any) -> Any:
    """What is saved of an object: its `state_dict()`; of a model without one, its tensors by name."""
    if isinstance(x, PLAIN):
        return x
    if callable(own := getattr(x, "state_dict", None)):
        return own()
    return get_state_dict(x) or x


class FlatState(NamedTuple):
    """JSON, tensors by name, names of those that are copies, which an optimiser made for us, and whether each worker
    has a state of its own."""

    tree: Any
    tensors: dict[str, Tensor | np.ndarray]
    copies: set[str]
    differs_by_rank: bool


def flatten(state: Any) -> FlatState:
    """Takes a state apart. TypeError names a value that is neither plain nor has a state."""
    tensors: dict[str, Tensor | np.ndarray] = {}
    copies: set[str] = set()
    own: list[str] = []  # where something is that each worker has of its own

    def named(path: str, t: Tensor | np.ndarray, copied: bool) -> str:
        name = path or "state"
        while name in tensors:
            name += "'"
        tensors[name] = t
        if copied:
            copies.add(name)
        return name

    def made(given: Any, key: Any) -> bool:
        return isinstance(given, Optimizer) and key == "state"

    def visit(given: Any, path: str, copied: bool = False) -> Any:
        x = state_of(given)
        below = f"{path}." if path else ""
        if isinstance(x, Tensor):
            return {"tensor": named(path, x, copied)}
        if isinstance(x, np.ndarray):
            return {"array": named(path, x, copied)}
        if isinstance(x, dict):
            if isinstance(x, StateOfOneWorker):
                own.append(path)
            if odd := [k for k in x if not isinstance(k, (str, int))]:
                raise TypeError(f"save: {path or 'the state'} has the key {odd[0]!r}; keys are text or whole numbers")
            return {"dict": [[k, visit(v, f"{below}{k}", copied or made(given, k))] for k, v in x.items()]}
        if isinstance(x, (list, tuple)):
            items = [visit(v, f"{below}{i}", copied) for i, v in enumerate(x)]
            return {"list" if isinstance(x, list) else "tuple": items}
        if isinstance(x, np.generic):
            x = x.item()
        if x is None or isinstance(x, (bool, int, float, str)):
            return {"value": x}
        raise TypeError(
            f"save: {path or 'the state'} is a {type(x).__name__}; a state has tensors, arrays, numbers, text, None, "
            "dicts, lists and tuples of them, and objects with state_dict()"
        )

    tree = visit(state, "")
    return FlatState(tree, tensors, copies, bool(own))


class LikeParameter:
    """A parameter that the tensors of its state, where they have its shape, are placed like."""

    def __init__(self, parameter: Tensor):
        self.parameter = parameter


def _there(like: Any) -> Any:
    """What is there now in the place of what was saved."""
    if isinstance(like, Optimizer):  # (a new one has no states yet)
        return {"state": {i: LikeParameter(p) for i, p in enumerate(like.params)}}
    return like if like is MISSING or isinstance(like, LikeParameter) else state_of(like)


def unflatten(node: Any, like: Any, tensor: Callable[[str, Any, bool], Any], whole: bool = False) -> Any:
    """The state again; `tensor(name, what is there now, whether an array is wanted)` gives its tensors. Of the user's
    dicts only the keys that are there now; an object is given all (`whole`), and says itself what does not fit."""
    ((kind, x),) = node.items()
    here = _there(like)
    whole = whole or here is not like
    if kind == "dict":
        there = here if isinstance(here, dict) else {}
        rest = here.parameter if isinstance(here, LikeParameter) else MISSING
        wanted = [(k, v) for k, v in x if whole or not there or k in there]
        return {k: unflatten(v, there.get(k, rest), tensor, whole) for k, v in wanted}
    if kind in ("list", "tuple"):
        same = isinstance(here, (list, tuple)) and len(here) == len(x)
        items = [unflatten(v, here[i] if same else MISSING, tensor, whole) for i, v in enumerate(x)]
        return items if kind == "list" else tuple(items)
    return x if kind == "value" else tensor(x, here, kind == "array")


def check_keys(node: Any, like: Any, path: str = "") -> None:
    """KeyError names what a state has and the saved one lacks; ValueError where something else was saved in a place.
    Lists and tuples of plain values may have any length: histories grow."""
    ((kind, x),) = node.items()
    where = path.rstrip(".") or "the state"
    if isinstance(like, dict) and like:
        if kind != "dict":
            raise ValueError(f"load: {where} is a dict, in the checkpoint it is {_told(kind, x)}")
        saved = dict(x)
        if missing := [f"{path}{k}" for k in like if k not in saved]:
            raise KeyError(
                f"load: {', '.join(missing)} is not in the checkpoint, which has "
                f"{', '.join(map(str, saved)) or 'nothing'}"
                f"{' in ' + path.rstrip('.') if path else ''}; load what it has"
            )
        for k, v in like.items():
            check_keys(saved[k], v, f"{path}{k}.")
    elif isinstance(like, (list, tuple)) and not all(isinstance(v, VALUES) for v in like):
        if kind not in ("list", "tuple") or len(x) != len(like):
            raise ValueError(
                f"load: {where} is a {type(like).__name__} of {len(like)}, in the checkpoint it is {_told(kind, x)}: "
                "what it was saved of is another model, perhaps"
            )
        for i, (saved, v) in enumerate(zip(x, like)):
            check_keys(saved, v, f"{path}{i}.")
    elif isinstance(like, (Tensor, np.ndarray)):
        if kind not in ("tensor", "array"):
            raise ValueError(f"load: {where} is a {type(like).__name__}, in the checkpoint it is {_told(kind, x)}")
    elif not isinstance(like, PLAIN) and kind == "value":
        raise ValueError(f"load: {where} is a {type(like).__name__}, in the checkpoint it is {_told(kind, x)}")


def _told(kind: str, x: Any) -> str:
    """What was saved in a place."""
    if kind == "value":
        return repr(x)
    return f"a {kind} of {len(x)}" if kind in ("list", "tuple") else f"a{'n' * (kind == 'array')} {kind}"


def put(target: Any, loaded: Any, path: str = "") -> Any:
    """Loads into the tensors and objects of `target`, which stands at `path`; returns what stands in its place."""
    where = path.rstrip(".") or "the state"
    if isinstance(target, dict) and isinstance(loaded, dict):
        if not target:
            target.update(loaded)
            return target
        for k in target:
            target[k] = put(target[k], loaded[k], f"{path}{k}.")
        return target
    if isinstance(target, list) and isinstance(loaded, list):
        same = len(target) == len(loaded)
        target[:] = [put(t, x, f"{path}{i}.") for i, (t, x) in enumerate(zip(target, loaded))] if same else loaded
        return target
    if isinstance(target, tuple) and isinstance(loaded, tuple) and len(target) == len(loaded):
        return tuple(put(t, x, f"{path}{i}.") for i, (t, x) in enumerate(zip(target, loaded)))
    if isinstance(target, Tensor):
        loaded = Tensor(loaded) if isinstance(loaded, np.ndarray) else loaded
        load_state_dict({where: target}, {where: loaded})
        return target
    if isinstance(target, np.ndarray):
        array = loaded.numpy() if isinstance(loaded, Tensor) else loaded
        if target.shape != array.shape:
            raise ValueError(f"load: {where} is an array of shape {target.shape}, saved was one of {array.shape}")
        if why := array_loses(array, target.dtype):
            raise ValueError(f"load: {where}: {why}")
        target[...] = array
        return target
    if callable(own := getattr(target, "load_state_dict", None)):
        own(loaded)
        return target
    if state_of(target) is not target:
        load_state_dict(target, loaded)
        return target
    return loaded
