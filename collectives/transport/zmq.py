"""ZeroMQ over TCP, between hosts (and anywhere shared memory cannot be attached).

Each endpoint binds LANES ROUTER sockets, on which it receives; to a peer it sends through LANES DEALER sockets, made at
the first need. A message is cut into frames of CHUNK bytes, which alternate between the lanes; each frame is a header
and a payload, sent from the caller's memory without a copy. A message of one frame is read from the frame's own memory;
a longer one is put together in one buffer, frame by frame as they come.

Flow control is in bytes: a receiver grants each sender WINDOW bytes beyond what it has asked for with `receive`, so the
memory of unexpected messages is bounded, while an awaited message of any size gets through. A receiver acknowledges
each message that has arrived; `flush` waits for that, which says more than ZeroMQ's tracker (that the kernel took the
bytes), and makes closing with LINGER=0 safe.

A lane whose connection breaks is made anew by ZeroMQ. What it has swallowed is sent again: when a lane is back, every
frame that went through it and is of a message not acknowledged yet, with a new hello, which is answered with the grant;
the receiver drops what it has (`ZmqLink.new`). So nothing is lost and nothing comes twice. A peer is lost when nothing
listens at its address any more (its process ended), or when its host does not answer for RECONNECT_TIMEOUT_S; a process
that is only suspended still has the kernel's answer.

All sockets are used under one lock by the thread that waits; there is no thread of our own. Progress is made in
`send`, `receive` and `flush`. Every connection is authenticated, and handshakes wait until the run's cards are known:
beyond loopback by CURVE with the keys of the cards; on loopback by PLAIN, where a password costs nothing per message,
each sender having its own (`password`). A message counts as the rank's that its connection has proved to be. Nothing is
unpickled.
"""

from __future__ import annotations

import ctypes
import errno
import hashlib
import hmac
import ipaddress
import os
import secrets
import socket
import struct
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import zmq
from zmq.utils import z85
from zmq.utils.monitor import parse_monitor_message

from manygrad.collectives.errors import WireError
from manygrad.collectives.transport import wire
from manygrad.tensor.environment import RECONNECT_TIMEOUT_S

LANES = 2
CHUNK = 2 << 20
WINDOW = 64 << 20
HIGH_WATER = 64
COPIED_NBYTES = 64 << 10  # a payload below is copied, which takes less time than to tell when its memory is free again
POOL_NBYTES = 256 << 20  # of receive buffers kept for reuse
HEARTBEAT_MS, HEARTBEAT_TIMEOUT_MS = 500, 3000  # answered by ZeroMQ's own thread, however busy Python is
CONNECT_TIMEOUT_MS = 1000  # then tried again: the system's own retries come ever later
LOST_GRACE_S = 0.1  # data may still be on its way in another connection when one breaks
_IDENTITY = struct.Struct("<cIHI")  # b"m", rank, lane, epoch
_SETTLED_S = 1.0  # a process that is being killed may still listen for a moment after its connections broke
_REFUSED_S = 0.4  # nothing listens at the peer's address for so long: its process has ended
# between two looks whether the peer's host answers: while it does not, and while it does
_PROBE_S, _PROBE_AGAIN_S = (0.1, 5.0)
_SOCKETS = 2 * LANES  # of each peer: lanes and their monitors


def is_loopback(host: str) -> bool:
    return ipaddress.ip_address(host).is_loopback


@dataclass
class _Outgoing:
    """A message until it is acknowledged. `owner` keeps a copy of memory that is not the arena's:
    it may be sent again."""

    header: wire.Header
    addr: int
    owner: Any
    offset: int = 0  # up to here it was handed to ZeroMQ
    handed: bool = False  # all of it


@dataclass
class _Incoming:
    """A message on its way in: frames not yet looked at, which have come, and how many bytes."""

    frames: list[tuple[wire.Header, Any]] = field(default_factory=list)
    offsets: set[int] = field(default_factory=set)
    arrived: int = 0


