"""Collectives run in a thread of their own while kernels run, each from where it stands in the order.

    k1  all_reduce(g)  k2  k3(g)      ==>      k1  start(all_reduce(g))  k2  wait(all_reduce(g))  k3(g)

What runs before a collective in the order is done when it is started, as kernels of a CPU are done when they return.
Its results are waited for before the first item that reads them; that others have read what it lends them, before the
first item that writes what it touches, and at the end. Collectives run one after the other, in their order. So that a
link does not idle between them, what the next ones send first goes out as soon as they are started, while the one
before them waits for others; they go on with what has come for them meanwhile; and the next one goes on before the last
word of others about the one before it has come.
One that is waited for at once is run where it stands, as that costs less.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from queue import Empty, SimpleQueue
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from manygrad.collectives.transport.endpoint import AHEAD_NBYTES
from manygrad.runtime.buffer import Buffer
from manygrad.runtime.current import current
from manygrad.runtime.executors.collective import CollectiveItem
from manygrad.runtime.executors.items import CopyItem, ExecItem, KernelItem, Vars
from manygrad.tensor.threads import ScopedThread

if TYPE_CHECKING:
    from manygrad.collectives.transport import Endpoint
    from manygrad.runtime.exchange.communication import Communication

WORTH_S = 100e-6  # of computing beside a collective, from which on starting it in its thread pays
FLOPS, BYTES = 50e9, 10e9  # a second, roughly, for that estimate
LOOK_S = 1.0  # so often a wait looks whether the thread lives


class Work(Protocol):
    """`begin` waits for nobody and sends `ahead_nbytes`; `advance` goes on as far as that waits for nobody, and returns
    what says that it can go on again, or None where only `finish` can; after `finish` its results are there, after
    `settle` all its memory may be written again. What was begun before is finished before, and settled before."""

    @property
    def ahead_nbytes(self) -> int: ...
    def begin(self) -> None: ...
    def advance(self) -> Callable[[], bool] | None: ...
    def finish(self) -> None: ...
    def settle(self) -> None: ...


class CollectiveThread:
    """Runs what it is given in order, in a thread of the epoch's scope, which ends with it. For one caller at a time.
    `endpoint`: in whose waits what has come meanwhile is begun."""

    def __init__(self, endpoint: Endpoint | None = None) -> None:
        self._done = _Done()
        self._endpoint = endpoint
        self._queue: SimpleQueue[Work | None] = SimpleQueue()
        self._thread: ScopedThread | None = None
        self._started = 0

    def __del__(self) -> None:
        self._queue.put(None)

    def start(self, work: Work) -> int:
        """Returns a number to `wait` for."""
        if self._thread is None:
            queue, done = self._queue, self._done  # (not this object, which ends the thread when nobody holds it)
            self._thread = current().epoch.threads.start(
                "manygrad-collectives",
                *(_serve, queue, done, self._endpoint),
                stop=lambda: queue.put(None),
                on_error=done.broke,
            )
        self._started += 1
        self._queue.put(work)
        if self._endpoint is not None:
            self._endpoint.wake()
        return self._started

    def wait(self, number: int, settled: bool = True) -> None:
        """Until `number` is settled, or, without `settled`, its results are there. Raises its error, that of one before
        it, or what has ended the thread. What runs has deadlines of its own."""
        done = self._done
        with done.changed:
            while (done.settled if settled else done.finished) < number:
                if self._thread is not None:
                    self._thread.check()
                if self._thread is None or not self._thread.is_alive():
                    raise RuntimeError("the thread of the collectives has ended, with its epoch")
                done.changed.wait(LOOK_S)
            if done.error is not None and done.failed <= number:
                raise done.error

    def drain(self) -> None:
        """Until all has ended, well or not. Errors are dropped: the caller raises the one that had him call this."""
        done = self._done
        with done.changed:
            while done.settled < self._started and self._thread is not None and self._thread.is_alive():
                done.changed.wait(LOOK_S)
            done.error = None


def thread_of(communication: Communication) -> CollectiveThread:
    """The thread in which its collectives run beside kernels, made at the first need."""
    if not isinstance(communication.beside, CollectiveThread):
        communication.beside = CollectiveThread(communication.endpoint)
    return communication.beside


@dataclass(slots=True)
class _Ahead:
    """Work that was begun and is not finished. `may_advance` is asked whenever anything has come; `error`: why it went
    no further."""

    work: Work
    may_advance: Callable[[], bool] | None = None
    error: BaseException | None = None


class _Done:
    """How much of what was started has its results, and how much is settled."""

    def __init__(self) -> None:
        self.changed = threading.Condition()
        self.finished = self.settled = 0
        self.failed = 0  # the first that did
        self.error: BaseException | None = None

    def broke(self, error: BaseException) -> None:
        """The thread has ended: who waits is to look."""
        with self.changed:
            self.changed.notify_all()

    def ahead(self, begun: _Ahead, first: bool = False) -> None:
        """A step of what is not finished next; its error is kept until that is."""
        begun.may_advance = None
        if self.error is None and begun.error is None:
            try:
                if first:
                    begun.work.begin()
                begun.may_advance = begun.work.advance()
            except BaseException as e:  # an abort, too; `wait` raises it
                begun.error = e

    def finish(self, begun: _Ahead) -> None:
        number = self.finished + 1
        error = begun.error or self._failing(number, begun.work.finish)
        with self.changed:
            self.finished = number
            self._note(number, error)

    def settle(self, work: Work) -> None:
        number = self.settled + 1
        error = self._failing(number, work.settle)
        with self.changed:
            self.settled = number
            self._note(number, error)

    def _failing(self, number: int, step: Callable[[], None]) -> BaseException | None:
        """The error of a step. From a failure on none is run: what follows would be taken for what failed."""
        if self.error is None or number < self.failed:
            try:
                step()
            except BaseException as e:  # an abort, too; `wait` raises it
                return e
        return None

    def _note(self, number: int, error: BaseException | None) -> None:
        if error is not None and (self.error is None or number < self.failed):
            self.failed, self.error = number, error
        self.changed.notify_all()


def _serve(queue: SimpleQueue[Work | None], done: _Done, endpoint: Endpoint | None) -> None:
    begun: deque[_Ahead] = deque()  # and not finished
    ahead_nbytes = 0  # of all these
    finishing: _Ahead | None = None  # the first of them, while that goes on
    me, is_going_on = threading.get_ident(), False

    def begin(work: Work) -> None:
        nonlocal ahead_nbytes
        ahead_nbytes += work.ahead_nbytes
        begun.append(_Ahead(work))
        done.ahead(begun[-1], first=True)

    def go_on() -> None:
        """Begins what has been started meanwhile, as far as it may be sent ahead, and has what was begun go on.
        (Another thread's waits leave it to this one.)"""
        nonlocal is_going_on
        if threading.get_ident() != me or is_going_on:  # (what goes on may have to wait after all)
            return
        is_going_on = True
        for b in list(begun):
            if b is not finishing and b.may_advance is not None and b.may_advance():
                done.ahead(b)
        while ahead_nbytes <= AHEAD_NBYTES and (work := _at_hand(queue)) is not None:
            begin(work)
        is_going_on = False

    if endpoint is not None:
        endpoint.meanwhile = go_on
    unsettled: Work | None = None
    while True:
        finished: Work | None = None
        if begun:
            go_on()
            finishing = begun[0]
            done.finish(finishing)
            finished, finishing = begun.popleft().work, None
            ahead_nbytes -= finished.ahead_nbytes
            go_on()
        if unsettled is not None:
            done.settle(unsettled)
        unsettled = finished
        if unsettled is None and not begun:  # (more may have been begun while it was settled)
            if (work := queue.get()) is None:
                return
            begin(work)


def _at_hand(queue: SimpleQueue[Work | None]) -> Work | None:
    """The next work, if it is there; the end of all stays in the queue."""
    with suppress(Empty):
        found = queue.get_nowait()
        if found is None:
            queue.put(None)
        return found
    return None


class _Begun(NamedTuple):
    """A collective with its variables."""

    item: CollectiveItem
    vars: Vars

    @property
    def ahead_nbytes(self) -> int:
        return self.item.ahead_nbytes

    def begin(self) -> None:
        self.item.begin(self.vars)

    def advance(self) -> Callable[[], bool] | None:
        return self.item.advance()

    def finish(self) -> None:
        self.item.finish()

    def settle(self) -> None:
        self.item.settle()


class StartItem(ExecItem):
    """Starts a collective."""

    def __init__(self, item: CollectiveItem):
        self.item, self.buffers, self.line, self.name = item, item.buffers, item.line, item.name
        self.thread = thread_of(item.communication)
        self.number = 0

    @property
    def written(self) -> list[Buffer]:
        return self.item.written

    def mover(self, buffer: Buffer) -> Callable[[Any], None] | None:
        return self.item.mover(buffer)

    def run(self, vars: Vars) -> None:
        self.item.count()
        self.number = self.thread.start(_Begun(self.item, vars))

    def run_profiled(self, vars: Vars) -> None:
        self.run(vars)  # (the collective tells of itself)


class WaitItem(ExecItem):
    """Waits for the results of a collective that was started, or until it is `settled`. It is what completes what the
    collective writes."""

    track = "waiting"

    def __init__(self, started: StartItem, settled: bool):
        self.started, self.settled, self.buffers, self.line = started, settled, started.buffers, started.line
        self.name = f"wait for {'readers of ' * settled}{started.name}"

    @property
    def written(self) -> list[Buffer]:
        return self.started.written

    def mover(self, buffer: Buffer) -> Callable[[Any], None] | None:
        return _keep  # (it reads nothing itself)

    def run(self, vars: Vars) -> None:
        began = time.perf_counter()
        self.started.thread.wait(self.started.number, self.settled)
        self.started.item.communication.waited(time.perf_counter() - began)


def _keep(handle: Any) -> None:
    pass


def in_order(items: Sequence[ExecItem]) -> list[ExecItem]:
    """The items as they were before `overlapped`."""
    return [i.item if isinstance(i, StartItem) else i for i in items if not isinstance(i, WaitItem)]


def overlapped(items: Sequence[ExecItem]) -> list[ExecItem]:
    """The same work, with starts and waits."""
    if not any(isinstance(i, CollectiveItem) for i in items):
        return list(items)
    touched = [_Touched(i) for i in items]
    out: list[ExecItem] = []
    flying: list[tuple[StartItem, _Touched]] = []
    finished = 0  # of those flying
    for at, item in enumerate(items):
        settled = 1 + max((k for k, (_, t) in enumerate(flying) if touched[at].writes_of(t)), default=-1)
        if settled:
            out.append(WaitItem(flying[settled - 1][0], settled=True))
            del flying[:settled]
            finished = max(finished - settled, 0)
        read = 1 + max((k for k, (_, t) in enumerate(flying) if t.writes_of(touched[at])), default=-1)
        if read > finished:
            out.append(WaitItem(flying[read - 1][0], settled=False))
            finished = read
        if isinstance(item, CollectiveItem) and (flying or _is_worth(items, touched, at)):
            flying.append((StartItem(item), touched[at]))
            item = flying[-1][0]
        out.append(item)
    if flying:
        out.append(WaitItem(flying[-1][0], settled=True))
    return out


def _is_worth(items: Sequence[ExecItem], touched: Sequence[_Touched], at: int) -> bool:
    """Whether there is enough to compute, or to send, before a collective has to be waited for."""
    first = items[at]
    if not isinstance(first, CollectiveItem) or not first.crosses:
        return False
    spent = 0.0
    for item, t in zip(items[at + 1 :], touched[at + 1 :]):
        if spent > WORTH_S or touched[at].meets(t):
            break
        if isinstance(item, CollectiveItem):  # what it sends goes out while the first one waits for its last word
            spent += item.link_s
        elif isinstance(item, KernelItem):
            spent += item.kernel.flops / FLOPS + item.kernel.nbytes / BYTES
        elif isinstance(item, CopyItem):
            spent += item.buffers[0].nbytes / BYTES
    return spent > WORTH_S


class _Touched:
    """The memory that an item reads and writes: (its id, first byte, end)."""

    def __init__(self, item: ExecItem) -> None:
        self.all = [_range(b) for b in item.buffers if b.nbytes]
        self.written = [_range(b) for b in item.written if b.nbytes]

    def writes_of(self, other: _Touched) -> bool:
        """Whether this one writes what the other one touches."""
        return _overlap(self.written, other.all)

    def meets(self, other: _Touched) -> bool:
        """Whether the two items must not run at once."""
        return self.writes_of(other) or other.writes_of(self)


Range = tuple[int, int, int]


def _range(b: Buffer) -> Range:
    return id(b.base or b), b.offset, b.offset + b.nbytes


def _overlap(these: list[Range], those: list[Range]) -> bool:
    return any(x == y and a < d and c < b for x, a, b in these for y, c, d in those)
