"""Collectives beside kernels: what runs at once, what waits, and what a failure leaves."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from manygrad.collectives.transport.endpoint import AHEAD_NBYTES
from manygrad.launcher.api import launch
from manygrad.runtime.buffer import Buffer
from manygrad.runtime.current import use
from manygrad.runtime.exchange.communication import Communication
from manygrad.runtime.executors.collective import CollectiveItem
from manygrad.runtime.executors.items import CopyItem, ExecItem, Vars, run_items
from manygrad.runtime.executors.overlap import CollectiveThread, StartItem, WaitItem, in_order, overlapped
from manygrad.runtime.runtime import Runtime
from manygrad.tensor.dtype import dtypes


class Sent(CollectiveItem):
    """Reads `source`, writes `target`, once it is let."""

    def __init__(self, target: Buffer, source: Buffer, communication: Communication, fails: bool = False):
        self.buffers, self.line, self.name, self.mine, self.idle = [target, source], "train.py:1", "sent", (0,), False
        self.communication, self.fails, self.slow = communication, fails, 0.0
        self.may, self.ran = threading.Event(), False

    @property
    def ahead_nbytes(self) -> int:
        return 0

    @property
    def crosses(self) -> bool:
        return True

    @property
    def link_s(self) -> float:
        return self.slow

    def count(self) -> None:
        pass

    def begin(self, vars: Vars) -> None:
        pass

    def advance(self) -> Callable[[], bool] | None:
        return None

    def settle(self) -> None:
        pass

    def finish(self) -> None:
        assert self.may.wait(20)
        if self.fails:
            raise ValueError("the peer is gone")
        self.ran = True


class Call(ExecItem):
    line = ""

    def __init__(self, run: Any) -> None:
        self.buffers, self.call = [], run

    def run(self, vars: Vars) -> None:
        self.call()


MANY = 1 << 20


def buffer(count: int = MANY) -> Buffer:
    return Buffer("CPU", count, dtypes.float32)


def kinds(items: list[ExecItem]) -> list[str]:
    return [type(i).__name__.removesuffix("Item") for i in items]


def test_a_collective_is_waited_for_before_its_memory_is_touched() -> None:
    c = Communication()
    a, b, d, e = buffer(), buffer(), buffer(), buffer()
    items = [CopyItem(a, d, ""), Sent(b, a, c), CopyItem(e, d, ""), CopyItem(d, a, ""), CopyItem(e, b, "")]
    found = overlapped(items)
    assert kinds(found) == ["Copy", "Start", "Copy", "Copy", "Wait", "Copy", "Wait"]
    assert [i.settled for i in found if isinstance(i, WaitItem)] == [False, True]
    assert in_order(overlapped(items)) == items
    overwritten = [Sent(b, a, c), CopyItem(e, d, ""), CopyItem(a, d, "")]
    found = overlapped(overwritten)
    assert kinds(found) == ["Start", "Copy", "Wait", "Copy"] and found[2].settled  # type: ignore[attr-defined]
    both = [Sent(b, a, c), CopyItem(e, d, ""), CopyItem(e, b, ""), CopyItem(b, d, ""), CopyItem(e, b, "")]
    assert kinds(overlapped(both)) == ["Start", "Copy", "Wait", "Copy", "Wait", "Copy", "Copy"]
    at_once = [Sent(b, a, c), CopyItem(e, b, "")]
    assert kinds(overlapped(at_once)) == ["Sent", "Copy"]
    following = Sent(d, e, c)
    assert kinds(overlapped([Sent(b, a, c), following])) == ["Sent", "Sent"]
    following.slow = 0.01
    assert kinds(overlapped([Sent(b, a, c), following])) == ["Start", "Start", "Wait"]
    little = [Sent(b, a, c), CopyItem(buffer(4), buffer(4), ""), CopyItem(e, b, "")]
    assert kinds(overlapped(little)) == ["Sent", "Copy", "Copy"]


def test_parts_of_one_memory_are_told_apart_and_collectives_keep_their_order() -> None:
    c = Communication()
    a, b, d = buffer(), buffer(), buffer()
    half = MANY // 2
    low, high = (
        (x.view(half, dtypes.float32, 0) for x in (a, b)),
        (x.view(half, dtypes.float32, 2 * MANY) for x in (a, b)),
    )
    (a0, b0), (a1, b1) = low, high
    spare = d.view(half, dtypes.float32, 0)
    first, second = Sent(b1, a1, c), Sent(b0, a0, c)
    items = [first, CopyItem(a0, spare, ""), second, CopyItem(spare, b1, "")]
    found = overlapped(items)
    assert kinds(found) == ["Start", "Copy", "Start", "Wait", "Copy", "Wait"]
    waits = [(i.started.item, i.settled) for i in found if isinstance(i, WaitItem)]
    assert waits == [(first, False), (second, True)]


class Job:
    """Notes when it begins and when it is finished and settled, or fails at one of them."""

    def __init__(self, ran: list[tuple[str, int]], number: int, fails: str = "", may: threading.Event | None = None):
        self.ran, self.number, self.fails, self.may = ran, number, fails, may
        self.ahead_nbytes = 0

    def begin(self) -> None:
        self.note("begin")

    def advance(self) -> Callable[[], bool] | None:
        return None

    def finish(self) -> None:
        assert self.may is None or self.may.wait(20)
        self.note("finish")

    def settle(self) -> None:
        self.note("settle")

    def note(self, what: str) -> None:
        if what == self.fails:
            raise ValueError("lost")
        self.ran.append((what, self.number))


@pytest.mark.parametrize("fails", ["begin", "finish", "settle"])
def test_a_lane_runs_in_order_and_stops_at_a_failure(fails: str) -> None:
    thread, ran = CollectiveThread(), list[tuple[str, int]]()
    numbers = [thread.start(Job(ran, i)) for i in range(100)]
    thread.wait(numbers[-1])
    for what in ("begin", "finish", "settle"):
        assert [i for found, i in ran if found == what] == list(range(100))
    good, bad, after = (thread.start(Job(ran, i, fails if i == 101 else "")) for i in range(100, 103))
    thread.wait(good)
    for number in (bad, after):
        with pytest.raises(ValueError, match="lost"):
            thread.wait(number)
    thread.drain()
    finished = [i for what, i in ran if what == "finish"]
    assert finished[:101] == list(range(101)) and len(finished) <= (103 if fails == "settle" else 101)
    assert [i for what, i in ran if what == "settle"] == list(range(101))
    thread.wait(thread.start(Job(ran, 103)))
    assert ran[-1] == ("settle", 103)


def test_results_are_there_before_others_have_read_what_is_lent() -> None:
    thread, ran, may = CollectiveThread(), list[tuple[str, int]](), threading.Event()
    first = Job(ran, 0)
    first.settle = lambda: (may.wait(20), first.note("settle"))  # type: ignore[method-assign, assignment]
    number = thread.start(first)
    thread.wait(number, settled=False)
    assert ran == [("begin", 0), ("finish", 0)]
    may.set()
    thread.wait(number)
    assert ran[-1] == ("settle", 0)


def test_the_next_ones_begin_before_the_first_is_finished() -> None:
    thread, ran, may = CollectiveThread(), list[tuple[str, int]](), threading.Event()
    first = Job(ran, 0)
    first.begin = lambda: (may.wait(20), first.note("begin"))  # type: ignore[method-assign, assignment]
    for job in (first, Job(ran, 1), Job(ran, 2)):
        last = thread.start(job)
    may.set()  # (all three are there)
    thread.wait(last)
    begun = [("begin", i) for i in range(3)]
    assert ran == [*begun, ("finish", 0), ("finish", 1), ("settle", 0), ("finish", 2), ("settle", 1), ("settle", 2)]


def test_no_more_is_sent_ahead_than_is_granted() -> None:
    thread, ran, may = CollectiveThread(), list[tuple[str, int]](), threading.Event()
    jobs = [Job(ran, i) for i in range(5)]
    jobs[0].begin = lambda: (may.wait(20), jobs[0].note("begin"))  # type: ignore[method-assign, assignment]
    for job in jobs:
        job.ahead_nbytes = AHEAD_NBYTES * 3 // 4
        last = thread.start(job)
    may.set()
    thread.wait(last)
    sent = most = 0
    for what, _ in ran:
        sent += {"begin": 1, "finish": -1}.get(what, 0)
        most = max(most, sent)
    assert most * AHEAD_NBYTES * 3 // 4 <= 2 * AHEAD_NBYTES and most == 2


class Waits:
    """In place of an endpoint, in whose waits `meanwhile` is called."""

    def __init__(self) -> None:
        self.meanwhile: Callable[[], None] = lambda: None
        self.woken = threading.Event()

    def wake(self) -> None:
        self.woken.set()

    def wait(self, until: Callable[[], bool]) -> None:
        end = time.monotonic() + 20
        while not until():
            assert self.woken.wait(20) and time.monotonic() < end
            self.meanwhile()


@pytest.mark.parametrize("where", ["finish", "settle"])
def test_what_is_started_while_one_waits_is_begun_at_once(where: str) -> None:
    endpoint, ran = Waits(), list[tuple[str, int]]()
    thread = CollectiveThread(endpoint)  # type: ignore[arg-type]
    first, second = Job(ran, 0), Job(ran, 1)
    waits = threading.Event()

    def wait() -> None:
        waits.set()
        endpoint.wait(lambda: ("begin", 1) in ran)
        first.note(where)

    setattr(first, where, wait)
    thread.start(first)
    assert waits.wait(20)
    thread.wait(thread.start(second))
    assert ran.index(("begin", 1)) < ran.index((where, 0)) and ran[-1] == ("settle", 1)
    assert thread.wait(thread.start(Job(ran, 2))) is None and ran[-1] == ("settle", 2)


@pytest.mark.parametrize("fails", [False, True])
@pytest.mark.parametrize("where", ["finish", "settle"])
def test_what_was_begun_goes_on_while_one_before_it_waits(where: str, fails: bool) -> None:
    """Its error is kept until it is its turn; and a wait within goes on with nothing."""
    endpoint, ran = Waits(), list[tuple[str, int]]()
    thread = CollectiveThread(endpoint)  # type: ignore[arg-type]
    jobs = [Job(ran, i, "advance" if fails and i == 2 else "") for i in range(4)]

    asked = 0

    def advance(job: Job) -> Callable[[], bool] | None:
        """The third time it is asked, something has come for it."""

        def more() -> bool:
            nonlocal asked
            asked += 1
            return asked >= 3

        if asked < 3:
            return more
        endpoint.meanwhile()
        job.note("advance")
        return None

    def wait() -> None:
        waits.set()
        endpoint.wait(lambda: ("begin", 3) in ran)
        for _ in range(3):
            endpoint.meanwhile()
        jobs[0].note(where)

    waits = threading.Event()
    setattr(jobs[0], where, wait)
    for job in jobs:
        job.advance = partial(advance, job)  # type: ignore[method-assign]
    numbers = [thread.start(jobs[0])]
    assert waits.wait(20)
    numbers += [thread.start(job) for job in jobs[1:]]
    thread.wait(numbers[1])
    assert ran.index(("advance", 1)) < ran.index((where, 0))
    if fails:
        with pytest.raises(ValueError, match="lost"):
            thread.wait(numbers[3])
        thread.drain()
        assert ("finish", 2) not in ran and ("finish", 1) in ran and ("settle", 1) in ran
    else:
        thread.wait(numbers[3])
        assert [i for what, i in ran if what == "finish"] == [0, 1, 2, 3]
        assert ran.index(("advance", 2)) < ran.index((where, 0))


def test_the_thread_ends_with_its_object() -> None:
    collectives = CollectiveThread()
    collectives.wait(collectives.start(Job([], 0)))
    thread = collectives._thread
    assert thread is not None and thread.is_alive()
    del collectives
    thread.join(20)
    assert not thread.is_alive()


def test_an_error_beside_the_steps_of_the_work_ends_the_thread_and_is_raised() -> None:
    """Also at the next wait; what nobody waits for is the scope's to tell."""

    class Odd(Job):
        @property
        def ahead_nbytes(self) -> int:
            raise ZeroDivisionError("odd")

        @ahead_nbytes.setter
        def ahead_nbytes(self, value: int) -> None:
            pass

    with use(Runtime()) as runtime:
        thread, ran = CollectiveThread(), list[tuple[str, int]]()
        thread.wait(thread.start(Job(ran, 0)))
        began = time.monotonic()
        for number in (thread.start(Odd(ran, 1)), thread.start(Job(ran, 2))):
            with pytest.raises(ZeroDivisionError, match="odd") as raised:
                thread.wait(number)
            assert "(this has ended the thread manygrad-collectives)" in raised.value.__notes__
        thread.drain()
        assert time.monotonic() - began < 15 and ran[-1] == ("settle", 0)
        runtime.epoch.threads.check()
        CollectiveThread().start(Odd(ran, 1))
        until = time.monotonic() + 20
        while runtime.epoch.threads.alive():
            assert time.monotonic() < until
        with pytest.raises(ZeroDivisionError, match="odd"):
            runtime.epoch.threads.check()


