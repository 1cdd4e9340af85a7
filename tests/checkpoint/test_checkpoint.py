"""Saving and loading: what comes back, on other devices and cuts, and what is noticed."""

from __future__ import annotations

import json
import struct
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import manygrad
from manygrad import Tensor, nn
from manygrad.checkpoint import Checkpointer, CheckpointError, load, save
from manygrad.nn.data import DataLoader, TensorDataset
from manygrad.nn.optim import SGD, AdamW
from manygrad.nn.optim.lr_scheduler import StepLR
from manygrad.nn.state import safe_load

DEVICES = [("CPU:0",), ("CPU:0", "CPU:1"), ("CPU:0", "CPU:1", "CPU:2")]


def values(shape: tuple[int, ...], seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def test_nested_values_come_back_as_they_were(tmp_path: Path) -> None:
    state = {
        "numbers": [1, -2.5, float("inf"), 1e-320, True, None, "ä"],
        "betas": (0.9, 0.999),
        "by number": {0: {"step": 3}, 7: []},
        "array": np.arange(6, dtype=np.int64).reshape(2, 3),
        "scalar": Tensor(2.5),
        "empty": Tensor(np.zeros((0, 3), np.float32)),
        "half": Tensor([1.5, 2.5], dtype="bfloat16"),
        "lazy": Tensor([1.0, 2.0]) + 1,
        "view": Tensor(np.arange(12.0).reshape(3, 4)).T[1:],
    }
    path = save(tmp_path, state, 10)
    assert path == str(tmp_path / "step-00000010")
    again = load(path, None)
    for key in ("numbers", "betas", "by number"):
        assert again[key] == state[key] and type(again[key]) is type(state[key])
    assert type(again["numbers"][4]) is bool and list(again["by number"]) == [0, 7]
    np.testing.assert_array_equal(again["array"], state["array"])
    for key in ("scalar", "empty", "half", "lazy", "view"):
        assert again[key].dtype == state[key].dtype and again[key].shape == state[key].shape
        np.testing.assert_array_equal(again[key].numpy(), state[key].numpy())


@pytest.mark.parametrize("saved_on", DEVICES)
@pytest.mark.parametrize("axis", [None, 0, 1])
def test_any_cut_loads_into_any_other(saved_on: tuple[str, ...], axis: int | None, tmp_path: Path) -> None:
    a = values((7, 5))
    save(tmp_path, {"w": Tensor(a).shard(saved_on, axis).realize()}, 1)
    for devices in DEVICES:
        for other in (None, 0, 1):
            w = Tensor(np.zeros_like(a)).shard(devices, other).realize()
            load(tmp_path, {"w": w})
            np.testing.assert_array_equal(w.numpy(), a)
            assert w.device == devices


def test_each_element_is_written_once_in_files_that_others_read(tmp_path: Path) -> None:
    a, b = values((6, 4)), values((5,), 1)
    path = save(tmp_path, {"a": Tensor(a).shard(("CPU:0", "CPU:1"), 0), "b": Tensor(b).shard(("CPU:0", "CPU:1"))}, 1)
    found = safe_load(f"{path}/part-00000.safetensors")
    assert sorted(found) == ["a[0:3, 0:4]", "a[3:6, 0:4]", "b"]
    np.testing.assert_array_equal(np.concatenate([found["a[0:3, 0:4]"].numpy(), found["a[3:6, 0:4]"].numpy()]), a)
    index = json.loads(Path(path, "index.json").read_text())["index"]
    assert [p["start"] for p in index["tensors"]["a"]["parts"]] == [[0, 0], [3, 0]]
    assert index["files"]["part-00000.safetensors"]["nbytes"] == Path(path, "part-00000.safetensors").stat().st_size


class Model(nn.Module):
    def __init__(self) -> None:
        self.first, self.norm, self.last = nn.Linear(6, 16), nn.BatchNorm1d(16), nn.Linear(16, 3)
        self.dropout = nn.Dropout(0.3)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.dropout(self.norm(self.first(x)).relu()))


