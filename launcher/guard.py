"""The guard of a Ray that the launcher has started: notices when a part of it dies during the start."""

from __future__ import annotations

import os
import select
import signal
import threading
from collections.abc import Callable
from contextlib import suppress

from manygrad.tensor.threads import Threads


class Guard:
    """Looks after the Ray that we start, from before its start until the supervisors run:
    calls `ended(text)` when a part of it dies, in a thread of its own.

    `ray.init` itself would find out after half a minute, and end in a traceback.
    """

    EVERY_S, CLOSE_S = 0.1, 0.5

    def __init__(self, ended: Callable[[str], None]) -> None:
        self.ended, self.done = ended, threading.Event()
        self.seen: dict[int, tuple[str, int]] = {}  # by id: name, and a descriptor that tells of its end
        self._threads = Threads()

    def start(self) -> None:
        self._threads.start("manygrad-guard", self._watch, stop=self.stop)

    def _watch(self) -> None:
        try:
            while not self.done.is_set():
                for pid, name in ray_processes().items():
                    if pid not in self.seen:
                        with suppress(OSError):  # (one that has just ended is gone)
                            self.seen[pid] = name, os.pidfd_open(pid)
                descriptors = {fd: pid for pid, (_, fd) in self.seen.items()}
                ended = select.select(list(descriptors), [], [], self.EVERY_S)[0]
                if ended and not self.done.is_set():
                    self._tell(descriptors[ended[0]])
                    return
        finally:
            for _, fd in self.seen.values():
                os.close(fd)

    def _tell(self, pid: int) -> None:
        for other, (name, _) in self.seen.items():
            if name == "raylet" and other != pid:
                # it ends with its agents, and with it Ray's client, which is this process, before it could say why
                with suppress(ProcessLookupError):
                    os.kill(other, signal.SIGSTOP)
        self.ended(
            f"Ray's {self.seen[pid][0]} (process {pid}) ended while the run was starting; start it again "
            "(on a very busy machine Ray's processes give up waiting for each other after 30 s)"
        )

    def stop(self) -> None:
        """Its thread ends soon."""
        self.done.set()

    def close(self) -> None:
        """Its thread has ended, unless it is within `ended`."""
        self._threads.close(self.CLOSE_S)


AGENTS = {b"dashboard/agent.py": "DashboardAgent", b"runtime_env/agent/main.py": "RuntimeEnvAgent"}


def ray_processes() -> dict[int, str]:
    """The GCS and the raylet that are children of this process, and the agents that are the raylet's: names by id."""
    parents, names = dict[int, int](), dict[int, str]()
    for name in os.listdir("/proc") if os.path.isdir("/proc") else []:
        if not name.isdigit():
            continue
        try:
            with open(f"/proc/{name}/stat", "rb") as f:
                head, _, tail = f.read().rpartition(b")")
        except OSError:
            continue
        parents[int(name)], names[int(name)] = int(tail.split()[1]), head.partition(b"(")[2].decode(errors="replace")
    me = os.getpid()
    found = {p: names[p] for p, parent in parents.items() if parent == me and names[p] in ("gcs_server", "raylet")}
    for p, parent in parents.items():
        if found.get(parent) == "raylet":
            line = b""
            with suppress(OSError), open(f"/proc/{p}/cmdline", "rb") as f:
                line = f.read()
            for path, agent in AGENTS.items():
                if path in line or agent.encode() in line:
                    found[p] = agent
    return found
