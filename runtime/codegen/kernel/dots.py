"""Sums of products of bytes and of bfloat16, in the form in which a processor adds up four or two of them in one
instruction.

before:  REDUCE(ADD, MUL(CAST.int32(a), CAST.int32(b)), k)                               a, b: int8
after:   REDUCE(ADD, CUSTOM[Dot](XOR(b, 128), a), k) - 128 * REDUCE(ADD, CUSTOM[Dot](1, a), l)

A machine multiplies bytes of some types only (x86: uint8 by int8). A factor of another one is moved by 128, which flips
its highest bit, and 128 times the sum of the other factor is taken away again: sums of int32 wrap around, so this is
exact for all values. The sum has a range of its own, so that it is made once for all that shares the factor.

Where a machine adds up two products of bytes in 16 bits (AVX2), a short sum of small numbers stays in 16 bits to its
end, and is widened once (`fits_words`): the weights of a block of 32, of 4 bits each, by bytes.

Of bfloat16, and of float16 where a matrix unit takes it, these are matrix products alone: plain reads, added up in
float32 over one range. (Denormals of bfloat16 count as 0 on a processor.) Factors of float32 are taken by a GPU's
matrix instructions alone, which round them, where `set_float32_matmul_precision` allows it.
"""

from __future__ import annotations

from math import prod

from manygrad.runtime.codegen.analysis.affine import TileAnalysis
from manygrad.runtime.codegen.analysis.describe import signature, size_factor
from manygrad.runtime.codegen.cost import LEAST_DOT_TERMS
from manygrad.runtime.codegen.target import LANE_BYTES, Dot
from manygrad.tensor.dtype import DType, dtypes
from manygrad.tensor.environment import FLOAT32_MATMUL_PRECISION
from manygrad.tensor.uop.args import RangeArg
from manygrad.tensor.uop.intervals import bounds
from manygrad.tensor.uop.ops import Ops
from manygrad.tensor.uop.ranges import ranges_of
from manygrad.tensor.uop.rewrite import rebuild
from manygrad.tensor.uop.uop import UOp

BYTES = (dtypes.int8, dtypes.uint8)


def is_dot(u: UOp) -> bool:
    return u.op is Ops.CUSTOM and isinstance(u.arg, Dot)


def is_product(u: UOp) -> bool:
    return u.op is Ops.MUL or is_dot(u)


def is_total(u: UOp) -> bool:
    """A REDUCE that adds up a single factor."""
    return is_dot(u.src[0]) and any(s.op is Ops.CONST for s in u.src[0].src)


