"""Nodes: interning, life and death, pickling, structural keys, shapes and devices."""

from __future__ import annotations

import pickle
import subprocess
import sys

import pytest

from manygrad.tensor.dtype import dtypes
from manygrad.tensor.uop import BufferSpec, Ops, ReduceArg, ShardArg, UOp, toposort
from manygrad.tensor.uop.rewrite import substitute
from manygrad.tensor.uop.show import show
from manygrad.tensor.uop.uop import live_nodes

f32 = dtypes.float32


def buffer(uid: int, *shape: int, device: str | tuple[str, ...] = "CPU:0") -> UOp:
    return UOp(Ops.BUFFER, f32, (), BufferSpec(uid, shape, f32, device))


def chain(depth: int, start: UOp) -> UOp:
    u, one = start, UOp.const(f32, 1.0)
    for _ in range(depth):
        u = u.alu(Ops.ADD, one)
    return u


def test_equal_nodes_are_one_object() -> None:
    a, b = buffer(-900, 4), buffer(-901, 4)
    assert a.alu(Ops.ADD, b) is a.alu(Ops.ADD, b)
    assert a.alu(Ops.ADD, b) is not b.alu(Ops.ADD, a)
    assert a.replace(arg=a.arg) is a
    assert UOp(Ops.BUFFER, f32, (), BufferSpec(-900, (4,), f32, "CPU:0")) is a


def test_constants_of_different_kind_are_different_nodes() -> None:
    """1 == 1.0 == True and 0.0 == -0.0 in Python, nan != nan; as constants they are told apart by type and bits."""
    values = [1, 1.0, True, 0, 0.0, -0.0, False, float("inf"), -float("inf"), float("nan")]
    nodes = [UOp(Ops.CONST, dtypes.void, (), v) for v in values]
    assert len({id(n) for n in nodes}) == len(values)
    assert UOp.const(f32, float("nan")) is UOp.const(f32, float("nan"))
    assert UOp.const(f32, -0.0) is not UOp.const(f32, 0.0)
    assert str(UOp.const(f32, -0.0).arg) == "-0.0"


def test_a_constant_has_the_value_its_type_can_hold() -> None:
    assert UOp.const(f32, 1).arg == 1.0 and type(UOp.const(f32, 1).arg) is float
    assert UOp.const(dtypes.int32, 3.0).arg == 3 and type(UOp.const(dtypes.int32, 3.0).arg) is int
    assert UOp.const(dtypes.bool, 7).arg is True


def test_unused_nodes_die(no_collection: None) -> None:
    a = buffer(-902, 4)
    before = live_nodes()
    u = chain(1000, a)
    assert live_nodes() >= before + 1000
    del u
    assert live_nodes() <= before + 1  # (the constant)


def test_a_node_can_be_made_again_after_it_died() -> None:
    a = buffer(-903, 4)
    text = show(chain(3, a))
    for _ in range(100):
        assert show(chain(3, a)) == text


def test_deep_graphs_live_and_die(no_collection: None) -> None:
    depth = 200_000
    a = buffer(-904, 4)
    before = live_nodes()
    u = chain(depth, a)
    assert u.shape == (4,) and u.device == "CPU:0"
    assert len(u.toposort()) == depth + 2
    assert len(u.key) == 32
    moved = substitute(u, {a: buffer(-905, 4)})
    assert moved is chain(depth, buffer(-905, 4))
    del u, moved
    assert live_nodes() <= before + 2


def test_pickling_gives_the_same_node() -> None:
    x = buffer(-906, 2, 3)
    u = UOp(Ops.REDUCE, f32, (x.alu(Ops.MUL, x),), ReduceArg(Ops.ADD, (1,))).cast(dtypes.bfloat16)
    assert pickle.loads(pickle.dumps(u)) is u
    spec = BufferSpec(-907, (4, 4), f32, ("CPU:0", "CPU:1"), 0, (0, 2, 4))
    sharded = UOp(Ops.BUFFER, f32, (), spec)
    assert pickle.loads(pickle.dumps(sharded)) is sharded
    for d in (*dtypes.all, dtypes.void, dtypes.index):
        assert pickle.loads(pickle.dumps(d)) is d


