"""opts.md: the kinds of Opt and the decisions that choose them, from their docstrings."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import fields

from manygrad.runtime.codegen.choose import DECISIONS
from manygrad.runtime.codegen.opts import KINDS, Opt, Opts

HEAD = """# Opts

<!-- made by docs/generate.py from runtime/codegen/opts/ -->

One named decision each about how a kernel's loop nest is run, by the names of Halide and TVM where they have the
thing; a list of them is what [the compiler chooses](#how-they-are-chosen) or the search (`BEAM`) finds, `DEBUG=4`
prints, and [performance](performance.md) explains. They are applied in the order of this page. Numbers: ids of loops
and reduce ranges, slots of arguments, sizes. The order in which a reduction is added up follows from those marked so;
all others change only when and where things are computed.

| Opt | it changes the order of sums |
|---|---|
"""


CHOSEN = """## How they are chosen

By the decisions below, in this order, from the kernel's shapes and strides and from what the machine is
(`runtime/codegen/choose/`; what they weigh, in which unit, and which benchmark shows it: `runtime/codegen/cost.py`).
`DEBUG=4` prints for each kernel which decision gave which Opt, `explain(ast, machine)` of `runtime/codegen/pipeline.py`
gives it as text; `tests/runtime/codegen/golden/choices.txt` shows it for some kernels.

| decision | when, and why |
|---|---|
"""


def signature(kind: type[Opt]) -> str:
    return f"{kind.kind}({', '.join(f.name for f in fields(kind))})"


def section(kind: type[Opt]) -> str:
    text, _, example = inspect.getdoc(kind).partition("before:")  # type: ignore[union-attr]
    assert example, f"{kind.kind}: its docstring shows no loops before and after"
    prose = " ".join(text.split("\n\n", 1)[0].split())
    rest = "".join(f"\n\n{' '.join(part.split())}" for part in text.split("\n\n")[1:] if part.strip())
    return f"## {signature(kind)}\n\n{prose}{rest}\n\n```\nbefore:{example.rstrip()}\n```\n"


def decision(made: Callable[..., Opts]) -> str:
    assert made.__doc__, f"{made.__name__} has no docstring"
    return f"| `{made.__name__}` | {' '.join(made.__doc__.split())} |\n"


def page() -> str:
    rows = [
        f"| [`{signature(k)}`](#{k.kind}{'-'.join(f.name for f in fields(k))}) | {'yes' if k.changes_sums else ''} |"
        for k in KINDS
    ]
    return (
        HEAD
        + "\n".join(rows)
        + "\n\n"
        + CHOSEN
        + "".join(map(decision, DECISIONS))
        + "\n"
        + "\n".join(map(section, KINDS))
    )
