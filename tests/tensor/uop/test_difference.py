"""What is printed of a graph that a pass has changed."""

from __future__ import annotations

from manygrad.tensor.dtype import dtypes
from manygrad.tensor.uop import Ops, UOp
from manygrad.tensor.uop.difference import Differences, difference
from manygrad.tensor.uop.show import show


def number(value: float) -> UOp:
    return UOp.const(dtypes.float32, value)


def sink(*values: UOp) -> UOp:
    return UOp(Ops.SINK, dtypes.void, values)


def test_equal_graphs_have_no_difference() -> None:
    x = number(1.0).alu(Ops.ADD, number(2.0))
    assert difference(sink(x), sink(x)) == ""


def test_a_node_above_a_changed_one_keeps_its_number() -> None:
    x, y = number(1.0), number(2.0)
    before = sink(x.alu(Ops.ADD, y).alu(Ops.SQRT).alu(Ops.EXP))
    after = sink(x.alu(Ops.MUL, y).alu(Ops.SQRT).alu(Ops.EXP))
    assert difference(before, after).splitlines() == [
        "-%2 = ADD float32 %0 %1",
        "+%6 = MUL float32 %0 %1",
        "-%3 = SQRT float32 %2",
        "+%3 = SQRT float32 %6",
    ]


def test_a_node_that_is_put_in_between() -> None:
    x = number(1.0)
    before = sink(x.alu(Ops.SQRT).alu(Ops.EXP))
    after = sink(x.alu(Ops.NEG).alu(Ops.SQRT).alu(Ops.EXP))
    assert difference(before, after).splitlines() == [
        "+%4 = NEG float32 %0",
        "-%1 = SQRT float32 %0",
        "+%1 = SQRT float32 %4",
    ]


def test_a_node_with_another_arg_is_shown_with_both() -> None:
    wide = UOp(Ops.EXPAND, dtypes.float32, (UOp(Ops.RESHAPE, dtypes.float32, (number(1.0),), (1,)),), (4,))
    assert difference(sink(wide), sink(wide.replace(arg=(2,)))).splitlines() == [
        "-%2 = EXPAND float32 (4) %1 [(4)]",
        "+%2 = EXPAND float32 (2) %1 [(2)]",
    ]


def test_constants_that_compare_equal_are_different() -> None:
    true, one = UOp.const(dtypes.bool, True), UOp.const(dtypes.int32, 1)
    assert difference(sink(true), sink(one)).splitlines()[:2] == ["-%0 = CONST bool [True]", "+%2 = CONST int32 [1]"]


def test_numbers_are_not_used_again() -> None:
    graphs, x = Differences(), number(1.0)
    assert graphs.show(sink(x)) == show(sink(x))
    assert "+%2 = NEG float32 %0" in graphs.show(sink(x.alu(Ops.NEG)))
    assert "-%2 = NEG float32 %0" in graphs.show(sink(x))
    assert "+%3 = SQRT float32 %0" in graphs.show(sink(x.alu(Ops.SQRT)))
