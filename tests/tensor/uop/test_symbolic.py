"""Index arithmetic: every simplification keeps the value, every bound holds.

A random expression is built twice, side by side: by the simplifying constructors, and as plain Python on the values of
its variables. Both must give the same number wherever they are evaluated.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from manygrad.tensor.dtype import dtypes
from manygrad.tensor.uop import Ops, RangeArg, UOp
from manygrad.tensor.uop import symbolic as sym

Env = dict[UOp, int]
Plain = Callable[[Env], int]

R = [UOp(Ops.RANGE, dtypes.index, (sym.iconst(n),), RangeArg(i, "loop")) for i, n in enumerate((2, 3, 5, 8))]
V = [sym.variable("n", 1, 6), sym.variable("m", 2, 4)]
SIGNED = sym.variable("s", -7, 5)
LEAVES = {**{r: range(r.src[0].arg) for r in R}, **{v: range(v.arg.min, v.arg.max + 1) for v in (*V, SIGNED)}}

PYTHON: dict[Ops, Callable[..., int]] = {
    Ops.ADD: lambda a, b: a + b,
    Ops.MUL: lambda a, b: a * b,
    Ops.IDIV: lambda a, b: a // b,
    Ops.MOD: lambda a, b: a % b,
    Ops.MAX: max,
    Ops.CMPLT: lambda a, b: a < b,
    Ops.AND: lambda a, b: a and b,
    Ops.WHERE: lambda c, a, b: a if c else b,
}


def value_of(u: UOp, env: Env) -> int:
    """The number `u` has: the definition, node by node."""
    done: dict[UOp, int] = {}
    for x in u.toposort(lambda x: x not in env):
        done[x] = env[x] if x in env else x.arg if x.op is Ops.CONST else PYTHON[x.op](*(done[s] for s in x.src))
    return done[u]


@st.composite
def expressions(draw: Any, leaves: tuple[UOp, ...] = (*R, *V, SIGNED), depth: int = 5) -> tuple[UOp, Plain]:
    """(simplified expression, its meaning)."""
    kind = draw(
        st.sampled_from(
            ["leaf", "const"]
            if depth == 0
            else ["leaf", "add", "add", "scale", "mul", "div", "mod", "divmod", "divvar"]
        )
    )
    if kind == "leaf":
        v = draw(st.sampled_from(leaves))
        return v, lambda env: env[v]
    if kind == "const":
        k = draw(st.integers(-9, 9))
        return sym.iconst(k), lambda env: k
    a, fa = draw(expressions(leaves, depth - 1))
    if kind == "scale":
        k = draw(st.integers(-4, 12))
        return sym.mul(a, k), lambda env: fa(env) * k
    if kind in ("div", "mod", "divmod"):
        k = draw(st.sampled_from([1, 2, 3, 4, 5, 6, 8, 12, 15]))
        if kind == "div":
            return sym.floordiv(a, k), lambda env: fa(env) // k
        if kind == "mod":
            return sym.mod(a, k), lambda env: fa(env) % k
        j = draw(st.sampled_from([1, 2, -1]))
        return sym.add(sym.mul(sym.floordiv(a, k), k * j), sym.mul(sym.mod(a, k), j)), lambda env: fa(env) * j
    if kind == "divvar":
        v = draw(st.sampled_from([x for x in leaves if x in V] or [V[0]]))
        if draw(st.booleans()):
            return sym.floordiv(a, v), lambda env: fa(env) // env[v]
        return sym.mod(a, v), lambda env: fa(env) % env[v]
    b, fb = draw(expressions(leaves, depth - 2 if depth > 1 else 0))
    if kind == "add":
        return sym.add(a, b), lambda env: fa(env) + fb(env)
    return sym.mul(a, b), lambda env: fa(env) * fb(env)


def environments(u: UOp, most: int = 150) -> list[Env]:
    """Values for the leaves of `u`: all of them, or an even sample."""
    leaves = sorted({x for x in u.toposort() if x in LEAVES}, key=lambda x: str(x.arg))
    total = 1
    for x in leaves:
        total *= len(LEAVES[x])
    step = max(1, total // most) | 1
    return [
        {**EDGE, **dict(zip(leaves, values))}
        for values in itertools.islice(itertools.product(*(LEAVES[x] for x in leaves)), 0, None, step)
    ]


EDGE: Env = {x: r[-1] for x, r in LEAVES.items()}


def agree(u: UOp, meaning: Plain) -> None:
    lo, hi = sym.bounds(u)
    for env in [*environments(u), {x: r[0] for x, r in LEAVES.items()}, EDGE]:
        got, want = value_of(u, env), meaning(env)
        assert got == want, f"{got} is not {want} at {env}"
        assert lo <= got <= hi, f"{got} is outside the bounds {lo}..{hi}"


@settings(max_examples=400)
@given(expressions())
@example((sym.floordiv(sym.add(sym.mul(SIGNED, 6), -1), 4), lambda env: (env[SIGNED] * 6 - 1) // 4))
def test_simplification_keeps_the_value_and_bounds_hold(e: tuple[UOp, Plain]) -> None:
    agree(*e)


@settings(max_examples=200)
@given(expressions(depth=3), expressions(depth=2))
def test_comparisons_keep_their_value(a: tuple[UOp, Plain], b: tuple[UOp, Plain]) -> None:
    (ua, fa), (ub, fb) = a, b
    agree(sym.lt(ua, ub), lambda env: fa(env) < fb(env))
    agree(sym.ge(ua, ub), lambda env: fa(env) >= fb(env))
    agree(sym.ge(ua, 3), lambda env: fa(env) >= 3)
    agree(sym.both(sym.lt(ua, ub), sym.ge(ua, 0)), lambda env: fa(env) < fb(env) and fa(env) >= 0)


@settings(max_examples=200)
@given(expressions(leaves=(R[0], R[1], SIGNED), depth=4), expressions(leaves=(R[2], V[0]), depth=2))
def test_substitution_keeps_the_value(e: tuple[UOp, Plain], by: tuple[UOp, Plain]) -> None:
    """A leaf replaced by an expression of values it may have, arithmetic simplified again on the way up."""
    (u, fu), (new, fnew) = e, by
    new = sym.add(sym.mod(new, 12), -7)
    agree(sym.substitute(u, {SIGNED: new}), lambda env: fu({**env, SIGNED: fnew(env) % 12 - 7}))


@settings(max_examples=200)
@given(st.permutations([0, 1, 2, 3, 4]), st.lists(st.integers(-5, 5), min_size=5, max_size=5))
def test_sums_are_canonical(order: list[int], ks: list[int]) -> None:
    """A sum is the same node in whatever order it is put together."""
    terms = [sym.mul(t, k) for t, k in zip((*R, SIGNED), ks)]
    forward = backward = sym.iconst(0)
    for t in terms:
        forward = sym.add(forward, t)
    for i in order:
        backward = sym.add(terms[i], backward)
    assert forward is backward
    assert sym.add(forward, sym.mul(forward, -1)) is sym.iconst(0)


@settings(max_examples=100)
@given(expressions(leaves=(*V, SIGNED), depth=4), st.integers(1, 6), st.integers(2, 4), st.integers(-7, 5))
def test_evaluate_gives_the_number(e: tuple[UOp, Plain], n: int, m: int, s: int) -> None:
    u, meaning = e
    assert sym.evaluate(u, {"n": n, "m": m, "s": s}) == meaning({V[0]: n, V[1]: m, SIGNED: s})


i, j, k, l = R  # 0..1, 0..2, 0..4, 0..7


def test_what_must_vanish_does() -> None:
    """The rules that reshapes and strides rely on."""
    flat = sym.add(sym.mul(j, 8), l)  # an index of (3, 8)
    assert sym.floordiv(flat, 8) is j
    assert sym.mod(flat, 8) is l
    assert sym.floordiv(sym.add(sym.mul(j, 40), sym.add(sym.mul(k, 8), l)), 8) is sym.add(sym.mul(j, 5), k)
    assert sym.add(sym.mul(sym.floordiv(flat, 6), 6), sym.mod(flat, 6)) is flat
    assert sym.add(sym.mul(sym.floordiv(l, 4), 12), sym.mul(sym.mod(l, 4), 3)) is sym.mul(l, 3)
    whole = UOp(Ops.RANGE, dtypes.index, (sym.iconst(24),), RangeArg(9, "loop"))
    digits = [sym.mul(sym.mod(sym.floordiv(whole, n), d), n) for n, d in ((1, 2), (2, 3), (6, 2), (12, 2))]
    assert sym.add(sym.add(digits[2], digits[0]), digits[1]) is sym.mod(whole, 12)
    assert sym.add(sym.add(digits[3], digits[0]), sym.add(digits[1], digits[2])) is whole
    assert sym.mod(sym.mod(l, 6), 3) is sym.mod(l, 3)
    assert sym.floordiv(sym.floordiv(flat, 2), 4) is j
    assert sym.lt(l, 8) is sym.TRUE and sym.lt(l, 0) is sym.FALSE and sym.ge(l, 0) is sym.TRUE
    assert sym.lt(sym.mul(l, 4), 10) is sym.lt(l, 3)


def test_symbolic_sizes_vanish_too() -> None:
    n = V[0]
    r = UOp(Ops.RANGE, dtypes.index, (n,), RangeArg(9, "loop"))
    flat = sym.add(sym.mul(j, n), r)
    assert sym.floordiv(flat, n) is j
    assert sym.mod(flat, n) is r
    assert sym.lt(r, n) is sym.TRUE


def test_bounds() -> None:
    assert sym.bounds(sym.mul(SIGNED, -3)) == (-15, 21)
    assert sym.bounds(sym.mul(SIGNED, SIGNED))[1] >= 49
    assert sym.bounds(sym.mod(SIGNED, 4)) == (0, 3)
    assert sym.bounds(sym.floordiv(SIGNED, 4)) == (-2, 1)
    deep = i
    for _ in range(50_000):
        deep = UOp(Ops.MAX, dtypes.index, (deep, sym.iconst(0)))
    assert sym.bounds(deep) == (0, 1)


def test_errors() -> None:
    with pytest.raises(ValueError, match="'q': its smallest value 5 is above its largest 4"):
        sym.variable("q", 5, 4)
    with pytest.raises(ValueError, match="'n' has no value; bind it"):
        sym.evaluate(sym.add(V[0], 1), {})
