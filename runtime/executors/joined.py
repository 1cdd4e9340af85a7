"""joined: graphs of kernels and the small collectives between them as one native call.

    graph  all_reduce  graph  all_reduce  graph     ==>      joined of 5

A step of a model that is cut over workers has two small all-reduces a layer: each would end one native call and begin
the next, with Python in between that takes longer than the message. Where a collective cannot go on natively, because a
peer is late, say, the call ends there; the collective goes on in Python, which has deadlines and errors, and what
follows is a native call again. Joined are replays alone, of graphs of CPUs, with collectives over shared memory
(`runtime/exchange/native_exchange.py`).
"""

from __future__ import annotations

import ctypes
import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

from manygrad.native.additions import Additions, place
from manygrad.native.exchange import ALL, ROW, SPENT_COUNT
from manygrad.native.memory import table
from manygrad.native.replay import NativeCall
from manygrad.runtime.buffer import Buffer
from manygrad.runtime.devices.cpu.graph import CPUGraph
from manygrad.runtime.devices.cpu.threads import team
from manygrad.runtime.exchange.native_exchange import NativeRun
from manygrad.runtime.executors.collective import CollectiveItem, variables_word
from manygrad.runtime.executors.items import ExecItem, GraphItem, Vars
from manygrad.runtime.profile import profile
from manygrad.runtime.profile.counters import GlobalCounters
from manygrad.tensor.environment import DEBUG

AT, STOPPED = ALL.index("AT"), ALL.index("STOPPED")
SCRATCH, VARIABLES = ALL.index("ALL_SCRATCH"), ALL.index("VARIABLES")

Part = GraphItem | CollectiveItem


def joined(items: Sequence[ExecItem]) -> list[ExecItem]:
    """The same work, with what stands side by side and can be joined as one item."""
    out: list[ExecItem] = []
    together: list[Part] = []

    def close() -> None:
        out.extend([JoinedItem(together)] if any(map(_native, together)) else together)
        together.clear()

    for item in items:
        if isinstance(item, (GraphItem, CollectiveItem)) and _joins(item):
            together.append(item)
        else:
            close()
            out.append(item)
    close()
    return out


def _joins(item: Part) -> bool:
    if isinstance(item, GraphItem):
        return isinstance(item.call, CPUGraph) and not item.call.records
    return _native(item) is not None


def _native(item: Part) -> NativeRun | None:
    return None if isinstance(item, GraphItem) or item.idle else item.exchange.native


