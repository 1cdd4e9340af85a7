"""A worker process: join the other ranks, run the user's script or function as rank r, report the end.

Started by the supervisor as `python -m manygrad.launcher.worker` with its spec (one line of JSON) on standard input,
followed by the pickled function if there is one. Never imports Ray.
"""

from __future__ import annotations

import atexit
import ctypes
import gc
import importlib
import io
import os
import runpy
import signal
import socket
import sys
import traceback
from dataclasses import fields, replace
from types import TracebackType
from typing import Any

from manygrad.errors import (
    EXIT_TERMINATED,
    CollectiveAborted,
    CollectiveTimeout,
    LaunchAborted,
    OtherRankFailed,
    PeerLost,
    PlanTimeout,
    Preempted,
)

from .spec import WorkerSpec, read_spec

PR_SET_PDEATHSIG = 1
THREADS_S = 1.0  # how long the end waits for threads


def main() -> int:
    """The pipeline of one worker; returns its exit code."""
    told = read_spec()
    if told is None:
        raise SystemExit("manygrad.launcher.worker is started by the launcher, not by hand; see `launcher --help`")
    spec, payload = told
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(line_buffering=True)
    die_with(spec.agent_pid)
    # Ray starts processes with it blocked; ignored it stays, until the script has a handler (`Channel.takes_interrupt`)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGINT])
    from manygrad.runtime.current import current

    from .channel import Channel
    from .link import Clock
    from .process_state import ProcessState

    clock, threads = Clock(spec.clock_rate), current().threads
    channel = Channel(spec.control, spec.rank, spec.curve, spec.silent_s, clock, threads, spec.epoch)
    before = ProcessState(spec.agent_pid) if may_go_on(spec) else None
    # registered first, it is called last: threads and handlers that the script leaves to its end belong to the run
    atexit.register(finish, spec, channel)
    os.register_at_fork(after_in_child=lambda: become_child(channel))
    if before is None:
        return attempt(spec, payload, channel)
    while True:
        code = int(before.run(attempt, spec, payload, channel))
        if not channel.epoch.has_failed:
            return code
        if why := why_not_again(channel, before):
            sys.stderr.write(f"rank {spec.rank}: a new process takes its place in another attempt: {why}\n")
            return code
        if not channel.next_epoch():
            return code
        spec = replace(spec, epoch=channel.epoch.number)


def may_go_on(spec: WorkerSpec) -> bool:
    """Whether this process may run the script again in another epoch; not where a step that failed keeps what it has
    read."""
    from manygrad.tensor.environment import FAILED_STEPS

    return spec.restarts and not FAILED_STEPS.value


def attempt(spec: WorkerSpec, payload: bytes, channel: Any) -> int:
    """Run the user's code in the epoch of `spec`, and tell the driver how it has failed; returns the exit code."""
    me = os.getpid()
    try:
        join(spec, channel)
        channel.send("started")
        return run_user_code(spec, payload, channel)
    except BaseException as e:
        if os.getpid() != me:  # a forked child, which ends as Python's do
            raise
        return report_failure(e, spec, channel)


def why_not_again(channel: Any, before: Any) -> str:
    """Leave the epoch, which has failed, and all that the script has changed. Returns why this process is not to run
    it again, or nothing."""
    from manygrad.runtime.current import current

    epoch, channel.in_user_code = channel.epoch, False
    if current().world.epoch != epoch.number or not epoch.cards:
        return "it has not joined the others"
    if epoch.training.terminated:
        return "it got SIGTERM"
    if epoch.failed_by in ("MemoryError", "KeyboardInterrupt") or epoch.abort_kind == "gone":
        return f"it has met a {epoch.failed_by}"
    channel.disconnect()
    try:
        return str(before.restore())
    except Exception as e:  # whatever the script has left that is in the way
        return f"what the script has changed cannot be undone: {type(e).__name__}: {e}"


def finish(spec: WorkerSpec, channel: Any) -> None:
    """The last exit handler: this rank has nothing left to do, and waits for the others, unless it has failed."""
    from manygrad.runtime.current import current

    channel.in_user_code = False
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        gc.collect()  # what destructors of the script's objects do belongs to the run, too
        if not channel.epoch.has_failed:
            for threads in (channel.threads, current().epoch.threads):
                threads.check()  # an error in a thread of ours that nobody has waited for
            channel.send("finished", **channel.position(), **channel.counters())
            channel.wait(lambda: channel.epoch.released, float("inf"), "the other ranks to finish")
    except BaseException as e:
        report_failure(e, spec, channel)
    finally:
        left = current().end()
        channel.close()
        if left := [*left, *channel.threads.close(THREADS_S)]:
            sys.stderr.write(f"rank {spec.rank} ends while its threads still run: {', '.join(left)}\n")


