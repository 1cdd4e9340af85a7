"""Runtime: what one worker owns, and Epoch: the part of it that is made and ended with the world it is in.

    epoch = runtime.enter(Membership(rank=1, size=3, job="run-17", epoch=0), endpoint, hooks)
    ...                                 # manygrad.world.size == 3
    runtime.leave()                     # threads, sockets and shared memory of epoch 0 are gone
    runtime.enter(Membership(rank=0, size=2, job="run-17", epoch=1), other_endpoint, hooks)

Compiled kernels, schedules and tensors on the worker's own devices are kept from one epoch to the next. What lies on
devices named by their ranks (`CPU:0@1`) is not: in the next epoch these names mean other workers.

`own` is that of this process, which the launcher connects where there are other workers. `current()`
(`runtime/current.py`) is `own`, unless a test replaces it: `with use(Runtime(world=me)):`.

What is not the worker's but the process's stays with its module: nodes and the numbers of their buffers; live tensors,
the memory behind their BUFFERs and the TinyJit that records them; compiled kernels, threads and drivers of the machine;
registries, such as that of environment variables; context variables; who watches (`profile`, observers of passes), and
`GlobalCounters`.
"""

from __future__ import annotations

import gc
import os
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from manygrad.multi.world import Membership, World
from manygrad.runtime.current import install
from manygrad.runtime.devices import Devices
from manygrad.runtime.devices.compile.diskcache import DiskCache
from manygrad.runtime.exchange.communication import Communication, Hooks
from manygrad.runtime.faults import Faults
from manygrad.runtime.profile.counters import GlobalCounters
from manygrad.runtime.storage import lose, lose_shared
from manygrad.schedule.cache import Schedules
from manygrad.tensor.ops.random import forget_draws
from manygrad.tensor.storage import LIVE
from manygrad.tensor.threads import Threads
from manygrad.tensor.uop import toposort
from manygrad.tensor.uop.table import Table

if TYPE_CHECKING:
    from manygrad.collectives.transport import Endpoint

THREADS_S = 1.0  # how long the end of an epoch waits for its threads


@dataclass
class Epoch:
    """What a worker has for the time of one epoch; a new one is that of a worker alone. `end` ends all of it."""

    membership: Membership = field(default_factory=Membership)
    # with other workers: endpoint, the launcher's hooks, prepared collectives, and how often each of them has run
    communication: Communication = field(default_factory=Communication)
    devices: Devices = field(default_factory=Devices)  # those it has opened
    faults: Faults = field(default_factory=Faults)  # words in which its kernels say that an index was out of range
    threads: Threads = field(default_factory=Threads)  # those of collectives and digests

    def connect(self, endpoint: Endpoint, hooks: Hooks) -> None:
        """From now on there are other workers, and buffers of the CPU devices live where those of this host can read
        them in place."""
        self.communication.connect(endpoint, hooks)
        self.devices = Devices(endpoint.arena)

    def end(self, why: str) -> list[str]:
        """Ends its threads and gives up its sockets; from now on who communicates gets `NoRank`, which says `why`, and
        what needs no other worker can go on. Returns the names of threads that still run. May be called again."""
        left = self.threads.close(THREADS_S)
        if (endpoint := self.communication.endpoint) is not None:
            endpoint.close(why)  # (which ends the waits of a thread that is in one)
            self.communication.leave(endpoint.why_closed)
        return self.threads.close(THREADS_S) if left else []

    def let_go(self) -> None:
        """Memory of its devices stays only where a tensor lies in it."""
        self.devices.trim()
        self.devices, self.faults = Devices(), Faults()
        self.communication.forget()


