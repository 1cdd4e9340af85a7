"""Calls that are put off: what each calls, the values that they give, and how they are made in the end."""

from __future__ import annotations

import weakref
from collections.abc import Container, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

from manygrad.tensor.deferred.arguments import External, Value, resolved
from manygrad.tensor.deferred.tensors import DeferredTensor, PutsOff, settle
from manygrad.tensor.deferred.tree import KeptGraphs, Spec, TraceNode, as_leaf
from manygrad.tensor.engine import engine
from manygrad.tensor.grad_mode import set_grad_enabled
from manygrad.tensor.source import standing_at
from manygrad.tensor.storage import LIVE, is_one_storage
from manygrad.tensor.tensor import TRAINING, Tensor
from manygrad.tensor.uop import Ops, UOp
from manygrad.tensor.uop.rewrite import substitute
from manygrad.tensor.uop.views import memory, rebased

_new = DeferredTensor.__new__


class DeferredCall:
    """A call that is put off: which one, and with what."""

    __slots__ = ("args", "kwargs", "node")

    def __init__(self, node: TraceNode, args: Sequence[Any], kwargs: dict[str, Any]) -> None:
        self.node, self.args, self.kwargs = node, args, kwargs

    def gives(self) -> range:
        """Numbers of the values that it makes."""
        return self.node.gives()

    def used(self) -> list[int]:
        """Numbers of the values among its arguments."""
        return [*(x.number for x in self._leaves() if type(x) is Value), *(~n for n in self.node.gradients if n < 0)]

    def tensors(self) -> list[Tensor]:
        """The tensors from before among its arguments."""
        return [x for x in self._leaves() if isinstance(x, Tensor)]

    def may_pass_gradients(self, flowing: Container[int]) -> bool:
        """Whether a gradient may flow through it, as it does through the values of the numbers in `flowing`."""
        if not self.node.modes[0] or self.node.fn.__name__ == "detach":
            return self.node.fn is as_leaf
        return any(x.number in flowing if type(x) is Value else is_trained(x) for x in self._leaves())

    def _leaves(self) -> Iterator[Any]:
        todo = [*self.args, *self.kwargs.values()]
        while todo:
            x = todo.pop()
            if type(x) in (tuple, list):
                todo += x
            elif type(x) is slice:
                todo += (x.start, x.stop, x.step)
            else:
                yield x


def is_trained(x: Any) -> bool:
    return isinstance(x, Tensor) and bool(x._requires_grad)


class Read:
    """In the place among calls where values were read: they are stored from then on."""

    __slots__ = ("flowing", "memories", "read", "stored")

    def __init__(self, read: dict[int, Tensor], flowing: frozenset[int] | None) -> None:
        """`read`: by number; `flowing`: numbers of those that a gradient may flow through."""
        self.read, self.flowing = read, flowing or frozenset()
        self.stored = {n: t.uop for n, t in read.items()}
        self.memories: dict[UOp, Tensor] = {}  # what they lie in, whole
        for t in read.values():
            base = memory(t.uop)
            if base.op is Ops.BUFFER and base not in self.memories:
                with set_grad_enabled(True):
                    self.memories[base] = t._new(base)
                self.memories[base].__dict__["_is_result"] = True

    def tensors(self) -> list[Tensor]:
        return list(self.memories.values())

    def of(self, numbers: Container[int]) -> Read:
        """The read of those of the values that are among these."""
        kept = {n: t for n, t in self.read.items() if n in numbers}
        return self if len(kept) == len(self.read) else Read(kept, self.flowing)

    def node(self, number: int) -> UOp:
        """Where this value lies; while calls are captured, in an input of the capture's own."""
        u = self.stored[number]
        found = self.memories.get(memory(u))
        return u if found is None else rebased(u, memory(u), found.uop)

    def tensor(self, number: int) -> Tensor:
        """This value."""
        with set_grad_enabled(True):
            return Tensor(self.node(number))

    def used(self) -> list[int]:
        return list(self.stored)

    gives = used


