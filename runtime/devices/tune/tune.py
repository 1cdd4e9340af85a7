"""BEAM=n: the optimisations of a kernel, found by measuring on this machine.

What a kind of device gives for it is its `Bench`.

`tuned` asks the disk first: winners are kept by kernel, machine, version of the code, threads and the search's
settings. Else it searches, one process of a user at a time (others wait, and then find the winner on disk). Buffers are
scratch ones of the sizes the kernel touches, filled with random numbers; indices that a kernel reads are all 0. A list
is dropped, and counted, when it does not compile, its code is far larger than the heuristic's (that bounds the time of
a compilation, which cannot be interrupted), a part of the work shows that it is far slower than the best, or its output
is not the heuristic's: bit for bit where reductions are added up in the same order, else up to rounding.
"""

from __future__ import annotations

import hashlib
import json
import time
from dataclasses import dataclass
from math import inf

import numpy as np

from manygrad.errors import WrongKernelError
from manygrad.runtime.codegen.analysis.describe import Signature, estimate, signature
from manygrad.runtime.codegen.choose import plain
from manygrad.runtime.codegen.opts import Opts, RFactor, Unroll, Vectorize, canonical, legal, named, neighbours, sums
from manygrad.runtime.codegen.pipeline import Prepared, beyond, prepare
from manygrad.runtime.codegen.search import Found, beam_search
from manygrad.runtime.devices.compile.diskcache import DiskCache
from manygrad.runtime.devices.tune.bench import Bench, Candidate, Scratch
from manygrad.tensor.dtype import DType, dtypes
from manygrad.tensor.environment import BEAM, BEAM_SPLIT, CHECK_OOB, DEBUG, FLOAT32_MATMUL_PRECISION, FLOAT32_PARTS
from manygrad.tensor.uop.intervals import bounds
from manygrad.tensor.uop.ops import Ops
from manygrad.tensor.uop.rewrite import rebuild
from manygrad.tensor.uop.uop import UOp

SEARCH_LIMIT_S = 30.0  # of one kernel
WINNERS_VERSION = 2  # of the form in which winners stand on disk: others are searched anew
LOCK_LIMIT_S = 45.0  # how long to wait for another process's search before the heuristic's list is taken
SMALL_WORK = 1 << 14  # operations + bytes below which a call costs more than the kernel
MEMORY_LIMIT_BYTES = 4 << 30
CODE_GROWTH = 4  # how many times the heuristic's code (or CODE_BYTES, if that is more) a candidate's may be
CODE_BYTES = 100_000
TOO_SLOW = 3.0  # times the best: a candidate is given up
MARGIN = 0.95  # a winner is faster than the heuristic's by this much, measured in turns

_WINNERS = DiskCache("beam")


def tuned(ast: UOp, bench: Bench) -> Opts | None:
    """The list of `Opt`s to compile `ast` with; None: the heuristic's."""
    prepared = prepare(ast, bench.machine())
    sig = signature(prepared.ast)
    if not searchable(sig) or sum(estimate(ast)) < SMALL_WORK:
        return None
    settings = f"{BEAM.value} {BEAM_SPLIT.value} {FLOAT32_PARTS.value} {FLOAT32_MATMUL_PRECISION.value} "
    key = hashlib.sha256(ast.key + settings.encode() + bench.key()).digest()
    if (known := _stored(key, sig)) is not None or CHECK_OOB:
        return known
    with _WINNERS.lock(LOCK_LIMIT_S) as mine:
        if (known := _stored(key, sig)) is not None or not mine:
            return known
        sizes = extents(sig)
        if sizes is None:
            return None
        opts = Search(prepared, ast, sizes, bench).run()
        _WINNERS.put(
            key, json.dumps({"version": WINNERS_VERSION, "opts": [[o.kind, *o.values] for o in opts]}).encode()
        )
        return opts


def _stored(key: bytes, sig: Signature) -> Opts | None:
    """The winner on disk, if it is there and one that the kernel can take."""
    data = _WINNERS.get(key)
    if data is None:
        return None
    try:
        found = json.loads(data)
        if found["version"] != WINNERS_VERSION:
            return None
        opts = tuple(named(str(kind), *map(int, values)) for kind, *values in found["opts"])
    except (ValueError, KeyError, TypeError):
        return None
    return opts if legal(sig, opts) is None else None


def searchable(sig: Signature) -> bool:
    """Kernels whose stores may meet at one address are left to the heuristic: their order counts."""
    return not any(s.arg is not None or _data_in(s.src[0]) for s in sig.stores)


