"""The tree of traces: the calls that a thread's steps have made, one after the other.

    root ── linear(i, s, s) ── relu(0) ── linear(1, s, s) ── cross_entropy(2, i) ── backward(3) ─┬─ an optimiser steps
                                                                                                 └─ item() of 3
A step that makes the same calls again goes down the same path; where it makes another one the path branches. What ends
a trace (a value is read, an optimiser steps) is an `TraceEnding` of the node it came to, and that is what is captured.

A key says what a call depends on: the function, the place in the user's code (errors name its line), modes, numbers and
other constants, and where each tensor comes from: the number of a value of this trace; `i`, a value from before that
may be another one each time; `s`, state, which is the very tensor in the very memory (a parameter, what a step writes);
`e`, one of these again.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from functools import cached_property
from types import CodeType
from typing import Any, NamedTuple, Protocol

from manygrad.tensor.deferred.ranks import digest_of, place_of
from manygrad.tensor.dtype import DType
from manygrad.tensor.engine import engine
from manygrad.tensor.ops.random import places_of_draws
from manygrad.tensor.storage import is_stored
from manygrad.tensor.tensor import Tensor
from manygrad.tensor.uop import UOp

MOST_CHILDREN = 64  # of a node: a call that is another one each time (a number that counts) is not followed
MOST_NODES = 4096  # of a thread's tree; then it begins anew
MOST_CAPTURES = 128  # of a thread, the last used ones
MOST_BYTES = 1 << 30  # of memory that these hold; the last used one may hold more
Key = tuple[Any, ...]
Where = str | tuple[str, ...]
TREES: weakref.WeakSet[TraceTree] = weakref.WeakSet()


class TraceReplay(Protocol):
    """A captured trace. `nbytes`: memory that it holds."""

    nbytes: int

    def fits(self) -> bool:
        """Whether it can be made now."""

    def run(self, inputs: list[Tensor]) -> list[Tensor]:
        """Makes its calls with other values from before; gives what lives on."""


class Spec:
    """A tensor that a call makes: enough to answer what a program asks of it before it is computed."""

    __slots__ = ("device", "dtype", "home", "is_leaf", "is_view", "requires_grad", "shape", "storage")

    def __init__(self, shape: tuple[int, ...], dtype: DType, device: Where | None, home: Where) -> None:
        """`device`: None of constants; `home`: where those live."""
        self.shape, self.dtype, self.device, self.home = shape, dtype, device, home
        self.requires_grad: bool | None = None  # nobody has asked yet
        self.is_leaf: bool | None = None  # to train
        self.is_view = False  # of memory from before
        self.storage = -1  # the number of the first value that is one storage with it; -1: itself

    @staticmethod
    def of(t: Tensor) -> Spec | None:
        """None where it cannot be told beforehand."""
        u = t.uop
        is_plain = type(t) is Tensor and all(type(d) is int for d in u.shape)
        if not is_plain or not engine().follows(u.device) or not engine().follows(t._device):
            return None
        found = Spec(u.shape, u.dtype, u.device, t._device)
        found.is_view = is_stored(u)
        found.is_leaf = found.requires_grad = t._requires_grad
        return found


def as_leaf(t: Tensor) -> Tensor:
    """The same value, as one to train."""
    new = t._new(t.uop)
    new._storage = t._identity()
    return new.requires_grad_()


class KeptGraphs(NamedTuple):
    """Values that live on after a recording, each by number as a graph, lazily, or, of what is stored, by what it was
    computed; numbers below 0 are of memory that these read. `own`: the nodes in them that stand for the inputs;
    `results`: those of what is stored; `stored`: the numbers of that."""

    graphs: dict[int, UOp]
    own: list[UOp]
    results: list[UOp]
    stored: list[int]


class TraceEnding:
    """What ended a trace at a node, and what lived on then."""

    def __init__(self, above: bytes, key: Key) -> None:
        """`above`: the digest of the node, `key`: of it there."""
        self.above, self.key = above, key
        # whether ranks communicate for it, as they did where its calls were made as they come; None: not known yet
        self.communicates: bool | None = None
        self.plain = ""  # why it cannot be captured
        self.state: set[int] | None = None  # ids of the nodes that state lies in
        self.flowing: frozenset[int] | None = None  # numbers of what is stored that a gradient flows on from
        self.replay: TraceReplay | None = None
        self.used = 0  # when, in uses of the tree's captures
        self.inputs: tuple[int, ...] = ()  # which of the trace's inputs a read needs
        self.kept: KeptGraphs | None = None  # of values that live on, where calls that write are not made again

    @cached_property
    def place(self) -> int:
        """Its number on all ranks that come to it by the same calls."""
        return place_of(self.above, self.key)


class TraceNode:
    """A call, after those above it. Large: what it gives, what ends with it, and which calls were new below it."""

    def __init__(
        self,
        parent: TraceNode | None = None,
        key: Key = (),
        fn: Any = None,
        line: str = "",
        code: CodeType | None = None,
    ) -> None:
        """`line`: the user's, which makes the call; `code`: what that is in, which the key names by id."""
        # (not held: what is cut off goes at once, with its captures)
        self.above = None if parent is None else weakref.ref(parent)
        several = parent is not None and engine().workers()[1] > 1
        self.digest: bytes = digest_of(parent.digest, key, code) if parent is not None and several else b""
        self.fn, self.line, self.code = fn, line, code
        self.key = key
        self.depth: int = 0 if parent is None else parent.depth + 1  # calls above it
        self.modes: Key = key[3:6]  # of gradients and training, the default type
        self.first: int = 0 if parent is None else parent.gives().stop  # number of the first value that it makes
        self.children: dict[Key, TraceNode] = {}
        self.endings: dict[Key, TraceEnding] = {}
        self.kind: type | None = None  # of the sequence that it gives; None: a tensor
        self.results: list[Spec | int | None] = []  # a Spec, or the number of the argument that it is
        self.gradients: tuple[int, ...] = ()  # numbers of the tensors whose gradients backward() makes
        self.writes: tuple[int, ...] = ()  # numbers of the tensors from before that are written, up to here
        self.carried: frozenset[int] | None = None  # numbers of the values that a read here may store, too
        self.is_followed = True
        self.is_plain = False  # whatever ends below it cannot be captured
        self.refs: list[weakref.ref[Any]] = []  # of the state that its key names by id
        self.is_known = False  # it was come to more than once
        self.round: tuple[Key | None, int] | None = None  # of a loop that the path to it shows (`rounds.py`)
        self.place: Key = ()  # of the call in the code
        self.new: dict[Key, tuple[int, Key]] = {}  # of each place below it, how many calls were made once, and the last
        self.told: set[Key] = set()  # places of which a warning was given

    @property
    def parent(self) -> TraceNode | None:
        return None if self.above is None else self.above()

    def gives(self) -> range:
        """Numbers of the values that it makes."""
        return range(self.first, self.first + sum(type(r) is Spec for r in self.results))

    def ending(self, key: Key) -> TraceEnding:
        """What ends a trace here in this way."""
        found = self.endings.get(key)
        if found is None:
            found = self.endings[key] = TraceEnding(self.digest, key)
            self.note_new()
        return found

    def hold(self, key: Key, state: Sequence[tuple[Tensor, UOp]]) -> None:
        """The node goes with the state that its key names."""
        back = self.above
        assert back is not None

        def gone(_: Any) -> None:
            parent = back()
            child = None if parent is None else parent.children.pop(key, None)
            if parent is not None and child is not None:
                parent.note_known(child)  # (a model that is gone keeps no loop from being replayed)

        self.refs = [weakref.ref(x, gone) for pair in state for x in pair]

    def note_known(self, child: TraceNode) -> None:
        """A call below it was come to again, or is none that is made once in each step."""
        if not child.is_known and child.place in self.new:
            count, last = self.new[child.place]
            self.new[child.place] = count - 1, last
        child.is_known = True

    def describe(self, out: Any, args: Sequence[Any], is_new: set[int]) -> None:
        """Notes what the call gave, or that it cannot be told the next time."""
        given = {id(a): i for i, a in reversed(list(enumerate(args)))}
        many = isinstance(out, (tuple, list))
        found = out if many else [out]
        self.kind = type(out) if many else None
        for t in found:
            if t is None and many:  # (no gradient)
                self.results.append(None)
                continue
            if not isinstance(t, Tensor):
                spec = None
            elif id(t) in given:
                spec = given[id(t)]
            else:  # (who else gives a leaf has made a model, say)
                is_known = id(t) in is_new and (self.fn is as_leaf or not t._requires_grad)
                spec = Spec.of(t) if is_known else None
            if spec is None:
                self.is_followed = False
                return
            if type(spec) is Spec and not self.modes[0]:
                spec.requires_grad = False
            self.results.append(spec)
        tensors = [id(t) for t in found if t is not None]
        self.is_followed = len({*tensors}) == len(tensors)

    def make_room(self) -> int:
        """If there are many nodes below it, forgets the oldest one that was come to only once, or the oldest one; how
        many nodes went."""
        if len(self.children) < MOST_CHILDREN:
            return 0
        key = next((k for k, child in self.children.items() if not child.is_known), next(iter(self.children)))
        return self.children.pop(key).size()

    def size(self) -> int:
        """How many nodes it is, with those below it."""
        count, todo = 0, [self]
        while todo:
            count += 1
            todo += todo.pop().children.values()
        return count

    def note_new(self) -> None:
        """Something is below it that may be captured."""
        node: TraceNode | None = self
        while node is not None and node.is_plain:
            node.is_plain = False
            node = node.parent

    def note_plain(self) -> None:
        """Nothing that ends here is captured: calls are not put off that lead here alone."""
        node: TraceNode | None = self
        while node is not None and node.parent is not None:
            if not all(e.plain for e in node.endings.values()):
                return
            if not all(child.is_plain for child in node.children.values()):
                return
            node.is_plain = True
            node = node.parent


