"""Loop trees: each that is built meets the spec, and one that is changed does not. (`docs/loops.md` is their golden
text.)"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from manygrad.runtime.codegen.analysis.describe import signature
from manygrad.runtime.codegen.emit.lower import emit
from manygrad.runtime.codegen.loops import index
from manygrad.runtime.codegen.loops.build import build
from manygrad.runtime.codegen.loops.index import Index
from manygrad.runtime.codegen.loops.show import show, text
from manygrad.runtime.codegen.loops.spec import verify
from manygrad.runtime.codegen.loops.tree import (
    Accumulate,
    For,
    If,
    Kind,
    Node,
    Nodes,
    Pack,
    PrefetchAhead,
    PrefetchLoads,
    ReduceLoop,
    Scope,
    Store,
    TileLoop,
    Tree,
)
from manygrad.runtime.codegen.lowered import Low
from manygrad.runtime.codegen.opts import loop_nest, named
from manygrad.runtime.codegen.pipeline import prepare
from manygrad.tensor.uop.args import RangeArg
from manygrad.tensor.uop.ops import Ops
from manygrad.tensor.uop.uop import UOp
from tests.runtime.codegen.corpus import MACHINES
from tests.runtime.codegen.kernels import gemm, logsumexp
from tests.runtime.codegen.test_random import kernels


def trees(ast: UOp) -> Iterator[Tree]:
    """Those of the heuristic's Opts for several machines."""
    for machine in MACHINES.values():
        prepared = prepare(ast, machine)
        sig = signature(prepared.ast)
        yield build(sig, loop_nest(sig, prepared.opts))


@given(kernels())
@settings(max_examples=30, deadline=None)
def test_what_is_built_meets_the_spec(kernel: tuple[UOp, object]) -> None:
    for tree in trees(kernel[0]):
        verify(tree)
        assert show(tree).count("store") >= 1


def changed(nodes: Nodes, kind: type[Node], change: Callable[[Node], Nodes], number: int) -> tuple[Nodes, int]:
    """`nodes` with the node of that kind and number changed; how many numbers are left."""
    out: list[Node] = []
    for node in nodes:
        if isinstance(node, kind):
            number -= 1
            if number == -1:
                out += change(node)
                continue
        for field in ("body", "parts", "otherwise"):
            if number >= 0 and isinstance(inner := getattr(node, field, None), tuple):
                found, number = changed(inner, kind, change, number)
                node = replace(node, **{field: found})  # type: ignore[type-var]
        out.append(node)
    return tuple(out), number


MUTATIONS: dict[str, tuple[type[Node], Callable[..., Nodes]]] = {
    "a tile that is not bound": (TileLoop, lambda n: n.body),
    "a tile of nothing": (TileLoop, lambda n: (replace(n, extent=0),)),
    "a tile inside of itself": (TileLoop, lambda n: (replace(n, body=(replace(n, vector=None),)),)),
    "two tiles in one block": (Scope, lambda n: (replace(n, body=n.body * 2),)),
    "a ragged tile without a size": (TileLoop, lambda n: (replace(n, size=None if n.size else index.const(3)),)),
    "a loop that does not move": (For, lambda n: (replace(n, step=0),)),
    "a counter that no loop has": (For, lambda n: (replace(n, counter=Index(n.counter.op, (), 10**6)),)),
    "a counter of two loops": (For, lambda n: (replace(n, body=(replace(n, kind=Kind.SERIAL),)),)),
    "a loop of threads in a loop": (For, lambda n: (replace(n, kind=Kind.SERIAL, body=(fresh(n, 10**6),)),)),
    "a sum that is missing": (ReduceLoop, lambda n: ()),
    "a sum that is computed twice": (ReduceLoop, lambda n: (n, n)),
    "a sum of other ranges": (ReduceLoop, lambda n: (replace(n, split=NOBODY),)),
    "a store inside of a sum": (Accumulate, lambda n: (n, Store())),
    "a tile added to no sum": (Store, lambda n: (Accumulate(), n)),
    "a number for a condition": (Store, lambda n: (If(index.const(1), (n,)),)),
    "a prefetch of what is loaded elsewhere": (PrefetchLoads, lambda n: (replace(n, body=()), *n.body)),
    "a prefetch of another argument": (PrefetchLoads, lambda n: (replace(n, argument=99),)),
    "a prefetch along no loop around": (PrefetchLoads, lambda n: (replace(n, ahead=NOBODY),)),
    "a prefetch of what is loaded now": (PrefetchLoads, lambda n: (replace(n, distance=0),)),
    "partial sums that no lane has": (ReduceLoop, lambda n: (replace(n, partials=n.partials + 1),)),
    "lanes that the group has not": (ReduceLoop, lambda n: (replace(n, across=3),)),
    "an argument read ahead that is not loaded": (Store, lambda n: (PrefetchAhead(99, 64, (n,)),)),
    "a store past the caches of what is not stored": (Store, lambda n: (replace(n, past_caches=(99,)),)),
    "an operand that nothing is packed for": (Pack, lambda n: (replace(n, stage=replace(n.stage, offset_bytes=-1)),)),
}
NOBODY = UOp(Ops.RANGE, gemm(2, 2, 2).src[0].src[2].dtype, gemm(2, 2, 2).src[0].src[2].src, RangeArg(77, "reduce"))