class ZmqLink:
    """Both directions between this rank and one peer."""

    route = "zmq"

    def __init__(self, peer: int, card: dict[str, Any]):
        self.peer, self.card = peer, card
        self.lanes: list[zmq.Socket[bytes]] = []
        self.monitors: list[zmq.Socket[bytes]] = []
        self.queue: deque[_Outgoing] = deque()  # not all handed to ZeroMQ yet
        # frames (message, offset) that a broken lane may have swallowed
        self.again: deque[tuple[_Outgoing, int]] = deque()
        self.out_number = self.in_number = 0
        self.unacked: dict[int, _Outgoing] = {}
        self.sent, self.granted = 0, WINDOW  # cumulative bytes out, and how many the peer allows
        self.taken, self.told, self.arrived = 0, WINDOW, 0  # cumulative bytes asked for, granted, and come in
        self.incoming: dict[int, _Incoming] = {}
        self.whole_below, self.whole = 0, set[int]()  # numbers of messages that have come whole: all below, and these
        self.heard = 0  # counts what came from the peer
        self.hellos = set[int]()  # lanes on which the peer has said hello
        self.hello_in = self.hello_back = False
        self.was_up: set[int] = set()  # lanes that have been connected
        self.down: dict[int, float] = {}  # lanes whose connection broke, and when
        self.probe_at = self.refused_at = self.answered_at = 0.0
        self.blocked: zmq.Socket[bytes] | None = None  # the lane at its high-water mark
        self.lost_at, self.evidence = 0.0, ""

    def lost(self) -> str | None:
        if self.down and not self.lost_at:
            self._probe(time.monotonic())
        return self.evidence if self.lost_at and time.monotonic() > self.lost_at + LOST_GRACE_S else None

    def lose(self, evidence: str) -> None:
        if not self.lost_at:
            self.lost_at, self.evidence = time.monotonic(), evidence

    def _probe(self, now: float) -> None:
        """A lane is down: does the peer's host answer, and does anything listen there?"""
        if now < self.probe_at:
            return
        lane = min(self.down)
        answer = reachable(self.card["addresses"][lane])
        settled = answer == 0 and now - self.down[lane] > _SETTLED_S
        self.probe_at = now + (_PROBE_AGAIN_S if settled else _PROBE_S)
        if answer == errno.ECONNREFUSED:
            self.refused_at = self.refused_at or now
            if now - self.refused_at >= _REFUSED_S:
                self.lose(f"nothing listens at {self.card['addresses'][lane]} any more (its process ended)")
            return
        self.refused_at = 0.0
        if answer == 0:
            self.answered_at = now
        since = max(self.down[lane], self.answered_at)
        if now - since > RECONNECT_TIMEOUT_S.value:
            self.lose(
                f"its connection broke, and its host has not answered for {RECONNECT_TIMEOUT_S.value:g} s (the knob is "
                "RECONNECT_TIMEOUT_S)"
            )

    def new(self, h: wire.Header) -> bool:
        """Takes note of a frame; whether it had not come before."""
        if h.number < self.whole_below or h.number in self.whole:
            return False
        message = self.incoming.get(h.number)
        return message is None or h.offset not in message.offsets

    def came_whole(self, number: int) -> None:
        self.whole.add(number)
        while self.whole_below in self.whole:
            self.whole.discard(self.whole_below)
            self.whole_below += 1


