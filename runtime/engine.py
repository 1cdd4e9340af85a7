"""The local realize engine: what `Tensor.realize` calls. Set as `tensor.engine.holder.current` by the package's root."""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterable
from math import prod

import numpy as np

from manygrad.multi.lower import store_spec
from manygrad.multi.world import world
from manygrad.runtime.buffer import Buffer
from manygrad.runtime.devices import canonical as local_canonical
from manygrad.runtime.devices import get_device
from manygrad.runtime.functions import has_functions, run_functions
from manygrad.runtime.linear import capture, compile_linear, run_linear, storage
from manygrad.schedule import as_param, create_linear, create_linear_with_vars
from manygrad.tensor.dtype import DType, dtypes
from manygrad.tensor.engine import default_device
from manygrad.tensor.source import line_of
from manygrad.tensor.tensor import LIVE, PENDING, Tensor
from manygrad.tensor.uop import BufferSpec, GroupOp, Ops, UOp, standing_on, toposort
from manygrad.tensor.uop.rewrite import substitute
from manygrad.tensor.uop.shape import unviewed

_uids = itertools.count(1)


def new_buffer(uop: UOp, device: str | tuple[str, ...]) -> UOp:
    """A BUFFER node for the value of `uop`."""
    axis, bounds = store_spec(uop) if isinstance(device, tuple) else (None, ())
    return UOp(Ops.BUFFER, uop.dtype, (), BufferSpec(next(_uids), tuple(uop.shape), uop.dtype, device, axis, bounds))


def _run(sink: UOp) -> None:
    linear, var_vals, buffers = create_linear_with_vars(sink)
    run_linear(compile_linear(linear, buffers), var_vals)


def _run_body(body: UOp, buffers: list[UOp]) -> None:
    """A traced body: PARAMs are numbered already, its results take the slots after the arguments'."""
    linear = body._cache.get("linear")
    if linear is None:
        n = len(buffers) - len(body.src)
        stores = tuple(UOp(Ops.STORE, dtypes.void, (as_param(b, n + i), u)) for i, (b, u) in enumerate(zip(buffers[n:], body.src)))
        linear = body._cache["linear"] = create_linear(UOp(Ops.SINK, dtypes.void, stores), world)
    run_linear(compile_linear(linear, buffers), {})


