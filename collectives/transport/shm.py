"""Shared memory between workers of one host: descriptors in rings, data read in place.

Every endpoint owns a mailbox at the start of its arena's file, which its peers map read-write:

    0     token        16 bytes, proves the mapping
    64    doorbell     bumped by whoever changes something for this endpoint (futex)
    128   interest     what this endpoint sleeps for (see native/sequence.py)
    192   closed       0 open, 1 closed, 2 aborted
    PAGE  per source rank: attached word, tail word, RING ack words, RING descriptors

A send writes a descriptor (the wire header, its `offset` a place in the sender's arena) and publishes the tail; no data
moves. The receiver reads the peer's arena in place and, when done, writes the ack word of that descriptor, after which
the sender may write the memory and reuse the descriptor. Data that is not in the arena is staged through it. When a
ring is full, sends queue in order and go out during later waits, so a send never blocks.

Cost: about 5 µs of Python a message on either side, one futex call only when the other side sleeps for just this.
"""

from __future__ import annotations

import ctypes
import os
import select
from collections import deque
from dataclasses import dataclass

from manygrad.collectives.transport import wire
from manygrad.collectives.transport.arena import PAGE, TOKEN_BYTES, Arena, RemoteArena, page_up
from manygrad.errors import WireError
from manygrad.native import exchange
from manygrad.native.exchange import LINK
from manygrad.native.memory import copy
from manygrad.native.sequence import ANY, REACHED, Timespec, functions

RING = 128
_BELL, _INTEREST, _CLOSED = 64, 128, 192
_ATTACHED, _TAIL, _ACKS = 0, 64, 128
_SLOTS = _ACKS + 4 * RING
_SLOT_NBYTES = 128
STRIDE = page_up(_SLOTS + RING * _SLOT_NBYTES)
assert TOKEN_BYTES <= _BELL and wire.SIZE <= _SLOT_NBYTES

_OUT_NUMBER, _IN_NUMBER = LINK.index("OUT_NUMBER"), LINK.index("IN_NUMBER")

OPEN, CLOSED, ABORTED = 0, 1, 2
_U32 = 0xFFFFFFFF
_NO_LIMIT = ctypes.c_uint32(ANY)


def native_functions() -> exchange.ExchangeFunctions:
    """Native functions that run collectives over such links."""
    return exchange.functions(RING, _SLOT_NBYTES, wire.SIZE)


def mailbox_nbytes(size: int) -> int:
    return PAGE + size * STRIDE


class Mailbox:
    """The head of an arena file, own or a peer's."""

    def __init__(self, addr: int):
        self.bell, self.interest, self.closed = addr + _BELL, addr + _INTEREST, addr + _CLOSED
        self.pairs = addr + PAGE

    def wake(self) -> None:
        """Wakes whatever sleeps on this mailbox's doorbell, unconditionally."""
        scratch = ctypes.c_uint32(0)
        functions().publish(ctypes.addressof(scratch), 0, self.bell, ctypes.addressof(_NO_LIMIT), ANY)

    @property
    def state(self) -> int:
        return int(functions().load(self.closed))

    def mark(self, state: int) -> None:
        ctypes.c_uint32.from_address(self.closed).value = state


@dataclass(slots=True)
class _Queued:
    number: int
    header: wire.Header


