"""Facts about a stored value beside its BUFFER, or of memory that is to become one."""

from __future__ import annotations

from manygrad.tensor.uop import UOp
from manygrad.tensor.uop.table import Table

# The graph a stored value was computed by, over what was stored then, and when (the engine's clock): backward() follows
# it. No graph: what it was computed from has been overwritten since.
HISTORY: Table[tuple[UOp | None, int]] = Table("history")
WRITTEN: Table[int] = Table("written")  # when an assignment last wrote here
ORIGIN: Table[UOp] = Table("origin")  # the value that memory is to hold which nothing is stored in yet
LOST: Table[str] = Table("lost")  # why there is no value: what whoever reads it is told


def is_overwritten(graph: UOp | None, clock: int) -> bool:
    """Whether something that a value with this history was computed from has been overwritten since: it has no gradient
    any more."""
    return graph is None or any((WRITTEN.get(x) or 0) > clock for x in graph.toposort(lambda x: x not in HISTORY))
