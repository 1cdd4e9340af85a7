"""Words in which kernels say that an index was out of range; looked at whenever a value is read.

Each place in a program that checks an index has a word on each device, 0 as long as all is well
(`schedule/graph/lower_checks.py` says what else it can hold). A read costs a comparison of these words with zeros,
whatever ran before it: a replayed step reports like any other.

A word does not say which of the values computed since the last read it is about. All of those that stand on its place
are lost then: none is read as if it were right. What an assignment wrote stays, as memory that is partly of before."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Iterable
from dataclasses import dataclass
from weakref import WeakKeyDictionary

import numpy as np

from manygrad.runtime.buffer import Buffer
from manygrad.runtime.current import current
from manygrad.runtime.storage import STORAGE, spoil
from manygrad.schedule.graph.lower_checks import index_of
from manygrad.tensor.dtype import dtypes
from manygrad.tensor.uop import BufferSpec, Ops, UOp
from manygrad.tensor.uop.walk import together

WORDS = 4096  # a device; the places of a program beyond share the last one
_BYTES = dtypes.int64.itemsize
_uids = itertools.count(-1, -1)  # the process's, as nodes are


@dataclass(frozen=True)
class Site:
    """A place that checks an index: what it is of, its valid range, the user's line."""

    what: str
    low: int
    size: int
    line: str

    def message(self, index: str) -> str:
        if self is OTHERS:
            return f"index {index} is out of range (the program has too many places with indices to say which)"
        valid = f"{self.low} to {self.size - 1} are valid" if self.size else "there is nothing to choose from"
        return f"{self.what} {index} is out of range: {valid} ({self.line})"


OTHERS = Site("index", 0, -1, "?")


class _Words:
    """Words of one device."""

    def __init__(self, device: str) -> None:
        self.buffer = Buffer(device, WORDS, dtypes.int64).copyin(np.zeros(WORDS, np.int64))
        self.buffer.agreed = True
        self.shared = self.buffer.as_numpy()  # None where the host cannot see the memory
        self.numbers: dict[Site, int] = {}

    def word(self, site: Site) -> Buffer:
        if site not in self.numbers and len(self.numbers) >= WORDS - 1:
            site = OTHERS
        number = self.numbers.setdefault(site, len(self.numbers))
        out = self.buffer.view(1, dtypes.int64, number * _BYTES)
        out.agreed = True  # what a rank finds is its own affair
        return out

    def look(self) -> tuple[Site, int] | None:
        """A place where something went wrong since the last look, and the code of the index."""
        now = (self.shared if self.shared is not None else self.buffer.copyout())[: len(self.numbers)]
        raw = now.tobytes()
        if raw.count(0) == len(raw):
            return None
        # (another thread may have been told)
        return next(((site, int(now[i])) for site, i in list(self.numbers.items())[: len(now)] if now[i]), None)

    def sites_of(self, buffers: Iterable[Buffer]) -> set[Site]:
        """The places whose words are among these."""
        named = {number: site for site, number in self.numbers.items()}
        return {named[b.offset // _BYTES] for b in buffers if b.base is self.buffer}

    def forget(self, site: Site) -> None:
        if site in self.numbers:
            self.word(site).copyin(np.zeros(1, np.int64))


class Faults:
    """The words of one worker, and the nodes by which its programs name them."""

    def __init__(self) -> None:
        self.words: dict[str, _Words] = {}  # by device
        self.nodes: dict[tuple[Site, str | tuple[str, ...]], UOp] = {}
        self.places: dict[UOp, Site] = {}  # by the node
        # stored values computed since the last read, each with the places that it stands on
        self.unread: WeakKeyDictionary[UOp, frozenset[Site]] = WeakKeyDictionary()
        self.changes = 0  # how often that was changed
        self.lock = threading.RLock()

    def word_of(self, what: str, low: int, size: int, line: str, device: str | tuple[str, ...]) -> UOp:
        """The BUFFER, one word a device, that a CHECK at a place of the program writes."""
        site = Site(what, low, size, line)
        found = self.nodes.get((site, device))
        if found is None:
            with self.lock:
                found = self.nodes.setdefault((site, device), self._new_node(site, device))
        return found

    def _new_node(self, site: Site, device: str | tuple[str, ...]) -> UOp:
        n = len(device)
        cut = (0, tuple(range(n + 1))) if isinstance(device, tuple) else (None, ())
        u = UOp(
            Ops.BUFFER, dtypes.int64, (), BufferSpec(next(_uids), (n if cut[1] else 1,), dtypes.int64, device, *cut)
        )
        self.attach(u, site)
        self.places[u] = site
        return u

    def attach(self, u: UOp, site: Site) -> None:
        """Gives a node the words of this worker's devices."""
        device = u.device
        assert device is not None
        if isinstance(device, str):
            STORAGE[u] = self._word(site, device)
        else:
            world = current().world
            STORAGE[u] = [self._word(site, d.partition("@")[0]) if world.is_local(d) else None for d in device]

    def _word(self, site: Site, device: str) -> Buffer:
        if device not in self.words:
            self.words[device] = _Words(device)
        return self.words[device].word(site)

    def sites_of(self, buffers: Iterable[Buffer]) -> frozenset[Site]:
        """The places whose indices calls check that use these buffers."""
        used = list(buffers)
        return frozenset(site for words in self.words.values() for site in words.sites_of(used))

    def note(self, sink: UOp) -> None:
        """The values that a SINK has stored stand on the places whose indices are read on the way to them."""
        unread = self.unread
        self.changes += 1
        below: dict[UOp, frozenset[Site]] = {}
        for u in sink.toposort():
            if u.op is Ops.BUFFER:
                sites = unread.get(u) if unread else None
            else:
                found = [below[s] for s in u.src if s in below]
                sites = together(found) if found else None
                if u.op is Ops.CHECK:
                    sites = (sites or frozenset()) | {self.places.get(u.src[1], OTHERS)}
            if sites:
                below[u] = sites
        for store in sink.src:
            if store.op is Ops.STORE and (stood_on := below.get(store.src[1])):
                unread[store.src[0]] = stood_on

    def note_replay(self, sites: frozenset[Site], results: Iterable[UOp]) -> int:
        """A replay that checks indices at `sites` is to store results; its arguments may be any unread values. Another
        one that stores the same need not be noted as long as `changes` is what is given."""
        if not sites and not self.unread:
            return self.changes
        self.changes += 1
        if self.unread:
            sites = sites.union(*self.unread.values())
        for u in results:
            self.unread[u] = sites
        return self.changes

    def look(self) -> None:
        """IndexError if an index was out of range; of several places each is told once, one at a look. What stands on
        the place is lost."""
        for words in list(self.words.values()):
            if (found := words.look()) is not None:
                site, code = found
                for others in list(self.words.values()):  # (what is replicated is wrong on all devices)
                    others.forget(site)
                told = site.message(index_of(code))
                self.changes += 1
                for u in [u for u, sites in self.unread.items() if site in sites]:
                    spoil(u, f"{told}; this tensor was computed with it and has no value")
                    del self.unread[u]
                raise IndexError(told)
        if self.unread:
            self.changes += 1
            self.unread.clear()
