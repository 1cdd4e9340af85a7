"""The arena: blocks never overlap, free space merges, peers map exactly the right file."""

from __future__ import annotations

import ctypes
import gc
import os
import threading

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from manygrad.collectives.transport.arena import PAGE, Arena, FreeList, RemoteArena, default_nbytes
from manygrad.collectives.transport.endpoint import Endpoint
from manygrad.errors import ArenaFull
from manygrad.runtime.devices import Devices

SIZE = 1 << 16


@settings(max_examples=150, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 9000), st.sampled_from([64, 128, 4096]), st.integers(0, 20)), max_size=60))
def test_blocks_never_overlap_and_space_comes_back(script: list[tuple[int, int, int]]) -> None:
    free, live = FreeList(SIZE), {}
    for nbytes, align, victim in script:
        nbytes = max(nbytes, 1)
        if victim < 8 and live:
            free.free(sorted(live)[victim % len(live)])
            del live[sorted(live)[victim % len(live)]]
            continue
        at = free.alloc(nbytes, align)
        if at is None:
            continue
        assert at % align == 0 and 0 <= at and at + nbytes <= SIZE
        assert all(at + nbytes <= o or o + n <= at for o, n in live.items())
        live[at] = nbytes
        assert sum(free.starts.values()) + sum(live.values()) == SIZE
    for at in live:
        free.free(at)
    assert free.starts == {0: SIZE} and free.by_size == [(SIZE, 0)]


def test_arena_memory_and_errors() -> None:
    arena = Arena(1 << 20)
    a = arena.alloc(100)
    assert arena.addr(a) % 64 == 0 and arena.contains(arena.addr(a), 100) and not arena.contains(arena.base - 1)
    assert not arena.contains(arena.base + arena.nbytes - 4, 8)
    ctypes.memset(arena.addr(a), 7, 100)
    with pytest.raises(ArenaFull, match="largest free block"):
        arena.alloc(1 << 20)
    with pytest.raises(ValueError, match="power of two"):
        arena.alloc(8, align=3)
    arena.free(a)
    with pytest.raises(ValueError, match="freed twice"):
        arena.free(a)
    assert arena.used_nbytes == 0 and arena.peak_nbytes == 128
    assert arena.trim() == 1 << 20
    assert ctypes.string_at(arena.addr(0), 4) == bytes(4)


def mapped() -> int:
    with open("/proc/self/maps") as maps:
        return sum("manygrad-arena" in line for line in maps)


def test_it_is_there_as_long_as_something_lies_in_it() -> None:
    before = mapped()
    endpoint = Endpoint(0, 1, "alone", 0, arena_bytes=1 << 20)
    device = Devices(endpoint.arena).get("CPU")
    handle = device.alloc(8)
    endpoint.close()
    del endpoint
    gc.collect()
    device.copyin(handle, memoryview(b"12345678"))
    del device
    gc.collect()
    assert ctypes.string_at(handle.address, 8) == b"12345678" and mapped() > before
    del handle
    gc.collect()
    assert mapped() == before


def test_what_a_child_writes_is_its_own() -> None:
    arena = Arena(1 << 20)
    at = arena.addr(arena.alloc(8))
    ctypes.memmove(at, b"parent's", 8)
    if (child := os.fork()) == 0:
        arena.keep_apart()
        seen = ctypes.string_at(at, 8)
        ctypes.memmove(at, b"child's.", 8)
        os._exit(0 if seen == b"parent's" and ctypes.string_at(at, 8) == b"child's." else 1)
    assert os.waitpid(child, 0)[1] == 0 and ctypes.string_at(at, 8) == b"parent's"


def test_the_default_is_sparse() -> None:
    arena = Arena()
    assert arena.nbytes >= default_nbytes() and os.fstat(arena.fd).st_blocks * 512 < 1 << 20


def test_threads() -> None:
    arena = Arena(1 << 20)

    def work() -> None:
        for n in range(300):
            arena.free(arena.alloc(n * 7 % 3000))

    threads = [threading.Thread(target=work) for _ in range(4)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert arena.used_nbytes == 0 and arena.alloc(1 << 20) == 0


def test_a_peer_maps_only_the_right_file() -> None:
    arena = Arena(1 << 20)
    right = (os.getpid(), arena.fd, arena.token, PAGE, arena.nbytes)
    remote = RemoteArena(*right)
    at = arena.alloc(8)
    ctypes.memmove(arena.addr(at), b"hello", 5)
    assert ctypes.string_at(remote.base + at, 5) == b"hello"
    remote.close()
    remote.close()
    for wrong in (
        (right[0], right[1], bytes(16), *right[3:]),
        (*right[:4], 2 << 20),
        (right[0], 0, *right[2:]),
        (2**22 + 1, *right[1:]),
    ):
        with pytest.raises(OSError):
            RemoteArena(*wrong)
