"""Messages of ranks to each other between two steps, as JSON of fixed length, second ones where they are longer.

The ranks are groups of neighbours (`world.group`), each with a replica of the model. The first ranks of all replicas
gather what these have written, and rank 0 tells all ranks what comes and goes. Whoever waits for longer than
COLLECTIVE_TIMEOUT_S fails the run, so rank 0 tells nothing, too (`scheduler.IDLE_S`).
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict, astuple

import numpy as np

from manygrad import Tensor, TinyJit, broadcast_, values_may_differ, world
from manygrad.llm.engine.batch import Request, SampledToken
from manygrad.llm.engine.writer import SamplingParams
from manygrad.llm.serve.scheduler import Report, StepWork

SHORT = 1024  # bytes, with four in front for the length


class Ranks:
    def __init__(self, replicas: int = 1) -> None:
        members = world.size // replicas
        self.devices = world.group(replicas)  # of this rank's replica
        self.replica, number = divmod(world.rank, members)
        self.is_first = number == 0  # of its replica
        self.firsts = tuple(world.node_devices(rank)[0] for rank in range(0, world.size, members))
        self.shares: dict[int, TinyJit[Tensor]] = {}  # by length
        self.gathers: dict[int, TinyJit[Tensor]] = {}

    def share(self, work: StepWork) -> StepWork:
        """Rank 0's, on every rank; what the others pass does not count."""
        if world.size == 1:
            return work
        sent = encode(work) if world.rank == 0 else b""
        (got,) = in_two([sent], self._send)
        return decode(got)

    def gather(self, report: Report) -> list[Report]:
        """Reports of all replicas, in their order, on their first ranks; on the others that of the replica alone."""
        if len(self.firsts) == 1 or not self.is_first:
            return [report]
        sent = [b""] * len(self.firsts)
        sent[self.replica] = encode_report(report)
        return [decode_report(got) for got in in_two(sent, self._join)]

    def _send(self, rows: np.ndarray) -> np.ndarray:
        return self.shares.setdefault(rows.size, TinyJit(broadcast))(Tensor(rows)).numpy()

    def _join(self, rows: np.ndarray) -> np.ndarray:
        with values_may_differ():
            return self.gathers.setdefault(rows.size, TinyJit(self._joined))(Tensor(rows)).numpy()

    def _joined(self, rows: Tensor) -> Tensor:
        return rows.shard(self.firsts, axis=0).shard(self.firsts).clone()


def broadcast(rows: Tensor) -> Tensor:
    got = rows.clone()
    broadcast_(got)
    return got


def in_two(sent: list[bytes], exchange: Callable[[np.ndarray], np.ndarray]) -> list[bytes]:
    """The messages of all, of which each rank knows its own: `exchange` turns rows of one length, so filled, into those
    of all."""
    heads = exchange(rows_of([len(m).to_bytes(4, "little") + m[: SHORT - 4] for m in sent], SHORT))
    sizes = [int.from_bytes(row[:4].tobytes(), "little") for row in heads]
    got = [row[4:].tobytes() for row in heads]
    if max(sizes) > SHORT - 4:
        rest = exchange(rows_of([m[SHORT - 4 :] for m in sent], 1 << (max(sizes) - 1).bit_length()))
        got = [head + row.tobytes() for head, row in zip(got, rest)]
    return [message[:size] for message, size in zip(got, sizes)]


def rows_of(messages: list[bytes], size: int) -> np.ndarray:
    return np.frombuffer(b"".join(m.ljust(size, b"\0") for m in messages), np.uint8).reshape(-1, size)


def encode(work: StepWork) -> bytes:
    return json.dumps(asdict(work), separators=(",", ":")).encode()


def decode(message: bytes) -> StepWork:
    told = json.loads(message)
    admit = [
        (replica, key, Request(**{**r, "ids": tuple(r["ids"]), "choice": SamplingParams(**r["choice"])}))
        for replica, key, r in told["admit"]
    ]
    embed = [(key, tuple(t if isinstance(t, str) else tuple(t) for t in texts)) for key, texts in told["embed"]]
    return StepWork(tuple(admit), tuple(told["cancel"]), tuple(embed), told["stop"])


def encode_report(report: Report) -> bytes:
    return json.dumps([*astuple(report)[1:], *map(astuple, report.made)], separators=(",", ":")).encode()


def decode_report(message: bytes) -> Report:
    running, slots, unpromised, pages, *made = json.loads(message)
    return Report(tuple(SampledToken(*m) for m in made), running, slots, unpromised, pages)
