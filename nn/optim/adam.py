"""Adam and AdamW."""

from __future__ import annotations

from typing import Unpack

from manygrad.nn.optim.flat import Flat, ParamGroup
from manygrad.nn.optim.optimizer import CommonOptions, Optimizer, Params
from manygrad.tensor.tensor import Tensor

Betas = tuple[float, float]


class Adam(Optimizer):
    """Adam (Kingma and Ba, 2015); weight decay, if any, is added to the gradient.
    `amsgrad` divides by the largest v so far."""

    def __init__(self, params: Params, lr: float = 0.001, betas: Betas = (0.9, 0.999), eps: float = 1e-8,
                 weight_decay: float = 0.0, amsgrad: bool = False, *, maximize: bool = False,
                 decoupled_weight_decay: bool = False, **how: Unpack[CommonOptions]):  # fmt: skip
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay,
                                  "amsgrad": amsgrad, "maximize": maximize,
                                  "decoupled_weight_decay": decoupled_weight_decay}, **how)  # fmt: skip

    def states_of(self, group: ParamGroup) -> tuple[str, ...]:
        return ("exp_avg", "exp_avg_sq", "max_exp_avg_sq") if group["amsgrad"] else ("exp_avg", "exp_avg_sq")

    def update(self, f: Flat, w: Tensor, g: Tensor, s: dict[str, Tensor]) -> None:
        m, v = s["exp_avg"], s["exp_avg_sq"]
        b1, b2, decay = f.beta("betas", 0), f.beta("betas", 1), f["weight_decay"]
        if decay and not f.group["decoupled_weight_decay"]:
            g = g + w * decay
        m.assign(m * b1 + g * (1 - b1))
        v.assign(v * b2 + g * g * (1 - b2))
        if f.group["amsgrad"]:
            v, low = s["max_exp_avg_sq"], v
            v.assign(v.maximum(low))
        c1, c2 = f.scalar(1 / f.correction(0)), f.scalar(1 / f.correction(1))
        step = (m * c1) / ((v * c2).sqrt() + f["eps"])
        if decay and f.group["decoupled_weight_decay"]:
            step = step + w * decay
        f.flat.assign(w - step * f["lr"])


class AdamW(Adam):
    """Adam with decoupled weight decay (Loshchilov and Hutter, 2019)."""

    def __init__(self, params: Params, lr: float = 0.001, betas: Betas = (0.9, 0.999), eps: float = 1e-8,
                 weight_decay: float = 0.01, amsgrad: bool = False, *, maximize: bool = False,
                 **how: Unpack[CommonOptions]):  # fmt: skip
        super().__init__(
            params, lr, betas, eps, weight_decay, amsgrad, maximize=maximize, decoupled_weight_decay=True, **how
        )
