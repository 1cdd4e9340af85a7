"""A node that no rule of its stage allows is named: pass, op, and the nearest rules with what is not met."""

from __future__ import annotations

import contextlib
import importlib
import re
from collections.abc import Iterator
from functools import cache
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from manygrad import Tensor, world
from manygrad.schedule import normalize
from manygrad.schedule.facts.chain import ChainSpec
from manygrad.schedule.lower import PASSES, lower_sink_to_linear
from manygrad.schedule.spec import GRAPHS, KERNEL, LINEAR, graph_spec, linear_spec
from manygrad.tensor.dtype import dtypes
from manygrad.tensor.environment import SPEC, Context
from manygrad.tensor.uop import BufferSpec, GroupOp, Members, Ops, PatternMatcher, UOp, UPat, passes
from manygrad.tensor.uop.args import (
    AllGatherArg,
    AllReduceArg,
    AllToAllArg,
    BroadcastArg,
    CheckArg,
    CollectiveArg,
    MessageArg,
    PointToPointArg,
    RangeArg,
    ReduceArg,
    ReduceScatterArg,
    ShardArg,
    VarArg,
)
from manygrad.tensor.uop.spec import TENSOR, GraphSpec, verify
from tests.schedule.programs import sink_of
from tests.schedule.test_golden import PROGRAMS

f32, i32, void, index = dtypes.float32, dtypes.int32, dtypes.void, dtypes.index
x = UOp(Ops.BUFFER, f32, (), BufferSpec(-800, (2, 3), f32, "CPU:0"))
n = UOp(Ops.BUFFER, i32, (), BufferSpec(-801, (2, 3), i32, "CPU:0"))
y = UOp(Ops.BUFFER, f32, (), BufferSpec(-802, (3, 2), f32, "CPU:0"))
two = UOp(Ops.BUFFER, f32, (), BufferSpec(-803, (2, 3), f32, ("CPU:0", "CPU:1"), 0, (0, 1, 2)))
four, one = UOp.const(index, 4), UOp.const(f32, 1)
v = UOp(Ops.DEFINE_VAR, index, (), VarArg("n", 1, 8))
r = UOp(Ops.RANGE, index, (four,), RangeArg(0, "loop"))
k = UOp(Ops.RANGE, index, (four,), RangeArg(1, "reduce"))
param = UOp(Ops.PARAM, f32, (), 0)
place = UOp(Ops.INDEX, f32, (param, r))
load = UOp(Ops.LOAD, f32, (place,))
copy = UOp(Ops.COPY, f32, (), "CPU:1")
body = UOp(Ops.SINK, void, (x,))

SPECS: dict[str, GraphSpec] = {"tensor": TENSOR, **GRAPHS, "kernel": KERNEL, "linear": LINEAR}

