"""Optimisers over flat storage: all parameters of one type and placement live in one buffer.

A parameter is a view of that buffer, so the update of all of them is one group of kernels (and their gradients are one
all-reduce), not one kernel a parameter.
"""

from __future__ import annotations

from math import prod
from typing import Any

from manygrad.tensor.dtype import dtypes
from manygrad.tensor.tensor import Tensor
from manygrad.tensor.uop.shape import unviewed


class _Group:
    """Parameters that share a flat buffer, with the optimiser's state of the same length."""

    def __init__(self, params: list[Tensor], states: int):
        self.params = params
        self.flat = _join([p.detach() for p in params]).contiguous()
        self.state = [self.flat.zeros_like().contiguous() for _ in range(states)]
        self.flat.realize(*self.state)
        self.attach()

    def attach(self) -> None:
        """Each parameter becomes its part of the flat buffer."""
        at = 0
        for p in self.params:
            n = prod(p.shape)
            p.uop = self.flat.shrink(((at, at + n),)).reshape(p.shape).uop
            at += n

    def is_attached(self) -> bool:
        return all(unviewed(p.uop) is self.flat.uop for p in self.params)


def _join(tensors: list[Tensor]) -> Tensor:
    flat = [t.reshape(-1) for t in tensors]
    return flat[0].cat(*flat[1:]) if len(flat) > 1 else flat[0]


class Optimizer:
    """Base of all: `zero_grad()`, `step()`. Learning rate and step count are tensors, so a JIT step may change them."""

    states = 0

    def __init__(self, params: list[Tensor], lr: float):
        unique: dict[int, Tensor] = {id(p): p for p in params}
        if not unique:
            raise ValueError("the optimiser got an empty list of parameters")
        for p in unique.values():
            if not p.dtype.is_float:
                raise TypeError(f"a parameter of {p.dtype.name} cannot be trained; parameters are floats")
            p.requires_grad = True
        self.params = list(unique.values())
        device = self.params[0].device
        self.lr = _scalar(lr, device)
        self.groups: list[_Group] = []

    def zero_grad(self) -> None:
        for p in self.params:
            p.grad = None

    def _prepare(self) -> None:
        """Builds the groups at the first step, and again if parameters were moved or replaced since."""
        if self.groups and all(g.is_attached() for g in self.groups):
            return
        self.params[0].realize(*self.params[1:])
        old = [(p, s) for g in self.groups for p, *s in zip(g.params, *([_split(x, g.params) for x in g.state] or [[]]))] if self.groups and self.states else []
        by_kind: dict[Any, list[Tensor]] = {}
        for p in self.params:
            if p.grad is not None:
                by_kind.setdefault((p.dtype, p.device), []).append(p)
        kept = {id(p): s for p, s in old}
        self.groups = []
        for ps in by_kind.values():
            g = _Group(ps, self.states)
            if kept:
                for k in range(self.states):
                    parts = [kept[id(p)][k] if id(p) in kept else p.zeros_like() for p in ps]
                    g.state[k] = _join(parts).contiguous().realize()
            self.groups.append(g)

    def schedule_step(self) -> list[Tensor]:
        """The updates, not yet run; returns what must be realized."""
        if all(p.grad is None for p in self.params):
            raise RuntimeError("step(): no parameter has a gradient; call loss.backward() first")
        self._prepare()
        out: list[Tensor] = self.tick()
        for g in self.groups:
            if any(p.grad is None for p in g.params):
                lost = [i for i, p in enumerate(self.params) if p.grad is None]
                raise RuntimeError(f"step(): parameters {lost} have no gradient this time; every step must reach the same parameters")
            grad = _join([p.grad for p in g.params])  # type: ignore[misc]
            for p, part in zip(g.params, _split(grad, g.params)):
                p.grad.replace(part)  # type: ignore[union-attr]
            out.append(grad)
            out += self.update(g.flat, grad, g.state)
            g.attach()
            out.append(g.flat)
        return out

    def tick(self) -> list[Tensor]:
        return []

    def update(self, flat: Tensor, grad: Tensor, state: list[Tensor]) -> list[Tensor]:
        """Assigns the new parameters to `flat`; returns the state tensors it assigned. All of shape (elements,)."""
        raise NotImplementedError

    def step(self) -> None:
        if not Tensor.training:
            raise RuntimeError("step() outside training: wrap the training loop in `with Tensor.train():`, so that dropout and batch norm know")
        todo = self.schedule_step()
        todo[0].realize(*todo[1:])


def _split(flat: Tensor, params: list[Tensor]) -> list[Tensor]:
    at, out = 0, []
    for p in params:
        n = prod(p.shape)
        out.append(flat.shrink(((at, at + n),)).reshape(p.shape))
        at += n
    return out


def _scalar(value: float, device: Any) -> Tensor:
    t = Tensor([float(value)], dtype=dtypes.float32)
    return (t.to(device) if device != t.device else t).contiguous().realize()


class SGD(Optimizer):
    """w ← w − lr·v with v ← momentum·v + g (+ weight_decay·w in g); `nesterov` looks ahead."""

    def __init__(self, params: list[Tensor], lr: float = 0.001, momentum: float = 0.0, weight_decay: float = 0.0, nesterov: bool = False):
        self.states = 1 if momentum else 0
        super().__init__(params, lr)
        self.momentum, self.weight_decay, self.nesterov = momentum, weight_decay, nesterov

    def update(self, flat: Tensor, grad: Tensor, state: list[Tensor]) -> list[Tensor]:
        g = grad + flat * self.weight_decay if self.weight_decay else grad
        if self.momentum:
            state[0].assign(state[0] * self.momentum + g)
            g = g + state[0] * self.momentum if self.nesterov else state[0]
        flat.assign(flat - g * self.lr)
        return state


class AdamW(Optimizer):
    """Adam with decoupled weight decay (Loshchilov and Hutter, 2019)."""

    states = 2
    decoupled = True

    def __init__(self, params: list[Tensor], lr: float = 0.001, betas: tuple[float, float] = (0.9, 0.999), eps: float = 1e-8, weight_decay: float = 0.01):
        super().__init__(params, lr)
        self.betas, self.eps, self.weight_decay = betas, eps, weight_decay
        device = self.params[0].device
        self.powers = [_scalar(1.0, device), _scalar(1.0, device)]  # betas to the number of steps

    def tick(self) -> list[Tensor]:
        for power, beta in zip(self.powers, self.betas):
            power.assign(power * beta)
        return self.powers

    def update(self, flat: Tensor, grad: Tensor, state: list[Tensor]) -> list[Tensor]:
        m, v = state
        b1, b2 = self.betas
        g = grad if self.decoupled or not self.weight_decay else grad + flat * self.weight_decay
        m.assign(m * b1 + g * (1 - b1))
        v.assign(v * b2 + g * g * (1 - b2))
        step = (m / (1 - self.powers[0])) / ((v / (1 - self.powers[1])).sqrt() + self.eps)
        if self.decoupled and self.weight_decay:
            step = step + flat * self.weight_decay
        flat.assign(flat - step * self.lr)
        return state


class Adam(AdamW):
    """Adam (Kingma and Ba, 2015); weight decay, if any, is added to the gradient."""

    decoupled = False

    def __init__(self, params: list[Tensor], lr: float = 0.001, betas: tuple[float, float] = (0.9, 0.999), eps: float = 1e-8, weight_decay: float = 0.0):
        super().__init__(params, lr, betas, eps, weight_decay)


__all__ = ["SGD", "Adam", "AdamW", "Optimizer"]
