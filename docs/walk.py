"""architecture.md: a sharded training step after each pass, as worker 0 of two sees it."""

from __future__ import annotations

import contextlib
import difflib
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from manygrad import Tensor
from manygrad.multi.world import Membership, World
from manygrad.runtime.codegen.kernel import passes as codegen
from manygrad.runtime.codegen.loops.show import show as show_tree
from manygrad.runtime.codegen.pipeline import prepare
from manygrad.runtime.codegen.target import Machine
from manygrad.runtime.current import use
from manygrad.runtime.runtime import Runtime
from manygrad.schedule import normalize
from manygrad.schedule.facts.buffers import Temps
from manygrad.schedule.facts.items import Item
from manygrad.schedule.lower import PASSES, Lowering
from manygrad.tensor.dtype import dtypes
from manygrad.tensor.uop import Ops, UOp
from manygrad.tensor.uop.difference import Differences, difference
from manygrad.tensor.uop.show import show

PROGRAM = """x = Tensor(rows).shard(world.devices, axis=0).realize()  # (4, 3): two rows on each device
w = Tensor(weights).shard(world.devices).realize()  # (3,): a copy on each
w.requires_grad = True
loss = (x * w).sum(1).square().sum()
loss.backward()
w.assign(w - w.grad * 0.1)
w.realize()
"""
NAMES = ("w", "x")  # of PARAM 0 and 1
NO_CHANGE = "no change by "
MACHINE = Machine(64, 32, 1 << 20, cores=2)


@contextlib.contextmanager
def worker_0_of_2() -> Iterator[World]:
    world = World(Membership(rank=0, size=2, local_rank=0, local_size=2, devices_per_node=1), "CPU")
    with use(Runtime(world=world)):
        yield world


def tensor_graph(world: World) -> UOp:
    """What the last line of PROGRAM hands to the engine, its buffers numbered."""
    *lines, last = PROGRAM.splitlines()
    assert last == "w.realize()"
    names = {"Tensor": Tensor, "world": world, "rows": np.ones((4, 3), np.float32), "weights": np.ones(3, np.float32)}
    exec("\n".join(lines), names)
    w = names["w"]
    assert isinstance(w, Tensor)
    return normalize(UOp(Ops.SINK, dtypes.void, (w.uop,))).graph


def argument(u: UOp) -> str:
    if u.op is Ops.VIEW:
        return f"{argument(u.src[0])}[{u.arg.offset}:]"
    if u.op is Ops.MSELECT:
        return argument(u.src[0])
    return f"temp{-u.arg.uid}" if u.op is Ops.BUFFER else NAMES[u.arg.uid]


def call(what: UOp, args: Sequence[UOp]) -> str:
    name = "kernel" if what.op is Ops.SINK else what.op.name.lower()
    return f"{name}({', '.join(map(argument, args))})"


def calls(items: Sequence[Item]) -> list[str]:
    """A STORE that is no kernel yet has no arguments but what it writes."""
    return [call(i.what, i.args or i.writes) for i in items]


def fenced(text: str, language: str = "") -> str:
    return f"```{language}\n{text}\n```"


def blocks() -> dict[str, str]:
    """The generated parts of the page, by name."""
    with worker_0_of_2() as world:
        return dict(_blocks(world))


def _blocks(world: World) -> Iterator[tuple[str, str]]:
    yield "program", fenced(PROGRAM.rstrip(), "python")
    made: Any = tensor_graph(world)
    graphs, to = Differences(), Lowering(world, Temps())
    yield "tensor graph", fenced(graphs.show(made))
    for p in PASSES:
        before, made = made, p.run(made, to)
        if isinstance(made, UOp) and made.op is Ops.LINEAR:
            break  # plan_memory, the last one
        if isinstance(made, UOp):
            yield change(p.name, graphs.show(made))
        elif isinstance(before, UOp):
            yield change(p.name, "\n".join(calls(made)))
        else:
            lines = difflib.ndiff(calls(before), calls(made))
            yield change(p.name, "\n".join(x for x in lines if x[0] in "+-"))
    plan = made.arg
    sizes = [f"pool {i}: {p.nbytes} bytes on {p.device}" for i, p in enumerate(plan.pools)]
    sizes += [f"temp{-b.uid}: {b.nbytes} bytes at {b.offset} of pool {b.pool}" for b in plan.buffers]
    yield "memory", fenced("\n".join(sizes))
    yield from kernel_blocks(next(c.src[0] for c in made.src if c.src[0].op is Ops.SINK))


def kernel_blocks(kernel: UOp) -> Iterator[tuple[str, str]]:
    yield "kernel", fenced(show(kernel))
    ast, to = kernel, codegen.Rewriting(MACHINE)
    for p in (*codegen.SIMPLIFY, *codegen.EXPRESS):
        before, ast = ast, p.run(ast, to)
        yield change(p.name, difference(before, ast))
    prepared = prepare(kernel, MACHINE)
    yield "opts", f"`{' '.join(map(repr, prepared.opts))}`"
    yield "loop tree", fenced(show_tree(prepared.tree()))


def change(name: str, text: str) -> tuple[str, str]:
    """What a pass changed; that of one which found nothing to do goes by another name."""
    return (f"change by {name}", fenced(text, "diff" if text[0] in "+-" else "")) if text else (NO_CHANGE + name, "")


def unchanged(names: list[str]) -> str:
    """`names`: of their blocks."""
    *first, last = (f"`{name.removeprefix(NO_CHANGE)}`" for name in names)
    return f"{', '.join(first)} and {last} find nothing to do here." if first else f"{last} finds nothing to do here."
