"""The emulated driver, in processes that tests start (PYTHONPATH=.:tests/cuda/shim)."""

import sys

from tests.cuda.driver import Emulated

sys.modules[__name__] = Emulated()  # type: ignore[assignment]
