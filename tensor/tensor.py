"""`Tensor`: a lazy value. Methods build UOps; nothing runs until `realize()`, `numpy()`, `item()` or `tolist()`.

The operators are in `tensor/ops/`, one concept a file. This file holds the value itself: where it comes from, what it
is, and how it is realized, assigned, moved and differentiated.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextvars import ContextVar
from typing import Any

import numpy as np

from manygrad.tensor import storage
from manygrad.tensor.changes import CHANGES
from manygrad.tensor.dtype import DType, dtypes, to_dtype
from manygrad.tensor.engine import default_device, engine
from manygrad.tensor.grad_mode import STOPPED, is_grad_enabled
from manygrad.tensor.lock import locked
from manygrad.tensor.ops.activation import ActivationMixin
from manygrad.tensor.ops.arithmetic import ArithmeticMixin
from manygrad.tensor.ops.attention import AttentionMixin
from manygrad.tensor.ops.bessel import BesselMixin
from manygrad.tensor.ops.bitwise import BitwiseMixin
from manygrad.tensor.ops.broadcast import BroadcastMixin
from manygrad.tensor.ops.casting import CastingMixin
from manygrad.tensor.ops.choice import ChoiceMixin
from manygrad.tensor.ops.comparison import ComparisonMixin
from manygrad.tensor.ops.convolution import ConvolutionMixin
from manygrad.tensor.ops.counting import CountingMixin
from manygrad.tensor.ops.creation import CreationMixin
from manygrad.tensor.ops.decomposition import DecompositionMixin
from manygrad.tensor.ops.diagonal import DiagonalMixin
from manygrad.tensor.ops.differentiation import DifferentiationMixin, as_written
from manygrad.tensor.ops.distance import DistanceMixin
from manygrad.tensor.ops.distributions import DistributionsMixin
from manygrad.tensor.ops.division import DivisionMixin
from manygrad.tensor.ops.einsum import EinsumMixin
from manygrad.tensor.ops.error_function import ErrorFunctionMixin
from manygrad.tensor.ops.expanding import ExpandingMixin
from manygrad.tensor.ops.exponential import ExponentialMixin
from manygrad.tensor.ops.extremum import ExtremumMixin
from manygrad.tensor.ops.gamma import GammaMixin
from manygrad.tensor.ops.gathering import GatheringMixin
from manygrad.tensor.ops.grids import GridsMixin
from manygrad.tensor.ops.hyperbolic import HyperbolicMixin
from manygrad.tensor.ops.indexing import IndexingMixin
from manygrad.tensor.ops.inplace import InplaceMixin
from manygrad.tensor.ops.integration import IntegrationMixin
from manygrad.tensor.ops.interop import InteropMixin, to_array
from manygrad.tensor.ops.joining import JoiningMixin
from manygrad.tensor.ops.loss import LossMixin
from manygrad.tensor.ops.masking import MaskingMixin
from manygrad.tensor.ops.matmul import MatmulMixin
from manygrad.tensor.ops.movement import MovementMixin
from manygrad.tensor.ops.norm import NormMixin
from manygrad.tensor.ops.normalization import NormalizationMixin
from manygrad.tensor.ops.operators import OperatorsMixin
from manygrad.tensor.ops.padding import PaddingMixin
from manygrad.tensor.ops.pooling import PoolingMixin
from manygrad.tensor.ops.power import PowerMixin
from manygrad.tensor.ops.properties import PropertiesMixin
from manygrad.tensor.ops.random import RandomMixin
from manygrad.tensor.ops.rearrange import RearrangeMixin
from manygrad.tensor.ops.reduction import ReductionMixin
from manygrad.tensor.ops.repeating import RepeatingMixin
from manygrad.tensor.ops.representation import RepresentationMixin
from manygrad.tensor.ops.reshaping import ReshapingMixin
from manygrad.tensor.ops.rounding import RoundingMixin
from manygrad.tensor.ops.scan import ScanMixin
from manygrad.tensor.ops.scattering import ScatteringMixin
from manygrad.tensor.ops.searching import SearchingMixin
from manygrad.tensor.ops.sequential import SequentialMixin
from manygrad.tensor.ops.sign import SignMixin
from manygrad.tensor.ops.slicing import SlicingMixin
from manygrad.tensor.ops.sorting import SortingMixin
from manygrad.tensor.ops.splitting import SplittingMixin
from manygrad.tensor.ops.statistics import StatisticsMixin
from manygrad.tensor.ops.transposing import TransposingMixin
from manygrad.tensor.ops.trigonometric import TrigonometricMixin
from manygrad.tensor.ops.variance import VarianceMixin
from manygrad.tensor.ops.windows import WindowsMixin
from manygrad.tensor.source import mark
from manygrad.tensor.storage import LIVE as LIVE
from manygrad.tensor.storage import PENDING as PENDING
from manygrad.tensor.storage import Storage
from manygrad.tensor.stored import OwnNumber
from manygrad.tensor.uop import GroupOp, Ops, ShardArg, UOp, VarArg, even_bounds
from manygrad.tensor.uop.symbolic import variable
from manygrad.tensor.uop.views import STEPS, memory, overlaps

TRAINING: ContextVar[bool | None] = ContextVar("training", default=None)


class _Modes(type):
    @property
    def training(cls) -> bool | None:
        """Set by `Tensor.train`, for its thread; None: every module has its own mode."""
        return TRAINING.get()

    @training.setter
    def training(cls, mode: bool | None) -> None:
        TRAINING.set(mode)


class Tensor(
    ActivationMixin,
    ArithmeticMixin,
    AttentionMixin,
    BesselMixin,
    BitwiseMixin,
    BroadcastMixin,
    CastingMixin,
    ChoiceMixin,
    ComparisonMixin,
    ConvolutionMixin,
    CountingMixin,
    CreationMixin,
    DiagonalMixin,
    DifferentiationMixin,
    DistanceMixin,
    DistributionsMixin,
    DivisionMixin,
    ErrorFunctionMixin,
    ExpandingMixin,
    ExponentialMixin,
    ExtremumMixin,
    GammaMixin,
    GatheringMixin,
    GridsMixin,
    HyperbolicMixin,
    IndexingMixin,
    IntegrationMixin,
    InteropMixin,
    InplaceMixin,
    JoiningMixin,
    DecompositionMixin,
    EinsumMixin,
    MatmulMixin,
    LossMixin,
    MaskingMixin,
    MovementMixin,
    NormMixin,
    NormalizationMixin,
    OperatorsMixin,
    PaddingMixin,
    PoolingMixin,
    PowerMixin,
    PropertiesMixin,
    RandomMixin,
    RearrangeMixin,
    ReductionMixin,
    RepeatingMixin,
    RepresentationMixin,
    ReshapingMixin,
    RoundingMixin,
    ScanMixin,
    ScatteringMixin,
    SearchingMixin,
    SequentialMixin,
    SignMixin,
    SlicingMixin,
    SortingMixin,
    SplittingMixin,
    StatisticsMixin,
    TransposingMixin,
    TrigonometricMixin,
    VarianceMixin,
    WindowsMixin,
    metaclass=_Modes,
):
    """A value of `shape` and `dtype` on `device`.

    `data`: a number, (nested) list, NumPy array, bytes, a `UOp`, or another Tensor. Floats become float32 and ints
    int64, as in PyTorch; NumPy arrays keep their type. `device` is a name such as `CPU:1`, default `CPU` (env DEVICE).
    """

    __array_priority__ = 1000
    uop: UOp
    _device: str | tuple[str, ...]

    def __init__(
        self,
        data: Any,
        device: str | tuple[str, ...] | None = None,
        dtype: DType | str | None = None,
        requires_grad: bool | None = None,
    ):
        want = to_dtype(dtype) if dtype is not None else None
        self._requires_grad: bool | None = None
        self._leaf: OwnNumber | None = None
        self._storage: Storage | None = None
        self._grad: Tensor | None = None
        target = _canonical(device) if device is not None else None
        one = target if isinstance(target, str) else default_device()
        single: str | tuple[str, ...] = one
        if isinstance(data, Tensor):
            self.uop, single = data.uop, data._device
            self._storage = data._identity()
        elif isinstance(data, UOp):
            self.uop = data
        elif isinstance(data, (bool, int, float)):
            kind = want or (
                dtypes.bool
                if isinstance(data, bool)
                else dtypes.int64
                if isinstance(data, int)
                else dtypes.default_float
            )
            self.uop = UOp.const(kind, kind.fits(data))
        else:
            array = to_array(data, want)
            self.uop = engine().from_numpy(array, dtypes.from_np(array.dtype), one)
        self._device = single
        if want is not None and self.uop.dtype is not want:
            self.uop = self.uop.cast(want)
        if target is not None and self.device != target and self.uop.device is not None:
            self.uop = self.to(target).uop
        LIVE.add(self)
        if requires_grad is not None:
            if isinstance(data, Tensor):  # (then it is a leaf of its own)
                u = UOp(Ops.DETACH, self.uop.dtype, (self.uop,)) if data.requires_grad else self.uop
                self.uop = storage.own_view(u) if requires_grad and storage.is_stored(u) else u
            self.requires_grad = requires_grad

    # *** how operators make new tensors ***

    def _new(self, uop: UOp) -> Tensor:
        """A tensor of `uop` that inherits where deviceless values live, and, as a view of this one, its storage."""
        identity = storage.of_view(uop, self) if uop.op in STEPS else None
        if not is_grad_enabled() and not STOPPED(uop):
            uop = UOp(Ops.DETACH, uop.dtype, (uop,))
        t = Tensor.__new__(Tensor)
        t.uop, t._requires_grad, t._leaf, t._grad, t._device, t._storage = uop, None, None, None, self._device, identity
        LIVE.add(t)
        return t

    def _op(self, op: Ops, arg: Any = None, *others: Tensor, dtype: DType | None = None) -> Tensor:
        if self.dtype.is_fp8 and op in GroupOp.ALU:
            raise TypeError(
                f"{op.name} of {self.dtype.name}: float8 is for storage; cast with .float() or .bfloat16() first"
            )
        return self._new(mark(UOp(op, dtype or self.dtype, (self.uop, *(o.uop for o in others)), arg)))

    # *** what it is ***

    def __len__(self) -> int:
        if not self.shape:
            raise TypeError("len() of a 0-d tensor")
        return int(self.shape[0])

    def __hash__(self) -> int:
        return id(self)

    @property
    def is_realized(self) -> bool:
        u = memory(self.uop)
        return u.op is Ops.BUFFER and engine().is_realized(u)

    # *** running ***

    def realize(self, *others: Tensor) -> Tensor:
        """Compute this tensor (and `others`, and pending assignments) now."""
        engine().realize([self, *others])
        return self

    # *** writing ***

    @locked
    def _store(self, *others: Tensor) -> None:
        """Gives this tensor (and `others`) memory to be assigned, where they have none.
        Assignments that wait go on waiting."""
        missing = [t for t in (self, *others) if not t._is_stored]
        if missing:
            engine().realize(missing, pending=False)

    @locked
    def assign(self, value: Any) -> Tensor:
        """Overwrite the storage with `value` (a tensor, number, array or list, broadcast to the shape), lazily.

        Views (reshape, permute, slices, detach, ...) share the storage of what they were made of, computed or not:
        writing through one shows in all. What was computed before keeps the values it was computed from. Gradients flow
        through what is written, as in PyTorch, but not under `no_grad()`.
        """
        return self._overwrite(value, anew=False)

    def _overwrite(self, value: Any, anew: bool | None = None) -> Tensor:
        """`assign`; `anew`: what is in memory, too, is made anew where it has a gradient
        (None: where backward() needs it)."""
        if isinstance(value, (bool, int, float)):
            x = self._new(UOp.const(self.dtype, self.dtype.fits(value)))
        elif isinstance(value, Tensor):
            x = value
        else:
            x = Tensor(value, device=self.device if isinstance(self.device, str) else None).to(self.device)
        if x.dtype is not self.dtype:
            x = x.cast(self.dtype)
        if x.shape != self.shape:
            x = x.expand(self.shape)
        if x.uop.device is not None and self.uop.device is not None and x.uop.device != self.uop.device:
            raise ValueError(
                f"assign: the value is on {x.uop.device}, the target on {self.uop.device}; "
                "move it first with .to(target.device)"
            )
        storage.note_assignment(self)
        if x.uop is self.uop:
            return self
        x, made, joins = as_written(self, x)
        if overlaps(self.uop) and (self._is_stored or self._storage is not None):
            raise ValueError(
                f"assign: {self.shape} is an expanded view, whose elements share memory; "
                "assign to what was expanded, or to a clone()"
            )
        if made is not None or not self._is_stored:
            anew = made
        # (a step of training by hand is a write: what is read in each step may never be the weights)
        is_step = self._requires_grad and self.uop in x.uop.toposort()
        if not is_step and not self._is_stored and len(storage.sharing(self)) == 1:  # the value becomes this tensor's
            if isinstance(self.device, tuple):  # it stays where and as it is cut
                x = x._shard_like(self)
            elif x.uop.device is None:
                x._device = self._device
            # (what lies in memory is another's)
            self._become(UOp(Ops.CONTIGUOUS, x.dtype, (x.uop,)) if x._is_stored else x.uop)
        elif self.numel():
            storage.write(self, x, storage.becomes_new(self, x) if anew is None else anew, joins)
        return self

    @property
    def _is_stored(self) -> bool:
        return storage.is_stored(self.uop)

    def _identity(self) -> Storage:
        """Storage that this tensor has in common with its views."""
        return storage.identity(self)

    @locked
    def replace(self, other: Tensor) -> Tensor:
        """Become `other` (same shape and dtype), without touching storage: that of `other` is this tensor's, too."""
        if (other.shape, other.dtype) != (self.shape, self.dtype):
            raise ValueError(f"replace: {other.shape} {other.dtype.name} is not {self.shape} {self.dtype.name}")
        self._device = other._device
        self._become(other.uop, other._identity())
        CHANGES.count += 1
        return self

    def contiguous(self) -> Tensor:
        """Stored on its own, as it is: a fusion boundary. Of a view a copy."""
        return self if self.uop.op in (Ops.CONTIGUOUS, Ops.BUFFER, Ops.AFTER) else self._op(Ops.CONTIGUOUS)

    def clone(self) -> Tensor:
        return self._op(Ops.CONTIGUOUS)

    # *** devices ***

    def to(self, *args: Any, **kwargs: Any) -> Tensor:
        """`x.to(device)`, `x.to(dtype)`, `x.to(device, dtype)`, `x.to(other)`: the value on a device, in a type,
        or as another tensor.

        A tuple of devices replicates it over them; what is on them already, cut perhaps, stays as it is
        (`shard(devices)` makes whole copies of what is cut). `non_blocking` and `memory_format` change nothing;
        `copy=True` makes a clone.
        """
        device, dtype, copy = _place_and_type(args, kwargs)
        x = self if dtype is None else self.cast(dtype)
        x = x if device is None else x._to_device(device)
        return x.clone() if copy and x.uop is self.uop else x

    def _to_device(self, device: str | tuple[str, ...]) -> Tensor:
        target = _canonical(device)
        if isinstance(target, tuple):
            return self if self.uop.device == target else self.shard(target)
        if self.device == target:
            return self
        if self.uop.device is None:
            if target.startswith("DISK"):  # where nothing is computed
                return self._to_device(default_device()).clone().realize()._to_device(target)
            t = self._new(self.uop)
            t._device = target
            return t
        t = self._new(mark(UOp(Ops.COPY, self.dtype, (self.uop,), target)))
        t._device = target
        return t

    def shard(self, devices: Sequence[str], axis: int | None = None) -> Tensor:
        """Cut along dim `axis` over `devices` (None: a full copy on each).

        Global shape S becomes, on device i of n, S with dim `axis` cut at ceil(i * S[axis] / n): parts that differ by
        one at most, maybe 0. On several workers every worker must hold the same value.
        """
        names = _canonical(tuple(devices))
        assert isinstance(names, tuple)
        if len(set(names)) != len(names):
            raise ValueError(f"shard: a device is named twice in {names}")
        if axis is not None:
            axis = self._dim(axis)
        if isinstance(self.device, tuple):
            if self.device != names:
                raise ValueError(
                    f"shard: the tensor is already on {self.device}; bring it to one device first with .to(device)"
                )
            if engine().sharding_axis(self.uop) == axis:
                return self
        t = self._new(mark(UOp(Ops.SHARD, self.dtype, (self.uop,), ShardArg(names, axis))))
        t._device = names  # (and what is made of it and is a number, a gradient say, lies there, too)
        return t

    def _shard_like(self, other: Tensor) -> Tensor:
        """On the devices of `other`, which has the same shape, and cut where that is."""
        devices, (axis, bounds) = other.device, engine().store_spec(other.uop)
        assert isinstance(devices, tuple)
        moves = self.device == devices and engine().store_spec(self.uop) != (axis, bounds)
        if axis is None or not (moves or isinstance(self.device, str)):
            return self.shard(devices, axis)  # (or an error about other devices)
        uneven = () if bounds == even_bounds(bounds[-1], len(bounds) - 1) else bounds
        return self._new(mark(UOp(Ops.SHARD, self.dtype, (self.uop,), ShardArg(devices, axis, uneven))))

    @locked
    def shard_(self, devices: Sequence[str], axis: int | None = None) -> Tensor:
        t = self.shard(devices, axis)
        self._device = t._device
        self._become(t.uop, t._storage)
        return self

    @locked
    def to_(self, device: str | tuple[str, ...]) -> Tensor:
        t = self.to(device)
        self._device = t._device
        self._become(t.uop, t._storage)
        return self

    class train:
        """`with Tensor.train(mode):` sets `Tensor.training` for a block: the mode of every module,
        and of `Tensor.dropout`."""

        def __init__(self, mode: bool = True):
            self.mode = mode
            self.saved: list[bool | None] = []

        def __enter__(self) -> None:
            self.saved.append(TRAINING.get())
            TRAINING.set(self.mode)

        def __exit__(self, *exc: object) -> None:
            TRAINING.set(self.saved.pop())


