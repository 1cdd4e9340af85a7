"""A server process, as a user starts it, and what its clients do."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http.client import HTTPConnection
from pathlib import Path
from typing import Any

import openai
import psutil

PROGRAM = ("-m", "manygrad.llm.serve")
LIMIT_S = 60.0


class Served:
    """A running server. `out`: its lines so far."""

    def __init__(self, process: subprocess.Popen[str]):
        self.process, self.out = process, list[str]()
        self.reader = threading.Thread(target=lambda: self.out.extend(process.stdout or ()), daemon=True)
        self.port = 0

    def start(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.out.append(line)
            if found := re.search(r"listening on http://127\.0\.0\.1:(\d+)", line):
                self.port = int(found[1])
                self.reader.start()
                return
        raise AssertionError("".join(self.out))

    @property
    def client(self) -> openai.OpenAI:
        return openai.OpenAI(base_url=f"http://127.0.0.1:{self.port}/v1", api_key="-", max_retries=0, timeout=LIMIT_S)

    def ask(self, path: str, body: bytes | None = None, **headers: str) -> tuple[int, Any]:
        """(status, what the answer holds)."""
        connection = HTTPConnection("127.0.0.1", self.port, timeout=LIMIT_S)
        headers = {"content-type": "application/json", **{k.replace("_", "-"): v for k, v in headers.items()}}
        try:
            connection.request("GET" if body is None else "POST", path, body, headers)
            answer = connection.getresponse()
            text = answer.read().decode()
            return answer.status, json.loads(text) if answer.headers["content-type"] == "application/json" else text
        finally:
            connection.close()

    def gauge(self, name: str) -> float:
        text = self.ask("/metrics")[1]
        found = re.search(rf"^{re.escape(name)} (\S+)$", text, re.MULTILINE)
        assert found is not None, text
        return float(found[1])

    def gauge_or_zero(self, name: str) -> float:
        return self.gauge(name) if name in self.ask("/metrics")[1] else 0.0

    def headers(self, method: str, path: str, body: bytes | None, **headers: str) -> dict[str, str]:
        """Those of the answer."""
        connection = HTTPConnection("127.0.0.1", self.port, timeout=LIMIT_S)
        try:
            connection.request(method, path, body, {"content-type": "application/json", **headers})
            answer = connection.getresponse()
            answer.read()
            return {k.lower(): v for k, v in answer.getheaders()}
        finally:
            connection.close()

    def wait_for(self, name: str, value: float) -> None:
        """Until a gauge has the value."""
        until = time.monotonic() + LIMIT_S
        while (found := self.gauge(name)) != value:
            assert time.monotonic() < until, f"{name} is {found}, not {value}"
            time.sleep(0.02)


@contextmanager
def serving(*command: str, stop: int = signal.SIGINT) -> Iterator[Served]:
    """`command` with --port 0; it has to end by itself, with 0 and with all its processes, after `stop`."""
    process = subprocess.Popen(command, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    watch = threading.Timer(5 * LIMIT_S, process.kill)  # (a module's tests share one, on a machine that others use)
    watch.start()
    served, children = Served(process), list[psutil.Process]()
    try:
        served.start()
        yield served
        children = psutil.Process(process.pid).children(recursive=True) if process.poll() is None else []
        if process.poll() is None:
            process.send_signal(stop)
            assert process.wait(LIMIT_S) == 0, "".join(served.out)
        _, left = psutil.wait_procs(children, timeout=10)
        assert not left, left
    finally:
        watch.cancel()
        if process.poll() is None:
            process.kill()
            process.wait()


def serve(model: Path | str, *options: str) -> Any:
    return serving(sys.executable, "-u", *PROGRAM, "--model", str(model), "--name", "tiny", "--port", "0", *options)
