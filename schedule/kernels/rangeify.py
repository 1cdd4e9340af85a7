"""rangeify: from a STORE of the tensor graph to one kernel over loop ranges.

Precondition: items of `STORE(target, value)` in which every stored value stands as AFTER/BUFFER. Postcondition: kernel
ASTs (`SINK` of kernel `STORE`s over RANGE, LOAD, INDEX, REDUCE, ALU), the buffers of their arguments, and what each
reads after which effects.

Shapes turn into index expressions from the output back to the inputs: a movement op changes the indices with which its
source is asked for, a reduction adds ranges, and what is memory becomes a LOAD.

    STORE(b, EXPAND(RESHAPE(a, (4, 1)), (4, 8)))  ==>  r0, r1 = RANGE(4), RANGE(8): b[r0*8 + r1] = a[r0]

A store whose kernel would read elements that another of its iterations overwrites goes through a temporary buffer.
"""

from __future__ import annotations

from typing import Any

from manygrad.schedule.facts.buffers import Temps, base_buffer, happened
from manygrad.schedule.facts.index import Index, flat_index, move_index
from manygrad.schedule.facts.items import Item
from manygrad.tensor.dtype import dtypes
from manygrad.tensor.uop import GroupOp, Ops, RangeArg, UOp
from manygrad.tensor.uop import symbolic as sym
from manygrad.tensor.uop.ranges import ranges_of
from manygrad.tensor.uop.rewrite import rebuild, substitute
from manygrad.tensor.uop.shape import is_buffer
from manygrad.tensor.uop.track import made_from


def rangeify(items: list[Item], temps: Temps) -> list[Item]:
    known: Known = {}
    out: list[Item] = []
    for item in items:
        if item.what.op is not Ops.STORE:
            out.append(item)
            continue
        store = item.what
        first = _kernel_item(store, item.effects, known)
        if not any(b is first.args[0] for b, _ in first.reads) or not writes_what_it_reads(first.what):
            out.append(first)
            continue
        target, value = store.src
        temp = temps.new(value.shape, value.dtype, base_buffer(target).device)
        filled = UOp(Ops.STORE, dtypes.void, (temp, value))
        emptied = UOp(Ops.STORE, dtypes.void, (target, UOp(Ops.AFTER, value.dtype, (temp, filled))), store.arg)
        out += [_kernel_item(filled, (filled,), known), _kernel_item(emptied, item.effects, known)]
    return out


def _kernel_item(store: UOp, effects: tuple[UOp, ...], known: Known) -> Item:
    ast, args, reads = kernel_once(store, known)
    made_from(ast, store)
    after = [(base_buffer(r), happened(r)) for r in reads]
    if earlier := happened(store.src[0]):  # a store into an assigned buffer comes after those assignments
        after.append((base_buffer(store.src[0]), earlier))
    return Item(effects, ast, args, [args[0]], after)


