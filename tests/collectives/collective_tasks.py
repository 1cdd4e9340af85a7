"""What the workers of the multi-process tests do: each function gets its connected endpoint. No tests in here."""

from __future__ import annotations

import ctypes
import hashlib
import os
import threading
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np

from manygrad.collectives.algorithms import build
from manygrad.collectives.lower import lower
from manygrad.collectives.program import Collective
from manygrad.collectives.transport import Endpoint, MessageKey
from manygrad.errors import CollectiveAborted, CollectiveTimeout
from manygrad.native.exchange import RECEIVE, RECEIVE_INTO, RUN, SEND
from manygrad.native.memory import bytes_at
from manygrad.runtime.buffer import Buffer
from manygrad.runtime.exchange.exchange import Exchange
from manygrad.tensor.dtype import DType, to_dtype
from manygrad.tensor.environment import COLLECTIVE_TIMEOUT_S, Context


def values(dtype: str, count: int, rank: int, seed: int = 0) -> np.ndarray[Any, Any]:
    """Rank's input: the same in every process, of widely different magnitudes for the floats."""
    d = to_dtype(dtype)
    rng = np.random.default_rng([seed, rank, count])
    if d.is_bool:
        return rng.random(count) < 0.3
    if d.is_float:
        return (rng.standard_normal(count) * np.exp2(rng.integers(-6, 6, count))).astype(d.np)
    return rng.integers(0, 1 << 32, count, dtype=np.uint64).astype(d.np)


def put(endpoint: Endpoint, array: np.ndarray[Any, Any]) -> int:
    """Copies `array` into the arena; its address."""
    addr = endpoint.arena.addr(endpoint.arena.alloc(array.nbytes))
    ctypes.memmove(addr, array.ctypes.data, array.nbytes)
    return addr


def buffer_at(endpoint: Endpoint, count: int, d: DType) -> Buffer:
    """Elements in the arena."""
    if not count:
        return Buffer("CPU", 0, d)
    addr = endpoint.arena.addr(endpoint.arena.alloc(count * d.itemsize))
    made = Buffer.over("CPU", bytes_at(addr, count * d.itemsize).view(d.np), d)
    assert made is not None
    return made


def free(endpoint: Endpoint, buffers: list[Buffer]) -> None:
    for b in buffers:
        if b.nbytes:
            endpoint.arena.free(b.device.address(b.handle) - endpoint.arena.base)


