"""Many kernels by one native call."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from typing import Any

from manygrad.native.graph import KernelCall, graph_table, room_for_stamps, seconds
from manygrad.native.replay import NativeCall
from manygrad.runtime.devices.cpu.kernel import SERIAL_WORK, CPUKernel, TeamJob
from manygrad.runtime.devices.cpu.threads import team
from manygrad.runtime.devices.host import Memory
from manygrad.runtime.devices.numbers import Numbers

_TOTAL, _GRAIN = KernelCall._fields.index("total"), KernelCall._fields.index("grain")


class CPUGraph:
    """One native call that runs a table of kernels."""

    def __init__(self, calls: Sequence[tuple[Any, Sequence[Memory], Numbers]]) -> None:
        jobs: list[TeamJob] = [kernel for kernel, _, _ in calls]
        self.calls = [(job, list(handles)) for job, (_, handles, _) in zip(jobs, calls)]  # keeps code and memory alive
        given = [job.arguments(handles, numbers.values) for job, (_, handles, numbers) in zip(jobs, calls)]
        rows = [
            KernelCall(job.address, ctypes.addressof(b), ctypes.addressof(n.array) if n.values else 0, total, grain)
            for job, (b, _, total, grain), (*_, n) in zip(jobs, given, calls)
        ]
        self.shared = any(total > grain for *_, total, grain in given)  # whether there is work for the team
        self.short = sum(job.work for job in jobs) <= SERIAL_WORK
        self.table = graph_table(rows)
        self.kept = [(words, numbers.array) for (words, *_), (*_, numbers) in zip(given, calls)]
        self._follow([numbers for *_, numbers in calls])
        self.records = [r for job in dict.fromkeys(jobs) for r in job.records]

    def __call__(self, timed: bool = False) -> list[float] | None:
        count, native = len(self.kept), team()
        stamps = room_for_stamps(count) if timed else None
        run = native.short_graph if self.short else native.graph
        run(self.table, count, native.ready(), stamps)
        for name, record in self.records:
            record.check(name)
        return None if stamps is None else seconds(stamps)

    def native_call(self) -> NativeCall | None:
        if self.records:
            return None
        native = team()
        args = ctypes.addressof(self.table), len(self.kept), native.ready(), 0
        return NativeCall(native.graph_address, args, kept=(native.local.memory, self))

    def wake(self) -> None:
        if self.shared:
            team().wake()

    def _follow(self, numbers: Sequence[Numbers]) -> None:
        """Other values of its variables: they are checked, and loops as long as a variable says are cut anew."""
        for i, ((kernel, _), own) in enumerate(zip(self.calls, numbers)):
            if own.values:
                assert isinstance(kernel, CPUKernel), kernel
                own.checks.setdefault(kernel.takes.bounds, kernel.cut)
                if not kernel.fixed:
                    loops = own.changes.setdefault(kernel, Loops(kernel))
                    assert isinstance(loops, Loops)
                    loops.places.append((self.table, len(KernelCall._fields) * i))

    def mover(self, handle: Memory) -> Callable[[Memory], None]:
        begin, end = handle.address, handle.address + handle.nbytes
        places = [
            (words, i, w - begin)
            for words, _ in self.kept
            for i, w in enumerate(words)
            if w is not None and begin <= w < end
        ]

        def move(to: Memory) -> None:
            for words, i, offset in places:
                words[i] = to.address + offset

        return move


class Loops:
    """The parallel loops of a kernel's calls in all graphs of a capture, where a variable says how long they are."""

    def __init__(self, kernel: CPUKernel) -> None:
        self.kernel = kernel
        self.places: list[tuple[Any, int]] = []  # (a graph's table, a call's row there)

    def __call__(self, values: tuple[int, ...]) -> None:
        total, grain = self.kernel.cut(values)
        for table, row in self.places:
            table[row + _TOTAL], table[row + _GRAIN] = total, grain
