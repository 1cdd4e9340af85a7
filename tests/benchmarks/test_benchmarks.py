"""Every benchmark runs at its smallest setting without torch and prints its table."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

FOLDER = Path(__file__).parents[2] / "benchmarks"
SMALLEST: dict[str, tuple[list[str], list[str]]] = {
    "gemm.py": (["--sizes", "64", "--repeats", "2"], ["64x64x64", "NT", "16x256x256x256", "512x3072x768", "+gelu", "bf16 via f32", "i8", "ratio"]),
    "conv.py": (["--batch", "2", "--width", "4", "--repeats", "2"], ["3->4 7x7 s2", "to weights", "torch/ours"]),
    "allreduce.py": (["--sizes", "256,64K", "--workers", "2", "--repeats", "5"], ["algbw", "64K"]),
    "schedule.py": (["--workers", "4,1024", "--repeats", "1", "--layers", "1", "--dim", "32"], ["lower_shards", "ratio of scheduling"]),
    "memory_bound.py": (["--elements", "16384", "--repeats", "2"], ["softmax", "adamw", "of copy"]),
    "beam.py": (["softmax", "--beam", "1", "--limit", "0.3", "--repeats", "2"], ["softmax", "same bits", "yes", "geometric mean"]),
    "dispatch.py": (["--kernels", "20", "--repeats", "5"], ["a kernel", "mlp batch 1"]),
    "ops_vs_torch.py": (["cumsum"], ["Tensor.cumsum"]),
    "models_vs_torch.py": (["--models", "lstm", "--repeats", "2"], ["lstm", "ms ours"]),
    "train_step.py": (["--models", "mlp1", "--steps", "6", "--turn", "1"], ["mlp1", "tinygrad/ours", "ours MB"]),
    "start_up.py": (["--model", "mlp1", "--sides", "ours,compile"], ["cold s", "warm s", "ours"]),
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
