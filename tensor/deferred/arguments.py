"""What a key says of a call's arguments, and what is kept of them to make the call later."""

from __future__ import annotations

from typing import Any

from manygrad.tensor.deferred.tensors import DeferredTensor
from manygrad.tensor.dtype import DType
from manygrad.tensor.engine import engine
from manygrad.tensor.stored import HISTORY
from manygrad.tensor.tensor import Tensor
from manygrad.tensor.uop import Ops, UOp

LONGEST = 1024  # list of numbers in a key
CONSTANTS = frozenset({bool, int, str, type(None), type(Ellipsis), DType, type})
_LAZY = frozenset({Ops.CAST, Ops.DETACH, Ops.RESHAPE})  # of a buffer: an external value that is stored first
_SPREAD = frozenset({Ops.CAST, Ops.DETACH, Ops.RESHAPE, Ops.EXPAND})  # of a constant


class UnknownArgument(Exception):
    """An argument of which it cannot be told whether it is the same again."""


class Value:
    """In place of a deferred tensor: the value with this number."""

    __slots__ = ("number",)

    def __init__(self, number: int) -> None:
        self.number = number


FIRST = tuple(map(Value, range(256)))  # (most traces have no more)


class External:
    """The tensors of a trace that were there before it, each with its node when the trace met it."""

    __slots__ = ("is_state", "nodes", "numbers", "tensors")

    def __init__(self) -> None:
        self.numbers: dict[int, int] = {}  # by the id of the tensor
        self.tensors: list[Tensor] = []
        self.nodes: list[UOp] = []
        self.is_state: list[bool] = []

    def told(self, x: Tensor, sig: list[Any]) -> Tensor:
        """Appends what a key says of `x`."""
        number = self.numbers.get(id(x))
        if number is not None:
            sig += ("e", number)
            return x
        u = x.uop
        trained = bool(x._requires_grad)
        state = trained or "_is_state" in x.__dict__
        if state:
            where = u.device
            if where and (type(where) is tuple or "@" in where) and not engine().follows(where):
                raise UnknownArgument("a parameter is with a part of the workers")
            sig += ("s", id(x), id(u), trained)
        elif u.op is Ops.CONST or is_constant(u):
            sig += ("c", u, x._device)
            return x
        else:
            sig += ("i", *_kind(u))
        self.numbers[id(x)] = len(self.tensors)
        self.tensors.append(x)
        self.nodes.append(u)
        self.is_state.append(state)
        return x

    def inputs(self) -> list[Tensor]:
        """The tensors that may be others each time."""
        return [t for t, state in zip(self.tensors, self.is_state) if not state]

    def state(self) -> list[Tensor]:
        """The tensors that are the same ones each time."""
        return [t for t, state in zip(self.tensors, self.is_state) if state]

    def written(self) -> tuple[int, ...]:
        """Numbers of the tensors that calls have written to, which are state from now on; -1 where it is none of
        them."""
        found = [n for n, (t, u) in enumerate(zip(self.tensors, self.nodes)) if t.uop is not u]
        note_state([self.tensors[n] for n in found])
        return tuple(found) or (-1,)


def note_state(tensors: list[Tensor]) -> None:
    """These are the same tensors each time, and are read where they lie, though no gradient is asked for of them."""
    for t in tensors:
        t.__dict__["_is_state"] = True


def is_constant(u: UOp) -> bool:
    """Whether a value is one number in all places."""
    while len(u.src) == 1 and u.op in _SPREAD:
        u = u.src[0]
    return u.op is Ops.CONST


def _kind(u: UOp) -> tuple[Any, ...]:
    """An external value as far as a program can tell beforehand: stored, or a lazy view or cast of what is."""
    chain: list[Any] = []
    while u.op in _LAZY and u not in HISTORY and len(chain) < 12:
        chain += (u.op, u.dtype, u.arg)
        u = u.src[0]
    is_plain = u.op is Ops.BUFFER and engine().follows(u.arg.device)
    if not is_plain or u in HISTORY or not engine().is_realized(u):  # (through HISTORY a gradient flows)
        raise UnknownArgument("a tensor from before the step is not in memory, or with a part of the workers")
    return (u.arg.shape, u.arg.dtype, u.arg.device, u.arg.axis, u.arg.bounds, *chain)


def told(x: Any, sig: list[Any], serial: int, external: External) -> Any:
    """Appends what a key says of an argument in the trace `serial`; gives what the call is made with later."""
    kind = type(x)
    if kind is DeferredTensor:
        of, number = x._value
        if of == serial:
            sig.append(number)
            return FIRST[number] if number < 256 else Value(number)
        return external.told(x, sig)
    if kind in CONSTANTS:
        sig += (kind, x)
        return x
    if isinstance(x, Tensor):
        value = x.__dict__.get("_value")
        if value is not None and value[0] == serial:
            sig.append(value[1])
            return x
        return external.told(x, sig)
    if kind is float and x == x:
        sig += (float, x or x.hex())  # (-0.0 is not 0.0)
        return x
    if (kind is tuple or kind is list) and len(x) <= LONGEST:
        sig += (kind, len(x))
        return kind([told(y, sig, serial, external) for y in x])
    if kind is slice:
        sig.append(slice)
        return slice(*[told(y, sig, serial, external) for y in (x.start, x.stop, x.step)])
    raise UnknownArgument(f"an argument is a {kind.__name__}" + " that is long" * (kind in (list, tuple)))


def resolved(x: Any, values: dict[int, Tensor]) -> Any:
    """An argument with the values of this time in it."""
    kind = type(x)
    if kind is Value:
        return values[x.number]
    if kind is tuple or kind is list:
        return kind([resolved(y, values) for y in x])
    if kind is slice:
        return slice(*[resolved(y, values) for y in (x.start, x.stop, x.step)])
    return x


__all__ = ["CONSTANTS", "External", "UnknownArgument", "Value", "note_state", "resolved", "told"]
