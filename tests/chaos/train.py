"""What chaos happens to: a small training with dropout and shuffled data, checkpoints, and a line in LOSSES.<rank> for
each step: `train.py FAULTS CHECKPOINTS LOSSES [asynchronous]`."""

from __future__ import annotations

import atexit
import hashlib
import json
import sys
from pathlib import Path

import numpy as np

from manygrad import Tensor, TinyJit, nn, world
from manygrad.checkpoint import Checkpointer
from manygrad.nn.data import DataLoader, TensorDataset
from manygrad.nn.optim import AdamW
from tests.chaos.faults import EVERY, STEPS, Injector


def main() -> None:
    plan, folder, out, *options = sys.argv[1:]
    injector = Injector(plan, world.rank, world.epoch, Path(folder))
    injector.at("start")
    injector.watch_files()
    Tensor.manual_seed(5)
    model = nn.Sequential(nn.Linear(16, 48), nn.ReLU(), nn.Dropout(0.25), nn.Linear(48, 5))
    for p in model.parameters():
        p.shard_(world.devices)
    injector.weights = model[0].weight
    optimizer = AdamW(model.parameters(), lr=0.01)
    data = np.random.default_rng(0)
    dataset = TensorDataset(data.standard_normal((96, 16)).astype(np.float32), data.integers(0, 5, 96))
    loader = DataLoader(dataset, 24, shuffle=True, devices=world.devices, drop_last=True)

    @TinyJit
    def step(x: Tensor, y: Tensor) -> Tensor:
        optimizer.zero_grad()
        loss = model(x).cross_entropy(y)
        loss.backward()
        optimizer.step()
        return loss

    state = {"model": model, "optimizer": optimizer, "loader": loader}
    checkpoints = Checkpointer(
        folder,
        state,
        every=EVERY,
        keep=3,
        asynchronous="asynchronous" in options,
        on_error="warn",
        timeout_s=20,
        check_every=1,
        memory_every=json.loads(Path(plan).read_text())["memory_every"],
    )
    done = checkpoints.resume()
    atexit.register(injector.at, "exit")
    injector.at("compile")
    with Tensor.train(), open(f"{out}.{world.rank}", "a") as losses:
        while done < STEPS:
            for x, y in loader:
                injector.step = done + 1
                injector.at("collective")
                loss = step(x, y)
                injector.at("step")
                print(json.dumps([done, loss.item()]), file=losses, flush=True)
                done += 1
                checkpoints.step(done)
                if done == STEPS:
                    break
    checkpoints.finish()
    tensors = [*model.state_dict().values(), *(t for s in optimizer.state_dict()["state"].values() for t in s.values())]
    digest = hashlib.sha256(b"".join(t.numpy().tobytes() for t in tensors)).hexdigest()
    Path(f"{out}.{world.rank}.digest").write_text(digest)


if __name__ == "__main__":
    main()
