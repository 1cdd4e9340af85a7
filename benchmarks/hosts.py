"""Training steps over several hosts with links of limited rate: ours, launched, and torch's DistributedDataParallel
over Gloo.

    python benchmarks/hosts.py [--models gpt,mlp] [--hosts 2,4] [--links 0,1000,200] [--steps 8] [--turns 3]
        [--tcp cubic]

The hosts are network namespaces on one switch (`tests/hosts.py`; root is needed), whose links carry `--links` Mbit/s
each way (0: no limit). They share this machine's cores: each rank has cores // hosts threads, at least one. Models as
in `train_step.py`; the global batch is the same for any number of hosts. Sides take turns in processes that stay.

Printed, medians of the ranks' means (who is ahead in one step waits in the next): milliseconds a step of ours; of
ours with parameters that are cut over the hosts, `cut`: gathered in the forward pass, their gradients scattered in
the backward one; of torch with the best of `--buckets` (MB); of ours without communication, `alone` (as many
processes at once, each with its rank's part of the batch), and of that beside plain TCP sockets, which move as many
bytes from a third of the step on, `sockets`; megabytes that a host sends a step, as its link counts them, and how long
the link needs for these; then ours and `cut` / max(alone, link), ours / sockets, and torch / ours.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from contextlib import ExitStack
from itertools import product
from pathlib import Path

sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), ".."))
sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))

from sides.asking import put

from tests.hosts import CONGESTION_CONTROL, UNLIMITED, Hosts, NoHosts, network

HERE = Path(__file__).resolve().parent
WARM_UP = 5
LIMIT_S = 300.0
PORT = 29500
ON_HOSTS = HERE.parent / "tests" / "launcher" / "on_hosts.py"


class Ranks:
    """The ranks of one side; `turn(steps)` gives the seconds of each rank's steps. Raises `RuntimeError`."""

    def __init__(self, commands: list[list[str]], size: int, folder: Path, env: dict[str, str]) -> None:
        self.size, self.folder, self.turns = size, folder, 0
        self.said = (folder / "said").open("w+")
        self.processes = [
            subprocess.Popen(c, cwd=folder, env=os.environ | env, stdout=self.said, stderr=self.said) for c in commands
        ]

    def turn(self, steps: int) -> list[list[float]]:
        put(self.folder / f"turn{self.turns}", str(steps))
        answers = [self.folder / f"turn{self.turns}.{r}" for r in range(self.size)]
        self.turns += 1
        end = time.monotonic() + LIMIT_S
        while not all(a.exists() for a in answers):
            if time.monotonic() > end or any(p.poll() is not None for p in self.processes):
                self.said.seek(0)
                raise RuntimeError(f"no answer from {self.folder.name}:\n{self.said.read()[-3000:]}")
            time.sleep(0.02)  # (it is the ranks' processors that look)
        return [json.loads(a.read_text()) for a in answers]

    def __enter__(self) -> Ranks:
        return self

    def __exit__(self, *exc: object) -> None:
        put(self.folder / f"turn{self.turns}", "0")
        for p in self.processes:
            try:
                p.wait(10)
            except subprocess.TimeoutExpired:
                p.kill()
                p.wait()
        self.said.close()


