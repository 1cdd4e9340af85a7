"""The rewrites of a kernel go through the runner of all stages: with specs, and tracked."""

from __future__ import annotations

from dataclasses import replace

import pytest

from manygrad import Context
from manygrad.runtime.codegen import pipeline
from manygrad.runtime.codegen.choose.facts import Facts
from manygrad.runtime.codegen.kernel.passes import rewrite
from manygrad.runtime.codegen.kernel.spec import kernel_spec
from manygrad.runtime.codegen.opts import Tile
from manygrad.runtime.codegen.target import Machine
from manygrad.tensor.dtype import dtypes
from manygrad.tensor.uop import Ops, RangeArg, UOp, track

MACHINE = Machine(vector_bytes=16, registers=16)


def exp_of(dtype: object) -> UOp:
    """A kernel: b[i * 2 + j] = exp(a[i * 2 + j])."""
    two = UOp.const(dtypes.index, 2)
    i, j = (UOp(Ops.RANGE, dtypes.index, (two,), RangeArg(n, "loop")) for n in range(2))
    at = i.alu(Ops.MUL, two).alu(Ops.ADD, j)
    out, load = (UOp(Ops.INDEX, dtype, (UOp(Ops.PARAM, dtype, (), n), at)) for n in range(2))  # type: ignore[arg-type]
    value = UOp(Ops.EXP, dtype, (UOp(Ops.LOAD, dtype, (load,)),))  # type: ignore[arg-type]
    return UOp(Ops.SINK, dtypes.void, (UOp(Ops.STORE, dtypes.void, (out, value, i, j)),))


@pytest.mark.parametrize("dtype", [dtypes.float32, dtypes.float16, dtypes.float64], ids=lambda d: d.name)
def test_what_no_machine_has_is_not_legal_after_legalize(dtype: object) -> None:
    with pytest.raises(AssertionError, match="after pass 'legalize': .*EXP"):
        kernel_spec(exp_of(dtype), "legal", "legalize")
    kernel_spec(rewrite(exp_of(dtype), MACHINE).ast, "legal", "legalize")


def test_the_passes_of_a_kernel_are_tracked() -> None:
    track.records.clear()
    with Context(TRACK_MATCH_STATS=1):
        rewrite(exp_of(dtypes.float32), MACHINE)
    assert [(r.of_pass, r.rule) for r in track.records] == [("collapse", track.WHOLE), ("legalize", track.WHOLE)]
    track.records.clear()


def test_a_choice_that_the_kernel_cannot_take_is_told_and_not_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    """Under SPEC it is an error; a user's program runs, more slowly."""
    chosen = replace(pipeline.decide(Facts(exp_of(dtypes.float32), MACHINE, {})), opts=(Tile(77, 4),))
    monkeypatch.setattr(pipeline, "decide", lambda facts: chosen)
    with pytest.raises(AssertionError, match="77.*please report it"):
        pipeline.prepare(exp_of(dtypes.float32), MACHINE)
    with Context(SPEC=0), pytest.warns(RuntimeWarning, match="77.*please report it"):
        prepared = pipeline.prepare(exp_of(dtypes.float32), MACHINE)
    assert prepared.opts == pipeline.plain(prepared.ast)
