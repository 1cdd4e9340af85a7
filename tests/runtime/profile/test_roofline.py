"""The machine's limits: measured once, kept, and what share of them a kernel reaches."""

from __future__ import annotations

from pathlib import Path

import pytest

from manygrad import Context
from manygrad.runtime.profile import roofline
from manygrad.runtime.profile.roofline import Peaks, peaks_of, share


def test_share_is_of_the_lower_limit() -> None:
    peaks = Peaks(flops=100e9, bandwidth=10e9)
    assert share(int(50e9), 0, 1.0, peaks) == 0.5
    assert share(0, int(10e9), 2.0, peaks) == 0.5
    assert share(int(10e9), int(5e9), 1.0, peaks) == 0.5  # the bytes take longer than the operations
    assert share(1, 1, 0.0, peaks) == 0.0


def test_limits_are_measured_once_and_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(roofline, "COPY_BYTES", 1 << 20)
    monkeypatch.setattr(roofline, "LEAST_S", 1e-5)
    roofline._peaks.cache_clear()
    with Context(CACHE_DIR=str(tmp_path)):
        first = peaks_of("CPU")
        assert first is not None and first.flops > 1e6 and first.bandwidth > 1e6
        monkeypatch.setattr(roofline, "measure", lambda: pytest.fail("measured again"))
        roofline._peaks.cache_clear()
        assert peaks_of("CPU") == first
    roofline._peaks.cache_clear()
    assert peaks_of("NULL") is None
