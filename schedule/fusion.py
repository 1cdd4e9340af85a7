"""decide_stores: which values are stored, so that everything between two stores is one kernel.

Precondition: storage lowered. Postcondition: a set of nodes, each of which gets a buffer of its own.

A value is stored where that moves fewer bytes or does far less work than computing it again:
- CONTIGUOUS (which copies and collectives put on their sources): always;
- a reduction's result before it is broadcast, padded, gathered from or reduced again (each would repeat the reduction;
  the levels of a reduction in blocks stay together);
- all but the largest of several contractions that an elementwise op joins: each has loops and tiles of its own;
- an elementwise chain before it is broadcast into a contraction, or anywhere if it is expensive;
- a value with several reading kernels, if it holds a reduction or if reading it costs less than reading its sources again.
"""

from __future__ import annotations

from manygrad.schedule.desugar import is_buffer
from manygrad.schedule.rows import Rows
from manygrad.tensor.uop import GroupOp, Ops, UOp
from manygrad.tensor.uop.shape import numel

MAX_LEAVES = 24  # buffers one kernel reads
MAX_DEPTH = 120  # nested ops in one kernel
CHEAP = 4  # weighted ops that are rather done twice than stored
GATHERED = 8  # weighted ops that are rather done for each element gathered than once and stored
EXPENSIVE = 30  # weighted ops; more is not computed twice
WEIGHT = {Ops.EXP: 8, Ops.LOG: 8, Ops.SIN: 10, Ops.SQRT: 4, Ops.RECIP: 3, Ops.FDIV: 3, Ops.IDIV: 6, Ops.MOD: 6}
EFFECTS = frozenset({Ops.STORE, Ops.CALL})
LOWERED = GroupOp.COLLECTIVE | {Ops.COPY}  # stand in a CALL, as what is called
_LEAVES = frozenset({Ops.AFTER, Ops.BARRIER, Ops.VIEW, Ops.CONST, Ops.IOTA, Ops.DEFINE_VAR, Ops.BUFFER, Ops.PARAM})
SHARED = GroupOp.ELEMENTWISE | {Ops.REDUCE}  # what is worth storing for several readers
_TRANSPARENT = frozenset({Ops.RESHAPE, Ops.PERMUTE, Ops.FLIP})


def is_leaf(u: UOp) -> bool:
    """Memory or a number: nothing to fuse below it."""
    return u.op in _LEAVES or (not u.src and u.op in LOWERED) or (u.op is Ops.MSELECT and is_buffer(u))


