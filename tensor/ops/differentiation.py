"""Which tensors require a gradient, how gradients are asked for, and hooks on them. The rules are in
`tensor/gradient.py`."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from manygrad.tensor import grad_mode, storage
from manygrad.tensor.changes import CHANGES
from manygrad.tensor.gradient import compute_gradients, hooked, with_history
from manygrad.tensor.hooks import RemovableHandle
from manygrad.tensor.lock import locked
from manygrad.tensor.source import LINE, user_line
from manygrad.tensor.storage import (
    HOOKED,
    LIVE,
    MEMORY,
    MOVES,
    TRAINED,
    Storage,
    about_to_change,
    is_stored,
    own_view,
)
from manygrad.tensor.stored import (
    ENDED,
    HISTORY,
    SOURCES,
    OwnNumber,
    carries,
    has_ended,
    has_live_history,
    is_hidden,
    leaves_before,
    note_former,
    was_leaf,
)
from manygrad.tensor.uop import Ops, UOp
from manygrad.tensor.uop.shape import attached
from manygrad.tensor.uop.uop import users
from manygrad.tensor.uop.views import Apart, memory

if TYPE_CHECKING:
    from manygrad.tensor.tensor import Tensor

_LEAVES = (Ops.CONTIGUOUS, Ops.DETACH)  # with a number: a leaf's own node


class DifferentiationMixin:
    _requires_grad: bool | None
    _leaf: int | None
    _hooks: dict[int, Callable[[Tensor], Tensor | None]] | None = None
    _accumulated_hooks: dict[int, Callable[[Tensor], None]] | None = None
    _grad: Tensor | None

    @property
    def grad(self: Tensor) -> Tensor | None:
        """Gradient that backward() has added up for this tensor so far."""
        return self._grad

    @grad.setter
    def grad(self: Tensor, value: Tensor | None) -> None:
        from manygrad.tensor.tensor import Tensor

        if value is not None and not isinstance(value, Tensor):
            raise TypeError(f"grad is a Tensor or None, not {type(value).__name__}")
        if value is not None and (value.shape, value.dtype) != (self.shape, self.dtype):
            raise ValueError(
                f"grad: a gradient of {value.shape} {value.dtype.name} does not fit a tensor of {self.shape} "
                f"{self.dtype.name}; both are the same"
            )
        self._grad = value

    @property
    @locked
    def requires_grad(self: Tensor) -> bool:
        """Whether this is a leaf to train, or was computed from one. Setting it makes a leaf of what depends on none;
        of what does, True changes nothing, and False is an error, as in PyTorch."""
        if self._requires_grad or not self.dtype.is_float:
            return bool(self._requires_grad)
        return _stands_on(self.uop, {t.uop for t in TRAINED})

    @requires_grad.setter
    @locked
    def requires_grad(self: Tensor, flag: bool | None) -> None:
        if flag and not self.dtype.is_float:
            raise TypeError(f"only float tensors can require a gradient, this one is {self.dtype.name}; cast it first")
        if flag is not None and is_computed_from_trained(self):
            if flag:
                return  # (its gradient flows on to what it was computed from)
            raise RuntimeError(
                "requires_grad: only of a leaf it can be changed, and this tensor was computed from one that requires "
                "a gradient; take detach() of it, or compute it under no_grad()"
            )
        if flag is not self._requires_grad:
            about_to_change(self)
        changed = bool(flag) and not self._requires_grad
        CHANGES.count += flag is not self._requires_grad
        self._requires_grad = flag
        if changed:
            self.__dict__.pop("_value", None)  # (no value of a step's, from here on: a step is one of it)
            is_view = self.uop.op is not Ops.BUFFER and is_stored(self.uop)
            self._become(own_view(self.uop) if is_view else self.uop, self._storage)
            TRAINED.add(self)
        elif not flag:
            TRAINED.discard(self)

    def requires_grad_(self: Tensor, requires_grad: bool = True) -> Tensor:
        self.requires_grad = requires_grad
        return self

    @property
    def is_leaf(self: Tensor) -> bool:
        return bool(self._requires_grad) or not self.requires_grad

    @locked
    def _become(self: Tensor, uop: UOp, storage: Storage | None = None) -> None:
        """Takes `uop` as the value, and the `storage` of what it is a view of. Of a tensor that requires a gradient and
        is not stored, a node of its own is made, numbered `_leaf`: equal values are one node, but two parameters that
        start equal have two gradients.
        """
        about_to_change(self)
        MOVES.count += 1
        if uop is not self.uop and id(self) in TRAINED.keys:
            note_former(self)
        if self._requires_grad and not is_stored(uop):
            self._leaf = OwnNumber.new()
            uop = UOp(Ops.CONTIGUOUS, uop.dtype, (uop,), self._leaf)
        self.uop, self._storage = uop, storage
        self.__dict__.pop("_is_part", None)  # (tensor/deferred/endings.py)
        LIVE.renew(self)
        TRAINED.renew(self)

    def detach(self: Tensor) -> Tensor:
        """The same value, through which no gradient flows; of a stored tensor, the same storage."""
        if self.uop.op is not Ops.DETACH or self._requires_grad:
            return self._op(Ops.DETACH)
        t = self._new(own_view(self.uop.src[0]))
        t._storage = self._identity()
        return t

    @locked
    def detach_(self: Tensor) -> Tensor:
        about_to_change(self)
        self._requires_grad = None
        TRAINED.discard(self)
        self.uop = self.detach().uop
        return self

    @property
    def data(self: Tensor) -> Tensor:
        return self.detach()

    @data.setter
    def data(self: Tensor, value: Tensor) -> None:
        new = value.detach()
        if is_computed_from_trained(self):
            new = unchanged_gradient(new, self)
        self._device = new._device
        self._become(new.uop, new._identity())
        CHANGES.count += 1

    # *** hooks ***

    def register_hook(self: Tensor, hook: Callable[[Tensor], Tensor | None]) -> RemovableHandle:
        """`hook(gradient)` is called with the complete gradient of this tensor whenever it is computed; what it
        returns, if anything, takes its place. Values that were computed alike are told apart by a hook, or
        `retain_grad()`, that comes before they are used."""
        if not self.requires_grad:
            raise RuntimeError(
                "register_hook: this tensor does not require a gradient, nothing it is computed from does"
            )
        self._hooks = self._hooks or {}
        set_apart(self)
        HOOKED.add(self)
        return RemovableHandle(self._hooks, hook)

    def register_post_accumulate_grad_hook(self: Tensor, hook: Callable[[Tensor], None]) -> RemovableHandle:
        """`hook(tensor)` is called after backward() has added to this leaf's `.grad`."""
        if not self._requires_grad:
            raise RuntimeError("register_post_accumulate_grad_hook: only a leaf with requires_grad=True gets a .grad")
        self._accumulated_hooks = self._accumulated_hooks or {}
        return RemovableHandle(self._accumulated_hooks, hook)

    _retains = False

    def retain_grad(self: Tensor) -> None:
        """backward() sets `.grad` of this tensor too, though it is not a leaf."""
        if not self.requires_grad:
            raise RuntimeError("retain_grad: this tensor does not require a gradient")
        set_apart(self)
        self._retains = True

    @property
    def retains_grad(self: Tensor) -> bool:
        return self._retains and not self._requires_grad

    # *** gradients ***

    def backward(
        self: Tensor,
        gradient: Tensor | None = None,
        retain_graph: bool | None = None,
        create_graph: bool = False,
        inputs: Sequence[Tensor] | None = None,
    ) -> Tensor:
        """Adds to `.grad` (lazily) of every live tensor with requires_grad=True that this one depends on,
        or only of `inputs`.

        Gradients can be differentiated again with `create_graph=True`. Graphs are never freed: `retain_graph` changes
        nothing.
        """
        found = self._leaf_gradients(gradient, create_graph, inputs)
        with grad_mode.set_grad_enabled(create_graph):
            for t, g in found:
                t._add_gradient(g)
        return self

    @locked
    def _leaf_gradients(
        self: Tensor, gradient: Tensor | None, create_graph: bool, inputs: Sequence[Tensor] | None
    ) -> list[tuple[Tensor, Tensor]]:
        """The leaves that backward() reaches, each with what it adds to its gradient. (Hooks of leaves come later.)"""
        if gradient is None:
            if self.numel() != 1:
                raise ValueError(
                    f"backward() starts at a scalar, this tensor has shape {self.shape}; sum it, or pass gradient="
                )
            if not self.dtype.is_float:
                raise TypeError(f"backward() needs a float tensor, this one is {self.dtype.name}")
        trained = list(TRAINED)
        wanted = [t for t in LIVE if t._requires_grad or t._retains] if inputs is None else list(inputs)
        root, now, stored = with_history(self.uop, trained)
        flowing = root.toposort(carries)
        reached = _reached(wanted, now, flowing)
        if not reached:
            raise RuntimeError(
                "backward(): no tensor with requires_grad=True stands below this one: it does not depend on any, or "
                "through whole numbers, truths, detach() or gradients that were made without create_graph=True only"
            )
        hooks = _hooks(now)
        for t, nodes in reached:
            for u in nodes if t._requires_grad else ():
                hooks.pop(u, None)
        targets = {u for _, nodes in reached for u in nodes}
        leaves = {t.uop for t in trained} | {u for t, nodes in reached if t._requires_grad for u in nodes}
        grads = compute_gradients(root, self._start(gradient), targets, stored, leaves, hooks)
        found = [(t, nodes, g) for t, nodes in reached if (g := _added_up(t, nodes, grads)) is not None]
        if create_graph:
            return [(t, g) for t, _, g in found]
        # (no view of another tensor: it may be written to)
        made = [
            (t, t._new(UOp(Ops.DETACH, g.dtype, (g.uop,))), next(grads[u] for u in nodes if u in grads))
            for t, nodes, g in found
        ]
        for _, new, u in made:
            LINE[new.uop] = LINE.get(u) or "?"  # (the user's line that it is the gradient of)
        return [(t, new) for t, new, _ in made]

    def _add_gradient(self: Tensor, new: Tensor) -> None:
        """What backward() has made for this leaf, by way of its hooks."""
        if self._hooks and self._requires_grad:
            for hook in list(self._hooks.values()):
                new = hooked(hook, new)
        if self._grad is None:
            self._grad = new
        else:
            self._grad._accumulate(new)
        if self._accumulated_hooks:
            for told in list(self._accumulated_hooks.values()):
                told(self)

    @locked
    def _accumulate(self: Tensor, new: Tensor) -> None:
        """Adds to this gradient in place, as in PyTorch: who holds it sees the sum."""
        self.assign(
            new + self
        )  # (a product that `new` ends with is rounded with the sum, whether self is stored or not)

    @locked
    def _clear(self: Tensor) -> None:
        """Fills this gradient with zeros, in place."""
        with grad_mode.no_grad():
            self._overwrite(0.0)

    def gradient(self: Tensor, *targets: Tensor, gradient: Tensor | None = None) -> list[Tensor]:
        """d(self)/d(target) for each target, without touching `.grad`; zeros where nothing flows.

        Any tensor below can be a target. Values that have been computed remember how only where they depend on what
        has requires_grad=True, so it is an error where one was computed from any other target, or may have been.
        """
        found = self._gradients(targets, gradient)
        absent = [t for t, g in zip(targets, found) if g is None and not t._requires_grad]
        if absent:
            below = with_history(self.uop, [t for t in targets if t._requires_grad])[1]
            if any(t.uop not in below for t in absent):
                raise _forgotten("this value does not depend on one of the targets, as far as is known")
        return [t.zeros_like() if g is None else g for t, g in zip(targets, found)]

    @locked
    def _gradients(self: Tensor, targets: Sequence[Tensor], gradient: Tensor | None) -> list[Tensor | None]:
        leaves = [t for t in targets if t._requires_grad]
        root, now, stored = with_history(self.uop, leaves)
        _refuse_forgotten(root, {t.uop for t in leaves}, {t.uop for t in targets if not t._requires_grad})
        reached = {id(t): nodes for t, nodes in _reached(targets, now, root.toposort(carries))}
        aims = {u for nodes in reached.values() for u in nodes}
        ends = {t.uop for t in leaves} | {u for t in leaves for u in reached.get(id(t), ())}
        grads = compute_gradients(root, self._start(gradient), aims, stored, ends, _hooks(now))
        return [_added_up(t, reached.get(id(t), []), grads) for t in targets]

    def _start(self: Tensor, gradient: Tensor | None) -> UOp:
        """d(self)/d(self): ones, or what the caller gives."""
        if gradient is not None and gradient.shape != self.shape:
            raise ValueError(
                f"a gradient of shape {gradient.shape} does not fit the tensor it is of, {self.shape}; "
                "pass one of that shape, such as gradient.expand(...)"
            )
        return (
            self._new(UOp.const(self.dtype, 1.0))._broadcast(self.shape)
            if gradient is None
            else gradient.cast(self.dtype)
        ).uop

    @staticmethod
    def no_grad() -> grad_mode.no_grad:
        """`with Tensor.no_grad():`: values made inside have no gradient."""
        return grad_mode.no_grad()


