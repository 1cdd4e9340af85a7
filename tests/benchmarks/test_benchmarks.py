"""Every benchmark runs at its smallest setting without torch and prints its table."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

FOLDER = Path(__file__).parents[2] / "benchmarks"
SMALLEST: dict[str, tuple[list[str], list[str]]] = {
    "gemm.py": (["--sizes", "64", "--repeats", "2"], ["64x64x64", "NT", "512x3072x768", "ratio"]),
    "allreduce.py": (["--sizes", "256,64K", "--workers", "2", "--repeats", "5"], ["algbw", "64K"]),
    "schedule.py": (["--workers", "4,1024", "--repeats", "1", "--layers", "1", "--dim", "32"], ["lower_shards", "ratio of scheduling"]),
    "memory_bound.py": (["--elements", "16384", "--repeats", "2"], ["softmax", "adamw", "of copy"]),
    "attention.py": (["--shapes", "1,2,128,16", "--seconds", "0.01"], ["causal with gradients", "T x T MB"]),
    "beam.py": (["softmax", "--beam", "1", "--limit", "0.3", "--repeats", "2"], ["softmax", "same bits", "yes", "geometric mean"]),
    "dispatch.py": (["--kernels", "20", "--repeats", "5"], ["a kernel", "mlp batch 1"]),
    "ops_vs_torch.py": (["cumsum"], ["Tensor.cumsum"]),
    "models_vs_torch.py": (["--models", "lstm", "--repeats", "2"], ["lstm", "ms ours"]),
    "train_step.py": (["--workers", "1", "--models", "mlp", "--steps", "4"], ["mlp", "torch/ours"]),
}
WITHOUT_TORCH = """
import importlib.util, runpy, sys
find = importlib.util.find_spec
importlib.util.find_spec = lambda name, *rest: None if name == "torch" else find(name, *rest)
sys.argv = sys.argv[1:]
runpy.run_path(sys.argv[0], run_name="__main__")
"""


def test_all_are_covered() -> None:
    assert {p.name for p in FOLDER.glob("*.py")} == set(SMALLEST)


@pytest.mark.parametrize("name", SMALLEST)
def test_smallest_setting(name: str, tmp_path: Path) -> None:
    options, words = SMALLEST[name]
    environment = {k: v for k, v in os.environ.items() if not k.startswith(("MANYGRAD_", "RAY_"))}
    command = [sys.executable, "-P", "-c", WITHOUT_TORCH, str(FOLDER / name), *options]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=90)
    assert done.returncode == 0, done.stderr
    for w in words:
        assert w in done.stdout, (w, done.stdout)
    if name == "schedule.py":
        assert float(done.stdout.split()[-1]) < 2, done.stdout
    if name == "allreduce.py":
        assert "more than one collective" not in done.stdout
