"""chain_kernels: kernels that hand large temporaries to each other run together, block by block of their outermost
loops.

Precondition: items in order, each kernel a SINK. Postcondition: the same effects; what was a chain of kernels is one
item, a CHAIN, and the temporaries that only it used hold one block, so that they stay in the cache.

    S[i, j] = ...;  P[i, j] = f(S[i, :]);  O[i, d] = sum(P[i, j] * V[j, d], j)      i < 2048
==> for block < 32, with i = block * 64 + r:  S[r, j] = ...;  P[r, j] = ...;  O[i, d] = ...

The kernels of a chain share their outermost loops, the rows. Each becomes a kernel over one block of rows, whose number
is its variable `block`. What one of them writes and another one reads or writes must belong to the same row, so blocks
depend on nothing of each other and run on any thread in any order. A sum runs in one kernel for one row as before: a
chain gives the same bits.

A chain is made where it saves much: its temporaries are large beside all that it reads, and beside what is read again
for every block. Not on a device of thousands of threads: a block of rows would leave most of them idle.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from math import prod

from manygrad.schedule.facts.buffers import is_temporary, nbytes_of
from manygrad.schedule.facts.chain import ChainSpec, Temporary
from manygrad.schedule.facts.devices import is_wide
from manygrad.schedule.facts.items import Item, edges_of
from manygrad.schedule.facts.nodes import indices, reductions
from manygrad.schedule.kernels.limit_columns import ALIGN, limits_of
from manygrad.schedule.order.plan_memory import lives_of, place
from manygrad.tensor.dtype import dtypes
from manygrad.tensor.uop import BufferSpec, Ops, UOp
from manygrad.tensor.uop import symbolic as sym
from manygrad.tensor.uop.ranges import ranges_of
from manygrad.tensor.uop.rewrite import substitute
from manygrad.tensor.uop.track import made_from

BLOCK_BYTES = 5 << 18  # temporaries of one block: about half of a second-level cache
MOST_BYTES = 8 << 20  # of a block of few, long rows
SAVED_BYTES = 1 << 18  # the least bytes of temporaries that are worth a chain
WIDE = 2  # a temporary counts as large if it has so many times the bytes of whatever its kernel reads
MIN_BLOCKS = 16  # enough pieces for many threads
MIN_ROWS, FEW_ROWS, MAX_ROWS = 16, 32, 128  # enough for register tiles; few however long they are; more gain nothing
AGAIN = 8  # bytes that every block reads again, for each byte of its temporaries


@dataclass(frozen=True)
class Chain:
    """Items that can run block by block: their positions, how many outer loops are the rows, and the elements a row of
    what they share."""

    members: tuple[int, ...]
    outer: int
    steps: dict[UOp, int]
    inside: tuple[UOp, ...]  # temporaries that nobody else uses


def chain_kernels(items: list[Item]) -> list[Item]:
    users: dict[UOp, set[int]] = {}
    writers: dict[UOp, list[int]] = {}
    for i, item in enumerate(items):
        for b in (*item.writes, *(b for b, _ in item.reads)):
            users.setdefault(b, set()).add(i)
        for b in item.writes:
            writers.setdefault(b, []).append(i)
    chain_of: dict[int, Chain] = {}
    waiting, before = _large(items, writers), 0
    while len(waiting) != before:  # what cannot be one yet may be, once others are
        before, left = len(waiting), []
        for t in waiting:
            members = set(users[t])
            for i in users[t]:
                members.update(chain_of[i].members if i in chain_of else ())
            found = _chain(items, tuple(sorted(members)), users)
            if found is not None:
                chain_of.update(dict.fromkeys(found.members, found))
            else:
                left.append(t)
        waiting = left
    made: dict[object, Item] = {}  # by the key of the last kernel
    runs: dict[object, list[Item]] = {}  # likewise: the kernels
    joined: dict[object, object] = {}
    for chain in {c.members: c for c in chain_of.values()}.values():
        rows = _rows(items, chain)
        if rows is not None:
            item = _masked(items, chain, rows) or _chained(items, chain, rows)
            runs[item.key] = kernels = [items[i] for i in chain.members]
            joined.update((k.key, item.key) for k in kernels)
            made_from(item.what, *(k.what for k in kernels), line=item.line)
            made[item.key] = item
    return [
        replace(made.get(item.key, item), after=edges_of(runs.get(item.key, [item]), joined))
        for item in items
        if joined.get(item.key, item.key) is item.key
    ]


def _large(items: list[Item], writers: dict[UOp, list[int]]) -> list[UOp]:
    """The temporaries that are much larger than what any kernel that writes them reads besides such temporaries."""
    found: dict[UOp, None] = {}
    other: set[UOp] = set()
    for i, item in enumerate(items):
        temps = [b for b in item.writes if is_temporary(b) and nbytes_of(b) >= SAVED_BYTES // 4 and b not in other]
        if item.what.op is Ops.SINK and temps:
            known = found.keys() | _element_for_element(item)
            read = max(
                (_bytes_at(u) for u in indices(item.what) if item.args[u.src[0].arg] not in {*known, *item.writes}),
                default=0,
            )
            other.update(b for b in temps if nbytes_of(b) < WIDE * read)
            found.update(dict.fromkeys(b for b in temps if b not in other and writers[b][-1] == i))
        else:
            other.update(temps)
    return list(found)


def _bytes_at(index: UOp) -> int:
    """How many bytes an INDEX reaches, of which each combination of its ranges reaches another one."""
    return prod(sym.vmax(r.src[0]) for r in ranges_of(index.src[1])) * index.dtype.itemsize


def _element_for_element(item: Item) -> set[UOp]:
    """Buffers that a contraction adds, or multiplies with, at the elements that it stores (a bias of all scores)."""
    if not reductions(item.what):
        return set()
    stored = {s.src[0].src[1] for s in item.what.src}
    apart = {item.args[u.src[0].arg] for u in indices(item.what) if u.src[1] not in stored}
    return set(item.args) - apart


# *** what can be a chain ***


def _chain(items: list[Item], members: tuple[int, ...], users: dict[UOp, set[int]]) -> Chain | None:
    """The items as a chain, at the place of the last one, or None where they cannot be one."""
    kernels = [items[i] for i in members]
    if (
        len(kernels) < 2
        or not all(map(_plain, kernels))
        or len({k.args[0].device for k in kernels}) > 1
        or is_wide(kernels[0].args[0].device)
        or not _can_wait(items, members)
    ):
        return None
    written = {b for k in kernels for b in k.writes}
    read = {b for k in kernels for b, _ in k.reads}  # what several kernels only write they write in any order
    shared = [b for b in written & read if sum(b in k.args for k in kernels) > 1]
    sizes = [[r.src[0].arg for r in _loops(k)] for k in kernels]
    common = next((n for n, at in enumerate(zip(*sizes)) if len(set(at)) > 1), min(map(len, sizes)))
    for outer in range(common, 0, -1):
        steps = {b: step for b in shared if (step := _step(kernels, b, outer)) is not None}
        if len(steps) == len(shared):
            inside = tuple(
                sorted((b for b in shared if is_temporary(b) and users[b] <= set(members)), key=lambda b: -b.arg.uid)
            )
            return Chain(members, outer, steps, inside) if inside else None
    return None


def _plain(item: Item) -> bool:
    """A kernel of fixed sizes whose iterations may run in any order."""
    return item.what.op is Ops.SINK and not any(
        u.op is Ops.DEFINE_VAR
        or (u.op is Ops.RANGE and u.src[0].op is not Ops.CONST)
        or (u.op is Ops.STORE and u.arg is not None)
        for u in item.what.below()
    )


def _loops(item: Item) -> tuple[UOp, ...]:
    return item.what.src[0].src[2:]


def _can_wait(items: list[Item], members: tuple[int, ...]) -> bool:
    """Whether the kernels before the last can run as late as that: nothing between comes after any of them."""
    keys = {items[i].key for i in members}
    between = (items[i] for i in range(members[0], members[-1]) if i not in members)
    return all(keys.isdisjoint(item.after) for item in between)


def _step(kernels: Sequence[Item], buffer: UOp, outer: int) -> int | None:
    """The elements a row of a buffer that kernels share, if each touches only its own row's."""
    found = {
        _step_of(u.src[1], _loops(k)[:outer])
        for k in kernels
        if buffer in k.args
        for u in indices(k.what)
        if k.args[u.src[0].arg] is buffer
    }
    return found.pop() if len(found) == 1 else None


