"""The thread team of this process, which runs the kernels of all `CPU:i`, and how many threads it has."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from functools import cache

from manygrad.native.compiler import compiler
from manygrad.native.processor import cores
from manygrad.native.team import MAX_THREADS, Team
from manygrad.runtime.codegen.lowered import SCRATCH_BYTES
from manygrad.runtime.devices.cpu.objects import OBJECTS, version
from manygrad.tensor.environment import THREADS


def wanted_threads() -> int:
    """THREADS, or the cores this process may use."""
    n = THREADS.value
    return int(min(n if n > 0 else cores(), MAX_THREADS))


@cache
def team() -> Team:
    return Team(link, wanted_threads, SCRATCH_BYTES)


def link(ir: str, names: Sequence[str]) -> dict[str, int]:
    """As `Compiler.functions`, with the object code kept on disk."""
    key = hashlib.sha256(ir.encode() + version()).digest()
    code = OBJECTS.get(key)
    if code is None:
        code = compiler().object_code(ir)
        OBJECTS.put(key, code)
    return compiler().load(code, names)
