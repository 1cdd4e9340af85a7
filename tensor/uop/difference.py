"""Changes of a graph by a pass: the nodes that are gone (-) and those that are new (+), a line each.

A node is numbered when it first appears and keeps its number from graph to graph. A node that was there before is not
printed. One whose sources, shape or arg are others now is printed twice, with the number of the node it stands for:

    -%62 = RESHAPE float32 (3, 1) %61 [(3, 1)]
    +%62 = RESHAPE float32 (3, 1) %66 [(3, 1)]
"""

from __future__ import annotations

from collections.abc import Callable
from difflib import SequenceMatcher
from typing import Any

from manygrad.tensor.uop.show import show_node
from manygrad.tensor.uop.uop import UOp


class Differences:
    """Prints one graph after the other: the first as a whole, then what has changed since the one before."""

    def __init__(self) -> None:
        self.last: UOp | None = None
        self.numbers: dict[UOp, int] = {}  # of its nodes
        self.used = 0

    def show(self, graph: UOp) -> str:
        """Empty where nothing has changed."""
        before, was = self.numbers, {n: show_node(u, self.numbers) for u, n in self.numbers.items()}
        same = matched(self.last, graph) if self.last is not None else {}
        self.numbers = {}
        for u in graph.toposort():
            self.numbers[u] = before[same[u]] if u in same else self.used
            self.used += u not in same
        now = {n: show_node(u, self.numbers) for u, n in self.numbers.items()}
        first, self.last = self.last is None, graph
        if first:
            return "\n".join(now.values())
        lines = [f"-{line}" for n, line in was.items() if n not in now]
        for n, line in now.items():
            if was.get(n) != line:
                lines += [f"-{was[n]}"] if n in was else []
                lines.append(f"+{line}")
        return "\n".join(lines)


def difference(before: UOp, after: UOp) -> str:
    """Lines of what is in one of two graphs only; `before` is numbered as `show` does."""
    graphs = Differences()
    graphs.show(before)
    return graphs.show(after)


def matched(before: UOp, after: UOp) -> dict[UOp, UOp]:
    """Node after -> the node before that it is or stands for: the same object; else, in the order of both graphs, one
    of the same op, type and arg; else one of the same op and type."""
    olds, news = before.toposort(), after.toposort()
    there = set(olds)
    found = {u: u for u in news if u in there}
    forms: tuple[Callable[[UOp], Any], ...] = (
        lambda u: (u.op, u.dtype, type(u.arg), u.arg),
        lambda u: (u.op, u.dtype),
    )
    for form in forms:
        taken = set(found.values())
        was = [u if u in taken else form(u) for u in olds]
        now = [found[u] if u in found else form(u) for u in news]
        for i, j, size in SequenceMatcher(None, was, now, autojunk=False).get_matching_blocks():
            found.update(zip(news[j : j + size], olds[i : i + size]))
    return found
