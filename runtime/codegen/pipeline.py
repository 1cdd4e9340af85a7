"""From a kernel AST to generated code: simplify, legalize, choose, lower, render.

What lowers and renders is imported when code is made: a kernel whose binary is on disk needs neither.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING

from manygrad.runtime.codegen.analysis.describe import kernel_name, signature
from manygrad.runtime.codegen.choose import Choice, decide, plain
from manygrad.runtime.codegen.choose.facts import Facts
from manygrad.runtime.codegen.kernel.legalize import Legalized
from manygrad.runtime.codegen.kernel.passes import in_parts, rewrite
from manygrad.runtime.codegen.lowered import LoweredProgram
from manygrad.runtime.codegen.opts import Float32Parts, Opt, Tensorize, legal, loop_nest
from manygrad.runtime.codegen.opts.bind_reduce import exchanged_bytes
from manygrad.runtime.codegen.opts.cache_shared import shared_bytes
from manygrad.runtime.codegen.opts.opt import chosen
from manygrad.runtime.codegen.opts.warp_matrix import fragments_bytes
from manygrad.runtime.codegen.target import Machine
from manygrad.tensor.environment import DEBUG, FLOAT32_PARTS, NOOPT, SPEC
from manygrad.tensor.uop.uop import UOp

if TYPE_CHECKING:
    from manygrad.runtime.codegen.loops.tree import Tree


@dataclass(frozen=True)
class Prepared:
    """A kernel with its optimisations chosen, not yet lowered."""

    name: str
    ast: UOp
    opts: tuple[Opt, ...]

    def tree(self) -> Tree:
        """Its loops."""
        from manygrad.runtime.codegen.lowering import MAKE_LOOPS, lower

        tree: Tree = lower(self.name, self.ast, self.opts, MAKE_LOOPS)
        return tree

    def program(self) -> LoweredProgram:
        from manygrad.runtime.codegen.lowering import EMIT, MAKE_LOOPS, lower

        program: LoweredProgram = lower(self.name, self.ast, self.opts, MAKE_LOOPS, EMIT)
        return program

    def code(self, render: Callable[[LoweredProgram], str]) -> str:
        """The generated code; from the source cache when it was made before."""
        return rendered(self, render)


@lru_cache(maxsize=16)
def rendered(prepared: Prepared, render: Callable[[LoweredProgram], str]) -> str:
    """The source cache: kernel AST and opts -> code (for several compilations, DEBUG=4 and `Kernel.source`)."""
    from manygrad.runtime.codegen.lowering import EMIT, MAKE_LOOPS, lower, render_pass

    text: str = lower(prepared.name, prepared.ast, prepared.opts, MAKE_LOOPS, EMIT, render_pass(render))
    return text


def prepare(ast: UOp, machine: Machine, opts: tuple[Opt, ...] | None = None, simplify: bool = True) -> Prepared:
    """The rewritten kernel with `opts`, or those chosen for it. Raises ValueError for `opts` that it cannot take."""
    name, kernel = kernel_name(ast), rewrite(ast, machine, simplify)
    if opts is not None:
        parts = in_parts(kernel, machine) if chosen(opts, Float32Parts) is not None else None
        taken, made = opts, kernel.ast if parts is None else parts.ast
    elif NOOPT:
        taken, made = plain(kernel.ast), kernel.ast
    else:
        choice = choice_of(kernel, machine)
        taken, made = choice.opts, choice.facts.ast
        if DEBUG >= 4:
            print(f"{name}, by runtime/codegen/choose:\n{choice.explained()}")
    reason = legal(signature(made), taken) or beyond(machine, made, taken)
    if reason is not None and opts is not None:
        raise ValueError(f"{name} cannot be optimised by {list(taken)}: {reason}")
    if reason is not None:
        message = f"{list(taken)} were chosen for {name}, which cannot take them: {reason}; please report it"
        assert not SPEC, message
        warnings.warn(f"{message} (until then it runs without)", RuntimeWarning, stacklevel=2)
        taken, made = plain(kernel.ast), kernel.ast
    return Prepared(name, made, taken)


def choice_of(kernel: Legalized, machine: Machine) -> Choice:
    """The decisions about a rewritten kernel, and which form of it they are about."""
    has_parts = FLOAT32_PARTS and any(d.in_parts for d in machine.dots)
    parts = in_parts(kernel, machine) if has_parts else None
    others = None if parts is None else Facts(parts.ast, machine, parts.written)
    return decide(Facts(kernel.ast, machine, kernel.written), others)


def beyond(machine: Machine, ast: UOp, opts: tuple[Opt, ...]) -> str | None:
    """Why the machine cannot run a kernel with legal `opts`: it has no such instructions, or only smaller groups."""
    sig = signature(ast)
    nest = loop_nest(sig, opts)
    if math.prod(nest.group) > machine.group_items:
        return f"a group of {math.prod(nest.group)} work items; this machine has groups of {machine.group_items}"
    if chosen(opts, Tensorize) is not None and machine.dots and all(d.columns for d in machine.dots):
        return "products in vectors' lanes; this machine's instructions share them out over a warp"
    if nest.ring and not machine.copies_ahead:
        return "copies that go on while a group computes; this machine has none"
    items = max(nest.reduce_bound.values(), default=1)
    if items > machine.subgroup_items > 0:
        return f"sums across {items} work items; this machine's subgroups have {machine.subgroup_items}"
    exchanged = 0 if machine.subgroup_items else exchanged_bytes(sig, nest)
    if (nbytes := shared_bytes(sig, nest) + fragments_bytes(sig, nest) + exchanged) > machine.shared_bytes:
        return f"{nbytes} bytes that a group shares; this machine has {machine.shared_bytes}"
    return None


def explain(ast: UOp, machine: Machine) -> str:
    """Which decision gives which Opt of a kernel, a line each (DEBUG=4 prints it for every kernel)."""
    return "as written (NOOPT=1)" if NOOPT else choice_of(rewrite(ast, machine), machine).explained()
