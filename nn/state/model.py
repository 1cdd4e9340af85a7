"""The state of a model: its tensors by name, read out and loaded."""

from __future__ import annotations

from typing import Any

from manygrad.nn import walk
from manygrad.nn.parameter import Buffer
from manygrad.nn.state.casts import loses
from manygrad.tensor.engine import default_device
from manygrad.tensor.tensor import Tensor


def get_state_dict(obj: Any, prefix: str = "") -> dict[str, Tensor]:
    """All tensors below `obj`, named by their path: attributes, list positions and dict keys joined by dots."""
    return {k: t for k, t in walk.tensors(obj, prefix) if getattr(t, "persistent", True)}


def get_parameters(obj: Any) -> list[Tensor]:
    """The tensors below `obj` that can be trained: floats that are no buffers and whose requires_grad is not False;
    each once."""
    found = [
        t
        for _, t in walk.tensors(obj)
        if t.dtype.is_float and not isinstance(t, Buffer) and t._requires_grad is not False
    ]
    return list({id(t): t for t in found}.values())


def load_state_dict(model: Any, state: dict[str, Tensor], strict: bool = True, assign: bool = False) -> None:
    """Copies `state` into the model's tensors of the same names, in their memory: a step that a TinyJit captured reads
    the new values. With `assign` they become those tensors instead, of their types, on their devices and in their
    memory, which a step captured before does not read. KeyError lists what is missing or left over (strict), ValueError
    names the tensors whose shapes differ, or whose values the model's type does not have (`casts.py`; floats are
    rounded to the model's width); then nothing is loaded."""
    own = get_state_dict(model)
    missing, extra = sorted(set(own) - set(state)), sorted(set(state) - set(own))
    if strict and (missing or extra):
        raise KeyError(
            f"load_state_dict: missing {missing or 'nothing'}, unexpected {extra or 'nothing'}; "
            "strict=False loads what fits"
        )
    pairs = {name: (t, state[name]) for name, t in own.items() if name in state}
    wrong = [
        f"{name} has shape {new.shape} in the file, {t.shape} in the model"
        for name, (t, new) in pairs.items()
        if new.shape != t.shape
    ]
    if wrong:
        raise ValueError(f"load_state_dict: {'; '.join(wrong)}")
    if lost := [] if assign else [f"{name}: {why}" for name, (t, new) in pairs.items() if (why := loses(new, t.dtype))]:
        raise ValueError(f"load_state_dict: {'; '.join(lost)}")
    for t, new in pairs.values():
        if assign:
            t.data = new
            continue
        if new.device != t.device or isinstance(t.device, tuple):
            if isinstance(new.device, str) and new.device.startswith("DISK"):
                new = new.to(default_device())
            new = new._shard_like(t) if isinstance(t.device, tuple) else new.to(t.device)
        t.assign(new.detach().cast(t.dtype))
    loaded = [] if assign else [t for t, _ in pairs.values()]
    if loaded:
        loaded[0].realize(*loaded[1:])
