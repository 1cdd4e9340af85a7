"""CUDA's part in the search for optimisations: candidates are timed by events, on the GPU's own clock."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any

import numpy as np

from manygrad.runtime.codegen.pipeline import Prepared
from manygrad.runtime.devices.cuda.driver import checked, gpu_of
from manygrad.runtime.devices.cuda.kernel import CUDAKernel, compile_text, render, version
from manygrad.runtime.devices.cuda.memory import OwnedRange
from manygrad.runtime.devices.cuda.stream import CUDAStream
from manygrad.runtime.devices.tune.bench import Bench
from manygrad.tensor.uop.uop import UOp


@cache
def _stream() -> CUDAStream:
    return CUDAStream(gpu_of(0), "the search for optimisations")


class CUDAScratch:
    """A Scratch."""

    def __init__(self, nbytes: int) -> None:
        stream = _stream()
        self.handle = OwnedRange(stream, stream.alloc(nbytes), nbytes)
        self.array = np.zeros(nbytes, np.uint8)

    def push(self) -> None:
        self.handle.fill(memoryview(self.array))

    def pull(self) -> None:
        self.handle.read(memoryview(self.array))


class CUDACandidate:
    """A Candidate."""

    def __init__(self, prepared: Prepared, ast: UOp, code: str) -> None:
        self.kernel = CUDAKernel(prepared, ast, compile_text(code))

    def run(self, handles: Sequence[Any], vars: tuple[int, ...], count: int = 1) -> float:
        stream = handles[0].stream
        launch, own = self.kernel.launch(handles, vars), stream.gpu.enter()
        begin, end = (checked(own.cuEventCreate(0), stream.name) for _ in range(2))
        checked(own.cuEventRecord(begin, stream.handle), stream.name)
        for _ in range(count):
            launch.start()
        checked(own.cuEventRecord(end, stream.handle), stream.name)
        stream.finish()
        took_ms = checked(own.cuEventElapsedTime(begin, end), stream.name)
        for event in (begin, end):
            checked(own.cuEventDestroy(event), stream.name)
        return float(took_ms) / 1e3 / count

    def part_s(self, handles: Sequence[Any], vars: tuple[int, ...]) -> float | None:
        return None


BENCH = Bench(
    machine=lambda: gpu_of(0).machine,
    key=lambda: b"cuda" + version(),
    render=render,
    load=CUDACandidate,
    memory=CUDAScratch,
    first_is_slow=True,
)
