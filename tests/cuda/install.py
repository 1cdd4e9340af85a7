"""Which CUDA the tests run on: a GPU where there is one, else emulated ones."""

from __future__ import annotations

import importlib
import sys
from typing import Any

import pytest

from tests.cuda.driver import Emulated


def _real() -> bool:
    try:
        own: Any = importlib.import_module("cuda.bindings.driver")
        return not isinstance(own, Emulated) and int(own.cuInit(0)[0]) == 0 and own.cuDeviceGetCount()[1] > 0
    except Exception:  # (cuda-bindings has no class of its own for a driver that is not installed)
        return False


REAL = _real()
if not REAL and "cuda.bindings.driver" not in sys.modules:  # (for good: devices that are open keep what they have)
    sys.modules["cuda.bindings.driver"] = Emulated()  # type: ignore[assignment]

emulated = pytest.mark.skipif(REAL, reason="a GPU is there: nothing is emulated")


def emulator() -> Emulated:
    """The emulated driver of this process."""
    found = sys.modules["cuda.bindings.driver"]
    assert isinstance(found, Emulated)
    return found
