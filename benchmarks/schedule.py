"""Scheduling one GPT training step for simulated workers on the NULL device: what one worker of n pays;
and against tinygrad.

    python benchmarks/schedule.py [--workers 4,64,1024] [--repeats 3] [--layers 2] [--dim 128] [--profile 15]
    python benchmarks/schedule.py --against-tinygrad [--repeats 3]

Nothing is computed and nobody is there: this process says that it is worker 0 of n and schedules the step of
`examples/train_gpt.py` as that worker would (SPEC=0, SCACHE=0). Each n runs in a process of its own. Printed per n,
as medians: seconds to write the graph (forward, backward, optimiser), to schedule it, pass by pass, and to build this
worker's part of every collective; nodes of the user's graph and calls of the result; and the ratio of the last n to the
first. `--profile N` also prints the N functions that take most of the scheduling for the largest n.

`--against-tinygrad`: the step of `train_step.py`'s GPT (forward, backward, AdamW) on one device, by ours and by
tinygrad's `linear_with_vars`, both from tensors to an ordered list of kernels, on their NULL devices, without schedule
caches and without code generation; each in a process of its own.
"""

from __future__ import annotations

import argparse
import cProfile
import importlib.util
import json
import os
import pstats
import statistics
import subprocess
import sys
import time
from typing import Any

PASSES = ("clean", "lower_shards", "simplify", "lower_storage", "insert_stores", "kernels, order, memory")


def measure(workers: int, repeats: int, layers: int, dim: int, profile: int) -> dict[str, Any]:
    """The numbers of one n, in this process."""
    sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "examples"))
    import numpy as np
    from train_gpt import GPT

    from manygrad import Tensor, schedule, world
    from manygrad.collectives import build, choose
    from manygrad.collectives.wanted import describe
    from manygrad.multi.world import Membership
    from manygrad.nn.optim import AdamW
    from manygrad.nn.state import get_parameters
    from manygrad.runtime.engine import realize as engine
    from manygrad.tensor.uop import GroupOp, Ops, UOp, passes

    world.show(Membership(size=workers))
    model = GPT(65, 64, layers, 4, dim)
    for p in get_parameters(model):
        p.shard_(world.devices)
    optimizer = AdamW(get_parameters(model), lr=1e-3)
    tokens = np.zeros((2 * max(workers, 8), 64), np.int32)
    x, y = (Tensor(tokens).shard(world.devices, axis=0).realize() for _ in range(2))

    found: list[tuple[UOp, dict[str, float]]] = []
    schedule_sink = schedule.create_linear_with_vars
    marks: list[tuple[str, float]] = []

    def mark(stage: str, name: str, graph: UOp) -> None:
        if stage == "schedule" and graph.op is not Ops.LINEAR:
            marks.append((name, time.perf_counter()))

    passes.observers.append(mark)
    profiler = cProfile.Profile()
    sinks: list[UOp] = []

    def timed(sink: UOp, *where: Any) -> Any:
        marks.clear()
        start = last = time.perf_counter()
        if profile:
            profiler.enable()
        out = schedule_sink(sink, *where)
        profiler.disable()
        end = time.perf_counter()
        spent = {}
        for name, at in marks:
            spent[name], last = at - last, at
        spent[PASSES[-1]] = end - last
        found.append((out.linear, {**spent, "schedule": end - start}))
        sinks.append(sink)
        return out

    runs: list[dict[str, float]] = []
    collectives: list[UOp] = []
    with Tensor.train():
        for i in range(repeats + 1):  # the first makes the optimiser's state
            found.clear()
            sinks.clear()
            start = time.perf_counter()
            optimizer.zero_grad()
            logits = model(x)
            loss = logits.reshape(-1, 65).cross_entropy(y.reshape(-1))
            loss.backward()
            engine.create_linear_with_vars = timed  # type: ignore[assignment]
            optimizer.step()
            loss.realize()
            engine.create_linear_with_vars = schedule_sink
            total = time.perf_counter() - start
            spent = {k: sum(s.get(k, 0.0) for _, s in found) for k in {k for _, s in found for k in s}}
            spent["graph"] = total - spent["schedule"]
            collectives = [c.src[0] for linear, _ in found for c in linear.src if c.src[0].op in GroupOp.COLLECTIVE]
            start = time.perf_counter()
            for what in collectives:
                c, _ = describe(what)
                build(choose(c.kind, c.count * what.dtype.itemsize, c.ranks), c, {0})
            spent["programs"] = time.perf_counter() - start
            if i:
                runs.append(spent)
    if profile:
        pstats.Stats(profiler, stream=sys.stderr).sort_stats("tottime").print_stats(profile)
    return {
        "workers": workers,
        "nodes": sum(len(s.toposort()) for s in sinks),
        "calls": sum(len(linear.src) for linear, _ in found),
        "collectives": len(collectives),
        "seconds": {k: statistics.median(r[k] for r in runs) for k in runs[0]},
    }


