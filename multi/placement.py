"""How a value lies on several devices: the three placements (PyTorch DTensor's words).

`Shard(axis, bounds)`: device i holds [bounds[i], bounds[i+1]) of dim `axis`.
`Replicate()`: each device holds all of it.
`Partial(op, wire)`: each device holds a term; the value is their sum (or max, product), and a collective is still due,
to which terms and result travel in the type `wire`, if one is named.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from manygrad.tensor.environment import SUM_BLOCKS
from manygrad.tensor.uop import Ops, even_bounds


@dataclass(frozen=True)
class Shard:
    axis: int
    bounds: tuple[int, ...]
    # where the dim is cut into the blocks that sums are taken in; (): unknown
    blocks: tuple[int, ...] = field(default=(), compare=False)

    @staticmethod
    def even(axis: int, size: int, devices: int) -> Shard:
        """As `Tensor.shard` cuts."""
        return Shard.of(axis, even_bounds(size, devices))

    @staticmethod
    def of(axis: int, bounds: tuple[int, ...]) -> Shard:
        """Cut at `bounds`; if these are even, sums are taken in SUM_BLOCKS even blocks,
        whatever the number of devices."""
        known = SUM_BLOCKS.value % (len(bounds) - 1) == 0 and bounds == even_bounds(bounds[-1], len(bounds) - 1)
        return Shard(axis, bounds, even_bounds(bounds[-1], SUM_BLOCKS.value) if known else ())


@dataclass(frozen=True)
class Replicate:
    pass


@dataclass(frozen=True)
class Partial:
    op: Ops
    wire: str | None = None


Placement = Shard | Replicate | Partial
REPLICATE = Replicate()
