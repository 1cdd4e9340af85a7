"""Steps scaled by the ratio of norms of each parameter: LARS and LAMB, for large batches."""

from __future__ import annotations

from typing import Unpack

from manygrad.nn.optim.adam import Betas
from manygrad.nn.optim.flat import Flat, ParamGroup
from manygrad.nn.optim.optimizer import CommonOptions, Optimizer, Params
from manygrad.tensor.tensor import Tensor


def _ratio(top: Tensor, bottom: Tensor, first: Tensor, second: Tensor) -> Tensor:
    """top / bottom where both norms are positive, else 1."""
    return ((first > 0) & (second > 0))._where(top / bottom, 1.0)


class LARS(Optimizer):
    """SGD with momentum whose gradient is scaled, parameter by parameter, by tcoef |w| / (|g| + weight_decay |w|)
    (You et al., 2017)."""

    def __init__(self, params: Params, lr: float = 0.001, momentum: float = 0.9, weight_decay: float = 1e-4,
                 nesterov: bool = False, tcoef: float = 0.001, *, maximize: bool = False):  # fmt: skip
        super().__init__(
            params,
            {
                "lr": lr,
                "momentum": momentum,
                "weight_decay": weight_decay,
                "nesterov": nesterov,
                "tcoef": tcoef,
                "maximize": maximize,
            },
        )

    def states_of(self, group: ParamGroup) -> tuple[str, ...]:
        return ("momentum_buffer",) if group["momentum"] else ()

    def update(self, f: Flat, w: Tensor, g: Tensor, s: dict[str, Tensor]) -> None:
        of_w, of_g = f.norms(w, g)
        ratios = [
            _ratio(a * f.group["tcoef"], b + a * f["weight_decay"], a, b).contiguous() for a, b in zip(of_w, of_g)
        ]
        g = (g + w * f["weight_decay"]) * f.spread(ratios)
        if s:
            v = s["momentum_buffer"]
            v.assign(v * f["momentum"] + g)
            g = g + v * f["momentum"] if f.group["nesterov"] else v
        f.flat.assign(w - g * f["lr"])


class LAMB(Optimizer):
    """AdamW whose step is scaled, parameter by parameter, by |w| / |step| (You et al., 2020)."""

    states = ("exp_avg", "exp_avg_sq")

    def __init__(
        self,
        params: Params,
        lr: float = 0.001,
        betas: Betas = (0.9, 0.999),
        eps: float = 1e-6,
        weight_decay: float = 0.0,
        *,
        maximize: bool = False,
        **how: Unpack[CommonOptions],
    ):
        super().__init__(
            params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay, "maximize": maximize}, **how
        )

    def update(self, f: Flat, w: Tensor, g: Tensor, s: dict[str, Tensor]) -> None:
        m, v, b1, b2 = s["exp_avg"], s["exp_avg_sq"], f.beta("betas", 0), f.beta("betas", 1)
        m.assign(m * b1 + g * (1 - b1))
        v.assign(v * b2 + g * g * (1 - b2))
        step = (m / f.scalar(f.correction(0))) / ((v / f.scalar(f.correction(1))).sqrt() + f["eps"])
        step = (step + w * f["weight_decay"] if f["weight_decay"] else step).contiguous()
        of_w, of_step = f.norms(w, step)
        ratios = [_ratio(a, b, a, b).contiguous() for a, b in zip(of_w, of_step)]
        f.flat.assign(w - step * f.spread(ratios) * f["lr"])