class Resumed:
    """In place of calls that were made, with all that they write, when values were read: the values that live on, as
    graphs over the inputs of that time. They are not made again, which would write again."""

    __slots__ = ("inputs", "kept", "read")

    def __init__(self, kept: KeptGraphs, inputs: Sequence[Tensor], read: Read) -> None:
        self.kept, self.inputs, self.read = kept, inputs, read

    def tensors(self) -> list[Tensor]:
        return list(self.inputs)

    def make(self) -> dict[int, Tensor]:
        """The values, lazily: also where one that is stored is read, for it is taken for stored afterwards."""
        graphs, own, results, stored = self.kept
        now = {u: t.uop for u, t in zip(own, self.inputs)}
        number = dict(zip(results, stored))
        now |= {u: self.read.node(n) for u, n in number.items() if graphs.get(n, u) is u}
        made: dict[int, UOp] = {}
        todo = list(graphs)
        while todo:
            n = todo[-1]
            below = [u for u in graphs[n].toposort() if u in number and u not in now]
            if below:
                todo += [number[u] for u in below]
                continue
            made[todo.pop()] = u = substitute(graphs[n], now)
            now |= {r: u for r, m in number.items() if m == n}
        with set_grad_enabled(True):
            return {n: Tensor(made[n]) for n in graphs}

    def used(self) -> list[int]:
        return []

    def gives(self) -> list[int]:
        return list(self.kept.graphs)


class TraceValues:
    """The values of a trace, by number."""

    def __init__(self, serial: int) -> None:
        """`serial`: of the trace."""
        self.serial = serial
        self.refs: list[weakref.ref[Tensor]] = []  # the tensor of each
        self.storages: list[int] = []  # of each, the first one that is one storage with it

    def __len__(self) -> int:
        return len(self.refs)

    def promise(self, trace: PutsOff, spec: Any) -> DeferredTensor:
        """A tensor that the next value will be, as its Spec says. (In one piece: each call makes one.)"""
        refs = self.refs
        number = len(refs)
        t = _new(DeferredTensor)
        t.__dict__ = {
            "_requires_grad": spec.is_leaf, "_leaf": None, "_grad": None, "_storage": None, "_device": spec.home,
            "_trace": trace, "_spec": spec, "_value": (self.serial, number),
        }  # fmt: skip
        self.storages.append(number if spec.storage < 0 else spec.storage)
        refs.append(weakref.ref(t))
        return t

    def add(self, t: Tensor, spec: Spec) -> None:
        """`t` is the next value."""
        self.storages.append(len(self.refs) if spec.storage < 0 else spec.storage)
        self.refs.append(weakref.ref(t))

    def leaf_number(self, t: Tensor, external: External) -> int | None:
        """The number of a tensor from before, or ~number of one that is a value."""
        value: tuple[int, int] | None = t.__dict__.get("_value")
        return ~value[1] if value is not None and value[0] == self.serial else external.numbers.get(id(t))

    def replace(self, number: int, t: Tensor) -> None:
        """`t` is this value from now on."""
        t.__dict__["_value"] = (self.serial, number)
        self.refs[number] = weakref.ref(t)

    def renew(self, t: Tensor, promise: DeferredTensor) -> None:
        """`t`, which was another value, is what was promised."""
        d = t.__dict__
        for name in ("uop", "_stored", "_is_part"):
            d.pop(name, None)
        d |= {k: promise.__dict__[k] for k in ("_leaf", "_storage", "_device", "_trace", "_spec")}
        t.__class__ = DeferredTensor
        LIVE.discard(t)
        self.replace(promise._value[1], t)

    def tensor(self, number: int) -> Tensor | None:
        """The one that is this value, if somebody has it, and it has not become another one, or one to train."""
        t = self.refs[number]()
        return t if t is not None and t.__dict__.get("_value") == (self.serial, number) else None

    def living(self) -> list[tuple[int, Tensor]]:
        """The values that somebody has, each with its number."""
        of = self.serial
        return [
            (n, t)
            for n, ref in enumerate(self.refs)
            if (t := ref()) is not None and (v := t.__dict__.get("_value")) is not None and v[1] == n and v[0] == of
        ]

    def is_shared(self, t: Tensor) -> bool:
        """Whether another value that somebody has is one storage with it."""
        serial, number = t.__dict__.get("_value") or (0, 0)
        if serial != self.serial or self.storages.count(own := self.storages[number]) == 1:
            return False
        return any(self.storages[n] == own and n != number for n, _ in self.living())

    def storage_of(self, t: Tensor) -> int:
        """The number of the first value that is one storage with `t`, a new one; -1: it is the first."""
        if t._storage is None:
            return -1
        return next((self.storages[n] for n, x in self.living() if is_one_storage(t, x)), -1)

    def one_storage(self, numbers: Sequence[int], living: list[tuple[int, Tensor]]) -> list[int]:
        """The numbers of those that live and are one storage with these: they are stored as one."""
        storages = {self.storages[n] for n in numbers}
        return [n for n, _ in living if self.storages[n] in storages]


