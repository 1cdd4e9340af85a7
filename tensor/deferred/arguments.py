"""What a key says of a call's arguments, and what is kept of them to make the call later."""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from typing import Any

from manygrad.tensor.dtype import DType
from manygrad.tensor.engine import engine
from manygrad.tensor.grad_mode import set_grad_enabled
from manygrad.tensor.ops.differentiation import flows_on
from manygrad.tensor.storage import is_stored
from manygrad.tensor.stored import ENDED, HISTORY, OwnNumber, has_live_history
from manygrad.tensor.tensor import Tensor
from manygrad.tensor.uop import Ops, UOp
from manygrad.tensor.uop.shape import Shape, numel
from manygrad.tensor.uop.views import memory

LONGEST = 1024  # list of numbers in a key
MOST_CARRIED = 1 << 24  # bytes of a lazy value that is stored though it is larger than what it is computed from
NOBODY: Any = None
LAZY: set[tuple[Any, ...]] = set()  # calls in the code that were given a lazy value from before
MOST_PLACES = 4096  # of them
LEAVES: dict[tuple[Any, ...], int] = {}  # calls in the code that a new leaf was given -> the first trace that was in
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
    """The tensors of a trace that were there before it, each with its node when the trace met it. (Of one that is let
    go, `NOBODY` stands there.)"""

    __slots__ = ("is_state", "nodes", "numbers", "released", "serial", "tensors", "wholes")

    def __init__(self, serial: int) -> None:
        """`serial`: of the trace."""
        self.serial = serial
        self.numbers: dict[int, int] = {}  # by the id of the tensor
        # those that are let go, while the program has them, by number
        self.released: dict[int, tuple[weakref.ref[Tensor], weakref.ref[UOp]]] = {}
        self.tensors: list[Tensor] = []
        self.nodes: list[UOp] = []
        self.is_state: list[bool] = []
        self.wholes: dict[UOp, Tensor] = {}

    def told(self, x: Tensor, sig: list[Any]) -> Tensor:
        """Appends what a key says of `x`."""
        number = self.numbers.get(id(x))
        if number is not None:
            sig += ("e", number)
            return x
        u = x.uop
        trained = bool(x._requires_grad)
        is_made_anew = trained and type(x) is Tensor and is_stored(u) and self._is_made_anew(x, sig)
        state = (trained and not is_made_anew) or "_is_state" in x.__dict__
        # (a sum or an average; what is larger may have been made for this call, scales of activations say)
        if u.op is not Ops.BUFFER and (trained or numel(u.shape) == 1) and is_carried(x):
            place = tuple(sig[:3])
            if place in LAZY:  # (met here before: in a loop)
                engine().realize([x])
                u = x.uop
            elif len(LAZY) < MOST_PLACES:
                LAZY.add(place)
        if state:
            where = u.device
            if where and (type(where) is tuple or "@" in where) and not engine().follows(where):
                raise UnknownArgument("a parameter is with a part of the workers")
            sig += ("s", id(x), id(u), trained)
        elif u.op is Ops.CONST or is_constant(u):
            sig += ("c", u, x._device)
            return x
        else:
            sig += ("l" if is_made_anew else "i", *_kind(u))
        self.numbers[id(x)] = len(self.tensors)
        self.tensors.append(x)
        self.nodes.append(u)
        self.is_state.append(state)
        return x

    def _is_made_anew(self, x: Tensor, sig: list[Any]) -> bool:
        """Whether a leaf, which no trace has met before, is another one each time, as the points are that a gradient is
        taken to: others were met first in this place of the code in traces before. Parameters are not."""
        if "_is_state" in x.__dict__:
            return False
        found: bool | None = x.__dict__.get("_is_made_anew")
        if found is None:
            place = tuple(sig[:3])
            if len(LEAVES) >= MOST_PLACES:
                LEAVES.clear()
            found = x.__dict__["_is_made_anew"] = LEAVES.setdefault(place, self.serial) != self.serial
        return found

    def whole(self, u: UOp, like: Tensor) -> Tensor:
        """A tensor of this memory, the same one each time: of gradients from before that are added to."""
        if u not in self.wholes:
            with set_grad_enabled(True):
                self.wholes[u] = like._new(u)
            self.wholes[u].__dict__["_is_result"] = True
        return self.wholes[u]

    def tensor(self, number: int) -> Tensor:
        """One of them, which the program has."""
        found: Tensor | None = self.tensors[number]
        if found is NOBODY:
            found = self.released[number][0]()
        assert found is not None
        return found

    def inputs(self) -> list[Tensor]:
        """The tensors that may be others each time."""
        return [t for t, state in zip(self.tensors, self.is_state) if not state]

    def state(self) -> list[Tensor]:
        """The tensors that are the same ones each time."""
        return [t for t, state in zip(self.tensors, self.is_state) if state]

    def refresh(self) -> None:
        """What they are now is what the trace has met."""
        for n, t in enumerate(self.tensors):
            if t is not NOBODY:
                self.nodes[n] = t.uop
        for n, (ref, _) in list(self.released.items()):
            if (x := ref()) is not None:
                self.released[n] = ref, weakref.ref(x.uop)

    def written(self) -> tuple[int, ...]:
        """Numbers of the tensors that calls have written to, which are state from now on; -1 where it is none of
        them."""
        both = enumerate(zip(self.tensors, self.nodes))
        found = {n: t for n, (t, u) in both if t is not NOBODY and t.uop is not u}
        for n, (ref, node) in self.released.items():
            t = ref()
            if t is not None and t.uop is not node():
                found[n] = t
        note_state(list(found.values()))
        return tuple(sorted(found)) or (-1,)

    def has_histories(self) -> bool:
        """Whether a gradient flows on from memory that calls have written to."""
        return any(t is not NOBODY and not t._requires_grad and has_live_history(memory(t.uop)) for t in self.tensors)

    def let_go(self, first: int) -> None:
        """Calls that read the inputs from number `first` on were made: these live as long as the program has them."""
        numbers, released = self.numbers, self.released
        for n in range(first, len(self.tensors)):
            t, u = self.tensors[n], self.nodes[n]
            if self.is_state[n] or t is NOBODY:  # (a destructor that ran meanwhile has called, too)
                continue

            def gone(_: Any, key: int = id(t), n: int = n) -> None:
                numbers.pop(key, None)
                released.pop(n, None)

            released[n] = weakref.ref(t, gone), weakref.ref(u)
            self.tensors[n] = self.nodes[n] = NOBODY


