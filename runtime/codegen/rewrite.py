"""Rebuilds a kernel AST bottom-up."""

from __future__ import annotations

from collections.abc import Callable

from manygrad.tensor.uop.uop import UOp


def rebuild(root: UOp, change: Callable[[UOp], UOp | None]) -> UOp:
    """`root` with every node, its sources already rebuilt, replaced by `change(node)` unless that is None."""
    done: dict[UOp, UOp] = {}
    for u in root.toposort():
        src = tuple(done[s] for s in u.src)
        new = u if src == u.src else u.replace(src=src)
        changed = change(new)
        done[u] = new if changed is None else changed
    return done[root]
