"""A training gives the same bits on any number of workers, over each transport, plain and encrypted, with collectives
beside kernels and without."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from tests.hosts import Hosts, hosts

HERE = Path(__file__).resolve().parent
SCRIPT = str(HERE / "training.py")
LIMIT_S = 300


def trained(command: Sequence[str], folder: Path, transport: str) -> dict[str, object]:
    """What `training.py` has written, launched by `command`."""
    out = folder / "digests.json"
    done = subprocess.run(
        [*command, "--", str(out)],
        env={**os.environ, "TRANSPORT": transport, "THREADS": "1"},
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    found: dict[str, object] = json.loads(out.read_text())
    assert found["beside"] == found["one by one"]
    return found


def launched(nodes: int, folder: Path, transport: str) -> dict[str, object]:
    launcher = [sys.executable, "-P", "-m", "manygrad.launcher.cli", SCRIPT, "--nodes", str(nodes)]
    return trained([*launcher, "--run-dir", str(folder / "run")], folder, transport)


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> object:
    """The digest of one worker."""
    return launched(1, tmp_path_factory.mktemp("alone"), "")["beside"]


@pytest.mark.parametrize("transport", ["shm", "zmq"])
@pytest.mark.parametrize("workers", [2, 4, 8])
def test_on_one_host(workers: int, transport: str, alone: object, tmp_path: Path) -> None:
    found = launched(workers, tmp_path, transport)
    assert found["routes"] == [transport] and found["beside"] == alone


@pytest.fixture(scope="module")
def four() -> Iterator[Hosts]:
    with hosts(4) as h:
        yield h


@pytest.mark.parametrize("options", [[], ["--plain-links"]], ids=["encrypted", "plain"])
@pytest.mark.parametrize("workers", [2, 4, 8])
def test_on_several_hosts(workers: int, options: list[str], alone: object, four: Hosts, tmp_path: Path) -> None:
    """At most four of them, so that eight workers are two on each."""
    ranks = [min(4, workers) * r // workers for r in range(workers)]
    places = ";".join(f"{four.addresses[i]},{four.names[i]}" for i in (0, *ranks))
    command = [*four.prefixes[0], sys.executable, "-P", str(HERE / "on_hosts.py"), places, "--"]
    command += [SCRIPT, "--nodes", str(workers), "--run-dir", str(tmp_path / "run"), *options]
    found = trained(command, tmp_path, "zmq")
    assert found["routes"] == ["zmq"] and found["beside"] == alone
