"""Sums across the work items of a subgroup (`bind_reduce`): the tree, what is not legal, the code, and, on OPENCL, the
numbers."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest

from manygrad.runtime.codegen.analysis.describe import signature
from manygrad.runtime.codegen.loops.index import const, less
from manygrad.runtime.codegen.loops.show import show
from manygrad.runtime.codegen.loops.spec import verify
from manygrad.runtime.codegen.loops.tree import For, If, Kind, Node, ReduceLoop
from manygrad.runtime.codegen.opts import Opts, canonical, legal, named, neighbours, sums
from manygrad.runtime.codegen.pipeline import prepare
from manygrad.runtime.codegen.render.opencl.printer import OpenCLTarget, render
from manygrad.runtime.codegen.target import Machine
from manygrad.tensor.dtype import DType, dtypes
from manygrad.tensor.environment import Context
from manygrad.tensor.uop.args import VarArg
from manygrad.tensor.uop.ops import Ops
from manygrad.tensor.uop.uop import UOp
from tests.opencl import needs_opencl
from tests.runtime.codegen.kernels import add, f32, gemm, load, logsumexp, loop, mul, red, reduce, run, sink, store
from tests.runtime.codegen.test_groups import changed, numbers

MACHINE = Machine(vector_bytes=16, registers=16, group_items=256, shared_bytes=32 << 10, subgroup_items=32)


def rows(m: int | UOp, n: int | UOp, d: DType = f32, op: Ops = Ops.ADD) -> UOp:
    i, k = loop(m, 0), red(n, 1)
    return sink(store(0, i, reduce(load(1, add(mul(i, n), k), d), k, op=op), i))


def shares(m: int, n: int) -> UOp:
    """Exponentials, of their sum."""
    i, k, j = loop(m, 0), red(n, 1), loop(n, 2)
    e = [load(1, add(mul(i, n), r)).alu(Ops.EXP) for r in (k, j)]
    return sink(store(0, add(mul(i, n), j), e[1].alu(Ops.FDIV, reduce(e[0], k)), i, j))


def across(n: int, *opts: tuple[str, *tuple[int, ...]]) -> Opts:
    return (*(named(*o) for o in opts), named("bind_reduce", 1, n))


BOUND = (named("parallel", 1), named("bind", 0, 4))
TREE = """\
for i0 in begin..finish, grid:
  for i1 in 0..4, group:
    r0 = 1 from i0 * 4 + i1:
      reduce ADD(argument 1) over k1, across 8 work items:
        for i2 in member * 3..99 by 24, subgroup:
          k1 = 3 from i2:
            accumulate
        if member == 0:
          k1 = 1 from 99:
            accumulate
      if member == 0:
        store argument 0"""


def test_the_tree_of_rows() -> None:
    """The work items of a sum are the first dimension of a group; what whole tiles leave is the first one's."""
    prepared = prepare(rows(24, 100), MACHINE, (*BOUND, *across(8, ("unroll", 1, 3))))
    tree = prepared.tree()
    verify(tree)
    assert show(tree) == TREE
    assert prepared.program().group == (8, 4)


def test_the_spec_of_trees_knows_lanes() -> None:
    tree = prepare(rows(24, 100), MACHINE, across(8, ("parallel", 1))).tree()
    some = less(const(0), const(1))
    broken: list[tuple[type[Node], Callable[..., Node], str]] = [
        (ReduceLoop, lambda n: If(some, (n,)), "all work items get to a sum across them"),
        (
            ReduceLoop,
            lambda n: replace(n, across=1),
            "only a sum across work items, and what is stored of it, is dealt out to them",
        ),
        (If, lambda n: n.body[0], "one of the work items stores"),
        (For, lambda n: replace(n, kind=Kind.SUBGROUP), "all work items get to a sum across them"),
    ]
    for kind, change, rule in broken:
        with pytest.raises(AssertionError, match=rule):
            verify(replace(tree, nodes=changed(tree.nodes, kind, change)))


