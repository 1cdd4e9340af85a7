"""A headless Chromium, driven through its DevTools protocol over a pipe."""

from __future__ import annotations

import json
import os
import select
import shutil
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

PROGRAM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
LIMIT_S = 30.0


class Page:
    def __init__(self, out: int, found: int):
        self.out, self.found, self.held, self.number, self.session = out, found, b"", 0, {}

    def call(self, method: str, **params: Any) -> Any:
        """What DevTools answers."""
        self.number += 1
        message = {"id": self.number, "method": method, "params": params, **self.session}
        os.write(self.out, json.dumps(message).encode() + b"\0")
        until = time.monotonic() + LIMIT_S
        while True:
            while b"\0" not in self.held:
                assert select.select([self.found], [], [], max(until - time.monotonic(), 0))[0], method
                part = os.read(self.found, 1 << 16)
                assert part, f"{method}: the browser has ended"
                self.held += part
            text, _, self.held = self.held.partition(b"\0")
            told = json.loads(text)
            if told.get("id") == self.number:
                assert "error" not in told, told
                return told["result"]

    def open(self, url: str) -> None:
        target = self.call("Target.createTarget", url=url)["targetId"]
        self.session = {"sessionId": self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]}

    def value(self, script: str) -> Any:
        found = self.call("Runtime.evaluate", expression=script, returnByValue=True)
        assert "exceptionDetails" not in found, found
        return found["result"].get("value")

    def wait_for(self, script: str) -> None:
        """Until it is true."""
        until = time.monotonic() + LIMIT_S
        while not self.value(script):
            assert time.monotonic() < until, script
            time.sleep(0.02)


@contextmanager
def page(folder: Path) -> Iterator[Page]:
    """`folder` is the browser's, for its files."""
    assert PROGRAM is not None
    to_read, to_write = os.pipe()
    from_read, from_write = os.pipe()
    # it reads from 3 and writes to 4
    command = f'exec "$0" "$@" 3<&{to_read} 4>&{from_write}'
    options = ["--headless", "--no-sandbox", "--remote-debugging-pipe", f"--user-data-dir={folder}", "about:blank"]
    process = subprocess.Popen(["bash", "-c", command, PROGRAM, *options], pass_fds=(to_read, from_write),
                               stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)  # fmt: skip
    os.close(to_read)
    os.close(from_write)
    found = Page(to_write, from_read)
    try:
        yield found
        found.session = {}
        found.call("Browser.close")
        process.wait(LIMIT_S)
    finally:
        if process.poll() is None:
            process.kill()
            process.wait()
        os.close(to_write)
        os.close(from_read)
