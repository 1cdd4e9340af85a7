"""A side in its own process, asked for a few steps at a time, so that sides can take turns."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
import threading
from typing import Any

WORKER = os.path.join(os.path.dirname(os.path.abspath(__file__)), "worker.py")
MODULE = {"torch": "torch", "compile": "torch", "tinygrad": "tinygrad"}


def installed(side: str) -> bool:
    return side == "ours" or importlib.util.find_spec(MODULE[side]) is not None


class Side:
    """`ask` gives None once the process has failed or was too slow;
    it is ended then, and what it wrote to stderr is kept in `said`."""

    def __init__(
        self, side: str, model: str, threads: int, limit_s: float, environment: dict[str, str] | None = None
    ) -> None:
        self.limit_s = limit_s
        mine = {
            "THREADS": str(threads),
            "NUM_CPU_THREADS": str(threads),
            "OMP_NUM_THREADS": str(threads),
            **(environment or {}),
        }
        if side == "tinygrad":
            mine.setdefault("DEV", "CPU")
        pipe = subprocess.PIPE
        command = [sys.executable, WORKER, side, model, str(threads)]
        self.process = subprocess.Popen(
            command, stdin=pipe, stdout=pipe, stderr=subprocess.DEVNULL, text=True, env={**os.environ, **mine}
        )
        self.ready = self._answer()

    def _answer(self) -> dict[str, Any] | None:
        assert self.process.stdout is not None
        timer = threading.Timer(self.limit_s, self.process.kill)
        timer.start()
        line = self.process.stdout.readline()
        timer.cancel()
        if not line:
            self.close()
        return json.loads(line) if line else None

    def ask(self, what: str) -> dict[str, Any] | None:
        if self.process.poll() is not None:
            return None
        assert self.process.stdin is not None
        try:
            print(what, file=self.process.stdin, flush=True)
        except BrokenPipeError:
            self.close()
            return None
        return self._answer()

    def close(self) -> None:
        self.process.kill()
        self.process.wait()