@locked
def zero_grad(t: Tensor, set_to_none: bool) -> None:
    """Forgets the gradient of one parameter, for `zero_grad` of optimizers and modules: `.grad` is None, or zeros where
    it lies, so that its views and a captured step show them."""
    if set_to_none or t._grad is None:
        t._grad = None
    else:
        t._grad._clear()


def is_computed_from_trained(t: Tensor) -> bool:
    """Whether it is no leaf, nor another tensor of one's memory, and a gradient flows on from it."""
    if t._requires_grad or not t.dtype.is_float:
        return False
    # (a new model's parameters stand on no memory: nothing else is asked of each)
    if not any(u.op in MEMORY or (u.op in _LEAVES and u.arg is not None) for u in t.uop.toposort(carries)):
        return False
    return _stands_on_leaf(t.uop)


class Written(NamedTuple):
    """What a write leaves, as far as gradients go.

    `value`: what is written; `anew`: whether it makes a new value of what is in memory (None: where backward() needs
    what was there); `joins`: whether the tensor, and its views, that no gradient flowed through have the value's now
    (None: it would, but others in that memory have another one).
    """

    value: Tensor
    anew: bool | None = None
    joins: bool | None = False


def as_written(t: Tensor, value: Tensor) -> Written:
    """`value` as it is written to `t`, which is no leaf, and whose views have the same gradient.

    Under no_grad() the gradient that flowed through what is written to flows on as if nothing were written. Of what was
    made under no_grad(), or detached, others may be left that a gradient flows through: they keep it, too.
    """
    on = grad_mode.is_grad_enabled()
    if not t.dtype.is_float:
        return Written(value)
    if t._requires_grad and (on or not _is_of_detached(t)):
        # (what is assigned to a leaf is its value; others in its memory may have histories)
        return Written(value if t.uop.op in MEMORY else value.detach())
    if not on and (value._requires_grad or not (value.uop.op is Ops.DETACH or grad_mode.STOPPED(value.uop))):
        value = value.detach()
    is_apart = attached(t.uop) is not t.uop
    if on and not is_apart:
        return Written(value)
    has_gradient, base = on and value.requires_grad, memory(t.uop)
    flows = (base.op is not Ops.BUFFER or base in HISTORY) and _stands_on_leaf(base)
    if not flows and not has_gradient:
        return Written(value)
    others = [s for s in storage.sharing(t) if "_is_result" not in s.__dict__]  # (of a replayed loop's own)
    if is_apart and not any(s._requires_grad or attached(s.uop) is s.uop for s in others):
        if has_gradient and flows and storage.waits(t):
            raise RuntimeError(
                f"{user_line()}: a value that has a gradient is written in place to what was detached (shape {t.shape})"
                ", while another write to it waits that has one, too; use x = x + y where there is x += y"
            )
        return Written(value, True if has_gradient and (flows or has_ended(base)) else None, has_gradient)
    joins = None if has_gradient else False
    if flows:
        return Written(unchanged_gradient(value, t), not storage.waits(t), joins)
    return Written(value.detach() if is_apart else value, None, joins)


