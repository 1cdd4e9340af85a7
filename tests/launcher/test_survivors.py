"""Workers that survive a failure run the script again in the same process: which do, and what is left of before."""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from typing import Any

import pytest

IS_ROOT = os.getuid() == 0
Launcher = Callable[..., Any]
Left = Callable[[str], list[str]]

# adds step + 1 in each step, and ends in epoch 0 by FAULT; tells its process
TRAIN = """
import os, signal, sys, threading, time
import numpy as np
from manygrad import Tensor, world
from manygrad.checkpoint import Checkpointer

w = Tensor(np.zeros(8, np.float32)).shard(world.devices).contiguous().realize()
checkpoints = Checkpointer("checkpoints", {{"w": w}}, every=1, keep=2, asynchronous={asynchronous})
begun = checkpoints.resume()
print("epoch", world.epoch, "rank", world.rank, "process", os.getpid(), "begins at", begun, flush=True)
for i in range(begun, 8):
    x = Tensor(np.full((2 * len(world.devices), 8), i + 1, np.float32)).shard(world.devices, axis=0)
    w.assign(w + x.mean(0)).realize()
    if world.epoch == 0 and i == 4:
        {fault}
    checkpoints.step(i + 1)
print("sum", w.numpy()[0], flush=True)
"""
SUM = f"sum {sum(range(1, 9))}.0"
BEGUN = re.compile(r"epoch (\d+) rank (\d+) process (\d+) begins at (\d+)")


def processes(out: str) -> list[dict[int, int]]:
    """The processes of each epoch, by rank."""
    found: list[dict[int, int]] = []
    for epoch, rank, pid, _ in BEGUN.findall(out):
        while len(found) <= int(epoch):
            found.append({})
        found[int(epoch)][int(rank)] = int(pid)
    return found


def ends(run: Any, size: int) -> bool:
    """Whether each rank has come to its sum."""
    return all(SUM in (run.run_dir / f"rank{r}.log").read_text() for r in range(size))


# the fault, the ranks whose processes go on, and what the others say (None: they may, or end before)
FAULTS: dict[str, tuple[str, set[int], str | None]] = {
    "killed": ("if world.rank == 1: os.kill(os.getpid(), 9)", {0, 2}, ""),
    "raised": ("if world.rank == 1: raise ValueError", {0, 1, 2}, ""),
    "raised by all": ("raise ValueError", {0, 1, 2}, ""),
    "sys.exit": ("if world.rank == 1: sys.exit(3)", {0, 1, 2}, ""),
    "out of memory": ("if world.rank == 1: raise MemoryError", {0, 2}, "it has met a MemoryError"),
    "stuck": ("while world.rank == 1: time.sleep(1)", {0, 1, 2}, ""),
    "stopped": ("if world.rank == 1: os.kill(os.getpid(), signal.SIGSTOP)", {0, 2}, None),
    "its supervisor was killed": ("if world.rank == 1: os.kill(os.getppid(), 9); time.sleep(60)", {0, 2}, ""),
    "a thread runs on": (
        "if world.rank == 1: threading.Thread(target=time.sleep, args=(60,), name='mine', daemon=True).start(); 1 / 0",
        {0, 2},
        "its threads still run: mine",
    ),
    "it is nicer": (
        "if world.rank == 1: os.nice(3); 1 / 0",
        {0, 1, 2} if IS_ROOT else {0, 2},
        "" if IS_ROOT else "what the script has set cannot be what it was: niceness",
    ),
    "a file is open": (
        "if world.rank == 1: os.open('lock', os.O_CREAT); 1 / 0",
        {0, 2},
        "its files are still open: ",
    ),
}


