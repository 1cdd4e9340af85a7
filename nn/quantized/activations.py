"""Inputs of a product in int8: each 32 elements of a row with a scale, their largest magnitude at 127.

x ≈ scale · number        |error| <= scale / 2 = largest magnitude of the 32 / 254
"""

from __future__ import annotations

from typing import NamedTuple

from manygrad.tensor.dtype import dtypes
from manygrad.tensor.tensor import Tensor

GROUP = 32  # elements that share a scale
MOST = 127


class Rounded(NamedTuple):
    numbers: Tensor  # (count, groups, 32) int8
    scales: Tensor  # (count, groups) float32
    integers: Tensor  # the numbers as float32, not stored

    def sums(self, pieces: int) -> Tensor:
        """Sums of the numbers, each group's in so many pieces: (count, groups, pieces) int32."""
        count, groups, size = self.integers.shape
        x = self.integers if pieces == 1 else self.integers.reshape(count, groups, pieces, size // pieces)
        return x.sum(-1).cast(dtypes.int32).contiguous()


def rounded(x: Tensor) -> Rounded:
    """(count, columns) float32 -> int8. What several products read is made once."""
    count, columns = x.shape
    groups = x.reshape(count, columns // GROUP, GROUP)
    largest = groups.abs().amax(-1, keepdim=True)
    by = (largest == 0).where(0, MOST / largest)
    integers = (groups * by).round()
    return Rounded(integers.cast(dtypes.int8).contiguous(), (largest / MOST).squeeze(-1).contiguous(), integers)
