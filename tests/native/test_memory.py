"""Copies between addresses, of any length and place: up to 4 MiB by the C library, beyond that past the caches."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from manygrad.native.memory import PAST_CACHES_NBYTES, copy

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
