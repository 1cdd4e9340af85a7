"""Runs a function in several real processes, each with a connected endpoint; used by the tests of this folder.

Processes are started with `python -c` (no fork of the test process), exchange cards through pipes, and each is ended by
its own handle, whatever happens.
"""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

FOLDER = str(Path(__file__).parent)
_MAIN = """
import os, pickle, struct, sys, traceback
sys.path.insert(0, sys.argv[1])
out = os.fdopen(os.dup(1), "wb"); os.dup2(2, 1)
def say(kind, value):
    data = pickle.dumps((kind, value)); out.write(struct.pack("<Q", len(data)) + data); out.flush()
def hear():
    n, = struct.unpack("<Q", sys.stdin.buffer.read(8)); return pickle.loads(sys.stdin.buffer.read(n))
import collective_tasks
from apart import Apart
endpoint = None
try:
    name, args, rank, size, options = hear()
    endpoint = Apart(rank, size, "test", 3, arena_bytes=1 << 28, **options)
    say("card", endpoint.card())
    endpoint.connect(hear(), 20)
    say("result", getattr(collective_tasks, name)(endpoint, *args))
    hear()
    endpoint.close()
except BaseException as e:
    e.add_note(traceback.format_exc())
    say("error", e)
    if endpoint is not None: endpoint.abort(repr(e)); endpoint.close()
"""


class Worker:
    """One process. `pid`; `hear(timeout_s)` gives the next `(kind, value)` it said."""

    def __init__(self, env: dict[str, str], prefix: list[str]):
        self.process = subprocess.Popen(
            [*prefix, sys.executable, "-c", _MAIN, FOLDER],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={**os.environ, **env},
        )
        self.pid = self.process.pid

    def say(self, value: Any) -> None:
        data = pickle.dumps(value)
        assert self.process.stdin
        try:
            self.process.stdin.write(len(data).to_bytes(8, "little") + data)
            self.process.stdin.flush()
        except BrokenPipeError:
            pass

    def hear(self, timeout_s: float = 30) -> tuple[str, Any]:
        assert self.process.stdout
        timer = threading.Timer(timeout_s, self.process.kill)
        timer.start()
        try:
            head = self.process.stdout.read(8)
            if len(head) < 8:
                return "gone", self.process.wait()
            return pickle.loads(self.process.stdout.read(int.from_bytes(head, "little")))  # type: ignore[no-any-return]
        finally:
            timer.cancel()

    def end(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()
        for stream in (self.process.stdin, self.process.stdout):
            if stream:
                try:
                    stream.close()
                except BrokenPipeError:
                    pass


def run_workers(
    size: int,
    name: str,
    args: Callable[[int], tuple[Any, ...]] | tuple[Any, ...] = (),
    env: dict[str, str] | None = None,
    options: Callable[[int], dict[str, Any]] | None = None,
    prefixes: list[list[str]] | None = None,
    after_start: Callable[[list[Worker]], None] | None = None,
    timeout_s: float = 40,
) -> list[tuple[str, Any]]:
    """`collective_tasks.<name>(endpoint, *args)` on `size` workers: each one's
    `("result" | "error" | "gone", value)`."""
    threads = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
    workers = [Worker({**threads, **(env or {})}, prefixes[r] if prefixes else []) for r in range(size)]
    try:
        for r, w in enumerate(workers):
            w.say((name, args(r) if callable(args) else args, r, size, options(r) if options else {}))
        cards = [w.hear(timeout_s) for w in workers]
        assert all(kind == "card" for kind, _ in cards), cards
        for w in workers:
            w.say([card for _, card in cards])
        if after_start:
            time.sleep(0.5)
            after_start(workers)
        results = [w.hear(timeout_s) for w in workers]
        for w in workers:
            w.say("done")
        for w in workers:
            try:
                w.process.wait(5)
            except subprocess.TimeoutExpired as e:
                raise AssertionError(f"worker {w.pid} does not end") from e
        return results
    finally:
        for w in workers:
            w.end()
