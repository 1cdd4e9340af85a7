"""`SpikeGuard`: where the loss goes up all at once, back to the last checkpoint, and on without that batch."""

from __future__ import annotations

import math
import warnings
from statistics import median
from typing import Any

from manygrad.checkpoint.checkpointer import Checkpointer, sum_over_ranks
from manygrad.errors import AnomalyError


class SpikeGuard:
    """Watches the loss of a training with checkpoints, in whose state it is.

        guard = SpikeGuard()
        checkpoints = Checkpointer("checkpoints", {"model": model, "optimizer": optimizer, "spikes": guard}, every=100)
        step = checkpoints.resume()
        if step == 0:
            checkpoints.save(0)
        while step < 1000:
            loss = None if guard.skips(step) else train(batch_of(step)).item()
            step = guard.step(checkpoints, step + 1, loss)

    A loss is a spike that is no finite number, or more than `factor` times the median of the last `window` ones, once
    there are `window` of them. Then the newest checkpoint is loaded, and the step whose batch gave it is left out from
    now on, also by later runs. `most`: so many spikes after one checkpoint are allowed.
    """

    def __init__(self, factor: float = 4.0, window: int = 16, most: int = 3):
        if not factor > 1 or window < 1 or most < 1:
            raise ValueError(
                f"SpikeGuard: factor is above 1, window and most are at least 1, not {factor}, {window} and {most}"
            )
        self.factor, self.window, self.most = factor, window, most
        self.losses: list[float] = []
        self.left_out: list[int] = []
        self.returns = (-1, 0)  # the step of the checkpoint that was last gone back to, and how often

    def skips(self, step: int) -> bool:
        """Whether the batch of the step after `step` steps is left out."""
        return step in self.left_out

    def step(self, checkpoints: Checkpointer, step: int, loss: float | None) -> int:
        """`step` steps are done, the last with this loss (None: it was left out). Returns from where to go on: `step`,
        after `checkpoints.step(step)`; after a spike on any rank the steps that the newest checkpoint had done. Every
        rank must call it. AnomalyError: there is no checkpoint, or this was one spike too many.
        """
        why = "" if loss is None else self._why(loss)
        if not sum_over_ranks(bool(why)):
            if loss is not None:
                self.losses = [*self.losses, float(loss)][-self.window :]
            checkpoints.step(step)
            return step
        why = why or "another rank's loss is a spike"
        left_out = sorted({*self.left_out, step - 1})
        if checkpoints.newest() is None:
            raise AnomalyError(
                f"step {step}: {why}, and there is no checkpoint to go back to; call checkpoints.save(0) before the "
                "first step"
            )
        begun = checkpoints.resume()
        count = self.returns[1] + 1 if self.returns[0] == begun else 1
        if count > self.most:
            raise AnomalyError(
                f"step {step}: {why}, which is spike {count} after the checkpoint of step {begun}; leaving out batches "
                f"does not help (steps {left_out}): lower the learning rate, clip gradients, or look at these batches"
            )
        self.left_out, self.returns = left_out, (begun, count)
        warnings.warn(f"step {step}: {why}. It goes on from step {begun} without this batch", stacklevel=2)
        return begun

    def _why(self, loss: float) -> str:
        if not math.isfinite(loss):
            return f"the loss is {loss}"
        if len(self.losses) < self.window or not loss > self.factor * (usual := median(self.losses)):
            return ""
        return f"the loss is {loss:g}, more than {self.factor:g} times the {usual:g} that is usual"

    def state_dict(self) -> dict[str, Any]:
        return {"losses": list(self.losses), "left_out": list(self.left_out)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.losses, self.left_out = list(state["losses"]), list(state["left_out"])