@pytest.mark.parametrize("name", FAULTS)
def test_who_survives_goes_on_in_its_process(name: str, launcher: Launcher, left_behind: Left) -> None:
    fault, survivors, why = FAULTS[name]
    text = TRAIN.format(fault=fault, asynchronous=False)
    options = ("--nodes", "3", "--max-restarts", "1", "--log-ranks", "all")
    run = launcher(text, *options, real_endpoint=True, COLLECTIVE_TIMEOUT_S="4").wait()
    assert run.code == 0 and ends(run, 3), (run.out, run.err)
    first, second = processes(run.out)
    assert {r for r in first if first[r] == second[r]} == survivors, run.err
    assert [a["kept"] for a in run.report["attempts"]] == [0, len(survivors)]
    assert {at for *_, at in BEGUN.findall(run.out)} == {"0", "4"}
    if why is not None:
        told = re.findall("a new process takes its place in another attempt: (.*)", run.out + run.err)
        assert len(told) == bool(why) and all(t.startswith(why) for t in told), told
    assert left_behind(run.report["job"]) == [] and run.still_there() == []


def test_a_lost_process_is_replaced_while_others_end(launcher: Launcher, left_behind: Left) -> None:
    """Rank 0 takes two seconds for it."""
    fault = """if world.rank == 1: os.kill(os.getpid(), 9)
        import atexit
        atexit.register(lambda: (time.sleep(2), print("ended at", time.time(), flush=True)))"""
    text = (
        TRAIN.format(fault=fault, asynchronous=True) + "import psutil\nprint('made at', psutil.Process().create_time())"
    )
    run = launcher(
        text, "--nodes", "2", "--max-restarts", "1", "--grace", "20", "--log-ranks", "all", real_endpoint=True
    ).wait()
    assert run.code == 0 and ends(run, 2), (run.out, run.err)
    ended = re.search(r"ended at (\S+)", (run.run_dir / "rank0.log").read_text())
    made = re.search(r"made at (\S+)", (run.run_dir / "rank1.log").read_text())
    assert ended and made and float(made[1]) < float(ended[1]) - 0.5, (ended, made)
    assert run.report["rejected_messages"] == 0 and left_behind(run.report["job"]) == []


def test_who_is_not_needed_any_more_ends_as_others_do(launcher: Launcher, left_behind: Left) -> None:
    """What the process has registered for its end is done."""
    text = "from manygrad import Tensor\nTensor([1.0]).numpy()\nraise ValueError"
    run = launcher(text, "--nodes", "2", "--max-restarts", "5", PROFILE="1").wait()
    assert run.code == 1 and [a["kept"] for a in run.report["attempts"]] == [0, 2], run.err
    assert all("profile: " in (run.run_dir / f"rank{r}.log").read_text() for r in range(2)), run.err
    assert "the profile of all ranks is in" in run.err and left_behind(run.report["job"]) == []


def test_a_save_that_waits_for_a_dead_rank_holds_nobody_up(launcher: Launcher) -> None:
    """A thread writes it; rank 1 is killed before it has written its part, and after its neighbour has a copy."""
    fault = "if world.rank == 1: checkpoints.finish(); os.fsync = lambda fd: os.kill(os.getpid(), 9)"
    text = TRAIN.format(fault=fault, asynchronous=True)
    run = launcher(text, "--nodes", "2", "--max-restarts", "1", "--log-ranks", "all", real_endpoint=True).wait()
    assert run.code == 0 and ends(run, 2), (run.out, run.err)
    first, second = processes(run.out)
    assert first[0] == second[0] and first[1] != second[1], run.err
    assert {at for *_, at in BEGUN.findall(run.out)} == {"0", "5"}


