"""Groups of work items (`bind`) and the memory that they share (`cache_shared`): the tree, what is not legal, and, on
OPENCL, the numbers."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from manygrad.runtime.codegen.analysis.describe import signature
from manygrad.runtime.codegen.loops.index import const, less
from manygrad.runtime.codegen.loops.show import show
from manygrad.runtime.codegen.loops.spec import verify
from manygrad.runtime.codegen.loops.tree import Barrier, For, If, Kind, Node, Nodes, Tree
from manygrad.runtime.codegen.opts import Opts, canonical, legal, named, neighbours
from manygrad.runtime.codegen.pipeline import prepare
from manygrad.runtime.codegen.target import Machine
from manygrad.runtime.devices import get_device
from manygrad.tensor.dtype import dtypes
from manygrad.tensor.uop.ops import Ops
from manygrad.tensor.uop.uop import UOp
from tests.opencl import needs_opencl
from tests.runtime.codegen.kernels import add, elementwise, f32, gemm, load, loop, mul, red, reduce, run, sink, store

MACHINE = Machine(vector_bytes=16, registers=16, group_items=256, shared_bytes=32 << 10)
TILED = (named("tile", 0, 4), named("tile", 1, 4), named("parallel", 2), named("bind", 0, 4), named("bind", 1, 8))
SHARED = (*TILED, named("cache_shared", 2, 1, 16), named("cache_shared", 2, 2, 16))

PRODUCT = """\
for i0 in begin..finish, grid:
  for i1 in 0..4, group:
    for i2 in 0..8, group:
      r0 = 4 from (i0 // 3 * 4 + i1) * 4:
        r1 = 4 from (i0 % 3 * 8 + i2) * 4:
          reduce ADD(argument 1 argument 2) over k2:
            for i3 in 0..48 by 16:
              block of k2 from i3:
                shared[0..] = argument 1:
                  for i4 in item..256 by 32:
                    r4 = 1 from i0 // 3 * 16 + i4 // 16:
                      k3 = 1 from i3 + i4 % 16:
                        copy
                shared[1024..] = argument 2:
                  for i5 in item..512 by 32:
                    k3 = 1 from i3 + i5 // 32:
                      r4 = 1 from i0 % 3 * 32 + i5 % 32:
                        copy
                barrier
                for i6 in i3..i3 + 16:
                  k2 = 1 from i6:
                    accumulate
                barrier
          store argument 0"""


def tree_of(ast: UOp, opts: Opts) -> Tree:
    return prepare(ast, MACHINE, opts).tree()


def test_the_tree_of_a_product() -> None:
    """Of argument 1 what lies side by side is along the reduction, of argument 2 along the loop."""
    assert show(tree_of(gemm(64, 96, 48), SHARED)) == PRODUCT


def test_a_program_says_how_large_its_groups_are_and_what_they_share() -> None:
    program = prepare(gemm(64, 96, 48), MACHINE, SHARED).program()
    assert program.group == (8, 4) and program.shared_bytes == 3072
    assert [(n.arg, step) for n, step in program.parallel] == [(64, 16), (96, 32)]


ILLEGAL: list[tuple[str, Opts, str]] = [
    ("not in the grid", (named("bind", 1, 8), named("parallel", 1)), "not in the parallel loop"),
    ("of one", (named("bind", 1, 1), named("parallel", 2)), "at least 2 work items"),
    ("twice", (named("bind", 1, 8), named("bind", 1, 4), named("parallel", 2)), "another bind already"),
    ("a thread's memory", (*TILED, named("cache_read", 1, 2)), "one thread's tiles"),
    ("shared by nobody", (named("parallel", 2), named("cache_shared", 2, 1, 16)), "only the work items of a group"),
    ("another size", (*TILED, named("cache_shared", 2, 1, 7)), "do not divide it"),
    ("of the result", (*TILED, named("cache_shared", 2, 0, 16)), "the kernel writes it"),
    ("two sizes", (*SHARED[:-1], named("cache_shared", 2, 2, 8)), "the same iterations"),
    ("along a loop", (*TILED, named("cache_shared", 1, 1, 16)), "does not apply to a loop range"),
    ("lanes of its own", (*TILED, named("rfactor", 2, 4), named("cache_shared", 2, 1, 16)), "lanes of its own"),
]


@pytest.mark.parametrize(("opts", "reason"), [x[1:] for x in ILLEGAL], ids=[x[0] for x in ILLEGAL])
def test_what_is_not_legal_and_why(opts: Opts, reason: str) -> None:
    found = legal(signature(gemm(64, 96, 48)), opts)
    assert found is not None and reason in found


def test_groups_that_miss_a_work_item_share_nothing() -> None:
    found = legal(signature(gemm(61, 96, 48)), SHARED)
    assert found is not None and "would miss a barrier" in found
    assert legal(signature(gemm(61, 96, 48)), TILED) is None


def test_what_a_machine_cannot_run_is_told() -> None:
    for machine, reason in (
        (replace(MACHINE, group_items=16), "a group of 32 work items; this machine has groups of 16"),
        (Machine(16, 16), "this machine has groups of 1"),
        (replace(MACHINE, shared_bytes=2048), "3072 bytes that a group shares; this machine has 2048"),
    ):
        with pytest.raises(ValueError, match=reason):
            prepare(gemm(64, 96, 48), machine, SHARED)


def test_the_search_finds_them_where_there_are_groups() -> None:
    sig = signature(gemm(64, 96, 48))
    start = (named("tile", 0, 4), named("tile", 1, 4), named("parallel", 2))
    assert not any(o.kind == "bind" for opts in neighbours(sig, start, 4) for o in opts)
    bound = [opts for opts in neighbours(sig, start, 4, group_items=256) if any(o.kind == "bind" for o in opts)]
    assert canonical(sig, (*start, named("bind", 0, 8))) in bound
    further = neighbours(sig, (*start, named("bind", 0, 8)), 4, group_items=256)
    assert canonical(sig, (*start, named("bind", 0, 8), named("cache_shared", 2, 2, 16))) in further


def changed(nodes: Nodes, kind: type[Node], change: Any) -> Nodes:
    """The first node of a kind replaced, wherever it is."""
    out: list[Node] = []
    for i, n in enumerate(nodes):
        if isinstance(n, kind):
            return (*out, change(n), *nodes[i + 1 :])
        body = getattr(n, "body", ())
        new = changed(body, kind, change)
        if new != body:
            return (*out, replace(n, body=new), *nodes[i + 1 :])  # type: ignore[call-arg]
        out.append(n)
    return tuple(out)


def test_the_spec_of_trees_knows_barriers_and_grids() -> None:
    tree = tree_of(gemm(64, 96, 48), SHARED)
    verify(tree)
    some = less(const(0), const(1))
    for kind, change, rule in (
        (Barrier, lambda n: If(some, (n,)), "a group gets to a barrier"),
        (For, lambda n: replace(n, kind=Kind.PARALLEL), "a group is inside of a grid"),
        (For, lambda n: replace(n, body=(replace(n, counter=replace(n.counter, arg=99)),)), "outermost loop is a grid"),
    ):
        with pytest.raises(AssertionError, match=rule):
            verify(replace(tree, nodes=changed(tree.nodes, kind, change)))


# *** on OPENCL ***


def numbers(ast: UOp, arrays: list[np.ndarray], opts: Opts, vars: tuple[int, ...] = ()) -> np.ndarray:
    """What `ast` with `opts` makes of argument 0."""
    device = get_device("OPENCL")
    handles = [device.alloc(a.nbytes) for a in arrays]
    for h, a in zip(handles, arrays):
        device.copyin(h, memoryview(np.ascontiguousarray(a).reshape(-1).view(np.uint8)))
    device.compile_with(ast, opts)(handles, vars, wait=True)
    raw = np.empty(arrays[0].nbytes, np.uint8)
    device.copyout(memoryview(raw), handles[0])
    for h, a in zip(handles, arrays):
        device.free(h, a.nbytes)
    return raw.view(arrays[0].dtype).reshape(arrays[0].shape)


def check(ast: UOp, arrays: list[np.ndarray], opts: Opts) -> None:
    """As the kernel without them, to the bit: no sum changes its order."""
    plain = tuple(o for o in opts if o.kind not in ("bind", "cache_shared"))
    found = numbers(ast, arrays, opts)
    np.testing.assert_array_equal(found, numbers(ast, arrays, plain))
    np.testing.assert_allclose(found, run(ast, arrays)[0], rtol=1e-4, atol=1e-4)


@needs_opencl
@pytest.mark.parametrize("layout", ["NN", "NT", "TN", "TT"])
@pytest.mark.parametrize("opts", [TILED, SHARED, SHARED[:-1]], ids=["bound", "shared", "one shared"])
def test_products(layout: str, opts: Opts) -> None:
    rng = np.random.default_rng(0)
    a, b = (rng.standard_normal(s).astype(np.float32) for s in ((32, 48), (48, 64)))
    arrays = [np.zeros((32, 64), np.float32), a if layout[0] == "N" else a.T, b if layout[1] == "N" else b.T]
    check(gemm(32, 64, 48, layout), arrays, opts)


@needs_opencl
def test_vectors_an_epilogue_and_uneven_groups() -> None:
    rng = np.random.default_rng(1)
    a, b = (rng.standard_normal(s).astype(np.float32) for s in ((32, 48), (48, 64)))
    vectors = (named("vectorize", 1, 4), named("tile", 0, 2), named("tile", 1, 8), named("parallel", 2))
    shared = (named("bind", 0, 4), named("bind", 1, 4), named("cache_shared", 2, 1, 8), named("cache_shared", 2, 2, 8))

    def bias(value: UOp, i: UOp, j: UOp) -> UOp:
        return value.alu(Ops.ADD, load(3, j)).alu(Ops.MAX, UOp.const(f32, 0.0))

    check(gemm(32, 64, 48, epilogue=bias), [np.zeros((32, 64), np.float32), a, b, b[0]], (*vectors, *shared))
    for m, n in ((29, 61), (3, 64), (2, 5)):  # the last groups miss tiles, the last tiles rows
        arrays = [np.zeros((m, n), np.float32), a[:m].copy(), np.resize(b, (48, n))]
        check(gemm(m, n, 48), arrays, (*vectors, *shared[:2]))


@needs_opencl
def test_rows_that_are_reduced_and_elementwise_work() -> None:
    rng = np.random.default_rng(2)
    x = rng.standard_normal((24, 40)).astype(np.float32)
    i, j, k = loop(24, 0), loop(40, 1), red(40, 2)
    total = reduce(load(1, add(mul(i, 40), k)), k)
    rows = sink(store(0, add(mul(i, 40), j), load(1, add(mul(i, 40), j)).alu(Ops.MUL, total), i, j))
    opts = (named("parallel", 2), named("bind", 0, 8), named("bind", 1, 4))
    check(rows, [np.zeros((24, 40), np.float32), x], opts)
    check(rows, [np.zeros((24, 40), np.float32), x], (*opts, named("cache_shared", 2, 1, 8)))
    double = elementwise(lambda v: v.alu(Ops.ADD, v), [dtypes.float32], 1000)
    y = rng.standard_normal(1000).astype(np.float32)
    for items in (2, 32, 1024):
        check(double, [np.zeros(1000, np.float32), y], (named("parallel", 1), named("bind", 0, items)))


@needs_opencl
def test_random_legal_lists_give_the_same_bits() -> None:
    """A walk through what the search would try."""
    rng, draw = np.random.default_rng(3), random.Random(3)
    sizes = [(16, 32, 16), (24, 40, 8), (7, 33, 12)]
    tried = 0
    for m, n, k in sizes:
        arrays = [np.zeros((m, n), np.float32), *(rng.standard_normal(s).astype(np.float32) for s in ((m, k), (k, n)))]
        sig, opts = signature(gemm(m, n, k)), (named("parallel", 2),)
        for _ in range(6):
            near = neighbours(sig, opts, 4, group_items=64)
            grouped = [o for o in near if any(x.kind in ("bind", "cache_shared") for x in o)]
            opts = draw.choice(grouped or near)
            if any(x.kind == "bind" for x in opts):
                check(gemm(m, n, k), arrays, opts)
                tried += 1
    assert tried >= 12
