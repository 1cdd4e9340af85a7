"""Arithmetic without undefined results: division by zero gives 0, shifts by too much give 0 (or the sign)."""

from __future__ import annotations

from typing import Any

from manygrad.runtime.codegen.lowered import Inst, Low
from manygrad.runtime.codegen.render.llvm.conversions import Converter
from manygrad.runtime.codegen.render.llvm.text import literal, scalar_type, splat, suffix, vector
from manygrad.tensor.dtype import dtypes
from manygrad.tensor.uop.ops import GroupOp, Ops


class LLVMArithmetic(Converter):
    def alu(self, x: Inst, t: str, src: list[str]) -> str:
        assert isinstance(x.op, Ops)
        d, n = x.src[0].dtype, x.lanes
        st = vector(scalar_type(d), n)
        e = scalar_type(d)
        num = lambda v: splat(literal(v, d), e, n)  # noqa: E731
        match x.op:
            case Ops.CAST:
                return self.cast(src[0], d, x.dtype, n)
            case Ops.BITCAST:
                if d.is_bool:
                    return self.let(f"zext {st} {src[0]} to {t}")
                if x.dtype.is_bool:
                    return self.let(f"icmp ne {st} {src[0]}, {num(0)}")
                st = vector(e, x.src[0].lanes)  # (which need not be as many)
                return src[0] if st == t else self.let(f"bitcast {st} {src[0]} to {t}")
            case Ops.WHERE:
                return self.let(f"select {self.typed(x.src[0])}, {self.typed(x.src[1])}, {self.typed(x.src[2])}")
        if x.op in GroupOp.COMPARE:
            if d.is_float:
                code = {Ops.CMPLT: "olt", Ops.CMPEQ: "oeq", Ops.CMPNE: "une"}[x.op]
                return self.let(f"fcmp {code} {st} {src[0]}, {src[1]}")
            order = {Ops.CMPLT: "ult" if d.is_unsigned or d.is_bool else "slt", Ops.CMPEQ: "eq", Ops.CMPNE: "ne"}[x.op]
            return self.let(f"icmp {order} {st} {src[0]}, {src[1]}")
        if d.is_float:
            return self.float_alu(x, t, src)
        if d.is_bool:
            logic = {Ops.ADD: "or", Ops.MAX: "or", Ops.OR: "or", Ops.MUL: "and", Ops.AND: "and", Ops.XOR: "xor",
                     Ops.SUB: "xor", Ops.NOT: "not", Ops.NEG: "not", Ops.TRUNC: "same"}.get(x.op)  # fmt: skip
            if logic is None:
                raise NotImplementedError(f"{x.op.name} on bool")
            if logic == "same":
                return src[0]
            return self.let(f"xor {t} {src[0]}, {num(True)}" if logic == "not" else f"{logic} {t} {src[0]}, {src[1]}")
        return self.int_alu(x, t, src, num)

    def float_alu(self, x: Inst, t: str, src: list[str]) -> str:
        d, n, e = x.dtype, x.lanes, scalar_type(x.dtype)
        assert isinstance(x.op, Ops)
        assert not d.is_half, f"{x.op.name} on {d}: halves are computed in float32"
        plain = {Ops.ADD: "fadd", Ops.SUB: "fsub", Ops.MUL: "fmul", Ops.FDIV: "fdiv"}.get(x.op)
        if plain is not None:
            return self.let(f"{plain} {t} {src[0]}, {src[1]}")
        match x.op:
            case Ops.NEG:
                return self.let(f"fneg {t} {src[0]}")
            case Ops.RECIP:
                return self.let(f"fdiv {t} {splat(literal(1.0, d), e, n)}, {src[0]}")
            case Ops.SQRT | Ops.TRUNC:
                return self.call(f"llvm.{x.op.name.lower()}.{suffix(e, n)}", t, f"{t} {src[0]}")
            case Ops.MAX:  # the greater; NaN where either is
                numbers = [s.op is Low.CONST and s.arg == s.arg for s in x.src]  # (never NaN)
                a, b = src if not numbers[1] else (src[1], src[0])
                greater = self.let(f"fcmp ogt {t} {a}, {b}")
                best = self.let(f"select {vector('i1', n)} {greater}, {t} {a}, {t} {b}")
                if any(numbers):
                    return best
                nan = self.let(f"fcmp uno {t} {a}, {a}")
                return self.let(f"select {vector('i1', n)} {nan}, {t} {a}, {t} {best}")
        raise NotImplementedError(f"{x.op.name} on {d}")

    def int_alu(self, x: Inst, t: str, src: list[str], num: Any) -> str:
        d, n = x.dtype, x.lanes
        assert isinstance(x.op, Ops)
        signed = not d.is_unsigned
        plain = {Ops.ADD: "add", Ops.SUB: "sub", Ops.MUL: "mul", Ops.AND: "and", Ops.OR: "or", Ops.XOR: "xor"}.get(x.op)
        if plain is not None:
            nsw = " nsw" if d is dtypes.index and plain in ("add", "sub", "mul") else ""
            return self.let(f"{plain}{nsw} {t} {src[0]}, {src[1]}")
        match x.op:
            case Ops.NEG:
                return self.let(f"sub {t} {num(0)}, {src[0]}")
            case Ops.NOT:
                return self.let(f"xor {t} {src[0]}, {num(-1) if signed else num(d.max)}")
            case Ops.TRUNC:
                return src[0]
            case Ops.MAX:
                return self.call(
                    f"llvm.{'s' if signed else 'u'}max.{suffix(scalar_type(d), n)}", t, f"{t} {src[0]}", f"{t} {src[1]}"
                )
            case Ops.SHL | Ops.SHR:
                return self.shift(x, t, src, num)
            case Ops.IDIV | Ops.MOD:
                return self.divide(x, t, src, num)
        raise NotImplementedError(f"{x.op.name} on {d}")

    def shift(self, x: Inst, t: str, src: list[str], num: Any) -> str:
        d, by = x.dtype, x.src[1]
        bits = d.itemsize * 8
        code = "shl" if x.op is Ops.SHL else "lshr" if d.is_unsigned else "ashr"
        if by.op is Low.CONST and 0 <= by.arg < bits:
            return self.let(f"{code} {t} {src[0]}, {src[1]}")
        fits = self.let(f"icmp ult {t} {src[1]}, {num(bits)}")
        mask = vector("i1", x.lanes)
        if code == "ashr":
            by_safe = self.let(f"select {mask} {fits}, {t} {src[1]}, {t} {num(bits - 1)}")
            return self.let(f"ashr {t} {src[0]}, {by_safe}")
        by_safe = self.let(f"select {mask} {fits}, {t} {src[1]}, {t} {num(0)}")
        found = self.let(f"{code} {t} {src[0]}, {by_safe}")
        return self.let(f"select {mask} {fits}, {t} {found}, {t} {num(0)}")

    def divide(self, x: Inst, t: str, src: list[str], num: Any) -> str:
        d, by, n = x.dtype, x.src[1], x.lanes
        a, b = src
        quotient = x.op is Ops.IDIV
        mask = vector("i1", n)
        if d.is_unsigned or (d is dtypes.index and x.arg and by.op is Low.CONST and by.arg > 0):
            safe = b if by.op is Low.CONST and by.arg != 0 else None
            if safe is None:
                zero = self.let(f"icmp eq {t} {b}, {num(0)}")
                safe = self.let(f"select {mask} {zero}, {t} {num(1)}, {t} {b}")
            found = self.let(f"{'udiv' if quotient else 'urem'} {t} {a}, {safe}")
            return (
                found
                if by.op is Low.CONST and by.arg != 0
                else self.let(f"select {mask} {zero}, {t} {num(0)}, {t} {found}")
            )
        if by.op is Low.CONST and by.arg not in (0, -1):
            safe, special = b, False
        else:  # x / 0 is 0, and MIN / -1 must not trap: take 1 instead, then put things right
            one = self.let(f"add {t} {b}, {num(1)}")
            odd = self.let(f"icmp ult {t} {one}, {num(2)}")  # b is 0 or -1
            safe, special = self.let(f"select {mask} {odd}, {t} {num(1)}, {t} {b}"), True
        q = self.let(f"sdiv {t} {a}, {safe}")
        back = self.let(f"mul {t} {q}, {safe}")
        r = self.let(f"sub {t} {a}, {back}")
        if d is dtypes.index and not x.arg:  # floor
            nonzero = self.let(f"icmp ne {t} {r}, {num(0)}")
            signs = self.let(f"xor {t} {r}, {safe}")
            opposite = self.let(f"icmp slt {t} {signs}, {num(0)}")
            fix = self.let(f"and {mask} {nonzero}, {opposite}")
            less = self.let(f"sub {t} {q}, {num(1)}")
            more = self.let(f"add {t} {r}, {safe}")
            q = self.let(f"select {mask} {fix}, {t} {less}, {t} {q}")
            r = self.let(f"select {mask} {fix}, {t} {more}, {t} {r}")
        if not special:
            return q if quotient else r
        if not quotient:
            return self.let(f"select {mask} {odd}, {t} {num(0)}, {t} {r}")
        negated = self.let(f"sub {t} {num(0)}, {a}")
        zero = self.let(f"icmp eq {t} {b}, {num(0)}")
        other = self.let(f"select {mask} {zero}, {t} {num(0)}, {t} {negated}")
        return self.let(f"select {mask} {odd}, {t} {other}, {t} {q}")
