"""Whole training steps: forward, backward, update, reading the loss;
ours, torch eager, torch.compile and tinygrad on this machine.

    python benchmarks/train_step.py [--models mlp,mlp1,conv,gpt,resnet] [--steps 30]
                                    [--sides ours,torch,compile,tinygrad] [--limit 300]
    python benchmarks/train_step.py --workers 4 [--models mlp,conv,gpt]

Models: a multilayer perceptron 784-512-512-10 on 512 samples (`mlp`) and on one (`mlp1`), two convolutions with pooling
on 256 (`conv`), a GPT of 4 layers, width 256, on 16 x 128 tokens (`gpt`), ResNet-18 on 64 images of 32 x 32 (`resnet`).
With one worker each side is a process of its own; the sides take turns of `--steps` / 3 steps (at most `--turn`
seconds). Printed: median milliseconds a step after warm-up, the ratios to ours (above 1: ours is faster), and by how
much the memory of each process grew (`sides/worker.py` says what is counted). torch eager and compiled are the best of
their `ways`, with fused optimisers; torch.compile needs g++, tinygrad clang. A dash: not installed, does not run, has
no such model, or was not ready within `--limit` seconds.

With several workers: ours, launched, and torch's DistributedDataParallel over Gloo, cores // workers threads each, at
least one. The global batch is the same for any number of workers.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import socket
import statistics
import subprocess
import sys
from collections.abc import Callable

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))

from sides.process import Side, installed
from sides.steps import batches, seconds_of

MODELS = ("mlp", "mlp1", "conv", "gpt", "resnet")
SIDES = ("ours", "torch", "compile", "tinygrad")
TINYGRAD = ("mlp", "mlp1", "gpt")
WARM_UP, TURNS = 5, 3


def available(side: str, model: str) -> bool:
    return installed(side) and (side != "tinygrad" or model in TINYGRAD)


def ways(side: str) -> list[tuple[int, dict[str, str]]]:
    """Threads and environment of a side; the best counts.
    OpenMP's threads wait spinning, or asleep, which is better beside other processes."""
    cores = len(os.sched_getaffinity(0))
    asleep = {"OMP_WAIT_POLICY": "PASSIVE"}
    return {"torch": [(1, {}), (cores, {}), (cores, asleep)], "compile": [(cores, {}), (cores, asleep)]}.get(
        side, [(cores, {})]
    )


def one_worker(
    model: str, sides: list[str], steps: int, limit_s: float, turn_s: float, typical: Callable[[list[float]], float]
) -> tuple[dict[str, float], dict[str, float]]:
    """Typical seconds a step, and bytes, of the sides that ran."""
    processes = [
        (side, Side(side, model, threads, limit_s, more))
        for side in sides
        if available(side, model)
        for threads, more in ways(side)
    ]
    times: list[list[float]] = [[] for _ in processes]
    counts = {p.ready["parameters"] for _, p in processes if p.ready}
    assert len(counts) == 1, f"the sides' models differ: {counts} parameters"
    for _, p in processes:
        p.ask(f"steps {WARM_UP} {limit_s}")
    for _ in range(TURNS):
        for (_, p), into in zip(processes, times):
            p.ask(f"steps 1 {turn_s}")
            if (turn := p.ask(f"steps {max(steps // TURNS, 1)} {turn_s}")) is not None:
                into += turn["seconds"]
    memory = [p.ask(f"memory 3 {turn_s}") for _, p in processes]
    for _, p in processes:
        p.close()
    seconds: dict[str, float] = {}
    nbytes: dict[str, float] = {}
    for (side, _), found, grown in zip(processes, times, memory):
        if grown is not None and typical(found) < seconds.get(side, float("inf")):
            seconds[side], nbytes[side] = typical(found), grown["memory"]
    return seconds, nbytes


def launched(model: str, steps: int) -> list[float]:
    """Seconds of each step on this rank of `manygrad.world`."""
    sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
    from sides.ours import trainer

    run, _ = trainer(model)
    return seconds_of(run, batches(model, range(steps)))


def torch_worker(model: str, steps: int, size: int, port: int, threads: int, rank: int) -> list[float]:
    """The same for a rank of DistributedDataParallel."""
    import torch.distributed as dist
    from sides.torch_side import trainer

    run, _ = trainer(model, threads, rank=rank, size=size, port=port)
    times = seconds_of(run, batches(model, range(steps)))
    dist.destroy_process_group()
    return times


def torch_workers(model: str, steps: int, workers: int, threads: int) -> list[float]:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    command = [
        sys.executable,
        os.path.abspath(__file__),
        "--torch-worker",
        model,
        str(steps),
        str(workers),
        str(port),
        str(threads),
    ]
    processes = [subprocess.Popen([*command, str(r)], stdout=subprocess.PIPE, text=True) for r in range(workers)]
    try:
        outputs = [p.communicate(timeout=600)[0] for p in processes]
    finally:
        for p in processes:
            p.kill()
    return [float(x) for x in outputs[0].split()]


def several_workers(models: list[str], workers: int, steps: int) -> None:
    from manygrad import launch

    threads = max(1, (os.cpu_count() or 1) // workers)
    for model in models:
        mine = launch(launched, model, steps, nodes=workers)[0]
        ms = statistics.median(mine[len(mine) // 2 :]) * 1e3
        have_torch = importlib.util.find_spec("torch") is not None
        other = (
            statistics.median(torch_workers(model, steps, workers, threads)[steps // 2 :]) * 1e3
            if have_torch
            else float("nan")
        )
        print(f"{model:<7}{workers:>8}{ms:10.2f}{other:10.2f}{other / ms:12.2f}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("--models", help=f"of {', '.join(MODELS)}; comma-separated")
    parser.add_argument("--sides", default=",".join(SIDES))
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--limit", type=float, default=300.0, help="seconds until a side has done its first steps")
    parser.add_argument(
        "--turn", type=float, default=3.0, help="seconds of a side's turn, after which it starts no more steps"
    )
    parser.add_argument(
        "--best",
        action="store_true",
        help="the fastest step instead of the median: for a machine that is busy with other things",
    )
    parser.add_argument("--torch-worker", nargs=6, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.torch_worker:
        model, *numbers = args.torch_worker
        print(*torch_worker(model, *map(int, numbers)))
        return
    if args.workers > 1:
        print(f"{'model':<7}{'workers':>8}{'ours ms':>10}{'torch ms':>10}{'torch/ours':>12}")
        return several_workers((args.models or "mlp,conv,gpt").split(","), args.workers, args.steps)
    sides = args.sides.split(",")
    others = [s for s in sides if s != "ours"]
    print(
        f"{'model':<7}"
        + "".join(f"{s + ' ms':>13}" for s in sides)
        + "".join(f"{s + '/ours':>14}" for s in others)
        + "".join(f"{s + ' MB':>13}" for s in sides)
    )
    for model in (args.models or ",".join(MODELS)).split(","):
        seconds, memory = one_worker(
            model, sides, args.steps, args.limit, args.turn, min if args.best else statistics.median
        )
        row = [f"{seconds[s] * 1e3:13.2f}" if s in seconds else f"{'-':>13}" for s in sides]
        row += [
            f"{seconds[s] / seconds['ours']:14.2f}" if {s, "ours"} <= seconds.keys() else f"{'-':>14}" for s in others
        ]
        row += [f"{memory[s] / 1e6:13.0f}" if s in memory else f"{'-':>13}" for s in sides]
        print(f"{model:<7}" + "".join(row), flush=True)


if __name__ == "__main__":
    main()