class JoinedItem(ExecItem):
    """exec_joined: one native call."""

    def __init__(self, items: Sequence[Part]) -> None:
        self.items = list(items)
        self.line, self.buffers = items[0].line, [b for i in items for b in i.buffers]
        self.graphs = [i for i in items if isinstance(i, GraphItem)]
        self.asked = list({id(g.variables): g.variables for g in self.graphs if g.asked}.values())
        self.collectives = [i for i in items if isinstance(i, CollectiveItem)]
        self.name = f"{len(self.graphs)} graphs and {len(self.collectives)} collectives"
        self.communication = self.collectives[0].communication
        natives = [n for i in items if (n := _native(i)) is not None]
        self.endpoint, self.is_native = natives[0].endpoint, True
        self.links = list({id(p): p for n in natives for p in n.peers}.values())
        self.additions = [self._additions(i) for i in items]
        self.rows = table(len(ROW) * len(items))
        for i, item in enumerate(items):
            self.rows[len(ROW) * i : len(ROW) * (i + 1)] = self._row(item, self.additions[i])
        self.spent_in = table(SPENT_COUNT)
        self.spent_in[:] = [place(c, name) for c, *names in self._times() for name in names]
        self.table = ALL.table(
            ROWS=ctypes.addressof(self.rows),
            ROW_COUNT=len(items),
            GRAPH=team().graph_address,
            SPENT_IN=ctypes.addressof(self.spent_in),
            ENTERED=ctypes.addressof(self.communication.entered_word),
        )
        self.endpoint.native.prepare_joined(self.table)

    def _times(self) -> tuple[tuple[Any, str, str], tuple[Any, str, str]]:
        """Counters of the seconds that native collectives take: nothing is computed meanwhile."""
        return (GlobalCounters, "net_time_s", "net_wait_s"), (self.communication.times, "all_s", "waited_s")

    def _additions(self, item: Part) -> Additions:
        """Amounts that a native run of it counts."""
        if isinstance(item, GraphItem):
            return Additions(item.amounts)
        native = _native(item)
        assert native is not None
        counts = {"kernel_count": 1, "net_bytes": item.bytes_sent}
        traffic = [(self.endpoint.traffic, name, n) for name, n in native.traffic._asdict().items()]
        return Additions([*((GlobalCounters, name, n) for name, n in counts.items()), *traffic])

    @staticmethod
    def _row(item: Part, additions: Additions) -> tuple[int, ...]:
        counts = additions.address, additions.count
        if isinstance(item, GraphItem):
            assert isinstance(item.call, CPUGraph)
            return ctypes.addressof(item.call.table), len(item.items), 0, -1, *counts
        native = _native(item)
        assert native is not None
        native.carry(item.key)
        return ctypes.addressof(native.table), -1, ctypes.addressof(item.counter), item.text_number, *counts

    @property
    def written(self) -> list[Buffer]:
        return [b for i in self.items for b in i.written]

    def mover(self, buffer: Buffer) -> Callable[[Any], None] | None:
        readers = [i for i in self.items if any((b.base or b) is buffer for b in i.buffers)]
        found = [i.mover(buffer) for i in readers]
        moves = [m for m in found if m is not None]
        if len(moves) < len(found):
            return None
        moved = any(isinstance(i, CollectiveItem) for i in readers)

        def move(to: Any) -> None:
            for m in moves:
                m(to)
            if moved:  # (a collective is native where its memory is shared)
                self.is_native = all(_native(c) is not None for c in self.collectives)

        return move

    def wake(self) -> None:
        self.items[0].wake()

    def run_profiled(self, vars: Vars) -> None:
        for item in self.items:
            item.run_profiled(vars)

    def run(self, vars: Vars) -> None:
        if not self.is_native or DEBUG >= 2 or profile.active:
            for item in self.items:
                item.run(vars)
            return
        for variables in self.asked:
            variables.set(vars)
        self._for_this_thread(vars)
        self.endpoint.native.run_joined(self.table, self.links)
        self.go_on(vars)

    def _for_this_thread(self, vars: Vars) -> None:
        self.table[AT] = 0
        self.table[VARIABLES] = ctypes.c_int64(variables_word(vars)).value if vars else 0
        self.table[SCRATCH] = team().ready()

    def go_on(self, vars: Vars) -> None:
        """After a native run, which may have stopped at an item: Python carries it out, and native code the next."""
        while (at := int(self.table[AT])) < len(self.items):
            self._by_python(self.items[at], vars)
            self.table[AT] = at + 1
            if at + 1 < len(self.items):
                self.endpoint.native.run_joined(self.table, self.links)

    def _by_python(self, item: Part, vars: Vars) -> None:
        stopped = int(self.table[STOPPED])
        if stopped < 0:
            item.run(vars)
        else:
            assert isinstance(item, CollectiveItem)
            item.count()
            item.resume(vars, stopped)

    def native_call(self, vars: Vars) -> tuple[NativeCall, Additions] | None:
        if self.asked or not self.is_native:
            return None
        self._for_this_thread(vars)
        at = ctypes.addressof(self.table) + ctypes.sizeof(ctypes.c_int64) * AT
        call, kept = self.endpoint.native.joined_call(self.table, self.links), (team().local.memory, self)
        return dataclasses.replace(call, at=at, parts=len(self.items), kept=kept), Additions([])
