"""The tables of the pages in docs/stages/, made of the lists that the code itself runs by."""

from __future__ import annotations

import ast
import inspect
from collections.abc import Callable, Iterable
from functools import cache, partial
from pathlib import Path
from types import ModuleType
from typing import Any

from manygrad import schedule
from manygrad.collectives.algorithms import ALGORITHMS, build
from manygrad.collectives.lower import lower
from manygrad.collectives.program import Collective
from manygrad.collectives.show import show_calls
from manygrad.launcher import options
from manygrad.launcher.controller.table import FITS
from manygrad.launcher.ranks import State
from manygrad.multi import rules as sharding
from manygrad.runtime.codegen.kernel import passes as codegen
from manygrad.runtime.devices import BACKENDS
from manygrad.runtime.engine import linear
from manygrad.schedule import lower as lowering
from manygrad.schedule import spec
from manygrad.schedule.order.order_spec import order_spec
from manygrad.schedule.stores import fusion
from manygrad.tensor import gradient
from manygrad.tensor.dtype import dtypes
from manygrad.tensor.uop import Ops

ROOT = Path(__file__).resolve().parents[1]
INSTALLED = Path(inspect.getfile(schedule)).resolve().parents[1]  # the package may stand elsewhere, in the same folders
PASSES: dict[str, tuple[ModuleType, Iterable[Any]]] = {
    "schedule": (lowering, lowering.PASSES),
    "codegen": (codegen, (*codegen.SIMPLIFY, *codegen.EXPRESS, *codegen.PARTS)),
}


def table(head: tuple[str, ...], rows: Iterable[Iterable[str]]) -> str:
    lines = [" | ".join(head), "|".join("---" for _ in head), *(" | ".join(row) for row in rows)]
    return "\n".join(f"|{line}|" if line.startswith("-") else f"| {line} |" for line in lines)


@cache
def docstring(path: str) -> str:
    """The first paragraph of a file's docstring, without the file's name before it; else that of its first class."""
    tree = ast.parse((ROOT / path).read_text(encoding="utf-8"))
    nodes = (tree, *(n for n in tree.body if isinstance(n, ast.ClassDef)))
    text = next((found for n in nodes if (found := ast.get_docstring(n))), "")
    head, _, rest = " ".join(text.split("\n\n")[0].split()).partition(": ")
    if head.lower() == Path(path).stem or head in named(tree):
        return rest[:1].upper() + rest[1:]
    return f"{head}: {rest}" if rest else head


def named(tree: ast.Module) -> set[str]:
    return {n.name for n in tree.body if isinstance(n, (ast.FunctionDef, ast.ClassDef))}


def sentence(text: str | None) -> str:
    """The first of a docstring."""
    assert text
    return " ".join(text.split("\n\n")[0].split()).partition(". ")[0].removesuffix(".")


def file_of(thing: Any) -> str:
    return str(Path(inspect.getfile(thing)).resolve().relative_to(INSTALLED))


def path_of_pass(stage: str, name: str) -> str:
    """The file of a pass: where the function of its name stands."""
    module, _ = PASSES[stage]
    return file_of(getattr(module, name))


# *** tables ***


def spec_of(p: Any) -> str:
    """The name of the spec that holds after a pass of the schedule."""
    others = {
        spec.stores_spec: "`STORED`, `LINEAR`",
        spec.items_spec: "`KERNEL`, `LINEAR`",
        order_spec: "`KERNEL`, `LINEAR`, edges (`order_spec`)",
        spec.linear_spec: "`LINEAR`",
    }
    if p.spec in others:
        return others[p.spec]
    return next(f"`{name}`" for name, value in vars(spec).items() if value is spec.GRAPHS[p.name] and name.isupper())


def schedule_passes() -> str:
    rows = ((f"`{p.name}`", f"`{(f := path_of_pass('schedule', p.name))}`", docstring(f), spec_of(p)) for p in
            lowering.PASSES)  # fmt: skip
    return table(("pass", "file", "what it does", "spec of what it leaves"), rows)


def codegen_passes() -> str:
    names = [p.name for p in PASSES["codegen"][1]]
    return table(
        ("pass", "file", "what it does"),
        ((f"`{n}`", f"`{(f := path_of_pass('codegen', n))}`", docstring(f)) for n in names),
    )


