"""Rotary positions (Su et al., RoFormer, arXiv 2104.09864) and how they are stretched for longer contexts.

Dim i of a head's first half and dim i of its second one are turned together by the angle position · frequency[i]; or,
where a file's rows are so (`neighbours`), dims 2i and 2i + 1.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from manygrad import Tensor


@dataclass(frozen=True)
class Rope:
    head_dim: int
    base: float = 10000.0
    kind: str = "none"  # or linear, llama3, yarn
    factor: float = 1.0  # how many times longer the context became
    original: int = 0  # tokens before that
    low: float = 1.0  # llama3: turns in the original context below which a frequency is divided by `factor`,
    high: float = 4.0  # and from which on it stays
    fast: float = 32.0  # yarn: the same two limits
    slow: float = 1.0
    attention: float | None = None  # yarn: what both queries and keys are scaled by
    divisors: tuple[float, ...] | None = None  # of the frequencies, as a GGUF file gives them

    def frequencies(self) -> np.ndarray:
        """(head_dim / 2,) radians a position."""
        plain = self.base ** -(np.arange(0, self.head_dim, 2) / self.head_dim)
        if self.divisors is not None:
            return plain / np.asarray(self.divisors)
        if self.kind == "linear":
            return plain / self.factor
        if self.kind == "llama3":
            turns = self.original * plain / (2 * math.pi)
            kept = np.clip((turns - self.low) / (self.high - self.low), 0, 1)
        elif self.kind == "yarn":  # Peng et al., YaRN, arXiv 2309.00071
            first, last = (self._dim_of(turns) for turns in (self.fast, self.slow))
            first, last = max(math.floor(first), 0), min(math.ceil(last), self.head_dim - 1)
            kept = 1 - np.clip((np.arange(self.head_dim // 2) - first) / max(last - first, 1e-3), 0, 1)
        else:
            return plain
        return plain * kept + plain / self.factor * (1 - kept)

    def _dim_of(self, turns: float) -> float:
        """Which pair of dims turns so often in the original context."""
        return self.head_dim * math.log(self.original / (turns * 2 * math.pi)) / (2 * math.log(self.base))

    def table(self, positions: int) -> Tensor:
        """(2, positions, head_dim / 2): cosines, sines."""
        angles = np.arange(positions)[:, None] * self.frequencies()
        stretched = self.kind == "yarn" and self.factor > 1
        size = (0.1 * math.log(self.factor) + 1 if self.attention is None else self.attention) if stretched else 1.0
        return Tensor((np.stack([np.cos(angles), np.sin(angles)]) * size).astype(np.float32))


def rotate(x: Tensor, table: Tensor, neighbours: bool = False) -> Tensor:
    """x (..., t, head_dim) by the angles of its t positions, table (2, t, head_dim / 2). Of neighbours, too, the first
    ones stand in the first half of what comes out."""
    if neighbours:
        pairs = x.unflatten(-1, (x.shape[-1] // 2, 2))
        a, b = pairs[..., 0], pairs[..., 1]
    else:
        a, b = x.chunk(2, dim=-1)
    cos, sin = table[0], table[1]
    return (a * cos - b * sin).cat(b * cos + a * sin, dim=-1)
