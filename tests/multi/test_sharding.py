"""Every kind of op on sharded values, against the same program on one device; even, uneven and empty shards."""

from __future__ import annotations

import gc
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import numpy as np
import pytest

from manygrad import Context, Tensor, nn
from manygrad.multi.placement import REPLICATE, Partial, Shard
from manygrad.multi.rules import placement, store_spec
from manygrad.multi.rules.reduce import groups_of
from manygrad.multi.world import Membership, World
from manygrad.nn.optim import SGD, AdamW
from manygrad.nn.state import get_parameters
from manygrad.runtime.current import use
from manygrad.runtime.engine.realize import RealizeEngine
from manygrad.runtime.runtime import Runtime
from manygrad.runtime.storage import storage
from manygrad.schedule import create_linear_with_vars
from manygrad.tensor.dtype import dtypes
from manygrad.tensor.uop import GroupOp, Ops, UOp, even_bounds
from manygrad.tensor.uop.shape import unviewed
from tests.multi.cluster import lowered, workers
from tests.schedule.programs import linear_of

RANDOM = np.random.RandomState(3)
A = RANDOM.randn(6, 5, 4).astype(np.float32)
B = RANDOM.randn(6, 5, 4).astype(np.float32)
W = RANDOM.randn(4, 3).astype(np.float32)
INDEX = RANDOM.randint(0, 6, (7, 2))


def devices(n: int) -> tuple[str, ...]:
    return tuple(f"CPU:{i}" for i in range(n))


Case = tuple[str, Callable[..., Tensor], tuple[np.ndarray, ...]]
CASES: list[Case] = [
    ("elementwise", lambda a, b: (a * b + a).exp() / (b.abs() + 1), (A, B)),
    ("where", lambda a, b: (a > b).where(a, b * 2), (A, B)),
    ("broadcast", lambda a, b: a + b.sum((0, 1)), (A, B)),
    ("sum all", lambda a: a.sum(), (A,)),
    ("sum 0", lambda a: a.sum(0), (A,)),
    ("sum 1", lambda a: a.sum(1, keepdim=True), (A,)),
    ("mean of squares", lambda a: a.square().mean((0, 2)), (A,)),
    ("max", lambda a: a.amax(0), (A,)),
    ("min", lambda a: a.amin((0, 1)), (A,)),
    ("prod", lambda a: a.prod(0), (A,)),
    ("var", lambda a: a.var(0), (A,)),
    ("softmax 0", lambda a: a.softmax(0), (A,)),
    ("softmax 2", lambda a: a.softmax(2), (A,)),
    ("permute", lambda a: a.permute(2, 0, 1) * 2, (A,)),
    ("reshape merge", lambda a: a.reshape(30, 4) + 1, (A,)),
    ("reshape split", lambda a: a.reshape(2, 3, 5, 4) + 1, (A,)),
    ("reshape odd", lambda a: a.reshape(3, 40) + 1, (A,)),
    ("flip", lambda a: a.flip(0, 2), (A,)),
    ("pad", lambda a: a.pad(((1, 2), (0, 0), (0, 1))), (A,)),
    ("slice", lambda a: a[1:5, ::2, -1], (A,)),
    ("cat 0", lambda a, b: a.cat(b, dim=0), (A, B)),
    ("cat 2", lambda a, b: a.cat(b, dim=2), (A, B)),
    ("matmul", lambda a, w: a @ w, (A, W)),
    ("batched matmul", lambda a, b: a @ b.transpose(1, 2), (A, B)),
    ("gather", lambda a: a[Tensor(INDEX).shard(a.device) if isinstance(a.device, tuple) else Tensor(INDEX)], (A,)),
    ("expand", lambda a: a.reshape(6, 5, 1, 4).expand(6, 5, 3, 4) + 1, (A,)),
    ("cumsum", lambda a: a.cumsum(0), (A,)),
    ("layer norm", lambda a: a.layer_norm(4), (A,)),
    ("argmax", lambda a: a.argmax(0).float(), (A,)),
    ("cast", lambda a: a.cast("float16").float() * 2, (A,)),
]


