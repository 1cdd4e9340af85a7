"""Every algorithm is proved for 1-17 ranks and uneven sizes; wrong programs are refused; projections are the filter."""

from __future__ import annotations

import time
from collections.abc import Callable

import pytest

from manygrad.collectives.algorithms import ALGORITHMS, build
from manygrad.collectives.check_calls import check_calls
from manygrad.collectives.checker import canonical, check
from manygrad.collectives.cost import choose, cost_s, message_nbytes
from manygrad.collectives.cut import cut
from manygrad.collectives.lower import lower
from manygrad.collectives.program import (
    Chunk,
    Collective,
    Copy,
    Instr,
    Program,
    Reduce,
    Release,
    Slot,
    Temp,
    Transfer,
    split,
)
from manygrad.errors import ProgramError
from manygrad.multi.world import Link
from manygrad.tensor.dtype import dtypes
from manygrad.tensor.environment import Context
from manygrad.tensor.uop import Ops

CASES = [(a.name, kind) for a in ALGORITHMS.values() for kind in a.kinds]


def participants(instr: Instr) -> tuple[int, ...]:
    return (instr.src_rank, instr.dst_rank) if isinstance(instr, Transfer) else (instr.rank,)


def variants(kind: str, ranks: int, group: int = 1) -> list[Collective]:
    counts = {0, 1, ranks - 1, ranks, 2 * ranks + 1, 23}
    found = [Collective(kind, ranks, n, root=ranks // 2, target=ranks // 3, group=group) for n in counts]
    if kind in ("all_gather", "reduce_scatter", "all_to_all"):
        sizes = tuple(i * 7 % 4 for i in range(ranks))
        rows = tuple(i * 5 % 3 for i in range(ranks)) if kind == "all_to_all" else None
        found.append(Collective(kind, ranks, sum(sizes), sizes=sizes, rows=rows))
    return found


def prove_calls(algorithm: str, c: Collective) -> None:
    """Of one rank a worker, and of the group in one; where the host sees the memory and where it does not."""
    seen: dict[bool, Callable[[str], bool]] = {True: lambda d: True, False: lambda d: d == "CPU"}
    for per_worker, piece, on_host in ((1, 0, True), (c.group, 6, False)):
        workers = [r // per_worker for r in range(c.ranks)]
        bodies = {}
        for w in range(workers[-1] + 1):
            own = tuple(r for r in range(c.ranks) if workers[r] == w)
            names = {r: f"GPU:{r}" for r in own}
            program = build(algorithm, c, own)
            sees = seen[on_host or ALGORITHMS[algorithm].writes]
            bodies[w] = lower(program, dtypes.float16, workers, names, piece, sees), own
        check_calls(c, bodies, algorithm)


@pytest.mark.parametrize("algorithm, kind", CASES)
def test_every_algorithm_is_proved(algorithm: str, kind: str) -> None:
    for ranks, group in [(r, g) for r in range(1, 18) for g in (1, 2, 4)]:
        group = group if ranks % group == 0 else 1
        if not ALGORITHMS[algorithm].can(kind, ranks, group) or (group > 1 and ALGORITHMS[algorithm].can(kind, ranks)):
            continue
        for c in variants(kind, ranks, group):
            whole = build(algorithm, c)
            check(whole)
            for length in (1, 3):
                check(cut(whole, length))
            if ranks <= 6 or (ranks in (8, 17) and c.count == 23):
                prove_calls(algorithm, c)
            for only in ({0}, {ranks - 1, ranks // 2}):
                part = build(algorithm, c, only)
                assert part.instrs == [i for i in whole.instrs if only & set(participants(i))]
                assert cut(part, 3).instrs == [i for i in cut(whole, 3).instrs if only & set(participants(i))]
                assert part.temps == [t for t in whole.temps if t.rank in only]


@pytest.mark.parametrize("algorithm", ["naive", "direct", "put", "halving_doubling", "ring"])
def test_without_any_one_call_the_proof_fails(algorithm: str) -> None:
    c = Collective("all_reduce", 4, 9)
    names = {r: f"CPU:{r}" for r in range(4)}
    bodies = {r: (lower(build(algorithm, c, (r,)), dtypes.bfloat16, range(4), {r: names[r]}), (r,)) for r in range(4)}
    check_calls(c, bodies, algorithm)
    body, own = bodies[2]
    for n, call in enumerate(body.linear.src):
        less = body.linear.replace(src=body.linear.src[:n] + body.linear.src[n + 1 :])
        with pytest.raises(ProgramError):
            check_calls(c, {**bodies, 2: (body._replace(linear=less), own)}, algorithm)
            pytest.fail(f"without call {n}, {call.src[0]!r}, all is well")


def test_what_is_lent_is_not_written() -> None:
    c = Collective("all_reduce", 2, 4)
    bodies = {r: (lower(build("direct", c, (r,)), dtypes.float32, (0, 1), {r: "CPU"}), (r,)) for r in range(2)}
    linear = bodies[0][0].linear
    sent = [call.src[1] for call in linear.src if call.src[0].op is Ops.SEND]
    again = next(call for call in linear.src if call.src[0].op is Ops.SINK)
    assert again.src[1] in sent
    at = next(i for i, call in enumerate(linear.src) if call.src[0].op is Ops.SEND and call.src[1] is again.src[1])
    twice = linear.replace(src=(*linear.src[: at + 1], again, *linear.src[at + 1 :]))
    with pytest.raises(ProgramError, match="of which a part is lent"):
        check_calls(c, {**bodies, 0: (bodies[0][0]._replace(linear=twice), (0,))}, "direct")


def test_work_of_one_rank_does_not_grow_beyond_the_steps() -> None:
    c = Collective("all_reduce", 1024, 10_000)
    start = time.perf_counter()
    part = build(choose("all_reduce", 40_000, 1024), c, {5})
    assert time.perf_counter() - start < 0.1
    assert sum(isinstance(i, Transfer) for i in part.instrs) == 2 * 2 * 10  # 2 lg p steps, each one way and the other


def test_a_message_is_two_from_two_mebibytes_on() -> None:
    link = Link("zmq", 1e9, 1e-4, piece_nbytes=2 << 20)
    found = [message_nbytes(n << 20, 2, link) for n in (1, 4, 6, 8, 256)]
    assert found == [n << 19 for n in (2, 2, 3, 4, 4)]
    assert message_nbytes(16 << 20, 4, link) == 2 << 20
    assert message_nbytes(5_000_001, 2, link) % 4096 == 0
    assert message_nbytes(8 << 20, 2, link._replace(piece_nbytes=64 << 10)) == 64 << 10  # a slow link
    assert message_nbytes(540_672, 4, link._replace(piece_nbytes=1 << 17)) == 540_672 // 4  # not 128 KiB, and 4 KiB
    assert message_nbytes(600_000, 2, link._replace(piece_nbytes=1 << 17)) == 102_400  # three alike
    assert message_nbytes(8 << 20, 2, Link("shm")) == message_nbytes(8 << 20, 2, None) == 0


def test_split_and_canonical_tree() -> None:
    assert split(10, 4) == (3, 3, 2, 2) and split(2, 4) == (1, 1, 0, 0) and split(0, 3) == (0, 0, 0)
    assert canonical("add", [(x,) for x in "abcdef"]) == (
        "add", ("add", ("add", ("a",), ("b",)), ("add", ("c",), ("d",))), ("add", ("e",), ("f",)),
    )  # fmt: skip


def test_structure_of_the_two_shot_all_reduce() -> None:
    assert build("direct", Collective("all_reduce", 2, 3)).show().splitlines() == [
        "0 -> 1: in[2:3] as s0",
        "1 -> 0: in[0:2] as s1",
        "0: out[0:2] = add(in[0:2], s1)",
        "0: release s1",
        "1: out[2:3] = add(s0, in[2:3])",
        "1: release s0",
        "0 -> 1: out[0:2] as g0",
        "1: out[0:2] = g0",
        "1: release g0",
        "1 -> 0: out[2:3] as g1",
        "0: out[2:3] = g1",
        "0: release g1",
    ]


C2 = Collective("all_reduce", 2, 2)
IN, OUT = Chunk("in", 0, 2), Chunk("out", 0, 2)
SWAP = [Transfer(0, 1, IN, "a"), Transfer(1, 0, IN, "a")]
SUMS = [Reduce(0, OUT, (IN, Slot("a"))), Reduce(1, OUT, (Slot("a"), IN))]
DONE = [Release(0, "a"), Release(1, "a")]


def test_the_good_program_passes() -> None:
    check(Program(C2, "naive", frozenset({0, 1}), [*SWAP, *SUMS, *DONE]))


@pytest.mark.parametrize(
    "instrs, problem",
    [
        ([*SWAP, *SUMS], "never released"),
        ([*SWAP, SUMS[0], *DONE], r"out\[0\] of rank 1 is never written"),
        ([*SWAP, *DONE, *SUMS], "does not hold"),
        ([*SWAP, *SWAP], "already holds"),
        ([*SWAP, Reduce(0, OUT, (Slot("a"), IN)), SUMS[1], *DONE], r"out\[0\] of rank 0 is .* expected"),
        ([*SWAP, Reduce(0, OUT, (IN, IN)), SUMS[1], *DONE], r"out\[0\] of rank 0 is .* expected"),
        ([*SWAP, Reduce(0, OUT, (IN, Slot("a"), IN)), SUMS[1], *DONE], r"out\[0\] of rank 0 is .* expected"),
        ([*SWAP, SUMS[0], Reduce(0, OUT, (OUT, IN)), SUMS[1], *DONE], "already rounded"),
        ([*SWAP, Reduce(0, OUT, (IN, Slot("a")), "max"), SUMS[1], *DONE], r"out\[0\] of rank 0"),
        ([Transfer(0, 1, OUT, "a")], "read before it is written"),
        ([Copy(0, OUT, IN), Transfer(0, 1, OUT, "a"), Copy(0, OUT, IN)], "while it is borrowed"),
        ([Copy(0, IN, IN)], "writes its input"),
        ([Copy(0, OUT, Chunk("in", 1, 2))], "outside"),
        ([Copy(0, Chunk("out", 0, 1), IN)], "2 elements are written to 1"),
        ([Copy(0, Chunk("t9", 0, 2), IN)], "no buffer"),
        ([Transfer(0, 0, IN, "a")], "from itself"),
        ([Release(1, "zz")], "does not hold"),
        ([Reduce(0, OUT, (IN, Chunk("in", 0, 1)))], "different lengths"),
    ],
)
def test_bad_programs_are_refused(instrs: list[object], problem: str) -> None:
    with pytest.raises(ProgramError, match=problem):
        check(Program(C2, "naive", frozenset({0, 1}), instrs))  # type: ignore[arg-type]


def test_a_temporary_that_rounds_is_refused() -> None:
    c = Collective("all_reduce", 1, 1)
    one = Chunk("in", 0, 1)
    program = Program(
        c,
        "naive",
        frozenset({0}),
        [Reduce(0, Chunk("t0", 0, 1), (one, one)), Reduce(0, Chunk("out", 0, 1), (Chunk("t0", 0, 1), one))],
    )
    program.temps = [Temp(0, "t0", 1, partial=False)]
    with pytest.raises(ProgramError, match="already rounded"):
        check(program)


def test_a_rotated_order_is_no_tree() -> None:
    with pytest.raises(ProgramError, match="expected"):
        check(build("ring", Collective("all_reduce", 4, 8)), order="tree")


@pytest.mark.parametrize(
    "kwargs, problem",
    [
        ({"kind": "gather"}, "unknown collective"),
        ({"op": "xor"}, "unknown reduction"),
        ({"ranks": 0}, "ranks must be"),
        ({"sizes": (1, 2)}, "sizes needs 3"),
        ({"sizes": (1, 2, 3)}, "sum to 6"),
        ({"sizes": (6, -2, 0)}, "non-negative"),
        ({"root": 3}, "outside 0..2"),
    ],
)
def test_bad_collectives(kwargs: dict[str, object], problem: str) -> None:
    with pytest.raises(ValueError, match=problem):
        Collective(**{"kind": "all_reduce", "ranks": 3, "count": 4, **kwargs})  # type: ignore[arg-type]


def test_choice() -> None:
    assert choose("all_reduce", 256, 4) == "naive" and choose("all_reduce", 1 << 25, 4) == "direct"
    assert choose("all_reduce", 1 << 20, 1024) == "halving_doubling"
    assert choose("all_to_all", 1 << 20, 6) == "direct"
    for kind in ("all_reduce", "reduce_scatter", "all_gather", "all_to_all", "broadcast", "send"):
        for ranks in (1, 2, 3, 8, 1000, 1024):
            for nbytes in (0, 1, 1 << 16, 1 << 30):
                name = choose(kind, nbytes, ranks)
                assert ALGORITHMS[name].order == "tree" and ALGORITHMS[name].can(kind, ranks)
                assert cost_s(name, kind, nbytes, ranks) >= 0
    assert choose("all_reduce", 1 << 22, 8, group=2) == "hierarchical"
    assert choose("all_reduce", 1 << 12, 4, share_memory=True) == "naive"
    assert choose("all_reduce", 1 << 25, 4, share_memory=True) == "put"
    with Context(COLLECTIVE="put"):
        assert choose("all_reduce", 1 << 25, 4) == "direct"  # put cannot, between hosts
    with Context(COLLECTIVE="ring"):
        assert choose("all_reduce", 256, 4) == "ring"
        assert choose("broadcast", 256, 4) == "direct"  # ring cannot: the model chooses
    with Context(COLLECTIVE="rnig"), pytest.raises(ValueError, match="rnig"):
        choose("all_reduce", 256, 4)


def test_the_link_decides_how_much_is_sent_at_once() -> None:
    gigabit, hosts = Link("zmq", 1e8, 1e-4), Link("zmq", 1e8, 1e-4, group=4)
    for link, largest in ((None, 1 << 13), (gigabit, 1 << 12)):  # what every rank reads whole
        assert choose("all_reduce", largest, 4, link=link) == "naive"
    assert choose("all_reduce", 1 << 19, 4) == "direct"
    # hosts send to one other at a time, where there is an algorithm for so many that does
    for nbytes, ranks, by in ((1 << 18, 4, "halving_doubling"), (1 << 18, 3, "direct")):
        for kind in ("all_reduce", "reduce_scatter", "all_gather"):
            assert choose(kind, nbytes, ranks, link=gigabit) == by
    assert choose("all_reduce", 1 << 20, 8, group=4, link=hosts) == "hierarchical"
    for nbytes in (1 << 10, 1 << 20, 1 << 30):
        name = choose("all_reduce", nbytes, 64, link=gigabit)
        slower = cost_s(name, "all_reduce", nbytes, 64, link=Link("zmq", 1e7, 1e-4))
        assert cost_s(name, "all_reduce", nbytes, 64, link=gigabit) < slower


def test_build_names_what_can() -> None:
    with pytest.raises(ValueError, match=r"use one of \['direct', 'naive', 'put', 'ring'\]"):
        build("halving_doubling", Collective("all_reduce", 3, 4))
    with pytest.raises(ValueError, match="unknown collective algorithm"):
        build("tree", Collective("all_reduce", 3, 4))
    with pytest.raises(ValueError, match="not all within"):
        build("direct", Collective("all_reduce", 3, 4), {3})
