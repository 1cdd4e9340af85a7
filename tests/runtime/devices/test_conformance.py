"""Every backend, and the worked example of CONTRIBUTING.md, which is this folder's `tiny.py`."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

import tests.cuda.install  # noqa: F401
from manygrad.runtime.devices import BACKENDS, get_device
from tests.opencl import OPENCL
from tests.runtime.devices.conformance import CHECKS


@pytest.mark.parametrize("check", CHECKS, ids=lambda c: c.__name__)
@pytest.mark.parametrize("kind", ["CPU", OPENCL, "CUDA", "PYTHON", "TINY"])
def test_conformance(kind: str, check: Callable[[str], None], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(BACKENDS, "TINY", "tests.runtime.devices.tiny")
    check(f"{kind}:77")


def test_the_worked_example_is_the_one_that_is_tested() -> None:
    page = (Path(__file__).parents[3] / "CONTRIBUTING.md").read_text(encoding="utf-8")
    assert Path(__file__).with_name("tiny.py").read_text(encoding="utf-8") in page


def test_kernels_are_shared_and_memory_is_not(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(BACKENDS, "TINY", "tests.runtime.devices.tiny")
    a, b = get_device("TINY:1"), get_device("TINY:2")
    assert a.kernels is b.kernels and a.memory is not b.memory and a.queue is not b.queue
    with pytest.raises(NotImplementedError, match="no host address"):
        a.address(a.alloc(64))
