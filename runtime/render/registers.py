"""Instructions that take whole registers: scaling by a power of two, look-ups in a table, dot products of bytes."""

from __future__ import annotations

from collections.abc import Callable

from manygrad.runtime.codegen.dots import Dot
from manygrad.runtime.codegen.lowered import Inst, Low
from manygrad.runtime.render.arithmetic import Arithmetic
from manygrad.runtime.render.text import literal, scalar_type, vector
from manygrad.tensor.dtype import dtypes

DOTS = {
    (dtypes.bfloat16, dtypes.bfloat16): "llvm.x86.avx512bf16.dpbf16ps.{bits}",
    (dtypes.uint8, dtypes.int8): "llvm.x86.avx512.vpdpbusd.{bits}",
    (dtypes.int8, dtypes.int8): "llvm.aarch64.neon.sdot.v4i32.v16i8",
    (dtypes.uint8, dtypes.uint8): "llvm.aarch64.neon.udot.v4i32.v16i8",
}


class Registers(Arithmetic):
    def in_registers(self, x: Inst, n: int, values: list[str]) -> str:
        """Fewer lanes than fill the smallest register are filled up, more than the largest one takes go in pieces."""
        e, size = "i32" if x.op is Low.DOT else scalar_type(x.dtype), x.dtype.itemsize
        most = (x.arg.vector_bytes if x.op is Low.DOT else 64) // size
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
        make: Callable[..., str] = (
            self.lookup if x.op is Low.LOOKUP else self.dot if x.op is Low.DOT else self.scale_or_within
        )
        found = make(x, wide, *values)
        if n == 1:
            return self.let(f"extractelement {t} {found}, i64 0")
        if n == wide:
            return found
        order = ", ".join(f"i32 {k}" for k in range(n))
        return self.let(f"shufflevector {t} {found}, {t} poison, <{n} x i32> <{order}>")

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
        sums, words, held = f"<{lanes} x i32>", f"<{2 * lanes} x i16>", f"<{4 * lanes} x i8>"
        kind = "avx2" if lanes == 8 else "sse2"

        def pairs(x: str, y: str) -> str:
            return self.call(f"llvm.x86.{kind}.pmadd.wd", sums, f"{words} {x}", f"{words} {y}")

        def word(value: int) -> str:
            return f"<{', '.join([f'i16 {value}'] * (2 * lanes))}>"

        if dot.most is not None:
            name = f"llvm.x86.{'avx2.pmadd.ub.sw' if lanes == 8 else 'ssse3.pmadd.ub.sw.128'}"
            products = self.call(name, words, f"{held} {a}", f"{held} {b}")
            return self.let(f"add {sums} {c}, {pairs(products, word(1))}")
        a, b = (self.let(f"bitcast {held} {v} to {words}") for v in (a, b))
        first = self.let(f"and {words} {a}, {word(255)}"), self.let(f"shl {words} {b}, {word(8)}")
        even = pairs(first[0], self.let(f"ashr {words} {first[1]}, {word(8)}"))
        odd = pairs(self.let(f"lshr {words} {a}, {word(8)}"), self.let(f"ashr {words} {b}, {word(8)}"))
        return self.let(f"add {sums} {self.let(f'add {sums} {c}, {even}')}, {odd}")

    def add_dots(self, x: Inst, a: str, b: str, c: str) -> str:
        t, bits = vector(scalar_type(x.dtype), x.lanes), vector("i32", x.lanes)
        found = self.in_registers(x, x.lanes, [a, b, self.let(f"bitcast {t} {c} to {bits}")])
        return self.let(f"bitcast {bits} {found} to {t}")
