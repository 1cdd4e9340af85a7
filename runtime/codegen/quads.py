"""Lowering of `tensorize`: neighbouring iterations of a reduction side by side, four bytes or two bfloat16, as one
int32 in each lane.

before:  ACC += CAST(a[k]) * CAST(b[k, lane])                      for each k
after:   DOT(ACC, SPLAT(a[k .. k+3]), [b[k .. k+3, lane] in each lane])      for each fourth k

What lies apart along the reduction is joined by shifts; where they lie side by side along it, but the lanes apart, they
are loaded in a square of int32s, which is transposed. What is packed is packed so.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from manygrad.runtime.codegen.affine import Position
from manygrad.runtime.codegen.dots import LANE_BYTES
from manygrad.runtime.codegen.evaluate import Evaluator
from manygrad.runtime.codegen.lowered import Inst, Low
from manygrad.tensor.dtype import dtypes
from manygrad.tensor.uop.ops import Ops
from manygrad.tensor.uop.ranges import ranges_of
from manygrad.tensor.uop.uop import UOp


class Quads(Evaluator):
    def quads(self, u: UOp, r: UOp, position: Position) -> Inst:
        """`u` at as many iterations of `r` as fill four bytes, from `position` on, 0 beyond the last one: int32, a
        scalar where all lanes agree."""
        if (packed := self.staged(u, position)) is not None:
            return packed
        key = (*self.key(u, position), LANE_BYTES)
        for block in reversed(self.blocks):
            if (known := block.values.get(key)) is not None:
                return known
        if self.lane is r or self.lane not in ranges_of(u):
            found = self.side_by_side(u, r, position, self.lanes if self.lane is r else 1)
        elif (square := self.transposed_quads(u, r, position)) is not None:
            found = square
        else:
            found = self.joined(u, r, position)
        self.blocks[found.depth].values[key] = found
        return found

    @contextmanager
    def lane_along(self, r: UOp, lanes: int) -> Iterator[None]:
        """Vectors along `r`, which is of a fixed size, for the moment."""
        before = (self.lane, self.lanes, self.along, self.analysis, self.ragged)
        self.use_lane(r, lanes, self.lane if self.along is not self.lane else None)
        self.ragged = {**self.ragged, r: None}  # (its tile need not fill them)
        yield
        self.lane, self.lanes, self.along, self.analysis, self.ragged = before

    def side_by_side(self, u: UOp, r: UOp, position: Position, count: int) -> Inst:
        """`count` quads from `position` on, one after the other along `r`."""
        with self.lane_along(r, self.nest.dots[r] * count):
            value = self.splat(self.value(u, position), self.lanes)
            if u.op is not Ops.LOAD and (mask := self.ragged_mask(position)) is not None:
                value = self.alu(Ops.WHERE, u.dtype, mask, value, self.const(0, u.dtype))
        return self.emit(Ops.BITCAST, dtypes.int32, (value,), None, count)

    def joined(self, u: UOp, r: UOp, position: Position) -> Inst:
        """Vectors of one iteration each, those of the later ones shifted."""
        at, count = position.get(r, 0), self.nest.dots[r]
        bits = dtypes.uint8 if u.dtype.itemsize == 1 else dtypes.uint16
        total: Inst | None = None
        for i in range(min(count, self.tile[r] - at)):
            part = self.alu(Ops.BITCAST, bits, self.value(u, {**position, r: at + i}))
            wide = self.alu(Ops.CAST, dtypes.int32, part)
            wide = self.alu(Ops.SHL, dtypes.int32, wide, self.const(8 * bits.itemsize * i, dtypes.int32)) if i else wide
            total = wide if total is None else self.alu(Ops.OR, dtypes.int32, total, wide)
        assert total is not None
        return total

    def transposed_quads(self, u: UOp, r: UOp, position: Position) -> Inst | None:
        """As `transposed_load`, of a square that is packed: for each lane as many quads as there are lanes,
        exchanged."""
        loads = [v for v in u.toposort() if v.op is Ops.LOAD and self.lane in ranges_of(v)]
        mask = self.ragged_mask(position)
        if (
            self.square is not r
            or (mask is not None and mask.op is not Low.FIRST)
            or any(self.step(v.src[0].src[1], r) != 1 for v in loads)
        ):
            return None
        lane, n, count = self.lane, self.lanes, self.nest.dots[r]
        span = count * n
        assert lane is not None
        at, first = position.get(lane, 0), position.get(r, 0) // span * span
        active = n if mask is None else mask.arg
        rows = [self.side_by_side(u, r, {**position, lane: at + i, r: first}, n) for i in range(active)]
        rows += [self.const(0, dtypes.int32, n)] * (n - active)
        columns = self.transpose(rows)
        for i, column in enumerate(columns):
            self.blocks[column.depth].values[(*self.key(u, {**position, r: first + count * i}), LANE_BYTES)] = column
        return columns[(position.get(r, 0) - first) // count]
