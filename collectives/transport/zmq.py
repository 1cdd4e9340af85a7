"""ZeroMQ over TCP, between hosts (and anywhere shared memory cannot be attached).

Each endpoint binds a control socket and DATA_SOCKETS data sockets; to a peer it connects a socket to each of them
at the first need. A message is cut into frames of CHUNK bytes, which alternate between the data sockets; each frame is
a header and a payload. A message of one frame is read from the frame's own memory; a longer one is put together in one
buffer, or in the place that it was asked for, frame by frame as they come.

Flow control is in bytes: a receiver grants each sender WINDOW bytes beyond what it has asked for with `receive`, so the
memory of unexpected messages is bounded, while an awaited message of any size gets through. A receiver tells up to
which number all messages have arrived, of those that the sender has copied or sealed only now and then. `settle` waits
for that where a message was neither, and `close` for all, which says more than ZeroMQ's tracker (that the kernel took
the bytes), and makes closing with LINGER=0 safe. Both travel in one header, on the control socket.

Every connection is authenticated, and handshakes wait until the run's cards are known. Beyond loopback the control
socket is CURVE with the keys of the cards, and frames on data sockets are sealed with keys of that handshake
(`seal.py`), unless the links are plain (MANYGRAD_PLAIN_LINKS). A data socket, and on loopback the control socket, is
let in by PLAIN, where a password costs nothing per message, each sender having its own (`password`). A message counts
as the rank's that its connection has proved to be. A sealed frame is opened when its message is asked for: into its
place, and never twice. One that does not open was changed on its way, or made up: the sender is asked for all again
that has not arrived, up to REFUSED times.
Nothing is unpickled.

A connection that breaks is made anew by ZeroMQ. What it has swallowed is sent again: when a data socket is back, every
frame that went through it and is of a message that has not arrived yet; on the control socket a new hello, which is
answered with grant and arrivals. The receiver drops what it has. So nothing is lost and nothing comes twice. A peer is
lost when nothing listens at its address any more (its process ended), or when its host does not answer for
RECONNECT_TIMEOUT_S; a process that is only suspended still has the kernel's answer.

All sockets are used under one lock by the thread that waits; there is no thread of our own. Progress is made in
`send`, `receive` and `flush`.
"""

from __future__ import annotations

import ctypes
import heapq
import ipaddress
import os
import secrets
import select
import struct
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import zmq
from zmq.utils import z85
from zmq.utils.monitor import parse_monitor_message

from manygrad.collectives.transport import wire
from manygrad.collectives.transport.blocks import Blocks
from manygrad.collectives.transport.link import COPIES_NBYTES, WINDOW, Frame, Outgoing, ZmqLink
from manygrad.collectives.transport.seal import COUNTER, TAG_NBYTES, Opener, Sealer, key_of
from manygrad.collectives.transport.zap import Allowed, answer_zap, password
from manygrad.errors import WireError
from manygrad.native.memory import bytes_at, keep_freed
from manygrad.tensor.environment import MANYGRAD_PLAIN_LINKS

DATA_SOCKETS = 2  # of each peer, after the control socket
CHUNK = 2 << 20  # a frame's payload; a quarter of it costs a third more processor time a byte, twice it no less
SENDING, RECEIVING = 1, 2  # the I/O threads of data sockets, as ZeroMQ's affinity has them: both ways at the same time
HIGH_WATER = 8  # frames
LOOK_EVERY = 4  # while frames come in a row, only every so often at anything else
REFUSED = 100  # frames in a peer's name, after which it is lost
OWED = 8  # messages that have come whole, until the sender is told in the middle of a stream
OWED_NBYTES = COPIES_NBYTES // 4  # likewise
SHARED_NBYTES = 4 << 10  # from here on ZeroMQ reads memory where it lies; what is shorter it copies as fast
# The system's own signs of life, not ZeroMQ's: its heartbeats queue behind data, so that on a slow link the answer of a
# peer that lives comes too late. A connection has broken when the peer's kernel acknowledges nothing for so long
UNACKNOWLEDGED_MS = 3000
KEEPALIVE_S, KEEPALIVES = 1, 3
CONNECT_TIMEOUT_MS = 1000  # then tried again: the system's own retries come ever later
# (plain integers: Python's enumerations are slow to combine)
_NOBLOCK, _MORE_FOLLOWS = int(zmq.NOBLOCK), int(zmq.NOBLOCK | zmq.SNDMORE)
_EVENTS, _POLLIN = int(zmq.EVENTS), int(zmq.POLLIN)
_IDENTITY = struct.Struct("<cIHI")  # b"m", rank, socket, epoch
_AHEAD = 1 << 24  # messages that may have come and are not asked for
_SOCKETS = 2 * (1 + DATA_SOCKETS)  # of each peer: sockets and their monitors


