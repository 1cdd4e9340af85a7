"""How the code is laid out: names that stand once, sizes of functions and classes, and imports without circles."""

from __future__ import annotations

import ast
import re
import subprocess
from collections import defaultdict
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import manygrad
from manygrad.tensor.source import is_own

ROOT = Path(__file__).resolve().parent.parent
LINES, METHODS, ATTRIBUTES = 80, 25, 15
# class names that stand twice, and why
TWICE = {
    "Buffer": "PyTorch's name for a buffer of a module, and the memory of a device",
    "Context": "PyTorch's argument of Function.forward, and tinygrad's settings for a block of code",
}
# circles of imports, by a module of each: how many modules it has at most
CIRCLES = {
    "manygrad.tensor.tensor": 73,  # Tensor has its functions from mixins, whose annotations name it
    "manygrad.tensor.uop.uop": 3,  # a node keeps its tables, which are told of nodes
}


@cache
def modules() -> dict[str, ast.Module]:
    """The package's files, by path; examples, tests, docs and benchmarks are none of it."""
    listed = subprocess.run(["git", "ls-files", "*.py"], cwd=ROOT, capture_output=True, text=True, timeout=60).stdout
    paths = listed.split() or [str(p.relative_to(ROOT)) for p in ROOT.rglob("*.py")]
    outside = ("tests/", "docs/", "benchmarks/", "examples/", "build/", ".")
    found = {p: ast.parse((ROOT / p).read_text()) for p in paths if not p.startswith(outside) and (ROOT / p).exists()}
    assert len(found) > 400
    return found


def of_kind(kind: type[ast.AST] | tuple[type[ast.AST], ...]) -> Iterator[tuple[str, ast.AST]]:
    return ((path, node) for path, tree in modules().items() for node in ast.walk(tree) if isinstance(node, kind))


def test_a_class_name_stands_once() -> None:
    found: dict[str, list[str]] = defaultdict(list)
    for path, node in of_kind(ast.ClassDef):
        assert isinstance(node, ast.ClassDef)
        found[node.name].append(path)
    assert {name: paths for name, paths in found.items() if len(paths) > 1 and name not in TWICE} == {}
    assert [name for name in TWICE if len(found[name]) < 2] == []


# where a lane is meant, as docs/glossary.md has the word: an element of a vector
LANES_OF_VECTORS = ("runtime/codegen/", "runtime/devices/tune/tune.py", "runtime/profile/roofline.py")


def defined(node: ast.AST) -> list[str]:
    """The names that a node gives to things."""
    match node:
        case ast.ClassDef() | ast.FunctionDef() | ast.AsyncFunctionDef():
            return [node.name]
        case ast.Name(ctx=ast.Store()):
            return [node.id]
        case ast.Attribute(ctx=ast.Store()):
            return [node.attr]
        case ast.arg():
            return [node.arg]
    return []


def test_a_word_of_the_glossary_means_one_thing() -> None:
    glossary = (ROOT / "docs" / "glossary.md").read_text().splitlines()
    listed = {w.strip().lower() for line in glossary if line.startswith("| ") for w in line.split("|")[1].split(",")}
    found = []
    for path, node in of_kind((ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef, ast.Name, ast.Attribute, ast.arg)):
        for name in defined(node):
            is_lane = re.search(r"(?:^|_)lanes?(?:_|$)|^LANES?|Lanes?(?:[A-Z]|$)", name) is not None
            if (is_lane and not path.startswith(LANES_OF_VECTORS)) or (name == "Rule" and path != "tensor/uop/spec.py"):
                found.append(f"{path}:{node.lineno}: {name}")  # type: ignore[attr-defined]
    assert found == [] and {"lane", "rule", "work item", "track", "link", "socket"} <= listed


def test_functions_fit_on_a_page() -> None:
    long = []
    for path, node in of_kind((ast.FunctionDef, ast.AsyncFunctionDef)):
        assert isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.end_lineno is not None
        if (lines := node.end_lineno - node.lineno + 1) > LINES:
            long.append(f"{path}: {node.name} has {lines} lines")
    assert long == []


def attributes(node: ast.ClassDef) -> set[str]:
    """Fields of the class, and what its methods assign to `self`."""
    fields = {x.target.id for x in node.body if isinstance(x, ast.AnnAssign) and isinstance(x.target, ast.Name)}
    assigned = {
        x.attr
        for x in ast.walk(node)
        if isinstance(x, ast.Attribute) and isinstance(x.ctx, ast.Store) and ast.unparse(x.value) == "self"
    }
    return fields | assigned


