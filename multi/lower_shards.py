"""lower_shards: from values on several devices to per-device values, MSTACK/MSELECT and explicit collectives.

Precondition: the user's graph; a sharded op is one node whatever the device count. Postcondition: no node's device is a
tuple, except MSTACK, collectives and the buffers under MSELECT; only this worker's devices are left.

    REDUCE(ADD, x cut along 0 over (CPU:0, CPU:1))  ==>
    s = ALLREDUCE(MSTACK(REDUCE(ADD, x0), REDUCE(ADD, x1)));  MSELECT(s, 0), MSELECT(s, 1)

Shapes: a value of global shape S cut on dim a has, on device i, S with dim a of bounds[i+1] - bounds[i].
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from itertools import pairwise
from math import gcd, prod
from typing import Any

from manygrad.multi.placement import REPLICATE, Partial, Placement, Shard
from manygrad.multi.rules import answer, placement, settled
from manygrad.multi.small_first import early_first, small_first
from manygrad.multi.world import World
from manygrad.tensor.dtype import DType, to_dtype
from manygrad.tensor.source import LINE, inherit, line_of
from manygrad.tensor.uop import GroupOp, Members, Ops, ReduceArg, UOp
from manygrad.tensor.uop.args import (
    AllGatherArg,
    AllReduceArg,
    AllToAllArg,
    BroadcastArg,
    CollectiveArg,
    PointToPointArg,
    ReduceScatterArg,
    finish_of,
)
from manygrad.tensor.uop.rewrite import substitute, with_sources
from manygrad.tensor.uop.shape import numel

Local = tuple[UOp, ...]  # one value a local device
MOVES = (Ops.RESHAPE, Ops.PERMUTE, Ops.EXPAND)
ELSEWHERE = UOp(Ops.MSTACK)  # stands for a value on another worker's device


def local_name(device: str) -> str:
    """The name of an own device without its node: `CPU:0@2` -> `CPU:0`."""
    return device.partition("@")[0]


class _Lowering:
    def __init__(self, me: World):
        self.me = me
        self.loc: dict[UOp, Local] = {}  # of nodes on several devices
        self.one: dict[UOp, UOp] = {}  # of nodes on one device or none
        self.memo: dict[Any, Local] = {}
        # the last answer of `mine`: a step asks for one tuple again and again
        self.asked: tuple[Any, list[int]] = (None, [])
        self.collectives = 0
        self.shared: list[
            UOp
        ] = []  # collectives with other workers: every one is run, whether its result is read here or not

    def mine(self, devices: tuple[str, ...]) -> list[int]:
        """Positions of this worker's devices."""
        if devices is self.asked[0]:
            return self.asked[1]
        found = self.memo.get(("mine", devices))
        if found is None:
            found = self.memo[("mine", devices)] = [i for i, d in enumerate(devices) if self.me.is_local(d)]  # type: ignore[assignment]
        if not found:
            raise ValueError(
                f"none of the {len(devices)} devices {devices[0]}.. belongs to this worker (rank {self.me.rank}); "
                "shard over manygrad.world.devices"
            )
        self.asked = (devices, found)  # type: ignore[assignment]
        return found  # type: ignore[return-value]

    def number(self) -> int:
        """The place of the next collective in the program: all workers must run theirs in this one order."""
        self.collectives += 1
        return self.collectives

    def run_by_all(self, node: UOp, devices: tuple[str, ...]) -> UOp:
        """Every worker runs the same list of collectives: one whose result only others read is an effect here."""
        if any(not self.me.is_local(d) for d in devices):
            self.shared.append(node)
        return node

    # *** changing the placement ***

    def at(self, u: UOp, devices: tuple[str, ...], have: Placement, want: Placement) -> Local:
        """The local parts of `u` as `want` lays them."""
        key = (u, devices, want)
        found = self.memo.get(key)
        if found is None:
            found = self.memo[key] = self._reshard(u, devices, have, want)
        return found

    def _reshard(self, u: UOp, devices: tuple[str, ...], have: Placement, want: Placement) -> Local:
        mine = self.mine(devices)
        if not isinstance(u.device, tuple):
            parts: Local = tuple(self.one[u] for _ in mine)
            have = REPLICATE
        else:
            parts = self.loc[u]
        if have == want:
            return parts
        if isinstance(want, Partial):
            return self.as_terms(u, parts, devices, have, want)
        if isinstance(have, Partial):
            return self.summed(parts, have, want, devices, u)
        if isinstance(have, Shard):
            whole = self.gathered_before(u, devices, want)
            if whole is None and isinstance(want, Shard) and have.axis != want.axis and len(devices) > 1:
                return self.all_to_all(parts, have, want, devices, u)
            whole = whole or self.all_gather(parts, have, u.shape, devices, u)
            return self.cut(whole, want, mine) if isinstance(want, Shard) else whole
        assert isinstance(want, Shard)
        return self.cut(parts, want, mine)

    def gathered_before(self, u: UOp, devices: tuple[str, ...], want: Placement) -> Local | None:
        """All of `u` on each device, where `u` is a smaller value that was moved and expanded and it takes less to
        gather that: weights that are cut along their outputs, for rows that are cut."""
        moves, small = [], u
        while small.op in MOVES or (small.op is Ops.CAST and small.src[0].dtype.itemsize <= small.dtype.itemsize):
            moves.append(small)
            small = small.src[0]
        pieces = len(devices) if isinstance(want, Shard) else 1  # (of the other, each device gets a piece)
        if numel(small.shape) * pieces >= numel(u.shape) or not isinstance(placement(small), Shard):
            return None
        parts = self.at(small, devices, placement(small), REPLICATE)
        for m in reversed(moves):
            parts = tuple(inherit(UOp(m.op, m.dtype, (x,), m.arg), m) for x in parts)
        return parts

    def as_terms(self, u: UOp, parts: Local, devices: tuple[str, ...], have: Placement, want: Partial) -> Local:
        """A term of a sum on each device, without communication: its slice among zeros, or the value on the first,
        zeros on the others."""
        assert want.op is Ops.ADD
        mine = self.mine(devices)
        if isinstance(have, Shard):
            return tuple(among_zeros(x, have, i) for x, i in zip(parts, mine))
        whole = self.summed(parts, have, REPLICATE, devices, u) if isinstance(have, Partial) else parts
        zero = const_like(u, 0)
        return tuple(p if i == 0 else zero for i, p in zip(mine, whole))

    def cut(self, whole: Local, p: Shard, mine: list[int]) -> Local:
        """Each device's slice of a value it holds whole; no communication."""
        return tuple(shrink(x, p.axis, p.bounds[i], p.bounds[i + 1]) for x, i in zip(whole, mine))

    def collective(
        self,
        op: Ops,
        parts: Local,
        devices: tuple[str, ...],
        arg: Callable[[Members], CollectiveArg],
        at: UOp,
        counts: list[int],
        stored: bool = False,
    ) -> Local:
        """One node for all devices, its `arg` for those who take part; its result has `counts[k]` elements on this
        worker's k-th device."""
        mine = self.mine(devices)
        flat = tuple(stored_on(reshape(x, (prod(x.shape),)), local_name(devices[i])) for x, i in zip(parts, mine))
        what = arg(Members(devices, tuple(mine), tuple(counts), self.number(), line_of(at), stored=stored))
        finish = finish_of(what)
        dtype = parts[0].dtype if finish is None else finish.dtype
        node = UOp(op, dtype, (UOp(Ops.MSTACK, parts[0].dtype, flat),), what)
        LINE[node] = line_of(at)
        self.run_by_all(node, devices)
        return tuple(UOp(Ops.MSELECT, dtype, (node,), k) for k in range(len(parts)))

    def summed(
        self,
        parts: Local,
        have: Partial,
        want: Placement,
        devices: tuple[str, ...],
        at: UOp,
        finish: UOp | None = None,
    ) -> Local:
        """The sum that is due, whole or cut. In a half type each term is rounded before, and the sum, which is taken in
        float32, once after: all devices have the same bits. `finish`: what is then computed of it."""
        wire = to_dtype(have.wire) if have.wire and len(devices) > 1 else at.dtype
        terms = tuple(cast(x, wire) for x in parts)
        if finish is not None and wire is not at.dtype:
            total = UOp(Ops.PARAM, wire, (), 0)
            finish = substitute(finish, {UOp(Ops.PARAM, at.dtype, (), 0): cast(total, at.dtype)})
        out = (
            self.reduce_scatter(terms, have.op, want, devices, at, finish)
            if isinstance(want, Shard)
            else self.all_reduce(terms, have.op, devices, at, finish)
        )
        return out if finish is not None else tuple(cast(x, at.dtype) for x in out)

    def all_reduce(self, parts: Local, op: Ops, devices: tuple[str, ...], at: UOp, finish: UOp | None = None) -> Local:
        if len(devices) == 1:
            return parts
        size = prod(at.shape)
        arg, counts = partial(AllReduceArg, op, size, finish=finish), [size] * len(parts)
        out = self.collective(Ops.ALLREDUCE, parts, devices, arg, at, counts, are_stored(at, len(devices)))
        return tuple(reshape(x, at.shape) for x in out)

    def all_gather(self, parts: Local, p: Shard, shape: tuple[Any, ...], devices: tuple[str, ...], at: UOp) -> Local:
        """Flat parts joined in rank order; for an inner dim the pieces are then set side by side."""
        if len(devices) == 1:
            return parts
        rest = prod(d for i, d in enumerate(shape) if i != p.axis)
        bounds = tuple(b * rest for b in p.bounds)
        counts = [bounds[-1]] * len(parts)
        out = self.collective(Ops.ALLGATHER, parts, devices, partial(AllGatherArg, bounds), at, counts)
        if prod(shape[: p.axis]) == 1 or not p.bounds[-1]:
            return tuple(reshape(x, shape) for x in out)
        whole = []
        for x in out:
            pieces = []
            for a, b in zip(p.bounds, p.bounds[1:]):
                if a < b:
                    pieces.append(
                        reshape(shrink(x, 0, a * rest, b * rest), (*shape[: p.axis], b - a, *shape[p.axis + 1 :]))
                    )
            whole.append(join(pieces, p.axis))
        return tuple(whole)

    def reduce_scatter(
        self, parts: Local, op: Ops, want: Shard, devices: tuple[str, ...], at: UOp, finish: UOp | None = None
    ) -> Local:
        """Each device's slice of the sum: half of what an all-reduce moves."""
        if len(devices) == 1:
            return parts
        mine = self.mine(devices)
        rest = prod(d for i, d in enumerate(at.shape) if i != want.axis)
        bounds = tuple(b * rest for b in want.bounds)
        packed = tuple(pack(x, want) for x in parts)
        counts = [bounds[i + 1] - bounds[i] for i in mine]
        arg = partial(ReduceScatterArg, op, bounds, finish=finish)
        out = self.collective(Ops.REDUCESCATTER, packed, devices, arg, at, counts)
        return tuple(reshape(x, cut_shape(at.shape, want, i)) for x, i in zip(out, mine))

    def all_to_all(self, parts: Local, have: Shard, want: Shard, devices: tuple[str, ...], at: UOp) -> Local:
        """From cut on one dim to cut on another: each device sends each other only what that one will hold."""
        mine = self.mine(devices)
        rest = prod(d for i, d in enumerate(at.shape) if i not in (have.axis, want.axis))
        columns = tuple(b * rest for b in want.bounds)
        packed = tuple(pack(x, want) for x in parts)
        total = at.shape[have.axis]
        counts = [total * (columns[i + 1] - columns[i]) for i in mine]
        arg = partial(AllToAllArg, have.bounds, columns)
        out = self.collective(Ops.ALLTOALL, packed, devices, arg, at, counts)
        whole = []
        for x, i in zip(out, mine):
            width, pieces = columns[i + 1] - columns[i], []
            for a, b in zip(have.bounds, have.bounds[1:]):
                if a < b and width:
                    shape = cut_shape((*at.shape[: have.axis], b - a, *at.shape[have.axis + 1 :]), want, i)
                    pieces.append(reshape(shrink(x, 0, a * width, b * width), shape))
            whole.append(join(pieces, have.axis) if pieces else reshape(x, cut_shape(at.shape, want, i)))
        return tuple(whole)

    # *** nodes ***

    def lower(self, u: UOp) -> None:
        devices = u.device
        if u.op is Ops.SINK:
            own = [x for s in u.src for x in (self.loc[s] if s in self.loc else (self.one[s],))]
            self.one[u] = u.replace(src=tuple(x for x in own if x is not ELSEWHERE) + tuple(self.shared))
        elif u.op is Ops.STORE and isinstance(u.src[0].device, tuple):
            want = settled(placement(u.src[0]))
            base = u.src[0]
            while base.op in GroupOp.MOVEMENT or base.op is Ops.AFTER:
                base = base.src[0]
            cut = placement(base)
            if isinstance(cut, Shard) and not isinstance(want, Shard):
                raise ValueError(
                    f"assignment into a part of dim {cut.axis}, along which the tensor of shape {base.shape} is cut "
                    f"over {len(u.src[0].device)} devices ({line_of(u)}); assign whole rows of it with t[...] = value, "
                    "or bring it to one device first"
                )
            targets = self.loc[u.src[0]]
            values = self.at(u.src[1], u.src[0].device, placement(u.src[1]), want)
            self.loc[u] = tuple(inherit(UOp(Ops.STORE, u.dtype, (t, v), u.arg), u) for t, v in zip(targets, values))
        elif not isinstance(devices, tuple):
            self.lower_single(u)
        elif u.op in (Ops.BUFFER, Ops.PARAM):
            self.loc[u] = tuple(UOp(Ops.MSELECT, u.dtype, (u,), i) for i in self.mine(devices))
        elif u.op is Ops.SHARD:
            self.lower_shard(u)
        elif u.op is Ops.FINISH:
            have = placement(u.src[0])
            assert isinstance(have, Partial)
            finish = None if u.arg.value.op is Ops.PARAM else u.arg.value
            self.loc[u] = self.summed(self.loc[u.src[0]], have, placement(u), devices, u.src[0], finish)
        elif u.op is Ops.AFTER:
            effects = [self.loc[e] for e in u.src[1:]]
            self.loc[u] = tuple(u.replace(src=(x, *(e[k] for e in effects))) for k, x in enumerate(self.loc[u.src[0]]))
        else:
            wants, result = answer(u)
            loc, places = self.loc, [placement(s) for s in u.src]
            parts = [
                loc[s] if w is p and s in loc else self.at(s, devices, p, w) for s, w, p in zip(u.src, wants, places)
            ]
            make: Callable[[UOp, Local, Placement, int], UOp] = local_node
            if u.op in (Ops.REDUCE, Ops.SCATTER) and isinstance(result, Partial) and u.dtype.is_float:
                cut = wants[0] if u.op is Ops.REDUCE else wants[1]
                assert isinstance(cut, Shard)
                if result.op in (Ops.ADD, Ops.MUL) and (mine := blocks_of(cut, len(devices))):
                    make = block_reducer(cut, mine) if u.op is Ops.REDUCE else block_scatterer(cut, mine)
            self.loc[u] = tuple(
                [inherit(make(u, tuple([p[k] for p in parts]), result, i), u) for k, i in enumerate(self.mine(devices))]
            )

    def lower_single(self, u: UOp) -> None:
        """A node on one device or none: kept where the device is this worker's;
        a copy between workers is a collective."""
        source = u.src[0].device if u.op is Ops.COPY else None
        if isinstance(source, tuple):
            whole = self.at(u.src[0], source, placement(u.src[0]), REPLICATE)
            self.one[u] = inherit(on(whole[0], local_name(u.arg)), u) if self.me.is_local(u.arg) else ELSEWHERE
        elif source is not None and "@" in source and "@" not in u.arg:
            self.one[u] = self.broadcast(u, source)
        elif source is not None and "@" in source and self.me.rank_of(source) != self.me.rank_of(u.arg):
            self.one[u] = self.send(u, source, u.arg)
        elif u.op in (Ops.BUFFER, Ops.PARAM):
            self.one[u] = u if self.me.is_local(u.arg.device) else ELSEWHERE
        else:
            src = tuple(self.one[s] for s in u.src)
            if ELSEWHERE in src:
                self.one[u] = ELSEWHERE
            else:
                node = with_sources(u, src)
                self.one[u] = node.replace(arg=local_name(u.arg)) if u.op is Ops.COPY else node

    def send(self, u: UOp, source: str, target: str) -> UOp:
        """A copy from a device of one worker to a device of another: one sends, one receives,
        the others take no part."""
        n, number = prod(u.shape), self.number()
        if not (self.me.is_local(source) or self.me.is_local(target)):
            return ELSEWHERE
        x = self.one[u.src[0]] if self.me.is_local(source) else broadcast(UOp.const(u.dtype, 0), (0,))
        here = source if self.me.is_local(source) else target
        part = stored_on(reshape(x, (prod(x.shape),)), local_name(here))
        members = Members((source, target), (int(here is target),), (n if here is target else 0,), number, line_of(u))
        node = UOp(Ops.POINT_TO_POINT, u.dtype, (UOp(Ops.MSTACK, u.dtype, (part,)),), PointToPointArg(n, members))
        inherit(self.run_by_all(node, (source, target)), u)
        if here is source:
            return ELSEWHERE
        return reshape(UOp(Ops.MSELECT, u.dtype, (node,), 0), u.shape)

    def broadcast(self, u: UOp, source: str) -> UOp:
        """A copy from one worker's device to "this node's own" device means: to every worker."""
        devices = tuple(f"{local_name(u.arg)}@{r}" for r in range(self.me.size))
        n, root = prod(u.shape), self.me.rank_of(source)
        x = self.one[u.src[0]] if root == self.me.rank else broadcast(UOp.const(u.dtype, 0), (0,))
        part = stored_on(reshape(x, (prod(x.shape),)), local_name(u.arg))
        members = Members(devices, (self.me.rank,), (n,), self.number(), line_of(u))
        node = UOp(Ops.BROADCAST, u.dtype, (UOp(Ops.MSTACK, u.dtype, (part,)),), BroadcastArg(root, n, members))
        self.run_by_all(inherit(node, u), devices)
        return reshape(UOp(Ops.MSELECT, u.dtype, (node,), 0), u.shape)

    def lower_shard(self, u: UOp) -> None:
        devices = u.arg.devices
        want = placement(u)
        src = u.src[0]
        if isinstance(src.device, str) and "@" in src.device and self.me.size > 1:
            raise ValueError(
                f"shard: the tensor lies on {src.device} only; bring it to every worker first: "
                f".to({local_name(src.device)!r}) ({line_of(u)})"
            )
        if isinstance(src.device, tuple):
            self.loc[u] = self.at(src, devices, placement(src), want)
            return
        x = self.one[src]
        out = []
        for i in self.mine(devices):
            part = shrink(x, want.axis, want.bounds[i], want.bounds[i + 1]) if isinstance(want, Shard) else x
            out.append(on(part, local_name(devices[i])))
        self.loc[u] = tuple(out)


