"""Conversations over connections that lose things, and silence: pure, with the clock given."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack

import pytest
from hypothesis import given
from hypothesis import strategies as st

from manygrad.errors import LaunchAborted
from manygrad.launcher.channel import Channel
from manygrad.launcher.control import ControlServer
from manygrad.launcher.link import HEAD, SUSPENDED_S, WINDOW, Broken, Clock, Conversation, Silence
from manygrad.launcher.messages import Event, Finished, Planned, Progress, Stopping, Values
from manygrad.launcher.plans import hooks_over
from manygrad.tensor.threads import Threads
from tests.proxy import Proxy


@given(st.integers(0, 1 << 30), st.integers(0, 300), st.floats(0.0, 0.6))
def test_nothing_is_lost_and_nothing_comes_twice(seed: int, count: int, loss: float) -> None:
    """Two sides, whose messages are lost in runs (a broken connection), come late, or come twice."""
    rng = random.Random(seed)
    ends, got = (Conversation(), Conversation()), ([], [])  # type: ignore[var-annotated]
    wires: tuple[list[tuple[bytes, bytes]], ...] = ([], [])
    for n in range(count):
        ends[n % 2].post(b"%d" % n)
    now, calm = 0.0, 400 + 40 * count
    for turn in range(calm + 2000):
        now += rng.choice((0.01, 0.3, 1.0))
        for me in (0, 1):
            end, wire = ends[me], wires[1 - me]
            while (frames := end.next(now)) is not None and rng.random() < 0.9:
                wire.append(frames)
                end.handed(now)
            if end.owes or rng.random() < 0.3:
                wire.append(end.passing())
            if turn < calm and rng.random() < loss:
                del wire[rng.randrange(len(wire) + 1) :]
                if wire and rng.random() < 0.2:
                    wire.append(wire[0])
            while wires[me] and rng.random() < 0.8:
                body = end.take(*wires[me].pop(0), now)
                if body is not None:
                    got[me].append(int(body))
        if not ends[0].kept and not ends[1].kept and turn > 2:
            break
    assert got[1] == list(range(0, count, 2)) and got[0] == list(range(1, count, 2))
    assert not ends[0].kept and not ends[1].kept


def test_a_window_bounds_what_is_on_its_way() -> None:
    s = Conversation()
    for i in range(3 * WINDOW):
        s.post(b"%d" % i)
    handed = 0
    while s.next(0.0) is not None:
        s.handed(0.0)
        handed += 1
    assert handed == WINDOW
    assert s.take(HEAD.pack(0, 0, 11), b"", 0.1) is None
    assert s.next(0.1) == (HEAD.pack(0, WINDOW + 1, 1), b"%d" % WINDOW)
    for bad in (b"", b"x", HEAD.pack(0, 0, 10**6), HEAD.pack(1, 1, 1)):
        with pytest.raises(ValueError):
            s.take(bad, b"", 0.2)


@given(st.integers(0, 1 << 30), st.floats(0.0, 0.5))
def test_nothing_of_an_epoch_reaches_the_next_one(seed: int, loss: float) -> None:
    """The driver begins epochs while messages are on their way; all come in the epoch they were posted in, or not."""
    rng = random.Random(seed)
    driver, worker = Conversation(), Conversation(follows=True)
    wires: tuple[list[tuple[bytes, bytes]], ...] = ([], [])
    got: dict[int, list[int]] = {}
    now, posted = 0.0, 0
    for turn in range(400):
        now += rng.choice((0.01, 0.3, 1.0))
        if turn % 40 == 39 and driver.epoch < 6:
            driver.enter(driver.epoch + 1)
            posted = 0
        if posted < 20 and worker.epoch == driver.epoch:
            worker.post(b"%d %d" % (worker.epoch, posted))
            driver.post(b"order")
            posted += 1
        for me, end in enumerate((driver, worker)):
            while (frames := end.next(now)) is not None:
                wires[1 - me].append(frames)
                end.handed(now)
            wires[1 - me].append(end.passing())
            if driver.epoch < 6 and rng.random() < loss:
                del wires[1 - me][rng.randrange(len(wires[1 - me])) :]
            for frames in [wires[me].pop(0) for _ in range(rng.randrange(len(wires[me]) + 1))]:
                if (body := end.take(*frames, now)) is not None and end is driver:
                    epoch, number = map(int, body.split())
                    assert epoch == driver.epoch
                    got.setdefault(epoch, []).append(number)
    assert all(numbers == list(range(len(numbers))) for numbers in got.values())
    assert worker.epoch == 6 and got[6] == list(range(20)) and not worker.kept
    with pytest.raises(ValueError, match="epoch 6 cannot follow epoch 6"):
        driver.enter(6)


def test_silence_counts_only_while_we_are_there() -> None:
    s, now = Silence(0.0), 0.0
    for _ in range(30):
        now += 1.0
        s.look(now)
    assert s.seconds == 30.0
    now += 3600.0  # a laptop's sleep
    assert s.look(now) == 30.0 and 3600 > SUSPENDED_S
    s.heard(now)
    assert s.look(now + 1) == 1.0


def test_a_refused_address_is_gone_an_unreachable_one_is_not() -> None:
    server = ControlServer(1)
    there, nowhere, unreachable = Broken(server.address), Broken(server.address), Broken("tcp://240.0.0.1:9")
    for b in (there, unreachable):
        b.connection(False, 1.0)
        assert not any(b.gone(1.0 + 0.6 * i) for i in range(20))
    server.close()
    assert not nowhere.gone(1.0), "while the connection stands nobody asks"
    nowhere.connection(False, 1.0)
    assert [nowhere.gone(t) for t in (1.0, 3.0, 5.0, 6.1)] == [False, False, False, True]
    nowhere.connection(True, 7.0)
    assert not nowhere.gone(20.0)


def events_until(server: ControlServer, kind: type, within_s: float = 10.0) -> list[Event]:
    """What comes until an event of that kind is among it; heartbeats go out meanwhile."""
    events, until = list[Event](), time.monotonic() + within_s
    while not any(isinstance(e, kind) for e in events):
        events += server.receive(0.01)
        server.beat()
        assert time.monotonic() < until, events
    return events


def test_the_channel_outlives_silence_and_broken_connections(monkeypatch: pytest.MonkeyPatch) -> None:
    """A worker's channel on a clock 25 times as fast: minutes of heartbeats,
    then a launcher that says nothing for a minute."""
    monkeypatch.setattr("manygrad.launcher.channel._end_process", lambda: None)  # (this one)
    clock = Clock(25.0)
    with ExitStack() as stack:
        server = ControlServer(1, clock=clock)
        stack.callback(server.close)
        proxy = Proxy(server.address)
        stack.callback(proxy.stop)
        channel = Channel(proxy.address, 0, server.curve(0), silent_s=60.0, clock=clock)
        stack.callback(channel.close)
        began = clock()
        while clock() - began < 150:
            events_until(server, Progress)
        events = []
        for n in range(1, 30):
            channel.send("planned", n=n, hash="5", description="a", collectives=0)
            if n % 3 == 0:
                proxy.cut()
            events += server.receive(0.02)
            server.send("worker", [0], "plan_ok", n=n)
            server.beat()
        channel.send("finished", collectives=1, collective="b")
        events += events_until(server, Finished)
        assert [e.n for e in events if isinstance(e, Planned)] == list(range(1, 30))
        assert channel.epoch.abort_reason is None
        until = time.monotonic() + 10
        while channel.epoch.plans_agreed < 29:
            server.receive(0.01)
            server.beat()
            assert time.monotonic() < until
        until = time.monotonic() + 20
        while channel.epoch.abort_reason is None:
            time.sleep(0.01)  # and no beat
            assert time.monotonic() < until
        assert channel.epoch.abort_kind == "gone" and "was not heard for 60 s" in channel.epoch.abort_reason


def test_two_epochs_through_one_channel() -> None:
    """The old one ends what waits in it, with its plans, cards and orders; the new one counts from nothing. What was
    on its way in the old one reaches nobody, also where the connection breaks meanwhile."""
    with ExitStack() as stack:
        server = ControlServer(1)
        stack.callback(server.close)
        proxy = Proxy(server.address)
        stack.callback(proxy.stop)
        channel = Channel(proxy.address, 0, server.curve(0))
        stack.callback(channel.close)
        aborted = list[str]()
        channel.on_abort = aborted.append
        first = hooks_over(channel)
        for n in (1, 2):
            agreed = first.make_plan(5, f"plan {n} of epoch 0", "")
            (plan,) = (e for e in events_until(server, Planned) if isinstance(e, Planned))
            assert plan.n == n
            if n == 1:
                server.send("worker", [0], "plan_ok", n=1)
                wait_for(server, lambda: channel.epoch.plans_agreed == 1)
                agreed()
        server.send("worker", [0], "cards", cards=[{"rank": 0}], master=["127.0.0.1", 1])
        wait_for(server, lambda: bool(channel.epoch.cards))
        old = channel.epoch

        server.begin(1)
        first.make_plan(5, "on its way when epoch 0 ended", "")
        server.send("worker", [0], "plan_ok", n=1)
        proxy.cut()
        wait_for(server, lambda: channel.epoch.number == 1 and channel.epoch.plans_agreed == 1)
        why = "epoch 0 is over: the launcher has begun epoch 1"
        assert aborted == [why] and old.abort_reason == why and not old.released
        assert channel.epoch.abort_reason is None and not channel.epoch.cards and not channel.epoch.plans_made
        for refused in (agreed, lambda: first.make_plan(5, "late", "")):
            with pytest.raises(LaunchAborted, match=why):
                refused()
        first.compare_values("late", [(0, "0", "a")])

        hooks_over(channel).make_plan(6, "plan 1 of epoch 1", "")()
        channel.send("finished", collectives=1, collective="b")
        events = events_until(server, Finished)
        assert [(e.n, e.description) for e in events if isinstance(e, Planned)] == [(1, "plan 1 of epoch 1")]
        assert not any(isinstance(e, Values) for e in events) and server.rejected == 0
        assert [e.plans for e in events if isinstance(e, Progress)][-1:] in ([0], [1], [])
        with pytest.raises(ValueError, match="epoch 1 cannot follow epoch 1"):
            server.begin(1)


def test_a_supervisor_in_the_place_of_another() -> None:
    """Its messages count from the first one; those of the old one, which may be on their way yet, are nobody's."""
    server = ControlServer(2)
    try:
        old, stays = Conversation(0), Conversation(0)
        for c in (old, stays):
            c.post(b'{"type": "exited", "code": -9}')
        pairs = [(server._with("agent", rank), c) for rank, c in enumerate((old, stays))]
        assert all(theirs.take(*c.next(1.0), 1.0) for theirs, c in pairs)  # type: ignore[misc]
        server.begin(1, started=[0])
        new = Conversation(1)
        for c in (old, stays, new):
            c.handed(1.0)
            c.post(b'{"type": "closed"}')
        new.due = 1
        assert pairs[0][0].take(*old.next(2.0), 2.0) is None  # type: ignore[misc]
        assert pairs[0][0].take(*new.next(2.0), 2.0) and pairs[1][0].take(*stays.next(2.0), 2.0)  # type: ignore[misc]
    finally:
        server.close()


