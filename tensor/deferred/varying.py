"""What is another one in each step of a loop.

A number that is an operand, also one that the program has made a Tensor of, becomes an input of the trace after a few
values: a tensor in memory, so that no number is compiled. For another one there is one line that says where it is, and
what to do.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import numpy as np

from manygrad.tensor.deferred.tensors import is_placed
from manygrad.tensor.deferred.tree import Key, TraceNode
from manygrad.tensor.dtype import DType
from manygrad.tensor.tensor import Tensor
from manygrad.tensor.uop import Ops

MOST_NUMBERS = 3  # at one place; then they are inputs
MANY = 16  # calls at one place, each another one and made once only: then one line says so
MOST_PLACES = 256  # below a node of which new calls are counted: code may be made anew in each step
# their number is of the tensor's type, and gives the same bits from memory
OPERATORS = frozenset(
    "__add__ __radd__ __sub__ __rsub__ __mul__ __rmul__ __truediv__ __rtruediv__ "
    "__iadd__ __isub__ __imul__ __itruediv__ add sub mul div true_divide".split()
)
CHOICES = frozenset({"_where", "masked_fill"})  # (which take a value as it is)
TAKING = OPERATORS | CHOICES
TYPES = frozenset({"float64", "float32", "float16"})
WHOLE = frozenset({"int64", "int32"})
Call = tuple[Callable[..., Any], tuple[Any, ...]]


def takes_numbers(key: Key) -> bool:
    """Whether it is a call whose numbers may be inputs."""
    return bool(key) and getattr(key[0], "__name__", "") in TAKING


def has_new_number(node: TraceNode, key: Key) -> bool:
    """Whether a call that is new below `node` has been there with a few other numbers, and all else alike."""
    if not takes_numbers(key):
        return False
    count, last = 0, len(key) - 1
    for other in node.children:
        if len(other) == len(key):
            differing = [i for i, (x, y) in enumerate(zip(key, other)) if x is not y and x != y]
            is_last = key[-2] in (float, int) and min(differing, default=0) >= last - 1
            count += is_last or (len(differing) == 1 and key[differing[0] - 1] == "c")
    return count >= MOST_NUMBERS - 1


def with_input(fn: Callable[..., Any], args: tuple[Any, ...]) -> Call:
    """A call that has another number each time, that number as a stored tensor."""
    tensors = [x for x in args if isinstance(x, Tensor) and not _is_number(x)]
    if not tensors or not is_placed(tensors[0]):  # (what lies on no device goes with any other)
        return fn, args
    given = [x if not _is_number(x) else _stored(x.uop.arg, x.dtype, tensors[0].device) for x in args]
    # (what a condition chooses from has the type, and not the condition)
    of_type = next((x for x in args[fn.__name__ == "_where" :] if any(x is t for t in tensors)), None)
    takes_last = len(args) == (3 if fn.__name__ in CHOICES else 2)
    if takes_last and of_type is not None and is_placed(of_type) and type(x := args[-1]) in (int, float):
        name = of_type.dtype.name
        if name in TYPES or (type(x) is int and name in WHOLE and "div" not in fn.__name__):
            given[-1] = _stored(x, of_type.dtype, of_type.device)
    return fn, tuple(given)


def _is_number(x: Any) -> bool:
    return type(x) is Tensor and x.uop.op is Ops.CONST and not x._requires_grad and x.dtype.name in TYPES | WHOLE


def _stored(x: float, dtype: DType, device: Any) -> Tensor:
    with np.errstate(over="ignore"):  # (as a constant it is infinite there, too)
        number = Tensor(np.array(dtype.fits(x), dtype.name))
    return number if number.device == device else number.to(device)


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


__all__ = ["has_new_number", "takes_numbers", "tell", "with_input"]