def local_node(u: UOp, src: tuple[UOp, ...], result: Placement, i: int) -> UOp:
    """Op `u` on device i's sources, its arg in local sizes."""
    if u.op is Ops.WIRE:
        return src[0]
    if u.op in (Ops.RESHAPE, Ops.EXPAND):
        shape = u.arg
        if isinstance(result, Shard):
            shape = (*shape[: result.axis], result.bounds[i + 1] - result.bounds[i], *shape[result.axis + 1 :])
        return UOp(u.op, u.dtype, src, shape)
    if u.op is Ops.SHRINK and isinstance(result, Shard):
        part = result.bounds[i + 1] - result.bounds[i]
        return u.replace(src=src, arg=(*u.arg[: result.axis], (0, part), *u.arg[result.axis + 1 :]))
    if u.op in (Ops.GATHER, Ops.SCATTER) and isinstance(result, Shard):
        return u.replace(src=local_rows(u, src, result.bounds[i]))
    if u.op is Ops.REDUCE and prod(d for d in src[0].shape if isinstance(d, int)) == 0:
        identity = {Ops.ADD: 0, Ops.MUL: 1, Ops.MAX: u.dtype.min}[u.arg.op]
        shape = tuple(1 if a in u.arg.axes else d for a, d in enumerate(src[0].shape))
        return broadcast(UOp.const(u.dtype, identity), shape)
    return u.replace(src=src)


