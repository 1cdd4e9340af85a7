"""A loop tree as text, a node a line."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from manygrad.runtime.codegen.loops.index import Index, Of
from manygrad.runtime.codegen.loops.lanes import Lanes, fixed_size
from manygrad.runtime.codegen.loops.tree import (
    Accumulate,
    AwaitCopies,
    Barrier,
    BlockLoop,
    CommitCopies,
    CopyElement,
    CopyPart,
    Fetch,
    FetchPart,
    For,
    Holds,
    If,
    Kind,
    Node,
    Nodes,
    OnlineReduce,
    Pack,
    PackLoop,
    PackStage,
    PrefetchAhead,
    PrefetchLoads,
    Ragged,
    ReduceLoop,
    Scope,
    Share,
    SharePart,
    StartCopies,
    Store,
    StorePart,
    TileLoop,
    Tree,
    Vectors,
)
from manygrad.tensor.uop.ops import Ops
from manygrad.tensor.uop.uop import UOp


def show(tree: Tree) -> str:
    return "\n".join(_lines(tree, tree.nodes, tree.tiling.lanes))


def _lines(tree: Tree, nodes: Nodes, lanes: Lanes) -> Iterator[str]:
    for node in nodes:
        if isinstance(node, Scope):  # (of no interest to a reader)
            yield from _lines(tree, node.body, lanes)
            continue
        yield _line(tree, node, lanes)
        inner = node.lanes if isinstance(node, (ReduceLoop, OnlineReduce, PackLoop, Vectors)) else lanes
        body: Nodes = node.parts if isinstance(node, PackStage) else getattr(node, "body", ())
        yield from (f"  {line}" for line in _lines(tree, body, inner))
        if otherwise := getattr(node, "otherwise", ()):
            yield "else:"
            yield from (f"  {line}" for line in _lines(tree, otherwise, lanes))


def _line(tree: Tree, node: Node, lanes: Lanes) -> str:
    match node:
        case For():
            kind = "" if node.kind is Kind.SERIAL else f", {node.kind.value}"
            by = "" if node.step == 1 else f" by {node.step}"
            return f"for {text(node.counter)} in {text(node.begin)}..{text(node.end)}{by}{kind}:"
        case TileLoop():
            count = tree.tiling.step_of(node.range, lanes)
            vectors = f" in vectors of {count}" if count > 1 else ""
            below = f", below {text(node.size)}" if node.size is not None else ""
            partial = ", the last one partial" if node.ragged is Ragged.FIXED else below
            what = f"{node.extent} from {text(node.origin)}{vectors}{partial}"
            return f"{name(node.range)} = {what}:"
        case BlockLoop():
            place = "" if node.place is None else f", in place {text(node.place)}"
            return f"block of {name(node.range)} from {text(node.begin)}{place}:"
        case If():
            return f"if {text(node.condition)}:"
        case PackStage():
            return "cache_read:"
        case PackLoop():
            return f"local[{node.stage.offset_bytes}..] = {_read(node.stage.value)}:"
        case Pack():
            return "pack"
        case Share():
            return f"shared[{node.stage.offset_bytes}..] = {_read(node.stage.value)}:"
        case CopyElement():
            return "copy"
        case Fetch():
            return f"registers = {_read(node.stage.value)}:"
        case FetchPart():
            return f"fetch part {node.number}"
        case SharePart():
            return f"share part {node.number}"
        case StartCopies():
            return f"start copies to shared[{node.stage.offset_bytes}..] of {_read(node.stage.value)}:"
        case CopyPart():
            return "copy part"
        case CommitCopies():
            return "commit copies"
        case AwaitCopies():
            return f"wait for all copies but the last {node.pending} sets"
        case Barrier():
            return "barrier"
        case PrefetchLoads():
            return f"prefetch argument {node.argument}, {node.distance} of {name(node.ahead)} ahead:"
        case PrefetchAhead():
            return f"prefetch argument {node.argument}, {node.nbytes} bytes ahead:"
        case ReduceLoop():
            sums = ", ".join(f"{u.arg.name}({_read(u.src[0])})" for u in node.group)
            over = ", ".join(map(name, node.group[0].src[1:]))
            lanes_of = f" in lanes of {name(node.split)}" if node.split is not None else ""
            rest = "" if node.rest is None else f", from local[{node.rest.offset_bytes}..] on"
            rows = [k.offset_bytes for k in tree.local.kept.values() if {*k.owners} & {*node.group}]
            across = f", across {node.across} work items" if node.across > 1 else ""
            keep = "".join(f", keeping what it reads in local[{at}..]" for at in rows)
            how = " in 16 bits" if node.words else " in matrices" if node.matrix else " by warps" if node.warp else ""
            return f"reduce {sums} over {over}{how}{lanes_of}{across}{rest}{keep}:"
        case Accumulate():
            return "accumulate"
        case OnlineReduce():
            return f"online maximum and sum over {name(node.pair.total.src[1])}, where finite:"
        case Holds():
            return f"with {sum(true for *_, true in node.facts)} of {len(node.facts)} masks true:"
        case Vectors():
            assert node.lanes.range is not None
            return f"vectors of {name(node.lanes.range)} from anywhere:"
        case Store():
            which = {StorePart.ALL: "", StorePart.BEFORE: " up to the first line", StorePart.LINES: " in whole lines"}
            to = ", ".join(str(s.src[0].src[0].arg) for s in tree.sig.stores)
            lines = ", in vectors from where it is aligned" if node.at_lines and node.stored is StorePart.ALL else ""
            past = f", argument {' '.join(map(str, node.past_caches))} past the caches" if node.past_caches else ""
            return f"store argument {to}{which[node.stored]}{lines}{past}"
    raise AssertionError(f"no line for {node}")


def _read(u: UOp) -> str:
    """Which arguments an expression reads, each once."""
    slots = sorted({v.src[0].src[0].arg for v in u.toposort(lambda v: v.op is not Ops.REDUCE) if v.op is Ops.LOAD})
    return " ".join(f"argument {s}" for s in slots) or "a sum"


# *** indices ***


SIGNS: dict[Ops, tuple[str, Callable[[int, int], int]]] = {
    Ops.ADD: ("+", lambda a, b: a + b),
    Ops.SUB: ("-", lambda a, b: a - b),
    Ops.MUL: ("*", lambda a, b: a * b),
    Ops.IDIV: ("//", lambda a, b: a // b),
    Ops.MOD: ("%", lambda a, b: a % b),
    Ops.CMPLT: ("<", lambda a, b: a < b),
    Ops.CMPEQ: ("==", lambda a, b: a == b),
    Ops.CMPNE: ("!=", lambda a, b: a != b),
    Ops.OR: ("or", lambda a, b: a | b),
    Ops.AND: ("and", lambda a, b: a & b),
}
STRENGTH = {Ops.MUL: 3, Ops.IDIV: 3, Ops.MOD: 3, Ops.ADD: 2, Ops.SUB: 2, Ops.OR: 0, Ops.AND: 0}


def name(r: UOp) -> str:
    """A range, by the number that the Opts have for it."""
    return f"{'k' if r.arg.kind == 'reduce' else 'r'}{r.arg.id}"


def text(x: Index) -> str:
    """As a formula; what is known is worked out."""
    if (known := _number(x)) is not None:
        return str(known)
    match x.op:
        case Of.COUNTER:
            return f"i{x.arg}"
        case Of.SIZE | Of.ORIGIN:
            return f"{x.op.name.lower()}({name(x.arg)})"
        case Of.LINE:
            return f"line({name(x.arg.range)})"
        case Of.HERE:
            return text(x.src[0])
        case Ops.WHERE:
            condition, a, b = x.src
            if condition.op is Ops.CMPLT and {*condition.src} == {a, b}:
                return f"{'min' if condition.src[0] is a else 'max'}({text(a)}, {text(b)})"
            return f"({text(a)} if {text(condition)} else {text(b)})"
    if not isinstance(x.op, Ops):
        return x.op.name.lower()
    a, b = x.src
    if x.op in (Ops.MUL, Ops.IDIV) and _number(b) == 1:
        return text(a)
    return f"{_operand(a, x, False)} {SIGNS[x.op][0]} {_operand(b, x, True)}"


def _operand(a: Index, of: Index, right: bool) -> str:
    """In parentheses where it binds less than what it is an operand of."""
    strong = [STRENGTH.get(x.op, 1) if isinstance(x.op, Ops) else 4 for x in (a, of)]
    simple = _number(a) is not None or " " not in text(a) or (a.op is Ops.WHERE)
    return text(a) if simple or strong[0] > strong[1] or (strong[0] == strong[1] and not right) else f"({text(a)})"


def _number(x: Index) -> int | None:
    if x.op is Of.SIZE:
        return fixed_size(x.arg)
    if x.op not in SIGNS:
        return x.number
    a, b = map(_number, x.src)
    return None if a is None or b is None else SIGNS[x.op][1](a, b)