class KernelBuilder:
    """Builds one kernel: numbers its arguments and ranges, and lowers values to expressions."""

    def __init__(self) -> None:
        self.args: list[UOp] = []
        self.reads: list[UOp] = []  # the AFTER or buffer node each LOAD came from
        self.slots: dict[UOp, int] = {}
        self.ranges = 0
        self.memo: dict[Any, UOp] = {}

    def param(self, buffer: UOp) -> UOp:
        if buffer not in self.slots:
            self.slots[buffer] = len(self.args)
            self.args.append(buffer)
        return UOp(Ops.PARAM, buffer.dtype, (), self.slots[buffer])

    def range(self, size: Any, kind: str) -> UOp:
        r = UOp(Ops.RANGE, dtypes.index, (sym.as_index(size),), RangeArg(self.ranges, kind))
        self.ranges += 1
        return r

    def loops(self, shape: tuple[Any, ...]) -> Index:
        return tuple(sym.iconst(0) if isinstance(d, int) and d == 1 else self.range(d, "loop") for d in shape)

    # *** values ***

    def value(self, u: UOp, idx: Index, valid: UOp = sym.TRUE) -> UOp:
        """The element of `u` at `idx`; memory is only touched where `valid` holds."""
        chain = u
        while chain.op in GroupOp.MOVEMENT:  # walk movement ops without recursion
            if chain.op is Ops.PAD:
                break
            idx, valid = move_index(chain, idx, valid)
            chain = chain.src[0]
        u = chain
        key = (u, idx, valid)
        found = self.memo.get(key)
        if found is None:
            found = self.memo[key] = self._value(u, idx, valid)
        return found

    def _value(self, u: UOp, idx: Index, valid: UOp) -> UOp:
        if u.op is Ops.AFTER or is_buffer(u):
            self.reads.append(u)
            base = u
            while base.op is Ops.AFTER:
                base = base.src[0]
            if not is_buffer(base):  # an assigned view: read the view of the buffer
                return self.view_load(base, idx, valid)
            return self.load(base, flat_index(idx, u.shape), valid)
        if u.op is Ops.CONST:
            return u
        if u.op is Ops.IOTA:
            return UOp(Ops.CAST, u.dtype, (idx[0],)) if idx[0].op is not Ops.CONST else UOp.const(u.dtype, idx[0].arg)
        if u.op is Ops.DEFINE_VAR:
            return u
        if u.op is Ops.PAD:
            inner, ok = move_index(u, idx, valid)
            value = self.value(u.src[0], inner, ok)
            if ok is valid or (value.op is Ops.LOAD):
                return value
            return alu(Ops.WHERE, (ok, value, UOp.const(u.dtype, 0)))
        if u.op is Ops.REDUCE:
            return self.reduce(u, idx, valid)
        if u.op is Ops.GATHER:
            return self.gather(u, idx, valid)
        if u.op is Ops.CAST:
            return cast(self.value(u.src[0], idx, valid), u.dtype)
        if u.op in (Ops.CONTIGUOUS, Ops.COPY):
            return self.value(u.src[0], idx, valid)
        assert u.op in GroupOp.ELEMENTWISE, f"{u.op} reached a kernel"
        return alu(u.op, tuple([self.value(s, idx if s.shape else (), valid) for s in u.src]), u.dtype)

    def load(self, buffer: UOp, offset: UOp, valid: UOp) -> UOp:
        if valid is sym.FALSE:
            return UOp.const(buffer.dtype, 0)
        param = self.param(buffer)
        src = (param, offset) if valid is sym.TRUE else (param, offset, valid)
        return UOp(Ops.LOAD, buffer.dtype, (UOp(Ops.INDEX, buffer.dtype, src),))

    def view_load(self, view: UOp, idx: Index, valid: UOp) -> UOp:
        base, offset, ok = self.place(view, idx, valid)
        return self.load(base, offset, ok)

    def gather(self, u: UOp, idx: Index, valid: UOp) -> UOp:
        inner, ok = self.gather_index(u, idx, valid)
        value = self.value(u.src[0], inner, ok)
        return value if value.op is Ops.LOAD or ok is valid else alu(Ops.WHERE, (ok, value, UOp.const(u.dtype, 0)))

    def gather_index(self, u: UOp, idx: Index, valid: UOp) -> tuple[Index, UOp]:
        n = len(u.src[1].shape)
        picked = []
        for i, d in zip(u.src[1:], u.src[0].shape):
            at = as_index(self.value(i, idx[:n], valid))
            valid = sym.both(valid, sym.both(sym.ge(at, 0), sym.lt(at, sym.as_index(d))))
            picked.append(at)
        return (*picked, *idx[n:]), valid

    def reduce(self, u: UOp, idx: Index, valid: UOp) -> UOp:
        ranges = {a: self.range(u.src[0].shape[a], "reduce") for a in u.arg.axes}
        value = self.value(u.src[0], tuple(ranges.get(i, x) for i, x in enumerate(idx)), valid)
        return collapse_reduce(u.arg.op, value, list(ranges.values()))

    # *** stores ***

    def place(self, target: UOp, idx: Index, valid: UOp = sym.TRUE) -> tuple[UOp, UOp, UOp]:
        """(buffer, offset, valid) of element `idx` of a view of a buffer."""
        while not is_buffer(target):
            if target.op is Ops.GATHER:
                idx, valid = self.gather_index(target, idx, valid)
            elif target.op in GroupOp.MOVEMENT:
                idx, valid = move_index(target, idx, valid)
            else:
                assert target.op is Ops.AFTER, f"store into {target.op}"
            target = target.src[0]
        return target, flat_index(idx, target.shape), valid