@dataclass
class Runtime:
    """A new one is that of a worker alone which has done nothing yet, and keeps no schedules on disk."""

    world: World = field(default_factory=World)  # who this worker is, as users see it
    schedules: Schedules = field(default_factory=Schedules)  # those it has made, in memory and on disk
    epoch: Epoch = field(init=False)
    # those of the process: under the launcher that of the control channel, whose end is the end of all
    threads: Threads = field(default_factory=Threads)
    # of snapshots, by the folder of their checkpoints: what outlives an epoch (`checkpoint/copies.py`)
    kept: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.epoch = Epoch(self.world.membership)

    @property
    def communication(self) -> Communication:
        return self.epoch.communication

    @property
    def devices(self) -> Devices:
        return self.epoch.devices

    @property
    def faults(self) -> Faults:
        return self.epoch.faults

    def enter(self, membership: Membership, endpoint: Endpoint, hooks: Hooks) -> Epoch:
        """Becomes the worker that `membership` says, which reaches the others through the connected `endpoint`, after
        leaving the epoch it was in. Kernels, schedules and what lies on own devices are kept."""
        self.leave()
        self.epoch = Epoch(membership)
        self.epoch.connect(endpoint, hooks)
        self.world.show(membership, endpoint.link)
        self.schedules.bodies = Table("bodies")  # which are kept without the rank they are for
        return self.epoch

    def leave(self) -> list[str]:
        """Ends the epoch as a whole: threads, sockets, shared memory in which no tensor lies. Until the next `enter`
        the world shows the one that was left, and a collective is a `NoRank`. Tensors on devices named by ranks are
        lost: who uses one gets `LostValue`. TinyJits capture anew. Again, or alone, it does nothing. Returns the names
        of threads that still run. Raises IndexError if a kernel has met an index out of range, when all that is
        done."""
        from manygrad.runtime.jit.tiny_jit import forget_captures

        epoch = self.epoch
        if epoch.communication.endpoint is None or epoch.communication.why_left:
            return []
        try:
            epoch.faults.look()
        finally:
            left = epoch.end(f"it has left {epoch.membership}; enter the next epoch, or compute without other ranks")
            forget_captures()
            lose_shared(
                f"the value is lost: it was one of {epoch.membership}, which this process has left; before, read it "
                "(`.numpy()`) or move it to the worker's own device"
            )
            epoch.let_go()
            gc.collect()  # endpoint and executors refer to each other, and hold the arena
        return left

    def start_anew(self) -> list[str]:
        """As a process that has computed nothing, for a script that is run again, but for kernels and schedules: leaves
        the epoch, and forgets random states and counts. Returns the names of threads that still run."""
        try:
            left = self.leave()
        except IndexError:  # (of what the script has computed, and did not read)
            left = self.epoch.threads.alive()
        forget_draws()
        GlobalCounters.reset()
        GlobalCounters.steps = GlobalCounters.updates = 0
        return left

    def end(self) -> list[str]:
        """This rank has ended: what needs no other worker can go on, as in a destructor. Returns the names of threads
        that still run."""
        return self.epoch.end("its script, its threads and its exit handlers have ended; read what is needed before")

    def become_child(self) -> None:
        """In a forked child, which is no rank: it can compute with tensors of its own, in memory of its own. What the
        parent's tensors hold lies where the parent, and its peers, go on writing."""
        from manygrad.runtime.jit.tiny_jit import forget_captures

        endpoint = self.communication.endpoint
        self.threads, self.epoch.threads = Threads(), Threads()  # (no thread is in a child)
        if endpoint is None:
            return
        who = f"process {os.getpid()} was forked from rank {endpoint.rank}, and a child is no rank"
        arena = endpoint.arena
        endpoint.leave_to_parent(f"{who}; leave to the rank, or to a thread of it, what needs other ranks")
        self.communication.leave(endpoint.why_closed)
        self.epoch.devices, self.epoch.faults = Devices(), Faults()
        forget_captures()
        lose(
            toposort([t.uop for t in LIVE]),
            lambda handle: getattr(handle, "owner", None) is arena,
            f"the value is the parent's: {who}; give it the array (`.numpy()`), read before the fork, or use a thread",
        )


own = Runtime(schedules=Schedules(DiskCache("schedules")))
install(own)