# changes all that it can, and looks in the second epoch whether something of it is there
CHANGES = """
import atexit, builtins, decimal, faulthandler, gc, locale, logging, multiprocessing, os, random, resource, signal
import socket, subprocess, sys, tempfile, threading, time, tracemalloc, warnings, weakref
import numpy as np
import manygrad
from manygrad import GlobalCounters, Tensor, TinyJit, dtypes, nn, set_grad_enabled, world
from manygrad.tensor.storage import LIVE
import helper

def arenas():
    return open("/proc/self/maps").read().count("memfd:manygrad-arena")

def what_is_there():
    return {
        "helper": helper.count,
        "globals": "leftover" in globals(),
        "environment": os.environ.get("MINE"),
        "folder": os.path.basename(os.getcwd()),
        "path": "/mine" in sys.path,
        "arguments": sys.argv[1:],
        "functions": [getattr(f, "__name__", "?") for f in (os.fsync, time.sleep, Tensor.relu, nn.Linear.forward)],
        "signals": signal.getsignal(signal.SIGUSR1) is signal.SIG_DFL,
        "timer": signal.getitimer(signal.ITIMER_REAL)[0],
        "hook": sys.excepthook is sys.__excepthook__,
        "stdout": sys.stdout is sys.__stdout__,
        "mode": manygrad.is_grad_enabled(),
        "training": Tensor.training,
        "float": dtypes.default_float.name,
        "precision": decimal.getcontext().prec,
        "handlers": len(logging.getLogger().handlers) + len(logging.getLogger("mine").handlers),
        "level": logging.getLogger("mine").level,
        "exit handlers": os.path.exists(f"elsewhere/exit.{world.rank}"),
        "child": os.path.exists(f"/proc/{open(f'child.{world.rank}').read()}/exe") if world.epoch else False,
        "collects": gc.isenabled(),
        "filters": len(warnings.filters),
        "socket": socket.getdefaulttimeout(),
        "processes": multiprocessing.get_start_method(allow_none=True),
        "file size": resource.getrlimit(resource.RLIMIT_FSIZE)[0],
        "locale": locale.setlocale(locale.LC_ALL),
        "zone": (time.tzname, time.timezone),
        "temporary": tempfile.gettempdir(),
        "builtins": hasattr(builtins, "mine"),
        "collections": (gc.get_threshold(), gc.get_debug(), len(gc.callbacks)),
        "interpreter": (sys.getswitchinterval(), sys.get_int_max_str_digits(), hasattr(sys, "tracebacklimit")),
        "stack": threading.stack_size(),
        "crashes": faulthandler.is_enabled(),
        "memory": tracemalloc.is_tracing(),
        "printing": np.get_printoptions()["precision"],
        "niceness": sorted({os.getpriority(os.PRIO_PROCESS, int(t)) for t in os.listdir("/proc/self/task")}),
        "processors": {len(os.sched_getaffinity(int(t))) for t in os.listdir("/proc/self/task")},
        "policy": os.sched_getscheduler(0),
        "blocked": sorted(map(int, signal.pthread_sigmask(signal.SIG_BLOCK, ()))),
        "umask": (os.umask(0o22), os.umask(0o22))[0],
        "input": os.path.basename(os.readlink("/proc/self/fd/0")),
        "threads": sorted(t.name for t in threading.enumerate()),
        "steps": GlobalCounters.updates,
        "live": len(LIVE),
        "arenas": arenas(),
        "drawn": Tensor.randn(3).tolist() + Tensor.rand(2).shard(world.devices).numpy().tolist(),
        "seed": Tensor.initial_seed(),
    }

there = what_is_there()
print("there", world.epoch, world.rank, os.getpid(), repr(there), flush=True)
print("random", world.rank, random.random(), np.random.random(), flush=True)
leftover = helper.count = 1
big = Tensor(np.ones((512, 512), np.float32)).shard(world.devices).realize()
step = TinyJit(lambda x: (x.sum(1) * 2).realize())
for _ in range(3):
    step(big)
model = nn.Linear(4, 4).to(world.devices)
optimizer = nn.optim.SGD(model.parameters(), lr=0.1)
model(Tensor.randn(2 * world.size, 4).shard(world.devices)).sum().backward()
optimizer.step()
os.environ["MINE"] = "1"
sys.path.append("/mine")
sys.argv.append("--mine")
real = time.sleep
os.fsync = time.sleep = Tensor.relu = nn.Linear.forward = lambda *a, **k: None
signal.signal(signal.SIGUSR1, lambda *_: None)
signal.setitimer(signal.ITIMER_REAL, 1000)
sys.excepthook = lambda *_: None
set_grad_enabled(False).__enter__()
Tensor.training = True
dtypes.default_float = dtypes.float64
decimal.getcontext().prec = 5
logging.getLogger().addHandler(logging.NullHandler())
logging.getLogger("mine").addHandler(logging.NullHandler())
logging.getLogger("mine").setLevel(10)
atexit.register(lambda: open(f"exit.{world.rank}", "w").close())
with open(f"child.{world.rank}", "w") as f:
    print(subprocess.Popen(["setsid", "sleep", "1000"], start_new_session=True).pid, end="", file=f)
gc.disable()
warnings.simplefilter("error", BytesWarning)
socket.setdefaulttimeout(5)
multiprocessing.set_start_method("spawn")
resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 40, resource.getrlimit(resource.RLIMIT_FSIZE)[1]))
locale.setlocale(locale.LC_ALL, "C")
os.environ["TZ"] = "UTC+5"
time.tzset()
tempfile.tempdir = os.getcwd()
builtins.mine = 1
gc.set_threshold(5, 5, 5)
gc.set_debug(gc.DEBUG_SAVEALL)
gc.callbacks.append(lambda *_: None)
sys.setswitchinterval(1)
sys.set_int_max_str_digits(5000)
sys.tracebacklimit = 3
threading.stack_size(1 << 20)
faulthandler.disable() if faulthandler.is_enabled() else faulthandler.enable()
tracemalloc.start()
np.set_printoptions(precision=3)
os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))
os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGUSR2])
os.umask(0o77)
os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
Tensor.manual_seed(7)
Tensor.randn(5).numpy()
waits = threading.Thread(target=real, args=(0.3,))
waits.start()
os.makedirs("elsewhere", exist_ok=True)
os.chdir("elsewhere")
sys.stdout = open(os.devnull, "w")
if world.epoch == 0:
    (Tensor.ones(4).shard(world.devices) + 1).sum().item()
    raise ValueError("again")
"""