def decide_stores(order: list[UOp]) -> set[UOp]:
    """`order`: the nodes of the graph, sources first."""
    feeds_reduce, summed = _feeds_reduce(order), _only_reduced(order)
    users: dict[UOp, int] = {}
    for u in order:
        for s in set(u.src):
            users[s] = users.get(s, 0) + 1
    stored: set[UOp] = set()
    reduces: dict[UOp, bool] = {}
    leaves: dict[UOp, frozenset[UOp]] = {}
    depth: dict[UOp, int] = {}
    contractions: dict[UOp, frozenset[UOp]] = {}  # that a fused value holds; absent: none
    seen: dict[UOp, int] = {}  # how many values were stored when a node was measured

    def settle(u: UOp) -> None:
        stored.add(u)
        reduces[u], leaves[u], depth[u] = False, frozenset((u,)), 0
        contractions.pop(u, None)

    def measure(u: UOp) -> None:
        """Reductions, leaves and depth of a fused value, from its sources."""
        src = u.src
        if len(src) == 1:
            s = src[0]
            reduces[u], leaves[u], depth[u] = u.op is Ops.REDUCE or reduces[s], leaves[s], depth[s] + 1
            if u.op is Ops.REDUCE and is_contraction(u):
                contractions[u] = frozenset((u,))
            elif s in contractions:
                contractions[u] = contractions[s]
            else:
                contractions.pop(u, None)
        else:
            reduces[u] = u.op is Ops.REDUCE or True in [reduces[s] for s in src]
            leaves[u] = union_of(src)
            depth[u] = max([depth[s] for s in src]) + 1
            held = [contractions[s] for s in src if s in contractions]
            if held:
                contractions[u] = frozenset().union(*held)
            else:
                contractions.pop(u, None)
        seen[u] = len(stored)

    def union_of(src: tuple[UOp, ...]) -> frozenset[UOp]:
        first = leaves[src[0]]
        for s in src[1:]:
            if not leaves[s] <= first:
                first = first | leaves[s]
        return first

    def refresh(s: UOp) -> None:
        """Measure again what was measured before something below it was stored."""
        if reduces[s] and seen.get(s) != len(stored):
            for u in s.toposort(lambda u: reduces[u] and u not in stored):
                if reduces[u] and u not in stored:
                    measure(u)

    def store_below(s: UOp) -> None:
        """Store the value that movement ops stand on; zeros that are padded to it are not worth memory, nor is a part beside the whole."""
        top, path = s, []
        while not is_leaf(s) and (
            s.op in _TRANSPARENT or s.op is Ops.PAD or (s.op is Ops.SHRINK and users[s.src[0]] > 1)
        ):
            path.append(s)
            s = s.src[0]
        if not is_leaf(s) and s not in stored:
            settle(s)
        for x in reversed(path):
            measure(x)
        refresh(top)

    def store_parts(s: UOp) -> None:
        """Store what a value that is reduced is made of, so that it holds no reduction any more."""
        for part in _shared_below(s, reduces, users):
            if not store_statistics(part):
                store_below(part)
        refresh(s)

    def store_statistics(s: UOp) -> bool:
        """Rather than a value made of one array and of statistics of its rows, store these, which are few: what is left is cheaply done again."""
        found = rows.statistics(s, stored)
        if (
            not found
            or sum(numel(x.shape) * 2 >= numel(s.shape) for x in leaves[s]) > 1
            or work(s, {*stored, *found}, CHEAP) > CHEAP
        ):
            return False
        for x in found:
            refresh(x)
            settle(x)
        rows.close(s, stored)
        refresh(s)
        return True

    rows = Rows()
    for u in order:
        if is_leaf(u):
            reduces[u], depth[u] = False, 0
            leaves[u] = frozenset((u,)) if u.op not in (Ops.CONST, Ops.IOTA, Ops.DEFINE_VAR) else frozenset()
            continue
        if u.op in (Ops.SINK, Ops.MSTACK) or u.op in EFFECTS:
            if u.op is Ops.STORE:
                for part in _gather_indices(u.src[0]):
                    if reduces[part]:
                        store_below(part)
            continue
        if u.op is Ops.CONTIGUOUS:
            settle(u)
            continue
        for s in u.src:
            if reduces[s]:
                refresh(s)
        for s in rows.must_store(u, stored):
            if u in summed:
                store_parts(s)
            else:
                settle(s)
        joined = [s for s in dict.fromkeys(u.src) if s in contractions]  # in order: all ranks decide alike
        if len(joined) > 1 and u.op in GroupOp.ELEMENTWISE and len({contractions[s] for s in joined}) > 1:
            largest = max(joined, key=lambda s: max(numel(r.src[0].shape) for r in contractions[s]))
            for s in joined:
                if s is not largest:
                    store_below(s)
        s0 = u.src[0]
        if (
            u.op is Ops.REDUCE
            and reduces[s0]
            and not rows.fuses_reduce(u)
            and not (len(u.arg) == 3 and s0.op is Ops.REDUCE and s0 not in stored)
        ):
            store_parts(s0)
        elif u.op is Ops.EXPAND and numel(u.shape) > numel(s0.shape):
            if (reduces[s0] and not rows.fuses_expand(u)) or (
                not reduces[s0]
                and leaves[s0]
                and numel(s0.shape) > 1
                and work(s0, stored, limit := 0 if u in feeds_reduce else EXPENSIVE) > limit
            ):
                store_below(s0)
        elif u.op is Ops.PAD and reduces[s0]:
            store_below(s0)
        elif u.op is Ops.GATHER:
            if reduces[s0] or work(s0, stored, GATHERED) > GATHERED:
                store_below(s0)
            for i in u.src[1:]:
                store_below(i) if reduces[i] or work(i, stored, EXPENSIVE) > EXPENSIVE else None
        union = union_of(u.src)
        deep = max([depth[s] for s in u.src]) + 1
        if len(union) > MAX_LEAVES or deep > MAX_DEPTH:
            for s in u.src:
                if len(leaves[s]) > 1 or depth[s] > MAX_DEPTH // 2:
                    store_below(s)
            deep = max([depth[s] for s in u.src]) + 1
            if deep > MAX_DEPTH:
                settle(u)
                continue
        measure(u)
        rows.learn(u, stored)
    _store_shared(order, stored, reduces, leaves, users)
    return stored


def is_contraction(u: UOp) -> bool:
    """A sum of products both of whose factors are used many times over."""
    return u.arg[0] is Ops.ADD and u.src[0].op is Ops.MUL and all(_spread(f) >= 8 for f in u.src[0].src)


