"""Runs that fail and go on: every kind of failure, in a new epoch each, with the numbers of an undisturbed run."""

from __future__ import annotations

import os
import re
import signal
import time
from collections.abc import Callable, Iterator
from typing import Any

import psutil
import pytest

Launcher = Callable[..., Any]
Left = Callable[[str], list[str]]

# adds step + 1 in each step, and meets FAULTS[epoch] in step 3 + epoch; what an epoch detaches is gone in the next one
TRAIN = """
import os, signal, subprocess, sys, time
from pathlib import Path
import numpy as np
from manygrad import Tensor, world
from manygrad.checkpoint import Checkpointer

def stuck():
    while True:
        time.sleep(1)

FAULTS = [{faults}]
w = Tensor(np.zeros(8, np.float32)).shard(world.devices).contiguous().realize()
checkpoints = Checkpointer("checkpoints", {{"w": w}}, every=1, keep=2)
begun = checkpoints.resume()
print("epoch", world.epoch, "begins at", begun, "on", world.size, flush=True)
left = Path(f"left.{{world.rank}}")
left.touch()
there = [p for p in left.read_text().split() if os.path.exists(f"/proc/{{p}}/exe")]  # (a zombie has none)
if there:
    print("left by earlier attempts:", there, file=sys.stderr, flush=True)
with left.open("a") as f:
    print(subprocess.Popen(["sleep", "1000"], start_new_session=True).pid, file=f)
for i in range(begun, {steps}):
    x = Tensor(np.full((2 * len(world.devices), 8), i + 1, np.float32)).shard(world.devices, axis=0)
    w.assign(w + x.mean(0)).realize()
    time.sleep({pause})
    if world.epoch < len(FAULTS) and i == 3 + world.epoch and world.rank == world.epoch % 2:
        FAULTS[world.epoch]()
    checkpoints.step(i + 1)
print("sum", w.numpy()[0], flush=True)
"""


def script(*faults: str, steps: int = 12, pause: float = 0.0) -> str:
    return TRAIN.format(faults=", ".join(f"lambda: {f}" for f in faults), steps=steps, pause=pause)


FAULTS = {
    "[].index(0)": "rank 0 failed: ValueError: ",
    "os.kill(os.getpid(), 9)": "rank 1 failed: killed by SIGKILL",
    "os._exit(3)": "rank 0 failed: the process ended with code 3",
    "stuck()": "rank 1 failed: it did not ",
    "os.kill(os.getpid(), signal.SIGSTOP)": "its process is stopped (SIGSTOP)",
    "os.kill(os.getppid(), 9)": "rank 1 failed: its supervisor is gone",
    "np.empty(1 << 60)": "rank 0 failed: ",
}


def test_every_kind_of_failure(launcher: Launcher, left_behind: Left) -> None:
    run = launcher(
        script(*FAULTS), "--nodes", "2", "--max-restarts", "9", real_endpoint=True, COLLECTIVE_TIMEOUT_S="3"
    ).wait()
    assert run.code == 0, run.err
    assert "left by earlier attempts" not in run.err, run.err
    assert run.out.count("sum") == 1 and f"sum {sum(range(1, 13))}.0" in run.out
    # each begins where the one before had saved: nothing is done twice but the step that failed (a process that was
    # stopped, and is ended by SIGTERM and SIGCONT, may save that one, too)
    begun = [(int(a), int(b)) for a, b in re.findall(r"epoch (\d+) begins at (\d+) on 2", run.out)]
    assert [e for e, _ in begun] == list(range(len(FAULTS) + 1)) and begun[0] == (0, 0)
    assert all(at in (2 + e, 3 + e) for e, at in begun[1:]), begun
    for cause, attempt in zip(FAULTS.values(), run.report["attempts"], strict=False):
        assert cause in run.err, (cause, run.err)
        assert attempt["root_cause"] is not None and attempt["saved"] in (
            3 + attempt["epoch"],
            4 + attempt["epoch"],
            None,
        )
    assert len(run.report["attempts"]) == len(FAULTS) + 1 and run.report["root_cause"] is None
    assert f"launcher: {len(FAULTS) + 1} attempts:" in run.err
    assert "launcher: attempt 2 begins, on 2 nodes" in (run.run_dir / "rank1.log").read_text()
    assert left_behind(run.report["job"]) == [] and run.still_there() == []


FAILS = """
import os, time
from manygrad import world
if world.rank == 1:
    {body}
while True:
    time.sleep(0.1)
"""


