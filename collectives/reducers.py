"""Reductions of several sources into one, in host memory: LLVM IR, compiled once a signature, called through ctypes.

A reduce reads every source once and writes the destination once, in explicit vectors of 64 bytes; half types are
widened to float32, summed in the order of the balanced tree, and rounded once (to nearest even). Loads need no more
alignment than their element's. More than 16 sources are reduced in groups of 16, which are subtrees of the same tree,
so the bits do not change. The GIL is released while a kernel runs. Compiling takes about 10 ms a signature.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import numpy as np

from manygrad.native.compiler import compiler
from manygrad.native.memory import bytes_at
from manygrad.tensor.dtype import DType, accumulate_dtype, dtypes, to_dtype

Reducer = Callable[[int, Sequence[int], int], None]
"""`(dst_addr, src_addrs, count)`: reduces `count` elements."""

GROUP = 16
BLOCK = 8192  # elements of a float32/float64 scratch row in the grouped form

# --- IR -------------------------------------------------------------------------------------------------------------

_LLVM_INT = {1: "i8", 2: "i16", 4: "i32", 8: "i64"}


def _stored(d: DType) -> str:
    """The LLVM type as it lies in memory (bfloat16 as bits, bool as a byte)."""
    if d.is_float and d is not dtypes.bfloat16:
        return {"float16": "half", "float32": "float", "float64": "double"}[d.name]
    return _LLVM_INT[d.itemsize]


class _Body:
    """Emits one loop body over `lanes` elements (1: the scalar tail)."""

    def __init__(self, lanes: int, prefix: str):
        self.lanes, self.prefix, self.n = lanes, prefix, 0
        self.lines: list[str] = []

    def ty(self, scalar: str) -> str:
        return scalar if self.lanes == 1 else f"<{self.lanes} x {scalar}>"

    def const(self, scalar: str, value: int) -> str:
        if self.lanes == 1:
            return str(value)
        return "<" + ", ".join([f"{scalar} {value}"] * self.lanes) + ">"

    def emit(self, text: str) -> str:
        self.n += 1
        name = f"%{self.prefix}{self.n}"
        self.lines.append(f"  {name} = {text}")
        return name

    def load(self, pointer: str, index: str, d: DType, acc: DType) -> str:
        stored = _stored(d)
        at = self.emit(f"getelementptr {stored}, ptr {pointer}, i64 {index}")
        v = self.emit(f"load {self.ty(stored)}, ptr {at}, align {d.itemsize}")
        if d is acc:
            return v
        if d is dtypes.bfloat16:
            wide = self.emit(f"zext {self.ty('i16')} {v} to {self.ty('i32')}")
            bits = self.emit(f"shl {self.ty('i32')} {wide}, {self.const('i32', 16)}")
            return self.emit(f"bitcast {self.ty('i32')} {bits} to {self.ty('float')}")
        return self.emit(f"fpext {self.ty(stored)} {v} to {self.ty('float')}")

    def store(self, value: str, pointer: str, index: str, d: DType, acc: DType) -> None:
        stored = _stored(d)
        if d is dtypes.bfloat16 and acc is not d:  # round to nearest even in integers; NaNs stay NaN
            i32, f32 = self.ty("i32"), self.ty("float")
            bits = self.emit(f"bitcast {f32} {value} to {i32}")
            high = self.emit(f"lshr {i32} {bits}, {self.const('i32', 16)}")
            odd = self.emit(f"and {i32} {high}, {self.const('i32', 1)}")
            bias = self.emit(f"add {i32} {odd}, {self.const('i32', 0x7FFF)}")
            rounded = self.emit(f"add {i32} {bits}, {bias}")
            rounded = self.emit(f"lshr {i32} {rounded}, {self.const('i32', 16)}")
            quiet = self.emit(f"or {i32} {high}, {self.const('i32', 0x40)}")
            nan = self.emit(f"fcmp uno {f32} {value}, {value}")
            chosen = self.emit(f"select {self.ty('i1')} {nan}, {i32} {quiet}, {i32} {rounded}")
            value = self.emit(f"trunc {i32} {chosen} to {self.ty('i16')}")
        elif d is not acc:
            value = self.emit(f"fptrunc {self.ty('float')} {value} to {self.ty(stored)}")
        at = self.emit(f"getelementptr {stored}, ptr {pointer}, i64 {index}")
        self.lines.append(f"  store {self.ty(stored)} {value}, ptr {at}, align {d.itemsize}")

    def combine(self, op: str, a: str, b: str, acc: DType) -> str:
        ty = self.ty(_stored(acc))
        if acc.is_bool:
            return self.emit(f"{'or' if op in ('add', 'max') else 'and'} {ty} {a}, {b}")
        if op in ("add", "mul"):
            return self.emit(f"{'f' if acc.is_float else ''}{op} {ty} {a}, {b}")
        if acc.is_float:  # a NaN on either side wins
            better = self.emit(f"fcmp {'ogt' if op == 'max' else 'olt'} {ty} {a}, {b}")
            nan = self.emit(f"fcmp uno {ty} {a}, {a}")
            better = self.emit(f"or {self.ty('i1')} {better}, {nan}")
        else:
            sign = "s" if acc.kind == "i" else "u"
            better = self.emit(f"icmp {sign}{'gt' if op == 'max' else 'lt'} {ty} {a}, {b}")
        return self.emit(f"select {self.ty('i1')} {better}, {ty} {a}, {ty} {b}")

    def tree(self, op: str, values: list[str], acc: DType) -> str:
        if len(values) == 1:
            return values[0]
        half = 1 << (len(values) - 1).bit_length() - 1
        return self.combine(op, self.tree(op, values[:half], acc), self.tree(op, values[half:], acc), acc)


def reduce_ir(op: str, dst: DType, srcs: tuple[DType, ...]) -> str:
    """LLVM IR of `void reduce(ptr dst, ptr s0, ..., i64 count)`: a vector loop, then a scalar tail."""
    acc = accumulate_dtype(dst) if dst.is_half else accumulate_dtype(srcs[0])
    width = max(64 // max(acc.itemsize, 1), 1)
    args = ", ".join(["ptr noalias %d"] + [f"ptr %s{i}" for i in range(len(srcs))] + ["i64 %n"])

    def body(lanes: int, prefix: str, index: str) -> str:
        b = _Body(lanes, prefix)
        values = [b.load(f"%s{i}", index, d, acc) for i, d in enumerate(srcs)]
        b.store(b.tree(op, values, acc), "%d", index, dst, acc)
        return "\n".join(b.lines)

    return f"""
