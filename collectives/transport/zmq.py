"""ZeroMQ over TCP, between hosts (and anywhere shared memory cannot be attached).

Each endpoint binds LANES ROUTER sockets, on which it receives; to a peer it sends through LANES DEALER sockets, made at
the first need. A message is cut into frames of CHUNK bytes, which alternate between the lanes; each frame is a header
and a payload, sent from the caller's memory without a copy. A message of one frame is read from the frame's own memory; a
longer one is put together in one buffer, frame by frame as they come.

Flow control is in bytes: a receiver grants each sender WINDOW bytes beyond what it has asked for with `receive`, so the
memory of unexpected messages is bounded, while an awaited message of any size gets through. A receiver acknowledges each
message that has arrived; `flush` waits for that, which says more than ZeroMQ's tracker (that the kernel took the bytes),
and makes closing with LINGER=0 safe.

All sockets are used under one lock by the thread that waits; there is no thread of our own. Progress is made in
`send`, `receive` and `flush`. Beyond loopback every socket speaks CURVE, and a ZAP handler admits only the keys of the
run's own cards; handshakes wait until those are known. The job's name is in every header, and nothing is unpickled.
"""

from __future__ import annotations

import ctypes
import ipaddress
import os
import struct
import time
from collections import deque
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import zmq
from zmq.utils import z85
from zmq.utils.monitor import parse_monitor_message

from manygrad.collectives.errors import WireError
from manygrad.collectives.transport import wire

LANES = 2
CHUNK = 2 << 20
WINDOW = 64 << 20
HIGH_WATER = 64
POOL_NBYTES = 256 << 20  # of receive buffers kept for reuse
HEARTBEAT_MS, HEARTBEAT_TIMEOUT_MS = 500, 3000  # answered by ZeroMQ's own thread, however busy Python is
LOST_GRACE_S = 0.1  # data may still be on its way in another connection when one breaks
_IDENTITY = struct.Struct("<cIHI")  # b"m", rank, lane, epoch
_BAD_BEFORE_LOST = 5


def is_loopback(host: str) -> bool:
    return ipaddress.ip_address(host).is_loopback


@dataclass
class _Outgoing:
    header: wire.Header
    addr: int
    copy: bool
    offset: int = 0


@dataclass
class _Incoming:
    """A message on its way in: frames not yet looked at, and how many bytes have come."""

    frames: list[tuple[wire.Header, Any]] = field(default_factory=list)
    arrived: int = 0


