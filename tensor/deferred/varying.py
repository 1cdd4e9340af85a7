"""What is another one in each step of a loop.

A number that is an operand, also one that the program has made a Tensor of, becomes an input of the trace after a few
values: a tensor in memory, so that no number is compiled. For another one there is one line that says where it is, and
what to do.

    t = Tensor.full((n,), step)      a number in all places, on no device: it is marked, and so is what views and casts
    model(x, t)                      make of it, until a call reads it beside what lies on a device, and takes an input
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import numpy as np

from manygrad.tensor.deferred.arguments import is_constant
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
FILLING = frozenset({"full"})  # (what it gives is one number in all places)
# what these make of such a tensor is one, too
STAYING = frozenset(
    "__getitem__ reshape view unsqueeze squeeze expand flatten cast to float double half bfloat16 int long".split()
)
# whose whole numbers are places, with the same result from memory
PLACING = frozenset("embedding __getitem__ gather index_select take".split())
TYPES = frozenset({"float64", "float32", "float16"})
WHOLE = frozenset({"int64", "int32"})
Call = tuple[Callable[..., Any], tuple[Any, ...]]


def takes_numbers(key: Key) -> bool:
    """Whether it is a call whose numbers may be inputs, or one that makes a tensor of one number."""
    name = getattr(key[0], "__name__", "") if key else ""
    return name in TAKING | FILLING or (name in STAYING and "c" in key)


def numbers_of(key: Key) -> tuple[Any, ...]:
    """The numbers in a call, and its tensors of one number."""
    return tuple([x for kind, x in pairwise(key) if kind is int or kind is float or kind == "c"])


def has_new_number(node: TraceNode, key: Key) -> bool:
    """Whether a call that is new below `node` has been there with a few other numbers, and all else alike."""
    if not takes_numbers(key):
        return False
    count, last = 0, len(key) - 1
    for other in node.children:
        if len(other) == len(key):
            differing = [i for i, (x, y) in enumerate(zip(key, other)) if x is not y and x != y]
            is_last = key[-2] in (float, int) and min(differing, default=0) >= last - 1
            kind = key[differing[0] - 1] if len(differing) == 1 else None
            count += is_last or kind == "c" or (key[0].__name__ in FILLING and kind in (float, int))
    return count >= MOST_NUMBERS - 1


def with_input(fn: Callable[..., Any], args: tuple[Any, ...]) -> Call:
    """A call that has another number each time, that number as a stored tensor."""
    tensors = [x for x in args if isinstance(x, Tensor) and not _is_number(x)]
    if not tensors or not is_placed(tensors[0]):  # (what lies on no device goes with any other)
        return fn, args
    name, given = fn.__name__, list(args)
    for i, x in enumerate(args):
        if name in TAKING | PLACING and _is_number(x) and not (i == 0 and name.startswith("__i")):  # (written to)
            given[i] = _input(x, tensors[0].device)
    # (what a condition chooses from has the type, and not the condition)
    of_type = next((x for x in args[name == "_where" :] if any(x is t for t in tensors)), None)
    takes_last = name in TAKING and len(args) == (3 if name in CHOICES else 2)
    if takes_last and of_type is not None and is_placed(of_type) and type(x := args[-1]) in (int, float):
        dtype = of_type.dtype
        if dtype.name in TYPES or (type(x) is int and dtype.name in WHOLE and "div" not in name):
            given[-1] = _stored(x, dtype, of_type.device)
    return fn, tuple(given)


def mark_varying(x: Tensor) -> Tensor:
    """`x` is one number in all places, which is another one each time."""
    if _is_constant(x):
        x.__dict__["_varies"] = True
    return x


def has_varying(args: tuple[Any, ...]) -> bool:
    return any(type(x) is Tensor and "_varies" in x.__dict__ for x in args)


def stays_varying(fn: Callable[..., Any], args: tuple[Any, ...]) -> bool:
    """Whether what the call gives is a number in all places, as its first argument is, which no other tensor meets."""
    tensors = [x for x in args if isinstance(x, Tensor)]
    return fn.__name__ in STAYING and len(tensors) == 1 and tensors[0] is args[0] and _is_constant(args[0])


def _is_constant(x: Any) -> bool:
    return type(x) is Tensor and not x._requires_grad and is_constant(x.uop)


def _is_number(x: Any) -> bool:
    """A tensor of one number that may be an input; one in many places only where it is marked."""
    if not (_is_constant(x) and x.dtype.name in TYPES | WHOLE):
        return False
    return x.uop.op is Ops.CONST or "_varies" in x.__dict__


def _input(x: Tensor, device: Any) -> Tensor:
    value = None
    for u in x.uop.toposort():  # (the number, then its views and casts, of which each rounds)
        value = u.dtype.const(u.arg if value is None else value)
    number = _stored(value, x.dtype, device)  # type: ignore[arg-type]
    return number if not x.shape else number.reshape(*[1] * x.ndim).expand(*x.shape)


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


__all__ = [
    "FILLING",
    "has_new_number",
    "has_varying",
    "mark_varying",
    "numbers_of",
    "stays_varying",
    "takes_numbers",
    "tell",
    "with_input",
]