def _data_in(index: UOp) -> list[UOp]:
    """The LOADs that the offset of an INDEX is computed from."""
    return [u for u in index.src[1].toposort() if u.op is Ops.LOAD]


def extents(sig: Signature) -> dict[int, int] | None:
    """Elements of every argument, with symbolic sizes at their maximum and what is loaded for an index taken as 0;
    None: unknown."""
    sizes = dict.fromkeys(sig.params, 1)
    for u in sig.nodes:
        if u.op is not Ops.INDEX:
            continue
        offset = rebuild(u.src[1], lambda x: UOp.const(x.dtype, 0) if x.op is Ops.LOAD else None)
        low, high = bounds(offset)
        if (low < 0 and len(u.src) == 2) or high >= MEMORY_LIMIT_BYTES:
            return None
        sizes[u.src[0].arg] = max(sizes[u.src[0].arg], high + 1)
    total = sum(n * sig.params[slot].itemsize for slot, n in sizes.items())
    return sizes if total <= MEMORY_LIMIT_BYTES else None


def _random(d: DType, count: int, rng: np.random.Generator) -> np.ndarray:
    if d.is_float:
        return rng.standard_normal(count, dtype=np.float32).astype(d.np)
    return rng.integers(0, 2 if d.is_bool else 4, count).astype(d.np)


@dataclass
class Tally:
    """Counts of what became of the lists tried."""

    tried: int = 0
    failed: int = 0  # did not compile
    large: int = 0  # too much code
    slow: int = 0  # given up
    wrong: int = 0

    def __str__(self) -> str:
        dropped = {k: n for k, n in vars(self).items() if n and k != "tried"}
        return f"{self.tried} tried" + (f" ({', '.join(f'{n} {k}' for k, n in dropped.items())})" if dropped else "")