def test_classes_are_small_or_say_why() -> None:
    """A class over the limits has a sentence `Large: why.` in its docstring, and no other one has."""
    silent, small = [], []
    for path, node in of_kind(ast.ClassDef):
        assert isinstance(node, ast.ClassDef)
        methods = sum(isinstance(x, ast.FunctionDef | ast.AsyncFunctionDef) for x in node.body)
        says_why = re.search(r"\bLarge: [^.]{8,}\.", ast.get_docstring(node) or "") is not None
        is_large = methods > METHODS or len(attributes(node)) > ATTRIBUTES
        if is_large and not says_why:
            silent.append(f"{path}:{node.name}: {methods} methods, {len(attributes(node))} attributes")
        if says_why and not is_large:
            small.append(f"{path}:{node.name}")
    assert silent == []
    assert small == [], "no longer large: take the sentence out"


def test_docstrings_begin_with_what_they_are_about() -> None:
    """No sentence without a subject, as "Of one device" or "That of the worker" is."""
    kinds = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    odd = []
    for path, node in of_kind(kinds):
        assert isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef)
        if re.match(r"(Of|That of|Those of|Those that)\b", ast.get_docstring(node) or ""):
            odd.append(f"{path}: {getattr(node, 'name', 'the file')}")
    assert odd == []


def test_threads_belong_to_scopes() -> None:
    """An error in one that is started elsewhere would be a line on stderr, and nobody would wait for its end."""
    starters = ("threading.Thread", "threading.Timer", "Thread", "Timer")
    found = []
    for path, node in of_kind((ast.Call, ast.ClassDef)):
        used = [node.func] if isinstance(node, ast.Call) else node.bases if isinstance(node, ast.ClassDef) else []
        found += [f"{path}:{u.lineno}" for u in used if ast.unparse(u) in starters]
    assert [f for f in found if not f.startswith("tensor/threads.py:")] == [] and len(found) == 1


# locks that a thread cannot take twice, by file, and why a destructor does not find one that its own thread has taken
PLAIN_LOCKS = {
    "collectives/transport/arena.py": "nothing is collected while it is held",
    "collectives/transport/endpoint.py": "only the control channel aborts, and only the owner closes",
    "runtime/devices/opencl/kernel.py": "who finds it taken goes on without",
    "tensor/storage.py": "nothing is made while it is held",
    "tensor/threads.py": "destructors start and end no threads",
    "tensor/uop/table.py": "nothing is made while it is held",
}


def test_locks_can_be_taken_twice_or_say_why() -> None:
    """A garbage collection while one is held runs destructors, which may use tensors, in the same thread."""
    found = {path for path, node in of_kind(ast.Call) if ast.unparse(node).removeprefix("threading.") == "Lock()"}
    assert found == PLAIN_LOCKS.keys()


def imports() -> dict[str, set[str]]:
    """For each module those that it imports when it is loaded, or for its annotations (TYPE_CHECKING)."""
    names = {("manygrad/" + p).removesuffix(".py").removesuffix("/__init__").replace("/", "."): p for p in modules()}
    found: dict[str, set[str]] = {name: set() for name in names}

    def visit(module: str, node: ast.AST) -> None:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.ImportFrom):
                base = child.module or ""
                if child.level:
                    package = module if names[module].endswith("__init__.py") else module.rpartition(".")[0]
                    above = package.split(".")[: len(package.split(".")) - child.level + 1]
                    base = ".".join([*above, *([base] if base else [])])
                for a in child.names:
                    found[module] |= {n for n in (f"{base}.{a.name}", base) if n in names and n != module}
                    if f"{base}.{a.name}" in names:  # a module of a package: of the package itself it wants nothing
                        found[module].discard(base)
            elif isinstance(child, ast.Import):
                found[module] |= {a.name for a in child.names if a.name in names}
            elif not isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef):
                visit(module, child)

    for name, path in names.items():
        visit(name, modules()[path])
    return found


def circles(graph: dict[str, set[str]]) -> list[set[str]]:
    """Sets of modules of which each can be reached from each other one."""

    def reached(start: str) -> set[str]:
        seen: set[str] = set()
        todo = [start]
        while todo:
            for n in graph[todo.pop()] - seen:
                seen.add(n)
                todo.append(n)
        return seen

    all_reached = {n: reached(n) for n in graph}
    found: list[set[str]] = []
    for n, others in all_reached.items():
        if n in others and not any(n in c for c in found):
            found.append({m for m in others if n in all_reached[m]})
    return found


def test_imports_have_no_circles() -> None:
    assert circles({"a": {"b"}, "b": {"c"}, "c": {"a"}, "d": {"a"}}) == [{"a", "b", "c"}]
    found = circles(imports())
    assert [sorted(c) for c in found if not any(n in c and len(c) <= most for n, most in CIRCLES.items())] == []
    assert len(found) == len(CIRCLES), "one is gone: take it off the list"


def test_lines_of_the_package_are_not_the_users() -> None:
    """A folder or file of the package whose lines count as a user's would be named in errors in place of the script."""
    package = Path(manygrad.__file__).parent  # which is elsewhere than the checkout where it was installed from there
    users = {p for p in modules() if not is_own(str(package / p))}
    assert users == set()
    for outside in ("examples/train_gpt.py", "tests/test_house.py", "train.py", "nn_train.py"):
        assert not is_own(str(package / outside)), outside
