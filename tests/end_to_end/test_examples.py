"""What README and examples/ show, run as they are (the digits: test_same_numbers.py)."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
BOTH = f"""
import runpy, sys
from pathlib import Path
sys.path.insert(0, {str(ROOT / "examples")!r})
runpy.run_path({str(ROOT / "examples/hello_shards.py")!r}, run_name="__main__")
sys.argv = ["train_gpt.py", "--text", "text", "--steps", "12", "--layers", "1", "--heads", "2", "--dim", "32", "--context", "16", "--batch", "8", "--lr", "1e-2"]
runpy.run_path({str(ROOT / "examples/train_gpt.py")!r}, run_name="__main__")
"""


def test_gpt_and_hello_shards_on_two_nodes(command: Callable[..., Any], tmp_path: Path) -> None:
    (tmp_path / "text").write_text("to shard or not to shard, that is the reduction. " * 40)
    (tmp_path / "both.py").write_text(BOTH)
    run = command("both.py", "--nodes", "2").wait()
    assert run.code == 0, run.err
    assert "(10, 4) over 2 devices" in run.out and "total 1560.0 column means" in run.out and "gathered (10, 2)" in run.out
    found = re.search(r"loss (\d+\.\d+) -> (\d+\.\d+)", run.out)
    assert found is not None and float(found[2]) < 0.8 * float(found[1]), run.out


def test_the_first_program_of_the_readme(command: Callable[..., Any], tmp_path: Path) -> None:
    readme = (ROOT / "README.md").read_text()
    (program,) = re.findall(r"## A first program\s+```python\n(.*?)```", readme, re.S)
    (tmp_path / "first.py").write_text(program)
    printed = []
    for options in ((), ("--devices-per-node", "4")):
        run = command("first.py", *options).wait()
        assert run.code == 0, run.err
        printed.append(run.out)
    assert re.fullmatch(r"loss \d+\.\d{4}\n", printed[0]) and printed[0] == printed[1], printed
