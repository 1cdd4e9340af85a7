"""The room for keys and values of a layer: what it keeps them in, and how they are put into it and read again.

A room is indexed as (2, texts, kv_heads, length, head_dim): keys, values. As `int8` each row of head_dim elements has a
scale, its largest element / 127: a quarter of the memory, an error of 0.4 % of that element at most.
"""

from __future__ import annotations

from typing import Any

from manygrad import Tensor, nn

KINDS = ("float32", "bfloat16", "float16", "int8")
LARGEST = 127


class Room(nn.Module):
    def __init__(self, texts: int, heads: int, length: int, size: int, kind: str = "float32"):
        self.length = length
        self.values = nn.Buffer(Tensor.zeros(2, texts, heads, length, size, dtype=kind).contiguous(), persistent=False)
        self.scales = None
        if kind == "int8":
            self.scales = nn.Buffer(Tensor.zeros(2, texts, heads, length, 1).contiguous(), persistent=False)

    def write(self, where: tuple[Any, ...], found: Tensor) -> None:
        """`found`, float32, to the elements at `where`, which leaves whole rows."""
        if self.scales is None:
            self.values[where] = found.cast(self.values.dtype)
            return
        scale = found.abs().amax(-1, keepdim=True) / LARGEST
        self.values[where] = (found / (scale == 0).where(1, scale)).round().cast("int8")
        self.scales[where] = scale

    def read(self, where: tuple[Any, ...]) -> Tensor:
        """What was written there, as float32."""
        found = self.values[where].float()
        return found if self.scales is None else found * self.scales[where]

    def move(self, source: Any, target: Any, end: Any) -> None:
        """The first `end` tokens of a text to the place of another one, as they are."""
        for kept in (self.values, self.scales):
            if kept is not None:
                kept[:, target : target + 1, :, :end] = kept[:, source : source + 1, :, :end]
