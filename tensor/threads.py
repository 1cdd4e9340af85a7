"""The scope of an owner's threads: it starts, names and ends them, and loses no error of theirs.

    threads = Threads()
    worker = threads.start("manygrad-digest", work, stop=over.set)
    worker.check()          # raises what has ended it, if anything has
    threads.check()         # the same for all whose error nobody has been told of
    threads.close(1.0)      # asks each to end, the last one first, and waits for all of them

As in trio's nurseries no thread outlives its scope, with one difference: what waits in native code, or for a terminal
that is held, cannot be ended from here. All are daemons, so that the process can end all the same; `close` names them.
"""

from __future__ import annotations

import sys
import threading
import time
import traceback
from collections.abc import Callable
from typing import Any


def _nothing() -> None:
    pass


class ScopedThread(threading.Thread):
    """A thread of a scope. `error` is what ended it, `is_told` whether somebody has learnt of that."""

    def __init__(
        self,
        name: str,
        work: Callable[[], object],
        stop: Callable[[], None],
        on_error: Callable[[BaseException], None] | None,
    ) -> None:
        super().__init__(name=name, daemon=True)
        self._work, self.stop, self._on_error = work, stop, on_error
        self.error: BaseException | None = None
        self.is_told = False

    def run(self) -> None:
        try:
            self._work()
        except BaseException as e:  # whatever it is, it would end here with a line on stderr that no caller sees
            e.add_note(f"(this has ended the thread {self.name})")
            self.error = e
            if self._on_error is not None:
                self._on_error(e)
        finally:
            del self._work, self._on_error  # what they hold is not needed for longer than they run

    def check(self) -> None:
        """Raise the error that has ended this thread, if one has."""
        if self.error is not None:
            self.is_told = True
            raise self.error


class Threads:
    """Starts threads for one owner, and ends them with it. All methods may be called from any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._threads: list[ScopedThread] = []
        self._closed = False

    def start(
        self,
        name: str,
        work: Callable[..., object],
        *args: Any,
        stop: Callable[[], None] = _nothing,
        on_error: Callable[[BaseException], None] | None = None,
    ) -> ScopedThread:
        """Run `work(*args)` in a new thread. `stop` makes it end soon; `on_error` is called in it with what has ended
        it. Raises RuntimeError once the scope is closed."""
        thread = ScopedThread(name, lambda: work(*args), stop, on_error)
        with self._lock:
            if self._closed:
                raise RuntimeError(f"the thread {name} is not started: its owner has ended")
            self._threads = [t for t in self._threads if t.is_alive() or (t.error is not None and not t.is_told)]
            thread.start()
            self._threads.append(thread)
        return thread

    def alive(self) -> list[str]:
        """Names of the threads that have not ended."""
        with self._lock:
            return [t.name for t in self._threads if t.is_alive()]

    def check(self) -> None:
        """Raise the first error of a thread of which nobody has been told."""
        with self._lock:
            failed = [t for t in self._threads if t.error is not None and not t.is_told]
        for thread in failed[:1]:
            thread.check()

    def close(self, deadline_s: float) -> list[str]:
        """End all threads, the last one first; returns the names of those that have not ended within the deadline.
        Errors of which nobody has been told are written to stderr: whoever closes is at his end, too."""
        with self._lock:
            self._closed = True
            threads = self._threads[::-1]
        until = time.monotonic() + deadline_s
        for t in threads:
            t.stop()
        for t in threads:
            if t is not threading.current_thread():
                t.join(max(0.0, until - time.monotonic()))
            if t.error is not None and not t.is_told:
                tell(t)
        return [t.name for t in threads if t.is_alive()]


def tell(thread: ScopedThread) -> None:
    """Write what has ended a thread to stderr, which for a rank is its log and the launcher's terminal."""
    assert thread.error is not None
    thread.is_told = True
    if sys.stderr is not None:
        text = "".join(traceback.format_exception(thread.error))
        sys.stderr.write(f"the thread {thread.name} has ended by an error:\n{text}")
        sys.stderr.flush()
