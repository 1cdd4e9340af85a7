"""merge_kernels: kernels join those over the same loops that read the same data, or that compute what they read.

Precondition: items in order, each with the items that it comes after. Postcondition: the same effects from
fewer items; a value that one kernel stored and a merged one read is taken from the register, not from memory; a
temporary that nothing else reads is not stored any more.

    m[i] = m[i] * b + g[i];  w[i] = w[i] - m[i] * lr      ==>  one kernel: reads m, g, w once, writes m and w
    h[i] = sum(x[k] * w[k, i]);  a[i] = gelu(h[i]);  d[i] = gelu'(h[i])   ==>  one kernel: a product that writes a and d
    s[i] = sum(x[i, k], k);  q[i] = sum((x[i, k] - s[i])**2, k)   ==>  one kernel: a row is read from memory once
    s = sum(x[k], k);  m = max(x[k], k)   ==>  one kernel: x is read from memory once
    c[i] = a[i];  c[i + 64] = b[i]   ==>  one kernel: the parts of joined values

A kernel joins an earlier one only where nothing between them must come first, and only if they touch shared buffers at
the very same elements: an iteration may not see what another one writes. Reductions join each other where they go over
the same elements: in one pass (the code generator shares the ranges), or, where one needs the other's result, in two
over a row that fits the cache. Contractions, whose operands are used many times, have loops of their own each.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from math import prod

from manygrad.schedule.facts.buffers import is_temporary
from manygrad.schedule.facts.domain import domain_of
from manygrad.schedule.facts.items import Item, edges_of
from manygrad.schedule.facts.nodes import reductions
from manygrad.schedule.facts.rows import ROW
from manygrad.tensor.dtype import dtypes
from manygrad.tensor.uop import Ops, UOp
from manygrad.tensor.uop import symbolic as sym
from manygrad.tensor.uop.rewrite import substitute
from manygrad.tensor.uop.track import made_from

MAX_ARGS = 20  # buffers of one kernel
MAX_STORES = 6
MAX_NODES = 400  # of a kernel: what is larger compiles slowly and spills registers


@dataclass
class Group:
    """Items that run as one, at the place of the first, or of a later one where that one comes after something else."""

    at: int
    items: list[Item]
    loops: tuple[UOp, ...] | None
    number: int = 0  # among the open groups of these loops
    args: list[UOp] = field(default_factory=list)
    stores: list[UOp] = field(default_factory=list)  # over PARAMs numbered as in `args`
    loads: dict[UOp, set[tuple[UOp, ...]]] = field(default_factory=dict)  # buffer -> places that are read
    reduces: bool = False
    nodes: int = 0
    after: list[Group] = field(default_factory=list)  # other groups that come before this one
    awaited: bool = False  # an item of another group comes after one of these

    def target(self, store: UOp) -> UOp:
        """The buffer that is written."""
        return self.args[store.src[0].src[0].arg]

    def written(self) -> dict[UOp, UOp]:
        """buffer -> its STORE; of several, which write parts of it, the last."""
        return {self.target(s): s for s in self.stores}

    @property
    def in_parts(self) -> set[UOp]:
        """Buffers that several STOREs write."""
        targets = [self.target(s) for s in self.stores]
        return {b for b in targets if targets.count(b) > 1}


def merge_kernels(items: list[Item]) -> list[Item]:
    groups: list[Group] = []
    group_of: dict[object, Group] = {}  # by the key of an item
    open_groups: dict[tuple[UOp, ...], list[Group]] = {}
    writers: dict[tuple[UOp, tuple[UOp, ...]], list[int]] = {}  # (buffer, loops) -> places among the open groups
    users: dict[UOp, list[Group]] = {}  # buffer -> the groups that touch it, one entry an item
    overtaken = False  # a group moved behind one that waits for it: places alone do not tell any more who can wait
    for i, item in enumerate(items):
        found = None
        before: set[int] | None = None
        loops, reduces = loops_of(item)
        for group in candidates(item, loops, open_groups.get(loops, []), writers) if loops is not None else []:
            others = [group_of[d] for d in item.after if group_of[d] is not group]
            in_place = all(g.at < group.at for g in others)
            overtakes = group.awaited and not in_place
            apart = all(group_of[d] is not group for d in item.after)
            if (overtakes and not reduces) or not can_join(group, item, apart):
                continue
            if overtakes or overtaken:
                before = all_before([group_of[d] for d in item.after]) if before is None else before
                if id(group) in before:
                    continue
            found = group
            overtaken = overtaken or overtakes
            if not in_place:
                group.at = i
            break
        if found is None:
            found = Group(i, [item], loops, reduces=reduces)
            groups.append(found)
            if loops is not None:
                of_loops = open_groups.setdefault(loops, [])
                found.number = len(of_loops)
                of_loops.append(found)
        else:
            found.items.append(item)
        if loops is not None:
            join(found, item)
            writers.setdefault((found.target(found.stores[-1]), loops), []).append(found.number)
        group_of[item.key] = found
        for b in item.args:
            users.setdefault(b.src[0] if b.op is Ops.VIEW else b, []).append(found)
        for d in item.after:
            if group_of[d] is not found:
                group_of[d].awaited = True
                found.after.append(group_of[d])
    joined = {key: g.items[0].key for key, g in group_of.items()}
    return [
        replace(g.items[0] if len(g.items) == 1 else merged(g, users), after=edges_of(g.items, joined))
        for g in in_order(groups)
    ]


def all_before(groups: list[Group]) -> set[int]:
    """What one of these comes after, at once or by way of others, by id."""
    seen: set[int] = set()
    todo = [a for g in groups for a in g.after]
    while todo:
        g = todo.pop()
        if id(g) not in seen:
            seen.add(id(g))
            todo += g.after
    return seen


def in_order(groups: list[Group]) -> list[Group]:
    """By place; what waits for a group that has moved to a later place comes after it."""
    done: set[int] = set()
    out: list[Group] = []
    for first in sorted(groups, key=lambda g: g.at):
        path = [first]
        while path:
            g = path[-1]
            missing = [a for a in g.after if id(a) not in done] if id(g) not in done else []
            path += missing[:1]
            if not missing:
                path.pop()
                if id(g) not in done:
                    done.add(id(g))
                    out.append(g)
    return out


def loops_of(item: Item) -> tuple[tuple[UOp, ...] | None, bool]:
    """The loops of a kernel with one plain STORE, and whether it reduces; None for any other item.

    A kernel that gives one number has no loops: it joins others only if all reduce, over the same elements."""
    if item.what.op is not Ops.SINK or len(item.what.src) != 1 or item.what.src[0].arg is not None:
        return None, False
    loops, reduces = item.what.src[0].src[2:], bool(reductions(item.what))
    return (loops if loops or reduces else None), reduces


def candidates(
    item: Item,
    loops: tuple[UOp, ...],
    groups: list[Group],
    writers: dict[tuple[UOp, tuple[UOp, ...]], list[int]],
) -> list[Group]:
    """Groups over the item's loops that it may join: those that write what it reads, and the last few."""
    makers = {n for b in item.args for n in writers.get((b, loops), ())}
    last = range(max(0, len(groups) - 4), len(groups))
    return [groups[n] for n in (*sorted(makers, reverse=True), *(n for n in reversed(last) if n not in makers))]


