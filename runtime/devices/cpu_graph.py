"""Many kernels by one native call."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from typing import Any

from manygrad.native.graph import Job, graph_table, room_for_stamps, seconds
from manygrad.native.replay import NativeCall
from manygrad.runtime.devices.cpu_kernel import CPUKernel, TeamJob
from manygrad.runtime.devices.host import Memory
from manygrad.runtime.devices.threads import team

_TOTAL, _GRAIN = Job._fields.index("total"), Job._fields.index("grain")


class CPUGraph:
    """One native call that runs a table of kernels."""

    def __init__(self, calls: Sequence[tuple[Any, Sequence[Memory], tuple[int, ...]]]) -> None:
        jobs: list[TeamJob] = [kernel for kernel, _, _ in calls]
        self.calls = [(job, list(handles)) for job, (_, handles, _) in zip(jobs, calls)]  # keeps code and memory alive
        self.kept = [job.arguments(handles, vars) for job, (_, handles, vars) in zip(jobs, calls)]
        rows = [
            Job(job.address, ctypes.addressof(b), 0 if v is None else ctypes.addressof(v), total, grain)
            for job, (b, v, total, grain) in zip(jobs, self.kept)
        ]
        self.shared = any(total > grain for *_, total, grain in self.kept)  # whether there is work for the team
        self.table = graph_table(rows)
        self.variables = [v for _, v, *_ in self.kept]
        self.records = [r for job in dict.fromkeys(jobs) for r in job.records]

    def __call__(self, timed: bool = False) -> list[float] | None:
        count, native = len(self.kept), team()
        stamps = room_for_stamps(count) if timed else None
        native.graph(self.table, count, native.ready(), stamps)
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

    def bind(self, changed: Sequence[tuple[int, tuple[int, ...]]]) -> None:
        for i, vars in changed:
            kernel, numbers = self.calls[i][0], self.variables[i]
            assert isinstance(kernel, CPUKernel) and numbers is not None, kernel
            cut = kernel.cut(vars)
            numbers[:] = vars
            if not kernel.fixed:
                self.table[len(Job._fields) * i + _TOTAL], self.table[len(Job._fields) * i + _GRAIN] = cut

    def mover(self, handle: Memory) -> Callable[[Memory], None]:
        begin, end = handle.address, handle.address + handle.nbytes
        places = [
            (words, i, w - begin)
            for words, *_ in self.kept
            for i, w in enumerate(words)
            if w is not None and begin <= w < end
        ]

        def move(to: Memory) -> None:
            for words, i, offset in places:
                words[i] = to.address + offset

        return move
