"""The worker's end of the control channel: one DEALER socket owned by one thread of the worker's scope.

The thread sends heartbeats with counters, forwards what the main thread queues, and acts on the driver's orders even
while the main thread computes or waits: `abort` first wakes every wait of the collectives, and if the main thread is
still in the user's code a moment later, a signal raises `LaunchAborted` there. A driver that has gone away (nothing
listens at its address any more), or has not been heard for `silent_s`, is an abort too, after which the process ends
itself; so is an error in this thread, which is the cause of the `LaunchAborted` in the main thread. Where the script
has a handler for Ctrl-C, that of the launcher reaches it as a signal (`interrupt`). A connection that breaks is made
anew, and nothing is lost by that (`link.Conversation`). What was said of one epoch stands in a `RankEpoch`: when the
driver begins the next one, the old one is over and a new one counts from nothing.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from types import FrameType
from typing import Any

import zmq

from manygrad.errors import LaunchAborted, LaunchInterrupted, PlanMismatch, PlanTimeout
from manygrad.tensor.source import is_own
from manygrad.tensor.threads import Threads, tell

from . import messages
from .link import BEAT_S, Broken, Clock, Conversation, Silence
from .training import Training

ABORT_SIGNAL = signal.SIGRTMIN + 7
NUDGE_S = 0.3  # collectives get this long to stop by themselves before the main thread is interrupted
SILENT_S = 60.0  # unless the driver says otherwise
CLOSE_S = 1.0
END_S = 3.0  # what the script's own clean-up gets where nobody is left to end this process


@dataclass(eq=False)
class RankEpoch:
    """What a rank and the driver have told each other in one epoch. `abort_reason` is set once, when it is over."""

    number: int = 0
    cards: list[dict[str, Any]] = field(default_factory=list)
    master: tuple[str, int] = ("127.0.0.1", 0)
    plans_made: int = 0
    plans_agreed: int = 0
    released: bool = False
    training: Training = field(default_factory=Training)
    failed_by: str = ""  # the type of the exception that ended this rank, once the driver was told
    abort_reason: str | None = None
    abort_kind: str = ""
    aborted_at: float = 0.0  # by the channel's clock

    @property
    def has_failed(self) -> bool:
        return self.failed_by != ""


class Channel:
    """Connects rank `rank` with the driver at `address`. All methods may be called from any thread. `epoch` is the one
    that the process starts in, then the one that the driver has begun last.

    Large: both directions, and what is waited for.
    """

    def __init__(
        self,
        address: str,
        rank: int,
        curve: dict[str, str],
        silent_s: float = SILENT_S,
        clock: Clock | None = None,
        threads: Threads | None = None,
        epoch: int = 0,
    ) -> None:
        self.address, self.rank, self.curve, self.silent_s, self.clock = (
            address,
            rank,
            curve,
            silent_s,
            clock or Clock(),
        )
        self.epoch = RankEpoch(epoch)
        self.steps: Callable[[], int] = lambda: 0  # training steps taken so far
        self.disconnect()
        self.in_user_code = False  # in the script, its threads, or its exit handlers
        self.in_script = False  # the main thread is there, where it may be interrupted
        self.changed = threading.Condition()
        self._outbox: deque[tuple[RankEpoch, bytes]] = deque()
        self._conversation = Conversation(epoch, follows=True)
        self._wake_r, self._wake_w = os.pipe()
        os.set_blocking(self._wake_w, False)
        self._closing = False
        self._main = threading.main_thread().ident
        self._no_handlers = (None, signal.SIG_DFL, signal.SIG_IGN, signal.getsignal(signal.SIGINT))
        self._told = (False, False)  # whether it takes interrupts, and can save
        signal.signal(ABORT_SIGNAL, self._interrupt_main)
        self.threads = threads or Threads()
        self._thread = self.threads.start("manygrad-control", self._serve, stop=self._let_go, on_error=self._has_broken)

    def disconnect(self) -> None:
        """There is no endpoint to ask (yet, or any more)."""
        self.on_abort: Callable[[str], None] = lambda reason: None
        # bytes_sent, collective_ms and waited_ms so far
        self.counters: Callable[[], dict[str, int]] = lambda: {"bytes_sent": 0}
        self.entered: Callable[[], tuple[int, str]] = lambda: (0, "")  # collectives entered so far, and the last
        # the rank that it waits for, how many seconds already, and where
        self.waiting: Callable[[], tuple[int, float, str] | None] = lambda: None
        self.meanwhile: Callable[[], None] = lambda: None  # about every second while the main thread waits here

    def next_epoch(self) -> bool:
        """Tell the driver that this process has left the epoch, which has failed, and wait until it begins another.
        False: it begins none."""
        old = self.epoch
        self.send_in(old, "ready")
        with self.changed:
            self.changed.wait_for(lambda: self.epoch is not old or old.released)
        return self.epoch is not old

    def send(self, kind: str, /, **content: Any) -> None:
        """Queue one message for the driver, in this epoch."""
        self.send_in(self.epoch, kind, **content)

    def send_in(self, epoch: RankEpoch, kind: str, /, **content: Any) -> None:
        """Queue one message for the driver, which it gets unless the epoch is over by then."""
        self._outbox.append((epoch, messages.encode(kind, **content)))
        self._wake()

    def fail(self, **content: Any) -> None:
        """Tell the driver how this rank has failed. What its threads wait for will not come."""
        self.epoch.failed_by = content["kind"]
        self.send("failed", **content)
        self.on_abort(f"this rank has failed: {content['kind']}")

    def position(self) -> dict[str, Any]:
        """Where this rank is in its sequence of collectives."""
        count, text = self.entered()
        return {"collectives": count, "collective": text}

    def wait(self, ready: Callable[[], bool], deadline_s: float, what: str, epoch: RankEpoch | None = None) -> None:
        """Wait until `ready()`; raises `LaunchAborted` (or `PlanMismatch`) when the run, or the epoch, ends first,
        `PlanTimeout` at the deadline."""
        until, epoch = time.monotonic() + deadline_s, epoch or self.epoch
        with self.changed:
            while not ready():
                self.check(epoch)
                left = until - time.monotonic()
                if left <= 0:
                    raise PlanTimeout(f"waited {deadline_s:g} s for {what}")
                self.changed.wait(min(left, 1.0))
                self.meanwhile()

    def check(self, epoch: RankEpoch | None = None) -> None:
        """Raise if the run, or the epoch, is over."""
        epoch = epoch or self.epoch
        if epoch.abort_reason is not None:
            raise self.abort_error(epoch)

    def abort_error(self, epoch: RankEpoch) -> BaseException:
        error: BaseException
        if epoch.abort_kind == "plan":
            error = PlanMismatch(rank=self.rank, difference=epoch.abort_reason)
        else:
            error = (LaunchInterrupted if epoch.abort_kind == "interrupt" else LaunchAborted)(epoch.abort_reason)
        error.__cause__ = self._thread.error
        return error

    def close(self, flush_s: float = 1.0) -> None:
        """Send what is queued and stop the thread. Daemon threads that wait here wait no more."""
        self._let_go()
        self._thread.join(flush_s + 1.0)

    def leave_to_parent(self) -> None:
        """In a forked child, where nothing of this runs: the connection, and the run's orders, are the parent's."""
        self.in_user_code = self.in_script = False
        self.changed = threading.Condition()
        if signal.getsignal(signal.SIGTERM) == self._terminate:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)

    # ---- the thread

    def _let_go(self) -> None:
        with self.changed:
            self.epoch.abort_reason = self.epoch.abort_reason or "this rank has ended"
            self.changed.notify_all()
        self._closing = True
        self._wake()

    def _wake(self) -> None:
        try:
            os.write(self._wake_w, b"x")
        except BlockingIOError:
            pass

    def _socket(self) -> tuple[zmq.Socket[bytes], zmq.Socket[bytes]]:
        sock: zmq.Socket[bytes] = zmq.Context.instance().socket(zmq.DEALER)
        for option, value in (
            (zmq.LINGER, 1000),
            (zmq.MAXMSGSIZE, 64 << 20),
            (zmq.IDENTITY, f"worker-{self.rank}".encode()),
            (zmq.HEARTBEAT_IVL, 2000),
            (zmq.HEARTBEAT_TIMEOUT, 10000),
        ):
            sock.setsockopt(option, value)
        sock.curve_serverkey = self.curve["server"].encode()
        sock.curve_publickey, sock.curve_secretkey = (self.curve[k].encode() for k in ("public", "secret"))
        monitor: zmq.Socket[bytes] = sock.get_monitor_socket(zmq.EVENT_DISCONNECTED | zmq.EVENT_HANDSHAKE_SUCCEEDED)
        sock.connect(self.address)
        return sock, monitor

    @property
    def step(self) -> int | None:
        """The step this rank is at, for failure reports; None before the first. Of a training with a Checkpointer it is
        the whole training's."""
        return self.epoch.training.step(self.steps())

    def at_step(self, epoch: RankEpoch, step: int, resumed: bool = False) -> None:
        """So many whole steps are done, says a Checkpointer: from now on this rank can save when it gets SIGTERM. Of
        several that count otherwise (steps, epochs) the one that is furthest counts, unless one has `resumed`."""
        training = epoch.training
        if training.steps_done is None and threading.current_thread() is threading.main_thread():
            if signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:
                signal.signal(signal.SIGTERM, self._terminate)
        with self.changed:
            if resumed or training.steps_done is None or step >= training.steps_done:
                training.steps_done, training.counted_then = step, self.steps()
            self._tell_step(epoch)

    def _tell_step(self, epoch: RankEpoch) -> None:
        """Once the driver has asked, and this rank's training has begun; `changed` is held. From the channel's thread,
        where the script is in a step: there it may wait for a rank that waits for this answer."""
        training = epoch.training
        if training.save_asked and training.told is None and training.steps_done is not None:
            training.told = training.steps_done
            self.send_in(epoch, "atstep", step=training.told)

    def _terminate(self, signum: int, frame: FrameType | None) -> None:
        """SIGTERM: where the training goes on, all ranks save first; the second one, or one at the end, ends this
        process."""
        epoch = self.epoch
        if epoch.training.terminated or epoch.abort_reason is not None or not self.in_script:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            os.kill(os.getpid(), signal.SIGTERM)
            return
        epoch.training.terminated = True
        self.send_in(epoch, "terminated")

    def _has_broken(self, error: BaseException) -> None:
        """In the thread, which an error has ended: a worker that cannot be told anything must not go on."""
        self._abort(f"the control channel broke: {type(error).__name__}: {error}", "gone")
        if self._closing:
            return
        if self.in_script and self._main is not None:
            signal.pthread_kill(self._main, ABORT_SIGNAL)
        time.sleep(END_S)
        if not self.epoch.has_failed:  # the main thread, which tells of it, waits in native code
            tell(self._thread)
        _end_process()

    def _serve(self) -> None:
        sock, monitor = self._socket()
        try:
            self._loop(sock, monitor)
        finally:
            sock.disable_monitor()
            sock.close()

    def _loop(self, sock: zmq.Socket[bytes], monitor: zmq.Socket[bytes]) -> None:
        from zmq.utils.monitor import recv_monitor_message

        clock, conversation = self.clock, self._conversation
        poller = zmq.Poller()
        for s in (sock, monitor):
            poller.register(s, zmq.POLLIN)
        poller.register(self._wake_r, zmq.POLLIN)
        now = clock()
        next_beat, nudged, flushed_by, end_at = now + BEAT_S, 0.0, 0.0, 0.0
        silence, broken = Silence(now), Broken(self.address)
        while True:
            hurries = self._closing or self.epoch.abort_reason is not None
            ready = dict(poller.poll(max(1, int(1000 * clock.real(0.1 if hurries else 0.3)))))
            now = clock()
            if self._wake_r in ready:
                os.read(self._wake_r, 4096)
            self._post()
            if monitor in ready:
                broken.connection(recv_monitor_message(monitor)["event"] != zmq.EVENT_DISCONNECTED, now)
            while sock in ready and sock.poll(0):
                silence.heard(now)
                frames = sock.recv_multipart()
                body = conversation.take(frames[0], frames[1], now)
                if conversation.epoch != self.epoch.number:
                    self._enter(conversation.epoch)
                message = messages.parse_object(body) if body else {"type": "beat"}
                if message["type"] != "beat":
                    self._order(message)
            if now >= next_beat or self._told != self._abilities():
                next_beat = now + BEAT_S
                self._hand(sock, conversation.passing(self._progress()))
            while (due := conversation.next(now)) and self._hand(sock, due):
                conversation.handed(now)
            if conversation.owes:
                self._hand(sock, conversation.passing())
            if self._closing:  # what the driver does not have yet gets a moment to arrive
                flushed_by = flushed_by or now + CLOSE_S
                if not self._outbox and (not conversation.kept or now > flushed_by or self.epoch.abort_kind == "gone"):
                    break
            if self.epoch.abort_reason is None:
                self._look_for_the_driver(broken.gone(now), silence.look(now))
            if (epoch := self.epoch).abort_reason is not None:
                epoch.aborted_at = epoch.aborted_at or now
                if (
                    self.in_script
                    and now - epoch.aborted_at > NUDGE_S
                    and now - nudged > 1.0
                    and self._main is not None
                ):
                    nudged = now
                    signal.pthread_kill(self._main, ABORT_SIGNAL)
                if epoch.abort_kind == "gone":
                    end_at = end_at or time.monotonic() + END_S
                    if time.monotonic() > end_at:
                        _end_process()

    @property
    def takes_interrupt(self) -> bool:
        """Whether the script has set a handler of its own for Ctrl-C."""
        return self.in_user_code and signal.getsignal(signal.SIGINT) not in self._no_handlers

    def _abilities(self) -> tuple[bool, bool]:
        return self.takes_interrupt, self.in_script and self.epoch.training.steps_done is not None

    def _progress(self) -> bytes:
        self._told = self._abilities()
        counters: dict[str, Any] = {"step": self.step, "plans": self.epoch.plans_made, **self.counters()}
        counters["takes_interrupt"], counters["saves"] = self._told
        if (wait := self.waiting()) is not None:
            counters |= {"waits_for": wait[0], "waits_ms": int(1000 * wait[1]), "waits_in": wait[2]}
        return messages.encode("progress", **counters, **self.position(), where=self._where())

    def _where(self) -> str:
        """The main thread's line; where the script has ended, that of a thread that is waited for."""
        if not self.in_user_code:
            return ""
        left = [t.ident for t in threading.enumerate() if not t.daemon and t.ident != self._main and not self.in_script]
        return where_is(sys._current_frames().get((left[0] if left else self._main) or 0))

    def _hand(self, sock: zmq.Socket[bytes], frames: tuple[bytes, bytes]) -> bool:
        try:
            sock.send_multipart(frames, zmq.NOBLOCK)
        except zmq.Again:
            return False
        return True

    def _look_for_the_driver(self, gone: bool, silent_s: float) -> None:
        why = ""
        if gone:
            why = "nothing listens at its address any more"
        elif silent_s > self.silent_s:
            why = (
                f"it was not heard for {self.silent_s:g} s (suspended, or the network is cut); "
                "the knob is HEARTBEAT_TIMEOUT_S"
            )
        if why:
            self._abort(f"the launcher is gone: {why}", "gone")

    def _post(self) -> None:
        """What is queued becomes messages of its epoch; where that is over, nobody wants it."""
        while self._outbox:
            epoch, body = self._outbox.popleft()
            if epoch.number == self._conversation.epoch:
                self._conversation.post(body)

    def _enter(self, number: int) -> None:
        """The driver has begun an epoch: whoever waits in the old one is told that it is over."""
        old, why = self.epoch, f"epoch {self.epoch.number} is over: the launcher has begun epoch {number}"
        with self.changed:
            if self._closing or old.abort_kind == "gone":  # this rank takes part in nothing more
                return
            self.epoch = RankEpoch(number)
            self.changed.notify_all()
        if old.abort_reason is None:
            self._abort(why, "epoch", old)

    def _order(self, message: dict[str, Any]) -> None:
        kind, epoch = message["type"], self.epoch
        with self.changed:
            if kind == "cards":
                epoch.cards, epoch.master = message["cards"], tuple(message["master"])
            elif kind == "plan_ok":
                epoch.plans_agreed = max(epoch.plans_agreed, int(message["n"]))
            elif kind == "release":
                epoch.released = True
            elif kind == "save":
                epoch.training.save_asked = True
                self._tell_step(epoch)
            elif kind == "save_at":
                epoch.training.save_at = int(message["step"])
            self.changed.notify_all()
        if kind == "stacks":
            self.send("stacks", text=stacks_of_threads(self._main))
        if kind == "interrupt" and self.takes_interrupt and self._main is not None:
            signal.pthread_kill(self._main, signal.SIGINT)
        if kind == "abort" and epoch.abort_reason is None:
            self.send("stopping", where=self._where())
            self._abort(str(message["reason"]), str(message["kind"]))

    def _abort(self, reason: str, kind: str, epoch: RankEpoch | None = None) -> None:
        epoch = epoch or self.epoch
        with self.changed:
            epoch.abort_reason, epoch.abort_kind = reason, kind
            self.changed.notify_all()
        try:
            self.on_abort(reason)
        except Exception:  # whatever fails in an endpoint, the run is over; it goes to the rank's log
            traceback.print_exc()

    def _interrupt_main(self, signum: int, frame: FrameType | None) -> None:
        if self.in_script:
            self.check()