@pytest.mark.parametrize("axis", [None, 0, 1, 2])
@pytest.mark.parametrize("n", [1, 2, 3])
def test_sharded_equals_unsharded(n: int, axis: int | None) -> None:
    for name, f, arrays in CASES:
        want = f(*[Tensor(a) for a in arrays]).numpy()
        cut = [Tensor(a).shard(devices(n), axis if axis is None or axis < a.ndim else None) for a in arrays]
        np.testing.assert_allclose(
            f(*cut).numpy(), want, rtol=2e-5, atol=2e-5, err_msg=f"{name}, {n} devices, axis {axis}"
        )


@pytest.mark.parametrize("n", [2, 3, 7])
def test_gradients_of_sharded_values(n: int) -> None:
    for name, f, arrays in CASES:
        if name in ("argmax", "prod"):
            continue
        grads: list[list[np.ndarray]] = []
        for split in (False, True):
            ts = [Tensor(a, requires_grad=True) for a in arrays]
            xs = [t.shard(devices(n), 0 if i == 0 else None) for i, t in enumerate(ts)] if split else ts
            if split:
                ts = [x.detach().contiguous().realize() for x in xs]
                for t in ts:
                    t.requires_grad = True
                xs = ts
            out = f(*xs)
            (out * out).sum().backward()
            grads.append([t.grad.numpy() for t in ts if t.grad is not None])
        for one, many in zip(*grads):
            np.testing.assert_allclose(many, one, rtol=1e-3, atol=1e-4, err_msg=f"gradient of {name} over {n} devices")


@pytest.mark.parametrize("n", [1, 2, 3, 5])
def test_more_devices_than_rows_leave_empty_shards(n: int) -> None:
    x = RANDOM.randn(3, 2).astype(np.float32)
    t = Tensor(x).shard(devices(n), 0)
    np.testing.assert_array_equal((t * 2).numpy(), x * 2)
    np.testing.assert_allclose(t.sum(0).numpy(), x.sum(0), rtol=1e-6)
    np.testing.assert_allclose(t.amax(0).numpy(), x.max(0))


@pytest.mark.parametrize("axis", [0, 1])
@pytest.mark.parametrize("kind", ["float32", "bfloat16"])
def test_cut_weights_are_gathered_before_they_are_expanded(axis: int, kind: str) -> None:
    """Once for a step of rows that are cut, however the weights are: not their products with every row."""
    rng = np.random.default_rng(0)
    x, w = rng.standard_normal((2 * 16, 6)).astype(np.float32), rng.standard_normal((10, 6)).astype(np.float32)

    def step(x: Tensor, w: Tensor) -> list[Tensor]:
        y = (x @ w.float().T).tanh()
        return [y, *(y @ w.float()).square().sum().gradient(w)]

    want = step(Tensor(x), Tensor(w, dtype=kind, requires_grad=True))
    with workers(2) as world:
        cut = Tensor(w, dtype=kind).shard(world.devices, axis).contiguous().realize().requires_grad_()
        got = step(Tensor(x).shard(world.devices, axis=0), cut)
        found = [c.src[0] for c in lowered(got)[0].src]
        gathers = [c.arg.bounds[-1] for c in found if c.op is Ops.ALLGATHER]
        assert gathers == [60] and Ops.ALLTOALL not in [c.op for c in found]
    cut = Tensor(w, dtype=kind).shard(devices(2), axis).contiguous().realize().requires_grad_()
    for a, b in zip(step(Tensor(x).shard(devices(2), axis=0), cut), want, strict=True):
        np.testing.assert_allclose(a.float().numpy(), b.float().numpy(), rtol=1e-2 if kind == "bfloat16" else 1e-5)


def test_every_change_of_placement_keeps_the_values() -> None:
    for n in (2, 3):
        for a in (None, 0, 1, 2):
            for b in (None, 0, 1, 2):
                t = (Tensor(A).shard(devices(n), a) * 2).shard(devices(n), b)
                np.testing.assert_array_equal(t.numpy(), A * 2)


