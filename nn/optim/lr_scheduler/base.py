"""`LRScheduler`: sets the groups' learning rates, a number of `step()`s after the start. A scheduler steps outside a
TinyJit step; the captured step reads the rate from memory."""

from __future__ import annotations

from typing import Any

from manygrad.nn.optim.checking import check_count
from manygrad.nn.optim.optimizer import Optimizer


def check_optimizer(owner: str, optimizer: Any) -> None:
    if not isinstance(optimizer, Optimizer):
        raise TypeError(f"{owner} takes an optimiser, not {type(optimizer).__name__}")


class LRScheduler:
    """A subclass writes `get_lr` (from the rates of the last step) and, where there is one, `closed_form`
    (from the first ones)."""

    def __init__(self, optimizer: Optimizer, last_epoch: int = -1):
        check_optimizer(type(self).__name__, optimizer)
        check_count(type(self).__name__, "last_epoch", last_epoch, -1)
        self.optimizer, self.last_epoch = optimizer, last_epoch
        for g in optimizer.param_groups:
            if last_epoch == -1:
                g.setdefault("initial_lr", float(g["lr"]))
            elif "initial_lr" not in g:
                raise KeyError(
                    f'{type(self).__name__}: to go on from last_epoch={last_epoch}, every group needs "initial_lr"; '
                    "load the optimiser's state first"
                )
        self.base_lrs: list[float] = [g["initial_lr"] for g in optimizer.param_groups]
        self._last_lr: list[float] = []
        self.step()

    def get_lr(self) -> list[float]:
        """The rates at `last_epoch`."""
        return self.closed_form()

    def closed_form(self) -> list[float]:
        raise NotImplementedError(f"{type(self).__name__} needs get_lr() or closed_form()")

    @property
    def has_closed_form(self) -> bool:
        return type(self).closed_form is not LRScheduler.closed_form

    @property
    def begins(self) -> bool:
        """Whether the rates are the optimiser's own: at step 0, and where a schedule is made to go on from `last_epoch`
        (an optimiser that was loaded has the rates of the step that is to come)."""
        return self.last_epoch == 0 or not self._last_lr

    @property
    def rates(self) -> list[float]:
        return [float(g["lr"]) for g in self.optimizer.param_groups]

    def get_last_lr(self) -> list[float]:
        return self._last_lr

    def step(self, epoch: int | None = None) -> None:
        self.last_epoch = self.last_epoch + 1 if epoch is None else epoch
        self._set(self.closed_form() if epoch is not None and self.has_closed_form else self.get_lr())

    def restart(self) -> None:
        """The next step is step 0."""
        self.last_epoch = -1

    def begin(self) -> None:
        """Step 0, from the first rates."""
        self.step(0)

    def _set(self, values: list[float]) -> None:
        for g, v in zip(self.optimizer.param_groups, values):
            g["lr"] = v
        self._last_lr = self.rates

    def state_dict(self) -> dict[str, Any]:
        """All but the optimiser and functions."""
        return {k: v for k, v in vars(self).items() if k != "optimizer" and not callable(v)}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        check_state(self, state_dict)
        vars(self).update(state_dict)


def check_state(scheduler: Any, state_dict: dict[str, Any]) -> None:
    """ValueError on the state of another schedule."""
    missing = sorted(scheduler.state_dict().keys() - state_dict.keys())
    if missing:
        raise ValueError(
            f"{type(scheduler).__name__}: the state lacks {', '.join(missing)} and has "
            f"{', '.join(sorted(state_dict))}; it is another schedule's"
        )
