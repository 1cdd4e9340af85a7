"""What one worker owns is its Runtime's: another one does not see it, and `use` gives the former one back."""

from __future__ import annotations

import pickle
import subprocess
import sys
import threading
from typing import Any

import numpy as np
import pytest

import manygrad
from manygrad import Context, Tensor, TinyJit
from manygrad.multi.world import Membership, World
from manygrad.runtime.agreement.agreement import Agreement
from manygrad.runtime.buffer import Buffer
from manygrad.runtime.current import current, use
from manygrad.runtime.devices import get_device
from manygrad.runtime.engine.linear import storage
from manygrad.runtime.exchange.communication import Communication, Hooks
from manygrad.runtime.executors.collective import CollectiveItem
from manygrad.runtime.runtime import Runtime
from manygrad.schedule.plan import Plan
from manygrad.tensor.uop import Ops, UOp

TWO = ("CPU:0", "CPU:1")


def counts(runtime: Runtime) -> tuple[int, int]:
    return runtime.schedules.misses, runtime.schedules.hits


def summed() -> np.ndarray:
    """A sum over two devices, by an all-reduce."""
    return Tensor(np.ones((4, 3), np.float32)).shard(TWO, 0).sum(0).numpy()


def test_use_restores_the_former_one() -> None:
    first, fresh = current(), Runtime()
    with use(fresh) as used:
        assert used is fresh is current()
        with use(Runtime()) as inner:
            assert inner is current()
        assert fresh is current()
    assert first is current()
    with pytest.raises(ZeroDivisionError), use(Runtime()):
        _ = 1 / 0
    assert first is current()


def test_threads_that_leave_in_any_order_leave_the_former_one() -> None:
    first, entered, left = current(), threading.Barrier(3), [threading.Event(), threading.Event()]

    def work(leave: threading.Event) -> None:
        with use(Runtime()):
            entered.wait(20)
            assert leave.wait(20)

    threads = [threading.Thread(target=work, args=(e,)) for e in left]
    for t in threads:
        t.start()
    entered.wait(20)
    for t, e in zip(threads, left, strict=True):
        assert current() is not first
        e.set()
        t.join(20)
    assert current() is first


@Context(SCACHE=1)
def test_schedules_are_its_own() -> None:
    a, b = Runtime(), Runtime()
    before = counts(current())
    x = Tensor(np.ones(7, np.float32)).realize()
    first = counts(current())
    for _ in range(2):
        with use(a):
            (x * 1.40625).realize()
    assert counts(a) == (1, 1) and len(a.schedules.in_memory) == 1
    with use(b):
        (x * 1.40625).realize()
    assert counts(b) == (1, 0) and counts(a) == (1, 1), "not found where another Runtime has it"
    assert counts(current()) == first >= before


def test_schedules_of_functions_are_its_own() -> None:
    @manygrad.function
    def twice(x: Tensor) -> Tensor:
        return x * 2.40625 + 1

    x, runtimes = Tensor(np.ones(5, np.float32)).realize(), (Runtime(), Runtime())
    for runtime in runtimes:
        with use(runtime):
            for _ in range(2):
                np.testing.assert_array_equal(twice(x).numpy(), np.full(5, 3.40625, np.float32))
    (body,) = (trace.body for traces in twice.traces.values() for trace in traces)
    assert body is not None
    first, second = (r.schedules.bodies[body][1] for r in runtimes)
    assert first is not second


def test_devices_are_its_own_and_kernels_are_the_processs(no_collection: None) -> None:
    device = get_device("CPU:7")
    before = device.allocated
    with use(Runtime()) as fresh:
        other = get_device("CPU:7")
        assert other is fresh.devices.get("CPU:7") is not device and other.kernels is device.kernels
        kept = Tensor(np.ones(1 << 16, np.float32), device="CPU:7").realize()
    assert other.allocated >= 1 << 18 and device.allocated == before
    part = storage(kept.uop)
    assert isinstance(part, Buffer) and part.view(4, part.dtype, 0).device is other
    np.testing.assert_array_equal((kept + 1).numpy(), np.full(1 << 16, 2, np.float32))  # it is where it was


def runs(runtime: Runtime) -> int:
    """Of collectives."""
    return sum(int(counter[0]) for counter in runtime.communication.counters.values())