ILLEGAL: list[tuple[str, UOp, Opts, str]] = [
    ("of three", rows(24, 100), across(3), "work items are a power of two"),
    ("of a loop", rows(24, 100), (named("bind_reduce", 0, 8),), "does not apply to a loop range"),
    ("twice", rows(24, 100), (*across(8), *across(16)), "another bind_reduce already"),
    ("of two sizes", logsumexp(4, 64), (*across(8), named("bind_reduce", 2, 16)), "the same work items"),
    ("uneven groups", rows(25, 100), (*BOUND, *across(8)), "would miss a barrier"),
    ("uneven tiles", rows(25, 100), across(8, ("tile", 0, 2), ("parallel", 1)), "would miss a barrier"),
    ("kept", shares(4, 64), (named("compute_at", 1, 2), *across(8)), "online or kept"),
    ("online", logsumexp(4, 64), (named("rfactor", 2, 4), named("online", 2, 1), named("bind_reduce", 2, 8)),
     "online or kept"),
    ("shared", gemm(32, 32, 64), (named("parallel", 2), named("bind", 1, 4), named("cache_shared", 2, 2, 16),
     named("bind_reduce", 2, 8)), "a group shares what is read along it"),
    ("a thread's memory", gemm(32, 32, 64), (named("cache_read", 1, 2), named("bind_reduce", 2, 8)),
     "one thread's tiles"),
]  # fmt: skip


@pytest.mark.parametrize(("ast", "opts", "reason"), [x[1:] for x in ILLEGAL], ids=[x[0] for x in ILLEGAL])
def test_what_is_not_legal_and_why(ast: UOp, opts: Opts, reason: str) -> None:
    found = legal(signature(ast), opts)
    assert found is not None and reason in found


def test_a_reduction_inside_and_one_of_what_is_written() -> None:
    i, k, j = loop(8, 0), red(64, 1), red(16, 2)
    inner = reduce(load(1, add(mul(k, 16), j)), j)
    nested = sink(store(0, i, reduce(inner.alu(Ops.MUL, load(2, add(mul(i, 64), k))), k), i))
    assert "a REDUCE inside of it depends on it" in str(legal(signature(nested), across(8)))
    assert legal(signature(nested), (named("bind_reduce", 2, 8),)) is None  # the inner one alone
    written = sink(store(0, i, reduce(load(0, add(i, k)), k), i))
    assert "do not wait for the store" in str(legal(signature(written), across(8)))


def test_what_a_machine_cannot_run_is_told() -> None:
    for machine, reason in (
        (replace(MACHINE, subgroup_items=16), "sums across 32 work items; this machine's subgroups have 16"),
        (Machine(16, 16), "this machine has groups of 1"),
        (replace(MACHINE, subgroup_items=0, shared_bytes=128), "256 bytes that a group shares; this machine has 128"),
    ):
        with pytest.raises(ValueError, match=reason):
            prepare(rows(24, 100), machine, across(32))


def test_it_is_another_order_of_the_sum() -> None:
    sig = signature(rows(24, 100))
    orders = [(), across(8), across(16), across(8, ("unroll", 1, 3)), across(8, ("rfactor", 1, 4))]
    assert len({sums(sig, o) for o in orders}) == len(orders)
    assert sums(sig, (*BOUND, *across(8))) == sums(sig, across(8))
    for may_change in (False, True):
        near = neighbours(sig, BOUND, 4, may_change, group_items=256)
        assert (canonical(sig, (*BOUND, *across(32))) in near) is may_change


def test_subgroups_exchange_values_in_registers() -> None:
    """The least size that holds them is demanded; without any, values go through memory that the group shares."""
    program = prepare(rows(24, 100), MACHINE, (*BOUND, *across(16))).program()
    shuffled = render(program, OpenCLTarget(subgroups=(8, 16, 32)))
    assert "intel_reqd_sub_group_size(16)" in shuffled and shuffled.count("sub_group_shuffle_xor") == 4
    assert "barrier(" not in shuffled and "__local" not in shuffled
    for target in (OpenCLTarget(), OpenCLTarget(subgroups=(4, 8))):
        through_memory = render(program, target)
        assert "sub_group" not in through_memory and through_memory.count("barrier(") == 8
        assert "__local uchar exchanged[512]" in through_memory  # of 64 work items


# *** on OPENCL ***


def check(ast: UOp, arrays: list[np.ndarray], opts: Opts, vars: tuple[int, ...] = ()) -> None:
    want = run(ast, arrays, vars)[0]
    with Context(CACHE=0):  # (a driver takes as long again for what is kept on disk)
        got = numbers(ast, arrays, opts, vars)
    tolerance = {"rtol": 1e-4, "atol": 1e-4} if arrays[0].dtype == np.float32 else {}
    np.testing.assert_allclose(got, want, **tolerance)  # type: ignore[arg-type]


