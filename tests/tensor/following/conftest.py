"""`counts`: how the traces of a test ended."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from manygrad.tensor.deferred import endings
from manygrad.tensor.deferred.trace import Trace
from tests.tensor.following.loops import Counts


@pytest.fixture
def counts(monkeypatch: pytest.MonkeyPatch) -> Iterator[Counts]:
    found, computed, flush = Counts(), endings.computed, Trace.flush

    def counted(trace: Trace, ending: Any, *rest: Any, **named: Any) -> Any:
        if ending.replay is None:
            found.captures += 1
        else:
            found.replays += 1
        return computed(trace, ending, *rest, **named)

    def flushed(self: Trace, why: str) -> None:
        found.flushes += bool(self.put_off)
        flush(self, why)

    monkeypatch.setattr(endings, "computed", counted)
    monkeypatch.setattr(Trace, "flush", flushed)
    yield found
