from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Self

from manygrad.runtime.codegen.analysis.describe import Signature
from manygrad.runtime.codegen.kernel.float32_parts import is_in_parts
from manygrad.runtime.codegen.opts.nest import LoopNest
from manygrad.runtime.codegen.opts.opt import Neighbourhood, Opt, Opts, RangeOpt
from manygrad.tensor.uop.uop import UOp


@dataclass(frozen=True, repr=False)
class Float32Parts(RangeOpt):
    """The products of float32 along the range are made as sums of products of parts, of bfloat16
    (`runtime/codegen/kernel/float32_parts.py`), by a matrix unit.

    The kernel's one REDUCE, over the range alone, and a `matrix` along it.

    before:  for k: s += a[k] * b[k]
    after:   for k: s += a2[k] * b0[k] + a1[k] * b1[k] + a0[k] * b2[k] + ..         # float32_parts(k)
    """

    kind = "float32_parts"
    changes_sums = True

    def apply(self, nest: LoopNest, ranges: Mapping[int, UOp]) -> LoopNest:
        return replace(nest, in_parts=self.reduced(self.axis, ranges))

    @classmethod
    def illegal(cls, sig: Signature, mine: Sequence[Self], nest: LoopNest) -> str | None:
        over = [u for u in sig.reduces if is_in_parts(u)]
        if mine and [u.src[1:] for u in over] != [(nest.in_parts,)]:
            return f"{mine[0]}: no product of float32 over the range that this machine multiplies in parts"
        if over and (nest.in_parts is None or nest.in_parts is not nest.matrix):
            return "products of float32 in parts are of a matrix unit alone, and said to be so"
        return None

    @classmethod
    def of(cls, nest: LoopNest) -> list[Opt]:
        return [] if nest.in_parts is None else [Float32Parts(nest.in_parts.arg.id)]

    @classmethod
    def neighbours(cls, search: Neighbourhood) -> Iterator[Opts]:
        return iter(())  # (the kernel is rewritten for it, before a search)