def test_uneven_parts_differ_by_one() -> None:
    assert even_bounds(10, 4) == (0, 3, 5, 8, 10)
    assert even_bounds(2, 4) == (0, 1, 1, 2, 2)
    assert even_bounds(0, 3) == (0, 0, 0, 0)


def test_placements_follow_the_ops() -> None:
    x = Tensor(A).shard(devices(2), 0)
    place = lambda t: placement(t.uop)  # noqa: E731
    assert place(x * 2) == Shard(0, (0, 3, 6))
    assert place(x.permute(1, 0, 2)) == Shard(1, (0, 3, 6))
    assert place(x.reshape(30, 4)) == Shard(0, (0, 15, 30))
    assert place(x._reduce(Ops.ADD, 0, True)) == Partial(Ops.ADD)
    assert place(x._reduce(Ops.ADD, 1, True)) == Shard(0, (0, 3, 6))
    assert place(Tensor(A).shard(devices(2))) == REPLICATE
    assert place(x.reshape(8, 15)) == Shard(0, (0, 4, 8))
    assert place(x.reshape(3, 40)) == REPLICATE


class Net:
    def __init__(self) -> None:
        self.a, self.b, self.norm = nn.Linear(8, 16), nn.Linear(16, 4), nn.LayerNorm(16)

    def __call__(self, x: Tensor) -> Tensor:
        return self.b(self.norm(self.a(x)).relu())


@pytest.mark.parametrize("ignored", [-100, None])
@pytest.mark.parametrize("optimizer", [SGD, AdamW])
def test_training_gives_the_same_bits_on_1_2_4_8_devices(optimizer: Any, ignored: int | None) -> None:
    """With copies of the parameters on all devices, and with parameters of which each has a part."""
    x, y = RANDOM.randn(32, 8).astype(np.float32), RANDOM.randint(0, 4, 32)
    curves, weights = [], []
    for n, axis in ((1, None), (2, None), (4, None), (8, None), (2, 0), (4, 0), (8, 0)):
        Tensor.manual_seed(5)
        net = Net()
        for p in get_parameters(net):
            p.shard_(devices(n), axis)
        opt = optimizer(get_parameters(net), lr=0.05)
        losses = []
        with Tensor.train():
            for _ in range(6):
                opt.zero_grad()
                targets = Tensor(y).shard(devices(n), 0)
                loss = net(Tensor(x).shard(devices(n), 0)).cross_entropy(targets, ignore_index=ignored)
                loss.backward()
                opt.step()
                losses.append(loss.item())
        curves.append(losses)
        weights.append(np.concatenate([p.numpy().reshape(-1) for p in get_parameters(net)]).tobytes())
    assert curves[0][-1] < curves[0][0]
    assert all(c == curves[0] for c in curves), curves
    assert all(w == weights[0] for w in weights)


def test_uneven_batches_divide_by_the_global_count() -> None:
    x, y = RANDOM.randn(7, 8).astype(np.float32), RANDOM.randint(0, 4, 7)
    Tensor.manual_seed(1)
    net = Net()
    want = net(Tensor(x)).cross_entropy(Tensor(y)).item()
    for p in get_parameters(net):
        p.shard_(devices(3))
    got = net(Tensor(x).shard(devices(3), 0)).cross_entropy(Tensor(y).shard(devices(3), 0)).item()
    assert got == pytest.approx(want, rel=1e-6)


def test_batch_norm_sees_the_global_batch() -> None:
    x = RANDOM.randn(10, 3, 4, 4).astype(np.float32)
    outs = []
    for n in (1, 2, 3):
        norm = nn.BatchNorm(3).to(devices(n))
        with Tensor.train():
            out = norm(Tensor(x).shard(devices(n), 0))
            outs.append((out.numpy(), norm.running_mean.numpy(), norm.running_var.numpy()))
    for other in outs[1:]:
        for a, b in zip(outs[0], other):
            np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(outs[0][1], 0.1 * x.mean((0, 2, 3)), rtol=1e-4, atol=1e-6)


def test_random_numbers_do_not_depend_on_the_sharding() -> None:
    values = []
    for n in (1, 2, 3):
        Tensor.manual_seed(9)
        values.append(Tensor.rand(10, 3).shard(devices(n), 0).numpy())
    np.testing.assert_array_equal(values[0], values[1])
    np.testing.assert_array_equal(values[0], values[2])


