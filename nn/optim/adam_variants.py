"""Relatives of Adam: Adamax, NAdam, RAdam."""

from __future__ import annotations

import math
from typing import Unpack

from manygrad.nn.optim.adam import Betas
from manygrad.nn.optim.adaptive import decayed
from manygrad.nn.optim.flat import Flat
from manygrad.nn.optim.optimizer import CommonOptions, Optimizer, Params
from manygrad.tensor.tensor import Tensor


class Adamax(Optimizer):
    """Adam with the largest instead of the mean square: u ← max(β₂ u, |g| + eps) (Kingma and Ba, 2015)."""

    states = ("exp_avg", "exp_inf")

    def __init__(
        self,
        params: Params,
        lr: float = 0.002,
        betas: Betas = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        *,
        maximize: bool = False,
        **how: Unpack[CommonOptions],
    ):
        super().__init__(
            params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay, "maximize": maximize}, **how
        )

    def update(self, f: Flat, w: Tensor, g: Tensor, s: dict[str, Tensor]) -> None:
        g, m, u, b1 = decayed(f, w, g), s["exp_avg"], s["exp_inf"], f.beta("betas", 0)
        m.assign(m * b1 + g * (1 - b1))
        u.assign((u * f.beta("betas", 1)).maximum(g.abs() + f["eps"]))
        f.flat.assign(w - f["lr"] / f.scalar(f.correction(0)) * m / u)


class _Decayed(Optimizer):
    """Adam's two averages, with weight decay in the gradient or apart from it."""

    states = ("exp_avg", "exp_avg_sq")

    def averages(self, f: Flat, w: Tensor, g: Tensor, s: dict[str, Tensor]) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """(w, g, m, v) after decay and with the gradient in m and v."""
        if f.group["decoupled_weight_decay"]:
            w = w * (1 - f["lr"] * f["weight_decay"]) if f["weight_decay"] else w
        else:
            g = decayed(f, w, g)
        m, v, b1, b2 = s["exp_avg"], s["exp_avg_sq"], f.beta("betas", 0), f.beta("betas", 1)
        m.assign(m * b1 + g * (1 - b1))
        v.assign(v * b2 + g * g * (1 - b2))
        return w, g, m, v


class NAdam(_Decayed):
    """Adam with Nesterov's momentum (Dozat, 2016); μₜ = β₁ (1 − 0.96^(t·momentum_decay) / 2)."""

    initial = {"mu_product": 1.0}

    def __init__(self, params: Params, lr: float = 0.002, betas: Betas = (0.9, 0.999), eps: float = 1e-8,
                 weight_decay: float = 0.0, momentum_decay: float = 0.004, decoupled_weight_decay: bool = False, *,
                 maximize: bool = False, **how: Unpack[CommonOptions]):  # fmt: skip
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay,
                                  "momentum_decay": momentum_decay, "decoupled_weight_decay": decoupled_weight_decay,
                                  "maximize": maximize}, **how)  # fmt: skip

    def update(self, f: Flat, w: Tensor, g: Tensor, s: dict[str, Tensor]) -> None:
        w, g, m, v = self.averages(f, w, g, s)
        b1, decay = f.group.value("betas", f.device, 0), f.group["momentum_decay"] * math.log(0.96)
        mu, following = (((t * decay).exp() * -0.5 + 1) * b1 for t in (f.step, f.step + 1))
        product = f.scalars["mu_product"]
        product.assign(product * mu)
        denominator = (v / f.scalar(f.correction(1))).sqrt() + f["eps"]
        by_gradient, by_momentum = f.scalar((1 - mu) / (1 - product)), f.scalar(following / (1 - product * following))
        f.flat.assign(w - f["lr"] * (by_gradient * g + by_momentum * m) / denominator)


class RAdam(_Decayed):
    """Adam whose step is rectified while the variance of v is not yet known (Liu et al., 2020)."""

    def __init__(self, params: Params, lr: float = 0.001, betas: Betas = (0.9, 0.999), eps: float = 1e-8,
                 weight_decay: float = 0.0, decoupled_weight_decay: bool = False, *, maximize: bool = False,
                 **how: Unpack[CommonOptions]):  # fmt: skip
        super().__init__(
            params,
            {
                "lr": lr,
                "betas": betas,
                "eps": eps,
                "weight_decay": weight_decay,
                "decoupled_weight_decay": decoupled_weight_decay,
                "maximize": maximize,
            },
            **how,
        )

    def update(self, f: Flat, w: Tensor, g: Tensor, s: dict[str, Tensor]) -> None:
        w, g, m, v = self.averages(f, w, g, s)
        c2 = f.correction(1)
        limit = 2 / (1 - f.group["betas"][1]) - 1
        rho = limit - f.step * 2 * (1 - c2) / c2
        share = (rho - 4) * (rho - 2) * limit / (rho * ((limit - 4) * (limit - 2)))
        rectified = f.scalar((share.maximum(0) * c2).sqrt())
        known = f.scalar((rho > 5).cast(rho.dtype))
        by_variance = rectified / (v.sqrt() + f["eps"])
        f.flat.assign(w - f["lr"] * (m / f.scalar(f.correction(0))) * (known > 0)._where(by_variance, 1.0))
