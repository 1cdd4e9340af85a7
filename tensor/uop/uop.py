"""The IR node: an immutable, hash-consed operation.

Two structurally equal nodes are the same object, so equality is identity and a graph is its own key. The intern table
holds nodes weakly: a node dies with its last user. Freed nodes are dropped from a queue, not recursively, so graphs of
any depth can die.
"""

from __future__ import annotations

import hashlib
import os
import threading
import weakref
from collections.abc import Callable, Iterable
from typing import Any

from manygrad.tensor.dtype import DType, dtypes
from manygrad.tensor.uop.ops import Ops


class _Ref(weakref.ref):
    __slots__ = ("key",)
    key: Any


_TABLE: dict[tuple[Any, ...], _Ref] = {}
_DEAD: list[_Ref] = []
# held where an entry of a dead node is removed or replaced; new entries are made without it
_REMOVING = threading.RLock()
_draining = False
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_REMOVING._at_fork_reinit)  # type: ignore[attr-defined]


def _forget(
    ref: _Ref, acquire: Callable[[bool], bool] = _REMOVING.acquire, release: Callable[[], None] = _REMOVING.release
) -> None:
    """Weak-reference callback: drop the dead node's entry; a queue instead of recursion.
    Who finds another one at it leaves it the entry."""
    global _draining
    _DEAD.append(ref)
    if _draining or not acquire(False):
        return
    _draining = True
    try:
        while _DEAD:
            ref = _DEAD.pop()
            key = ref.key
            if _TABLE.get(key) is ref:
                del _TABLE[key]
            del ref, key
    finally:
        _draining = False
        release()


def _argkey(arg: Any) -> Any:
    """1, 1.0, True and -0.0 must not be one constant."""
    if type(arg) is float:
        return ("f", arg.hex())
    if type(arg) is bool:
        return ("b", arg)
    return arg


class infer:
    """Set by `tensor.uop.shape` when it is imported: the two inferred properties of a node."""

    shape: Callable[[UOp], tuple[Any, ...]]
    device: Callable[[UOp], str | tuple[str, ...] | None]


class UOp:
    """`op` on `src` giving values of `dtype`; `arg` is the op's own hashable parameter.

    Shape and device live in `tensor.uop.shape`; printing in `tensor.uop.show`.
    """

    __slots__ = ("__weakref__", "_cache", "arg", "dtype", "op", "src")
    op: Ops
    dtype: DType
    src: tuple[UOp, ...]
    arg: Any
    _cache: dict[str, Any]

    def __new__(cls, op: Ops, dtype: DType = dtypes.void, src: tuple[UOp, ...] = (), arg: Any = None) -> UOp:
        kind = type(arg)
        key = (op, dtype, src, _argkey(arg) if kind is float or kind is bool else arg)
        ref = _TABLE.get(key)
        if ref is not None:
            node = ref()
            if node is not None:
                return node
        self = object.__new__(cls)
        self.op, self.dtype, self.src, self.arg, self._cache = op, dtype, src, arg, {}
        new = _Ref(self, _forget)
        new.key = key
        ref = _TABLE.setdefault(key, new)  # (atomic)
        if ref is not new:  # another thread was faster, or a dead node's entry is still there
            with _REMOVING:
                ref = _TABLE.setdefault(key, new)
                node = None if ref is new else ref()
                if node is not None:
                    return node
                _TABLE[key] = new
        return self

    def __reduce__(self) -> Any:
        return UOp, (self.op, self.dtype, self.src, self.arg)

    def __repr__(self) -> str:
        arg = "" if self.arg is None else f", {self.arg!r}"
        return f"UOp({self.op.name}, {self.dtype.name}, {len(self.src)} src{arg})"

    def replace(self, **changes: Any) -> UOp:
        """The same node with some of op, dtype, src, arg changed."""
        if len(changes) == 1 and "src" in changes:
            return UOp(self.op, self.dtype, changes["src"], self.arg)
        return UOp(
            changes.get("op", self.op),
            changes.get("dtype", self.dtype),
            changes.get("src", self.src),
            changes.get("arg", self.arg),
        )

    def toposort(self, enter: Callable[[UOp], bool] | None = None) -> list[UOp]:
        """All nodes below and including this one, sources first. `enter(u)` false: do not look below `u`."""
        return [*self.below(), self] if enter is None and self.op is Ops.SINK else toposort((self,), enter)

    def below(self) -> tuple[UOp, ...]:
        """All nodes below this one, sources first; found once, for graphs and kernels that many passes walk."""
        found: tuple[UOp, ...] | None = self._cache.get("below")
        if found is None:
            found = self._cache["below"] = tuple(toposort(self.src))
        return found

    @property
    def key(self) -> bytes:
        """A structural digest that is the same in every process (for the disk cache and plan hashes)."""
        for u in lacking(self, "key"):
            head = f"{u.op.name} {u.dtype.name} {u.arg!r}".encode()
            u._cache["key"] = hashlib.sha256(head + b"".join([s._cache["key"] for s in u.src])).digest()
        return self._cache["key"]

    @property
    def shape(self) -> tuple[Any, ...]:
        """Dims of the value: ints, or index UOps where symbolic (`tensor.uop.shape`)."""
        found = self._cache.get("shape")
        return found if found is not None else infer.shape(self)

    @property
    def device(self) -> str | tuple[str, ...] | None:
        """Where the value lives; None for constants, a tuple of names when sharded (`tensor.uop.shape`)."""
        return self._cache["device"] if "device" in self._cache else infer.device(self)

    # *** arithmetic of symbolic integers: bound variables and symbolic dims ***

    def __add__(self, other: UOp | int) -> Any:
        return _symbolic("add", self, other)

    def __radd__(self, other: int) -> Any:
        return _symbolic("add", self, other)

    def __sub__(self, other: UOp | int) -> Any:
        return self + other * -1

    def __rsub__(self, other: int) -> Any:
        return self * -1 + other

    def __mul__(self, other: UOp | int) -> Any:
        return _symbolic("mul", self, other)

    def __rmul__(self, other: int) -> Any:
        return _symbolic("mul", self, other)

    def __floordiv__(self, other: int) -> Any:
        return _symbolic("floordiv", self, other)

    def __mod__(self, other: int) -> Any:
        return _symbolic("mod", self, other)

    def __neg__(self) -> Any:
        return self * -1

    # *** construction of constants and ALU nodes ***

    @staticmethod
    def const(dtype: DType, value: Any) -> UOp:
        return UOp(Ops.CONST, dtype, (), dtype.const(value))

    def alu(self, op: Ops, *others: UOp) -> UOp:
        """An elementwise node; comparisons give bool, WHERE the type of its branches."""
        src = (self, *others)
        dtype = dtypes.bool if op in (Ops.CMPLT, Ops.CMPNE, Ops.CMPEQ) else src[-1].dtype
        return UOp(op, dtype, src)

    def cast(self, dtype: DType) -> UOp:
        return self if self.dtype is dtype else UOp(Ops.CAST, dtype, (self,))

    def bitcast(self, dtype: DType) -> UOp:
        return self if self.dtype is dtype else UOp(Ops.BITCAST, dtype, (self,))


