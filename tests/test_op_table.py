"""docs/ops.md tells the truth: what it says we have is there and is tested, what it says we have not has a reason."""

from __future__ import annotations

import importlib.util
import os
import re
from typing import Any

from tests.nn.test_every_layer import LAYERS
from tests.tensor.test_ops import CASES

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))


def table() -> Any:
    spec = importlib.util.spec_from_file_location("op_table", os.path.join(ROOT, "docs", "op_table.py"))
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


TABLE = table()


def words_in_tests() -> set[str]:
    found: set[str] = set()
    for folder, _, names in os.walk(os.path.join(ROOT, "tests")):
        for name in names:
            if name.endswith(".py"):
                with open(os.path.join(folder, name), encoding="utf-8") as f:
                    found.update(re.findall(r"[A-Za-z_][A-Za-z_0-9]*", f.read()))
    return found


def test_nine_of_ten_operators_are_here() -> None:
    for section, (have, missing, _) in TABLE.counts().items():
        assert have >= 0.9 * (have + missing), f"torch.{section}: {have} of {have + missing}"


def test_what_is_missing_has_a_reason_and_nothing_else_has_one() -> None:
    why = TABLE.reasons()
    for section, names in TABLE.torch_names().items():
        assert [n for n in names if not TABLE.has(section, n) and n not in why] == []
        assert [n for n in names if TABLE.has(section, n) and n in why] == []


def test_every_operator_that_is_here_is_tested() -> None:
    """By a case of tests/tensor/cases, a layer of tests/nn/layers, by name elsewhere, or, of what works in
    place, with the operator that it is made of."""
    in_cases = {c.op for c in CASES} | {f"nn.{layer.name}" for layer in LAYERS}
    words = words_in_tests()
    untested = []
    for section, names in TABLE.torch_names().items():
        space = {"Tensor": "Tensor", "nn.functional": "functional", "nn": "nn"}[section]
        for n in names:
            plain = n.removesuffix("_") if section == "Tensor" else n
            if (
                TABLE.has(section, n)
                and not {f"{space}.{n}", f"{space}.{plain}", f"torch.{plain}"} & in_cases
                and n not in words
                and plain not in words
            ):
                untested.append(f"{section}.{n}")
    assert untested == []
