"""joined: graphs of kernels and the small collectives between them as one native call.

    graph  all_reduce  graph  all_reduce  graph     ==>      joined of 5

A step of a model that is cut over workers has two small all-reduces a layer: each would end one native call and begin
the next, with Python in between that takes longer than the message. Where a collective cannot go on natively, because a
peer is late, say, the call ends there; the collective goes on in Python, which has deadlines and errors, and what
follows is a native call again. Joined are replays alone, of graphs of CPUs, with collectives over shared memory
(`native_exchange.py`).
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import Any

from manygrad.collectives.transport.endpoint import Traffic
from manygrad.native.exchange import ALL, ROW
from manygrad.native.memory import table
from manygrad.runtime import profile
from manygrad.runtime.buffer import Buffer
from manygrad.runtime.collective import CollectiveItem, variables_word
from manygrad.runtime.counters import GlobalCounters
from manygrad.runtime.devices.cpu_graph import CPUGraph
from manygrad.runtime.devices.threads import team
from manygrad.runtime.items import ExecItem, GraphItem, Vars
from manygrad.runtime.native_exchange import NativeRun
from manygrad.tensor.environment import DEBUG

AT, STOPPED, SPENT = ALL.index("AT"), ALL.index("STOPPED"), ALL.index("SPENT")
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
        self.asked = [g for g in self.graphs if g.asked]
        self.collectives = [i for i in items if isinstance(i, CollectiveItem)]
        self.name = f"{len(self.graphs)} graphs and {len(self.collectives)} collectives"
        self.communication = self.collectives[0].communication
        # how many collectives of all workers stand before each item, and before the end; the text of the last one
        of_all = [i.text if isinstance(i, CollectiveItem) and i.by_all else "" for i in items]
        self.entered: list[int] = list(accumulate((bool(text) for text in of_all), initial=0))
        self.texts: list[str] = list(accumulate(of_all, lambda last, text: text or last, initial=""))
        self.before = 0  # how many had been entered before this run's first item
        natives = [n for i in items if (n := _native(i)) is not None]
        self.endpoint, self.is_native = natives[0].endpoint, True
        self.kernels = sum(len(g.items) for g in self.graphs) + len(self.collectives)
        self.flops, self.nbytes = sum(g.flops for g in self.graphs), sum(g.nbytes for g in self.graphs)
        self.bytes_sent = sum(c.bytes_sent for c in self.collectives)
        self.traffic = Traffic(*map(sum, zip(*(n.traffic for n in natives))))
        self.links = list({id(p): p for n in natives for p in n.peers}.values())
        self.rows = table(len(ROW) * len(items))
        for i, item in enumerate(items):
            self.rows[len(ROW) * i : len(ROW) * (i + 1)] = self._row(item)
        self.table = table(len(ALL))
        self.table[ALL.index("ROWS")] = ctypes.addressof(self.rows)
        self.table[ALL.index("ROW_COUNT")] = len(items)
        self.table[ALL.index("GRAPH")] = team().graph_address
        self.endpoint.native.prepare_joined(self.table)

    @staticmethod
    def _row(item: Part) -> tuple[int, int, int]:
        if isinstance(item, GraphItem):
            assert isinstance(item.call, CPUGraph)
            return ctypes.addressof(item.call.table), len(item.items), 0
        native = _native(item)
        assert native is not None
        native.carry(item.key)
        return ctypes.addressof(native.table), -1, ctypes.addressof(item.counter)

    @property
    def written(self) -> list[Buffer]:
        return [b for i in self.items for b in i.written]

    def mover(self, buffer: Buffer) -> Callable[[Any], None] | None:
        readers = [i for i in self.items if any((b.base or b) is buffer for b in i.buffers)]
        found = [i.mover(buffer) for i in readers]
        moves = [m for m in found if m is not None]
        if len(moves) < len(found):
            return None

        def move(to: Any) -> None:
            for m in moves:
                m(to)
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
        self._count()
        for graph in self.asked:
            graph.bind(vars)
        self.table[AT] = begun = 0
        self.table[VARIABLES] = ctypes.c_int64(variables_word(vars)).value if vars else 0
        self.table[SCRATCH] = team().ready()
        while begun < len(self.items):
            begun = self._run_native(begun)
            if begun < len(self.items):
                self._by_python(self.items[begun], vars)
                begun = self.table[AT] = begun + 1

    def _count(self) -> None:
        c = GlobalCounters
        c.kernel_count += self.kernels
        c.global_ops += self.flops
        c.global_mem += self.nbytes
        c.net_bytes += self.bytes_sent

    def _run_native(self, first: int) -> int:
        """From item `first` on; gives the item that it did not finish, if any."""
        c = self.communication
        self.table[SPENT] = 0
        self.before = c.entered[0] - self.entered[first]
        c.native = self._told
        try:
            self.endpoint.native.run_joined(self.table, self.links)
        finally:
            at = self._account(first)
            c.native = None
        return at

    def _account(self, first: int) -> int:
        """What a native call has done; the item at which it ended."""
        c, at = self.communication, int(self.table[AT])
        seconds = self.table[SPENT] * 1e-9
        c.spent(seconds)
        c.waited(seconds)
        if at - first == len(self.items):
            self.endpoint.add(self.traffic)
        else:
            for item in self.items[first:at]:
                if (native := _native(item)) is not None:
                    self.endpoint.add(native.traffic)
        if times := self.entered[at] - self.entered[first]:
            c.enter(self.texts[at], times)
        return at

    def _told(self) -> tuple[int, str]:
        """What has been entered, while the native call runs."""
        through = min(int(self.table[AT]) + 1, len(self.items))
        return self.before + self.entered[through], self.texts[through]

    def _by_python(self, item: Part, vars: Vars) -> None:
        stopped = int(self.table[STOPPED])
        if isinstance(item, GraphItem):
            item.call()
        elif stopped < 0:
            item.run_uncounted(vars)
        else:
            item.resume(vars, stopped)
