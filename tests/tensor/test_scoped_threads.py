"""The scope of an owner's threads: no error is lost, and none outlives it unsaid."""

from __future__ import annotations

import sys
import threading
import traceback
from collections.abc import Iterator

import pytest

from manygrad.tensor.threads import ScopedThread, Threads


@pytest.fixture
def gate() -> Iterator[threading.Event]:
    """Threads wait at it, and go on when the test is over."""
    event = threading.Event()
    yield event
    event.set()


def fail(text: str) -> None:
    raise ValueError(text)


def ended(thread: ScopedThread) -> ScopedThread:
    thread.join(20)
    assert not thread.is_alive()
    return thread


def test_an_error_is_raised_where_the_thread_is_asked_for() -> None:
    threads, seen = Threads(), list[BaseException]()
    thread = ended(threads.start("manygrad-test", fail, "lost", on_error=seen.append))
    assert thread.name == "manygrad-test" and thread.daemon and seen == [thread.error]
    with pytest.raises(ValueError, match="lost") as raised:
        thread.check()
    shown = "".join(traceback.format_exception(raised.value))
    assert "(this has ended the thread manygrad-test)" in shown and "in fail" in shown
    threads.check()  # it is told
    ended(threads.start("manygrad-test", lambda: None)).check()


def test_what_nobody_was_told_of_is_raised_once(capfd: pytest.CaptureFixture[str]) -> None:
    threads = Threads()
    for text in ("first", "second"):
        ended(threads.start(text, fail, text))
    ended(threads.start("exits", sys.exit, 3))
    for text in ("first", "second"):
        with pytest.raises(ValueError, match=text):
            threads.check()
    with pytest.raises(SystemExit):
        threads.check()
    threads.check()
    assert threads.close(1.0) == [] and capfd.readouterr().err == ""


def test_the_end_of_a_scope_writes_what_is_left(capfd: pytest.CaptureFixture[str]) -> None:
    threads = Threads()
    ended(threads.start("manygrad-test", fail, "lost"))
    assert threads.close(1.0) == threads.close(1.0) == []
    written = capfd.readouterr().err
    assert written.startswith("the thread manygrad-test has ended by an error:\nTraceback")
    assert written.count("ValueError: lost") == 1 and "in fail" in written
    with pytest.raises(RuntimeError, match="manygrad-late is not started: its owner has ended"):
        threads.start("manygrad-late", fail, "never")


def test_all_are_ended_the_last_one_first(gate: threading.Event) -> None:
    threads, stopped, over = Threads(), list[str](), threading.Event()

    def stop(name: str) -> None:
        stopped.append(name)
        over.set()

    for name in ("a", "b"):
        threads.start(name, over.wait, 20, stop=lambda name=name: stop(name))
    threads.start("stuck", gate.wait, 20)
    assert threads.alive() == ["a", "b", "stuck"]
    assert threads.close(0.2) == ["stuck"] and stopped == ["b", "a"] and threads.alive() == ["stuck"]
    gate.set()
    assert threads.close(20) == [] == threads.alive()


def test_a_thread_may_close_its_own_scope() -> None:
    threads, left = Threads(), list[list[str]]()
    ended(threads.start("a", lambda: left.append(threads.close(5))))
    assert left == [["a"]]


def test_the_threads_that_have_ended_are_forgotten() -> None:
    threads = Threads()
    for _ in range(5):
        ended(threads.start("a", lambda: None))
    failed = ended(threads.start("b", fail, "kept"))
    ended(threads.start("a", lambda: None))
    assert [t.name for t in threads._threads] == ["b", "a"]
    with pytest.raises(ValueError, match="kept"):
        failed.check()
