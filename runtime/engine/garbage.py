"""What garbage holds is not computed on some ranks and forgotten on others.

Values that nobody asks for are computed where what they read is overwritten. It may be garbage that holds them, an
object that refers to itself, which other ranks have collected already: when that happens is each rank's own affair,
what ranks compute together is not. So on several workers garbage is collected before something is computed in this
way, unless as many values of the same lines were no garbage before.
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
    """Values that are computed though nobody asks for them. `known`: (line, shape) of those that a collection of
    garbage left, all of one time together."""

    def __init__(self) -> None:
        self.known: set[tuple[str, ...]] = set()

    def may_be_garbage(self, tensors: Sequence[Tensor]) -> bool:
        """Whether some of these values may be, on several workers: no such ones were left by a collection before."""
        return bool(tensors) and current().world.size > 1 and _kinds(tensors) not in self.known

    def note_left(self, tensors: Sequence[Tensor]) -> None:
        """Garbage was collected, and left these."""
        if len(self.known) >= MOST:
            self.known.clear()
        self.known.add(_kinds(tensors))

    def left(self, tensors: list[Tensor]) -> list[Tensor]:
        """What is left of `tensors`, which nobody else may hold by then, when garbage was collected."""
        if not self.may_be_garbage(tensors):
            return tensors
        refs = [weakref.ref(t) for t in tensors]
        tensors.clear()
        gc.collect()
        found = [t for ref in refs if (t := ref()) is not None]
        self.note_left(found)
        return found


def _kinds(tensors: Sequence[Tensor]) -> tuple[str, ...]:
    return tuple(sorted(f"{line_of(t.uop)} {t.shape}" for t in tensors))
