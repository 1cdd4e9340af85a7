"""Endpoints in real processes: right bytes over both transports, and every way to fail is quick and named."""

from __future__ import annotations

import hashlib
import os
import signal
import socket
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from manygrad.collectives.algorithms import ALGORITHMS
from manygrad.collectives.program import Collective
from manygrad.collectives.transport import Endpoint, MessageKey
from manygrad.collectives.transport.measure import piece_nbytes
from manygrad.errors import CollectiveTimeout, NoRank, PeerLost, PlanMismatch
from manygrad.tensor.dtype import dtypes, to_dtype
from manygrad.tensor.environment import Context
from tests.hosts import Hosts, hosts

from collective_tasks import collective, values  # isort: skip
from collective_workers import Worker, run_workers  # isort: skip
from tests.collectives.oracle import reduce_arrays, view

TRANSPORTS = ["shm", "zmq"]
ALL = os.environ.get("MANYGRAD_TESTS") == "all"  # every rank count, and 10 million elements: some minutes
TREE = ["naive", "direct", "put", "halving_doubling"]


def results(found: list[tuple[str, Any]]) -> list[Any]:
    for kind, value in found:
        assert kind == "result", (kind, value, getattr(value, "__notes__", ""))
    return [value for _, value in found]


def errors(found: list[tuple[str, Any]], kind: type, ranks: list[int]) -> list[Any]:
    for r in ranks:
        assert found[r][0] == "error" and isinstance(found[r][1], kind), (
            r,
            found[r],
            getattr(found[r][1], "__notes__", ""),
        )
    return [found[r][1] for r in ranks]


def oracle(c: Collective, dtype: str) -> bytes:
    return reduce_arrays([values(dtype, c.count, r) for r in range(c.ranks)], c.op, to_dtype(dtype)).tobytes()


def all_reduce_cases(ranks: int) -> list[tuple[str, Collective, str]]:
    every = [d.name for d in dtypes.all] if ranks <= 3 or ALL else ["float16", "int8"]
    cases = [("direct", Collective("all_reduce", ranks, n), d) for d in every for n in (1, 997)]
    for name in TREE:
        if ALGORITHMS[name].can("all_reduce", ranks):
            sizes = [(n, d) for n in (3, 1009, 65_537) for d in ("float32", "bfloat16")]
            cases += [(name, Collective("all_reduce", ranks, n), d) for n, d in sizes]
    sizes = [1_000_003, 10_000_019] if ALL else [1_000_003]
    return cases + [("direct", Collective("all_reduce", ranks, n), "float32") for n in sizes]


@pytest.mark.parametrize("ranks", range(1, 9) if ALL else [1, 2, 3, 8])
def test_all_reduce_has_the_same_bits_everywhere(ranks: int) -> None:
    cases = all_reduce_cases(ranks)
    want = [oracle(c, dtype) for _, c, dtype in cases]
    want_short = [w if len(w) < 4096 else hashlib.blake2b(w).hexdigest() for w in want]
    for transport in TRANSPORTS if ranks > 1 else TRANSPORTS[:1]:
        # (between hosts nobody writes another's memory)
        able = [n for n, case in enumerate(cases) if transport == "shm" or not ALGORITHMS[case[0]].writes]
        given = ([cases[n] for n in able],)
        for got in results(run_workers(ranks, "collective", given, env={"TRANSPORT": transport})):
            for n, g in zip(able, got, strict=True):
                assert g == want_short[n], (transport, cases[n])


@pytest.mark.parametrize("transport, piece_nbytes", [("shm", 0), ("shm", 100), ("zmq", None), ("zmq", 100)])
def test_every_kind_between_workers_equals_one_process(transport: str, piece_nbytes: int | None) -> None:
    cases = []
    for ranks in (6,):
        for a in ALGORITHMS.values():
            for kind in a.kinds:
                if a.can(kind, ranks, 2) and not (a.writes and transport == "zmq"):
                    cases.append((a.name, Collective(kind, ranks, 1001, root=4, target=1, group=2), "float32"))
        sizes = (3, 0, 5, 1, 2, 8)
        for kind in ("all_gather", "reduce_scatter", "all_to_all"):
            rows = (1, 2, 0, 3, 1, 1) if kind == "all_to_all" else None
            cases.append(("direct", Collective(kind, ranks, 19, sizes=sizes, rows=rows), "float16"))
    alone = Endpoint(0, 1, "alone", 0, arena_bytes=1 << 26)
    want = collective(alone, cases, ranks_per_worker=6)
    alone.close()
    # two ranks a worker, run twice
    got = results(run_workers(3, "collective", (cases, 2, 2, piece_nbytes), env={"TRANSPORT": transport}))
    for n, case in enumerate(cases):
        assert [v for worker in got for v in worker[2 * n : 2 * n + 2]] == want[6 * n : 6 * n + 6], case


