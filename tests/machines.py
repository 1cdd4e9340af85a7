"""Hosts that share less than network namespaces do: each has processes, host name, /tmp and /dev/shm of its own as
well, as machines have. They share the processors and all other files.

Nobody reaches another's memory here, so workers on them find ZeroMQ by themselves. Whatever was started on a machine
ends with it: its first process is killed, and the kernel ends all others of its process namespace.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path

from tests.hosts import Hosts, NoHosts, network, skipped_without

# The first process of a machine. Children that lost their parents become its own, and are forgotten when they end.
_INIT = """
import os, signal, socket, subprocess, sys
name, *shared = sys.argv[1:]
socket.sethostname(name)
held = [(folder, os.open(folder, os.O_PATH)) for folder in shared]
for folder in ("/tmp", "/dev/shm"):
    subprocess.run(["mount", "-t", "tmpfs", "-o", "mode=1777", "tmpfs", folder], check=True)
for folder, fd in held:
    os.makedirs(folder, exist_ok=True)
    subprocess.run(["mount", "--no-canonicalize", "--bind", f"/proc/self/fd/{fd}", folder], check=True, pass_fds=[fd])
signal.signal(signal.SIGCHLD, signal.SIG_IGN)
print("ready", flush=True)
os.execvp("sleep", ["sleep", "infinity"])
"""


@contextmanager
def machines(count: int, *shared: Path | str) -> Iterator[Hosts]:
    """`count` machines `host0`, `host1`, ..., which all see the folders `shared`.
    Skips the test where there are none."""
    with skipped_without(), network(count) as h, ExitStack() as stack:
        folders = [str(f) for f in (*shared, *_of_python())]
        inits = [stack.enter_context(_machine(prefix, f"host{i}", folders)) for i, prefix in enumerate(h.prefixes)]
        enter = "nsenter --net --pid --mount --uts --ipc --target"
        yield replace(h, prefixes=[[*enter.split(), str(pid)] for pid in inits])


def _of_python() -> list[str]:
    """Folders in /tmp that Python is run from, if any."""
    return [p for p in {sys.prefix, *sys.path} if p.startswith("/tmp/") and Path(p).is_dir()]


@contextmanager
def _machine(prefix: list[str], name: str, folders: list[str]) -> Iterator[int]:
    """A machine's first process; its id, as seen from outside."""
    own = "unshare --pid --fork --kill-child --mount-proc --mount --uts --ipc".split()
    command = [*prefix, *own, sys.executable, "-I", "-S", "-c", _INIT, name, *folders]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None and process.stderr is not None
            if process.stdout.readline() != "ready\n":
                raise NoHosts(f"this machine gives no process namespaces: {process.stderr.read().strip()}")
            yield child_of(process.pid)
        finally:
            process.kill()


def child_of(pid: int) -> int:
    """The only child of a process that did nothing but start it (`nsenter`, `unshare`)."""
    return int(Path(f"/proc/{pid}/task/{pid}/children").read_text())


def processes(h: Hosts, i: int) -> list[str]:
    """What runs on machine i beside its first process: `id command line`."""
    listed = subprocess.run([*h.prefixes[i], "ps", "-e", "-o", "pid=,stat=,args="], capture_output=True, text=True)
    rows = [line.split(None, 2) for line in listed.stdout.splitlines()]
    return [f"{pid} {args}" for pid, stat, args in rows if pid != "1" and stat[0] != "Z" and not args.startswith("ps ")]


def files(h: Hosts, i: int) -> list[str]:
    """What lies in machine i's own folders, but for those of Python, where it is run from there."""
    command = ["find", "/tmp", "/dev/shm", "-mindepth", "1", "-xdev"]
    found = subprocess.run([*h.prefixes[i], *command], capture_output=True, text=True).stdout.split()
    return [f for f in found if not any(Path(p).is_relative_to(f) for p in _of_python())]