class ZmqLink:
    """Both directions between this rank and one peer."""

    route = "zmq"

    def __init__(self, peer: int, card: dict[str, Any]):
        self.peer, self.card = peer, card
        self.lanes: list[zmq.Socket[bytes]] = []
        self.monitor: zmq.Socket[bytes] | None = None
        self.queue: deque[_Outgoing] = deque()
        self.out_number = self.in_number = 0
        self.unacked: set[int] = set()
        self.sent, self.granted = 0, WINDOW  # cumulative bytes out, and how many the peer allows
        self.taken, self.told, self.arrived = 0, WINDOW, 0  # cumulative bytes asked for, granted, and come in
        self.incoming: dict[int, _Incoming] = {}
        self.hello_in = self.hello_back = self.up = False
        self.blocked: zmq.Socket[bytes] | None = None  # the lane at its high-water mark
        self.bad, self.lost_at, self.evidence = 0, 0.0, ""

    def lost(self) -> str | None:
        return self.evidence if self.lost_at and time.monotonic() > self.lost_at + LOST_GRACE_S else None

    def lose(self, evidence: str) -> None:
        if not self.lost_at:
            self.lost_at, self.evidence = time.monotonic(), evidence


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
        self.links: dict[int, ZmqLink] = {}
        self.allowed: set[bytes] | None = None
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
            s.zap_domain = b"manygrad"
        s.bind(f"tcp://[{self.host}]:*" if ":" in self.host else f"tcp://{self.host}:*")
        self.poller.register(s, zmq.POLLIN)
        return s

    # --- peers

    def add(self, peer: int, card: dict[str, Any]) -> ZmqLink:
        link = self.links[peer] = ZmqLink(peer, card)
        return link

    def admit(self, keys: set[str]) -> None:
        """The CURVE public keys (Z85) of this run; until now handshakes have been waiting."""
        self.allowed = {z85.decode(k) for k in keys}

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
            if lane == 0:
                link.monitor = s.get_monitor_socket()
                self.poller.register(link.monitor, zmq.POLLIN)
            s.connect(address)
            s.send(wire.pack(self._control(wire.HELLO)))
            self.poller.register(s, zmq.POLLIN)
            link.lanes.append(s)

    def _control(self, kind: int, number: int = 0, value: int = 0) -> wire.Header:
        return wire.Header(kind, self.job, self.epoch, self.rank, value, 0, 0, wire.RAW, number, 0, 0, 0)

    def _reply(self, link: ZmqLink, kind: int, number: int = 0) -> None:
        """Answers on the peer's lane 0, with the current grant; dropped while that lane is not there (hello repeats it)."""
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
        link.unacked.add(number)
        link.queue.append(_Outgoing(header._replace(number=number), addr, copy))
        self.connect(link)
        self.push(link)
        return number

    def push(self, link: ZmqLink) -> None:
        """Hands frames to ZeroMQ as far as grants and high-water marks allow."""
        link.blocked = None
        while link.queue:
            item = link.queue[0]
            total = item.header.total
            length = min(CHUNK, total - item.offset)
            if link.sent + length > link.granted:
                return
            lane: Any = link.lanes[item.offset // CHUNK % LANES]
            header = wire.pack(item.header._replace(offset=item.offset, length=length))
            try:
                lane.send(header, zmq.SNDMORE | zmq.NOBLOCK)
            except zmq.Again:
                link.blocked = lane
                return
            payload = memoryview((ctypes.c_char * length).from_address(item.addr + item.offset)) if length else b""
            lane.send(payload, copy=item.copy)
            link.sent += length
            item.offset += length
            if item.offset >= total:
                link.queue.popleft()

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
        """A buffer for a message of several frames, reused where one is free."""
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
            if link.queue:
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
            if link.monitor is not None and link.monitor in events:
                self._watch(link)
            for s in link.lanes:
                if events.get(s, 0) & zmq.POLLIN:
                    self._answers(link, s)
            if link.queue:
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
            link = self.links.get(peer)
            h = self._accept(parts[1].buffer, link, peer)
            if h is None or link is None:
                continue
            if h.kind == wire.HELLO:
                link.hello_in = True
                if lane == 0:
                    self._reply(link, wire.HELLO)
            elif h.kind == wire.DATA:
                payload = parts[2] if len(parts) == 3 else None
                if (
                    payload is None
                    or len(payload.buffer) != h.length
                    or not link.in_number - 1 <= h.number < link.in_number + (1 << 24)
                ):
                    self.dropped += 1
                elif link.arrived + h.length > link.told:
                    link.lose(f"it sent {link.arrived + h.length} bytes, but was granted {link.told}")
                else:
                    link.arrived += h.length
                    message = link.incoming.setdefault(h.number, _Incoming())
                    message.frames.append((h, payload))
                    message.arrived += h.length
                    if message.arrived >= h.total:
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
            link.granted = max(link.granted, h.plan)
            if h.kind == wire.ACK:
                link.unacked.discard(h.number)
            elif h.kind == wire.HELLO:
                link.hello_back = True

    def _watch(self, link: ZmqLink) -> None:
        """Connection events of lane 0: a break after the handshake, or no listener at all, means the peer is gone."""
        while link.monitor is not None:
            try:
                event = parse_monitor_message(link.monitor.recv_multipart(zmq.NOBLOCK))["event"]
            except zmq.Again:
                return
            if event == zmq.EVENT_HANDSHAKE_SUCCEEDED:
                link.up, link.bad = True, 0
            elif event == zmq.EVENT_DISCONNECTED and link.up:
                link.lose("its connection closed (the process ended, or the network broke)")
            elif event == zmq.EVENT_HANDSHAKE_FAILED_AUTH:
                link.lose("it refused this worker's CURVE key (it belongs to another run)")
            elif event == zmq.EVENT_CLOSED and not link.up:
                link.bad += 1
                if link.bad >= _BAD_BEFORE_LOST:
                    link.lose(f"nothing listens at {link.card['addresses'][0]} any more")

    def _authenticate(self) -> None:
        """One ZAP request (RFC 27): CURVE with an allowed key passes."""
        while self.allowed is not None:
            try:
                version, request, _domain, _address, _identity, mechanism, *credentials = self.zap.recv_multipart(
                    zmq.NOBLOCK
                )
            except zmq.Again:
                return
            ok = mechanism == b"CURVE" and len(credentials) == 1 and credentials[0] in self.allowed
            status = [b"200", b"OK", b"manygrad", b""] if ok else [b"400", b"key not of this run", b"", b""]
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


def frame_address(frame: Any, nbytes: int) -> tuple[int, Any]:
    """`(address, owner)` of a received payload, at a multiple of 8: small frames may lie anywhere and are copied."""
    array = np.frombuffer(frame.buffer, np.uint8) if nbytes else np.empty(8, np.uint8)
    if array.ctypes.data % 8:
        array = array.copy()
    return array.ctypes.data, (array, frame)
