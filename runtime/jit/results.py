"""What a captured function returns: the caller's, as it is without a capture.

Memory that a replay gives is written by a later one only if nobody refers to it any more: no tensor that was returned,
no view of it, no lazy value made of it. Else that replay writes elsewhere: the native calls are pointed to other memory
(`ExecItem.mover`), of which two take turns where the caller holds one result at a time; where they cannot be, what is
held is copied away and the memory goes on as that of the next result. Reference counts tell, so a step whose results
are dropped costs nothing. Native code compares the same counts where it makes a replay alone (`checks`).

What is returned and is an argument is that argument; what is memory from before, the function's state, is that state.
"""

from __future__ import annotations

import ctypes
import weakref
from array import array
from collections.abc import Callable, Collection, Mapping, Sequence
from sys import getrefcount
from typing import Any

from manygrad.native.checks import ATTRIBUTE, MISSING, REFERRED, WORD, Check, words_of
from manygrad.runtime.buffer import Buffer, copy_buffer
from manygrad.runtime.current import current
from manygrad.runtime.executors.items import ExecItem
from manygrad.runtime.jit.arguments import Input, binds, with_dims
from manygrad.runtime.jit.memory import address
from manygrad.runtime.jit.recording import Recorded
from manygrad.runtime.storage import SPOILED, STORAGE, buffers_of, restore, storage
from manygrad.tensor.engine import engine
from manygrad.tensor.grad_mode import enable_grad
from manygrad.tensor.storage import LIVE, is_stored
from manygrad.tensor.stored import ENDED, HISTORY
from manygrad.tensor.tensor import Tensor
from manygrad.tensor.uop import UOp
from manygrad.tensor.uop.rewrite import substitute
from manygrad.tensor.uop.views import memory, rebased

Passed = Mapping[int, Tensor]  # by the id of an input's own tensor, the argument of this call
Owner = tuple["weakref.ref[Tensor]", int]  # a tensor, and the number of the one that is its gradient
Leaf = Callable[[Passed, dict[str, int]], Any]
OVER = (None, 0)  # the history of what a replay gives


class Returned:
    """Tensors in one memory, and how often they are referred to while nobody else holds them."""

    def __init__(self, node: UOp, tensors: list[Tensor]) -> None:
        self.node, self.tensors = node, tensors
        self.uops = [t.uop for t in tensors]
        self.buffers = buffers_of(node)
        self.references = -1  # (not known: whoever made them may hold them)
        self.words: list[tuple[int, int]] = []  # address and value of each one's count of references, then
        self.rows = array("q")  # of `checks`

    def count(self) -> int:
        found = getrefcount(self.node)
        for t, u in zip(self.tensors, self.uops):
            found += getrefcount(t) + getrefcount(u)
        for b in self.buffers:
            found += getrefcount(b)
        return found

    def settle(self) -> None:
        """From now on only others' references are found beyond those there are."""
        if self.references < 0:
            # (a node's memory is noted beside it when it is asked for first, which is one more reference)
            all(map(memory, self.uops))
            self.references = self.count()
            counted = [*map(id, (self.node, *self.tensors, *self.uops, *self.buffers))]  # (which holds none of them)
            self.words = [(at, ctypes.c_int64.from_address(at).value) for at in counted]

    def checks(self, owners: Sequence[Owner]) -> Sequence[int]:
        """What `is_free` looks at, for native code, as rows of its table, where all owners have their gradients."""
        if self.rows and not owners:
            return self.rows
        grads = [MISSING if ref() is None else self.tensors[k] for ref, k in owners]
        held = [k for (_, k), grad in zip(owners, grads) if grad is not MISSING]
        found = [Check(WORD, at, None, n + held.count(i - 1)) for i, (at, n) in enumerate(self.words)]
        for t, u in zip(self.tensors, self.uops):
            found += [Check(ATTRIBUTE, t, "uop", u), Check(ATTRIBUTE, t, "_grad", None)]
            found.append(Check(ATTRIBUTE, t, "_requires_grad", t._requires_grad))
        found += [Check(REFERRED, ref, "_grad", grad) for (ref, _), grad in zip(owners, grads)]
        self.rows = array("q", words_of(found))
        return self.rows

    def restore(self) -> None:
        """What was lost there is to be written anew."""
        if self.node in SPOILED:
            restore(self.node)

    def is_free(self, owners: Sequence[Owner]) -> bool:
        """Whether nobody refers to them, but for those whose gradients they are, and they are as they were made."""
        held = 0
        for ref, k in owners:
            held += (t := ref()) is not None and t._grad is self.tensors[k]
        if self.count() != self.references + held:
            return False
        for t, u in zip(self.tensors, self.uops):
            if t.uop is not u or t._grad is not None or t._requires_grad:
                return False
        return True


