"""How a value lies on several devices: the three placements (PyTorch DTensor's words).

`Shard(axis, bounds)`: device i holds [bounds[i], bounds[i+1]) of dim `axis`. `Replicate()`: each device holds all of it.
`Partial(op)`: each device holds a term; the value is their sum (or max, product), and a collective is still due.
"""

from __future__ import annotations

from dataclasses import dataclass

from manygrad.tensor.uop import Ops


@dataclass(frozen=True)
class Shard:
    axis: int
    bounds: tuple[int, ...]


@dataclass(frozen=True)
class Replicate:
    pass


@dataclass(frozen=True)
class Partial:
    op: Ops


Placement = Shard | Replicate | Partial
REPLICATE = Replicate()


def even_bounds(size: int, n: int) -> tuple[int, ...]:
    """n parts of ceil(size / n), the last ones smaller or empty: 10 over 4 -> 0, 3, 6, 9, 10."""
    step = -(-size // n)
    return tuple(min(i * step, size) for i in range(n + 1))
