"""Pattern matcher and graph rewrite: tables of (pattern, function), applied without recursion.

A `UPat` names what a node must look like; named parts are passed to the rule's function by keyword. A rule gives the
replacement, or None for "does not apply". `graph_rewrite` runs sources first and repeats on what a rule returned, to
the fixed point; `rewrite_once` does not look at what rules make. Besides named parts a function may ask for `ctx`, and
under `rewrite_once` for `old`, the node as it was, and `done`, what has become of nodes.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

from manygrad.tensor.dtype import DType
from manygrad.tensor.source import inherit
from manygrad.tensor.uop.ops import GroupOp, Ops
from manygrad.tensor.uop.track import matches
from manygrad.tensor.uop.uop import UOp


class UPat:
    """Matches a node by op (one or a set), dtype, arg and sources; `name` binds it. `src` None: any sources."""

    __slots__ = ("arg", "dtype", "name", "ops", "src")

    def __init__(self, ops: Ops | Iterable[Ops] | None = None, name: str | None = None,
                 src: tuple[UPat, ...] | None = None, arg: Any = None, dtype: DType | None = None):  # fmt: skip
        self.ops = None if ops is None else frozenset((ops,)) if isinstance(ops, Ops) else frozenset(ops)
        self.name, self.src, self.arg, self.dtype = name, src, arg, dtype

    @staticmethod
    def var(name: str, dtype: DType | None = None) -> UPat:
        return UPat(None, name, dtype=dtype)

    @staticmethod
    def const(name: str | None = None, value: Any = None) -> UPat:
        return UPat(Ops.CONST, name, arg=value)

    def match(self, u: UOp, bound: dict[str, UOp]) -> bool:
        if self.ops is not None and u.op not in self.ops:
            return False
        if (self.dtype is not None and u.dtype is not self.dtype) or (self.arg is not None and u.arg != self.arg):
            return False
        if self.name is not None and bound.setdefault(self.name, u) is not u:
            return False
        if self.src is None:
            return True
        if len(self.src) != len(u.src):
            return False
        saved = dict(bound)
        if all(p.match(s, bound) for p, s in zip(self.src, u.src)):
            return True
        if len(self.src) == 2 and u.op in GroupOp.COMMUTATIVE:
            bound.clear()
            bound.update(saved)
            if all(p.match(s, bound) for p, s in zip(self.src, reversed(u.src))):
                return True
        bound.clear()
        bound.update(saved)
        return False


RewriteRule = tuple[UPat, Callable[..., UOp | None]]
Tell = Callable[[Callable[..., UOp | None], UOp, UOp], None]
_ASKED = frozenset({"ctx", "old", "done"})
_NOTHING: Mapping[str, Any] = MappingProxyType({})


class _Entry(NamedTuple):
    """A rule of one op."""

    pat: UPat
    fn: Callable[..., UOp | None]
    asked: frozenset[str]  # of what is given, by name
    parameters: tuple[str, ...]  # of a function whose pattern the op says all of


class PatternMatcher:
    """An ordered table of rules, dispatched by op. Tables add up: `a + b`."""

    def __init__(self, rules: list[RewriteRule]):
        self.rules = rules
        self.table: dict[Ops, list[_Entry]] = {op: [] for op in Ops}
        for pat, fn in rules:
            parameters = tuple(inspect.signature(fn).parameters)
            asked = _ASKED.intersection(parameters)
            by_op = pat.src is None and pat.arg is None and pat.dtype is None and {*parameters} - asked == {pat.name}
            for op in pat.ops if pat.ops is not None else Ops:
                self.table[op].append(_Entry(pat, fn, asked, parameters if by_op else ()))

    def __add__(self, other: PatternMatcher) -> PatternMatcher:
        return PatternMatcher(self.rules + other.rules)

    def rewrite(self, u: UOp, given: Mapping[str, Any] = _NOTHING, tell: Tell | None = None) -> UOp | None:
        """The first rule's answer that is a different node, or None. `given`: what functions may ask for, by name;
        `tell` is told of the answer (rule, before, after)."""
        for pat, fn, asked, parameters in self.table[u.op]:
            if len(parameters) == 1:
                out = fn(u)
            elif parameters:
                out = fn(*[given[name] if name in asked else u for name in parameters])
            else:
                bound: dict[str, UOp] = {}
                if not pat.match(u, bound):
                    continue
                out = fn(**bound, **{name: given[name] for name in asked})
            if out is not None and out is not u:
                if tell is not None:
                    tell(fn, u, out)
                return out
        return None


def with_sources(u: UOp, src: tuple[UOp, ...]) -> UOp:
    """`u`, of the same line, over what a pass made of its sources."""
    return u if src == u.src else inherit(u.replace(src=src), u)


Over = Callable[[UOp, tuple[UOp, ...]], UOp]  # makes a node over other sources
MAX_REWRITES = 10_000_000


def graph_rewrite(root: UOp, pm: PatternMatcher, ctx: Any = None, over: Over | None = None) -> UOp:
    """`root` with `pm` applied to every node, sources first, until nothing changes."""
    done: dict[UOp, UOp] = {}
    # what has yet to be rewritten, sources first, and whose result it is: below the root, then below what a rule made
    stack: list[tuple[Iterator[UOp], UOp, UOp]] = [(iter(root.toposort()), root, root)]
    steps, rules, tell, given = 0, pm.table, matches(), {"ctx": ctx}
    while stack:
        nodes, made, of = stack[-1]
        for u in nodes:
            if u in done:
                continue
            steps += 1
            src = tuple([done[s] for s in u.src])
            if src == u.src:
                node = u
            else:
                node = inherit(over(u, src) if over is not None else u.replace(src=src), u)
            new = pm.rewrite(node, given, tell) if rules[node.op] else None
            if new is None:
                done[u] = node
                if node is not u:
                    done.setdefault(node, node)
            elif new in done:
                done[u] = done[new]
            else:
                stack.append((iter(new.toposort(lambda x: x not in done)), new, u))
                assert steps < MAX_REWRITES, "graph_rewrite does not end: two rules undo each other"
                break
        else:
            stack.pop()
            done[of] = done[made]
    return done[root]


def rewrite_once(root: UOp, pm: PatternMatcher, ctx: Any = None, over: Over = with_sources) -> UOp:
    """`root` with each node, sources first and once, replaced by what the first rule that applies makes of it over what
    its sources have become."""
    done: dict[UOp, UOp] = {}
    rules, given = pm.table, {"ctx": ctx, "old": root, "done": done}
    for u in root.toposort():
        given["old"] = u
        node = over(u, tuple([done[s] for s in u.src]))
        new = pm.rewrite(node, given) if rules[node.op] else None
        done[u] = node if new is None else new
    return done[root]


def rebuild(root: UOp, change: Callable[[UOp], UOp | None], over: Over | None = None) -> UOp:
    """`root` with every node, once, replaced by `change(node over what its sources became)` unless that is None."""
    done: dict[UOp, UOp] = {}
    for u in root.toposort():
        src = tuple([done[s] for s in u.src])
        new = u if src == u.src else over(u, src) if over is not None else u.replace(src=src)
        changed = change(new)
        done[u] = new if changed is None else changed
    return done[root]


def substitute(root: UOp, mapping: dict[UOp, UOp], over: Over | None = None) -> UOp:
    """`root` with nodes replaced, which are not looked into."""
    done: dict[UOp, UOp] = dict(mapping)
    for u in root.toposort(lambda u: u not in mapping):
        if u not in done:
            src = tuple([done[s] for s in u.src])
            done[u] = u if src == u.src else over(u, src) if over is not None else u.replace(src=src)
    return done[root]
