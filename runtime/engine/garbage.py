"""What garbage holds is not computed on some ranks and forgotten on others.

Values that nobody asks for are computed where what they read is overwritten. It may be garbage that holds them, an
object that refers to itself, which other ranks have collected already: when that happens is each rank's own affair,
what ranks compute together is not. So on several workers garbage is collected before something is computed in this way
that was not before.
"""

from __future__ import annotations

import gc
import weakref
from collections.abc import Sequence

from manygrad.runtime.current import current
from manygrad.tensor.source import line_of
from manygrad.tensor.tensor import Tensor

MOST = 4096  # kinds of values that are remembered


class Unasked:
    """Values that were computed though nobody asked for them, as (line, shape) of those of one time."""

    def __init__(self) -> None:
        self.known: set[tuple[str, ...]] = set()

    def may_be_garbage(self, tensors: Sequence[Tensor]) -> bool:
        """Whether such values are to be computed for the first time, on several workers."""
        if not tensors or current().world.size == 1:
            return False
        kinds = tuple(sorted(f"{line_of(t.uop)} {t.shape}" for t in tensors))
        if kinds in self.known:
            return False
        if len(self.known) >= MOST:
            self.known.clear()
        self.known.add(kinds)
        return True

    def left(self, tensors: list[Tensor]) -> list[Tensor]:
        """What is left of `tensors`, which nobody else may hold by then, when garbage was collected."""
        if not self.may_be_garbage(tensors):
            return tensors
        refs = [weakref.ref(t) for t in tensors]
        tensors.clear()
        gc.collect()
        return [t for ref in refs if (t := ref()) is not None]
