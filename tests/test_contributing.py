"""The worked examples of CONTRIBUTING.md: each is applied to a copy of the package, and what it adds is tried there.
(That of a backend is a file of its own: `runtime/devices/test_conformance.py`.)"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PAGE = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
BLOCK = re.compile(r"^( *)```(diff|python)\n(.*?)^ *```$", re.MULTILINE | re.DOTALL)

# section -> a script, which is run with the section's changes
TRIED = {
    "Add an op": """
        import numpy as np
        from manygrad import Tensor
        x = Tensor(np.array([-3.0, 0.5, 2.0], np.float32))
        x.requires_grad = True
        y = x.bent_identity()
        want = (np.sqrt(x.numpy() ** 2 + 1) - 1) / 2 + x.numpy()
        np.testing.assert_allclose(y.numpy(), want, rtol=1e-6)
        y.sum().backward()
        np.testing.assert_allclose(x.grad.numpy(), x.numpy() / (2 * np.sqrt(x.numpy() ** 2 + 1)) + 1, rtol=1e-6)
    """,
    "Add an Opt": """
        import numpy as np
        from manygrad.runtime.codegen.analysis.describe import signature
        from manygrad.runtime.codegen.opts import canonical, legal, named, neighbours
        from tests.runtime.codegen.kernels import gemm, run
        from manygrad.runtime.devices import get_device
        ast, whole = gemm(6, 20, 8), named("whole", 0)
        sig = signature(ast)
        assert repr(whole) == "whole(0)" and canonical(sig, (whole,)) == (named("tile", 0, 6),)
        assert "no fixed number of at most 16" in legal(sig, (named("whole", 1),))
        assert (named("tile", 0, 6),) in neighbours(sig, (), 4)
        a, b = (np.random.default_rng(0).random(s, np.float32) for s in ((6, 8), (8, 20)))
        kernel = get_device("CPU").compile_with(ast, (whole,))
        assert kernel.opts == (whole,)
        out = np.zeros((6, 20), np.float32)
        device = get_device("CPU")
        handles = [device.alloc(x.nbytes) for x in (out, a, b)]
        for handle, x in zip(handles, (out, a, b)):
            device.copyin(handle, x.data)
        kernel(handles, wait=True)
        device.copyout(out.data, handles[0])
        np.testing.assert_allclose(out, a @ b, rtol=1e-5)
    """,
    "Add a decision": """
        from manygrad.runtime.codegen.opts import named
        from manygrad.runtime.codegen.pipeline import explain, prepare
        from tests.runtime.codegen.corpus import MACHINES
        from tests.runtime.codegen.kernels import add, load, loop, mul, sink, store
        from manygrad.tensor.uop.ops import Ops
        c, i = loop(3, 0), loop(1000, 1)
        at = add(mul(c, 1000), i)
        ast = sink(store(0, at, load(1, at).alu(Ops.MUL, load(2, c)), c, i))
        shown = explain(ast, MACHINES["avx2"]).splitlines()
        assert [line.split() for line in shown if "threes" in line] == [["write_out_threes", "tile(0,", "3)"]]
        assert named("tile", 0, 3) in prepare(ast, MACHINES["avx2"]).opts
    """,
    "Add a pass to the schedule": """
        import numpy as np
        from manygrad import Context, Tensor
        from manygrad.tensor.uop import track
        x = Tensor(np.arange(6, dtype=np.float32)).realize()
        with Context(TRACK_MATCH_STATS=1, SCACHE=0):
            y = x.maximum(x) + 1
            np.testing.assert_array_equal(y.numpy(), np.arange(6) + 1)
        (made,) = [r for r in track.records if r.of_pass == "drop_maxima" and r.rule == "of_one"]
        assert made.before.op.name == "MAX" and made.after is made.before.src[0]
    """,
    "Add a collective": """
        from manygrad.collectives.algorithms import build
        from manygrad.collectives.checker import check
        from manygrad.collectives.cost import cost_s
        from manygrad.collectives.program import Collective
        for ranks in range(1, 18):
            for root in {0, ranks - 1}:
                check(build("chain", Collective("broadcast", ranks, 8, root=root)))
        assert cost_s("chain", "broadcast", 1 << 20, 8) > cost_s("chain", "broadcast", 1 << 20, 2) > 0
    """,
    "Add an option of the launcher": """
        import os, subprocess, sys
        from pathlib import Path
        from manygrad.launcher.command_line import parse
        from manygrad.launcher.options import markdown
        assert (parse(["t.py", "--nice", "3"], {}).nice, parse(["t.py"], {"MANYGRAD_NICE": "4"}).nice) == (3, 4)
        assert "| `--nice N` | `MANYGRAD_NICE` | count | niceness of the workers" in markdown()
        Path("nice.py").write_text("import os; print('niceness', os.nice(0), flush=True)")
        command = [sys.executable, "-m", "manygrad.launcher.cli", "nice.py", "--nodes", "1", "--run-dir", "run"]
        ran = subprocess.run([*command, "--nice", "3"], capture_output=True, text=True, timeout=200)
        assert f"niceness {os.nice(0) + 3}" in ran.stdout, ran.stdout + ran.stderr
    """,
}


def sections() -> dict[str, str]:
    """The page's sections, by heading."""
    parts = re.split(r"^## (.*)\n", PAGE, flags=re.MULTILINE)
    return dict(zip(parts[1::2], parts[2::2]))