SMALL: list[tuple[str, Collective, str]] = [
    *((name, Collective("all_reduce", 4, n), d) for name in TREE for n, d in ((1, "int8"), (77, "bfloat16"))),
    ("direct", Collective("all_to_all", 4, 9), "float32"),
    ("ring", Collective("all_gather", 4, 1000), "float64"),
    ("ring", Collective("all_reduce", 4, 1000), "float32"),
    ("halving_doubling", Collective("broadcast", 4, 3, root=2), "bool"),
    ("direct", Collective("send", 4, 5, root=3, target=1), "uint16"),
]


@pytest.mark.parametrize("runs, late_s", [(300, 0.0), (3, 0.12)], ids=["often", "late"])
def test_small_messages_of_one_host_are_sent_by_native_calls(runs: int, late_s: float) -> None:
    """More runs than a ring holds messages; and with ranks that others wait for longer than a native call does."""
    alone = Endpoint(0, 1, "alone", 0, arena_bytes=1 << 26)
    want = collective(alone, SMALL, ranks_per_worker=4)
    alone.close()
    got = results(run_workers(4, "collective", (SMALL, 1, runs, None, late_s, True)))
    for n, case in enumerate(SMALL):
        assert [worker[n] for worker in got] == want[4 * n : 4 * n + 4], case


@pytest.mark.parametrize(
    "algorithm, kind",
    [
        (a, k)
        for a in ("naive", "direct", "put", "ring")
        for k in ("all_reduce", "all_gather")
        if ALGORITHMS[a].can(k, 3)
    ],
)
def test_python_goes_on_after_any_step_of_native_code(algorithm: str, kind: str) -> None:
    found = results(run_workers(3, "stopped_after_each_step", (algorithm, kind, 999), env={"TRANSPORT": "shm"}))
    assert all(wrong == miscounted == 0 and steps >= 3 for wrong, miscounted, steps in found), found


def test_short_messages_are_free_and_on_their_way_when_they_are_settled(tmp_path: Path) -> None:
    """Whatever the sender does then, and however many there are: more than may be copied at a time."""
    wrong = results(run_workers(2, "settled_at_once", (500, 64 << 10, str(tmp_path)), env={"TRANSPORT": "zmq"}))
    assert wrong == [0, 0]


@pytest.mark.parametrize("count", [997, 1_000_003])
def test_sums_are_written_to_memory_that_others_do_not_see(count: int) -> None:
    assert results(run_workers(3, "written_outside", (count, 5), env={"TRANSPORT": "shm"})) == [0, 0, 0]


@pytest.mark.parametrize("count", [997, 1_000_003])
def test_who_comes_too_late_writes_to_nothing_else(count: int) -> None:
    assert results(run_workers(2, "late_writer", (count, 0.5), env={"TRANSPORT": "shm"})) == [0, 0]


def test_messages_of_long_transfers_take_as_long_on_any_link() -> None:
    assert [piece_nbytes(r) for r in (1e5, 25e6, 125e6, 1e9, 1e10)] == [n << 10 for n in (64, 64, 256, 2048, 2048)]


@pytest.mark.parametrize("ranks", [2, 3])
def test_an_exchange_begins_before_the_one_before_it_is_finished(ranks: int) -> None:
    """Whoever does so, and of messages of one frame or of several."""
    counts = [5, 900, 3_000_000, 1, 700_000, 64, 2_000_000]
    found = results(run_workers(ranks, "begun_ahead", (counts, 20), env={"TRANSPORT": "zmq"}))
    assert found == [0] * ranks


