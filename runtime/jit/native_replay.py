"""The replay of a capture that is like the one before it, made by native code alone.

What `TinyJit._repeats` and `Captured.replay_in_place` do in Python becomes the guards and the native call of
`native/replay.py`. There is one for a capture that has become one native call, which reads its arguments in place. It
is prepared by a replay in Python that found all as it was, and holds until the cores of this process are counted anew.
"""

from __future__ import annotations

from collections.abc import Sequence
from weakref import ref

from manygrad.native.additions import Additions
from manygrad.native.replay import Replay
from manygrad.runtime.engine.linear import capture
from manygrad.runtime.executors.items import ExecItem, Vars
from manygrad.runtime.profile import profile
from manygrad.runtime.profile.counters import GlobalCounters
from manygrad.tensor.environment import DEBUG, overridden
from manygrad.tensor.storage import LIVE, PENDING
from manygrad.tensor.uop import UOp


def prepared(
    items: list[ExecItem], vars: Vars, replay: Replay | None, last: Sequence[ref[UOp]], mark: int
) -> Replay | None:
    """`replay`, or a new one, prepared for arguments with the nodes `last`; None where a replay needs Python.

    `mark`: the key of LIVE behind which the tensors stand that are newer than the last replay.
    """
    native = items[0].native_call(vars) if len(items) == 1 and overridden.get() is None and not DEBUG >= 2 else None
    if native is None:
        return None
    from manygrad.native.processor import counted_until_ns  # (they load the compiler, which has run by now)
    from manygrad.runtime.devices.cpu.threads import link

    call, counts = native
    if replay is None:
        replay = Replay(link, "uop", overridden, LIVE.keys, mark)
    counts = Additions([*counts.amounts, (GlobalCounters, "steps", 1)])
    replay.prepare(last, (PENDING.keys, capture, profile.active), call, counts, counted_until_ns())
    return replay
