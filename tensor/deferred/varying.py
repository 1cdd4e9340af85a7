"""What is another one in each step of a loop.

A number that is an operand becomes an input of the trace after a few values: a tensor in memory, so that no number is
compiled. For another one there is one line that says where it is, and what to do.
"""

from __future__ import annotations

import warnings
from typing import Any

import numpy as np

from manygrad.tensor.deferred.tree import Key, TraceNode
from manygrad.tensor.tensor import Tensor

MOST_NUMBERS = 3  # that an operand may be; then it is an input
MANY = 16  # calls at one place, each another one and made once only: then one line says so
MOST_PLACES = 256  # below a node of which new calls are counted: code may be made anew in each step
# their number is of the tensor's type, and gives the same bits from memory
OPERATORS = frozenset(
    "__add__ __radd__ __sub__ __rsub__ __mul__ __rmul__ __truediv__ __rtruediv__ "
    "__iadd__ __isub__ __imul__ __itruediv__ add sub mul div true_divide".split()
)
TYPES = frozenset({"float64", "float32", "float16"})


def has_new_number(node: TraceNode, key: Key, args: tuple[Any, ...]) -> bool:
    """Whether a call that is new below `node` has been there with a few other numbers, and all else alike."""
    if key[0].__name__ not in OPERATORS or len(args) != 2 or key[-2] not in (float, int):
        return False
    return sum(k[:-2] == key[:-2] for k in node.children) >= MOST_NUMBERS


def with_input(args: tuple[Any, ...]) -> tuple[Any, ...]:
    """The arguments of a call whose number is another one each time, that number as a stored tensor."""
    t, x = args if len(args) == 2 else (None, None)
    if not isinstance(t, Tensor) or type(x) not in (int, float):
        return args
    if t.dtype.name not in TYPES:
        return args
    with np.errstate(over="ignore"):  # (as a constant it is infinite there, too)
        number = Tensor(np.array(x, t.dtype.name))
    return t, number if number.device == t.device else number.to(t.device)


def tell(node: TraceNode, key: Key, line: str) -> None:
    """One line, once, where a place below `node` calls for something else each time. `key`: of a new call there."""
    place = key[:3]
    count, last = node.new.get(place, (0, key))
    if len(node.new) > MOST_PLACES:
        node.new.clear()
    node.new[place] = count + 1, key
    if count < MANY or place in node.told:
        return
    i = next((i for i, (x, y) in enumerate(zip(last, key)) if x != y), 0)
    if last[i - 1] not in (int, float):  # (shapes and parameters differ in loops that load a model, too)
        return
    node.told.add(place)
    warnings.warn(
        f"{line}: `{key[0].__name__}` has another number each time ({last[i]}, {key[i]}), so this loop is built anew "
        "in each step from here on instead of being replayed: pass it as a Tensor (docs/fast_loops.md)",
        stacklevel=5,
    )


__all__ = ["has_new_number", "tell", "with_input"]
