"""Integer index expressions: bounds, and constructors that simplify as they build.

Expressions are UOps of `dtypes.index` over CONST, RANGE, DEFINE_VAR and loaded indices. A sum is kept in one canonical
form, `terms * coefficients + constant` with terms in a fixed order, so equal sums are the same node. Division and
remainder are floor; they vanish where the bounds allow.
"""

from __future__ import annotations

from math import gcd
from typing import Any

from manygrad.tensor.dtype import dtypes
from manygrad.tensor.uop import rewrite
from manygrad.tensor.uop.args import VarArg
from manygrad.tensor.uop.intervals import bounds
from manygrad.tensor.uop.ops import Ops
from manygrad.tensor.uop.table import Table
from manygrad.tensor.uop.uop import UOp

Terms = dict[UOp, int]
TRUE = UOp.const(dtypes.bool, True)
FALSE = UOp.const(dtypes.bool, False)


_SMALL = [UOp(Ops.CONST, dtypes.index, (), n) for n in range(1025)]  # kept: they are asked for all the time


def iconst(n: int) -> UOp:
    return _SMALL[n] if 0 <= n <= 1024 else UOp(Ops.CONST, dtypes.index, (), int(n))


def as_index(x: Any) -> UOp:
    """An int or symbolic dim as an index node."""
    return x if isinstance(x, UOp) else iconst(x)


def to_sint(u: Any) -> Any:
    """A constant node as an int, any other node (and an int) as it is."""
    return u.arg if isinstance(u, UOp) and u.op is Ops.CONST else u


def vmin(u: UOp) -> int:
    return bounds(u)[0]


def vmax(u: UOp) -> int:
    return bounds(u)[1]


_LINEAR: Table[tuple[Terms, int]] = Table("linear")


def linear(u: UOp) -> tuple[Terms, int]:
    """`u` as (terms with coefficients, constant)."""
    if u.op is not Ops.ADD and u.op is not Ops.MUL and u.op is not Ops.CONST:
        return {u: 1}, 0  # (not kept: a node that refers to itself would live until a garbage collection)
    found = _LINEAR.get(u)
    if found is None:
        terms: Terms = {}
        const = 0
        stack = [(u, 1)]
        while stack:
            x, k = stack.pop()
            if x.op is Ops.CONST:
                const += k * x.arg
            elif x.op is Ops.ADD:
                stack += [(x.src[0], k), (x.src[1], k)]
            elif x.op is Ops.MUL and x.src[1].op is Ops.CONST:
                stack.append((x.src[0], k * x.src[1].arg))
            else:
                terms[x] = terms.get(x, 0) + k
        found = ({t: k for t, k in terms.items() if k}, const)
        if u not in terms:
            _LINEAR[u] = found
    return found


def _order(t: UOp) -> Any:
    return (0, t.arg.id, b"") if t.op is Ops.RANGE else (1, 0, t.key)


def _range_id(t: UOp) -> int:
    return int(t.arg.id)


def build(terms: Terms, const: int) -> UOp:
    """The canonical node of a sum; `x//c*(k*c) + x%c*k` becomes `x*k`,
    and `x//c%d*(k*c) + x%c*k` becomes `x%(c*d)*k`."""
    if len(terms) == 1:
        ((t, k),) = terms.items()
        node = t if k == 1 else UOp(Ops.MUL, dtypes.index, (t, iconst(k)))
        return node if const == 0 else UOp(Ops.ADD, dtypes.index, (node, iconst(const)))
    for t, k in terms.items():
        if t.op is not Ops.MOD or t.src[1].op is not Ops.CONST:
            continue
        c = t.src[1]
        for q in terms:
            part = q.op is Ops.MOD and q.src[1].op is Ops.CONST
            d = q.src[0] if part else q
            if d.op is Ops.IDIV and d.src[1] is c and terms[q] == k * c.arg and _congruent(d.src[0], t.src[0], c.arg):
                rest = {x: n for x, n in terms.items() if x is not t and x is not q}
                inner, inner_const = linear(mod(d.src[0], c.arg * q.src[1].arg) if part else d.src[0])
                for x, n in inner.items():
                    rest[x] = rest.get(x, 0) + n * k
                return build({x: n for x, n in rest.items() if n}, const + inner_const * k)
    out: UOp | None = None
    for t in sorted(terms, key=_range_id if all([t.op is Ops.RANGE for t in terms]) else _order):  # noqa: C419 (faster as a list)
        k = terms[t]
        node = t if k == 1 else UOp(Ops.MUL, dtypes.index, (t, iconst(k)))
        out = node if out is None else UOp(Ops.ADD, dtypes.index, (out, node))
    if out is None:
        return iconst(const)
    return out if const == 0 else UOp(Ops.ADD, dtypes.index, (out, iconst(const)))