@needs_opencl
@pytest.mark.parametrize("n", [100, 7])
@pytest.mark.parametrize(
    "opts",
    [across(32), across(8, ("parallel", 1)), (*BOUND, *across(8)), (*BOUND, *across(16, ("unroll", 1, 3))),
     (*BOUND, *across(2, ("rfactor", 1, 4))), across(4, ("vectorize", 0, 4), ("parallel", 1), ("bind", 0, 2)),
     across(64, ("tile", 0, 3), ("parallel", 1))],
    ids=lambda opts: " ".join(map(repr, opts)),
)  # fmt: skip
def test_rows(n: int, opts: Opts) -> None:
    x = np.random.default_rng(n).standard_normal((24, n)).astype(np.float32)
    check(rows(24, n), [np.zeros(24, np.float32), x], opts)


@needs_opencl
def test_types() -> None:
    rng = np.random.default_rng(0)
    greatest = [(Ops.MAX, d) for d in (dtypes.int8, dtypes.uint16, f32)]
    added = [(Ops.ADD, d) for d in (dtypes.uint8, dtypes.int64, dtypes.float64)]
    for op, d in (*greatest, *added, (Ops.MUL, dtypes.int32)):
        x = (rng.integers(0, 3, (8, 40)) if op is Ops.MUL else rng.integers(0, 100, (8, 40))).astype(d.np)
        if d.is_float and op is Ops.MAX:
            x[3, 17] = np.nan
        check(rows(8, 40, d, op), [np.zeros(8, d.np), x], (named("parallel", 1), *across(16)))


@needs_opencl
def test_several_sums_a_size_that_is_not_fixed_and_all_of_an_array() -> None:
    rng = np.random.default_rng(1)
    x = rng.standard_normal((6, 70)).astype(np.float32)
    both = (*across(8, ("parallel", 1), ("bind", 0, 2)), named("bind_reduce", 2, 8))
    for opts in (both, both[:-1]):
        check(logsumexp(6, 70), [np.zeros(6, np.float32), x], opts)
    n = UOp(Ops.DEFINE_VAR, dtypes.index, (), VarArg("n", 1, 70))
    i, k = loop(6, 0), red(n, 1)
    some = sink(store(0, i, reduce(load(1, add(mul(i, 70), k)), k), i))
    for opts in (across(16), across(16, ("unroll", 1, 4)), across(4, ("rfactor", 1, 8), ("parallel", 1))):
        for size in (1, 5, 61, 70):
            check(some, [np.zeros(6, np.float32), x], opts, (size,))
    total = sink(store(0, 0, reduce(load(1, red(420, 1)), red(420, 1))))
    check(total, [np.zeros(1, np.float32), x], across(64))


@needs_opencl
def test_the_bits_do_not_depend_on_how_lanes_exchange() -> None:
    """Those of the partial sums of each work item, added in pairs."""
    x = np.random.default_rng(2).standard_normal((24, 100)).astype(np.float32)
    parts = np.zeros((8, 24), np.float32)
    for k in range(100):
        parts[k % 8] += x[:, k]
    while len(parts) > 1:
        parts = parts[: len(parts) // 2] + parts[len(parts) // 2 :]
    for opts in (across(8), (*BOUND, *across(8))):
        np.testing.assert_array_equal(numbers(rows(24, 100), [np.zeros(24, np.float32), x], opts), parts[0])


def is_small(opts: Opts) -> bool:
    """(pocl takes seconds to compile many sums across work items.)"""
    return math.prod(o.values[1] for o in opts if o.kind in ("tile", "unroll", "vectorize", "rfactor")) <= 8


@needs_opencl
def test_random_legal_lists() -> None:
    """A walk through what the search would try, of products, rows, and sums of sums."""
    rng, draw, tried = np.random.default_rng(3), random.Random(3), 0
    kernels: list[tuple[UOp, list[tuple[int, ...]]]] = [
        (gemm(16, 32, 24), [(16, 32), (16, 24), (24, 32)]), (rows(12, 37), [(12,), (12, 37)]),
        (logsumexp(8, 33), [(8,), (8, 33)]),
    ]  # fmt: skip
    for ast, shapes in kernels:
        arrays = [np.zeros(shapes[0], np.float32), *(rng.standard_normal(s).astype(np.float32) for s in shapes[1:])]
        sig, opts = signature(ast), (named("parallel", 1),)
        for _ in range(5):
            near = [o for o in neighbours(sig, opts, 4, True, group_items=64) if is_small(o)]
            across = [o for o in near if any(x.kind == "bind_reduce" for x in o)]
            opts = draw.choice(across or near)
            if any(x.kind == "bind_reduce" for x in opts):
                check(ast, arrays, opts)
                tried += 1
    assert tried >= 10
