"""Products of a matrix unit, where the machine has one."""

from __future__ import annotations

from manygrad.runtime.codegen import cost
from manygrad.runtime.codegen.analysis.describe import is_fixed, size_factor, size_max
from manygrad.runtime.codegen.choose.facts import Facts, is_masked
from manygrad.runtime.codegen.choose.operands import can_pack
from manygrad.runtime.codegen.choose.packing import ProductTile, can_pack_rows, loops_stored_closer
from manygrad.runtime.codegen.choose.reductions import Split
from manygrad.runtime.codegen.kernel.dots import is_dot, is_total, row_step, step_of
from manygrad.runtime.codegen.opts import Float32Parts, Matrix, Opts, Tensorize, Tile, Unroll
from manygrad.runtime.codegen.opts.opt import without
from manygrad.runtime.codegen.target import LANE_BYTES, SQUARES
from manygrad.tensor.uop.ranges import ranges_of
from manygrad.tensor.uop.uop import UOp


def multiply_in_parts(facts: Facts, opts: Opts) -> Opts:
    """A product of float32 is multiplied as parts of bfloat16, where a matrix unit takes it so."""
    (u,) = facts.sig.reduces
    return (*opts, Float32Parts(u.src[1].arg.id))


def vectorized_for_matrices(facts: Facts, split: Split) -> UOp | None:
    """The loop of a product with vectors along which a matrix unit reads the other factor as it lies, along the
    reduction; if there is none, or it may be either, that along which results are stored. Not one of those that are
    accumulated in lanes of their own."""
    main = facts.main
    if main is None or main in split or not multiplies_matrices(facts, main):
        return None
    taken = {r for v in split for r in ranges_of(v)}
    found = [r for r in facts.sig.loops if size_max(r) > 1 and r in ranges_of(main) and r not in taken]
    others = {r: [u for u in facts.loads_of[main] if r not in ranges_of(u)] for r in found}
    single = [r for r in sorted(found, key=facts.stored_along, reverse=True) if len(others[r]) == 1]
    return next((r for r in single if step_of(others[r][0], main.src[-1]) == 1), next(iter(single), None))


def fits_matrix_unit(facts: Facts, opts: Opts, p: ProductTile) -> bool:
    """Whether a product's rows lie as a matrix unit reads them, or can be packed so, and it can take the reduction
    evenly. Not by how many rows there are: a batch of any size, however it is cut, is added up in the same order."""
    u, k = p.main, p.main.src[-1]
    if not multiplies_matrices(facts, u) or is_masked(p.rows) or is_masked(p.columns) or loops_stored_closer(facts, p):
        return False
    if len(p.row_loops) > 1 or terms_at_once(u) * cost.MATRIX_SHARE < u.src[0].arg.most_terms:
        return False
    in_parts = u.src[0].arg.in_parts
    if step_of(p.rows, k) == 1 and not in_parts:
        return p.rows in u.src[0].src and all(row_step(p.rows, r) is not None for r in p.row_loops)
    turned = all((step_of(p.rows, r) == 1 or in_parts) and is_fixed(r) for r in p.row_loops)
    return bool(p.row_loops) and turned and can_pack_rows(facts, opts, p)


def multiplies_matrices(facts: Facts, u: UOp) -> bool:
    """Whether the machine has a matrix unit for the products that a REDUCE adds up over a range. Its vectors are the
    kernel's: not where something wider is computed."""
    unit = is_dot(u.src[0]) and u.src[0].arg.rows > 1 and not is_total(u)
    unit = unit and facts.lanes * LANE_BYTES == u.src[0].arg.vector_bytes
    alone = [v for v in facts.sig.reduces if not is_total(v)] == [u]
    return unit and alone and len(u.src) == 2


def single_row(facts: Facts, opts: Opts, main: UOp, vectorized: UOp) -> ProductTile | None:
    """A product of one row, as of a batch of one."""
    if not multiplies_matrices(facts, main):
        return None
    columns = [u for u in facts.loads_of[main] if vectorized in ranges_of(u)]
    rows = [u for u in facts.loads_of[main] if vectorized not in ranges_of(u)]
    if len(columns) != 1 or len(rows) != 1 or not can_pack(facts, opts, columns[0], main, vectorized):
        return None
    outer = [r for r in facts.sig.loops if r in ranges_of(main) and r is not vectorized]
    after = [r for r in facts.sig.loops if r not in ranges_of(main)]
    return ProductTile(main, vectorized, [], columns[0], rows[0], [], outer, after)


def use_matrix_unit(facts: Facts, opts: Opts, p: ProductTile) -> Opts:
    """Squares of rows by vectors of sums, two by two, so that each that is loaded is multiplied twice; as much of the
    reduction as an instruction adds up."""
    k, high, wide = p.main.src[-1], SQUARES * p.main.src[0].arg.rows, SQUARES * facts.lanes
    columns = (Tile(p.vectorized.arg.id, wide),) if size_max(p.vectorized) > facts.lanes else ()
    each = p.main.src[0].arg.rows if p.main.src[0].arg.in_parts else 1  # (sums that rest are whole squares)
    rows = [Tile(r.arg.id, min(high, -(-size_max(r) // each) * each)) for r in p.row_loops]
    terms = Unroll(k.arg.id, terms_at_once(p.main)), Tensorize(k.arg.id, p.main.src[0].arg.terms), Matrix(k.arg.id)
    return (*without(opts, Tile, Tensorize), *columns, *rows, *terms)


def terms_at_once(u: UOp) -> int:
    """Iterations of the reduction that an instruction adds up: the most that cut it evenly."""
    size, dot = size_factor(u.src[-1]), u.src[0].arg
    return max((n for n in range(dot.terms, dot.most_terms + 1, dot.terms) if size % n == 0), default=0)