def _congruent(a: UOp, b: UOp, c: int) -> bool:
    """Whether a and b differ by a multiple of c (`mod` takes multiples of c off the coefficients)."""
    (ta, ca), (tb, cb) = linear(a), linear(b)
    return (ca - cb) % c == 0 and all((ta.get(x, 0) - tb.get(x, 0)) % c == 0 for x in {**ta, **tb})


def add(a: UOp, b: UOp | int) -> UOp:
    b = as_index(b)
    if b.op is Ops.CONST and a.op is Ops.CONST:
        return iconst(a.arg + b.arg)
    ta, ca = linear(a)
    tb, cb = linear(b)
    if not tb and cb == 0:
        return a
    if not ta and ca == 0:
        return b
    terms = dict(ta)
    for t, k in tb.items():
        terms[t] = terms.get(t, 0) + k
    return build({t: k for t, k in terms.items() if k}, ca + cb)


def mul(a: UOp, b: UOp | int) -> UOp:
    b = as_index(b)
    if a.op is Ops.CONST:
        a, b = b, a
    if b.op is Ops.CONST:
        k = b.arg
        if k == 1:
            return a
        terms, const = linear(a)
        return build({t: c * k for t, c in terms.items()} if k else {}, const * k)
    ta, ca = linear(a)
    tb, cb = linear(b)
    if len(tb) == 1 and cb == 0 and (len(ta) > 1 or ca):  # (x + c) * v -> x*v + c*v
        out = mul(b, ca)
        for t, k in ta.items():
            out = add(out, mul(mul(t, b), k))
        return out
    return UOp(Ops.MUL, dtypes.index, tuple(sorted((a, b), key=_order)))


