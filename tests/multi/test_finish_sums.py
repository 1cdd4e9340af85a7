"""What is computed of a sum over devices by the kernels that sum: the same bits as in a kernel of its own, and no such
kernel."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from manygrad import Context, Tensor
from manygrad.collectives.algorithms import ALGORITHMS, build
from manygrad.collectives.check_calls import check_calls
from manygrad.collectives.lower import lower
from manygrad.collectives.program import Collective
from manygrad.collectives.wanted import text_of
from manygrad.errors import ProgramError
from manygrad.multi.world import Link
from manygrad.nn.optim import SGD
from manygrad.tensor.dtype import dtypes, to_dtype
from manygrad.tensor.uop import GroupOp, Ops, UOp
from tests.multi.cluster import assert_same_collectives, lowered, run, workers
from tests.multi.test_cut_collectives import slow
from tests.schedule.programs import linear_of

TWO = ("CPU:0", "CPU:1")

STEPS: dict[str, Callable[[Tensor], Tensor]] = {
    "scaled": lambda t: t * 0.25,
    "third": lambda t: t / 3,
    "plus": lambda t: t + 1,
    "times, plus": lambda t: t * 3 + 2,
    "negative": lambda t: -t,
    "relu": lambda t: t.relu(),
    "square": lambda t: t * t,
    "clipped": lambda t: t.clip(-1, 2),
    "where": lambda t: (t > 0).where(t, t * 2),
    "exp": lambda t: t.float().clip(-5, 5).exp(),
    "sqrt": lambda t: t.abs().sqrt(),
    "float32": lambda t: t.cast("float32"),
    "bfloat16": lambda t: t.cast("bfloat16"),
    "float16": lambda t: t.cast("float16"),
    "int32": lambda t: t.clip(-100, 100).cast("int32"),
    "int8": lambda t: t.clip(-100, 100).cast("int8"),
    "bool": lambda t: t != 0,
}
DTYPES = ["float32", "float16", "bfloat16", "float64", "int32", "int8", "bool"]


def of(t: Tensor, steps: list[str]) -> Tensor:
    for s in steps:
        t = STEPS[s](t.cast("int8") if t.dtype is dtypes.bool else t)
    return t


def rows(devices: tuple[str, ...], shape: tuple[int, ...], dtype: str, axis: int = 0) -> Tensor:
    array = np.random.default_rng(math.prod(shape)).standard_normal(shape) * 3
    return Tensor(array.astype(np.float32)).cast(dtype).shard(devices, axis=axis)


def collectives(linear: UOp) -> list[UOp]:
    return [c.src[0] for c in linear.src if c.src[0].op in GroupOp.COLLECTIVE]


def bytes_of(t: Tensor) -> list[bytes]:
    return [p.tobytes() for rank in run([t]) for p in rank[0] if p is not None]


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.sampled_from(list(STEPS)), min_size=1, max_size=4),
    st.sampled_from(DTYPES),
    st.sampled_from([(1, 5), (1,), (3, 7), (2, 1500), (1, 9000)]),
    st.integers(2, 5),
    st.sampled_from(["", "naive", "direct", "halving_doubling"]),
    st.sampled_from([None, "zmq"]),
    st.booleans(),
)
def test_the_bits_are_those_of_a_kernel_of_its_own(
    steps: list[str], dtype: str, shape: tuple[int, ...], size: int, algorithm: str, route: str | None, is_max: bool
) -> None:
    n = shape[0] * size
    with Context(COLLECTIVE=algorithm, SPEC=1), workers(size) as world:
        if route is not None:
            world.link = slow(4 * math.prod(shape[1:]), 3)  # a long one is cut into parts
        x = rows(world.devices, (n, *shape[1:]), dtype)
        total = x.amax(0) if is_max else x.sum(0, dtype=dtype) if dtype != "bool" else x.any(0)
        fused, apart = of(total, steps), of(total.contiguous(), steps)
        linears = lowered([fused])
        assert_same_collectives(linears)
        for link in {None, world.link}:
            world.link = link
            got = bytes_of(fused)
            assert got == bytes_of(apart) and len(got) == size and set(got) == {got[0]}


@pytest.mark.parametrize("per_worker", [1, 2])
@pytest.mark.parametrize("steps", [["scaled"], ["bfloat16"], ["where", "exp"]])
def test_no_kernel_follows(steps: list[str], per_worker: int) -> None:
    with workers(2, per_worker) as world:
        linear = lowered([of(rows(world.devices, (len(world.devices), 64), "float32").sum(0), steps)])[0]
        (what,) = collectives(linear)
        assert what.op is Ops.ALLREDUCE and what.arg.finish is not None and linear.src[-1].src[0] is what
        assert text_of(what).startswith("all_reduce add of 64 float32 over")


def test_what_travels_is_the_smaller_type() -> None:
    """Half of the sums is sent as float32 before they are taken, and as what is made of them after."""
    with Context(COLLECTIVE="direct"), workers(2) as world:
        for step, dtype in (("scaled", "float32"), ("bfloat16", "bfloat16"), ("bool", "bool")):
            linear = lowered([of(rows(world.devices, (2, 1024), "float32").sum(0), [step])])[0]
            (what,) = collectives(linear)
            sent = [c.src[1].dtype.name for c in what.src[0].src if c.src[0].op is Ops.SEND]
            assert sent == ["float32", dtype]


def test_a_type_that_takes_more_bytes_is_made_by_who_reads() -> None:
    """(Half types are summed in float32 and rounded, which is then a part of the sum.)"""
    with workers(2) as world:
        x = rows(world.devices, (2, 256), "float16")
        linear = lowered([(x.sum(0) * 0.5).cast("float32") + 1])[0]
        (what,) = collectives(linear)
        assert what.dtype is dtypes.float16 and what.arg.finish is not None
        assert [c.src[0].op for c in linear.src][-1] is Ops.SINK
        linear = lowered([rows(world.devices, (2, 256), "int32").amax(0).cast("float64")])[0]
        assert [what.arg.finish for what in collectives(linear)] == [None]


def other_readers(x: Tensor) -> list[list[Tensor]]:
    s = x.sum(0)
    half, y = s * 0.5, s * 0.5 + 1
    return [[s, s * 2], [s * 2, s * 3], [half, y], [s * s.sum()], [s * Tensor.ones(64).contiguous().shard(x.device)]]


@pytest.mark.parametrize("case", range(5))
def test_a_sum_that_others_read_stays_one_sum(case: int) -> None:
    with Context(SPEC=1), workers(2) as world:
        wanted = other_readers(rows(world.devices, (2, 64), "float32"))[case]
        sums = [what for what in collectives(lowered(wanted)[0]) if what.arg.size == 64]
        assert len(sums) == 1
        x = np.array(rows(TWO, (2, 64), "float32").numpy())
        s = x.sum(0)
        want = [[s, s * 2], [s * 2, s * 3], [s / 2, s / 2 + 1], [s * s.sum()], [s]][case]
        for got in run(wanted):
            for parts, w in zip(got, want):
                (part,) = [p for p in parts if p is not None]
                np.testing.assert_allclose(part, w, rtol=1e-5, atol=1e-5)


def test_what_a_kernel_that_reads_other_memory_computes_for_nothing_stays_there() -> None:
    with workers(2) as world:
        s = rows(world.devices, (2, 64), "float32").sum(0) * 0.25
        bias = Tensor.arange(64).float().contiguous().shard(world.devices)
        (what,) = collectives(lowered([s + bias])[0])
        assert what.arg.finish is None
        (what,) = collectives(lowered([s.cast("bfloat16") + bias])[0])  # (less moves)
        assert what.dtype is dtypes.bfloat16
        (what,) = collectives(lowered([s.contiguous() + bias])[0])
        assert what.arg.finish.op is Ops.MUL


def test_a_scaled_gradient_of_a_cut_weight_is_scattered() -> None:
    """It took an all-reduce, of which each device kept its part."""
    for steps, same in ((["scaled"], True), (["bfloat16", "float32"], False)):
        w = Tensor(np.ones((8, 3), np.float32)).shard(TWO, 0).contiguous().realize()
        x = rows(TWO, (6, 8), "float32")
        results = []
        for apart in (False, True):
            g = (x @ w).square().sum().gradient(w)[0]
            step = of(g.contiguous() if apart else g, steps)
            for made in (w - step, w.clone().assign(step)):
                if not apart:
                    ops = [c.op for c in collectives(linear_of(made)) if c.op is not Ops.ALLGATHER]
                    assert (Ops.REDUCESCATTER in ops) or not same, ops
                results.append(made.numpy().tobytes())
        assert results[:2] == results[2:]


def test_a_wire_type_comes_before_what_is_computed() -> None:
    with workers(2) as world:
        s = rows(world.devices, (2, 64), "float32").sum(0)
        wired = s._op(Ops.WIRE, arg="bfloat16")
        (what,) = collectives(lowered([(wired * 0.3).cast("float16")])[0])
        assert what.arg.finish is not None and what.dtype is dtypes.float16
        apart = (wired.contiguous() * 0.3).cast("float16")
        assert bytes_of((wired * 0.3).cast("float16")) == bytes_of(apart)
        (what,) = collectives(lowered([wired * 0.3])[0])  # (float32 takes more than what travels)
        assert what.arg.finish is None and bytes_of(wired * 0.3) == bytes_of(wired.contiguous() * 0.3)


def test_one_worker_that_alone_reads_the_result() -> None:
    """The others finish it all the same: decided is over the graph of all devices."""
    with Context(COLLECTIVE="direct", SPEC=1), workers(3) as world:
        found = {}
        for apart in (False, True):
            s = rows(world.devices, (3, 1000), "float32").sum(0)
            t = ((s.contiguous() if apart else s) * 0.3).cast("bfloat16").to(world.devices[1])
            assert_same_collectives(lowered([t]))
            found[apart] = bytes_of(t)
        assert found[False] == found[True] and len(found[True]) == 1


def test_a_training_step_with_a_scaled_gradient() -> None:
    found = {}
    for apart in (False, True):
        w = Tensor(np.linspace(-1, 1, 24, dtype=np.float32).reshape(8, 3)).shard(TWO).requires_grad_()
        o = SGD([w], lr=0.1)
        with Tensor.train():
            for _ in range(3):
                o.zero_grad()
                (rows(TWO, (6, 8), "float32") @ w).square().sum().backward()
                assert w.grad is not None
                w.grad = (w.grad.contiguous() if apart else w.grad) * 0.01
                o.step()
        found[apart] = w.numpy().tobytes()
    assert found[False] == found[True]


# *** the proof of the calls ***


def body_of(dtype: str, *ops: Any) -> UOp:
    u = UOp(Ops.PARAM, to_dtype(dtype), (), 0)
    for op, arg in ops:
        u = UOp(op, to_dtype(arg), (u,)) if op is Ops.CAST else UOp(op, u.dtype, (u, UOp.const(u.dtype, arg)))
    return u


FINISHES = [
    body_of("float16", (Ops.MUL, 0.5)),
    body_of("float16", (Ops.CAST, "int8")),
    body_of("float16", (Ops.CAST, "float32"), (Ops.ADD, 1.0), (Ops.CAST, "bfloat16")),
]


def bodies(algorithm: str, c: Collective, finish: UOp | None, on_host: bool, piece: int) -> dict[int, Any]:
    seen: Callable[[str], bool] = (lambda d: True) if on_host else (lambda d: d == "CPU")
    workers_of = [r // c.group for r in range(c.ranks)]
    found: dict[int, Any] = {}
    for w in range(workers_of[-1] + 1):
        own = tuple(r for r in range(c.ranks) if workers_of[r] == w)
        names = {r: f"GPU:{r}" for r in own}
        program = build(algorithm, c, own)
        found[w] = lower(program, dtypes.float16, workers_of, names, piece, seen, finish), own
    return found


@pytest.mark.parametrize("finish", FINISHES, ids=["mul", "int8", "in float32"])
@pytest.mark.parametrize("kind", ["all_reduce", "reduce_scatter"])
def test_the_calls_are_proved(kind: str, finish: UOp) -> None:
    """With one of them for many ranks, with each for a few: who finishes what does not depend on how."""
    counts = (2, 3, 4, 5, 6, 8, 17, 20) if finish is FINISHES[0] else (2, 3, 4, 8)
    for a in ALGORITHMS.values():
        for ranks, group in [(r, g) for r in counts for g in (1, 2, 4) if r % g == 0]:
            if not a.can(kind, ranks, group) or (a.name == "hierarchical") != (group > 1):
                continue
            for count in (1, ranks - 1, 23):
                c = Collective(kind, ranks, count, group=group)
                for on_host, piece in ((True, 0), (a.writes, 6)):
                    check_calls(c, bodies(a.name, c, finish, on_host, piece), a.name, finish)


def test_what_is_not_finished_or_otherwise_is_refused() -> None:
    c = Collective("all_reduce", 4, 9)
    for algorithm in ("naive", "direct", "put", "halving_doubling", "ring"):
        done = bodies(algorithm, c, FINISHES[0], True, 0)
        plain = bodies(algorithm, c, None, True, 0)
        other = bodies(algorithm, c, body_of("float16", (Ops.MUL, 0.25)), True, 0)
        check_calls(c, done, algorithm, FINISHES[0])
        for made, wanted in ((plain, FINISHES[0]), (other, FINISHES[0]), (done, None)):
            with pytest.raises(ProgramError):
                check_calls(c, made, algorithm, wanted)
        for one in (plain, other):
            with pytest.raises(ProgramError):
                check_calls(c, {**done, 2: one[2]}, algorithm, FINISHES[0])


def test_one_rank_has_nothing_to_finish() -> None:
    with pytest.raises(ValueError, match="one rank sums nothing"):
        lower(build("direct", Collective("all_reduce", 1, 4)), dtypes.float16, [0], {0: "CPU"}, finish=FINISHES[0])


def test_on_one_device_the_graph_stays() -> None:
    x = rows(("CPU:0",), (4, 8), "float32")
    assert not collectives(linear_of(x.sum(0) * 0.25))


def test_parts_of_a_long_one_are_finished_too() -> None:
    with workers(2) as world:
        world.link = Link("zmq", 1e6)
        linear = lowered([rows(world.devices, (2, 40_000), "float32").sum(0) * 0.25])[0]
        parts = collectives(linear)
        assert len(parts) > 1 and len({p.arg.finish for p in parts}) == 1 and parts[0].arg.finish is not None
