"""The repository itself: the package list, generated pages, links, and what pages say of files."""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
import tomllib
from collections.abc import Sequence
from pathlib import Path

import pytest

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
NOT_PACKAGES = {"tests", "examples", "benchmarks", "docs", "build", "runs", "dist"}
# what modules change while a program runs: the process's own. A worker's is its Runtime's (runtime/runtime.py)
STATE = {
    "runtime/codegen/loops/tiles.py": {"NONE": "never changed"},
    "runtime/current.py": {"_installed": "which Runtime is current"},
    "tensor/deferred/arguments.py": {
        "LAZY": "places in the code, at most MOST_PLACES",
        "LEAVES": "places in the code, at most MOST_PLACES",
    },
    "tensor/deferred/trace.py": {
        "PUT_OFF": "traces of all threads that have put calls off",
        "WRITING": "those of them that will write",
        "OPTIMIZERS": "a number of each live optimiser, which an id would not be",
        "TREES": "what live threads' traces have been, which a forked child has to forget",
    },
    "tensor/deferred/counts.py": {"COUNTS": "what DEBUG=1 tells at the end"},
    "tensor/storage.py": {"before_change": "who is told before a tensor is written, filled at import"},
    "runtime/jit/tiny_jit.py": {"_made": "live TinyJits, which a forked child has to forget"},
    "runtime/engine/linear.py": {"capture": "the TinyJit that records"},
    "runtime/profile/profile.py": {"active": "who listens to events", "_NOTHING": "never changed"},
    "runtime/devices/opencl/driver.py": {"_opened": "the machine's driver"},
    "runtime/devices/opencl/bench.py": {"_streams": "a queue of that driver"},
    "tensor/engine.py": {"_engine": "what is registered, once"},
    "tensor/environment.py": {"REGISTRY": "of environment variables"},
    "tensor/function.py": {"TRACING": "the @functions that are being traced, under the lock"},
    "tensor/gradient.py": {"_NONE": "never changed"},
    "tensor/source.py": {
        "_shown": "names of files in lines of errors",
        "heirs": "who watches passes",
        "_heirs": "nodes with a line for the length of a schedule",
    },
    "tensor/uop/passes.py": {"observers": "who watches passes", "timers": "who watches passes"},
    "tensor/uop/serial.py": {"_CLASSES": "registry of what can be written down"},
    "tensor/uop/track.py": {"records": "who watches passes"},
    "tensor/uop/uop.py": {"_TABLE": "interned nodes", "_DEAD": "those to forget", "_draining": "those to forget"},
}


def folders_with_python() -> set[str]:
    found = set()
    for folder, names, files in os.walk(ROOT):
        names[:] = [
            n
            for n in names
            if not n.startswith((".", "__"))
            and not n.endswith(".egg-info")
            and os.path.exists(os.path.join(folder, n, "__init__.py"))
        ]
        if folder == ROOT:
            names[:] = [n for n in names if n not in NOT_PACKAGES]
        if "__init__.py" in files:
            found.add(".".join(["manygrad", *os.path.relpath(folder, ROOT).split(os.sep)]).removesuffix(".."))
    return {f.rstrip(".") for f in found}


def test_the_package_list_is_complete() -> None:
    with open(os.path.join(ROOT, "pyproject.toml"), "rb") as f:
        listed = tomllib.load(f)["tool"]["setuptools"]["packages"]
    assert set(listed) == folders_with_python()
    assert len(listed) == len(set(listed))


def test_generated_pages_are_up_to_date() -> None:
    clean = {k: v for k, v in os.environ.items() if k not in ("SPEC", "DEBUG", "DEVICE")}
    done = subprocess.run(
        [sys.executable, os.path.join(ROOT, "docs", "generate.py"), "--check"],
        capture_output=True,
        text=True,
        timeout=120,
        env=clean,
    )
    assert done.returncode == 0, done.stdout + done.stderr


PAGES = [Path(ROOT, n) for n in ("README.md", "CONTRIBUTING.md")] + sorted(Path(ROOT, "docs").rglob("*.md"))