def test_nothing_of_the_first_run_is_in_the_second(launcher: Launcher, tmp_path: Any, left_behind: Left) -> None:
    (tmp_path / "helper.py").write_text("count = 0\n")
    run = launcher(CHANGES, "--nodes", "2", "--max-restarts", "1", "--log-ranks", "all", real_endpoint=True)
    run.wait()
    assert run.code == 0, (run.out, run.err)
    found = {}
    for epoch, rank, pid, there in re.findall(r"there (\d+) (\d+) (\d+) (\{.*\})", run.out):
        found[int(epoch), int(rank)] = int(pid), eval(there)
    for rank in range(2):
        (pid, first), (again, second) = found[0, rank], found[1, rank]
        assert pid == again and second.pop("exit handlers") and not first.pop("exit handlers"), run.err
        assert first == second
    drawn = re.findall(r"random \d (\S+) (\S+)", run.out)
    assert len({x for pair in drawn for x in pair}) == 8, "each run draws its own"
    assert left_behind(run.report["job"]) == [] and run.still_there() == []


def test_a_function_is_called_again_in_the_same_process(launcher: Launcher) -> None:
    run = launcher("""
        import manygrad

        def work(seen=[]):
            import os, time
            from manygrad import world
            seen.append(world.epoch)
            open(f"pid.{world.rank}.{world.epoch}", "w").write(str(os.getpid()))
            while world.epoch == 0:
                time.sleep(0.1)
                if world.rank == 1 and os.path.exists("pid.0.0"):
                    raise ValueError
            return world.epoch, seen, open(f"pid.{world.rank}.0").read() == str(os.getpid())

        print(manygrad.launch(work, nodes=2, max_restarts=1, run_dir="run"))
    """).wait()
    assert run.code == 0 and run.out == f"{[(1, [1], True)] * 2}\n", (run.out, run.err)
