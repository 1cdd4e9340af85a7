"""Type checkers see what scripts use: mypy and pyright, on a script outside of the repository and on the examples."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
SCRIPT = """\
import manygrad.nn.functional as F
from manygrad import Tensor, TinyJit, linalg, nn, world
from manygrad.nn import functional
from manygrad.nn.data import DataLoader, TensorDataset
from manygrad.nn.optim import AdamW
from manygrad.nn.optim.lr_scheduler import CosineAnnealingLR
from manygrad.nn.state import get_parameters, safe_save


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.hidden = nn.Linear(784, 64)
        self.out = nn.Linear(64, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.hidden(x))
        return functional.dropout(self.out(x), 0.1)


model = Net()
optimizer = AdamW(model.parameters(), lr=1e-3)
schedule = CosineAnnealingLR(optimizer, T_max=10)
loader = DataLoader(TensorDataset(Tensor.rand(64, 784), Tensor.randint(0, 10, (64,))), batch_size=16)


@TinyJit
def step(x: Tensor, y: Tensor) -> Tensor:
    optimizer.zero_grad()
    loss = F.cross_entropy(model(x), y)
    loss.backward()
    optimizer.step()
    return loss.realize()


for x, y in loader:
    loss: Tensor = step(x.to(world.devices), y)
    print(world.rank, float(loss.item()), linalg.inv(Tensor.eye(3)).shape, len(get_parameters(model)))
schedule.step()
safe_save(model.state_dict(), "model.safetensors")
"""
FAULTS = """\
from manygrad.nn import functional as F
from manygrad.nn.optim import SGD

SGD(1.5, learning_rate=0.1)
F.no_such_function(3)
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A user's folder that finds the package as one that is installed, whatever the checkout is called."""
    (tmp_path / "packages").mkdir()
    (tmp_path / "packages" / "manygrad").symlink_to(ROOT)
    (tmp_path / "train.py").write_text(SCRIPT)
    (tmp_path / "faults.py").write_text(FAULTS)
    return tmp_path


def pyright(folder: Path, mode: str, *include: str) -> list[str]:
    """Errors that pyright prints for files of `folder`."""
    if find_spec("pyright") is None:
        pytest.skip("pyright is not installed: pip install 'pyright[nodejs]'")
    config = {"extraPaths": ["packages"], "include": include, "typeCheckingMode": mode}
    (folder / "pyrightconfig.json").write_text(json.dumps(config))
    command = [sys.executable, "-m", "pyright", "--pythonpath", sys.executable, "--outputjson"]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=300)
    try:
        report = json.loads(done.stdout)
    except ValueError:
        pytest.skip(f"pyright cannot run here: {(done.stderr or done.stdout)[-500:]}")
    assert report["summary"]["filesAnalyzed"] >= len(include)
    found = report["generalDiagnostics"]
    return [f"{Path(d['file']).name}:{d['range']['start']['line'] + 1}: {d['message']}" for d in found]


def mypy(folder: Path, *files: Path, strict: bool = False) -> list[str]:
    """Errors that mypy prints for `files`, those inside of the package aside, as of one that is installed."""
    if find_spec("mypy") is None:
        pytest.skip("mypy is not installed: pip install mypy")
    (folder / "mypy.ini").write_text(
        f"[mypy]\nmypy_path = {folder / 'packages'}\nstrict = {strict}\nwarn_return_any = False\n"
        "[mypy-manygrad.*]\nfollow_imports = silent\n[mypy-pythonbible.*,mlxtend.*]\nignore_missing_imports = True\n"
    )
    command = [sys.executable, "-m", "mypy", "--config-file", "mypy.ini", "--cache-dir", str(folder / "cache")]
    done = subprocess.run([*command, *map(str, files)], cwd=folder, capture_output=True, text=True, timeout=600)
    assert done.returncode in (0, 1), done.stdout + done.stderr
    return [line for line in done.stdout.splitlines() if ": error:" in line]


def test_pyright_follows_a_users_script(folder: Path) -> None:
    assert pyright(folder, "strict", "train.py") == []
    found = pyright(folder, "strict", "faults.py")
    assert any("learning_rate" in e for e in found) and any("no_such_function" in e for e in found), found


def test_mypy_follows_a_users_script(folder: Path) -> None:
    assert mypy(folder, folder / "train.py", strict=True) == []
    found = mypy(folder, folder / "faults.py", strict=True)
    assert any("learning_rate" in e for e in found) and any("no_such_function" in e for e in found), found


def test_examples_have_types(folder: Path) -> None:
    shutil.copytree(ROOT / "examples", folder / "examples")
    assert pyright(folder, "standard", "examples") == []
    for scripts in (sorted((folder / "examples").glob("*.py")), sorted((folder / "examples" / "llm").glob("*.py"))):
        assert len(scripts) >= 2 and mypy(folder, *scripts) == []
