"""The driver's end of the control channel: one ROUTER socket for all workers and agents.

Every connection authenticates with CURVE: the driver makes one key pair for itself and one per rank for each run, and
its ZAP handler admits only those. A message's rank is the one its key belongs to. Without CURVE in this build of
libzmq only loopback is allowed.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterable
from typing import Any

import zmq
from zmq.utils import z85

from .errors import ProtocolError, UsageError
from .messages import MAX_MESSAGE, Event, parse

ZAP_ADDRESS = "inproc://zeromq.zap.01"


class ControlServer:
    """Listens on `host`, on `port` or (0) one that the system chooses. Raises `UsageError` if the port is taken."""

    def __init__(self, size: int, host: str = "127.0.0.1", port: int = 0) -> None:
        self.size, self.secure, self.rejected = size, bool(zmq.has("curve")), 0
        if not self.secure and host != "127.0.0.1":
            raise UsageError(
                "this libzmq has no CURVE (encryption), so workers on other hosts cannot be reached safely: install the pyzmq wheel from PyPI"
            )
        self.context = zmq.Context()
        self.zap: zmq.Socket[bytes] | None = None
        self.server_key, self.keys = "", list[dict[str, str]]()
        self.router: zmq.Socket[bytes] = self.context.socket(zmq.ROUTER)
        for option, value in (
            (zmq.LINGER, 200),
            (zmq.MAXMSGSIZE, MAX_MESSAGE),
            (zmq.RCVHWM, 64),
            (zmq.HANDSHAKE_IVL, 15000),
            (zmq.ROUTER_MANDATORY, 1),
        ):
            self.router.setsockopt(option, value)
        if self.secure:
            self._secure()
        try:
            self.router.bind(f"tcp://{host}:{port or '*'}")
        except zmq.ZMQError as e:
            self.context.destroy(0)
            raise UsageError(
                f"cannot listen on {host}:{port}: {e}"
                + ("; leave --port out to let the system choose a free one" if port else "")
            ) from None
        self.address = self.router.getsockopt_string(zmq.LAST_ENDPOINT)
        self.poller = zmq.Poller()
        self.poller.register(self.router, zmq.POLLIN)
        if self.zap is not None:
            self.poller.register(self.zap, zmq.POLLIN)
        self.unsent: list[tuple[bytes, bytes, float]] = []

    def _secure(self) -> None:
        zap: zmq.Socket[bytes] = self.context.socket(zmq.REP)
        zap.setsockopt(zmq.LINGER, 0)
        zap.bind(ZAP_ADDRESS)
        self.zap = zap
        public, secret = zmq.curve_keypair()
        self.server_key = public.decode()
        for _ in range(self.size):
            p, s = zmq.curve_keypair()
            self.keys.append({"server": self.server_key, "public": p.decode(), "secret": s.decode()})
        self.allowed = {z85.decode(k["public"]): r for r, k in enumerate(self.keys)}
        self.router.curve_server = True
        self.router.curve_publickey, self.router.curve_secretkey = public, secret
        self.router.setsockopt(zmq.ZAP_DOMAIN, b"manygrad")

    def curve(self, rank: int) -> dict[str, str] | None:
        """What rank `rank` needs to connect."""
        return self.keys[rank] if self.secure else None

    def receive(self, timeout_s: float) -> list[Event]:
        """Wait for messages; returns the valid ones that are there. Invalid ones are counted in `rejected`."""
        events: list[Event] = []
        ready = dict(self.poller.poll(int(timeout_s * 1000)))
        while self.zap is not None and self.zap in ready and self.zap.poll(0):
            self._admit(self.zap)
        for _ in range(256):
            try:
                frames = self.router.recv_multipart(zmq.NOBLOCK, copy=False)
            except zmq.Again:
                break
            try:
                events.append(self._event(frames))
            except (ProtocolError, ValueError, LookupError):
                self.rejected += 1
        if self.unsent:
            again, self.unsent = self.unsent, []
            for identity, data, until in again:
                self._send(identity, data, until)
        return events

    def _event(self, frames: list[Any]) -> Event:
        identity, data = frames
        role, _, number = identity.bytes.decode().partition("-")
        rank = int(number)
        if not 0 <= rank < self.size or (self.secure and data.get("User-Id") != str(rank)):
            raise ProtocolError("a message under a foreign name")
        return parse(data.bytes, role, rank)

    def _admit(self, zap: zmq.Socket[bytes]) -> None:
        version, request, _domain, _address, _identity, mechanism, *credentials = zap.recv_multipart()
        rank = self.allowed.get(credentials[0]) if mechanism == b"CURVE" and credentials else None
        if rank is None:
            zap.send_multipart([version, request, b"400", b"unknown key", b"", b""])
        else:
            zap.send_multipart([version, request, b"200", b"OK", str(rank).encode(), b""])

    def send(self, role: str, ranks: Iterable[int], type: str, /, **content: Any) -> None:
        """Send one message to the workers or agents of `ranks`; one that is not connected yet gets it within 5 s, or never."""
        data = json.dumps({"type": type, **content}).encode()
        for r in ranks:
            self._send(f"{role}-{r}".encode(), data, time.monotonic() + 5.0)

    def _send(self, identity: bytes, data: bytes, until: float) -> None:
        try:
            self.router.send_multipart([identity, data], zmq.NOBLOCK)
        except zmq.ZMQError:
            if time.monotonic() < until:
                self.unsent.append((identity, data, until))

    def close(self) -> None:
        self.router.close()
        if self.zap is not None:
            self.zap.close(0)
        self.context.term()
