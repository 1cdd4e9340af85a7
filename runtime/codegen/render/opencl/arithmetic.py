"""Arithmetic and conversions in OpenCL C, with the bits of the other devices.

Nothing is undefined: division by zero gives 0, shifts by too much give 0 (or the sign), conversions to integers
saturate, and signed numbers are added as unsigned ones, because C may assume that they do not overflow. Halves are
converted by their bits, so that a device need not know them.
"""

from __future__ import annotations

from manygrad.runtime.codegen.lowered import Inst, Low
from manygrad.runtime.codegen.render.opencl.text import (
    OpenCLWriter,
    Value,
    constant,
    integer,
    mask_size,
    memory_type,
    pieces,
    scalar_type,
    vector,
    whole,
)
from manygrad.tensor.dtype import DType, dtypes
from manygrad.tensor.uop.ops import GroupOp, Ops

WRAPPING = {Ops.ADD: "+", Ops.SUB: "-", Ops.MUL: "*"}
BITWISE = {Ops.AND: "&", Ops.OR: "|", Ops.XOR: "^"}
LOGIC = {**BITWISE, Ops.ADD: "|", Ops.MAX: "|", Ops.MUL: "&", Ops.SUB: "^"}
FLOAT = {Ops.ADD: "+", Ops.SUB: "-", Ops.MUL: "*", Ops.FDIV: "/"}
COMPARE = {Ops.CMPLT: "<", Ops.CMPEQ: "==", Ops.CMPNE: "!="}


