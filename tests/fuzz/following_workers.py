"""The programs of `following.py` on two workers, one of which reads now and then what it holds while the other does
not: each rank shows what it shows where calls are made as they come, and both show the same.

The workers are started once, and given one program after the other in a folder: this file is their script, too."""

from __future__ import annotations

import atexit
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from hypothesis import strategies as st

from manygrad import world
from tests.fuzz import following

EXAMPLES = 4
LIMIT_S = 120.0
LOOK_S = 0.005
ROOT = Path(__file__).resolve().parents[2]
Program = dict[str, Any]


@st.composite
def programs(draw: st.DrawFn) -> Program:
    """`alone`: for each step which rank reads something by itself, where, and whether it computes that. (Not where
    random numbers are drawn, or Tensors are written by hand: a read carries that out on this rank, so that ranks
    come to other plans or errors, however calls are made.)"""
    program = draw(following.programs())
    who = st.tuples(st.integers(0, 1), st.sampled_from(following.PLACES), st.booleans())
    alone = [draw(st.one_of(st.none(), st.none(), st.none(), who)) for _ in program["events"]]
    happens = {*program["usual"], *program["within"]}
    writes = program["dropout"] or not happens.isdisjoint({"noise", "seed", "write what is read", "by hand"})
    return {**program, "devices": 0, "alone": [None] * len(alone) if writes else alone}


class Workers:
    """Two of them, which run what is written to their folder."""

    def __init__(self) -> None:
        self.folder, self.count = Path(tempfile.mkdtemp(prefix="following-")), 0
        command = [sys.executable, "-P", "-m", "manygrad.launcher.cli", "--run-dir", str(self.folder / "run")]
        environment = os.environ | {"PYTHONPATH": os.pathsep.join([os.environ.get("PYTHONPATH", ""), str(ROOT)])}
        self.log = (self.folder / "log").open("w")
        self.process = subprocess.Popen(
            [*command, __file__, "--nodes", "2", "--", str(self.folder)],
            env=environment,
            stdout=self.log,
            stderr=self.log,
            cwd=self.folder,
        )
        atexit.register(self.end)

    def run(self, program: Program) -> None:
        """Raises what went wrong in one of them; then they have ended."""
        self.count += 1
        write(self.folder / f"{self.count}.json", json.dumps(program))
        until = time.monotonic() + LIMIT_S
        left = {0, 1}
        while left:
            left -= {rank for rank in left if (self.folder / f"{self.count}.{rank}").exists()}
            if self.process.poll() is not None or time.monotonic() > until:
                raise AssertionError(self.end())
            time.sleep(LOOK_S)
        shown = [(self.folder / f"{self.count}.{rank}").read_text() for rank in (0, 1)]
        assert shown[0] == shown[1], "the ranks show different values"

    def end(self) -> str:
        """What they have said."""
        if self.process.poll() is None:
            self.process.terminate()
            self.process.wait(30)
        self.log.close()
        said = (self.folder / "log").read_text()
        shutil.rmtree(self.folder)
        atexit.unregister(self.end)
        return said


def write(path: Path, text: str) -> None:
    """All of it at once."""
    part = path.with_name(f"{path.name}.part")
    part.write_text(text)
    part.rename(path)


workers: list[Workers] = []


def check(program: Program) -> None:
    if not workers or workers[0].process.poll() is not None:
        workers[:] = [Workers()]
    workers[0].run(program)


def serve(folder: Path) -> None:
    """A worker: checks one program after the other. The first that fails ends it."""
    for n in range(1, 1 << 30):
        while not (folder / f"{n}.json").exists():
            time.sleep(LOOK_S)
        program = json.loads((folder / f"{n}.json").read_text())
        shown = following.check(program, world.devices)
        write(folder / f"{n}.{world.rank}", "\n".join(map(repr, shown)))


if __name__ == "__main__":
    serve(Path(sys.argv[1]))
