"""Signals while Ray is being started: raised wherever they find the main thread."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable

import pytest

from manygrad.launcher.interrupts import Signals, StartInterrupted


class Dying:
    def __del__(self) -> None:
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(0.001)  # the handler runs here


def in_a_destructor() -> None:
    dying = Dying()
    del dying


def around_a_fork() -> None:
    """`os.register_at_fork` takes nothing back: what it calls does nothing the next time."""
    calls = [lambda: os.kill(os.getpid(), signal.SIGINT)]
    os.register_at_fork(after_in_parent=lambda: calls.pop()() if calls else None)
    if (child := os.fork()) == 0:
        os._exit(0)
    os.waitpid(child, 0)


def anywhere() -> None:
    os.kill(os.getpid(), signal.SIGINT)


@pytest.mark.parametrize("where", [in_a_destructor, around_a_fork, anywhere])
def test_a_signal_ends_the_start_wherever_it_comes(
    where: Callable[[], None], capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "unraisablehook", sys.__unraisablehook__)  # pytest has its own
    before, handler = time.monotonic(), signal.getsignal(signal.SIGINT)
    with Signals() as signals:
        with pytest.raises(StartInterrupted) as raised, signals.raising():
            where()
            time.sleep(30)
        assert raised.value.signum == signal.SIGINT and list(signals.queue) == [signal.SIGINT]
        time.sleep(0.05)  # nothing comes later
    assert time.monotonic() - before < 20 and capfd.readouterr().err == ""
    assert sys.unraisablehook is sys.__unraisablehook__ and signal.getsignal(signal.SIGINT) is handler


def test_other_exceptions_in_destructors_are_printed(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    class Broken:
        def __del__(self) -> None:
            raise ValueError("in vain")

    monkeypatch.setattr(sys, "unraisablehook", sys.__unraisablehook__)
    with Signals() as signals, signals.raising():
        broken = Broken()
        del broken
    assert "ValueError: in vain" in capfd.readouterr().err


def test_a_signal_that_ray_takes_is_one() -> None:
    """Ray's own handler of SIGTERM ends the process by `sys.exit(15)`."""
    with Signals() as signals:
        with pytest.raises(StartInterrupted) as raised, signals.raising():
            sys.exit(int(signal.SIGTERM))
        assert raised.value.signum == signal.SIGTERM
        with pytest.raises(SystemExit), signals.raising():
            sys.exit(3)
