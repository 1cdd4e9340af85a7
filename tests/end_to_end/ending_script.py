"""The script of a random ending (`endings.py`), which says what happens where: `[place, what]` of each act, and the
ending. It is no part of the tests' package: a rank runs it as a user's script.

Every act prints `act <number> right`, `wrong <value>` or `error <name>: <text>`.
"""

import atexit
import builtins
import json
import multiprocessing
import os
import signal
import sys
import threading
import time

import numpy as np

from manygrad import Tensor, TinyJit, world
from manygrad.nn.state import safe_load, safe_save

PLAN = json.loads(sys.argv[1])
ME = os.getpid()
# of a worker alone, and of all
own = Tensor(np.arange(6, dtype=np.float32)).realize()
cut = Tensor(np.arange(16, dtype=np.float32)).shard(world.devices, axis=0).realize()
step = TinyJit(lambda t: (t * 2).sum().realize())
step_of_all = TinyJit(lambda t: (t * 3).sum().realize())
for _ in range(3):
    step(own)
    step_of_all(cut)


def saved() -> float:
    path = f"saved-{world.rank}-{os.getpid()}-{threading.get_ident()}.safetensors"
    safe_save({"own": own * 2}, path)
    return float(safe_load(path)["own"].to("CPU").sum().item())


ACTS = {
    "read": (lambda: sum(own.tolist()), 15.0),
    "compute": (lambda: (own * 2).sum().item(), 30.0),
    "make": (lambda: (Tensor([1.0, 2.0]) + 1).sum().item(), 5.0),
    "replay": (lambda: step(own).item(), 30.0),
    "save": (saved, 30.0),
    "sum of all": (lambda: (cut + 1).sum().item(), 136.0),
    "gather": (lambda: float(cut.numpy().sum()), 120.0),
    "replay of all": (lambda: step_of_all(cut).item(), 360.0),
}


def act(number: int, what: str, in_child: bool = False) -> None:
    if (os.getpid() != ME) != in_child:
        return  # a child has its parent's exit handlers and destructors
    function, right = ACTS[what]
    try:
        value = function()
        said = "right" if value == right else f"wrong {value}"
    except BaseException as e:
        said = f"error {type(e).__name__}: {str(e).splitlines()[0] if str(e) else ''}"
    os.write(1, f"act {number} {said}\n".encode())  # (in one piece, whoever else prints)


class Last:
    """Acts in its destructor."""

    def __init__(self, number: int, what: str) -> None:
        self.act = lambda: act(number, what)

    def __del__(self) -> None:
        self.act()


def forked(number: int, what: str, end: str) -> None:
    if os.getpid() != ME:
        return
    if (pid := os.fork()) == 0:
        act(number, what, True)
        sys.stdout.flush()
        if end == "exit":
            sys.exit(0)
        if end == "raise":
            raise ValueError("a child's own")
        os._exit(0)
    ended = os.waitpid(pid, 0)[1]
    os.write(1, f"child {number} ended with {os.waitstatus_to_exitcode(ended)}\n".encode())


threads: list[threading.Thread] = [threading.main_thread()]


def thread(number: int, what: str, pause_s: float) -> None:
    """After the script's end, one after the other: ranks must communicate in one order."""
    before = threads[-1]

    def run() -> None:
        before.join()
        time.sleep(pause_s)
        act(number, what)

    threads.append(threading.Thread(target=run))
    threads[-1].start()


def daemon(number: int, what: str, pause_s: float) -> None:
    def run() -> None:
        time.sleep(pause_s)
        act(number, what)

    threading.Thread(target=run, daemon=True).start()


kept = []
for number, (place, what, choice) in enumerate(PLAN["acts"]):
    if place == "script":
        act(number, what)
    elif place == "exit handler":
        atexit.register(act, number, what)
    elif place == "thread":
        thread(number, what, choice)
    elif place == "daemon":
        daemon(number, what, choice)
    elif place == "destructor":
        kept.append(Last(number, what))
    elif place == "cycle":
        last = Last(number, what)
        last.me = last  # type: ignore[attr-defined]
        del last
    elif place == "interpreter's end":
        setattr(builtins, f"kept_{number}", Last(number, what))
    elif place == "child":
        forked(number, what, choice)
    elif place == "child of exit handler":
        atexit.register(forked, number, what, "_exit")
    elif place == "process":
        child = multiprocessing.get_context("fork").Process(target=act, args=(number, what, True))
        child.start()
        child.join()
        os.write(1, f"child {number} ended with {child.exitcode}\n".encode())

end, who = PLAN["end"]
if world.rank == who:
    if end == "raise":
        raise ValueError("planned")
    if end == "code":
        sys.exit(3)
    if end == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
if end == "exit":
    sys.exit(0)