def _symbolic(name: str, a: UOp, b: UOp | int) -> Any:
    """`a` op `b` for symbolic integers: an int where it is constant."""
    from manygrad.tensor.uop import symbolic

    if a.dtype is not dtypes.index or not isinstance(b, (UOp, int)):
        raise TypeError(
            f"{name} of {a!r} and {type(b).__name__}: only symbolic integers have arithmetic; tensors are `Tensor`s"
        )
    return symbolic.to_sint(getattr(symbolic, name)(a, symbolic.as_index(b)))


def toposort(roots: Iterable[UOp], enter: Callable[[UOp], bool] | None = None) -> list[UOp]:
    """Nodes reachable from `roots`, sources first, each once; iterative."""
    done: dict[UOp, None] = {}
    stack: list[UOp | None] = [*roots]
    stack.reverse()
    path: list[UOp] = []  # entered, their sources not all done; a None on the stack stands for the last of them
    pop, push = stack.pop, stack.append
    while stack:
        u = pop()
        if u is None:
            done[path.pop()] = None
        elif u not in done:
            src = u.src
            if src and (enter is None or enter(u)):
                path.append(u)
                push(None)
                if len(src) == 1:
                    push(src[0])
                else:
                    stack += src[::-1]
            else:
                done[u] = None
    return list(done)


def lacking(u: UOp, name: str) -> list[UOp]:
    """The nodes below and including `u` for which `name` has yet to be inferred (it is not in their `_cache`),
    sources first."""
    if name in u._cache:
        return []
    for s in u.src:
        if name not in s._cache:
            return [x for x in toposort((u,), lambda x: name not in x._cache) if name not in x._cache]
    return [u]


def standing_on(
    roots: Iterable[UOp], found: Callable[[UOp], bool], opaque: Ops | Callable[[UOp], bool] = lambda u: False
) -> set[UOp]:
    """The nodes below `roots` that are `found` or have such a one below them;
    nothing is seen through `opaque` nodes."""
    blind = (lambda u: u.op is opaque) if isinstance(opaque, Ops) else opaque
    out: set[UOp] = set()
    for u in toposort(roots, lambda u: not blind(u)):
        if found(u) or (not blind(u) and any(s in out for s in u.src)):
            out.add(u)
    return out


def live_nodes() -> int:
    """How many nodes are interned now (for tests of memory)."""
    return len(_TABLE)
