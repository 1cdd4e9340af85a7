"""Runtime: what one worker owns.

`own` is that of this process, which the launcher connects where there are other workers. `current()`
(`runtime/current.py`) is `own`, unless a test replaces it: `with use(Runtime(world=me)):`.

What is not the worker's but the process's stays with its module: nodes and the numbers of their buffers; live tensors,
the memory behind their BUFFERs and the TinyJit that records them; compiled kernels, threads and drivers of the machine;
registries, such as that of environment variables; context variables; who watches (`profile`, observers of passes), and
`GlobalCounters`.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from manygrad.multi.world import World
from manygrad.runtime.communication import Communication, Hooks
from manygrad.runtime.current import install
from manygrad.runtime.devices import Devices
from manygrad.runtime.devices.diskcache import DiskCache
from manygrad.runtime.faults import Faults
from manygrad.schedule.cache import Schedules

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

    def connect(self, endpoint: Endpoint, hooks: Hooks) -> None:
        """From now on there are other workers, and buffers of the CPU devices live where those of this host can read
        them in place."""
        self.communication.connect(endpoint, hooks)
        self.devices = Devices(endpoint.arena)


own = Runtime(schedules=Schedules(DiskCache("schedules")))
install(own)
