"""Copies of the last snapshot in the workers' memory, for who goes on in its process after a failure.

    save      each rank keeps the file of its parts, and a neighbour's, on another host where there is one
    resume    the newest snapshot of which every file is in some memory; each part goes to the ranks that will hold some
              of it, and is checked as one from disk is

A snapshot stays until all ranks have the next one, so there is always a whole one. What goes from rank to rank goes
over an endpoint of its own, in the thread that saves (`Neighbours`), and over that of the collectives while all ranks
resume (`CopiesReader`): sealed, with deadlines, and ended by a failure, as all else is.

Memory: three times what a rank writes, five times while the next snapshot is on its way.
"""

from __future__ import annotations

import ctypes
import json
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from manygrad.checkpoint.index import box_of, checksums, merged, nbytes_of
from manygrad.checkpoint.layout import Bounds, common, within
from manygrad.checkpoint.reader import CheckpointReader
from manygrad.checkpoint.writer import Snapshot, part_name
from manygrad.collectives.transport import Endpoint, MessageKey
from manygrad.collectives.transport.largest import largest
from manygrad.errors import CollectiveAborted, CollectiveError, CollectiveTimeout, PeerLost
from manygrad.nn.state.safetensors import CODES
from manygrad.runtime.current import current
from manygrad.tensor.environment import COLLECTIVE_TIMEOUT_S

PIECE = 4 << 20  # bytes of a message
AHEAD = 16 * PIECE  # sent, and not known to have come
_KEY = MessageKey(0xC0B1E5, 0, 0)


class SnapshotId(NamedTuple):
    """The number of a snapshot among all of a job, on all ranks alike, and how many ranks have taken it."""

    epoch: int
    number: int
    size: int


@dataclass(frozen=True)
class PartFile:
    """The bytes of the file that a rank writes. `about`: its step, state and description."""

    about: dict[str, Any]
    data: np.ndarray

    @property
    def name(self) -> str:
        return str(next(iter(self.about["files"])))

    def part(self, part: dict[str, Any], nbytes: int) -> np.ndarray:
        return self.data[part["offset"] : part["offset"] + nbytes]


@dataclass
class KeptSnapshots:
    """What this process has of one folder's snapshots, from one epoch to the next: files by name. `last`: the one that
    was begun last, also where nothing is kept of it."""

    last: SnapshotId | None = None
    snapshots: dict[SnapshotId, dict[str, PartFile]] = field(default_factory=dict)


class WholeSnapshot(NamedTuple):
    """A snapshot that is whole in the memory of all ranks: who has which of its files. `is_last`: no later one was
    begun."""

    id: SnapshotId
    step: int
    files: list[set[str]]
    is_last: bool


# *** between ranks ***


def swapped(endpoint: Endpoint, distance: int, data: np.ndarray) -> np.ndarray:
    """Gives bytes to the rank so far after this one, and returns those of the rank so far before it; every rank must
    call it. Cost: a copy of both, and PIECE bytes of memory."""
    to, source = (endpoint.rank + distance) % endpoint.size, (endpoint.rank - distance) % endpoint.size
    nbytes = np.array([data.nbytes], np.int64)
    endpoint.send(to, _KEY, nbytes.ctypes.data, nbytes.nbytes)
    with endpoint.receive(source, _KEY, nbytes.nbytes) as got:
        into = np.empty(ctypes.c_int64.from_address(got.addr).value, np.uint8)
    for at in range(0, max(data.nbytes, into.nbytes), PIECE):
        if at < data.nbytes:
            endpoint.send(to, _KEY, data.ctypes.data + at, min(PIECE, data.nbytes - at))
        if at < into.nbytes:
            endpoint.receive_into(source, _KEY, into.ctypes.data + at, min(PIECE, into.nbytes - at))
        endpoint.flush()
    endpoint.flush()
    return into


def told_by_all(endpoint: Endpoint, value: Any) -> list[Any]:
    """What each rank says, as JSON, in rank order; every rank must call it."""
    out, own = [value] * endpoint.size, _bytes_of(value)
    for distance in range(1, endpoint.size):
        out[(endpoint.rank - distance) % endpoint.size] = json.loads(bytes(swapped(endpoint, distance, own)))
    return out


def _bytes_of(value: Any) -> np.ndarray:
    return np.frombuffer(json.dumps(value).encode(), np.uint8)


