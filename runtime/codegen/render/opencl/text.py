"""Text of OpenCL C: types, literals, and values in pieces.

OpenCL C has vectors of 2, 4, 8 and 16 lanes. A value of any number of lanes is a tuple of pieces, the widest first: of
27 lanes, one of 16, one of 8, one of 2 and a scalar. A scalar bool is an `int` that is 0 or 1, a vector of them an
`intN` whose lanes are 0 or -1, as comparisons give them and as selections take them. Halves and bytes of float8 are
held as their bits, in `ushort` and `uchar`.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from manygrad.runtime.codegen.lowered import Inst
from manygrad.tensor.dtype import DType, dtypes

WIDTHS = (16, 8, 4, 2, 1)
Value = tuple[str, ...]  # the pieces


def pieces(lanes: int) -> tuple[int, ...]:
    """How many lanes each piece of a value has."""
    found = []
    for width in WIDTHS:
        count, lanes = divmod(lanes, width)
        found += [width] * count
    return tuple(found)


def starts(lanes: int) -> tuple[tuple[int, int], ...]:
    """(first lane, lanes) of each piece."""
    found, first = [], 0
    for n in pieces(lanes):
        found.append((first, n))
        first += n
    return tuple(found)


def integer(itemsize: int, unsigned: bool = False) -> str:
    return ("u" if unsigned else "") + {1: "char", 2: "short", 4: "int", 8: "long"}[itemsize]


def scalar_type(d: DType) -> str:
    """Type of a value."""
    if d.is_bool:
        return "int"
    if d.is_float:
        return {4: "float", 8: "double"}[d.itemsize] if d.itemsize >= 4 else integer(d.itemsize, True)
    return integer(d.itemsize, d.is_unsigned)


def memory_type(d: DType) -> str:
    """Type of an element in memory."""
    return "uchar" if d.is_bool else scalar_type(d)


def vector(t: str, lanes: int) -> str:
    return t if lanes == 1 else f"{t}{lanes}"


def mask_size(d: DType) -> int:
    """Bytes of a lane of what a comparison of such values gives."""
    return 4 if d.is_bool else d.itemsize


def whole(value: int, size: int, unsigned: bool = False) -> str:
    """An integer literal of that many bytes."""
    if size < 4:
        return f"({integer(size, unsigned)})({value})"
    end = ("U" if unsigned else "") + ("L" if size == 8 else "")
    if value == -(1 << (8 * size - 1)):
        return f"(-{-value - 1}{end} - 1)"
    return f"{value}{end}" if value >= 0 else f"({value}{end})"


def literal(value: Any, d: DType) -> str:
    """A scalar."""
    if d.is_bool:
        return "1" if value else "0"
    if not d.is_float:
        return whole(int(value), d.itemsize, d.is_unsigned)
    exact = np.asarray(value, dtype=np.float64).astype(d.np)
    bits = int(exact.view(f"u{d.itemsize}"))
    if d.itemsize < 4:
        return whole(bits, d.itemsize, True)
    number = float(exact)
    if not math.isfinite(number):
        return f"as_{scalar_type(d)}({whole(bits, d.itemsize, True)})"
    text = number.hex() + ("f" if d.itemsize == 4 else "")
    return f"({text})" if text.startswith("-") else text


def constant(value: Any, d: DType, lanes: int) -> str:
    """A literal in all lanes of a piece."""
    if lanes == 1:
        return literal(value, d)
    if d.is_bool:
        return f"(int{lanes})({-1 if value else 0})"
    return f"({vector(scalar_type(d), lanes)})({literal(value, d)})"


class OpenCLWriter:
    def __init__(self) -> None:
        self.lines: list[str] = []
        self.names: dict[Inst, Value] = {}
        self.helpers: dict[str, str] = {}  # functions that stand before the kernel, by name
        self.double = False
        self.count = 0
        self.depth = 1

    def line(self, text: str) -> None:
        self.lines.append("  " * self.depth + text)

    def fresh(self, prefix: str = "v") -> str:
        self.count += 1
        return f"{prefix}{self.count}"

    def let(self, t: str, text: str) -> str:
        name = self.fresh()
        self.line(f"const {t} {name} = {text};")
        return name

    def piece(self, d: DType, lanes: int, text: str) -> str:
        """A piece of a value of that type, named."""
        if d is dtypes.float64:
            self.double = True
        return self.let(vector(scalar_type(d), lanes), text)

    # *** masks ***

    def mask(self, text: str, size: int, lanes: int) -> str:
        """Result of a comparison of lanes of `size` bytes gives, as a bool."""
        return text if lanes == 1 or size == 4 else f"convert_int{lanes}({text})"

    def sized(self, mask: str, size: int, lanes: int) -> str:
        """A bool as selections among lanes of `size` bytes take it."""
        return mask if lanes == 1 or size == 4 else f"convert_{integer(size)}{lanes}({mask})"

    def choose(self, mask: str, a: str, b: str, d: DType, lanes: int) -> str:
        """`a` where the mask holds, else `b`."""
        if d.is_bool and lanes > 1:
            return f"(({mask} & {a}) | (~{mask} & {b}))"
        return f"({self.sized(mask, mask_size(d), lanes)} ? {a} : {b})"

    # *** lanes ***

    def lane(self, x: Inst, i: int) -> str:
        """Lane `i` of a value, as a scalar."""
        for name, (first, n) in zip(self.names[x], starts(x.lanes)):
            if first <= i < first + n:
                if n == 1:
                    return name
                one = f"({name}).s{i - first:x}"
                return f"({one} & 1)" if x.dtype.is_bool else one
        raise AssertionError(f"lane {i} of {x}")

    def joined(self, d: DType, lanes: list[str]) -> Value:
        """The value of these scalars."""
        found = []
        for first, n in starts(len(lanes)):
            own = lanes[first : first + n]
            if n == 1:
                found.append(own[0])
            else:
                own = [f"-({one})" for one in own] if d.is_bool else own
                t = vector(scalar_type(d), n)
                found.append(self.piece(d, n, f"({t})({', '.join(own)})"))
        return tuple(found)
