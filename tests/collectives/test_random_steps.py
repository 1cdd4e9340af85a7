"""A few of the random steps of `random_steps.py`."""

from __future__ import annotations

from functools import partial

import pytest

from manygrad.launcher.api import launch
from tests.collectives.random_steps import steps


@pytest.mark.parametrize("nodes, transport", [(3, "zmq"), (2, "shm")])
def test_random_steps_are_right(nodes: int, transport: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRANSPORT", transport)
    found = launch(partial(steps, 8, 600.0, 17), nodes=nodes)
    assert found[0] >= 8 and len(set(found)) == 1
