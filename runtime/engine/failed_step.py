"""FAILED_STEPS: a rank that fails saves what its last step has run, and what that read; `replay.py` runs it again.

Kept are the LINEARs since the optimiser's last step, the memory that they read as it was before the first of them,
what each collective gave, and digests of what was written. Calls are then made one by one, so that nothing runs
unseen. Cost: a copy of all that a step reads, in each step, and a pass over what it writes.
"""

from __future__ import annotations

import json
import os
import sys
import traceback
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any

import numpy as np

from manygrad.runtime.agreement.agreement import digest
from manygrad.runtime.buffer import Buffer
from manygrad.runtime.current import current
from manygrad.runtime.executors.collective import CollectiveItem
from manygrad.runtime.executors.items import ExecItem, Vars
from manygrad.runtime.profile.counters import GlobalCounters, steps_taken
from manygrad.runtime.storage import storage
from manygrad.tensor.environment import FAILED_STEPS
from manygrad.tensor.source import LINE
from manygrad.tensor.uop import Ops, UOp
from manygrad.tensor.uop.serial import encode

FORMAT = "manygrad step 1"
Place = list[Any]  # number of the memory, offset in bytes, elements, type


@dataclass
class RunLinear:
    """A LINEAR that was run: where its arguments lie by slot, what its collectives gave by call and argument, and the
    digests of what it wrote by slot and part."""

    linear: UOp
    vars: dict[str, int]
    slots: list[Place | list[Place | None]]
    given: dict[tuple[int, int], np.ndarray] = field(default_factory=dict)
    written: list[tuple[int, int, str]] = field(default_factory=list)


class StepRecorder:
    """What this process has run since the optimiser's last step."""

    def __init__(self) -> None:
        self.runs: list[RunLinear] = []
        self.memory: dict[Any, int] = {}  # (bases, or parts of files) -> number
        self.before: list[tuple[Buffer, np.ndarray | None]] = []  # the memory by number, and what was in it
        self.updates = -1
        self.saved: BaseException | None = None

    def recorded(self, items: list[ExecItem], linear: UOp, outside: list[UOp]) -> list[ExecItem]:
        """Executors of `linear` on its arguments `outside`, with those that note what they do."""
        out: list[ExecItem] = [_Noting(lambda vars: self._begin(linear, outside, vars))]
        for i, item in enumerate(items):
            out.append(item)
            if isinstance(item, CollectiveItem) and not item.idle:
                out.append(_Noting(lambda vars, i=i, item=item: self._collective(i, item)))
        return [*out, _Noting(lambda vars: self._end(linear, outside))]

    def _begin(self, linear: UOp, outside: list[UOp], vars: Vars) -> None:
        if self.updates != GlobalCounters.updates:
            self.updates = GlobalCounters.updates
            self.runs, self.memory, self.before = [], {}, []
        slots: list[Place | list[Place | None]] = []
        for u in outside:
            found = storage(u)
            parts = found if isinstance(found, list) else [found]
            places = [None if b is None else self._place(b) for b in parts]
            slots.append(places if isinstance(found, list) else places[0])  # type: ignore[arg-type]
        self.runs.append(RunLinear(linear, dict(vars), slots))

    def _place(self, b: Buffer) -> Place:
        is_file = b.device.kind == "DISK"  # (of which only what is read is kept)
        base = b if is_file else b.base or b
        key = (id(base.base), base.offset, base.count, base.dtype) if is_file else id(base)
        if key not in self.memory:
            self.memory[key] = len(self.before)
            self.before.append((base, base.copyout() if base.is_allocated or is_file else None))
        return [self.memory[key], 0 if is_file else b.offset, b.count, b.dtype.name]

    def _collective(self, call: int, item: CollectiveItem) -> None:
        for i, b in enumerate(item.buffers[: len(item.mine)]):
            self.runs[-1].given[call, i] = b.copyout()

    def _end(self, linear: UOp, outside: list[UOp]) -> None:
        for slot, part in written_arguments(linear):
            found = storage(outside[slot])
            b = found[part] if isinstance(found, list) else found
            if b is not None:
                self.runs[-1].written.append((slot, part, digest(b)))

    def save(self, error: BaseException) -> str | None:
        """Writes the file, and returns its path; None where nothing has run, or this error has one."""
        if not self.runs or self.saved is error:
            return None
        self.saved, world = error, current().world
        arrays: dict[str, np.ndarray] = {}
        memory, runs = [], []
        for n, (b, data) in enumerate(self.before):
            device = "CPU:0" if b.device.kind == "DISK" else b.device.name
            memory.append({"device": device, "count": b.count, "dtype": b.dtype.name, "given": data is not None})
            if data is not None:
                arrays[f"memory {n}"] = _raw(data)
        for n, run in enumerate(self.runs):
            arrays[f"linear {n}"] = np.frombuffer(encode(run.linear, lambda u: LINE.get(u) or ""), np.uint8)
            for (call, i), data in run.given.items():
                arrays[f"given {n} {call} {i}"] = _raw(data)
            runs.append({"vars": run.vars, "slots": run.slots, "written": run.written})
        told = "".join(traceback.format_exception_only(error)).strip()
        about = {"rank": world.rank, "size": world.size, "step": steps_taken(), "error": told}
        index = {"format": FORMAT, **about, "memory": memory, "runs": runs}
        arrays["index"] = np.frombuffer(json.dumps(index).encode(), np.uint8)
        folder = os.path.abspath(FAILED_STEPS.value)
        os.makedirs(folder, exist_ok=True)
        path = os.path.join(folder, f"rank{world.rank}-{world.job}.{world.epoch}-{os.getpid()}.step")
        with open(f"{path}.part", "wb") as f:
            np.savez(f, **arrays)  # type: ignore[arg-type]
        os.replace(f"{path}.part", path)
        return path