PutOff = DeferredCall | Read | Resumed


def needed_for(calls: Sequence[PutOff], numbers: Iterable[int]) -> list[PutOff]:
    """The calls that these values stand on, and the reads of what they stand on."""
    needed, found = set(numbers), set()
    for i, call in reversed(list(enumerate(calls))):
        if type(call) is not Read and not needed.isdisjoint(call.gives()):
            found.add(i)
            needed.update(call.read.stored if type(call) is Resumed else call.used())
    return [
        call
        for i, call in enumerate(calls)
        if i in found or (type(call) is Read and not needed.isdisjoint(call.stored))
    ]


class Maker(NamedTuple):
    """Whose calls they are, whoever makes them: a thread, and the state of its draws."""

    thread: int
    draws: dict[str, Any]


class Making:
    """Calls that were put off are made. `values`: what they gave, by number, for as long as it is used or wanted.

    `settled`: the values of the trace, whose tensors become what is made for them; None where calls are captured.
    """

    def __init__(self, external: External, settled: TraceValues | None = None) -> None:
        self.external, self.settled = external, settled
        self.values: dict[int, Tensor] = {}
        self.there: set[int] = set()  # numbers of values whose tensors are computed

    def make(self, calls: Sequence[PutOff], wanted: Sequence[int] = ()) -> None:
        """Makes these calls. A value goes with its last use, if it is not wanted: as a program's own do."""
        last = {n: i for i, call in enumerate(calls) for n in call.used()}
        for i, call in enumerate(calls):
            if isinstance(call, Read):
                numbers = self._take(call)
            else:
                numbers = self._resume(call) if isinstance(call, Resumed) else self._make(call)
            for n in numbers:
                if last.get(n, i) <= i and n not in wanted:
                    del self.values[n]

    def _take(self, read: Read) -> set[int]:
        """These values are stored from here on; gives their numbers."""
        values = self.values
        numbers = [n for n in read.stored if n in values and n not in self.there]
        for n in read.stored:
            if n not in values:  # (the call that gave it is not made again)
                self._give(n, read.tensor(n))
        others = {id(t): t for t in values.values()}
        if self.settled is not None:
            others |= {id(t): t for _, t in self.settled.living() if type(t) is Tensor}
        engine().take_stored([(values[n], read.node(n)) for n in numbers], list(others.values()))
        return set(read.stored)

    def _resume(self, resumed: Resumed) -> set[int]:
        """The values of calls that were made before."""
        made = resumed.make()
        for n, t in made.items():
            d = None if self.settled is None or n < 0 else self.settled.tensor(n)
            if d is not None:
                t._device = d._device
            self._give(n, t)
        return set(made)

    def _give(self, number: int, t: Tensor) -> None:
        """`t` was made for this value; who has that finds it."""
        d = None if self.settled is None or number < 0 else self.settled.tensor(number)
        if type(d) is DeferredTensor:
            settle(d, t)
        elif d is not None:
            self.there.add(number)
        self.values[number] = t if d is None else d

    def _make(self, call: DeferredCall) -> set[int]:
        """Makes one call; gives the numbers of what it used and made."""
        node, values = call.node, self.values
        args = [resolved(x, values) for x in call.args]
        kwargs = {k: resolved(x, values) for k, x in call.kwargs.items()}
        grad, training, _ = node.modes
        token = TRAINING.set(training)
        try:
            with set_grad_enabled(grad), standing_at(node.line):
                out = node.fn(*args, **kwargs)
        finally:
            TRAINING.reset(token)
        if node.gradients:
            found = {id(t): g for t, g in out}
            made = [found[id(self.external.tensors[i] if i >= 0 else values[~i])] for i in node.gradients]
        else:
            made = [t for t, r in zip([out] if node.kind is None else out, node.results) if type(r) is Spec]
        for number, t in enumerate(made, node.first):
            self._give(number, t)
        return {*call.used(), *call.gives()}


__all__ = ["DeferredCall", "Maker", "Making", "PutOff", "Read", "Resumed", "TraceValues"]
