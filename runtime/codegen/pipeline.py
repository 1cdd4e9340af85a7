"""From a kernel AST to generated code: simplify, choose, lower, render."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache

from manygrad.runtime.codegen import heuristic
from manygrad.runtime.codegen.describe import kernel_name, signature
from manygrad.runtime.codegen.lower import lower
from manygrad.runtime.codegen.lowered import Program
from manygrad.runtime.codegen.opts import Opt, legal, loop_nest
from manygrad.runtime.codegen.passes import legalized, simplified
from manygrad.runtime.codegen.target import Machine
from manygrad.tensor.environment import NOOPT, SPEC
from manygrad.tensor.uop.uop import UOp


@dataclass(frozen=True)
class Prepared:
    """A kernel with its optimisations chosen, not yet lowered."""

    name: str
    ast: UOp
    opts: tuple[Opt, ...]

    def program(self) -> Program:
        return lower(self.ast, loop_nest(signature(self.ast), self.opts), self.name)

    def code(self, render: Callable[[Program], str]) -> str:
        """The generated code; from the source cache when it was made before."""
        return rendered(self, render)


@lru_cache(maxsize=16)
def rendered(prepared: Prepared, render: Callable[[Program], str]) -> str:
    """The source cache: kernel AST and opts -> code (for several compilations, DEBUG=4 and `Kernel.source`)."""
    return render(prepared.program())


def prepare(ast: UOp, machine: Machine, opts: tuple[Opt, ...] | None = None, simplify: bool = True) -> Prepared:
    """Collapses the ranges, splits them by phases, rewrites what machines do not have, or have for bytes, and picks the
    optimisations (unless given)."""
    simple = simplified(ast, machine, simplify)
    kernel = legalized(simple, machine)
    sig = signature(kernel)
    if opts is None:
        opts = heuristic.plain(simple) if NOOPT else heuristic.choose(simple, machine)
        assert not SPEC or (reason := legal(sig, opts)) is None, f"the heuristic's {opts}: {reason}"
    elif (reason := legal(sig, opts)) is not None:
        raise ValueError(f"{kernel_name(ast)} cannot be optimised by {list(opts)}: {reason}")
    return Prepared(kernel_name(ast), kernel, opts)
