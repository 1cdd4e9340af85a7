"""Values in and out: Python numbers, NumPy, DLPack (torch, JAX, CuPy), the buffer protocol, pickling, printing.

`numpy()`, `tolist()` and `item()` compute and copy. `from_dlpack`, `__dlpack__`, `np.asarray(t, copy=False)` and
`memoryview(t)` share memory: what one side writes, the other sees.
"""

from __future__ import annotations

import copy
import ctypes
from typing import TYPE_CHECKING, Any

import numpy as np

from manygrad.tensor.dtype import DType, dtypes, to_dtype
from manygrad.tensor.engine import default_device, engine
from manygrad.tensor.lock import LOCK, locked
from manygrad.tensor.storage import PENDING
from manygrad.tensor.stored import HISTORY
from manygrad.tensor.uop import GroupOp, Ops, UOp
from manygrad.tensor.uop.show import text_of_shape
from manygrad.tensor.uop.views import memory

if TYPE_CHECKING:
    from manygrad.tensor.tensor import Tensor

# what a tensor itself is, and hooks; other attributes are the user's
OWN = frozenset(
    (
        "uop",
        "_grad",
        "_device",
        "_requires_grad",
        "_leaf",
        "_storage",
        "_hooks",
        "_accumulated_hooks",
        "_retains",
        "_value",
        "_is_made_anew",
        "_is_part",
        "_is_result",
        "_varies",
        "_is_state",
        "_stored",
        "_trace",
        "_spec",
    )
)


