"""The node agent: a Ray actor that starts a rank's supervisor on its node, holds the node's CPU for it,
and waits for its end.

It stands alone (standard library, no manygrad import): Ray ships its source to the actor by value, so an agent is up
without importing the runtime. The supervisor (`supervisor.py`) is a process of a session of its own and no child of the
actor: Ray is needed to find the places, and a run goes on to its end when Ray dies.
"""

from __future__ import annotations

import importlib.util
import json
import os
import signal
import socket
import subprocess
import sys
from typing import Any

# The package's folder without its root module, which would import the whole runtime.
BOOT = (
    "import sys, types; p = types.ModuleType('manygrad'); p.__path__ = sys.argv[1:]; sys.modules['manygrad'] = p; "
    "from manygrad.launcher.supervisor import main; main()"
)


class Agent:
    def host(self) -> dict[str, Any]:
        """Where this actor runs."""
        import ray

        return {
            "host": socket.gethostname(),
            "cores": len(os.sched_getaffinity(0)),
            "node_id": ray.get_runtime_context().get_node_id(),
        }

    def run(self, spec: dict[str, Any], payload: bytes) -> bytes:
        """Have one worker run to its end under a supervisor. `spec` is a `WorkerSpec` (`spec.py`) as a dict. Returns
        the worker's pickled result, or nothing."""
        package = importlib.util.find_spec("manygrad")
        if package is None or not package.submodule_search_locations:
            raise RuntimeError(f"manygrad is not installed for {sys.executable} on {socket.gethostname()}")
        reader, writer = os.pipe()  # its end is the supervisor's; before, a result comes through it
        try:
            start(spec, payload, list(package.submodule_search_locations), writer)
        finally:
            os.close(writer)
        with os.fdopen(reader, "rb") as f:
            return f.read()


def start(spec: dict[str, Any], payload: bytes, package: list[str], writer: int) -> None:
    """Start the supervisor. The process made here only makes it, and ends."""
    starter = subprocess.Popen(
        [sys.executable, "-P", "-c", BOOT, *package],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        pass_fds=(writer,),
        env=dict(os.environ) | {"MANYGRAD_JOB": spec["job"], "MANYGRAD_START": f"{spec['epoch']}.{spec['rank']}"},
        cwd="/",
        start_new_session=True,
    )
    assert starter.stdin is not None and starter.stdout is not None
    pid = int(starter.stdout.readline() or 0)
    if not pid:
        raise RuntimeError(f"the supervisor of rank {spec['rank']} did not start: exit code {starter.wait()}")
    try:
        head = {**spec, "result_fd": writer, "payload_nbytes": len(payload)}
        starter.stdin.write(json.dumps(head).encode() + b"\n" + payload)
        starter.stdin.close()
    except OSError:
        os.kill(pid, signal.SIGKILL)
        raise
    starter.wait()