def _is_of_detached(leaf: Tensor) -> bool:
    """Whether a leaf was made of what is detached, through which another gradient may flow."""
    u = leaf.uop
    return storage.detached(u.src[0] if u.op is Ops.CONTIGUOUS else u) is not None


def unchanged_gradient(value: Tensor, old: Tensor) -> Tensor:
    """`value`, written past the gradient of `old`, which flows on as if nothing were written (torch's `data`)."""
    with grad_mode.enable_grad():
        now = value._new(UOp(Ops.DETACH, value.dtype, (value.uop,)))
        before = old._new(attached(old.uop, past_leaves=True))
        from manygrad.tensor.ops.elementary import with_gradient

        return with_gradient(now, "unchanged", None, lambda g, _: (g,), before)


@locked
def set_apart(t: Tensor) -> None:
    """Gives `t`, which is no leaf, a node of its own. Equal values are one node, and each has a gradient of its own:
    what was made of that node before may be of any of them."""
    u = t.uop
    if t._requires_grad or type(u.arg) is Apart or any(type(x.arg) is not Apart for x in users(u)):
        return
    if all(s is t or s.uop is not u for s in storage.sharing(t)):  # (a view of it has its gradient, too)
        t.uop = UOp(Ops.CUSTOM, u.dtype, (u,), Apart())
        LIVE.renew(t)


