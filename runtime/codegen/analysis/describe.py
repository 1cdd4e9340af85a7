"""Facts that a kernel AST tells about itself: its loops, arguments, bounds, a name, and an estimate of its work."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from manygrad.tensor.dtype import DType, dtypes
from manygrad.tensor.uop.intervals import bounds
from manygrad.tensor.uop.ops import GroupOp, Ops
from manygrad.tensor.uop.ranges import ranges_of
from manygrad.tensor.uop.rewrite import substitute
from manygrad.tensor.uop.table import memo
from manygrad.tensor.uop.uop import UOp


@dataclass(frozen=True, eq=False)
class Signature:
    """The arguments and loops of a kernel, in the order in which they are passed and nested. One for each AST."""

    stores: tuple[UOp, ...]
    loops: tuple[UOp, ...]
    reduces: tuple[UOp, ...]  # the REDUCE nodes, inner ones first
    params: dict[int, DType]  # slot -> element type
    variables: tuple[UOp, ...]  # DEFINE_VARs by name
    nodes: tuple[UOp, ...]  # all of them, sources first

    @property
    def slots(self) -> int:
        return max(self.params, default=-1) + 1


@memo
def signature(ast: UOp) -> Signature:
    """Reads `SINK(*STORE)`, checking its form."""
    assert ast.op is Ops.SINK and ast.src and all(s.op is Ops.STORE for s in ast.src), f"not a kernel AST: {ast}"
    nodes = tuple(ast.toposort())
    loops = ast.src[0].src[2:]
    assert all(s.src[2:] == loops for s in ast.src), "the STOREs of a kernel must share their loop ranges"
    assert all(r.op is Ops.RANGE for r in loops), "loops must be RANGEs"
    params: dict[int, DType] = {}
    for u in nodes:
        if u.op is Ops.PARAM:
            assert params.setdefault(u.arg, u.dtype) is u.dtype, f"PARAM {u.arg} has two dtypes"
    return Signature(
        ast.src,
        loops,
        tuple(u for u in nodes if u.op is Ops.REDUCE),
        params,
        tuple(sorted((u for u in nodes if u.op is Ops.DEFINE_VAR), key=lambda u: u.arg.name)),
        nodes,
    )


def size_max(r: UOp) -> int:
    """The most iterations of a RANGE."""
    return max(1, bounds(r.src[0])[1])


def size_factor(r: UOp) -> int:
    """Number of which the iterations of a RANGE are known to be a multiple: itself, where it is fixed."""
    return _factor(r.src[0])


def _factor(u: UOp) -> int:
    match u.op:
        case Ops.CONST:
            return int(u.arg)
        case Ops.MUL:
            return _factor(u.src[0]) * _factor(u.src[1])
        case Ops.ADD | Ops.SUB:
            return math.gcd(_factor(u.src[0]), _factor(u.src[1]))
    return 1


def is_fixed(r: UOp) -> bool:
    """Whether the size of a range is a constant."""
    return r.src[0].op is Ops.CONST


def in_whole_tiles(r: UOp, tile: int) -> bool:
    """Whether tiles of so many iterations cut a range evenly, whatever its size."""
    return size_factor(r) % tile == 0


def conjuncts(condition: UOp) -> list[UOp]:
    """The conditions that all must hold."""
    return [c for s in condition.src for c in conjuncts(s)] if condition.op is Ops.AND else [condition]


def factor_masks(v: UOp) -> list[UOp]:
    """The conditions under which the factors of a product are loaded; anything else than a product of loads has
    none."""
    if v.op is Ops.MUL:
        return [m for s in v.src for m in factor_masks(s)]
    if v.op is Ops.CAST:
        return factor_masks(v.src[0])
    return [v.src[0].src[2]] if v.op is Ops.LOAD and len(v.src[0].src) == 3 else []


def volume(ranges: frozenset[UOp]) -> int:
    return math.prod(size_max(r) for r in ranges)


@lru_cache(1024)
def estimate(ast: UOp) -> tuple[int, int]:
    """(floating and integer operations, bytes touched), symbolic sizes at their maximum, offsets' arithmetic left
    out."""
    sig = signature(ast)
    flops = 0
    values = UOp(Ops.SINK, dtypes.void, tuple(s.src[1] for s in sig.stores)).toposort(
        lambda u: u.op not in (Ops.LOAD, Ops.INDEX)
    )
    for u in values:
        if u.op in GroupOp.ALU and u.dtype is not dtypes.index:
            flops += volume(ranges_of(u)) * (2 if u.op is Ops.FMA else 1)
        elif u.op is Ops.REDUCE:
            flops += volume(ranges_of(u.src[0]) | frozenset(u.src[1:]))
    flops += sum(volume(frozenset(sig.loops)) for s in sig.stores if s.arg not in (None, "set"))
    reads: dict[tuple[int, bool], int] = {}
    stored = {s.src[0] for s in sig.stores}
    for u in sig.nodes:
        if u.op is not Ops.INDEX:
            continue
        lo, hi = bounds(u.src[1])
        touched = min(volume(ranges_of(u)), hi - lo + 1)
        key = (u.src[0].arg, u in stored)
        reads[key] = max(reads.get(key, 0), touched * u.src[0].dtype.itemsize)
    return flops, sum(reads.values())


@lru_cache(1024)
def estimate_at(ast: UOp, values: tuple[tuple[str, int], ...]) -> tuple[int, int]:
    """The same with these values of its variables."""
    known = {v: UOp.const(v.dtype, n) for v in signature(ast).variables for name, n in values if v.arg.name == name}
    return estimate(substitute(ast, known))


def kernel_name(ast: UOp) -> str:
    """`e_32_1024` (elementwise), `r_128_784` (with a reduction; its sizes last), then six digits of the key."""
    sig = signature(ast)
    reduced: dict[UOp, None] = {r: None for u in sig.reduces for r in u.src[1:]}
    sizes = [size_max(r) for r in (*sig.loops, *reduced)]
    return "_".join(["r" if sig.reduces else "e", *map(str, sizes), ast.key.hex()[:6]])


@lru_cache(1024)
def part_held(condition: UOp) -> float:
    """In what part of its ranges' iterations a condition on indices holds; 1 where they are too many to try, or data
    decides."""
    ranges = sorted(ranges_of(condition), key=lambda r: r.arg)
    if any(r.src[0].op is not Ops.CONST for r in ranges) or volume(frozenset(ranges)) > 256:
        return 1.0
    if not all(u.op in _EVALUATE for u in condition.toposort()):
        return 1.0
    cases = list(itertools.product(*(range(r.src[0].arg) for r in ranges)))
    return sum(evaluate_int(condition, dict(zip(ranges, at))) for at in cases) / len(cases)


def evaluate_int(expr: UOp, variables: Mapping[Any, int]) -> int:
    """The value of an integer expression or a condition; `variables`: of its variables by name, of its ranges."""
    if expr.op is Ops.CONST:
        return int(expr.arg)
    values: dict[UOp, int] = {}
    for u in expr.toposort():
        values[u] = _EVALUATE[u.op](u, variables, *(values[s] for s in u.src))
    return int(values[expr])


_EVALUATE: dict[Ops, Callable[..., int]] = {
    Ops.CONST: lambda u, v: u.arg,
    Ops.DEFINE_VAR: lambda u, v: v[u.arg.name],
    Ops.RANGE: lambda u, v, size: v[u],
    Ops.ADD: lambda u, v, a, b: a + b,
    Ops.SUB: lambda u, v, a, b: a - b,
    Ops.MUL: lambda u, v, a, b: a * b,
    Ops.NEG: lambda u, v, a: -a,
    Ops.IDIV: lambda u, v, a, b: a // b if b else 0,
    Ops.MOD: lambda u, v, a, b: a % b if b else 0,
    Ops.MAX: lambda u, v, a, b: max(a, b),
    Ops.CMPLT: lambda u, v, a, b: a < b,
    Ops.CMPEQ: lambda u, v, a, b: a == b,
    Ops.CMPNE: lambda u, v, a, b: a != b,
    Ops.AND: lambda u, v, a, b: a and b,
    Ops.WHERE: lambda u, v, c, a, b: a if c else b,
    Ops.CAST: lambda u, v, a: a,
}
