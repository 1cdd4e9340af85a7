"""PYTHON: interprets the kernel AST with NumPy. The living definition of what the UOps of a kernel mean.

Every RANGE is an axis: an array has one axis a range of the kernel (loops first, in their order), of extent 1 where it
does not depend on that range. A REDUCE collapses its axes. Large iteration spaces are run in blocks of the loops.
Sums and products of float32 are accumulated in float64 and rounded once, so that this can be the oracle of the others.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from manygrad.native.memory import bytes_at
from manygrad.runtime.codegen.analysis.describe import (
    Signature,
    estimate,
    evaluate_int,
    kernel_name,
    signature,
    size_max,
)
from manygrad.runtime.codegen.opts import Opt
from manygrad.runtime.devices.base import Backend, Builder, Opened
from manygrad.runtime.devices.host import HOST_MEMORY, Memory
from manygrad.runtime.devices.in_order import IN_ORDER
from manygrad.tensor.dtype import DType, dtypes
from manygrad.tensor.uop.ops import Ops
from manygrad.tensor.uop.ranges import ranges_of
from manygrad.tensor.uop.uop import UOp

BLOCK_ELEMENTS = 1 << 22  # the most elements of one intermediate array, where cutting the loops can hold it


def cast(x: np.ndarray, to: DType) -> np.ndarray:
    """Conversion: floats to integers truncate and saturate (NaN gives 0), to bool is `!= 0`, integers wrap."""
    if to.is_bool:
        return x != 0
    if to.is_int and x.dtype.kind not in "biu":
        wide = np.trunc(x.astype(np.float64))
        lo, hi = int(to.min), int(to.max)
        inside = np.where((wide > lo) & (wide < hi), wide, 0).astype(to.np)
        return np.where(wide >= hi, to.np.type(hi), np.where(wide <= lo, to.np.type(lo), inside))
    return x.astype(to.np)


def divide(a: np.ndarray, b: np.ndarray, dtype: DType) -> np.ndarray:
    """Integer quotient: floor on index, towards zero elsewhere; x/0 = 0."""
    q = np.floor_divide(a, b)
    if dtype is dtypes.index or dtype.is_unsigned:
        return q
    inexact = (np.fmod(a, b) != 0) & ((a < 0) != (b < 0))
    return q + inexact.astype(q.dtype)


def _in_double(f: Any) -> Any:
    """Transcendentals of float32 and the halves: computed in float64, rounded once."""
    return lambda x, *more: f(x.astype(np.float64), *(y.astype(np.float64) for y in more)).astype(x.dtype)


UNARY: dict[Ops, Any] = {
    Ops.NEG: lambda x: np.logical_not(x) if x.dtype == bool else np.negative(x),
    Ops.RECIP: lambda x: np.divide(np.ones_like(x), x),
    Ops.SQRT: np.sqrt,
    Ops.EXP: _in_double(np.exp),
    Ops.LOG: _in_double(np.log),
    Ops.SIN: _in_double(np.sin),
    Ops.TRUNC: lambda x: np.trunc(x) if x.dtype.kind not in "biu" else x,
    Ops.NOT: lambda x: np.logical_not(x) if x.dtype == bool else np.invert(x),
}
BINARY: dict[Ops, Any] = {
    Ops.ADD: np.add, Ops.MUL: np.multiply, Ops.MAX: np.maximum, Ops.FDIV: np.true_divide,
    Ops.POW: _in_double(np.power),
    Ops.SUB: lambda a, b: np.logical_xor(a, b) if a.dtype == bool else np.subtract(a, b),
    Ops.CMPLT: np.less, Ops.CMPNE: np.not_equal, Ops.CMPEQ: np.equal,
    Ops.AND: np.bitwise_and, Ops.OR: np.bitwise_or, Ops.XOR: np.bitwise_xor,
    Ops.SHL: np.left_shift, Ops.SHR: np.right_shift,
}  # fmt: skip
COMBINE: dict[str, Any] = {"add": np.add, "mul": np.multiply, "max": np.maximum}
REDUCE: dict[Ops, Any] = {Ops.ADD: np.add, Ops.MUL: np.multiply, Ops.MAX: np.maximum}


class Interpreter:
    """One block of one run: `starts[r]`, `sizes[r]` say which iterations of range `r` are evaluated."""

    def __init__(
        self, sig: Signature, axes: dict[UOp, int], memory: dict[int, np.ndarray], variables: dict[UOp, int]
    ) -> None:
        self.sig, self.axes, self.memory, self.variables = sig, axes, memory, variables
        self.values: dict[UOp, np.ndarray] = {}

    def run(self, starts: dict[UOp, int], sizes: dict[UOp, int]) -> None:
        self.values.clear()
        self.starts, self.sizes = starts, sizes
        ready = []
        for u in self.sig.nodes:
            if u.op is Ops.STORE:
                ready.append(self.gather_store(u))
            elif u.op not in (Ops.SINK, Ops.PARAM, Ops.INDEX):
                self.values[u] = self.evaluate(u)
        for u, offset, value in ready:
            target = self.memory[u.src[0].src[0].arg]
            if u.arg in COMBINE:
                COMBINE[u.arg].at(target, offset, value)
            else:
                target[offset] = value  # iterations in order: the last one to an address stays

    def constant(self, value: Any, dtype: DType) -> np.ndarray:
        return np.full((1,) * max(1, len(self.axes)), value, dtype=dtype.np)

    def evaluate(self, u: UOp) -> np.ndarray:
        src: list[Any] = [self.values.get(s) for s in u.src]
        match u.op:
            case Ops.CONST:
                return self.constant(u.arg, u.dtype)
            case Ops.DEFINE_VAR:
                return self.constant(self.variables[u], dtypes.index)
            case Ops.RANGE:
                shape = [1] * max(1, len(self.axes))
                shape[self.axes[u]] = self.sizes[u]
                return np.arange(self.starts[u], self.starts[u] + self.sizes[u], dtype=np.int64).reshape(shape)
            case Ops.LOAD:
                return self.load(u)
            case Ops.REDUCE:
                return self.reduce(u, src[0])
            case Ops.WHERE:
                return np.where(src[0], src[1], src[2])
            case Ops.FMA:  # the product of two float32 is exact in float64
                wide = [x.astype(np.float64) for x in src]
                return (wide[0] * wide[1] + wide[2]).astype(u.dtype.np)
            case Ops.CAST:
                return cast(src[0], u.dtype)
            case Ops.BITCAST:
                return np.ascontiguousarray(src[0]).view(u.dtype.np)
            case Ops.IDIV:
                return divide(src[0], src[1], u.dtype)
            case Ops.MOD:
                floor = u.dtype is dtypes.index
                return np.where(src[1] == 0, 0, (np.mod if floor else np.fmod)(*src)).astype(u.dtype.np)
            case op if op in UNARY:
                return UNARY[op](src[0])
            case op if op in BINARY:
                return BINARY[op](*src)
        raise NotImplementedError(f"{u.op.name} has no meaning inside a kernel")

    def checked(self, index: UOp, offset: np.ndarray) -> np.ndarray:
        """Out of bounds is an error here; the native devices would read what stands there."""
        extent = self.memory[index.src[0].arg].size
        if offset.size and not (0 <= offset.min() and offset.max() < extent):
            bad = int(offset.min() if offset.min() < 0 else offset.max())
            raise IndexError(f"kernel argument {index.src[0].arg} has {extent} elements, but element {bad} is accessed")
        return offset

    def load(self, u: UOp) -> np.ndarray:
        index = u.src[0]
        memory, offset = self.memory[index.src[0].arg], self.values[index.src[1]]
        if len(index.src) == 2:
            return memory[self.checked(index, offset)]
        valid, offset = np.broadcast_arrays(self.values[index.src[2]], offset)
        value = np.zeros(offset.shape, dtype=memory.dtype)
        value[valid] = memory[self.checked(index, offset[valid])]
        return value

    def reduce(self, u: UOp, value: np.ndarray) -> np.ndarray:
        axes = [self.axes[r] for r in u.src[1:]]
        shape = list(value.shape)
        for r, axis in zip(u.src[1:], axes):
            shape[axis] = self.sizes[r]
        value = np.broadcast_to(value, shape)
        wide = np.float64 if u.dtype.is_float and u.arg is not Ops.MAX else u.dtype.np
        return REDUCE[u.arg].reduce(value, axis=tuple(axes), dtype=wide, keepdims=True).astype(u.dtype.np)

    def gather_store(self, u: UOp) -> tuple[UOp, np.ndarray, np.ndarray]:
        """(STORE, flat offsets, flat values) in iteration order, invalid iterations left out."""
        index = u.src[0]
        shape = [1] * max(1, len(self.axes))
        for r in self.sig.loops:
            shape[self.axes[r]] = self.sizes[r]
        offset = np.broadcast_to(self.values[index.src[1]], shape).reshape(-1)
        value = np.broadcast_to(self.values[u.src[1]], shape).reshape(-1)
        if len(index.src) == 3:
            valid = np.broadcast_to(self.values[index.src[2]], shape).reshape(-1)
            offset, value = offset[valid], value[valid]
        return u, self.checked(index, offset), value


class PythonKernel:
    source = ""
    opts: tuple[Opt, ...] = ()

    def __init__(self, ast: UOp) -> None:
        self.name = kernel_name(ast)
        self.flops, self.nbytes = estimate(ast)
        self.sig = signature(ast)
        self.axes = {r: i for i, r in enumerate(self.sig.loops)}
        for u in self.sig.nodes:
            if u.op is Ops.RANGE:
                self.axes.setdefault(u, len(self.axes))

    def blocks(self, sizes: dict[UOp, int]) -> Iterator[tuple[dict[UOp, int], dict[UOp, int]]]:
        """Cuts the loops, the outermost first, until no intermediate exceeds BLOCK_ELEMENTS."""
        used = {ranges_of(u) | (frozenset(u.src[1:]) if u.op is Ops.REDUCE else frozenset()) for u in self.sig.nodes}
        used |= {frozenset(self.sig.loops)}
        step = dict(sizes)
        for r in self.sig.loops:
            largest = max(_volume(s, step) for s in used)
            if largest <= BLOCK_ELEMENTS:
                break
            step[r] = max(1, step[r] * BLOCK_ELEMENTS // largest)
        cuts = [range(0, sizes[r], max(1, step[r])) for r in self.sig.loops]
        for start in itertools.product(*cuts):
            begin = {**dict.fromkeys(sizes, 0), **dict(zip(self.sig.loops, start))}
            yield begin, {r: min(step[r], sizes[r] - begin[r]) for r in sizes}

    def __call__(self, handles: Sequence[Memory], vars: tuple[int, ...] = (), wait: bool = False) -> float | None:
        began = time.perf_counter()
        variables = dict(zip(self.sig.variables, vars, strict=True))
        by_name = {v.arg.name: n for v, n in variables.items()}
        memory = {}
        for slot, dtype in self.sig.params.items():
            h = handles[slot]
            raw = bytes_at(h.address, h.nbytes)
            memory[slot] = raw[: h.nbytes // dtype.itemsize * dtype.itemsize].view(dtype.np)
        interpreter = Interpreter(self.sig, self.axes, memory, variables)
        sizes = {r: evaluate_int(r.src[0], by_name) for r in self.axes}
        with np.errstate(all="ignore"):
            for starts, extent in self.blocks(sizes):
                interpreter.run(starts, extent)
        return time.perf_counter() - began if wait else None


def _volume(ranges: frozenset[UOp], sizes: dict[UOp, int]) -> int:
    total = 1
    for r in ranges:
        total *= sizes.get(r, size_max(r))
    return total


BACKEND = Backend("PYTHON", Builder(lambda ast: PythonKernel(ast)), lambda name: Opened(HOST_MEMORY, IN_ORDER))
