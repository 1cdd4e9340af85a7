"""A stage as a list of passes: each has a name, what it does, and the spec of what it makes. `run_passes` runs them,
for every stage: it times and checks each (SPEC=1), prints its name, time and change in ops (DEBUG=5), the first graph
and what each pass changes in it (DEBUG=6), and keeps its rewrites (TRACK_MATCH_STATS=1).

A pass goes by the name of its function and file. None runs inside another.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from manygrad.tensor.dtype import dtypes
from manygrad.tensor.environment import DEBUG, SPEC, TRACK_MATCH_STATS
from manygrad.tensor.uop.difference import Differences
from manygrad.tensor.uop.ops import Ops
from manygrad.tensor.uop.track import tracked, whole_pass
from manygrad.tensor.uop.uop import UOp

To = TypeVar("To")
# functions (stage, pass, graph after it), for docs and tests
observers: list[Callable[[str, str, UOp], None]] = []
# functions (stage, pass, start, end, what it did), for profiles
timers: list[Callable[[str, str, float, float, dict[str, Any]], None]] = []


@dataclass(frozen=True)
class Pass(Generic[To]):
    """`run(graph or items, what it is told besides)`, and a `spec(what it made, name)` that raises AssertionError where
    that is not legal. An item is a call: `what` on `args`."""

    name: str
    run: Callable[[Any, To], Any]
    spec: Callable[[Any, str], None]


def run_passes(stage: str, passes: Sequence[Pass[To]], graph: Any, to: To) -> Any:
    changes = Differences() if DEBUG >= 6 else None
    if changes is not None:
        print(f"{stage}, before its passes:\n{changes.show(_graph(graph))}")
    for p in passes:
        start, before = time.perf_counter(), graph
        if TRACK_MATCH_STATS:
            with tracked(p.name):
                graph = p.run(before, to)
                whole_pass(_root(before), _root(graph))
        else:
            graph = p.run(before, to)
        if timers:
            timed(stage, p.name, start, **_counted(graph))
        if DEBUG >= 5:
            _print(p.name, time.perf_counter() - start, before, graph)
        if changes is not None and (text := changes.show(_graph(graph))):
            print(text)
        if SPEC:
            p.spec(graph, p.name)
        if isinstance(graph, UOp):
            for observe in observers:
                observe(stage, p.name, graph)
    return graph


def timed(stage: str, name: str, start: float, **did: Any) -> None:
    """Tells the timers of something that started at `start` and ends now."""
    if timers:
        now = time.perf_counter()
        for tell in timers:
            tell(stage, name, start, now, did)


def _print(name: str, seconds: float, before: Any, after: Any) -> None:
    (what, n), (m,) = next(iter(_counted(after).items())), _counted(before).values()
    print(f"pass {name:<18} {seconds * 1e3:8.2f} ms  {m:5d} -> {n:5d} {what}")


def _counted(made: Any) -> dict[str, int]:
    return {"ops": len(made.toposort())} if isinstance(made, UOp) else {"calls": len(made)}


def _graph(made: Any) -> UOp:
    """As one graph; of items, with their arguments."""
    if isinstance(made, UOp):
        return made
    return UOp(Ops.LINEAR, dtypes.void, tuple(UOp(Ops.CALL, dtypes.void, (i.what, *i.args)) for i in made))


def _root(made: Any) -> UOp:
    return made if isinstance(made, UOp) else UOp(Ops.LINEAR, dtypes.void, tuple(item.what for item in made))
