"""Rates, and momentum against them, that go up and down (Smith, 2017 and 2018)."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from manygrad.nn.optim.checking import check_count, check_number
from manygrad.nn.optim.lr_scheduler.base import LRScheduler, check_optimizer
from manygrad.nn.optim.optimizer import Optimizer


def _per_group(owner: str, name: str, optimizer: Optimizer, value: float | list[float]) -> list[float]:
    check_optimizer(owner, optimizer)
    values = list(value) if isinstance(value, (list, tuple)) else [value] * len(optimizer.param_groups)
    if len(values) != len(optimizer.param_groups):
        raise ValueError(f"{owner}: {len(optimizer.param_groups)} parameter groups need as many {name}, got {values}")
    for v in values:
        check_number(owner, name, v)
    return values


class _Cycling(LRScheduler):
    """Also sets momentum (or the first beta), which becomes a value in memory as the rate is."""

    cycle_momentum: bool

    def _momentum_key(self) -> str:
        group = self.optimizer.param_groups[0]
        key = "momentum" if "momentum" in group else "betas" if "betas" in group else ""
        if not key:
            raise ValueError(
                f"{type(self).__name__}: the optimiser has neither momentum nor betas; pass cycle_momentum=False"
            )
        return key

    def _begin(self, optimizer: Optimizer) -> None:
        self.optimizer = optimizer
        if self.cycle_momentum:
            key = self._momentum_key()
            for g in optimizer.param_groups:
                g.variable.add(key)

    def _set_momentum(self, values: list[float]) -> None:
        key = self._momentum_key()
        for g, v in zip(self.optimizer.param_groups, values):
            g[key] = v if key == "momentum" else (v, *g[key][1:])


class OneCycleLR(_Cycling):
    """Up from max_lr / div_factor to max_lr in a share pct_start of all steps, then down to initial / final_div_factor;
    momentum the other way."""

    def __init__(self, optimizer: Optimizer, max_lr: float | list[float], total_steps: int | None = None,
                 epochs: int | None = None, steps_per_epoch: int | None = None, pct_start: float = 0.3,
                 anneal_strategy: str = "cos", cycle_momentum: bool = True, base_momentum: float | list[float] = 0.85,
                 max_momentum: float | list[float] = 0.95, div_factor: float = 25.0, final_div_factor: float = 1e4,
                 three_phase: bool = False, last_epoch: int = -1):  # fmt: skip
        if total_steps is None and (epochs is None or steps_per_epoch is None):
            raise ValueError("OneCycleLR: give total_steps, or epochs and steps_per_epoch")
        if anneal_strategy not in ("cos", "linear"):
            raise ValueError(f'OneCycleLR: anneal_strategy is "cos" or "linear", not {anneal_strategy!r}')
        check_number("OneCycleLR", "pct_start", pct_start, 0, 1)
        counts = (
            {"total_steps": total_steps}
            if total_steps is not None
            else {"epochs": epochs, "steps_per_epoch": steps_per_epoch}
        )
        for name, n in counts.items():
            check_count("OneCycleLR", name, n)
        tops = _per_group("OneCycleLR", "max_lr", optimizer, max_lr)
        lows, highs = (
            _per_group("OneCycleLR", name, optimizer, m)
            for name, m in (("base_momentum", base_momentum), ("max_momentum", max_momentum))
        )
        for name, factor in (("div_factor", div_factor), ("final_div_factor", final_div_factor)):
            check_number("OneCycleLR", name, factor)
            if factor == 0:
                raise ValueError(f"OneCycleLR: {name} must be positive, got {factor}")
        self.total_steps = total_steps if total_steps is not None else epochs * steps_per_epoch  # type: ignore[operator]
        self.anneal_strategy, self.cycle_momentum = anneal_strategy, cycle_momentum
        up = float(pct_start * self.total_steps) - 1
        # (end of the phase, from which rate, to which, from which momentum, to which)
        if three_phase:
            self.phases = [(up, "initial_lr", "max_lr", "max_momentum", "base_momentum"),
                           (2 * up, "max_lr", "initial_lr", "base_momentum", "max_momentum"),
                           (self.total_steps - 1, "initial_lr", "min_lr", "max_momentum", "max_momentum")]  # fmt: skip
        else:
            self.phases = [
                (up, "initial_lr", "max_lr", "max_momentum", "base_momentum"),
                (self.total_steps - 1, "max_lr", "min_lr", "base_momentum", "max_momentum"),
            ]
        self._begin(optimizer)
        if last_epoch == -1:
            for g, top in zip(optimizer.param_groups, tops):
                g.update(initial_lr=top / div_factor, max_lr=top, min_lr=top / div_factor / final_div_factor)
            if cycle_momentum:
                for g, low, high in zip(optimizer.param_groups, lows, highs):
                    g.update(base_momentum=low, max_momentum=high)
        super().__init__(optimizer, last_epoch)

    def _between(self, start: float, end: float, share: float) -> float:
        return (
            end + (start - end) / 2 * (1 + math.cos(math.pi * share))
            if self.anneal_strategy == "cos"
            else start + (end - start) * share
        )

    def closed_form(self) -> list[float]:
        at = self.last_epoch
        if at > self.total_steps:
            raise ValueError(f"OneCycleLR: step {at} of {self.total_steps}; make a new schedule to go on")
        begin = 0.0
        for i, phase in enumerate(self.phases):
            if at <= phase[0] or i == len(self.phases) - 1:
                break
            begin = phase[0]
        end, lr0, lr1, m0, m1 = phase
        share = (at - begin) / (end - begin)
        if self.cycle_momentum:
            self._set_momentum([self._between(g[m0], g[m1], share) for g in self.optimizer.param_groups])
        return [self._between(g[lr0], g[lr1], share) for g in self.optimizer.param_groups]


class CyclicLR(_Cycling):
    """Between base_lr and max_lr, up in step_size_up steps and down in step_size_down."""

    def __init__(self, optimizer: Optimizer, base_lr: float | list[float], max_lr: float | list[float],
                 step_size_up: int = 2000, step_size_down: int | None = None, mode: str = "triangular",
                 gamma: float = 1.0, scale_fn: Callable[[float], float] | None = None, scale_mode: str = "cycle",
                 cycle_momentum: bool = True, base_momentum: float | list[float] = 0.8,
                 max_momentum: float | list[float] = 0.9, last_epoch: int = -1):  # fmt: skip
        if mode not in ("triangular", "triangular2", "exp_range") and scale_fn is None:
            raise ValueError(f'CyclicLR: mode is "triangular", "triangular2" or "exp_range", not {mode!r}')
        for name, size in (("step_size_up", step_size_up), ("step_size_down", step_size_down)):
            if size is not None:
                check_number("CyclicLR", name, size, 1)
        check_number("CyclicLR", "gamma", gamma)
        self.total_size = step_size_up + (step_size_up if step_size_down is None else step_size_down)
        self.step_ratio, self.mode, self.gamma = step_size_up / self.total_size, mode, gamma
        self.scale_fn, self.scale_mode = (
            scale_fn,
            scale_mode if scale_fn is not None else "iterations" if mode == "exp_range" else "cycle",
        )
        self.max_lrs, self.cycle_momentum = _per_group("CyclicLR", "max_lr", optimizer, max_lr), cycle_momentum
        self.base_momentums, self.max_momentums = (
            _per_group("CyclicLR", "base_momentum", optimizer, base_momentum),
            _per_group("CyclicLR", "max_momentum", optimizer, max_momentum),
        )
        self._begin(optimizer)
        for g, low in zip(optimizer.param_groups, _per_group("CyclicLR", "base_lr", optimizer, base_lr)):
            if last_epoch == -1:
                g["lr"] = g["initial_lr"] = low
        super().__init__(optimizer, last_epoch)

    def _scale(self, x: float) -> float:
        if self.scale_fn is not None:
            return self.scale_fn(x)
        return {"triangular": 1.0, "triangular2": 1 / 2.0 ** (x - 1), "exp_range": self.gamma**x}[self.mode]

    def closed_form(self) -> list[float]:
        cycle = math.floor(1 + self.last_epoch / self.total_size)
        x = 1.0 + self.last_epoch / self.total_size - cycle
        height = x / self.step_ratio if x <= self.step_ratio else (x - 1) / (self.step_ratio - 1)
        height *= self._scale(cycle if self.scale_mode == "cycle" else self.last_epoch)
        if self.cycle_momentum:
            self._set_momentum(
                [high - (high - low) * height for low, high in zip(self.base_momentums, self.max_momentums)]
            )
        return [low + (high - low) * height for low, high in zip(self.base_lrs, self.max_lrs)]

    def state_dict(self) -> dict[str, Any]:
        return {k: v for k, v in super().state_dict().items() if k != "scale_fn"}