def can_join(group: Group, item: Item, apart: bool) -> bool:
    """Whether the item's kernel can be one with the group's, no value changes, and something is saved. `apart`: neither
    must come first, so that what both write are parts that do not meet."""
    store = item.what.src[0]
    place = store.src[0].src[1:]
    out = item.args[store.src[0].src[0].arg]
    written = group.written()
    if len(group.stores) == MAX_STORES or out.device != group.args[0].device:
        return False
    if out in written and not (apart and not group.reduces and not reductions(item.what) and out not in group.loads):
        return False
    if len(set(group.args) | set(item.args)) > MAX_ARGS or group.nodes + len(item.what.below()) > MAX_NODES:
        return False
    if not (goes_along(group, item) if reductions(item.what) else _shares(group, item, out)):
        return False
    if group.reduces and any(u.op is Ops.LOAD for p in place for u in p.below()):
        return False  # (a store at places that are read goes one by one, and so would the reduction)
    in_parts = group.in_parts | ({out} if out in written else set())
    for b, places in reads_of(item.what, item.args).items():
        if b in in_parts or (b in written and places != {written[b].src[0].src[1:]}):
            return False
    return group.loads.get(out, {place}) == {place}


def reads_of(ast: UOp, args: list[UOp]) -> dict[UOp, set[tuple[UOp, ...]]]:
    """buffer -> places that are read."""
    found: dict[UOp, set[tuple[UOp, ...]]] = {}
    for load in ast.below():
        if load.op is Ops.LOAD:
            found.setdefault(args[load.src[0].src[0].arg], set()).add(load.src[0].src[1:])
    return found


