"""What a link gives, measured while its workers start."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from manygrad.collectives.transport import measure


@pytest.mark.parametrize(
    "bytes_per_s, rate, piece_nbytes",
    [(25e6, 1 << 25, 128 << 10), (125e6, 1 << 27, 512 << 10), (4e9, 1 << 32, 2 << 20)],
)
@pytest.mark.parametrize("late", [(), (0,), (0, 1, 2)], ids=["never", "first", "but_once"])
def test_late_workers_do_not_make_a_link_slow(
    monkeypatch: pytest.MonkeyPatch, bytes_per_s: float, rate: float, piece_nbytes: int, late: tuple[int, ...]
) -> None:
    """As long as they come in time once of the times that a message is sent."""
    now, sent = 0.0, dict[int, Iterator[int]]()

    def exchange(meter: Any, distance: int, nbytes: int) -> None:
        nonlocal now
        number = next(sent.setdefault(nbytes, iter(range(100))))
        now += 300e-6 + nbytes / bytes_per_s + 0.05 * (number in late)

    monkeypatch.setattr(measure._Meter, "exchange", exchange)
    monkeypatch.setattr(measure, "largest", lambda endpoint, key, words: words)
    monkeypatch.setattr(measure.time, "perf_counter", lambda: now)
    link = measure.measure(SimpleNamespace(size=2, rank=0, routes={1: "zmq"}))
    assert link is not None and (link.bytes_per_s, link.piece_nbytes) == (rate, piece_nbytes)


def test_a_worker_that_begins_late_does_not_make_a_link_fast(monkeypatch: pytest.MonkeyPatch) -> None:
    """It finds what it was sent at once: each of the two is late once, and sees no time pass then."""
    now, tries = 0.0, iter(range(100))
    others: list[float] = []  # times that the other worker has taken and not told

    def largest(endpoint: Any, key: Any, words: tuple[int, ...]) -> tuple[int, ...]:
        told = int(min(others, default=0) * 1e9)
        others.clear()
        return (max(words[0], told),)

    def exchange(meter: Any, distance: int, nbytes: int) -> None:
        nonlocal now
        number, there = next(tries) % measure.TRIES, 300e-6 + nbytes / 25e6
        own, other = {0: (20e-6, 0.05 + there), 1: (0.05 + there, 20e-6)}.get(number, (there, there))
        now += own
        others.append(other)

    monkeypatch.setattr(measure._Meter, "exchange", exchange)
    monkeypatch.setattr(measure, "largest", largest)
    monkeypatch.setattr(measure.time, "perf_counter", lambda: now)
    link = measure.measure(SimpleNamespace(size=2, rank=0, routes={1: "zmq"}))
    assert link is not None and link.bytes_per_s == 1 << 25