def _end_process() -> None:
    os._exit(1)


_OUTSIDE = (os.path.dirname(os.__file__) + os.sep, "<frozen")  # the standard library


def is_user_file(filename: str) -> bool:
    """Whether a source file is the user's: not manygrad's, not the standard library's, not an installed package's."""
    if f"{os.sep}site-packages{os.sep}" in filename or f"{os.sep}dist-packages{os.sep}" in filename:
        return False
    return not is_own(filename) and not filename.startswith(_OUTSIDE)


def stacks_of_threads(main: int | None) -> str:
    """The Python stack of each thread, the main thread's first."""
    names = {t.ident: t.name for t in threading.enumerate()}
    frames = sorted(sys._current_frames().items(), key=lambda x: x[0] != main)
    return "".join(
        f"  thread {names.get(ident, ident)}:\n" + "".join(f"  {line}" for line in traceback.format_stack(frame))
        for ident, frame in frames
    )


def where_is(frame: FrameType | None) -> str:
    """`train.py:31 in step` for the innermost line of user code."""
    innermost, f = "", frame
    while f is not None:
        name = f"{f.f_code.co_filename}:{f.f_lineno} in {f.f_code.co_name}"
        if os.path.dirname(f.f_code.co_filename) != os.path.dirname(__file__):
            innermost = innermost or name
        if is_user_file(f.f_code.co_filename):
            return name
        f = f.f_back
    return innermost
