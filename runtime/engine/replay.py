"""`launcher replay FILE`: runs a step that `failed_step.py` has saved, on one machine.

Kernels run here on the memory that the rank had; collectives are answered from the file. What they write is compared
with what the rank had written. The settings are those of this process: DEBUG, DETECT_ANOMALY, CHECK_OOB and
VALIDATE_WITH_CPU look closer at a step that cannot be brought about again.
"""

from __future__ import annotations

import json
import sys
import zipfile
from typing import Any

import numpy as np

from manygrad.errors import EXIT_USAGE
from manygrad.runtime.agreement.agreement import digest
from manygrad.runtime.buffer import Buffer
from manygrad.runtime.engine.failed_step import FORMAT
from manygrad.runtime.engine.linear import Arguments, pm_exec
from manygrad.runtime.executors.items import ExecItem, Vars, run_items
from manygrad.tensor.dtype import to_dtype
from manygrad.tensor.source import LINE, line_of
from manygrad.tensor.uop import GroupOp, Ops, UOp
from manygrad.tensor.uop.serial import decode

Given = Buffer | list[Buffer | None]


class SavedArguments(Arguments):
    """The arguments of a LINEAR in memory that was saved."""

    def __init__(self, linear: UOp, given: list[Given]):
        super().__init__(linear, [])
        self.given = given

    def buffer_of(self, u: UOp) -> Buffer:
        if u.op is Ops.PARAM:
            found = self.given[u.arg.uid]
            assert isinstance(found, Buffer)
            return found
        if u.op is Ops.MSELECT:
            parts = self.given[u.src[0].arg.uid]
            assert isinstance(parts, list)
            part = parts[u.arg]
            assert part is not None, "a buffer of another worker"
            return part
        return super().buffer_of(u)


class AnsweredCollective(ExecItem):
    """A collective that gives what it had given."""

    def __init__(self, what: UOp, buffers: list[Buffer], answers: list[np.ndarray | None]):
        self.line, self.name, self.answers = what.arg.members.line, what.op.name.lower(), answers
        self.buffers = buffers[: len(what.arg.members.mine)]

    @property
    def written(self) -> list[Buffer]:
        return self.buffers

    def run(self, vars: Vars) -> None:
        for b, data in zip(self.buffers, self.answers):
            if data is None:
                raise EOFError(f"{self.line}: the rank has not come to the end of this {self.name}; the step ends here")
            b.copyin(data.view(b.dtype.np))


class SavedStep:
    """A file that `StepRecorder.save` has written. ValueError: it is none."""

    def __init__(self, path: str):
        try:
            with np.load(path, allow_pickle=False) as file:
                self.arrays: dict[str, np.ndarray] = {k: file[k] for k in file.files}
            self.index: dict[str, Any] = json.loads(self.arrays["index"].tobytes())
            if self.index["format"] != FORMAT:
                raise ValueError(f"its format is {self.index['format']!r}, not {FORMAT!r}: replay it where it was made")
            self.memory = [self._buffer(n, m) for n, m in enumerate(self.index["memory"])]
        except (ValueError, KeyError, TypeError, EOFError, zipfile.BadZipFile) as e:
            raise ValueError(f"{path} is no saved step: {e}") from None

    def _buffer(self, n: int, about: dict[str, Any]) -> Buffer:
        b = Buffer(about["device"], about["count"], to_dtype(about["dtype"]))
        return b.copyin(self.arrays[f"memory {n}"].view(b.dtype.np)) if about["given"] else b

    def _view(self, place: list[Any] | None) -> Buffer | None:
        if place is None:
            return None
        number, offset, count, dtype = place
        base = self.memory[number]
        if (offset, count, dtype) == (0, base.count, base.dtype.name):
            return base
        return base.view(count, to_dtype(dtype), offset)

    def replay(self) -> list[str]:
        """Runs it; what came out otherwise than it did in the run. Errors of kernels are raised."""
        odd = []
        for n, run in enumerate(self.index["runs"]):
            linear, lines = decode(self.arrays[f"linear {n}"].tobytes())
            for node, line in lines:
                LINE.setdefault(node, line)
            given: list[Any] = [
                [self._view(p) for p in slot] if slot and isinstance(slot[0], (list, type(None))) else self._view(slot)
                for slot in run["slots"]
            ]
            run_items(self._items(n, linear, given), run["vars"])
            for slot, part, want in run["written"]:
                found = given[slot]
                b = found[part] if isinstance(found, list) else found
                if digest(b) != want:
                    odd.append(
                        f"graph {n + 1}: {b.dtype.name}[{b.count}] of argument {slot}, {_written_at(linear, slot)}"
                    )
        return odd

    def _items(self, n: int, linear: UOp, given: list[Given]) -> list[ExecItem]:
        arguments = SavedArguments(linear, given)
        items: list[ExecItem] = []
        for i, call in enumerate(linear.src):
            buffers = [arguments.buffer_of(a) for a in call.src[1:]]
            if (what := call.src[0]).op in GroupOp.COLLECTIVE:
                answers = [self.arrays.get(f"given {n} {i} {k}") for k in range(len(what.arg.members.mine))]
                items.append(AnsweredCollective(what, buffers, answers))
            else:
                items.append(pm_exec[what.op](call, buffers, 0))
        return items


def _written_at(linear: UOp, slot: int) -> str:
    """The line of the last call that reads or writes an argument."""
    calls = [
        c for c in linear.src if any(u.op is Ops.PARAM and u.arg.uid == slot for a in c.src[1:] for u in a.toposort())
    ]
    return f"last used at {line_of(calls[-1])}" if calls else "which no call uses"


def main(words: list[str]) -> int:
    """The command line; returns the exit code."""
    if len(words) != 1 or words[0] in ("-h", "--help"):
        print("usage: launcher replay FILE     (which a rank has saved in the folder FAILED_STEPS)", file=sys.stderr)
        return 0 if words[:1] in (["-h"], ["--help"]) else EXIT_USAGE
    try:
        step = SavedStep(words[0])
    except (ValueError, OSError) as e:
        print(f"launcher replay: {e}", file=sys.stderr)
        return EXIT_USAGE
    index = step.index
    nbytes = sum(a.nbytes for a in step.arrays.values())
    print(f"rank {index['rank']} of {index['size']}, step {index['step']}, ended by {index['error']}")
    print(f"{len(index['runs'])} graphs, {nbytes / 1e6:.1f} MB", flush=True)
    try:
        odd = step.replay()
    except EOFError as e:
        print(f"replayed up to where the rank failed: {e}")
        return 0
    if odd:
        print("replayed, with other bits than the rank had:", *odd, sep="\n  ")
        return 1
    print("replayed, with the same bits")
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