def as_index(x: UOp) -> UOp:
    """An integer value as an index expression."""
    if x.op is Ops.CAST and x.src[0].dtype is dtypes.index and (x.dtype is dtypes.int64 or _fits(x.src[0], x.dtype)):
        return x.src[0]
    return sym.iconst(int(x.arg)) if x.op is Ops.CONST else UOp(Ops.CAST, dtypes.index, (x,))


def _index_of(x: UOp) -> UOp | None:
    """The index expression under an integer value, if it is nothing else."""
    if (
        x.op is Ops.CAST
        and x.src[0].dtype is dtypes.index
        and x.dtype.is_int
        and (x.dtype is dtypes.int64 or _fits(x.src[0], x.dtype))
    ):
        return x.src[0]
    return sym.iconst(int(x.arg)) if x.op is Ops.CONST and x.dtype.is_int else None


def _fits(e: UOp, dtype: Any) -> bool:
    lo, hi = sym.bounds(e)
    return bool(dtype.min <= lo and hi <= dtype.max)


def cast(x: UOp, dtype: Any) -> UOp:
    if x.dtype is dtype:
        return x
    if x.op is Ops.CONST and x.arg == x.arg and abs(x.arg) != float("inf"):
        return UOp.const(dtype, x.arg)
    inner = _index_of(x)
    if inner is not None and dtype.is_int and _fits(inner, x.dtype) and _fits(inner, dtype):
        return UOp(Ops.CAST, dtype, (inner,))
    return UOp(Ops.CAST, dtype, (x,))


def alu(op: Ops, src: tuple[UOp, ...], dtype: Any = None) -> UOp:
    """An ALU node, with arithmetic on loop indices kept symbolic and the plain identities folded."""
    dtype = dtype or (dtypes.bool if op in GroupOp.COMPARE else src[-1].dtype)
    if len(src) == 2 and src[0].dtype.is_int and src[0].dtype is not dtypes.index:
        a, b = _index_of(src[0]), _index_of(src[1])
        if (
            a is not None
            and b is not None
            and (a.op is not Ops.CONST or b.op is not Ops.CONST)
            and _fits(a, src[0].dtype)
            and _fits(b, src[0].dtype)
        ):
            out: UOp | None = None
            if op is Ops.ADD:
                out = sym.add(a, b)
            elif op is Ops.SUB:
                out = sym.add(a, sym.mul(b, -1))
            elif op is Ops.MUL:
                out = sym.mul(a, b)
            elif op in (Ops.IDIV, Ops.MOD) and b.op is Ops.CONST and b.arg > 0 and sym.vmin(a) >= 0:
                out = sym.floordiv(a, b) if op is Ops.IDIV else sym.mod(a, b)
            elif op is Ops.CMPLT:
                return sym.lt(a, b)
            elif op is Ops.CMPEQ and (sym.vmin(a) > sym.vmax(b) or sym.vmax(a) < sym.vmin(b)):
                return sym.FALSE
            if out is not None and _fits(out, dtype):
                return UOp(Ops.CAST, dtype, (out,))
    if op is Ops.NOT and dtype is dtypes.bool:
        x = src[0]
        if x is sym.TRUE or x is sym.FALSE:
            return sym.FALSE if x is sym.TRUE else sym.TRUE
        if x.op is Ops.CMPLT and x.src[0].dtype is dtypes.index:
            return sym.lt(sym.add(x.src[1], -1), x.src[0])  # not a < b -> b - 1 < a
    if op is Ops.AND and dtype is dtypes.bool:
        return sym.both(src[0], src[1])
    if op is Ops.WHERE:
        if src[0].op is Ops.CONST:
            return src[1] if src[0].arg else src[2]
        if src[1] is src[2]:
            return src[1]
    return UOp(op, dtype, src)