class Variable:
    """A symbolic integer in [lo, hi]: `v = Variable("n", 1, 64).bind(5)`, then `t[:v]`."""

    def __new__(cls, name: str, lo: int, hi: int) -> Any:
        return _Variable(variable(name, lo, hi))


class _Variable:
    def __init__(self, uop: UOp):
        self.uop = uop

    def bind(self, value: int) -> UOp:
        v: VarArg = self.uop.arg
        if not isinstance(value, (int, np.integer)) or not v.min <= value <= v.max:
            raise ValueError(
                f"bind: variable {v.name!r} ranges over {v.min}..{v.max}, got {value!r}; "
                "widen the variable or check the value"
            )
        return UOp(Ops.BIND, dtypes.index, (self.uop, UOp(Ops.CONST, dtypes.index, (), int(value))))


def _place_and_type(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, DType | None, bool]:
    """(device, dtype, copy) of a call of `to`."""
    unknown = kwargs.keys() - {"device", "dtype", "other", "non_blocking", "copy", "memory_format"}
    if unknown:
        raise TypeError(f"to() has no argument {sorted(unknown)[0]!r}; it takes a device, a dtype, or another tensor")
    device, dtype = kwargs.get("device"), kwargs.get("dtype")
    # bools: non_blocking, copy
    rest = [a for a in (*args, kwargs.get("other")) if a is not None and not isinstance(a, bool)]
    for a in rest:
        if isinstance(a, Tensor):
            device, dtype = a.device, a.dtype
        elif isinstance(a, DType) or (isinstance(a, str) and isinstance(getattr(dtypes, a, None), DType)):
            dtype = a
        else:
            device = a
    flags = [a for a in args if isinstance(a, bool)]
    return device, None if dtype is None else to_dtype(dtype), bool(kwargs.get("copy") or (len(flags) > 1 and flags[1]))


def _canonical(device: str | Sequence[str]) -> str | tuple[str, ...]:
    if isinstance(device, str):
        return engine().canonical(device)
    names = tuple(engine().canonical(d) for d in device)
    if not names:
        raise ValueError("an empty tuple of devices")
    return names
