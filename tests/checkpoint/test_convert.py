"""Checkpoints of torch and of Hugging Face into ours, and back; nothing in them is run, and damage is an error."""

from __future__ import annotations

import json
import pickle
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from manygrad import Tensor, nn
from manygrad.checkpoint import convert, load, save
from manygrad.nn.state import dcp_load, safe_load, safe_save, torch_load

MADE = Path(__file__).parent / "made_by_torch"  # by torch_files.py
WHOLE = np.arange(35, dtype=np.float32).reshape(7, 5)


def check(state: Any) -> None:
    """What torch_files.py has saved."""
    for name, want in {"rows": WHOLE, "columns": WHOLE.T, "copies": WHOLE, "half": np.ones(3)}.items():
        np.testing.assert_array_equal(state["model"][name].numpy().astype(np.float32), want)
    assert state["model"]["half"].dtype.name == "bfloat16"
    assert state["step"] == 3 and state["empty"].shape == (0, 3)
    (name, number, nothing) = state["names"]
    assert (name, number.item(), nothing) == ("a", 2.5, None)
    (group,) = state["optimizer"]["param_groups"]
    assert (group["lr"], group["betas"], group["params"]) == (0.25, (0.9, 0.999), [0])
    ((_, entry),) = state["optimizer"]["state"].items()
    np.testing.assert_allclose(entry["exp_avg"].numpy(), 0.1 * WHOLE.sum(0, keepdims=True), rtol=1e-6)


@pytest.mark.parametrize("source", ["dcp", "state.pt"])
def test_a_checkpoint_of_torch_into_ours_and_back(source: str, tmp_path: Path) -> None:
    ours = convert(MADE / source, tmp_path / "ours", step=3)
    assert ours == str(tmp_path / "ours" / "step-00000003")
    check(load(ours, None))
    back = convert(tmp_path / "ours", tmp_path / "back.pt")
    check(torch_load(back))
    convert(back, tmp_path / "once more", step=3)
    check(load(tmp_path / "once more", None))


def test_a_resumed_training_takes_the_optimiser_of_torch(tmp_path: Path) -> None:
    convert(MADE / "dcp", tmp_path / "ours", key="optimizer", below="optimizer")
    weight = Tensor(np.full((1, 5), 0.5, np.float32))
    optimizer = nn.optim.AdamW([weight], lr=0.01)
    load(tmp_path / "ours", {"optimizer": optimizer})
    assert optimizer.param_groups[0]["lr"] == 0.25
    np.testing.assert_allclose(optimizer.state[weight]["exp_avg"].numpy(), 0.1 * WHOLE.sum(0, keepdims=True), rtol=1e-6)


def test_shards_of_hugging_face(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(8, 16), nn.Linear(16, 4))
    save(tmp_path / "ours", {"model": model, "step": 5}, 5)
    shards = Path(convert(tmp_path / "ours", tmp_path / "hf", key="model", shard_nbytes=600))
    names = sorted(p.name for p in shards.iterdir())
    assert names == [*(f"model-{i:05d}-of-00002.safetensors" for i in (1, 2)), "model.safetensors.index.json"]
    index = json.loads((shards / "model.safetensors.index.json").read_text())
    assert set(index["weight_map"]) == set(model.state_dict())
    assert index["metadata"]["total_size"] == 4 * sum(t.numel() for t in model.state_dict().values())
    with pytest.raises(ValueError, match="has model.* already"):
        convert(tmp_path / "ours", tmp_path / "hf")
    Tensor.manual_seed(9)
    other = nn.Sequential(nn.Linear(8, 16), nn.Linear(16, 4))
    convert(shards, tmp_path / "back", below="model")
    load(tmp_path / "back", {"model": other})
    for name, t in model.state_dict().items():
        np.testing.assert_array_equal(other.state_dict()[name].numpy(), t.numpy())
    one = convert(shards, tmp_path / "one.safetensors")
    assert {k: t.shape for k, t in safe_load(one).items()} == {k: t.shape for k, t in model.state_dict().items()}
    convert(one, tmp_path / "one of ours")
    convert(tmp_path / "one of ours", tmp_path / "folder of one")
    assert [p.name for p in (tmp_path / "folder of one").iterdir()] == ["model.safetensors"]


