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
from collections.abc import Callable
from typing import Any

from manygrad.tensor.dtype import DType, dtypes
from manygrad.tensor.uop.ops import Ops
from manygrad.tensor.uop.table import NOTHING, AttributeTable, inferred, memo
from manygrad.tensor.uop.walk import toposort


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


# the two properties of every value, whose rules stand in `tensor.uop.shape`
SHAPE: AttributeTable[tuple[Any, ...]] = AttributeTable("shape", "_shape")
DEVICE: AttributeTable[str | tuple[str, ...] | None] = AttributeTable("device", "_device")


@inferred
def KEY(u: UOp) -> bytes:
    """A digest of the node and all below it."""
    return hashlib.sha256(f"{u.op.name} {u.dtype.name} {u.arg!r}".encode() + b"".join([KEY[s] for s in u.src])).digest()


@memo
def BELOW(u: UOp) -> tuple[UOp, ...]:
    """All nodes below a node, sources first."""
    return tuple(toposort(u.src))


def users(u: UOp) -> list[UOp]:
    """The living nodes that are made of `u`. (It looks through all nodes.)"""
    with _REMOVING:
        refs = list(_TABLE.values())
    return [x for ref in refs if any(s is u for s in ref.key[2]) and (x := ref()) is not None]


class UOp:
    """`op` on `src` giving values of `dtype`; `arg` is the op's own hashable parameter.

    Shape and device live in `tensor.uop.shape`; printing in `tensor.uop.show`.
    """

    __slots__ = ("__weakref__", "_beside", "_device", "_line", "_shape", "_stopped", "arg", "dtype", "op", "src")
    op: Ops
    dtype: DType
    src: tuple[UOp, ...]
    arg: Any
    _beside: dict[Any, Any]  # entries of tables (`tensor/uop/table.py`), which alone look here and into these slots:
    _shape: tuple[Any, ...]
    _device: str | tuple[str, ...] | None
    _line: str
    _stopped: bool

    def __new__(cls, op: Ops, dtype: DType = dtypes.void, src: tuple[UOp, ...] = (), arg: Any = None) -> UOp:
        kind = type(arg)
        key = (op, dtype, src, _argkey(arg) if kind is float or kind is bool else arg)
        ref = _TABLE.get(key)
        if ref is not None:
            node = ref()
            if node is not None:
                return node
        self = object.__new__(cls)
        self.op, self.dtype, self.src, self.arg, self._beside = op, dtype, src, arg, NOTHING
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
        return BELOW(self)

    @property
    def key(self) -> bytes:
        """A structural digest that is the same in every process (for the disk cache and plan hashes)."""
        return KEY(self)

    @property
    def shape(self) -> tuple[Any, ...]:
        """Dims of the value: ints, or index UOps where symbolic (`tensor.uop.shape`)."""
        try:
            return self._shape
        except AttributeError:
            return SHAPE(self)

    @property
    def device(self) -> str | tuple[str, ...] | None:
        """Where the value lives; None for constants, a tuple of names when sharded (`tensor.uop.shape`)."""
        try:
            return self._device
        except AttributeError:
            return DEVICE(self)

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

    def _no_number(self, *_: object) -> Any:
        from manygrad.tensor.uop.show import text_of_index

        raise TypeError(
            f"{text_of_index(self)} is known when the program runs, and what is asked for here needs a number while it "
            "is built; a size with a Variable in it takes +, -, *, // and % and bounds slices: cut such a dim to a "
            "number first, or reduce over it (sum, mean, amax, softmax)"
        )

    __truediv__ = __rtruediv__ = __rfloordiv__ = __rmod__ = _no_number
    __lt__ = __le__ = __gt__ = __ge__ = __int__ = __float__ = _no_number

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

    if hasattr(b, "uop"):
        return NotImplemented  # a tensor does it
    if a.dtype is not dtypes.index or not isinstance(b, (UOp, int)):
        raise TypeError(
            f"{name} of {a!r} and {type(b).__name__}: only symbolic integers have arithmetic; tensors are `Tensor`s"
        )
    return symbolic.to_sint(getattr(symbolic, name)(a, symbolic.as_index(b)))


def live_nodes() -> int:
    """How many nodes are interned now (for tests of memory)."""
    return len(_TABLE)
