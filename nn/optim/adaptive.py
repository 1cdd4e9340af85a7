"""Step sizes by the history of squared gradients: Adagrad, RMSprop, Adadelta."""

from __future__ import annotations

from typing import Unpack

from manygrad.nn.optim.flat import Flat, ParamGroup
from manygrad.nn.optim.optimizer import CommonOptions, Optimizer, Params
from manygrad.tensor.tensor import Tensor


def decayed(f: Flat, w: Tensor, g: Tensor) -> Tensor:
    """The gradient with weight decay."""
    return g + w * f["weight_decay"] if f["weight_decay"] else g


class Adagrad(Optimizer):
    """w ← w − lr / (1 + (t − 1)·lr_decay) · g / (√Σg² + eps) (Duchi et al., 2011)."""

    states = ("sum",)

    def __init__(self, params: Params, lr: float = 0.01, lr_decay: float = 0.0, weight_decay: float = 0.0,
                 initial_accumulator_value: float = 0.0, eps: float = 1e-10, *, maximize: bool = False,
                 **how: Unpack[CommonOptions]):  # fmt: skip
        super().__init__(params, {"lr": lr, "lr_decay": lr_decay, "weight_decay": weight_decay,
                                  "initial_accumulator_value": initial_accumulator_value, "eps": eps,
                                  "maximize": maximize}, **how)  # fmt: skip

    def initial_of(self, group: ParamGroup) -> dict[str, float]:
        return {"sum": group["initial_accumulator_value"]}

    def update(self, f: Flat, w: Tensor, g: Tensor, s: dict[str, Tensor]) -> None:
        g, total = decayed(f, w, g), s["sum"]
        total.assign(total + g * g)
        rate = f["lr"] / f.scalar(1 + (f.step - 1) * f.group["lr_decay"]) if f.group["lr_decay"] else f["lr"]
        f.flat.assign(w - rate * g / (total.sqrt() + f["eps"]))


class RMSprop(Optimizer):
    """w ← w − lr · g / (√v + eps), v a moving average of g²;
    `centered` subtracts the squared average of g (Graves, 2013)."""

    def __init__(self, params: Params, lr: float = 0.01, alpha: float = 0.99, eps: float = 1e-8,
                 weight_decay: float = 0.0, momentum: float = 0.0, centered: bool = False, *, maximize: bool = False,
                 **how: Unpack[CommonOptions]):  # fmt: skip
        super().__init__(
            params,
            {
                "lr": lr,
                "alpha": alpha,
                "eps": eps,
                "weight_decay": weight_decay,
                "momentum": momentum,
                "centered": centered,
                "maximize": maximize,
            },
            **how,
        )

    def states_of(self, group: ParamGroup) -> tuple[str, ...]:
        return (
            "square_avg",
            *(["momentum_buffer"] if group["momentum"] else []),
            *(["grad_avg"] if group["centered"] else []),
        )

    def update(self, f: Flat, w: Tensor, g: Tensor, s: dict[str, Tensor]) -> None:
        g, v, a = decayed(f, w, g), s["square_avg"], f["alpha"]
        v.assign(v * a + g * g * (1 - a))
        spread: Tensor = v
        if f.group["centered"]:
            mean = s["grad_avg"]
            mean.assign(mean * a + g * (1 - a))
            spread = v - mean * mean
        step = g / (spread.sqrt() + f["eps"])
        if f.group["momentum"]:
            s["momentum_buffer"].assign(s["momentum_buffer"] * f["momentum"] + step)
            step = s["momentum_buffer"]
        f.flat.assign(w - step * f["lr"])


class Adadelta(Optimizer):
    """w ← w − lr · d, d = √(u + eps) / √(v + eps) · g, with moving averages v of g² and u of d² (Zeiler, 2012)."""

    states = ("square_avg", "acc_delta")

    def __init__(
        self,
        params: Params,
        lr: float = 1.0,
        rho: float = 0.9,
        eps: float = 1e-6,
        weight_decay: float = 0.0,
        *,
        maximize: bool = False,
        **how: Unpack[CommonOptions],
    ):
        super().__init__(
            params, {"lr": lr, "rho": rho, "eps": eps, "weight_decay": weight_decay, "maximize": maximize}, **how
        )

    def update(self, f: Flat, w: Tensor, g: Tensor, s: dict[str, Tensor]) -> None:
        g, v, u, rho, eps = decayed(f, w, g), s["square_avg"], s["acc_delta"], f["rho"], f["eps"]
        v.assign(v * rho + g * g * (1 - rho))
        d = (u + eps).sqrt() / (v + eps).sqrt() * g
        f.flat.assign(w - d * f["lr"])
        u.assign(u * rho + d * d * (1 - rho))