PROGRAM = """
from manygrad.tensor.dtype import dtypes
from manygrad.tensor.uop import BufferSpec, Ops, ReduceArg, UOp
from manygrad.tensor.uop import symbolic as sym
f32 = dtypes.float32
x = UOp(Ops.BUFFER, f32, (), BufferSpec(-1, (4, 6), f32, "CPU:0"))
n = sym.variable("n", 1, 9)
u = UOp(Ops.SHRINK, f32, (x,), ((0, n), (0, 6)))
u = UOp(Ops.REDUCE, f32, (u.alu(Ops.MUL, u),), ReduceArg(Ops.ADD, (1,)))
tenth = UOp(Ops.RESHAPE, f32, (UOp.const(f32, 0.1),), (1, 1))
u = u.alu(Ops.ADD, UOp(Ops.EXPAND, f32, (tenth,), (n, 1))).cast(dtypes.float16)
"""


def test_keys_are_the_same_in_every_process() -> None:
    here: dict[str, UOp] = {}
    exec(PROGRAM, here)
    texts = set()
    for seed in ("1", "2"):  # Python's string hash differs
        run = [sys.executable, "-c", PROGRAM + "print(u.key.hex())"]
        texts.add(
            subprocess.run(run, env={"PYTHONHASHSEED": seed}, capture_output=True, text=True, check=True).stdout.strip()
        )
    assert texts == {here["u"].key.hex()}


def test_keys_tell_structure_apart() -> None:
    a, b = buffer(-908, 4), buffer(-909, 4)
    nodes = [
        a, b, a.alu(Ops.ADD, b), b.alu(Ops.ADD, a), a.alu(Ops.SUB, b), a.alu(Ops.ADD, a), a.cast(dtypes.float64),
        a.bitcast(dtypes.int32),
        UOp.const(f32, 0.0), UOp.const(f32, -0.0), UOp.const(dtypes.int32, 0), UOp(Ops.FLIP, f32, (a,), (True,)),
        UOp(Ops.FLIP, f32, (a,), (False,)),
    ]  # fmt: skip
    assert len({n.key for n in nodes}) == len(nodes)


def test_toposort_gives_sources_first_and_each_node_once() -> None:
    a = buffer(-910, 4)
    u = a
    for _ in range(60):  # 2**60 paths
        u = u.alu(Ops.ADD, u)
    order = u.toposort()
    assert len(order) == 61
    at = {n: i for i, n in enumerate(order)}
    assert all(at[s] < at[n] for n in order for s in n.src)
    assert toposort((a, u))[0] is a
    assert u.toposort(lambda n: n is u) == [u.src[0], u]


@pytest.mark.parametrize(
    "op, arg, want",
    [
        (Ops.RESHAPE, (6, 4), (6, 4)),
        (Ops.PERMUTE, (2, 0, 1), (4, 2, 3)),
        (Ops.PAD, ((1, 0), (0, 0), (2, 3)), (3, 3, 9)),
        (Ops.SHRINK, ((0, 1), (1, 3), (4, 4)), (1, 2, 0)),
        (Ops.FLIP, (True, False, True), (2, 3, 4)),
        (Ops.REDUCE, ReduceArg(Ops.MAX, (0, 2)), (1, 3, 1)),
    ],
)
def test_shapes(op: Ops, arg: tuple, want: tuple[int, ...]) -> None:
    assert UOp(op, f32, (buffer(-911, 2, 3, 4),), arg).shape == want


def test_device_of_a_node_is_that_of_its_storage() -> None:
    x = buffer(-912, 4)
    two = UOp(Ops.SHARD, f32, (x,), ShardArg(("CPU:0", "CPU:1"), 0))
    assert UOp.const(f32, 1.0).device is None
    assert UOp.const(f32, 1.0).alu(Ops.ADD, x).device == "CPU:0"
    assert UOp(Ops.COPY, f32, (x,), "CPU:1").device == "CPU:1"
    assert two.alu(Ops.NEG).device == ("CPU:0", "CPU:1")


def test_show_names_every_node_once() -> None:
    x = buffer(-913, 2, 3)
    y = UOp(Ops.REDUCE, f32, (x.alu(Ops.MUL, x),), ReduceArg(Ops.ADD, (0,)))
    assert show(y).splitlines() == [
        "%0 = BUFFER float32 (2, 3) [#-913 (2, 3) on CPU:0]",
        "%1 = MUL float32 (2, 3) %0 %0",
        "%2 = REDUCE float32 (1, 3) %1 [(ADD, (0))]",
    ]