def sides(
    h: Hosts, model: str, buckets: list[str], folder: Path, stack: ExitStack, traced: str = ""
) -> dict[str, Ranks]:
    """Each side's ranks, one a host: `ours`, `cut`, `alone`, `sockets` and torch's buckets, if torch is there, or only
    what is `traced`. One side after the other starts and warms up: ours measures its links when it connects."""
    size = len(h.names)
    threads = str(max(1, len(os.sched_getaffinity(0)) // size))
    env = {"THREADS": threads, "OMP_NUM_THREADS": threads, "TRANSPORT": "zmq", "GLOO_SOCKET_IFNAME": "eth0"}
    python = [sys.executable, str(HERE / "sides" / "rank.py")]
    found: dict[str, Ranks] = {}

    def place(name: str) -> tuple[list[str], Path]:
        (folder / name).mkdir()
        return [name.partition("-")[0], model, str(folder / name)], folder / name

    def start(name: str, commands: list[list[str]], where: Path, env: dict[str, str]) -> None:
        found[name] = stack.enter_context(Ranks(commands, size, where, env))
        found[name].turn(WARM_UP)

    hosts = ";".join(f"{a},{n}" for a, n in zip([h.addresses[0], *h.addresses], [h.names[0], *h.names]))
    launcher = [sys.executable, "-P", str(ON_HOSTS), hosts, "--", python[1], "--nodes", str(size)]
    for side in (traced,) if traced else ("ours", "cut"):
        what, where = place(side)
        own = env | {"PROFILE": "1"} if traced else env
        start(side, [[*h.prefixes[0], *launcher, "--", *what, "0", str(size)]], where, own)
    if traced:
        return found
    what, where = place("alone")
    ranks = [[*p, *python, *what, str(r), str(size)] for r, p in enumerate(h.prefixes)]
    start("alone", ranks, where, env)
    what, where = place("sockets")
    before = sent(h)
    found["ours"].turn(WARM_UP)
    nbytes = max(b - a for a, b in zip(before, sent(h))) // WARM_UP
    ring = zip(h.prefixes, h.addresses, [*h.addresses[1:], h.addresses[0]])
    ranks = [[*p, *python, *what, str(r), str(size), str(nbytes), a, n, str(PORT)] for r, (p, a, n) in enumerate(ring)]
    start("sockets", ranks, where, env)
    for i, bucket in enumerate(buckets if importlib.util.find_spec("torch") else []):
        what, where = place(f"torch-{bucket}")
        rest = [threads, bucket, h.addresses[0], str(PORT + 1 + i)]
        ranks = [[*p, *python, *what, str(r), str(size), *rest] for r, p in enumerate(h.prefixes)]
        start(bucket, ranks, where, env)
    return found


def sent(h: Hosts) -> list[int]:
    """Bytes that each host's link has carried away from it."""
    shown = [subprocess.check_output(["ip", "-n", n, "-j", "-s", "link", "show", "eth0"]) for n in h.names]
    return [json.loads(s)[0]["stats64"]["tx"]["bytes"] for s in shown]


def measure(ranks: dict[str, Ranks], h: Hosts, steps: int, turns: int) -> tuple[dict[str, float], float]:
    """Median seconds a step of each side, and bytes a step that the host sends in ours that sends most."""
    times: dict[str, list[float]] = {side: [] for side in ranks}
    nbytes = 0.0
    for _ in range(turns):
        for side, r in ranks.items():
            r.turn(1)
            before = sent(h)
            found = r.turn(steps)
            if side == "ours":
                nbytes = max(b - a for a, b in zip(before, sent(h))) / steps
            times[side] += [statistics.mean(step) for step in zip(*found)]
    return {side: statistics.median(t) for side, t in times.items()}, nbytes


def limit(h: Hosts, mbit: float) -> None:
    for i in range(len(h.names)):
        h.limit(i, 1e6 * mbit or UNLIMITED)


def trace(h: Hosts, model: str, side: str, folder: Path, mbit: float, steps: int, into: Path) -> None:
    """Writes the trace of all ranks of a side of ours."""
    limit(h, mbit)
    with ExitStack() as stack:
        sides(h, model, [], folder, stack, traced=side)[side].turn(steps)
    (found,) = folder.rglob("profile.json")
    shutil.copyfile(found, into)


def row(model: str, count: int, mbit: float, seconds: dict[str, float], nbytes: float) -> str:
    ours, cut, alone, sockets = (seconds.pop(side) for side in ("ours", "cut", "alone", "sockets"))
    link = 8 * nbytes / (1e6 * mbit) if mbit else 0.0
    bucket = min(seconds, key=lambda b: seconds[b], default="-")
    other = seconds.get(bucket, float("nan"))
    return (
        f"{model:<6}{count:>6}{f'{mbit:g}' if mbit else '-':>8}{1e3 * ours:>10.1f}{1e3 * cut:>10.1f}"
        f"{1e3 * other:>10.1f}{bucket:>8}"
        f"{1e3 * alone:>10.1f}{1e3 * sockets:>12.1f}{nbytes / 1e6:>9.2f}{1e3 * link:>9.1f}"
        f"{ours / max(alone, link):>12.2f}{cut / max(alone, link):>11.2f}{ours / sockets:>14.2f}{other / ours:>12.2f}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", default="gpt,mlp")
    parser.add_argument("--hosts", default="2,4")
    parser.add_argument("--links", default="0,1000,200", help="Mbit/s each way; 0: no limit")
    parser.add_argument("--buckets", default="1,5,25", help="MB, DistributedDataParallel's")
    parser.add_argument("--steps", type=int, default=8, help="of a turn")
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--tcp", default=CONGESTION_CONTROL, help="congestion control of the hosts' TCP")
    parser.add_argument("--trace", type=Path, help="only write a trace of ours: of the first model, count and link")
    parser.add_argument("--traced", default="ours", choices=["ours", "cut"])
    args = parser.parse_args()
    if args.trace:
        count, mbit = int(args.hosts.split(",")[0]), float(args.links.split(",")[0])
        with tempfile.TemporaryDirectory(prefix="mghosts-") as folder, network(count, args.tcp) as h:
            trace(h, args.models.split(",")[0], args.traced, Path(folder), mbit, args.steps, args.trace)
        return
    print(
        f"{'model':<6}{'hosts':>6}{'Mbit/s':>8}{'ours ms':>10}{'cut ms':>10}{'torch ms':>10}{'bucket':>8}"
        f"{'alone ms':>10}{'sockets ms':>12}{'MB sent':>9}{'link ms':>9}"
        f"{'ours/bound':>12}{'cut/bound':>11}{'ours/sockets':>14}{'torch/ours':>12}  TCP"
    )
    for model in args.models.split(","):
        for count, mbit in product(map(int, args.hosts.split(",")), map(float, args.links.split(","))):
            with (
                tempfile.TemporaryDirectory(prefix="mghosts-") as folder,
                network(count, args.tcp) as h,
                ExitStack() as stack,
            ):
                limit(h, mbit)  # (before the start: ours measures its links as it connects)
                ranks = sides(h, model, args.buckets.split(","), Path(folder), stack)
                print(
                    row(model, count, mbit, *measure(ranks, h, args.steps, args.turns)),
                    f" {args.tcp}",
                    flush=True,
                )


def end(signum: int, frame: object) -> None:
    signal.signal(signum, signal.SIG_IGN)  # (a second one would end the removal of the hosts)
    sys.exit(128 + signum)


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, end)
    try:
        main()
    except NoHosts as e:
        sys.exit(f"several hosts cannot be had here: {e}")
