"""What a compiled kernel is called with: so many buffers, and variables within their bounds."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

from manygrad.runtime.codegen.analysis.describe import evaluate_int, signature
from manygrad.runtime.codegen.opts.nest import LoopNest
from manygrad.tensor.uop.uop import UOp


@dataclass(frozen=True)
class KernelArguments:
    """`counts`: (size, step) of the loops that make up the parallel loop."""

    kernel: str
    slots: int
    names: tuple[str, ...]
    bounds: tuple[tuple[int, int], ...]
    counts: tuple[tuple[UOp, int], ...]

    @classmethod
    def of(cls, kernel: str, ast: UOp, slots: int, nest: LoopNest) -> Self:
        variables = [v.arg for v in signature(ast).variables]
        bounds = tuple((v.min, v.max) for v in variables)
        return cls(kernel, slots, tuple(v.name for v in variables), bounds, nest.counts)

    def known(self, buffers: int, vars: Sequence[int]) -> dict[str, int]:
        """The variables by name. Raises ValueError where one is out of bounds."""
        assert buffers >= self.slots and len(vars) == len(self.names), f"{self}: not {buffers} buffers and {vars}"
        for name, value, (lo, hi) in zip(self.names, vars, self.bounds):
            if not lo <= value <= hi:
                raise ValueError(f"{self.kernel}: variable {name} is {value}, outside of its bounds {lo}..{hi}")
        return dict(zip(self.names, vars))

    def steps(self, known: dict[str, int]) -> list[int]:
        """Indices of each of these loops; 0 where a variable leaves nothing of one."""
        return [max(0, -(-evaluate_int(n, known) // step)) for n, step in self.counts]

    def total(self, known: dict[str, int]) -> int:
        return math.prod(self.steps(known))
