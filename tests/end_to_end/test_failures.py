"""A failure is everybody's at once: root cause first, a named error on every rank, nothing left behind."""

from __future__ import annotations

import glob
import json
import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import cloudpickle
import numpy as np
import psutil
import pytest

from manygrad import Tensor, TinyJit, broadcast_, launch, nn, world
from manygrad.errors import LaunchError
from manygrad.launcher.janitor import marked_processes

cloudpickle.register_pickle_by_value(sys.modules[__name__])  # workers cannot import a test

TRAIN = """
import numpy as np
from manygrad import Tensor, TinyJit, nn, world
from manygrad.nn.optim import SGD
from manygrad.nn.state import get_parameters

model = nn.Linear(64, 8)
for p in get_parameters(model):
    p.shard_(world.devices)
optimizer = SGD(get_parameters(model), lr=1e-3)

@TinyJit
def step(x):
    optimizer.zero_grad()
    loss = model(x).square().mean()
    loss.backward()
    optimizer.step()
    return loss

i = 0
with Tensor.train():
    while True:
        step(Tensor(np.full((12, 64), i % 7, np.float32)).shard(world.devices, axis=0)).item()
        i += 1
        if i == 20:
            print("training", flush=True)
"""


def left_behind(job: str) -> list[str]:
    folder = f"/tmp/mg-{job}"
    found = [f"process {p}" for p in marked_processes(job, folder)] + [f for f in [folder] if os.path.exists(f)]
    return found + glob.glob(f"/dev/shm/*{job}*")


def start_training(command: Callable[..., Any], tmp_path: Path, nodes: int) -> tuple[Any, list[psutil.Process], str]:
    """A run in the middle of its training, its workers by rank, its job."""
    (tmp_path / "train.py").write_text(TRAIN)
    run = command("train.py", "--nodes", str(nodes))
    for rank in range(nodes):
        run.wait_for_log(rank, "training")
    children = psutil.Process(run.process.pid).children(recursive=True)
    workers = [p for p in children if "manygrad.launcher.worker" in p.cmdline()]
    assert len(workers) == nodes
    return run, sorted(workers, key=lambda p: int(p.environ()["RANK"])), workers[0].environ()["MANYGRAD_JOB"]


def test_a_worker_is_killed_in_the_middle_of_a_step(command: Callable[..., Any], tmp_path: Path) -> None:
    shared = set(os.listdir("/dev/shm"))
    run, workers, job = start_training(command, tmp_path, 3)
    began = time.monotonic()
    workers[1].kill()
    run.wait()
    assert time.monotonic() - began < 5
    assert run.code == 128 + signal.SIGKILL
    assert "rank 1 failed: killed by SIGKILL" in run.err and f"pid {workers[1].pid}" in run.err, run.err
    assert "Consequences:" in run.err and any(
        e in run.err for e in ("PeerLost", "CollectiveAborted", "LaunchAborted")
    ), run.err
    for rank in (0, 2):
        log = (run.run_dir / f"rank{rank}.log").read_text()
        assert "PeerLost" in log or "Aborted" in log, log
    assert left_behind(job) == [] and set(os.listdir("/dev/shm")) <= shared
    assert not any(p.is_running() and p.status() != psutil.STATUS_ZOMBIE for p in workers)


def test_a_rank_that_does_not_come_is_waited_for_once(command: Callable[..., Any], tmp_path: Path) -> None:
    """The others do not try the plan again: to go on without the agreement of all would look like another program."""
    wait = "if world.rank == 1: import time; time.sleep(60)"
    told = """
except BaseException:
    from manygrad.runtime.current import current
    print("entered", current().communication.entered, flush=True)
    raise
"""
    body = TRAIN.replace("i = 0\n", f"i = 0\n{wait}\ntry:\n").partition("try:\n")
    loop = "".join(f"  {line}\n" for line in body[2].splitlines())
    (tmp_path / "train.py").write_text(body[0] + "try:\n" + loop + told.lstrip())
    run = command("train.py", "--nodes", "2", COLLECTIVE_TIMEOUT_S="5").wait()
    assert "rank 1 failed: it did not come to plan 1 " in run.err and "PlanMismatch" not in run.err, run.err
    report = json.loads((run.run_dir / "report.json").read_text())
    waited = next(x for x in report["ranks"][0]["story"] if "Failed" in x)
    began = next(x for x in report["ranks"][0]["story"] if "Planned" in x)
    assert float(waited.split()[0]) - float(began.split()[0]) < 9, report["ranks"][0]["story"]
    assert "entered (0, '')" in run.out, run.out