BROKEN = [
    ("tensor", "one dtype", UOp(Ops.ADD, f32, (x, n))),
    ("tensor", "one shape", UOp(Ops.ADD, f32, (x, y))),
    ("tensor", "dtype bool", UOp(Ops.CMPLT, f32, (x, x))),
    ("tensor", "a float dtype", UOp(Ops.EXP, i32, (n,))),
    ("tensor", "an integer or bool dtype", UOp(Ops.AND, f32, (x, x))),
    ("tensor", "a bool first", UOp(Ops.WHERE, f32, (n, x, x))),
    ("tensor", "as many bytes", UOp(Ops.BITCAST, dtypes.int8, (x,))),
    ("tensor", "dtype of its first source", UOp(Ops.RESHAPE, i32, (x,), (6,))),
    ("tensor", "as many elements", UOp(Ops.RESHAPE, f32, (x,), (7,))),
    ("tensor", "each dim once", UOp(Ops.PERMUTE, f32, (x,), (0, 0))),
    ("tensor", "a pair a dim", UOp(Ops.SHRINK, f32, (x,), ((0, 1),))),
    ("tensor", "within the dims", UOp(Ops.SHRINK, f32, (x,), ((0, 1), (2, 4)))),
    ("tensor", "pairs as arg", UOp(Ops.PAD, f32, (x,), ((0, -1), (0, 0)))),
    ("tensor", "dims of 1", UOp(Ops.EXPAND, f32, (x,), (4, 3))),
    ("tensor", "a ReduceArg of its dims", UOp(Ops.REDUCE, f32, (x,), ReduceArg(Ops.ADD, (2,)))),
    ("tensor", "a ReduceArg of its dims", UOp(Ops.REDUCE, f32, (x,), ReduceArg(Ops.SUB, (1,)))),
    ("tensor", "target in memory", UOp(Ops.STORE, void, (UOp(Ops.NEG, f32, (x,)), x))),
    ("tensor", "the target's shape", UOp(Ops.STORE, void, (x, y))),
    ("tensor", "2 sources", UOp(Ops.STORE)),
    ("tensor", "indices of one shape", UOp(Ops.GATHER, f32, (x, n, UOp(Ops.RESHAPE, i32, (n,), (6,))))),
    ("tensor", "the way to combine", UOp(Ops.SCATTER, f32, (x, one, UOp.const(i32, 0)), "replace")),
    ("tensor", "no rule of this stage is about its op", r),
    ("tensor", "an integer dtype", UOp(Ops.CHECK, f32, (x, n), CheckArg(0, 3, None))),
    ("tensor", "no sources", UOp(Ops.CONST, f32, (x,), 1.0)),
    ("tensor", "the value of its dtype", UOp(Ops.CONST, f32, (), 1)),
    ("tensor", "a DEFINE_VAR and a CONST", UOp(Ops.BIND, index, (four, v))),
    ("tensor", "2 sources", UOp(Ops.BIND, index, (v,))),
    ("tensor", "a VarArg, its min no larger", UOp(Ops.DEFINE_VAR, index, (), VarArg("n", 8, 1))),
    ("tensor", "effects after it", UOp(Ops.AFTER, f32, (x, x))),
    ("tensor", "effects as sources", UOp(Ops.SINK, void, (x,))),
    ("tensor", "its number", UOp(Ops.RESULT, f32, (UOp(Ops.FUNCTION, void, (x,), body),), 1)),
    ("tensor", "a BufferSpec", UOp(Ops.BUFFER, i32, (), x.arg)),
    ("tensor", "bounds of its parts", UOp(Ops.SHARD, f32, (x,), ShardArg(("CPU:0", "CPU:1"), 0, (0, 9)))),
    ("tensor", "bounds of its parts", UOp(Ops.SHARD, f32, (x,), ShardArg(("CPU:0", "CPU:1"), None, (0, 1, 4)))),
    ("clean", "no rule", UOp(Ops.DETACH, f32, (x,))),
    ("lower_shards", "no rule", UOp(Ops.SHARD, f32, (x,), ShardArg(("CPU:0",), None))),
    ("lower_shards", "a number of one of its parts", UOp(Ops.MSELECT, f32, (two,), 2)),
    ("lower_checks", "no rule", UOp(Ops.CHECK, i32, (n, n), CheckArg(0, 3, None))),
    ("simplify", "one device", UOp(Ops.NEG, f32, (two,))),
    ("lower_storage", "no rule", UOp(Ops.CAT, f32, (x, x), 0)),
    ("lower_storage", "no sources", UOp(Ops.COPY, f32, (x,), "CPU:1")),
    ("lower_storage", "results and sources", UOp(Ops.CALL, void, (copy, x))),
    ("insert_stores", "no rule", UOp(Ops.CONTIGUOUS, f32, (x,))),
    ("kernel", "no rule", UOp(Ops.RESHAPE, f32, (load,), (1,))),
    ("kernel", "one dtype", UOp(Ops.ADD, f32, (load, UOp.const(i32, 1)))),
    ("kernel", "a value of its dtype", UOp(Ops.STORE, void, (place, UOp.const(i32, 1), r))),
    ("kernel", "RANGEs at the end", UOp(Ops.STORE, void, (place, load, load))),
    ("kernel", "all RANGEs that it changes with", UOp(Ops.STORE, void, (place, load))),
    ("kernel", "an INDEX as source", UOp(Ops.LOAD, f32, (param,))),
    ("kernel", "an offset of dtype index", UOp(Ops.INDEX, f32, (param, UOp.const(i32, 1)))),
    ("kernel", "RANGEs of reductions", UOp(Ops.REDUCE, f32, (load, r), Ops.ADD)),
    ("kernel", "1 sources", UOp(Ops.RANGE, index, (), RangeArg(0, "loop"))),
    ("kernel", "STOREs as sources", UOp(Ops.SINK, void, (load,))),
    ("linear", "CALLs as sources", UOp(Ops.LINEAR, void, (x,))),
    ("linear", "as arguments", UOp(Ops.CALL, void, (copy, x, copy))),
    ("linear", "an argument for each PARAM", UOp(Ops.CALL, void, (UOp(Ops.SINK, void, (load,)), x, x))),
    ("linear", "arguments that its kernels are given",
     UOp(Ops.CALL, void, (UOp(Ops.CHAIN, void, (body, body), ChainSpec(2, 4, ((0, 1), ()), ())), x))),
]  # fmt: skip


