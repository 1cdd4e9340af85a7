"""Values on several devices as the parts of this worker's own, brought from one placement to another: by slices where
that takes no communication, else by one collective."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from math import prod
from typing import Any

from manygrad.multi.local import (
    among_zeros,
    broadcast,
    cast,
    const_like,
    cut_shape,
    join,
    local_name,
    pack,
    reshape,
    shrink,
    stored_on,
)
from manygrad.multi.placement import REPLICATE, Partial, Placement, Shard
from manygrad.multi.rules import placement
from manygrad.multi.world import World
from manygrad.tensor.dtype import to_dtype
from manygrad.tensor.source import LINE, inherit, line_of
from manygrad.tensor.uop import GroupOp, Members, Ops, UOp
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
from manygrad.tensor.uop.rewrite import substitute
from manygrad.tensor.uop.shape import numel

Local = tuple[UOp, ...]  # one value a local device
MOVES = (Ops.RESHAPE, Ops.PERMUTE, Ops.EXPAND)
ELSEWHERE = UOp(Ops.MSTACK)  # stands for a value on another worker's device


class Resharding:
    """`loc`: the parts of each node on several devices; `one`: each node on one device or none."""

    def __init__(self, me: World):
        self.me = me
        self.loc: dict[UOp, Local] = {}
        self.one: dict[UOp, UOp] = {}
        self.memo: dict[tuple[UOp, tuple[str, ...], Placement], Local] = {}
        self.own: dict[tuple[str, ...], list[int]] = {}
        # the last answer of `mine`: a step asks for one tuple again and again
        self.asked: tuple[tuple[str, ...], list[int]] = ((), [])
        self.collectives = 0
        # collectives with other workers: every one is run, whether its result is read here or not
        self.shared: list[UOp] = []

    def mine(self, devices: tuple[str, ...]) -> list[int]:
        """Positions of this worker's devices."""
        if devices is self.asked[0]:
            return self.asked[1]
        found = self.own.get(devices)
        if found is None:
            found = self.own[devices] = [i for i, d in enumerate(devices) if self.me.is_local(d)]
        if not found:
            raise ValueError(
                f"none of the {len(devices)} devices {devices[0]}.. belongs to this worker (rank {self.me.rank}); "
                "shard over manygrad.world.devices"
            )
        self.asked = (devices, found)
        return found

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
        if want is have and u in self.loc:
            return self.loc[u]
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

    # *** copies between workers ***

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