def collapse_reduce(op: Ops, value: UOp, ranges: list[UOp]) -> UOp:
    """REDUCE(value, ranges) with the ranges that need no loop worked out.

    sum over r of c -> c * n;  sum over r of (r == e ? v(r) : 0) -> v(e);  sum over r of (r < e ? c : 0) -> c * clamp(e,
    0, n)
    """
    left = []
    for r in ranges:
        size = r.src[0]
        if r not in ranges_of(value):
            if op is Ops.ADD:
                value = alu(
                    Ops.MUL,
                    (
                        value,
                        cast(
                            UOp(Ops.CAST, dtypes.int64, (size,))
                            if size.op is not Ops.CONST
                            else UOp.const(dtypes.int64, size.arg),
                            value.dtype,
                        ),
                    ),
                )
                continue
            if op is Ops.MAX:
                continue
        picked = _pick_one(value, r) if op is Ops.ADD else None
        if picked is not None:
            value = picked
            continue
        left.append(r)
    return UOp(Ops.REDUCE, value.dtype, (value, *left), op) if left else value


def _is_zero(u: UOp) -> bool:
    return u.op is Ops.CONST and u.arg == 0


def _pick_one(value: UOp, r: UOp) -> UOp | None:
    """The mask patterns of `collapse_reduce`, for one range."""
    if value.op is Ops.CAST and value.src[0].op is Ops.WHERE and value.src[0].dtype.is_float and value.dtype.is_float:
        inner = _pick_one(value.src[0], r)
        return None if inner is None else cast(inner, value.dtype)
    if value.op is Ops.NEG:
        inner = _pick_one(value.src[0], r)
        return None if inner is None else UOp(Ops.NEG, value.dtype, (inner,))
    if value.op is not Ops.WHERE or not _is_zero(value.src[2]):
        return None
    cond, chosen, zero = value.src
    if cond.op is Ops.CMPEQ:
        for a, b in (cond.src, cond.src[::-1]):
            if as_index(a) is r and a.dtype.is_int and r not in ranges_of(b):
                e = as_index(b)
                ok = sym.both(sym.ge(e, 0), sym.lt(e, r.src[0]))
                return alu(Ops.WHERE, (ok, _guard(sym.substitute(chosen, {r: e}), ok), zero))
    if cond.op is Ops.CMPLT and cond.src[0].dtype is dtypes.index and r not in ranges_of(chosen):
        terms, const = sym.linear(sym.add(cond.src[0], sym.mul(cond.src[1], -1)))  # terms + const < 0
        k = terms.get(r)
        if k in (1, -1):
            rest = sym.build({t: c for t, c in terms.items() if t is not r}, const)
            # k = 1: r < -rest; k = -1: r > rest, that is n - 1 - r < n - 1 - rest
            limit = sym.mul(rest, -1) if k == 1 else sym.add(sym.add(r.src[0], -1), sym.mul(rest, -1))
            count = UOp(Ops.MAX, dtypes.index, (limit, sym.iconst(0))) if sym.vmin(limit) < 0 else limit
            if sym.vmax(limit) > sym.vmin(r.src[0]):
                count = UOp(Ops.WHERE, dtypes.index, (sym.lt(count, r.src[0]), count, r.src[0]))
            return alu(Ops.MUL, (chosen, UOp(Ops.CAST, chosen.dtype, (count,))))
    return None


def _guard(value: UOp, ok: UOp) -> UOp:
    """`value` with every load made only where `ok` holds."""
    if ok is sym.TRUE:
        return value

    def guarded(u: UOp) -> UOp | None:
        valid = ok if len(u.src) < 3 else sym.both(u.src[2], ok)
        return u.replace(src=(*u.src[:2], valid)) if u.op is Ops.INDEX else None

    return rebuild(value, guarded, sym.simplified)


def natural_loops(target: UOp, value: UOp) -> tuple[UOp, UOp]:
    """STORE(t, RESHAPE(v)) as STORE(RESHAPE(t), v): the loops follow the dims in which the value is computed."""
    while value.op is Ops.RESHAPE and value.src[0].op not in (Ops.AFTER, Ops.CONST) and not is_buffer(value.src[0]):
        value = value.src[0]
        target = UOp(Ops.RESHAPE, target.dtype, (target,), value.shape)
    return target, value


