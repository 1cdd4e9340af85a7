"""OPENCL in whole runs: the digits, on one device, on several, and on two workers."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.opencl import needs_opencl

ROOT = Path(__file__).parents[2]
SCRIPT = str(ROOT / "examples" / "train_mnist.py")
STEPS = 20


@needs_opencl
def test_the_digits_are_learned_with_equal_bits_on_any_number_of_devices(
    command: Callable[..., Any], tmp_path: Path
) -> None:
    found = []
    for i, options in enumerate((("--device", "OPENCL"), ("--devices-per-node", "2"), ("--nodes", "2"))):
        path = tmp_path / f"losses{i}"
        environment = {} if "--device" in options else {"MANYGRAD_DEVICE": "OPENCL"}
        run = command(*options, SCRIPT, "--", "--steps", str(STEPS), "--losses", str(path), **environment).wait()
        assert run.code == 0, (options, run.out, run.err)
        files = [Path(f"{path}.{r}") for r in range(2)] if "--nodes" in options else [path]
        found += [json.loads(f.read_text()) for f in files]
    assert all(f == found[0] for f in found), [f["losses"][-1] for f in found]
    assert found[0]["losses"][-1] < found[0]["losses"][0]


def test_a_run_without_opencl_says_what_to_install(
    command: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "first.py").write_text(
        "import sys\nsys.modules['pyopencl'] = None\nfrom manygrad import Tensor\nprint(Tensor([1.0]).numpy())\n"
    )
    run = command("--device", "OPENCL", "first.py").wait()
    assert run.code == 1 and "pip install pyopencl" in run.err and "apt-get install pocl-opencl-icd" in run.err
