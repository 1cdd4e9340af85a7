"""Which rule of which pass made a node: the records of TRACK_MATCH_STATS=1, and what they tell of a kernel.

    simplify  fold_binary  ADD(PARAM, EXPAND) -> PARAM   train.py:7

A record is made of each match of a pattern (the rule is its function, or where its lambda stands), of each node that a
walk says it made from another one (`inherit`, `made_from`; the rule is the walk's function), and of each pass as a
whole. `records` keeps them in order, with the nodes that they name, until it is cleared. Where nothing was tracked yet,
this costs a look at a context variable for each graph that is rewritten, and one at a list for each node.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from types import FrameType
from typing import Any

from manygrad.tensor import source
from manygrad.tensor.uop.ops import Ops
from manygrad.tensor.uop.uop import UOp

WHOLE = "the whole pass"


@dataclass(frozen=True)
class Rewrite:
    """`rule` is empty where a node only has other sources than before. Of a whole pass, what it was given and made: a
    graph, or (of a kernel) its decisions, loop tree, instructions or text."""

    of_pass: str
    rule: str
    before: Any
    after: Any
    line: str  # the user's

    def __str__(self) -> str:
        return f"{self.of_pass:<18} {self.rule:<24} {outline(self.before)} -> {outline(self.after)}   {self.line}"


records: list[Rewrite] = []
_PASS: ContextVar[str | None] = ContextVar("pass", default=None)  # that this thread runs, if it is tracked


def outline(u: Any) -> str:
    """A node and the ops of its sources, which are many for a kernel or a graph."""
    if not isinstance(u, UOp):
        return type(u).__name__
    src = ", ".join(s.op.name for s in u.src[:4]) + (", ..." if len(u.src) > 4 else "")
    return f"{u.op.name}({src})" if src else u.op.name


@contextmanager
def tracked(name: str) -> Iterator[None]:
    """Attributes what is rewritten inside, in this thread, to pass `name`, and kept."""
    if not source.heirs:
        source.heirs.append(_inherited)
    token = _PASS.set(name)
    try:
        yield
    finally:
        _PASS.reset(token)


def _function(frame: FrameType) -> str:
    """The function that a frame runs, or the one around it where it runs a part of one."""
    return frame.f_code.co_qualname.split(".<locals>")[0].rpartition(".")[2]


def _record(rule: str, before: Any, after: Any, line: str = "") -> None:
    name = _PASS.get()
    if name is not None:
        line = line or (source.line_of(before) if isinstance(before, UOp) else "")
        records.append(Rewrite(name, rule, before, after, line))


def matches() -> Callable[[Callable[..., UOp | None], UOp, UOp], None] | None:
    """The function that is told of each match (the rule's function, before, after); None where nobody wants to know."""
    return _matched if _PASS.get() is not None else None


def _matched(rule: Callable[..., UOp | None], before: UOp, after: UOp) -> None:
    code = rule.__code__
    named = rule.__name__ != "<lambda>"
    _record(rule.__name__ if named else f"{os.path.basename(code.co_filename)}:{code.co_firstlineno}", before, after)


def _inherited(after: UOp, before: UOp) -> None:
    alike = after.op is before.op and after.arg == before.arg and after.dtype is before.dtype
    _record("" if alike else _function(sys._getframe(2)), before, after)  # (this, `inherit`, the walk)


def made_from(after: UOp, *before: UOp, line: str = "") -> None:
    """A walk made `after` of all these, which are of `line` where it is known and not theirs."""
    if _PASS.get() is not None:
        rule = _function(sys._getframe(1))
        for u in before:
            if u is not after:
                _record(rule, u, after, line)


def whole_pass(before: Any, after: Any) -> None:
    if before is not after:
        _record(WHOLE, before, after)


def history(node: UOp) -> list[Rewrite]:
    """The rewrites that led to a node, such as a kernel, in order; not those of what other kernels store for it."""
    wanted = _own(node)
    found: list[Rewrite] = []
    for r in reversed(records):
        # (a leaf that something was folded to is in other kernels, too: then what stood there before tells)
        if r.rule != WHOLE and (r.before in wanted or (r.after.src and r.after in wanted)):
            wanted |= _own(r.before)
            if r.rule and r not in found:
                found.append(r)
    return found[::-1]


def _own(node: UOp) -> set[UOp]:
    return set(node.toposort(lambda u: u.op is not Ops.AFTER or u is node))