def test_collectives_and_their_counts_are_its_own() -> None:
    a, b = Runtime(), Runtime()
    for runtime, times in ((a, 2), (b, 1)):
        with use(runtime):
            for _ in range(times):
                np.testing.assert_array_equal(summed(), np.full(3, 4, np.float32))
    told = [(runs(r), r.communication.entered[0]) for r in (a, b)]
    assert told == [(2, 2), (1, 1)]
    assert a.communication.descriptions == b.communication.descriptions != {}


def test_a_replay_keeps_what_it_was_made_with() -> None:
    """It looks up no Runtime: whichever is current, it counts where it was captured."""

    @TinyJit
    def step(x: Tensor) -> Tensor:
        return x.sum(0).realize()

    x = Tensor(np.ones((4, 3), np.float32)).shard(TWO, 0).contiguous().realize()
    with use(Runtime()) as captured:
        for _ in range(3):
            step(x)
    assert any(isinstance(i, CollectiveItem) for i in step.captured.items)
    before = runs(captured)
    with use(Runtime()) as other:
        step(x)
    assert runs(captured) == before + 1 and not other.communication.counters
    assert counts(other) == (0, 0)


def test_endpoint_and_hooks_are_its_own() -> None:
    asked: list[int] = []

    def make_plan(key: int, description: str, outline: str) -> Any:
        asked.append(key)
        return lambda: None

    a, b = Runtime(), Runtime()
    endpoint: Any = type("Endpoint", (), {"arena": None})()
    a.epoch.connect(endpoint, Hooks(make_plan, lambda name, values: None))
    assert a.communication.endpoint is endpoint and b.communication == Communication()
    a.communication.descriptions[5] = "all_reduce of 3"
    assert endpoint.describe(5) == "all_reduce of 3" and endpoint.describe(6) == ""

    with use(Runtime(world=joined(rank=1, size=2))) as r:
        x = Tensor(np.ones((4, 3), np.float32), device="NULL").shard(r.world.devices, 0)
        linear, plan = planned(x.sum(0))
    for runtime in (b, a, a):
        runtime.world = r.world
        with use(runtime):
            Agreement(plan, linear, []).end()
    assert (
        asked == [plan.key] and a.communication.compared == {plan.key: 1} and b.communication.compared == {plan.key: 0}
    )


def joined(rank: int, size: int) -> World:
    return World(Membership(rank, size), "NULL")


def planned(t: Tensor) -> tuple[UOp, Plan]:
    from tests.schedule.programs import scheduled

    found = scheduled(t)
    assert found.plan is not None and any(c.src[0].op is Ops.ALLREDUCE for c in found.linear.src)
    return found.linear, Plan(found.plan.key, True, (), (), found.plan.graph, found.plan.lines)


def test_words_of_indices_are_its_own() -> None:
    """A Runtime does not tell of what went wrong in another one."""
    with use(Runtime()) as fresh:
        t, at = Tensor(np.arange(4, dtype=np.float32)).realize(), Tensor(np.array([1, 9])).realize()
        wrong = t[at].realize()
    assert fresh.faults.words and not any(site in current().faults.nodes for site in fresh.faults.nodes)
    Tensor([1.0]).numpy()
    with use(fresh), pytest.raises(IndexError, match="index 9 is out of range"):
        wrong.numpy()


def test_the_world_is_the_runtimes() -> None:
    assert manygrad.world is current().world
    with use(Runtime(world=joined(rank=2, size=4))) as r:
        assert Tensor([1.0]).to("NULL:0@3").device == "NULL:0@3"
        assert pickle.loads(pickle.dumps(r.world)) is r.world
    with pytest.raises(ValueError, match="device"), use(Runtime(world=joined(rank=0, size=2))):
        Tensor([1.0]).to("NULL:0@3")
    there = pickle.loads(pickle.dumps(r.world))  # of another process: a copy
    assert there is not r.world and vars(there) == vars(r.world)


def test_importing_the_package_leaves_other_modules_as_they_are() -> None:
    code = (
        "import sys, numpy, ml_dtypes, typing, threading\nbefore = dict(sys.modules)\nimport manygrad\n"
        "changed = [n for n, m in before.items() if sys.modules.get(n) is not m]\n"
        "assert not changed, changed\n"
        "foreign = [n for n, m in sys.modules.items() if (n.split('.')[0] == 'manygrad') != "
        "(getattr(m, '__name__', n).split('.')[0] == 'manygrad')]\n"
        "assert not foreign, foreign"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
