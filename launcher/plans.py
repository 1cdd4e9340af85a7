"""The worker's side of the plan check: all ranks must make the same communication plans in the same order.

The Runtime of a worker has these functions as its hooks (`runtime/exchange/communication.py`); the engine calls
`check_plan` when a plan is first made. It costs one message and one answer per new plan, nothing on replays. The driver
compares (`controller/`)."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from manygrad.runtime.exchange.communication import Hooks
from manygrad.tensor.environment import REGISTRY

from .channel import Channel, RankEpoch
from .compare import pack, write_values
from .messages import MAX_TEXT
from .saving import at_step, resumed, saved

VALUES_A_MESSAGE = 500


def hooks_over(channel: Channel, may_go_on: bool = False) -> Hooks:
    """The launcher is asked and told over `channel`, in the epoch that it is in now. `may_go_on`: this process may take
    part in another one."""
    here = channel, channel.epoch
    return Hooks(
        partial(check_plan, *here),
        partial(compare_values, *here),
        partial(at_step, *here),
        partial(resumed, *here),
        partial(saved, *here),
        lambda: here[1].abort_reason is not None,
        may_go_on,
    )


def check_plan(
    channel: Channel, epoch: RankEpoch, hash: int, description: str, outline: str = ""
) -> Callable[[], None]:
    """Tell that this rank's next plan is `hash`; the function returned returns once every rank has made the same one.

    `description` and `outline` are what a person reads when the plans differ: collectives, ops, shapes, the user's
    source lines. Raises `PlanMismatch` on every rank when two ranks differ, or when others finish their script or wait
    in a collective meanwhile; `LaunchAborted` when the epoch is over; `PlanTimeout` after `COLLECTIVE_TIMEOUT_S`.
    """
    channel.check(epoch)
    epoch.plans_made += 1
    n = epoch.plans_made
    channel.send_in(
        epoch,
        "planned",
        n=n,
        hash=str(int(hash)),
        description=str(description),
        collectives=channel.entered()[0],
        outline=pack(outline, MAX_TEXT),
    )
    deadline_s = float(REGISTRY["COLLECTIVE_TIMEOUT_S"].value)
    return lambda: channel.wait(
        lambda: epoch.plans_agreed >= n,
        deadline_s,
        f"the other ranks to make plan {n} ({description}); the knob is COLLECTIVE_TIMEOUT_S",
        epoch,
    )


def compare_values(channel: Channel, epoch: RankEpoch, name: str, values: list[tuple[int, str, str]]) -> None:
    """Send the digests of values that all ranks must hold alike; a difference ends the run."""
    for start in range(0, len(values), VALUES_A_MESSAGE):
        part = values[start : start + VALUES_A_MESSAGE]
        channel.send_in(epoch, "values", name=f"{name}.{start}", values=write_values(part))
