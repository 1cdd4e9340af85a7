"""Planned memory: reuse proved by the bytes that a device held at its peak; values that live together never overlap."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from manygrad import Context, Tensor, TinyJit
from manygrad.runtime.devices import Device, get_device
from manygrad.schedule.facts.buffers import nbytes_of
from manygrad.schedule.order.plan_memory import ALIGN, MemoryPlan, memory_plan
from manygrad.tensor.dtype import dtypes
from manygrad.tensor.uop import BufferSpec, Ops, UOp
from tests.schedule.programs import linear_of, stored

MB = 1 << 20


@pytest.fixture(autouse=True)
def nothing_is_captured() -> Iterator[None]:
    """A capture of what several tests do would keep its temporaries."""
    with Context(FOLLOW=0):
        yield


def peak_of(device: Device, run: Callable[[], object]) -> int:
    """Bytes that `run` made the device hold at most, beyond what it held before."""
    start = device.memory.peak = device.allocated
    run()
    return device.peak - start


def chain(depth: int, device: str, n: int = 512) -> Tensor:
    """`depth` stored temporaries of 1 MB, each needed by the next one only."""
    t = Tensor(np.full((n, n), 0.5, np.float32), device=device).realize()
    for i in range(depth):
        t = (t * 0.5 + i).contiguous()
    return t


@pytest.mark.parametrize("depth", [4, 40])
def test_a_long_chain_needs_the_memory_of_two_values(depth: int) -> None:
    device = get_device("CPU:6")
    t = chain(depth, "CPU:6")
    assert peak_of(device, t.realize) <= 3 * MB + ALIGN  # the result and two temporaries
    want = np.float64(0.5)
    for i in range(depth):
        want = want * 0.5 + i
    np.testing.assert_allclose(t.numpy(), np.full((512, 512), want), rtol=1e-6)


def test_a_chain_of_products_too() -> None:
    device = get_device("CPU:6")
    x = Tensor(np.eye(512, dtype=np.float32) * 2, device="CPU:6").realize()
    t = x
    for _ in range(9):
        t = t @ x
    assert peak_of(device, t.realize) <= 3 * MB + ALIGN
    assert t.numpy()[3, 3] == 2.0**10


def test_what_each_layer_needs_is_made_when_its_layer_is_next() -> None:
    """Two matrices a layer, of which the small ones would all fit before the first large one is made."""
    small = [Tensor(np.ones((64, 64), np.float32)).realize() for _ in range(8)]
    large = [Tensor(np.ones((64, 256), np.float32)).realize() for _ in range(8)]
    x = Tensor(np.ones((32, 64), np.float32)).realize()
    for a, b in zip(small, large):
        y = x @ (a * 0.5).contiguous()
        x = (y @ (b * 0.5).contiguous()).reshape(32, 4, 64).sum(1)
    plan = linear_of(x).arg
    assert sum(p.nbytes for p in plan.pools) < 2 * (64 * 64 + 64 * 256) * 4


def test_what_is_needed_later_is_kept() -> None:
    """A backward pass reads every activation: they cannot share, but gradients reuse what is done with."""
    device, depth = get_device("CPU:6"), 8
    w = Tensor(np.full((512, 512), 0.01, np.float32), device="CPU:6", requires_grad=True).realize()
    t = Tensor(np.ones((512, 512), np.float32), device="CPU:6").realize()
    for _ in range(depth):
        t = (t @ w).tanh()
    t.mean().backward()
    assert w.grad is not None
    held = peak_of(device, w.grad.realize)
    assert depth * MB // 2 <= held <= (2 * depth + 6) * MB


@pytest.mark.parametrize("donate", [False, True])
def test_a_replayed_step_allocates_nothing_but_results_that_are_kept(donate: bool) -> None:
    device = get_device("CPU:6")
    x = stored(512, 512, device="CPU:6")
    step = TinyJit(lambda x: ((x + 1).contiguous() * 2).contiguous().sum(0), donate=donate)
    with Context(JIT_CHECK=0):  # (a look at what it would do has memory of its own, which nothing writes)
        for _ in range(3):
            step(x)
        assert peak_of(device, lambda: [step(x).shape for _ in range(5)]) == 0
        assert peak_of(device, lambda: [step(x) for _ in range(5)]) == (0 if donate else 4 * 512 * 4)


def test_temporaries_are_given_back_after_the_run(no_collection: None) -> None:
    device = get_device("CPU:6")
    before = device.allocated
    t = chain(5, "CPU:6")
    assert device.allocated - before == MB  # the input
    t.realize()
    assert device.allocated - before == MB  # the result; input and temporaries are gone


def test_what_is_put_together_lies_in_the_output() -> None:
    """CONTIGUOUS of a CAT is no copy of it, also where another output reads the same CAT."""
    both = (stored(4, 3) + 1).cat(stored(2, 3))
    linear = linear_of(both.contiguous())
    assert len(linear.src) == 2 and linear.arg == MemoryPlan((), ())
    linear = linear_of([both.contiguous(), both * 2])
    assert len(linear.src) == 3 and linear.arg == MemoryPlan((), ())
    first, second = both.contiguous(), both * 2
    first.realize(second)
    first.assign(first * 5).realize()
    np.testing.assert_array_equal(first.numpy(), np.repeat([10.0, 5.0], [4, 2])[:, None] * np.ones((1, 3)))
    np.testing.assert_array_equal(second.numpy(), np.repeat([4.0, 2.0], [4, 2])[:, None] * np.ones((1, 3)))


def test_outputs_and_inputs_are_never_reused() -> None:
    a = stored(64, 64)
    outs = [(a + i).contiguous() for i in range(5)]
    kept = [(o * 2).contiguous() for o in outs]
    outs[0].realize(*outs[1:], *kept)
    for i, (o, k) in enumerate(zip(outs, kept)):
        assert np.unique(o.numpy()).tolist() == [1 + i] and np.unique(k.numpy()).tolist() == [2 + 2 * i]
    assert np.unique(a.numpy()).tolist() == [1]


# *** the planner alone ***


def temp(uid: int, elements: int, device: str = "CPU:0") -> UOp:
    return UOp(Ops.BUFFER, dtypes.uint8, (), BufferSpec(-uid, (elements,), dtypes.uint8, device))


def call(*buffers: UOp) -> UOp:
    return UOp(Ops.CALL, dtypes.void, (UOp(Ops.SINK), *buffers))


@st.composite
def schedules(draw: st.DrawFn) -> list[UOp]:
    """Calls that write a new temporary and read some older ones."""
    buffers: list[UOp] = []
    calls = []
    for uid in range(1, draw(st.integers(1, 25)) + 1):
        new = temp(uid, draw(st.integers(0, 600)), draw(st.sampled_from(["CPU:0", "CPU:0", "CPU:1"])))
        outside = UOp(Ops.PARAM, dtypes.uint8, (), BufferSpec(0, (10**9,), dtypes.uint8, "CPU:0"))
        reads = draw(st.lists(st.sampled_from(buffers), max_size=3)) if buffers else []
        calls.append(call(new, outside, *reads))
        buffers.append(new)
    return calls


def lives(calls: list[UOp]) -> dict[int, tuple[int, int]]:
    out: dict[int, tuple[int, int]] = {}
    for at, c in enumerate(calls):
        for b in c.src[1:]:
            if b.op is Ops.BUFFER:
                out[b.arg.uid] = (out.get(b.arg.uid, (at, at))[0], at)
    return out


@settings(max_examples=300)
@given(schedules())
def test_values_that_live_together_never_overlap(calls: list[UOp]) -> None:
    plan, life = memory_plan(calls), lives(calls)
    assert {b.uid for b in plan.buffers} == set(life)
    devices = {b.arg.uid: b.arg.device for c in calls for b in c.src[1:] if b.op is Ops.BUFFER}
    sizes = {b.arg.uid: nbytes_of(b) for c in calls for b in c.src[1:] if b.op is Ops.BUFFER}
    for b in plan.buffers:
        pool = plan.pools[b.pool]
        assert (
            pool.device == devices[b.uid]
            and b.nbytes == sizes[b.uid]
            and b.offset % ALIGN == 0
            and 0 <= b.offset <= b.offset + b.nbytes <= pool.nbytes
        )
    for i, a in enumerate(plan.buffers):
        for b in plan.buffers[i + 1 :]:
            together = life[a.uid][0] <= life[b.uid][1] and life[b.uid][0] <= life[a.uid][1]
            if a.pool == b.pool and together and a.nbytes and b.nbytes:
                assert a.offset + a.nbytes <= b.offset or b.offset + b.nbytes <= a.offset, f"{a} and {b} overlap"


@settings(max_examples=200)
@given(schedules())
def test_pools_are_at_least_what_lives_at_once_and_at_most_everything(calls: list[UOp]) -> None:
    plan, life = memory_plan(calls), lives(calls)
    for number, pool in enumerate(plan.pools):
        mine = [(b.uid, max(ALIGN, -(-b.nbytes // ALIGN) * ALIGN)) for b in plan.buffers if b.pool == number]
        at_once = max(sum(n for uid, n in mine if life[uid][0] <= at <= life[uid][1]) for at in range(len(calls)))
        assert at_once <= pool.nbytes <= sum(n for _, n in mine)
        assert pool.nbytes <= 2 * at_once  # first fit by size: far from everything


def test_the_plan_is_the_same_every_time() -> None:
    plans = set()
    for _ in range(3):
        with Context(SCACHE=0):
            plan = linear_of(
                (((stored(30, 30) @ stored(30, 30)).softmax() @ stored(30, 7)).relu() @ stored(7, 2)).sum(0)
            ).arg
        assert isinstance(plan, MemoryPlan)
        plans.add(plan)
    assert len(plans) == 1
