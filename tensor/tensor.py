"""`Tensor`: a lazy value. Methods build UOps; nothing runs until `realize()`, `numpy()`, `item()` or `tolist()`.

The operators are in `tensor/ops/`, one concept a file. This file holds the value itself: where it comes from, what it
is, and how it is realized, assigned, moved and differentiated.
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from manygrad.tensor import environment as env
from manygrad.tensor.dtype import DType, dtypes, to_dtype
from manygrad.tensor.engine import engine
from manygrad.tensor.ops.creation import CreationMixin
from manygrad.tensor.ops.elementwise import ElementwiseMixin
from manygrad.tensor.ops.functional import FunctionalMixin
from manygrad.tensor.ops.indexing import IndexingMixin
from manygrad.tensor.ops.linalg import LinalgMixin
from manygrad.tensor.ops.movement import MovementMixin
from manygrad.tensor.ops.random import RandomMixin
from manygrad.tensor.ops.reduction import ReductionMixin
from manygrad.tensor.source import mark
from manygrad.tensor.uop import GroupOp, Ops, UOp
from manygrad.tensor.uop.rewrite import substitute
from manygrad.tensor.uop.shape import numel, unviewed
from manygrad.tensor.uop.symbolic import variable


class TensorSet:
    """A weak set by identity (`==` on tensors is elementwise, so `WeakSet` will not do), in order of insertion."""

    def __init__(self) -> None:
        self._refs: dict[int, weakref.ref[Tensor]] = {}

    def add(self, t: Tensor) -> None:
        key, refs = id(t), self._refs
        refs[key] = weakref.ref(t, lambda _: refs.pop(key, None))

    def discard(self, t: Tensor) -> None:
        self._refs.pop(id(t), None)

    def __iter__(self) -> Iterator[Tensor]:
        return (t for r in list(self._refs.values()) if (t := r()) is not None)

    def __len__(self) -> int:
        return len(self._refs)


_leaves = itertools.count(1)
LIVE = TensorSet()
PENDING = TensorSet()  # assigned, not yet realized


class Tensor(
    ElementwiseMixin, MovementMixin, ReductionMixin, IndexingMixin, LinalgMixin, FunctionalMixin, CreationMixin, RandomMixin
):
    """A value of `shape` and `dtype` on `device`.

    `data`: a number, (nested) list, NumPy array, bytes, a `UOp`, or another Tensor. Floats become float32 and ints int64, as in
    PyTorch; NumPy arrays keep their type. `device` is a name such as `CPU:1`, default `CPU` (env DEVICE).
    """

    __array_priority__ = 1000
    uop: UOp
    _device: str | tuple[str, ...]
    training: bool = False

    def __init__(self, data: Any, device: str | tuple[str, ...] | None = None, dtype: DType | str | None = None, requires_grad: bool | None = None):
        want = to_dtype(dtype) if dtype is not None else None
        self._requires_grad: bool | None = None
        self._leaf: int | None = None
        self.grad: Tensor | None = None
        target = _canonical(device) if device is not None else None
        single: str | tuple[str, ...] = target if isinstance(target, str) else default_device()
        if isinstance(data, Tensor):
            self.uop, single = data.uop, data._device
        elif isinstance(data, UOp):
            self.uop = data
        elif isinstance(data, (bool, int, float)):
            kind = want or (dtypes.bool if isinstance(data, bool) else dtypes.int64 if isinstance(data, int) else dtypes.default_float)
            self.uop = UOp.const(kind, data)
        else:
            array = _to_array(data, want)
            self.uop = engine().from_numpy(array, dtypes.from_np(array.dtype), target if isinstance(target, str) else default_device())
        self._device = single
        if want is not None and self.uop.dtype is not want:
            self.uop = self.uop.cast(want)
        if target is not None and self.device != target and self.uop.device is not None:
            self.uop = self.to(target).uop
        self.requires_grad = requires_grad
        LIVE.add(self)

    # *** how operators make new tensors ***

    def _new(self, uop: UOp) -> Tensor:
        """A tensor of `uop` that inherits where deviceless values live."""
        t = Tensor.__new__(Tensor)
        t.uop, t._requires_grad, t._leaf, t.grad, t._device = uop, None, None, None, self._device
        LIVE.add(t)
        return t

    def _op(self, op: Ops, arg: Any = None, *others: Tensor, dtype: DType | None = None) -> Tensor:
        return self._new(mark(UOp(op, dtype or self.dtype, (self.uop, *(o.uop for o in others)), arg)))

    # *** what it is ***

    @property
    def shape(self) -> tuple[Any, ...]:
        return self.uop.shape

    @property
    def dtype(self) -> DType:
        return self.uop.dtype

    @property
    def device(self) -> str | tuple[str, ...]:
        return self.uop.device or self._device

    @property
    def ndim(self) -> int:
        return len(self.uop.shape)

    def numel(self) -> int:
        return numel(self.shape)

    def size(self, dim: int | None = None) -> Any:
        return self.shape if dim is None else self.shape[self._dim(dim)]

    def element_size(self) -> int:
        return self.dtype.itemsize

    @property
    def nbytes(self) -> int:
        return self.numel() * self.dtype.itemsize

    def __len__(self) -> int:
        if not self.shape:
            raise TypeError("len() of a 0-d tensor")
        return int(self.shape[0])

    def __repr__(self) -> str:
        state = "realized" if self.is_realized else "lazy"
        return f"<Tensor {list(self.shape)} {self.dtype.name} on {self.device if isinstance(self.device, str) else f'{len(self.device)} devices'}, {state}>"

    def __hash__(self) -> int:
        return id(self)

    def __bool__(self) -> bool:
        if self.numel() != 1:
            raise TypeError(f"the truth of a tensor of shape {self.shape} is ambiguous; use .any() or .all()")
        return bool(self.item())

    def __float__(self) -> float:
        return float(self.item())

    def __int__(self) -> int:
        return int(self.item())

    def __index__(self) -> int:
        if not (self.dtype.is_int or self.dtype.is_bool):
            raise TypeError(f"only integer tensors can be an index, not {self.dtype.name}")
        return int(self.item())

    @property
    def is_realized(self) -> bool:
        u = unviewed(self.uop)
        return u.op is Ops.BUFFER and engine().is_realized(u)

    # *** running ***

    def realize(self, *others: Tensor) -> Tensor:
        """Compute this tensor (and `others`, and pending assignments) now."""
        engine().realize([self, *others])
        return self

    def numpy(self) -> np.ndarray:
        """The values as a NumPy array (a copy); a sharded tensor is gathered."""
        t = self
        if any(not isinstance(d, int) for d in t.shape):
            raise ValueError(f"numpy() needs a shape of numbers, not {t.shape}; shrink or bind the symbolic dim first")
        if t.numel() == 0:
            return np.empty(t.shape, t.dtype.np)
        if isinstance(t.device, tuple) or "@" in t.device:
            t = t.to(engine().canonical(default_device()))
        if t.uop.op is not Ops.BUFFER:
            u = t.uop
            t = t.contiguous() if u.op is not Ops.AFTER and u.op in GroupOp.MOVEMENT else t
            t.realize()
            if self.device == t.device and self.uop is u and u.op not in GroupOp.MOVEMENT:
                self.uop = t.uop
            if t.uop.op is not Ops.BUFFER:
                t = t.contiguous().realize()
        else:
            t.realize()
        return engine().to_numpy(t.uop)

    def item(self) -> bool | int | float:
        """The one element as a Python number."""
        if self.numel() != 1:
            raise ValueError(f"item() needs one element, this tensor has shape {self.shape}; index it first")
        return self.numpy().astype(object if self.dtype is not dtypes.bfloat16 else np.float32).reshape(-1)[0]

    def tolist(self) -> Any:
        a = self.numpy()
        return (a.astype(np.float32) if self.dtype is dtypes.bfloat16 else a).tolist()

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        a = self.numpy()
        return a if dtype is None else a.astype(dtype)

    # *** writing ***

    def assign(self, value: Tensor | float) -> Tensor:
        """Overwrite this tensor's storage with `value` (broadcast to its shape), lazily.

        Views of a stored tensor (by reshape, permute, flip, slices) share its storage: writing through one shows in all. What was
        computed before keeps the values it was computed from.
        """
        x = value if isinstance(value, Tensor) else self._new(UOp.const(self.dtype, value))
        if x.dtype is not self.dtype:
            x = x.cast(self.dtype)
        if x.shape != self.shape:
            x = x.expand(self.shape)
        if x.uop.device is not None and self.uop.device is not None and x.uop.device != self.uop.device:
            raise ValueError(f"assign: the value is on {x.uop.device}, the target on {self.uop.device}; move it first with .to(target.device)")
        if x.uop is self.uop:
            return self
        if not self._is_stored:  # the value simply becomes this tensor's
            if isinstance(self.device, str) and x.uop.device is None:
                x._device = self._device
            self._become(x.uop)
            return self
        if self.numel() > numel(unviewed(self.uop).shape):
            raise ValueError(f"assign: {self.shape} is an expanded view, whose elements share memory; assign to what was expanded, or to a clone()")
        self._write(self.uop, x.uop)
        return self

    @property
    def _is_stored(self) -> bool:
        """Whether there is memory to write to: a buffer, perhaps with assignments that are still to be carried out."""
        return unviewed(self.uop).op in (Ops.BUFFER, Ops.AFTER)

    @staticmethod
    def _write(target: UOp, value: UOp) -> None:
        """Stores `value` at `target`, a view of memory; all live views of that memory then show it."""
        before = unviewed(target)
        after = UOp(Ops.AFTER, before.dtype, (before, mark(UOp(Ops.STORE, dtypes.void, (target, value)))))
        for t in LIVE:
            if unviewed(t.uop) is before:
                t.uop = substitute(t.uop, {before: after})
                PENDING.add(t)

    def replace(self, other: Tensor) -> Tensor:
        """Become `other` (same shape and dtype), without touching storage."""
        if (other.shape, other.dtype) != (self.shape, self.dtype):
            raise ValueError(f"replace: {other.shape} {other.dtype.name} is not {self.shape} {self.dtype.name}")
        self._device = other._device
        self._become(other.uop)
        return self

    def detach(self) -> Tensor:
        return self._op(Ops.DETACH)

    def contiguous(self) -> Tensor:
        """Stored on its own, as it is: a fusion boundary."""
        return self if self.uop.op in (Ops.CONTIGUOUS, Ops.BUFFER) else self._op(Ops.CONTIGUOUS)

    def clone(self) -> Tensor:
        return self._op(Ops.CONTIGUOUS)

    def __deepcopy__(self, memo: dict[int, Any]) -> Tensor:
        t = self.detach().clone().realize()
        t.requires_grad = self.requires_grad
        return t

    def __reduce__(self) -> Any:
        return _unpickle, (self.numpy(), self.dtype.name, self.requires_grad)

    # *** devices ***

    def to(self, device: str | tuple[str, ...] | None) -> Tensor:
        """The value on `device`; a tuple replicates it over several."""
        if device is None:
            return self
        target = _canonical(device)
        if isinstance(target, tuple):
            return self.shard(target)
        if self.device == target:
            return self
        if self.uop.device is None:
            t = self._new(self.uop)
            t._device = target
            return t
        t = self._new(mark(UOp(Ops.COPY, self.dtype, (self.uop,), target)))
        t._device = target
        return t

    def shard(self, devices: Sequence[str], axis: int | None = None) -> Tensor:
        """Cut along dim `axis` over `devices` (None: a full copy on each).

        Global shape S becomes, on device i of n, S with dim `axis` of size ceil(S[axis] / n) (the last ones smaller, maybe 0).
        On several workers every worker must hold the same value.
        """
        names = _canonical(tuple(devices))
        assert isinstance(names, tuple)
        if len(set(names)) != len(names):
            raise ValueError(f"shard: a device is named twice in {names}")
        if axis is not None:
            axis = self._dim(axis)
        if isinstance(self.device, tuple):
            if self.device != names:
                raise ValueError(f"shard: the tensor is already on {self.device}; bring it to one device first with .to(device)")
            if engine().sharding_axis(self.uop) == axis:
                return self
        return self._new(mark(UOp(Ops.SHARD, self.dtype, (self.uop,), (names, axis))))

    def shard_(self, devices: Sequence[str], axis: int | None = None) -> Tensor:
        self._become(self.shard(devices, axis).uop)
        return self

    def to_(self, device: str | tuple[str, ...]) -> Tensor:
        t = self.to(device)
        self._device = t._device
        self._become(t.uop)
        return self

    # *** gradients ***

    @property
    def requires_grad(self) -> bool | None:
        return self._requires_grad

    @requires_grad.setter
    def requires_grad(self, flag: bool | None) -> None:
        changed = bool(flag) and not self._requires_grad
        self._requires_grad = flag
        if changed:
            self._become(self.uop)

    def _become(self, uop: UOp) -> None:
        """Takes `uop` as the value. Of a tensor that requires a gradient and is not stored, a node of its own is made, numbered
        `_leaf`: equal values are one node, but two parameters that start equal have two gradients.
        """
        if self._requires_grad and unviewed(uop).op not in (Ops.BUFFER, Ops.AFTER):
            self._leaf = next(_leaves)
            uop = UOp(Ops.CONTIGUOUS, uop.dtype, (uop,), self._leaf)
        self.uop = uop

    def backward(self, gradient: Tensor | None = None) -> Tensor:
        """Sets `.grad` (lazily, added to what is there) of every live tensor with `requires_grad` that this one depends on."""
        from manygrad.tensor.gradient import compute_gradients, with_history

        if gradient is None:
            if self.numel() != 1:
                raise ValueError(f"backward() starts at a scalar, this tensor has shape {self.shape}; sum it, or pass gradient=")
            if not self.dtype.is_float:
                raise TypeError(f"backward() needs a float tensor, this one is {self.dtype.name}")
        trained = [t for t in LIVE if t.requires_grad]
        root, stored = with_history(self.uop, trained)
        below = set(root.toposort())
        leaves = [t for t in trained if t.uop in below]
        if not leaves:
            raise RuntimeError("backward(): no tensor with requires_grad=True stands below this one")
        start = gradient.uop if gradient is not None else UOp.const(self.dtype, 1.0)
        if start.shape != self.shape:
            start = self._new(start).expand(self.shape).uop
        grads = compute_gradients(root, start, {t.uop for t in leaves}, stored)
        for t in leaves:
            g = grads.get(t.uop)
            if g is not None:
                new = t._new(g)
                t.grad = new if t.grad is None else t.grad + new
        return self

    def gradient(self, *targets: Tensor, gradient: Tensor | None = None) -> list[Tensor]:
        """d(self)/d(target) for each target, without touching `.grad`; zeros where nothing flows."""
        from manygrad.tensor.gradient import compute_gradients, with_history

        start = gradient.uop if gradient is not None else UOp.const(self.dtype, 1.0)
        if start.shape != self.shape:
            start = self._new(start).expand(self.shape).uop
        root, stored = with_history(self.uop, targets)
        grads = compute_gradients(root, start, {t.uop for t in targets}, stored)
        return [t._new(grads[t.uop]) if t.uop in grads else t.zeros_like() for t in targets]

    def requires_grad_(self, flag: bool = True) -> Tensor:
        self.requires_grad = flag
        return self

    class train:
        """`with Tensor.train():` sets `Tensor.training` (dropout, batch norm) for a block."""

        def __init__(self, mode: bool = True):
            self.mode = mode

        def __enter__(self) -> None:
            self.saved, Tensor.training = Tensor.training, self.mode

        def __exit__(self, *exc: object) -> None:
            Tensor.training = self.saved


class Variable:
    """A symbolic integer in [lo, hi]: `v = Variable("n", 1, 64).bind(5)`, then `t[:v]`."""

    def __new__(cls, name: str, lo: int, hi: int) -> Any:
        return _Variable(variable(name, lo, hi))


class _Variable:
    def __init__(self, uop: UOp):
        self.uop = uop

    def bind(self, value: int) -> UOp:
        name, lo, hi = self.uop.arg
        if not isinstance(value, (int, np.integer)) or not lo <= value <= hi:
            raise ValueError(f"bind: variable {name!r} ranges over {lo}..{hi}, got {value!r}; widen the variable or check the value")
        return UOp(Ops.BIND, dtypes.index, (self.uop, UOp(Ops.CONST, dtypes.index, (), int(value))))


def default_device() -> str:
    return engine().canonical(str(env.DEVICE.value))


def _canonical(device: str | Sequence[str]) -> str | tuple[str, ...]:
    if isinstance(device, str):
        return engine().canonical(device)
    names = tuple(engine().canonical(d) for d in device)
    if not names:
        raise ValueError("an empty tuple of devices")
    return names


def _to_array(data: Any, dtype: DType | None) -> np.ndarray:
    if isinstance(data, (bytes, bytearray, memoryview)):
        return np.frombuffer(data, dtype=dtype.np if dtype else np.uint8)
    if isinstance(data, np.ndarray) or hasattr(data, "__array__"):
        array = np.asarray(data)
    elif isinstance(data, (list, tuple, range)):
        try:
            array = np.array(data if not isinstance(data, range) else list(data))
        except ValueError as error:
            raise ValueError(f"cannot make a tensor of this nested list: its rows differ in length ({error})") from None
        if array.dtype == np.float64 or array.size == 0:
            array = array.astype(np.float32)
    else:
        raise TypeError(f"cannot make a tensor of {type(data).__name__}; pass a number, a list, a NumPy array or bytes")
    if array.dtype == object:
        raise TypeError("cannot make a tensor of Python objects; pass numbers")
    if dtype is not None:
        array = array.astype(dtype.np)
    return array


def _unpickle(array: np.ndarray, dtype: str, requires_grad: bool | None) -> Tensor:
    return Tensor(array, dtype=dtype, requires_grad=requires_grad)
