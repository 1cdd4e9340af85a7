"""What rank 0 tells the others before each step, as JSON: a message of fixed length, a second one where it is longer.

Whoever waits for longer than COLLECTIVE_TIMEOUT_S for it fails the run, so rank 0 tells nothing, too (`desk.IDLE_S`).
"""

from __future__ import annotations

import json
from dataclasses import asdict

import numpy as np
from batch import Request
from server.desk import Work
from writer import Choice

from manygrad import Tensor, TinyJit, broadcast_, world

SHORT = 1024  # bytes, with four in front for the length


class Ranks:
    def __init__(self) -> None:
        self.steps: dict[int, TinyJit[Tensor]] = {}  # by length

    def share(self, work: Work) -> Work:
        """Rank 0's, on every rank; what the others pass does not count."""
        if world.size == 1:
            return work
        sent = encode(work) if world.rank == 0 else b""
        head = self._send(len(sent).to_bytes(4, "little") + sent[: SHORT - 4], SHORT)
        size = int.from_bytes(head[:4], "little")
        got = head[4 : 4 + size]
        if size > SHORT - 4:
            got += self._send(sent[SHORT - 4 :], 1 << (size - 1).bit_length())[: size - len(got)]
        return decode(got)

    def _send(self, message: bytes, size: int) -> bytes:
        step = self.steps.setdefault(size, TinyJit(self._step))
        found = step(Tensor(np.frombuffer(message.ljust(size, b"\0"), np.uint8)))
        return found.numpy().tobytes()

    def _step(self, message: Tensor) -> Tensor:
        got = message.clone()
        broadcast_(got)
        return got


def encode(work: Work) -> bytes:
    return json.dumps(asdict(work), separators=(",", ":")).encode()


def decode(message: bytes) -> Work:
    told = json.loads(message)
    admit = [
        (key, Request(**{**r, "ids": tuple(r["ids"]), "choice": Choice(**r["choice"])})) for key, r in told["admit"]
    ]
    embed = [(key, tuple(texts)) for key, texts in told["embed"]]
    return Work(tuple(admit), tuple(told["cancel"]), tuple(embed), told["stop"])