def kernel_of(store: UOp) -> tuple[UOp, list[UOp], list[UOp]]:
    """(kernel AST, argument buffers by slot, the buffer nodes it reads) for one STORE."""
    k = KernelBuilder()
    target, value = natural_loops(*store.src)
    idx = k.loops(value.shape)
    base = base_buffer(target)
    k.param(base)
    buffer, offset, valid = k.place(target, idx)
    assert buffer is base
    element = k.value(value, idx)
    if element.dtype is not base.dtype:
        element = cast(element, base.dtype)
    index = UOp(Ops.INDEX, base.dtype, (k.param(base), offset) if valid is sym.TRUE else (k.param(base), offset, valid))
    ranges = tuple(i for i in idx if i.op is Ops.RANGE)
    out = UOp(Ops.STORE, dtypes.void, (index, element, *ranges), store.arg)
    return without_unused(UOp(Ops.SINK, dtypes.void, (out,)), k.args, k.reads)


Known = dict[tuple[Any, ...], tuple[UOp, list[int], list[int]]]


def kernel_once(store: UOp, known: Known) -> tuple[UOp, list[UOp], list[UOp]]:
    """`kernel_of`, from `known` where a STORE of the same form over other buffers was seen: the layers of a model are
    alike."""
    form, nodes = form_of(store)
    found = known.get(form)
    if found is None:
        ast, args, reads = kernel_of(store)
        number = {u: i for i, u in enumerate(nodes)}
        known[form] = ast, [number[a] for a in args], [number[r] for r in reads]
        return ast, args, reads
    ast, at_args, at_reads = found
    return ast, [nodes[i] for i in at_args], [nodes[i] for i in at_reads]


def form_of(store: UOp) -> tuple[tuple[Any, ...], list[UOp]]:
    """The kernel's origin, without which buffers it is about: each node below `store` (its place in the list
    stands for it) down to memory, of which only shape and type matter. Equal forms give one kernel AST; nodes at equal
    places play equal parts.
    """
    number: dict[UOp, int] = {}
    form: list[Any] = []
    stack: list[UOp | None] = [store]
    path: list[UOp] = []
    while stack:
        u = stack.pop()
        if u is None:
            u = path.pop()
        elif u in number:
            continue
        elif is_buffer(u):
            number[u] = len(form)
            form.append((u.dtype, u.shape))
            continue
        elif missing := [s for s in (u.src[:1] if u.op is Ops.AFTER else u.src) if s not in number]:
            path.append(u)
            stack.append(None)
            stack += missing
            continue
        number[u] = len(form)
        form.append(
            (u.op, u.dtype, _distinct(u.arg), *[number[s] for s in (u.src[:1] if u.op is Ops.AFTER else u.src)])
        )
    return tuple(form), list(number)


def _distinct(arg: Any) -> Any:
    """1, 1.0, True and -0.0 are not one constant."""
    return (type(arg), repr(arg)) if type(arg) in (float, bool) else arg


def without_unused(ast: UOp, args: list[UOp], reads: list[UOp]) -> tuple[UOp, list[UOp], list[UOp]]:
    """Arguments whose loads were all simplified away (`x[...] * 0`, a mask that holds nowhere) are not passed."""
    params: dict[int, UOp] = {}
    seen: set[UOp] = set()
    todo = [ast]
    while todo:
        u = todo.pop()
        if u.op is Ops.PARAM and u.arg not in params:
            params[u.arg] = u
            if len(params) == len(args):
                return ast, args, reads
        for s in u.src:
            if s not in seen:
                seen.add(s)
                todo.append(s)
    used = sorted(params)
    ast = substitute(ast, {params[slot]: params[slot].replace(arg=i) for i, slot in enumerate(used)})
    args = [args[slot] for slot in used]
    return ast, args, [r for r in reads if base_buffer(r) in args]


def writes_what_it_reads(ast: UOp) -> bool:
    """Whether some iteration reads an element that another iteration writes (slot 0 is the target)."""
    store = ast.src[0]
    if store.arg is not None:
        return any(u.op is Ops.LOAD and u.src[0].src[0].arg == 0 for u in store.src[1].toposort())
    written = store.src[0].src[1]
    return any(u.op is Ops.LOAD and u.src[0].src[0].arg == 0 and u.src[0].src[1] is not written for u in ast.toposort())
