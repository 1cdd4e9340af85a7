"""A long all-reduce between hosts: cut into parts, which start while the rest is computed."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from manygrad import Tensor
from manygrad.collectives.cost import MAX_PARTS, PART_ALIGN, PART_COST_S, parts_of
from manygrad.multi.world import Link, World
from manygrad.tensor.uop import GroupOp, Ops, UOp
from tests.multi.cluster import assert_same_collectives, lowered, run, workers

FAST, SHM = Link("zmq", 2.0**40), Link("shm")


def slow(nbytes: int, parts: int) -> Link:
    """A link over which an all-reduce of 2 workers is cut into so many parts."""
    return Link("zmq", nbytes / (parts**2 * PART_COST_S))


def gradients(world: World, sizes: tuple[int, ...] = (3, 96, 128, 64, 2)) -> Tensor:
    """Of the weights of a few layers, one after the other in one tensor, as an optimiser holds them."""
    rng = np.random.default_rng(0)
    n = world.size
    x = Tensor(rng.standard_normal((2 * n, sizes[0])).astype(np.float32)).shard(world.devices, axis=0)
    weights = [
        Tensor(rng.standard_normal((a, b)).astype(np.float32)).shard(world.devices).requires_grad_()
        for a, b in itertools.pairwise(sizes)
    ]
    for w in weights:
        x = (x @ w).tanh()
    loss = x.sum()
    found = loss.gradient(*weights)
    return found[0].reshape(-1).cat(*[g.reshape(-1) for g in found[1:]])


def reduced(linear: UOp) -> list[UOp]:
    return [c for c in linear.src if c.src[0].op is Ops.ALLREDUCE]


@pytest.mark.parametrize("size", [2, 3, 4])
def test_parts_have_the_bits_of_the_whole(size: int) -> None:
    found = []
    for link in (SHM, FAST, slow(4 * 20_000, 5)):
        with workers(size) as world:
            world.link = link
            t = gradients(world)
            linears = lowered([t])
            assert_same_collectives(linears)
            counts = {len(reduced(linear)) for linear in linears}
            assert (counts == {1}) == (link in (SHM, FAST)), counts
            (first, *others) = run([t])
            parts = [p for p in first[0] if p is not None]
            for other in others:
                parts += [p for p in other[0] if p is not None]
            assert len(parts) == size and all((p == parts[0]).all() for p in parts)
            found.append(parts[0])
    assert (found[0] == found[1]).all() and (found[0] == found[2]).all()


def test_a_part_starts_as_soon_as_it_is_computed_from_the_last_layer_on() -> None:
    with workers(2) as world:
        world.link = slow(4 * 20_000, 5)
        linear = lowered([gradients(world)])[0]
        calls = reduced(linear)
        offsets = [c.src[2].arg.offset for c in calls]
        assert len(calls) > 3 and offsets == sorted(offsets, reverse=True)
        assert [c.src[0].arg.members.part for c in calls] == list(range(len(calls)))
        at = [linear.src.index(c) for c in calls]
        between = [j for i, j in itertools.pairwise(at) if j > i + 1]
        assert len(between) >= 2, at  # kernels run after a part and before the next one
        source = calls[0].src[2].src[0]
        for c, i in zip(calls, at):  # nothing of a part is written after it has started
            begin = c.src[2].arg.offset
            end = begin + c.src[2].arg.shape[0]
            for k in linear.src[i:]:
                if k.src[0].op is Ops.SINK and (v := k.src[1]).op is Ops.VIEW and v.src[0] is source:
                    assert v.arg.offset >= end or v.arg.offset + v.arg.shape[0] <= begin


@pytest.mark.parametrize("computed", [False, True])
def test_what_is_in_memory_before_the_program_starts_stays_whole(computed: bool) -> None:
    with workers(2) as world:
        world.link = slow(4 * 20_000, 5)
        x = Tensor(np.ones((2, 20_000), np.float32)).shard(world.devices, axis=0).realize()
        linears = lowered([((x * 2).contiguous() if computed else x).sum(0)])
        assert_same_collectives(linears)
        assert (len(reduced(linears[0])) > 1) == computed


def test_what_does_not_wait_for_communication_runs_before_what_does() -> None:
    with workers(2) as world:
        x = Tensor(np.ones((4, 8), np.float32)).shard(world.devices, axis=0)
        total = x.sum(0).contiguous()
        squares = [(x * k).exp().contiguous() for k in range(3)]
        linear = lowered([total * 2, *squares])[0]
        ops = [c.src[0].op for c in linear.src]
        first = next(i for i, op in enumerate(ops) if op in GroupOp.COLLECTIVE)
        result = linear.src[first].src[1]
        readers = [i for i, c in enumerate(linear.src) if result in c.src[2:]]
        assert readers and min(readers) == len(ops) - 1 and len(ops) - first >= 3, ops


@pytest.mark.parametrize("ranks", [2, 3, 8])
def test_bounds_cover_all_elements(ranks: int) -> None:
    for count in (0, 1, PART_ALIGN, PART_ALIGN + 1, 10**6, 10**8):
        for rate in (1e3, 1e7, 1e9, 1e12):
            bounds = parts_of(count, 4, ranks, Link("zmq", rate))
            assert bounds[0] == 0 and bounds[-1] == count and len(bounds) - 1 <= MAX_PARTS
            assert count == 0 or all(a < b for a, b in itertools.pairwise(bounds))
            assert all(b % PART_ALIGN == 0 for b in bounds[:-1])
        assert parts_of(count, 4, ranks, SHM) == (0, count)


@pytest.mark.parametrize("n, halvings", [(1, 0), (2, 1), (4, 2), (8, 3), (20, 3)])
def test_what_is_sent_last_is_short(n: int, halvings: int) -> None:
    """Parts are sent from the last to the first."""
    count = n * 64 * PART_ALIGN
    bounds = parts_of(count, 4, 2, slow(4 * count, n))
    widths = [b - a for a, b in itertools.pairwise(bounds)]
    assert widths[0] << halvings == count // -(-n // 2) and sorted(widths[:-2]) == widths[:-2]
    assert len(widths) == -(-n // 2) + halvings + (n >= 8)
    assert n < 8 or widths[-1] < widths[-3]


def test_weights_of_later_layers_are_on_their_way_before_the_first_is_computed() -> None:
    """They are cut along another dim than their products need: each is sent as soon as its memory is there."""
    layers = 4
    with workers(2) as world:
        world.link = slow(4 * 64 * 64, 1)
        x = Tensor.ones(4, 64).contiguous().shard(world.devices, axis=0)
        for i in range(layers):
            x = (x @ Tensor.full((64, 64), i + 1.0).contiguous().shard(world.devices, axis=0)).tanh()
        calls = [c.src[0].op for c in lowered([x])[0].src]
    sent = [i for i, op in enumerate(calls) if op is Ops.ALLGATHER]
    assert len(sent) == layers
    assert len(calls) - sent[-1] - 1 >= layers  # (the products, all of them after the last send)


def scattered(world: World, finish: bool = False, layers: int = 6) -> Tensor:
    """The gradients of cut weights as an optimiser joins them: a row for each device."""
    rng = np.random.default_rng(0)
    n = world.size
    x = Tensor(rng.standard_normal((2 * n, 24)).astype(np.float32)).shard(world.devices, axis=0)
    weights = [
        Tensor(rng.standard_normal((24, 24)).astype(np.float32)).shard(world.devices).requires_grad_()
        for _ in range(layers)
    ]
    for w in weights:
        x = (x @ w).tanh()
    rows = [g.reshape(n, -1) for g in x.sum().gradient(*weights)]
    joined = rows[0].cat(*rows[1:], dim=1)
    return ((joined * 0.5).cast("float16") if finish else joined).shard(world.devices, 0)


@pytest.mark.parametrize("finish", [False, True])
@pytest.mark.parametrize("size", [2, 3, 4])
def test_a_scattered_sum_of_joined_gradients_is_cut_between_them(size: int, finish: bool) -> None:
    found = []
    for link in (SHM, FAST, slow(2 * 6 * 24 * 24 * 4, 8)):
        with workers(size) as world:
            world.link = link
            t = scattered(world, finish)
            linears = lowered([t])
            assert_same_collectives(linears)
            sums = [c for c in linears[0].src if c.src[0].op is Ops.REDUCESCATTER]
            assert (len(sums) > 1) == (link not in (SHM, FAST)), len(sums)
            assert all((c.src[0].arg.finish is not None) == finish for c in sums)
            found.append([p.tobytes() for rank in run([t]) for p in rank[0] if p is not None])
    assert len(found[0]) == size and found[0] == found[1] == found[2]


def test_the_gradient_of_the_last_layers_is_scattered_while_the_first_are_computed() -> None:
    with workers(2) as world:
        world.link = slow(2 * 6 * 24 * 24, 4)
        linear = lowered([scattered(world)])[0]
        at = [i for i, c in enumerate(linear.src) if c.src[0].op is Ops.REDUCESCATTER]
        assert len(at) > 2 and all(b - a > 1 for a, b in itertools.pairwise(at)), at  # kernels run between them
        numbers = [linear.src[i].src[0].arg.members.number for i in at]
        assert numbers == sorted(numbers)


def test_sums_are_scattered_in_the_order_in_which_they_are_computed() -> None:
    """Whatever the order of the parameters, and with what they are joined: what is first in the model comes with the
    gradients of the first layers, at the end."""
    with workers(2) as world:
        world.link = slow(2 * 6 * 24 * 24, 4)
        rng = np.random.default_rng(0)
        x = Tensor(rng.standard_normal((8, 24)).astype(np.float32)).shard(world.devices, axis=0)
        shapes = [(24,), *[(24, 24)] * 6, (24, 7)]
        first, *weights, last = [
            Tensor(rng.standard_normal(s).astype(np.float32)).shard(world.devices).requires_grad_() for s in shapes
        ]
        x = x + first
        for w in weights:
            x = (x @ w).tanh()
        of_first, *rows, of_last = (x @ last).sum().gradient(first, *weights, last)
        joined = rows[0].reshape(2, -1).cat(*(r.reshape(2, -1) for r in rows[1:]), dim=1)
        linear = lowered([g.shard(world.devices, 0) for g in (of_first, joined, of_last)])[0]
        sums = [c.src[0].arg.bounds[-1] for c in linear.src if c.src[0].op is Ops.REDUCESCATTER]
        assert len(sums) > 4 and sums[0] == 24 * 7 and 24 in sums[-2:], sums


def test_a_sum_of_one_value_and_a_gather_stay_whole() -> None:
    with workers(2) as world:
        world.link = slow(4 * 64 * 64, 6)
        w = Tensor(np.ones((64, 64), np.float32)).shard(world.devices, 0)
        x = Tensor(np.ones((2, 4096), np.float32)).shard(world.devices, 0)
        total = x.sum(0).reshape(64, 64).shard(world.devices, 0)
        ops = [c.src[0].op for c in lowered([total + w, w.shard(world.devices) * 2])[0].src]
        assert ops.count(Ops.REDUCESCATTER) == 1 and ops.count(Ops.ALLGATHER) == 1
