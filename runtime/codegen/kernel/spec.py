"""Spec of a kernel AST after each of its rewrites (`passes.py`): what the schedule makes, and what they add."""

from __future__ import annotations

from collections.abc import Mapping

from manygrad.runtime.codegen.kernel.transcendental import SELDOM, Lookup
from manygrad.runtime.codegen.target import Dot
from manygrad.schedule.spec import KERNEL
from manygrad.tensor.uop.ops import GroupOp, Ops
from manygrad.tensor.uop.spec import FLOAT, LIKE_FIRST, GraphSpec, also, plus, rule, sources, verify, without
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
    rule("CUSTOM is one of two values", Ops.CUSTOM,
         sources(4), FLOAT,
         ("a condition, two values of its type and what the second is made of",
          lambda u: u.arg == SELDOM and u.src[0].dtype.is_bool and u.src[1].dtype is u.src[3].dtype is u.dtype)),
    rule("CUSTOM looks up", Ops.CUSTOM,
         sources(1), FLOAT, LIKE_FIRST,
         ("a Lookup as arg", lambda u: isinstance(u.arg, Lookup) and all(type(v) is float for v in u.arg.values))),
)  # fmt: skip
_SIMPLE: GraphSpec = plus(KERNEL, *_INSTRUCTIONS)  # (a kernel may come with functions that are expanded already)
_DOTS: GraphSpec = plus(KERNEL, _DOT, *_INSTRUCTIONS)
_LEGAL: GraphSpec = also(
    without(_DOTS, Ops.EXP, Ops.LOG, Ops.SIN, Ops.POW),
    ("arithmetic in more than half precision", lambda u: not any(s.dtype.is_half for s in u.src)),
    but=[op for op in Ops if op not in GroupOp.ALU | {Ops.REDUCE} or op is Ops.WHERE],
)
FORMS: Mapping[str, GraphSpec] = {"simple": _SIMPLE, "dots": _DOTS, "legal": _LEGAL}


def kernel_spec(ast: UOp, form: str, after: str) -> None:
    """AssertionError where `ast` is not of the form that the pass `after` makes."""
    verify(ast, FORMS[form], after)