@pytest.mark.parametrize("stage, need, bad", BROKEN, ids=[f"{s}: {need}, {u.op.name}" for s, need, u in BROKEN])
def test_violation_names_pass_op_and_need(stage: str, need: str, bad: UOp) -> None:
    with pytest.raises(
        AssertionError, match=re.escape(f"after pass 'some': UOp({bad.op.name}") + ".*" + re.escape(need)
    ):
        verify(bad, SPECS[stage], "some", _enter(stage))


def test_of_the_rules_of_an_op_the_nearest_are_told() -> None:
    call = UOp(Ops.CALL, void, (UOp(Ops.SINK, void, (load,)), x, x))
    with pytest.raises(AssertionError) as e:
        verify(call, LINEAR, "merge_kernels", _enter("linear"))
    assert str(e.value) == (
        "after pass 'merge_kernels': UOp(CALL, void, 3 src) of shape () with sources "
        "[UOp(SINK, void, 1 src) of shape (), "
        f"{x!r} of shape (2, 3), {x!r} of shape (2, 3)] fits no rule of this stage; nearest: "
        "rule 'CALL of a kernel' needs an argument for each PARAM; rule 'CALL of a CHAIN' needs a CHAIN first; "
        "rule 'CALL copies or communicates' needs a COPY or a collective first"
    )


# *** mutations of the graphs of real programs ***


def candidates() -> Iterator[UOp]:
    """Nodes of ops that none of the golden programs has, each legal in some stages."""
    yield from (copy, UOp(Ops.BIND, index, (v, four)), UOp(Ops.RESULT, f32, (UOp(Ops.FUNCTION, void, (x,), body),), 0))
    yield from (UOp(Ops.DETACH, f32, (x,)), UOp(Ops.CUSTOM, f32, (x,), "a gradient"), UOp(Ops.BARRIER, f32, (x, x)))
    yield from (UOp(Ops.SHARD, f32, (x,), ShardArg(("CPU:0", "CPU:1"), None)), UOp(Ops.CONTIGUOUS, f32, (x,), 3))
    yield UOp(Ops.WIRE, f32, (x,), "bfloat16")
    yield from (UOp(Ops.CHECK, i32, (n, n), CheckArg(0, 3, None)), UOp(Ops.REDUCE, f32, (load, k), Ops.MAX))
    for op, arg in COLLECTIVES.items():
        yield from (UOp(op, f32, (UOp(Ops.MSTACK, f32, (x, x)),), arg), UOp(op, f32, (), arg))
    for value in (x, n, load, UOp(Ops.CAST, i32, (load,))):
        yield from (UOp(op, value.dtype, (value,)) for op in GroupOp.UNARY)
        yield from (UOp(op, value.dtype, (value, value)) for op in GroupOp.BINARY - GroupOp.COMPARE)
        yield from (UOp(op, dtypes.bool, (value, value)) for op in GroupOp.COMPARE)
        yield from (UOp(Ops.FMA, value.dtype, (value,) * 3), UOp(Ops.BITCAST, dtypes.uint32, (value,)))
    yield from BODY.src
    for op, arg in COLLECTIVES.items():
        yield from (sums := UOp(op, f32, (BODY,), arg), UOp(Ops.CALL, void, (sums, x, x, x, x, x)))


