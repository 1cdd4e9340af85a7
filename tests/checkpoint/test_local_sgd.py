"""Workers that train copies of their own (DiLoCo) and are stopped between outer steps go on where each of them was."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.checkpoint import scripts

HERE = Path(__file__).resolve().parent
STEPS = 9


def trained(nodes: int, steps: int, folder: Path, *options: str, code: int = 0, more: tuple[str, ...] = ()) -> Any:
    """What each rank of `local_sgd.py` has written; nothing where it is to end otherwise."""
    return scripts.trained("local_sgd.py", nodes, steps, folder, *options, code=code, more=("--grace", "60", *more))


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return trained(2, STEPS, tmp_path_factory.mktemp("whole") / "checkpoints")


def test_each_worker_has_its_own_state_back(whole: Any, tmp_path: Path) -> None:
    """On two workers all goes on with the same bits; on others each takes all that it has of one worker."""
    folder = tmp_path / "checkpoints"
    trained(2, 6, folder)
    for nodes in (3, 1):
        for rank, found in enumerate(trained(nodes, 6, folder)):
            assert found["begun"] == 6 and found["loaded"] == whole[rank % 2]["path"][5]
            assert found["number"] == rank % 2
    for rank, found in enumerate(trained(2, STEPS, folder)):
        assert found["path"] == whole[rank]["path"][6:]


def test_all_that_was_done_at_sigterm_is_saved(whole: Any, tmp_path: Path) -> None:
    folder = tmp_path / "checkpoints"
    trained(2, STEPS, folder, "terminated", code=143)
    for rank, found in enumerate(trained(2, STEPS, folder)):
        assert found["begun"] in (6, 7) and found["path"] == whole[rank]["path"][found["begun"] :]


def test_a_lost_worker_has_its_own_state_of_a_neighbour(whole: Any, tmp_path: Path) -> None:
    """The newest snapshot is in memory, and between outer steps."""
    found = trained(2, STEPS, tmp_path / "checkpoints", "memory", "killed", more=("--max-restarts", "1"))
    for rank, x in enumerate(found):
        assert x["begun"] == 5 and x["number"] == rank
        assert x["loaded"] == whole[rank]["path"][4] and x["path"] == whole[rank]["path"][5:]
