"""Flat storage: parameters of one group, type and placement that step together live in one buffer, and so does each of their states.

A parameter is a view of that buffer, so the update of all of them is one group of kernels (and their gradients are one
all-reduce), not one kernel a parameter. Graphs written before, such as the loss of the first step, read it there, too: the first step
is the same program as all later ones.
"""

from __future__ import annotations

from math import inf, log, prod
from typing import Any

import numpy as np

from manygrad.tensor.dtype import accumulate_dtype, dtypes
from manygrad.tensor.tensor import LIVE, Tensor
from manygrad.tensor.uop import Ops, UOp
from manygrad.tensor.uop.rewrite import substitute
from manygrad.tensor.uop.shape import unviewed


class ParamGroup(dict[str, Any]):
    """One of `optimizer.param_groups`: {"params": [...], "lr": 0.1, ...}.

    What is in `variable` (lr; momentum or betas under a scheduler that cycles them) is read by the kernels from memory: setting
    it takes effect at once, also in the replay of a TinyJit step. Other values are part of the step as it was captured.
    """

    def __init__(self, values: dict[str, Any]):
        super().__init__(values)
        self.variable = {"lr"}
        self._scalars: dict[tuple[str, int, Any], Tensor] = {}

    def __setitem__(self, key: str, value: Any) -> None:
        super().__setitem__(key, value)
        for (name, i, _), t in self._scalars.items():
            if name == key:
                new = value[i] if isinstance(value, (tuple, list)) else value
                t.assign(new.reshape(1) if isinstance(new, Tensor) else float(new))

    def update(self, *args: Any, **kwargs: Any) -> None:
        for k, v in dict(*args, **kwargs).items():
            self[k] = v

    def value(self, key: str, device: Any, i: int = 0) -> Any:
        """A hyperparameter for the kernels on `device`: a float, or a (1,) tensor if it is variable; of a tuple, its i-th."""
        now = self[key][i] if isinstance(self[key], (tuple, list)) else self[key]
        if key not in self.variable:
            return now
        at = (key, i, device)
        if at not in self._scalars:
            if isinstance(now, Tensor):
                self._scalars[at] = now.reshape(1).to(device)
            else:
                self._scalars[at] = scalar(now, device)
        return self._scalars[at]

    def current(self, key: str) -> Any:
        """The value in memory, which a captured step may have changed."""
        return next((float(t.item()) for (name, _, _), t in self._scalars.items() if name == key), self[key])


class Flat:
    """Parameters that share a flat buffer, and the optimiser's state of the same length."""

    scalars: dict[str, Tensor]
    fresh: bool  # not yet stepped

    def __init__(self, params: list[Tensor], group: ParamGroup, names: tuple[str, ...], initial: dict[str, float], old: dict[int, Flat]):
        self.params, self.group = params, group
        self.device = params[0].device
        self.flat = join([p.detach() for p in params]).contiguous()
        before = [old.get(id(p)) for p in params]
        self.state: dict[str, Tensor] = {}
        for name in names:
            start = initial.get(name, 0.0)
            if isinstance(self.device, str) and all(b is None or name not in b.state for b in before):
                self.state[name] = self.flat.full_like(start).contiguous()
                continue
            empty = [None if b is not None and name in b.state else p.detach().full_like(start) for p, b in zip(params, before)]
            parts = [e if e is not None else b.part(name, p) for e, p, b in zip(empty, params, before)]  # type: ignore[union-attr]
            self.state[name] = join([t.cast(self.flat.dtype) for t in parts]).contiguous()
        first = before[0]
        kept = {} if first is None else {k: t.item() for k, t in first.scalars.items()}
        begun = {"step": 0.0, **{k: v for k, v in initial.items() if k not in names}, **kept}
        self.scalars = {k: scalar(v, self.device) for k, v in begun.items()}
        self.fresh = first is None or first.fresh
        self.flat._store(*self.state.values())
        self.move_in()

    def move_in(self) -> None:
        """Each parameter becomes its part of the flat buffer, also where a tensor that is not computed yet reads it."""
        parts = split(self.flat, self.params)
        moved = {p.uop: part.uop for p, part in zip(self.params, parts) if unviewed(p.uop).op is Ops.BUFFER}
        lazy = [t for t in LIVE if t.uop.op is not Ops.BUFFER]
        graph = substitute(UOp(Ops.SINK, dtypes.void, tuple(t.uop for t in lazy)), moved)
        for t, u in zip(lazy, graph.src):
            t.uop = u
        self.attach()

    def attach(self) -> None:
        """Each parameter is its part of the flat buffer."""
        for p, part in zip(self.params, split(self.flat, self.params)):
            p.uop = part.uop

    def is_attached(self) -> bool:
        return all(unviewed(p.uop) is self.flat.uop for p in self.params)

    def part(self, name: str, param: Tensor) -> Tensor:
        """A parameter's part of a state."""
        at = next(i for i, p in enumerate(self.params) if p is param)
        t = split(self.state[name], self.params)[at].contiguous().realize()
        return t if t.device == param.device else t.to(param.device)

    # *** what updates are written with ***

    def __getitem__(self, key: str) -> Any:
        """A hyperparameter, in the type that the update is computed in."""
        return self.beta(key, 0)

    def beta(self, key: str, i: int) -> Any:
        v = self.group.value(key, self.device, i)
        return v.cast(accumulate_dtype(self.flat.dtype)) if isinstance(v, Tensor) else v

    @property
    def step(self) -> Tensor:
        """The number of steps with this one, (1,) float64."""
        return self.scalars["step"]

    def scalar(self, value: Tensor) -> Tensor:
        """A number computed from the step, stored once for all elements."""
        return value.cast(accumulate_dtype(self.flat.dtype)).contiguous()

    def correction(self, i: int, key: str = "betas") -> Tensor:
        """1 − βᵢ to the number of steps, in float64."""
        b = self.group.value(key, self.device, i)
        return 1 - (self.step * (b.log() if isinstance(b, Tensor) else (log(b) if b > 0 else -inf))).exp()

    def norms(self, *flats: Tensor) -> list[list[Tensor]]:
        """For each flat tensor the 2-norm of each parameter's part, (1,) each."""
        return [[part.square().sum().sqrt().reshape(1) for part in split(f, self.params)] for f in flats]

    def spread(self, values: list[Tensor]) -> Tensor:
        """One number a parameter as a flat tensor."""
        return join([v._broadcast((prod(p.shape),)) for v, p in zip(values, self.params)])


def join(tensors: list[Tensor]) -> Tensor:
    flat = [t.reshape(-1) for t in tensors]
    return flat[0].cat(*flat[1:]) if len(flat) > 1 else flat[0]


def split(flat: Tensor, params: list[Tensor]) -> list[Tensor]:
    at, out = 0, []
    for p in params:
        n = prod(p.shape)
        out.append(flat.shrink(((at, at + n),)).reshape(p.shape))
        at += n
    return out


def scalar(value: float, device: Any) -> Tensor:
    """A stored (1,) float64 on `device`."""
    t = Tensor(np.array([float(value)]))
    t = (t.to(device) if device != t.device else t).contiguous()
    t._store()
    return t