MEMBERS = Members(("CPU:0", "CPU:1"), (0, 1), (6, 6), 1, "a line")
COLLECTIVES: dict[Ops, CollectiveArg] = {
    Ops.ALLREDUCE: AllReduceArg(Ops.ADD, 6, MEMBERS),
    Ops.ALLGATHER: AllGatherArg((0, 3, 6), MEMBERS),
    Ops.REDUCESCATTER: ReduceScatterArg(Ops.ADD, (0, 3, 6), MEMBERS),
    Ops.ALLTOALL: AllToAllArg((0, 1), (0, 1), MEMBERS),
    Ops.BROADCAST: BroadcastArg(0, 6, MEMBERS),
    Ops.POINT_TO_POINT: PointToPointArg(6, MEMBERS),
}


BODY = UOp(
    Ops.LINEAR,
    void,
    tuple(
        UOp(Ops.CALL, void, (what, x))
        for what in (
            UOp(Ops.SEND, f32, (), MessageArg(1, 0)),
            UOp(Ops.RECEIVE, f32, (), MessageArg(1, 0)),
            UOp(Ops.RELEASE, f32),
            UOp(Ops.SETTLE, void, (), (MessageArg(1, 0),)),
        )
    ),
)


def _enter(stage: str) -> Any:
    return (lambda u: u.op not in (Ops.SINK, Ops.CHAIN)) if stage == "linear" else None


def _is_legal(u: UOp, stage: str) -> bool:
    try:
        verify(u, SPECS[stage], stage, _enter(stage))
    except AssertionError:
        return False
    return True


@cache
def corpus() -> list[tuple[str, UOp]]:
    """(stage, node) of what the golden programs have after some pass, wherever it is legal; the same forms once."""
    nodes: dict[UOp, None] = {}

    def add(stage: str, name: str, root: Any) -> None:
        if isinstance(root, UOp):
            nodes.update(dict.fromkeys(root.toposort()))

    passes.observers.append(add)
    try:
        for program in PROGRAMS:
            sink = sink_of(program())
            add("", "", sink)
            linear = lower_sink_to_linear(normalize(sink).graph, world)
            add("", "", linear)
    finally:
        passes.observers.remove(add)
    for u in candidates():
        add("", "", u)
    found: dict[Any, tuple[str, UOp]] = {}
    for stage, spec in SPECS.items():
        for u in nodes:
            form = stage, u.op, u.dtype, type(u.arg), tuple(s.op for s in u.src[:3])
            if u.op in spec and form not in found and _is_legal(u, stage):
                found[form] = stage, u
    return list(found.values())


# of these, one source less or more of the right kind may be legal, too
VARIADIC = frozenset({Ops.SINK, Ops.CAT, Ops.AFTER, Ops.MSTACK, Ops.CUSTOM, Ops.FUNCTION, Ops.LINEAR, Ops.GATHER})


