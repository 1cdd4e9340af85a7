"""A few of the random steps of `random_steps.py`."""

from __future__ import annotations

from functools import partial

import pytest

from manygrad.launcher.api import launch
from manygrad.launcher.job import REAL_ENDPOINT
from tests.collectives.random_steps import PAIRS, steps


@pytest.mark.parametrize("nodes, transport", [(3, "zmq"), (2, "shm"), (4, "pairs")])
def test_random_steps_are_right(nodes: int, transport: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """`pairs`: two and two share memory, with ZeroMQ between them."""
    if transport != "pairs":
        monkeypatch.setenv("TRANSPORT", transport)
    endpoint = PAIRS if transport == "pairs" else REAL_ENDPOINT
    found = launch(partial(steps, 8, 600.0, 17), nodes=nodes, endpoint=endpoint)
    assert found[0] >= 8 and len(set(found)) == 1
