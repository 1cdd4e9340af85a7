"""OPENCL's part in the search for optimisations: a queue of its own, and kernels that are compiled for one device and
one size of groups, without the binary that others are kept as."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from manygrad.runtime.codegen.pipeline import Prepared
from manygrad.runtime.codegen.target import Machine
from manygrad.runtime.devices.opencl.driver import driver, opencl
from manygrad.runtime.devices.opencl.kernel import OpenCLKernel, Stream, new_block, packed, render, version
from manygrad.runtime.devices.tune.bench import Bench
from manygrad.tensor.uop.uop import UOp

_streams: list[Stream] = []


def _stream() -> Stream:
    if not _streams:
        _streams.append(Stream())
    return _streams[0]


class OpenCLScratch:
    """A Scratch."""

    def __init__(self, nbytes: int) -> None:
        self.handle = new_block(_stream(), nbytes)
        self.array = np.zeros(nbytes, np.uint8)

    def push(self) -> None:
        opencl().enqueue_copy(self.handle.stream.queue, self.handle.memory, self.array, is_blocking=True)

    def pull(self) -> None:
        opencl().enqueue_copy(self.handle.stream.queue, self.array, self.handle.memory, is_blocking=True)


class OpenCLCandidate:
    """A Candidate."""

    def __init__(self, prepared: Prepared, ast: UOp, code: str) -> None:
        self.kernel = OpenCLKernel(prepared, ast, packed(code))

    def run(self, handles: Sequence[Any], vars: tuple[int, ...], count: int = 1) -> float:
        queue = handles[0].stream.queue
        launch = self.kernel.launch(handles, vars, self.kernel.fresh())
        queue.finish()
        began = time.perf_counter()
        for _ in range(count):
            launch.start()
        queue.finish()
        return (time.perf_counter() - began) / count

    def part_s(self, handles: Sequence[Any], vars: tuple[int, ...]) -> float | None:
        return None


def _machine() -> Machine:
    """A processor runs the work items of a group one after the other: there is nothing to find."""
    own = driver()
    return replace(own.machine, group_items=1) if own.is_cpu else own.machine


BENCH = Bench(
    machine=_machine,
    key=lambda: b"opencl" + version(),
    render=render,
    load=OpenCLCandidate,
    memory=OpenCLScratch,
    first_is_slow=True,
)