class Neighbours:
    """The way from each rank to the one at `distance` after it, beside all collectives. Every rank must make it, in its
    main thread; one thread at a time may use it."""

    def __init__(self, endpoint: Endpoint, distance: int) -> None:
        self.distance, self.count = distance, 0
        self.endpoint = endpoint.beside()
        self.cards = told_by_all(endpoint, self.endpoint.card())

    def swap(self, file: PartFile) -> PartFile:
        """The file of the neighbour before, for this one; returns when all ranks have theirs."""
        endpoint, n = self.endpoint, self.endpoint.size
        if not self.count:
            reached = {self.distance, *(1 << k for k in range(n.bit_length()) if 1 << k < n)}
            peers = {(endpoint.rank + sign * d) % n for d in reached for sign in (1, -1)}
            endpoint.connect(self.cards, float(COLLECTIVE_TIMEOUT_S.value), peers)
        self.count += 1
        about = json.loads(bytes(swapped(endpoint, self.distance, _bytes_of(file.about))))
        theirs = PartFile(about, swapped(endpoint, self.distance, file.data))
        largest(endpoint, _KEY._replace(sequence=self.count), (0,))
        return theirs


# *** saving ***


class Copies:
    """The copies of one Checkpointer's snapshots; `folder` is their name in this process."""

    def __init__(self, folder: str) -> None:
        self.folder = folder
        self.neighbours: Neighbours | None = None
        self.has_failed = False

    @property
    def are_kept(self) -> bool:
        """Whether this process may go on in another epoch, and there are others to help it; on all ranks alike."""
        hooks = current().communication.hooks
        return hooks is not None and hooks.may_go_on and current().world.size > 1

    @property
    def kept(self) -> KeptSnapshots:
        return current().kept.setdefault(self.folder, KeptSnapshots())

    def begin(self, snapshot: Snapshot) -> Callable[[], None]:
        """Counts a snapshot; every rank must call it, in its main thread. What it returns does the work."""
        communication, world, kept = current().communication, current().world, self.kept
        communication.saves += 1
        kept.last = SnapshotId(world.epoch, communication.saves, world.size)
        if self.neighbours is None:
            group = world.link.group if world.link is not None else 1
            self.neighbours = Neighbours(_endpoint(), group if group < world.size else 1)
        neighbours, id = self.neighbours, kept.last
        return lambda: self._share(neighbours, kept, id, snapshot)

    def _share(self, neighbours: Neighbours, kept: KeptSnapshots, id: SnapshotId, snapshot: Snapshot) -> None:
        """Where it fails, later snapshots of this epoch are on disk alone. Raises CollectiveTimeout."""
        if self.has_failed:
            return
        try:
            data: list[memoryview] = []
            about = snapshot.part_file(data.append)
            whole = np.empty(sum(map(len, data)), np.uint8)
            at = 0
            for piece in data:
                whole[at : at + len(piece)] = piece
                at += len(piece)
            file = PartFile({"step": snapshot.step, "state": snapshot.state, **about}, whole)
            kept.snapshots[id] = {file.name: file}
            theirs = neighbours.swap(file)
            kept.snapshots[id] |= {theirs.name: theirs}
            for older in [i for i in kept.snapshots if i != id]:
                del kept.snapshots[older]
        except (CollectiveError, MemoryError) as e:
            self.has_failed = True
            neighbours.endpoint.close()
            if isinstance(e, CollectiveTimeout):  # a rank that does not come is waited for once
                raise
            if not isinstance(e, (CollectiveAborted, PeerLost)):  # (who fails says so)
                warnings.warn(
                    f"step {snapshot.step} has no copy in the memory of a neighbour: {e}. Until the next restart "
                    "snapshots are on disk alone",
                    stacklevel=2,
                )

    # *** resuming ***

    def newest(self) -> WholeSnapshot | None:
        """The newest snapshot that is whole; every rank must call it."""
        kept = self.kept
        mine = [(id, next(iter(files.values())).about["step"], [*files]) for id, files in kept.snapshots.items()]
        return newest_whole(told_by_all(_endpoint(), [kept.last, mine]))

    def reader(self, found: WholeSnapshot) -> CopiesReader:
        """Reads that snapshot; every rank must call it."""
        return CopiesReader(_endpoint(), found, self.kept.snapshots.get(found.id, {}))

    def forget(self) -> None:
        """Nothing of what was saved so far is of use."""
        self.kept.snapshots.clear()