def is_loopback(host: str) -> bool:
    return ipaddress.ip_address(host).is_loopback


class ZmqHub:
    """All ZeroMQ sockets of one endpoint. Not thread-safe: the endpoint calls it under its lock, except `wake`.

    Large: the sockets and timers of all links.
    """

    def __init__(self, rank: int, size: int, job: int, epoch: int, host: str):
        try:
            loopback = is_loopback(host)
        except ValueError:
            raise ValueError(f"bind_host must be an IP address of this host, got {host!r}") from None
        if ipaddress.ip_address(host).is_unspecified:
            raise ValueError(
                f"bind_host={host!r} would listen on every interface; give the address that the peers should use"
            )
        self.rank, self.size, self.job, self.epoch, self.host = rank, size, job, epoch, host
        self.secure = not loopback
        self.sealed = self.secure and not MANYGRAD_PLAIN_LINKS
        self.context = zmq.Context(io_threads=2)
        self.context.set(zmq.MAX_SOCKETS, max(1023, size * _SOCKETS + 64))
        self.token = secrets.token_bytes(16)
        self.links: dict[int, ZmqLink] = {}
        self.allowed: Allowed | None = None
        self.dropped = self.in_a_row = 0
        self.blocks = Blocks()
        self.public, self.secret = zmq.curve_keypair()
        self.wake_fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self.poller = zmq.Poller()
        self.poller.register(self.wake_fd, zmq.POLLIN)
        # of what seldom happens: a look at each socket costs more than one at this for all
        self.seldom = select.epoll()
        self.seldom_fd = self.seldom.fileno()
        self.poller.register(self.seldom_fd, zmq.POLLIN)
        self.watched: set[zmq.Socket[bytes]] = set()  # sockets at their high-water mark, which are to have room again
        self.closed = False
        try:
            self.zap = self.context.socket(zmq.REP)
            self.zap.linger = 0
            self.zap.bind("inproc://zeromq.zap.01")
            self.seldom.register(self.zap.FD, select.EPOLLIN)
            self.control = self._bound(zmq.ROUTER)
            self.data = [self._bound(zmq.PULL) for _ in range(DATA_SOCKETS)]
            self.lively: list[zmq.Socket[bytes]] = []  # those on which frames came last time
            self.addresses = [s.getsockopt_string(zmq.LAST_ENDPOINT) for s in (self.control, *self.data)]
        except BaseException:
            self.close()
            raise

    def _options(self, s: zmq.Socket[bytes]) -> zmq.Socket[bytes]:
        s.linger, s.sndhwm, s.rcvhwm, s.maxmsgsize = 0, HIGH_WATER, HIGH_WATER, CHUNK + 4096
        s.setsockopt(zmq.TCP_MAXRT, UNACKNOWLEDGED_MS)
        s.tcp_keepalive, s.tcp_keepalive_cnt = 1, KEEPALIVES
        s.tcp_keepalive_idle = s.tcp_keepalive_intvl = KEEPALIVE_S
        s.ipv6 = ":" in self.host
        if s.type in (zmq.PUSH, zmq.PULL):
            s.affinity = SENDING if s.type == zmq.PUSH else RECEIVING
        return s

    def _bound(self, kind: int) -> zmq.Socket[bytes]:
        s = self._options(self.context.socket(kind))
        if kind == zmq.ROUTER:
            s.router_handover = 1
            s.sndhwm = 0  # answers are small and few; at a limit a ROUTER would drop them silently
        if kind == zmq.ROUTER and self.secure:
            s.curve_server, s.curve_secretkey, s.curve_publickey = 1, self.secret, self.public
        else:
            s.plain_server = True
        s.zap_domain = b"manygrad"
        s.bind(f"tcp://[{self.host}]:*" if ":" in self.host else f"tcp://{self.host}:*")
        self.poller.register(s, zmq.POLLIN)
        return s

    # --- peers

    def add(self, peer: int, card: dict[str, Any]) -> ZmqLink:
        link = self.links[peer] = ZmqLink(peer, card, self.epoch)
        return link

    def admit(self, cards: Sequence[dict[str, Any]]) -> None:
        """The cards of this run; until now handshakes have been waiting."""
        self.allowed = {(b"PLAIN", password(self.token, r, self.rank)): r for r in range(self.size) if r != self.rank}
        if self.secure:
            keys = {r: c["curve"] for r, c in enumerate(cards) if r != self.rank and c.get("curve")}
            self.allowed |= {(b"CURVE", z85.decode(key)): r for r, key in keys.items()}

    def connect(self, link: ZmqLink) -> None:
        """Makes the sockets to a peer, with a hello on each (once)."""
        if link.sockets:
            return
        keep_freed(
            2 * CHUNK, 2 * HIGH_WATER * DATA_SOCKETS * CHUNK
        )  # ZeroMQ allocates memory for every frame that comes
        if (self.secure, self.sealed) != (bool(link.card.get("curve")), bool(link.card.get("sealed"))):
            raise WireError(
                f"rank {link.peer} and this rank do not agree on encryption: one binds loopback, or has plain links "
                "(MANYGRAD_PLAIN_LINKS), and the other does not"
            )
        if self.sealed and link.sealer is None:
            self._derive(link)
        for socket, address in enumerate(link.card["addresses"]):
            s = self._options(self.context.socket(zmq.PUSH if socket else zmq.DEALER))
            if not socket:
                s.routing_id = _IDENTITY.pack(b"m", self.rank, socket, self.epoch)
            if self.secure and not socket:
                s.curve_serverkey = link.card["curve"].encode()
                s.curve_publickey, s.curve_secretkey = self.public, self.secret
            else:
                s.plain_username = b"%d" % self.rank
                s.plain_password = password(bytes.fromhex(link.card["lock"]), self.rank, link.peer)
            events = (
                zmq.EVENT_HANDSHAKE_SUCCEEDED
                | zmq.EVENT_HANDSHAKE_FAILED_AUTH
                | zmq.EVENT_DISCONNECTED
                | zmq.EVENT_CLOSED
            )
            monitor = s.get_monitor_socket(events)
            self.seldom.register(monitor.FD, select.EPOLLIN)
            link.monitors.append(monitor)
            s.connect_timeout = CONNECT_TIMEOUT_MS
            s.connect(address)
            link.sockets.append(s)
            if not socket:
                self.poller.register(s, zmq.POLLIN)
            self._greet(link, socket)

    def _derive(self, link: ZmqLink) -> None:
        """The keys of both directions."""
        secret, own, theirs = (z85.decode(k) for k in (self.secret, self.public, link.card["curve"]))
        out, into = (
            key_of(secret, theirs, self.job, self.epoch, *pair, own)
            for pair in ((self.rank, link.peer), (link.peer, self.rank))
        )
        link.sealer, link.opener = Sealer(out), Opener(into)

    def _greet(self, link: ZmqLink, socket: int) -> None:
        """Says hello on a socket."""
        header = self._control(wire.HELLO)._replace(chunk=socket)
        try:
            if not socket:
                link.sockets[0].send(wire.pack(header), zmq.NOBLOCK)
            elif link.sealer is None:
                self._hand(link.sockets[socket], wire.pack(header), b"")
            else:
                head, tag = wire.pack(header) + link.sealer.next(), bytearray(TAG_NBYTES)
                link.sealer.seal(head, b"", tag)
                self._hand(link.sockets[socket], head, tag)
        except zmq.Again:
            pass  # so much waits there that its arrival will bring the answer

    def _control(self, kind: int, number: int = 0, value: int = 0) -> wire.Header:
        return wire.Header(kind, self.job, self.epoch, self.rank, value, 0, 0, wire.RAW, number, 0, 0, 0)

    def _reply(self, link: ZmqLink, kind: int) -> None:
        """Tells the peer, on its control socket, the grant and what has arrived;
        dropped while that socket is not there (hello repeats it)."""
        link.told = link.taken + WINDOW
        header = wire.pack(self._control(kind, link.session.told(), link.told))
        try:
            self.control.send_multipart([_IDENTITY.pack(b"m", link.peer, 0, self.epoch), header], zmq.NOBLOCK)
        except zmq.Again:
            link.connections.lose("its answers pile up unread")

    def pay(self, link: ZmqLink, all: bool = False) -> None:
        """Tells the peer what has arrived, where it waits for that: in the middle of a stream that is waited for not
        every message, and of those that it has copied or sealed only every `OWED`, or with `all` and `urgent`."""
        s = link.session
        waited_for = s.urgent and (all or link.asking.isdisjoint(link.incoming))
        if s.owed >= OWED or s.owed_nbytes >= OWED_NBYTES or (s.owed and waited_for):
            self._reply(link, wire.ACK)

    def pay_waiting(self, all: bool = False) -> None:
        """`pay` for every peer that has sent something since it was told."""
        for link in self.links.values():
            if link.session.owed:
                self.pay(link, all)

    def pay_all(self) -> None:
        """Tells every peer all that has arrived."""
        for link in self.links.values():
            if link.session.owed:
                self._reply(link, wire.ACK)

    def ask_again(self, link: ZmqLink) -> None:
        """A sealed frame in the peer's name was refused."""
        link.refused += 1
        if link.refused > REFUSED:
            evidence = f"{link.refused} frames in its name did not open: something between the hosts changes them"
            link.connections.lose(evidence)
        else:
            self._reply(link, wire.AGAIN)

    # --- sending

    def send(self, link: ZmqLink, header: wire.Header, addr: int, copy: bool) -> None:
        """Queues a message of `header`, but for `offset` and `length`; with `copy` its memory is not read later."""
        item = Outgoing(header, addr, None)
        link.session.keep(header.number, item)
        self.connect(link)
        nbytes = header.total
        if copy and link.sealer is not None:  # (what is sealed is a copy)
            for offset in range(0, max(nbytes, 1), CHUNK):
                self._sealed(link, item, offset, min(CHUNK, nbytes - offset))
        elif copy:
            item.copy = self.blocks.take(nbytes)
            ctypes.memmove(item.copy.addr, addr, nbytes)
            item.addr, item.kept_nbytes = item.copy.addr, nbytes
            link.kept_nbytes += nbytes
        heapq.heappush(link.queue, (header.number, item))
        self.push(link)

    def push(self, link: ZmqLink) -> None:
        """Hands frames to ZeroMQ as far as grants and high-water marks allow."""
        link.blocked = None
        if link.connections.down:
            return
        while link.again:
            item, offset = link.again[0]
            if item.header.number in link.session.kept and not self._frame(link, item, offset):
                return
            link.again.popleft()
        while link.queue:
            _, item = link.queue[0]
            total = item.header.total
            length = min(CHUNK, total - item.offset)
            if link.sent + length > link.granted or not self._frame(link, item, item.offset):
                return
            link.sent += length
            item.offset += length
            if item.offset >= total:
                item.handed = True
                heapq.heappop(link.queue)

    def _frame(self, link: ZmqLink, item: Outgoing, offset: int) -> bool:
        """Hands one frame to its socket, if that has room."""
        socket = _socket_of(item.header.number, offset)
        length = min(CHUNK, item.header.total - offset)
        head, payload = (self._sealed if link.sealer is not None else self._plain)(link, item, offset, length)
        try:
            self._hand(link.sockets[socket], head, payload)
        except zmq.Again:
            link.blocked = link.sockets[socket]
            return False
        return True

    def _plain(self, link: ZmqLink, item: Outgoing, offset: int, length: int) -> tuple[bytes, Any]:
        """Head and payload of a frame. The memory is read when ZeroMQ sends it."""
        head = wire.pack_frame(item.header, offset, length)
        if length < SHARED_NBYTES:
            return head, ctypes.string_at(item.addr + offset, length)
        if item.copy is not None:
            whole = length == item.copy.nbytes
            return head, item.copy.frame if whole else zmq.Frame(item.copy.array[offset : offset + length], copy=False)
        return head, self.blocks.frame(item.addr + offset, length)

    def _sealed(self, link: ZmqLink, item: Outgoing, offset: int, length: int) -> tuple[bytes, Any]:
        """The same, sealed. It is kept: sent again it has to be the same bytes, as its memory may not be, and one nonce
        must never seal two texts."""
        found = item.sealed.get(offset)
        if found is None:
            assert link.sealer is not None
            head = wire.pack_frame(item.header, offset, length) + link.sealer.next()
            block = self.blocks.take(length + TAG_NBYTES)
            payload = memoryview(bytes_at(item.addr + offset, length)) if length else b""
            link.sealer.seal(head, payload, block.array)
            found = item.sealed[offset] = head, block
            item.kept_nbytes += block.nbytes
            link.kept_nbytes += block.nbytes
        head, block = found
        return head, block.frame if length >= SHARED_NBYTES else block.array

    def _hand(self, socket: Any, head: bytes, payload: Any) -> None:
        """Hands a frame to a data socket; `zmq.Again` where there is no room."""
        socket.send(head, _MORE_FOLLOWS)
        socket.send(payload, 0, not isinstance(payload, zmq.Frame))

    def _is_back(self, link: ZmqLink, socket: int) -> None:
        """The connection was made anew, or the peer has refused a frame: says hello, and has all frames sent again
        that may not have arrived."""
        self._greet(link, socket)
        waiting = {(item.header.number, offset) for item, offset in link.again}
        for item in link.session.kept.values():
            handed = max(item.offset, 1) if item.handed else item.offset  # a message of no bytes has a frame, too
            for offset in range(0, handed, CHUNK):
                number = item.header.number
                if _socket_of(number, offset) == socket and (number, offset) not in waiting:
                    link.again.append((item, offset))
        self.push(link)

    # --- receiving

    def post(self, link: ZmqLink, nbytes: int) -> None:
        """Asks for a message of `nbytes`. Grants the sender what it needs."""
        self.connect(link)
        link.taken += nbytes
        if link.taken > link.told or link.taken + WINDOW - link.told >= WINDOW // 4:
            self._reply(link, wire.GRANT)

    def progress(self, timeout_s: float) -> None:
        """Handles what has come; where that is nothing, waits up to `timeout_s` for anything to happen."""
        for link in self.links.values():
            if link.queue or link.again:
                self.push(link)
        if self.lively and self._drain(self.lively):
            timeout_s = 0.0
            self.in_a_row += 1
            if self.in_a_row % LOOK_EVERY:
                self.pay_waiting()
                return
        self.pay_waiting(all=timeout_s > 0)
        for link in self.links.values():
            if self.watched or link.blocked is not None:
                room = {link.blocked} if link.blocked is not None else set()
                for s in (self.watched & set(link.sockets)) ^ room:
                    self._watch_room(s, s in room)
        events = dict(self.poller.poll(int(timeout_s * 1000)))
        if self.wake_fd in events:
            os.eventfd_read(self.wake_fd)
        if self.seldom_fd in events:
            answer_zap(self.zap, self.allowed)
            for link in self.links.values():
                for socket, monitor in enumerate(link.monitors):
                    self._watch(link, socket, monitor)
        if self.control in events:
            self._greeted()
        if ready := [s for s in self.data if s in events]:
            self._drain(ready, known=True)
        for link in self.links.values():
            if link.sockets and events.get(link.sockets[0], 0) & _POLLIN:
                self._answers(link, link.sockets[0])
            if link.queue or link.again:
                self.push(link)
        self.pay_waiting()

    def _watch_room(self, s: zmq.Socket[bytes], on: bool) -> None:
        """Whether `progress` wakes when a socket has room again."""
        if on:
            self.watched.add(s)
            self.poller.register(s, zmq.POLLOUT)
        else:
            self.watched.discard(s)
            self.poller.unregister(s)

    def _accept(self, data: Any, link: ZmqLink | None, peer: int) -> wire.Header | None:
        """The header, if it is valid and of this job, epoch and peer; else counted as dropped."""
        try:
            h = wire.unpack(data)
        except WireError:
            h = None
        if h is None or link is None or (h.job, h.epoch, h.source) != (self.job, link.session.epoch, peer):
            self.dropped += 1
            return None
        return h

    def _greeted(self) -> None:
        """Takes what peers say on the control socket: hello."""
        for parts in _received(self.control):
            identity = bytes(parts[0].buffer)
            if len(identity) != _IDENTITY.size or len(parts) != 2:
                self.dropped += 1
                continue
            peer = _IDENTITY.unpack(identity)[1]
            link = self.links.get(peer)
            h = self._accept(parts[1].buffer, link, peer) if parts[1].get("User-Id") == str(peer) else None
            if h is None or link is None or h.kind != wire.HELLO:
                self.dropped += h is not None or parts[1].get("User-Id") != str(peer)  # another's name, or no hello
                continue
            self._hello(link, 0)
            self._reply(link, wire.HELLO)

    def _hello(self, link: ZmqLink, socket: int) -> None:
        link.heard += 1
        link.hellos.add(socket)
        # every socket was let in: the peer does not need us to be connected
        link.hello_in = len(link.hellos) == 1 + DATA_SOCKETS

    def _drain(self, sockets: Sequence[zmq.Socket[bytes]], known: bool = False) -> bool:
        """Takes the frames that have come on data sockets; whether there were any. `known`: there are on each."""
        self.lively = []
        for s in sockets:
            for parts in _received(s, 2 * HIGH_WATER, known):
                if not self.lively or self.lively[-1] is not s:
                    self.lively.append(s)
                user = parts[0].get("User-Id")
                if not self.take(user, [p.buffer for p in parts]):
                    self.dropped += 1
                    if self.sealed and (link := self.links.get(int(user))) is not None:
                        self.ask_again(link)
        return bool(self.lively)

    def take(self, user: str, parts: Sequence[Any]) -> bool:
        """A frame of a data socket, from the rank that `user` has proved to be; False where it is dropped."""
        if len(parts) != 2:
            return False
        try:
            h = wire.unpack(parts[0])
        except WireError:
            return False
        link = self.links.get(h.source)
        if link is None or user != str(h.source) or (h.job, h.epoch) != (self.job, link.session.epoch):
            return False
        if self.sealed and link.opener is None:  # its first frame comes before our first need
            self._derive(link)
        sealed = link.opener is not None
        if len(parts[0]) != wire.SIZE + sealed * COUNTER.size or len(parts[1]) != h.length + sealed * TAG_NBYTES:
            return False
        if h.kind == wire.HELLO and 0 < h.chunk <= DATA_SOCKETS and not h.length:
            if link.opener is not None and not link.opener.open(parts[0], parts[1], bytearray()):
                return False
            self._hello(link, h.chunk)
            return True
        whole_frame = h.offset % CHUNK == 0 and h.length == min(CHUNK, h.total - h.offset)
        if h.kind != wire.DATA or not whole_frame or h.number >= link.session.in_number + _AHEAD:
            return False
        link.heard += not sealed
        return link.take(Frame(h, parts[0] if sealed else None, parts[1]))

    def _answers(self, link: ZmqLink, socket: zmq.Socket[bytes]) -> None:
        for parts in _received(socket):
            h = self._accept(parts[0].buffer, link, link.peer)
            if h is None:
                continue
            try:
                arrived = link.session.acknowledge(h.number)
            except ValueError:
                self.dropped += 1
                continue
            link.heard += 1
            link.granted = max(link.granted, h.plan)
            link.hello_back |= h.kind == wire.HELLO
            for number in range(1, len(link.sockets)) if h.kind == wire.AGAIN else ():
                self._is_back(link, number)
            for item in arrived:  # (what is still on its way there is dropped)
                link.kept_nbytes -= item.kept_nbytes
                if item.copy is not None:
                    self.blocks.give_back(item.copy)
                for _, block in item.sealed.values():
                    self.blocks.give_back(block)

    def _watch(self, link: ZmqLink, socket: int, monitor: zmq.Socket[bytes]) -> None:
        """Connection events of a socket."""
        while True:
            try:
                event = parse_monitor_message(monitor.recv_multipart(zmq.NOBLOCK))["event"]
            except zmq.Again:
                return
            if event == zmq.EVENT_HANDSHAKE_SUCCEEDED:
                if link.connections.came_up(socket):
                    self._is_back(link, socket)
            elif event == zmq.EVENT_HANDSHAKE_FAILED_AUTH:
                proof = "CURVE key" if self.secure and not socket else "password"
                link.connections.lose(f"it refused this worker's {proof} (it belongs to another run)")
            else:
                link.connections.broke(socket)

    # --- ending

    def wake(self) -> None:
        """Ends a `progress` at once; from any thread."""
        if not self.closed:
            os.eventfd_write(self.wake_fd, 1)

    def close(self) -> None:
        if self.closed:
            return
        self.closed = True
        for link in self.links.values():
            for s in link.sockets:
                s.disable_monitor()
        self.context.destroy(linger=0)
        self.blocks.clear()
        self.seldom.close()
        os.close(self.wake_fd)