def _stands_on_leaf(base: UOp) -> bool:
    """Whether a gradient flows on from what lies there, which is no leaf."""
    leaves = {x.uop for x in TRAINED}
    return base not in leaves and _stands_on(base, leaves)


def _stands_on(root: UOp, leaves: set[UOp]) -> bool:
    """Whether a gradient flows from it to any of these, or to a stored value that has, or had, one."""
    below = root.toposort(carries)
    has = lambda u: u in HISTORY or u in ENDED  # noqa: E731
    if any(u in leaves or is_hidden(u) or (has(u) and carries(u)) for u in below):
        return True
    return any(map(was_leaf, below)) and any(map(was_leaf, _read(root)))


def _read(root: UOp) -> set[UOp]:
    """What a gradient flows to from `root`: not what something was written to, before that."""
    found, todo = {root}, [root]
    while todo:
        u = todo.pop()
        new = set(u.src[1:] if u.op is Ops.STORE else u.src) - found if carries(u) else set()
        found |= new
        todo += new
    return found


def flows_on(root: UOp) -> bool:
    """Whether a gradient flows from a value to a leaf: not where all of them have been written to since."""
    leaves = {t.uop for t in TRAINED}
    return any(u in leaves or (carries(u) and (has_live_history(u) or was_leaf(u))) for u in root.toposort(carries))