def test_writing_into_sharded_tensors() -> None:
    for axis in (None, 0, 1):
        x = np.zeros((6, 4), np.float32)
        t = Tensor(x).shard(devices(3), axis).contiguous().realize()
        t[:, 1] = 5
        t[1:4] = 7
        t[5, 2:] = Tensor(np.array([1.0, 2.0], np.float32)).shard(devices(3))
        x[:, 1], x[1:4], x[5, 2:] = 5, 7, [1, 2]
        np.testing.assert_array_equal(t.numpy(), x)


def test_errors_name_devices_shapes_and_the_way_out() -> None:
    x = Tensor(A).shard(devices(2), 0)
    with pytest.raises(ValueError, match=r"different devices.*\(6, 5, 4\).*CPU:0.*\.to\("):
        x + Tensor(A)
    with pytest.raises(ValueError, match="named twice"):
        Tensor(A).shard(("CPU:0", "CPU:0"))
    with pytest.raises(ValueError, match="already on"):
        x.shard(devices(3), 0)
    with pytest.raises(IndexError, match="dim 3"):
        Tensor(A).shard(devices(2), 3)


def scheduled(size: int, ignored: int | None = -100) -> UOp:
    """One worker's LINEAR of a training step over `size` workers on NULL."""
    me = World(Membership(rank=0, size=size), "NULL")
    with use(Runtime(world=me)) as runtime:
        net = Net()
        for p in get_parameters(net):
            p.shard_(me.devices)
        x = Tensor.ones(size, 8).shard(me.devices, 0)
        y = Tensor.zeros(size, dtype="int64").shard(me.devices, 0)
        net(x).cross_entropy(y, ignore_index=ignored).backward()
        grads = [p.grad for p in get_parameters(net)]
        stores = [UOp(Ops.STORE, dtypes.void, (_target(g), g.uop)) for g in grads if g is not None]
        return create_linear_with_vars(UOp(Ops.SINK, dtypes.void, tuple(stores)), me, runtime.schedules).linear


def scheduled_nodes(size: int) -> tuple[int, int, int]:
    """Of that, CALLs, nodes outside of the collectives' own calls, and in them."""
    linear = scheduled(size)
    outside = len(linear.toposort(lambda u: u.op not in GroupOp.COLLECTIVE))
    return len(linear.src), outside, len(linear.toposort()) - outside


def test_gradients_wait_for_the_targets_of_others_only_where_some_may_not_count() -> None:
    counted, known = (
        [call.src[0].op in GroupOp.COLLECTIVE for call in scheduled(2, ignored).src] for ignored in (-100, None)
    )
    assert sum(counted) == sum(known) + 1 and counted.index(True) < known.index(True), (counted, known)


def _target(t: Tensor) -> UOp:
    from manygrad.runtime.engine.realize import new_buffer

    return new_buffer(t.uop, t.uop.device)  # type: ignore[arg-type]


def test_a_workers_schedule_does_not_grow_with_the_world() -> None:
    small, large = scheduled_nodes(4), scheduled_nodes(1024)
    assert large[0] <= small[0] * 1.3
    assert large[1] <= small[1] * 1.3
    assert large[2] <= small[2] * 5  # (the steps of an all-reduce: 2 lg size)


# *** an optimiser keeps every placement ***


