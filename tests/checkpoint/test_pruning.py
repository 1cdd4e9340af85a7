"""`keep` counts checkpoints of which all can be read."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from manygrad import Tensor
from manygrad.checkpoint import CheckpointError, load, save
from manygrad.checkpoint.reader import CheckpointReader


def damage(path: Path) -> None:
    """The last bit of its data is another one."""
    file = path / "part-00000.safetensors"
    raw = bytearray(file.read_bytes())
    raw[-1] ^= 1
    file.write_bytes(raw)


def names(folder: Path) -> list[str]:
    return sorted(p.name for p in folder.iterdir())


def test_a_damaged_one_does_not_count(tmp_path: Path) -> None:
    """Also one that was read back before. The last good one stays."""
    w = Tensor(np.arange(1000, dtype=np.float32))
    for step in (1, 2, 3):
        save(tmp_path, {"w": w + step}, step, keep=2)
    assert names(tmp_path) == ["step-00000002", "step-00000003"]
    damage(tmp_path / "step-00000003")
    with pytest.warns(UserWarning, match=r"step-00000003.*is damaged.*older checkpoints than keep=2 stay"):
        save(tmp_path, {"w": w + 4}, 4, keep=2)
    assert names(tmp_path) == ["step-00000002", "step-00000003", "step-00000004"]
    damage(tmp_path / "step-00000004")
    load(tmp_path / "step-00000002", {"w": w})
    np.testing.assert_array_equal(w.numpy(), np.arange(1000, dtype=np.float32) + 2)


def test_each_one_is_read_back_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[str] = []
    whole = CheckpointReader.verify

    def verify(self: CheckpointReader) -> None:
        read.append(Path(self.folder).name)
        whole(self)

    monkeypatch.setattr(CheckpointReader, "verify", verify)
    for step in range(1, 7):
        save(tmp_path, {"x": np.full(10, step)}, step, keep=3)
    assert names(tmp_path) == [f"step-{step:08d}" for step in (4, 5, 6)]
    assert sorted(read) == [f"step-{step:08d}" for step in range(2, 7)]


def test_nothing_is_removed_while_none_can_be_read(tmp_path: Path) -> None:
    for step in (1, 2):
        save(tmp_path, {"x": np.full(10, step)}, step)
        damage(tmp_path / f"step-{step:08d}")
    save(tmp_path, {"x": np.full(10, 3)}, 3)
    with pytest.warns(UserWarning, match="older checkpoints than keep=2 stay"):
        save(tmp_path, {"x": np.full(10, 0)}, 0, keep=2)
    assert len(names(tmp_path)) == 4
    assert (load(tmp_path / "step-00000000", None)["x"] == 0).all()
    with pytest.raises(CheckpointError, match="is damaged"):
        load(tmp_path / "step-00000002", None)
