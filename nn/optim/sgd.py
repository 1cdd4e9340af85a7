"""Stochastic gradient descent."""

from __future__ import annotations

from typing import Unpack

from manygrad.nn.optim.flat import Flat, ParamGroup
from manygrad.nn.optim.optimizer import CommonOptions, Optimizer, Params
from manygrad.tensor.tensor import Tensor


class SGD(Optimizer):
    """w ← w − lr·v with v ← momentum·v + (1 − dampening)·g (+ weight_decay·w in g); `nesterov` looks ahead.
    The first v is g."""

    def __init__(self, params: Params, lr: float = 0.001, momentum: float = 0.0, dampening: float = 0.0,
                 weight_decay: float = 0.0, nesterov: bool = False, *, maximize: bool = False,
                 **how: Unpack[CommonOptions]):  # fmt: skip
        super().__init__(
            params,
            {
                "lr": lr,
                "momentum": momentum,
                "dampening": dampening,
                "weight_decay": weight_decay,
                "nesterov": nesterov,
                "maximize": maximize,
            },
            **how,
        )

    def check(self, group: ParamGroup) -> None:
        super().check(group)
        if group["nesterov"] and (not group["momentum"] or group["dampening"]):
            raise ValueError("SGD: nesterov needs a momentum and no dampening")

    def states_of(self, group: ParamGroup) -> tuple[str, ...]:
        return ("momentum_buffer",) if group["momentum"] else ()

    def update(self, f: Flat, w: Tensor, g: Tensor, s: dict[str, Tensor]) -> None:
        if f["weight_decay"]:
            g = g + w * f["weight_decay"]
        if s:
            v, damping = s["momentum_buffer"], 0.0 if f.fresh else f.group["dampening"]
            v.assign(v * f["momentum"] + (g * (1 - damping) if damping else g))
            g = g + v * f["momentum"] if f.group["nesterov"] else v
        f.flat.assign(w - g * f["lr"])