def _received(s: Any, most: int = 1 << 30, known: bool = False) -> Iterator[list[Any]]:
    """The messages that are there, `most` at most. It asks first, unless it is `known` that there is one: a receive
    that finds nothing raises an exception, which takes longer than a receive."""
    while most and (known or s.get(_EVENTS) & _POLLIN):
        known = False
        try:
            parts: list[Any] = [s.recv(_NOBLOCK, copy=False)]
        except zmq.Again:  # its connection broke in the middle
            return
        while parts[-1].more:
            parts.append(s.recv(_NOBLOCK, copy=False))
        yield parts
        most -= 1


def _socket_of(number: int, offset: int) -> int:
    """The data socket of a frame."""
    return 1 + (number + offset // CHUNK) % DATA_SOCKETS


def frame_address(payload: Any) -> tuple[int, Any]:
    """`(address, owner)` of a received payload, at a multiple of 8: small frames may lie anywhere and are copied."""
    if len(payload) and not payload.readonly:
        owner = ctypes.c_char.from_buffer(payload)  # (in a fifth of the time that an array takes)
        if not (address := ctypes.addressof(owner)) % 8:
            return address, owner
    array = np.array(memoryview(payload)) if len(payload) else np.empty(8, np.uint8)
    return array.ctypes.data, array
