"""What README and examples/ show, run as they are (the digits: test_same_numbers.py)."""

from __future__ import annotations

import re
import runpy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from manygrad import Tensor
from manygrad.runtime.devices import get_device

ROOT = Path(__file__).parents[2]
BOTH = f"""
import runpy, sys
from pathlib import Path
sys.path.insert(0, {str(ROOT / "examples")!r})
runpy.run_path({str(ROOT / "examples/hello_shards.py")!r}, run_name="__main__")
sys.argv = "train_gpt.py --text text --steps 12 --layers 1 --heads 2 --dim 32 --context 16 --batch 8 --lr 1e-2".split()
runpy.run_path({str(ROOT / "examples/train_gpt.py")!r}, run_name="__main__")
"""

MODELS = {
    "resnet18": "--steps 2 --batch 8 --width 4 --blocks 1 1 --image 16",
    "vit": "--steps 4 --batch 8 --dim 16 --layers 1 --heads 2 --image 16 --dropout 0",
    "lstm": "--steps 6 --batch 8 --hidden 16 --context 8 --write 5",
    "gpt2": "--steps 6 --batch 8 --layers 1 --heads 2 --dim 16 --context 16 --write 5",
}
ALL_MODELS = f"""
import runpy, sys
for name, options in {MODELS!r}.items():
    sys.argv = [name, *options.split()]
    runpy.run_path(f"{ROOT}/examples/{{name}}.py", run_name="__main__")
"""


def test_models_on_one_and_on_two_nodes(command: Callable[..., Any], tmp_path: Path) -> None:
    """Each worker loads its rows of a batch; the losses are those of one process."""
    (tmp_path / "models.py").write_text(ALL_MODELS)
    losses = []
    for options in ((), ("--nodes", "2")):
        run = command("models.py", *options).wait()
        assert run.code == 0, run.err
        losses.append([[float(x) for x in pair] for pair in re.findall(r"loss (\d+\.\d+) -> (\d+\.\d+)", run.out)])
        assert run.out.count("it writes: ") == (2 if not options else 1), run.out
    assert len(losses[0]) == len(MODELS)
    np.testing.assert_allclose(losses[0], losses[1], atol=0.005)
    assert all(last < first for first, last in losses[0][1:]), losses


def test_gpt2_writes_the_same_with_and_without_a_cache() -> None:
    """One compilation serves all positions, and a file with Hugging Face's names loads."""
    gpt2 = runpy.run_path(str(ROOT / "examples" / "gpt2.py"))
    Tensor.manual_seed(0)
    model = gpt2["GPT2"](50, 16, 2, 2, 8)
    for p in model.parameters():
        p.assign(p * 8 if p.ndim > 1 else p)
    written = model.write([3, 5], 4)
    kernels = len(get_device("CPU").kernels.kernels)
    longer = model.write([3, 5], 10)
    assert longer[:4] == written and len(get_device("CPU").kernels.kernels) == kernels
    tokens = [3, 5]
    with Tensor.no_grad():
        for _ in range(10):
            tokens.append(int(model(Tensor([tokens]))[0, -1].argmax().item()))
    assert longer == tokens[2:]
    names = set(model.state_dict())
    assert {
        "wte.weight",
        "wpe.weight",
        "h.0.ln_1.weight",
        "h.1.attn.c_attn.weight",
        "h.0.mlp.c_proj.bias",
        "ln_f.bias",
    } < names


def test_gpt_and_hello_shards_on_two_nodes(command: Callable[..., Any], tmp_path: Path) -> None:
    (tmp_path / "text").write_text("to shard or not to shard, that is the reduction. " * 40)
    (tmp_path / "both.py").write_text(BOTH)
    run = command("both.py", "--nodes", "2").wait()
    assert run.code == 0, run.err
    assert (
        "(10, 4) over 2 devices" in run.out and "total 1560.0 column means" in run.out and "gathered (10, 2)" in run.out
    )
    found = re.search(r"loss (\d+\.\d+) -> (\d+\.\d+)", run.out)
    assert found is not None and float(found[2]) < 0.8 * float(found[1]), run.out


def test_the_first_program_of_the_readme(command: Callable[..., Any], tmp_path: Path) -> None:
    readme = (ROOT / "README.md").read_text()
    (program,) = re.findall(r"## A first program\s+```python\n(.*?)```", readme, re.S)
    (tmp_path / "first.py").write_text(program)
    printed = []
    for options in ((), ("--devices-per-node", "4"), ("--nodes", "2"), ("--nodes", "4")):
        run = command("first.py", *options).wait()
        assert run.code == 0, run.err
        printed.append(run.out.removeprefix("0:0: "))
    assert re.fullmatch(r"loss \d+\.\d{4}\n", printed[0]) and len(set(printed)) == 1, printed
