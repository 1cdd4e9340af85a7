"""Rates that fall (or rise) by a rule of the step's number."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable
from typing import Any

from manygrad.nn.optim.checking import check_count, check_number
from manygrad.nn.optim.lr_scheduler.base import LRScheduler, check_optimizer
from manygrad.nn.optim.optimizer import Optimizer

Factor = Callable[[int], float]


class _Product(LRScheduler):
    """Each step multiplies the last rate by `factor()`, so a rate that others change as well is respected."""

    def factor(self) -> float:
        raise NotImplementedError

    def get_lr(self) -> list[float]:
        return self.rates if self.begins else [r * self.factor() for r in self.rates]


class StepLR(_Product):
    """Times gamma every step_size steps."""

    def __init__(self, optimizer: Optimizer, step_size: int, gamma: float = 0.1, last_epoch: int = -1):
        check_count("StepLR", "step_size", step_size)
        check_number("StepLR", "gamma", gamma)
        self.step_size, self.gamma = step_size, gamma
        super().__init__(optimizer, last_epoch)

    def factor(self) -> float:
        return self.gamma if self.last_epoch % self.step_size == 0 else 1.0

    def closed_form(self) -> list[float]:
        return [b * self.gamma ** (self.last_epoch // self.step_size) for b in self.base_lrs]


class MultiStepLR(_Product):
    """Times gamma at each milestone."""

    def __init__(self, optimizer: Optimizer, milestones: list[int], gamma: float = 0.1, last_epoch: int = -1):
        for m in milestones:
            check_count("MultiStepLR", "a milestone", m, 0)
        check_number("MultiStepLR", "gamma", gamma)
        self.milestones, self.gamma = sorted(milestones), gamma
        super().__init__(optimizer, last_epoch)

    def factor(self) -> float:
        return self.gamma ** self.milestones.count(self.last_epoch)

    def closed_form(self) -> list[float]:
        return [b * self.gamma ** bisect_right(self.milestones, self.last_epoch) for b in self.base_lrs]


class ExponentialLR(_Product):
    """Times gamma every step."""

    def __init__(self, optimizer: Optimizer, gamma: float, last_epoch: int = -1):
        check_number("ExponentialLR", "gamma", gamma)
        self.gamma = gamma
        super().__init__(optimizer, last_epoch)

    def factor(self) -> float:
        return self.gamma

    def closed_form(self) -> list[float]:
        return [b * self.gamma**self.last_epoch for b in self.base_lrs]


class ConstantLR(LRScheduler):
    """Times `factor` until step total_iters."""

    def __init__(self, optimizer: Optimizer, factor: float = 1 / 3, total_iters: int = 5, last_epoch: int = -1):
        check_number("ConstantLR", "factor", factor, 0, 1)
        check_number("ConstantLR", "total_iters", total_iters, 1)
        self.factor, self.total_iters = factor, total_iters
        super().__init__(optimizer, last_epoch)

    def get_lr(self) -> list[float]:
        ends = self.last_epoch == self.total_iters and not self.begins
        change = self.factor if self.last_epoch == 0 else 1 / self.factor if ends else 1.0
        return [r * change for r in self.rates]

    def closed_form(self) -> list[float]:
        return [b * (self.factor if self.last_epoch < self.total_iters else 1.0) for b in self.base_lrs]


class LinearLR(LRScheduler):
    """A factor that goes straight from start_factor to end_factor in total_iters steps."""

    def __init__(
        self,
        optimizer: Optimizer,
        start_factor: float = 1 / 3,
        end_factor: float = 1.0,
        total_iters: int = 5,
        last_epoch: int = -1,
    ):
        check_number("LinearLR", "start_factor", start_factor, 0, 1)
        check_number("LinearLR", "end_factor", end_factor, 0, 1)
        check_number("LinearLR", "total_iters", total_iters, 1)
        if start_factor == 0:
            raise ValueError("LinearLR: start_factor must not be 0, each rate is computed from the one before")
        self.start_factor, self.end_factor, self.total_iters = start_factor, end_factor, total_iters
        super().__init__(optimizer, last_epoch)

    def _factor(self, at: int) -> float:
        return self.start_factor + (self.end_factor - self.start_factor) * min(at, self.total_iters) / self.total_iters

    def get_lr(self) -> list[float]:
        if self.last_epoch == 0:
            return [r * self.start_factor for r in self.rates]
        before = 0 if self.begins else self._factor(self.last_epoch - 1)
        return [r * (self._factor(self.last_epoch) / before if before else 1.0) for r in self.rates]

    def closed_form(self) -> list[float]:
        return [b * self._factor(self.last_epoch) for b in self.base_lrs]


class PolynomialLR(LRScheduler):
    """Down to 0 in total_iters steps, as (1 − t / total_iters)^power."""

    def __init__(self, optimizer: Optimizer, total_iters: int = 5, power: float = 1.0, last_epoch: int = -1):
        check_number("PolynomialLR", "total_iters", total_iters, 1)
        check_number("PolynomialLR", "power", power)
        self.total_iters, self.power = total_iters, power
        super().__init__(optimizer, last_epoch)

    def get_lr(self) -> list[float]:
        t, n = self.last_epoch, self.total_iters
        if self.begins or t > n:
            return self.rates
        return [r * ((1 - t / n) / (1 - (t - 1) / n)) ** self.power for r in self.rates]

    def closed_form(self) -> list[float]:
        return [
            b * (1 - min(self.last_epoch, self.total_iters) / self.total_iters) ** self.power for b in self.base_lrs
        ]


def _rules(owner: str, optimizer: Optimizer, rules: Factor | list[Factor]) -> list[Factor]:
    check_optimizer(owner, optimizer)
    found = list(rules) if isinstance(rules, (list, tuple)) else [rules] * len(optimizer.param_groups)
    if len(found) != len(optimizer.param_groups):
        raise ValueError(
            f"{owner}: {len(optimizer.param_groups)} parameter groups need as many functions, got {len(found)}"
        )
    for rule in found:
        if not callable(rule):
            raise TypeError(f"{owner}: lr_lambda is a function of the step's number, not {rule!r}")
    return found


class LambdaLR(LRScheduler):
    """The first rate times lr_lambda(step)."""

    def __init__(self, optimizer: Optimizer, lr_lambda: Factor | list[Factor], last_epoch: int = -1):
        self.lr_lambdas = _rules("LambdaLR", optimizer, lr_lambda)
        super().__init__(optimizer, last_epoch)

    def closed_form(self) -> list[float]:
        return [b * rule(self.last_epoch) for b, rule in zip(self.base_lrs, self.lr_lambdas)]

    def state_dict(self) -> dict[str, Any]:
        return {k: v for k, v in super().state_dict().items() if k != "lr_lambdas"}


class MultiplicativeLR(LRScheduler):
    """The last rate times lr_lambda(step)."""

    def __init__(self, optimizer: Optimizer, lr_lambda: Factor | list[Factor], last_epoch: int = -1):
        self.lr_lambdas = _rules("MultiplicativeLR", optimizer, lr_lambda)
        super().__init__(optimizer, last_epoch)

    def get_lr(self) -> list[float]:
        return (
            self.rates if self.begins else [r * rule(self.last_epoch) for r, rule in zip(self.rates, self.lr_lambdas)]
        )

    def state_dict(self) -> dict[str, Any]:
        return {k: v for k, v in super().state_dict().items() if k != "lr_lambdas"}
