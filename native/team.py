"""The native thread team of a process: persistent threads that share the parallel loop of a kernel.

LLVM IR (`ir/team*.ll`, `ir/chain.ll`, `ir/graph.ll`) over libc's pthread_create and futexes, so it needs no C compiler
and no Python thread. A job is (function, buffers, variables, total, grain). Each thread has a share of the indices, the
same part of every job of a size, so that what it has in its caches from one kernel serves it in the next; it takes
pieces of `grain` indices of it from an atomic counter, and then of the shares of the others, which may have begun late.

Protocol. The caller fills in the job, sets `ctl` to OPEN and adds one to `seq`. A worker that sees a new `seq` adds
itself to `ctl`'s low half if the job is still open, works, and takes itself off. The caller works too, then closes the
job and waits for those inside only: a worker that the system does not run right now holds nobody up. Idle workers spin
shortly, then sleep on `seq` (`wake` has them spin again: a job is about to come); so does the caller, on the low half
of `ctl`, until the last one inside wakes it. When the team is busy (another Python thread runs a kernel), the caller
works alone.

`short_run` and `short_graph` keep Python's lock, for a few microseconds of work among much more of Python. A thread
that gives that lock away for a moment and takes it back, again and again, would keep every other Python thread waiting:
whenever one has been woken the lock is taken, and it begins its wait anew.

A thread's scratch memory begins with the index up to which it has run the kernel in this job, 0 before: a kernel packs
nothing anew for a part of the loop that goes on where what this thread has packed is still right.

After a fork the child has no threads: `Team` starts over there. Without Linux's futex there are no workers.
"""

from __future__ import annotations

import ctypes
import os
import signal
import threading
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from manygrad.native import futex, graph
from manygrad.native.chain import CHAIN_BYTES
from manygrad.native.memory import mostly_unwritten
from manygrad.native.processor import processor
from manygrad.native.source import module, pause

MAX_THREADS = 256
SPINS = 4000  # of an idle worker before it sleeps, of one pause instruction each: a few dozen microseconds
AWAIT_SPINS = 1000  # of the caller before it sleeps until the last worker is out (which may need this very core)
OPEN = 1 << 32  # in `ctl`: the job can be joined; below it, how many workers are inside

Link = Callable[[str, Sequence[str]], dict[str, int]]
"""`(IR text, names)`: compiles and loads a module for good, gives the addresses of its functions."""

_P, _N = ctypes.c_void_p, ctypes.c_int64
RUN = _P, _P, _P, _N, _N, _P
GRAPH = _P, _N, _P, _P
PROTOTYPES: dict[str, Any] = {
    "team_run": ctypes.CFUNCTYPE(None, *RUN),
    "team_chain": ctypes.CFUNCTYPE(None, _P, _P, _N, _N, _P),
    "team_graph": ctypes.CFUNCTYPE(None, *GRAPH),
    "team_wake": ctypes.CFUNCTYPE(None),
    "team_start": ctypes.CFUNCTYPE(ctypes.c_int32, ctypes.c_int32, ctypes.c_int32),
    "team_limit": ctypes.CFUNCTYPE(None, ctypes.c_int32),
    "team_scratch": ctypes.CFUNCTYPE(None, ctypes.c_int32, _P),
    "team_reset": ctypes.CFUNCTYPE(None),
}


def team_ir(scratch_bytes: int) -> str:
    """The team's module."""
    return module(
        "futex", pause(processor().architecture), "team", "team_work", "team_worker", "team_run", "chain", "graph",
        **futex.constants(), MAX_THREADS=MAX_THREADS, SHARES=MAX_THREADS + 1, OPEN=OPEN, INSIDE=OPEN - 1,
        SPINS=SPINS, AWAIT_SPINS=AWAIT_SPINS, SCRATCH_BYTES=scratch_bytes, CLOCK=graph.clock(),
    )  # fmt: skip


class _Scratch(threading.local):
    """A calling thread's own scratch memory."""

    def __init__(self, nbytes: int) -> None:
        self.memory, self.address = mostly_unwritten(nbytes)


class Team:
    """`run` and `graph` of native code; starts and sizes the threads as `wanted` says, on first use.

    Large: words that native code reads.
    """

    def __init__(self, link: Link, wanted: Callable[[], int], scratch_bytes: int) -> None:
        """`wanted()`: how many threads, the caller included; `scratch_bytes`: of memory that a kernel may use in
        each."""
        addresses = link(team_ir(scratch_bytes), list(PROTOTYPES))
        for name, prototype in PROTOTYPES.items():
            setattr(self, name.removeprefix("team_"), prototype(addresses[name]))
        self.short_run = ctypes.PYFUNCTYPE(None, *RUN)(addresses["team_run"])
        self.short_graph = ctypes.PYFUNCTYPE(None, *GRAPH)(addresses["team_graph"])
        self.chain_address, self.run_address = addresses["team_chain"], addresses["team_run"]
        self.graph_address = addresses["team_graph"]
        self.native = futex.available()
        self.wanted, self.nbytes = wanted, scratch_bytes + CHAIN_BYTES
        self.lock = threading.RLock()
        self.local = _Scratch(self.nbytes)
        self.memories: list[np.ndarray] = []
        self.started = 0
        self.threads = 1
        if hasattr(os, "register_at_fork"):
            os.register_at_fork(after_in_child=self.after_fork)

    run: Any
    short_run: Any
    short_graph: Any
    chain: Any
    graph: Any
    wake: Any
    start: Any
    limit: Any
    scratch: Any
    reset: Any

    def after_fork(self) -> None:
        self.lock = threading.RLock()
        self.reset()
        self.started, self.threads = 0, 1

    def ready(self) -> int:
        """Makes the team as large as it is wanted; gives this thread's scratch address."""
        wanted = self.wanted()
        if wanted != self.threads:
            self.resize(wanted)
        return self.local.address

    def resize(self, threads: int) -> None:
        with self.lock:
            workers = threads - 1 if self.native else 0
            if workers > self.started:
                self._start(workers)
            self.limit(min(workers, self.started))
            self.threads = threads

    def _start(self, workers: int) -> None:
        for i in range(self.started, workers):
            memory, address = mostly_unwritten(self.nbytes)
            self.memories.append(memory)
            self.scratch(i, address)
        blocked = signal.pthread_sigmask(signal.SIG_BLOCK, set(signal.Signals))  # signals are for Python's threads
        try:
            self.started = self.start(self.started, workers)
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, blocked)
