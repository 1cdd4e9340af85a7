"""Faults and moments: how they are drawn, and how a worker brings one upon itself.

A `Fault` names what happens (`act`), when in the life of an attempt (`moment`), in which epoch and to which rank. The
training script (`train.py`) calls `Injector.at(moment)` where the moments are; whatever the act needs is done there, so
that a fault hits between two known lines, or, with `delay_s`, in the midst of whatever comes then.
"""

from __future__ import annotations

import errno
import json
import os
import random
import signal
import socket
import subprocess
import sys
import threading
import time
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import psutil

from manygrad import Tensor
from manygrad.collectives.transport import Endpoint
from manygrad.runtime.current import current
from manygrad.runtime.storage import buffers_of
from manygrad.tensor.uop.views import memory

MOMENTS = ("start", "compile", "step", "collective", "checkpoint", "commit", "exit")
# what the report has to name as the root cause; nothing where the run is not to notice
KINDS: dict[str, tuple[str, ...]] = {
    "kill": ("signal",),
    "exit": ("exit",),
    "raise": ("exception",),
    "memory": ("exception",),
    "supervisor": ("lost",),
    "stuck": ("late", "timeout"),
    "stop": ("late", "timeout", "silent"),
    "pause": (),
    "clock": (),
    "slow": (),
    "cut": (),
    "flip": ("exception",),
    "full": (),
    "damage": ("signal",),
    "terminate": ("preempted",),
    "launcher": (),
    "preempt": ("preempted", "interrupt"),
}
NEW_COMMAND = frozenset({"launcher", "preempt"})  # after which the command is given again, with epoch 0
UNNOTICED = frozenset({"pause", "clock", "slow", "cut", "full"})  # after which the attempt goes on
STEPS, EVERY = 12, 3
DRAWN = "a fault was drawn"  # the text of the exceptions
PAUSE_S = SLOW_S = 1.5
DELAY_S = 0.02  # of each message over a link that is slow
DAY_S = 86400.0


@dataclass(frozen=True)
class Fault:
    act: str
    moment: str
    epoch: int
    rank: int
    step: int  # at which the moments of steps and checkpoints are
    delay_s: float  # after the moment

    @property
    def mark(self) -> str:
        """The name of the file that says that it happened."""
        return f"happened.{self.epoch}.{self.act}"

    def __str__(self) -> str:
        late = f" and {self.delay_s:.2f} s" if self.delay_s else ""
        return f"{self.act} in rank {self.rank}, epoch {self.epoch}, at {self.moment} (step {self.step}){late}"


@dataclass(frozen=True)
class Plan:
    """One run: so many workers, and what happens to them. `transport`: that between the workers; `memory_every`: as the
    Checkpointer takes it."""

    nodes: int
    transport: str
    asynchronous: bool
    faults: tuple[Fault, ...]
    memory_every: int | None = None

    def __str__(self) -> str:
        how = f"{self.nodes} nodes, {self.transport or 'shm'}{', asynchronous' * self.asynchronous}"
        how += "" if self.memory_every is None else f", memory_every={self.memory_every}"
        return "; ".join([how, *map(str, self.faults)])