def state_of(path: str) -> set[str]:
    """Names that functions of a module assign, and containers of it that are empty at first."""
    with open(path, encoding="utf-8") as f:
        tree = ast.parse(f.read())
    found = {name for node in ast.walk(tree) if isinstance(node, ast.Global) for name in node.names}
    for node in tree.body:
        if isinstance(node, ast.Assign | ast.AnnAssign) and node.value is not None:
            target = node.targets[0] if isinstance(node, ast.Assign) else node.target
            if isinstance(target, ast.Name) and ast.unparse(node.value) in ("{}", "[]", "set()", "dict()", "list()"):
                found.add(target.id)
    return found


def test_no_hidden_globals() -> None:
    """A new one belongs to the Runtime, or into the list above with a reason."""
    hidden = []
    for package in sorted(folders_with_python()):
        folder = os.path.join(ROOT, *package.split(".")[1:])
        for name in (n for n in os.listdir(folder) if n.endswith(".py")):
            path = os.path.relpath(os.path.join(folder, name), ROOT)
            hidden += [f"{path}: {n}" for n in state_of(os.path.join(ROOT, path)) if n not in STATE.get(path, {})]
    assert not hidden, hidden


def test_links_between_pages_lead_somewhere() -> None:
    for page in PAGES:
        for target in re.findall(r"\]\(([^)#]+)[^)]*\)", page.read_text(encoding="utf-8")):
            if not target.startswith("http"):
                assert (page.parent / target).exists(), f"{page} links to {target}"


# `schedule/stores/fusion.py`, `docs/stages/`; not `/tmp/x.py`
MENTIONED = re.compile(r"`((?:[\w.-]+/)+(?:[\w-]+\.(?:py|md|ll|txt))?)`")
# `RULES`, `LIMITS` and `Shared.value` in `schedule/stores/fusion.py`
DEFINED = re.compile(r"((?:`[\w.]+`(?:, | and ))*`[\w.]+`) in `([\w/]+\.py)`")


def test_files_that_the_pages_mention_exist() -> None:
    missing = [
        f"{page.relative_to(ROOT)}: {path}"
        for page in PAGES
        for path in MENTIONED.findall(page.read_text(encoding="utf-8"))
        if not (Path(ROOT) / path).exists()
    ]
    assert not missing, "\n".join(missing)


def defined_in(nodes: Sequence[ast.stmt]) -> dict[str, ast.stmt]:
    found: dict[str, ast.stmt] = {}
    for node in nodes:
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            found[node.name] = node
        elif isinstance(node, (ast.Assign, ast.AnnAssign)):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            found |= {n.id: node for t in targets for n in ast.walk(t) if isinstance(n, ast.Name)}
    return found


def is_defined(name: str, path: Path) -> bool:
    nodes: Sequence[ast.stmt] = ast.parse(path.read_text(encoding="utf-8")).body
    for part in name.split("."):
        node = defined_in(nodes).get(part)
        if node is None:
            return False
        nodes = node.body if isinstance(node, ast.ClassDef) else ()
    return True


def test_names_that_the_pages_mention_stand_in_the_files_they_say() -> None:
    asked = [
        (page, name, path)
        for page in PAGES
        for names, path in DEFINED.findall(page.read_text(encoding="utf-8"))
        for name in re.findall(r"[\w.]+", names.replace("` and `", " "))
    ]
    assert len(asked) > 100
    missing = [
        f"{page.relative_to(ROOT)}: {name} in {path}"
        for page, name, path in asked
        if not is_defined(name, Path(ROOT, path))
    ]
    assert not missing, "\n".join(missing)


def test_import_is_quick_and_leaves_ray_alone() -> None:
    code = "import sys, manygrad; assert 'ray' not in sys.modules and 'llvmlite' not in sys.modules, 'heavy import'"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr


def test_tests_that_start_processes_run_in_one(request: pytest.FixtureRequest) -> None:
    """Under `-n 2 --dist loadgroup` they have deadlines, and look for what is left behind. xdist writes the group
    behind a test's name."""
    if getattr(request.config.option, "loadgroup", False):
        assert request.node.nodeid.endswith("@processes"), "pytest-xdist has not read the groups of conftest.py"
        return
    command = [sys.executable, "-m", "pytest", "-n", "1", "--dist", "loadgroup", request.node.nodeid]
    environ = {k: v for k, v in os.environ.items() if not k.startswith("PYTEST_")}
    found = subprocess.run(command, cwd=ROOT, env=environ, capture_output=True, text=True, timeout=120)
    assert found.returncode == 0, found.stdout
