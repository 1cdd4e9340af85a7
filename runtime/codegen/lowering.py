"""From a kernel and its Opts to code, as passes: each Opt, then the loop tree, its instructions, their text.

    tile(0, 6) -> vectorize(1, 16) -> .. -> make_loops -> emit -> render

What an Opt does is shown as the loop tree that the Opts up to it give.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from manygrad.runtime.codegen.analysis.describe import Signature, signature
from manygrad.runtime.codegen.emit import spec as instructions
from manygrad.runtime.codegen.emit.lower import emit
from manygrad.runtime.codegen.loops import spec as loops
from manygrad.runtime.codegen.loops.build import build
from manygrad.runtime.codegen.loops.show import show as show_tree
from manygrad.runtime.codegen.loops.tree import every
from manygrad.runtime.codegen.lowered import LoweredProgram, show
from manygrad.runtime.codegen.opts import Opt, Opts, legal
from manygrad.runtime.codegen.opts.kinds import apply, in_order
from manygrad.runtime.codegen.opts.nest import LoopNest
from manygrad.tensor.uop.passes import Form, Pass, run_passes
from manygrad.tensor.uop.uop import UOp


@dataclass(frozen=True)
class Decided:
    """A kernel with some of its Opts applied."""

    sig: Signature
    opts: Opts
    nest: LoopNest

    def text(self) -> str:
        reason = legal(self.sig, self.opts)
        return show_tree(build(self.sig, self.nest)) if reason is None else f"(no loops without what follows: {reason})"


def _anything(made: Any, name: str) -> None:
    """No spec: an Opt is legal as one of its list, and a compiler reads the text."""


DECISIONS = Form("decisions", lambda d: len(d.opts), Decided.text)
TREE = Form("nodes", lambda tree: sum(1 for _ in every(tree.nodes)), show_tree)
PROGRAM = Form("instructions", lambda program: len(program.insts), show)
TEXT = Form("lines", lambda text: text.count("\n") + 1, str)

MAKE_LOOPS = Pass[str]("make_loops", lambda d, _: build(d.sig, d.nest), lambda made, _: loops.verify(made), TREE)
EMIT = Pass[str]("emit", emit, lambda made, _: instructions.verify(made), PROGRAM)


def opt_pass(opt: Opt) -> Pass[str]:
    def run(d: Decided, _: str) -> Decided:
        return replace(d, opts=(*d.opts, opt), nest=apply(opt, d.sig, d.nest))

    return Pass(repr(opt), run, _anything, DECISIONS)


def render_pass(render: Callable[[LoweredProgram], str]) -> Pass[str]:
    return Pass("render", lambda program, _: render(program), _anything, TEXT)


def lower(name: str, ast: UOp, opts: Opts, *passes: Pass[str]) -> Any:
    """What `passes` make of a kernel with its Opts."""
    sig = signature(ast)
    written = Decided(sig, (), LoopNest(sig.loops))
    return run_passes("codegen", (*map(opt_pass, in_order(opts)), *passes), written, name, DECISIONS)
