"""A CHAIN as a kernel: its kernels one after the other, for one block of rows after the other.

What this means is said by `Chained`, which works on any device; a device may run blocks in parallel, each thread with
temporaries of its own (`cpu/chain.py`).
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from math import prod
from typing import Any

from manygrad.runtime.codegen.analysis.describe import signature
from manygrad.runtime.codegen.opts import Opt
from manygrad.runtime.devices.base import Call, Kernel
from manygrad.runtime.devices.numbers import Numbers
from manygrad.schedule.facts.chain import ChainSpec
from manygrad.tensor.uop.intervals import bounds
from manygrad.tensor.uop.ops import Ops
from manygrad.tensor.uop.ranges import ranges_of
from manygrad.tensor.uop.uop import UOp


class Chained:
    """A Kernel. `kernels`: those of the CHAIN `ast`, compiled."""

    source = ""
    opts: tuple[Opt, ...] = ()

    def __init__(self, ast: UOp, kernels: Sequence[Kernel]) -> None:
        spec = ast.arg
        assert isinstance(spec, ChainSpec)
        self.spec, self.kernels = spec, tuple(kernels)
        self.variables = block_variables(ast)
        self.name, self.flops, self.nbytes = chain_name(ast), flops_of(ast, kernels), bytes_of(ast)

    def calls(self, handles: Sequence[Any]) -> Iterator[tuple[Kernel, list[Any], tuple[int, ...]]]:
        """Calls of kernels that one call of it is."""
        given = [[handles[i] for i in own] for own in self.spec.slots]
        for block in range(self.spec.blocks):
            for kernel, own, variables in zip(self.kernels, given, self.variables):
                yield kernel, own, (block,) * len(variables)

    def __call__(self, handles: Sequence[Any], vars: tuple[int, ...] = (), wait: bool = False) -> float | None:
        began = time.perf_counter()
        for kernel, own, variables in self.calls(handles):
            kernel(own, variables, wait)
        return time.perf_counter() - began if wait else None


def kernels_of(call: Call) -> Iterator[tuple[Kernel, Sequence[Any], tuple[int, ...]]]:
    """The kernels that a call starts: of a chain one after the other, block by block."""
    kernel, handles, numbers = call
    if isinstance(kernel, Chained):
        for part, own, vars in kernel.calls(handles):
            yield from kernels_of((part, own, Numbers(vars)))
    else:
        yield kernel, handles, numbers.values


def chain_name(ast: UOp) -> str:
    return f"chain_{ast.arg.blocks}_{ast.key.hex()[:6]}"


def block_variables(ast: UOp) -> tuple[tuple[int, ...], ...]:
    """Variables of each kernel: the number of the block, at first; a kernel that is alike for all blocks has
    none."""
    return tuple((0,) if signature(k).variables else () for k in ast.src)


def flops_of(ast: UOp, kernels: Sequence[Kernel]) -> int:
    return int(ast.arg.blocks * sum(k.flops for k in kernels))


def bytes_of(ast: UOp) -> int:
    """The bytes that a CHAIN reads and writes besides its temporaries."""
    temps = {t.argument for t in ast.arg.temps}
    found: dict[tuple[int, bool], int] = {}
    for kernel, own in zip(ast.src, ast.arg.slots):
        stored = {s.src[0] for s in kernel.src}
        for u in signature(kernel).nodes:
            if u.op is Ops.INDEX and (i := own[u.src[0].arg]) not in temps:
                lo, hi = bounds(u.src[1])  # (of a place that is read: of its type)
                times = ast.arg.blocks * prod(bounds(r)[1] + 1 for r in ranges_of(u.src[1]))
                key = (i, u in stored)
                found[key] = max(found.get(key, 0), min(hi - lo + 1, times) * u.src[0].dtype.itemsize)
    return sum(found.values())


def written(ast: UOp) -> set[int]:
    """The arguments that a kernel or CHAIN writes, a chain's temporaries left out."""
    if ast.op is Ops.SINK:
        return {s.src[0].src[0].arg for s in ast.src}
    temps = {t.argument for t in ast.arg.temps}
    return {own[i] for kernel, own in zip(ast.src, ast.arg.slots) for i in written(kernel)} - temps