def test_restarts_that_are_exhausted_have_a_code_of_their_own(launcher: Launcher, left_behind: Left) -> None:
    body = "os._exit(3) if world.epoch else os.kill(os.getpid(), 9)"
    run = launcher(FAILS.format(body=body), "--nodes", "2", "--max-restarts", "1").wait()
    assert run.code == 75, run.err
    for words in (
        "attempt 1: 2 nodes, ",
        ": rank 1 failed: killed by SIGKILL",
        ": rank 1 failed: the process ended with code 3",
        "launcher: no restarts are left (--max-restarts 1)",
    ):
        assert words in run.err, (words, run.err)
    assert run.err.endswith("launcher: exit code 75\n") and run.report["exit_code"] == 75
    assert left_behind(run.report["job"]) == []


def test_what_fails_in_the_same_way_is_not_retried(launcher: Launcher, left_behind: Left) -> None:
    run = launcher(FAILS.format(body="raise ValueError(world.epoch)"), "--nodes", "2", "--max-restarts", "5").wait()
    assert run.code == 1 and len(run.report["attempts"]) == 2, run.err
    assert "the same fault has come 2 times without progress, before the first step, so it is not retried" in run.err
    assert left_behind(run.report["job"]) == []


def test_ctrl_c_is_no_failure(launcher: Launcher, left_behind: Left) -> None:
    run = launcher(FAILS.format(body="print('here', flush=True)"), "--nodes", "2", "--max-restarts", "5")
    run.wait_for_log(1, "here")
    os.kill(run.process.pid, signal.SIGINT)
    run.wait()
    assert run.code == 130 and len(run.report["attempts"]) == 1, run.err
    assert left_behind(run.report["job"]) == []


def worker(run: Any, rank: int) -> psutil.Process:
    """The process of a rank in the attempt that runs now."""
    for p in psutil.process_iter():
        try:
            here = p.cwd() == str(run.run_dir.parent)
            if here and "manygrad.launcher.worker" in p.cmdline() and p.environ()["RANK"] == str(rank):
                return p
        except psutil.Error:
            pass
    raise AssertionError(f"no rank {rank}")


def wait_until_all_can_save(run: Any) -> None:
    for rank in (0, 1):
        run.wait_for_log(rank, "begins at 0")
    time.sleep(2.0)  # (a heartbeat tells)


def test_sigterm_saves_first_and_the_next_run_goes_on(launcher: Launcher, left_behind: Left) -> None:
    text = script(steps=120, pause=0.05).replace("every=1,", "every=1000,")
    run = launcher(text, "--nodes", "2", "--grace", "20", "--max-restarts", "3", real_endpoint=True)
    wait_until_all_can_save(run)
    os.kill(run.process.pid, signal.SIGTERM)
    run.wait()
    assert run.code == 143 and len(run.report["attempts"]) == 1, run.err
    (step,) = re.findall(r"the run was preempted \(SIGTERM\): step (\d+) is saved in ", run.err)
    assert 0 < int(step) < 120 and "exit code 143" in run.err
    assert left_behind(run.report["job"]) == []
    run = launcher(text, "--nodes", "2", real_endpoint=True).wait()
    assert f"begins at {step} on 2" in run.out and f"sum {sum(range(1, 121))}.0" in run.out, run.err


def test_a_worker_that_gets_sigterm_is_replaced(launcher: Launcher, left_behind: Left) -> None:
    """It does not count as a failure."""
    text = script(steps=120, pause=0.05).replace("every=1,", "every=1000,")
    run = launcher(text, "--nodes", "2", "--grace", "20", "--max-restarts", "1", real_endpoint=True)
    wait_until_all_can_save(run)
    worker(run, 1).terminate()
    run.wait()
    assert run.code == 0, run.err
    (step,) = re.findall(r"rank 1 was preempted \(SIGTERM\): step (\d+) is saved", run.err.partition("attempts:")[0])
    assert f"epoch 1 begins at {step} on 2" in run.out and f"sum {sum(range(1, 121))}.0" in run.out
    assert "another attempt begins, and does not count" in run.err
    assert left_behind(run.report["job"]) == []


AHEAD = """
    if world.epoch == 0 and i == 9 and world.rank == 0:
        time.sleep(1.0)
    checkpoints.step(i + 1)
    if world.epoch == 0 and i == 9 and world.rank == 1:
        os.kill(os.getpid(), signal.SIGTERM)
"""


def test_ranks_that_hear_of_it_on_two_sides_of_a_step_save_at_one(launcher: Launcher, left_behind: Left) -> None:
    """Rank 1 hears of it in step 11, where it waits for rank 0, which hears of it at the end of step 10: where that
    one waited for the other's answer both waited until the grace was over."""
    text = script(steps=40, pause=0.05).replace("every=1,", "every=1000,")
    text = text.replace("    checkpoints.step(i + 1)\n", AHEAD[1:])
    run = launcher(text, "--nodes", "2", "--grace", "20", "--max-restarts", "1", real_endpoint=True).wait()
    assert run.code == 0, run.err
    # (11, but on a machine so busy that the order takes longer than a second)
    (step,) = re.findall(r"rank 1 was preempted \(SIGTERM\): step (\d+) is saved", run.err.partition("attempts:")[0])
    assert f"epoch 1 begins at {step} on 2" in run.out and f"sum {sum(range(1, 41))}.0" in run.out
    assert left_behind(run.report["job"]) == []