class Training:
    """A model with dropout, trained on shuffled data on some devices."""

    def __init__(self, folder: Path | None, devices: tuple[str, ...], optimizer: Any = AdamW, **options: Any):
        Tensor.manual_seed(1)
        self.model = Model()
        for p in [*self.model.parameters(), *self.model.buffers()]:
            p.shard_(devices)
        self.optimizer = optimizer(self.model.parameters(), lr=0.05)
        self.schedule = StepLR(self.optimizer, 3, gamma=0.5)
        data = TensorDataset(values((40, 6), 2), np.arange(40) % 3)
        self.loader = DataLoader(data, 8, shuffle=True, seed=3, drop_last=True, devices=devices, num_workers=0)
        state = {k: v for k, v in vars(self).items() if k != "checkpoints"}
        self.checkpoints = Checkpointer(folder, state, every=4, **options)

    def run(self, steps: int) -> list[np.ndarray]:
        """The losses from the first step after that of the checkpoint on; then the weights."""
        done = self.checkpoints.resume()
        losses = []

        @manygrad.TinyJit
        def step(x: Tensor, y: Tensor) -> Tensor:
            self.optimizer.zero_grad()
            loss = self.model(x).cross_entropy(y)
            loss.backward()
            self.optimizer.step()
            return loss

        with Tensor.train():
            while done < steps:
                for x, y in self.loader:
                    losses.append(step(x, y).numpy().copy())
                    self.schedule.step()
                    done += 1
                    self.checkpoints.step(done)
                    if done == steps:
                        break
        self.checkpoints.finish()
        return [*losses, *(t.numpy() for t in self.model.state_dict().values())]


@pytest.mark.parametrize("asynchronous", [False, True])
@pytest.mark.parametrize("optimizer", [AdamW, lambda p, lr: SGD(p, lr, momentum=0.9)])
def test_a_resumed_training_has_the_same_bits(optimizer: Any, asynchronous: bool, tmp_path: Path) -> None:
    """With dropout, shuffling in the midst of an epoch, batch norm's buffers and a schedule; also on other devices."""
    whole = Training(None, DEVICES[0], optimizer).run(14)
    Training(tmp_path, DEVICES[0], optimizer, asynchronous=asynchronous).run(10)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["step-00000004", "step-00000008"]
    for devices in DEVICES[:2]:
        resumed = Training(tmp_path, devices, optimizer)
        resumed.checkpoints.every = 1000
        found = resumed.run(14)
        assert len(found) == len(whole) - 8
        for a, b in zip(whole[8:], found):
            assert a.tobytes() == b.tobytes()


def test_what_another_thread_changes_meanwhile_is_saved_whole(tmp_path: Path) -> None:
    """As it was before, or after, row by row, and never so that the checkpoint is damaged."""
    a, is_saved = np.zeros((64, 1 << 16), np.float32), threading.Event()  # 16 chunks

    def change() -> None:
        while not is_saved.is_set():
            np.add(a, 1, out=a)

    thread = threading.Thread(target=change)
    thread.start()
    try:
        for step in range(5):
            save(tmp_path, {"a": a}, step, keep=1)
    finally:
        is_saved.set()
        thread.join()
    found = load(tmp_path, None)["a"]
    assert found.max() > 0 and np.array_equal(found, np.round(found))


def test_a_snapshot_is_as_the_state_was(tmp_path: Path) -> None:
    """What a save in the background writes, in memory that the last one had, is of the step in which it was taken."""
    w, array = Tensor(values((300, 1000))).realize(), values((200, 1000), 1)
    with Checkpointer(tmp_path, {"w": w, "array": array}, every=1, keep=None, asynchronous=True) as checkpoints:
        taken = []
        for step in range(4):
            taken.append((w.numpy().copy(), array.copy()))
            checkpoints.step(step)
            w.assign(w * 2).realize()
            array += 1
    for step, (then, array) in enumerate(taken):
        again = load(tmp_path / f"step-{step:08d}", None)
        np.testing.assert_array_equal(again["w"].numpy(), then)
        np.testing.assert_array_equal(again["array"], array)