def die_with(agent_pid: int) -> None:
    """Be killed when the supervisor dies, however it dies; if it is dead already, end here."""
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != agent_pid:
        raise SystemExit("the supervisor is gone")


def join(spec: WorkerSpec, channel: Any) -> None:
    """Rendezvous: tell the driver this rank's card, wait for everyone's, connect."""
    from manygrad.multi.world import Membership
    from manygrad.runtime.current import current
    from manygrad.runtime.profile.counters import steps_taken

    from .messages import PROTOCOL
    from .plans import hooks_over

    runtime = current()
    me = Membership(**{f.name: getattr(spec, f.name) for f in fields(Membership)})
    sys.path.extend(p for p in spec.sys_path if p not in sys.path and os.path.isdir(p))
    module, _, name = spec.endpoint.partition(":")
    endpoint = getattr(importlib.import_module(module), name)(
        rank=me.rank, size=me.size, job=me.job, epoch=me.epoch, bind_host=spec.bind_host
    )
    channel.on_abort, channel.counters = endpoint.abort, lambda: counters(endpoint, runtime.communication)
    channel.waiting, channel.meanwhile = endpoint.waiting, endpoint.keep_going
    with socket.socket() as s:
        s.bind((spec.bind_host, 0))
        port = s.getsockname()[1]
    channel.send(
        "hello",
        card=endpoint.card(),
        host=socket.gethostname(),
        ip=spec.bind_host,
        pid=os.getpid(),
        port=port,
        protocol=PROTOCOL,
    )
    epoch = channel.epoch
    channel.wait(lambda: bool(epoch.cards), spec.start_timeout_s, "all ranks to start")
    endpoint.connect(epoch.cards, deadline_s=spec.start_timeout_s)
    os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"] = epoch.master[0], str(epoch.master[1])
    runtime.enter(me, endpoint, hooks_over(channel, may_go_on(spec)))
    channel.entered, channel.steps = lambda: runtime.communication.entered, steps_taken


def become_child(channel: Any) -> None:
    """In a forked child, which is no rank."""
    from manygrad.runtime.current import current

    atexit.unregister(finish)
    channel.leave_to_parent()
    current().become_child()


def counters(endpoint: Any, communication: Any) -> dict[str, int]:
    """Cost of communication to this rank so far."""
    return {
        "bytes_sent": int(endpoint.bytes_sent),
        "collective_ms": int(1000 * communication.time_s),
        "waited_ms": int(1000 * communication.waited_s),
    }


def run_user_code(spec: WorkerSpec, payload: bytes, channel: Any) -> int:
    """Run the script, module or function in the main thread; returns 0, or the code of its `sys.exit`."""
    me, channel.in_user_code, channel.in_script = os.getpid(), True, True
    try:
        channel.check()
        if spec.kind == "function":
            call_function(payload, spec)
        else:
            run_script(spec.kind, spec.target, spec.args)
    except SystemExit as e:
        channel.in_script = False
        if os.getpid() != me:
            raise
        code = exit_code_of(e)
        if code:
            channel.fail(
                kind="SystemExit",
                message=f"sys.exit({e.code!r})",
                traceback="",
                where=failing_line(e.__traceback__),
                step=channel.step,
                code=code,
                consequence=channel.epoch.abort_reason is not None,
            )
            if not isinstance(e.code, int):
                print(e.code, file=sys.stderr)
        return code
    finally:
        channel.in_script = False
    return 0


def run_script(kind: str, target: str, args: list[str]) -> None:
    """Run `target` as `python target args...` or `python -m target args...` would."""
    if kind == "module":
        sys.argv = [target, *args]
        sys.path.insert(0, os.getcwd())
        runpy.run_module(target, run_name="__main__", alter_sys=True)
    else:
        sys.argv = [target, *args]
        sys.path.insert(0, os.path.dirname(os.path.realpath(target)))  # (of a link, where it leads)
        runpy.run_path(target, run_name="__main__")