def test_no_thread_of_a_lane_is_left_when_its_runtime_ends() -> None:
    with use(Runtime()) as runtime:
        threads = [CollectiveThread() for _ in range(2)]
        for thread in threads:
            thread.wait(thread.start(Job([], 0)))
        assert runtime.epoch.threads.alive() == ["manygrad-collectives"] * 2
        assert runtime.epoch.threads.close(20) == [] == runtime.epoch.threads.alive()
        with pytest.raises(RuntimeError, match="has ended, with its epoch"):
            threads[0].wait(threads[0].start(Job([], 1)))


def test_after_a_failure_nothing_is_under_way() -> None:
    with use(Runtime()) as runtime:
        sent = Sent(buffer(), buffer(), runtime.communication)

        def fail() -> None:
            threading.Timer(0.2, sent.may.set).start()
            raise IndexError("out of range")

        start = StartItem(sent)
        with pytest.raises(IndexError):
            run_items([start, Call(fail), WaitItem(start, True)], {})
        assert sent.ran
        broken = Sent(buffer(), buffer(), runtime.communication, fails=True)
        broken.may.set()
        start = StartItem(broken)
        with pytest.raises(ValueError, match="the peer is gone"):
            run_items([start, WaitItem(start, True)], {})
        sent.ran = False
        start = StartItem(sent)
        run_items([start, WaitItem(start, True)], {})
        assert sent.ran


