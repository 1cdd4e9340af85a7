"""Spec of a loop tree: its instructions mean what the kernel means.

`verify` walks it with what is open around each node, and raises AssertionError, which names the rule and the node.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from math import gcd

from manygrad.runtime.codegen.loops import ring
from manygrad.runtime.codegen.loops.index import FIRST_ITEM, Index, Of
from manygrad.runtime.codegen.loops.lanes import Lanes, fixed_size
from manygrad.runtime.codegen.loops.prefetch import loads
from manygrad.runtime.codegen.loops.show import name, text
from manygrad.runtime.codegen.loops.tree import (
    Accumulate,
    AwaitCopies,
    Barrier,
    BlockLoop,
    CommitCopies,
    CopyElement,
    CopyPart,
    Fetch,
    FetchPart,
    For,
    Holds,
    If,
    Kind,
    Node,
    Nodes,
    OnlineReduce,
    Pack,
    PackLoop,
    PackStage,
    PrefetchAhead,
    PrefetchLoads,
    Ragged,
    ReduceLoop,
    Scope,
    Share,
    SharePart,
    StartCopies,
    Store,
    TileLoop,
    Tree,
    Vectors,
    every,
)
from manygrad.tensor.uop.ops import Ops
from manygrad.tensor.uop.ranges import ranges_of
from manygrad.tensor.uop.symbolic import linear
from manygrad.tensor.uop.uop import UOp


@dataclass(frozen=True)
class Open:
    """State at a node: what is open around it, and what was computed before it.

    Large: what holds at a place of the tree.
    """

    tree: Tree
    counters: frozenset[Index] = frozenset()
    tiles: frozenset[UOp] = frozenset()
    blocks: frozenset[UOp] = frozenset()
    computed: frozenset[UOp] = frozenset()  # REDUCEs
    reducing: tuple[UOp, ...] = ()  # ranges of the innermost Reduce
    added: tuple[UOp, ...] = ()  # what it adds up
    packing: PackLoop | None = None
    kinds: frozenset[Kind] = frozenset()  # of the loops around
    is_uniform: bool = True  # whether all work items of the group get here
    sharing: Share | Fetch | StartCopies | None = None
    across: int = 1  # work items that the innermost Reduce has
    is_summed_across: bool = False  # whether any has some
    is_first_item: bool = False
    lanes: Lanes = field(default_factory=Lanes)
    block: Nodes = ()  # what the innermost block holds
    steps: Mapping[Index, int] = field(default_factory=dict)  # loop's counter -> what it is a multiple of (0: it is 0)
    begins: Mapping[UOp, int] = field(default_factory=dict)  # range -> what its open tile's first iteration is so


TreeRule = tuple[str, type[Node] | tuple[type[Node], ...], Callable[..., bool]]
RULES: list[TreeRule] = [
    ("each loop has a counter of its own", For, lambda n, o: n.counter not in o.counters),
    ("a loop goes in steps of at least 1", For, lambda n, o: n.step >= 1),
    ("only the outermost loop is parallel", For, lambda n, o: n.kind is not Kind.PARALLEL or not o.counters),
    ("only the outermost loop is a grid", For, lambda n, o: n.kind is not Kind.GRID or not o.counters),
    ("a group is inside of a grid", For, lambda n, o: n.kind is not Kind.GROUP or Kind.GRID in o.kinds),
    (
        "a group is as large as its loops",
        For,
        lambda n, o: n.kind is not Kind.GROUP or o.tree.group[n.dim : n.dim + 1] == (n.end.number,),
    ),
    (
        "only a sum across work items, and what is stored of it, is dealt out to them",
        For,
        lambda n, o: n.kind is not Kind.SUBGROUP or (o.across > 1 if o.reducing else o.is_summed_across),
    ),
    ("a group gets to a barrier", Barrier, lambda n, o: Kind.GROUP in o.kinds and o.is_uniform and not o.sharing),
    ("a group shares memory", Share, lambda n, o: Kind.GROUP in o.kinds and o.is_uniform and not o.sharing),
    (
        "what is copied is what the loops around are for",
        (CopyElement, SharePart),
        lambda n, o: isinstance(o.sharing, Share) and o.sharing.stage is n.stage,
    ),
    (
        "what is fetched is what the loops around are for",
        FetchPart,
        lambda n, o: isinstance(o.sharing, Fetch) and o.sharing.stage is n.stage,
    ),
    (
        "what is copied is what the loops around are for",
        CopyPart,
        lambda n, o: isinstance(o.sharing, StartCopies) and o.sharing.stage is n.stage,
    ),
    ("a group copies together", (StartCopies, CommitCopies, AwaitCopies), lambda n, o: _together(o)),
    (
        "all is open that is copied",
        (CopyElement, CopyPart, FetchPart, SharePart),
        lambda n, o: ranges_of(n.stage.source) <= o.tiles,
    ),
    ("a group fetches together", Fetch, lambda n, o: _together(o)),
    ("a tile has at least one iteration", TileLoop, lambda n, o: n.extent >= 1),
    ("a range has one tile at a time", TileLoop, lambda n, o: (n.range in o.tiles) == (n.vector is not None)),
    ("a range's tile is the only one in its block", (For, If, Scope), lambda n, o: _tiles_apart(n)),
    (
        "a tile of loops is not inside a sum",
        TileLoop,
        lambda n, o: n.range not in o.tree.tiling.loops or not o.reducing,
    ),
    (
        "only a size makes a tile ragged by size",
        TileLoop,
        lambda n, o: (n.size is not None) == (n.ragged is Ragged.SIZE),
    ),
    ("what goes on beyond a tile is aligned", TileLoop, lambda n, o: not n.reach or _stored_at_lines(n, o)),
    ("a condition is one", If, lambda n, o: n.condition.is_condition),
    ("a block is not inside its range's tile", BlockLoop, lambda n, o: n.range not in o.tiles),
    ("operands are packed outside of packing", PackStage, lambda n, o: o.packing is None and bool(n.parts)),
    ("an operand is packed in a tile, or a block, of its loop", PackLoop, lambda n, o: _placed(n, o)),
    ("what is packed is what the loops around are for", Pack, lambda n, o: o.packing and o.packing.stage is n.stage),
    ("all is open that is packed", Pack, lambda n, o: {n.stage.loop, *n.stage.ranges} <= o.tiles),
    (
        "what is prefetched is loaded below",
        PrefetchLoads,
        lambda n, o: bool(n.loads) and {*n.loads} <= {*_loaded(n, o)},
    ),
    ("it is of one argument", PrefetchLoads, lambda n, o: {u.src[0].src[0].arg for u in n.loads} == {n.argument}),
    (
        "a loop around moves what is prefetched",
        PrefetchLoads,
        lambda n, o: n.ahead in o.tiles & {*o.tree.tiling.loops} and all(n.ahead in ranges_of(u) for u in n.loads),
    ),
    ("what is prefetched is further along", PrefetchLoads, lambda n, o: n.distance > 0),
    (
        "what is read ahead is loaded below",
        PrefetchAhead,
        lambda n, o: n.nbytes > 0 and n.argument in {u.src[0].src[0].arg for u in _loaded(n, o)},
    ),
    ("partial sums are those of the lanes' own range", ReduceLoop, lambda n, o: n.partials == _partials(n, o)),
    (
        "a sum is across a whole group",
        ReduceLoop,
        lambda n, o: n.across == 1 or o.tree.group[:1] == (n.across,),
    ),
    ("sums are over the same ranges", ReduceLoop, lambda n, o: len({u.src[1:] for u in n.group}) == 1),
    ("all is open that sums depend on", ReduceLoop, lambda n, o: all(ranges_of(u) <= o.tiles for u in n.group)),
    ("a sum is computed once in a tile", ReduceLoop, lambda n, o: not o.computed & {*n.group}),
    ("all work items get to a sum across them", ReduceLoop, lambda n, o: n.across == 1 or o.is_uniform),
    (
        "what is held in 16 bits is a whole sum",
        ReduceLoop,
        lambda n, o: not n.words or (n.rest, n.split, n.across) == (None, None, 1),
    ),
    (
        "a matrix unit sums all that is read, in one sum",
        ReduceLoop,
        lambda n, o: not n.matrix or (n.split, n.across, n.masks) == (None, 1, ()),
    ),
    (
        "a warp's sums are those of whole tiles, of what its group shares",
        ReduceLoop,
        lambda n, o: not n.warp or ((n.split, n.across, n.masks, n.rest) == (None, 1, (), None) and o.is_uniform),
    ),
    ("sums rest between blocks alone", ReduceLoop, lambda n, o: n.rest is None or n.group[0].src[1] in o.blocks),
    ("the lanes of a sum are along one of its ranges", ReduceLoop, lambda n, o: n.split in (None, *n.group[0].src[1:])),
    ("all is open that is added", Accumulate, lambda n, o: bool(o.reducing) and {*o.reducing} <= o.tiles),
    ("the pair is not computed yet", OnlineReduce, lambda n, o: not o.computed & {n.pair.maximum, n.pair.total}),
    ("all loops are open around a store", Store, lambda n, o: {*o.tree.tiling.loops} <= o.tiles),
    ("all sums are known that are stored", Store, lambda n, o: {*o.tree.sig.reduces} - _inner(o) <= o.computed),
    (
        "what goes past the caches is stored",
        Store,
        lambda n, o: {*n.past_caches} <= {u.src[0].src[0].arg for u in o.tree.sig.stores},
    ),
    (
        "one of the work items stores, or each its own",
        Store,
        lambda n, o: o.is_first_item or Kind.SUBGROUP in o.kinds or not o.is_summed_across,
    ),
    ("conditions are known in a block of their own", Holds, lambda n, o: o.block == (n,)),
    ("nothing is stored inside of a sum", Store, lambda n, o: not o.reducing and o.packing is None),
]


def verify(tree: Tree) -> None:
    _verify(tree.nodes, Open(tree, lanes=tree.tiling.lanes, is_summed_across=_sums_across(tree)))
    ring.verify(tree)


def _together(o: Open) -> bool:
    return Kind.GROUP in o.kinds and not o.sharing


def _sums_across(tree: Tree) -> bool:
    return any(isinstance(n, ReduceLoop) and n.across > 1 for n in every(tree.nodes))


def _partials(n: ReduceLoop, o: Open) -> int:
    tiling = o.tree.tiling
    return 1 if n.split is None else tiling.size_of(n.split) // tiling.step_of(n.split, n.lanes)


def _stored_at_lines(n: TileLoop, o: Open) -> bool:
    return n.range is o.tree.tiling.lanes.range and all(s.at_lines for s in every(n.body) if isinstance(s, Store))


def _tiles_apart(n: For | If | Scope) -> bool:
    """Values of a tile are known up to the end of its block, by their places in the tile."""
    for body in (n.body, n.otherwise) if isinstance(n, If) else (n.body,):
        ranges = [tile.range for tile in _tiles_of(body)]
        if len({*ranges}) < len(ranges):
            return False
    return True


def _tiles_of(nodes: Nodes) -> Iterator[TileLoop]:
    """The tiles that stand in the block of these nodes."""
    for node in nodes:
        if isinstance(node, TileLoop):
            yield node
        if not isinstance(node, (If, Scope)) and not (isinstance(node, For) and node.kind is not Kind.GROUP):
            for part in ("body", "otherwise", "parts"):
                yield from _tiles_of(getattr(node, part, ()))


def _placed(n: PackLoop, o: Open) -> bool:
    return n.stage.loop in o.tiles | o.blocks


def _loaded(n: PrefetchLoads | PrefetchAhead, o: Open) -> list[UOp]:
    return loads(n.body, o.tree.sig, o.added)


def _inner(o: Open) -> set[UOp]:
    """REDUCEs that are computed inside of others, as they depend on their ranges."""
    loops = {*o.tree.tiling.loops}
    return {u for u in o.tree.sig.reduces if not ranges_of(u) <= loops}


def _verify(nodes: Nodes, o: Open) -> frozenset[UOp]:
    """Values that have been computed after `nodes`."""
    for node in nodes:
        for rule, kind, holds in RULES:
            if isinstance(node, kind) and not holds(node, o):
                raise AssertionError(f"loop tree: {rule}: {_named(node)}")
        for index in _indices(node):
            _verify_index(index, node, o)
        o = _inside(node, o)
    return o.computed


def _inside(node: Node, o: Open) -> Open:
    """Verifies what is in a node; gives what is open after it."""
    match node:
        case For():
            uniform = o.is_uniform and node.begin.op is not Of.ITEM and node.kind is not Kind.SUBGROUP
            steps = {**o.steps, node.counter: gcd(_multiple(node.begin, o), node.step)}
            inside = replace(
                o,
                counters=o.counters | {node.counter},
                kinds=o.kinds | {node.kind},
                is_uniform=uniform,
                steps=steps,
                block=(),
            )
            _verify(node.body, inside)
        case TileLoop():
            begins = {**o.begins, node.range: _multiple(node.origin, o)}
            inside = replace(o, tiles=o.tiles | {node.range}, begins=begins)
            _verify_begins(node, inside, (node.range,))
            _verify(node.body, inside)
        case BlockLoop():
            _verify(node.body, replace(o, blocks=o.blocks | {node.range}))
        case If():
            inside = replace(o, is_uniform=False)
            first = replace(inside, is_first_item=o.is_first_item or node.condition == FIRST_ITEM, block=node.body)
            known = [_verify(node.body, first), _verify(node.otherwise, replace(inside, block=node.otherwise))]
            return replace(o, computed=known[0] & known[1])
        case PackStage():
            for part in node.parts:
                _verify((part,), o)
        case Share() | Fetch() | StartCopies():
            _verify(node.body, _with_lanes(node, replace(o, sharing=node), Lanes()))
        case PackLoop():
            _verify(node.body, _with_lanes(node, replace(o, packing=node), node.lanes))
        case ReduceLoop():
            added = tuple(u.src[0] for u in node.group)
            inside = replace(o, reducing=node.group[0].src[1:], added=added, across=node.across)
            _verify(node.body, _with_lanes(node, inside, node.lanes))
            if node.rest is None or node.rest.is_last:
                return replace(o, computed=o.computed | {*node.group})
        case OnlineReduce():
            added = (node.pair.maximum.src[0], node.pair.total.src[0])
            inside = replace(o, reducing=node.pair.total.src[1:], added=added)
            _verify(node.body, _with_lanes(node, inside, node.lanes))
            return replace(o, computed=_verify(node.otherwise, o))
        case Vectors():
            return replace(o, computed=_verify(node.body, _with_lanes(node, o, node.lanes)))
        case Scope():
            return replace(o, computed=_verify(node.body, replace(o, block=node.body)))
        case Holds() | PrefetchLoads() | PrefetchAhead():
            return replace(o, computed=_verify(node.body, o))
    return o


def _with_lanes(node: Node, o: Open, lanes: Lanes) -> Open:
    inside = replace(o, lanes=lanes)
    _verify_begins(node, inside, tuple(o.begins))
    return inside


def _verify_begins(node: Node, o: Open, ranges: tuple[UOp, ...]) -> None:
    """Tiles begin where the analysis of index expressions takes them to begin."""
    analysis = o.tree.tiling.analysis(o.lanes)
    for r in ranges:
        begin, size = o.begins[r], fixed_size(r)
        if begin == 0 or (size is not None and begin >= size):  # (within the range it is 0)
            continue
        every = analysis.aligned.get(r, 1)
        if r in analysis.whole or begin % every:
            where = "at 0 alone" if r in analysis.whole else f"at multiples of {every}"
            raise AssertionError(
                f"loop tree: a tile begins where index expressions take it to: {name(r)} begins at multiples of "
                f"{begin}, they take it to begin {where}: {_named(node)}"
            )


def _multiple(x: Index, o: Open) -> int:
    """A number that the value of an Index is a multiple of; 0: it is 0."""
    if (n := x.number) is not None:
        return abs(n)
    match x.op:
        case Of.COUNTER:
            return o.steps.get(x, 1)
        case Of.ORIGIN:
            return o.begins.get(x.arg, 1)
        case Of.HERE:
            return _multiple(x.src[0], o)
        case Of.SIZE:
            return _multiple_of_size(x.arg.src[0])
        case Ops.SUB if x.src[1].op is Ops.MOD and x.src[1].src[0] == x.src[0]:  # x - x % n
            return _multiple(x.src[1].src[1], o)
        case Ops.ADD | Ops.SUB:
            return gcd(_multiple(x.src[0], o), _multiple(x.src[1], o))
        case Ops.MUL:
            return _multiple(x.src[0], o) * _multiple(x.src[1], o)
        case Ops.MOD:
            return gcd(_multiple(x.src[0], o), _multiple(x.src[1], o))
        case Ops.WHERE:
            return gcd(_multiple(x.src[1], o), _multiple(x.src[2], o))
    return 1


def _multiple_of_size(u: UOp) -> int:
    terms, constant = linear(u)
    return gcd(constant, *terms.values())


def _indices(node: Node) -> Iterator[Index]:
    for part in ("begin", "end", "origin", "place", "size", "condition"):
        if isinstance(x := getattr(node, part, None), Index):
            yield x
    if isinstance(node, ReduceLoop) and node.rest is not None:
        yield from (node.rest.at, node.rest.begun)


def _verify_index(x: Index, node: Node, o: Open) -> None:
    if x.op is Of.COUNTER and x not in o.counters:
        raise AssertionError(f"loop tree: a counter is used in its loop: {text(x)} in {_named(node)}")
    if x.op is Of.ORIGIN and x.arg not in o.tiles:
        raise AssertionError(f"loop tree: an origin is that of an open tile: {text(x)} in {_named(node)}")
    for s in x.src:
        _verify_index(s, node, o)


def _named(node: Node) -> str:
    if isinstance(node, TileLoop):
        return f"Tile of {name(node.range)}"
    if isinstance(node, ReduceLoop):
        over = ", ".join(map(name, node.group[0].src[1:]))
        return f"Reduce of {', '.join(u.arg.name for u in node.group)} over {over}"
    return type(node).__name__
