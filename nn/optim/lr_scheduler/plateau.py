"""A rate that falls when a measure stops improving."""

from __future__ import annotations

import math
from typing import Any

from manygrad.nn.optim.checking import check_number
from manygrad.nn.optim.lr_scheduler.base import check_optimizer, check_state
from manygrad.nn.optim.optimizer import Optimizer


class ReduceLROnPlateau:
    """`step(metric)`: after more than `patience` steps without improvement, the rate times `factor`
    (not below min_lr)."""

    def __init__(self, optimizer: Optimizer, mode: str = "min", factor: float = 0.1, patience: int = 10,
                 threshold: float = 1e-4, threshold_mode: str = "rel", cooldown: int = 0,
                 min_lr: float | list[float] = 0, eps: float = 1e-8):  # fmt: skip
        check_optimizer("ReduceLROnPlateau", optimizer)
        check_number("ReduceLROnPlateau", "factor", factor, 0, 1, below=True)
        for name, value in (("patience", patience), ("threshold", threshold), ("cooldown", cooldown), ("eps", eps)):
            check_number("ReduceLROnPlateau", name, value)
        if mode not in ("min", "max") or threshold_mode not in ("rel", "abs"):
            raise ValueError(
                'ReduceLROnPlateau: mode is "min" or "max" and threshold_mode "rel" or "abs", '
                f"not {mode!r} and {threshold_mode!r}"
            )
        self.optimizer, self.mode, self.factor, self.patience, self.cooldown, self.eps = (
            optimizer,
            mode,
            factor,
            patience,
            cooldown,
            eps,
        )
        self.threshold, self.threshold_mode = threshold, threshold_mode
        self.min_lrs = list(min_lr) if isinstance(min_lr, (list, tuple)) else [min_lr] * len(optimizer.param_groups)
        if len(self.min_lrs) != len(optimizer.param_groups):
            raise ValueError(
                f"ReduceLROnPlateau: {len(optimizer.param_groups)} parameter groups need as many min_lr, "
                f"got {self.min_lrs}"
            )
        for low in self.min_lrs:
            check_number("ReduceLROnPlateau", "min_lr", low)
        self.best = math.inf if mode == "min" else -math.inf
        self.num_bad_epochs, self.cooldown_counter, self.last_epoch = 0, 0, 0
        self._last_lr = [float(g["lr"]) for g in optimizer.param_groups]

    def is_better(self, a: float, best: float) -> bool:
        sign = 1 if self.mode == "max" else -1
        margin = self.threshold * (best if self.threshold_mode == "rel" else 1.0)
        return a * sign > (best + sign * margin) * sign if math.isfinite(best) else a * sign > best * sign

    def step(self, metrics: Any, epoch: int | None = None) -> None:
        now = float(metrics)
        self.last_epoch = self.last_epoch + 1 if epoch is None else epoch
        if self.is_better(now, self.best):
            self.best, self.num_bad_epochs = now, 0
        else:
            self.num_bad_epochs += 1
        if self.cooldown_counter > 0:
            self.cooldown_counter, self.num_bad_epochs = self.cooldown_counter - 1, 0
        if self.num_bad_epochs > self.patience:
            for g, low in zip(self.optimizer.param_groups, self.min_lrs):
                old = float(g["lr"])
                new = max(old * self.factor, low)
                if old - new > self.eps:
                    g["lr"] = new
            self.cooldown_counter, self.num_bad_epochs = self.cooldown, 0
        self._last_lr = [float(g["lr"]) for g in self.optimizer.param_groups]

    def get_last_lr(self) -> list[float]:
        return self._last_lr

    def state_dict(self) -> dict[str, Any]:
        return {k: v for k, v in vars(self).items() if k != "optimizer"}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        check_state(self, state_dict)
        vars(self).update(state_dict)