def gradient_rules() -> str:
    """Each rule of `tensor/gradient.py` as it is written there, a and b the sources of the op and y its value; of a
    function, what it says it does."""
    source = Path(inspect.getfile(gradient)).read_text(encoding="utf-8")
    entries = next(n.value for n in ast.parse(source).body if isinstance(n, ast.AnnAssign)
                   and isinstance(n.target, ast.Name) and n.target.id == "RULES")  # fmt: skip
    assert isinstance(entries, ast.Dict) and len(entries.keys) == len(gradient.RULES)
    by_rule: dict[str, list[str]] = {}
    for op, rule in zip(entries.keys, entries.values):
        assert isinstance(op, ast.Attribute)
        if isinstance(rule, ast.Lambda):
            text = ast.unparse(rule.body)
            for node, name in (("_t(u.src[0])", "a"), ("_t(u.src[1])", "b"), ("_t(u)", "y")):
                text = text.replace(node, name)
            text = f"`{text}`"
        else:
            text = sentence(getattr(gradient, ast.unparse(rule)).__doc__)
        by_rule.setdefault(text, []).append(f"`{op.attr}`")
    return table(("op", "gradients of its sources"), ((", ".join(ops), text) for text, ops in by_rule.items()))


def sharding_rules() -> str:
    by_rule: dict[Callable[..., Any], list[str]] = {}
    for op, rule in sharding.RULES.items():
        by_rule.setdefault(rule.place, []).append(op.name)
    rows = []
    for rule, ops in by_rule.items():
        of = "all elementwise ops" if rule is sharding.RULES[Ops.ADD].place else ", ".join(f"`{op}`" for op in ops)
        rows.append((f"`{rule.__name__}`", of, sentence(rule.__doc__)))
    return table(("rule", "ops", "what it says"), rows)


def fusion_rules() -> str:
    rows = [
        (name, r.name, r.why + ("" if getattr(r, "stores", True) else " (not stored)"))
        for name in ("RULES", "LIMITS", "SHARED")
        for r in getattr(fusion, name)
    ]
    return table(("table", "a value is stored by the rule", "because"), ((f"`{t}`", n, w) for t, n, w in rows))


def executors() -> str:
    by_function: dict[Callable[..., Any], list[Ops]] = {}
    for op, function in linear.pm_exec.items():
        by_function.setdefault(function, []).append(op)
    rows = ((", ".join(f"`{op.name}`" for op in sorted(ops, key=lambda op: op.value)), f"`{f.__name__}`")
            for f, ops in by_function.items())  # fmt: skip
    return table(("a CALL of", "gets its executor from"), rows)


def backends() -> str:
    paths = {kind: f"{module.removeprefix('manygrad.').replace('.', '/')}.py" for kind, module in BACKENDS.items()}
    return table(("device", "file", "what it is"), ((f"`{k}`", f"`{p}`", docstring(p)) for k, p in paths.items()))


def algorithms() -> str:
    rows = []
    for a in ALGORITHMS.values():
        path = f"collectives/algorithms/{a.name}.py"
        kinds = ", ".join(f"`{k}`" for k in a.kinds)
        rows.append((f"`{a.name}`", f"`{path}`", docstring(path), kinds, a.order))
    return table(("algorithm", "file", "what it does", "collectives", "order of sums"), rows)


def calls() -> str:
    program = build("direct", Collective("all_reduce", ranks=2, count=3), {0})
    body = lower(program, dtypes.float32, [0, 1], {0: "CPU:0"})
    return "\n".join(["```", *show_calls(body.linear, 1), "```"])


def transitions() -> str:
    """Those that lead to another state."""
    rows = []
    for state in State:
        to: dict[State, list[str]] = {}
        for (before, event), (after, _) in FITS.items():
            if before is state and after is not state:
                to.setdefault(after, []).append(f"`{event.__name__}`")
        rows.append((state.value, "; ".join(f"{', '.join(events)}: {after.value}" for after, events in to.items())))
    return table(("state of a rank", "event: the next state"), rows)


def files(*folders: str) -> str:
    paths = [p.relative_to(ROOT).as_posix() for folder in folders for p in sorted((ROOT / folder).glob("*.py"))]
    rows = ((f"`{p}`", docstring(p)) for p in paths if not p.endswith("__init__.py"))
    return table(("file", "what it holds"), rows)


FOLDERS = (
    "collectives",
    "collectives/lower",
    "collectives/transport",
    "launcher",
    "launcher/controller",
    "runtime/codegen/loops",
    "runtime/codegen/emit",
)
RUNTIME = ("", "/engine", "/jit", "/executors", "/exchange", "/agreement", "/profile")
TABLES: dict[str, Callable[[], str]] = {
    "passes of the schedule": schedule_passes,
    "passes of a kernel": codegen_passes,
    "gradient rules": gradient_rules,
    "sharding rules": sharding_rules,
    "fusion rules": fusion_rules,
    "executors": executors,
    "backends": backends,
    "algorithms": algorithms,
    "calls of an all-reduce": calls,
    "transitions": transitions,
    "launcher options": options.markdown,
    "files of runtime": partial(files, *(f"runtime{room}" for room in RUNTIME)),
    **{f"files of {folder}": partial(files, folder) for folder in FOLDERS},
}


def blocks() -> dict[str, str]:
    return {name: make() for name, make in TABLES.items()}