def call_function(payload: bytes, spec: WorkerSpec) -> None:
    """Call the pickled function and write its pickled result to the agent's pipe."""
    from . import pickled

    fn, args, kwargs = pickled.loads(payload)  # from the driver through the agent, not from a socket of ours
    result = fn(*args, **kwargs)
    try:
        data = pickled.dumps(result)
    except Exception as e:
        raise TypeError(
            f"launch: rank {spec.rank} returned a {type(result).__name__} that cannot be pickled: {e}; "
            "return plain values or NumPy arrays"
        ) from e
    with os.fdopen(spec.result_fd, "wb") as f:
        f.write(data)


def exit_code_of(e: SystemExit) -> int:
    """The process exit code of a `SystemExit`, as Python computes it."""
    if e.code is None:
        return 0
    return (e.code & 0xFF or (1 if e.code else 0)) if isinstance(e.code, int) else 1


def report_failure(e: BaseException, spec: WorkerSpec, channel: Any) -> int:
    """Send the driver the exception that ended this rank; its traceback starts at the user's code."""
    channel.in_script = False
    code = exit_code_of(e) if isinstance(e, SystemExit) else EXIT_TERMINATED if isinstance(e, Preempted) else 1
    tb = strip_runner(e.__traceback__)
    text = text_of(e, tb)
    waited_for, peer = (
        waited_in_vain(e)
        if channel.epoch.abort_reason is None
        else ("launcher" * (channel.epoch.abort_kind == "gone"), -1)
    )
    channel.fail(
        kind=type(e).__name__,
        message=message_of(e),
        traceback="" if isinstance(e, Preempted) else text,
        waited_for=waited_for,
        peer=peer,
        where=failing_line(tb),
        step=channel.step,
        code=code or 1,
        consequence=is_consequence(e) or channel.epoch.abort_kind in ("plan", "gone", "interrupt", "preempted"),
    )
    if not (is_consequence(e) or channel.epoch.abort_reason):
        from manygrad.runtime.engine.failed_step import save_failed_step

        save_failed_step(e)
    if channel.epoch.abort_kind == "gone":
        sys.stderr.write(text.encode("utf-8", "backslashreplace").decode())
    return code or 1


def message_of(e: BaseException) -> str:
    """The text of an exception, on whose `__str__` there is no relying (it may even call `sys.exit`);
    empty if it has none."""
    try:
        return str(e)
    except BaseException as other:
        return f"(its __str__ raises {type(other).__name__})"


def text_of(e: BaseException, tb: TracebackType | None) -> str:
    """The traceback as Python prints it, or what can be had of it."""
    try:
        return "".join(traceback.format_exception(type(e), e, tb))
    except BaseException:
        return "".join(traceback.format_tb(tb)) + f"{type(e).__name__}: {message_of(e)}\n"


def waited_in_vain(e: BaseException | None) -> tuple[str, int]:
    """Names what the exception, or one it was raised from, had waited for until its deadline:
    `Failed.waited_for` and `.peer`."""
    seen: set[int] = set()
    while e is not None and id(e) not in seen:
        seen.add(id(e))
        if isinstance(e, CollectiveTimeout):
            return "collective", int(e.fields["peer"])
        if isinstance(e, PeerLost):
            return "peer", int(e.fields["peer"])
        if isinstance(e, OtherRankFailed) and e.fields["peer"] >= 0:
            return "checkpoint", int(e.fields["peer"])
        if isinstance(e, PlanTimeout):
            return "plan", -1
        e = e.__cause__ or e.__context__
    return "", -1


def is_consequence(e: BaseException | None) -> bool:
    """Whether the exception, or one it was raised from, only reports another rank's failure."""
    seen: set[int] = set()
    while e is not None and id(e) not in seen:
        seen.add(id(e))
        if isinstance(e, (LaunchAborted, CollectiveAborted, PeerLost, OtherRankFailed)):
            return True
        e = e.__cause__ or e.__context__
    return False


def strip_runner(tb: TracebackType | None) -> TracebackType | None:
    """The traceback without the frames of this module and runpy at its start."""
    first = tb
    while first is not None and (
        first.tb_frame.f_code.co_filename == __file__ or "runpy" in first.tb_frame.f_code.co_filename
    ):
        first = first.tb_next
    return first or tb


def failing_line(tb: TracebackType | None) -> str:
    """`train.py:31 in step` for the innermost user line of a traceback."""
    from .channel import is_user_file

    frames = traceback.extract_tb(tb)
    users = [f for f in frames if is_user_file(f.filename)] or [
        f for f in frames if os.path.dirname(f.filename) != os.path.dirname(__file__)
    ]
    return f"{users[-1].filename}:{users[-1].lineno} in {users[-1].name}" if users else ""


if __name__ == "__main__":
    raise SystemExit(main())
