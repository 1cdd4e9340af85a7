"""Memory of the calls of one worker: PARAMs for `out` of each of its ranks, `in` of each, then temporaries."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from manygrad.collectives.program import Chunk, Program
from manygrad.tensor.dtype import DType, accumulate_dtype
from manygrad.tensor.uop import BufferSpec, Ops, UOp, ViewArg

HOST = "CPU"  # whose memory messages pass through where the host does not see a device's


class CallTemporary(NamedTuple):
    """A temporary that the calls are given."""

    size: int  # elements
    dtype: DType
    device: str


class CallMemory:
    """`element`: the type of what is reduced; `partial`: of partial sums; `result`: of results."""

    def __init__(self, program: Program, element: DType, result: DType, devices: Mapping[int, str]) -> None:
        self.element, self.partial, self.result = element, accumulate_dtype(element), result
        self.temps: list[CallTemporary] = []
        self.buffers: dict[tuple[int, str], UOp] = {}  # by rank and name
        c, ranks = program.collective, sorted(program.only)
        for name, length in (("out", c.out_length), ("in", c.in_length)):
            for r in ranks:
                self.buffers[r, name] = _param(len(self.buffers), length(r), self.dtype_of(name), devices[r])
        self.given = len(self.buffers)
        for t in program.temps:
            self.buffers[t.rank, t.name] = self.temp(t.length, self.partial if t.partial else element, devices[t.rank])

    def dtype_of(self, buffer: str) -> DType:
        """The type of a rank's buffer that another rank reads: temporaries then hold partial sums."""
        return {"in": self.element, "out": self.result}.get(buffer, self.partial)

    def temp(self, count: int, dtype: DType, device: str) -> UOp:
        self.temps.append(CallTemporary(count, dtype, device))
        return _param(self.given + len(self.temps) - 1, count, dtype, device)

    def chunk(self, rank: int, c: Chunk) -> UOp:
        buffer = self.buffers[rank, c.buffer]
        if c.offset == 0 and (c.length,) == buffer.arg.shape:
            return buffer
        return UOp(Ops.VIEW, buffer.dtype, (buffer,), ViewArg(c.offset, (c.length,)))


def _param(slot: int, count: int, dtype: DType, device: str) -> UOp:
    return UOp(Ops.PARAM, dtype, (), BufferSpec(slot, (count,), dtype, device))


def device_of(view: UOp) -> str:
    device = (view.src[0] if view.op is Ops.VIEW else view).arg.device
    assert isinstance(device, str)
    return device
