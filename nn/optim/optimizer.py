"""`Optimizer`: parameter groups, steps, state; an optimiser itself is one formula over flat tensors."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Mapping
from math import inf
from typing import Any, TypedDict, Unpack

from manygrad.nn.optim.checking import check_names, check_number
from manygrad.nn.optim.flat import Flat, Layout, ParamGroup
from manygrad.nn.optim.state_by_parameter import StateByParameter
from manygrad.tensor.changes import CHANGES
from manygrad.tensor.deferred.thread import step as step_of_trace
from manygrad.tensor.dtype import DType, accumulate_dtype, to_dtype
from manygrad.tensor.engine import engine
from manygrad.tensor.ops.differentiation import zero_grad
from manygrad.tensor.tensor import Tensor
from manygrad.tensor.uop import Ops


class CommonOptions(TypedDict, total=False):
    """Options that every optimiser takes. All but the first say how PyTorch runs its kernels; ours are always fused."""

    all_reduce_dtype: DType | str | None
    foreach: bool | None
    capturable: bool
    differentiable: bool
    fused: bool | None


HOW = CommonOptions.__annotations__.keys() - {"all_reduce_dtype"}  # they mean nothing here

LABELS = ("initial_lr", "name", "param_names")  # of a group, besides hyperparameters
RANGES = {
    "lr": (0, inf), "eps": (0, inf), "weight_decay": (0, inf), "momentum": (0, inf), "lr_decay": (0, inf),
    "initial_accumulator_value": (0, inf), "momentum_decay": (0, inf), "tcoef": (0, inf), "alpha": (0, 1),
    "rho": (0, 1), "dampening": (-inf, inf),
}  # fmt: skip


def is_own(kind: type[Optimizer]) -> bool:
    """Whether an optimiser is one of ours, whose steps depend on parameters, gradients and groups alone."""
    return kind.__module__.startswith(__name__.rpartition(".")[0])


Params = Iterable[Any]  # tensors, (name, tensor) pairs, or dicts with "params" and a group's own hyperparameters


class Optimizer:
    """Base of all. A subclass names its states (PyTorch's names) and writes `update`.

    `all_reduce_dtype` (of the optimiser or a group; None, bfloat16 or float16): gradients travel between devices in
    that type, half the bytes of float32; each device's term is rounded to it, the sum is taken in float32 and rounded
    once.

    A parameter without a gradient in a step is skipped. Inside a TinyJit step the learning rate is read from memory:
    `group["lr"] = 0.01` between two replays takes effect;
    `optimizer.lr` is that memory (of the first group), to be assigned inside a step.

    Large: PyTorch's methods, and how states are loaded, copied and pickled.
    """

    states: tuple[str, ...] = ()
    initial: dict[str, float] = {}
    _counted = "groups"  # are what `tensor/changes.py` counts changes of

    def __init__(self, params: Params, defaults: dict[str, Any], **how: Unpack[CommonOptions]):
        """`how`: what every optimiser takes, `all_reduce_dtype` and PyTorch's `foreach`, `capturable`, ..., which mean
        nothing here."""
        owner = type(self).__name__
        check_names(owner, how, {*defaults, *HOW, "all_reduce_dtype"})
        self.defaults = {**defaults, **{k: v for k, v in how.items() if k not in HOW}}
        self.param_groups: list[ParamGroup] = []
        self.flats: list[Flat] = []
        self.own_state: dict[Tensor, dict[str, Any]] = {}
        if isinstance(params, Tensor):
            raise TypeError(f"{owner} takes a list of parameters, not one tensor; write [parameter]")
        given = _listed(owner, params)
        if not given:
            raise ValueError(
                f"{owner}: the optimiser got an empty list of parameters; a generator such as model.parameters() is "
                "empty once it was read"
            )
        for g in given if isinstance(given[0], dict) else [{"params": given}]:
            self.add_param_group(g)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Adds {"params": [...], "lr": ...}; what is not given has the optimiser's defaults."""
        owner = type(self).__name__
        if not isinstance(param_group, dict) or "params" not in param_group:
            raise TypeError(f'{owner}: a parameter group is a dict with "params", not {param_group!r}')
        check_names(
            f"a parameter group of {owner}", param_group, {*self.defaults, "all_reduce_dtype", *HOW, *LABELS, "params"},
            "; labels of your own can be set later: optimizer.param_groups[0]['label'] = ...",
        )  # fmt: skip
        given = param_group["params"]
        items = [given] if isinstance(given, Tensor) else _listed(owner, given)
        named = [p for p in items if isinstance(p, tuple)]
        if named and len(named) < len(items):
            raise ValueError(
                f"{owner}: {len(named)} of {len(items)} parameters have names; give all of them one, or none"
            )
        if self.param_groups and items and bool(named) != ("param_names" in self.param_groups[0]):
            raise ValueError(f"{owner}: either the parameters of all groups have names, or none have")
        seen = {id(p) for g in self.param_groups for p in g["params"]}
        params: dict[int, tuple[str | None, Tensor]] = {}
        for item in items:
            name, p = item if isinstance(item, tuple) else (None, item)
            if not isinstance(p, Tensor):
                raise TypeError(f"{owner}: an optimiser trains tensors, not {type(p).__name__}")
            if not p.dtype.is_float:
                raise TypeError(f"{owner}: a parameter of {p.dtype.name} cannot be trained; parameters are floats")
            if id(p) in seen:
                raise ValueError(f"{owner}: a parameter of shape {p.shape} is in two parameter groups")
            if p._requires_grad is None and p.requires_grad:
                raise ValueError(
                    f"{owner}: a tensor of shape {p.shape} is computed from others that require a gradient, and cannot "
                    "be trained itself; give the optimiser those, or detach() it first"
                )
            params[id(p)] = name, p
        if len(params) < len(items):
            warnings.warn(
                f"{owner}: {len(items) - len(params)} parameters of a group are given twice; each takes one step",
                stacklevel=4,
            )
        group = ParamGroup(
            {**self.defaults, **{k: v for k, v in param_group.items() if k not in HOW},
             "params": [p for _, p in params.values()]}
        )  # fmt: skip
        if named:
            group["param_names"] = [name for name, _ in params.values()]
        self.check(group)
        for _, p in params.values():
            if p._requires_grad is None:
                p.requires_grad = True
        self.param_groups.append(group)
        CHANGES.count += 1

    def check(self, group: ParamGroup) -> None:
        """ValueError or TypeError on hyperparameters that make no sense."""
        owner = type(self).__name__
        for key, (low, high) in RANGES.items():
            if key in group:
                check_number(owner, key, group[key], low, high)
        wire = group.get("all_reduce_dtype")
        if wire is not None and not to_dtype(wire).is_half:
            raise ValueError(f"{owner}: all_reduce_dtype must be bfloat16, float16 or None, got {to_dtype(wire).name}")
        if "betas" in group:
            betas = group["betas"]
            if not isinstance(betas, (tuple, list)) or len(betas) != 2:
                raise TypeError(f"{owner}: betas are two numbers, got {betas!r}")
            for i, b in enumerate(betas):
                check_number(owner, f"betas[{i}]", b, 0, 1, below=True)

    @property
    def params(self) -> list[Tensor]:
        return [p for g in self.param_groups for p in g["params"]]

    @property
    def lr(self) -> Tensor:
        """The first group's learning rate in memory, (1,)."""
        return self.param_groups[0].value("lr", self.params[0].device)

    def zero_grad(self, set_to_none: bool = True) -> None:
        for p in self.params:
            zero_grad(p, set_to_none)

    # *** a step ***

    def _prepare(self) -> None:
        """Flat storage for what has a gradient now: made at the first step, and again for parameters that were moved or
        replaced since. Parameters that do not step together any more come apart, so that each keeps its own count of
        steps."""
        keep: list[Flat] = []
        apart: list[Flat] = []
        trained = {id(p): g for g in self.param_groups for p in g["params"]}
        for f in self.flats:
            have = {p.grad is not None for p in f.params}
            is_whole = len(have) == 1 and all(trained.get(id(p)) is f.group for p in f.params)
            (keep if is_whole and f.is_attached() else apart).append(f)
        placed = {id(p) for f in keep for p in f.params}
        if not apart and all(id(p) in placed or p.grad is None for p in self.params):
            return
        old = {id(p): f for f in apart for p in f.params}
        todo: dict[Any, list[Tensor]] = {}
        owner: dict[Any, ParamGroup] = {}
        for number, group in enumerate(self.param_groups):
            for p in group["params"]:
                if id(p) not in placed and (id(p) in old or p.grad is not None):
                    key = (number, p.dtype, p.device, Layout.of(p), p.grad is not None, id(old.get(id(p))))
                    todo.setdefault(key, []).append(p)
                    owner[key] = group
        if todo:
            every = [p for ps in todo.values() for p in ps]
            every[0]._store(*every[1:])
        self.flats = keep + [
            Flat(ps, owner[key], self.states_of(owner[key]), self.initial_of(owner[key]), old)
            for key, ps in todo.items()
        ]

    def states_of(self, group: ParamGroup) -> tuple[str, ...]:
        return self.states

    def initial_of(self, group: ParamGroup) -> dict[str, float]:
        """First values of states, where it is not 0; and numbers that the update keeps besides the count of steps."""
        return self.initial

    def schedule_step(self) -> list[Tensor]:
        """The updates, not yet run; returns what must be realized."""
        self._prepare()
        out: list[Tensor] = []
        for f in self.flats:
            if f.params[0].grad is None:
                continue
            grads: list[Tensor] = [p.grad for p in f.params]  # type: ignore[misc]
            if f.group.get("all_reduce_dtype") is not None:  # (joining already places what is cut)
                grads = [g._op(Ops.WIRE, arg=to_dtype(f.group["all_reduce_dtype"]).name) for g in grads]
            grad = f.join(grads)
            for p, part in zip(f.params, f.split(grad)):
                p.grad.replace(part)  # type: ignore[union-attr]
            f.step.assign(f.step + 1)
            g = grad.detach().cast(accumulate_dtype(grad.dtype))
            self.update(f, f.flat.detach(), -g if f.group.get("maximize") else g, f.state)
            f.fresh = False
            f.attach()
            out += [grad, f.flat, *f.state.values(), *f.scalars.values()]
        return out

    def update(self, f: Flat, w: Tensor, g: Tensor, s: dict[str, Tensor]) -> None:
        """Assigns the new parameters to `f.flat` and the new states.
        `w` (parameters), `g` (gradients) and `s` are (elements,)."""
        raise NotImplementedError

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """One update; returns what `closure` (which computes the loss again and calls backward) returned."""
        engine().begin_update()
        loss = None if closure is None else closure()
        if is_own(type(self)):
            step_of_trace(self, self._prepare, self._make_step, self.params, self._memories)
        else:
            self._make_step()
        return loss

    def _memories(self) -> list[Tensor]:
        """All that a step reads, but for gradients."""
        return [t for f in self.flats for t in f.memories()]

    def _make_step(self) -> None:
        todo = self.schedule_step()
        engine().count_update()
        if todo:
            todo[0].realize(*todo[1:])

    # *** state ***

    @property
    def state(self) -> StateByParameter:
        """By parameter: its parts of the states, and its count of steps, which may be changed."""
        return StateByParameter(self)

    @state.setter
    def state(self, state: Mapping[Tensor, dict[str, Any]]) -> None:
        """Begins anew (`optimizer.state = defaultdict(dict)`), or takes over what another such dict has."""
        entries = {p: dict(s) for p, s in state.items()}
        self.state.clear()
        for p, s in entries.items():
            self.state[p] = s

    @property
    def keeps_own_state(self) -> bool:
        """Whether its `step` is the user's, with no `update` of flat tensors."""
        return type(self).update is Optimizer.update

    def state_dict(self) -> dict[str, Any]:
        """PyTorch's form: {"state": {number of the parameter: {...}}, "param_groups": [{..., "params": [numbers]}]}."""
        number = {id(p): i for i, p in enumerate(self.params)}
        groups = [
            {
                **{k: g.current(k) if k == "lr" else v for k, v in g.items()},
                "params": [number[id(p)] for p in g["params"]],
            }
            for g in self.param_groups
        ]
        state = {
            number[id(p)]: {k: t.detach().clone().realize() if isinstance(t, Tensor) else t for k, t in s.items()}
            for p, s in self.state.items()
            if id(p) in number
        }
        return {"state": dict(sorted(state.items())), "param_groups": groups}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Takes over hyperparameters and states, also those of torch.optim for the same parameters. They are written
        into the memory of the states that are there, so a step that a TinyJit captured goes on with them; only where
        parameters have taken different numbers of steps do they get storage of their own."""
        groups = state_dict["param_groups"]
        mine, theirs = [len(g["params"]) for g in self.param_groups], [len(g["params"]) for g in groups]
        if mine != theirs:
            raise ValueError(
                f"load_state_dict: the parameter groups have {mine} parameters here and {theirs} in the state"
            )
        loaded = [
            ParamGroup({**g, **{k: v for k, v in new.items() if k not in HOW}, "params": g["params"]})
            for g, new in zip(self.param_groups, groups)
        ]
        states = {int(i): entry for i, entry in state_dict["state"].items()}
        entries: dict[int, dict[str, Any]] = {}
        for g, new in zip(loaded, groups):
            self.check(g)
            for i, p in zip(new["params"], g["params"]):
                if self.keeps_own_state and i in states:
                    self.own_state[p] = {
                        k: t.detach().clone() if isinstance(t, Tensor) else t for k, t in states[i].items()
                    }
                elif entry := self._checked(states.get(i, {}), i, p, g):
                    entries[id(p)] = entry
        for g, new in zip(self.param_groups, loaded):
            g.update({k: v for k, v in new.items() if k != "params"})
        self.load_entries(entries)

    def load_entries(self, entries: dict[int, dict[str, Any]]) -> None:
        """The states by parameter."""
        self.flats = [f for f in self.flats if self._keeps(f, entries)]
        placed = {id(p) for f in self.flats for p in f.params}
        todo: dict[Any, list[Tensor]] = {}
        for number, group in enumerate(self.param_groups):
            for p in group["params"]:
                if id(p) in entries and id(p) not in placed:
                    p.realize()
                    key = (number, p.dtype, p.device, Layout.of(p), self._counts(entries[id(p)], group))
                    todo.setdefault(key, []).append(p)
        for (number, *_), params in todo.items():
            group = self.param_groups[number]
            self.flats.append(Flat(params, group, self.states_of(group), self.initial_of(group), {}))
        written = [
            t for f in self.flats for t in f.load([entries.get(id(p), {}) for p in f.params], self.initial_of(f.group))
        ]
        if written:
            written[0].realize(*written[1:])

    def __getstate__(self) -> dict[str, Any]:
        """Copied and pickled by its parameters' states, which are laid in one buffer again where it comes to be."""
        return {**vars(self), "flats": {} if self.keeps_own_state else self.state_dict()["state"]}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update({"own_state": {}, **state})
        self.flats, params = [], self.params
        group = {id(p): g for g in self.param_groups for p in g["params"]}
        self.load_entries(
            {id(params[i]): self._checked(e, i, params[i], group[id(params[i])]) for i, e in state["flats"].items()}
        )

    def __copy__(self) -> Optimizer:
        """Shares parameters and states, as any object's copy."""
        other = type(self).__new__(type(self))
        vars(other).update(vars(self))
        return other

    def checked(self, entry: dict[str, Any], p: Tensor) -> dict[str, Any]:
        """A whole state of a parameter, as `load_entries` takes it."""
        i, group = next(
            (i, g) for i, (x, g) in enumerate((x, g) for g in self.param_groups for x in g["params"]) if x is p
        )
        return self._checked(entry, i, p, group)

    def _checked(self, entry: dict[str, Any], number: Any, p: Tensor, group: ParamGroup) -> dict[str, Any]:
        """A parameter's state as tensors and numbers, without what this optimiser does not keep. ValueError where
        something that it needs is missing or has another shape."""
        entry = {k: v for k, v in entry.items() if v is not None}  # (PyTorch's None: no step yet)
        names = self.states_of(group)
        if entry and not entry.keys() >= {*names}:
            raise ValueError(
                f"load_state_dict: the state of parameter {number} has {sorted(entry)}, {type(self).__name__} keeps "
                f"{list(names)}; it is another optimiser's"
            )
        wrong = [k for k in names if k in entry and tuple(entry[k].shape) != tuple(p.shape)]
        if wrong:
            raise ValueError(
                f"load_state_dict: {wrong} of parameter {number} have the shape {tuple(entry[wrong[0]].shape)}, "
                f"the parameter {p.shape}"
            )
        kept = {k: Tensor(v) for k, v in entry.items() if k in (*names, *self._numbers_of(group))}
        return {k: t if k in names else float(t.item()) for k, t in kept.items()}

    def _numbers_of(self, group: ParamGroup) -> tuple[str, ...]:
        return ("step", *(k for k in self.initial_of(group) if k not in self.states_of(group)))

    def _counts(self, entry: dict[str, Any], group: ParamGroup) -> tuple[float, ...]:
        """Numbers that all parameters that share storage have in common: the count of steps, ..."""
        return tuple(entry.get(k, self.initial_of(group).get(k, 0.0)) for k in self._numbers_of(group))

    def _keeps(self, f: Flat, entries: dict[int, dict[str, Any]]) -> bool:
        """Whether what is loaded fits in the storage that is there."""
        found = [entries.get(id(p), {}) for p in f.params]
        together = len({(bool(e), self._counts(e, f.group)) for e in found}) == 1
        return together and f.is_attached() and set(f.state) == set(self.states_of(f.group))


def _listed(owner: str, params: Any) -> list[Any]:
    """The parameters in their order, which is the same in every run and on every worker."""
    if isinstance(params, (set, frozenset)):
        raise TypeError(f"{owner}: a set has no order that all runs and workers share; give the parameters as a list")
    if isinstance(params, dict) or not isinstance(params, Iterable):
        raise TypeError(
            f"{owner} takes a list of parameters, of (name, parameter) or of groups, not a {type(params).__name__}"
        )
    return list(params)
