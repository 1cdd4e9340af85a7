"""The rewrites of a kernel AST before its loops are made, in order, each with what it may leave.

collapse -> split_phases -> use_dots -> legalize
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from manygrad.runtime.codegen.collapse import collapse
from manygrad.runtime.codegen.dots import Dot, use_dots
from manygrad.runtime.codegen.legalize import Legalized, legalize
from manygrad.runtime.codegen.phases import split_phases
from manygrad.runtime.codegen.target import Machine
from manygrad.runtime.codegen.transcendental import Lookup
from manygrad.schedule.spec import KERNEL
from manygrad.tensor.uop.ops import GroupOp, Ops
from manygrad.tensor.uop.passes import Pass, run_passes
from manygrad.tensor.uop.spec import FLOAT, LIKE_FIRST, Spec, also, plus, rule, sources, verify, without
from manygrad.tensor.uop.uop import UOp

_DOT = rule(
    "CUSTOM multiplies bytes", Ops.CUSTOM,
    ("a Dot as arg", lambda u: isinstance(u.arg, Dot)), sources(2),
    ("factors of its types", lambda u: (u.src[0].dtype, u.src[1].dtype) == (u.arg.left, u.arg.right)),
)  # fmt: skip
_SMALL = ("within", "scale", "round")  # what a renderer has beside the ops
_INSTRUCTIONS = (
    rule("CUSTOM is an instruction of floats", Ops.CUSTOM,
         sources(1, 2), FLOAT, LIKE_FIRST, ("its name as arg", lambda u: u.arg in _SMALL)),
    rule("CUSTOM looks up", Ops.CUSTOM,
         sources(1), FLOAT, LIKE_FIRST,
         ("a Lookup as arg", lambda u: isinstance(u.arg, Lookup) and all(type(v) is float for v in u.arg.values))),
)  # fmt: skip
SIMPLE: Spec = plus(KERNEL, *_INSTRUCTIONS)  # (a kernel may come with functions that are expanded already)
DOTS: Spec = plus(KERNEL, _DOT, *_INSTRUCTIONS)
LEGAL: Spec = also(
    without(DOTS, Ops.EXP, Ops.LOG, Ops.SIN),
    ("arithmetic in more than half precision", lambda u: not any(s.dtype.is_half for s in u.src)),
    but=[op for op in Ops if op not in GroupOp.ALU | {Ops.REDUCE} or op is Ops.WHERE],
)


@dataclass(frozen=True)
class Rewriting:
    """What the passes of one kernel are told, and what they tell: which operations stood where others do now."""

    machine: Machine
    written: dict[UOp, UOp] = field(default_factory=dict)


def _legalize(ast: UOp, to: Rewriting) -> UOp:
    found = legalize(ast, to.machine.scales)
    to.written.update(found.written)
    return found.ast


def _as(spec: Spec, name: str, run: Callable[[UOp, Rewriting], UOp]) -> Pass[Rewriting]:
    return Pass(name, run, lambda ast, name: verify(ast, spec, name))


SIMPLIFY = (
    _as(SIMPLE, "collapse", lambda ast, _: collapse(ast)),
    _as(SIMPLE, "split_phases", lambda ast, _: split_phases(ast)),
)
EXPRESS = (
    _as(DOTS, "use_dots", lambda ast, to: use_dots(ast, to.machine.dots)),
    _as(LEGAL, "legalize", _legalize),
)


def rewrite(ast: UOp, machine: Machine, simplify: bool = True) -> Legalized:
    """The kernel for which Opts are chosen, checked and lowered."""
    to = Rewriting(machine)
    return Legalized(run_passes("codegen", (*(SIMPLIFY if simplify else ()), *EXPRESS), ast, to), to.written)
