"""Checkpoints in remote storage, by fsspec: in memory, slow, failing now and then, failing for good, cut off."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import fsspec
import numpy as np
import pytest
from fsspec.implementations.memory import MemoryFileSystem

from manygrad import Tensor, nn
from manygrad.checkpoint import Checkpointer, CheckpointError, convert, load, save, store
from manygrad.checkpoint.layout import TensorPart
from manygrad.checkpoint.reader import committed
from manygrad.checkpoint.remote_writer import RemoteAttempt
from manygrad.checkpoint.writer import Snapshot

INSIDE = threading.local()


class Died(BaseException):
    """The process has died at this operation, and does nothing more."""


class Faulty(MemoryFileSystem):  # type: ignore[misc]
    """A store that does what a test says at each operation."""

    protocol = "faulty"
    cachable = True
    calls, each, dies_at, halves = 0, 0, -1, False
    broken: type[Exception] | None = None
    delay_s = 0.0

    @classmethod
    def meet(cls, half: Any = None) -> None:
        if getattr(INSIDE, "now", False):
            return
        cls.calls += 1
        time.sleep(cls.delay_s)
        if 0 <= cls.dies_at <= cls.calls:
            if cls.dies_at == cls.calls and cls.halves and half is not None:
                half()
            raise Died
        if cls.broken is not None:
            raise cls.broken("the store says no")
        if cls.each and cls.calls % cls.each == 0:
            raise TimeoutError("no answer")

    def pipe_file(self, path: str, value: bytes, mode: str = "overwrite", **kwargs: Any) -> None:
        whole = super().pipe_file
        self.meet(lambda: whole(path, value[: len(value) // 2]))
        self.alone(whole, path, value, mode, **kwargs)

    def cat_file(self, path: str, start: Any = None, end: Any = None, **kwargs: Any) -> Any:
        self.meet()
        return self.alone(super().cat_file, path, start, end, **kwargs)

    def ls(self, path: str, detail: bool = True, **kwargs: Any) -> Any:
        self.meet()
        return self.alone(super().ls, path, detail, **kwargs)

    def rm(self, path: str, recursive: bool = False, maxdepth: Any = None) -> None:
        self.meet()
        self.alone(super().rm, path, recursive, maxdepth)

    def alone(self, work: Any, *args: Any, **kwargs: Any) -> Any:
        """What an operation consists of is no operation."""
        INSIDE.now = True
        try:
            return work(*args, **kwargs)
        finally:
            INSIDE.now = False


fsspec.register_implementation("faulty", Faulty)


@pytest.fixture(autouse=True)
def fresh(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(store, "FIRST_WAIT_S", 0.001)
    for name in ("calls", "each", "delay_s"):
        monkeypatch.setattr(Faulty, name, 0)
    monkeypatch.setattr(Faulty, "dies_at", -1)
    monkeypatch.setattr(Faulty, "halves", False)
    monkeypatch.setattr(Faulty, "broken", None)
    empty()
    yield
    empty()


def empty() -> None:
    MemoryFileSystem.store.clear()
    MemoryFileSystem.pseudo_dirs[:] = [""]


def values(step: int) -> np.ndarray:
    return np.arange(5, dtype=np.float32) + step


def state(step: int) -> dict[str, Any]:
    return {"w": Tensor(values(step)), "step": step}


def there(url: str) -> list[str]:
    return sorted(p.removeprefix(url.partition("://")[2]).lstrip("/") for p in MemoryFileSystem.store)


@pytest.mark.parametrize("asynchronous", [False, True])
def test_a_training_is_resumed_and_old_ones_go(asynchronous: bool) -> None:
    url = "memory://bucket/run"
    model = nn.Linear(3, 2)
    with Checkpointer(url, {"model": model}, every=1, keep=2, asynchronous=asynchronous) as checkpoints:
        for step in range(1, 5):
            model.bias.assign(Tensor([float(step), 0.0])).realize()
            checkpoints.step(step)
    assert [s.step for s in committed(url)] == [4, 3]
    parts = {p.split("/")[-2] for p in MemoryFileSystem.store if p.endswith(".safetensors")}
    assert len(parts) == 2 and all(p.startswith(("parts-00000003.", "parts-00000004.")) for p in parts)
    other = nn.Linear(3, 2)
    assert Checkpointer(url, {"model": other}).resume() == 4
    assert other.bias.tolist() == [4.0, 0.0] and other.weight.tolist() == model.weight.tolist()


def test_a_step_that_is_saved_again_is_the_newer_one() -> None:
    for value in (1, 2, 3):
        save("memory://again", state(value), 7)
    assert [(s.step, s.revision) for s in committed("memory://again")] == [(7, 2), (7, 1), (7, 0)]
    assert load("memory://again", None)["step"] == 3
    assert load("memory://again/step-00000007", None)["step"] == 1


def test_a_url_of_files_is_a_folder(tmp_path: Path) -> None:
    path = save(f"file://{tmp_path}/run", state(3), 3)
    assert path == str(tmp_path / "run" / "step-00000003") and sorted(os.listdir(path))[0] == "index.json"
    assert load(tmp_path / "run", None)["step"] == load(f"file://{tmp_path}/run", None)["step"] == 3


def test_convert_to_and_from_it(tmp_path: Path) -> None:
    save(tmp_path / "ours", state(3), 3)
    assert convert(tmp_path / "ours", "memory://there", step=3) == "memory://there/step-00000003"
    convert("memory://there", tmp_path / "back.safetensors")
    with pytest.raises(ValueError, match="to which checkpoints are written; torch needs a local path"):
        convert(tmp_path / "ours", "memory://there", to="torch")


@pytest.mark.parametrize("each", [2, 3, 7])
def test_a_store_that_fails_now_and_then_and_is_slow(each: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Faulty, "each", each)
    monkeypatch.setattr(Faulty, "delay_s", 0.002)
    for step in range(1, 5):
        save("faulty://run", state(step), step, keep=2)
    assert load("faulty://run", None)["step"] == 4 and [s.step for s in committed("faulty://run")] == [4, 3]


def test_a_store_that_fails_for_good(monkeypatch: pytest.MonkeyPatch) -> None:
    checkpoints = Checkpointer("faulty://run", state(1), every=1, on_error="warn")
    checkpoints.step(1)
    monkeypatch.setattr(Faulty, "broken", ConnectionError)
    with pytest.warns(UserWarning, match=r"ConnectionError: the store says no \(5 tries\).*goes on without"):
        checkpoints.step(2)
    with pytest.raises(CheckpointError, match="faulty://run"):
        save("faulty://run", state(3), 3)
    monkeypatch.setattr(Faulty, "broken", PermissionError)
    began = Faulty.calls
    with pytest.raises(CheckpointError, match="this user may not do that|the store says no"):
        save("faulty://run", state(3), 3)
    assert Faulty.calls - began <= 3  # (nothing is tried again that stays as it is)
    monkeypatch.setattr(Faulty, "broken", None)
    assert Checkpointer("faulty://run", state(0)).resume() == 1
    save("faulty://run", state(4), 4)
    assert not [p for p in MemoryFileSystem.store if "parts-00000002" in p or "parts-00000003" in p]


@pytest.mark.parametrize("halves", [False, True])
def test_death_at_any_operation_leaves_a_whole_checkpoint(halves: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """At each operation of a save that also removes an old one: what is loaded then is whole, and the next save works.
    With `halves` an object may be there in part."""
    monkeypatch.setattr(Faulty, "halves", halves)
    ends = set()
    for at in range(1, 60):
        empty()
        monkeypatch.setattr(Faulty, "dies_at", -1)
        for step in (1, 2):
            Checkpointer("faulty://run", state(step)).save(step)
        monkeypatch.setattr(Faulty, "dies_at", Faulty.calls + at)
        died = False
        try:
            Checkpointer("faulty://run", state(3), keep=2).save(3)
        except Died:
            died = True
        monkeypatch.setattr(Faulty, "dies_at", -1)
        found: dict[str, Any] = {"w": Tensor(np.zeros(5, np.float32)), "step": 0}
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # (of half an index)
            begun = Checkpointer("faulty://run", found).resume()
            assert begun in (2, 3) and found["step"] == begun
            np.testing.assert_array_equal(found["w"].numpy(), values(begun))
            ends.add(begun)
            Checkpointer("faulty://run", state(4), keep=2).save(4)
            assert Checkpointer("faulty://run", found).resume() == 4
        if not died:
            break
    assert not died and ends == {2, 3}


def test_a_bucket_that_is_missing_is_not_made(monkeypatch: pytest.MonkeyPatch) -> None:
    """s3fs makes it where it is asked for a folder in it: a name that was mistyped would be a new bucket."""

    def makedirs(self: Any, path: str, exist_ok: bool = False) -> None:
        raise AssertionError(f"makedirs of {path}")

    monkeypatch.setattr(Faulty, "makedirs", makedirs)
    with pytest.raises(CheckpointError, match="AssertionError: makedirs of"):
        save("faulty://run", state(1), 1)
    monkeypatch.setattr(Faulty, "protocol", ("s3", "s3a"))
    save("faulty://run", state(1), 1)


def test_without_fsspec_and_without_a_driver(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(CheckpointError, match="nosuch://run cannot be opened.*nosuch"):
        save("nosuch://run", state(1), 1)
    monkeypatch.setitem(sys.modules, "fsspec.core", None)
    with pytest.raises(CheckpointError, match=r"pip install 'manygrad\[remote\]'"):
        save("memory://run", state(1), 1)


# *** several ranks ***


def snapshot(rank: int, size: int) -> Snapshot:
    """Each rank has a row of `w`."""
    parts = [TensorPart(((r, r + 1), (0, 4)), r) for r in range(size)]
    state = {"dict": [["w", {"array": "w"}]]}
    return Snapshot(rank, 5, state, {"w": ("F32", (size, 4), parts, [np.full((1, 4), rank, "<f4")])})


def together(url: str, size: int, broken: int = -1) -> list[str]:
    out = [""] * size

    def run(rank: int) -> None:
        s = snapshot(rank, size)
        if rank == broken:
            s.tensors["w"] = ("F32", (size, 3), *s.tensors["w"][2:])
        try:
            out[rank] = RemoteAttempt(url, rank, size, "job", 0, None, 10.0).write(s)
        except CheckpointError as e:
            out[rank] = f"{type(e).__name__}: {e}"

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(size)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    return out


@pytest.mark.parametrize("each", [0, 5])
def test_all_ranks_write_their_parts_and_see_the_commit(each: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Faulty, "each", each)
    assert together("faulty://run", 3) == ["faulty://run/step-00000005"] * 3
    np.testing.assert_array_equal(load("faulty://run", None)["w"], np.repeat([[0.0], [1.0], [2.0]], 4, axis=1))


def test_ranks_with_other_states_make_no_checkpoint() -> None:
    out = together("faulty://run", 2, broken=1)
    assert "F32 [2, 4] on one rank and F32 [2, 3] on another" in out[0] and "rank 0 could not write" in out[1]
    assert committed("faulty://run") == []


SCRIPT = '''
import sys, time
import fsspec
import numpy as np
from fsspec.implementations.local import LocalFileSystem
from manygrad import Tensor, nn, world
from manygrad.checkpoint import Checkpointer


class Slow(LocalFileSystem):
    """A shared folder behind a slow link."""

    protocol = "slow"

    def ls(self, *args, **kwargs):
        time.sleep(0.02)
        return super().ls(*args, **kwargs)

    @classmethod
    def _strip_protocol(cls, path):
        return super()._strip_protocol(path.removeprefix("slow://"))


fsspec.register_implementation("slow", Slow)
url, steps = sys.argv[1], int(sys.argv[2])
Tensor.manual_seed(0)
model = nn.Linear(8, 4).to(world.devices)
model.weight.shard_(world.devices, 0)
optimizer = nn.optim.AdamW(model.parameters(), lr=0.01)
checkpoints = Checkpointer(url, {"model": model, "optimizer": optimizer}, every=2, keep=2, asynchronous=True)
begun = checkpoints.resume()
for step in range(begun, steps):
    x = Tensor(np.random.default_rng(step).standard_normal((8, 8)).astype(np.float32)).shard(world.devices, axis=0)
    optimizer.zero_grad()
    (model(x) - 1).square().mean().backward()
    optimizer.step()
    checkpoints.step(step + 1)
checkpoints.finish()
total = model.weight.square().sum().item()
if world.rank == 0:
    print(f"begun {begun}, weights {total!r}", flush=True)
'''


def test_workers_save_there_and_others_go_on(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(SCRIPT)

    def run(folder: str, nodes: int, steps: int) -> str:
        command = [sys.executable, "-P", "-m", "manygrad.launcher.cli", "script.py", "--nodes", str(nodes), "--"]
        done = subprocess.run(
            [*command, f"slow://{tmp_path}/{folder}", str(steps)],
            cwd=tmp_path,
            env={**os.environ, "THREADS": "1"},
            capture_output=True,
            text=True,
            timeout=240,
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    whole = run("whole", 1, 8)
    assert "begun 0" in run("cut", 2, 4)
    step = tmp_path / "cut" / "step-00000004"
    files = json.loads((step / "index.json").read_text())["index"]["files"]
    assert len(files) == 2 and all(f.startswith("../parts-00000004.") for f in files)
    assert run("cut", 1, 8) == whole.replace("begun 0", "begun 4")
