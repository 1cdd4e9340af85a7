"""A graph that breaks a stage's rules is named: pass, rule and op."""

from __future__ import annotations

import importlib
import itertools
import re

import pytest

from manygrad import Tensor
from manygrad.schedule import PASSES, trace
from manygrad.schedule.chain import ChainSpec
from manygrad.tensor.dtype import dtypes
from manygrad.tensor.environment import SPEC, Context
from manygrad.tensor.uop import BufferSpec, Ops, PatternMatcher, UOp, UPat
from manygrad.tensor.uop.spec import SPECS, verify

f32, i32 = dtypes.float32, dtypes.int32
x = UOp(Ops.BUFFER, f32, (), BufferSpec(-800, (2, 3), f32, "CPU:0"))
n = UOp(Ops.BUFFER, i32, (), BufferSpec(-801, (2, 3), i32, "CPU:0"))
y = UOp(Ops.BUFFER, f32, (), BufferSpec(-802, (3, 2), f32, "CPU:0"))
two = UOp(Ops.BUFFER, f32, (), BufferSpec(-803, (2, 3), f32, ("CPU:0", "CPU:1"), 0, (0, 1, 2)))
r = UOp(Ops.RANGE, dtypes.index, (UOp.const(dtypes.index, 4),), (0, "loop"))

param = UOp(Ops.PARAM, f32, (), 0)
load = UOp(Ops.LOAD, f32, (UOp(Ops.INDEX, f32, (param, r)),))

BROKEN = [
    ("tensor", "ALU sources have one dtype", UOp(Ops.ADD, f32, (x, n))),
    ("tensor", "ALU sources have one shape", UOp(Ops.ADD, f32, (x, y))),
    ("tensor", "comparisons give bool", UOp(Ops.CMPLT, f32, (x, x))),
    ("tensor", "WHERE chooses by a bool", UOp(Ops.WHERE, f32, (n, x, x))),
    ("tensor", "movement keeps the dtype", UOp(Ops.RESHAPE, i32, (x,), (6,))),
    ("tensor", "PERMUTE names every dim once", UOp(Ops.PERMUTE, f32, (x,), (0, 0))),
    ("tensor", "PAD and SHRINK have a pair a dim", UOp(Ops.SHRINK, f32, (x,), ((0, 1),))),
    ("tensor", "EXPAND grows only dims of 1", UOp(Ops.EXPAND, f32, (x,), (4, 3))),
    ("tensor", "REDUCE axes exist", UOp(Ops.REDUCE, f32, (UOp(Ops.RESHAPE, f32, (x,), (6,)),), (Ops.ADD, (-1,)))),
    ("tensor", "STORE fits its target", UOp(Ops.STORE, dtypes.void, (x, y))),
    ("tensor", "GATHER indices have one shape", UOp(Ops.GATHER, f32, (x, n, UOp(Ops.RESHAPE, i32, (n,), (6,))))),
    ("tensor", "kernel ops do not stand in a tensor graph", r),
    ("tensor", "CHECK looks at integers and has a word", UOp(Ops.CHECK, f32, (x, n), (0, 3, None))),
    ("clean", "no gradient markers are left", UOp(Ops.DETACH, f32, (x,))),
    ("lower_shards", "no SHARD is left", UOp(Ops.SHARD, f32, (x,), (("CPU:0",), None))),
    ("lower_checks", "no CHECK is left", UOp(Ops.CHECK, i32, (n, n), (0, 3, None))),
    ("simplify", "only buffers, MSTACK and collectives are on several devices", UOp(Ops.NEG, f32, (two,))),
    ("lower_storage", "no CAT or SCATTER is left", UOp(Ops.CAT, f32, (x, x), 0)),
    ("lower_storage", "COPY and collectives stand in a CALL", UOp(Ops.COPY, f32, (x,), "CPU:1")),
    ("insert_stores", "no CONTIGUOUS or BARRIER is left", UOp(Ops.CONTIGUOUS, f32, (x,))),
    ("rangeify", "only kernel ops stand in a kernel", UOp(Ops.RESHAPE, f32, (load,), (1,))),
    ("rangeify", "ALU sources have one dtype", UOp(Ops.ADD, f32, (load, UOp.const(i32, 1)))),
    (
        "rangeify",
        "STORE writes an INDEX of its type and ends RANGEs",
        UOp(Ops.STORE, dtypes.void, (load.src[0], UOp.const(i32, 1), r)),
    ),
    (
        "rangeify",
        "STORE writes an INDEX of its type and ends RANGEs",
        UOp(Ops.STORE, dtypes.void, (load.src[0], load, load)),
    ),
    ("rangeify", "LOAD reads an INDEX", UOp(Ops.LOAD, f32, (param,))),
    ("rangeify", "INDEX is a PARAM, an offset and maybe a condition", UOp(Ops.INDEX, f32, (param, UOp.const(i32, 1)))),
    ("rangeify", "REDUCE adds, multiplies or takes the largest over RANGEs", UOp(Ops.REDUCE, f32, (load, r), Ops.ADD)),
    ("rangeify", "RANGE has one size", UOp(Ops.RANGE, dtypes.index, (), (0, "loop"))),
    ("linear", "a LINEAR holds CALLs", UOp(Ops.LINEAR, dtypes.void, (load,))),
    (
        "linear",
        "a CALL's arguments are buffers or VIEWs of buffers",
        UOp(Ops.CALL, dtypes.void, (UOp(Ops.COPY, f32, (), "CPU:1"), x, load)),
    ),
    (
        "linear",
        "a kernel has as many arguments as PARAMs",
        UOp(Ops.CALL, dtypes.void, (UOp(Ops.SINK, dtypes.void, (load,)), x, x)),
    ),
    (
        "linear",
        "a CHAIN's kernels are given the CALL's arguments",
        UOp(Ops.CALL, dtypes.void, (UOp(Ops.CHAIN, dtypes.void, (), ChainSpec(2, ((0, 1),), ())), x)),
    ),
]