class OpenCLArithmetic(OpenCLWriter):
    def alu(self, x: Inst, src: list[Value]) -> Value:
        assert isinstance(x.op, Ops)
        if x.op is Ops.BITCAST:
            return self.bitcast(x, src[0])
        by_piece = list(zip(pieces(x.lanes), *src))
        return tuple(self.piece(x.dtype, n, self.one(x, n, list(own))) for n, *own in by_piece)

    def one(self, x: Inst, n: int, src: list[str]) -> str:
        """A piece of `n` lanes."""
        op, d = x.op, x.src[0].dtype
        assert isinstance(op, Ops)
        if op is Ops.CAST:
            return self.cast(src[0], d, x.dtype, n)
        if op is Ops.WHERE:
            return self.choose(src[0], src[1], src[2], x.dtype, n)
        if op in GroupOp.COMPARE:
            return self.compare(op, d, n, src)
        if d.is_bool:
            return self.logic(op, n, src)
        return self.float_alu(x, n, src) if d.is_float else self.int_alu(x, n, src)

    def compare(self, op: Ops, d: DType, n: int, src: list[str]) -> str:
        a, b = src
        if d.is_bool and n > 1:
            return {Ops.CMPLT: f"(~{a} & {b})", Ops.CMPEQ: f"(~({a} ^ {b}))", Ops.CMPNE: f"({a} ^ {b})"}[op]
        return self.mask(f"({a} {COMPARE[op]} {b})", mask_size(d), n)

    def logic(self, op: Ops, n: int, src: list[str]) -> str:
        if op in (Ops.NOT, Ops.NEG):
            return f"(~{src[0]})" if n > 1 else f"(!{src[0]})"
        if op is Ops.TRUNC:
            return src[0]
        if op not in LOGIC:
            raise NotImplementedError(f"{op.name} on bool")
        return f"({src[0]} {LOGIC[op]} {src[1]})"

    # *** floats ***

    def float_alu(self, x: Inst, n: int, src: list[str]) -> str:
        d, op = x.dtype, x.op
        assert isinstance(op, Ops)
        assert d.itemsize >= 4, f"{op.name} on {d}: halves are computed in float32"
        if op in FLOAT:
            return f"({src[0]} {FLOAT[op]} {src[1]})"
        match op:
            case Ops.NEG:
                return f"(-{src[0]})"
            case Ops.RECIP:
                return f"({constant(1.0, d, n)} / {src[0]})"
            case Ops.SQRT | Ops.TRUNC:
                return f"{op.name.lower()}({src[0]})"
            case Ops.MAX:  # the greater; NaN where either is
                numbers = [s.op is Low.CONST and s.arg == s.arg for s in x.src]  # (never NaN)
                a, b = src if not numbers[1] else (src[1], src[0])
                best = f"(({a} > {b}) ? {a} : {b})"
                return best if any(numbers) else f"(({a} != {a}) ? {a} : {best})"
        raise NotImplementedError(f"{op.name} on {d}")

    # *** integers ***

    def narrow(self, text: str, d: DType, n: int) -> str:
        """Arithmetic of scalars of 8 and 16 bits is done in 32."""
        return f"(({scalar_type(d)})({text}))" if n == 1 and d.itemsize < 4 else text

    def wrapping(self, op: str, d: DType, n: int, src: list[str]) -> str:
        if n == 1 and d.itemsize < 4:
            return self.narrow(f"(uint){src[0]} {op} (uint){src[1]}", d, n)
        if d.is_unsigned or d is dtypes.index:  # (indices do not overflow)
            return f"({src[0]} {op} {src[1]})"
        t = vector(integer(d.itemsize, True), n)
        return f"as_{vector(scalar_type(d), n)}(as_{t}({src[0]}) {op} as_{t}({src[1]}))"

    def int_alu(self, x: Inst, n: int, src: list[str]) -> str:
        d, op = x.dtype, x.op
        assert isinstance(op, Ops)
        if op in WRAPPING:
            return self.wrapping(WRAPPING[op], d, n, src)
        if op in BITWISE:
            return self.narrow(f"({src[0]} {BITWISE[op]} {src[1]})", d, n)
        match op:
            case Ops.NEG:
                return self.wrapping("-", d, n, [constant(0, d, n), src[0]])
            case Ops.NOT:
                return self.narrow(f"(~{src[0]})", d, n)
            case Ops.TRUNC:
                return src[0]
            case Ops.MAX:
                return f"max({src[0]}, {src[1]})"
            case Ops.SHL | Ops.SHR:
                return self.shift(x, n, src)
            case Ops.IDIV | Ops.MOD:
                return self.divide(x, n, src)
        raise NotImplementedError(f"{op.name} on {d}")

    def shift(self, x: Inst, n: int, src: list[str]) -> str:
        d, (value, by) = x.dtype, src
        bits, known = d.itemsize * 8, x.src[1].op is Low.CONST and 0 <= x.src[1].arg < d.itemsize * 8
        t, u = vector(scalar_type(d), n), vector(integer(d.itemsize, True), n)
        arithmetic = x.op is Ops.SHR and not d.is_unsigned
        if not known:
            name = self.let(u, f"as_{u}({by})")
            fits = self.let(vector("int", n), self.mask(f"({name} < {constant(bits, UNSIGNED[d.itemsize], n)})",
                                                        d.itemsize, n))  # fmt: skip
            beyond = constant(bits - 1 if arithmetic else 0, UNSIGNED[d.itemsize], n)
            by = self.let(u, self.choose(fits, name, beyond, UNSIGNED[d.itemsize], n))
        else:
            by = f"as_{u}({by})"
        if arithmetic:
            return self.narrow(f"({value} >> {by})", d, n)
        moved = f"as_{u}({value}) {'<<' if x.op is Ops.SHL else '>>'} {by}"
        found = f"as_{t}({self.narrow(moved, UNSIGNED[d.itemsize], n)})"
        return found if known else self.choose(fits, found, constant(0, d, n), d, n)

    def divide(self, x: Inst, n: int, src: list[str]) -> str:
        d, by = x.dtype, x.src[1]
        a, b = src
        quotient, size, bools = x.op is Ops.IDIV, d.itemsize, vector("int", n)
        t, u = vector(scalar_type(d), n), vector(integer(size, True), n)
        zero, one = constant(0, d, n), constant(1, d, n)
        if d.is_unsigned or (d is dtypes.index and x.arg and by.op is Low.CONST and by.arg > 0):
            known = by.op is Low.CONST and by.arg != 0
            safe = b if known else self.let(t, self.choose(self.mask(f"({b} == {zero})", size, n), one, b, d, n))
            text = self.narrow(f"as_{u}({a}) {'/' if quotient else '%'} as_{u}({safe})", UNSIGNED[size], n)
            found = f"as_{t}({text})"
            return found if known else self.choose(self.mask(f"({b} == {zero})", size, n), zero, found, d, n)
        special = not (by.op is Low.CONST and by.arg not in (0, -1))
        if special:  # x / 0 is 0, and MIN / -1 must not trap: take 1 instead, then put things right
            odd = self.let(bools, self.mask(f"(({b} == {zero}) | ({b} == {constant(-1, d, n)}))", size, n))
            safe = self.let(t, self.choose(odd, one, b, d, n))
        else:
            safe = b
        q = self.let(t, self.narrow(f"({a} / {safe})", d, n))
        r = self.let(t, self.narrow(f"({a} % {safe})", d, n))
        if d is dtypes.index and not x.arg:  # floor
            apart = f"(({r} != {zero}) & (({r} ^ {safe}) < {zero}))"
            fix = self.let(bools, self.mask(apart, size, n))
            if quotient:
                q = self.let(t, self.choose(fix, f"({q} - {one})", q, d, n))
            else:
                r = self.let(t, self.choose(fix, f"({r} + {safe})", r, d, n))
        if not special:
            return q if quotient else r
        if not quotient:
            return self.choose(odd, zero, r, d, n)
        negated = self.wrapping("-", d, n, [zero, a])
        other = self.choose(self.mask(f"({b} == {zero})", size, n), zero, negated, d, n)
        return self.choose(odd, other, q, d, n)

    # *** conversions ***

    def bitcast(self, x: Inst, src: Value) -> Value:
        a, b = x.src[0].dtype, x.dtype
        if x.src[0].lanes != x.lanes:
            raise NotImplementedError(f"BITCAST of {x.src[0].lanes} lanes of {a} to {x.lanes} of {b}")
        found = []
        for n, text in zip(pieces(x.lanes), src):
            if a.is_bool:
                text = f"convert_{vector('uchar', n)}({text} & 1)"
            to = f"as_{vector(memory_type(b), n)}({text})"
            found.append(self.piece(b, n, self.mask(f"({to} != 0)", 1, n) if b.is_bool else to))
        return tuple(found)

    def cast(self, text: str, a: DType, b: DType, n: int) -> str:
        """Conversion of `n` lanes from type `a` to `b`."""
        to = vector(scalar_type(b), n)
        if a is b:
            return text
        if a.is_bool:  # 0 and 1
            bits = f"({text} & 1)" if n > 1 else text
            return self.cast(bits, dtypes.int32, b, n)
        if a.is_half:
            if b.is_bool:  # (but for the sign, which -0 has)
                return self.mask(f"(({text} & {constant_bits(0x7FFF, 2, n)}) != {constant_bits(0, 2, n)})", 2, n)
            wide = self.let(vector("float", n), self.half_to_float(text, a, n))
            return self.cast(wide, dtypes.float32, b, n)
        if b.is_bool:
            return self.mask(f"({text} != {constant(0, a, n)})", mask_size(a), n)
        if b.is_half:
            if a is dtypes.float64 and b is dtypes.float16:
                text = self.round_to_odd(text, n)
            elif a is not dtypes.float32:
                text = self.let(vector("float", n), f"convert_{vector('float', n)}({text})")
            return self.to_bfloat16(text, n) if b is dtypes.bfloat16 else self.to_float16(text, n)
        assert not a.is_fp8 and not b.is_fp8, f"CAST from {a} to {b}: float8 is storage only"
        if a.is_float and b.is_int:
            return self.saturated(text, a, b, n)
        return f"convert_{to}({text})"

    def saturated(self, text: str, a: DType, b: DType, n: int) -> str:
        """Towards zero; beyond the type's ends its end; 0 of NaN. (`convert_sat` promises nothing for NaN.)"""
        bits = b.itemsize * 8
        low = 0.0 if b.is_unsigned else -(2.0 ** (bits - 1))
        high = 2.0 ** (bits if b.is_unsigned else bits - 1)
        lo, hi = constant(low, a, n), constant(high, a, n)
        ft, mt = vector(scalar_type(a), n), vector("int", n)
        x = self.let(ft, text)
        below, above = (self.let(mt, self.mask(f"({x} {sign} {end})", a.itemsize, n)) for sign, end in
                        (("<", lo), (">=", hi)))  # fmt: skip
        inside = self.let(mt, self.mask(f"(({x} >= {lo}) & ({x} < {hi}))", a.itemsize, n))
        safe = self.let(ft, self.choose(inside, x, constant(0.0, a, n), a, n))
        t = vector(scalar_type(b), n)
        end = self.choose(below, constant(b.min, b, n), constant(0, b, n), b, n)
        end = self.choose(above, constant(b.max, b, n), end, b, n)
        return self.choose(inside, self.let(t, f"convert_{t}({safe})"), end, b, n)

    def half_to_float(self, text: str, a: DType, n: int) -> str:
        u, f = vector("uint", n), vector("float", n)
        c = lambda v: constant_bits(v, 4, n)  # noqa: E731
        wide = self.let(u, f"convert_{u}({text})")
        if a is dtypes.bfloat16:
            return f"as_{f}({wide} << {c(16)})"
        size = self.let(u, f"({wide} & {c(0x7FFF)})")
        # (not by a float32 of these bits: it were a denormal, which a device may take for 0)
        small = self.let(f, f"(convert_{f}({size}) * {constant(2.0**-24, dtypes.float32, n)})")
        large = self.choose(f"({size} >= {c(0x7C00)})", f"(({size} << {c(13)}) | {c(0x7F800000)})",
                            f"(({size} << {c(13)}) + {c(112 << 23)})", dtypes.uint32, n)  # fmt: skip
        bits = self.choose(f"({size} < {c(0x400)})", f"as_{u}({small})", large, dtypes.uint32, n)
        return f"as_{f}(({bits}) | (({wide} & {c(0x8000)}) << {c(16)}))"

    def to_bfloat16(self, text: str, n: int) -> str:
        """Round to nearest even on the bits; NaN stays a (quiet) NaN."""
        u = vector("uint", n)
        c = lambda v: constant_bits(v, 4, n)  # noqa: E731
        bits = self.let(u, f"as_{u}({text})")
        rounded = f"({bits} + ((({bits} >> {c(16)}) & {c(1)}) + {c(0x7FFF)}))"
        chosen = self.choose(f"(({bits} & {c(0x7FFFFFFF)}) > {c(0x7F800000)})", f"({bits} | {c(0x400000)})", rounded,
                             dtypes.uint32, n)  # fmt: skip
        return f"convert_{vector('ushort', n)}(({chosen}) >> {c(16)})"

    def to_float16(self, text: str, n: int) -> str:
        """Round to nearest even; NaN stays a (quiet) NaN."""
        u, f = vector("uint", n), vector("float", n)
        c = lambda v: constant_bits(v, 4, n)  # noqa: E731
        bits = self.let(u, f"as_{u}({text})")
        size = self.let(u, f"({bits} & {c(0x7FFFFFFF)})")
        # below 2**-14 a half is a multiple of 2**-24; `rint` rounds to even
        small = self.let(u, f"convert_{u}(rint(as_{f}(min({size}, {c(0x38800000)})) * "
                            f"{constant(2.0**24, dtypes.float32, n)}))")  # fmt: skip
        usual = self.let(u, f"(({size} + {c(0xFFF)} + (({size} >> {c(13)}) & {c(1)}) - {c(112 << 23)}) >> {c(13)})")
        found = self.choose(f"({size} < {c(0x38800000)})", small, usual, dtypes.uint32, n)
        found = self.choose(f"({size} >= {c(0x47800000)})", c(0x7C00), found, dtypes.uint32, n)
        quiet = f"({c(0x7E00)} | (({size} >> {c(13)}) & {c(0x1FF)}))"
        found = self.choose(f"({size} > {c(0x7F800000)})", quiet, found, dtypes.uint32, n)
        return f"convert_{vector('ushort', n)}(({found}) | (({bits} >> {c(16)}) & {c(0x8000)}))"

    def round_to_odd(self, text: str, n: int) -> str:
        """float64 -> float32 such that rounding once more gives the float16 nearest to the float64, as in NumPy.

        (bfloat16 is rounded by way of float32, as in PyTorch and ml_dtypes.)
        """
        self.double = True
        d, f, u, m = (vector(t, n) for t in ("double", "float", "uint", "int"))
        c = lambda v: constant_bits(v, 4, n)  # noqa: E731
        given, near = self.let(d, text), self.let(f, f"convert_{f}({text})")
        back = self.let(d, f"convert_{d}({near})")
        ordered = f"(({back} < {given}) | ({back} > {given}))"
        inexact, above = (self.let(m, self.mask(x, 8, n)) for x in (ordered, f"(fabs({back}) > fabs({given}))"))
        bits = self.let(u, f"as_{u}({near})")
        towards_zero = self.choose(above, f"({bits} - {c(1)})", bits, dtypes.uint32, n)
        return self.let(f, f"as_{f}({self.choose(inexact, f'({towards_zero} | {c(1)})', bits, dtypes.uint32, n)})")


UNSIGNED = {d.itemsize: d for d in (dtypes.uint8, dtypes.uint16, dtypes.uint32, dtypes.uint64)}


def constant_bits(value: int, size: int, n: int) -> str:
    return constant(value, UNSIGNED[size], n) if n > 1 else whole(value, size, True)