define void @reduce({args}) {{
entry:
  %m = and i64 %n, {-width}
  %any = icmp sgt i64 %m, 0
  br i1 %any, label %wide, label %middle
wide:
  %i = phi i64 [0, %entry], [%i2, %wide]
{body(width, "v", "%i")}
  %i2 = add i64 %i, {width}
  %more = icmp slt i64 %i2, %m
  br i1 %more, label %wide, label %middle
middle:
  %left = icmp slt i64 %m, %n
  br i1 %left, label %tail, label %done
tail:
  %j = phi i64 [%m, %middle], [%j2, %tail]
{body(1, "t", "%j")}
  %j2 = add i64 %j, 1
  %again = icmp slt i64 %j2, %n
  br i1 %again, label %tail, label %done
done:
  ret void
}}"""


def _check(op: str, dst: DType, srcs: tuple[DType, ...]) -> DType:
    """The accumulate type; `TypeError` on types that cannot be reduced into one another."""
    accs = {accumulate_dtype(d) for d in (dst, *srcs)}
    if len(accs) != 1 or op not in ("add", "mul", "max", "min"):
        raise TypeError(f"cannot reduce {[d.name for d in srcs]} into {dst.name} by {op!r}")
    return accs.pop()


@cache
def reducer(op: str, dst_dtype: str, src_dtypes: tuple[str, ...]) -> Reducer:
    """The compiled reducer of this signature. bool: add and max are or, mul and min are and.

    Raises `TypeError` for types of different accumulate types. The destination may be one of the sources.
    """
    dst, srcs = to_dtype(dst_dtype), tuple(to_dtype(s) for s in src_dtypes)
    acc = _check(op, dst, srcs)
    if len(srcs) > GROUP:
        return _grouped(op, dst, srcs, acc)
    text = reduce_ir(op, dst, srcs).replace("ptr noalias %d", "ptr %d")
    address = compiler().functions(text, ["reduce"])["reduce"]
    kernel = ctypes.CFUNCTYPE(None, *[ctypes.c_void_p] * (len(srcs) + 1), ctypes.c_int64)(address)

    def reduce(dst_addr: int, src_addrs: Sequence[int], count: int) -> None:
        kernel(dst_addr, *src_addrs, count)

    return reduce


def _grouped(op: str, dst: DType, srcs: tuple[DType, ...], acc: DType) -> Reducer:
    groups = [slice(i, i + GROUP) for i in range(0, len(srcs), GROUP)]
    firsts = [reducer(op, acc.name, tuple(s.name for s in srcs[g])) for g in groups]
    last = reducer(op, dst.name, (acc.name,) * len(groups))
    sizes = [s.itemsize for s in srcs]

    def reduce(dst_addr: int, src_addrs: Sequence[int], count: int) -> None:
        scratch = np.empty((len(groups), min(count, BLOCK) * acc.itemsize), dtype=np.uint8)
        rows = [scratch[i].ctypes.data for i in range(len(groups))]
        for start in range(0, count, BLOCK):
            n = min(BLOCK, count - start)
            addrs = [a + start * s for a, s in zip(src_addrs, sizes)]
            for row, g, first in zip(rows, groups, firsts):
                first(row, addrs[g], n)
            last(dst_addr + start * dst.itemsize, rows, n)

    return reduce


# --- NumPy: the oracle ----------------------------------------------------------------------------------------------


def view(addr: int, count: int, dtype: str) -> np.ndarray[Any, Any]:
    """The memory at `addr` as an array that does not own it."""
    d = to_dtype(dtype)
    return bytes_at(addr, count * d.itemsize).view(d.np)


def reduce_arrays(arrays: Sequence[np.ndarray[Any, Any]], op: str, dst: DType) -> np.ndarray[Any, Any]:
    """The tree reduction of equally long arrays, accumulated in float32 for half types and rounded once to `dst`."""
    acc = accumulate_dtype(dst)
    if acc.is_bool:
        fn: Any = np.logical_or if op in ("add", "max") else np.logical_and
    else:
        fn = {"add": np.add, "mul": np.multiply, "max": np.maximum, "min": np.minimum}[op]

    def tree(values: list[np.ndarray[Any, Any]]) -> np.ndarray[Any, Any]:
        if len(values) == 1:
            return values[0]
        half = 1 << (len(values) - 1).bit_length() - 1
        return fn(tree(values[:half]), tree(values[half:]))

    with np.errstate(all="ignore"):
        return tree([a.astype(acc.np) for a in arrays]).astype(dst.np)


def reducer_numpy(op: str, dst_dtype: str, src_dtypes: tuple[str, ...]) -> Reducer:
    """As `reducer`, by NumPy."""
    dst = to_dtype(dst_dtype)
    _check(op, dst, tuple(to_dtype(s) for s in src_dtypes))

    def reduce(dst_addr: int, src_addrs: Sequence[int], count: int) -> None:
        out = reduce_arrays([view(a, count, s) for a, s in zip(src_addrs, src_dtypes)], op, dst)
        ctypes.memmove(dst_addr, out.ctypes.data, out.nbytes)

    return reduce