class Search:
    """The search for one kernel: its scratch buffers, its candidates, and the outputs they must give."""

    def __init__(self, prepared: Prepared, ast: UOp, sizes: dict[int, int], bench: Bench) -> None:
        self.bench = bench
        self.prepared, self.ast, self.sig = prepared, ast, signature(prepared.ast)
        self.default = canonical(self.sig, prepared.opts)
        self.code_limit = max(CODE_BYTES, CODE_GROWTH * len(prepared.code(bench.render)))
        self.tally = Tally()
        rng = np.random.default_rng(0)
        indices = {v.src[0].src[0].arg for u in self.sig.nodes if u.op is Ops.INDEX for v in _data_in(u)}
        self.arrays: list[np.ndarray] = []
        self.scratch: list[Scratch] = []
        for slot in range(self.sig.slots):
            d = self.sig.params.get(slot, dtypes.uint8)
            scratch = bench.memory(sizes.get(slot, 1) * d.itemsize)
            array = scratch.array.view(d.np)
            array[:] = 0
            if slot not in indices:
                array[:] = _random(d, array.size, rng)
            scratch.push()
            self.arrays.append(array)
            self.scratch.append(scratch)
        self.handles = [s.handle for s in self.scratch]
        self.variables = tuple(v.arg.max for v in self.sig.variables)
        self.written = sorted({s.src[0].src[0].arg for s in self.sig.stores})
        self.before = {slot: self.arrays[slot].copy() for slot in self.written}
        self.want: dict[int, np.ndarray] = {}

    def run(self) -> Opts:
        """The fastest list that is right."""
        began = time.monotonic()
        lanes, group_items = self.register_lanes(), self.bench.machine().group_items

        def near(opts: Opts) -> list[Opts]:
            return neighbours(self.sig, opts, lanes, bool(BEAM_SPLIT), group_items)

        def progress(found: Found) -> None:
            if DEBUG >= 1:
                print(f"beam {self.prepared.name}: round {found.rounds}, {self.tally}, best {found.best * 1e6:.1f} us")

        starts = [self.default, *self.bare()]
        found = beam_search(starts, near, self.measure, int(BEAM.value), SEARCH_LIMIT_S, progress)
        opts = self.decide(found)
        if DEBUG >= 1:
            was, now = (found.seconds[o] * 1e6 for o in (self.default, opts))
            print(
                f"beam {self.prepared.name}: {was:.1f} -> {now:.1f} us, {self.tally} "
                f"in {time.monotonic() - began:.1f} s: {list(opts)}"
            )
        return opts

    def bare(self) -> list[Opts]:
        """The list without optimisation; unless sums may change, with what the heuristic's way of adding up needs."""
        none = plain(self.prepared.ast)
        for kinds in ((), (RFactor, Unroll), (RFactor, Unroll, Vectorize)):
            opts = canonical(self.sig, (*(o for o in self.default if isinstance(o, kinds)), *none))
            if legal(self.sig, opts) is None and (BEAM_SPLIT or sums(self.sig, opts) == sums(self.sig, self.default)):
                return [opts]
        return []

    # *** one candidate ***

    def measure(self, opts: Opts, best_s: float) -> float:
        self.tally.tried += 1
        candidate = self.candidate(opts)
        if candidate is None:
            return inf
        if best_s < inf:
            part = candidate.part_s(self.handles, self.variables)
            if part is not None and part > TOO_SLOW * best_s:
                self.tally.slow += 1
                return inf
        if self.bench.first_is_slow:
            candidate.run(self.handles, self.variables)
        self.restore()
        first = candidate.run(self.handles, self.variables)
        for slot in self.written:
            self.scratch[slot].pull()
        if not self.right(opts):
            self.tally.wrong += 1
            if DEBUG >= 1:
                raise WrongKernelError(
                    f"kernel {self.prepared.name} under {list(opts)} gives other numbers "
                    f"than under the heuristic's {list(self.default)}; "
                    "please report it; DEBUG=0 leaves the list out"
                )
            return inf
        if first > TOO_SLOW * best_s and first > 1e-4:
            self.tally.slow += 1
            return inf
        return min(first, *(self.timed(candidate, first) for _ in range(3)))

    def candidate(self, opts: Opts) -> Candidate | None:
        try:
            prepared = Prepared(self.prepared.name, self.prepared.ast, opts)
            if (reason := beyond(self.bench.machine(), prepared.ast, opts)) is not None:
                raise ValueError(reason)
            code = self.bench.render(prepared.program())
            if len(code) > self.code_limit:
                self.tally.large += 1
                return None
            return self.bench.load(prepared, self.ast, code)
        except (ValueError, AssertionError, NotImplementedError, RuntimeError) as error:
            self.tally.failed += 1
            if DEBUG >= 1:
                print(f"beam {self.prepared.name}: {list(opts)} does not compile: {error!r}")
            return None

    def restore(self) -> None:
        for slot, data in self.before.items():
            self.arrays[slot][:] = data
            self.scratch[slot].push()

    def right(self, opts: Opts) -> bool:
        """Whether the outputs are those of the first candidate, the heuristic's."""
        got = {slot: self.arrays[slot] for slot in self.written}
        if not self.want:
            self.want = {slot: a.copy() for slot, a in got.items()}
            return True
        exact = sums(self.sig, opts) == sums(self.sig, self.default)
        return all(_same(got[s], self.want[s], exact) for s in self.written)

    def timed(self, candidate: Candidate, about_s: float) -> float:
        """Seconds of one run; of several in a row, where one is too short to time."""
        return candidate.run(self.handles, self.variables, int(min(100, max(1, 2e-4 / max(about_s, 1e-7)))))

    def register_lanes(self) -> int:
        """Lanes of a vector register in the widest type the kernel computes in."""
        used = [o.lanes for o in self.prepared.opts if isinstance(o, (Vectorize, RFactor))]
        return used[0] if used else max(1, self.bench.machine().vector_bytes // 4)

    def decide(self, found: Found) -> Opts:
        """The fastest of the best few and the heuristic's, measured once more, in turns."""
        best = dict.fromkeys([self.default, *found.fastest(3)])
        kernels = [(o, c) for o in best if (c := self.candidate(o)) is not None]
        self.restore()
        seconds = {o: inf for o, _ in kernels}
        for _ in range(7):
            for o, candidate in kernels:
                seconds[o] = min(seconds[o], self.timed(candidate, found.seconds[o]))
        found.seconds.update(seconds)
        winner = min(seconds, key=lambda o: seconds[o])
        return winner if seconds[winner] < MARGIN * seconds[self.default] else self.default


def _same(got: np.ndarray, want: np.ndarray, exact: bool) -> bool:
    if exact or got.dtype.kind in "biu":
        return bool(np.array_equal(got, want, equal_nan=got.dtype.kind not in "biu"))
    a, b = got.astype(np.float64), want.astype(np.float64)
    tolerance = {8: 1e-9, 4: 1e-4}.get(got.dtype.itemsize, 3e-2)
    scale = float(np.max(np.abs(b[np.isfinite(b)]), initial=0.0))
    return bool(np.allclose(a, b, rtol=tolerance, atol=tolerance * scale, equal_nan=True))