def join(group: Group, item: Item) -> None:
    """Adds the item's kernel to the group."""
    store = renumbered(item, group)
    written = group.written()
    for b, places in reads_of(item.what if store is item.what.src[0] else store, item.args).items():
        if b not in written:
            group.loads.setdefault(b, set()).update(places)
    group.nodes += len(item.what.below())
    if not group.stores and len(set(item.args)) == len(item.args):
        group.args += item.args
        group.stores.append(store)
        return
    group.args += [b for b in item.args if b not in group.args]
    changes: dict[UOp, UOp] = {}
    for u in store.toposort():
        if u.op is Ops.PARAM:
            changes[u] = u.replace(arg=group.args.index(item.args[u.arg]))
        elif u.op is Ops.LOAD and (b := item.args[u.src[0].src[0].arg]) in written:
            changes[u] = written[b].src[1]
    group.stores.append(substitute(store, changes))


def renumbered(item: Item, group: Group) -> UOp:
    """The item's STORE, the ranges of its REDUCEs numbered after the group's."""
    if not group.stores or not reductions(item.what):
        return item.what.src[0]
    used = [u.arg.id for s in group.stores for u in s.toposort() if u.op is Ops.RANGE]
    ranges = dict.fromkeys(r for u in reductions(item.what) for r in u.src[1:])
    fresh = {r: r.replace(arg=r.arg._replace(id=max(used) + 1 + i)) for i, r in enumerate(ranges)}
    return substitute(item.what.src[0], fresh)


def goes_along(group: Group, item: Item) -> bool:
    """Whether the REDUCEs of an item go over the elements that those of the group go over; in order, if they need what
    those give, then over rows that fit the cache. How each is added up is as in a kernel of its own: equal sizes,
    types, places."""
    mine = domain_of(item.what)
    if mine is None:
        return False
    others = [(i, s) for i in group.items if reductions(i.what) for s in (domain_of(i.what),)]
    if not all(
        s is not None and (s.sizes, s.widths, s.place) == (mine.sizes, mine.widths, mine.place) for _, s in others
    ):
        return False
    if any(b in group.written() for b in item.args) and prod(sym.vmax(n) for n in mine.sizes) > ROW:
        return False
    read = {(i.args[slot], place) for i, s in others if s is not None for slot, place in s.read}
    return not read.isdisjoint((item.args[slot], place) for slot, place in mine.read)


def _shares(group: Group, item: Item, out: UOp) -> bool:
    """Whether merging saves a read: of what the group computes, or, without a reduction in it, of what both read."""
    if group.reduces:
        return any(b in item.args for b in group.written())
    return any(b in group.args for b in item.args if b is not out) or out in group.loads or out in group.written()


def merged(group: Group, users: dict[UOp, list[Group]]) -> Item:
    """One item for all of a group's, over the buffers that it still touches."""
    first, written = group.items[0], group.written()
    needed = [b for b in written if not is_temporary(b) or any(g is not group for g in users[b])]
    sink = UOp(Ops.SINK, dtypes.void, tuple(s for s in group.stores if group.target(s) in needed))
    used = sorted({u.arg for u in sink.toposort() if u.op is Ops.PARAM})
    params = {u: UOp(Ops.PARAM, u.dtype, (), used.index(u.arg)) for u in sink.toposort() if u.op is Ops.PARAM}
    what = substitute(sink, params)
    made_from(what, *(item.what for item in group.items), line=first.line)
    reads = [r for item in group.items for r in item.reads if r[0] not in written or item is first]
    return replace(
        first,
        effects=tuple(dict.fromkeys(e for item in group.items for e in item.effects)),
        what=what,
        args=[group.args[i] for i in used],
        writes=needed,
        reads=list(dict.fromkeys(reads)),
    )