def draw(seed: int) -> Plan:
    """The plan of a seed: one to three faults, each in the epoch that those before it leave the run in."""
    chance = random.Random(seed)
    nodes = chance.choice((2, 2, 2, 4))
    faults = []
    # (the same fault twice at one step would rightly not be retried)
    epoch = 0
    for act in chance.sample(tuple(KINDS), chance.choice((1, 1, 2, 3))):
        moment = chance.choice(MOMENTS)
        if act == "full":
            moment = "checkpoint"
        if (act == "raise" and moment == "collective") or act == "flip":
            moment = "step"  # (an exception of another thread is none of the script's; a wrong number is seen there)
        if act == "stuck" and moment == "exit":
            moment = "step"  # (what a script leaves to its end may take as long as it likes)
        step = chance.randrange(1, STEPS // EVERY) * EVERY if moment in ("checkpoint", "commit") else 0
        step = step or chance.randrange(1, STEPS)
        rank = 0 if moment == "commit" else chance.randrange(nodes)
        inside = moment in ("compile", "collective") or (chance.random() < 0.3 and act not in ("raise", "full", "flip"))
        faults.append(Fault(act, moment, epoch, rank, step, chance.uniform(0.0, 0.3) if inside else 0.0))
        epoch = 0 if act in NEW_COMMAND else epoch + (act not in UNNOTICED)
    how = chance.choice(("", "", "zmq")), chance.random() < 0.5
    return Plan(nodes, *how, tuple(faults), chance.choice((None, 0, 1)))


class Injector:
    """In a worker: brings its faults of this epoch about when their moment comes."""

    def __init__(self, path: str, rank: int, epoch: int, checkpoints: Path) -> None:
        faults = [Fault(**f) for f in json.loads(Path(path).read_text())["faults"]]
        self.faults = [f for f in faults if (f.rank, f.epoch) == (rank, epoch)]
        self.folder, self.checkpoints, self.step = Path(path).parent, checkpoints, 0
        self.weights: Any = None  # the tensor that `flip` hits

    def at(self, moment: str) -> None:
        for f in list(self.faults):
            # (a checkpoint in the background is made while later steps are)
            late = moment in ("checkpoint", "commit") and f.step < self.step
            if f.moment == moment and (moment in ("start", "exit", "compile") or late or f.step == self.step):
                self.faults.remove(f)
                mark = self.folder / f.mark
                if mark.exists():  # (a launcher that was killed begins at epoch 0 again)
                    continue
                mark.write_text(str(f))
                if f.delay_s and f.act not in ("raise", "memory", "stuck"):
                    threading.Timer(f.delay_s, self.act, (f,)).start()
                else:
                    time.sleep(f.delay_s)
                    self.act(f)

    def watch_files(self) -> None:
        """The moments of a checkpoint: as a part is synced, and around the rename that commits."""
        sync, rename = os.fsync, os.rename

        def fsync(fd: int) -> None:
            self.at("checkpoint")
            sync(fd)

        def renaming(src: Any, dst: Any) -> None:
            commits = str(src).endswith(".tmp") and not str(dst).endswith(".tmp")
            if commits and self.step % 2:
                self.at("commit")
            rename(src, dst)
            if commits:
                self.at("commit")

        os.fsync, os.rename = fsync, renaming  # type: ignore[assignment]

    def act(self, f: Fault) -> None:
        me = os.getpid()
        if f.act == "kill":
            os.kill(me, signal.SIGKILL)
        elif f.act == "exit":
            os._exit(7)
        elif f.act == "raise":
            raise ValueError(DRAWN)
        elif f.act == "memory":
            raise MemoryError(DRAWN)
        elif f.act == "supervisor":
            os.kill(os.getppid(), signal.SIGKILL)
            time.sleep(60)
        elif f.act == "stuck":
            while True:
                time.sleep(1)
        elif f.act == "stop":
            os.kill(me, signal.SIGSTOP)
        elif f.act == "pause":
            code = f"import os, time; time.sleep({PAUSE_S}); os.kill({me}, {int(signal.SIGCONT)})"
            subprocess.Popen([sys.executable, "-c", code])
            os.kill(me, signal.SIGSTOP)
        elif f.act == "clock":
            now, jump = time.time, DAY_S * (-1) ** f.step
            time.time = lambda: now() + jump
        elif f.act == "slow":
            send, until = Endpoint.send, time.monotonic() + SLOW_S

            def slowly(*args: Any) -> Any:
                time.sleep(DELAY_S if time.monotonic() < until else 0.0)
                return send(*args)

            Endpoint.send = slowly  # type: ignore[method-assign]
        elif f.act == "cut":
            cut_links()
        elif f.act == "flip":
            flip_a_bit(self.weights, random.Random(f.step))
        elif f.act == "full":
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        elif f.act == "damage":
            self.damage(random.Random(f.step + f.rank))
            os.kill(me, signal.SIGKILL)
        elif f.act == "terminate":
            os.kill(me, signal.SIGTERM)
        elif f.act == "launcher":
            os.kill(int(Path(self.folder, "launcher").read_text()), signal.SIGKILL)
            time.sleep(60)
        elif f.act == "preempt":
            os.kill(int(Path(self.folder, "launcher").read_text()), signal.SIGTERM)

    def damage(self, chance: random.Random) -> None:
        """Truncates a file of the newest checkpoint, or flips a bit of it; not where it is the only one."""
        found = sorted(p for p in self.checkpoints.glob("step-*") if not p.name.endswith(".tmp"))
        if len(found) < 2:
            return
        file = chance.choice(sorted(found[-1].iterdir()))
        data = bytearray(file.read_bytes())
        at = chance.randrange(len(data))
        if chance.random() < 0.5:
            del data[at:]
        else:
            data[at] ^= 1 << chance.randrange(8)
        file.write_bytes(data)


def cut_links() -> None:
    """Breaks this worker's connections with the others, as a router does that is started anew: what was on its way is
    lost. (Workers that share memory have none.)"""
    endpoint = current().communication.endpoint
    hub = getattr(endpoint, "_hub", None)
    cards = [] if hub is None else [hub.addresses, *(link.card["addresses"] for link in list(hub.links.values()))]
    ports = {int(address.rpartition(":")[2]) for addresses in cards for address in addresses}
    for c in psutil.Process().net_connections("tcp"):
        if c.raddr and c.fd >= 0 and not ports.isdisjoint((c.laddr.port, c.raddr.port)):
            with suppress(OSError), socket.socket(fileno=os.dup(c.fd)) as s:
                s.shutdown(socket.SHUT_RDWR)


def flip_a_bit(weights: Tensor, chance: random.Random) -> None:
    """In this worker's copy, as memory that is broken does."""
    (buffer,) = buffers_of(memory(weights.uop))
    held = buffer.as_numpy()
    assert held is not None
    found = held.reshape(-1).view(np.uint8)
    found[chance.randrange(len(found))] ^= 1 << chance.randrange(8)


def write(plan: Plan, path: Path) -> None:
    path.write_text(json.dumps({"faults": [asdict(f) for f in plan.faults], "memory_every": plan.memory_every}))
