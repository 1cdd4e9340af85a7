"""The rewrites of a kernel AST before its loops are made, in order, each with what it may leave.

collapse -> split_phases -> use_dots -> legalize (-> multiply_in_parts, where its Opts have float32_parts)
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from manygrad.runtime.codegen.kernel.collapse import collapse
from manygrad.runtime.codegen.kernel.dots import allowed, use_dots
from manygrad.runtime.codegen.kernel.float32_parts import multiply_in_parts
from manygrad.runtime.codegen.kernel.legalize import Legalized, legalize
from manygrad.runtime.codegen.kernel.split_phases import split_phases
from manygrad.runtime.codegen.target import Machine
from manygrad.tensor.uop.passes import Pass, run_passes
from manygrad.tensor.uop.uop import UOp


@dataclass(frozen=True)
class Rewriting:
    """State of the passes of one kernel: which operations stood where others do now."""

    machine: Machine
    written: dict[UOp, UOp] = field(default_factory=dict)


def _legalize(ast: UOp, to: Rewriting) -> UOp:
    found = legalize(ast, to.machine.scales)
    to.written.update(found.written)
    return found.ast


def _multiply_in_parts(ast: UOp, to: Rewriting) -> UOp:
    found = multiply_in_parts(Legalized(ast, to.written), to.machine)
    if found is None:
        return ast
    to.written.update(found.written)
    return found.ast


def _as(form: str, name: str, run: Callable[[UOp, Rewriting], UOp]) -> Pass[Rewriting]:
    def spec(ast: UOp, name: str) -> None:
        from manygrad.runtime.codegen.kernel.spec import kernel_spec  # (only SPEC=1 asks)

        kernel_spec(ast, form, name)

    return Pass(name, run, spec)


SIMPLIFY = (
    _as("simple", "collapse", lambda ast, _: collapse(ast)),
    _as("simple", "split_phases", lambda ast, _: split_phases(ast)),
)
EXPRESS = (
    _as("dots", "use_dots", lambda ast, to: use_dots(ast, allowed(to.machine.dots))),
    _as("legal", "legalize", _legalize),
)
PARTS = (_as("legal", "multiply_in_parts", _multiply_in_parts),)


def rewrite(ast: UOp, machine: Machine, simplify: bool = True) -> Legalized:
    """The kernel for which Opts are chosen, checked and lowered."""
    to = Rewriting(machine)
    return Legalized(run_passes("codegen", (*(SIMPLIFY if simplify else ()), *EXPRESS), ast, to), to.written)


def in_parts(kernel: Legalized, machine: Machine) -> Legalized | None:
    """The kernel for which Opts with `float32_parts` are chosen, checked and lowered; None: there is none."""
    to = Rewriting(machine, dict(kernel.written))
    ast = run_passes("codegen", PARTS, kernel.ast, to)
    return None if ast is kernel.ast else Legalized(ast, to.written)
