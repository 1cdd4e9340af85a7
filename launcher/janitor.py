"""Leaves nothing behind: ends every process of a job by its id and removes the job's files,
even after `kill -9` of the driver.

Every process of a job carries `MANYGRAD_JOB=<job>` in its environment (Ray's own processes too, when we started Ray),
and every file that a job creates outside its run directory has the job's name in its own. The driver calls `sweep`
itself; this file also runs as a small process of its own (`python -I -S janitor.py JOB FOLDER`) that waits until the
driver closes its pipe, and sweeps unless the driver said that all is done. Standard library only.
"""

from __future__ import annotations

import glob
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterable

MARK, START_MARK = "MANYGRAD_JOB", "MANYGRAD_START"  # the latter: epoch and rank of a supervisor's start
KERNEL_THREAD = 0x200000  # Linux's PF_KTHREAD
STARTING_S = 30.0  # a process that has no environment after so long has been given none


def marked_processes(job: str, folder: str) -> list[int]:
    """Ids of the live processes of this user that belong to the job, without the caller.

    They carry the mark in their environment; or are a Ray process (whose title overwrites the environment) with a file
    open in the job's folder; or descend from such a process.
    """
    return _look(job, folder)[0]


def _look(job: str, folder: str, also: frozenset[bytes] = frozenset()) -> tuple[list[int], list[int]]:
    """`marked_processes` (only those that have one of `also` in their environment, too), and those of which it is not
    known yet: while a process is in the system's `exec`, nobody can read its environment; and before, forked from the
    caller, it has the caller's."""
    mark, inside, me = f"{MARK}={job}".encode(), folder + "/", os.getpid()
    mine = _read(f"/proc/{me}/cmdline") if os.path.isdir("/proc") else b""
    parents, found, starting = dict[int, int](), set[int](), list[int]()
    for name in os.listdir("/proc") if os.path.isdir("/proc") else []:
        if not name.isdigit() or int(name) == me:
            continue
        pid = int(name)
        try:
            stat = _read(f"/proc/{pid}/stat").rpartition(b")")[2].split()
            if stat[0] == b"Z":
                continue
            parents[pid] = int(stat[1])
            command, environment = _read(f"/proc/{pid}/cmdline"), _read(f"/proc/{pid}/environ")
            ray = command.startswith(b"ray::")
            in_exec = not environment and not int(stat[6]) & KERNEL_THREAD
            before_exec = parents[pid] == me and command == mine
            marks = environment.split(b"\0")
            if also:
                if mark in marks and not also.isdisjoint(marks):
                    found.add(pid)
                continue
            if mark in marks or (ray and any(p.startswith(inside) for p in _open_files(pid))):
                found.add(pid)
            elif (in_exec or before_exec) and _age_s(int(stat[19])) < STARTING_S:
                starting.append(pid)
        except OSError:
            pass  # gone, or not ours
    while more := {p for p, parent in parents.items() if parent in found and p not in found}:
        found |= more
    return sorted(found), starting


def _age_s(started: int) -> float:
    """Age of a process that was forked so many ticks after the system was started."""
    return time.clock_gettime(time.CLOCK_BOOTTIME) - started / os.sysconf("SC_CLK_TCK")


def _read(path: str) -> bytes:
    with open(path, "rb") as f:
        return f.read()


def _open_files(pid: int) -> list[str]:
    out = []
    for fd in os.listdir(f"/proc/{pid}/fd"):
        try:
            out.append(os.readlink(f"/proc/{pid}/fd/{fd}"))
        except OSError:
            pass
    return out


def sweep(job: str, folder: str, within_s: float = 2.0) -> None:
    """Kill what is left of the job on this host and remove its folder and its shared memory."""
    _end(job, folder, frozenset(), within_s)
    for path in glob.glob(f"/dev/shm/*{glob.escape(job)}*"):
        try:
            os.unlink(path)
        except OSError:
            pass
    shutil.rmtree(folder, ignore_errors=True)


