"""The KV cache of a layer: the form in which it keeps keys and values, and how they are written and read.

It is indexed as (2, pages, kv_heads, page, head_dim): keys, values. Which pages a text has says `pages.py`, or it
has one alone. As `int8` each row of head_dim elements has a scale, its largest element / 127: a quarter of the memory,
an error of 0.4 % of that element at most.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from manygrad import Tensor, nn

KINDS = ("float32", "bfloat16", "float16", "int8")
LARGEST = 127
ROUNDED_ROWS = 32  # from which on a product takes less time of inputs that are rounded to the other's type


class KVCache(nn.Module):
    def __init__(self, pages: int, heads: int, page: int, size: int, kind: str = "float32", rounds: bool = False):
        self.page, self.rounds = page, rounds  # tokens; whether the model rounds what it multiplies
        self.values = nn.Buffer(Tensor.zeros(2, pages, heads, page, size, dtype=kind).contiguous(), persistent=False)
        self.scales = None
        if kind == "int8":
            self.scales = nn.Buffer(Tensor.zeros(2, pages, heads, page, 1).contiguous(), persistent=False)

    def rounded(self, x: Tensor) -> Tensor:
        """The other operand of a product with what was read, float32, rounded to its type where the model rounds
        products' inputs and x has many rows."""
        rounds = self.rounds and self.values.dtype.is_half and x.shape[-2] >= ROUNDED_ROWS
        return x.cast(self.values.dtype).contiguous().cast(x.dtype) if rounds else x

    def write(self, where: tuple[Any, ...], found: Tensor) -> None:
        """`found`, float32, to the elements at `where`, which leaves whole rows."""
        if self.scales is None:
            self.values[where] = found.cast(self.values.dtype)
            return
        scale = found.abs().amax(-1, keepdim=True) / LARGEST
        self.values[where] = (found / (scale == 0).where(1, scale)).round().cast("int8")
        self.scales[where] = scale

    def read(self, where: tuple[Any, ...], arranged: Callable[[Tensor], Tensor] = lambda x: x) -> Tensor:
        """The values that were written there, as float32, `arranged` before it becomes that."""
        found = arranged(self.values[where]).float()
        return found if self.scales is None else found * arranged(self.scales[where])
