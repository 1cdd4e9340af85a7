"""Instructions that take whole registers: scaling by a power of two, look-ups in a table, dot products of bytes."""

from __future__ import annotations

from collections.abc import Callable

from manygrad.runtime.codegen.lowered import Inst, Low
from manygrad.runtime.codegen.render.llvm.arithmetic import LLVMArithmetic
from manygrad.runtime.codegen.render.llvm.text import literal, scalar_type, vector
from manygrad.runtime.codegen.target import Dot
from manygrad.tensor.dtype import dtypes
from manygrad.tensor.uop.ops import Ops

DOTS = {
    (dtypes.bfloat16, dtypes.bfloat16): "llvm.x86.avx512bf16.dpbf16ps.{bits}",
    (dtypes.uint8, dtypes.int8): "llvm.x86.avx512.vpdpbusd.{bits}",
    (dtypes.int8, dtypes.int8): "llvm.aarch64.neon.sdot.v4i32.v16i8",
    (dtypes.uint8, dtypes.uint8): "llvm.aarch64.neon.udot.v4i32.v16i8",
}


class Registers(LLVMArithmetic):
    def in_registers(self, x: Inst, n: int, values: list[str]) -> str:
        """Fewer lanes than fill the smallest register are filled up, more than the largest one takes go in pieces."""
        bytewise = x.op in (Low.DOT, Low.DOT_WORDS, Low.SUM_WORDS)
        e, size = "i32" if bytewise else scalar_type(x.dtype), x.dtype.itemsize
        most = (x.arg.vector_bytes if bytewise else 64) // size
        least = (64 if x.op is Low.LOOKUP else 16) // size
        given = f"<{n} x {e}>"
        if n > most:
            halves = []
            for i in range(2):
                order = ", ".join(f"i32 {i * n // 2 + k}" for k in range(n // 2))
                parts = [
                    self.let(f"shufflevector {given} {v}, {given} poison, <{n // 2} x i32> <{order}>") for v in values
                ]
                halves.append(self.in_registers(x, n // 2, parts))
            order = ", ".join(f"i32 {k}" for k in range(n))
            t = f"<{n // 2} x {e}>"
            return self.let(f"shufflevector {t} {halves[0]}, {t} {halves[1]}, <{n} x i32> <{order}>")
        wide = max(n, least)
        t = f"<{wide} x {e}>"
        if n == 1:
            values = [self.let(f"insertelement {t} zeroinitializer, {e} {v}, i64 0") for v in values]
        elif n < wide:
            order = ", ".join(f"i32 {min(k, n)}" for k in range(wide))
            values = [
                self.let(f"shufflevector {given} {v}, {given} zeroinitializer, <{wide} x i32> <{order}>")
                for v in values
            ]
        found = self.makers.get(x.op, self.scale_or_within)(x, wide, *values)
        if n == 1:
            return self.let(f"extractelement {t} {found}, i64 0")
        if n == wide:
            return found
        order = ", ".join(f"i32 {k}" for k in range(n))
        return self.let(f"shufflevector {t} {found}, {t} poison, <{n} x i32> <{order}>")

    @property
    def makers(self) -> dict[Ops | Low, Callable[..., str]]:
        return {
            Low.LOOKUP: self.lookup,
            Low.DOT: self.dot,
            Low.DOT_WORDS: self.dot_in_words,
            Low.SUM_WORDS: self.sum_words,
        }

    def scale_or_within(self, x: Inst, lanes: int, a: str, b: str) -> str:
        bits, t = lanes * x.dtype.itemsize * 8, f"<{lanes} x {scalar_type(x.dtype)}>"
        what, kind = "scalef" if x.op is Low.SCALE else "range", "ps" if x.dtype.itemsize == 4 else "pd"
        name = f"llvm.x86.avx512.mask.{what}.{kind}.{bits}"
        least_magnitude = ["i32 2"] if x.op is Low.WITHIN else []
        rounding = ["i32 4"] if bits == 512 else []  # as the current mode says
        mask = "i8" if lanes <= 8 else "i16"
        return self.call(
            name, t, f"{t} {a}", f"{t} {b}", *least_magnitude, f"{t} zeroinitializer", f"{mask} -1", *rounding
        )

    def lookup(self, x: Inst, lanes: int, a: str) -> str:
        """In a table of two registers."""
        t, index = f"<{lanes} x float>", self.let(f"bitcast <{lanes} x float> {a} to <{lanes} x i32>")
        lower, upper = (", ".join(f"float {literal(v, x.dtype)}" for v in x.arg[i : i + 16]) for i in (0, 16))
        return self.call(
            "llvm.x86.avx512.vpermi2var.ps.512", t, f"{t} <{lower}>", f"<16 x i32> {index}", f"{t} <{upper}>"
        )

    def dot(self, x: Inst, lanes: int, a: str, b: str, c: str) -> str:
        """The products of what each int32 of `a` and `b` holds, added to `c`, of which the int32s hold the bits."""
        given, t = f"<{lanes} x i32>", f"<{lanes} x {scalar_type(x.dtype)}>"
        held = f"<{x.arg.terms * lanes} x {'bfloat' if x.arg.left is dtypes.bfloat16 else 'i8'}>"
        a, b, c = (self.let(f"bitcast {given} {v} to {to}") for v, to in ((a, held), (b, held), (c, t)))
        if x.arg.words:
            return self.dot_of_words(x.arg, lanes, a, b, c)
        found = self.call(
            DOTS[x.arg.left, x.arg.right].format(bits=32 * lanes), t, f"{t} {c}", f"{held} {a}", f"{held} {b}"
        )
        return self.let(f"bitcast {t} {found} to {given}")

    def dot_of_words(self, dot: Dot, lanes: int, a: str, b: str, c: str) -> str:
        """The same of uint8 by int8 with products of 16 bits, two of which are added up at a time: exact, for bytes are
        widened, or, where `a` is small, two products of bytes fit 16 bits."""
        sums, words, held = _types(lanes)
        if dot.most is not None:
            found = self.products_of_words(lanes, self.pairs_of_bytes(lanes, a, b), _all_words(1, lanes))
            return self.let(f"add {sums} {c}, {found}")
        a, b = (self.let(f"bitcast {held} {v} to {words}") for v in (a, b))
        eight = _all_words(8, lanes)
        first = self.let(f"and {words} {a}, {_all_words(255, lanes)}"), self.let(f"shl {words} {b}, {eight}")
        even = self.products_of_words(lanes, first[0], self.let(f"ashr {words} {first[1]}, {eight}"))
        second = self.let(f"lshr {words} {a}, {eight}"), self.let(f"ashr {words} {b}, {eight}")
        odd = self.products_of_words(lanes, *second)
        return self.let(f"add {sums} {self.let(f'add {sums} {c}, {even}')}, {odd}")

    def dot_in_words(self, x: Inst, lanes: int, a: str, b: str, c: str) -> str:
        """The same, where all of the sum fits 16 bits: each half of an int32 of `c` is the sum of two of four
        products."""
        sums, words, held = _types(lanes)
        a, b = (self.let(f"bitcast {sums} {v} to {held}") for v in (a, b))
        added = self.let(f"bitcast {sums} {c} to {words}")
        found = self.let(f"add {words} {added}, {self.pairs_of_bytes(lanes, a, b)}")
        return self.let(f"bitcast {words} {found} to {sums}")

    def sum_words(self, x: Inst, lanes: int, a: str) -> str:
        """Both halves of each int32 added up."""
        sums, words, _ = _types(lanes)
        return self.products_of_words(lanes, self.let(f"bitcast {sums} {a} to {words}"), _all_words(1, lanes))

    def pairs_of_bytes(self, lanes: int, a: str, b: str) -> str:
        """The products of uint8 by int8, two added up at a time: in 16 bits, to which they must not be too much."""
        _, words, held = _types(lanes)
        name = f"llvm.x86.{'avx2.pmadd.ub.sw' if lanes == 8 else 'ssse3.pmadd.ub.sw.128'}"
        return self.call(name, words, f"{held} {a}", f"{held} {b}")

    def products_of_words(self, lanes: int, a: str, b: str) -> str:
        """The products of int16, two added up at a time."""
        sums, words, _ = _types(lanes)
        name = f"llvm.x86.{'avx2' if lanes == 8 else 'sse2'}.pmadd.wd"
        return self.call(name, sums, f"{words} {a}", f"{words} {b}")

    def add_dots(self, x: Inst, a: str, b: str, c: str) -> str:
        t, bits = vector(scalar_type(x.dtype), x.lanes), vector("i32", x.lanes)
        found = self.in_registers(x, x.lanes, [a, b, self.let(f"bitcast {t} {c} to {bits}")])
        return self.let(f"bitcast {bits} {found} to {t}")


def _types(lanes: int) -> tuple[str, str, str]:
    """Types of so many int32, and of the int16 and bytes that they hold."""
    return f"<{lanes} x i32>", f"<{2 * lanes} x i16>", f"<{4 * lanes} x i8>"


def _all_words(value: int, lanes: int) -> str:
    return f"<{', '.join([f'i16 {value}'] * (2 * lanes))}>"