@pytest.mark.parametrize("stage, rule, bad", BROKEN, ids=[f"{stage}: {rule}" for stage, rule, _ in BROKEN])
def test_violation_names_pass_rule_and_op(stage: str, rule: str, bad: UOp) -> None:
    sink = bad if stage == "linear" else UOp(Ops.SINK, dtypes.void, (bad,))
    with pytest.raises(
        AssertionError, match=re.escape(f"after pass {stage!r}: rule {rule!r} is broken by UOp({bad.op.name}")
    ):
        verify(sink, stage)


def test_every_rule_is_tried() -> None:
    assert {rule for _, rule, _ in BROKEN} == {name for rules in SPECS.values() for name, _ in rules}


def test_a_later_stage_holds_the_rules_of_the_earlier_ones() -> None:
    order = [
        "tensor",
        "clean",
        "lower_shards",
        "lower_checks",
        "simplify",
        "compute_in_parts",
        "lower_storage",
        "copy_old_values",
        "split_updates",
        "insert_stores",
    ]
    assert list(SPECS)[:10] == order  # (then kernels, and the LINEAR of calls, which are graphs of their own)
    for before, after in itertools.pairwise(order):
        assert {name for name, _ in SPECS[before]} <= {name for name, _ in SPECS[after]}


def test_legal_graphs_pass() -> None:
    good = UOp(Ops.REDUCE, f32, (x.alu(Ops.ADD, UOp(Ops.PERMUTE, f32, (y,), (1, 0))),), (Ops.ADD, (0, 1)))
    verify(UOp(Ops.SINK, dtypes.void, (good,)), "tensor")


def test_specs_are_on_in_tests_and_a_broken_pass_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    assert SPEC
    simplify = importlib.import_module("manygrad.schedule.simplify")  # (the package has a function of that name)
    broken = PatternMatcher([(UPat(Ops.ADD, "u"), lambda u: UOp(Ops.DETACH, u.dtype, (u.src[0],)))])
    monkeypatch.setattr(simplify, "pm_simplify", broken)
    with pytest.raises(
        AssertionError, match=r"after pass 'simplify': rule 'no gradient markers are left' is broken by UOp\(DETACH"
    ):
        (Tensor([1.0, 2.0]) + 1).realize()
    with Context(SPEC=0):  # unverified, it goes on to the kernel
        with pytest.raises(AssertionError, match="DETACH reached a kernel"):
            (Tensor([1.0, 2.0]) + 1).realize()


def test_passes_run_in_order() -> None:
    seen: list[str] = []
    trace.observers.append(lambda name, graph: seen.append(name))
    try:
        (Tensor([1.0, 2.0, 3.0, 3.5]) * 2.125 + 0.375).realize()
    finally:
        trace.observers.pop()
    assert (
        seen
        == [p.name for p in PASSES[:9]]
        == [
            "clean",
            "lower_shards",
            "lower_checks",
            "simplify",
            "compute_in_parts",
            "lower_storage",
            "copy_old_values",
            "split_updates",
            "insert_stores",
        ]
    )
