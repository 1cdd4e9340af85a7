"""What a server costs: many streaming clients against manygrad.llm.serve, beside the same batch without a server.

    python benchmarks/serving.py [--model smollm2] [--clients 64] [--slots 64] [--seconds 20] [--tokens 64]
                                 [--activations int8]
    python benchmarks/serving.py --seconds 120 --only server    # how it holds: ends with 1 if a stream goes wrong

Both sides write texts of `--tokens` tokens after prompts of `--prompt`, at temperature 0.8, as many at once as there
are clients; a text that ends is followed by the next one. What is counted begins when all have their first text behind
them. The clients are one process on the same machine, whose cores they share. `between`: ms between two tokens of a
text, as the client (or the loop) sees them; `first`: ms from a request to its first token; `errors`: answers other than
200, events with an error, and streams that end before their text does.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import re
import signal
import subprocess
import sys
import threading
import time
from dataclasses import dataclass, field

import numpy as np

START_S, WARM_S, END_S = 300.0, 120.0, 30.0


@dataclass
class Seen:
    """When tokens of texts came, in seconds."""

    between: list[tuple[float, float]] = field(default_factory=list)  # (when, since the one before)
    first: list[tuple[float, float]] = field(default_factory=list)  # (when, since the request)
    ended: set[int] = field(default_factory=set)  # clients that have a text behind them
    texts: int = 0  # that are complete
    errors: list[str] = field(default_factory=list)

    def row(self, began: float, ended: float) -> list[float]:
        """tokens/s, p50 and p99 between tokens, p50 to the first, in ms; texts and errors (of the whole run)."""
        between, first = ([s for at, s in part if began <= at < ended] for part in (self.between, self.first))
        p50, p99 = np.percentile(between, [50, 99]) * 1e3
        rate, median = (len(between) + len(first)) / (ended - began), np.median(first) * 1e3 if first else np.nan
        return [rate, p50, p99, median, self.texts, len(self.errors)]


def prompt(number: int, size: int) -> list[int]:
    draw = random.Random(number)
    return [draw.randrange(3, 60) for _ in range(size)]


def offline(args: argparse.Namespace) -> list[float]:
    """The batch alone, in this process."""
    from manygrad import Tensor
    from manygrad.llm.engine.batch import Batch, Request
    from manygrad.llm.engine.steps import Steps
    from manygrad.llm.engine.writer import SamplingParams
    from manygrad.llm.load import dtype_for, load

    model, _ = load(args.model, dtype_for(args.slots, args.activations), args.activations)
    model.reserve_pages(args.slots * args.max_model_len, args.max_model_len)
    Tensor.realize(*model.parameters(), *model.buffers())
    batch = Batch(Steps(model, args.slots, args.max_model_len))
    batch.warm_up()
    seen, last, asked = Seen(), dict[int, float](), dict[int, float]()
    texts, client, began = 0, dict[int, int](), 0.0
    waiting = list(range(args.clients))
    limit = time.perf_counter() + WARM_S
    while not began or time.perf_counter() < began + args.seconds:
        for c in waiting:
            asked.setdefault(c, time.perf_counter())
        while waiting and batch.free:
            texts += 1
            client[texts] = waiting.pop(0)
            given = Request(
                tuple(prompt(texts, args.prompt)), args.tokens, SamplingParams(0.8, seed=texts), ignore_end=True
            )
            batch.admit(texts, given)
        made = batch.step()
        now = time.perf_counter()
        for m in made:
            if m.key in last:
                seen.between.append((now, now - last[m.key]))
            else:
                seen.first.append((now, now - asked.pop(client[m.key])))
            last[m.key] = now
            if m.reason:
                seen.texts += 1
                seen.ended.add(client[m.key])
                waiting.append(client[m.key])
        if not began and (len(seen.ended) == args.clients or now > limit):
            began = now
    return seen.row(began, began + args.seconds)


class Stream(asyncio.Protocol):
    """One text, to its end. (No reader of lines: the clients' time is the server's, whose cores they share.)"""

    def __init__(self, request: bytes, seen: Seen):
        self.request, self.seen = request, seen
        self.ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.rest = b""  # an event that has not come as a whole
        self.last = self.asked = time.perf_counter()
        self.begun = self.done = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.WriteTransport)
        transport.write(self.request)

    def data_received(self, data: bytes) -> None:
        now = time.perf_counter()
        *events, self.rest = (self.rest + data).split(b"\n\n")
        for event in events:
            begin = event.find(b"data: ")
            if not self.begun:
                self.begun = b" 200 " in event.split(b"\r\n", 1)[0]
                if not self.begun:
                    return self.fail(event.decode(errors="replace"))
            if event.startswith(b'data: {"error"', begin):
                return self.fail(event.decode(errors="replace"))
            if event.startswith(b"data: {", begin):
                part = self.seen.first if self.last == self.asked else self.seen.between
                part.append((now, now - self.last))
                self.last = now
            elif event.startswith(b"data: [DONE]", begin):
                self.done = True

    def connection_lost(self, error: Exception | None) -> None:
        if not self.done:
            self.fail(f"the stream ended before its text: {self.rest!r}")
        elif not self.ended.done():
            self.seen.texts += 1
            self.ended.set_result(None)

    def fail(self, what: str) -> None:
        if not self.ended.done():
            self.ended.set_exception(OSError(what))


async def stream(port: int, number: int, args: argparse.Namespace, seen: Seen) -> None:
    given = {"prompt": prompt(number, args.prompt), "max_tokens": args.tokens, "temperature": 0.8, "seed": number}
    body = json.dumps({**given, "ignore_eos": True, "stream": True}).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nhost: a\r\ncontent-type: application/json\r\ncontent-length: {len(body)}"
    request = f"{head}\r\nconnection: close\r\n\r\n".encode() + body
    transport, text = await asyncio.get_running_loop().create_connection(
        lambda: Stream(request, seen), "127.0.0.1", port
    )
    try:
        await text.ended
    finally:
        transport.close()


async def clients(port: int, args: argparse.Namespace) -> list[float]:
    seen, numbers = Seen(), iter(range(1, 1 << 30))

    async def one(client: int) -> None:
        while True:
            try:
                await stream(port, next(numbers), args, seen)
            except OSError as error:
                seen.errors.append(str(error))
                print(f"client {client}: {error}", file=sys.stderr)
                await asyncio.sleep(1)
            seen.ended.add(client)

    tasks = [asyncio.create_task(one(c)) for c in range(args.clients)]
    limit = time.perf_counter() + WARM_S
    while len(seen.ended) < args.clients and time.perf_counter() < limit:
        await asyncio.sleep(0.05)
    began = time.perf_counter()
    await asyncio.sleep(args.seconds)
    ended = time.perf_counter()
    for task in tasks:
        task.cancel()
    return seen.row(began, ended)


def served(args: argparse.Namespace) -> list[float]:
    options = ["--model", args.model, "--port", "0", "--slots", str(args.slots), "--max-model-len",
               str(args.max_model_len), "--queue", str(args.clients), "--drain", "0",
               "--activations", args.activations]  # fmt: skip
    command = [sys.executable, "-u", "-m", "manygrad.llm.serve", *options]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        watch = threading.Timer(START_S, process.kill)  # (its output then ends)
        watch.start()
        try:
            found = re.search(r"http://127\.0\.0\.1:(\d+)", process.stdout.readline())
            if found is None:
                raise SystemExit("the server did not start; what it wrote above says why")
            watch.cancel()
            return asyncio.run(clients(int(found[1]), args))
        finally:
            watch.cancel()
            process.send_signal(signal.SIGINT)
            try:
                process.wait(END_S)
            except subprocess.TimeoutExpired:
                process.kill()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2", help="as for the server")
    parser.add_argument("--clients", type=int, default=64)
    parser.add_argument("--slots", type=int, default=64)
    parser.add_argument("--max-model-len", type=int, default=256, help="tokens of a prompt and its text")
    parser.add_argument("--seconds", type=float, default=20.0, help="that each side is measured")
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--prompt", type=int, default=16)
    parser.add_argument("--activations", default="float32", choices=["float32", "int8"], help="as for the server")
    parser.add_argument("--only", choices=["batch", "server"])
    parser.add_argument("--offline", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.offline:
        print(json.dumps(offline(args)))
        return
    rows = {}
    if args.only != "server":
        command = [sys.executable, os.path.abspath(__file__), *sys.argv[1:], "--offline"]
        limit_s = START_S + WARM_S + args.seconds
        rows["batch"] = json.loads(subprocess.run(command, stdout=subprocess.PIPE, check=True, timeout=limit_s).stdout)
    if args.only != "batch":
        rows["server"] = served(args)
    print(f"{args.model} x {args.activations}: {args.clients} texts at once, {args.slots} slots, {args.seconds:g} s")
    print(f"{'':8}{'tokens/s':>12}{'between p50':>14}{'p99':>10}{'first p50':>12}  (ms){'texts':>10}{'errors':>8}")
    for name, (rate, p50, p99, first, texts, errors) in rows.items():
        print(f"{name:8}{rate:12.1f}{p50:14.1f}{p99:10.1f}{first:12.1f}      {texts:10.0f}{errors:8.0f}")
    if len(rows) == 2:
        print(f"server/batch{rows['server'][0] / rows['batch'][0]:8.3f}")
    raise SystemExit(1 if any(row[-1] for row in rows.values()) else 0)


if __name__ == "__main__":
    main()