@pytest.mark.parametrize("algorithm, group", [("direct", 1), ("hierarchical", 2), ("halving_doubling", 1)])
def test_an_exchange_goes_on_between_hosts_and_waits_its_turn_on_its_own(algorithm: str, group: int) -> None:
    """Two hosts of two workers each."""
    counts = [64, 900, 3_000_000, 4, 700_000, 2_000_000]
    found = results(run_workers(4, "begun_ahead", (counts, 8, algorithm, group), env={"WORKERS_A_HOST": "2"}))
    assert found == [0] * 4


@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.parametrize("count, nbytes", [(5, 0), (300, 70_000), (1, 70_000_001)])
def test_many_and_large_messages_in_flight(transport: str, count: int, nbytes: int) -> None:
    """More than a ring holds, several frames each, and one message larger than the flow-control window."""
    assert results(run_workers(2, "ping", (count, nbytes), env={"TRANSPORT": transport})) == [count, count]


def test_shared_memory_is_found_and_a_forced_difference_still_agrees() -> None:
    assert results(run_workers(3, "routes")) == [{1: "shm", 2: "shm"}, {0: "shm", 2: "shm"}, {0: "shm", 1: "shm"}]


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_a_killed_peer_is_noticed(transport: str) -> None:
    """By the end of its process: neither deadline passes within this test."""

    def kill(workers: list[Worker]) -> None:
        os.kill(workers[1].pid, signal.SIGKILL)

    env = {"TRANSPORT": transport, "RECONNECT_TIMEOUT_S": "600", "COLLECTIVE_TIMEOUT_S": "600"}
    found = run_workers(3, "wait_for_ever", (1,), env=env, after_start=kill)
    for e in errors(found, PeerLost, [0, 2]):
        # (killed before or after rank 0 or 2 had connected)
        assert e.peer == 1 and ("64 bytes" in str(e) or "first hello" in str(e))
    assert found[1] == ("gone", -signal.SIGKILL)


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_a_silent_peer_is_a_timeout(transport: str) -> None:
    found = run_workers(2, "wait_in_vain", (1,), env={"TRANSPORT": transport, "COLLECTIVE_TIMEOUT_S": "0.7"})
    (e,) = errors(found, CollectiveTimeout, [0])
    assert (e.rank, e.peer, e.plan, e.sequence, e.timeout_s) == (0, 1, 1, 2, 0.7) and "COLLECTIVE_TIMEOUT_S" in str(e)
    errors(found, PeerLost, [1])


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_abort_ends_a_wait(transport: str) -> None:
    assert results(run_workers(2, "aborted", env={"TRANSPORT": transport, "COLLECTIVE_TIMEOUT_S": "600"})) == [
        True,
        True,
    ]


@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.parametrize(
    "args",
    [
        [(1, 64, "float32"), (2, 64, "float32")],
        [(1, 64, "float32"), (1, 66, "float32")],
        [(1, 64, "float32"), (1, 64, "int32")],
    ],
)
def test_divergent_plans_are_named(transport: str, args: list[tuple[Any, ...]]) -> None:
    found = run_workers(2, "diverge", lambda r: args[r], env={"TRANSPORT": transport})
    for r, e in enumerate(errors(found, PlanMismatch, [0, 1])):
        _, mine, theirs, advice = str(e).split("\n")
        assert e.rank == r and f"train.py:{args[r][0]}" in mine and f"train.py:{args[1 - r][0]}" in theirs, e
        assert "look for a branch" in advice


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_messages_of_another_epoch_are_dropped(transport: str) -> None:
    assert results(run_workers(2, "stale", env={"TRANSPORT": transport})) == [0, 1]


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_nothing_is_left(transport: str) -> None:
    for found in results(run_workers(2, "leftovers", env={"TRANSPORT": transport})):
        # (its own arena is there for what lies in it, as long as something refers to it)
        assert found == {"named": 0, "arenas": 1, "pidfds": 0, "mapped": 1, "threads": 0}


def test_misuse_is_named() -> None:
    for host, problem in (("0.0.0.0", "every interface"), ("localhost", "IP address")):
        with pytest.raises(ValueError, match=problem):
            Endpoint(0, 1, "t", 0, bind_host=host, arena_bytes=1 << 20)
    with pytest.raises(ValueError, match="outside"):
        Endpoint(2, 2, "t", 0)
    with Endpoint(0, 2, "t", 0, arena_bytes=1 << 20) as e, pytest.raises(ValueError, match="no connected peer"):
        e.send(1, MessageKey(0, 0, 0), 0, 8)
    with pytest.raises(NoRank, match="this process does not communicate as rank 0: this endpoint is closed"):
        e.send(1, MessageKey(0, 0, 0), 0, 8)
    assert e.native.closed
    e.abort("after the end")


