"""The instructions of a loop tree's Index."""

from __future__ import annotations

from manygrad.runtime.codegen.emit.emission import INDEX, Emission
from manygrad.runtime.codegen.emit.values import sum_of_terms, value
from manygrad.runtime.codegen.loops.index import Index, Of, RowOf
from manygrad.runtime.codegen.lowered import Inst, Low
from manygrad.tensor.dtype import dtypes
from manygrad.tensor.uop.ops import Ops


def instruction(e: Emission, x: Index) -> Inst:
    match x.op:
        case Of.CONST:
            return e.const(x.arg)
        case Of.COUNTER:
            return e.counters[x]
        case Of.SIZE:
            return value(e, x.arg.src[0], {})
        case Of.ORIGIN:
            return e.scope.origin[x.arg]
        case Of.BEGIN:
            return e.emit(Low.BEGIN, INDEX)
        case Of.FINISH:
            return e.emit(Low.FINISH, INDEX)
        case Of.HELD:
            return e.emit(Low.LOAD, INDEX, (e.emit(Low.SCRATCH, INDEX, (), 0), e.const(0)), 0)
        case Of.ITEM:
            return e.emit(Low.ITEM, INDEX, (), None)
        case Of.MEMBER:
            return e.emit(Low.ITEM, INDEX, (), 0)
        case Of.HERE:
            return _here(e, x.src[0])
        case Of.LINE:
            return _first_of_line(e, x)
    assert isinstance(x.op, Ops)
    src = tuple(instruction(e, s) for s in x.src)
    if x.op is Ops.ADD:
        return e.add(*src)
    return e.emit(x.op, dtypes.bool if x.is_condition else INDEX, src, x.arg)


def _here(e: Emission, x: Index) -> Inst:
    found = instruction(e, x)
    if found.op is Low.CONST:
        return e.emit(Low.HERE, INDEX, (), found.arg, here=True)
    return e.emit(Ops.ADD, INDEX, (found, e.const(0)), here=True)


def _first_of_line(e: Emission, x: Index) -> Inst:
    """The first element of the row that stands at the beginning of a line."""
    of: RowOf = x.arg
    line = instruction(e, x.src[0])
    e.open()
    with e.within(e.with_tile(of.range, e.const(0))):
        a = e.scope.analysis.affine(e.sig.stores[0].src[0].src[1], dict(of.row))
        assert a is not None
        begin = e.add(sum_of_terms(e, a), e.const(a.constant))
    e.close()
    into = e.emit(Ops.MOD, INDEX, (begin, line), True)
    return e.emit(Ops.MOD, INDEX, (e.emit(Ops.SUB, INDEX, (line, into)), line), True)
