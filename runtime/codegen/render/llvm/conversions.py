"""Conversions between types: integers saturate, halves are rounded to the nearest even."""

from __future__ import annotations

from manygrad.runtime.codegen.render.llvm.text import LLVMWriter, literal, scalar_type, splat, suffix, vector
from manygrad.tensor.dtype import DType, dtypes


class Converter(LLVMWriter):
    rounds_bfloat16 = False  # whether the processor has an instruction for it (AVX-512 BF16)

    def cast(self, text: str, a: DType, b: DType, n: int) -> str:
        """Conversion of `n` lanes from type `a` to `b`."""
        if a is b or (a.itemsize == b.itemsize and a.is_int and b.is_int):
            return text
        if a is dtypes.bfloat16:
            if b.is_bool:
                magnitude = self.let(f"shl {vector('i16', n)} {text}, {splat('1', 'i16', n)}")
                return self.let(f"icmp ne {vector('i16', n)} {magnitude}, {splat('0', 'i16', n)}")
            wide = self.let(f"zext {vector('i16', n)} {text} to {vector('i32', n)}")
            bits = self.let(f"shl {vector('i32', n)} {wide}, {splat('16', 'i32', n)}")
            return self.cast(
                self.let(f"bitcast {vector('i32', n)} {bits} to {vector('float', n)}"), dtypes.float32, b, n
            )
        ta, tb = vector(scalar_type(a), n), vector(scalar_type(b), n)
        if b.is_bool:
            zero = splat(literal(0, a), scalar_type(a), n)
            return self.let(f"fcmp une {ta} {text}, {zero}" if a.is_float else f"icmp ne {ta} {text}, {zero}")
        if a.is_float and b.is_float:
            if b is dtypes.float16 and a is dtypes.float64:
                return self.cast(self.round_to_odd(text, n), dtypes.float32, b, n)
            if b is dtypes.bfloat16:
                return (
                    self.to_bfloat16(text, n)
                    if a is dtypes.float32
                    else self.cast(self.cast(text, a, dtypes.float32, n), dtypes.float32, b, n)
                )
            return self.let(f"{'fpext' if b.itemsize > a.itemsize else 'fptrunc'} {ta} {text} to {tb}")
        if b.is_float:
            if b.is_half:
                return self.cast(self.cast(text, a, dtypes.float32, n), dtypes.float32, b, n)
            return self.let(f"{'uitofp' if a.is_unsigned or a.is_bool else 'sitofp'} {ta} {text} to {tb}")
        if a.is_float:
            if a.is_half:
                return self.cast(self.cast(text, a, dtypes.float32, n), dtypes.float32, b, n)
            return self.to_narrow(text, a, b, n) if b.itemsize <= 2 else self.to_wide(text, a, b, n)
        if b.itemsize * 8 < (1 if a.is_bool else a.itemsize * 8):
            return self.let(f"trunc {ta} {text} to {tb}")
        return self.let(f"{'zext' if a.is_unsigned or a.is_bool else 'sext'} {ta} {text} to {tb}")

    def to_narrow(self, text: str, a: DType, b: DType, n: int) -> str:
        """Towards zero, at most to the ends of an integer type, which are numbers of the float's, too; NaN gives 0.
        (LLVM's own conversion that saturates goes lane by lane.)"""
        t, i = vector(scalar_type(a), n), vector("i32", n)
        inside = text
        for order, end in ("olt", b.max), ("ogt", b.min):
            limit = splat(literal(end, a), scalar_type(a), n)
            better = self.let(f"fcmp {order} {t} {inside}, {limit}")
            inside = self.let(f"select {vector('i1', n)} {better}, {t} {inside}, {t} {limit}")
        whole = self.let(f"fptosi {t} {inside} to {i}")
        number = self.let(f"fcmp ord {t} {text}, {text}")
        found = self.let(f"select {vector('i1', n)} {number}, {i} {whole}, {i} {splat('0', 'i32', n)}")
        return self.let(f"trunc {i} {found} to {vector(scalar_type(b), n)}")

    def to_wide(self, text: str, a: DType, b: DType, n: int) -> str:
        """To an integer whose largest number may be none of the float's type, but the next one is."""
        t, mask = vector(scalar_type(a), n), vector("i1", n)
        wide = scalar_type(b)
        i = vector(wide, n)

        def choose(condition: str, yes: str, no: str, of: str = i) -> str:
            return self.let(f"select {mask} {condition}, {of} {yes}, {of} {no}")

        least, beyond = (splat(literal(end, a), scalar_type(a), n) for end in (int(b.min), int(b.max) + 1))
        above = self.let(f"fcmp oge {t} {text}, {beyond}")
        bounded = [self.let(f"fcmp {x} {t} {text}, {end}") for x, end in (("oge", least), ("olt", beyond))]
        inside = self.let(f"and {mask} {bounded[0]}, {bounded[1]}")
        safe = choose(inside, text, splat(literal(0, a), scalar_type(a), n), t)
        whole = self.let(f"fpto{'u' if b.is_unsigned else 's'}i {t} {safe} to {i}")
        number = self.let(f"fcmp ord {t} {text}, {text}")
        ends = choose(above, splat(str(int(b.max)), wide, n), splat(str(int(b.min)), wide, n))
        return choose(inside, whole, choose(number, ends, splat("0", wide, n)))

    def to_bfloat16(self, text: str, n: int) -> str:
        """Round to nearest even; NaN stays a (quiet) NaN."""
        if not self.rounds_bfloat16 or n not in (16, 32):
            return self.bits_to_bfloat16(text, n)
        found, subnormal = self.registers_to_bfloat16(text, n)
        label, before = self.fresh("subnormal"), self.label
        self.line(f"br i1 {subnormal}, label %{label}, label %{label}.end")
        self.start(label)
        exact = self.bits_to_bfloat16(text, n)
        self.line(f"br label %{label}.end")
        self.start(f"{label}.end")
        return self.let(f"phi {vector('i16', n)} [ {found}, %{before} ], [ {exact}, %{label} ]")

    def registers_to_bfloat16(self, text: str, n: int) -> tuple[str, str]:
        """One instruction for one register or for two, and whether it made zeros of subnormal numbers."""
        f, parts = vector("float", 16), [text]
        if n == 32:
            orders = (", ".join(f"i32 {k}" for k in range(first, first + 16)) for first in (0, 16))
            parts = [
                self.let(f"shufflevector <32 x float> {text}, <32 x float> poison, <16 x i32> <{o}>") for o in orders
            ]
        name = "llvm.x86.avx512bf16.cvtne" + ("ps2bf16.512" if n == 16 else "2ps2bf16.512")
        found = self.call(name, f"<{n} x bfloat>", *(f"{f} {x}" for x in parts[::-1]))
        masks = [self.call("llvm.x86.avx512.fpclass.ps.512", "<16 x i1>", f"{f} {x}", "i32 32") for x in parts]
        some = masks[0] if n == 16 else self.let(f"or <16 x i1> {masks[0]}, {masks[1]}")
        bits = self.let(f"bitcast <16 x i1> {some} to i16")
        return self.let(f"bitcast <{n} x bfloat> {found} to <{n} x i16>"), self.let(f"icmp ne i16 {bits}, 0")

    def bits_to_bfloat16(self, text: str, n: int) -> str:
        f, i = vector("float", n), vector("i32", n)
        c = lambda v: splat(str(v), "i32", n)  # noqa: E731
        bits = self.let(f"bitcast {f} {text} to {i}")
        high = self.let(f"lshr {i} {bits}, {c(16)}")
        even = self.let(f"and {i} {high}, {c(1)}")
        bias = self.let(f"add {i} {even}, {c(0x7FFF)}")
        rounded = self.let(f"add {i} {bits}, {bias}")
        quiet = self.let(f"or {i} {bits}, {c(0x400000)}")
        nan = self.let(f"fcmp uno {f} {text}, {text}")
        chosen = self.let(f"select {vector('i1', n)} {nan}, {i} {quiet}, {i} {rounded}")
        shifted = self.let(f"lshr {i} {chosen}, {c(16)}")
        return self.let(f"trunc {i} {shifted} to {vector('i16', n)}")

    def round_to_odd(self, text: str, n: int) -> str:
        """float64 -> float32 such that rounding once more gives the float16 nearest to the float64, as in NumPy.

        (bfloat16 is rounded by way of float32, as in PyTorch and ml_dtypes.)
        """
        d, f, i, m = vector("double", n), vector("float", n), vector("i32", n), vector("i1", n)
        c = lambda v: splat(str(v), "i32", n)  # noqa: E731
        near = self.let(f"fptrunc {d} {text} to {f}")
        back = self.let(f"fpext {f} {near} to {d}")
        inexact = self.let(f"fcmp one {d} {back}, {text}")
        size_back, size = (self.call(f"llvm.fabs.{suffix('double', n)}", d, f"{d} {v}") for v in (back, text))
        above = self.let(f"fcmp ogt {d} {size_back}, {size}")
        bits = self.let(f"bitcast {f} {near} to {i}")
        down = self.let(f"sub {i} {bits}, {c(1)}")
        towards_zero = self.let(f"select {m} {above}, {i} {down}, {i} {bits}")
        odd = self.let(f"or {i} {towards_zero}, {c(1)}")
        chosen = self.let(f"select {m} {inexact}, {i} {odd}, {i} {bits}")
        return self.let(f"bitcast {i} {chosen} to {f}")