class InteropMixin:
    """Values out of tensors, and Python's and NumPy's protocols. Large: the protocols' methods."""

    # *** out ***

    def numpy(self: Tensor) -> np.ndarray:
        """The values as a NumPy array (a copy); a sharded tensor is gathered."""
        t = self
        if any(not isinstance(d, int) for d in t.shape):
            raise ValueError(
                f"numpy() needs a shape of numbers, not {text_of_shape(t.shape)}; shrink the symbolic dims first"
            )
        if t.numel() == 0:
            return np.empty(t.shape, t.dtype.np)
        with LOCK:
            u, (graph, _) = t.uop, HISTORY.get(t.uop) or (None, 0)
            try:
                if u.op is Ops.BUFFER and type(u.device) is str and "@" not in u.device and not len(PENDING):
                    return engine().to_numpy(u)
                if isinstance(t.device, tuple) and engine().is_read_by_all(u):
                    t.realize()  # (stored as it is: who reads it again sees the same bits)
                copied = t.uop.op is Ops.BUFFER and engine().has_copy(t.uop)  # then one is read where it lies
                return engine().to_numpy((t.realize() if copied else self._whole()).uop)
            except IndexError as error:
                self._spoil(u if graph is None else graph, error)
                raise

    def _spoil(self: Tensor, graph: UOp, error: IndexError) -> None:
        """What `graph` computed with an index that was out of range is no value: a second read does not show it.
        (Memory that was written at valid places only keeps what it holds.)"""
        if memory(graph).op is not Ops.AFTER and any(x.op is Ops.CHECK for x in graph.toposort()):
            why = f"{error}; this tensor was computed with it and has no value"
            base = memory(self.uop)
            if base.op is Ops.BUFFER:
                engine().spoil(base, why)
            else:
                engine().lose(self, why)

    @locked
    def _whole(self: Tensor) -> Tensor:
        """Computed and stored as one buffer on one device of this worker: itself where that is so."""
        t = self
        if (
            isinstance(t.device, tuple)
            or "@" in t.device
            or (t.device.startswith("DISK") and t.uop.op is not Ops.BUFFER)
        ):
            t = t.to(engine().canonical(default_device()))
        u = t.uop
        if u.op is Ops.BUFFER:
            return t.realize() if len(PENDING) else t
        t = t.contiguous() if u.op is not Ops.AFTER and u.op in GroupOp.MOVEMENT else t
        t.realize()
        if self.device == t.device and self.uop is u and u.op not in GroupOp.MOVEMENT:
            self.uop = t.uop
        return t if t.uop.op is Ops.BUFFER else t.clone().realize()

    def item(self: Tensor) -> bool | int | float:
        """The one element as a Python number."""
        if self.numel() != 1:
            raise ValueError(f"item() needs one element, this tensor has shape {self.shape}; index it first")
        return self._python_values().item()

    def tolist(self: Tensor) -> Any:
        """(Nested) lists of Python numbers; of a 0-d tensor the number."""
        return self._python_values().tolist()

    def _python_values(self: Tensor) -> np.ndarray:
        a = self.numpy()
        return a if self.dtype.np.kind in "biuf" else a.astype(np.float32)

    def __bool__(self: Tensor) -> bool:
        if self.numel() != 1:
            raise TypeError(f"the truth of a tensor of shape {self.shape} is ambiguous; use .any() or .all()")
        return bool(self.item())

    def __float__(self: Tensor) -> float:
        return float(self.item())

    def __int__(self: Tensor) -> int:
        return int(self.item())

    def __index__(self: Tensor) -> int:
        if not (self.dtype.is_int or self.dtype.is_bool):
            raise TypeError(f"only integer tensors can be an index, not {self.dtype.name}")
        return int(self.item())

    def __format__(self: Tensor, spec: str) -> str:
        return format(self.item(), spec) if spec and self.numel() == 1 else format(repr(self), spec)

    def _shared(self: Tensor) -> np.ndarray:
        """The computed values as an array over the same memory."""
        if isinstance(self.device, tuple):
            raise BufferError(
                f"a tensor on {len(self.device)} devices has no memory to share; bring it to one with .to(device)"
            )
        if self.numel() == 0:
            return np.empty(self.shape, self.dtype.np)
        array = engine().share(self._whole().uop)
        if array is None:
            raise BufferError(f"memory of {self.device} is not visible to the host; use .to('CPU') first")
        return array

    def __array__(self: Tensor, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        if copy is False:
            a = self._shared()
            if dtype is not None and a.dtype != dtype:
                raise ValueError(f"a {self.dtype.name} tensor as {np.dtype(dtype)} without a copy is not possible")
            return a
        a = self.numpy()
        return a if dtype is None else a.astype(dtype)

    def __buffer__(self: Tensor, flags: int) -> memoryview:
        return memoryview(self._shared())

    def data_ptr(self: Tensor) -> int:
        """The host address of the first element; computes."""
        return int(self._shared().ctypes.data)

    # *** DLPack ***

    def __dlpack__(self: Tensor, *, stream: Any = None, **kwargs: Any) -> Any:
        """A capsule that shares this tensor's memory: `torch.from_dlpack(t)`; computes. Of a view, of a copy."""
        if self._requires_grad:
            raise BufferError(
                "this tensor requires a gradient, which does not travel through DLPack; use .detach() first"
            )
        array = self._shared()
        if self.dtype is dtypes.bfloat16:
            return _retyped(array.view(np.int16).__dlpack__(), *_BFLOAT)
        return array.__dlpack__(**kwargs)

    def __dlpack_device__(self: Tensor) -> tuple[int, int]:
        return _CPU, 0

    @staticmethod
    def from_dlpack(source: Any) -> Tensor:
        """A tensor over the memory of `source` (a torch tensor, a NumPy or JAX array, ... on the CPU), without a copy
        where it lies in row-major order. Writing to one then writes to the other."""
        from manygrad.tensor.tensor import Tensor

        kind = source.__dlpack_device__()[0]
        if kind != _CPU:
            raise BufferError(
                f"from_dlpack: the memory is on a device of DLPack kind {int(kind)}, only host memory ({_CPU}) can be "
                "shared; bring it to the CPU first"
            )
        return Tensor._over(_from_capsule(source))

    @staticmethod
    def from_numpy(array: np.ndarray) -> Tensor:
        """A tensor over the array's memory (torch.from_numpy); `Tensor(array)` copies."""
        from manygrad.tensor.tensor import Tensor

        if not isinstance(array, np.ndarray):
            raise TypeError(
                f"from_numpy takes a NumPy array, not {type(array).__name__}; use Tensor(...) to copy other data"
            )
        return Tensor._over(array)

    @staticmethod
    def _over(array: np.ndarray) -> Tensor:
        from manygrad.tensor.tensor import Tensor

        kind = dtypes.from_np(array.dtype)
        usable = array.flags.c_contiguous and array.flags.writeable and array.flags.aligned and array.dtype.isnative
        device = default_device()
        return Tensor(
            engine().from_numpy(array, kind, device, share=usable)
            if array.ndim or usable
            else engine().from_numpy(array, kind, device)
        )

    # *** printing: never computes anything ***

    def __repr__(self: Tensor) -> str:
        where = self.device if isinstance(self.device, str) else f"{len(self.device)} devices"
        grad = ", requires_grad" if self._requires_grad else ""
        return (
            f"<Tensor {text_of_shape(self.shape)} {self.dtype.name} on {where}, "
            f"{'realized' if self.is_realized else 'lazy'}{grad}>"
        )

    def _repr_html_(self: Tensor) -> str:
        """One row for a notebook: shape, dtype, device, size, state."""
        import html  # (two thousand names of characters)

        where = (
            self.device
            if isinstance(self.device, str)
            else ", ".join(self.device[:4]) + (", …" if len(self.device) > 4 else "")
        )
        cells = (
            text_of_shape(self.shape),
            self.dtype.name,
            where,
            f"{self.nbytes:,} bytes",
            "realized" if self.is_realized else "lazy",
        )
        head = "".join(f"<th>{h}</th>" for h in ("shape", "dtype", "device", "size", "state"))
        return f"<table><tr>{head}</tr><tr>{''.join(f'<td>{html.escape(str(c))}</td>' for c in cells)}</tr></table>"

    # *** copies ***

    def __copy__(self: Tensor) -> Tensor:
        """Another tensor of the same storage, placed as this one, without its gradient."""
        from manygrad.tensor.tensor import Tensor

        if self.is_leaf:
            self._store()
        return self._as_copied(Tensor(self), self._attributes())

    def __deepcopy__(self: Tensor, memo: dict[int, Any]) -> Tensor:
        """A copy placed as this one, with a copy of its gradient."""
        if not self.is_leaf:
            raise RuntimeError(
                f"deepcopy of a tensor of shape {self.shape} that was computed from others that require a gradient: a "
                "copy would lose that; copy x.detach(), or use x.clone(), through which gradients flow"
            )
        t = self.detach().clone().realize()
        memo[id(self)] = t
        t.grad = None if self.grad is None else copy.deepcopy(self.grad.detach(), memo)
        return self._as_copied(t, copy.deepcopy(self._attributes(), memo))

    def __reduce__(self: Tensor) -> Any:
        """Values come back on the default device, whatever devices the process has that reads them."""
        return _unpickle_as, (self._kind(), self.numpy(), self.dtype.name, self._requires_grad, self._attributes())

    def _kind(self: Tensor) -> type[Tensor]:
        """The user's class; what is put off is none (who asks for the node has it made)."""
        _ = self.uop
        return type(self)

    def _attributes(self: Tensor) -> dict[str, Any]:
        """Attributes that the user has set on this tensor."""
        return {k: v for k, v in vars(self).items() if k not in OWN}

    def _as_copied(self: Tensor, t: Tensor, attributes: dict[str, Any]) -> Tensor:
        t.__class__ = self._kind()
        t.requires_grad = self._requires_grad
        vars(t).update(attributes)
        return t


def _unpickle(array: np.ndarray, dtype: str, requires_grad: bool | None) -> Tensor:
    """(Tensors that were pickled before subclasses and attributes were kept name this function.)"""
    from manygrad.tensor.tensor import Tensor

    return Tensor(array, dtype=dtype, requires_grad=requires_grad)


def _unpickle_as(
    kind: type[Tensor], array: np.ndarray, dtype: str, requires_grad: bool | None, attributes: dict[str, Any]
) -> Tensor:
    t = _unpickle(array, dtype, requires_grad)
    t.__class__ = kind
    vars(t).update(attributes)
    return t


def to_array(data: Any, dtype: DType | None) -> np.ndarray:
    """Array of what `Tensor(data)` copies: bytes, arrays, torch tensors, (nested) lists."""
    if isinstance(data, (bytes, bytearray)):
        return np.frombuffer(data, dtype=dtype.np if dtype else np.uint8)
    if isinstance(data, np.ndarray):
        array = data
    elif hasattr(data, "__dlpack__") and hasattr(data, "__dlpack_device__") and data.__dlpack_device__()[0] == _CPU:
        array = _from_capsule(data.detach() if hasattr(data, "detach") else data)
    elif hasattr(data, "__array__"):
        array = np.asarray(data)
    elif isinstance(data, (list, tuple, range)):
        try:
            array = np.array(_numbers(data) if not isinstance(data, range) else list(data))
        except ValueError as error:
            raise ValueError(f"cannot make a tensor of this nested list: its rows differ in length ({error})") from None
        kind = dtype or (dtypes.int64 if array.dtype.kind in "iu" else None)
        if kind is not None and kind.is_int and array.size and array.dtype.kind in "iuf":
            for extreme in (array.min(), array.max()):
                kind.fits(extreme.item())
        if dtype is None and (array.dtype == np.float64 or array.size == 0):
            array = array.astype(np.float32)
    else:
        try:
            array = np.asarray(memoryview(data))
        except TypeError:
            raise TypeError(
                f"cannot make a tensor of {type(data).__name__}; pass a number, a list, a NumPy array or bytes"
            ) from None
    if array.dtype == object:
        raise TypeError("cannot make a tensor of Python objects; pass numbers")
    return array if dtype is None else dtype.array(array)


def _numbers(data: Any) -> Any:
    """Lists with 0-d tensors in them, as PyTorch takes them."""
    from manygrad.tensor.tensor import Tensor

    if isinstance(data, (list, tuple)):
        return [_numbers(x) for x in data]
    return data.tolist() if isinstance(data, Tensor) else data


# *** DLPack capsules (github.com/dmlc/dlpack, include/dlpack/dlpack.h) ***

_CPU = 1  # kDLCPU
_BFLOAT = (4, 16)  # kDLBfloat
_INT = (0, 16)  # kDLInt


class _DLTensor(ctypes.Structure):
    _fields_ = [
        ("data", ctypes.c_void_p), ("device_type", ctypes.c_int32), ("device_id", ctypes.c_int32),
        ("ndim", ctypes.c_int32),
        ("code", ctypes.c_uint8), ("bits", ctypes.c_uint8), ("lanes", ctypes.c_uint16),
        ("shape", ctypes.c_void_p), ("strides", ctypes.c_void_p), ("byte_offset", ctypes.c_uint64),
    ]  # fmt: skip


def _struct(capsule: Any) -> _DLTensor:
    """The tensor in an unversioned capsule; it stands first in the managed struct."""
    get = ctypes.pythonapi.PyCapsule_GetPointer
    get.restype, get.argtypes = ctypes.c_void_p, [ctypes.py_object, ctypes.c_char_p]
    return _DLTensor.from_address(get(capsule, b"dltensor"))


def _retyped(capsule: Any, code: int, bits: int) -> Any:
    """The same capsule, its elements called another type of the same width: NumPy does not know bfloat16."""
    t = _struct(capsule)
    t.code, t.bits = code, bits
    return capsule


class _Capsule:
    """The object that `np.from_dlpack` asks for a capsule."""

    def __init__(self, capsule: Any):
        self.capsule = capsule

    def __dlpack__(self, **kwargs: Any) -> Any:
        return self.capsule

    def __dlpack_device__(self) -> tuple[int, int]:
        return _CPU, 0


def _from_capsule(source: Any) -> np.ndarray:
    """A writable array over the memory of `source`."""
    capsule = source.__dlpack__()
    t = _struct(capsule)
    bfloat = (t.code, t.bits) == _BFLOAT
    array = np.from_dlpack(_Capsule(_retyped(capsule, *_INT) if bfloat else capsule))
    if not array.flags.writeable:
        array = _writable(array)
    return array.view(to_dtype("bfloat16").np) if bfloat else array


def _writable(array: np.ndarray) -> np.ndarray:
    """NumPy marks unversioned capsules read-only, though the protocol shares them for writing."""
    interface = dict(array.__array_interface__)
    interface["data"] = (interface["data"][0], False)
    return np.asarray(_OwnedArray(interface, array))


class _OwnedArray:
    """An array interface that keeps the owner of its memory alive."""

    def __init__(self, interface: dict[str, Any], owner: Any):
        self.__array_interface__, self.owner = interface, owner