def fresh(n: For, counter: int) -> For:
    return replace(n, counter=Index(n.counter.op, (), counter), kind=Kind.PARALLEL, body=(Scope(()),))


@pytest.mark.parametrize("name", MUTATIONS)
def test_what_is_changed_does_not(name: str) -> None:
    kind, change = MUTATIONS[name]
    tried, ahead = 0, (named("tile", 0, 2), named("prefetch", 2, 1))
    prefetching = [prepare(gemm(6, 8, n), MACHINES["avx2"], ahead).tree() for n in (5, 7)]
    for ast in (gemm(256, 192, 250), logsumexp(33, 100)):
        for tree in [*trees(ast), *prefetching]:
            for number in range(100):
                nodes, left = changed(tree.nodes, kind, change, number)
                if left >= 0:
                    break
                with pytest.raises(AssertionError, match="loop tree: "):
                    verify(replace(tree, nodes=nodes))
                tried += 1
    assert tried >= 4


def test_a_tree_says_what_is_stored_past_the_caches() -> None:
    opts = (named("vectorize", 1, 8), named("nontemporal_store", 0))
    stored = show(prepare(gemm(8, 8, 16), MACHINES["avx2"], opts).tree()).splitlines()[-1].strip()
    assert stored == "store argument 0, argument 0 past the caches"


def test_instructions_are_those_of_the_tree() -> None:
    """A node taken out of the tree takes its instructions with it: emission asks nothing else for what was decided."""
    tree = prepare(gemm(8, 8, 16), MACHINES["avx2"], (named("vectorize", 1, 8), named("read_ahead", 2, 256))).tree()
    (ahead,) = tree.nodes
    assert isinstance(ahead, PrefetchAhead) and show(tree).startswith("prefetch argument 2, 256 bytes ahead:\n")

    def prefetches(tree: Tree) -> int:
        return sum(i.op is Low.PREFETCH for i in emit(tree, "k").insts)

    assert prefetches(tree) > 0 == prefetches(replace(tree, nodes=ahead.body))


CONSTANTS = st.integers(-9, 9).map(index.const)
SUMS = st.recursive(CONSTANTS, lambda s: st.builds(index.add, s, s) | st.builds(index.sub, s, s))


@given(SUMS)
def test_known_indices_are_worked_out(x: Index) -> None:
    def value(i: Index) -> int:
        if not i.src:
            return int(i.arg)
        a, b = map(value, i.src)
        return a + b if i.op is Ops.ADD else a - b

    assert text(x) == str(value(x))


def test_formulas_are_read_as_they_are_meant() -> None:
    """Parentheses stand where they are needed, and only there."""
    i, j, two = Index(index.Of.COUNTER, (), 0), Index(index.Of.COUNTER, (), 1), index.const(2)
    formulas = {
        index.mul(index.add(i, j), 2): "(i0 + i1) * 2",
        index.add(index.mul(i, 2), j): "i0 * 2 + i1",
        index.sub(i, index.sub(j, two)): "i0 - (i1 - 2)",
        index.sub(index.sub(i, j), two): "i0 - i1 - 2",
        index.mul(index.div(i, two), 2): "i0 // 2 * 2",
        index.div(i, index.mul(j, 2)): "i0 // (i1 * 2)",
        index.either(
            index.less(i, j), index.both(index.equal(i, two), index.less(j, two))
        ): "i0 < i1 or (i0 == 2 and i1 < 2)",
        index.choose(index.less(i, j), i, j): "min(i0, i1)",
        index.choose(index.less(i, j), j, i): "max(i1, i0)",
    }
    assert {text(x): text(x) for x in formulas} == {f: f for f in formulas.values()}
