"""Copies between addresses, of any length and place: up to 4 MiB by the C library, beyond that past the caches.
Memory that mostly stays unwritten."""

from __future__ import annotations

import sys

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from manygrad.native.memory import PAST_CACHES_NBYTES, bytes_at, copy, mostly_unwritten

GUARD = 128
SOURCE = np.random.default_rng(0).integers(0, 255, PAST_CACHES_NBYTES + 4096, dtype=np.uint8)


@pytest.mark.parametrize("least", [0, PAST_CACHES_NBYTES])
@settings(deadline=None, max_examples=40)
@given(extra=st.integers(0, 700), to=st.integers(0, 130), source=st.integers(0, 130))
def test_copies_what_it_should_and_nothing_else(least: int, extra: int, to: int, source: int) -> None:
    n = least + extra
    target = np.full(n + to + 2 * GUARD, 7, np.uint8)
    copy(target.ctypes.data + GUARD + to, SOURCE.ctypes.data + source, n)
    assert np.array_equal(target[GUARD + to : GUARD + to + n], SOURCE[source : source + n])
    assert (target[: GUARD + to] == 7).all() and (target[GUARD + to + n :] == 7).all()


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc/self/smaps")
def test_what_is_not_written_takes_no_memory() -> None:
    nbytes = 80 << 20
    owner, address = mostly_unwritten(nbytes)
    assert address % 4096 == 0 and owner.nbytes == nbytes
    for at, limit in ((0, 64 << 10), (nbytes - 1, 4 << 20)):  # (far behind, pages may be huge)
        bytes_at(address + at, 1)[:] = 1
        assert 0 < resident(address, nbytes) <= limit


def resident(address: int, nbytes: int) -> int:
    """Bytes of the areas that begin in there (neighbours may have become one with its last)."""
    found, inside = 0, False
    with open("/proc/self/smaps") as f:
        for line in f:
            field, *rest = line.split()
            if "-" in field and not field.endswith(":"):
                inside = address <= int(field.split("-")[0], 16) < address + nbytes
            elif inside and field == "Rss:":
                found += 1024 * int(rest[0])
    return found