def test_random_numbers_go_on_where_the_state_was_taken() -> None:
    Tensor.manual_seed(2**63 + 5)
    Tensor.rand(3).realize()
    state = manygrad.get_rng_state()
    want = [Tensor.rand(4).numpy() for _ in range(3)]
    Tensor.manual_seed(1)
    manygrad.set_rng_state(state)
    for a in want:
        np.testing.assert_array_equal(Tensor.rand(4).numpy(), a)
    with pytest.raises(ValueError, match="what get_rng_state gave"):
        manygrad.set_rng_state(Tensor([1, 2, 3]))


def test_what_does_not_fit_is_an_error_and_changes_nothing(tmp_path: Path) -> None:
    save(tmp_path, {"w": Tensor(values((3, 2))), "step": 1}, 1)
    w = Tensor(np.zeros((2, 3), np.float32))
    with pytest.raises(ValueError, match="shape"):
        load(tmp_path, {"w": w})
    with pytest.raises(KeyError, match="other"):
        load(tmp_path, {"other": w})
    assert not w.numpy().any()
    with pytest.raises(TypeError, match="the state|a.b"):
        save(tmp_path, {"a": {"b": object()}}, 2)
    with pytest.raises(CheckpointError, match="it is no checkpoint"):
        load(tmp_path / "nothing", {"w": w})


def small(folder: Path, step: int) -> Path:
    return Path(save(folder, {"w": Tensor(values((3, 4), step)), "b": Tensor(values((2,), step)), "step": step}, step))


def test_every_flipped_byte_and_every_cut_is_noticed(tmp_path: Path) -> None:
    path = small(tmp_path, 1)
    for file in sorted(path.iterdir()):
        raw = file.read_bytes()
        broken = [raw[:i] + bytes([raw[i] ^ (1 << i % 8)]) + raw[i + 1 :] for i in range(len(raw))]
        broken += [raw[:i] for i in range(len(raw))] + [raw + b"\0"]
        for data in broken:
            file.write_bytes(data)
            with pytest.raises(CheckpointError, match=file.name):
                load(path, None)
        file.unlink()
        with pytest.raises(CheckpointError, match=file.name):
            load(path, None)
        file.write_bytes(raw)
    assert load(path, None)["step"] == 1


def test_the_one_before_a_damaged_one_is_used_and_kept(tmp_path: Path) -> None:
    w = Tensor(np.zeros((3, 4), np.float32))
    checkpoints = Checkpointer(tmp_path, {"w": w}, keep=2)
    for step in (1, 2, 3):
        w.assign(values((3, 4), step))
        checkpoints.save(step)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["step-00000002", "step-00000003"]
    file = tmp_path / "step-00000003" / "part-00000.safetensors"
    raw = bytearray(file.read_bytes())
    raw[8 + struct.unpack("<Q", raw[:8])[0]] ^= 1
    file.write_bytes(raw)
    with pytest.warns(UserWarning, match="part-00000.safetensors is damaged"):
        assert checkpoints.resume() == 2
    np.testing.assert_array_equal(w.numpy(), values((3, 4), 2))
    checkpoints.save(3)  # again: a new revision, and the damaged one does not count
    assert checkpoints.resume() == 3
    np.testing.assert_array_equal(w.numpy(), values((3, 4), 2))


def test_nothing_is_begun_anew_where_all_are_damaged(tmp_path: Path) -> None:
    (small(tmp_path, 1) / "index.json").write_text("{}")
    with pytest.warns(UserWarning), pytest.raises(CheckpointError, match="all 1 checkpoints"):
        Checkpointer(tmp_path, {"w": Tensor(values((3, 4)))}).resume()