def written_arguments(linear: UOp) -> list[tuple[int, int]]:
    """(slot, part) of the arguments that kernels of a LINEAR write."""
    from manygrad.runtime.devices.compile.chain import written

    out: dict[tuple[int, int], None] = {}
    for call in linear.src:
        what = call.src[0]
        numbers = written(what) if what.op in (Ops.SINK, Ops.CHAIN) else {0} if what.op is Ops.COPY else set()
        for i in sorted(numbers):
            u = call.src[1 + i]
            while u.op is Ops.VIEW:
                u = u.src[0]
            if u.op is Ops.PARAM:
                out[u.arg.uid, 0] = None
            elif u.op is Ops.MSELECT and u.src[0].op is Ops.PARAM:
                out[u.src[0].arg.uid, u.arg] = None
    return list(out)


def _raw(data: np.ndarray) -> np.ndarray:
    return np.ascontiguousarray(data).reshape(-1).view(np.uint8)


class _Noting(ExecItem):
    """Notes something between two calls."""

    track, name, line = "notes", "note", ""

    def __init__(self, note: Any) -> None:
        self.note = note
        self.buffers = []

    def run(self, vars: Vars) -> None:
        self.note(vars)


RECORDER = StepRecorder()


def save_failed_step(error: BaseException) -> None:
    """With FAILED_STEPS: saves the step that ended in `error`, and says where; what fails here changes nothing."""
    if not FAILED_STEPS.value:
        return
    try:
        if (path := RECORDER.save(error)) is not None:
            print(f"manygrad: the step that failed is in {path}: launcher replay {path}", file=sys.stderr, flush=True)
    except Exception as e:
        print(
            f"manygrad: the step that failed could not be saved: {type(e).__name__}: {e}", file=sys.stderr, flush=True
        )


def watch_this_process() -> None:
    """An error that ends a process without a launcher saves its step, too."""
    before = sys.excepthook

    def told(kind: type[BaseException], error: BaseException, tb: TracebackType | None) -> None:
        before(kind, error, tb)
        if isinstance(error, Exception):
            save_failed_step(error)

    sys.excepthook = told
