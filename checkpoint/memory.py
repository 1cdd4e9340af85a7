"""Parts of tensors from and to the memory of this worker's devices."""

from __future__ import annotations

from collections.abc import Callable
from itertools import accumulate
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

ALIGN = 64  # bytes, of parts in a snapshot's memory
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


def is_shared(t: Tensor | np.ndarray) -> bool:
    """Whether a tensor lies where its device says, and not on each worker's own one."""
    return isinstance(t, Tensor) and (isinstance(t.device, tuple) or "@" in t.device)


def layout_of_own(t: Tensor | np.ndarray) -> TensorLayout:
    """How a tensor lies of which each worker has one of its own: as rows of one with a row for each."""
    n = current().world.size
    return TensorLayout((n, *t.shape), t.dtype.itemsize, tuple(range(n)), 0, tuple(range(n + 1)))


class SnapshotMemory:
    """Where the parts of a snapshot are copied to. It is kept for the next one, whose copies find its pages there."""

    def __init__(self) -> None:
        self.whole = np.empty(0, np.uint8)

    def copies(self, arrays: list[np.ndarray]) -> list[np.ndarray]:
        """They are valid until they are asked for again."""
        ends = list(accumulate((-(-a.nbytes // ALIGN) * ALIGN for a in arrays), initial=0))
        if self.whole.nbytes < ends[-1]:
            self.whole = np.empty(ends[-1], np.uint8)
        out = [self.whole[at : at + a.nbytes].view(a.dtype).reshape(a.shape) for at, a in zip(ends, arrays)]
        for to, a in zip(out, arrays):
            np.copyto(to, a)
        return out


def snapshot(
    tensors: dict[str, Tensor | np.ndarray],
    copies: set[str],
    own_ones: set[str],
    memory: SnapshotMemory | None = None,
) -> dict[str, tuple[list[TensorPart], list[np.ndarray]]]:
    """By name: who writes which parts, and this rank's own ones: copies in `memory`, so that training may go on, or,
    without it, where they lie. What is lazy, or a view, is computed first, by all that hold it; `copies` are not copied
    again, of `own_ones` each worker writes its own. Cost: a pass over memory, or none."""
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
    divided = divide([layout_of_own(t) if name in own_ones else layout_of(t) for name, t in tensors.items()])
    own: list[np.ndarray] = []
    changing: list[int] = []  # which of them others may write to meanwhile
    for (name, t), parts in zip(tensors.items(), divided):
        is_copy = name in lazy or name in copies
        for p in parts:
            if p.owner == rank:
                array, lies_there = _part(lazy.get(name, t), p.box[1:] if name in own_ones else p.box)
                if lies_there and not is_copy:
                    changing.append(len(own))
                own.append(array)
    if memory is not None:
        for i, copied in zip(changing, memory.copies([own[i] for i in changing])):
            own[i] = copied
    found = map(_contiguous, own)
    return {name: (parts, [next(found) for p in parts if p.owner == rank]) for name, parts in zip(tensors, divided)}


def _contiguous(array: np.ndarray) -> np.ndarray:
    return np.ascontiguousarray(array).reshape(array.shape)


def _part(t: Tensor | np.ndarray, box: Bounds) -> tuple[np.ndarray, bool]:
    """The elements `box`, which lie on this worker, and whether it is there that they are."""
    whole = tuple((0, d) for d in t.shape)
    if isinstance(t, np.ndarray):
        return t[within(box, whole)], True
    found = storage(t.uop)
    if isinstance(found, Buffer):
        return _read(found, whole, box)
    how = layout_of(t)
    for i, b in enumerate(found):
        if b is not None and all(a <= c and d <= e for (a, e), (c, d) in zip(how.box(i), box)):
            return _read(b, how.box(i), box)
    raise AssertionError(f"no device of rank {current().world.rank} holds {box} of a tensor of shape {t.shape}")


def _read(b: Buffer, lies: Bounds, box: Bounds) -> tuple[np.ndarray, bool]:
    raw = b.as_numpy()
    array = b.copyout() if raw is None else raw
    return array.reshape([y - x for x, y in lies])[within(box, lies)], raw is not None


class Loaded:
    """A saved tensor in host memory, of which this worker has read what it will hold: `place()` makes it a Tensor."""

    def __init__(self, like: Any, shape: tuple[int, ...], dtype: DType, read: Read):
        self.dtype = dtype
        whole = tuple((0, d) for d in shape)
        self.like = like if isinstance(like, Tensor) and tuple(like.shape) == shape and 0 not in shape else None
        self.arrays: list[np.ndarray | None] | None = None  # of several devices
        self.array: np.ndarray | None = None
        if self.like is None or not isinstance(self.like.device, tuple):
            self.array = read(whole)
            return
        how, rank = layout_of(self.like), current().world.rank
        self.arrays, seen = [], dict[Bounds, np.ndarray]()
        for i, owner in enumerate(how.ranks):
            box = how.box(i)
            if owner == rank and box not in seen:
                seen[box] = read(box)
            self.arrays.append(seen[box] if owner == rank else None)

    def place(self) -> Tensor:
        """On the devices of what it was read like, and cut where that is; else on the default device. Where a device
        can compute with the memory that it was read into, that is the tensor's, once."""
        if self.arrays is None:
            assert self.array is not None
            device = default_device() if self.like is None else self.like.device
            if isinstance(device, str) and current().world.is_local(device) and not device.startswith("DISK"):
                return Tensor(self.array, device=device.partition("@")[0])
            return Tensor(self.array)
        assert self.like is not None
        u = engine().new_buffer(self.like.detach().cast(self.dtype).uop, self.like.device)
        found = storage(u)
        assert isinstance(found, list)
        given: set[int] = set()
        for i, (b, array) in enumerate(zip(found, self.arrays)):
            if b is not None and array is not None:
                own = None if id(array) in given else Buffer.over(b.device.name, array, self.dtype)
                found[i] = b.copyin(array) if own is None else own
                given.add(id(array))
        return Tensor(u)
