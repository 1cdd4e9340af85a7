"""A script for `test_workers.py`: trains with dropout on shuffled data, with checkpoints every 3 steps, and writes what
came of it to OUT.<rank>: `training.py FOLDER OUT STEPS [asynchronous | full | killed]`."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import signal
import sys
import warnings
from pathlib import Path

import numpy as np

from manygrad import Tensor, TinyJit, nn, world
from manygrad.checkpoint import Checkpointer
from manygrad.nn.data import DataLoader, TensorDataset
from manygrad.nn.optim import AdamW


class Model(nn.Module):
    """An embedding large enough to be divided, one layer cut over the devices, and dropout."""

    def __init__(self) -> None:
        self.embedding, self.cut, self.last = nn.Embedding(4096, 96), nn.Linear(96, 48), nn.Linear(48, 5)
        self.dropout = nn.Dropout(0.25)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.dropout(self.cut(self.embedding(x).mean(1)).relu()))


def fill_the_disk_once() -> None:
    """The first fsync fails."""
    whole = os.fsync

    def full(fd: int) -> None:
        os.fsync = whole
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    os.fsync = full


def digest(model: Model, optimizer: AdamW) -> str:
    """The bits of all weights and of the optimiser's state."""
    states = [t for s in optimizer.state_dict()["state"].values() for t in s.values()]
    tensors = [*model.state_dict().values(), *states]
    return hashlib.sha256(b"".join(t.numpy().tobytes() for t in tensors)).hexdigest()


def main() -> None:
    folder, out, steps, *options = sys.argv[1:]
    Tensor.manual_seed(5)
    model = Model()
    for name, p in model.state_dict().items():
        p.shard_(world.devices, 0 if name == "cut.weight" else None)
    optimizer = AdamW(model.parameters(), lr=0.01)
    data = np.random.default_rng(0)
    dataset = TensorDataset(data.integers(0, 4096, (120, 4)), data.integers(0, 5, 120))
    loader = DataLoader(dataset, 24, shuffle=True, devices=world.devices, drop_last=True)

    @TinyJit
    def step(x: Tensor, y: Tensor) -> Tensor:
        optimizer.zero_grad()
        loss = model(x).cross_entropy(y)
        loss.backward()
        optimizer.step()
        return loss

    if "full" in options and world.rank == 1:
        fill_the_disk_once()
    losses: list[float] = []
    with warnings.catch_warnings(record=True) as warned, Tensor.train():
        warnings.simplefilter("always")
        checkpoints = Checkpointer(
            folder,
            {"model": model, "optimizer": optimizer, "loader": loader},
            every=3,
            asynchronous="asynchronous" in options,
            on_error="warn",
        )
        begun = done = checkpoints.resume()
        loaded = digest(model, optimizer)
        while done < int(steps):
            for x, y in loader:
                losses.append(step(x, y).item())
                done += 1
                if "killed" in options and world.rank == 1 and done == 8:
                    os.kill(os.getpid(), signal.SIGKILL)
                checkpoints.step(done)
                if done == int(steps):
                    break
        checkpoints.finish()
    messages = [str(w.message) for w in warned]
    ended = digest(model, optimizer)
    found = {"begun": begun, "losses": losses, "loaded": loaded, "ended": ended, "warned": messages}
    Path(f"{out}.{world.rank}").write_text(json.dumps(found))


if __name__ == "__main__":
    main()
