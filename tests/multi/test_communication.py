"""Which collectives a program becomes, on how many elements, and what each worker schedules."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest

from manygrad import Tensor, Variable, nn
from manygrad.collectives.wanted import group_of
from manygrad.multi.small_first import SMALL
from manygrad.multi.world import Link, Membership, World
from manygrad.nn.state import get_parameters
from manygrad.runtime.current import use
from manygrad.runtime.runtime import Runtime
from manygrad.tensor.uop import GroupOp, Ops
from manygrad.tensor.uop.args import terms_dtype
from manygrad.tensor.uop.symbolic import linear
from tests.multi.cluster import assert_same_collectives, collectives_of, lowered, run, workers
from tests.schedule.programs import linear_of, scheduled

TWO, FOUR = ("CPU:0", "CPU:1"), tuple(f"CPU:{i}" for i in range(4))


def cut(*shape: int, axis: int | None = 0, devices: tuple[str, ...] = TWO) -> Tensor:
    return Tensor(np.ones(shape, np.float32)).shard(devices, axis).contiguous().realize()


def communication(tensors: Tensor | list[Tensor]) -> list[tuple[str, int]]:
    """(collective or copy, elements of its result on the first device)."""
    out = []
    for c in linear_of(tensors).src:
        op = c.src[0].op
        if op in GroupOp.COLLECTIVE:
            out.append((op.name, int(np.prod(c.src[1].shape))))
        elif op is Ops.COPY:
            out.append(("COPY", int(np.prod(c.src[1].shape))))
    return out


def test_what_stays_cut_needs_no_communication() -> None:
    x, y, w = cut(8, 6), cut(8, 6), cut(6, 5, axis=None)
    columns, rows = (
        Tensor([2, 0]).shard(TWO).contiguous().realize(),
        Tensor(np.zeros((8, 2), np.int64)).shard(TWO, 0).contiguous().realize(),
    )
    for t in (
        (x * y + 1).exp(), x.sum(1), x.softmax(1), x @ w, (x @ w).relu() @ cut(5, 2, axis=None), x.T * 2,
        x.reshape(8, 2, 3).sum(2), x.reshape(48), x[:, 1:3], x.pad((1, 1)),
        x.cat(y, dim=1), x.unsqueeze(1).expand(8, 3, 6), x.flip(1), x.layer_norm(6), x + w.sum(), x[:, columns],
        w.sum(0), x.cast("float16"), x.contiguous(),
        w[rows], x.reshape(6, 8), x.reshape(16, 3), x.gather(1, rows), x.scatter_add(1, rows, y),
        x.scatter(1, rows, 2.0), x.sort(1).values, x.topk(2).indices,
        x.gather(1, rows).sum().gradient(x)[0], x.index_fill(0, columns, 3.0), x.median(1).values,
    ):  # fmt: skip
        assert communication(t) == [], t


def test_a_sum_over_the_cut_dim_is_one_all_reduce_of_the_result() -> None:
    x = cut(8, 6)
    assert communication(x.sum()) == [("ALLREDUCE", 1)]
    assert communication(x.sum(0)) == [("ALLREDUCE", 6)]
    assert communication((x * 2).sum(0) + 1) == [("ALLREDUCE", 6)]
    assert communication(x.max()) == [("ALLREDUCE", 1)]
    assert communication(x.mean()) == [("ALLREDUCE", 1)]
    assert communication(cut(5, 8, axis=1) @ cut(8, 3)) == [("ALLREDUCE", 15)]


def test_terms_are_added_before_they_are_sent() -> None:
    """Sums of two products over cut dims: one all-reduce, not two."""
    a, b = cut(5, 8, axis=1), cut(8, 3)
    assert communication(a @ b + (a * 2) @ b) == [("ALLREDUCE", 15)]
    assert communication(-(a @ b)) == [("ALLREDUCE", 15)]


def test_a_sum_that_is_cut_again_is_a_reduce_scatter() -> None:
    x = cut(8, 6)
    assert communication(x.sum(0).shard(TWO, 0)) == [("REDUCESCATTER", 3)]


def test_a_change_of_the_cut_dim_is_an_all_to_all() -> None:
    x, y = cut(8, 6, devices=FOUR), cut(8, 6, axis=1, devices=FOUR)
    assert communication((x * 2).shard(FOUR, 1)) == [("ALLTOALL", 16)]
    assert communication(x + y) == [("ALLTOALL", 12)]  # y becomes cut like x: 2 rows of 6


def test_what_cannot_stay_cut_is_gathered() -> None:
    x = cut(8, 6)
    rows = Tensor([3, 1]).shard(TWO).contiguous().realize()
    for t in (x.reshape(3, 16), x.flip(0), x[rows], x.shard(TWO, None)):
        assert communication(t) == [("ALLGATHER", 48)]
    assert communication(cut(7, 6).reshape(42)) == []  # whole rows: 4 and 3
    assert communication(cut(7, 6).reshape(6, 7)) == [("ALLGATHER", 42)]


def test_replicating_copies_once_a_device_and_cutting_a_replica_moves_nothing() -> None:
    t = Tensor(np.ones((8, 6), np.float32)).realize()
    assert communication(t.shard(FOUR)) == [("COPY", 48)] * 3
    assert communication(t.shard(FOUR, 0)) == [("COPY", 12)] * 3
    assert communication(cut(8, 6, axis=None).shard(TWO, 0)) == []


def test_one_device_needs_no_collective() -> None:
    x = cut(8, 6, devices=("CPU:1",))
    assert communication([x.sum(), x.T @ x, x.softmax(0)]) == []


class Net:
    def __init__(self) -> None:
        self.a, self.norm, self.b = nn.Linear(6, 8), nn.LayerNorm(8), nn.Linear(8, 3)

    def __call__(self, x: Tensor) -> Tensor:
        return self.b(self.norm(self.a(x)).relu())


def test_all_gradients_of_an_optimiser_step_are_one_all_reduce() -> None:
    net = Net()
    params = get_parameters(net)
    for p in params:
        p.shard_(TWO)
    optimiser = nn.optim.AdamW(params)
    x, y = cut(8, 6), Tensor(np.zeros(8, np.int64)).shard(TWO, 0).contiguous().realize()
    with Tensor.train():
        for _ in range(2):
            optimiser.zero_grad()
            loss = net(x).cross_entropy(y)
            loss.backward()
            todo = optimiser.schedule_step()
            moved = communication([*todo, loss])
            todo[0].realize(*todo[1:], loss)
    count = sum(int(np.prod(p.shape)) for p in params)
    # the loss's sum, its count of targets, the gradients
    assert sorted(moved) == [("ALLREDUCE", 1), ("ALLREDUCE", 1), ("ALLREDUCE", count)]


# *** several workers ***


@pytest.fixture
def four_workers() -> Iterator[World]:
    """This process as worker 1 of 4 with 2 devices, on NULL."""
    me = World(Membership(rank=1, size=4, local_rank=1, local_size=4, devices_per_node=2), "NULL")
    with use(Runtime(world=me)):
        yield me


def test_names_of_the_world(four_workers: World) -> None:
    world = four_workers
    assert world.devices == tuple(f"NULL:{i}@{r}" for r in range(4) for i in range(2))
    assert world.local_devices == ("NULL:0@1", "NULL:1@1")
    assert world.is_local("NULL:1@1") and world.is_local("NULL:0") and not world.is_local("NULL:0@2")
    assert world.rank_of("NULL:0@3") == 3 and world.rank_of("NULL:0") == 1
    with pytest.raises(ValueError, match=r"node 4 does not exist, the world has 4 \(0\.\.3\)"):
        Tensor([1.0]).to("NULL:0@4")
    with pytest.raises(ValueError, match=r"rank 4 is outside 0\.\.3"):
        Membership(rank=4, size=4)
    with pytest.raises(ValueError, match="devices_per_node must be at least 1"):
        Membership(rank=0, size=4, devices_per_node=0)


def test_a_worker_schedules_its_own_devices_only(four_workers: World) -> None:
    x = Tensor(np.ones((16, 6), np.float32), device="NULL").shard(four_workers.devices, 0)
    calls = scheduled((x * 2).sum(0)).linear.src
    kernels = [c for c in calls if c.src[0].op is Ops.SINK]
    assert {a.device for c in kernels for a in c.src[1:]} <= {"NULL:0", "NULL:1", "NULL:0@1", "NULL:1@1"}
    (reduce,) = [c for c in calls if c.src[0].op is Ops.ALLREDUCE]
    assert len(reduce.src) == 1 + 2 + 2  # results and inputs of the own devices
    members = reduce.src[0].arg.members
    assert members.devices == four_workers.devices and members.mine == (2, 3) and members.counts == (6, 6)


def test_the_rows_of_a_worker(four_workers: World) -> None:
    """16 rows over 8 devices: worker 1 holds rows 4, 5 on its first and 6, 7 on its second device,
    which gets a copy of them."""
    x = Tensor(np.ones((16, 6), np.float32), device="NULL").shard(four_workers.devices, 0)
    reads = []
    for call in scheduled(x * 1.5).linear.src:
        if call.src[0].op is Ops.COPY:
            reads.append((call.src[2].arg.offset // 6, call.src[2].arg.shape))
        elif call.src[2].op is Ops.VIEW:
            assert all(linear(u.src[0].src[1])[1] == 0 for u in call.src[0].toposort() if u.op is Ops.LOAD)
            reads.append((call.src[2].arg.offset // 6, (2, 6)))
    assert sorted(reads) == [(4, (2, 6)), (6, (2, 6))]


def test_devices_of_others_are_refused(four_workers: World) -> None:
    with pytest.raises(
        ValueError,
        match=(
            r"none of the 2 devices NULL:0@2\.\. belongs to this worker \(rank 1\); "
            r"shard over manygrad\.world\.devices"
        ),
    ):
        (Tensor(np.ones(4, np.float32), device="NULL").shard(("NULL:0@2", "NULL:0@3"), 0) * 2).realize()


# *** every worker runs the same list of collectives ***


def test_a_sum_that_one_device_uses_is_run_by_all() -> None:
    with workers(2) as world:
        d = world.devices
        x, v = Tensor(np.ones((4, 5), np.float32)).shard(d, 0), Tensor(np.ones(40, np.float32)).shard(d, 0)
        out = x.sum(0).relu().scatter_add(0, Tensor(np.arange(40) % 4).shard(d, 0), v)
        linears = lowered([out])
        assert_same_collectives(linears)
        assert [c[0] for c in collectives_of(linears[1])] == ["ALLREDUCE", "ALLREDUCE"]
        for rank in range(2):
            np.testing.assert_array_equal(run([out])[rank][0][rank], [14, 14, 14, 14, 4])


def test_a_value_for_one_device_is_computed_by_all() -> None:
    with workers(3) as world:
        x = Tensor(np.ones((4, 5), np.float32)).shard(world.devices, 0)
        found = run([x.sum().to(world.devices[1]), (x * 2).sum()])
        assert [r[0][0] for r in found] == [None, 20, None] and [r[1][k] for k, r in enumerate(found)] == [40, 40, 40]


@pytest.mark.parametrize("rows", [1, 3, 5, 6])
def test_the_last_batch_of_a_loader(rows: int) -> None:
    """Linear, then BatchNorm, with fewer rows than a multiple of the workers."""
    with workers(4) as world:
        net = nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3, track_running_stats=False))
        params = get_parameters(net)
        a = np.random.default_rng(0).standard_normal((rows, 4)).astype(np.float32)
        with Tensor.train():
            if rows == 1:
                with pytest.raises(ValueError, match="more than 1 value"):
                    net(Tensor(a))
                return
            plain = net(Tensor(a))
            want = [t.numpy() for t in (plain, *plain.exp().sum().gradient(*params))]
            for p in params:
                p.shard_(world.devices)
            out = net(Tensor(a).shard(world.devices, 0))
            found = run([out.shard(world.devices), *out.exp().sum().gradient(*params)])
        for rank, tensors in enumerate(found):
            for parts, w in zip(tensors, want):
                np.testing.assert_allclose(np.asarray(parts[rank]).reshape(w.shape), w, rtol=2e-4, atol=2e-4)


def test_a_device_whose_part_is_empty_has_nothing_to_run() -> None:
    x = cut(4, 4, 4).requires_grad_()
    t = (x * x + x)[:1]
    (t - t.sum(1, keepdim=True)).square().sum().backward()
    plain = Tensor(np.ones((4, 4, 4), np.float32), requires_grad=True)
    u = (plain * plain + plain)[:1]
    (u - u.sum(1, keepdim=True)).square().sum().backward()
    np.testing.assert_array_equal(x.grad.numpy(), plain.grad.numpy())  # type: ignore[union-attr]


def test_a_part_that_is_constant_is_sent_from_its_device() -> None:
    """The second device holds no column: what it is to send folds to an empty constant,
    which lies nowhere by itself."""
    x = Tensor(np.array([[2.0], [3.0]])).shard(TWO)
    y = Tensor(np.array([[5.0], [7.0]])).shard(TWO, 1)
    hidden = (x * y + y).sum(0).relu().scatter_add(0, Tensor(np.array([0, 0])).shard(TWO), y.reshape(-1))
    (gradient,) = (hidden * hidden).sum().gradient(x)
    assert gradient.numpy().tolist() == [[2 * 55 * 5.0], [2 * 55 * 7.0]]


def test_what_is_made_of_small_values_alone_is_sent_first() -> None:
    """The count of a mean's terms does not wait for the terms; what is made of larger values keeps its order."""
    x, y = cut(4, SMALL), cut(4)
    total, count = (x * 2).sum(), (y != 0).sum()
    for both in (total.exp() + count.exp(), count.exp() + total.exp()):
        sent = [c for c in linear_of(both.contiguous()).src if c.src[0].op is Ops.ALLREDUCE]
        numbers = {terms_dtype(c.src[0]): c.src[0].arg.members.number for c in sent}
        assert sorted(numbers, key=numbers.__getitem__) == [count.dtype, total.dtype]