def _step_of(offset: UOp, rows: tuple[UOp, ...]) -> int | None:
    """n where `offset` is (joint index of `rows`) * n + rest, with 0 <= rest < n."""
    terms, const = sym.linear(offset)
    step = stride = terms.get(rows[-1], 0)
    for r in reversed(rows):
        if terms.get(r) != stride:
            return None
        stride *= r.src[0].arg
    rest = sym.build({t: k for t, k in terms.items() if t not in rows}, const)
    inside = 0 <= sym.vmin(rest) and sym.vmax(rest) < step and not any(r in rest.toposort() for r in rows)
    return step if inside else None


# *** what is worth it ***


def _rows(items: list[Item], chain: Chain) -> int | None:
    """How many rows a block has; None where a chain does not pay."""
    kernels = [items[i] for i in chain.members]
    sizes = [r.src[0].arg for r in _loops(kernels[0])[: chain.outer]]
    _, row_bytes = place(
        {b: chain.steps[b] * b.dtype.itemsize for b in _largest_first(chain)}, lives_of([k.args for k in kernels])
    )
    if sum(map(nbytes_of, chain.inside)) < SAVED_BYTES:
        return None
    most = min(MAX_ROWS, max(FEW_ROWS, BLOCK_BYTES // row_bytes), prod(sizes) // MIN_BLOCKS)
    rows = max((n for n in range(1, min(sizes[-1], most) + 1) if sizes[-1] % n == 0), default=0)
    again: dict[UOp, int] = {}
    for k in kernels:
        own = {**dict.fromkeys(_loops(k)[: chain.outer], 1), _loops(k)[chain.outer - 1]: rows}
        for u in indices(k.what):
            if (b := k.args[u.src[0].arg]) not in chain.inside:
                count = prod(own.get(x, x.src[0].arg) for x in ranges_of(u.src[1]))
                again[b] = max(again.get(b, 0), count * b.dtype.itemsize)
    if (
        rows < min(MIN_ROWS, sizes[-1])
        or rows * row_bytes > MOST_BYTES
        or sum(again.values()) > AGAIN * rows * row_bytes
    ):
        return None
    return rows


def _masked(items: list[Item], chain: Chain, rows: int) -> Item | None:
    """The chain in smaller blocks, of no more than a quarter of the columns, if a mask then makes columns zero in a
    whole block, which `limit_columns` will leave out."""
    size = _loops(items[chain.members[0]])[chain.outer - 1].src[0].arg
    most = max(ALIGN, max(chain.steps[b] for b in chain.inside) // 4)
    fewer = max((n for n in range(1, min(size, most) + 1) if size % n == 0), default=rows)
    if not MIN_ROWS <= fewer < rows or not any(u.op is Ops.WHERE for i in chain.members for u in items[i].what.below()):
        return None
    found = _chained(items, chain, fewer)
    return (
        found if any(r.src[0].op is not Ops.CONST for limits in limits_of(found) for _, r in limits.values()) else None
    )


# *** making it ***


def _chained(items: list[Item], chain: Chain, rows: int) -> Item:
    kernels = [items[i] for i in chain.members]
    sizes = [r.src[0].arg for r in _loops(kernels[0])[: chain.outer]]
    part = {
        b: UOp(Ops.BUFFER, b.dtype, (), BufferSpec(b.arg.uid, (rows * chain.steps[b],), b.dtype, b.arg.device))
        for b in chain.inside
    }
    args = list(dict.fromkeys(part.get(b, b) for k in kernels for b in k.args))
    slots = tuple(tuple(args.index(part.get(b, b)) for b in k.args) for k in kernels)
    offsets, _ = place(
        {b: _apart(nbytes_of(part[b])) for b in _largest_first(chain)}, lives_of([k.args for k in kernels])
    )
    temps = tuple(Temporary(args.index(part[b]), offsets[b], nbytes_of(part[b])) for b in chain.inside)
    spec = ChainSpec(prod(sizes) // rows, rows, slots, temps)
    cut = tuple(
        _cut(k.what, chain.outer, rows, tuple((i, chain.steps[b]) for i, b in enumerate(k.args) if b in part))
        for k in kernels
    )
    writes = dict.fromkeys(b for k in kernels for b in k.writes if b not in part)
    reads = dict.fromkeys(r for k in kernels for r in k.reads if r[0] not in part)
    return replace(
        kernels[-1],
        effects=tuple(dict.fromkeys(e for k in reversed(kernels) for e in k.effects)),
        what=UOp(Ops.CHAIN, dtypes.void, cut, spec),
        args=args,
        writes=list(writes),
        reads=list(reads),
    )


def _largest_first(chain: Chain) -> list[UOp]:
    return sorted(chain.inside, key=lambda b: -chain.steps[b] * b.dtype.itemsize)


def _apart(nbytes: int) -> int:
    """Bytes that a block of so many takes: never a multiple of 4 KiB, where stores would hold up loads."""
    return -(-nbytes // 4096) * 4096 + 576


@lru_cache(maxsize=256)  # (the layers of a model are alike)
def _cut(kernel: UOp, outer: int, rows: int, steps: tuple[tuple[int, int], ...]) -> UOp:
    return cut_rows(kernel, outer, rows, dict(steps))


def cut_rows(ast: UOp, outer: int, rows: int, steps: dict[int, int]) -> UOp:
    """A kernel for the `rows` rows of block `block`. Of the arguments in `steps` (elements a row) it is given that
    block alone."""
    loops = ast.src[0].src[2:]
    own, row = loops[:outer], loops[outer - 1]
    sizes = [r.src[0].arg for r in own]
    here = row.replace(src=(sym.iconst(rows),)) if rows > 1 else sym.iconst(0)
    rest = sym.variable("block", 0, prod(sizes) // rows - 1)
    at = {row: sym.add(sym.mul(sym.mod(rest, sizes[-1] // rows), rows), here)}
    rest = sym.floordiv(rest, sizes[-1] // rows)
    for r, n in zip(reversed(own[:-1]), reversed(sizes[:-1])):
        at[r] = sym.mod(rest, n)
        rest = sym.floordiv(rest, n)
    within = {}
    for u in indices(ast):
        if u.src[0].arg in steps:
            terms, const = sym.linear(u.src[1])
            inner = sym.build({t: k for t, k in terms.items() if t not in own}, const)
            within[u] = u.replace(src=(u.src[0], sym.add(inner, sym.mul(here, steps[u.src[0].arg])), *u.src[2:]))
    parts = substitute(UOp(Ops.SINK, dtypes.void, tuple(x for s in ast.src for x in s.src[:2])), within)
    parts = sym.substitute(parts, at)
    ranges = (*_ranges(here), *loops[outer:])
    return ast.replace(
        src=tuple(s.replace(src=(i, v, *ranges)) for s, i, v in zip(ast.src, parts.src[::2], parts.src[1::2]))
    )


def _ranges(u: UOp) -> Iterable[UOp]:
    return (u,) if u.op is Ops.RANGE else ()
