"""A training with dropout and shuffling, stopped on some workers and resumed on others, has the bits of one that was
not; each worker writes a part."""

from __future__ import annotations

import json
import shutil
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.checkpoint import scripts

HERE = Path(__file__).resolve().parent


trained = partial(scripts.trained, "training.py")


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    (found,) = trained(1, 12, tmp_path_factory.mktemp("whole") / "checkpoints")
    assert found["begun"] == 0
    return found


@pytest.mark.parametrize("nodes,others", [(1, (2,)), (2, (1, 3))])
def test_resumed_on_other_workers(nodes: int, others: tuple[int, ...], undisturbed: Any, tmp_path: Path) -> None:
    """Three workers add in another order (Decision 0004): they load the same bits, and go on within rounding."""
    checkpoints = tmp_path / "checkpoints"
    trained(nodes, 6, checkpoints, "asynchronous")
    names = sorted(p.name for p in (checkpoints / "step-00000006").iterdir())
    assert names == ["index.json", *(f"part-{rank:05d}.safetensors" for rank in range(nodes))]
    index = json.loads((checkpoints / "step-00000006" / "index.json").read_text())["index"]
    parts = index["tensors"]["model.embedding.weight"]["parts"]
    assert [p["file"] for p in parts] == [f"part-{rank:05d}.safetensors" for rank in range(nodes)]
    assert len(parts[0]["crc32"]) == -(-4096 * 96 * 4 // nodes // (1 << 20))
    saved = {found["loaded"] for found in trained(nodes, 6, checkpoints)}  # (nothing is left to train)
    for count in others:
        copy = tmp_path / f"on {count}" / "checkpoints"
        shutil.copytree(checkpoints, copy)
        for found in trained(count, 12, copy):
            assert found["begun"] == 6 and {found["loaded"]} == saved
            if count == 3:
                np.testing.assert_allclose(found["losses"], undisturbed["losses"][6:], rtol=1e-5)
            else:
                assert found["losses"] == undisturbed["losses"][6:]
                assert found["ended"] == undisturbed["ended"]


def test_a_killed_worker_costs_the_steps_since_the_last_checkpoint(undisturbed: Any, tmp_path: Path) -> None:
    trained(2, 12, tmp_path / "checkpoints", "killed", code=137)
    for found in trained(2, 12, tmp_path / "checkpoints"):
        assert found["begun"] == 6
        assert found["losses"] == undisturbed["losses"][6:]
        assert found["ended"] == undisturbed["ended"]


def test_a_rank_that_cannot_write_is_named_and_all_go_on(tmp_path: Path) -> None:
    """Rank 1 meets a full disk once: no rank takes that checkpoint, and the next one is whole."""
    found = trained(2, 7, tmp_path / "checkpoints", "full")
    assert "the disk is full" in found[1]["warned"][0] and "rank 1 could not write" in found[0]["warned"][0]
    assert sorted(p.name for p in (tmp_path / "checkpoints").iterdir()) == ["step-00000006"]


def test_damage_that_one_rank_sees_sends_all_to_the_one_before(tmp_path: Path) -> None:
    trained(2, 7, tmp_path / "checkpoints")
    file = tmp_path / "checkpoints" / "step-00000006" / "part-00001.safetensors"
    index = json.loads((file.parent / "index.json").read_text())["index"]["tensors"]["model.cut.weight"]
    part = next(p for p in index["parts"] if p["file"] == file.name)
    raw = bytearray(file.read_bytes())
    raw[part["offset"]] ^= 4
    file.write_bytes(raw)
    first, second = trained(2, 7, tmp_path / "checkpoints")
    assert first["begun"] == second["begun"] == 3
    assert "cannot be read by 1 other ranks" in first["warned"][0] and "is damaged" in second["warned"][0]
