"""The values of variables where the kernels of graphs read them: set once, however many calls there are."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Collection, Mapping
from typing import Any


class Numbers:
    """The values of a kernel's variables, in its order. `array` is what native code reads.

    Kernels that take the same variables in the same order share one.
    """

    def __init__(self, values: tuple[int, ...] = ()) -> None:
        self.values = values
        self.array = (ctypes.c_int64 * len(values))(*values)
        # by bounds of the variables: what raises ValueError where values are outside of them; by kernel: what else
        # follows from the values
        self.checks: dict[Any, Callable[[tuple[int, ...]], Any]] = {}
        self.changes: dict[Any, Callable[[tuple[int, ...]], None]] = {}

    def set(self, values: tuple[int, ...]) -> None:
        self.values = values
        self.array[:] = list(values)
        for change in self.changes.values():
            change(values)


class Variables:
    """The variables of one capture's graphs. Those `asked` for take the values of each replay (`set`), the others keep
    those of `vars`."""

    def __init__(self, vars: Mapping[str, int], asked: Collection[str] = ()) -> None:
        self.vars, self.asked = dict(vars), [n for n in vars if n in asked]
        self._numbers: dict[tuple[str, ...], Numbers] = {}

    def numbers(self, names: tuple[str, ...]) -> Numbers:
        found = self._numbers.get(names)
        if found is None:
            found = self._numbers[names] = Numbers(tuple(self.vars[n] for n in names))
        return found

    def set(self, vars: Mapping[str, int]) -> None:
        """Raises ValueError where a value is outside of the bounds of a kernel's variable, and changes nothing then."""
        changed = {n: vars[n] for n in self.asked if vars[n] != self.vars[n]}
        if changed:
            now = self.vars | changed
            found = [
                (numbers, tuple(now[n] for n in names))
                for names, numbers in self._numbers.items()
                if not changed.keys().isdisjoint(names)
            ]
            for numbers, values in found:
                for check in numbers.checks.values():
                    check(values)
            for numbers, values in found:
                numbers.set(values)
            self.vars = now
