"""`launcher doctor`: what it finds here, and what it says where something is missing or broken."""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from manygrad.launcher import doctor
from manygrad.launcher.doctor import ABSENT, OK, WRONG, Finding
from tests.cuda.install import emulated

ROOT = Path(__file__).parents[2]


def run(*options: str, **env: str) -> tuple[int, list[dict[str, Any]]]:
    command = [sys.executable, "-P", "-m", "manygrad.launcher.cli", "doctor", "--json", *options]
    done = subprocess.run(command, env={**os.environ, **env}, capture_output=True, text=True, timeout=120, check=False)
    assert done.stdout, done
    return done.returncode, json.loads(done.stdout)


def named(found: list[dict[str, Any]], name: str) -> list[dict[str, Any]]:
    return [f for f in found if f["name"].startswith(name)]


def test_this_host() -> None:
    code, found = run("--quick")
    assert code == 0 and not [f for f in found if f["state"] == WRONG], found
    assert [f["name"] for f in found][:2] == ["manygrad", "python"]
    for name in ("numpy", "ray", "processor", "memory", "open files", "cache", "CPU:0"):
        assert named(found, name)[0]["state"] == OK, name


def test_rates_are_measured() -> None:
    (one,) = doctor.device("CPU", False)
    copied, multiplied = (float(w) for w in one.text.replace(";", "").split() if w.replace(".", "").isdigit())
    assert 0.1 < copied < 10_000 and 0.1 < multiplied < 1_000_000, one


@emulated
def test_a_kind_that_has_to_be_here() -> None:
    code, found = run("--quick", "--device", "cuda")
    assert code == 69 and "pip install cuda-bindings" in named(found, "CUDA")[0]["text"], found
    shim = os.pathsep.join([str(ROOT), str(ROOT / "tests" / "cuda" / "shim")])
    code, found = run("--quick", "--device", "CUDA", PYTHONPATH=shim)
    assert code == 0 and [f["name"] for f in named(found, "CUDA")] == ["CUDA:0", "CUDA:1"], found
    assert "emulated GPU, compute capability 9.0" in named(found, "CUDA")[0]["text"]


def test_a_cache_that_cannot_be_written_and_a_cluster_that_is_gone(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    code, found = run("--quick", CACHE_DIR=str(tmp_path / "file" / "folder"), RAY_ADDRESS="127.0.0.1:1")
    assert code == 1, found
    assert [f["name"] for f in found if f["state"] == WRONG] == ["cache", "cluster"], found


def test_few_open_files(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda which: (64, 4096))
    (one,) = (f for f in doctor.host() if f.name == "open files")
    assert one == Finding(WRONG, "open files", "at most 64: `ulimit -n 4096` before a run on workers")


def test_a_package_that_is_not_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "PACKAGES", ("no-such-package",))
    *_, last = doctor.packages()
    assert last == Finding(WRONG, "no-such-package", "is not installed: pip install no-such-package")


def test_a_driver_that_is_there_and_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(kind: str) -> Any:
        raise OSError("the driver is of another version")
        yield

    monkeypatch.setattr(doctor, "described", fail)
    assert list(doctor.device("CUDA", True)) == [Finding(WRONG, "CUDA", "OSError: the driver is of another version")]


def test_states_are_three() -> None:
    assert len({OK, ABSENT, WRONG}) == 3 and str(Finding(OK, "x", "y")).startswith("ok  x  ")