def sweep_starts(job: str, folder: str, starts: Iterable[str], within_s: float = 2.0) -> None:
    """Kill what these starts have left on this host: supervisors, their workers and what these have started."""
    if marks := frozenset(f"{START_MARK}={s}".encode() for s in starts):  # (without one it is all of the job)
        _end(job, folder, marks, within_s)


def _end(job: str, folder: str, also: frozenset[bytes], within_s: float) -> None:
    """Kill the processes of the job, those that have one of `also` in their environment, until there are none."""
    until, seen = time.monotonic() + within_s, set[int]()
    while True:
        pids, starting = _look(job, folder, also)
        if not pids and not starting:
            break
        for pid in pids:
            try:
                os.kill(pid, signal.SIGKILL)
            except OSError:
                pass
        seen |= set(pids)
        if time.monotonic() > until:
            break
        time.sleep(0.01)
    until = min(until, time.monotonic() + 0.5)
    # our own children (and, with `adopt_orphans`, theirs) would stay as zombies
    while seen and time.monotonic() < until:
        for pid in list(seen):
            try:
                os.waitpid(pid, os.WNOHANG)
            except OSError:
                pass
            if not os.path.exists(f"/proc/{pid}"):
                seen.discard(pid)
        time.sleep(0.005)


def adopt_orphans() -> None:
    """Make this process the parent of descendants whose own parent dies,
    so that `sweep` and `end_descendants` find them too."""
    if sys.platform == "linux":
        import ctypes

        ctypes.CDLL(None).prctl(36, 1, 0, 0, 0)  # PR_SET_CHILD_SUBREAPER


def end_descendants(within_s: float = 1.0, of: int = 0) -> None:
    """Kill every other process that descends from this one, or from `of` (with `adopt_orphans`: however it was
    detached, whatever its environment)."""
    until = time.monotonic() + within_s
    while pids := set(_descendants(of or os.getpid())) - {os.getpid()}:
        for pid in pids:
            try:
                os.kill(pid, signal.SIGKILL)
            except OSError:
                pass
        collect_children()
        if time.monotonic() > until:
            break
        time.sleep(0.005)
    collect_children()


def _descendants(of: int) -> list[int]:
    """The live ones."""
    parents = dict[int, int]()
    for name in os.listdir("/proc") if os.path.isdir("/proc") else []:
        try:
            state, parent = _read(f"/proc/{int(name)}/stat").rpartition(b")")[2].split()[:2]
        except (OSError, ValueError):
            continue
        if state != b"Z":
            parents[int(name)] = int(parent)
    found = {of}
    while more := {p for p, parent in parents.items() if parent in found and p not in found}:
        found |= more
    return sorted(found - {of})


def collect_orphans(child: int) -> None:
    """Take note of dead children that this process has adopted;
    not of its own, `child`, whose end is for another to read."""
    try:
        while (
            dead := os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        ) is not None and dead.si_pid != child:
            os.waitpid(dead.si_pid, os.WNOHANG)
    except OSError:
        pass


def collect_children() -> None:
    """Take note of all dead children, so that none stays a zombie; for a process that ends next."""
    try:
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass
    except OSError:
        pass


class Janitor:
    """The process that sweeps if the driver cannot."""

    def __init__(self, job: str, folder: str) -> None:
        env = {k: v for k, v in os.environ.items() if k != MARK}
        self.process = subprocess.Popen(
            [sys.executable, "-I", "-S", os.path.abspath(__file__), job, folder],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            env=env,
            cwd="/",
            start_new_session=True,
        )

    def dismiss(self) -> None:
        """All is done: no sweep needed."""
        try:
            self.process.communicate(b"done", timeout=1.0)
        except (subprocess.TimeoutExpired, OSError):
            self.process.kill()
            self.process.wait()


if __name__ == "__main__":
    if sys.stdin.buffer.read() != b"done":
        sweep(sys.argv[1], sys.argv[2])