def mutants(stage: str, u: UOp) -> Iterator[tuple[str, UOp]]:
    """`u` with one thing wrong."""
    if stage == "linear" and u.op is Ops.SINK:  # (kernels are looked at by themselves)
        return
    spec = SPECS[stage]
    if u.src and u.op not in VARIADIC and not (u.op in (Ops.INDEX, Ops.REDUCE) and len(u.src) > 2):
        yield "a source less", u.replace(src=u.src[:-1])
    if u.src and u.op not in (Ops.FUNCTION, Ops.LINEAR) and not (u.op is Ops.SINK and stage != "kernel"):
        yield "no sources", u.replace(src=())
    if u.op is not Ops.FUNCTION:
        if u.dtype is void or u.op is Ops.AFTER or Ops.BUFFER not in spec or Ops.STORE not in spec:
            stray = x if Ops.BUFFER in spec else UOp.const(dtypes.float64, 1)
        else:
            stray = UOp(Ops.STORE, void, (x, x))
        yield "a source more", u.replace(src=(*u.src, stray))
    yield "another dtype", u.replace(dtype=f32 if u.dtype is void else void)
    if u.op not in (Ops.CUSTOM, Ops.LINEAR):
        yield "another arg", u.replace(arg=(7, "?") if u.arg is None else 7.5 if isinstance(u.arg, tuple) else ())
    others = [op for op in Ops if op not in spec]
    yield "an op of another stage", u.replace(op=others[len(u.src) % len(others)])


def test_every_op_of_every_stage_is_tried() -> None:
    tried = {(stage, u.op) for stage, u in corpus()}
    assert not {(stage, op.name) for stage in SPECS for op in SPECS[stage] if (stage, op) not in tried}


@given(st.data())
def test_a_node_with_one_thing_wrong_is_rejected(data: st.DataObject) -> None:
    stage, u = data.draw(st.sampled_from(corpus()))
    for wrong, bad in mutants(stage, u):
        with pytest.raises(AssertionError):
            verify(bad, SPECS[stage], stage, _enter(stage))
            pytest.fail(f"{stage}: {u!r} with {wrong}, {bad!r}, is legal")


ARGS = st.sampled_from([None, 0, -1, 2.5, True, "CPU:0", (), (0,), (1, 2), ((0, 1),), (Ops.ADD, (0,)), x.arg, x, "add"])


@given(st.data())
def test_verify_raises_nothing_but_assertion_errors(data: st.DataObject) -> None:
    stage, nodes = data.draw(st.sampled_from(list(SPECS))), [u for _, u in corpus()]
    src = tuple(data.draw(st.lists(st.sampled_from(nodes), max_size=4)))
    dtype = data.draw(st.sampled_from([void, f32, i32, index, dtypes.bool]))
    with contextlib.suppress(AssertionError):
        verify(UOp(data.draw(st.sampled_from(list(Ops))), dtype, src, data.draw(ARGS)), SPECS[stage], stage)


def test_specs_are_on_in_tests_and_a_broken_pass_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    assert SPEC
    simplify = importlib.import_module("manygrad.schedule.graph.simplify")  # (the package has a function of that name)
    broken = PatternMatcher([(UPat(Ops.ADD, "u"), lambda u: UOp(Ops.DETACH, u.dtype, (u.src[0],)))])
    monkeypatch.setattr(simplify, "pm_simplify", broken)
    with (
        Context(SCACHE=0),
        pytest.raises(AssertionError, match=r"after pass 'simplify': UOp\(DETACH.* no rule of this"),
    ):
        (Tensor([1.0, 2.0]) + 1).realize()
    with Context(SCACHE=0, SPEC=0):  # unverified, it goes on to the kernel
        with pytest.raises(AssertionError, match="DETACH reached a kernel"):
            (Tensor([1.0, 2.0]) + 1).realize()


def test_every_pass_has_a_spec() -> None:
    assert {p.name for p in PASSES if p.spec is graph_spec} == GRAPHS.keys() - {"normalize"}


def test_passes_run_in_order() -> None:
    seen: list[str] = []
    passes.observers.append(lambda stage, name, graph: seen.append(name) if stage == "schedule" else None)
    try:
        with Context(SCACHE=0):
            (Tensor([1.0, 2.0, 3.0, 3.5]) * 2.125 + 0.375).realize()
    finally:
        passes.observers.pop()
    assert seen == [p.name for p in PASSES if p.spec in (graph_spec, linear_spec)]
