"""The schedule cache, the order of calls, and what the scheduler tells."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from manygrad import Context, Tensor, nn
from manygrad.runtime.current import current
from manygrad.schedule.facts.items import Item
from manygrad.schedule.order.order_items import order_items
from manygrad.tensor.dtype import dtypes
from manygrad.tensor.environment import SPEC
from manygrad.tensor.source import LINE
from manygrad.tensor.uop import AllReduceArg, BufferSpec, Members, Ops, UOp
from tests.schedule.programs import linear_of, scheduled, stored

TWO = ("CPU:0", "CPU:1")


def counted(*tensors: Tensor) -> tuple[int, int]:
    """(misses, hits) of realizing them."""
    schedules = current().schedules
    misses, hits = schedules.misses, schedules.hits
    tensors[0].realize(*tensors[1:])
    return schedules.misses - misses, schedules.hits - hits


def test_the_same_program_on_other_data_is_scheduled_once() -> None:
    def program(seed: int) -> Tensor:
        rng = np.random.default_rng(seed)
        x = Tensor(rng.standard_normal((5, 7)).astype(np.float32)).realize()
        return (x @ x.T * 1.03125).softmax()

    with Context(FOLLOW=0):  # (the third would be captured)
        assert counted(program(0)) == (1, 0)
        for seed in range(1, 4):
            assert counted(program(seed)) == (0, 1)


def test_what_differs_is_scheduled_again() -> None:
    x = stored(5, 7)
    assert counted(x * 1.0625) == (1, 0)
    for other in (
        x * 1.125,
        x.T * 1.0625,
        stored(5, 8) * 1.0625,
        x.double() * 1.0625,
        stored(5, 7, device="CPU:1") * 1.0625,
        x.shard(TWO, 0) * 1.0625,
    ):
        assert counted(other) == (1, 0)
    y = stored(5, 7)
    assert counted(x + y * 1.0625) == (1, 0)
    assert counted(x + x * 1.0625) == (1, 0)  # one buffer twice is another program than two buffers
    assert counted(y + x * 1.0625) == (0, 1)


def test_training_steps_hit_the_cache() -> None:
    w = Tensor(np.ones((3, 3), np.float32), requires_grad=True)
    optimiser = nn.optim.AdamW([w])
    seen = []
    with Tensor.train(), Context(FOLLOW=0):
        for _ in range(4):
            before = current().schedules.misses
            optimiser.zero_grad()
            (stored(2, 3) @ w).square().sum().backward()
            optimiser.step()
            seen.append(current().schedules.misses - before)
    assert seen[2:] == [0, 0]


def test_scache_0_schedules_every_time_and_gives_the_same() -> None:
    x = stored(5, 7)
    with Context(SCACHE=0):
        first, second = linear_of(x * 1.1875 + 1), linear_of(x * 1.1875 + 1)
        assert counted(x * 1.1875 + 1) == (1, 0)
    assert first is second  # the same graph: nodes are interned


def test_a_linear_is_over_params_and_names_its_buffers() -> None:
    x, y = stored(4), stored(4)
    linear, vals, buffers, plan = scheduled(x * y + x)
    assert plan is None
    assert [b is t.uop for b, t in zip(buffers[1:], (x, y))] == [True, True] and vals == {}
    assert {a.op for c in linear.src for a in c.src[1:]} == {Ops.PARAM}


def test_specs_are_verified_in_tests() -> None:
    assert SPEC


def test_calls_know_the_users_line() -> None:
    call = linear_of((stored(4) * 3.0).sum()).src[-1]
    assert str(LINE[call]).startswith("test_schedule.py:")


# *** order ***


def buffer(uid: int) -> UOp:
    return UOp(Ops.BUFFER, dtypes.float32, (), BufferSpec(uid, (4,), dtypes.float32, "CPU:0"))


def item(name: int, writes: int, reads: dict[int, list[Item]], comm: bool = False) -> Item:
    """Writes buffer `writes`; reads buffers as they are after the named items."""
    target = buffer(writes)
    effect = UOp(Ops.STORE, dtypes.void, (target, UOp.const(dtypes.float32, float(name))))
    LINE[effect] = f"train.py:{name}"
    members = Members(TWO, (0, 1), (4, 4), name, f"train.py:{name}")
    what = UOp(Ops.ALLREDUCE, dtypes.float32, (), AllReduceArg(Ops.ADD, 4, members)) if comm else UOp(Ops.SINK)
    return Item(
        (effect,),
        what,
        [target],
        [target],
        [(buffer(b), frozenset(e for i in after for e in i.effects)) for b, after in reads.items()],
    )


def keys(items: list[Item]) -> list[object]:
    return [i.key for i in items]


def test_a_read_comes_after_its_effects_and_a_write_after_older_reads() -> None:
    first = item(1, 10, {})
    old_reader = item(2, 11, {10: [first]})
    overwrite = item(3, 10, {10: [first]})  # a store into an assigned buffer
    new_reader = item(4, 12, {10: [first, overwrite]})
    for items in (
        [first, overwrite, new_reader, old_reader],
        [first, old_reader, overwrite, new_reader],
        [first, new_reader, overwrite, old_reader],
    ):
        out = keys(order_items(items))
        assert out == keys([first, old_reader, overwrite, new_reader])


def test_communication_starts_as_early_as_it_can() -> None:
    plain = [item(i, 100 + i, {}) for i in range(5)]
    feed = item(50, 150, {})
    comm = item(51, 151, {150: [feed]}, comm=True)
    use = item(52, 152, {151: [comm]})
    out = order_items([*plain, feed, comm, use])
    assert keys(out[:2]) == keys([feed, comm])


def test_communication_keeps_the_order_of_the_program() -> None:
    """Every worker must enter collectives in one order, whatever else it has to do."""
    slow, fast = item(1, 100, {}), item(2, 101, {})
    second, first = item(9, 102, {101: [fast]}, comm=True), item(3, 103, {100: [slow]}, comm=True)
    out = keys(order_items([fast, second, slow, first]))
    assert out.index(first.key) < out.index(second.key)


def test_a_cycle_is_an_error_that_names_the_lines() -> None:
    a = item(1, 10, {11: []})  # writes 10, reads the old 11
    b = item(2, 11, {10: []})  # writes 11, reads the old 10
    with pytest.raises(
        RuntimeError, match=r"wait for each other: .* \(lines train\.py:1, train\.py:2\); .*old = t\.clone\(\)"
    ):
        order_items([a, b])


@settings(max_examples=200)
@given(st.data())
def test_any_order_keeps_what_each_reader_sees(data: st.DataObject) -> None:
    """Random programs of versioned buffers: in the order found, every reader finds just the versions it names."""
    versions: dict[int, list[Item]] = {b: [] for b in range(4)}
    items: list[Item] = []
    for name in range(data.draw(st.integers(1, 14))):
        target = data.draw(st.integers(0, 3))
        reads = {b: list(versions[b]) for b in data.draw(st.sets(st.integers(0, 3), max_size=3)) if b != target}
        if versions[target]:
            reads[target] = list(versions[target])
        new = item(name, target, reads)
        items.append(new)
        versions[target].append(new)
    shuffled = data.draw(st.permutations(items))
    written: dict[UOp, set[UOp]] = {}
    for it in order_items(shuffled):
        for b, effects in it.reads:
            assert written.get(b, set()) == effects
        written.setdefault(it.writes[0], set()).update(it.effects)


def test_a_reader_of_the_old_value_runs_before_the_write() -> None:
    x = stored(8)
    # at other elements than the write: one kernel, but not the writer's
    readers = [x.flip(0) * (i + 2.0) for i in range(3)]
    x.assign(x + 100)
    linear = linear_of([x, *readers])  # the write is named first
    first, last = linear.src
    assert len(first.src[0].src) == 3 and len(last.src[0].src) == 1 and last.src[1] in first.src[1:]
    x.realize(*readers)
    assert [r.numpy()[0] for r in readers] == [2, 3, 4] and x.numpy()[0] == 101
