"""Each training example takes `--checkpoint DIR`: a run that was cut short ends with the losses of one that was not."""

from __future__ import annotations

import json
import re
import runpy
import sys
import threading
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
OPTIONS = {
    "resnet18": "--batch 8 --width 4 --blocks 1 1 --image 16",
    "vit": "--batch 8 --dim 16 --layers 1 --heads 2 --image 16 --dropout 0.1",
    "lstm": "--batch 8 --hidden 16 --context 8 --write 5",
    "gpt2": "--batch 8 --layers 1 --heads 2 --dim 16 --context 16 --write 5",
    "train_gpt": "--text {text} --layers 1 --heads 2 --dim 32 --context 16 --batch 8",
    "train_mnist": "--batch 40 --losses {losses}",
}


@pytest.mark.parametrize("name", OPTIONS)
def test_an_example_goes_on(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A schedule depends on the number of steps, so the run that is cut short is one of 53 that dies after its save."""
    monkeypatch.setattr(sys, "path", [str(ROOT / "examples"), *sys.path])
    (tmp_path / "text").write_text("a text that is long enough for a context of sixteen characters " * 4)
    options = OPTIONS[name].format(text=tmp_path / "text", losses=tmp_path / "losses")

    def run(*more: str) -> tuple[list[float], str]:
        monkeypatch.setattr(sys, "argv", [name, *options.split(), "--steps", "53", *more])
        capsys.readouterr()
        runpy.run_path(str(ROOT / f"examples/{name}.py"), run_name="__main__")
        for thread in threading.enumerate():  # as at the end of a process
            if thread.name == "manygrad-checkpoint":
                thread.join(60)
        out = capsys.readouterr().out
        weights = json.loads((tmp_path / "losses").read_text())["weights"] if name == "train_mnist" else ""
        last = re.findall(r"step +53/53  loss (\d+\.\d+)", out)
        return [float(x) for x in last or re.findall(r"-> (\d+\.\d+)", out)], weights

    whole = run()
    assert whole[0]
    assert run("--checkpoint", str(tmp_path / "checkpoints")) == whole
    assert [p.name for p in (tmp_path / "checkpoints").iterdir()] == ["step-00000050"]
    assert run("--checkpoint", str(tmp_path / "checkpoints")) == whole