class ZmqHub:
    """All ZeroMQ sockets of one endpoint. Not thread-safe: the endpoint calls it under its lock, except `wake`."""

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
        self.context = zmq.Context()
        self.context.set(zmq.MAX_SOCKETS, max(1023, size * _SOCKETS + 64))
        self.token = secrets.token_bytes(16)
        self.links: dict[int, ZmqLink] = {}
        self.allowed: dict[bytes, int] | None = None  # CURVE keys or passwords, and whose they are
        self.dropped = 0
        self.pooled_nbytes = 0
        self.pool: dict[int, list[np.ndarray[Any, Any]]] = {}
        self.public, self.secret = zmq.curve_keypair()
        self.wake_fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self.poller = zmq.Poller()
        self.poller.register(self.wake_fd, zmq.POLLIN)
        self.closed = False
        try:
            self.zap = self.context.socket(zmq.REP)
            self.zap.linger = 0
            self.zap.bind("inproc://zeromq.zap.01")
            self.poller.register(self.zap, zmq.POLLIN)
            self.routers = [self._router() for _ in range(LANES)]
            self.addresses = [r.getsockopt_string(zmq.LAST_ENDPOINT) for r in self.routers]
        except BaseException:
            self.close()
            raise

    def _options(self, s: zmq.Socket[bytes]) -> zmq.Socket[bytes]:
        s.linger, s.sndhwm, s.rcvhwm, s.maxmsgsize = 0, HIGH_WATER, HIGH_WATER, CHUNK + 4096
        s.heartbeat_ivl, s.heartbeat_timeout, s.heartbeat_ttl = HEARTBEAT_MS, HEARTBEAT_TIMEOUT_MS, HEARTBEAT_TIMEOUT_MS
        s.ipv6 = ":" in self.host
        return s

    def _router(self) -> zmq.Socket[bytes]:
        s = self._options(self.context.socket(zmq.ROUTER))
        s.router_handover = 1
        s.sndhwm = 0  # answers are small and as many as messages taken in; at a limit a ROUTER would drop them silently
        if self.secure:
            s.curve_server, s.curve_secretkey, s.curve_publickey = 1, self.secret, self.public
        else:
            s.plain_server = True
        s.zap_domain = b"manygrad"
        s.bind(f"tcp://[{self.host}]:*" if ":" in self.host else f"tcp://{self.host}:*")
        self.poller.register(s, zmq.POLLIN)
        return s

    # --- peers

    def add(self, peer: int, card: dict[str, Any]) -> ZmqLink:
        link = self.links[peer] = ZmqLink(peer, card)
        return link

    def admit(self, cards: Sequence[dict[str, Any]]) -> None:
        """The cards of this run; until now handshakes have been waiting."""
        if self.secure:
            self.allowed = {z85.decode(c["curve"]): r for r, c in enumerate(cards) if r != self.rank and c.get("curve")}
        else:
            self.allowed = {password(self.token, r, self.rank): r for r in range(self.size) if r != self.rank}

    def connect(self, link: ZmqLink) -> None:
        """Makes the lanes to a peer, with a hello on each (once)."""
        if link.lanes:
            return
        if self.secure != bool(link.card.get("curve")):
            raise WireError(
                f"rank {link.peer} and this rank do not agree on encryption: one binds loopback, the other does not"
            )
        for lane, address in enumerate(link.card["addresses"]):
            s = self._options(self.context.socket(zmq.DEALER))
            s.routing_id = _IDENTITY.pack(b"m", self.rank, lane, self.epoch)
            if self.secure:
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
            self.poller.register(monitor, zmq.POLLIN)
            link.monitors.append(monitor)
            s.connect_timeout = CONNECT_TIMEOUT_MS
            s.connect(address)
            s.send(wire.pack(self._control(wire.HELLO)))
            self.poller.register(s, zmq.POLLIN)
            link.lanes.append(s)

    def _control(self, kind: int, number: int = 0, value: int = 0) -> wire.Header:
        return wire.Header(kind, self.job, self.epoch, self.rank, value, 0, 0, wire.RAW, number, 0, 0, 0)

    def _reply(self, link: ZmqLink, kind: int, number: int = 0) -> None:
        """Answers on the peer's lane 0, with the current grant;
        dropped while that lane is not there (hello repeats it)."""
        link.told = link.taken + WINDOW
        header = wire.pack(self._control(kind, number, link.told))
        try:
            self.routers[0].send_multipart([_IDENTITY.pack(b"m", link.peer, 0, self.epoch), header], zmq.NOBLOCK)
        except zmq.Again:
            link.lose("its answers pile up unread")

    # --- sending

    def send(self, link: ZmqLink, header: wire.Header, addr: int, copy: bool) -> int:
        """Queues a message; with `copy` ZeroMQ copies the bytes as it takes them. Returns its number."""
        number = link.out_number
        link.out_number += 1
        owner = None
        if copy:  # and kept, as it may have to be sent again when that memory is not what it was
            owner = self.buffer(header.total)
            ctypes.memmove(owner.ctypes.data, addr, header.total)
            addr = owner.ctypes.data
        item = link.unacked[number] = _Outgoing(header._replace(number=number), addr, owner)
        link.queue.append(item)
        self.connect(link)
        self.push(link)
        return number

    def push(self, link: ZmqLink) -> None:
        """Hands frames to ZeroMQ as far as grants and high-water marks allow."""
        link.blocked = None
        if link.down:
            return
        while link.again:
            item, offset = link.again[0]
            if item.header.number in link.unacked and not self._frame(link, item, offset):
                return
            link.again.popleft()
        while link.queue:
            item = link.queue[0]
            total = item.header.total
            length = min(CHUNK, total - item.offset)
            if link.sent + length > link.granted or not self._frame(link, item, item.offset):
                return
            link.sent += length
            item.offset += length
            if item.offset >= total:
                item.handed = True
                link.queue.popleft()

    def _frame(self, link: ZmqLink, item: _Outgoing, offset: int) -> bool:
        """Hands one frame to its lane, if that has room. The memory is read when ZeroMQ sends it."""
        length = min(CHUNK, item.header.total - offset)
        lane: Any = link.lanes[offset // CHUNK % LANES]
        try:
            lane.send(wire.pack(item.header._replace(offset=offset, length=length)), zmq.SNDMORE | zmq.NOBLOCK)
        except zmq.Again:
            link.blocked = lane
            return False
        payload: Any = b""
        if length and item.owner is not None:
            payload = memoryview(item.owner)[offset : offset + length]
        elif length:
            payload = memoryview((ctypes.c_char * length).from_address(item.addr + offset))
        lane.send(payload, copy=length < COPIED_NBYTES)
        return True

    def _lane_is_back(self, link: ZmqLink, lane: int) -> None:
        """The connection was made anew: says hello, and has all frames sent again
        that the old one may have swallowed."""
        link.down.pop(lane, None)
        link.refused_at = link.probe_at = 0.0
        try:
            link.lanes[lane].send(wire.pack(self._control(wire.HELLO)), zmq.NOBLOCK)
        except zmq.Again:
            pass  # so much waits there that its acknowledgements will bring the grant
        waiting = {(item.header.number, offset) for item, offset in link.again}
        for item in link.unacked.values():
            handed = max(item.offset, 1) if item.handed else item.offset  # a message of no bytes has a frame, too
            for offset in range(0, handed, CHUNK):
                if offset // CHUNK % LANES == lane and (item.header.number, offset) not in waiting:
                    link.again.append((item, offset))
        self.push(link)

    # --- receiving

    def post(self, link: ZmqLink, nbytes: int) -> int:
        """Asks for the next message, of `nbytes`; its number. Grants the sender what it needs."""
        self.connect(link)
        number = link.in_number
        link.in_number += 1
        link.taken += nbytes
        if link.taken > link.told or link.taken + WINDOW - link.told >= WINDOW // 4:
            self._reply(link, wire.GRANT)
        return number

    def buffer(self, nbytes: int) -> np.ndarray[Any, Any]:
        """A buffer for a message, reused where one is free: the pages of a large one are there already."""
        free = self.pool.get(nbytes)
        if not free:
            return np.empty(nbytes, np.uint8)
        self.pooled_nbytes -= nbytes
        return free.pop()

    def give_back(self, buffer: np.ndarray[Any, Any]) -> None:
        if self.pooled_nbytes + buffer.nbytes <= POOL_NBYTES:
            self.pooled_nbytes += buffer.nbytes
            self.pool.setdefault(buffer.nbytes, []).append(buffer)

    def progress(self, timeout_s: float) -> None:
        """Waits up to `timeout_s` for anything to happen, and handles it."""
        for link in self.links.values():
            if link.queue or link.again:
                self.push(link)
            for s in link.lanes:
                self.poller.modify(s, zmq.POLLIN | zmq.POLLOUT if s is link.blocked else zmq.POLLIN)
        events = dict(self.poller.poll(int(timeout_s * 1000)))
        if self.wake_fd in events:
            os.eventfd_read(self.wake_fd)
        if self.zap in events:
            self._authenticate()
        for router in self.routers:
            if router in events:
                self._drain(router)
        for link in self.links.values():
            for lane, monitor in enumerate(link.monitors):
                if monitor in events:
                    self._watch(link, lane, monitor)
            for s in link.lanes:
                if events.get(s, 0) & zmq.POLLIN:
                    self._answers(link, s)
            if link.queue or link.again:
                self.push(link)

    def _accept(self, data: Any, link: ZmqLink | None, peer: int) -> wire.Header | None:
        """The header, if it is valid and of this job, epoch and peer; else counted as dropped."""
        try:
            h = wire.unpack(data)
        except WireError:
            h = None
        if h is None or link is None or (h.job, h.epoch, h.source) != (self.job, self.epoch, peer):
            self.dropped += 1
            return None
        return h

    def _drain(self, router: zmq.Socket[bytes]) -> None:
        while True:
            try:
                parts = router.recv_multipart(zmq.NOBLOCK, copy=False)
            except zmq.Again:
                return
            identity = bytes(parts[0].buffer)
            if len(identity) != _IDENTITY.size or not 2 <= len(parts) <= 3:
                self.dropped += 1
                continue
            _, peer, lane, _ = _IDENTITY.unpack(identity)
            if parts[1].get("User-Id") != str(peer):  # another's name on this connection
                self.dropped += 1
                continue
            link = self.links.get(peer)
            h = self._accept(parts[1].buffer, link, peer)
            if h is None or link is None:
                continue
            link.heard += 1
            if h.kind == wire.HELLO:
                link.hellos.add(lane)
                # every lane was let in: the peer does not need us to be connected
                link.hello_in = len(link.hellos) == LANES
                if lane == 0:
                    self._reply(link, wire.HELLO)
            elif h.kind == wire.DATA:
                payload = parts[2] if len(parts) == 3 else None
                if payload is None or len(payload.buffer) != h.length or not h.number < link.in_number + (1 << 24):
                    self.dropped += 1
                elif not link.new(h):  # sent again; its acknowledgement may have been lost
                    if h.number < link.whole_below or h.number in link.whole:
                        self._reply(link, wire.ACK, h.number)
                elif link.arrived + h.length > link.told:
                    link.lose(f"it sent {link.arrived + h.length} bytes, but was granted {link.told}")
                else:
                    link.arrived += h.length
                    message = link.incoming.setdefault(h.number, _Incoming())
                    message.frames.append((h, payload))
                    message.offsets.add(h.offset)
                    message.arrived += h.length
                    if message.arrived >= h.total:
                        link.came_whole(h.number)
                        self._reply(link, wire.ACK, h.number)

    def _answers(self, link: ZmqLink, lane: zmq.Socket[bytes]) -> None:
        while True:
            try:
                parts = lane.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            h = self._accept(parts[0], link, link.peer)
            if h is None:
                continue
            link.heard += 1
            link.granted = max(link.granted, h.plan)
            if h.kind == wire.ACK:
                item = link.unacked.pop(h.number, None)
                # (what is still on its way there has come before, and is dropped)
                if item is not None and item.owner is not None:
                    self.give_back(item.owner)
            elif h.kind == wire.HELLO:
                link.hello_back = True

    def _watch(self, link: ZmqLink, lane: int, monitor: zmq.Socket[bytes]) -> None:
        """Connection events of a lane."""
        while True:
            try:
                event = parse_monitor_message(monitor.recv_multipart(zmq.NOBLOCK))["event"]
            except zmq.Again:
                return
            if event == zmq.EVENT_HANDSHAKE_SUCCEEDED:
                if lane in link.was_up:
                    self._lane_is_back(link, lane)
                link.was_up.add(lane)
                link.down.pop(lane, None)
            elif event == zmq.EVENT_HANDSHAKE_FAILED_AUTH:
                link.lose(
                    f"it refused this worker's {'CURVE key' if self.secure else 'password'} (it belongs to another run)"
                )
            else:  # the connection broke, or could not be made
                link.down.setdefault(lane, time.monotonic())

    def _authenticate(self) -> None:
        """ZAP requests (RFC 27): a key or a password of this run passes, as the rank whose it is."""
        while self.allowed is not None:
            try:
                version, request, _domain, _address, _identity, mechanism, *credentials = self.zap.recv_multipart(
                    zmq.NOBLOCK
                )
            except zmq.Again:
                return
            proof = b""
            if mechanism == (b"CURVE" if self.secure else b"PLAIN") and len(credentials) == (1 if self.secure else 2):
                proof = credentials[-1]
            rank = self.allowed.get(proof)
            if rank is not None:
                status = [b"200", b"OK", b"%d" % rank, b""]
            else:
                status = [b"400", b"key not of this run", b"", b""]
            self.zap.send_multipart([version, request, *status])

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
            for s in link.lanes:
                s.disable_monitor()
        self.context.destroy(linger=0)
        os.close(self.wake_fd)


def password(token: bytes, source: int, target: int) -> bytes:
    """What rank `source` shows rank `target`, whose secret is `token`;
    whoever takes `target`'s place learns nothing else by it."""
    return hmac.digest(token, b"%d to %d" % (source, target), hashlib.sha256).hex().encode()


def reachable(address: str, timeout_s: float = 0.05) -> int:
    """0 if the kernel at `tcp://host:port` takes connections, else the error number
    (ECONNREFUSED: nothing listens there)."""
    host, _, port = address.removeprefix("tcp://").rpartition(":")
    with socket.socket(socket.AF_INET6 if host.startswith("[") else socket.AF_INET) as s:
        s.settimeout(timeout_s)
        return s.connect_ex((host.strip("[]"), int(port)))


def frame_address(frame: Any, nbytes: int) -> tuple[int, Any]:
    """`(address, owner)` of a received payload, at a multiple of 8: small frames may lie anywhere and are copied."""
    array = np.frombuffer(frame.buffer, np.uint8) if nbytes else np.empty(8, np.uint8)
    if array.ctypes.data % 8:
        array = array.copy()
    return array.ctypes.data, (array, frame)