def note_state(tensors: list[Tensor]) -> None:
    """These are the same tensors each time, and are read where they lie, though no gradient is asked for of them."""
    for t in tensors:
        t.__dict__["_is_state"] = True


def is_carried(x: Tensor) -> bool:
    """Whether a value from before is lazy, and can be stored: its computation would go on growing in each step that
    carries it on (`total = total + loss.detach()`), and no step that reads it would be a replay. Not where a gradient
    flows through it, it lies on no device yet, or it may be meant never to be stored; nor on several workers, of which
    one alone may come to it."""
    u = x.uop
    if u.device is None or is_stored(u) or not all(type(d) is int for d in u.shape) or not engine().follows(u.device):
        return False
    if engine().workers()[1] > 1:
        return False
    below = u.toposort()
    if x._requires_grad:  # (made from another one to train; a new model's are all computed at once)
        if not any(v.op is Ops.CONTIGUOUS and v.arg is not None for v in below if v is not u):
            return False
    elif flows_on(u):
        return False
    base = memory(u)  # (a view is stored with all of it)
    return nbytes(base.shape, base.dtype) <= most_carried(below)


def most_carried(below: Iterable[UOp]) -> int:
    """Bytes of the largest value that is stored unasked, of those computed from these nodes."""
    return max(MOST_CARRIED, sum(nbytes(u.shape, u.dtype) for u in below if u is not NOBODY and u.op is Ops.BUFFER))


def nbytes(shape: Shape, dtype: DType) -> int:
    return numel(shape) * dtype.itemsize


def is_constant(u: UOp) -> bool:
    """Whether a value is one number in all places."""
    while len(u.src) == 1 and u.op in _SPREAD:
        u = u.src[0]
    return u.op is Ops.CONST


def _kind(u: UOp) -> tuple[Any, ...]:
    """An external value as far as a program can tell beforehand: stored, or a lazy view or cast of what is."""
    chain: list[Any] = []
    while u.op in _LAZY and u not in HISTORY and len(chain) < 12:
        is_number = u.op is Ops.DETACH and isinstance(u.arg, OwnNumber)  # (another one each time)
        arg = None if is_number else u.arg
        chain += (u.op, u.dtype, arg)
        u = u.src[0]
    is_plain = u.op is Ops.BUFFER and engine().follows(u.arg.device)
    if not is_plain or has_live_history(u) or not engine().is_realized(u):
        raise UnknownArgument("a tensor from before the step is not in memory, or with a part of the workers")
    if u in ENDED or u in HISTORY:  # (of which backward() says that its gradient has ended)
        chain.append(ENDED)
    return (u.arg.shape, u.arg.dtype, u.arg.device, u.arg.axis, u.arg.bounds, *chain)


def told(x: Any, sig: list[Any], serial: int, external: External) -> Any:
    """Appends what a key says of an argument in the trace `serial`; gives what the call is made with later."""
    kind = type(x)
    if kind in CONSTANTS:
        sig += (kind, x)
        return x
    if isinstance(x, Tensor):
        value = x.__dict__.get("_value")
        if value is None or value[0] != serial:
            return external.told(x, sig)
        number = value[1]
        sig.append(number)
        return FIRST[number] if number < 256 else Value(number)
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


__all__ = [
    "CONSTANTS",
    "External",
    "UnknownArgument",
    "Value",
    "is_carried",
    "most_carried",
    "nbytes",
    "note_state",
    "resolved",
    "told",
]