def test_what_cannot_be_saved_in_time_is_not(launcher: Launcher, left_behind: Left) -> None:
    """Steps of five seconds, and two of grace."""
    run = launcher(script(steps=40, pause=5.0), "--nodes", "2", real_endpoint=True)
    wait_until_all_can_save(run)
    began = time.monotonic()
    os.kill(run.process.pid, signal.SIGTERM)
    run.wait()
    assert run.code == 143 and "no checkpoint was saved within --grace 2 s" in run.err, run.err
    assert time.monotonic() - began < 12
    assert left_behind(run.report["job"]) == []


SLOW_START_S = 240  # a Ray cluster of four nodes on a busy machine


@pytest.fixture
def nodes() -> Iterator[Any]:
    """A Ray cluster of three nodes of one CPU each, beside a head that has none."""
    with pytest.MonkeyPatch.context() as patch:
        for name in ("RAY_ADDRESS", "RAY_AUTH_MODE", "RAY_AUTH_TOKEN_PATH"):
            patch.delenv(name, raising=False)
        from ray.cluster_utils import Cluster

        small = {"object_store_memory": 80 << 20, "include_dashboard": False}
        cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 0, **small})
        cluster.small = small
        cluster.others = [cluster.add_node(num_cpus=1, object_store_memory=80 << 20) for _ in range(3)]
        cluster.wait_for_nodes()
        try:
            yield cluster
        finally:
            cluster.shutdown()


def test_nodes_that_die_and_come_back(launcher: Launcher, nodes: Any) -> None:
    """Three, then two, then three again, from the next checkpoint on. The processes of a node that is removed here are
    killed, as a host's would be."""
    text = script(steps=400, pause=0.1)
    options = ("--nodes", "3", "--min-nodes", "2", "--max-restarts", "4", "--address", nodes.address)
    run = launcher(text, *options, "--log-ranks", "all", real_endpoint=True)
    try:
        for epoch, size in enumerate((3, 2, 3)):
            found = run.wait_for_log(0, rf"epoch {epoch} begins at \d+ on (\d+)\n", SLOW_START_S)
            assert int(found[1]) == size, found
            if epoch == 0:
                nodes.remove_node(nodes.others.pop(), allow_graceful=False)
                nodes.wait_for_nodes()  # (until the cluster knows it: else the third node is taken again)
            elif epoch == 1:
                nodes.others.append(nodes.add_node(num_cpus=1, object_store_memory=80 << 20))
                nodes.wait_for_nodes()
            time.sleep(2)
            if epoch == 0:
                worker(run, 1).kill()
        os.kill(run.process.pid, signal.SIGTERM)
    finally:
        run.wait(SLOW_START_S)
    assert run.code == 143 and "is saved in" in run.err, run.err
    found = [(a["nodes"], (a["root_cause"] or {}).get("kind")) for a in run.report["attempts"]]
    assert found == [(3, "signal"), (2, "preempted"), (3, "preempted")], run.err
    assert "the run ends to go on on 3 nodes: step " in run.err, run.err
    assert "there are more nodes; another attempt begins, and does not count" in run.err
    begun = [int(at) for at in re.findall(r"epoch \d begins at (\d+) on", (run.run_dir / "rank0.log").read_text())]
    assert begun[0] == 0 < begun[1] < begun[2], begun


def test_the_time_out_is_that_of_all_attempts(launcher: Launcher, left_behind: Left) -> None:
    """The second attempt would take as long as it likes."""
    body = "if world.epoch == 0: time.sleep(2); raise ValueError()"
    run = launcher(FAILS.format(body=body), "--nodes", "2", "--max-restarts", "5", "--timeout", "8").wait()
    assert run.code == 124 and "the run took longer than its time-out of 8 s" in run.err, run.err
    assert [a["root_cause"]["kind"] for a in run.report["attempts"]] == ["exception", "timeout"]
    assert left_behind(run.report["job"]) == []


def test_a_function_is_called_anew(launcher: Launcher) -> None:
    """In a Ray of the launcher's own; results are of the attempt that ended well."""
    run = launcher("""
        import manygrad

        def work():
            import os
            from manygrad import world
            if world.epoch < 2 and world.rank == world.epoch:
                raise ValueError("again") if world.epoch else SystemExit(3)
            return 10 * world.epoch + world.rank

        print(manygrad.launch(work, nodes=2, max_restarts=2, run_dir="run"))
    """).wait()
    assert run.code == 0 and run.out == "[20, 21]\n", (run.out, run.err)