def collective(
    endpoint: Endpoint,
    cases: list[tuple[str, Collective, str]],
    ranks_per_worker: int = 1,
    runs: int = 1,
    piece_nbytes: int | None = None,
    late_s: float = 0.0,
    is_native: bool | None = None,
) -> list[Any]:
    """Runs every case; the bytes of `out` of each local rank (a digest where long). `late_s`: in turns each other rank
    comes late; `is_native`: whether each case has to be one native call, or must not be."""
    if piece_nbytes is not None:
        endpoint.piece_nbytes = piece_nbytes
    results = []
    mine = range(endpoint.rank * ranks_per_worker, (endpoint.rank + 1) * ranks_per_worker)
    for n, (algorithm, c, dtype) in enumerate(cases):
        d = to_dtype(dtype)
        only = [r for r in mine if r < c.ranks]
        workers = [r // ranks_per_worker for r in range(c.ranks)]
        names = {r: f"CPU:{i}" for i, r in enumerate(only)}
        body = lower(build(algorithm, c, only), d, workers, names, endpoint.piece_nbytes)
        outs = [buffer_at(endpoint, c.out_length(r), d) for r in only]
        ins = [buffer_at(endpoint, c.in_length(r), d) for r in only]
        for r, b in zip(only, ins):
            b.copyin(values(dtype, c.in_length(r), r))
        temps = [buffer_at(endpoint, t.size, t.dtype) for t in body.temps]
        exchange = Exchange(body.linear, [*outs, *ins, *temps], len(only), endpoint)
        for sequence in range(runs):
            for b in outs:
                b.copyin(np.full(b.nbytes, 0xA5, np.uint8).view(d.np))
            if late_s and (sequence + endpoint.rank) % 2:
                time.sleep(late_s)
            exchange.run(n, sequence)
            assert not exchange.borrowed and not endpoint._outstanding
        if is_native is not None and exchange.steps:
            assert is_native == (exchange.native is not None)
        for b in outs:
            data = b.copyout().tobytes()
            results.append(data if len(data) < 4096 else hashlib.blake2b(data).hexdigest())
        free(endpoint, [*outs, *ins, *temps])
    assert endpoint.arena.used_nbytes == 0
    return results


def written_outside(endpoint: Endpoint, count: int, runs: int) -> int:
    """Sums that others write, on every second rank to memory that they cannot see; how many elements came wrong."""
    n, r, d = endpoint.size, endpoint.rank, to_dtype("int32")
    body = lower(build("put", Collective("all_reduce", n, count), [r]), d, range(n), {r: "CPU:0"})
    place = np.zeros(count, d.np)
    out = buffer_at(endpoint, count, d) if r % 2 else Buffer.over("CPU", place, d)
    given, wrong = buffer_at(endpoint, count, d), 0
    assert out is not None
    exchange = Exchange(body.linear, [out, given], 1, endpoint)
    for sequence in range(runs):
        given.copyin(np.arange(count, dtype=d.np) * (r + 1) + sequence)
        exchange.run(1, sequence)
        want = np.arange(count, dtype=d.np) * (n * (n + 1) // 2) + n * sequence
        wrong += int((out.copyout() != want).sum())
    assert not any(link.staged for link in endpoint._links.values())  # type: ignore[union-attr]
    return wrong


def stopped_after_each_step(endpoint: Endpoint, algorithm: str, kind: str, count: int) -> list[int]:
    """Native code stops after each number of steps, on each rank after another one, and Python goes on: how many
    elements came wrong, how many steps there are, and how many messages were counted too often or not at all."""
    n, r, d = endpoint.size, endpoint.rank, to_dtype("int32")
    c = Collective(kind, n, count)
    body = lower(build(algorithm, c, [r]), d, range(n), {r: "CPU:0"})
    temps = [buffer_at(endpoint, t.size, t.dtype) for t in body.temps]
    length = c.in_length(r)
    out, given = buffer_at(endpoint, c.out_length(r), d), buffer_at(endpoint, length, d)
    exchange = Exchange(body.linear, [out, given, *temps], 1, endpoint)
    wrong, miscounted, steps, run = 0, 0, len(exchange.steps), endpoint.native.run
    for sequence in range(steps + 2):
        stop = (sequence + r) % (steps + 1)
        endpoint.native.run = lambda table, links, stop=stop: (  # type: ignore[method-assign, misc]
            RUN.put(table, STEP_COUNT=stop),
            run(table, links),
        )[1]
        given.copyin(np.arange(length, dtype=d.np) * (r + 1) + sequence)
        out.copyin(np.full(count, -1, d.np))
        before = endpoint.traffic.messages, endpoint.traffic.received
        exchange.run(3, sequence)
        assert exchange.native is not None and not exchange.borrowed and not endpoint._outstanding
        sent = sum(s.kind == SEND for s in exchange.steps)
        got = sum(s.nbytes for s in exchange.steps if s.kind in (RECEIVE, RECEIVE_INTO))
        miscounted += (endpoint.traffic.messages - before[0], endpoint.traffic.received - before[1]) != (sent, got)
        ends = [np.arange(length, dtype=d.np) * (k + 1) + sequence for k in range(n)]
        wrong += int((out.copyout() != (sum(ends) if kind == "all_reduce" else np.concatenate(ends))).sum())
    endpoint.native.run = run  # type: ignore[method-assign]
    return [wrong, miscounted, steps]


def late_writer(endpoint: Endpoint, count: int, timeout_s: float) -> int:
    """Rank 1 comes when rank 0 has given up, and writes to what it was lent; how many elements of what rank 0 has made
    in the meantime are not its own any more."""
    n, r, d = endpoint.size, endpoint.rank, to_dtype("int32")
    body = lower(build("put", Collective("all_reduce", n, count), [r]), d, range(n), {r: "CPU:0"})
    out, given = buffer_at(endpoint, count, d), buffer_at(endpoint, count, d)
    given.copyin(np.ones(count, d.np))
    exchange = Exchange(body.linear, [out, given], 1, endpoint)
    if r:
        time.sleep(2 * timeout_s)
    with suppress(CollectiveTimeout), Context(COLLECTIVE_TIMEOUT_S=timeout_s):
        exchange.run(1, 0)
        raise AssertionError(f"rank {r} has not missed the other one")
    if r:
        return 0
    free(endpoint, [out, given])
    made = [buffer_at(endpoint, count, d) for _ in range(2)]
    for b in made:
        b.copyin(np.full(count, 7, d.np))
    endpoint.settle(endpoint.outstanding(next(iter(exchange.tickets.values()))))  # the other one has come
    time.sleep(timeout_s)
    return sum(int((b.copyout() != 7).sum()) for b in made)


def begun_ahead(endpoint: Endpoint, counts: list[int], rounds: int, algorithm: str = "direct", group: int = 1) -> int:
    """Sums of these lengths, again and again, each of which this rank begins before or after some before it are
    finished, goes on with while it waits for those, and settles before or after the one after it is, as it likes; how
    many elements came wrong."""
    rng, n, wrong = np.random.default_rng(endpoint.rank), endpoint.size, 0
    made = []
    for count in counts:
        program = build(algorithm, Collective("all_reduce", n, count, group=group), [endpoint.rank])
        body = lower(program, to_dtype("int32"), range(n), {endpoint.rank: "CPU:0"}, endpoint.piece_nbytes)
        temps = [buffer_at(endpoint, t.size, t.dtype) for t in body.temps]
        out, given = (buffer_at(endpoint, count, to_dtype("int32")) for _ in range(2))
        made.append((Exchange(body.linear, [out, given, *temps], 1, endpoint), out, given))
    apart = set(endpoint.routes.values()) == {"zmq"}
    assert not apart or any(exchange.ahead for exchange, _, _ in made)
    went_on = 0
    for sequence in range(rounds):
        began = settled = 0
        for i, (exchange, out, _) in enumerate(made):
            following = max(began, min(len(made), i + 1 + int(rng.integers(4))))
            for j in range(began, following):
                made[j][2].copyin(np.full(counts[j], sequence + j + endpoint.rank, np.int32))
                made[j][0].begin(j, sequence)
            began = following
            ahead = [e for e, _, _ in made[i + 1 : began]] * int(rng.integers(2))
            endpoint.meanwhile = lambda ahead=ahead: [e.advance() for e in ahead]  # type: ignore[misc]
            exchange.finish()
            went_on += sum(e.done > e.ahead for e in ahead)
            wrong += int((out.copyout() != n * (sequence + i) + n * (n - 1) // 2).sum())
            for j in range(settled, i + int(rng.integers(2))):
                made[j][0].settle()
                settled = j + 1
        endpoint.meanwhile = lambda: None
        for exchange, _, _ in made[settled:]:
            exchange.settle()
    assert not endpoint._outstanding and (went_on or not apart)
    return wrong


def settled_at_once(endpoint: Endpoint, count: int, nbytes: int, folder: str) -> int:
    """Worker 0 writes over each message that it has settled, and then does nothing for the endpoint until worker 1 has
    all of them. How many came wrong."""
    got_all = Path(folder) / "got_all"
    at = endpoint.arena.alloc(nbytes)
    memory = np.ctypeslib.as_array(ctypes.cast(endpoint.arena.addr(at), ctypes.POINTER(ctypes.c_uint8)), (nbytes,))
    wrong = 0
    for n in range(count):
        key = MessageKey(7, 0, n)
        if endpoint.rank == 0:
            memory[:] = n % 251
            endpoint.settle(endpoint.send(1, key, endpoint.arena.addr(at), nbytes))
        else:
            with endpoint.receive(0, key, nbytes) as got:
                wrong += ctypes.string_at(got.addr, nbytes) != bytes([n % 251]) * nbytes
    got_all.touch() if endpoint.rank else wait_for(got_all)
    endpoint.arena.free(at)
    return wrong


def wait_for(path: Path) -> None:
    end = time.monotonic() + 60
    while not path.exists():
        assert time.monotonic() < end, f"{path} does not come"
        time.sleep(0.01)


def routes(endpoint: Endpoint) -> dict[int, str]:
    return endpoint.routes


def ping(endpoint: Endpoint, count: int, nbytes: int) -> int:
    """Messages from memory outside the arena, both ways, `count` in flight at once; how many came right."""
    peer, right = 1 - endpoint.rank, 0
    data = [values("uint8", nbytes, endpoint.rank, seed=i) for i in range(count)]
    for i, d in enumerate(data):
        endpoint.send(peer, MessageKey(7, i, 0), d.ctypes.data, nbytes)
    for i in range(count):
        with endpoint.receive(peer, MessageKey(7, i, 0), nbytes) as b:
            right += ctypes.string_at(b.addr, nbytes) == values("uint8", nbytes, peer, seed=i).tobytes()
    endpoint.flush()
    return right


def wait_for_ever(endpoint: Endpoint, silent: int) -> None:
    """Rank `silent` sleeps; the others wait for it."""
    if endpoint.rank == silent:
        time.sleep(60)
    endpoint.receive(silent, MessageKey(1, 2, 3), 64)


def wait_in_vain(endpoint: Endpoint, silent: int) -> None:
    """Rank `silent` waits too, for longer: until the other has given up, and is gone."""
    with Context(COLLECTIVE_TIMEOUT_S=600.0 if endpoint.rank == silent else COLLECTIVE_TIMEOUT_S.value):
        endpoint.receive(1 - endpoint.rank, MessageKey(1, 2, 3), 64)


def wait_for_each_other(endpoint: Endpoint) -> None:
    endpoint.receive(1 - endpoint.rank, MessageKey(1, 2, 3), 64)


def aborted(endpoint: Endpoint) -> bool:
    """Rank 0 waits for 1 and is aborted by a thread of its own; whether that ended the wait."""
    if endpoint.rank == 1:
        return True
    thread = threading.Timer(0.3, endpoint.abort, ["a test"])
    thread.start()
    try:
        endpoint.receive(1, MessageKey(0, 0, 0), 8)
    except CollectiveAborted as e:
        return "a test" in str(e)
    finally:
        thread.join()
    return False


def diverge(endpoint: Endpoint, plan: int, count: int, dtype: str) -> None:
    """An all_reduce whose plan, length or type differs between ranks."""
    endpoint.describe = lambda p: f"train.py:{p}"
    c = Collective("all_reduce", endpoint.size, count)
    d = to_dtype(dtype)
    body = lower(build("direct", c, [endpoint.rank]), d, range(c.ranks), {endpoint.rank: "CPU:0"})
    ends = [buffer_at(endpoint, count, d).copyin(np.zeros(count, d.np)) for _ in range(2)]
    Exchange(body.linear, ends, 1, endpoint).run(plan, 0)


def stale(endpoint: Endpoint) -> int:
    """Rank 0 sends a message of an older epoch first; rank 1 must not see it. How many it dropped."""
    data = np.arange(8, dtype=np.uint8)
    if endpoint.rank == 0:
        endpoint.epoch -= 1
        old = np.full(8, 9, np.uint8)
        link = endpoint._links[1]
        number = link.session.out_number if link.route == "zmq" else 0
        endpoint.send(1, MessageKey(0, 0, 0), old.ctypes.data, 8)
        endpoint.epoch += 1
        if link.route == "zmq":
            link.session.out_number = number  # a dropped message has no number in this epoch
            link.session.kept.clear()
        endpoint._outstanding.clear()
        endpoint.send(1, MessageKey(0, 0, 0), data.ctypes.data, 8)
        endpoint.flush()
        return 0
    with endpoint.receive(0, MessageKey(0, 0, 0), 8) as b:
        assert ctypes.string_at(b.addr, 8) == data.tobytes()
    return endpoint.dropped_stale + endpoint._hub.dropped


def leftovers(endpoint: Endpoint) -> dict[str, int]:
    """What had a name in /dev/shm in use, and what is still there after close: descriptors, own threads,
    arena mappings."""
    ping(endpoint, 3, 100_000)
    with open("/proc/self/maps") as maps:
        named = sum("/dev/shm/" in line for line in maps)
    endpoint.close()
    endpoint.close()
    links = [
        os.readlink(f"/proc/self/fd/{n}") for n in os.listdir("/proc/self/fd") if os.path.exists(f"/proc/self/fd/{n}")
    ]
    with open("/proc/self/maps") as maps:
        mapped = sum("manygrad-arena" in line for line in maps)
    return {
        "named": named,
        "arenas": sum("manygrad" in link for link in links),
        "pidfds": sum("pidfd" in link for link in links),
        "mapped": mapped,
        "threads": sum(not t.name.startswith("MainThread") and not t.daemon for t in threading.enumerate()),
    }


def talk_for(endpoint: Endpoint, seconds: float, nbytes: int) -> tuple[int, int]:
    """Exchanges messages for so long; how many came right, and how many were asked for."""
    peer, right, asked, until = 1 - endpoint.rank, 0, 0, time.monotonic() + seconds
    go_on = np.ones(1, np.uint8)
    while go_on[0]:
        go_on[0] = time.monotonic() < until
        data = values("uint8", nbytes, endpoint.rank, seed=asked)
        for chunk, d in enumerate((data, go_on)):
            endpoint.send(peer, MessageKey(8, asked, chunk), d.ctypes.data, d.nbytes)
        with endpoint.receive(peer, MessageKey(8, asked, 0), nbytes) as b:
            right += ctypes.string_at(b.addr, nbytes) == values("uint8", nbytes, peer, seed=asked).tobytes()
        with endpoint.receive(peer, MessageKey(8, asked, 1), 1) as b:
            go_on[0] &= ctypes.string_at(b.addr, 1)[0]
        endpoint.flush()
        asked += 1
    return right, asked