class RealizeEngine:
    """Implements `tensor.engine.Engine` on the local devices."""

    def __init__(self) -> None:
        self.clock = 0  # counts realizes, to tell what was written after a value was computed

    def realize(self, tensors: list[Tensor], pending: bool = True) -> None:
        wanted = [*PENDING, *tensors] if pending else tensors
        if all(t.uop.op is Ops.BUFFER for t in wanted):
            return
        todo, overwritten = self._needed(wanted)
        effects: list[UOp] = []
        becomes: dict[UOp, UOp] = {}
        own: dict[int, UOp] = {}  # equal graphs are one node, but every tensor gets storage of its own: one may be assigned
        for t in todo:
            u = t.uop
            base = unviewed(u)
            if base.op is Ops.BUFFER or any(isinstance(d, int) and d == 0 for d in u.shape):
                continue
            if base.op is Ops.AFTER:
                effects.append(base)
                continue
            buffer = new_buffer(u, u.device or t._device)
            store = UOp(Ops.STORE, dtypes.void, (buffer, u))
            store._cache["line"] = line_of(u)
            effects.append(store)
            becomes.setdefault(u, buffer)
            own[id(t)] = buffer
        if not effects:
            return
        for u in self._kept(effects, overwritten):
            becomes[u] = new_buffer(u, u.device or default_device())
            effects.append(UOp(Ops.STORE, dtypes.void, (becomes[u], u)))
        sink = UOp(Ops.SINK, dtypes.void, tuple(dict.fromkeys(effects)))
        rest = run_functions(sink, lambda u: new_buffer(u, u.device or default_device()), _run, _run_body) if has_functions(sink) else sink
        linear, var_vals, buffers = create_linear_with_vars(rest)
        items = compile_linear(linear, buffers)
        for t in todo:
            PENDING.discard(t)
        run_linear(items, var_vals)
        computed = dict(becomes)
        for u in sink.toposort():
            if u.op is Ops.AFTER:
                base = u
                while base.op is Ops.AFTER:
                    base = base.src[0]
                becomes[u] = base
        self._remember(computed, becomes, overwritten)
        self._replace(becomes, own)

    def _needed(self, tensors: list[Tensor]) -> tuple[list[Tensor], set[UOp]]:
        """The tensors, and every lazy tensor that still needs a value about to be overwritten; those values."""
        todo = {id(t): t for t in tensors}
        written: set[UOp] = set()  # buffers, and assigned values that a later assignment overwrites
        for u in toposort(t.uop for t in todo.values()):
            if u.op is Ops.AFTER:
                written.add(u.src[0])
        if written:
            computed = {t.uop for t in todo.values()}
            lazy = [t for t in LIVE if id(t) not in todo and unviewed(t.uop).op not in (Ops.BUFFER, Ops.AFTER)]
            readers = standing_on([t.uop for t in lazy], written.__contains__, Ops.AFTER)
            todo |= {id(t): t for t in lazy if t.uop in readers and unviewed(t.uop) not in computed}
        return list(todo.values()), written

    def _trained(self, roots: Iterable[UOp]) -> set[UOp]:
        """The nodes below `roots` through which a gradient flows to a live tensor that requires one."""
        leaves = {t.uop for t in LIVE if t._requires_grad}
        return standing_on(roots, lambda u: u in leaves or "history" in u._cache, Ops.DETACH) if leaves else set()

    def _kept(self, effects: list[UOp], overwritten: set[UOp]) -> list[UOp]:
        """Values stored on the way that were made from what is overwritten now, and not by training: the random numbers of a dropout.
        backward() after item() needs them; they could not be computed again.
        """
        if not overwritten or not (trained := self._trained(effects)):
            return []
        readers = standing_on(effects, overwritten.__contains__, Ops.AFTER)
        return [u for u in toposort(effects) if u.op is Ops.CONTIGUOUS and u.arg is None and u in readers and u not in trained]

    def _remember(self, computed: dict[UOp, UOp], becomes: dict[UOp, UOp], overwritten: set[UOp]) -> None:
        """A computed value that depends on something trained keeps its graph (over what is stored now), so that backward() works after
        item() or numpy(). One that was made from values overwritten by now remembers just that.
        """
        self.clock += 1
        for u, buffer in becomes.items():
            if u.op is Ops.AFTER:
                buffer._cache.pop("history", None)
                buffer._cache["written"] = self.clock
        trained = self._trained(computed)
        leaves = {t.uop for t in LIVE if t._requires_grad}
        values = [u for u in computed if u in trained and u not in leaves and u.dtype.is_float]
        if not values:
            return
        sources = UOp(Ops.SINK, dtypes.void, tuple(s for u in values for s in u.src))
        stale = standing_on([sources], overwritten.__contains__, lambda u: u.op is Ops.AFTER or u in becomes)
        now = iter(substitute(sources, becomes).src)
        for u in values:
            src = tuple(next(now) for _ in u.src)
            becomes[u]._cache["history"] = (None if any(s in stale for s in u.src) else u.replace(src=src), self.clock)

    def _replace(self, becomes: dict[UOp, UOp], own: dict[int, UOp]) -> None:
        """Live tensors see what has been computed as storage. An equal tensor that was not asked for, or a view of one, reads a lazy
        copy of it: the storage may be assigned.
        """
        lazy = [t for t in LIVE if t.uop.op is not Ops.BUFFER]
        if not lazy:
            return
        mapped = substitute(UOp(Ops.SINK, dtypes.void, tuple(t.uop for t in lazy)), becomes)
        for t, u in zip(lazy, mapped.src):
            base = t.uop
            while base not in becomes and base.op in GroupOp.VIEW:
                base = base.src[0]
            if id(t) in own:
                t.uop = own[id(t)]
            elif base in becomes and base.op is not Ops.AFTER:
                t.uop = substitute(t.uop, {base: UOp(Ops.CONTIGUOUS, base.dtype, (becomes[base],))})
            else:
                t.uop = u

    def from_numpy(self, array: np.ndarray, dtype: DType, device: str, share: bool = False) -> UOp:
        if array.size == 0:
            flat = UOp(Ops.RESHAPE, dtype, (UOp.const(dtype, 0),), (1,) * array.ndim)
            return UOp(Ops.EXPAND, dtype, (flat,), array.shape)
        u = UOp(Ops.BUFFER, dtype, (), BufferSpec(next(_uids), tuple(array.shape), dtype, device))
        shared = Buffer.over(device, array, dtype) if share else None
        u._cache["buffer"] = shared if shared is not None else Buffer(device, array.size, dtype).copyin(array)
        return u

    def map_file(self, path: str, parts: list[tuple[DType, tuple[int, ...], int]]) -> list[UOp]:
        """BUFFERs on `DISK:path`, one for each (dtype, shape, offset in bytes); the file is mapped once, nothing is read yet."""
        device = f"DISK:{path}"
        whole = Buffer(device, os.path.getsize(path), dtypes.uint8)
        out = []
        for dtype, shape, offset in parts:
            u = UOp(Ops.BUFFER, dtype, (), BufferSpec(next(_uids), shape, dtype, device))
            u._cache["buffer"] = whole.view(prod(shape), dtype, offset)
            out.append(u)
        return out

    def to_numpy(self, buffer: UOp) -> np.ndarray:
        if capture:
            raise RuntimeError("a value is read (numpy(), item(), tolist()) while a TinyJit records: a replay would not read it again; return the tensor and read it outside")
        found = storage(buffer)
        assert isinstance(found, Buffer), "to_numpy of a buffer on several devices"
        return found.copyout().reshape(buffer.shape)

    def share(self, buffer: UOp) -> np.ndarray | None:
        found = storage(buffer)
        assert isinstance(found, Buffer), "share of a buffer on several devices"
        array = found.as_numpy()
        return None if array is None else array.reshape(buffer.shape)

    def canonical(self, device: str) -> str:
        """`cpu:1` -> `CPU:1`; the node is kept where there are several: `CPU:0@2`."""
        _, at, node = device.partition("@")
        local = local_canonical(device)
        if not at or world.size == 1:
            return local
        if not node.isdecimal() or int(node) >= world.size:
            raise ValueError(f"device {device!r}: node {node} does not exist, the world has {world.size} (0..{world.size - 1})")
        return f"{local}@{int(node)}"

    def workers(self) -> tuple[int, int]:
        return world.rank, world.size

    def sharding_axis(self, uop: UOp) -> int | None:
        return store_spec(uop)[0] if isinstance(uop.device, tuple) else None

    def store_spec(self, uop: UOp) -> tuple[int | None, tuple[int, ...]]:
        return store_spec(uop)

    def is_realized(self, buffer: UOp) -> bool:
        return "buffer" in buffer._cache


def synchronize(device: str | None = None) -> None:
    """Waits until everything started on `device` has ended."""
    get_device(device or default_device()).synchronize()
