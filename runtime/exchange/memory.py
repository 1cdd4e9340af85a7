"""Memory of one worker's calls of a collective, found once: places, with their handles for kernels and their addresses
for messages."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from manygrad.collectives.transport.endpoint import Borrowed
from manygrad.native.memory import table
from manygrad.runtime.buffer import Buffer
from manygrad.runtime.devices import Device, get_device
from manygrad.tensor.uop import Ops, UOp
from manygrad.tensor.uop.shape import numel


class BufferPart(NamedTuple):
    """A part of a buffer, or, without one, what is borrowed."""

    device: Device
    nbytes: int
    base: Buffer | None = None
    offset: int = 0  # in bytes


class BoundMemory:
    """The places that calls take. `buffers` are the LINEAR's arguments: with `ranks` ranks of this worker the results,
    the sources, then temporaries. What a RECEIVE borrows has its place when it has come (`lend`)."""

    def __init__(self, body: UOp, buffers: Sequence[Buffer], ranks: int) -> None:
        self.buffers, self.ranks = list(buffers), ranks
        args = list(dict.fromkeys(a for call in body.src for a in call.src[1:]))
        self.numbers = {a: n for n, a in enumerate(args)}  # of places
        self.places = [self._located(a) for a in args]
        self.is_bound = False
        self.handles: list[Any] = [None] * len(args)
        self.spare = len(args)  # one address more, of a message that native code copies into its place
        self.addresses: Any = table(len(args) + 1)  # of places that the host sees

    def bind(self) -> None:
        """Finds the memory, when it is first needed."""
        self._refuse_overlap()
        for n, p in enumerate(self.places):
            if p.base is not None:
                self._put(n, p, p.device.view(p.base.handle, p.offset, p.nbytes))
        self.is_bound = True

    def move(self, buffer: Buffer, to: Any) -> None:
        """From now on the memory `to` is read instead of that of a source's buffer."""
        for n, p in enumerate(self.places):
            if p.base is not None and (p.base.base or p.base) is buffer:
                self._put(n, p, p.device.view(to, p.base.offset + p.offset, p.nbytes))

    def lend(self, number: int, got: Borrowed) -> None:
        """From now on a place is what has been borrowed."""
        host = self.places[number].device.allocator.host
        assert host is not None, "a message is borrowed in memory that the host does not see"
        self.addresses[number], self.handles[number] = got.addr, host.at(got.addr, got.nbytes)

    def is_seen(self, number: int) -> bool:
        """Whether the host sees a place."""
        return self.places[number].device.allocator.host is not None

    def _refuse_overlap(self) -> None:
        for out in self.buffers[: self.ranks]:
            for given in self.buffers[self.ranks : 2 * self.ranks]:
                if (out.base or out) is (given.base or given) and out.nbytes and given.nbytes:
                    if out.offset < given.offset + given.nbytes and given.offset < out.offset + out.nbytes:
                        raise ValueError(
                            f"{given} and {out} overlap; peers still read the one while the other is written"
                        )

    def _put(self, number: int, place: BufferPart, handle: Any) -> None:
        self.handles[number] = handle
        if place.device.allocator.host is not None:
            self.addresses[number] = place.device.address(handle)

    def _located(self, u: UOp) -> BufferPart:
        buffer, first = (u.src[0], u.arg.offset) if u.op is Ops.VIEW else (u, 0)
        nbytes = numel(u.shape) * u.dtype.itemsize
        if buffer.op is Ops.BUFFER:
            return BufferPart(get_device(buffer.arg.device), nbytes)
        base = self.buffers[buffer.arg.uid]
        return BufferPart(base.device, nbytes, base, first * u.dtype.itemsize)
