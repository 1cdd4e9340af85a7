"""What is kept on disk is not used after a change of any code that took part in making it."""

from __future__ import annotations

import ast
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from manygrad.tensor.code import FOLDERS, ROOT, digest_of, files

NO_PART = {"errors.py", "tensor/__init__.py", "runtime/__init__.py"}  # names of errors; a docstring each


def imported(path: Path) -> Iterator[str]:
    """The modules of ours that a module imports, wherever it does."""
    tree = ast.parse(path.read_text())
    for_types = [n for n in ast.walk(tree) if isinstance(n, ast.If) and "TYPE_CHECKING" in ast.dump(n.test)]
    left_out = {id(n) for block in for_types for n in ast.walk(block)}
    for n in ast.walk(tree):
        names = [a.name for a in n.names] if isinstance(n, ast.Import) else []
        if isinstance(n, ast.ImportFrom):
            assert not n.level, path
            names = [n.module or "", *(f"{n.module}.{a.name}" for a in n.names)]
        for name in names if id(n) not in left_out else []:
            at = ROOT / name.removeprefix("manygrad.").replace(".", "/")
            for found in (at.with_suffix(".py"), at / "__init__.py"):
                if name.startswith("manygrad.") and found.exists():
                    yield str(found.relative_to(ROOT))


def test_all_modules_that_take_part_are_in_it() -> None:
    known = list(files())
    assert len(known) == len(set(known))
    todo, reached = [f for f in known if f.endswith(".py")], set(known)
    while todo:
        found = set(imported(ROOT / todo.pop())) - reached
        reached |= found
        todo += found
    assert reached - set(known) <= NO_PART


@pytest.mark.parametrize(
    "changed",
    [
        "collectives/algorithms/ring.py",
        "tensor/dtype.py",
        "tensor/environment.py",
        "tensor/uop/symbolic.py",
        "native/ir/copy.ll",
    ],
)
def test_a_change_of_one_is_another_version(changed: str, tmp_path: Path) -> None:
    for name in files():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(ROOT / name, tmp_path / name)
    assert digest_of(tmp_path) == digest_of(ROOT)
    with (tmp_path / changed).open("a") as f:
        f.write("# changed\n")
    assert digest_of(tmp_path) != digest_of(ROOT)
    assert not set(FOLDERS) & {"launcher", "tensor/ops"}  # (which may change as they like)
