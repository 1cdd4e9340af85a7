"""Parts of tensors from and to the memory of this worker's devices."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from manygrad.checkpoint.layout import Bounds, TensorLayout, TensorPart, divide, within
from manygrad.runtime.buffer import Buffer
from manygrad.runtime.current import current
from manygrad.runtime.storage import storage
from manygrad.tensor.dtype import DType
from manygrad.tensor.engine import default_device, engine
from manygrad.tensor.tensor import Tensor
from manygrad.tensor.uop import Ops

Read = Callable[[Bounds], np.ndarray]  # of a global box: what was saved there


def layout_of(t: Tensor | np.ndarray) -> TensorLayout:
    """How a tensor lies. One on a device of this worker is taken to be the same on all of them."""
    world = current().world
    if isinstance(t, np.ndarray):
        return TensorLayout(t.shape, t.dtype.itemsize, tuple(range(world.size)))
    if isinstance(t.device, tuple):
        axis, bounds = engine().store_spec(t.uop)
        return TensorLayout(t.shape, t.dtype.itemsize, tuple(world.rank_of(d) for d in t.device), axis, bounds)
    named = "@" in t.device
    return TensorLayout(t.shape, t.dtype.itemsize, (world.rank_of(t.device),) if named else tuple(range(world.size)))


def snapshot(
    tensors: dict[str, Tensor | np.ndarray], copies: set[str]
) -> dict[str, tuple[list[TensorPart], list[np.ndarray]]]:
    """By name: who writes which parts, and copies of this rank's own ones. What is lazy, or a view, is computed first,
    by all that hold it; `copies` are kept, not copied again. Cost: a pass over memory."""
    # (asked once: by what is computed here, or in another thread, a lazy value becomes a stored one)
    lazy = {
        name: t.detach().clone()
        for name, t in tensors.items()
        if isinstance(t, Tensor) and t.numel() and t.uop.op is not Ops.BUFFER
    }
    if lazy:
        first, *others = lazy.values()
        first.realize(*others)
    rank = current().world.rank
    divided = divide([layout_of(t) for t in tensors.values()])
    out = {}
    for (name, t), parts in zip(tensors.items(), divided):
        whole = lazy.get(name, t)
        own = whole is not t or name in copies  # and nobody else writes there
        out[name] = parts, [_part(whole, p.box, own) for p in parts if p.owner == rank]
    return out


def _part(t: Tensor | np.ndarray, box: Bounds, own: bool) -> np.ndarray:
    """The elements `box`, which lie on this worker; a copy, unless the memory is our own."""
    whole = tuple((0, d) for d in t.shape)
    if isinstance(t, np.ndarray):
        return np.array(t[within(box, whole)], order="C")
    found = storage(t.uop)
    if isinstance(found, Buffer):
        return _read(found, whole, box, own)
    how = layout_of(t)
    for i, b in enumerate(found):
        if b is not None and all(a <= c and d <= e for (a, e), (c, d) in zip(how.box(i), box)):
            return _read(b, how.box(i), box, own)
    raise AssertionError(f"no device of rank {current().world.rank} holds {box} of a tensor of shape {t.shape}")


def _read(b: Buffer, lies: Bounds, box: Bounds, own: bool) -> np.ndarray:
    raw = b.as_numpy()
    array = (b.copyout() if raw is None else raw).reshape([y - x for x, y in lies])[within(box, lies)]
    return np.ascontiguousarray(array).reshape(array.shape) if own or raw is None else np.array(array, order="C")


class Loaded:
    """A saved tensor in host memory, of which this worker has read what it will hold: `place()` makes it a Tensor."""

    def __init__(self, like: Any, shape: tuple[int, ...], dtype: DType, read: Read):
        self.shape, self.dtype = shape, dtype
        whole = tuple((0, d) for d in shape)
        self.like = like if isinstance(like, Tensor) and tuple(like.shape) == shape and 0 not in shape else None
        self.parts: list[np.ndarray | None] | None = None
        self.array: np.ndarray | None = None
        if self.like is None or not isinstance(self.like.device, tuple):
            self.array = read(whole)
            return
        how, rank = layout_of(self.like), current().world.rank
        self.parts, seen = [], dict[Bounds, np.ndarray]()
        for i, owner in enumerate(how.ranks):
            box = how.box(i)
            if owner == rank and box not in seen:
                seen[box] = read(box)
            self.parts.append(seen[box] if owner == rank else None)

    def place(self) -> Tensor:
        """On the devices of what it was read like, and cut where that is; else on the default device."""
        if self.parts is None:
            assert self.array is not None
            device = default_device() if self.like is None else self.like.device
            if isinstance(device, str) and current().world.is_local(device) and not device.startswith("DISK"):
                return Tensor(self.array, device=device.partition("@")[0])
            return Tensor(self.array)
        assert self.like is not None
        u = engine().new_buffer(self.like.detach().cast(self.dtype).uop, self.like.device)
        found = storage(u)
        assert isinstance(found, list)
        for b, array in zip(found, self.parts):
            if b is not None and array is not None:
                b.copyin(array)
        return Tensor(u)
