"""Schedules made of schedules."""

from __future__ import annotations

from bisect import bisect_right
from typing import Any

from manygrad.nn.optim.checking import check_count
from manygrad.nn.optim.lr_scheduler.base import LRScheduler, check_state
from manygrad.nn.optim.optimizer import Optimizer


def _same_optimizer(name: str, schedulers: list[Any], optimizer: Optimizer | None) -> Optimizer:
    if not schedulers:
        raise ValueError(f"{name}: no schedulers")
    for s in schedulers:
        if not isinstance(s, LRScheduler):
            raise TypeError(
                f"{name} takes schedulers whose step() needs nothing, not {type(s).__name__}; step that one itself"
            )
    optimizer = optimizer or schedulers[0].optimizer
    if any(s.optimizer is not optimizer for s in schedulers):
        raise ValueError(f"{name}: all schedulers must have the same optimiser")
    return optimizer


class _Composed(LRScheduler):
    _schedulers: list[Any]

    def restart(self) -> None:
        for s in self._schedulers:
            s.restart()

    def begin(self) -> None:
        for g in self.optimizer.param_groups:
            g["lr"] = g["initial_lr"]
        self.restart()
        self.step()

    def state_dict(self) -> dict[str, Any]:
        return {
            **{k: v for k, v in super().state_dict().items() if k != "_schedulers"},
            "_schedulers": [s.state_dict() for s in self._schedulers],
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        check_state(self, state_dict)
        vars(self).update({k: v for k, v in state_dict.items() if k != "_schedulers"})
        for s, state in zip(self._schedulers, state_dict["_schedulers"]):
            s.load_state_dict(state)


class SequentialLR(_Composed):
    """The first scheduler until the first milestone, then the second, which begins at its step 0, and so on."""

    def __init__(
        self, optimizer: Optimizer, schedulers: list[LRScheduler], milestones: list[int], last_epoch: int = -1
    ):
        self.optimizer = _same_optimizer("SequentialLR", schedulers, optimizer)
        if len(milestones) != len(schedulers) - 1:
            raise ValueError(
                f"SequentialLR: {len(schedulers)} schedulers need {len(schedulers) - 1} milestones, got {milestones}"
            )
        for m in milestones:
            check_count("SequentialLR", "a milestone", m)
        if sorted(milestones) != list(milestones):
            raise ValueError(f"SequentialLR: milestones rise, got {milestones}")
        self._schedulers, self._milestones = schedulers, milestones
        self.begin()  # (what the constructors of the schedulers did is undone)
        self.last_epoch = last_epoch + 1

    def restart(self) -> None:
        super().restart()
        self.last_epoch = -1

    def step(self) -> None:  # type: ignore[override]
        self.last_epoch += 1
        i = bisect_right(self._milestones, self.last_epoch)
        s = self._schedulers[i]
        if i > 0 and self._milestones[i - 1] == self.last_epoch:
            s.begin()
        else:
            s.step()
        self._last_lr = s.get_last_lr()


class ChainedScheduler(_Composed):
    """All schedulers at every step, one after another."""

    def __init__(self, schedulers: list[LRScheduler], optimizer: Optimizer | None = None):
        self.optimizer = _same_optimizer("ChainedScheduler", schedulers, optimizer)
        self._schedulers = schedulers
        self._last_lr = self.rates

    def step(self) -> None:  # type: ignore[override]
        for s in self._schedulers:
            s.step()
        self._last_lr = self.rates
