"""Controllers without processes: events of ranks, and a run whose ranks have started."""

from __future__ import annotations

from manygrad.launcher.controller import Controller
from manygrad.launcher.instructions import Instruction, Send
from manygrad.launcher.messages import (
    PROTOCOL,
    Failed,
    Hello,
    Spawned,
    Started,
)
from manygrad.launcher.ranks import State


def hello(r: int) -> Hello:
    return Hello(r, {"rank": r}, "h", "127.0.0.1", 100 + r, 5000 + r, PROTOCOL)


def failed(r: int, consequence: bool = False, text: str = "ValueError") -> Failed:
    return Failed(r, text, "bad", "Traceback", "t.py:3 in f", 7, 1, consequence)


def running(n: int, **limits: float) -> Controller:
    c = Controller(n, 0.0, **limits)
    for r in range(n):
        c.handle(Spawned(r, 100 + r, "h"), 0.0)
    for r in range(n):
        c.handle(hello(r), 0.1)
    for r in range(n):
        c.handle(Started(r), 0.2)
    assert all(r.state is State.RUNNING for r in c.ranks)
    return c


def sent(out: list[Instruction], kind: str) -> list[Send]:
    return [i for i in out if isinstance(i, Send) and i.type == kind]
