"""Stores of vectors across their order in memory: what lies side by side is of one lane and several positions of the
tile.

before:  for each pixel of a row: STORE 16 channels, a plane apart
after:   8 pixels x 16 channels are exchanged in registers; for each channel: STORE 8 pixels
"""

from __future__ import annotations

import itertools
from typing import NamedTuple

from manygrad.runtime.codegen.analysis.affine import Affine
from manygrad.runtime.codegen.cost import LEAST_TURNED
from manygrad.runtime.codegen.emit.emission import Emission
from manygrad.runtime.codegen.emit.memory import argument
from manygrad.runtime.codegen.emit.values import ragged_mask, sum_of_terms, value
from manygrad.runtime.codegen.lowered import Inst, Low
from manygrad.tensor.dtype import dtypes
from manygrad.tensor.uop.uop import UOp


class StoreRun(NamedTuple):
    """Tile positions that are stored side by side."""

    form: Affine  # of the first one's index
    positions: list[dict[UOp, int]]
    active: int  # lanes that are stored


def runs_of_stores(e: Emission) -> tuple[list[StoreRun], list[dict[UOp, int]]]:
    """The runs of the kernel's only STORE, and the positions that are in none."""
    positions = list(e.positions(frozenset(e.tiling.loops)))
    u = e.sig.stores[0]
    if (
        len(e.sig.stores) > 1
        or u.arg is not None
        or e.scope.vectorized is None
        or len(u.src[0].src) == 3
        or u.src[1].dtype.is_bool
    ):
        return [], positions
    found: dict[tuple[object, ...], list[tuple[Affine, dict[UOp, int]]]] = {}
    rest = []
    for p in positions:
        form, mask = e.scope.analysis.affine(u.src[0].src[1], p), ragged_mask(e, p)
        if form is None or form.table or form.stride in (0, 1) or (mask is not None and mask.op is not Low.FIRST):
            rest.append(p)
        else:
            found.setdefault((form.terms, form.stride, e.scope.lanes if mask is None else mask.arg), []).append(
                (form, p)
            )
    runs = []
    for (_, _, active), group in found.items():
        group.sort(key=lambda x: x[0].constant)
        for _, side in itertools.groupby(enumerate(group), key=lambda x: x[1][0].constant - x[0]):
            some = [x for _, x in side]
            while len(some) >= LEAST_TURNED:
                count = min(chunk(len(some)), e.scope.lanes)
                runs.append(StoreRun(some[0][0], [p for _, p in some[:count]], active))  # type: ignore[arg-type]
                some = some[count:]
            rest += [p for _, p in some]
    return runs, rest


def chunk(count: int) -> int:
    """So many of `count` at once that at most a quarter of a power of two is wasted."""
    above = 1 << (count - 1).bit_length()
    return count if 4 * count >= 3 * above else above // 2


def store_transposed(e: Emission, u: UOp, run: StoreRun) -> None:
    """Rounds of interleaving the first half of all vectors with the second: then each lane's values lie side by
    side."""
    n, count = e.scope.lanes, len(run.positions)
    width = 1 << (count - 1).bit_length()
    dtype = u.src[1].dtype
    rows = [e.splat(value(e, u.src[1], p), n) for p in run.positions]
    rows += [e.const(0, dtype, n)] * (width - count)
    orders = [tuple(i // 2 + (i % 2) * n for i in range(first, first + n)) for first in (0, n)]
    for _ in range(width.bit_length() - 1):
        pairs = zip(rows[: width // 2], rows[width // 2 :])
        rows = [e.emit(Low.SHUFFLE, dtype, pair, order, n) for pair in pairs for order in orders]
    to, offset = argument(e, u.src[0].src[0]), sum_of_terms(e, run.form)
    guard = () if count == width else (e.emit(Low.FIRST, dtypes.bool, (), count, width),)
    for lane, part in enumerate(itertools.islice(parts(e, rows, width), run.active)):
        constant = run.form.constant + run.form.stride * lane
        e.emit(Low.STORE, dtypes.void, (to, offset, part, *guard), constant, width, here=True)


def parts(e: Emission, rows: list[Inst], width: int) -> list[Inst]:
    """The vectors cut into parts of `width` lanes, in order."""
    while rows[0].lanes > width:
        n = rows[0].lanes // 2
        rows = [e.emit(Low.HALVES, x.dtype, (x,), i, n) for x in rows for i in (0, 1)]
    return rows
