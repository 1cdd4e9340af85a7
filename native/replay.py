"""A call of Python made again by native code alone: a builtin function that looks whether all is as it was, and then
makes one native call (`ir/replay.ll`).

What Python's bytecode does before a native call takes longer than a small kernel or a short message. The builtin is
made from compiled code and CPython's C API (`PyCFunction_NewEx`); `Replay` fills in its table:

| words | what |
|---|---|
| ARGUMENT_COUNT, ARGUMENTS, NAME | weak references to what the attribute of each argument was |
| CHECKS, CHECK_COUNT, CHANGED | what must read as before (`native/checks.py`); the row that did not, or -1 |
| REVERSED, MARK | a dict's `__reversed__`, and the address that its last key must be |
| THREAD, UNTIL | whose call it is, and until when (nanoseconds of time.monotonic) |
| ACQUIRE, RELEASE | of a lock, or 0 |
| FUNCTION, A0..A3, AT, PARTS | the native call; the word that it leaves at PARTS if it came to its end |
| ADDITIONS, ADDITION_COUNT | what it counts (`native/additions.py`) |
"""

from __future__ import annotations

import ctypes
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any
from weakref import ref

from manygrad.native.additions import AMOUNT_WORDS, Additions
from manygrad.native.checks import CONSTANTS, CheckTable
from manygrad.native.graph import clock
from manygrad.native.memory import table
from manygrad.native.source import module
from manygrad.native.words import WordLayout

NOTHING_DONE, DONE, STOPPED = range(3)
WORDS = WordLayout(
    (
        *("ARGUMENT_COUNT", "ARGUMENTS", "NAME", "CHECKS", "CHECK_COUNT", "CHANGED", "REVERSED", "MARK"),
        *("THREAD", "UNTIL", "ACQUIRE", "RELEASE", "FUNCTION", "A0", "A1", "A2", "A3", "AT", "PARTS"),
        *("ADDITIONS", "ADDITION_COUNT"),
    )
)
_THREAD, _UNTIL, _CHANGED = (WORDS.index(name) for name in ("THREAD", "UNTIL", "CHANGED"))
_METH_FASTCALL = 0x80

Link = Callable[[str, Sequence[str]], dict[str, int]]


@dataclass(frozen=True)
class NativeCall:
    """`function(*args)`, four words. `at`: the address of a word that it leaves at `parts` if it comes to its end."""

    function: int
    args: tuple[int, int, int, int]
    at: int = 0
    parts: int = 0
    lock: Any = None  # held meanwhile
    empty: tuple[Any, ...] = ()  # where these are not, it must not be made
    kept: tuple[Any, ...] = ()


class _MethodDef(ctypes.Structure):
    _fields_ = [("name", ctypes.c_char_p), ("function", ctypes.c_void_p), ("flags", ctypes.c_int)]
    _fields_ += [("doc", ctypes.c_char_p)]


@cache
def _method(link: Link) -> Any:
    constants = {"DONE": DONE, "STOPPED": STOPPED, "AMOUNT_WORDS": AMOUNT_WORDS, "CLOCK": clock(), **CONSTANTS}
    text = module("clock", "words", "additions", "checks", "replay", **WORDS.numbers, **constants)
    return _MethodDef(b"replay", link(text, ["replay"])["replay"], _METH_FASTCALL, None)


class Replay:
    """`call(*args)` gives NOTHING_DONE, DONE or STOPPED."""

    def __init__(self, link: Link, attribute: str, keys: dict[int, Any], mark: int) -> None:
        """`attribute`: of the arguments, what must be the same; `mark` must be the last of `keys`."""
        self.table = WORDS.table(NAME=id(attribute), MARK=mark)
        self.at = table(1)
        self.fixed = (attribute, keys.__reversed__)
        self.kept: tuple[Any, ...] = ()
        WORDS.put(self.table, REVERSED=id(self.fixed[1]))
        new = ctypes.pythonapi.PyCFunction_NewEx
        new.restype, new.argtypes = ctypes.py_object, [ctypes.c_void_p, ctypes.py_object, ctypes.c_void_p]
        self.address = ctypes.addressof(self.table)
        self.call: Callable[..., int] = new(ctypes.addressof(_method(link)), self.address, None)

    def prepare(
        self, last: Sequence[ref[Any]], checks: CheckTable, call: NativeCall, additions: Additions, until_ns: int
    ) -> None:
        """For the thread that asks. `last`: what the attributes of the arguments are."""
        refs = table(max(1, len(last)))
        refs[: len(last)] = [id(r) for r in last]
        locks = () if call.lock is None else (call.lock.acquire, call.lock.release)
        acquire, release = (id(x) for x in locks) if locks else (0, 0)
        WORDS.put(
            self.table,
            ARGUMENT_COUNT=len(last),
            ARGUMENTS=ctypes.addressof(refs),
            CHECK_COUNT=checks.count,
            CHECKS=checks.address,
            ACQUIRE=acquire,
            RELEASE=release,
            THREAD=threading.get_ident(),
            UNTIL=until_ns,
            FUNCTION=call.function,
            **{f"A{i}": x for i, x in enumerate(call.args)},
            AT=call.at or ctypes.addressof(self.at),
            PARTS=call.parts,
            ADDITIONS=additions.address,
            ADDITION_COUNT=additions.count,
        )
        self.kept = (list(last), checks, call, additions, refs, locks)

    def point_to(self, last: Sequence[ref[Any]]) -> None:
        """For other arguments, as many as before."""
        _, *kept, refs, locks = self.kept
        refs[: len(last)] = [id(r) for r in last]
        self.kept = (list(last), *kept, refs, locks)

    def holds(self) -> bool:
        """Whether it is prepared for this thread and now."""
        t = self.table
        return bool(t[_THREAD] == threading.get_ident() and time.monotonic_ns() < t[_UNTIL])

    @property
    def changed(self) -> int:
        """After a call that did nothing: the row of the checks that reads something else now, -1 for another reason."""
        return int(self.table[_CHANGED])
