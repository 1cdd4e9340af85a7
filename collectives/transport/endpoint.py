"""One worker's end of all communication: `send`, `receive`, `flush` over whichever transport reaches each peer.

    endpoint = Endpoint(rank, size, job="run-17", epoch=0)
    cards = rendezvous(endpoint.card())               # the launcher's: everyone's cards, in rank order
    endpoint.connect(cards, deadline_s=20)
    endpoint.send(1, MessageKey(plan, 0, 0), addr, nbytes, "float32")
    with endpoint.receive(1, MessageKey(plan, 0, 0), nbytes, "float32") as borrowed: ...
    endpoint.flush()

Messages of a directed pair are numbered in the order sent, or in that in which they were reserved and expected; each
receive says what it expects, and anything else is a `PlanMismatch`. One thread at a time communicates; `abort` may be
called by any. How it waits: `waiting.py`.
"""

from __future__ import annotations

import ctypes
import os
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from threading import Lock, RLock
from types import TracebackType
from typing import Any, NamedTuple

from manygrad.collectives.transport import shm, wire
from manygrad.collectives.transport import zmq as tcp
from manygrad.collectives.transport.arena import Arena, RemoteArena
from manygrad.collectives.transport.blocks import SharedBlock
from manygrad.collectives.transport.link import COPIED_NBYTES, WINDOW, Incoming
from manygrad.collectives.transport.measure import measure
from manygrad.collectives.transport.native_runs import NativeRuns
from manygrad.collectives.transport.waiting import TICK_S, Waits
from manygrad.collectives.transport.wire import MessageKey
from manygrad.errors import CollectiveTimeout, NoRank, PeerLost, PlanMismatch, TransportError
from manygrad.multi.world import Link
from manygrad.native.memory import bytes_at, copy
from manygrad.tensor.environment import TRANSPORT

SPINS = 1500  # about 30 µs, only where every worker of the host has a core
CLOSE_S = 2.0
BESIDE_NBYTES = 64 << 20  # of the arena of an endpoint beside another, through which it stages what it sends
# That one collective sends before those before it are finished. All together send at most twice as much, which is less
# than is granted unasked
AHEAD_NBYTES = WINDOW // 4
EAGER_PEERS = 64  # up to so many ZeroMQ peers are connected at the start; more, at the first message


class Borrowed:
    """Received bytes, readable at `addr` until `release()` (or the end of a `with` block)."""

    __slots__ = ("_release", "addr", "nbytes")

    def __init__(self, addr: int, nbytes: int, release: Callable[[], None]):
        self.addr, self.nbytes, self._release = addr, nbytes, release

    def release(self) -> None:
        """Gives the memory back to whoever owns it. May be called again."""
        release, self._release = self._release, _nothing
        release()

    def __enter__(self) -> Borrowed:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.release()


def _nothing() -> None:
    return None


class Ticket(NamedTuple):
    """A message sent, to be settled."""

    peer: int
    number: int
    key: MessageKey


class Traffic(NamedTuple):
    """Bytes sent and received, and messages sent."""

    sent: int
    received: int
    messages: int


class Counts(ctypes.Structure):
    """Traffic so far, in memory that native code adds to."""

    _fields_ = [(name, ctypes.c_int64) for name in Traffic._fields]
    sent: int
    received: int
    messages: int


