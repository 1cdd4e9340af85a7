"""Copies of a snapshot in the memory of the ranks, which are threads here, each with an endpoint of its own."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest

from manygrad.checkpoint.copies import (
    PIECE,
    CopiesReader,
    Neighbours,
    PartFile,
    SnapshotId,
    WholeSnapshot,
    newest_whole,
)
from manygrad.checkpoint.layout import Bounds, TensorPart
from manygrad.checkpoint.writer import Snapshot, part_name
from manygrad.collectives.transport import Endpoint
from manygrad.errors import PeerLost
from manygrad.tensor.environment import Context

TRANSPORTS = ["shm", "zmq"]


@contextmanager
def ranks(size: int, transport: str) -> Iterator[Callable[[Callable[[Endpoint], Any]], list[Any]]]:
    """`run(work)` calls `work(endpoint)` of each rank at the same time."""
    with ThreadPoolExecutor(size) as pool, Context(TRANSPORT=transport):
        endpoints = [Endpoint(r, size, "copies", 0, arena_bytes=1 << 26) for r in range(size)]
        cards = [e.card() for e in endpoints]
        list(pool.map(lambda e: e.connect(cards), endpoints))
        try:
            yield lambda work: list(pool.map(work, endpoints))
        finally:
            list(pool.map(Endpoint.close, endpoints))


def file_of(rank: int, nbytes: int) -> PartFile:
    data = np.random.default_rng(rank).integers(0, 256, nbytes).astype(np.uint8)
    return PartFile({"step": 7, "files": {part_name(rank): {}}}, data)


@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.parametrize("size,distance", [(2, 1), (3, 1), (4, 2), (5, 3)])
def test_each_rank_gets_the_file_of_the_one_before(size: int, distance: int, transport: str) -> None:
    """Twice, of all lengths: nothing, a part of a message, more messages than the neighbour has."""
    lengths = [3 * PIECE + 5, 0, 17, PIECE, 2 * PIECE][:size]
    files = [file_of(r, n) for r, n in enumerate(lengths)]

    def swap(endpoint: Endpoint) -> list[PartFile]:
        neighbours = Neighbours(endpoint, distance)
        return [neighbours.swap(f) for f in (files[endpoint.rank], files[(endpoint.rank + 1) % size])]

    with ranks(size, transport) as run:
        for rank, (first, second) in enumerate(run(swap)):
            before = (rank - distance) % size
            assert first.name == part_name(before) and first.about == files[before].about
            np.testing.assert_array_equal(first.data, files[before].data)
            np.testing.assert_array_equal(second.data, files[(before + 1) % size].data)


def test_a_closed_endpoint_ends_who_waits_beside_it() -> None:
    def swap(endpoint: Endpoint) -> str:
        neighbours = Neighbours(endpoint, 1)
        if endpoint.rank == 1:
            endpoint.close("a test")
            return ""
        with pytest.raises(PeerLost) as caught:
            neighbours.swap(file_of(0, 3))
        return str(caught.value)

    with ranks(2, "shm") as run:
        assert "it closed its endpoint" in run(swap)[0]


SIZE = 3
CUT = np.arange(SIZE * 2 * 4, dtype=np.float32).reshape(SIZE * 2, 4)
COPIED = np.arange(SIZE * 5, dtype=np.int64).reshape(SIZE, 5)
ALONE = np.array(2.5, np.float64)


def snapshot_file(rank: int) -> PartFile:
    """Of each tensor rank `rank` has some rows, and one of them a number."""
    cut = [TensorPart(((2 * r, 2 * r + 2), (0, 4)), r) for r in range(SIZE)]
    copied = [TensorPart(((r, r + 1), (0, 5)), r) for r in range(SIZE)]
    tensors = {
        "cut": ("F32", CUT.shape, cut, [CUT[2 * rank : 2 * rank + 2]]),
        "copied": ("I64", COPIED.shape, copied, [COPIED[rank : rank + 1]]),
        "alone": ("F64", (), [TensorPart((), 1)], [ALONE] if rank == 1 else []),
    }
    snapshot = Snapshot(rank, 7, {"value": f"of rank {rank}"}, tensors)  # type: ignore[arg-type]
    data: list[memoryview] = []
    about = snapshot.part_file(data.append)
    return PartFile({"step": 7, "state": snapshot.state, **about}, np.frombuffer(b"".join(data), np.uint8).copy())


def read_all(endpoint: Endpoint, have: list[dict[str, PartFile]]) -> tuple[str, Any, list[np.ndarray]]:
    """Rank r reads its rows of `cut`, and all of the rest."""
    reader = CopiesReader(
        endpoint, WholeSnapshot(SnapshotId(0, 1, SIZE), 7, [{*h} for h in have], True), have[endpoint.rank]
    )
    rows: Bounds = ((2 * endpoint.rank, 2 * endpoint.rank + 2), (0, 4))
    found = [reader.read("cut", rows), reader.read("copied", ((0, SIZE), (0, 5))), reader.read("alone", ())]
    return reader.fetch(), reader.index["state"], found


@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.parametrize("lost", [None, 0, 1, 2])
def test_a_rank_that_has_nothing_gets_what_it_needs(lost: int | None, transport: str) -> None:
    files = [snapshot_file(r) for r in range(SIZE)]
    have = [{} if r == lost else {f.name: f for f in (files[r], files[r - 1])} for r in range(SIZE)]
    with ranks(SIZE, transport) as run:
        for rank, (wrong, state, (cut, copied, alone)) in enumerate(run(lambda e: read_all(e, have))):
            assert wrong == "" and state == {"value": "of rank 0"}
            np.testing.assert_array_equal(cut, CUT[2 * rank : 2 * rank + 2])
            np.testing.assert_array_equal(copied, COPIED)
            assert alone == ALONE


def test_a_flipped_bit_is_named_by_who_would_hold_it() -> None:
    """Rank 1's file is with rank 2 alone, which has it with another bit in rank 1's rows of `cut`."""
    files = [snapshot_file(r) for r in range(SIZE)]
    (part,) = files[1].about["tensors"]["cut"]["parts"]
    files[1].data[part["offset"] + 6] ^= 16
    have = [{f.name: f for f in of} for of in ([files[0], files[2]], [], [files[2], files[1]])]
    with ranks(SIZE, "shm") as run:
        wrong = [w for w, *_ in run(lambda e: read_all(e, have))]
    assert wrong[0] == wrong[2] == ""
    assert "a checksum of 'cut' is wrong in part-00001" in wrong[1]


def test_the_newest_snapshot_that_is_whole_is_found() -> None:
    def told(last: int | None, **snapshots: list[int]) -> Any:
        """As JSON brings it: `s4=[1, 0]`: of the snapshot number 4 the files of ranks 1 and 0."""
        found = [[[0, int(s[1:]), 3], 10 * int(s[1:]), [part_name(r) for r in of]] for s, of in snapshots.items()]
        return [None if last is None else [0, last, 3], found]

    new = told(None)
    whole = newest_whole([told(4, s4=[0, 2]), new, told(4, s4=[2, 1])])
    assert whole == WholeSnapshot(
        SnapshotId(0, 4, 3), 40, [{part_name(0), part_name(2)}, set(), {part_name(2), part_name(1)}], True
    )
    # the next one was on its way; or rank 2 has begun one that it could not give anybody
    between = newest_whole([told(5, s4=[0, 2], s5=[0]), new, told(5, s4=[2, 1], s5=[2, 1])])
    assert between is not None and between.step == 50
    begun = newest_whole([told(4, s4=[0, 2]), new, told(5, s4=[2, 1], s5=[2])])
    assert begun is not None and (begun.step, begun.is_last) == (40, False)
    assert newest_whole([new, new, told(4, s4=[2, 1])]) is None
    assert newest_whole([new, new, new]) is None
    # two ranks are left of three: they have all that there was
    assert newest_whole([told(4, s4=[0, 2]), told(4, s4=[2, 1])]) is not None