class ResultMemory:
    """The memory of one or more results: `now`, what the next replay writes, and `spare`, what the one before gave."""

    def __init__(self, node: UOp, tensors: list[Tensor], items: list[ExecItem]) -> None:
        self.now, self.spare = Returned(node, tensors), None
        self.moves = [_moves(b, items) for b in self.now.buffers]
        self.owners: list[Owner] = []
        # why no gradient flows back from what is given, as the function leaves it (who holds it may write to it)
        self.ended, self.is_over = ENDED.get(node), False

    now: Returned
    spare: Returned | None

    def is_free(self) -> bool:
        """Whether the next replay may write what the last one gave."""
        return self.now.is_free(self.owners)

    def leave(self) -> None:
        """What was returned stays with those who hold it; the next replay writes other memory."""
        old = self.now
        is_moved = None not in self.moves
        if is_moved and self.spare is not None and self.spare.is_free(self.owners):
            self.now = self.spare
            self.now.restore()
        else:
            node = engine().new_buffer(old.node, old.node.arg.device)
            if is_moved:
                storage(node)
            else:
                self._copy_away(node)
            if self.ended:
                ENDED[node] = self.ended
            elif self.is_over:
                HISTORY[node] = OVER
            self.now = Returned(node, [_as(t, rebased(t.uop, old.node, node)) for t in self._as_made(old)])
        self.spare = old if is_moved else None  # (else the calls write where they did)
        for moves, b in zip(self.moves, self.now.buffers):
            for move in moves or ():
                move(b.handle)

    def _as_made(self, old: Returned) -> list[Tensor]:
        """The tensors, or, of those that were changed since, others with the same node."""
        return [t if t.uop is u else _as(t, u) for t, u in zip(old.tensors, old.uops)]

    def _copy_away(self, node: UOp) -> None:
        """The memory becomes that of `node`; what it holds lies elsewhere."""
        old = self.now
        if old.node in SPOILED:
            STORAGE[node] = SPOILED[old.node]
            SPOILED.pop(old.node)
            old.buffers = []
            return
        found = STORAGE[old.node]
        STORAGE[node] = found
        if isinstance(found, Buffer):
            STORAGE[old.node] = _copy(found)
        else:
            STORAGE[old.node] = [b if b is None else _copy(b) for b in found]
        old.buffers = buffers_of(old.node)

    def give(self) -> None:
        """Gradients are those of their tensors."""
        tensors = self.now.tensors
        for ref, k in self.owners:
            if (t := ref()) is not None and t._grad is not tensors[k]:
                t._grad = tensors[k]

    def overlaps(self, begin: int, end: int) -> bool:
        """Whether the next replay writes there."""
        for b in self.now.buffers:
            if (at := address(b)) < end and begin < at + b.nbytes:
                return True
        return False


class Results:
    """The results of a capture, and the gradients that it sets. `written`: the memory that it gives away."""

    def __init__(
        self, out: Any, inputs: list[Input], items: list[ExecItem], written: Collection[Buffer], recorded: Recorded
    ) -> None:
        own = {i.own.uop: i.own for i in inputs}
        self.slots: list[ResultMemory] = []
        groups: dict[UOp, list[Tensor]] = {}
        self.gradients = recorded.gradients
        gradients = self.gradients.made
        for t in {id(t): t for t in (*_tensors(out), *(g for _, g in gradients))}.values():
            node = memory(t.uop)
            fits = is_stored(t.uop) and node not in own and node not in recorded.known
            if fits and all(b.base is None and b in written for b in buffers_of(node)):
                groups.setdefault(node, []).append(t)
        at: dict[int, tuple[ResultMemory, int]] = {}
        for node, tensors in groups.items():
            self.slots.append(slot := ResultMemory(node, tensors, items))
            at |= {id(t): (slot, k) for k, t in enumerate(tensors)}
        self.buffers = {b for s in self.slots for b in s.now.buffers}
        self.fixed: list[tuple[weakref.ref[Tensor], UOp]] = []  # tensors whose gradients lie in no memory of their own
        for t, g in gradients:
            if id(g) in at:
                at[id(g)][0].owners.append((weakref.ref(t), at[id(g)][1]))
            else:
                self.fixed.append((weakref.ref(t), g.uop))
        self.gradients.forget_tensors()
        self.build = _builder(out, at, own)
        self.sites = current().faults.sites_of(b for item in items for b in item.buffers)
        self.noted = -1  # `Faults.changes` when the results' places were noted last

    def end_histories(self) -> None:
        """No gradient flows back through a replay: from now on backward() from what is given says so."""
        for s in self.slots:
            if s.now.node in HISTORY:
                s.is_over, HISTORY[s.now.node] = True, OVER

    def renew(self, mark: object) -> bool:
        """Before a replay. `mark`: as in `TensorSet.newer`; what is made here is not new to it. Whether a result will
        lie elsewhere."""
        moved, was_last = list[ResultMemory](), next(reversed(LIVE.keys), None) == id(mark)
        for s in self.slots:
            if not s.is_free():
                s.leave()
                s.now.settle()
                moved.append(s)
            if s.now.node in SPOILED:  # (the spare one, too, may have been given with a bad index)
                s.now.restore()
            if s.owners:
                s.give()
        for ref, u in self.fixed:
            if (t := ref()) is not None and (t._grad is None or t._grad.uop is not u):
                t._grad = _as(t, u)
        if was_last:
            LIVE.newer(mark)
        self.note(moved)
        return bool(moved)

    def need_python(self) -> bool:
        """Whether native code cannot look at all that `renew` does."""
        made = self.gradients
        return bool(self.fixed or made.absent or made.added) or not all(s.now.words for s in self.slots)

    def note(self, moved: Sequence[ResultMemory]) -> None:
        """What is given stands on the places whose indices are checked. `moved`: what lies elsewhere since."""
        faults = current().faults
        if faults.changes != self.noted:
            moved = self.slots
        if moved:
            self.noted = faults.note_replay(self.sites, [s.now.node for s in moved])