class Endpoint:
    """See the module. `describe(plan)` gives the source line of a plan, for errors.

    `arena_bytes`: size of the shared-memory arena (default: the host's memory; it is sparse). `bind_host`: this host's
    IP address that the peers reach. `bytes_sent`, `bytes_received` and `messages` (sent) count from the start.

    Large: all that a worker says to others goes through it.
    """

    def __init__(
        self,
        rank: int,
        size: int,
        job: str,
        epoch: int,
        bind_host: str = "127.0.0.1",
        arena_bytes: int | None = None,
        describe: Callable[[int], str] | None = None,
    ):
        if not 0 <= rank < size:
            raise ValueError(f"rank {rank} is outside 0..{size - 1}")
        self.rank, self.size, self.job, self.epoch = rank, size, job, epoch
        self.describe = describe or (lambda plan: "")
        self.traffic, self.dropped_stale = Counts(), 0
        self.routes: dict[int, str] = {}
        self.link: Link | None = None  # the slowest one of all workers, once they have met
        self.piece_nbytes = 0  # collectives are cut in messages of so many bytes, on all ranks alike; 0: they are not
        self._links: dict[int, shm.ShmLink | tcp.ZmqLink] = {}
        self._job = wire.job_hash(job)
        self._closed = False
        self.why_closed = "this endpoint is closed"
        self._lock = RLock()  # held by whoever communicates
        self._ending = Lock()  # between abort and close
        self._beside: list[Endpoint] = []
        self._outstanding: dict[tuple[int, int], Ticket] = {}  # what is not settled, by peer and number
        # what a wait does when it is woken; it may send
        self.meanwhile: Callable[[], None] = _nothing
        self.arena = Arena(arena_bytes, shm.mailbox_nbytes(size))
        self._hub = tcp.ZmqHub(rank, size, self._job, epoch, bind_host)
        self._mailbox = shm.Mailbox(self.arena.mailbox)
        self._waits = Waits(rank, self._hub, self._links, lambda plan: self.describe(plan), lambda: self.meanwhile())
        self.native = NativeRuns(self._lock, self._waits)

    # --- meeting

    def card(self) -> dict[str, Any]:
        """Address and token with which peers reach this endpoint; JSON-able. The token is a secret of the run."""
        return {
            "rank": self.rank,
            "host": self._hub.host,
            "addresses": self._hub.addresses,
            "curve": self._hub.public.decode() if self._hub.secure else "",
            "sealed": self._hub.sealed,
            "transport": TRANSPORT.value,
            "lock": self._hub.token.hex(),
            "pid": os.getpid(),
            "memfd": self.arena.fd,
            "token": self.arena.token.hex(),
            "arena_nbytes": self.arena.nbytes,
        }

    def beside(self) -> Endpoint:
        """Another endpoint of this rank, to be connected, for a thread that communicates beside what this one does. It
        is aborted and closed with this one."""
        self._beside.append(Endpoint(self.rank, self.size, self.job, self.epoch, self._hub.host, BESIDE_NBYTES))
        return self._beside[-1]

    def connect(
        self, cards: Sequence[dict[str, Any]], deadline_s: float = 30.0, peers: Collection[int] | None = None
    ) -> None:
        """Finds a route to every peer: shared memory where both sides can map each other, else ZeroMQ. `peers`: to
        these alone, and their links are not measured.

        Raises `TransportError` where TRANSPORT forces what cannot be, `CollectiveTimeout` naming the peers not reached.
        """
        with self._lock:
            self._connect(cards, deadline_s, [r for r in peers or range(self.size) if r != self.rank])
            link = measure(self) if peers is None else None
            self.link = link
            self.piece_nbytes = 0 if link is None else link.piece_nbytes
            self.traffic = Counts()

    def _connect(self, cards: Sequence[dict[str, Any]], deadline_s: float, peers: Collection[int]) -> None:
        if len(cards) != self.size:
            raise ValueError(f"connect needs {self.size} cards, one a rank, got {len(cards)}")
        if TRANSPORT.value not in ("", "shm", "zmq"):
            raise ValueError(f"TRANSPORT={TRANSPORT.value!r} is unknown; use shm or zmq, or leave it empty")
        self._hub.admit(cards)
        attached: dict[int, shm.ShmLink] = {}
        for r in peers:
            self._hub.add(r, cards[r])
            if TRANSPORT.value != "zmq":
                try:
                    self._links[r] = attached[r] = self._attach(r, cards[r])
                    attached[r].announce()
                except (OSError, ValueError, KeyError) as e:
                    if TRANSPORT.value == "shm":
                        raise TransportError(
                            rank=self.rank,
                            peer=r,
                            problem=f"TRANSPORT=shm, but its memory cannot be mapped ({e})",
                            remedy="Unset TRANSPORT, or run both workers on one host, as one user, in one container",
                        ) from None
        over_tcp = {r for r in peers if r not in attached}
        eager = len(over_tcp) <= EAGER_PEERS
        for r in over_tcp:
            self._hub.connect(self._hub.links[r])
        waiting, end = set(peers), time.monotonic() + deadline_s
        while waiting:
            for r in list(waiting):
                link = self._hub.links[r]
                if r in attached and link.hello_in:  # the peer could not map this side: both use ZeroMQ
                    attached.pop(r).close()
                    del self._links[r]
                    over_tcp.add(r)
                    self._hub.connect(link)
                if r in attached:
                    if attached[r].announced():
                        waiting.discard(r)
                elif not eager or (link.hello_in and link.hello_back):
                    waiting.discard(r)
                lost = (attached[r] if r in attached else link).lost()
                if r in waiting and lost:
                    raise PeerLost(rank=self.rank, peer=r, waited_for="the first hello", evidence=lost)
            if waiting:
                self._waits.raise_aborted()
                if time.monotonic() > end:
                    raise CollectiveTimeout(
                        rank=self.rank,
                        peer=min(waiting),
                        plan=0,
                        sequence=0,
                        timeout_s=deadline_s,
                        where="connect",
                        waited_for=f"the first hello (missing: ranks {sorted(waiting)[:16]})",
                    )
                self._hub.progress(0.002 if len(attached) else TICK_S)
        for r in peers:
            self._links[r] = attached[r] if r in attached else self._hub.links[r]
            self.routes[r] = self._links[r].route
            if r in attached:
                del self._hub.links[r]
        local = 1 + len(attached)
        self._waits.spins = SPINS if local <= len(os.sched_getaffinity(0)) else 0

    def _attach(self, peer: int, card: dict[str, Any]) -> shm.ShmLink:
        token = bytes.fromhex(card["token"])
        remote = RemoteArena(card["pid"], card["memfd"], token, self.arena.mailbox_nbytes, card["arena_nbytes"])
        try:
            return shm.ShmLink(self.rank, peer, self.arena, remote, card["pid"])
        except OSError:
            remote.close()
            raise

    # --- messages

    def may_reserve(self, peer: int) -> bool:
        """Whether messages to `peer` may come in another order than they are asked for: over ZeroMQ."""
        return self.routes.get(peer) == "zmq"

    def reserve(self, peer: int, count: int) -> int:
        """The number of the first of the next `count` messages to `peer`, which are to be sent with these numbers, in
        whatever order. Those of lower numbers go first, where several wait for the link: so what the peer waits for is
        not behind what it has no room for."""
        with self._lock:
            link = self._link(peer)
            assert isinstance(link, tcp.ZmqLink), "messages in shared memory keep their order"
            return link.session.reserve(count)

    def expect(self, peer: int, count: int) -> int:
        """The number of the first of the next `count` messages of `peer`, which may be asked for in whatever order."""
        with self._lock:
            link = self._link(peer)
            assert isinstance(link, tcp.ZmqLink), "messages in shared memory keep their order"
            return link.session.expect(count)

    def incoming(self, peer: int) -> Mapping[int, Incoming]:
        """By its number each message of `peer` of which something is there and that was not received yet. Receiving one
        of which all is `there` hardly waits."""
        link = self._link(peer)
        assert isinstance(link, tcp.ZmqLink), "messages in shared memory keep their order"
        return link.incoming

    def send(
        self,
        peer: int,
        key: MessageKey,
        addr: int,
        nbytes: int,
        dtype_name: str = "raw",
        number: int | None = None,
        is_written: bool = False,
    ) -> Ticket:
        """Lends `nbytes` at `addr` to `peer`; never blocks. The memory must stay as it is until `settle` or `flush`,
        which wait for nobody where the message was copied. `number`: one that was reserved. `is_written`: the peer, of
        this host, does not read but write there."""
        with self._lock:
            link = self._link(peer)
            self._waits.raise_aborted()
            if isinstance(link, shm.ShmLink):
                header = self.header(self.rank, key, dtype_name, nbytes)._replace(length=0)
                number = link.send(header, addr, is_written)
            else:  # memory of others may be gone before ZeroMQ has sent it, if an error comes between: it is copied,
                # as is what takes less time to copy than its receipt takes to come back
                assert not is_written, "only peers of this host write here"
                number = self.reserve(peer, 1) if number is None else number
                copied = nbytes <= COPIED_NBYTES or not self.arena.contains(addr, nbytes)
                self._hub.send(link, self.header(self.rank, key, dtype_name, nbytes, number), addr, copied)
            self.traffic.sent += nbytes
            self.traffic.messages += 1
            return self.outstanding(Ticket(peer, number, key))

    def header(self, source: int, key: MessageKey, dtype_name: str, nbytes: int, number: int = 0) -> wire.Header:
        """Header of a message of a rank, but for where it lies."""
        code = wire.DTYPE_CODES[dtype_name]
        return wire.Header(wire.DATA, self._job, self.epoch, source, *key, code, number, nbytes, 0, nbytes)

    def outstanding(self, ticket: Ticket) -> Ticket:
        """Notes what `flush` has to wait for."""
        self._outstanding[ticket.peer, ticket.number] = ticket
        return ticket

    def add(self, traffic: Traffic) -> None:
        self.traffic.sent += traffic.sent
        self.traffic.received += traffic.received
        self.traffic.messages += traffic.messages

    @property
    def bytes_sent(self) -> int:
        return self.traffic.sent

    @property
    def bytes_received(self) -> int:
        return self.traffic.received

    @property
    def messages(self) -> int:
        return self.traffic.messages

    def shared_memory(self, peer: int) -> shm.ShmLink | None:
        """The link to a peer of this host; None where the peer, or any other, is reached over ZeroMQ, which has to be
        served while one waits."""
        link = self._links.get(peer)
        return link if isinstance(link, shm.ShmLink) and not self._hub.links else None

    def receive(
        self, peer: int, key: MessageKey, nbytes: int, dtype_name: str = "raw", number: int | None = None
    ) -> Borrowed:
        """Waits for the next message of `peer`, or for that of a `number` that was expected, which must be `key` with
        `nbytes` of `dtype_name`.

        The bytes are read where they lie (the peer's memory, or the received frame), at a multiple of the item size.
        Raises `PlanMismatch`, `CollectiveTimeout`, `PeerLost`, `CollectiveAborted`.
        """
        with self._lock:
            link = self._link(peer)
            self._waits.raise_aborted()
            if isinstance(link, shm.ShmLink):
                borrowed = self._receive_shm(link, key, nbytes, dtype_name)
            else:
                borrowed = self._receive_zmq(link, key, nbytes, dtype_name, number)
            self.traffic.received += nbytes
            return borrowed

    def _receive_shm(self, link: shm.ShmLink, key: MessageKey, nbytes: int, dtype_name: str) -> Borrowed:
        while True:
            self._waits.for_word(link, *link.tail_word(), key, f"{nbytes} bytes (message {key.chunk})")
            number = link.in_number
            h, addr = link.take()
            if h.epoch == self.epoch and h.job == self._job:
                break
            self.dropped_stale += 1
            link.release(number)
        self._compare(link.peer, h, key, nbytes, dtype_name)
        return Borrowed(addr, nbytes, lambda: link.release(number))

    def receive_into(
        self,
        peer: int,
        key: MessageKey,
        addr: int,
        nbytes: int,
        dtype_name: str = "raw",
        number: int | None = None,
    ) -> None:
        """As `receive`, into the `nbytes` at `addr`: what comes over ZeroMQ is put there frame by frame."""
        with self._lock:
            link = self._link(peer)
            if isinstance(link, shm.ShmLink):
                with self.receive(peer, key, nbytes, dtype_name) as got:
                    copy(addr, got.addr, nbytes)
                return
            self._waits.raise_aborted()
            self._receive_zmq(link, key, nbytes, dtype_name, number, addr)
            self.traffic.received += nbytes

    def _receive_zmq(
        self,
        link: tcp.ZmqLink,
        key: MessageKey,
        nbytes: int,
        dtype_name: str,
        expected: int | None = None,
        addr: int | None = None,
    ) -> Borrowed:
        hub = self._hub
        number = self.expect(link.peer, 1) if expected is None else expected
        link.asking.add(number)
        hub.post(link, nbytes)
        place = None if addr is None or not nbytes else bytes_at(addr, nbytes)
        pooled: SharedBlock | None = None

        def look() -> Borrowed | None:
            nonlocal place, pooled
            message = link.incoming.get(number)
            if message is None:
                return None
            for frame in list(message.frames.values()):
                h = frame.header
                fits = h.total == nbytes
                if place is None and h.length < h.total and fits:
                    pooled = hub.blocks.take(nbytes)
                    place = pooled.array
                into = place[h.offset : h.offset + h.length] if place is not None and fits else None
                if not link.open(frame, message, into):
                    hub.dropped += 1
                    hub.ask_again(link)
                    continue
                self._compare(link.peer, h, key, nbytes, dtype_name)
                if place is not None or nbytes == 0:
                    del message.frames[h.offset]
                    message.seen.add(h.offset)
            if message.arrived < nbytes or (nbytes == 0 and not message.seen):
                return None
            del link.incoming[number]
            link.asking.discard(number)
            hub.pay(link)
            if pooled is not None:
                full = pooled
                return Borrowed(full.addr, nbytes, lambda: hub.blocks.give_back(full))
            if addr is not None:
                return Borrowed(addr, nbytes, _nothing)
            at, owner = tcp.frame_address(message.frames[0].payload if nbytes else b"")
            return Borrowed(at, nbytes, lambda owner=owner: None)  # type: ignore[misc]

        return self._waits.for_frames(link, look, key, f"{nbytes} bytes (message {key.chunk})")

    def settle(self, ticket: Ticket) -> None:
        """Waits until the memory of one message may be written again."""
        key = ticket.key
        with self._lock:
            link = self._link(ticket.peer)
            self._outstanding.pop((ticket.peer, ticket.number), None)
            if isinstance(link, shm.ShmLink):
                self._waits.for_word(link, *link.ack_word(ticket.number), key, f"the release of message {key.chunk}")
                link.settle(ticket.number)
            elif link.must_wait(ticket.number):
                what = f"the receipt of message {key.chunk}"
                self._waits.for_frames(link, lambda: not link.must_wait(ticket.number) or None, key, what)

    def flush(self) -> None:
        """Waits until everything sent since the last flush may be written again."""
        with self._lock:
            for ticket in list(self._outstanding.values()):
                self.settle(ticket)

    def waiting(self) -> tuple[int, float, str] | None:
        """From any thread: the peer that this endpoint waits for right now, for how many seconds nothing has come of
        it, and the source line."""
        wait = self._waits.now
        return wait and (wait.peer, time.monotonic() - wait.since, self.describe(wait.plan))

    def keep_going(self) -> None:
        """Sends on what is on its way, again where a connection has broken meanwhile. For a rank that communicates no
        more, every now and then until its peers do not either."""
        if self._hub.links and self._lock.acquire(blocking=False):
            try:
                if not self._closed and self._waits.reason is None:
                    self._hub.progress(0)
            finally:
                self._lock.release()

    def wake(self) -> None:
        """Has a wait of another thread call `meanwhile`, if any peer is on another host."""
        if self._hub.links:
            self._hub.wake()

    # --- waiting

    def _link(self, peer: int) -> shm.ShmLink | tcp.ZmqLink:
        if self._closed:
            raise NoRank(rank=self.rank, reason=self.why_closed)
        link = self._links.get(peer)
        if link is None:
            raise ValueError(f"rank {self.rank} has no connected peer {peer}; connect() first (size {self.size})")
        return link

    def _compare(self, peer: int, h: wire.Header, key: MessageKey, nbytes: int, dtype_name: str) -> None:
        if h.key == key and h.total == nbytes and h.dtype == wire.DTYPE_CODES[dtype_name]:
            return

        def text(k: MessageKey, n: int, dtype: str) -> str:
            where = self.describe(k.plan)
            return f"plan {k.plan:#018x}, sequence {k.sequence}, message {k.chunk}: {n} bytes of {dtype}" + (
                f" [{where}]" if where else ""
            )

        raise PlanMismatch(
            rank=self.rank,
            difference=f"ranks {self.rank} and {peer} run different programs:"
            f"\n  rank {self.rank}: {text(key, nbytes, dtype_name)}"
            f"\n  rank {peer}: {text(h.key, h.total, wire.DTYPE_NAMES[h.dtype])}"
            "\nEvery rank must make the same tensors in the same order; "
            "look for a branch on the rank, or for data of another length, at these lines",
        )

    # --- ending

    def abort(self, reason: str) -> None:
        """Ends every wait of this endpoint with `CollectiveAborted`, now and from now on. From any thread;
        the first wins."""
        with self._ending:
            self.arena.has_failed = True
            for other in self._beside:
                other.abort(reason)
            self._waits.abort(reason)
            if not self._closed:
                self._mailbox.wake()
                self._hub.wake()

    def close(self, why: str = "") -> None:
        """Lets what was sent arrive (2 s at most, and not after an abort), then gives up all sockets; the arena stays
        for what lies in it. From now on who communicates gets `NoRank`, which says `why`."""
        for other in self._beside:
            other.close(why)
        if not self._lock.acquire(timeout=0.01):  # another thread is waiting: end its wait first
            self.abort("this endpoint is being closed")
            self._lock.acquire()
        try:
            if not self._closed:
                self._drain()
                with self._ending:
                    self._end(self._waits.reason or why)
                self._mailbox.mark(shm.CLOSED if self._waits.reason is None else shm.ABORTED)
                for link in self._links.values():
                    if isinstance(link, shm.ShmLink):
                        link.close()
                self._hub.close()
                self._links.clear()
        finally:
            self._lock.release()

    def leave_to_parent(self, why: str) -> None:
        """In a forked child: all this is its parent's. From now on who communicates here gets `NoRank`, which says
        `why`, and nothing that is written here is seen by others."""
        for other in self._beside:
            other.leave_to_parent(why)
        self._lock._at_fork_reinit()  # type: ignore[attr-defined]  # (a thread that held it is not in the child)
        self._end(why)
        self.arena.keep_apart()

    def _end(self, why: str) -> None:
        self._closed = self.native.closed = True
        self._waits.stop[0] = 1
        self.why_closed = why or self.why_closed

    def _drain(self) -> None:
        self._hub.pay_all()
        end = time.monotonic() + CLOSE_S
        while self._waits.reason is None and time.monotonic() < end:
            if not any(link.session.kept and not link.lost() for link in self._hub.links.values()):
                break
            self._hub.progress(0.01)

    @property
    def closed(self) -> bool:
        return self._closed

    def __enter__(self) -> Endpoint:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()
