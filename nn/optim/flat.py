"""Flat storage: parameters of one group, type and placement that step together live in one buffer,
and so does each of their states.

A parameter is a view of that buffer, so the update of all of them is one group of kernels (and their gradients are one
all-reduce), not one kernel a parameter. Parameters keep their placement (`Layout`): what is cut over devices stays cut,
and its states are cut with it. Graphs written before, such as the loss of the first step, read it there, too: the first
step is the same program as all later ones.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from math import inf, log, prod
from typing import Any

import numpy as np

from manygrad.tensor.changes import CHANGES
from manygrad.tensor.deferred.arguments import note_state
from manygrad.tensor.dtype import accumulate_dtype, dtypes
from manygrad.tensor.engine import engine
from manygrad.tensor.lock import locked
from manygrad.tensor.storage import unrealized
from manygrad.tensor.stored import note_former
from manygrad.tensor.tensor import Tensor
from manygrad.tensor.uop import Ops, UOp
from manygrad.tensor.uop.rewrite import substitute
from manygrad.tensor.uop.views import memory


class ParamGroup(dict[str, Any]):
    """One of `optimizer.param_groups`: {"params": [...], "lr": 0.1, ...}.

    What is in `variable` (lr; momentum or betas under a scheduler that cycles them) is read by the kernels from memory:
    setting it takes effect at once, also in the replay of a TinyJit step. Other values are part of the step as it was
    captured.
    """

    def __init__(self, values: dict[str, Any]):
        super().__init__(values)
        self.variable = {"lr"}
        self._scalars: dict[tuple[str, int, Any], Tensor] = {}
        self._listed, self._lists = tuple[int, ...](), 0

    def number_of_list(self) -> int:
        """How often other parameters have been found in it: the same on all workers, as no id is."""
        now = (*map(id, self["params"]),)
        if now != self._listed:
            self._listed, self._lists = now, self._lists + 1
        return self._lists

    def __setitem__(self, key: str, value: Any) -> None:
        if key in self.variable and not isinstance(value, Tensor):
            engine().refuse_in_capture(
                f"group[{key!r}] is set to {value!r} inside of a TinyJit, as scheduler.step() does: replays would set "
                "that number for ever; do it outside of the step, which reads it from memory, or set it to a Tensor"
            )
        super().__setitem__(key, value)
        CHANGES.count += key not in self.variable
        for (name, i, device), t in self._scalars.items():
            if name == key:
                new = value[i] if isinstance(value, (tuple, list)) else value
                # from memory: as a constant each number would be compiled
                t.assign(new.reshape(1) if isinstance(new, Tensor) else scalar(new, device))

    def update(self, *args: Any, **kwargs: Any) -> None:
        for k, v in dict(*args, **kwargs).items():
            self[k] = v

    def __reduce__(self) -> Any:
        now = {k: self.current(k) if k == "lr" else v for k, v in self.items()}
        return _group, (now, self.variable)

    def value(self, key: str, device: Any, i: int = 0) -> Any:
        """A hyperparameter for the kernels on `device`: a float, or a (1,) tensor if it is variable;
        of a tuple, its i-th."""
        now = self[key][i] if isinstance(self[key], (tuple, list)) else self[key]
        if key not in self.variable:
            return now
        at = (key, i, device)
        if at not in self._scalars:
            if isinstance(now, Tensor):
                self._scalars[at] = now.reshape(1).to(device)
            else:
                self._scalars[at] = scalar(now, device)
            note_state([self._scalars[at], *([now] if isinstance(now, Tensor) else [])])
        return self._scalars[at]

    def numbers(self) -> list[Tensor]:
        """The hyperparameters in memory."""
        return list(self._scalars.values())

    def current(self, key: str) -> Any:
        """The value in memory, which a captured step may have changed."""
        return next((float(t.item()) for (name, _, _), t in self._scalars.items() if name == key), self[key])


def _group(values: dict[str, Any], variable: set[str]) -> ParamGroup:
    group = ParamGroup(values)
    group.variable = set(variable)
    return group


@dataclass(frozen=True)
class Layout:
    """How parameters lie in one buffer. Equal layouts of one group can share it.

    Whole on each of their devices: as they are, one after the other, (elements,). Cut: the cut dim first, as (rows,
    elements / rows), side by side; the buffer is cut along its rows. Cut evenly over n devices there are n rows, so
    each device's part of every parameter is a part of its row. Cut unevenly the rows are those of the cut dim, and the
    parameter has a buffer of its own.

        (4, 6) cut on dim 1 and (8,) cut on dim 0 over 2 devices  ==>  (2, 12 + 4), cut on dim 0
    """

    rows: int | None = None
    alone: int | None = None  # the parameter's id

    @staticmethod
    def of(p: Tensor) -> Layout:
        axis, bounds = cut_of(p)
        if axis is None:
            return Layout()
        even = bounds[1] > 0 and all(b - a == bounds[1] for a, b in pairwise(bounds))
        return Layout(len(bounds) - 1) if even else Layout(bounds[-1], id(p))

    def join(self, values: list[Tensor], params: list[Tensor]) -> Tensor:
        """A value for each parameter, in its shape -> in one buffer."""
        if self.rows is None:
            flat = [t.reshape(-1) for t in values]
            return flat[0].cat(*flat[1:]) if len(flat) > 1 else flat[0]
        rows = [t.movedim(cut_of(p)[0] or 0, 0).reshape(self.rows, -1) for t, p in zip(values, params)]
        return (rows[0].cat(*rows[1:], dim=1) if len(rows) > 1 else rows[0]).shard(params[0].device, 0)

    def split(self, joined: Tensor, params: list[Tensor]) -> list[Tensor]:
        """The parts of a buffer in the shapes of the parameters: views. Of what is cut, the rows of a part do not lie
        together in the whole, but on each device they do: writing to such a part has to write there, too."""
        at, out = 0, []
        for p in params:
            n = prod(p.shape) // (self.rows or 1)
            if self.rows is None:
                out.append(joined.shrink(((at, at + n),)).reshape(p.shape))
            else:
                axis = cut_of(p)[0] or 0
                first = (p.shape[axis], *(d for i, d in enumerate(p.shape) if i != axis))
                part = joined.shrink((None, (at, at + n))).reshape(first).movedim(0, axis)
                out.append(part if memory(part.uop) is memory(joined.uop) else joined._strided(part))
            at += n
        return out


def cut_of(p: Tensor) -> tuple[int | None, tuple[int, ...]]:
    """(the dim along which a parameter is cut, the positions); (None, ()) where it is whole on each of its devices."""
    return engine().store_spec(p.uop) if isinstance(p.device, tuple) else (None, ())


class Flat:
    """Parameters that share a buffer, and the optimiser's state of the same shape."""

    scalars: dict[str, Tensor]
    fresh: bool  # not yet stepped

    def __init__(
        self,
        params: list[Tensor],
        group: ParamGroup,
        names: tuple[str, ...],
        initial: dict[str, float],
        old: dict[int, Flat],
    ):
        self.params, self.group = params, group
        self.device, self.layout = params[0].device, Layout.of(params[0])
        self.flat = self.join([p.detach() for p in params]).contiguous()
        before = [old.get(id(p)) for p in params]
        self.state: dict[str, Tensor] = {}
        for name in names:
            start = initial.get(name, 0.0)
            if (isinstance(self.device, str) or self.layout.rows) and all(
                b is None or name not in b.state for b in before
            ):
                self.state[name] = self.flat.full_like(start).contiguous()
                continue
            empty = [
                None if b is not None and name in b.state else p.detach().full_like(start)
                for p, b in zip(params, before)
            ]
            parts = [e if e is not None else b.part(name, p) for e, p, b in zip(empty, params, before)]  # type: ignore[union-attr]
            self.state[name] = self.join([t.cast(self.flat.dtype) for t in parts]).contiguous()
        first = before[0]
        kept = {} if first is None else {k: t.item() for k, t in first.scalars.items()}
        begun = {"step": 0.0, **{k: v for k, v in initial.items() if k not in names}, **kept}
        self.scalars = {k: scalar(v, self.device) for k, v in begun.items()}
        self.fresh = first is None or first.fresh
        self.flat._store(*self.state.values())
        self.move_in()

    @locked
    def join(self, values: list[Tensor]) -> Tensor:
        """A value for each parameter, in its shape, laid like the parameters."""
        return self.layout.join(values, self.params)

    def split(self, joined: Tensor) -> list[Tensor]:
        """Parts of a tensor that is laid like the parameters, each in its parameter's shape."""
        return self.layout.split(joined, self.params)

    def move_in(self) -> None:
        """Each parameter becomes its part of the flat buffer, also where a tensor that is not computed yet reads it."""
        parts = self.split(self.flat)
        moved = {p.uop: part.uop for p, part in zip(self.params, parts) if memory(p.uop).op is Ops.BUFFER}
        lazy = unrealized()
        graph = substitute(UOp(Ops.SINK, dtypes.void, tuple(t.uop for t in lazy)), moved)
        for t, u in zip(lazy, graph.src):
            t.uop = u
        for p in self.params:
            note_former(p)
        self.attach()
        note_state(self.params)  # (a frozen one, too)
        CHANGES.count += 1

    @locked
    def attach(self) -> None:
        """Each parameter is its part of the flat buffer."""
        for p, part in zip(self.params, self.split(self.flat)):
            p.uop = part.uop

    def is_attached(self) -> bool:
        return all(memory(p.uop) is self.flat.uop for p in self.params)

    def memories(self) -> list[Tensor]:
        """All that a step reads, but for gradients."""
        return [self.flat, *self.state.values(), *self.scalars.values(), *self.group.numbers()]

    def part(self, name: str, param: Tensor) -> Tensor:
        """A parameter's part of a state."""
        at = next(i for i, p in enumerate(self.params) if p is param)
        t = self.split(self.state[name])[at].contiguous().realize()
        return t if t.device == param.device else t.to(param.device)

    def load(self, entries: list[dict[str, Any]], initial: dict[str, float]) -> list[Tensor]:
        """The state of each parameter, `entries`, is written where a captured step reads it; what an entry lacks begins
        anew, as do all without any. Returns what must be realized."""
        for name, t in self.state.items():
            start = initial.get(name, 0.0)
            t.assign(self.join([self._laid(e.get(name, start), p) for e, p in zip(entries, self.params)]))
        for name, t in self.scalars.items():
            t.assign(scalar(entries[0].get(name, initial.get(name, 0.0)), self.device))
        self.fresh = not entries[0]
        return [*self.state.values(), *self.scalars.values()]

    def _laid(self, value: Tensor | float, param: Tensor) -> Tensor:
        """A value for a parameter's state, in its shape and placement."""
        if not isinstance(value, Tensor):
            return param.detach().full_like(value).cast(self.flat.dtype)
        new = value.detach().cast(self.flat.dtype).reshape(param.shape)
        if isinstance(param.device, tuple) and isinstance(new.device, str):
            return new.shard(param.device, None)
        return new.to(param.device)

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
        return [[part.square().sum().sqrt().reshape(1) for part in self.split(f)] for f in flats]

    def spread(self, values: list[Tensor]) -> Tensor:
        """One number a parameter as a flat tensor."""
        return self.join([v._broadcast((prod(p.shape),)).reshape(p.shape) for v, p in zip(values, self.params)])


def scalar(value: float, device: Any) -> Tensor:
    """A stored (1,) float64 on `device`."""
    return Tensor(engine().from_numpy(np.array([float(value)]), dtypes.float64, device))
