"""The rewrites of a kernel go through the runner of all stages: with specs, and tracked."""

from __future__ import annotations

from dataclasses import replace
from types import ModuleType

import pytest

from manygrad import Context
from manygrad.runtime.codegen import pipeline
from manygrad.runtime.codegen.choose.facts import Facts
from manygrad.runtime.codegen.emit import spec as instructions
from manygrad.runtime.codegen.kernel.passes import rewrite
from manygrad.runtime.codegen.kernel.spec import kernel_spec
from manygrad.runtime.codegen.loops import spec as loops
from manygrad.runtime.codegen.loops.tree import Tree
from manygrad.runtime.codegen.lowered import LoweredProgram
from manygrad.runtime.codegen.lowering import Decided
from manygrad.runtime.codegen.opts import Parallel, Tile
from manygrad.runtime.codegen.pipeline import rendered
from manygrad.runtime.codegen.render.llvm.printer import render
from manygrad.runtime.codegen.target import Machine
from manygrad.tensor.dtype import dtypes
from manygrad.tensor.uop import Ops, RangeArg, UOp, passes, track

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
    monkeypatch.setattr(pipeline, "choice_of", lambda kernel, machine: chosen)
    with pytest.raises(AssertionError, match="77.*please report it"):
        pipeline.prepare(exp_of(dtypes.float32), MACHINE)
    with Context(SPEC=0), pytest.warns(RuntimeWarning, match="77.*please report it"):
        prepared = pipeline.prepare(exp_of(dtypes.float32), MACHINE)
    assert prepared.opts == pipeline.plain(prepared.ast)


OPTS = (Tile(1, 2), Parallel(1))
LOWERING = [*map(repr, OPTS), "make_loops", "emit", "render"]


def lowered_to_text() -> str:
    ast = rewrite(exp_of(dtypes.float32), MACHINE).ast
    rendered.cache_clear()
    return pipeline.Prepared("k", ast, OPTS).code(render)


def test_a_kernel_is_recorded_from_its_graph_to_its_text() -> None:
    """By the mechanism of all passes: timed, told to observers, tracked."""
    seen: list[tuple[str, str, object]] = []
    told: list[str] = []
    watch = (lambda *what: seen.append(what)), (lambda stage, name, start, end, did: told.append(f"{name} {[*did]}"))
    passes.observers.append(watch[0])
    passes.timers.append(watch[1])
    track.records.clear()
    try:
        with Context(TRACK_MATCH_STATS=1):
            text = lowered_to_text()
    finally:
        passes.observers.remove(watch[0])
        passes.timers.remove(watch[1])
    names = ["collapse", "split_phases", "use_dots", "legalize", *LOWERING]
    assert [(stage, name) for stage, name, _ in seen] == [("codegen", n) for n in names]
    *_, tiled, _, tree, program, code = (made for *_, made in seen)
    assert isinstance(tiled, Decided) and tiled.opts == OPTS[:1] and tiled.nest.tile == {tiled.sig.loops[0]: 2}
    assert (type(tree), type(program), code) == (Tree, LoweredProgram, text)
    parts = ["ops"] * 4 + ["decisions"] * 2 + ["nodes", "instructions", "lines"]
    assert told == [f"{n} {[part]}" for n, part in zip(names, parts)]
    assert [r.of_pass for r in track.records if r.rule == track.WHOLE] == ["collapse", "legalize", *LOWERING]
    assert str(track.records[-1]).split()[-3:] == ["LoweredProgram", "->", "str"]
    track.records.clear()


def test_each_opt_is_printed_with_what_it_changes(capsys: pytest.CaptureFixture[str]) -> None:
    with Context(DEBUG=6):
        lowered_to_text()
    out = capsys.readouterr().out
    tile = out[out.index("pass tile(1, 2)") : out.index("pass parallel(1)")].splitlines()
    assert tile[0].split()[-4:] == ["0", "->", "1", "decisions"]
    assert "+for i0 in 0..4 by 2:" in tile and "+  r1 = 2 from i0:" in tile
    assert all(f"pass {name} " in out for name in LOWERING)
    assert "define " in out[out.index("pass render") :]


@pytest.mark.parametrize("name, module", [("make_loops", loops), ("emit", instructions)])
def test_what_is_lowered_is_verified(name: str, module: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    def wrong(made: object) -> None:
        raise AssertionError(f"wrong: {type(made).__name__}")

    monkeypatch.setattr(module, "verify", wrong)
    with Context(SPEC=1), pytest.raises(AssertionError, match="wrong: "):
        lowered_to_text()