def newest_whole(told: list[Any]) -> WholeSnapshot | None:
    """Chooses from what each rank says: the snapshot begun last; id, step and names of files of each that it has."""
    last = max((SnapshotId(*last) for last, _ in told if last is not None), default=None)
    steps = {SnapshotId(*id): step for _, found in told for id, step, _ in found}
    for id in sorted(steps, reverse=True):
        files = [{n for i, _, names in found if SnapshotId(*i) == id for n in names} for _, found in told]
        if set().union(*files) == {part_name(rank) for rank in range(id.size)}:
            return WholeSnapshot(id, steps[id], files, id == last)
    return None


def _endpoint() -> Endpoint:
    communication = current().communication
    communication.descriptions[_KEY.plan] = "copies of a snapshot"
    assert communication.endpoint is not None
    return communication.endpoint


class CopiesReader(CheckpointReader):
    """A snapshot in the memory of the ranks; every rank must make it. What `read` returns has its values after
    `fetch`."""

    def __init__(self, endpoint: Endpoint, found: WholeSnapshot, own: dict[str, PartFile]) -> None:
        self.endpoint, self.own, self.files = endpoint, own, found.files
        self.folder = f"the snapshot of step {found.step} in memory"
        # of who has a file, the first one gives it to the others
        self.giver = {name: rank for rank, names in reversed([*enumerate(found.files)]) for name in names}
        given = [f.about for f in own.values() if self.giver[f.name] == endpoint.rank]
        pieces = sorted((p for told in told_by_all(endpoint, given) for p in told), key=lambda p: [*p["files"]])
        self.index = merged(pieces, found.step, pieces[0]["state"])
        self.wanted: dict[str, list[tuple[Bounds, np.ndarray]]] = {}

    def _read(self, name: str, box: Bounds) -> np.ndarray:
        out = np.empty([b - a for a, b in box], CODES[self.index["tensors"][name]["dtype"]].np)
        self.wanted.setdefault(name, []).append((box, out))
        return out

    def fetch(self) -> str:
        """Each part goes to the ranks that have asked for some of it, in one order on all of them; every rank must call
        it. Returns what is damaged, or nothing."""
        endpoint, rank, wrong, ahead = self.endpoint, self.endpoint.rank, "", 0
        asked = told_by_all(endpoint, {name: [box for box, _ in boxes] for name, boxes in self.wanted.items()})
        for name, t in self.index["tensors"].items():
            for part in t["parts"]:
                box, file, nbytes = box_of(part), part["file"], nbytes_of(part, t["dtype"])
                takers = [r for r, of in enumerate(asked) if any(common(box, b) is not None for b in of.get(name, ()))]
                if self.giver[file] == rank:
                    for r in takers:
                        if file not in self.files[r]:
                            self._give(r, self.own[file].part(part, nbytes))
                            ahead += nbytes
                if rank in takers:
                    data = self.own[file].part(part, nbytes) if file in self.own else self._get(file, nbytes)
                    if checksums(memoryview(data)) != part["crc32"]:
                        wrong = wrong or f"{self.folder} is damaged: a checksum of {name!r} is wrong in {file}"
                    else:
                        self._put(name, box, data)
                if ahead >= AHEAD:
                    endpoint.flush()
                    ahead = 0
        endpoint.flush()
        return wrong

    def _give(self, peer: int, data: np.ndarray) -> None:
        for at in range(0, data.nbytes, PIECE):
            self.endpoint.send(peer, _KEY, data.ctypes.data + at, min(PIECE, data.nbytes - at))

    def _get(self, file: str, nbytes: int) -> np.ndarray:
        out = np.empty(nbytes, np.uint8)
        for at in range(0, nbytes, PIECE):
            self.endpoint.receive_into(self.giver[file], _KEY, out.ctypes.data + at, min(PIECE, nbytes - at))
        return out

    def _put(self, name: str, box: Bounds, data: np.ndarray) -> None:
        whole = data.view(CODES[self.index["tensors"][name]["dtype"]].np).reshape([b - a for a, b in box])
        for wanted, out in self.wanted[name]:
            if (both := common(box, wanted)) is not None:
                out[within(both, wanted)] = whole[within(both, box)]