def test_a_host_is_a_group_of_neighbouring_ranks() -> None:
    with workers(4, devices_per_node=2) as world:
        devices = world.devices
        assert group_of(devices, world) == 2
        world.link = Link("zmq", 1e8, 1e-4, group=2)
        assert group_of(devices, world) == 4 and group_of(devices[:4], world) == 4
        assert group_of(devices[2:6], world) == 2  # of two hosts, a half each
        assert group_of(devices[::2], world) == 2  # a device of each worker
        assert group_of(devices[1:], world) == 1


def test_dims_of_symbolic_size_beside_the_cut_one() -> None:
    """Attention over as much of a cache as is written, heads cut over devices, sends nothing."""
    n, rng = Variable("n", 1, 16), np.random.default_rng(0)
    q, cache = rng.standard_normal((4, 1, 8)), rng.standard_normal((4, 16, 8))
    query, keys = (Tensor(a.astype(np.float32)).shard(TWO, 0).contiguous().realize() for a in (q, cache))
    weight = Tensor(cache[0].astype(np.float32)).shard(TWO, 1).contiguous().realize()
    for k in (3, 16, 7):
        seen = keys[:, : n.bind(k)]
        scores = q @ cache[:, :k].transpose(0, 2, 1)
        part = np.exp(scores - scores.max(-1, keepdims=True))
        attended = (query @ seen.transpose(1, 2)).softmax(-1) @ seen
        rows = attended[:1, 0] @ weight[: n.bind(k)].sum(0).reshape(8, 1)
        assert communication(attended) == []
        want = part / part.sum(-1, keepdims=True) @ cache[:, :k]
        np.testing.assert_allclose(attended.numpy(), want, rtol=1e-4, atol=1e-5)
        np.testing.assert_allclose(rows.numpy(), want[:1, 0] @ cache[0, :k].sum(0).reshape(8, 1), rtol=1e-4, atol=1e-4)
