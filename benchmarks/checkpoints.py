"""Saving and loading a training's state: ours, torch.distributed.checkpoint, and what disk and memory allow.

    python benchmarks/checkpoints.py [--size 1G] [--workers 4] [--load-workers 2] [--rounds 3] [--folder DIR]

The state is float32 in tensors of 16 MiB, of which each worker has a copy; each side divides the writing among its
workers, started by `manygrad.launch` or, torch's (Gloo), as processes. A time is from a common start until the last
worker's end; of the rounds, in which the sides take turns, the median, in seconds, and GB/s of the state.

`disk`: each worker writes as many bytes of its own memory into a file, and fsyncs it. `save`: `checkpoint.save`, with
checksums, fsync and commit. `again`: with `keep=1`, so the new checkpoint is read back and the old one removed.
`pause`: how long `Checkpointer(asynchronous=True)` keeps a step waiting, the third time, beside `copy`, a copy in
memory of the worker's share. `load`: on `--load-workers`, each of which needs all of the state; `read`: as many bytes
read from the same files by themselves; the page cache is emptied of them before. `bytes read / needed` is over all that
a worker's process reads meanwhile. torch/ours above 1: ours is faster.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import shutil
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import numpy as np

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))

from sides.units import nbytes_of

TENSOR_NBYTES, PIECE_NBYTES, LIMIT_S = 16 << 20, 8 << 20, 900
TURNS = 3  # of the disk and of a save, which a disk that others use as well needs; of these the median
Times = dict[str, float]


def values(nbytes: int) -> dict[str, np.ndarray]:
    """The state's tensors, of random bits of which all are finite numbers."""
    random = np.random.default_rng(0)
    sizes = [min(TENSOR_NBYTES, nbytes - at) // 4 for at in range(0, nbytes, TENSOR_NBYTES)]
    return {f"layer{i}": random.random(n, np.float32) for i, n in enumerate(sizes)}


def seconds(run: Callable[[], object], meet: Callable[[], object]) -> float:
    meet()
    start = time.perf_counter()
    run()
    return time.perf_counter() - start


def write_raw(path: str, data: memoryview) -> None:
    with open(path, "wb", buffering=0) as f:
        at = 0
        while at < len(data):
            n = f.write(data[at : at + PIECE_NBYTES]) or 0
            os.posix_fadvise(f.fileno(), at, n, os.POSIX_FADV_DONTNEED)  # (begins to write it)
            at += n
        os.fsync(f.fileno())


def files_in(folder: str) -> list[str]:
    return [os.path.join(at, name) for at, _, names in os.walk(folder) for name in names]


def forget(folder: str) -> None:
    """Empties the page cache of the files in a folder, which are on disk."""
    for path in files_in(folder):
        with open(path, "rb") as f:
            os.posix_fadvise(f.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def read_raw(folder: str) -> None:
    into = bytearray(PIECE_NBYTES)
    for path in files_in(folder):
        with open(path, "rb", buffering=0) as f:
            while f.readinto(into):
                pass


def bytes_read() -> int:
    with open("/proc/self/io") as f:
        return int(f.readline().split()[1])


def ours(what: str, nbytes: int, folder: str) -> Times:
    """This rank's times; `what` is `save` or `load`."""
    from manygrad import Tensor, TinyJit, world
    from manygrad.checkpoint import Checkpointer, load, save

    one = Tensor(np.ones((len(world.devices), 1), np.float32)).shard(world.devices, axis=0).contiguous().realize()
    together = TinyJit(lambda x: x.sum(0))

    def meet() -> None:
        together(one).item()

    for _ in range(3):
        meet()
    given = values(nbytes) if what == "save" else {k: np.zeros_like(v) for k, v in values(nbytes).items()}
    state = {name: Tensor(v).to(world.devices).realize() for name, v in given.items()}
    path, raw = os.path.join(folder, "ours"), os.path.join(folder, f"raw-{world.rank}")
    if what == "save":
        own = np.random.default_rng(world.rank).random(nbytes // world.size // 4, np.float32)
        found, disk, saves = Times(), [], []
        for step in range(TURNS):
            disk.append(seconds(partial(write_raw, f"{raw}-{step}", memoryview(own).cast("B")), meet))
            saves.append(seconds(partial(save, path, state, step), meet))
        found["disk"], found["save"] = statistics.median(disk), statistics.median(saves)
        found["copy"] = statistics.median(seconds(own.copy, meet) for _ in range(3))
        found["again"] = seconds(lambda: save(path, state, TURNS, keep=1), meet)
        with Checkpointer(os.path.join(folder, "pause"), {"state": state}, every=1, asynchronous=True) as later:
            for step in range(3):
                found["pause"] = seconds(partial(later.save, step), meet)
                later.finish()
        return found
    if world.rank == 0:
        forget(path)
    found = {"read": seconds(lambda: read_raw(path), meet)}
    meet()
    if world.rank == 0:
        forget(path)
    meet()
    before = bytes_read()
    found["load"] = seconds(lambda: load(path, state), meet)
    found["bytes read / needed"] = (bytes_read() - before) / nbytes
    for name, v in values(nbytes).items():
        assert np.array_equal(state[name].numpy(), v), f"{name} is not what was saved"
    return found


def torchs(what: str, nbytes: int, folder: str, rank: int, size: int, port: int) -> Times:
    import torch
    import torch.distributed as dist
    import torch.distributed.checkpoint as dcp

    torch.set_num_threads(1)
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), GLOO_SOCKET_IFNAME="lo")
    dist.init_process_group("gloo", rank=rank, world_size=size)
    given = values(nbytes) if what == "save" else {k: np.zeros_like(v) for k, v in values(nbytes).items()}
    state: Any = {name: torch.from_numpy(v) for name, v in given.items()}
    path = os.path.join(folder, "torch")
    if what == "save":
        saves = []
        for step in range(TURNS):
            saves.append(seconds(partial(dcp.save, state, checkpoint_id=f"{path}{step}"), dist.barrier))
            dist.barrier()
        found = {"save": statistics.median(saves)}
        for step in range(3):
            handles: list[Any] = []

            def start(step: int = step, handles: list[Any] = handles) -> None:
                handles.append(dcp.async_save(state, checkpoint_id=os.path.join(folder, f"pause{step}")))

            found["pause"] = seconds(start, dist.barrier)
            handles[0].result()
    else:
        path = f"{path}{TURNS - 1}"
        if rank == 0:
            forget(path)
        dist.barrier()
        before = bytes_read()
        found = {"load": seconds(lambda: dcp.load(state, checkpoint_id=path), dist.barrier)}
        found["bytes read / needed"] = (bytes_read() - before) / nbytes
        assert all(np.array_equal(state[name].numpy(), v) for name, v in values(nbytes).items())
    dist.barrier()
    dist.destroy_process_group()
    return found


def run_torch(what: str, nbytes: int, folder: str, size: int) -> list[Times]:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    processes = []
    for rank in range(size):
        given = json.dumps([what, nbytes, folder, rank, size, port])
        command = [sys.executable, os.path.abspath(__file__), "--torch", given]
        processes.append(subprocess.Popen(command, stdout=subprocess.PIPE, text=True))
    try:
        return [json.loads(p.communicate(timeout=LIMIT_S)[0].splitlines()[-1]) for p in processes]
    finally:
        for p in processes:
            p.kill()
            p.wait()


def slowest(ranks: Iterable[Times]) -> Times:
    ranks = list(ranks)
    return {name: max(r[name] for r in ranks) for name in ranks[0]}


def one_round(nbytes: int, folder: str, workers: int, load_workers: int, have_torch: bool) -> dict[str, Times]:
    from manygrad import launch

    found: dict[str, Times] = {"ours": {}, "torch": {}}
    for what, size in (("save", workers), ("load", load_workers)):
        found["ours"] |= slowest(launch(ours, what, nbytes, folder, nodes=size))
        if have_torch:
            found["torch"] |= slowest(run_torch(what, nbytes, folder, size))
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", default="1G", help="bytes of the state; K, M and G are powers of two")
    parser.add_argument("--workers", type=int, default=4)
    parser.add_argument("--load-workers", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--folder", default=".", help="the disk that is written to")
    parser.add_argument("--torch", default="", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.torch:
        return print(json.dumps(torchs(*json.loads(args.torch))))
    nbytes, rounds = nbytes_of(args.size), []
    have_torch = importlib.util.find_spec("torch") is not None
    for _ in range(args.rounds):
        folder = tempfile.mkdtemp(prefix="checkpoints-", dir=args.folder)
        try:
            rounds.append(one_round(nbytes, folder, args.workers, args.load_workers, have_torch))
        finally:
            shutil.rmtree(folder)
    medians = {
        side: {name: statistics.median(r[side][name] for r in rounds) for name in rounds[0][side]} for side in rounds[0]
    }
    mine, theirs = medians["ours"], medians["torch"]
    print(f"{args.size} of state, saved by {args.workers} workers, loaded by {args.load_workers}")
    print(f"{'':>6} {'ours s':>8} {'GB/s':>6} {'torch s':>8} {'limit s':>8} {'limit/ours':>10} {'torch/ours':>10}")
    for name, limit in (("save", "disk"), ("again", "disk"), ("pause", "copy"), ("load", "read")):
        other, bound = theirs.get(name), mine[limit]
        print(
            f"{name:>6} {mine[name]:8.3f} {nbytes / mine[name] / 1e9:6.2f} "
            f"{'-' if other is None else f'{other:.3f}':>8} {bound:8.3f} {bound / mine[name]:10.2f} "
            f"{'-' if other is None else f'{other / mine[name]:.2f}':>10}"
        )
    read, other = mine["bytes read / needed"], theirs.get("bytes read / needed")
    print(f"bytes read / needed: ours {read:.3f}, torch {'-' if other is None else f'{other:.3f}'}")


if __name__ == "__main__":
    main()