def alone(side: str, repeats: int) -> dict[str, float]:
    """Seconds of writing the graph and of scheduling it, medians, and the calls that come out, in this process."""
    sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
    from sides.data import batch

    spent: list[float] = []
    calls: list[int] = []

    def timed(schedule: Any) -> Any:
        def call(*args: Any) -> Any:
            began = time.perf_counter()
            out = schedule(*args)
            spent.append(time.perf_counter() - began)
            calls.append(len((out[0] if isinstance(out, tuple) else out.linear).src))
            return out

        return call

    if side == "ours":
        from sides.ours import Tensor, training

        from manygrad.runtime.engine import realize as engine

        engine.create_linear_with_vars = timed(engine.create_linear_with_vars)  # type: ignore[assignment]
        training_mode = Tensor.train()
    else:
        from sides.tinygrad_side import Context, Tensor, training  # type: ignore[no-redef]

        Tensor.linear_with_vars = timed(Tensor.linear_with_vars)
        training_mode = Context(TRAINING=1, SCACHE=0)
    loss_of, _, optimizer = training("gpt")
    x, y = (Tensor(a.astype("int32")).realize() for a in batch("gpt", 0))
    rows: list[tuple[float, float, int]] = []
    with training_mode:
        for _ in range(repeats + 1):  # the first makes the optimiser's state
            spent.clear()
            calls.clear()
            began = time.perf_counter()
            optimizer.zero_grad()
            loss = loss_of(x, y)
            loss.backward()
            if side == "ours":
                optimizer.step()
                graph = time.perf_counter() - began - sum(spent)
                loss.realize()
            else:
                updates = optimizer.schedule_step()
                graph = time.perf_counter() - began
                loss.realize(*updates)
            rows.append((graph, sum(spent), sum(calls)))
    graphs, schedules, counts = zip(*rows[1:])
    return {"graph": statistics.median(graphs), "schedule": statistics.median(schedules), "calls": counts[-1]}


def against_tinygrad(repeats: int) -> None:
    print(f"{'':<10}{'graph ms':>10}{'schedule ms':>13}{'calls':>8}")
    found = {}
    for side in ("ours", "tinygrad"):
        if importlib.util.find_spec("manygrad" if side == "ours" else side) is None:
            print(f"{side:<10}{'-':>10}{'-':>13}{'-':>8}")
            continue
        null = {"DEVICE": "NULL", "SPEC": "0", "SCACHE": "0"} if side == "ours" else {"DEV": "NULL"}
        command = [sys.executable, os.path.abspath(__file__), "--repeats", str(repeats), "--alone", side]
        done = subprocess.run(command, env={**os.environ, **null}, stdout=subprocess.PIPE, text=True, check=True)
        found[side] = json.loads(done.stdout.splitlines()[-1])
        print(
            f"{side:<10}{found[side]['graph'] * 1e3:10.1f}{found[side]['schedule'] * 1e3:13.1f}"
            f"{found[side]['calls']:8d}",
            flush=True,
        )
    if len(found) == 2:
        print(f"tinygrad / ours: {found['tinygrad']['schedule'] / found['ours']['schedule']:.2f}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workers", default="4,64,1024")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--dim", type=int, default=128)
    parser.add_argument("--profile", type=int, default=0)
    parser.add_argument("--against-tinygrad", action="store_true")
    parser.add_argument("--one", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--alone", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.alone:
        return print(json.dumps(alone(args.alone, args.repeats)))
    if args.against_tinygrad:
        return against_tinygrad(args.repeats)
    if args.one:
        print(json.dumps(measure(args.one, args.repeats, args.layers, args.dim, args.profile)))
        return
    sizes = [int(n) for n in args.workers.split(",")]
    rows = []
    for n in sizes:
        options = ["--repeats", args.repeats, "--layers", args.layers, "--dim", args.dim, "--one", n]
        options += ["--profile", args.profile if n == max(sizes) else 0]
        command = [sys.executable, os.path.abspath(__file__), *map(str, options)]
        done = subprocess.run(
            command,
            env={**os.environ, "DEVICE": "NULL", "SPEC": "0", "SCACHE": "0"},
            stdout=subprocess.PIPE,
            text=True,
            check=True,
        )
        rows.append(json.loads(done.stdout.splitlines()[-1]))
    print(f"{'milliseconds':<26}" + "".join(f"{r['workers']:>9}" for r in rows) + f"{'last/first':>12}   (workers)")
    shown = [k for k in rows[0]["seconds"] if k not in ("graph", "schedule", "programs")]
    for name in (
        "graph",
        "schedule",
        *(k for k in PASSES if k in shown),
        *sorted(k for k in shown if k not in PASSES),
        "programs",
    ):
        ms = [r["seconds"].get(name, 0.0) * 1e3 for r in rows]
        ratio = f"{ms[-1] / ms[0]:12.2f}" if ms[0] else ""
        print(
            f"{name if name in ('graph', 'schedule', 'programs') else '  ' + name:<26}"
            + "".join(f"{t:9.1f}" for t in ms)
            + ratio
        )
    for name in ("nodes", "calls", "collectives"):
        print(f"{name:<26}" + "".join(f"{r[name]:9d}" for r in rows))
    print(
        f"ratio of scheduling, {sizes[-1]} to {sizes[0]} workers: "
        f"{rows[-1]['seconds']['schedule'] / rows[0]['seconds']['schedule']:.2f}"
    )


if __name__ == "__main__":
    main()
