"""Runs a job: this is the pipeline of the launcher, from a `Job` to an `Outcome`.

It makes the run directory, starts the cluster, has the job attempted (`attempts.py`), and leaves nothing behind
whatever happens. Nothing that only tells of the run (a terminal that is held, a full disk, a run directory that was
deleted) ends the run.
"""

from __future__ import annotations

import os
import signal
import socket
import sys
import tempfile
import threading
import time

from manygrad.errors import Infeasible, UsageError

from .attempts import Attempts, Outcome
from .cluster import Cluster
from .guard import Guard
from .inquiries import Inquiries
from .interrupts import START_FAILED, Signals, StartFailed, StartInterrupted
from .janitor import Janitor, adopt_orphans, collect_children, sweep
from .job import Job
from .logs import RankLogs, Terminal, make_run_directory, write
from .messages import readable
from .run import Surroundings

START_FAILED_S = 2.0  # how long Ray's client may take to notice that its Ray has ended


def run(job: Job, *, last: bool = False) -> Outcome:
    """Run `job` to its end. `last`: this process ends right after, so a Ray of ours need not be left in order.

    Raises `UsageError` and `Infeasible` before anything runs; failures of the ranks are in the outcome.
    """
    began = time.monotonic()
    with Signals(last) as signals:
        if last:
            adopt_orphans()
        check_port(job.port)
        try:
            os.getcwd()
            run_dir = make_run_directory(job.run_dir, job.name, time.strftime("%Y-%m-%d_%H-%M-%S"))
        except (OSError, ValueError) as e:
            raise UsageError(readable(f"cannot create the run directory: {e}; choose another with --run-dir")) from None
        try:
            return _run_in(run_dir, job, signals, began, last)
        except StartInterrupted as e:
            code, name = 128 + e.signum, signal.Signals(e.signum).name
            return Outcome(
                code, f"\nlauncher: {name} before the workers had started\nlauncher: exit code {code}\n", None, run_dir
            )
        except StartFailed as e:
            raise Infeasible(str(e)) from None
        finally:
            try:
                os.rmdir(run_dir)  # if the run has left nothing in it
            except OSError:
                pass


def _run_in(run_dir: str, job: Job, signals: Signals, began: float, last: bool) -> Outcome:
    base = "/tmp" if os.access("/tmp", os.W_OK) else tempfile.gettempdir()  # Ray's socket paths must be short
    folder = os.path.join(base, f"mg-{job.id}")
    signals.check()
    logs = None
    try:
        logs = RankLogs(run_dir, job.nodes)
        os.mkdir(folder, 0o700)
    except OSError as e:
        if logs is not None:
            logs.close()
            logs.remove()
        raise UsageError(readable(f"cannot write: {e}; choose another run directory with --run-dir")) from None
    cluster, terminal, inquiries = Cluster(job, folder), Terminal(), None
    janitor = Janitor(job.id, folder)
    guard = Guard(lambda text: _start_failed(text, job, folder, signals, last))
    try:
        guard.start()
        with signals.raising():
            cluster.start()
            signals.again()
            places = cluster.place()
        inquiries = Inquiries(job.id, folder, run_dir, signals, job.grace_s)
        around = Surroundings(job, cluster, run_dir, folder, logs, terminal, signals, guard, began, inquiries)
        return Attempts(around).run(places)
    finally:
        guard.stop()
        terminal.close(lambda: True)
        if inquiries is not None:
            inquiries.close()
        logs.close()
        if not signals.supervised:
            logs.remove()
        try:
            if trouble := cluster.stop(fast=last):
                hint = "the run's outcome stands, and `ray status` shows what Ray still holds"
                write(sys.stderr, f"launcher: warning: Ray could not be left in order ({trouble}); {hint}\n")
        finally:
            guard.close()
            sweep(job.id, folder)
            janitor.dismiss()
            if last:
                collect_children()


def _start_failed(text: str, job: Job, folder: str, signals: Signals, last: bool) -> None:
    """A part of our Ray has died at the start (called by the guard's thread).
    What waits for it in Ray's client cannot be woken from here."""
    signals.failed = text
    if signals.saved:
        signal.pthread_kill(threading.main_thread().ident or 0, START_FAILED)
    if last:
        time.sleep(START_FAILED_S)
        if not signals.supervised:
            write(sys.stderr, f"launcher: {text}\n")
            sweep(job.id, folder)
            os._exit(Infeasible.exit_code)


def check_port(port: int) -> None:
    """Say at once, before Ray is started, that the port for the control channel is taken."""
    if port:
        with socket.socket() as s:
            s.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                s.bind(("", port))
            except OSError as e:
                raise UsageError(
                    f"--port {port}: {e.strerror}; leave --port out to let the system choose a free one"
                ) from None