def _reached(wanted: Sequence[Tensor], now: dict[UOp, UOp], below: Collection[UOp]) -> list[tuple[Tensor, list[UOp]]]:
    """Which of these the nodes `below` a root have, each with its nodes: of a leaf that was written to since also the
    one that it was. `now`: what each node became."""
    flowing, former = set(below), dict[int, list[UOp]]()
    for u in below:
        if was_leaf(u):
            for t in leaves_before(u):
                former.setdefault(id(t), []).append(u)
    found = []
    for t in wanted:
        own = now.get(t.uop)
        nodes = [own] if own in flowing and own is not None else []
        nodes += [u for u in former.get(id(t), ()) if u is not own]
        if nodes:
            found.append((t, nodes))
    return found


def _added_up(t: Tensor, nodes: Sequence[UOp], grads: dict[UOp, UOp]) -> Tensor | None:
    """The gradient of what has these nodes."""
    total: Tensor | None = None
    for g in (grads.get(u) for u in nodes):
        if g is not None:
            total = t._new(g) if total is None else total + t._new(g)
    return total


def _refuse_forgotten(root: UOp, leaves: set[UOp], others: set[UOp]) -> None:
    """Raises RuntimeError where something stored below `root` was computed from one of the `others`, as what flows
    through it would be left out."""
    for u in root.toposort(lambda u: carries(u) and u not in leaves) if others else ():
        if (sources := SOURCES.get(u)) is not None and carries(u) and u not in leaves:
            if any(t in sources for t in others):
                raise _forgotten(f"a value of shape {u.shape} below this one was computed from one of the targets")


def _forgotten(what: str) -> RuntimeError:
    return RuntimeError(
        f"gradient(): {what}: what has been computed (realize(), a read) remembers only what has requires_grad=True. "
        "Set it on the target before, or ask for the gradient before the value is computed; detach() what is to count "
        "as a constant"
    )


def _hooks(now: dict[UOp, UOp]) -> dict[UOp, list[Any]]:
    return {now[t.uop]: list(t._hooks.values()) for t in HOOKED if t._hooks and t.uop in now}