def _tensors(out: Any) -> list[Tensor]:
    """Each tensor of a result once."""
    if isinstance(out, Tensor):
        return [out]
    parts = out.values() if isinstance(out, dict) else out if isinstance(out, (list, tuple)) else ()
    return list({id(t): t for x in parts for t in _tensors(x)}.values())


def _moves(buffer: Buffer, items: list[ExecItem]) -> list[Callable[[Any], None]] | None:
    """Functions that have each item use other memory; None where one cannot."""
    users = [item for item in items if any((b.base or b) is buffer for b in item.buffers)]
    found = [item.mover(buffer) for item in users]
    return None if None in found else [move for move in found if move is not None]


def _copy(b: Buffer) -> Buffer:
    new = Buffer(b.device.name, b.count, b.dtype)
    copy_buffer(new, b)
    return new


def _builder(x: Any, at: Mapping[int, tuple[ResultMemory, int]], own: Mapping[UOp, Tensor]) -> Leaf:
    """A function that makes a result like `x` of this call's tensors."""
    if isinstance(x, Tensor):
        return _leaf(x, at.get(id(x)), own)
    if isinstance(x, (list, tuple)):
        kind, parts = type(x), [_builder(y, at, own) for y in x]
        if hasattr(x, "_fields"):
            return lambda passed, values: kind(*[f(passed, values) for f in parts])
        return lambda passed, values: kind([f(passed, values) for f in parts])
    if isinstance(x, dict):
        entries = {k: _builder(y, at, own) for k, y in x.items()}
        return lambda passed, values: {k: f(passed, values) for k, f in entries.items()}
    return lambda passed, values: x


def _leaf(t: Tensor, found: tuple[ResultMemory, int] | None, own: Mapping[UOp, Tensor]) -> Leaf:
    node = memory(t.uop)
    if found is not None:
        slot, k = found
        if binds(t):
            return lambda passed, values: with_dims(slot.now.tensors[k], values) if values else slot.now.tensors[k]
        return lambda passed, values: slot.now.tensors[k]
    if node in own:
        key, uop = id(own[node]), t.uop
        return lambda passed, values: _part(passed[key], uop, node)
    if not is_stored(t.uop):
        return _lazy_copy(t, own)
    if binds(t):
        return lambda passed, values: with_dims(t, values) if values else t
    return lambda passed, values: t


def _lazy_copy(t: Tensor, own: Mapping[UOp, Tensor]) -> Leaf:
    """A copy that nothing has to be computed for (elements of memory in another order): another one each time, which
    keeps its value when that memory is written."""
    uop, like = t.uop, _as(t, t.uop)
    LIVE.discard(like)  # (no value that anybody reads)
    read = {u: id(own[u]) for u in uop.toposort() if u in own}

    def copy(passed: Passed, values: dict[str, int]) -> Tensor:
        made = _as(like, substitute(uop, {u: passed[key].uop for u, key in read.items()}) if read else uop)
        return with_dims(made, values) if values and binds(like) else made

    return copy


def _as(t: Tensor, uop: UOp) -> Tensor:
    """A tensor of just this node, which has a DETACH already where it was made without gradients."""
    with enable_grad():
        return t._new(uop)


def _part(given: Tensor, uop: UOp, node: UOp) -> Tensor:
    """An argument, or what the function made a view of it, in its memory."""
    return given if uop is node else _as(given, rebased(uop, node, given.uop))
