"""The promise: the same script, the same numbers, on any number of devices and workers."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
STEPS = 12
LAYOUTS: dict[str, tuple[tuple[str, ...], dict[str, str]]] = {
    "one process": ((), {}),
    "4 devices": (("--devices-per-node", "4"), {}),
    "2 workers": (("--nodes", "2"), {}),
    "4 workers over ZeroMQ": (("--nodes", "4"), {"TRANSPORT": "zmq"}),
    "2 workers of 2 devices, in two levels": (
        ("--nodes", "2", "--devices-per-node", "2"),
        {"COLLECTIVE": "hierarchical"},
    ),
}


def test_losses_and_weights_are_equal_to_the_bit(command: Callable[..., Any], tmp_path: Path) -> None:
    found: dict[str, list[dict[str, Any]]] = {}
    for i, (name, (options, environment)) in enumerate(LAYOUTS.items()):
        path = tmp_path / f"losses{i}"
        script = str(ROOT / "examples" / "train_mnist.py")
        run = command(*options, script, "--", "--steps", str(STEPS), "--losses", str(path), **environment).wait()
        assert run.code == 0, (name, run.out, run.err)
        workers = int(options[options.index("--nodes") + 1]) if "--nodes" in options else 1
        files = [path] if workers == 1 else [Path(f"{path}.{r}") for r in range(workers)]
        found[name] = [json.loads(f.read_text()) for f in files]
    reference = found["one process"][0]
    assert len(reference["losses"]) == STEPS and reference["losses"][-1] < reference["losses"][0]
    for name, ranks in found.items():
        for rank, result in enumerate(ranks):
            assert result == reference, f"rank {rank} of {name} differs from one process: {result} and {reference}"
