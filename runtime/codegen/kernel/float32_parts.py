"""multiply_in_parts: the product of a kernel in float32, as sums of products of parts, of bfloat16.

before:  REDUCE(ADD, MUL(a, b), k)
after:   REDUCE(ADD, CUSTOM[Dot](a, b), k)

A matrix unit that multiplies bfloat16 alone multiplies float32, too: a number is the sum of three of bfloat16, of 8
bits each, exactly, and of the nine products of two numbers' parts the six that a float32 could hold are added up. The
error is below that of float32's own sums. (What is below 2**-126 counts as 0, of the parts, too, so numbers below about
2**-110 have fewer bits.) What has been converted from a half type has fewer parts. Which products can be multiplied so
follows from how the factors lie, and from their sizes only in that there are rows and columns enough to pack them for.
"""

from __future__ import annotations

from math import prod

from manygrad.runtime.codegen.analysis.describe import signature
from manygrad.runtime.codegen.cost import LEAST_PARTS_ROWS, MOST_PARTS_TERMS
from manygrad.runtime.codegen.kernel.dots import along, factors, is_dot, least_terms
from manygrad.runtime.codegen.kernel.legalize import Legalized
from manygrad.runtime.codegen.target import Dot, Machine
from manygrad.tensor.dtype import dtypes
from manygrad.tensor.uop.ops import Ops
from manygrad.tensor.uop.ranges import ranges_of
from manygrad.tensor.uop.rewrite import substitute
from manygrad.tensor.uop.uop import UOp

# of bfloat16, of which a number of float32 is the sum that has been one of that type
PARTS = {dtypes.float32: 3, dtypes.float16: 2, dtypes.bfloat16: 1}


def parts_of(factor: UOp) -> int:
    """As the sum of how many numbers a factor of float32 is multiplied."""
    return PARTS[factor.src[0].dtype if factor.op is Ops.CAST else factor.dtype]


def products_of_parts(left: int, right: int) -> tuple[tuple[int, int], ...]:
    """Which of so many parts of two factors are multiplied, the smallest products first, those of the largest parts
    last: one after the other has a part in common with it. (Part 0 is the largest one.)"""
    path = ((0, 2), (0, 1), (1, 1), (1, 0), (2, 0), (0, 0))
    return tuple((i, j) for i, j in path if i < left and j < right)


def is_in_parts(u: UOp) -> bool:
    """Whether a REDUCE adds up products of parts."""
    return is_dot(u.src[0]) and bool(u.src[0].arg.in_parts)


def multiply_in_parts(kernel: Legalized, machine: Machine) -> Legalized | None:
    """The kernel with its product in parts; None: the machine does not multiply it so."""
    dot = next((d for d in machine.dots if d.in_parts), None)
    if dot is None or (u := product(kernel.ast, dot)) is None:
        return None
    made = UOp(Ops.REDUCE, u.dtype, (UOp(Ops.CUSTOM, u.dtype, u.src[0].src, dot), *u.src[1:]), Ops.ADD)
    # (what was written before is of the same sums)
    written = [x for pair in kernel.written.items() for x in pair]
    ast, *pairs = substitute(UOp(Ops.LINEAR, dtypes.void, (kernel.ast, *written)), {u: made}).src
    return Legalized(ast, dict(zip(pairs[::2], pairs[1::2])))


def product(ast: UOp, dot: Dot) -> UOp | None:
    """The REDUCE of a kernel that is a product of float32, which may have been of a half type, and worth multiplying in
    parts: plain reads of fixed sizes, each along the reduction or along a loop of its own, and whole instructions
    of the reduction."""
    sig = signature(ast)
    if len(sig.reduces) != 1 or not all(least_terms(r) for r in sig.loops):
        return None
    (u,) = sig.reduces
    multiplies = u.arg is Ops.ADD and u.dtype is dtypes.float32 and len(u.src) == 2 and u.src[0].op is Ops.MUL
    if not multiplies or factors(u) is not None:
        return None
    loads, k = [s.src[0] if s.op is Ops.CAST else s for s in u.src[0].src], u.src[1]
    if any(v.op is not Ops.LOAD or v.dtype not in PARTS or len(v.src[0].src) > 2 for v in loads):
        return None
    a, b = loads
    if not 0 < least_terms(k) <= MOST_PARTS_TERMS or least_terms(k) % dot.most_terms:
        return None
    for mine, other in ((a, b), (b, a)):
        own = [r for r in sig.loops if r in ranges_of(mine) and r not in ranges_of(other)]
        if k not in ranges_of(mine) or prod(map(least_terms, own)) < LEAST_PARTS_ROWS:
            return None
        if len(own) != 1 or not any(along(mine, r) for r in (k, *own)):
            return None
    return u