def floordiv(a: UOp, b: UOp | int) -> UOp:
    b = as_index(b)
    if b.op is not Ops.CONST:
        if a is b:
            return iconst(1)
        ta, ca = linear(a)
        whole = {t: k for t, k in ta.items() if t.op is Ops.MUL and b in t.src}
        rest = build({t: k for t, k in ta.items() if t not in whole}, ca)
        if whole and vmin(rest) >= 0 and _below(rest, b):
            out = iconst(0)
            for t, k in whole.items():
                out = add(out, mul(t.src[1] if t.src[0] is b else t.src[0], k))
            return out
        if vmin(a) >= 0 and _below(a, b):
            return iconst(0)
        return UOp(Ops.IDIV, dtypes.index, (a, b))
    c = b.arg
    assert c > 0, f"index division by {c}"
    if c == 1:
        return a
    lo, hi = bounds(a)
    if lo // c == hi // c:
        return iconst(lo // c)
    terms, const = linear(a)
    whole = {t: k // c for t, k in terms.items() if k % c == 0}
    part = {t: k for t, k in terms.items() if k % c}
    if whole or const // c:
        rest = build(part, const % c)
        return add(build(whole, const // c), floordiv(rest, c))
    g = c
    for k in part.values():
        g = gcd(g, k)
    if g > 1:  # (g*x + r) // (g*c') with 0 <= r < g -> x // c'
        return floordiv(build({t: k // g for t, k in part.items()}, const // g), c // g)
    if len(terms) == 1 and const == 0 and a.op is Ops.IDIV and a.src[1].op is Ops.CONST:
        return floordiv(a.src[0], a.src[1].arg * c)
    # terms whose coefficients share a factor with c, the rest staying below that factor
    for f in sorted({gcd(k, c) for k in part.values() if gcd(k, c) > 1}, reverse=True):
        low = build({t: k for t, k in part.items() if k % f}, const % f)
        if vmin(low) >= 0 and vmax(low) < f:
            high = build({t: k // f for t, k in part.items() if k % f == 0}, const // f)
            return floordiv(high, c // f)
    return UOp(Ops.IDIV, dtypes.index, (a, b))


def mod(a: UOp, b: UOp | int) -> UOp:
    b = as_index(b)
    if b.op is not Ops.CONST:
        q = floordiv(a, b)
        if q.op is not Ops.IDIV:
            return add(a, mul(mul(q, b), -1))
        return UOp(Ops.MOD, dtypes.index, (a, b))
    c = b.arg
    assert c > 0, f"index remainder by {c}"
    if c == 1:
        return iconst(0)
    lo, hi = bounds(a)
    if lo // c == hi // c:
        return add(a, -(lo // c) * c)
    terms, const = linear(a)
    part: Terms = {}
    for t, k in terms.items():
        if k % c == 0:
            continue
        if t.op is Ops.MOD and t.src[1].op is Ops.CONST and (k * t.src[1].arg) % c == 0:  # k*(x % n) mod c -> k*x mod c
            inner, inner_const = linear(t.src[0])
            for x, kx in inner.items():
                part[x] = part.get(x, 0) + kx * k
            const += inner_const * k
        else:
            part[t] = part.get(t, 0) + k
    part = {t: k % c if k % c <= c // 2 or vmin(t) >= 0 else k % c - c for t, k in part.items() if k % c}
    reduced = build(part, const % c)
    if reduced is not a:
        return mod(reduced, c)
    g = c
    for k in part.values():
        g = gcd(g, k)
    if g > 1:
        r = const % g
        return add(mul(mod(build({t: k // g for t, k in part.items()}, const // g), c // g), g), r)
    for f in sorted({gcd(k, c) for k in part.values() if gcd(k, c) > 1}, reverse=True):
        low = build({t: k for t, k in part.items() if k % f}, const % f)
        if vmin(low) >= 0 and vmax(low) < f:
            high = build({t: k // f for t, k in part.items() if k % f == 0}, const // f)
            return add(mul(mod(high, c // f), f), low)
    return UOp(Ops.MOD, dtypes.index, (a, b))


def maximum(a: UOp, b: UOp | int) -> UOp:
    """The larger one, where that can be told; else a MAX."""
    b = as_index(b)
    if _at_least(a, b):
        return a
    return b if _at_least(b, a) else UOp(Ops.MAX, dtypes.index, tuple(sorted((a, b), key=_order)))


def minimum(a: UOp, b: UOp | int) -> UOp:
    """The smaller one; where it cannot be told, -MAX(-a, -b)."""
    b = as_index(b)
    if _at_least(b, a):
        return a
    return b if _at_least(a, b) else mul(maximum(mul(a, -1), mul(b, -1)), -1)


def spread(u: UOp) -> UOp:
    """A sum with a larger or smaller one of two in it as the larger or smaller one of two sums, whose bounds are
    closer: those of v - max(v - 3, 0) are -4..8, of min(3, v) 1..3."""
    terms, _ = linear(u)
    chosen = [(t, k) for t, k in terms.items() if t.op is Ops.MAX and k in (1, -1)]
    if not chosen:
        return u
    for t, k in chosen:
        rest = add(u, mul(t, -k))
        x, y = (add(rest, mul(s, k)) for s in t.src)
        if x.op is Ops.CONST or y.op is Ops.CONST:
            break
    return (maximum if k == 1 else minimum)(spread(x), spread(y))


def _at_least(a: UOp, b: UOp) -> bool:
    """Whether a >= b holds for certain."""
    if vmin(add(a, mul(b, -1))) >= 0:
        return True
    if b.op is Ops.IDIV and b.src[1].op is Ops.CONST and vmin(b.src[0]) >= 0:
        return _at_least(a, b.src[0])
    if b.op is Ops.MAX:
        return all(_at_least(a, x) for x in b.src)
    return a.op is Ops.MAX and any(_at_least(x, b) for x in a.src)


def product(shape: tuple[Any, ...]) -> UOp:
    """How many elements a shape has."""
    out = iconst(1)
    for d in shape:
        out = mul(out, as_index(d))
    return out


def _below(a: UOp, b: UOp) -> bool:
    """Whether a < b holds for certain (b symbolic)."""
    if vmax(a) < vmin(b):
        return True
    terms, const = linear(a)
    if const == 0 and len(terms) == 1:
        ((t, k),) = terms.items()
        return k == 1 and t.op is Ops.RANGE and t.src[0] is b
    return False


def lt(a: UOp, b: UOp | int) -> UOp:
    """a < b as a bool node."""
    diff = add(a, mul(as_index(b), -1))  # a - b < 0
    lo, hi = bounds(diff)
    if hi < 0:
        return TRUE
    if lo >= 0:
        return FALSE
    b = as_index(b)
    if b.op is not Ops.CONST and _below(a, b):
        return TRUE
    if b.op is Ops.CONST:
        terms, const = linear(a)
        bound = b.arg - const
        g = 0
        for k in terms.values():
            g = gcd(g, k)
        if g > 1:  # g*x < n -> x < ceil(n / g)
            return lt(build({t: k // g for t, k in terms.items()}, 0), -(-bound // g))
        return UOp(Ops.CMPLT, dtypes.bool, (build(terms, 0), iconst(bound)))
    return UOp(Ops.CMPLT, dtypes.bool, (a, b))


def ge(a: UOp, b: UOp | int) -> UOp:
    """a >= b, as b - 1 < a."""
    return lt(add(as_index(b), -1), a) if not isinstance(b, int) else _ge_const(a, b)


def _ge_const(a: UOp, b: int) -> UOp:
    lo, hi = bounds(a)
    if lo >= b:
        return TRUE
    if hi < b:
        return FALSE
    return lt(mul(a, -1), 1 - b)  # -a < 1 - b


def both(a: UOp, b: UOp) -> UOp:
    """Logical and, in a canonical order of its factors."""
    if a is FALSE or b is FALSE:
        return FALSE
    parts = sorted({p for x in (a, b) for p in _factors(x)} - {TRUE}, key=lambda p: p.key)
    out = TRUE
    for p in parts:
        out = p if out is TRUE else UOp(Ops.AND, dtypes.bool, (out, p))
    return out


def _factors(x: UOp) -> list[UOp]:
    return [*_factors(x.src[0]), x.src[1]] if x.op is Ops.AND and x.dtype is dtypes.bool else [x]


def substitute(u: UOp, mapping: dict[UOp, UOp]) -> UOp:
    """`u` with nodes replaced, index arithmetic simplified again on the way up."""
    return rewrite.substitute(u, mapping, simplified)


def simplified(x: UOp, src: tuple[UOp, ...]) -> UOp:
    """Node `x` over new sources, through the simplifying constructors where it is index arithmetic."""
    if x.dtype is dtypes.index:
        if x.op is Ops.ADD:
            return add(src[0], src[1])
        if x.op is Ops.MUL:
            return mul(src[0], src[1])
        if x.op is Ops.IDIV:
            return floordiv(src[0], src[1])
        if x.op is Ops.MOD:
            return mod(src[0], src[1])
        if x.op is Ops.MAX:
            return maximum(src[0], src[1])
    if x.op is Ops.CMPLT and src[0].dtype is dtypes.index:
        return lt(src[0], src[1])
    if x.op is Ops.AND and x.dtype is dtypes.bool:
        return both(src[0], src[1])
    return x.replace(src=src)


def variable(name: str, lo: int, hi: int) -> UOp:
    if not lo <= hi:
        raise ValueError(f"variable {name!r}: its smallest value {lo} is above its largest {hi}")
    return UOp(Ops.DEFINE_VAR, dtypes.index, (), VarArg(name, lo, hi))


def evaluate(u: Any, values: dict[str, int]) -> int:
    """The number an index expression has for given values of its variables."""
    if isinstance(u, int):
        return u
    done: dict[UOp, int] = {}
    for x in u.toposort(lambda x: x.op is not Ops.BIND):
        s = [done[y] for y in x.src if y in done]
        if x.op is Ops.CONST:
            done[x] = int(x.arg)
        elif x.op is Ops.BIND:
            done[x] = x.src[1].arg
        elif x.op is Ops.DEFINE_VAR:
            name = x.arg.name
            if name not in values:
                raise ValueError(
                    f"variable {name!r} has no value; bind it: Variable({name!r}, {x.arg.min}, {x.arg.max}).bind(n)"
                )
            done[x] = values[name]
        elif x.op is Ops.ADD:
            done[x] = s[0] + s[1]
        elif x.op is Ops.MUL:
            done[x] = s[0] * s[1]
        elif x.op is Ops.IDIV:
            done[x] = s[0] // s[1]
        elif x.op is Ops.MOD:
            done[x] = s[0] % s[1]
        elif x.op is Ops.MAX:
            done[x] = max(s)
        else:
            raise AssertionError(f"{x.op} in a dim")
    return done[u]
