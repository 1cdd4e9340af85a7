"""Signals that end a run: raised while Ray is being started, values for the controller afterwards.

A signal's handler raises wherever it finds the main thread. In a destructor, or in what runs around a fork, Python
prints such an exception and goes on; here it is raised again a moment later, and nothing is printed.
"""

from __future__ import annotations

import signal
import sys
import threading
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

from manygrad.tensor.threads import Threads

AGAIN_S, CLOSE_S = 0.01, 1.0
START_FAILED = signal.SIGRTMIN + 6  # our Ray has died at the start


class StartInterrupted(BaseException):
    """A signal came before the ranks were supervised."""

    def __init__(self, signum: int) -> None:
        super().__init__(signum)
        self.signum = signum


class StartFailed(BaseException):
    """Our Ray has died before the ranks were supervised. Not an `Exception`: Ray would try again."""


class Signals:
    """Ctrl-C and SIGTERM as values: queued, for the run while it is supervised and for `check` before;
    raised within `raising`."""

    def __init__(self, last: bool = False) -> None:
        self.last = last
        self.queue: deque[int] = deque()
        self.saved = dict[int, Any]()
        self.failed = ""  # why the start failed, if it did
        self.supervised = False  # the run has its loop
        self._raising = False
        self._threads, self._calm = Threads(), threading.Event()  # for what is raised again; set: no more of it
        self._hook = sys.unraisablehook

    def __enter__(self) -> Signals:
        if threading.current_thread() is threading.main_thread():
            for s in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, START_FAILED):
                self.saved[s] = signal.signal(s, self._take)
        return self

    def again(self) -> None:
        """Put the handlers back in place (Ray sets its own when it starts)."""
        for s in self.saved:
            signal.signal(s, self._take)

    @contextmanager
    def raising(self) -> Iterator[None]:
        """Within it a signal is raised where it finds us: Ray takes its time."""
        self.check()
        self._threads, self._calm = Threads(), threading.Event()
        self._hook, sys.unraisablehook = sys.unraisablehook, self._raised_in_vain
        self._raising = True
        try:
            yield
        except Exception:  # any: what Ray makes of a signal that comes within it
            self.check()
            raise
        except SystemExit as e:  # (Ray has a handler of its own for SIGTERM from some moment of its start on)
            if e.code == signal.SIGTERM:
                raise StartInterrupted(signal.SIGTERM) from None
            raise
        finally:
            self._raising = False
            sys.unraisablehook = self._hook
            self._calm.set()
            self._threads.close(CLOSE_S)
            self.again()
        self.check()  # it may have come in the last moment

    def check(self) -> None:
        """Raise what has come before the run is supervised."""
        if self.failed:
            raise StartFailed(self.failed)
        if self.queue:
            raise StartInterrupted(self.queue[0])

    def _take(self, signum: int, frame: FrameType | None) -> None:
        if signum != START_FAILED:
            self.queue.append(signum)
        if self._raising:
            self._raising = False
            self.check()

    def _raised_in_vain(self, raised: sys.UnraisableHookArgs) -> None:
        """Raises again, a moment later, what was raised where Python lets nothing out."""
        if not issubclass(raised.exc_type, StartInterrupted | StartFailed):
            self._hook(raised)
        elif threading.current_thread() is threading.main_thread():
            self._raising = True
            self._threads.start("manygrad-signal-again", self._send_again, threading.get_ident())

    def _send_again(self, thread: int) -> None:
        if not self._calm.wait(AGAIN_S):
            signal.pthread_kill(thread, START_FAILED)

    def __exit__(self, *exc: object) -> None:
        for s, handler in self.saved.items() if not self.last else ():
            signal.signal(s, handler if handler is not None else signal.SIG_DFL)