def local_rows(u: UOp, src: tuple[UOp, ...], begin: int) -> tuple[UOp, ...]:
    """The sources of a GATHER or SCATTER with the index of a cut dim counted from `begin`,
    where this device's part begins."""
    first = 1 if u.op is Ops.GATHER else 2
    cut = next(
        (first + j for j, (a, b) in enumerate(zip(src[0].shape, u.src[0].shape)) if j < len(src) - first and a != b),
        None,
    )
    if cut is None or not begin:
        return src
    start = broadcast(UOp.const(src[cut].dtype, begin), src[cut].shape)
    return (*src[:cut], UOp(Ops.SUB, src[cut].dtype, (src[cut], start)), *src[cut + 1 :])


def blocks_of(p: Shard, ranks: int) -> int:
    """How many of the blocks that sums over the cut dim are taken in each device holds; 0 where these are no whole
    subtree of the tree in which the blocks are added."""
    blocks = len(p.blocks) - 1
    mine = blocks // ranks
    if blocks < 1 or (ranks > 1 and mine & (mine - 1)) or p.bounds != p.blocks[::mine] or not p.bounds[-1]:
        return 0
    return mine


def block_scatterer(p: Shard, mine: int) -> Callable[[UOp, Local, Placement, int], UOp]:
    """Values added at their places in the order of a sum over the cut dim (`block_reducer`): each block in a table of
    its own, that of the first block over the base, and the tables in a tree."""

    def scatter(u: UOp, src: Local, result: Placement, i: int) -> UOp:
        base, *rows = src
        tables: list[UOp | None] = []
        for a, b in pairwise(p.blocks[i * mine : (i + 1) * mine + 1]):
            part = [shrink(x, p.axis, a - p.bounds[i], b - p.bounds[i]) for x in rows]
            start = const_like(u, 0) if tables else base
            tables.append(u.replace(src=(start, *part)) if a < b else None if tables else start)
        total = in_tree(tables, Ops.ADD)
        assert total is not None
        return total

    return scatter


