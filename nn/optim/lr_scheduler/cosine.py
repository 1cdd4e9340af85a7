"""Rates along a cosine (Loshchilov and Hutter, 2017)."""

from __future__ import annotations

import math

from manygrad.nn.optim.checking import check_count, check_number
from manygrad.nn.optim.lr_scheduler.base import LRScheduler
from manygrad.nn.optim.optimizer import Optimizer


class CosineAnnealingLR(LRScheduler):
    """From the first rate to eta_min in T_max steps, and back again."""

    def __init__(self, optimizer: Optimizer, T_max: int, eta_min: float = 0.0, last_epoch: int = -1):
        check_number("CosineAnnealingLR", "T_max", T_max, 1)
        check_number("CosineAnnealingLR", "eta_min", eta_min)
        self.T_max, self.eta_min = T_max, eta_min
        super().__init__(optimizer, last_epoch)

    def get_lr(self) -> list[float]:
        """From the last rate, so that a rate that others change as well is respected."""
        t, n = self.last_epoch, self.T_max
        if self.begins:
            return self.rates
        if (t - 1 - n) % (2 * n) == 0:
            return [r + (b - self.eta_min) * (1 - math.cos(math.pi / n)) / 2 for b, r in zip(self.base_lrs, self.rates)]
        change = (1 + math.cos(math.pi * t / n)) / (1 + math.cos(math.pi * (t - 1) / n))
        return [change * (r - self.eta_min) + self.eta_min for r in self.rates]

    def closed_form(self) -> list[float]:
        return [
            self.eta_min + (b - self.eta_min) * (1 + math.cos(math.pi * self.last_epoch / self.T_max)) / 2
            for b in self.base_lrs
        ]


class CosineAnnealingWarmRestarts(LRScheduler):
    """From the first rate to eta_min in T_0 steps, then again in T_0·T_mult, and so on.
    `step(epoch)` takes fractions."""

    def __init__(self, optimizer: Optimizer, T_0: int, T_mult: int = 1, eta_min: float = 0.0, last_epoch: int = -1):
        check_count("CosineAnnealingWarmRestarts", "T_0", T_0)
        check_count("CosineAnnealingWarmRestarts", "T_mult", T_mult)
        check_number("CosineAnnealingWarmRestarts", "eta_min", eta_min)
        self.T_0, self.T_mult, self.eta_min = T_0, T_mult, eta_min
        super().__init__(optimizer, last_epoch)

    def closed_form(self) -> list[float]:
        at, length = float(self.last_epoch), self.T_0
        if self.T_mult == 1:
            at %= length
        while at >= length:
            at, length = at - length, length * self.T_mult
        return [self.eta_min + (b - self.eta_min) * (1 + math.cos(math.pi * at / length)) / 2 for b in self.base_lrs]