def test_the_command(tmp_path: Path) -> None:
    def run(*words: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-P", "-m", "manygrad.launcher.cli", "convert", *words]
        return subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=120)

    done = run(str(MADE / "dcp"), "ours", "--step", "7")
    assert done.returncode == 0 and done.stdout.strip() == str(tmp_path / "ours" / "step-00000007"), done
    done = run("ours", "model.safetensors", "--key", "model.rows", "--below", "w")
    assert done.returncode == 0 and list(safe_load(tmp_path / "model.safetensors")) == ["w"], done
    done = run("ours", "x.pt", "--key", "model.colour")
    assert done.returncode == 1 and "has no model.colour; there are rows, columns, copies, half" in done.stderr, done
    assert run("ours").returncode == 2 and run("--help").returncode == 0


def test_what_is_no_checkpoint_and_what_cannot_be_written(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="does not exist"):
        convert(tmp_path / "nothing", tmp_path / "x")
    (tmp_path / "empty").mkdir()
    with pytest.raises(ValueError, match="is no checkpoint: it has no .metadata"):
        convert(tmp_path / "empty", tmp_path / "x")
    for i in range(2):
        safe_save({"w": Tensor.ones(2)}, tmp_path / "empty" / f"{i}.safetensors")
    with pytest.raises(ValueError, match="2 safetensors files and 0 indices"):
        convert(tmp_path / "empty", tmp_path / "x")
    save(tmp_path / "plain", {"step": 3}, 1)
    with pytest.raises(ValueError, match="there are no tensors"):
        convert(tmp_path / "plain", tmp_path / "hf")
    with pytest.raises(ValueError, match="give another path"):
        convert(tmp_path / "plain", tmp_path / "plain")
    with pytest.raises(ValueError, match="what stands above x is a int"):
        convert(tmp_path / "plain", tmp_path / "x.pt", key="step.x")


# *** damaged, and meant to do harm ***


class Harm:
    def __init__(self, path: Path):
        self.path = path

    def __reduce__(self) -> Any:
        return Path.touch, (self.path,)


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    shutil.copytree(MADE / "dcp", tmp_path / "dcp")
    return tmp_path / "dcp"


def test_nothing_is_run(copy: Path, tmp_path: Path) -> None:
    touched = tmp_path / "touched"
    (copy / ".metadata").write_bytes(pickle.dumps(Harm(touched), 4))
    with pytest.raises(ValueError, match="the file asks for .*touch.*nothing was run"):
        dcp_load(copy)
    assert not touched.exists()


def test_files_outside_of_its_folder_are_not_read(copy: Path) -> None:
    raw = (copy / ".metadata").read_bytes()
    assert raw.count(b"__0_0.distcp")
    (copy / ".metadata").write_bytes(raw.replace(b"__0_0.distcp", b"../../secret"))
    with pytest.raises(ValueError, match="names the file '../../secret', which is not in its folder"):
        dcp_load(copy)


def test_what_is_missing_or_too_short_is_named(copy: Path) -> None:
    part = copy / "__1_0.distcp"
    whole = part.read_bytes()
    part.write_bytes(whole[:-40])
    with pytest.raises(ValueError, match="__1_0.distcp is truncated"):
        dcp_load(copy)
    part.unlink()
    with pytest.raises(FileNotFoundError, match="__1_0.distcp"):
        dcp_load(copy)


@pytest.mark.parametrize(
    "old, new", [(b"K\x07K\x05", b"K\x09K\x05"), (b"K\x05K\x07", b"K\x05K\x08"), (b"K\x04K\x05", b"K\x03K\x05")]
)
def test_parts_that_do_not_make_up_the_tensor(old: bytes, new: bytes, copy: Path) -> None:
    raw = (copy / ".metadata").read_bytes()
    assert old in raw
    (copy / ".metadata").write_bytes(raw.replace(old, new, 1))
    with pytest.raises(ValueError, match="cannot be read as a checkpoint of torch"):
        dcp_load(copy)


@pytest.mark.parametrize("name", [".metadata", "__0_0.distcp", "__1_0.distcp"])
def test_mutations_are_errors_or_harmless(name: str, copy: Path) -> None:
    """Random bytes of each file: nothing but ValueError and OSError, whatever they hit."""
    raw, rng = (copy / name).read_bytes(), np.random.default_rng(0)
    refused = 0
    for _ in range(150):
        changed = bytearray(raw)
        for _ in range(int(rng.integers(1, 4))):
            changed[int(rng.integers(len(raw)))] = int(rng.integers(256))
        (copy / name).write_bytes(changed)
        try:
            dcp_load(copy)
        except (ValueError, OSError):
            refused += 1
    assert refused > 10