def test_ctrl_c_in_the_middle_of_training(command: Callable[..., Any], tmp_path: Path) -> None:
    run, workers, job = start_training(command, tmp_path, 2)
    began = time.monotonic()
    os.killpg(run.process.pid, signal.SIGINT)
    run.wait()
    assert time.monotonic() - began < 5 and run.code == 130
    assert "interrupted by Ctrl-C" in run.err, run.err
    assert left_behind(job) == [] and not any(p.is_running() for p in workers)


def diverge(how: str) -> None:
    """Twelve equal steps, ten of them replays; then rank 1 does something else."""
    w = Tensor.ones(64).shard(world.devices).contiguous().realize()

    @TinyJit
    def step(x: Tensor) -> Tensor:
        return (x * w).sum(0)  # the step

    def batch() -> Tensor:
        return Tensor(np.ones((8, 64), np.float32)).shard(world.devices, axis=0)

    for _ in range(12):
        assert step(batch()).numpy()[0] == 8
    if world.rank == 1:
        if how == "an exception":
            raise ValueError("bad batch")  # the exception
        if how == "another shape":
            Tensor.ones(8, 5).shard(world.devices, axis=0).sum().item()  # the other shape
        if how == "the end":
            return
        if how == "a replay while the other plans":
            step(batch()).numpy()
    elif how == "a replay while the other plans":
        Tensor.ones(8, 5).shard(world.devices, axis=0).sum().item()  # rank 0's plan
    elif how == "another shape":
        Tensor.ones(8, 7).shard(world.devices, axis=0).sum(0).numpy()  # rank 0's shape
    else:
        step(batch()).numpy()


def lines(*marks: str) -> list[str]:
    """`test_failures.py:NN` of the lines with these comments."""
    text = Path(__file__).read_text().splitlines()
    return [f"test_failures.py:{1 + next(i for i, line in enumerate(text) if line.endswith('# ' + m))}" for m in marks]


def differ(how: str) -> None:
    """One rank's training differs, in a way that changes no size of a message."""
    odd = world.rank == 1
    if how == "a seed" and odd:
        Tensor.manual_seed(1)
    model = nn.Linear(6, 3)
    for p in nn.state.get_parameters(model):
        p.shard_(world.devices)
    if how == "weights":
        model.bias.assign(model.bias + (1e-7 if odd else 0.0)).realize()
    if how == "a cure":
        model.bias.assign(model.bias + world.rank).realize()
        broadcast_(model.bias)
    optimizer = nn.optim.SGD(nn.state.get_parameters(model), lr=2e-3 if how == "a learning rate" and odd else 1e-3)
    rows = np.full((12, 6), 2.0 if how == "data" and odd else 1.0, np.float32)
    for _ in range(3):
        optimizer.zero_grad()
        x = Tensor(rows).shard(world.devices, axis=0)
        loss = (
            (
                nn.functional.dropout(model(x), 0.5, training=not (how == "a mode" and odd))
                * (0.2 if how == "a constant" and odd else 0.1)
            )
            .square()
            .mean()
        )
        loss.backward()
        optimizer.step()
        if world.rank == 0:
            print(f"loss {loss.item():.6f}")  # a value on every device: reading it on one rank is no communication


@pytest.mark.parametrize(
    "how, words",
    [
        ("a seed", ["ranks 0 and 1 hold different values", "uint32 (1,) of test_failures.py"]),
        ("weights", ["ranks 0 and 1 hold different values", "float32 (21,) of test_failures.py", "broadcast_"]),
        ("a learning rate", ["hold different values", "float64 (1,) of test_failures.py"]),
        ("data", ["hold different values", "float32 (12, 6) of test_failures.py"]),
        ("a mode", ["The first difference", "a mode (eval, no_grad) set on one rank"]),
        ("a constant", ["The first difference", "CONST float32 () 0.1", "CONST float32 () 0.2"]),
    ],
)
def test_ranks_that_differ_are_told(ray: Any, how: str, words: list[str], tmp_path: Path) -> None:
    with pytest.raises(LaunchError) as caught:
        launch(differ, how, nodes=2, run_dir=str(tmp_path / "run"), timeout=40)
    for w in [*words, "PlanMismatch", "rank 0: ", "rank 1: "]:
        assert w in caught.value.report, (w, caught.value.report)
    assert "at ?" not in caught.value.report and "threading.py" not in caught.value.report