def bytes_on(t: Tensor) -> list[int]:
    """The bytes that each device holds of a realized tensor's own elements."""
    whole = int(np.prod(t.shape)) * t.dtype.itemsize
    axis, bounds = store_spec(t.uop)
    return [whole] * len(t.device) if axis is None else [whole // t.shape[axis] * (b - a) for a, b in pairwise(bounds)]


def memory_of(t: Tensor) -> list[int]:
    """The bytes of the buffers, device by device, in which a tensor lies."""
    return [b.nbytes for b in storage(unviewed(t.realize().uop))]  # type: ignore[union-attr]


@pytest.mark.parametrize("n", [2, 3])
@pytest.mark.parametrize("optimizer", [SGD, AdamW, nn.optim.LAMB, nn.optim.RMSprop])
def test_an_optimiser_keeps_every_placement(optimizer: Any, n: int) -> None:
    """Whole, cut evenly on either dim, cut unevenly: bytes per device are the same before and after steps;
    so are the numbers on one device."""
    where = devices(n)
    shapes: list[tuple[tuple[int, ...], int | None]] = [
        ((6, 12), 0),
        ((12, 6), 1),
        ((5,), None),
        ((7, 4), 0),
        ((4, 5), 1),
        ((12,), 0),
        ((3, 2, 6), 2),
    ]
    rng = np.random.default_rng(0)
    arrays = [rng.standard_normal(s).astype(np.float32) for s, _ in shapes]
    cut = [Tensor(a).shard(where, axis).contiguous().realize().requires_grad_() for a, (_, axis) in zip(arrays, shapes)]
    plain = [Tensor(a, requires_grad=True) for a in arrays]
    before = [bytes_on(p) for p in cut]
    found = []
    for params in (cut, plain):
        opt = optimizer(params, lr=0.05, **({"momentum": 0.9} if optimizer is SGD else {}))
        for _ in range(3):
            opt.zero_grad()
            sum(
                ((p * p).sum() * 0.5 + p.sum() for p in params),
                Tensor(0.0).shard(where) if params is cut else Tensor(0.0),
            ).backward()  # type: ignore[attr-defined]
            opt.step()
        found.append(opt)
    opt = found[0]
    for p, q, a, b in zip(cut, plain, before, shapes):
        assert bytes_on(p) == a and bytes_on(p.grad) == a, b
        np.testing.assert_allclose(p.numpy(), q.numpy(), rtol=1e-5, atol=1e-6, err_msg=f"{b}")
        for name, state in opt.state[p].items():
            assert state.ndim == 0 or bytes_on(state) == a, (name, b)
    for f in opt.flats:  # and no buffer is larger than what lies in it
        for t in (f.flat, *f.state.values()):
            assert memory_of(t) == [sum(x) for x in zip(*(bytes_on(p) for p in f.params))]
    again = optimizer(cut, lr=0.05, **({"momentum": 0.9} if optimizer is SGD else {}))
    again.load_state_dict(opt.state_dict())
    for p, a in zip(cut, before):
        assert bytes_on(p) == a
        for name, state in again.state[p].items():
            assert state.ndim == 0 or bytes_on(state) == a, name
            np.testing.assert_array_equal(state.numpy(), opt.state[p][name].numpy())


def test_a_step_of_cut_parameters_moves_nothing() -> None:
    """Each device updates its part from its part of the gradient."""
    where = devices(4)
    w, v = (
        Tensor(np.ones((8, 12), np.float32)).shard(where, axis).contiguous().realize().requires_grad_()
        for axis in (0, 1)
    )
    opt = AdamW([w, v])
    for _ in range(2):
        opt.zero_grad()
        ((w * w).sum() + (v * v).sum()).backward()
        todo = opt.schedule_step()
        assert not [c for c in linear_of(todo).src if c.src[0].op in GroupOp.COLLECTIVE]
        todo[0].realize(*todo[1:])


@pytest.mark.parametrize("axis", [0, 1, None])
def test_a_cache_written_twice_while_what_was_read_between_is_alive(
    axis: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In one schedule, in program order: the collective of what was read first comes first."""
    two = ("CPU:0", "CPU:1")
    cache, other = (
        Tensor(np.zeros((8, 4))).shard(two, axis).realize(),
        Tensor(np.ones((8, 4))).shard(two, axis).realize(),
    )
    cache[0:4] = Tensor(np.ones((4, 4))).shard(two, axis)
    first = cache[0:4] * 2
    first.numpy()  # (a copy of it: `first` itself stays lazy)
    other.assign(cache + other)
    cache[0:8] = other[0:8] * 3
    second = cache[0:4] * 2 + other[4:8]
    monkeypatch.delattr(RealizeEngine, "_go_on_without")  # not by trying again
    np.testing.assert_array_equal(second.numpy(), np.full((4, 4), 13.0))
    np.testing.assert_array_equal(first.numpy(), np.full((4, 4), 2.0))


@pytest.mark.parametrize("shape, axis", [((2, 0, 3), 1), ((2, 3, 0), 2), ((0, 3), 0), ((0, 3), 1)])
def test_nothing_is_gathered(shape: tuple[int, ...], axis: int) -> None:
    nothing = Tensor(np.zeros(shape, np.float32)).shard(devices(2), axis).realize()
    assert (nothing.to("CPU:0") + 1).numpy().shape == shape
    assert nothing.diag_embed(1, 0, 1).numpy().shape == (*(1 + nothing.shape[-1],) * 2, *shape[:-1])


# *** sums by global position ***


@pytest.mark.parametrize(
    "blocks, counts, rows",
    [
        (8, (1, 2, 4, 8), 21),
        (8, (1, 2, 4, 8), 100),
        (24, (1, 3, 6, 12), 61),
        (24, (1, 3, 6, 12), 72),
        (24, (1, 3, 24), 77),
    ],
)
def test_a_sum_has_the_same_bits_on_every_count_that_is_the_blocks_over_a_power_of_two(
    blocks: int, counts: tuple[int, ...], rows: int
) -> None:
    a, w = RANDOM.randn(rows, 11).astype(np.float32), RANDOM.randn(11, 5).astype(np.float32)
    found = []
    with Context(SUM_BLOCKS=blocks):
        for n in counts:
            x, v = Tensor(a).shard(devices(n), 0), Tensor(w).shard(devices(n)).contiguous().realize().requires_grad_()
            (grad,) = (x @ v).square().sum().gradient(v)
            found.append([t.numpy().tobytes() for t in (x.sum(0), x.mean(), grad)])
    assert all(f == found[0] for f in found)


def test_the_number_of_blocks_holds_where_the_graph_lives_on() -> None:
    """It is asked for when a sum is lowered: what is kept beside nodes depends on them alone."""
    x = Tensor(RANDOM.randn(64, 5).astype(np.float32)).shard(devices(2), 0)
    y = x.reshape(8, 8, 5).permute(1, 0, 2) * 3
    total = y.sum((0, 1))

    def bits(blocks: int, t: Tensor) -> bytes:
        with Context(SUM_BLOCKS=blocks):
            return (t + 0).numpy().tobytes()  # (a new tensor of the same graph)

    eight, two = bits(8, total), bits(2, total)
    fresh = x.reshape(8, 8, 5).permute(1, 0, 2) * 3
    del y, total
    gc.collect()
    assert bits(2, fresh.sum((0, 1))) == two != eight


def test_where_blocks_are_cut() -> None:
    assert Shard.even(0, 21, 4) == Shard(0, (0, 6, 11, 16, 21)) and Shard.even(0, 21, 4).blocks == Shard.even(
        0, 21, 1
    ).blocks == (0, 3, 6, 8, 11, 14, 16, 19, 21)
    assert (
        groups_of((0, 2, 3, 5, 6)) == 2
        and groups_of((0, 3, 6, 8, 11, 14, 16, 19, 21)) == 1
        and groups_of((0, 2, 4, 6, 8)) == 4
    )
    assert Shard.even(0, 21, 3).blocks == ()  # 8 is no multiple of 3
    # each of 21 rows is ten elements now, and the other way round
    assert Shard(0, (0, 110, 210), 21).blocks == (0, 30, 60, 80, 110, 140, 160, 190, 210)
    assert Shard(0, (0, 2, 4), 12).blocks == ()  # where 12 rows are cut into 8 blocks lies within these 4
    assert groups_of(even_bounds(50, 24)) == 1  # (two groups of 12 blocks are no subtrees of 24)


def test_a_gradient_that_is_a_number_lies_on_its_devices() -> None:
    t = Tensor([1.0, 2.0, 3.0]).shard(("CPU:0", "CPU:1"), axis=0).requires_grad_()
    t.sum().backward()
    assert t.grad is not None and t.grad.device == t.device == t.grad.realize().device