def _spread(u: UOp) -> float:
    """How many times over movement ops repeat the value they stand on; 1 for sizes that are not known."""
    times = 1.0
    while u.op in GroupOp.MOVEMENT or u.op is Ops.CAST:
        if u.op is Ops.EXPAND:
            wide, narrow = numel(u.shape), numel(u.src[0].shape)
            times *= wide / narrow if isinstance(wide, int) and isinstance(narrow, int) and narrow else 1
        u = u.src[0]
    return times


def work(u: UOp, stored: set[UOp], limit: int, above: UOp | None = None) -> int:
    """Weighted ops that an element of `u` takes from what is stored (and from `above`), each op once however many read it.

    Counting ends above `limit`, so that it costs no more than a few dozen nodes.
    """
    total = 0
    seen = {u, above}
    todo = [u]
    while todo and total <= limit:
        x = todo.pop()
        if x in stored or is_leaf(x):
            continue
        if x.op in GroupOp.ALU:
            total += WEIGHT.get(x.op, 1)
        for s in x.src:
            if s not in seen:
                seen.add(s)
                todo.append(s)
    return total


def _shared_below(s: UOp, reduces: dict[UOp, bool], users: dict[UOp, int]) -> tuple[UOp, ...]:
    """What to store under a reduction: the lowest values on the way to the inner reductions that others need as well, else `s`."""
    best, u = (s,), s
    while u.op is not Ops.REDUCE and u.op in GroupOp.ELEMENTWISE | _TRANSPARENT:
        below = [x for x in dict.fromkeys(u.src) if reduces.get(x)]
        if len(below) > 1:
            parts = (
                tuple(dict.fromkeys(p for x in below for p in _shared_below(x, reduces, users)))
                if best == (s,) and users.get(s, 0) <= 1
                else ()
            )
            return (
                parts if parts and all(users.get(p, 0) > 1 and p.op in SHARED | _TRANSPARENT for p in parts) else best
            )
        if not below:
            break
        u = below[0]
        if users.get(u, 0) > 1 and u.op in SHARED | _TRANSPARENT:
            best = (u,)
    return best


def _gather_indices(target: UOp) -> list[UOp]:
    """The index values in a store's target."""
    out = []
    while target.op in GroupOp.MOVEMENT or target.op is Ops.GATHER:
        out += list(target.src[1:])
        target = target.src[0]
    return out


def _feeds_reduce(order: list[UOp]) -> set[UOp]:
    """Nodes from which a REDUCE is reached without passing a store."""
    out: set[UOp] = set()
    for u in reversed(order):
        if u.op is Ops.REDUCE or (u in out and not is_leaf(u) and u.op is not Ops.CONTIGUOUS):
            out.update(u.src)
    return out


def _only_reduced(order: list[UOp]) -> set[UOp]:
    """Movement ops from which, by others, nothing but REDUCEs are reached: a sum in blocks is to be made as one without."""
    other: set[UOp] = set()
    for u in reversed(order):
        if not (u.op is Ops.REDUCE or (u.op in _TRANSPARENT and u not in other)):
            other.update(u.src)
    return {u for u in order if u.op in _TRANSPARENT and u not in other}


def _store_shared(order: list[UOp], stored: set[UOp], reduces: dict[UOp, bool], leaves: dict[UOp, frozenset[UOp]],
                  users: dict[UOp, int]) -> None:  # fmt: skip
    """Store values that several kernels read, where that is the cheaper way; consumers first."""
    kernels: dict[UOp, set[UOp]] = {}
    for u in reversed(order):
        if u.op in (Ops.SINK, Ops.MSTACK, Ops.CALL) or is_leaf(u):
            continue
        mine = kernels.get(u, set())
        if u.op is Ops.STORE:
            mine = {u}
            for part in (u.src[1], *_gather_indices(u.src[0])):
                kernels.setdefault(part, set()).update(mine)
            continue
        if u in stored:
            mine = {u}
        elif len(mine) > 1 and u.op not in GroupOp.MOVEMENT:
            wide = sum(1 for x in leaves[u] if numel(x.shape) * 2 >= numel(u.shape))
            k = len(mine)
            lower = _shared_below(u, reduces, users) if reduces[u] else (u,)
            if len(lower) == 1 and lower[0] is not u and work(u, stored, CHEAP, lower[0]) <= CHEAP:
                pass  # the value below is stored for others too; these few ops are done again from it
            elif reduces[u] or (wide and work(u, stored, EXPENSIVE) > EXPENSIVE) or k * wide > 1 + wide + k:
                stored.add(u)
                mine = {u}
        for s in u.src:
            kernels.setdefault(s, set()).update(mine)
