"""`launch(fn)`: results, errors, and a Ray that is already there."""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
import textwrap
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from manygrad.errors import Infeasible, LaunchError
from manygrad.launcher.api import launch
from tests.own_ray import own_ray

FAKE = "fake_endpoint:Endpoint"


@pytest.fixture(autouse=True)
def _find_fake_endpoint(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(os.path.dirname(__file__))


@pytest.fixture(scope="module")
def ray() -> Iterator[Any]:
    with own_ray(2) as found:
        yield found


def test_results_by_rank(ray: Any, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    factor = 3

    def work(x: int, *, add: int) -> tuple[int, int, bytes]:
        from manygrad import world

        print("working on", world.rank)
        return world.rank, x * factor + add, b"\0" * 300_000

    results = launch(work, 5, add=1, nodes=2, run_dir=str(tmp_path / "run"), endpoint=FAKE)
    assert [r[:2] for r in results] == [(0, 16), (1, 16)] and len(results[1][2]) == 300_000
    assert "0:0: working on 0" in capfd.readouterr().out
    assert ray.is_initialized()


def test_error(ray: Any, tmp_path: Path) -> None:
    def work() -> None:
        import time

        from manygrad import world

        if world.rank == 1:
            raise KeyError("weights")
        time.sleep(30)

    with pytest.raises(LaunchError) as caught:
        launch(work, nodes=2, run_dir=str(tmp_path / "run"), endpoint=FAKE)
    e = pickle.loads(pickle.dumps(caught.value))
    assert (
        (e.rank, e.exit_code) == (1, 1)
        and "rank 1 failed: KeyError: 'weights'" in e.report
        and 'raise KeyError("weights")' in e.report
    )
    assert e.details["root_cause"]["rank"] == 1


def test_a_restart_in_a_ray_that_was_there(ray: Any, tmp_path: Path) -> None:
    """New agents in new places; the old ones are given back."""

    def work() -> int:
        from manygrad import world

        if world.rank == 1 and world.epoch == 0:
            raise KeyError("weights")
        return 10 * world.epoch + world.rank

    found = launch(work, nodes=2, max_restarts=1, run_dir=str(tmp_path / "run"), endpoint=FAKE)
    assert found == [10, 11]
    until = time.monotonic() + 20
    while (free := ray.available_resources().get("CPU")) != 2 and time.monotonic() < until:
        time.sleep(0.1)
    assert free == 2 and ray.is_initialized()


def test_a_ray_started_later_is_not_changed(tmp_path: Path) -> None:
    """What the launcher asks of its own Ray (loopback alone) stayed in the process, so that a head started there could
    not be found by others."""
    text = """
        import sys
        from manygrad.launcher.api import launch
        launch(print, nodes=2, run_dir=sys.argv[1], endpoint="fake_endpoint:Endpoint")
        from ray._private import ray_constants
        print(ray_constants.ENABLE_RAY_CLUSTER)
    """
    env = {k: v for k, v in os.environ.items() if not k.startswith("RAY_")}
    env["PYTHONPATH"] = os.pathsep.join([os.path.dirname(__file__), *filter(None, [os.environ.get("PYTHONPATH")])])
    command = [sys.executable, "-c", textwrap.dedent(text), str(tmp_path / "run")]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=120)
    assert done.stdout.splitlines()[-1:] == ["True"], done


def test_a_head_on_loopback_alone_is_found_and_gives_each_worker_its_gpu(tmp_path: Path) -> None:
    """Ray takes the host's address for 127.0.0.1, where such a head does not listen, and asked there for ever."""
    text = """
        import os, sys
        os.environ["RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"] = "0"
        from ray.cluster_utils import Cluster
        small = {"object_store_memory": 80 << 20, "include_dashboard": False, "num_cpus": 2, "num_gpus": 2}
        cluster = Cluster(initialize_head=True, head_node_args=small)
        print(cluster.address, flush=True)
        sys.stdin.read()
        cluster.shutdown()
    """
    env = {k: v for k, v in os.environ.items() if not k.startswith("RAY_")}
    head = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(text)],
        env=env,
        text=True,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    assert head.stdout is not None
    try:
        address = head.stdout.readline().strip()
        assert address.startswith("127.0.0.1:")
        script = tmp_path / "script.py"
        script.write_text("import os; print('GPUs', os.environ['CUDA_VISIBLE_DEVICES'])")
        command = [sys.executable, "-P", "-m", "manygrad.launcher.cli", str(script), "--nodes", "2"]
        options = ["--address", address, "--run-dir", str(tmp_path / "run"), "--device", "CUDA", "--log-ranks", "all"]
        done = subprocess.run([*command, *options], env=env, capture_output=True, text=True, timeout=120)
        assert done.returncode == 0, done
        assert sorted(line[-1] for line in done.stdout.splitlines() if "GPUs" in line) == ["0", "1"], done
    finally:
        head.communicate("", timeout=60)
    options = ["--address", address, "--run-dir", str(tmp_path / "later")]
    done = subprocess.run([*command, *options], env=env, capture_output=True, text=True, timeout=120)
    assert done.returncode == 2 and "nothing answers there" in done.stderr, done


def test_more_gpus_than_there_are(ray: Any, tmp_path: Path) -> None:
    with pytest.raises(Infeasible, match=r"2 nodes with 2 GPUs each need 4; the Ray cluster has 0: .*--num-gpus"):
        launch(print, nodes=2, devices_per_node=2, device="CUDA", run_dir=str(tmp_path / "run"))


def test_more_nodes_than_fit(ray: Any, tmp_path: Path) -> None:
    with pytest.raises(Infeasible, match=r"3 nodes were asked for.* 2 CPUs in all"):
        launch(print, nodes=3, run_dir=str(tmp_path / "run"))


@pytest.mark.parametrize(
    "arguments",
    [
        {"nodes": 0},
        {"nodes": True},
        {"nodes": 2, "devices_per_node": 0},
        {"timeout": -1},
        {"max_restarts": -1},
        {"min_nodes": 2},
    ],
)
def test_bad_arguments(arguments: dict[str, Any]) -> None:
    with pytest.raises(ValueError):
        launch(print, **arguments)
    with pytest.raises(TypeError, match="cannot be pickled"):
        launch(print, __import__("threading").Lock())
