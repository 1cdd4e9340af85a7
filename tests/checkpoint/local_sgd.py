"""A script for `test_local_sgd.py`: each worker trains a copy of its own (DiLoCo with an outer step every 4 steps):
`local_sgd.py FOLDER OUT STEPS [memory | terminated | killed]`. OUT.<rank> gets what it has seen."""

from __future__ import annotations

import json
import os
import signal
import sys
from pathlib import Path
from typing import Any

import numpy as np

from manygrad import Tensor, nn, world
from manygrad.checkpoint import Checkpointer

FAULT_AT = 6  # between outer steps


class Seen:
    """A number that each worker has of its own."""

    def __init__(self) -> None:
        self.number = world.rank

    def state_dict(self) -> dict[str, Any]:
        return {"number": self.number}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.number = state["number"]


def main() -> None:
    folder, out, steps, *options = sys.argv[1:]
    Tensor.manual_seed(0)
    # (one tensor of 1 MiB, of which each rank used to write some rows)
    model = nn.Sequential(nn.Linear(4, 512), nn.BatchNorm1d(512), nn.Linear(512, 1024), nn.ReLU(), nn.Linear(1024, 1))
    inner = nn.optim.AdamW(model.parameters(), lr=0.01)
    optimizer, seen = nn.optim.DiLoCo(inner, every=4, lr=0.75, momentum=0.5), Seen()
    state = {"seen": seen, "optimizer": optimizer, "model": model}
    memory_every = 1 if "memory" in options else None
    checkpoints = Checkpointer(folder, state, every=3, check_every=2, keep=None, memory_every=memory_every)
    begun = checkpoints.resume()

    def told() -> list[list[float]]:
        """A few numbers of all parameters, buffers and inner states."""
        states = [t for s in inner.state_dict()["state"].values() for t in s.values() if t.numel() > 1]
        tensors = [*model.state_dict().values(), *states]
        return [[float(t.sum().item()), float(t.abs().max().item())] for t in tensors]

    found: dict[str, Any] = {"begun": begun, "number": seen.number, "loaded": told(), "path": []}
    with Tensor.train():
        for step in range(begun, int(steps)):
            # (the gradients of the workers differ by orders of magnitude: states that are mixed would be seen)
            x = np.random.default_rng(100 * step + world.rank).standard_normal((8, 4)).astype(np.float32)
            optimizer.zero_grad()
            (model(Tensor(x)).square().mean() * 1000.0**world.rank).backward()
            optimizer.step()
            found["path"].append(told())
            if step + 1 == FAULT_AT and world.rank == world.size - 1 and not begun:
                if "terminated" in options:
                    os.kill(os.getpid(), signal.SIGTERM)
                if "killed" in options:
                    os.kill(os.getpid(), signal.SIGKILL)
            checkpoints.step(step + 1)
    Path(f"{out}.{world.rank}").write_text(json.dumps(found))


if __name__ == "__main__":
    main()
