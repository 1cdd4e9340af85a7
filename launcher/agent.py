"""The node agent: a Ray actor that starts one worker process, forwards its output and reports its end at once.

It stands alone (standard library and pyzmq, no manygrad import): Ray ships its source to the actor by value, so an
agent is up without importing the runtime. One thread does everything, for two reasons: a process started with a
parent-death signal dies with the *thread* that started it, and one poll loop gives back-pressure for free (while
the driver does not take messages, the pipes are not read and the worker's prints wait).
"""

from __future__ import annotations

import codecs
import glob
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections import deque
from typing import Any

CHUNK = 1 << 15
DRAIN_S = 0.7  # how long output is still read after the worker's end (a grandchild may hold the pipe open)


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
        """Run one worker to its end. Returns what it wrote to its result pipe (a pickled result, or nothing)."""
        return _Run(spec, payload).loop()


class _Run:
    def __init__(self, spec: dict[str, Any], payload: bytes) -> None:
        import zmq

        self.zmq, self.spec, self.result = zmq, spec, bytearray()
        self.outbox: deque[bytes] = deque()
        self.code: int | None = None
        self.stopped, self.closed = False, False
        self.context = zmq.Context()
        self.sock = self.context.socket(zmq.DEALER)
        for option, value in (
            (zmq.LINGER, 500),
            (zmq.SNDHWM, 64),
            (zmq.IDENTITY, f"agent-{spec['rank']}".encode()),
            (zmq.MAXMSGSIZE, 1 << 20),
        ):
            self.sock.setsockopt(option, value)
        if spec["curve"]:
            self.sock.curve_serverkey = spec["curve"]["server"].encode()
            self.sock.curve_publickey, self.sock.curve_secretkey = (
                spec["curve"][k].encode() for k in ("public", "secret")
            )
        self.sock.connect(spec["control"])
        self._spawn(payload)

    def _spawn(self, payload: bytes) -> None:
        spec = self.spec
        env = (
            dict(spec["environ"])
            if spec["environ"] is not None
            else {k: v for k, v in os.environ.items() if not k.startswith("RAY_")}
        )
        env.update(spec["env"])
        cores = str(max(1, len(os.sched_getaffinity(0)) // spec["local_size"]))
        for name in ("THREADS", "OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"):
            if name not in spec["user_set"]:
                env[name] = cores
        out_r, out_w = os.pipe()
        err_r, err_w = os.pipe()
        res_r, res_w = os.pipe()
        try:
            if not os.path.isdir(spec["cwd"]):
                raise FileNotFoundError(
                    f"folder {spec['cwd']} does not exist on {socket.gethostname()}: start from a folder that all nodes share"
                )
            self.process = subprocess.Popen(
                [sys.executable, "-P", "-m", "manygrad.launcher.worker"],
                stdin=subprocess.PIPE,
                stdout=out_w,
                stderr=err_w,
                pass_fds=(res_w,),
                env=env,
                cwd=spec["cwd"],
                start_new_session=True,
            )
        except OSError as e:
            self._send(type="output", stream="stderr", text=f"cannot start the worker: {e}\n")
            self._send(type="exited", code=127)
            self.code, self.pipes = 127, {}
            for fd in (out_r, err_r, res_r):
                os.close(fd)
            return
        finally:
            for fd in (out_w, err_w, res_w):
                os.close(fd)
        self._send(type="spawned", pid=self.process.pid, host=socket.gethostname())
        self.pipes = {out_r: "stdout", err_r: "stderr", res_r: "result"}
        decoder = codecs.getincrementaldecoder("utf-8")
        self.decoders = {fd: decoder("replace") for fd in self.pipes}
        for fd in self.pipes:
            os.set_blocking(fd, False)
        head = json.dumps(
            {**spec, "result_fd": res_w, "agent_pid": os.getpid(), "environ": None, "payload_nbytes": len(payload)}
        ).encode()
        stdin = self.process.stdin
        assert stdin is not None
        try:
            stdin.write(head + b"\n" + payload)
            stdin.close()
        except OSError:
            pass  # it died at once; its exit says more

    def loop(self) -> bytes:
        zmq, poller = self.zmq, self.zmq.Poller()
        pidfd = -1
        if self.code is None:
            try:
                pidfd = os.pidfd_open(self.process.pid)
                poller.register(pidfd, zmq.POLLIN)
            except (AttributeError, OSError):
                pidfd = -1
        drain_until, stop_after = None, None
        while True:
            poller.register(self.sock, zmq.POLLIN | (zmq.POLLOUT if self.outbox else 0))
            for fd in self.pipes:
                poller.register(fd, 0 if self.outbox else zmq.POLLIN)
            ready = dict(poller.poll(1000 if pidfd >= 0 and not self.stopped else 50))
            if self.sock in ready and ready[self.sock] & zmq.POLLIN:
                self._command(json.loads(self.sock.recv()))
            self._flush()
            for fd in [fd for fd in self.pipes if ready.get(fd)]:
                if not self._forward(fd):
                    poller.unregister(fd)
                    os.close(fd)
                    del self.pipes[fd]
            if self.code is None and (pidfd < 0 or pidfd in ready):
                if self._reap():
                    drain_until = time.monotonic() + DRAIN_S
                    if pidfd >= 0:
                        poller.unregister(pidfd)
                        os.close(pidfd)
                        pidfd = -1
            if (
                self.code is not None
                and not self.closed
                and (not self.pipes or (drain_until is not None and time.monotonic() > drain_until))
            ):
                self._send(type="closed")
                self.closed = True
            if self.stopped and self.code is not None:
                stop_after = stop_after or time.monotonic() + 0.5
                if (self.closed and not self.outbox) or time.monotonic() > stop_after:
                    break
        if self.spec["job"]:
            for path in glob.glob(f"/dev/shm/*{self.spec['job']}*") if self.spec["sweep"] else []:
                try:
                    os.unlink(path)
                except OSError:
                    pass
        self.sock.close()
        self.context.term()
        return bytes(self.result)

    def _command(self, message: dict[str, Any]) -> None:
        if message.get("type") == "signal" and self.code is None:
            try:
                os.killpg(self.process.pid, int(message["signum"]))
            except ProcessLookupError:
                pass
        elif message.get("type") == "stop":
            self.stopped = True
            if self.code is None:
                os.killpg(self.process.pid, signal.SIGKILL)

    def _reap(self) -> bool:
        """Whether the worker has ended; then its process group is killed (before its id is free) and its end reported."""
        try:
            if os.waitid(os.P_PID, self.process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None:
                return False
            os.killpg(self.process.pid, signal.SIGKILL)
        except (ChildProcessError, ProcessLookupError, PermissionError):
            pass
        self.code = self.process.wait()
        self._send(type="exited", code=self.code)
        return True

    def _forward(self, fd: int) -> bool:
        """Pass on what the pipe holds; False at its end."""
        try:
            data = os.read(fd, CHUNK)
        except BlockingIOError:
            return True
        if self.pipes[fd] == "result":
            self.result += data
        else:
            text = self.decoders[fd].decode(data, final=not data)
            if text:
                self._send(type="output", stream=self.pipes[fd], text=text)
        return bool(data)

    def _send(self, **message: Any) -> None:
        self.outbox.append(json.dumps(message).encode())
        self._flush()

    def _flush(self) -> None:
        while self.outbox:
            try:
                self.sock.send(self.outbox[0], self.zmq.NOBLOCK)
            except self.zmq.Again:
                return
            self.outbox.popleft()