class ShmLink:
    """Both directions between this rank and one peer of the same host. Large: both directions of a link."""

    route = "shm"

    def __init__(self, rank: int, peer: int, arena: Arena, remote: RemoteArena, pid: int):
        self.rank, self.peer, self.arena, self.remote, self.pid = rank, peer, arena, remote, pid
        self.mine, self.theirs = Mailbox(arena.mailbox), Mailbox(remote.mailbox)
        self.out, self.inn = self.theirs.pairs + rank * STRIDE, self.mine.pairs + peer * STRIDE
        self.queue: deque[_Queued] = deque()
        # number -> arena offset, and, where the peer writes there, whereto that goes: (address, bytes)
        self.staged: dict[int, tuple[int, tuple[int, int] | None]] = {}
        self.code_tail, self.code_ack = 2 * peer + 2, 2 * peer + 3
        self.my_tail, self.my_ack = 2 * rank + 2, 2 * rank + 3
        self.pidfd = os.pidfd_open(pid)
        self.poll = select.poll()
        self.poll.register(self.pidfd, select.POLLIN)
        self._fn = functions()
        self.record = LINK.table(
            **{"OUT_TAIL": self.out + _TAIL, "OUT_ACKS": self.out + _ACKS, "OUT_SLOTS": self.out + _SLOTS},
            **{"THEIR_BELL": self.theirs.bell, "THEIR_INTEREST": self.theirs.interest},
            **{"MY_TAIL": self.my_tail, "MY_ACK": self.my_ack},
            **{"IN_TAIL": self.inn + _TAIL, "IN_ACKS": self.inn + _ACKS, "IN_SLOTS": self.inn + _SLOTS},
            **{"MY_BELL": self.mine.bell, "MY_INTEREST": self.mine.interest},
            **{"CODE_TAIL": self.code_tail, "CODE_ACK": self.code_ack},
            **{"REMOTE_BASE": remote.base, "REMOTE_NBYTES": remote.nbytes},
        )

    # the numbers of the next message to the peer, and from it: native calls count them, too
    @property
    def out_number(self) -> int:
        return int(self.record[_OUT_NUMBER])

    @out_number.setter
    def out_number(self, value: int) -> None:
        self.record[_OUT_NUMBER] = value

    @property
    def in_number(self) -> int:
        return int(self.record[_IN_NUMBER])

    @in_number.setter
    def in_number(self, value: int) -> None:
        self.record[_IN_NUMBER] = value

    # --- agreeing on this link

    def announce(self) -> None:
        """Tells the peer that this side has mapped it."""
        self._fn.publish(self.out + _ATTACHED, 1, self.theirs.bell, self.theirs.interest, self.my_tail)

    def announced(self) -> bool:
        """Whether the peer has mapped this side."""
        return bool(self._fn.load(self.inn + _ATTACHED))

    # --- sending

    def send(self, header: wire.Header, addr: int, is_written: bool) -> int:
        """Lends `header.total` bytes at `addr`, which the peer reads or writes; returns the message's number, to
        `settle` later."""
        number, nbytes = self.out_number, header.total
        self.out_number += 1
        if self.arena.contains(addr, max(nbytes, 1)):
            offset = addr - self.arena.base
        else:
            offset = self.arena.alloc(nbytes)
            self.staged[number] = offset, (addr, nbytes) if is_written else None
            if not is_written:
                copy(self.arena.addr(offset), addr, nbytes)
        self.queue.append(_Queued(number, header._replace(number=number, offset=offset, length=nbytes)))
        self.push()
        return number

    def push(self) -> bool:
        """Writes queued descriptors while the ring has room; whether all are out."""
        while self.queue:
            item = self.queue[0]
            slot = item.number % RING
            if item.number >= RING and self._fn.load(self.out + _ACKS + 4 * slot) != (item.number - RING + 1) & _U32:
                return False
            ctypes.memmove(self.out + _SLOTS + slot * _SLOT_NBYTES, wire.pack(item.header), wire.SIZE)
            self._fn.publish(
                self.out + _TAIL, (item.number + 1) & _U32, self.theirs.bell, self.theirs.interest, self.my_tail
            )
            self.queue.popleft()
        return True

    def ack_word(self, number: int) -> tuple[int, int, int]:
        """`(word, target, interest code)` of the wait for the release of message `number`."""
        return self.out + _ACKS + 4 * (number % RING), (number + 1) & _U32, self.code_ack

    def settle(self, number: int) -> None:
        """Called once `number` is released: its staging memory is free again."""
        if number in self.staged:
            offset, target = self.staged.pop(number)
            if target is not None:
                copy(target[0], self.arena.addr(offset), target[1])
            self.arena.free(offset)

    # --- receiving

    def tail_word(self) -> tuple[int, int, int]:
        """`(word, target, interest code)` of the wait for the next message."""
        return self.inn + _TAIL, (self.in_number + 1) & _U32, self.code_tail

    def take(self) -> tuple[wire.Header, int]:
        """The next message's header and the address of its data in the peer's arena. `WireError` if it lies outside."""
        slot = self.in_number % RING
        h = wire.unpack(ctypes.string_at(self.inn + _SLOTS + slot * _SLOT_NBYTES, wire.SIZE), shared=True)
        if h.offset + h.total > self.remote.nbytes or h.source != self.peer:
            raise WireError(f"descriptor from rank {self.peer} points outside its arena or names rank {h.source}: {h}")
        self.in_number += 1
        return h, self.remote.base + h.offset

    def release(self, number: int) -> None:
        """Tells the peer that message `number` is not read any more."""
        if self.remote.head.addr:
            self._fn.publish(
                self.inn + _ACKS + 4 * (number % RING),
                (number + 1) & _U32,
                self.theirs.bell,
                self.theirs.interest,
                self.my_ack,
            )

    # --- waiting

    def wait(self, word: int, target: int, code: int, spins: int, limit: Timespec) -> bool:
        """Waits once, for at most `limit`, until `word` has reached `target`."""
        fn, m = self._fn, self.mine
        return bool(
            fn.wait(word, target, m.bell, m.interest, ANY if self.queue else code, spins, ctypes.addressof(limit))
            == REACHED
        )

    def lost(self) -> str | None:
        """Evidence that the peer is gone, or None."""
        if self.poll.poll(0):
            return f"its process {self.pid} ended"
        state = self.theirs.state
        if state != OPEN:
            return "it aborted" if state == ABORTED else "it closed its endpoint (its program ended)"
        return None

    def close(self) -> None:
        self.theirs.wake()
        self.poll.unregister(self.pidfd)
        os.close(self.pidfd)
        self.remote.close()
