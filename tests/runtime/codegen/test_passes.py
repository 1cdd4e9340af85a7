"""The rewrites of a kernel go through the runner of all stages: with specs, and tracked."""

from __future__ import annotations

import pytest

from manygrad import Context
from manygrad.runtime.codegen.passes import LEGAL, legalized, simplified
from manygrad.runtime.codegen.target import Machine
from manygrad.tensor.dtype import dtypes
from manygrad.tensor.uop import Ops, UOp, track
from manygrad.tensor.uop.spec import verify

MACHINE = Machine(vector_bytes=16, registers=16)


def exp_of(dtype: object) -> UOp:
    """A kernel: b[i * 2 + j] = exp(a[i * 2 + j])."""
    two = UOp.const(dtypes.index, 2)
    i, j = (UOp(Ops.RANGE, dtypes.index, (two,), (n, "loop")) for n in range(2))
    at = i.alu(Ops.MUL, two).alu(Ops.ADD, j)
    out, load = (UOp(Ops.INDEX, dtype, (UOp(Ops.PARAM, dtype, (), n), at)) for n in range(2))  # type: ignore[arg-type]
    value = UOp(Ops.EXP, dtype, (UOp(Ops.LOAD, dtype, (load,)),))  # type: ignore[arg-type]
    return UOp(Ops.SINK, dtypes.void, (UOp(Ops.STORE, dtypes.void, (out, value, i, j)),))


@pytest.mark.parametrize("dtype", [dtypes.float32, dtypes.float16, dtypes.float64], ids=lambda d: d.name)
def test_what_no_machine_has_is_not_legal_after_legalize(dtype: object) -> None:
    simple = simplified(exp_of(dtype), MACHINE)
    with pytest.raises(AssertionError, match="after pass 'legalize': .*EXP"):
        verify(simple, LEGAL, "legalize")
    verify(legalized(simple, MACHINE), LEGAL, "legalize")


def test_the_passes_of_a_kernel_are_tracked() -> None:
    track.records.clear()
    with Context(TRACK_MATCH_STATS=1):
        legalized(simplified(exp_of(dtypes.float32), MACHINE), MACHINE)
    assert [(r.of_pass, r.rule) for r in track.records] == [("collapse", track.WHOLE), ("legalize", track.WHOLE)]
    track.records.clear()
