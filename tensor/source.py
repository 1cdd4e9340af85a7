"""The user's source line behind a node, for errors and plan hashes.

Lines are kept beside the graph, not in it: two places that build the same value share one node,
and the first line wins.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from types import CodeType

from manygrad.tensor.uop.table import AttributeTable, Table
from manygrad.tensor.uop.uop import UOp

_PACKAGE = os.path.dirname(os.path.dirname(os.path.abspath(__file__))) + os.sep
_OWN = tuple(
    _PACKAGE + part
    for part in (
        *(
            f"{folder}{os.sep}"
            for folder in (
                *("native", "tensor", "nn", "multi", "schedule", "runtime", "collectives", "launcher", "checkpoint"),
                "llm",
            )
        ),
        *("__init__.py", "autograd.py", "errors.py", "linalg.py", "session.py", "special.py"),
    )
)


def is_own(filename: str) -> bool:
    """Whether a file is one of the package, whose lines are not the user's; examples and tests are not."""
    return filename.startswith(_OWN)


class _Shown(dict[str, str]):
    """How each file seen is called in a line; nothing where its lines are not the user's."""

    def __missing__(self, name: str) -> str:
        shown = self[name] = "" if is_own(name) or name.startswith("<") else os.path.basename(name)
        return shown


_shown = _Shown()

LINE: AttributeTable[str] = AttributeTable("line", "_line")  # where the user wrote it


_standing: ContextVar[str] = ContextVar("the user's line", default="")


@contextmanager
def standing_at(line: str) -> Iterator[None]:
    """What is made inside is of this line of the user's, which called for it earlier."""
    token = _standing.set(line)
    try:
        yield
    finally:
        _standing.reset(token)


def user_line() -> str:
    """`file:line` of the nearest frame outside the package."""
    if line := _standing.get():
        return line
    frame = sys._getframe(1)
    while frame is not None:
        shown = _shown[frame.f_code.co_filename]
        if shown:
            return f"{shown}:{frame.f_lineno}"
        frame = frame.f_back  # type: ignore[assignment]
    return "?"


def user_place() -> tuple[CodeType, int]:
    """The code of the nearest frame outside the package, and where in it that frame is: what `user_line` tells,
    quicker, and so that two calls on one line are two. (It is asked from two frames of the package at least.)"""
    frame = sys._getframe(3)
    while frame is not None:
        code = frame.f_code
        if _shown[code.co_filename]:
            return code, frame.f_lasti
        frame = frame.f_back  # type: ignore[assignment]
    return user_place.__code__, 0


def mark(u: UOp) -> UOp:
    """Remember the user's line for `u` unless it has one."""
    if u not in LINE:
        LINE[u] = user_line()
    return u


def line_of(u: UOp) -> str:
    """The line of `u` or of its nearest source that has one."""
    seen = 0
    todo = [u]
    while todo and seen < 200:
        x = todo.pop(0)
        found = LINE.get(x) or _INHERITED.get(x)
        if found:
            return str(found)
        todo.extend(x.src)
        seen += 1
    return "?"


heirs: list[Callable[[UOp, UOp], None]] = []  # told of (new, old) while passes are tracked (`tensor/uop/track.py`)
_INHERITED: Table[str] = Table("inherited line")
_heirs: list[UOp] = []  # the nodes that have one


def inherit(new: UOp, old: UOp) -> UOp:
    """`new`, which a pass made from `old`, is of its line as long as this schedule is made.

    Kept apart from the user's lines, and forgotten with `forget_inherited`: the lines that a later graph finds must not
    depend on whether an earlier one was scheduled here or read from the disk cache, for plans are compared by their
    lines over all workers.
    """
    if heirs and new is not old:
        for tell in heirs:
            tell(new, old)
    if new is not old and new not in LINE and new not in _INHERITED:
        line = LINE.get(old) or _INHERITED.get(old)
        if line:
            _INHERITED[new] = line
            _heirs.append(new)
    return new


def forget_inherited() -> None:
    """The end of a schedule."""
    for u in _heirs:
        _INHERITED.pop(u)
    _heirs.clear()
