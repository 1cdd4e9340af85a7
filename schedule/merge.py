"""merge_kernels: elementwise kernels join those over the same loops that read the same data, or that compute what they read.

Precondition: items in order, each with its dependencies. Postcondition: the same effects from fewer items; a value that one kernel
stored and a merged one read is taken from the register, not from memory; a temporary that nothing else reads is not stored any more.

    m[i] = m[i] * b + g[i];  w[i] = w[i] - m[i] * lr      ==>  one kernel: reads m, g, w once, writes m and w
    h[i] = sum(x[k] * w[k, i]);  a[i] = gelu(h[i]);  d[i] = gelu'(h[i])      ==>  one kernel: a product that writes a and d

A kernel joins an earlier one only where nothing between them must come first, and only if they touch shared buffers at the very same
elements: an iteration may not see what another one writes.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from manygrad.schedule.kernels import Item
from manygrad.schedule.memory import is_temporary
from manygrad.tensor.dtype import dtypes
from manygrad.tensor.uop import Ops, UOp
from manygrad.tensor.uop.rewrite import substitute

MAX_ARGS = 20  # buffers of one kernel
MAX_STORES = 6
MAX_NODES = 400  # of a kernel: what is larger compiles slowly and spills registers


@dataclass
class Group:
    """Items that run as one, at the place of the first, or of a later one where that one comes after something else."""

    at: int
    items: list[Item]
    loops: tuple[UOp, ...]
    args: list[UOp] = field(default_factory=list)
    stores: list[UOp] = field(default_factory=list)  # over PARAMs numbered as in `args`
    loads: dict[UOp, set[tuple[UOp, ...]]] = field(default_factory=dict)  # buffer -> places that are read
    reduces: bool = False
    nodes: int = 0
    awaited: bool = False  # an item of another group comes after one of these: the group cannot move to a later place

    def written(self) -> dict[UOp, UOp]:
        """buffer -> its STORE."""
        return {self.args[s.src[0].src[0].arg]: s for s in self.stores}


def merge_kernels(items: list[Item], after: list[set[int]]) -> list[Item]:
    """`after[i]`: the positions that item i comes after."""
    groups: list[Group] = []
    group_of: list[Group] = []
    open_groups: dict[tuple[UOp, ...], list[Group]] = {}
    users: dict[UOp, list[Group]] = {}  # buffer -> the groups that touch it, one entry an item
    for i, item in enumerate(items):
        found = None
        loops, reduces = loops_of(item)
        if loops and not reduces:
            for group in candidates(item, open_groups.get(loops, [])):
                in_place = all(group_of[d] is group or group_of[d].at < group.at for d in after[i])
                if (in_place or not group.awaited) and joins(group, item):
                    found = group
                    if not in_place:
                        group.at = i
                    break
        if found is None:
            found = Group(i, [item], loops, reduces=reduces)
            groups.append(found)
            if loops:
                assert joins(found, item)
                open_groups.setdefault(loops, []).append(found)
        else:
            found.items.append(item)
        group_of.append(found)
        for b in item.args:
            users.setdefault(b.src[0] if b.op is Ops.VIEW else b, []).append(found)
        for d in after[i]:
            group_of[d].awaited = group_of[d].awaited or group_of[d] is not found
    return [g.items[0] if len(g.items) == 1 else merged(g, users) for g in sorted(groups, key=lambda g: g.at)]


def loops_of(item: Item) -> tuple[tuple[UOp, ...], bool]:
    """The loops of a kernel with one plain STORE, and whether it reduces; no loops for any other item."""
    if item.what.op is not Ops.SINK or len(item.what.src) != 1 or item.what.src[0].arg is not None:
        return (), False
    return item.what.src[0].src[2:], any(u.op is Ops.REDUCE for u in item.what.toposort())


def candidates(item: Item, groups: list[Group]) -> list[Group]:
    """Groups over the item's loops that it may join: those that write what it reads, and the last few."""
    makers = [g for g in groups if any(w in item.args for w in g.written())]
    return [*reversed(makers), *(g for g in reversed(groups[-4:]) if g not in makers)]


def joins(group: Group, item: Item) -> bool:
    """Adds the item's kernel to the group if that changes no value."""
    store = item.what.src[0]
    nodes = item.what.toposort()
    indices = [u for u in nodes if u.op is Ops.INDEX]
    reads: dict[UOp, set[tuple[UOp, ...]]] = {}
    for load in nodes:
        if load.op is Ops.LOAD:
            index = load.src[0]
            reads.setdefault(item.args[index.src[0].arg], set()).add(index.src[1:])
    place = store.src[0].src[1:]
    out = item.args[store.src[0].src[0].arg]
    written = group.written()
    if group.stores:
        if out in written or len(group.stores) == MAX_STORES or out.device != group.args[0].device:
            return False
        if len(set(group.args) | set(item.args)) > MAX_ARGS or group.nodes + len(nodes) > MAX_NODES or not _shares(group, item, out):
            return False
        if any(b in written and places != {written[b].src[0].src[1:]} for b, places in reads.items()):
            return False
        if group.loads.get(out, {place}) != {place}:
            return False
    slots = {b: i for i, b in enumerate(group.args)}
    for b in item.args:
        if b not in slots:
            slots[b] = len(slots)
            group.args.append(b)
    mapping: dict[UOp, UOp] = {}
    for index in indices:
        param = index.src[0]
        mapping[param] = UOp(Ops.PARAM, param.dtype, (), slots[item.args[param.arg]])
    taken = {load: written[b].src[1] for load in nodes if load.op is Ops.LOAD and (b := item.args[load.src[0].src[0].arg]) in written}
    group.stores.append(substitute(store, {**mapping, **taken}))
    group.nodes += len(nodes)
    for b, places in reads.items():
        if b not in written:
            group.loads.setdefault(b, set()).update(places)
    return True


def _shares(group: Group, item: Item, out: UOp) -> bool:
    """Whether merging saves reading something: what the group computes, or, where no reduction is made beside it, what both read."""
    if group.reduces:
        return any(b in item.args for b in group.written())
    return any(b in group.args for b in item.args if b is not out) or out in group.loads


def merged(group: Group, users: dict[UOp, list[Group]]) -> Item:
    """One item for all of a group's, over the buffers that it still touches."""
    first, written = group.items[0], group.written()
    needed = {b: s for b, s in written.items() if not is_temporary(b) or any(g is not group for g in users[b])}
    sink = UOp(Ops.SINK, dtypes.void, tuple(needed.values()))
    used = sorted({u.arg for u in sink.toposort() if u.op is Ops.PARAM})
    params = {u: UOp(Ops.PARAM, u.dtype, (), used.index(u.arg)) for u in sink.toposort() if u.op is Ops.PARAM}
    reads = [r for item in group.items for r in item.reads if r[0] not in written or item is first]
    return Item(first.effect, substitute(sink, params), [group.args[i] for i in used], list(needed), list(dict.fromkeys(reads)))
