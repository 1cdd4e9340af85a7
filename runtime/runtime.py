"""Runtime: what one worker owns.

`own` is that of this process, which the launcher connects where there are other workers. `current()`
(`runtime/current.py`) is `own`, unless a test replaces it: `with use(Runtime(world=me)):`.

What is not the worker's but the process's stays with its module: nodes and the numbers of their buffers; live tensors,
the memory behind their BUFFERs and the TinyJit that records them; compiled kernels, threads and drivers of the machine;
registries, such as that of environment variables; context variables; who watches (`profile`, observers of passes), and
`GlobalCounters`.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from manygrad.multi.world import World
from manygrad.runtime.current import install
from manygrad.runtime.devices import Devices
from manygrad.runtime.devices.compile.diskcache import DiskCache
from manygrad.runtime.exchange.communication import Communication, Hooks
from manygrad.runtime.faults import Faults
from manygrad.runtime.storage import lose
from manygrad.schedule.cache import Schedules
from manygrad.tensor.storage import LIVE
from manygrad.tensor.threads import Threads
from manygrad.tensor.uop import toposort

if TYPE_CHECKING:
    from manygrad.collectives.transport import Endpoint


@dataclass
class Runtime:
    """A new one is that of a worker alone which has done nothing yet, and keeps no schedules on disk."""

    world: World = field(default_factory=World)  # who this worker is
    schedules: Schedules = field(default_factory=Schedules)  # those it has made, in memory and on disk
    # with other workers: endpoint, the launcher's hooks, prepared collectives, and how often each of them has run
    communication: Communication = field(default_factory=Communication)
    devices: Devices = field(default_factory=Devices)  # those it has opened
    faults: Faults = field(default_factory=Faults)  # words in which its kernels say that an index was out of range
    # those of collectives and digests, and under the launcher of the control channel, whose end is the end of all
    threads: Threads = field(default_factory=Threads)

    def connect(self, endpoint: Endpoint, hooks: Hooks) -> None:
        """From now on there are other workers, and buffers of the CPU devices live where those of this host can read
        them in place."""
        self.communication.connect(endpoint, hooks)
        self.devices = Devices(endpoint.arena)

    def end(self) -> None:
        """This rank has ended: what needs no other worker can go on, as in a destructor."""
        if (endpoint := self.communication.endpoint) is not None:
            endpoint.close("its script, its threads and its exit handlers have ended; read what is needed before")
            self.communication.leave(endpoint.why_closed)

    def become_child(self) -> None:
        """In a forked child, which is no rank: it can compute with tensors of its own, in memory of its own. What the
        parent's tensors hold lies where the parent, and its peers, go on writing."""
        from manygrad.runtime.jit.tiny_jit import forget_captures

        endpoint = self.communication.endpoint
        assert endpoint is not None
        who = f"process {os.getpid()} was forked from rank {endpoint.rank}, and a child is no rank"
        arena = endpoint.arena
        endpoint.leave_to_parent(f"{who}; leave to the rank, or to a thread of it, what needs other ranks")
        self.communication.leave(endpoint.why_closed)
        self.devices, self.faults, self.threads = Devices(), Faults(), Threads()  # (no thread is in a child)
        forget_captures()
        lose(
            toposort([t.uop for t in LIVE]),
            lambda handle: getattr(handle, "owner", None) is arena,
            f"the value is the parent's: {who}; give it the array (`.numpy()`), read before the fork, or use a thread",
        )


own = Runtime(schedules=Schedules(DiskCache("schedules")))
install(own)
