"""Graphs as bytes: what is read back is the same node; what differs has other bytes."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from manygrad import Tensor, Variable
from manygrad.tensor.dtype import dtypes
from manygrad.tensor.uop import BufferSpec, Ops, UOp, VarArg
from manygrad.tensor.uop.serial import NotStorable, decode, encode

ARGS = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False)
    | st.text(max_size=4)
    | st.sampled_from([Ops.ADD, dtypes.half, VarArg("n", 1, 4)]),
    lambda inner: st.lists(inner, max_size=3).map(tuple),
    max_leaves=8,
)


@given(ARGS)
def test_args_come_back_as_they_were(arg: object) -> None:
    u = UOp(Ops.CONTIGUOUS, dtypes.float32, (UOp.const(dtypes.float32, 1.0),), arg)
    back, _ = decode(encode(u))
    assert back is u and repr(back.arg) == repr(arg)


def test_numbers_that_look_alike_are_kept_apart() -> None:
    nodes = [UOp(Ops.CONST, dtypes.float32, (), v) for v in (1, 1.0, True, 0.0, -0.0, math.inf)]
    assert len({encode(u) for u in nodes}) == len(nodes)
    assert math.isnan(decode(encode(UOp(Ops.CONST, dtypes.float32, (), math.nan)))[0].arg)


def test_a_graph_with_symbolic_shapes_comes_back() -> None:
    n = Variable("n", 1, 10)
    t = (Tensor(np.ones((10, 4), np.float32)).realize()[: n.bind(3)] + 1).sum(0)
    assert decode(encode(t.uop))[0] is t.uop
    spec = BufferSpec(7, (n.bind(3).src[0], 4), dtypes.float32, ("CPU:0", "CPU:1"), 1, (0, 2, 4))
    u = UOp(Ops.BUFFER, dtypes.float32, (), spec)
    assert decode(encode(u))[0] is u


def test_equal_dims_of_two_variables_are_told_apart() -> None:
    one = UOp.const(dtypes.float32, 1.0)
    dims = [UOp(Ops.DEFINE_VAR, dtypes.index, (), VarArg(n, 1, 4)) for n in "ab"]
    a, b = (UOp(Ops.RESHAPE, dtypes.float32, (one,), (d,)) for d in dims)
    assert encode(a) != encode(b)


def test_lines_stand_beside_the_nodes() -> None:
    u = UOp.const(dtypes.float32, 2.5).alu(Ops.EXP)
    data = encode(u, lambda x: "train.py:7" if x is u else "")
    assert decode(data) == (u, [(u, "train.py:7")]) and data != encode(u)


def test_a_deep_graph_does_not_recurse() -> None:
    u = UOp.const(dtypes.float32, 3.5)
    for _ in range(20_000):
        u = u.alu(Ops.NEG)
    assert decode(encode(u))[0] is u


def test_what_has_no_form_is_refused() -> None:
    with pytest.raises(NotStorable, match="type object"):
        encode(UOp(Ops.CUSTOM, dtypes.float32, (UOp.const(dtypes.float32, 1.0),), object()))


@pytest.mark.parametrize("damage", [b"", b"\x00\x00\x00\x00", b"\x02\x00\x00\x00{}"])
def test_other_bytes_are_an_error(damage: bytes) -> None:
    with pytest.raises((ValueError, IndexError)):
        decode(damage)
