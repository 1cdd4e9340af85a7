"""The driver's end of the control channel: one ROUTER socket for all workers and supervisors (agents).

Every connection authenticates with CURVE: the driver makes one key pair for itself and one per rank for each run, and
its ZAP handler admits only those. A message's rank is the one its key belongs to. With each of them runs a conversation
(`link.Conversation`) that outlives broken connections; a worker's goes through epochs, which `begin` begins.
"""

from __future__ import annotations

import json
from collections.abc import Container, Iterable
from typing import Any

import zmq
from zmq.utils import z85

from manygrad.errors import ProtocolError, UsageError

from .link import HEAD, Clock, Conversation
from .messages import MAX_MESSAGE, Event, parse

EARLY = 1000  # messages of the next epoch are kept; later ones come again
ZAP_ADDRESS = "inproc://zeromq.zap.01"


class ControlServer:
    """Listens on `host`, on `port` or (0) one that the system chooses. Raises `UsageError` if the port is taken."""

    def __init__(
        self, size: int, host: str = "127.0.0.1", port: int = 0, clock: Clock | None = None, epoch: int = 0
    ) -> None:
        self.size, self.rejected, self.clock = size, 0, clock or Clock()
        self.epoch = epoch  # of the workers; a supervisor stays in the one in which it was started
        if not zmq.has("curve"):
            raise UsageError(
                "this libzmq has no CURVE, so strangers could not be kept out: install the pyzmq wheel from PyPI"
            )
        self.context = zmq.Context()
        self.keys = list[dict[str, str]]()
        self.conversations: dict[tuple[str, int], Conversation] = {}
        self.begun = list[list[Any]]()  # those of them whose epoch has begun
        self.early: list[list[Any]] = []  # messages of the next epoch, from processes that were started for it
        self.hold = False  # take no notice of the agents' numbered messages: they stop reading their workers' output
        self.router: zmq.Socket[bytes] = self.context.socket(zmq.ROUTER)
        for option, value in (
            (zmq.LINGER, 200),
            (zmq.MAXMSGSIZE, MAX_MESSAGE),
            (zmq.RCVHWM, 64),
            (zmq.HANDSHAKE_IVL, 15000),
            (zmq.ROUTER_MANDATORY, 1),
            (zmq.ROUTER_HANDOVER, 1),  # a connection made anew takes the place of the broken one
            (zmq.HEARTBEAT_IVL, 2000),
            (zmq.HEARTBEAT_TIMEOUT, 10000),
        ):
            self.router.setsockopt(option, value)
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
        self.poller.register(self.zap, zmq.POLLIN)

    def _secure(self) -> None:
        self.zap: zmq.Socket[bytes] = self.context.socket(zmq.REP)
        self.zap.setsockopt(zmq.LINGER, 0)
        self.zap.bind(ZAP_ADDRESS)
        public, secret = zmq.curve_keypair()
        for _ in range(self.size):
            p, s = zmq.curve_keypair()
            self.keys.append({"server": public.decode(), "public": p.decode(), "secret": s.decode()})
        self.allowed = {z85.decode(k["public"]): r for r, k in enumerate(self.keys)}
        self.router.curve_server = True
        self.router.curve_publickey, self.router.curve_secretkey = public, secret
        self.router.setsockopt(zmq.ZAP_DOMAIN, b"manygrad")

    def curve(self, rank: int) -> dict[str, str]:
        """Keys with which rank `rank` connects."""
        return self.keys[rank]

    def receive(self, timeout_s: float) -> list[Event]:
        """Wait for messages; returns the valid ones that are there. Invalid ones are counted in `rejected`."""
        events: list[Event] = []
        ready = dict(self.poller.poll(max(1, int(timeout_s * 1000))))
        while self.zap in ready and self.zap.poll(0):
            self._admit(self.zap)
        now, of_the_next = self.clock(), HEAD.pack(self.epoch + 1, 0, 0)[:4]
        for _ in range(256):
            try:
                frames = self.begun.pop(0) if self.begun else self.router.recv_multipart(zmq.NOBLOCK, copy=False)
            except zmq.Again:
                break
            if frames[1].bytes.startswith(of_the_next) and len(self.early) < EARLY:
                self.early.append(frames)
                continue
            try:
                event = self._event(frames, now)
            except (ProtocolError, ValueError, LookupError):
                self.rejected += 1
                continue
            if event is not None:
                events.append(event)
        for identity, conversation in self.conversations.items():
            self._flush(identity, conversation, now)
        return events

    def _event(self, frames: list[Any], now: float) -> Event | None:
        identity, head, body = frames
        role, _, number = identity.bytes.decode().partition("-")
        rank = int(number)
        if not 0 <= rank < self.size or role not in ("worker", "agent") or head.get("User-Id") != str(rank):
            raise ProtocolError("a message under a foreign name")
        if self.hold and role == "agent" and HEAD.unpack(head.bytes)[1]:
            return None
        data = self._with(role, rank).take(head.bytes, body.bytes, now)
        return None if data is None else parse(data, role, rank)

    def _with(self, role: str, rank: int) -> Conversation:
        return self.conversations.setdefault((role, rank), Conversation(self.epoch))

    def begin(self, epoch: int, started: Container[int] = ()) -> None:
        """Begins an epoch of all workers. Those that are there enter it with the next word that they hear; what they
        said before, and what they were to be told, is dropped. `started`: ranks whose supervisors are new, too. Raises
        ValueError where it is not a later one."""
        if epoch <= self.epoch:
            raise ValueError(f"epoch {epoch} cannot follow epoch {self.epoch}")
        self.epoch = epoch
        self.begun, self.early = self.early, []
        for (role, rank), conversation in self.conversations.items():
            if role == "worker" or rank in started:
                conversation.enter(epoch)

    def _admit(self, zap: zmq.Socket[bytes]) -> None:
        version, request, _domain, _address, _identity, mechanism, *credentials = zap.recv_multipart()
        rank = self.allowed.get(credentials[0]) if mechanism == b"CURVE" and credentials else None
        if rank is None:
            zap.send_multipart([version, request, b"400", b"unknown key", b"", b""])
        else:
            zap.send_multipart([version, request, b"200", b"OK", str(rank).encode(), b""])

    def send(self, role: str, ranks: Iterable[int], type: str, /, **content: Any) -> None:
        """Send one message to the workers or agents of `ranks`; one that is not connected gets it when it is."""
        data, now = json.dumps({"type": type, **content}).encode(), self.clock()
        for r in ranks:
            conversation = self._with(role, r)
            conversation.post(data)
            self._flush((role, r), conversation, now)

    def beat(self) -> None:
        """Tell everybody that the driver is there."""
        for identity, conversation in self.conversations.items():
            self._hand(identity, conversation.passing())

    def _flush(self, identity: tuple[str, int], conversation: Conversation, now: float) -> None:
        while (frames := conversation.next(now)) and self._hand(identity, frames):
            conversation.handed(now)
        if conversation.owes:
            self._hand(identity, conversation.passing())

    def _hand(self, identity: tuple[str, int], frames: tuple[bytes, bytes]) -> bool:
        try:
            self.router.send_multipart(["{}-{}".format(*identity).encode(), *frames], zmq.NOBLOCK)
        except zmq.ZMQError:
            return False  # not connected (yet), or at its high-water mark
        return True

    def close(self) -> None:
        self.router.close()
        self.zap.close(0)
        self.context.term()