class TraceTree:
    """What a thread's traces have been, and what was captured of them."""

    def __init__(self) -> None:
        TREES.add(self)
        self.world: tuple[object, int] | None = None  # that it is grown in
        self.root = TraceNode()
        self.nodes = 0
        self.varying: dict[Key, CodeType] = {}  # places in code at which a number is an input
        self.marks = False  # tensors of such numbers (`varying.mark_varying`)
        self.captures: weakref.WeakSet[TraceEnding] = weakref.WeakSet()  # one goes with its node
        self.uses = 0  # of captures

    def is_of_another_world(self) -> bool:
        """As where a test works in another Runtime, or numbers are drawn on another device from now on."""
        now = (engine().world(), places_of_draws())
        self.world = self.world or now
        return self.world[0] is not now[0] or self.world[1] != now[1]

    def forget(self) -> None:
        self.root, self.nodes, self.world = TraceNode(), 0, None
        self.varying.clear()
        self.captures.clear()

    def note_varying(self, place: Key, code: CodeType) -> None:
        """At this place of the user's code a number is another one each time."""
        if len(self.varying) >= MOST_NODES:
            self.varying.clear()
        self.varying[place] = code

    def note_use(self, ending: TraceEnding) -> None:
        """A capture is used: those used longest ago make way."""
        self.uses += 1
        ending.used = self.uses

    def keep(self, ending: TraceEnding) -> None:
        """A new capture stays, and others used longer ago go where all together hold too much memory."""
        self.captures.add(ending)
        by_use = sorted(self.captures, key=lambda e: e.used)
        while len(by_use) > 1 and (len(by_use) > MOST_CAPTURES or self.nbytes() > MOST_BYTES):
            gone = by_use.pop(0)
            gone.replay = None
            self.captures.discard(gone)

    def nbytes(self) -> int:
        """Memory that the captures hold."""
        return sum(e.replay.nbytes for e in self.captures if e.replay is not None)


__all__ = [
    "MOST_BYTES",
    "MOST_CAPTURES",
    "MOST_CHILDREN",
    "MOST_NODES",
    "TREES",
    "Key",
    "Spec",
    "TraceEnding",
    "TraceNode",
    "TraceReplay",
    "TraceTree",
]
