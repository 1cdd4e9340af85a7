"""Under SPEC, the calls of all workers for a collective are proved when they are made."""

from __future__ import annotations

from collections.abc import Iterable

import pytest

from manygrad import Context
from manygrad.collectives.lower import Body, CollectiveChoice
from manygrad.errors import ProgramError
from tests.schedule.programs import linear_of, stored

TWO = ("CPU:0", "CPU:1")


@pytest.mark.parametrize("call", range(2))
def test_a_collective_without_one_of_its_calls_is_refused(call: int, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = CollectiveChoice.body

    def less(choice: CollectiveChoice, ranks: Iterable[int], on_host: object) -> Body:
        body = whole(choice, ranks, on_host)  # type: ignore[arg-type]
        linear = body.linear
        return body._replace(linear=linear.replace(src=linear.src[:call] + linear.src[call + 1 :]))

    monkeypatch.setattr(CollectiveChoice, "body", less)
    with pytest.raises(ProgramError), Context(SCACHE=0):
        linear_of([stored(8, 13 + call).shard(TWO, 0).sum(0)])