def late_peer() -> tuple[int, int, list[float]]:
    """Kernels that ended before the collective did, all kernels, and twice the sum."""
    import time

    import manygrad
    from manygrad import Tensor, world
    from manygrad.runtime.profile.counters import GlobalCounters

    x = Tensor(np.ones((world.size, 64), np.float32)).shard(world.devices, axis=0).realize()
    own = [Tensor(np.ones((256, 256), np.float32)).realize() for _ in range(8)]

    def made() -> list[Tensor]:
        return [(x.sum(0) * 2).contiguous(), *[(o @ o).contiguous() for o in own]]

    Tensor.realize(*made())  # (compiled by then)
    total, *products = made()
    if world.rank == 1:
        time.sleep(1)
    GlobalCounters.reset()
    with manygrad.profile() as p:
        total.realize(*products)
    (collective,) = [e for e in p.events if e.track == "collectives"]
    kernels = [e for e in p.events if e.track.startswith("kernels")]
    assert GlobalCounters.net_wait_s <= GlobalCounters.net_time_s + 0.1
    return sum(e.end < collective.end for e in kernels), len(kernels), total.tolist()


def test_products_run_while_a_peer_is_late(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FOLLOW", "0")  # (where loops are followed ranks meet before a step, and none begins it earlier)
    first, _ = launch(late_peer, nodes=2, run_dir=tmp_path / "run")
    before, kernels, total = first
    assert kernels >= 8 and before == kernels - 1, first  # only what reads the sum waits for it
    assert total == [4.0] * 64


def replays() -> tuple[list[float], bool]:
    """How far sums of inputs that lie elsewhere at each call are off; whether inputs are read where they lie."""
    from manygrad import Tensor, TinyJit, world

    step = TinyJit(lambda x: x.sum(0))
    rows = [np.arange(24, dtype=np.float32).reshape(2, 12) * (k + 1) for k in range(6)]
    inputs = [Tensor(r).shard(world.devices, axis=0).realize() for r in rows]
    found = [float((step(x).numpy() - r.sum(0)).sum()) for x, r in zip(inputs, rows)]
    x, want = inputs[0], rows[0]
    for _ in range(3):
        x = step(x).reshape(1, 12).expand(2, 12).contiguous().shard(world.devices, axis=0)
        want = np.repeat(want.sum(0, keepdims=True), 2, 0)
        found.append(float((x.numpy() - want).sum()))
    return found, all(i.moves is not None for i in step.captured.inputs)


@pytest.mark.parametrize("transport", ["shm", "zmq"])
def test_a_replay_sends_an_input_from_where_it_lies(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, transport: str, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("TRANSPORT", transport)
    for differences, moved in launch(replays, nodes=2, run_dir=tmp_path / "run"):
        assert differences == [0.0] * 9 and moved
    ranks = json.loads((tmp_path / "run" / "report.json").read_text())["ranks"]
    assert all(r["collectives"] >= 9 and r["bytes_sent"] > 0 and r["collective_s"] >= 0 <= r["waited_s"] for r in ranks)
    assert f"launcher: {ranks[0]['collectives']} collectives of all ranks, up to 0.0 MB sent;" in capfd.readouterr().err


def test_what_runs_in_the_waits_of_a_collective_is_in_its_time() -> None:
    communication, inner = Communication(), 0.02

    def step() -> None:
        communication.spend(lambda: time.sleep(inner))

    began = time.perf_counter()
    communication.spend(step)
    assert inner <= communication.time_s <= time.perf_counter() - began
    with pytest.raises(ValueError):
        communication.spend(lambda: [][:].index(0))
    before = communication.time_s
    step()
    assert communication.time_s >= before + inner
