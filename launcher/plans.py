"""The worker's side of the plan check: all ranks must make the same communication plans in the same order.

`check_plan` is put into `manygrad.collectives.plan_hook`; the engine calls it when a plan is first made. It costs one
message and one answer per new plan, nothing on replays. The driver compares (`controller.py`).
"""

from __future__ import annotations

from collections.abc import Callable

from manygrad.tensor.environment import REGISTRY

from .channel import Channel
from .compare import pack, write_values
from .messages import MAX_TEXT

_channel: Channel | None = None
VALUES_A_MESSAGE = 500


def install(channel: Channel) -> None:
    """Make the collectives check their plans over `channel`."""
    global _channel
    import manygrad.collectives as collectives

    _channel = channel
    collectives.plan_hook, collectives.values_hook = check_plan, compare_values


def check_plan(hash: int, description: str, outline: str = "") -> Callable[[], None]:
    """Tell that this rank's next plan is `hash`; the function returned returns once every rank has made the same one.

    `description` and `outline` are what a person reads when the plans differ: collectives, ops, shapes, the user's
    source lines. Raises `PlanMismatch` on every rank when two ranks differ, or when others finish their script or wait
    in a collective meanwhile; `PlanTimeout` after `COLLECTIVE_TIMEOUT_S`.
    """
    channel = _channel
    if channel is None:
        return lambda: None
    channel.check()
    channel.plans_made += 1
    n = channel.plans_made
    packed = pack(outline, MAX_TEXT)
    channel.send(
        "plan", n=n, hash=str(int(hash)), description=str(description), collectives=channel.entered()[0], outline=packed
    )
    deadline_s = float(REGISTRY["COLLECTIVE_TIMEOUT_S"].value)
    return lambda: channel.wait(
        lambda: channel.plans_agreed >= n,
        deadline_s,
        f"the other ranks to make plan {n} ({description}); the knob is COLLECTIVE_TIMEOUT_S",
    )


def compare_values(name: str, values: list[tuple[int, str, str]]) -> None:
    """Send the digests of values that all ranks must hold alike; a difference ends the run."""
    if _channel is not None:
        for start in range(0, len(values), VALUES_A_MESSAGE):
            part = values[start : start + VALUES_A_MESSAGE]
            _channel.send("values", name=f"{name}.{start}", values=write_values(part))
