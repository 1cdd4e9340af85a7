"""A started `launcher` command, as tests of whole runs look at it."""

from __future__ import annotations

import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import Self


@dataclass
class Command:
    """`wait()` fills in `code`, `out`, `err`; it may take `limit_s`."""

    process: subprocess.Popen[str]
    run_dir: Path
    limit_s: float
    code: int = 0
    out: str = ""
    err: str = ""

    def wait(self) -> Self:
        self.out, self.err = self.process.communicate(timeout=self.limit_s)
        self.code = self.process.returncode
        return self
