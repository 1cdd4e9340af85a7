"""The supervisor: a process beside each worker that starts it, forwards its output,
and reports its state and its end at once.

Started by the node agent in a session of its own, so that neither Ray's end nor a terminal's signals reach it. It
imports nothing of manygrad but `link` (with `session`), `janitor` and `spec`, and is up at once. What the worker starts
and detaches becomes the supervisor's, and ends with it. One thread does everything, for two reasons: a process started
with a parent-death signal dies with the *thread* that started it, and one poll loop gives back-pressure for free (while
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
from typing import Any

from .janitor import adopt_orphans, collect_orphans, end_descendants
from .link import BEAT_S, WINDOW, Broken, Clock, Conversation, Silence
from .spec import WorkerSpec, read_spec

# a worker's share of cores, as told to our threads, OpenMP, the libraries of linear algebra, and OpenCL's pocl
SHARES = ("THREADS", "OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS", "POCL_MAX_PTHREAD_COUNT")

CHUNK = 1 << 15
DRAIN_S = 0.7  # how long output is still read after the worker's end (a grandchild may hold the pipe open)
ALONE_S = 3.0  # without a launcher, the worker gets this long to end by itself after SIGTERM
FLUSH_S = 0.5  # for the last messages after the order to stop


def main() -> None:
    """Become a process of our own, say its id, take the spec, and run the worker to its end."""
    if pid := os.fork():
        os.write(1, b"%d\n" % pid)
        os._exit(0)
    if (told := read_spec()) is None:
        return
    os.dup2(0, 1)
    for s in (signal.SIGINT, signal.SIGHUP):
        signal.signal(s, signal.SIG_IGN)
    adopt_orphans()
    Supervisor(*told).loop()


class Supervisor:
    def __init__(self, spec: WorkerSpec, payload: bytes) -> None:
        self.spec, self.result = spec, bytearray()
        self.clock = Clock(spec.clock_rate)
        self.conversation = Conversation(spec.epoch)
        self.code: int | None = None
        self.stopped = self.closed = False
        self._spawn(payload)  # the worker imports its runtime while we import ZeroMQ
        self._connect()

    def _connect(self) -> None:
        import zmq

        spec, self.zmq = self.spec, zmq
        self.context = zmq.Context()
        self.sock = self.context.socket(zmq.DEALER)
        for option, value in (
            (zmq.LINGER, 500),
            (zmq.SNDHWM, 64),
            (zmq.IDENTITY, f"agent-{spec.rank}".encode()),
            (zmq.MAXMSGSIZE, 1 << 20),
            (zmq.HEARTBEAT_IVL, 2000),
            (zmq.HEARTBEAT_TIMEOUT, 10000),
        ):
            self.sock.setsockopt(option, value)
        self.sock.curve_serverkey = spec.curve["server"].encode()
        self.sock.curve_publickey, self.sock.curve_secretkey = (spec.curve[k].encode() for k in ("public", "secret"))
        self.monitor = self.sock.get_monitor_socket(zmq.EVENT_DISCONNECTED | zmq.EVENT_HANDSHAKE_SUCCEEDED)
        self.sock.connect(spec.control)

    def _spawn(self, payload: bytes) -> None:
        spec = self.spec
        env = (
            dict(spec.environ)
            if spec.environ is not None
            else {k: v for k, v in os.environ.items() if not k.startswith("RAY_")}
        )
        env.update(spec.env)
        cores = str(max(1, len(os.sched_getaffinity(0)) // spec.local_size))
        for name in SHARES:
            if name not in spec.user_set:
                env[name] = cores
        out_r, out_w = os.pipe()
        err_r, err_w = os.pipe()
        res_r, res_w = os.pipe()
        try:
            if not os.path.isdir(spec.cwd):
                raise FileNotFoundError(
                    f"folder {spec.cwd} does not exist on {socket.gethostname()}: "
                    "start from a folder that all nodes have"
                )
            self.process = subprocess.Popen(
                [sys.executable, "-P", "-m", "manygrad.launcher.worker"],
                stdin=subprocess.PIPE,
                stdout=out_w,
                stderr=err_w,
                pass_fds=(res_w,),
                env=env,
                cwd=spec.cwd,
                start_new_session=True,
            )
        except (OSError, ValueError) as e:
            self._send(type="output", stream="stderr", text=f"cannot start the worker: {e}\n")
            self._send(type="exited", code=127)
            self.code, self.pipes = 127, {}
            for fd in (out_r, err_r, res_r):
                os.close(fd)
            return
        finally:
            for fd in (out_w, err_w, res_w):
                os.close(fd)
        self._send(type="spawned", pid=self.process.pid, host=socket.gethostname(), agent_pid=os.getpid())
        self.pipes = {out_r: "stdout", err_r: "stderr", res_r: "result"}
        decoder = codecs.getincrementaldecoder("utf-8")
        self.decoders = {fd: decoder("replace") for fd in self.pipes}
        for fd in self.pipes:
            os.set_blocking(fd, False)
        head = spec.line(result_fd=res_w, agent_pid=os.getpid(), environ=None, payload_nbytes=len(payload))
        stdin = self.process.stdin
        assert stdin is not None
        try:
            stdin.write(head + payload)
            stdin.close()
        except OSError:
            pass  # it died at once; its exit says more

    def loop(self) -> None:
        zmq, poller, clock = self.zmq, self.zmq.Poller(), self.clock
        pidfd = -1
        if self.code is None:
            try:
                pidfd = os.pidfd_open(self.process.pid)
                poller.register(pidfd, zmq.POLLIN)
            except (AttributeError, OSError):
                pidfd = -1
        poller.register(self.monitor, zmq.POLLIN)
        silence, broken, next_beat = Silence(clock()), Broken(self.spec.control), 0.0
        drain_until = stop_after = alone_since = 0.0
        while True:
            full = len(self.conversation.kept) >= WINDOW
            poller.register(self.sock, zmq.POLLIN)
            for fd in self.pipes:
                poller.register(fd, 0 if full else zmq.POLLIN)
            wait_s = clock.real(0.3) if pidfd >= 0 and not self.stopped else clock.real(0.05)
            ready = dict(poller.poll(max(1, int(1000 * wait_s))))
            now = clock()
            if self.monitor in ready:
                broken.connection(self._monitor_event() != zmq.EVENT_DISCONNECTED, now)
            while ready.get(self.sock) and self.sock.poll(0):
                silence.heard(now)
                self._take(self.sock.recv_multipart(), now)
            for fd in [fd for fd in self.pipes if ready.get(fd)]:
                if not self._forward(fd):
                    poller.unregister(fd)
                    os.close(fd)
                    del self.pipes[fd]
            if self.code is None and (pidfd < 0 or pidfd in ready):
                if self._reap():
                    drain_until = now + DRAIN_S
                    if pidfd >= 0:
                        poller.unregister(pidfd)
                        os.close(pidfd)
                        pidfd = -1
            collect_orphans(self.process.pid if self.code is None else 0)
            if self.code is not None and not self.closed and (not self.pipes or (drain_until and now > drain_until)):
                self._keep_result()
                self._send(type="closed")
                self.closed = True
            if now >= next_beat:
                next_beat = now + BEAT_S
                self._beat()
            self._flush(now)
            if self.stopped and self.code is not None:
                stop_after = stop_after or now + FLUSH_S
                if (self.closed and not self.conversation.kept) or now > stop_after:
                    break
            if broken.gone(now) or silence.look(now) > self.spec.silent_s:
                alone_since = alone_since or now
                if self.code is None:
                    self._signal(signal.SIGKILL if now - alone_since > ALONE_S else signal.SIGTERM)
                elif self.closed or now - alone_since > ALONE_S + DRAIN_S:
                    break
        self._tidy()
        self.sock.disable_monitor()
        self.context.destroy(500)
        if not self.spec.scratch:
            try:
                with os.fdopen(self.spec.result_fd, "wb") as f:
                    f.write(self.result)
            except OSError:
                pass  # the agent is gone, and Ray with it

    def _monitor_event(self) -> int:
        from zmq.utils.monitor import recv_monitor_message

        return int(recv_monitor_message(self.monitor)["event"])

    def _take(self, frames: list[bytes], now: float) -> None:
        try:
            body = self.conversation.take(frames[0], frames[1], now)
            message = json.loads(body) if body else {}
        except (ValueError, IndexError):
            return
        if message.get("type") == "signal":
            self._signal(int(message["signum"]))
        elif message.get("type") == "stop":
            self.stopped = True
            self._signal(signal.SIGKILL)

    def _signal(self, signum: int) -> None:
        if self.code is None:
            try:
                os.killpg(self.process.pid, signum)
                os.killpg(self.process.pid, signal.SIGCONT)  # a stopped process would take no SIGTERM
            except ProcessLookupError:
                pass

    def _reap(self) -> bool:
        """Whether the worker has ended; then its process group is killed (before its id is free)
        and its end reported."""
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

    def _keep_result(self) -> None:
        """The function's pickled result goes into the driver's own folder, if that is on this host; else to the agent.
        Never through a socket."""
        if not self.result or not self.spec.scratch:
            return
        path = os.path.join(self.spec.scratch, f"result-{self.spec.rank}")
        try:
            with open(os.open(path + ".tmp", os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "wb") as f:
                f.write(self.result)
            os.rename(path + ".tmp", path)
        except OSError as e:
            self._send(type="output", stream="stderr", text=f"cannot keep the function's result: {e}\n")

    def _beat(self) -> None:
        """Say that we are here, and how the worker's process is: its state (`T`: stopped)
        and the CPU time it has used."""
        state, cpu_ms = "", 0
        if self.code is None:
            try:
                with open(f"/proc/{self.process.pid}/stat", "rb") as f:
                    fields = f.read().rpartition(b")")[2].split()
                state = fields[0].decode()
                cpu_ms = int((int(fields[11]) + int(fields[12])) * 1000 / os.sysconf("SC_CLK_TCK"))
            except (OSError, IndexError, ValueError):
                pass
        self._hand(
            self.conversation.passing(json.dumps({"type": "agentbeat", "process": state, "cpu_ms": cpu_ms}).encode())
        )

    def _send(self, **message: Any) -> None:
        self.conversation.post(json.dumps(message).encode())

    def _flush(self, now: float) -> None:
        while (frames := self.conversation.next(now)) and self._hand(frames):
            self.conversation.handed(now)
        if self.conversation.owes:
            self._hand(self.conversation.passing())

    def _hand(self, frames: tuple[bytes, bytes]) -> bool:
        try:
            self.sock.send_multipart(frames, self.zmq.NOBLOCK)
        except self.zmq.Again:
            return False
        return True

    def _tidy(self) -> None:
        """End what the worker has left running, and remove the job's shared memory;
        on the driver's host that is the janitor's."""
        end_descendants()
        for path in glob.glob(f"/dev/shm/*{self.spec.job}*") if self.spec.sweep else []:
            try:
                os.unlink(path)
            except OSError:
                pass