def in_another_order(how: str) -> None:
    """Two plans of equal sizes, in another order on rank 1."""
    wrap = TinyJit if how == "replayed" else lambda f: f
    x = Tensor(np.arange(8, dtype=np.float32)).shard(world.devices, axis=0).realize()
    twice = wrap(lambda x: (x * 2).sum().realize())  # two
    seven = wrap(lambda x: (x * 7).sum().realize())  # seven
    for _ in range(3):
        assert (twice(x).item(), seven(x).item()) == (56, 196)
    for f in (twice, seven) if world.rank == 0 else (seven, twice):
        f(x).item()


@pytest.mark.parametrize("how", ["replayed", "plain"])
def test_equal_collectives_in_another_order(ray: Any, how: str, tmp_path: Path) -> None:
    with pytest.raises(LaunchError) as caught:
        launch(in_another_order, how, nodes=2, run_dir=str(tmp_path / "run"), timeout=40)
    for w in ["PlanMismatch", *lines("two", "seven")]:
        assert w in caught.value.report, (w, caught.value.report)


def reads_on_one_rank() -> list[float]:
    """What lies whole on each device may be read on one rank alone, whatever assignments wait."""
    model = nn.Linear(4, 2)
    for p in nn.state.get_parameters(model):
        p.shard_(world.devices)
    optimizer = nn.optim.SGD(nn.state.get_parameters(model), lr=0.1)
    schedule = nn.optim.lr_scheduler.StepLR(optimizer, 1, 0.9)
    count, losses = Tensor(np.zeros(3, np.float32)), []
    for i in range(4):
        optimizer.zero_grad()
        loss = model(Tensor(np.ones((5, 4), np.float32)).shard(world.devices, 0)).square().mean()
        loss.backward()
        optimizer.step()
        schedule.step()
        count += 1
        if i % 2 == world.rank:
            print(loss.item(), count.numpy(), optimizer.lr.numpy(), model.bias.numpy(), model.weight.sum().item())
        losses.append(loss.item())
    return losses


def test_one_rank_reads_what_it_holds(ray: Any, tmp_path: Path) -> None:
    first, second = launch(reads_on_one_rank, nodes=2, run_dir=str(tmp_path / "run"), timeout=40)
    assert first == second and first[-1] < first[0]


@pytest.mark.parametrize("how", ["nothing", "a cure"])
def test_ranks_that_do_not_differ(ray: Any, how: str, tmp_path: Path) -> None:
    launch(differ, how, nodes=2, run_dir=str(tmp_path / "run"), timeout=40)


@pytest.mark.parametrize(
    "how, words, marks",
    [
        ("an exception", ["rank 1 failed: ValueError: bad batch"], ["the exception"]),
        ("another shape", ["the ranks run different programs: plan 2 differs"], ["rank 0's shape", "the other shape"]),
        ("the end", ["rank 0 is in collective 13, rank 1 came to its end after 12"], ["the step"]),
        (
            "a replay while the other plans",
            ["rank 1 is in collective 13, rank 0 came to a plan after 12"],
            ["the step", "rank 0's plan"],
        ),
    ],
)
def test_one_rank_does_something_else(ray: Any, how: str, words: list[str], marks: list[str], tmp_path: Path) -> None:
    with pytest.raises(LaunchError) as caught:
        launch(diverge, how, nodes=2, run_dir=str(tmp_path / "run"), timeout=40)
    error = caught.value
    assert error.details["duration_s"] < 15, error.details  # most of it is starting
    assert error.exit_code == 1 and error.rank in (0, 1)
    for w in [*words, *lines(*marks), "Consequences:"]:
        assert w in error.report, (w, error.report)
    assert not left_behind(error.details["job"])