def fits_words(u: UOp, tensorized: UOp) -> bool:
    """Whether all that a REDUCE adds up, four iterations of `tensorized` at a time, fits 16 bits."""
    sizes = [least_terms(r) for r in u.src[1:] if r is not tensorized]
    count = prod(sizes) * -(-least_terms(tensorized) // LANE_BYTES)
    return is_dot(u.src[0]) and 0 < count <= u.src[0].arg.words_most


def allowed(dots: tuple[Dot, ...]) -> tuple[Dot, ...]:
    """Without those that round factors of float32, unless the user allows it."""
    exact = FLOAT32_MATMUL_PRECISION.value not in ("high", "medium")
    return tuple(d for d in dots if not (exact and d.columns and d.left is dtypes.float32))


def use_dots(ast: UOp, dots: tuple[Dot, ...]) -> UOp:
    """The kernel with products as `dots` has them, where they are added up."""
    floats = tuple(dict.fromkeys(d.left for d in dots if d.left.is_float and not d.in_parts))
    plain = not any(d.columns for d in dots)
    if not dots or not any(factors(u, floats, plain) for u in signature(ast).reduces):
        return ast
    last = signature(ast).loops[-1] if signature(ast).loops else None
    fresh = 1 + max(u.arg.id for u in signature(ast).nodes if u.op is Ops.RANGE)

    def change(u: UOp) -> UOp | None:
        nonlocal fresh
        found = factors(u, floats, plain)
        if found is None:
            return None
        for x, y in sorted((found, found[::-1]), key=lambda pair: cost_of_sum(pair[1], u, last)):
            for flips in (False, True) if x.dtype in BYTES else (False,):
                one = flipped(x) if flips else x
                dot = next((d for d in dots if d.takes(one, y)), None)
                ones = next((d for d in dots if y.dtype in (d.left, d.right) and d.takes(one_for(d, y), y)), None)
                if dot is None or ones is None:
                    continue
                product = UOp(Ops.REDUCE, u.dtype, (dotted(dot, one, y), *u.src[1:]), Ops.ADD)
                if not flips:
                    return product
                own = {r: r.replace(arg=RangeArg(fresh + i, "reduce")) for i, r in enumerate(u.src[1:])}
                fresh += len(own)
                mine = rebuild(y, own.get)
                total = UOp(Ops.REDUCE, u.dtype, (dotted(ones, one_for(ones, y), mine), *own.values()), Ops.ADD)
                by = UOp.const(u.dtype, 128 if one.dtype is dtypes.uint8 else -128)
                return product.alu(Ops.SUB, total.alu(Ops.MUL, by))
        return None

    return rebuild(ast, change)


def factors(u: UOp, floats: tuple[DType, ...] = (dtypes.bfloat16,), plain: bool = True) -> tuple[UOp, UOp] | None:
    """The bytes that a REDUCE multiplies and adds up in an int32, or the floats, of one of the types `floats`, of a
    matrix product; `plain`: those that are read as they are."""
    types = {dtypes.int32: BYTES, dtypes.float32: floats}.get(u.dtype, ())
    if u.op is not Ops.REDUCE or u.arg is not Ops.ADD or u.src[0].op is not Ops.MUL:
        return None
    a, b = u.src[0].src
    if all(s.op is Ops.CAST and s.src[0].dtype in types for s in (a, b)):
        a, b = a.src[0], b.src[0]
    if a.dtype not in types or b.dtype not in types:
        return None
    if a.dtype.is_float and (len(u.src) > 2 or a is b or not all(_can_be_factor(s, plain) for s in (a, b))):
        return None
    ranges = frozenset(u.src[1:])
    shared = ranges <= ranges_of(a) and ranges <= ranges_of(b)
    return (a, b) if shared and (size_factor(u.src[-1]) >= LEAST_DOT_TERMS or in_fours(u)) else None


def _can_be_factor(s: UOp, plain: bool) -> bool:
    if plain:
        return s.op is Ops.LOAD and len(s.src[0].src) == 2
    return all(v.op is not Ops.REDUCE for v in s.toposort())


def least_terms(r: UOp) -> int:
    """The iterations of a range, where they are fixed."""
    size = r.src[0]
    return size.arg if size.op is Ops.CONST else 0


def in_fours(u: UOp) -> bool:
    """Whether the innermost range of a sum of bytes is one of four that lie side by side in all that is read, and the
    sum is long enough: a block of bytes."""
    loads = [v for v in u.src[0].toposort() if v.op is Ops.LOAD]
    whole = least_terms(u.src[-1]) == LANE_BYTES and prod(map(least_terms, u.src[1:])) >= LEAST_DOT_TERMS
    return whole and u.dtype is dtypes.int32 and all(along(v, u.src[-1]) for v in loads)


def along(load: UOp, r: UOp) -> bool:
    """Whether a LOAD reads one element after the other along `r`."""
    return step_of(load, r) == 1


def step_of(load: UOp, r: UOp) -> int | None:
    """How many elements a LOAD moves on by with each iteration of `r`; None: not always by as many."""
    form = TileAnalysis({}, None, 1).affine(load.src[0].src[1], {})
    if form is None or any(r in ranges_of(t.expr) for t, _ in form.terms if t.expr is not r):
        return None
    return {t.expr: c for t, c in form.terms}.get(r, 0)


def row_step(load: UOp, r: UOp) -> UOp | None:
    """The same, also where only variables say how many."""
    step = step_of(load, r)
    return _slope(load.src[0].src[1], r) if step is None else UOp.const(dtypes.index, step)


def _slope(u: UOp, r: UOp) -> UOp | None:
    """The number by which `r` is multiplied in an index, without ranges."""
    if u is r:
        return UOp.const(dtypes.index, 1)
    within = [s for s in u.src if r in ranges_of(s)]
    if len(within) != 1 or u.op not in (Ops.ADD, Ops.MUL) or (found := _slope(within[0], r)) is None:
        return None
    if u.op is Ops.ADD:
        return found
    by = next(s for s in u.src if s is not within[0])
    return None if ranges_of(by) else found.alu(Ops.MUL, by)


def cost_of_sum(y: UOp, u: UOp, last: UOp | None) -> int:
    """Which factor of `u` is better added up: one that lies along the reduction, and is read for all iterations of the
    last loop."""
    in_order = all(along(v, u.src[-1]) for v in y.toposort() if v.op is Ops.LOAD)
    across = last in ranges_of(y)
    return 0 if in_order and not across else 1 if across else 2


def flipped(x: UOp) -> UOp:
    """`x` moved by 128, as the other type of bytes."""
    other = dtypes.uint8 if x.dtype is dtypes.int8 else dtypes.int8
    return x.bitcast(other).alu(Ops.XOR, UOp.const(other, 128))


def one_for(dot: Dot, y: UOp) -> UOp:
    """The factor with which `dot` adds up `y`."""
    return UOp.const(dot.right if dot.left is y.dtype else dot.left, 1)


def dotted(dot: Dot, x: UOp, y: UOp) -> UOp:
    src = (x, y) if (x.dtype, y.dtype) == (dot.left, dot.right) else (y, x)
    if dot.most is not None:
        dot = dot._replace(most=bounds(src[0])[1])
    return UOp(Ops.CUSTOM, dtypes.float32 if x.dtype.is_float else dtypes.int32, src, dot)
