"""The replay of a capture that is like the one before it, made by native code alone.

What `TinyJit._repeats`, `Captured.holds`, `Results.renew` and `Captured.replay_in_place` do in Python becomes the
checks and the native call of `native/replay.py`. There is one for a capture that has become one native call and reads
its arguments in place. It is prepared by a replay in Python that found all as it was, and holds until the cores of this
process are counted anew.

The checks come in parts, each slot of results one: one that the caller still holds is left, with the memory that the
next replay writes, and the call is made again.
"""

from __future__ import annotations

import sysconfig
from collections.abc import Sequence
from weakref import ref

from manygrad.native.additions import Additions
from manygrad.native.checks import ATTRIBUTE, SIZE, VARIABLE, Check, CheckTable, words_of
from manygrad.native.replay import NativeCall, Replay
from manygrad.runtime.engine.linear import capture
from manygrad.runtime.executors.items import ExecItem, Vars
from manygrad.runtime.jit.results import ResultMemory, Results, Returned
from manygrad.runtime.profile import profile
from manygrad.runtime.profile.counters import GlobalCounters
from manygrad.runtime.storage import LOSSES
from manygrad.tensor.environment import DEBUG, overridden
from manygrad.tensor.guards import Guards
from manygrad.tensor.storage import LIVE, PENDING
from manygrad.tensor.uop import UOp

# without the interpreter's lock, objects do not begin with their count of references
COUNTS_FIRST = not sysconfig.get_config_var("Py_GIL_DISABLED")


class NativeReplay:
    """The native replay of one capture, `replay`, and the checks that it makes."""

    def __init__(self, results: Results, mark: int) -> None:
        """`mark`: the key of LIVE behind which the tensors stand that are newer than the last replay."""
        from manygrad.runtime.devices.cpu.threads import link  # (it loads the compiler, which has run by now)

        self.slots = results.slots
        self.replay = Replay(link, "uop", LIVE.keys, mark)
        self.checks: CheckTable | None = None
        self.guards: Guards | None = None  # what part 1 stands for
        self.modes, self.read = list[Check](), list[Check]()  # the parts 0 and 1, which keep what they compare with
        self.now: list[Returned] = []  # and those of the slots, which it keeps as long as rows are of them

    def prepare(self, guards: Guards, last: Sequence[ref[UOp]], call: NativeCall, counts: Additions) -> None:
        """For arguments with the nodes `last`."""
        from manygrad.native.processor import counted_until_ns

        modes = _modes(call)
        if self.checks is None or self.guards is not guards:
            read = guards.checks()
            self.checks = CheckTable([words_of(modes), words_of(read), *(s.now.checks(s.owners) for s in self.slots)])
            self.guards, self.read, self.now = guards, read, [*(s.now for s in self.slots)]
        self.modes = modes
        self.checks.put(0, words_of(modes))
        self.look_at_slots()
        counts = Additions([*counts.amounts, (GlobalCounters, "steps", 1)])
        self.replay.prepare(last, self.checks, call, counts, counted_until_ns())

    def look_at_slots(self) -> None:
        """After a replay in Python, which may have left results."""
        for n, s in enumerate(self.slots):
            self._point_to(n, s)

    def _point_to(self, n: int, s: ResultMemory) -> None:
        if self.now[n] is not s.now and self.checks is not None:  # (there may be hundreds of rows)
            self.checks.put(n + 2, s.now.checks(s.owners))
            self.now[n] = s.now

    def leave_what_is_held(self) -> ResultMemory | None:
        """After a call that did nothing: the slot for whose result that was, as it is held; it is another one's now."""
        if (row := self.replay.changed) < 0 or self.checks is None:
            return None
        n = self.checks.part_of(row) - 2
        if n < 0:
            return None
        if (s := self.slots[n]).is_free():  # (it differs in something else: whose gradients they are, perhaps)
            self.checks.put(n + 2, s.now.checks(s.owners))
            return None
        s.leave()
        s.now.settle()
        s.give()
        self._point_to(n, s)
        return s


def _modes(call: NativeCall) -> list[Check]:
    empty = [Check(SIZE, x, None, 0) for x in (PENDING.keys, capture, profile.active, *call.empty)]
    return [*empty, Check(VARIABLE, overridden, None, None), Check(ATTRIBUTE, LOSSES, "count", LOSSES.count)]


def native_call(items: list[ExecItem], vars: Vars) -> tuple[NativeCall, Additions] | None:
    """What replays these items, and what it counts; None where that needs Python."""
    if len(items) != 1 or overridden.get() is not None or DEBUG >= 2 or not COUNTS_FIRST:
        return None
    return items[0].native_call(vars)
