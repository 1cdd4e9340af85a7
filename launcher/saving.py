"""The worker's side of checkpoints: the launcher hears how far the training is and what is saved, and can have all
ranks save at the same step and end (`launcher/controller/preemption.py`).

The Runtime of a worker has these functions as its hooks (`runtime/exchange/communication.py`); a Checkpointer calls
them.
"""

from __future__ import annotations

from manygrad.tensor.environment import REGISTRY

from .channel import Channel, RankEpoch


def resumed(channel: Channel, epoch: RankEpoch, step: int) -> None:
    """The training begins after so many steps."""
    channel.at_step(epoch, step, resumed=True)


def at_step(channel: Channel, epoch: RankEpoch, step: int) -> bool:
    """So many steps are done: whether all ranks are to save here and end. Costs a microsecond until they are told to;
    then it waits for the other ranks' answers, which come whatever their scripts do."""
    channel.at_step(epoch, step)
    training = epoch.training
    if training.told is None or step <= training.told:
        return False
    if training.save_at is None:
        deadline_s = float(REGISTRY["COLLECTIVE_TIMEOUT_S"].value)
        what = "the other ranks to say at which step they are; the knob is COLLECTIVE_TIMEOUT_S"
        channel.wait(lambda: training.save_at is not None, deadline_s, what, epoch)
    assert training.save_at is not None
    return step >= training.save_at


def saved(channel: Channel, epoch: RankEpoch, step: int) -> None:
    """A checkpoint of so many steps is committed."""
    channel.send_in(epoch, "committed", step=step)
