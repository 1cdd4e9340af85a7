"""Local SGD with an outer optimiser: workers train copies of their own, and meet every so many steps."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from manygrad.nn.optim.checking import check_count, check_number
from manygrad.nn.optim.optimizer import Optimizer
from manygrad.tensor.deferred.thread import at_once
from manygrad.tensor.dtype import DType, to_dtype
from manygrad.tensor.engine import engine
from manygrad.tensor.grad_mode import no_grad
from manygrad.tensor.tensor import Tensor
from manygrad.tensor.uop import Ops


def _devices() -> tuple[str, ...]:
    """All devices of the world."""
    world: Any = engine().world()
    return tuple(world.devices)


class StateOfOneWorker(dict[str, Any]):
    """A state of which each worker has one of its own. Where a checkpoint has such a part, what lies on the workers'
    own devices is saved by each of them, and not taken to be the same on all."""


class DiLoCo:
    """Each worker takes `every` steps of `inner` on its own copy of the parameters and its own data; then all take one
    step of Nesterov's SGD on the mean of what they have moved (Douillard et al., arXiv 2311.08105).

        d = mean over workers of (θ − own parameters);  v ← momentum·v + d;  θ ← θ − lr·(d + momentum·v)

    After it every worker's parameters are θ. Data travels once in `every` steps: one all-reduce of the parameters'
    size, with `delta_dtype` bfloat16 or float16 of half that (each worker's d is rounded to it, the sum taken in
    float32 and rounded once). Parameters lie on the worker's own device, not over `world.devices`, and begin alike on
    all workers, which is checked. The inner states stay each worker's own.

    It may be saved at any step: a checkpoint has θ, v, and of each worker its parameters, inner state and all else that
    lies on its own device; on another number of workers each takes those of one, whole (rank r those of rank r modulo
    the number that saved). Not for a TinyJit, which would count one step for ever: capture what it needs before.
    """

    def __init__(self, inner: Optimizer, every: int = 100, lr: float = 0.7, momentum: float = 0.9,
                 nesterov: bool = True, delta_dtype: DType | str | None = None):  # fmt: skip
        check_count("DiLoCo", "every", every)
        check_number("DiLoCo", "lr", lr)
        check_number("DiLoCo", "momentum", momentum, 0, 1, below=True)
        wire = None if delta_dtype is None else to_dtype(delta_dtype)
        if wire is not None and not wire.is_half:
            raise ValueError(f"DiLoCo: delta_dtype must be bfloat16, float16 or None, got {wire.name}")
        for p in inner.params:
            if not isinstance(p.device, str) or "@" in p.device:
                raise ValueError(
                    f"DiLoCo: a parameter of shape {p.shape} lies on {p.device}; each worker trains a copy on a device "
                    "of its own: leave out to(world.devices)"
                )
        self.inner, self.every, self.lr, self.momentum, self.nesterov = inner, every, lr, momentum, nesterov
        self.delta_dtype, self.steps = wire, 0
        self.outer = [self._on_all(p.detach()) for p in inner.params]  # θ, a copy on every device of the world
        self.velocity = [t.zeros_like().contiguous() for t in self.outer]
        with at_once():
            self.outer[0].realize(*self.outer[1:], *self.velocity)

    @staticmethod
    def _on_all(t: Tensor) -> Tensor:
        devices = _devices()
        return t.clone() if len(devices) == 1 else t.clone().shard(devices)

    @property
    def param_groups(self) -> list[Any]:
        """The groups of the inner optimiser."""
        return self.inner.param_groups

    def zero_grad(self, set_to_none: bool = True) -> None:
        self.inner.zero_grad(set_to_none)

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """A step of `inner`, and after `every` of them an outer one, in which every worker must take part."""
        engine().refuse_in_capture("DiLoCo.step() in a TinyJit: it counts steps, which a replay does not")
        loss = self.inner.step(closure)
        self.steps += 1
        if self.steps % self.every == 0:
            self.outer_step()
        return loss

    @no_grad()
    def outer_step(self) -> None:
        """All workers meet now."""
        params = self.inner.params
        with at_once():
            params[0].realize(*params[1:])
            todo = []
            for p, outer, v in zip(params, self.outer, self.velocity):
                d = self._mean_delta(p.detach(), outer)
                moved = v * self.momentum + d
                todo += [
                    v.assign(moved),
                    outer.assign(outer - (d + moved * self.momentum if self.nesterov else moved) * self.lr),
                ]
            todo[0].realize(*todo[1:])
            self._take_over(self.outer)

    def _mean_delta(self, own: Tensor, outer: Tensor) -> Tensor:
        devices = _devices()
        if len(devices) == 1:
            d = outer - own
            return d if self.delta_dtype is None else d.cast(self.delta_dtype).cast(d.dtype)
        held = own.clone().realize()
        engine().differs_by_rank(held.uop)
        rows = held.reshape(1, *held.shape).expand(len(devices), *held.shape).shard(devices, axis=0)
        total = (outer.reshape(1, *outer.shape) - rows).sum(0)
        if self.delta_dtype is not None:
            total = total._op(Ops.WIRE, arg=self.delta_dtype.name)
        return total / len(devices)

    def _take_over(self, values: list[Tensor]) -> None:
        """The parameters become these."""
        todo = [p.detach().assign(t.detach().to(p.device)) for p, t in zip(self.inner.params, values)]
        todo[0].realize(*todo[1:])

    def state_dict(self) -> dict[str, Any]:
        """`own`: this worker's parameters, between outer steps."""
        own = [p.detach() for p in self.inner.params] if self.steps % self.every else []
        outer = {"steps": self.steps, "outer": list(self.outer), "velocity": list(self.velocity), "own": own}
        return StateOfOneWorker(outer, inner=self.inner.state_dict())

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Takes over θ, v and the inner state; the parameters become those that were saved between outer steps, else
        θ."""
        self.inner.load_state_dict(state_dict["inner"])
        self.steps = int(state_dict["steps"])
        with at_once():
            for mine, saved in ((self.outer, state_dict["outer"]), (self.velocity, state_dict["velocity"])):
                if [t.shape for t in mine] != [t.shape for t in saved]:
                    raise ValueError("DiLoCo: the state is that of other parameters; their shapes differ")
                todo = [t.assign(s.detach()._shard_like(t) if isinstance(t.device, tuple) else s.detach().to(t.device))
                        for t, s in zip(mine, saved)]  # fmt: skip
                todo[0].realize(*todo[1:])
            self._take_over(state_dict.get("own") or self.outer)
