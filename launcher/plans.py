"""The worker's side of the plan check: all ranks must make the same communication plans in the same order.

`check_plan` is put into `manygrad.collectives.plan_hook`; the engine calls it when a plan is first made. It costs one
message and one answer per new plan, nothing on replays. The driver compares (`controller.py`).
"""

from __future__ import annotations

from manygrad.tensor.environment import REGISTRY

from .channel import Channel

_channel: Channel | None = None


def install(channel: Channel) -> None:
    """Make the collectives check their plans over `channel`."""
    global _channel
    import manygrad.collectives as collectives

    _channel = channel
    collectives.plan_hook = check_plan


def check_plan(hash: int, description: str) -> None:
    """Return once every rank has made this same plan (`hash`) as its next one.

    `description` is what a person reads when the plans differ: op, shape, dtype, the user's source line. Raises
    `PlanMismatch` on every rank when two ranks differ, or when others finish their script or wait in a collective meanwhile;
    `TimeoutError` after `COLLECTIVE_TIMEOUT_S`.
    """
    channel = _channel
    if channel is None:
        return
    channel.check()
    channel.plans_made += 1
    n = channel.plans_made
    channel.send("plan", n=n, hash=str(int(hash)), description=str(description), collectives=channel.entered()[0])
    deadline_s = float(REGISTRY["COLLECTIVE_TIMEOUT_S"].value)
    channel.wait(
        lambda: channel.plans_agreed >= n,
        deadline_s,
        f"the other ranks to make plan {n} ({description}); the knob is COLLECTIVE_TIMEOUT_S",
    )
