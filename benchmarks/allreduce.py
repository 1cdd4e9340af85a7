"""All-reduce of float32 sums, ours against torch's Gloo and Open MPI, on this machine in one run.

    python benchmarks/allreduce.py [--sizes 256,1K,...,256M] [--workers 2,4] [--transport shm|zmq]
                                  [--devices-per-node 1]
    python benchmarks/allreduce.py --hosts 2,4 [--plain-links] [--rounds 3]
    python benchmarks/allreduce.py --finished [--sizes 1M,16M,64M] [--workers 2]

`step`: what a training step pays, `TinyJit(lambda x: x.sum(0))` on a tensor with one row per device, sharded on axis 0.
`bare`: the same collective as a prepared program, without tensors. Both run on workers started by `manygrad.launch`, as
Gloo's `dist.all_reduce` and Open MPI's (with the package mpi4py and `mpirun`) run on as many processes. A repeat is
timed on every rank from a common start until its own end; of the ranks the slowest counts, of the repeats the median is
printed, in microseconds. algbw = bytes / time of `step`; busbw = algbw * 2(p-1)/p for p devices. gloo/step and mpi/step
above 1: ours is faster.

`--hosts 2,4`: between as many hosts, network namespaces of this machine (root, `ip`), in milliseconds of `step`: ours
encrypted and with plain links, Gloo, and raw TCP sockets and ZeroMQ's, that move the same bytes and sum nothing
(`sides/network.py`). The sides take turns, `--rounds` times; of all repeats the median. gloo/plain, raw/plain and
zmq/plain above 1: ours is faster; plain/encrypted: what is left of the speed with encryption.

`--finished`: what is computed of the sum, by the kernels that sum (`multi/finish_sums.py`) and by a kernel after them:
`x.sum(0) * 0.25` and `x.sum(0).cast("bfloat16")` beside the same of `x.sum(0).contiguous()`, in turns, in microseconds.
apart/with above 1: as a part of the sum it is faster.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import socket
import statistics
import sys
import time
from collections.abc import Callable
from functools import partial
from typing import Any

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))

from sides import mpi, network
from sides.units import nbytes_of, text_of

SIZES = "256,1K,4K,16K,64K,256K,1M,4M,16M,64M,256M"
BUDGET_S = 1.5  # for the repeats of one size on one side


def timed(run: Callable[[], object], align: Callable[[], object], repeats: int) -> list[float]:
    """Seconds of each repeat on this rank; `align` makes the ranks start together."""
    times = []
    for _ in range(repeats):
        align()
        start = time.perf_counter()
        run()
        times.append(time.perf_counter() - start)
    return times


def repeats_for(first_s: float, most: int) -> int:
    return max(3, min(most, int(BUDGET_S / max(first_s, 1e-7))))


def ours(sizes: list[int], most: int) -> list[dict[str, Any]]:
    """Per size, the times of `step` and `bare` on this rank, and which calls a step makes."""
    import numpy as np

    from manygrad import Tensor, TinyJit, values_may_differ, world
    from manygrad.collectives import Collective, build, choose, lower
    from manygrad.collectives.cost import message_nbytes
    from manygrad.collectives.wanted import group_of
    from manygrad.runtime.buffer import Buffer
    from manygrad.runtime.current import current
    from manygrad.runtime.exchange.exchange import Exchange
    from manygrad.tensor.dtype import dtypes

    n, devices, per_node = len(world.devices), world.devices, world.devices_per_node
    endpoint = current().communication.endpoint
    owner = [i // per_node for i in range(n)]
    mine = range(world.rank * per_node, (world.rank + 1) * per_node)
    group, shared = group_of(devices, world), world.link is None or world.link.route == "shm"

    def program(count: int, plan: int) -> Callable[[], None]:
        what = Collective("all_reduce", n, count, group=group)
        program = build(choose("all_reduce", 4 * count, n, group, world.link, shared), what, mine)
        piece = message_nbytes(4 * count, n, world.link)
        body = lower(program, dtypes.float32, owner, {r: devices[r].partition("@")[0] for r in mine}, piece)
        ends = [
            Buffer("CPU", count, dtypes.float32).copyin(np.full(count, r + 1.0, np.float32))
            for _ in ("out", "in")
            for r in mine
        ]
        temps = [Buffer(t.device, t.size, t.dtype) for t in body.temps]
        made = Exchange(body.linear, [*ends, *temps], len(mine), endpoint)
        sequence = iter(range(1 << 60))
        return lambda: made.run(plan, next(sequence))

    align = program(1, 0xA116)
    out = []
    for plan, nbytes in enumerate(sizes):
        count = nbytes // 4
        row = Tensor.arange(n).reshape(n, 1).float().shard(devices, axis=0)  # each device computes its own row
        x = (row + (Tensor.arange(count) % 128).float().reshape(1, count).shard(devices)).contiguous().realize()

        @TinyJit
        def step(x: Tensor) -> Tensor:
            return x.sum(0)

        for _ in range(3):
            y = step(x)
        bare = program(count, 0xBA4E + plan)
        result: dict[str, Any] = {"link": str(world.link), "calls": [i.name for i in step.captured.items]}
        for name, run in (("step", partial(step, x)), ("bare", bare)):
            first = timed(run, align, 3)
            with values_may_differ():  # each rank's row is its own time
                # the same repeats on all
                slowest = Tensor(np.full((n, 1), max(first), np.float32)).shard(devices, axis=0).max().item()
            result[name] = timed(run, align, repeats_for(float(slowest), most))
        expected = (n * (np.arange(count, dtype=np.int32) % 128) + n * (n - 1) // 2).astype(np.float32)
        assert np.array_equal(y.numpy(), expected), f"wrong sum at {nbytes} bytes"
        del x, y, bare, step, run
        out.append(result)
    return out


FINISHES = ("* 0.25", "bfloat16")


def finished(sizes: list[int], most: int) -> list[dict[str, list[float]]]:
    """Per size, the times on this rank of what is computed of a sum: `with` it, and `apart`."""
    import numpy as np

    from manygrad import Tensor, TinyJit, values_may_differ, world

    n = len(world.devices)
    one = Tensor(np.ones((n, 1), np.float32)).shard(world.devices, axis=0).contiguous().realize()
    meet = TinyJit(lambda x: x.sum(0))
    for _ in range(3):
        meet(one)
    out = []
    for nbytes in sizes:
        x = Tensor.ones(n, nbytes // 4).shard(world.devices, axis=0).contiguous().realize()
        result = {}
        for finish in FINISHES:
            steps = {}
            for name in ("with", "apart"):

                @TinyJit
                def step(x: Tensor, finish: str = finish, name: str = name) -> Tensor:
                    total = x.sum(0) if name == "with" else x.sum(0).contiguous()
                    return total * 0.25 if finish == "* 0.25" else total.cast("bfloat16")

                for _ in range(3):
                    y = step(x)
                steps[name] = step
            first = timed(partial(steps["apart"], x), partial(meet, one), 3)
            with values_may_differ():
                slowest = Tensor(np.full((n, 1), max(first), np.float32)).shard(world.devices, axis=0).max().item()
            for name in ("with", "apart", "with", "apart"):
                times = timed(partial(steps[name], x), partial(meet, one), repeats_for(float(slowest), most))
                result[f"{name} {finish}"] = result.get(f"{name} {finish}", []) + times
            del y, steps, step
        out.append(result)
    return out


def print_finished(sizes: list[int], most: int, workers: list[int], devices_per_node: int) -> None:
    from manygrad import launch

    print(f"{'workers':>7} {'bytes':>6} {'of the sum':>10} {'with us':>10} {'apart us':>10} {'apart/with':>10}")
    for count in workers:
        ranks = launch(finished, sizes, most, nodes=count, devices_per_node=devices_per_node)
        for i, nbytes in enumerate(sizes):
            for finish in FINISHES:
                beside, apart = (median_of_slowest([r[i][f"{k} {finish}"] for r in ranks]) for k in ("with", "apart"))
                print(
                    f"{count:7d} {text_of(nbytes):>6} {finish:>10} {beside * 1e6:10.1f} {apart * 1e6:10.1f} "
                    f"{apart / beside:10.2f}",
                    flush=True,
                )


def gloo(
    sizes: list[int], most: int, rank: int, size: int, port: int, threads: int, address: str = "127.0.0.1"
) -> list[list[float]]:
    """The same with torch, on this rank; rank 0 is at `address`."""
    import torch
    import torch.distributed as dist

    torch.set_num_threads(threads)
    interface = "lo" if address == "127.0.0.1" else "eth0"
    os.environ.update(MASTER_ADDR=address, MASTER_PORT=str(port), GLOO_SOCKET_IFNAME=interface)
    dist.init_process_group("gloo", rank=rank, world_size=size)
    out = []
    for nbytes in sizes:
        x = torch.zeros(nbytes // 4)
        first = timed(lambda: dist.all_reduce(x), dist.barrier, 3)  # noqa: B023
        slowest = torch.tensor([max(first)])
        dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
        out.append(timed(lambda: dist.all_reduce(x), dist.barrier, repeats_for(slowest.item(), most)))  # noqa: B023
    dist.destroy_process_group()
    return out


def run_gloo(sizes: list[int], most: int, size: int, threads: int) -> list[list[list[float]]]:
    """Per rank, per size, the times."""
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    return network.run_in([[]] * size, "gloo", [sizes, most, size, port, threads])


def side(name: str, what: list[Any], rank: int) -> None:
    """One process of a side: prints its times, or, where the launcher started it, writes them to its folder."""
    if name == "ours":
        from manygrad import world

        sizes, most, folder = what
        with open(os.path.join(folder, f"{world.rank}.json"), "w") as f:
            json.dump(ours(sizes, most), f)
    elif name == "gloo":
        sizes, most, *rest = what
        print(json.dumps(gloo(sizes, most, rank, *rest)))
    elif name == "mpi":
        of_ranks = mpi.measured(*what, timed, repeats_for)
        if int(os.environ["OMPI_COMM_WORLD_RANK"]) == 0:
            print(json.dumps(of_ranks))
    else:
        sizes, most, addresses = what
        kind = network.Zmq if name == "zmq" else network.Raw
        print(json.dumps(network.moved(kind, sizes, most, rank, addresses, timed, repeats_for)))


def between_hosts(count: int, sizes: list[int], most: int, rounds: int, plain_only: bool) -> None:
    """Prints the table of `count` hosts."""
    sys.path.append(network.ROOT)
    from tests.hosts import hosts

    have_torch = importlib.util.find_spec("torch") is not None
    threads = max(1, (os.cpu_count() or 1) // count)
    times: dict[str, list[list[float]]] = {}
    with hosts(count) as h:
        sides: dict[str, Callable[[], list[Any]]] = {
            "plain": partial(network.run_ours, h.names, h.addresses, sizes, most, ["--plain-links"]),
            "raw": partial(network.run_in, h.prefixes, "raw", [sizes, most, h.addresses]),
            "zmq": partial(network.run_in, h.prefixes, "zmq", [sizes, most, h.addresses]),
        }
        if not plain_only:
            sides["encrypted"] = partial(network.run_ours, h.names, h.addresses, sizes, most, [])
        if have_torch:
            what = [sizes, most, count, network.PORT, threads, h.addresses[0]]
            sides["gloo"] = partial(network.run_in, h.prefixes, "gloo", what)
        for _ in range(rounds):
            for name, run in sides.items():
                ranks = run()
                of_ranks = [[x["step"] if isinstance(x, dict) else x for x in r] for r in ranks]
                for i, all_times in enumerate(zip(*of_ranks)):
                    times.setdefault(name, [[] for _ in sizes])[i] += map(max, zip(*all_times))
    nothing = float("nan")
    for i, nbytes in enumerate(sizes):
        ms = {name: statistics.median(t[i]) * 1e3 for name, t in times.items()}
        encrypted, plain, other, sockets, carrier = (
            ms.get(k, nothing) for k in ("encrypted", "plain", "gloo", "raw", "zmq")
        )
        print(
            f"{count:5d} {text_of(nbytes):>6} {encrypted:12.2f} {plain:9.2f} {other:9.2f} {sockets:9.2f} "
            f"{carrier:9.2f} {other / plain:10.2f} {sockets / plain:9.2f} {carrier / plain:9.2f} "
            f"{plain / encrypted:15.2f}",
            flush=True,
        )


def median_of_slowest(ranks: list[list[float]]) -> float:
    return statistics.median(map(max, zip(*ranks)))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", default=SIZES, help="bytes, comma-separated; K and M are powers of two")
    parser.add_argument("--workers", default="2,4")
    parser.add_argument(
        "--transport", default="", choices=("", "shm", "zmq"), help="force ours (default: shared memory on one host)"
    )
    parser.add_argument("--devices-per-node", type=int, default=1)
    parser.add_argument(
        "--repeats", type=int, default=1000, help=f"at most; large sizes make as many as fit in {BUDGET_S} s"
    )
    parser.add_argument("--hosts", default="", help="measure between so many hosts (network namespaces), as 2,4")
    parser.add_argument("--finished", action="store_true", help="what is computed of a sum: with it, and apart")
    parser.add_argument("--plain-links", action="store_true", help="with --hosts: leave out ours encrypted")
    parser.add_argument("--rounds", type=int, default=1, help="with --hosts: turns of each side")
    parser.add_argument("--side", nargs=3, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.side:
        return side(args.side[0], json.loads(args.side[1]), int(args.side[2]))
    sizes = [nbytes_of(s) for s in args.sizes.split(",")]
    if args.hosts:
        print(
            f"{'hosts':>5} {'bytes':>6} {'encrypted ms':>12} {'plain ms':>9} {'gloo ms':>9} {'raw ms':>9} "
            f"{'zmq ms':>9} {'gloo/plain':>10} {'raw/plain':>9} {'zmq/plain':>9} {'plain/encrypted':>15}"
        )
        for count in map(int, args.hosts.split(",")):
            between_hosts(count, sizes, args.repeats, args.rounds, args.plain_links)
        return
    from manygrad import launch

    if args.transport:
        os.environ["TRANSPORT"] = args.transport
    if args.finished:
        return print_finished(sizes, args.repeats, [int(n) for n in args.workers.split(",")], args.devices_per_node)
    have_torch = importlib.util.find_spec("torch") is not None
    print(
        f"{'workers':>7} {'bytes':>6} {'step us':>10} {'bare us':>10} {'gloo us':>10} {'mpi us':>10} "
        f"{'algbw GB/s':>10} {'busbw GB/s':>10} {'step/bare':>9} {'gloo/step':>9} {'mpi/step':>9}"
    )
    for workers in map(int, args.workers.split(",")):
        threads = max(1, (os.cpu_count() or 1) // workers)
        mine = launch(ours, sizes, args.repeats, nodes=workers, devices_per_node=args.devices_per_node)
        theirs = run_gloo(sizes, args.repeats, workers * args.devices_per_node, threads) if have_torch else None
        p = workers * args.devices_per_node
        with_mpi = mpi.run(os.path.abspath(__file__), sizes, args.repeats, p) if mpi.there() else None
        for i, nbytes in enumerate(sizes):
            step, bare = (median_of_slowest([r[i][k] for r in mine]) for k in ("step", "bare"))
            other, third = (median_of_slowest([r[i] for r in x]) if x else float("nan") for x in (theirs, with_mpi))
            bandwidth = nbytes / step * 1e-9
            print(
                f"{workers:7d} {text_of(nbytes):>6} {step * 1e6:10.1f} {bare * 1e6:10.1f} {other * 1e6:10.1f} "
                f"{third * 1e6:10.1f} {bandwidth:10.2f} {bandwidth * 2 * (p - 1) / p:10.2f} {step / bare:9.2f} "
                f"{other / step:9.2f} {third / step:9.2f}",
                flush=True,
            )
            if len(mine[0][i]["calls"]) != 1:
                print(f"        a step made {', '.join(mine[0][i]['calls'])}: more than one collective")


if __name__ == "__main__":
    main()
