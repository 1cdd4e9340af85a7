"""Tests of OPENCL run where there is such a device; elsewhere they are skipped, and pytest prints what to install."""

from __future__ import annotations

import pytest

from manygrad.errors import NoOpenCLError
from manygrad.runtime.devices.opencl.driver import devices


def missing() -> str:
    """What OPENCL lacks here; empty: nothing."""
    try:
        devices()
    except NoOpenCLError as error:
        return str(error)
    return ""


MISSING = missing()
needs_opencl = pytest.mark.skipif(bool(MISSING), reason=MISSING)
OPENCL = pytest.param("OPENCL", marks=needs_opencl)
