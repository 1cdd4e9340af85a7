"""Text of LLVM IR: types, literals, and the lines of a function."""

from __future__ import annotations

import struct
from functools import cache
from typing import Any

import numpy as np

from manygrad.runtime.codegen.lowered import Inst
from manygrad.tensor.dtype import DType, dtypes

ENTRY = "kernel"  # the name of a kernel's function
_FLOATS = {2: "half", 4: "float", 8: "double"}


@cache
def scalar_type(d: DType) -> str:
    if d.is_float:
        return "i16" if d is dtypes.bfloat16 else "i8" if d.is_fp8 else _FLOATS[d.itemsize]
    return "i1" if d.is_bool else f"i{d.itemsize * 8}"


def memory_type(d: DType) -> str:
    return "i8" if d.is_bool else scalar_type(d)


def vector(t: str, lanes: int) -> str:
    return t if lanes == 1 else f"<{lanes} x {t}>"


def suffix(t: str, lanes: int) -> str:
    """The type in an intrinsic's name."""
    short = {"half": "f16", "float": "f32", "double": "f64"}.get(t, t)
    return short if lanes == 1 else f"v{lanes}{short}"


def literal(value: Any, d: DType) -> str:
    if d is dtypes.bfloat16:
        return str(int(np.asarray(value, dtype=np.float64).astype(d.np).view(np.uint16)))
    if d.is_fp8:
        return str(int(np.asarray(value, dtype=np.float64).astype(d.np).view(np.uint8)))
    if d is dtypes.float16:
        return f"0xH{int(np.float16(value).view(np.uint16)):04X}"
    if d.is_float:
        value = float(np.float32(value)) if d.itemsize == 4 else float(value)
        return f"0x{struct.unpack('<Q', struct.pack('<d', value))[0]:016X}"
    return ("true" if value else "false") if d.is_bool else str(int(value))


def splat(text: str, t: str, lanes: int) -> str:
    return text if lanes == 1 else "<" + ", ".join([f"{t} {text}"] * lanes) + ">"


class LLVMWriter:
    def __init__(self) -> None:
        self.lines: list[str] = []
        self.declared: dict[str, None] = {}
        self.names: dict[Inst, str] = {}
        self.count = 0
        self.label = "entry"

    def fresh(self, prefix: str = "v") -> str:
        self.count += 1
        return f"{prefix}{self.count}"

    def let(self, text: str) -> str:
        name = "%" + self.fresh()
        self.lines.append(f"  {name} = {text}")
        return name

    def line(self, text: str) -> None:
        self.lines.append("  " + text)

    def start(self, label: str) -> None:
        self.lines.append(f"{label}:")
        self.label = label

    def call(self, name: str, result: str, *args: str) -> str:
        """Calls an intrinsic; `args` are typed operands."""
        types = ", ".join(_type_of(a) for a in args)
        self.declared[f"declare {result} @{name}({types})"] = None
        text = f"call {result} @{name}({', '.join(args)})"
        if result == "void":
            self.line(text)
            return ""
        return self.let(text)

    def typed(self, x: Inst) -> str:
        return f"{vector(scalar_type(x.dtype), x.lanes)} {self.names[x]}"


def _type_of(typed: str) -> str:
    """`<16 x float> %v3` -> `<16 x float>`; `ptr addrspace(3) %v3` -> `ptr addrspace(3)`"""
    end = ">" if typed.startswith("<") else ")" if typed.startswith("ptr addrspace") else ""
    return typed[: typed.index(end) + 1] if end else typed.split(" ", 1)[0]