def test_a_peer_that_never_comes_is_named() -> None:
    a, b = (Endpoint(r, 2, "t", 0, arena_bytes=1 << 20) for r in range(2))
    with Context(TRANSPORT="zmq"), pytest.raises(CollectiveTimeout, match=r"missing: ranks \[1\]"):
        a.connect([a.card(), b.card()], 0.3)
    a.close()
    b.close()


def test_a_peer_without_access_falls_back_to_zmq_on_both_sides() -> None:
    a, b = (Endpoint(r, 2, "t", 0, arena_bytes=1 << 20) for r in range(2))
    spoiled = {**a.card(), "token": "00" * 16}  # b cannot map a; a can map b
    other = threading.Thread(target=b.connect, args=([spoiled, b.card()], 10))
    other.start()
    a.connect([a.card(), b.card()], 10)
    other.join()
    assert a.routes == {1: "zmq"} and b.routes == {0: "zmq"}
    data = np.arange(10.0)
    a.send(1, MessageKey(0, 0, 0), data.ctypes.data, 80, "float64")
    with b.receive(0, MessageKey(0, 0, 0), 80, "float64") as got:
        assert (view(got.addr, 10, "float64") == data).all()
    a.close()
    b.close()


@pytest.fixture
def two_hosts() -> Iterator[Hosts]:
    with hosts(2) as h:
        yield h


def on(h: Hosts) -> dict[str, Any]:
    """Arguments of `run_workers`: rank r on host r."""
    return {"options": lambda r: {"bind_host": h.addresses[r]}, "prefixes": h.prefixes}


@pytest.mark.parametrize("plain", [0, 1])
def test_zeromq_between_two_hosts(two_hosts: Hosts, plain: int) -> None:
    """Sealed, and with plain links; of one frame and of several."""
    cases = [("direct", Collective("all_reduce", 2, n), "float32") for n in (1, 1009, 1_000_003, 3_000_001)]
    env = {"TRANSPORT": "zmq", "MANYGRAD_PLAIN_LINKS": str(plain)}
    found = run_workers(2, "collective", (cases,), env, **on(two_hosts))
    got = results(found)
    assert got[0] == got[1] and got[0][0] == oracle(cases[0][1], "float32")


def test_a_broken_network_is_noticed(two_hosts: Hosts) -> None:
    """The link goes down without a word: the heartbeat finds it, long before the deadline of the wait."""

    def cut(workers: list[Worker]) -> None:
        two_hosts.down(1)

    env = {"TRANSPORT": "zmq", "RECONNECT_TIMEOUT_S": "2", "COLLECTIVE_TIMEOUT_S": "600"}
    found = run_workers(2, "wait_for_each_other", (), env, after_start=cut, **on(two_hosts))
    for e in errors(found, PeerLost, [0, 1]):
        assert "has not answered for 2 s" in str(e) or "first hello" in str(e), e


def test_a_key_of_another_run_is_refused() -> None:
    """The server's allow-list does not hold the client's key."""
    host = _own_address()
    if host is None:
        pytest.skip("this machine has no address besides loopback")
    a, b = (Endpoint(r, 2, "t", 0, bind_host=host, arena_bytes=1 << 20) for r in range(2))
    stranger = Endpoint(1, 2, "t", 0, bind_host=host, arena_bytes=1 << 20)

    def serve() -> None:
        with pytest.raises((CollectiveTimeout, PeerLost)):
            a.connect([a.card(), b.card()], 1.5)

    thread = threading.Thread(target=serve)
    with Context(TRANSPORT="zmq"):
        thread.start()
        with pytest.raises((PeerLost, CollectiveTimeout), match=r"CURVE key|missing"):
            stranger.connect([a.card(), stranger.card()], 1)
        thread.join()
    assert not a._hub.links[1].hello_in
    for e in (a, b, stranger):
        e.close()


def _own_address() -> str | None:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as s:
        try:
            s.connect(("192.0.2.1", 9))
            return str(s.getsockname()[0])
        except OSError:
            return None