def block_reducer(p: Shard, mine: int) -> Callable[[UOp, Local, Placement, int], UOp]:
    """A sum (or product) over the cut dim in an order that follows from global positions, not from the number of
    devices, each of which holds `mine` blocks.

    The dim is seen as SUM_BLOCKS blocks, cut where so many devices would be cut; each block is reduced on its own, then
    blocks are added in a tree that is split at the largest power of two. Devices hold whole subtrees where they are
    SUM_BLOCKS over a power of two (by default 1, 2, 4, 8), and the all-reduce goes on with the same tree over ranks:
    the same bits on all of them, for any size.

    Where blocks differ in size they do so alike in every group of them:
    12 rows in 8 blocks are 4 groups of 2 rows and 1 row,

        REDUCE(x, (12, n))  ==>  x as (4, 3, n):  tree(REDUCE(x[:, :2]) + REDUCE(x[:, 2:]))
    """
    in_group = (len(p.blocks) - 1) // groups_of(p.blocks)
    cuts = p.blocks[: in_group + 1]

    def reduce(u: UOp, src: Local, result: Placement, i: int) -> UOp:
        op, axes = u.arg.op, u.arg.axes
        (x,) = src
        first = i * mine % in_group  # of the blocks of a group, where a device holds fewer than a group
        held = min(mine, in_group)
        own = mine // held  # groups
        x = reshape(x, (*x.shape[: p.axis], own, x.shape[p.axis] // own, *x.shape[p.axis + 1 :]))
        inner = tuple(a if a < p.axis else a + 1 for a in axes)
        sums = [
            reduce_rows(u, op, shrink(x, p.axis + 1, a - cuts[first], b - cuts[first]), inner, mine)
            for a, b in pairwise(cuts[first : first + held + 1])
        ]
        if (
            own > 1
        ):  # (of what is added in a tree of REDUCEs one row alone, if it is a product, is rounded as others are)
            sums = [rounded(s) if s is not None and prod(s.src[0].shape[a] for a in inner) == 1 else s for s in sums]
        y = in_tree(sums, op)
        if y is None:
            none = UOp.const(u.dtype, 0 if op is Ops.ADD else 1)
            return broadcast(none, tuple(1 if a in axes else d for a, d in enumerate(src[0].shape)))
        if own & (own - 1):
            y = in_tree([shrink(y, p.axis, k, k + 1) for k in range(own)], op)
            assert y is not None
        else:  # the levels of the tree nest in one kernel
            levels = own.bit_length() - 1
            y = reshape(y, (*y.shape[: p.axis], *(2,) * levels, *y.shape[p.axis + 1 :]))
            for level in reversed(range(levels)):
                y = UOp(Ops.REDUCE, u.dtype, (y,), ReduceArg(op, (p.axis + level,), blocks=1))
        return reshape(y, tuple(1 if a in axes else d for a, d in enumerate(src[0].shape)))

    return reduce


def groups_of(blocks: tuple[int, ...]) -> int:
    """Into how many equal groups, cut alike, the blocks of a dim fall: (0, 2, 3, 5, 6) -> 2. Groups are whole
    subtrees: of a power of two of blocks, or of all."""
    n, size = len(blocks) - 1, blocks[-1]
    for groups in range(gcd(n, size), 1, -1):
        if (
            n % groups == 0
            and not n // groups & (n // groups - 1)
            and size % groups == 0
            and all(blocks[k + n // groups] - blocks[k] == size // groups for k in range(n + 1 - n // groups))
        ):
            return groups
    return 1


def reduce_rows(u: UOp, op: Ops, x: UOp, axes: tuple[int, ...], blocks: int) -> UOp | None:
    """The sum of one block (of each group); None of no rows."""
    return None if 0 in x.shape else UOp(Ops.REDUCE, u.dtype, (x,), ReduceArg(op, axes, blocks))


def rounded(u: UOp) -> UOp:
    """`u` as if it had been stored: a sum over it adds rounded products."""
    bits = to_dtype(f"int{8 * u.dtype.itemsize}")
    return UOp(Ops.BITCAST, u.dtype, (UOp(Ops.BITCAST, bits, (u,)),))


def in_tree(terms: Sequence[UOp | None], op: Ops) -> UOp | None:
    """The sum (or product) as the collectives take it over ranks: split at the largest power of two below the number of
    terms; None is no term."""
    if len(terms) == 1:
        return terms[0]
    half = 1 << ((len(terms) - 1).bit_length() - 1)
    a, b = in_tree(terms[:half], op), in_tree(terms[half:], op)
    return UOp(op, a.dtype, (a, b)) if a is not None and b is not None else a or b


def reshape(x: UOp, shape: tuple[Any, ...]) -> UOp:
    return x if x.shape == shape else UOp(Ops.RESHAPE, x.dtype, (x,), shape)


def are_stored(u: UOp, devices: int) -> bool:
    """Whether the terms of a sum over `devices` lie in memory: one row of a buffer on each. Told from the global graph,
    so all workers say the same."""
    while (
        u.op in GroupOp.MOVEMENT
        or u.op is Ops.WIRE
        or (u.op is Ops.REDUCE and prod(u.src[0].shape[a] for a in u.arg.axes) == devices)
    ):
        u = u.src[0]
    return u.op in (Ops.BUFFER, Ops.PARAM)


def cut_shape(shape: tuple[Any, ...], p: Shard, i: int) -> tuple[Any, ...]:
    return (*shape[: p.axis], p.bounds[i + 1] - p.bounds[i], *shape[p.axis + 1 :])


def join(pieces: list[UOp], axis: int) -> UOp:
    return UOp(Ops.CAT, pieces[0].dtype, tuple(pieces), axis) if len(pieces) > 1 else pieces[0]


def pack(x: UOp, p: Shard) -> UOp:
    """Flat, with what each device will hold lying together."""
    if prod(x.shape[: p.axis]) == 1 or not prod(x.shape):
        return reshape(x, (prod(x.shape),))
    return join(
        [
            reshape(y, (prod(y.shape),))
            for y in (shrink(x, p.axis, a, b) for a, b in zip(p.bounds, p.bounds[1:]) if a < b)
        ],
        0,
    )


def shrink(x: UOp, axis: int, begin: int, end: int) -> UOp:
    if (begin, end) == (0, x.shape[axis]):
        return x
    return UOp(Ops.SHRINK, x.dtype, (x,), tuple((begin, end) if a == axis else (0, d) for a, d in enumerate(x.shape)))


def among_zeros(x: UOp, p: Shard, i: int) -> UOp:
    """Device i's slice in the shape of the whole value."""
    pads = tuple((p.bounds[i], p.bounds[-1] - p.bounds[i + 1]) if a == p.axis else (0, 0) for a in range(len(x.shape)))
    return UOp(Ops.PAD, x.dtype, (x,), pads)


def is_on(x: UOp, device: str) -> bool:
    """Whether local value `x` lies on local `device`; buffers of the world keep their global names."""
    return isinstance(x.device, str) and local_name(x.device) == device


def on(x: UOp, device: str) -> UOp:
    return x if x.device is None or is_on(x, device) else UOp(Ops.COPY, x.dtype, (x,), device)


def stored_on(x: UOp, device: str) -> UOp:
    """`x` in memory of `device`."""
    return UOp(Ops.CONTIGUOUS, x.dtype, (x,)) if is_on(x, device) else UOp(Ops.COPY, x.dtype, (x,), device)


def broadcast(u: UOp, shape: tuple[Any, ...]) -> UOp:
    return u if not shape else UOp(Ops.EXPAND, u.dtype, (UOp(Ops.RESHAPE, u.dtype, (u,), (1,) * len(shape)),), shape)


def const_like(u: UOp, value: int) -> UOp:
    return broadcast(UOp.const(u.dtype, value), u.shape)


def lower_shards(sink: UOp, me: World) -> UOp:
    """The pass; `me` says which devices are this worker's."""
    order = early_first(sink)
    if not any(
        isinstance(u.device, tuple) or (isinstance(u.device, str) and "@" in u.device)
        for u in order
        if u.op in (Ops.BUFFER, Ops.PARAM, Ops.SHARD, Ops.COPY)
    ):
        return sink
    low = _Lowering(me)
    for u in small_first(order):
        low.lower(u)
    return low.one[sink]


def store_spec(u: UOp) -> tuple[int | None, tuple[int, ...]]:
    """(axis, bounds) of the buffer that will hold `u`."""
    p = settled(placement(u))
    return (p.axis, p.bounds) if isinstance(p, Shard) else (None, ())


def cast(x: UOp, dtype: DType) -> UOp:
    return x if x.dtype is dtype else UOp(Ops.CAST, dtype, (x,))