def changes(section: str) -> Iterator[tuple[str, str, list[str]]]:
    """(kind, path, lines) of each change of a section; a program that is no file of the package is none."""
    for indent, kind, text in BLOCK.findall(section):
        first, *lines = [line.removeprefix(indent) for line in text.splitlines()]
        if (path := re.fullmatch(r" ?# ([\w/]+\.py)", first)) is not None:
            yield kind, path[1], lines


def changed(before: list[str], lines: list[str]) -> list[str]:
    """A file with a diff's lines: what it says is there is looked for, one line after the other; what it adds stands
    after the line before it, or before the first one."""
    made, at, waiting = list(before), 0, list[str]()
    for line in lines:
        mark, text = line[:1], line[1:]
        if mark == "+" and at == 0:
            waiting.append(text)
        elif mark == "+":
            made.insert(at, text)
            at += 1
        else:
            at = made.index(text, at) + 1
            made[at - 1 : at - 1] = waiting
            at, waiting = at + len(waiting), []
            if mark == "-":
                at -= 1
                del made[at]
    assert not waiting, "a diff says where its lines go"
    return made


def apply(section: str, package: Path) -> int:
    """How many changes there are."""
    count = 0
    for kind, path, lines in changes(section):
        file = package / path
        assert file.exists() == (kind == "diff"), f"{path} {'is there' if file.exists() else 'is not there'}"
        found = lines if kind == "python" else changed(file.read_text(encoding="utf-8").splitlines(), lines)
        file.write_text("\n".join(found) + "\n", encoding="utf-8")
        count += 1
    return count


def test_each_worked_example_is_tried() -> None:
    added = [name for name in sections() if name.startswith("Add ")]
    assert added == [*list(TRIED)[:1], "Add a backend", *list(TRIED)[1:]]


def test_a_diff_that_does_not_fit_is_told() -> None:
    before = ["a = (", "    1,", ")", "b = 2"]
    assert changed(before, ["+# first", " a = (", "+    0,", "     1,", "-b = 2", "+b = 3"]) == [
        *("# first", "a = (", "    0,", "    1,", ")", "b = 3"),
    ]
    for wrong in ([" c = 1", "+d"], [" b = 2", " a = ("], ["-b = 1"]):
        with pytest.raises(ValueError, match="not in list"):
            changed(before, wrong)
    with pytest.raises(AssertionError, match="where its lines go"):
        changed(before, ["+d"])


@pytest.mark.parametrize("name", TRIED)
def test_the_worked_example_works(name: str, tmp_path: Path) -> None:
    package = tmp_path / "manygrad"
    shutil.copytree(ROOT, package, ignore=shutil.ignore_patterns(".*", "__pycache__", "build", "runs", "shared"))
    assert apply(sections()[name], package) > 0
    environ = {**os.environ, "PYTHONPATH": str(tmp_path), "SPEC": "1"}
    script = f"import sys; sys.path.insert(0, {str(package)!r})\n{textwrap.dedent(TRIED[name])}"
    command = [sys.executable, "-P", "-c", script]
    ran = subprocess.run(command, cwd=tmp_path, env=environ, capture_output=True, text=True, timeout=300)
    assert ran.returncode == 0, ran.stdout + ran.stderr
