"""What was pickled while `manygrad.nn` stood in `manygrad.tensor.nn` still loads, as objects of the same classes."""

from __future__ import annotations

import pickle
import subprocess
import sys

from manygrad import Tensor, nn


def test_a_pickle_with_old_names_loads_in_a_new_process() -> None:
    model = nn.Sequential(nn.Linear(2, 3), nn.ReLU())
    for p in model.parameters():
        p.assign(Tensor.ones(*p.shape)).realize()
    new = pickle.dumps(model, protocol=0)
    old = new.replace(b"cmanygrad.nn.", b"cmanygrad.tensor.nn.")
    assert old.count(b"manygrad.tensor.nn.") >= 3
    code = (
        "import pickle, sys\nmodel = pickle.load(sys.stdin.buffer)\nfrom manygrad import Tensor, nn\n"
        "assert type(model) is nn.Sequential and type(model[0]) is nn.Linear, model\n"
        "assert model(Tensor([[1.0, 2.0]])).tolist() == [[4.0] * 3]"
    )
    done = subprocess.run([sys.executable, "-c", code], input=old, capture_output=True, timeout=120)
    assert done.returncode == 0, done.stderr.decode()


def test_a_module_under_its_old_name_is_the_same_module() -> None:
    code = (
        "import importlib, sys, manygrad.nn.functional as F, manygrad.linalg\nfrom manygrad.nn.data import DataLoader\n"
        "from manygrad.tensor.nn.data import DataLoader as Same\nimport manygrad.tensor.nn.optim.lr_scheduler.base\n"
        "assert DataLoader is Same\n"
        "for old in [n for n in sys.modules if n.startswith('manygrad.tensor.nn')]:\n"
        "    new = old.replace('tensor.', '', 1)\n"
        "    assert sys.modules[old] is sys.modules[new] and sys.modules[new].__spec__.name == new, old\n"
        "importlib.reload(F)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
