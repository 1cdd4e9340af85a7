"""A script of these tests, run by the launcher."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent


def trained(
    script: str, nodes: int, steps: int, folder: Path, *options: str, code: int = 0, more: tuple[str, ...] = ()
) -> list[dict[str, Any]]:
    """What each rank of the script has written; nothing where it is to end otherwise. `more`: of the launcher."""
    out = folder.parent / f"{folder.name}-{nodes}-{steps}"
    launcher = [sys.executable, "-P", "-m", "manygrad.launcher.cli", str(HERE / script), "--nodes", str(nodes), *more]
    done = subprocess.run(
        [*launcher, "--run-dir", f"{out}.run", "--", str(folder), str(out), str(steps), *options],
        env={**os.environ, "THREADS": "1"},
        cwd=folder.parent,
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == code, done.stdout + done.stderr
    return [] if code else [json.loads(Path(f"{out}.{rank}").read_text()) for rank in range(nodes)]
