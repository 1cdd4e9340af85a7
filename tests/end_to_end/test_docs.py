"""The programs that the pages show do run."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


def programs() -> list[tuple[str, str]]:
    found = []
    for page in (
        "README.md",
        "docs/pytorch.md",
        "docs/fast_loops.md",
        "docs/checkpoints.md",
        "docs/wrong_numbers.md",
        "docs/inference.md",
        "docs/kernels.md",
    ):
        text = (ROOT / page).read_text(encoding="utf-8")
        found += [
            (f"{page}:{text[: m.start()].count(chr(10)) + 1}", m[1])
            for m in re.finditer(r"```python\n(.*?)```", text, re.S)
        ]
    return found


@pytest.mark.parametrize(("where", "program"), programs(), ids=[w for w, _ in programs()])
def test_program(where: str, program: str, tmp_path: Path) -> None:
    script = tmp_path / "program.py"
    script.write_text(program, encoding="utf-8")
    done = subprocess.run(
        [sys.executable, str(script)], cwd=tmp_path, capture_output=True, text=True, timeout=120, env=dict(os.environ)
    )
    assert done.returncode == 0, f"{where}\n{done.stdout}{done.stderr}"
