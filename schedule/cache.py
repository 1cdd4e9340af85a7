"""Schedules that a worker keeps, in memory and on disk: a program that starts again reads its LINEARs instead of making
them.

An entry's key is a digest of the normalised graph with the user's lines (plans of collectives name them, so every rank
must find the same ones), of the worker's rank, world size and link, and of our code (`tensor/code.py`). Its value is
the LINEAR with its calls' lines, and the keys of its kernels, which are the keys of their machine code. The store
itself (`runtime`'s disk cache) is given by the Runtime. SPEC=1, DEBUG=4, TRACK_MATCH_STATS=1 and observers of the
passes want the schedule made, so then it is.

In memory a schedule is found by a digest, too, when it is asked for the second time, and by its graph from then on: a
graph of thousands of nodes is not kept for what runs once, nor for a TinyJit, which runs it once, records it and looks
at it now and then; the last two are not counted.
"""

from __future__ import annotations

import hashlib
import zlib
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol, TypeVar

from manygrad.multi.world import World
from manygrad.schedule.facts.items import kernels_of
from manygrad.schedule.plan import Plan
from manygrad.tensor.code import code_version
from manygrad.tensor.environment import COLLECTIVE, DEBUG, SPEC, SUM_BLOCKS, TRACK_MATCH_STATS
from manygrad.tensor.source import LINE
from manygrad.tensor.uop import Ops, UOp
from manygrad.tensor.uop.passes import observers
from manygrad.tensor.uop.serial import NotStorable, decode, encode, encoded
from manygrad.tensor.uop.table import Table
from manygrad.tensor.uop.uop import KEY

LIMIT = 1024  # schedules kept in memory by graph, and as many by digest
_DIGEST_BYTES = 32
T = TypeVar("T")


class ByteStore(Protocol):
    """Bytes by key, kept across processes; `get` gives None for what is not there."""

    def get(self, key: bytes) -> bytes | None: ...
    def put(self, key: bytes, payload: bytes) -> None: ...


class Schedule(NamedTuple):
    """`linear` over PARAMs, whose calls are of `lines`; `plan`, where it communicates with other workers."""

    linear: UOp
    plan: Plan | None
    lines: tuple[str | None, ...] = ()

    def tell_lines(self) -> None:
        """Its calls are of its lines again: another schedule of the same calls may have been made since."""
        for call, line in zip(self.linear.src, self.lines):
            if line is not None:
                LINE[call] = line


class Digests(NamedTuple):
    graph: bytes  # of the graph alone
    entry: bytes  # of its lines, too: the key on disk


@dataclass(slots=True)
class Known:
    schedule: Schedule
    found: bool = False  # by its digest


class Schedules:
    """Schedules of one worker: in memory, and on disk where there is a `store`.

    Counts: `hits` were found in memory, `misses` were not; of those, `loaded` were found on disk.
    """

    def __init__(self, store: ByteStore | None = None) -> None:
        self.store = store
        self.in_memory: dict[Any, Schedule] = {}  # by graph
        self.by_digest: dict[Any, Known] = {}
        # of a traced body, by how many arguments it is called with
        self.bodies: Table[dict[int, Schedule]] = Table("bodies")
        self.hits, self.misses, self.loaded = 0, 0, 0

    def find(self, key: Any) -> Schedule | None:
        return self.in_memory.get(key)

    def keep(self, key: Any, schedule: Schedule) -> None:
        _add(self.in_memory, key, schedule)

    def find_again(self, digest: Any, key: Any, is_recorded: bool = False) -> Schedule | None:
        """By its digest; from the second time on it is found by `key`, its graph. What `is_recorded` is not counted."""
        known = self.by_digest.get(digest)
        if known is None:
            return None
        if is_recorded:
            return known.schedule
        if known.found:
            self.keep(key, known.schedule)
            del self.by_digest[digest]
        known.found = True
        return known.schedule

    def keep_digest(self, digest: Any, schedule: Schedule) -> None:
        _add(self.by_digest, digest, Known(schedule))

    def digests(self, normal: UOp, me: World) -> Digests | None:
        """Digests of a normalised graph; None where there is no store, or the graph cannot be written down."""
        if self.store is None or SPEC or DEBUG >= 4 or TRACK_MATCH_STATS or observers:
            return None
        try:
            graph, lines = encoded(normal, lambda u: LINE.get(u) or "")
        except NotStorable:
            return None
        worker = f"{me.rank} {me.size} {me.link} {SUM_BLOCKS.value} {COLLECTIVE.value} ".encode()
        same = hashlib.sha256(code_version() + worker + graph)
        entry = same.copy()
        entry.update(lines)
        return Digests(same.digest(), entry.digest())

    def load(self, key: bytes) -> UOp | None:
        """The LINEAR under `key` on disk, its calls with their lines."""
        assert self.store is not None
        data = self.store.get(key)
        if data is None:
            return None
        try:
            data = zlib.decompress(data)
            count = int.from_bytes(data[:4], "little")
            linear, lines = decode(memoryview(data)[4 + count * _DIGEST_BYTES :])
        except Exception:  # whatever is in it
            return None  # of another program that writes the same folder: made again
        for node, line in lines:
            LINE[node] = line
        for i, ast in enumerate(_kernels(linear)):
            KEY.setdefault(ast, data[4 + i * _DIGEST_BYTES : 4 + (i + 1) * _DIGEST_BYTES])
        return linear

    def save(self, key: bytes, linear: UOp) -> None:
        assert self.store is not None
        try:
            graph = encode(linear, lambda u: LINE.get(u) or "" if u.op is Ops.CALL else "")
        except NotStorable:
            return
        keys = [ast.key for ast in _kernels(linear)]
        self.store.put(key, zlib.compress(len(keys).to_bytes(4, "little") + b"".join(keys) + graph, 1))


def _add(kept: dict[Any, T], key: Any, value: T) -> None:
    """Where there are LIMIT, the oldest one goes."""
    if len(kept) >= LIMIT:
        kept.pop(next(iter(kept)))
    kept[key] = value


def _kernels(linear: UOp) -> list[UOp]:
    return list(dict.fromkeys(k for call in linear.src for k in kernels_of(call)))
