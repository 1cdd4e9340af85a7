"""merge_kernels: elementwise kernels over the same loops that read the same data become one kernel with several results.

Precondition: items in order, each with its dependencies. Postcondition: the same effects from fewer items; a value that one kernel
stored and a merged one read is taken from the register, not from memory.

    m[i] = m[i] * b + g[i];  w[i] = w[i] - m[i] * lr      ==>  one kernel: reads m, g, w once, writes m and w

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


@dataclass
class Group:
    """Items that run as one, at the place of the first, or of a later one where that one comes after something else."""

    at: int
    items: list[Item]
    loops: tuple[UOp, ...]
    args: list[UOp] = field(default_factory=list)
    stores: list[UOp] = field(default_factory=list)  # over PARAMs numbered as in `args`
    loads: dict[UOp, set[tuple[UOp, ...]]] = field(default_factory=dict)  # buffer -> places that are read
    awaited: bool = False  # an item of another group comes after one of these: the group cannot move to a later place

    def written(self) -> dict[UOp, UOp]:
        """buffer -> its STORE."""
        return {self.args[s.src[0].src[0].arg]: s for s in self.stores}


def merge_kernels(items: list[Item], after: list[set[int]]) -> list[Item]:
    """`after[i]`: the positions that item i comes after."""
    groups: list[Group] = []
    group_of: list[Group] = []
    open_groups: dict[tuple[UOp, ...], list[Group]] = {}
    for i, item in enumerate(items):
        found = None
        loops = simple_loops(item)
        if loops:
            for group in reversed(open_groups.get(loops, [])[-4:]):
                in_place = all(group_of[d] is group or group_of[d].at < group.at for d in after[i])
                if (in_place or not group.awaited) and joins(group, item):
                    found = group
                    if not in_place:
                        group.at = i
                    break
        if found is None:
            found = Group(i, [item], loops)
            groups.append(found)
            if loops:
                assert joins(found, item)
                open_groups.setdefault(loops, []).append(found)
        else:
            found.items.append(item)
        group_of.append(found)
        for d in after[i]:
            group_of[d].awaited = group_of[d].awaited or group_of[d] is not found
    return [g.items[0] if len(g.items) == 1 else merged(g) for g in sorted(groups, key=lambda g: g.at)]


def simple_loops(item: Item) -> tuple[UOp, ...]:
    """The loops of an elementwise kernel with one plain STORE; nothing for any other item."""
    if item.what.op is not Ops.SINK or len(item.what.src) != 1:
        return ()
    store = item.what.src[0]
    return () if store.arg is not None or nodes_of(item.what, Ops.REDUCE) else store.src[2:]


def nodes_of(kernel: UOp, op: Ops) -> list[UOp]:
    """The kernel's nodes of an op, in order; looked for once."""
    found: dict[Ops, list[UOp]] | None = kernel._cache.get("nodes")
    if found is None:
        found = kernel._cache["nodes"] = {o: [] for o in (Ops.INDEX, Ops.LOAD, Ops.REDUCE)}
        for u in kernel.toposort():
            if u.op in found:
                found[u.op].append(u)
    return found[op]


def joins(group: Group, item: Item) -> bool:
    """Adds the item's kernel to the group if that changes no value."""
    store = item.what.src[0]
    reads: dict[UOp, set[tuple[UOp, ...]]] = {}
    for load in nodes_of(item.what, Ops.LOAD):
        index = load.src[0]
        reads.setdefault(item.args[index.src[0].arg], set()).add(index.src[1:])
    place = store.src[0].src[1:]
    out = item.args[store.src[0].src[0].arg]
    written = group.written()
    if group.stores:
        if out in written or len(group.stores) == MAX_STORES or out.device != group.args[0].device:
            return False
        if len(set(group.args) | set(item.args)) > MAX_ARGS or not _shares(group, item, out):
            return False
        if any(b in written and (is_temporary(b) or places != {written[b].src[0].src[1:]}) for b, places in reads.items()):
            return False  # (that a temporary is stored between two kernels was decided before: a fusion boundary)
        if group.loads.get(out, {place}) != {place}:
            return False
    slots = {b: i for i, b in enumerate(group.args)}
    for b in item.args:
        if b not in slots:
            slots[b] = len(slots)
            group.args.append(b)
    mapping: dict[UOp, UOp] = {}
    for index in nodes_of(item.what, Ops.INDEX):
        param = index.src[0]
        mapping[param] = UOp(Ops.PARAM, param.dtype, (), slots[item.args[param.arg]])
    taken = {load: written[b].src[1] for load in nodes_of(item.what, Ops.LOAD) if (b := item.args[load.src[0].src[0].arg]) in written}
    group.stores.append(substitute(store, {**mapping, **taken}))
    for b, places in reads.items():
        if b not in written:
            group.loads.setdefault(b, set()).update(places)
    return True


def _shares(group: Group, item: Item, out: UOp) -> bool:
    """Whether both touch a buffer besides what the item writes: merging then saves reading it again."""
    return any(b in group.args for b in item.args if b is not out) or out in group.loads


def merged(group: Group) -> Item:
    first = group.items[0]
    written = group.written()
    reads = [r for item in group.items for r in item.reads if r[0] not in written or item is first]
    item = Item(first.effect, UOp(Ops.SINK, dtypes.void, tuple(group.stores)), group.args, list(written), list(dict.fromkeys(reads)))
    return item
