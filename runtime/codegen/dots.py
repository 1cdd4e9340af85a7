"""Sums of products of bytes and of bfloat16, in the form in which a processor adds up four or two of them in one
instruction.

before:  REDUCE(ADD, MUL(CAST.int32(a), CAST.int32(b)), k)                               a, b: int8
after:   REDUCE(ADD, CUSTOM[Dot](XOR(b, 128), a), k) - 128 * REDUCE(ADD, CUSTOM[Dot](1, a), l)

A machine multiplies bytes of some types only (x86: uint8 by int8). A factor of another one is moved by 128, which flips
its highest bit, and 128 times the sum of the other factor is taken away again: sums of int32 wrap around, so this is
exact for all values. The sum has a range of its own, so that it is made once for all that shares the factor.

Of bfloat16 these are matrix products alone: plain reads, added up in float32 over one range. (Denormals count as 0
there.)
"""

from __future__ import annotations

from typing import NamedTuple

from manygrad.runtime.codegen.affine import TileAnalysis
from manygrad.runtime.codegen.cost import LEAST_DOT_TERMS
from manygrad.runtime.codegen.describe import signature
from manygrad.tensor.dtype import DType, dtypes
from manygrad.tensor.uop.args import RangeArg
from manygrad.tensor.uop.ops import Ops
from manygrad.tensor.uop.ranges import ranges_of
from manygrad.tensor.uop.rewrite import rebuild
from manygrad.tensor.uop.uop import UOp

BYTES = (dtypes.int8, dtypes.uint8)
LANE_BYTES = 4  # of each factor, side by side


class Dot(NamedTuple):
    """An instruction that adds the products of what four bytes hold of type `left` by the same of type `right` to an
    int32 or float32, in vectors of `vector_bytes`; as the arg of a CUSTOM, one of the products, which may be added up
    by it."""

    left: DType
    right: DType
    vector_bytes: int

    @property
    def terms(self) -> int:
        """Products that it adds up in a lane."""
        return LANE_BYTES // self.left.itemsize


def is_dot(u: UOp) -> bool:
    return u.op is Ops.CUSTOM and isinstance(u.arg, Dot)


def is_product(u: UOp) -> bool:
    return u.op is Ops.MUL or is_dot(u)


def is_total(u: UOp) -> bool:
    """A REDUCE that adds up a single factor."""
    return is_dot(u.src[0]) and any(s.op is Ops.CONST for s in u.src[0].src)


def use_dots(ast: UOp, dots: tuple[Dot, ...]) -> UOp:
    """The kernel with products as `dots` has them, where they are added up."""
    if not dots or not any(factors(u) for u in signature(ast).reduces):
        return ast
    last = signature(ast).loops[-1] if signature(ast).loops else None
    fresh = 1 + max(u.arg.id for u in signature(ast).nodes if u.op is Ops.RANGE)

    def change(u: UOp) -> UOp | None:
        nonlocal fresh
        found = factors(u)
        if found is None:
            return None
        for x, y in sorted((found, found[::-1]), key=lambda pair: cost_of_sum(pair[1], u, last)):
            for flips in (False, True) if x.dtype in BYTES else (False,):
                one = flipped(x) if flips else x
                dot = next((d for d in dots if {d.left, d.right} == {one.dtype, y.dtype}), None)
                ones = next((d for d in dots if y.dtype in (d.left, d.right)), None)
                if dot is None or ones is None:
                    continue
                product = UOp(Ops.REDUCE, u.dtype, (dotted(dot, one, y), *u.src[1:]), Ops.ADD)
                if not flips:
                    return product
                own = {r: r.replace(arg=RangeArg(fresh + i, "reduce")) for i, r in enumerate(u.src[1:])}
                fresh += len(own)
                other = UOp.const(ones.right if ones.left is y.dtype else ones.left, 1)
                total = UOp(Ops.REDUCE, u.dtype, (dotted(ones, other, rebuild(y, own.get)), *own.values()), Ops.ADD)
                by = UOp.const(u.dtype, 128 if one.dtype is dtypes.uint8 else -128)
                return product.alu(Ops.SUB, total.alu(Ops.MUL, by))
        return None

    return rebuild(ast, change)


def factors(u: UOp) -> tuple[UOp, UOp] | None:
    """The bytes that a REDUCE multiplies and adds up in an int32, or the bfloat16 of a matrix product."""
    types = {dtypes.int32: BYTES, dtypes.float32: (dtypes.bfloat16,)}.get(u.dtype, ())
    if u.op is not Ops.REDUCE or u.arg is not Ops.ADD or u.src[0].op is not Ops.MUL:
        return None
    if any(s.op is not Ops.CAST or s.src[0].dtype not in types for s in u.src[0].src):
        return None
    a, b = (s.src[0] for s in u.src[0].src)
    if a.dtype is dtypes.bfloat16 and (
        len(u.src) > 2 or a is b or any(s.op is not Ops.LOAD or len(s.src[0].src) > 2 for s in (a, b))
    ):
        return None
    ranges, inner = frozenset(u.src[1:]), u.src[-1].src[0]
    shared = ranges <= ranges_of(a) and ranges <= ranges_of(b)
    return (a, b) if shared and inner.op is Ops.CONST and inner.arg >= LEAST_DOT_TERMS else None


def cost_of_sum(y: UOp, u: UOp, last: UOp | None) -> int:
    """Which factor of `u` is better added up: one that lies along the reduction, and is read for all iterations of the
    last loop."""
    analysis = TileAnalysis({}, None, 1)
    forms = [analysis.affine(v.src[0].src[1], {}) for v in y.toposort() if v.op is Ops.LOAD]
    along = all(f is not None and {t.expr: c for t, c in f.terms}.get(u.src[-1]) == 1 for f in forms)
    across = last in ranges_of(y)
    return 0 if along and not across else 1 if across else 2


def flipped(x: UOp) -> UOp:
    """`x` moved by 128, as the other type of bytes."""
    other = dtypes.uint8 if x.dtype is dtypes.int8 else dtypes.int8
    return x.bitcast(other).alu(Ops.XOR, UOp.const(other, 128))


def dotted(dot: Dot, x: UOp, y: UOp) -> UOp:
    return UOp(
        Ops.CUSTOM,
        dtypes.float32 if x.dtype.is_float else dtypes.int32,
        (x, y) if (x.dtype, y.dtype) == (dot.left, dot.right) else (y, x),
        dot,
    )
