"""Schedules on disk: found by a second start, not by another program, another worker or other lines."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from manygrad import Context, Tensor, TinyJit, Variable
from manygrad.multi.world import Membership, World
from manygrad.runtime.current import current
from manygrad.schedule import create_linear, normalize
from manygrad.schedule.cache import Schedules
from manygrad.tensor import source
from manygrad.tensor.source import LINE
from manygrad.tensor.uop import Ops, UOp
from manygrad.tensor.uop.uop import KEY
from tests.schedule.programs import sink_of, stored

TWO = ("CPU:0", "CPU:1")


@pytest.fixture(autouse=True)
def empty_cache(tmp_path: Path) -> Iterator[None]:
    with Context(SPEC=0, CACHE_DIR=str(tmp_path), DEBUG=0):
        yield


def normal(*tensors: Tensor) -> UOp:
    return normalize(sink_of(list(tensors))).graph


def again(graph: UOp, me: World | None = None) -> tuple[UOp, bool]:
    """The LINEAR as a second start has it, and whether it came from disk."""
    schedules = Schedules(current().schedules.store)
    return create_linear(graph, me or World(), schedules), schedules.loaded == 1


def programs() -> list[list[Tensor]]:
    x, y = stored(6, 8), stored(8, 3)
    sharded = Tensor(np.ones((4, 3), np.float32)).shard(TWO, 0).contiguous().realize()
    return [
        [(x @ y).softmax()],
        [sharded.sum() * 2, sharded + 1],
        [(stored(10, 4)[: Variable("n", 1, 10).bind(3)] + 1).sum(0)],
        [x.to("CPU:1") + 1],
    ]


@pytest.mark.parametrize("at", range(4))
def test_what_is_read_is_what_was_made(at: int) -> None:
    graph = normal(*programs()[at])
    first, loaded = again(graph)
    assert not loaded
    lines = [LINE[c] for c in first.src]
    keys = [c.src[0].key for c in first.src if c.src[0].op is Ops.SINK]
    for c in first.src:
        LINE.pop(c)
        KEY.pop(c.src[0])
    second, loaded = again(graph)
    assert loaded and second is first  # nodes are interned: equal is the same
    assert [LINE[c] for c in second.src] == lines
    assert [KEY[c.src[0]] for c in second.src if c.src[0].op is Ops.SINK] == keys
    for c in second.src:
        KEY.pop(c.src[0])
    assert [c.src[0].key for c in second.src if c.src[0].op is Ops.SINK] == keys


def test_another_worker_has_its_own() -> None:
    graph = normal(stored(4) * 3)
    other = World(Membership(rank=1, size=2))
    assert not again(graph)[1] and not again(graph, other)[1]
    assert again(graph)[1] and again(graph, other)[1]


def test_other_lines_are_another_entry() -> None:
    """Plans of collectives name the user's line: a rank that reads its schedule
    must name the line that the others see."""
    t = stored(4) * 3.0
    graph = normal(t)
    assert not again(graph)[1]
    node = next(u for u in graph.toposort() if u in LINE)
    LINE[node] = "elsewhere.py:1"
    assert not again(graph)[1]


def test_a_schedule_leaves_no_lines_behind() -> None:
    """Else a later graph's lines, and with them the plans that workers compare,
    would depend on whether this one came from disk."""
    x = stored(6, 8)
    graph = normal((x.exp() @ stored(8, 3)).softmax())
    lines = [LINE.get(u) for u in graph.toposort()]
    again(graph)
    assert [LINE.get(u) for u in graph.toposort()] == lines
    assert not any(u in source._INHERITED for u in graph.toposort())


def test_checks_and_the_switches_want_it_made() -> None:
    graph = normal(stored(4) * 5.0)
    assert not again(graph)[1] and again(graph)[1]
    for switch in ({"SPEC": 1}, {"CACHE": 0}, {"SCACHE": 0}):
        with Context(**switch):
            assert not again(graph)[1]


def test_a_damaged_entry_is_made_again(tmp_path: Path) -> None:
    graph = normal(stored(4) * 7.0)
    first, _ = again(graph)
    schedules = current().schedules
    digests = schedules.digests(graph, World())
    assert digests is not None and schedules.store is not None
    schedules.store.put(digests.entry, b"of another program")
    second, loaded = again(graph)
    assert second is first and not loaded and again(graph)[1]


PROGRAM = """
import sys
import numpy as np
from manygrad import Tensor
from manygrad.native.compiler import Compiler
from manygrad.runtime.current import current
made = []
compile = Compiler.object_code
Compiler.object_code = lambda self, ir: (made.append(1), compile(self, ir))[1]
x = Tensor(np.ones((5, 4), np.float32)).realize()
((x @ x.T).softmax() + 1).realize()
stages = ["schedule.lower", "codegen.loops.build", "codegen.emit.lower", "render.llvm.printer"]
imported = sum(name.endswith(tuple(stages)) for name in sys.modules)
specs = sum(name.startswith("manygrad.") and name.endswith(".spec") for name in sys.modules)
print(current().schedules.misses, current().schedules.loaded, len(made), imported, specs)
"""


def test_a_second_start_neither_schedules_nor_compiles(tmp_path: Path) -> None:
    script = tmp_path / "program.py"
    script.write_text(PROGRAM)
    env = {**os.environ, "SPEC": "0", "CACHE_DIR": str(tmp_path / "cache")}
    said = [
        subprocess.run(
            [sys.executable, str(script)], env=env, capture_output=True, text=True, check=True
        ).stdout.split()
        for _ in range(2)
    ]
    misses, loaded, compiled, imported, _ = map(int, said[0])
    assert misses > 0 and loaded == 0 and compiled > 0 and imported == 4
    assert said[1] == [str(misses), str(misses), "0", "0", "0"]  # nor does it import what would


def test_a_graph_is_kept_from_its_third_use_on() -> None:
    """What runs once, or was recorded as well, leaves its schedule under a digest."""
    schedules = Schedules(current().schedules.store)
    graph = normal(stored(4) * 9.0 + 1)
    kept = []
    for _ in range(4):
        create_linear(graph, World(), schedules)
        kept.append((len(schedules.in_memory), len(schedules.by_digest)))
    assert kept == [(0, 1), (0, 1), (1, 0), (1, 0)]
    assert (schedules.misses, schedules.hits) == (1, 3)


def test_nothing_holds_the_graph_of_a_capture() -> None:
    w = Tensor(np.ones(8, np.float32)).realize()

    @TinyJit
    def step(x: Tensor) -> Tensor:
        for i in range(200):
            x = x * w + i
        return x.sum()

    before = alive()
    for i in range(12):  # run, recorded, and followed in calls 3 and 10
        assert step(Tensor(np.full(8, i, np.float32))).item() == 8 * i + 8 * 199 * 100
    assert alive() - before < 100 + 200 * 3, "(its kernel has an addition, a product and a constant for each)"


def alive() -> int:
    gc.collect()
    return sum(type(o) is UOp for o in gc.get_objects())
