"""Many messages of one host by one native call: of a collective, or of graphs and collectives as one table."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any

from manygrad.collectives.transport import shm
from manygrad.collectives.transport.waiting import Waits
from manygrad.native.exchange import ALL, RUN
from manygrad.native.replay import NativeCall

_STOPPED = ALL.index("STOPPED")
_SPINS, _LIMIT = RUN.index("SPINS"), RUN.index("LIMIT")


class NativeRuns:
    """Native runs of one endpoint, made under its `lock`."""

    def __init__(self, lock: AbstractContextManager[bool], waits: Waits) -> None:
        self.lock, self.waits = lock, waits
        self.closed = False  # set by the endpoint's end
        self._joined: Any = None

    def run(self, run: Any, links: Sequence[shm.ShmLink]) -> int:
        """Runs the calls of a table (`native/exchange.py`) with peers of this host; the number of the first that was
        not carried out. It may be 0 for any reason: then the calls have to be made one by one."""
        with self.lock:
            if not self._may_run(links):
                return 0
            run[_SPINS], run[_LIMIT] = self.waits.spins, ctypes.addressof(self.waits.tick)
            return int(shm.native_functions().exchange(ctypes.addressof(run)))

    def run_joined(self, all: Any, links: Sequence[shm.ShmLink]) -> None:
        """As `run`, for graphs and collectives as one table, which tells where it stopped. It was given to
        `prepare_joined` before."""
        with self.lock:
            if not self._may_run(links):
                all[_STOPPED] = -1
                return
            self._joined(ctypes.addressof(all))
            self.waits.raise_aborted()

    def prepare_joined(self, all: Any) -> None:
        """Puts into a table what all its runs have alike."""
        waits = self.waits
        tick, stop = ctypes.addressof(waits.tick), ctypes.addressof(waits.stop)
        ALL.put(all, ALL_SPINS=waits.spins, ALL_LIMIT=tick, STOP=stop)
        self._joined = shm.native_functions().joined

    def joined_call(self, all: Any, links: Sequence[shm.ShmLink]) -> NativeCall:
        """`run_joined` as native code makes it; it stops at once where the endpoint has ended."""
        function = ctypes.cast(self._joined, ctypes.c_void_p).value or 0
        queues = tuple(link.queue for link in links)
        return NativeCall(function, (ctypes.addressof(all), 0, 0, 0), lock=self.lock, empty=queues)

    def _may_run(self, links: Sequence[shm.ShmLink]) -> bool:
        self.waits.raise_aborted()
        for link in links:
            if link.queue:
                return False
        return not self.closed
