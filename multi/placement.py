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
    # the size of the dim when it was cut as `Tensor.shard` cuts, of which each element has become as many as fit since;
    # 0: it was cut otherwise
    origin: int = field(default=0, compare=False)

    @staticmethod
    def even(axis: int, size: int, devices: int) -> Shard:
        """As `Tensor.shard` cuts."""
        return Shard.of(axis, even_bounds(size, devices))

    @staticmethod
    def of(axis: int, bounds: tuple[int, ...]) -> Shard:
        """Cut at `bounds`."""
        return Shard(axis, bounds, bounds[-1] if bounds == even_bounds(bounds[-1], len(bounds) - 1) else 0)

    @property
    def blocks(self) -> tuple[int, ...]:
        """Where the dim is cut into the blocks that sums are taken in: SUM_BLOCKS even ones of what was cut, whatever
        the number of devices; (): in none."""
        total, count = self.bounds[-1], SUM_BLOCKS.value
        if not self.origin or count % (len(self.bounds) - 1):
            return ()
        cuts = [b * total for b in even_bounds(self.origin, count)]
        return () if any(c % self.origin for c in cuts) else tuple([c // self.origin for c in cuts])


@dataclass(frozen=True)
class Replicate:
    pass


@dataclass(frozen=True)
class Partial:
    op: Ops
    wire: str | None = None


Placement = Shard | Replicate | Partial
REPLICATE = Replicate()