def wait_for(server: ControlServer, ready: Callable[[], bool], within_s: float = 10.0) -> None:
    until = time.monotonic() + within_s
    while not ready():
        assert not [e for e in server.receive(0.01) if not isinstance(e, Progress)]
        server.beat()
        assert time.monotonic() < until


def test_an_error_in_the_channels_thread_is_the_cause_of_an_abort(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """And ends the process a moment later; where the main thread has not told of it by then, it is written."""
    over = threading.Event()
    monkeypatch.setattr("manygrad.launcher.channel._end_process", over.set)
    monkeypatch.setattr("manygrad.launcher.channel.END_S", 0.2)
    server, threads, told = ControlServer(1), Threads(), list[str]()
    try:
        channel = Channel(server.address, 0, server.curve(0), threads=threads)
        channel.on_abort = told.append
        channel._progress = lambda: b"x"[1:2].index(b"y")  # type: ignore[method-assign, return-value]
        with pytest.raises(
            LaunchAborted, match="the control channel broke: ValueError: subsection not found"
        ) as raised:
            channel.wait(lambda: False, 20.0, "nothing")
        cause = raised.value.__cause__
        assert isinstance(cause, ValueError)
        assert "(this has ended the thread manygrad-control)" in cause.__notes__
        assert told == [str(raised.value)] and over.wait(20)
        written = capfd.readouterr().err
        assert "the thread manygrad-control has ended by an error:\nTraceback" in written and "subsection" in written
        channel.close()
        assert threads.close(5.0) == [] and capfd.readouterr().err == ""
    finally:
        server.close()


def test_no_thread_of_a_channel_is_left() -> None:
    server, threads = ControlServer(1), Threads()
    try:
        for closes in (True, False):
            threads = Threads()
            channel = Channel(server.address, 0, server.curve(0), threads=threads)
            events_until(server, Progress)
            assert threads.alive() == ["manygrad-control"]
            if closes:
                channel.close()
                assert threads.alive() == []
            assert threads.close(10.0) == [] == threads.alive()
    finally:
        server.close()


def test_an_endpoint_that_fails_to_abort_keeps_no_abort_back(capfd: pytest.CaptureFixture[str]) -> None:
    server, threads = ControlServer(1), Threads()
    try:
        channel = Channel(server.address, 0, server.curve(0), threads=threads)
        channel.on_abort = lambda reason: [].index(0)  # type: ignore[func-returns-value]
        events_until(server, Progress)
        server.send("worker", [0], "abort", rank=1, kind="failure", reason="rank 1 failed")
        events_until(server, Stopping)
        with pytest.raises(LaunchAborted, match="rank 1 failed"):
            channel.wait(lambda: False, 20.0, "nothing")
        channel.send("finished")
        events_until(server, Finished)
        assert "ValueError: 0 is not in list" in capfd.readouterr().err and threads.alive() == ["manygrad-control"]
        channel.close()
    finally:
        server.close()
