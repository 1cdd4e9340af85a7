"""Kernels of a program that makes new ones without end: they go, and what still runs them keeps them."""

from __future__ import annotations

import gc
import subprocess
import sys
from typing import Any

import numpy as np
import pytest

from manygrad import Tensor, TinyJit
from manygrad.native import compiler as native
from manygrad.runtime.devices.base import Builder
from manygrad.runtime.devices.compile import loaded
from manygrad.runtime.devices.cpu.kernel import CPUKernel
from manygrad.schedule import cache
from manygrad.tensor.dtype import dtypes
from manygrad.tensor.uop import Ops, UOp

KEPT = 8


@pytest.fixture(autouse=True)
def few(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cache, "LIMIT", KEPT)
    monkeypatch.setattr(loaded, "LIMIT", KEPT)
    monkeypatch.setattr(native, "LIBRARIES", 3)


def scaled(x: Tensor, number: float) -> float:
    return float((x * number).sum().item())


def live(kind: type) -> int:
    gc.collect()
    return sum(isinstance(o, kind) for o in gc.get_objects())


def test_kernels_of_other_numbers_go() -> None:
    x = Tensor(np.arange(24, dtype=np.float32)).realize()
    for n in range(3 * KEPT):  # (older ones of this process go first)
        scaled(x, 0.5 + n)
    kernels, libraries, jits = (live(k) for k in (CPUKernel, native.Linked, native.llvm.orcjit.LLJIT))
    for n in range(6 * KEPT):
        assert scaled(x, 100.5 + n) == 276 * (100.5 + n)
    spread = 2  # more or less of them, over JITs and caches
    assert live(CPUKernel) <= kernels + spread and live(native.Linked) <= libraries + spread
    assert live(native.llvm.orcjit.LLJIT) <= jits + spread


def test_what_runs_a_kernel_keeps_it() -> None:
    """Captured, they run on while others of their JIT are unloaded; asked for again, they are loaded again."""
    x = Tensor(np.arange(24, dtype=np.float32)).realize()

    @TinyJit
    def step(t: Tensor) -> Tensor:
        return ((t * 3 + 1).sum() * 2).realize()

    for n in range(4):
        assert step(Tensor(np.full(24, n, np.float32))).item() == 2 * (72 * n + 24)
    for n in range(6 * KEPT):
        scaled(x, 200.5 + n)
        if n % KEPT == 0:
            gc.collect()
        assert step(Tensor(np.full(24, n, np.float32))).item() == 2 * (72 * n + 24)
    assert scaled(x, 200.5) == 276 * 200.5


def test_what_is_asked_for_stays() -> None:
    built: list[UOp] = []

    def build(ast: UOp) -> Any:
        built.append(ast)
        return object()

    kernels = loaded.LoadedKernels(Builder(build))
    asts = [UOp(Ops.SINK, dtypes.void, (UOp.const(dtypes.int32, n),)) for n in range(5 * KEPT)]
    for ast in asts:  # as of a program that makes new ones, and runs one in every step
        kernels.get(ast)
        kernels.get(asts[0])
    assert len(kernels.kernels) == KEPT and built == asts
    kernels.get(asts[1])
    assert built == [*asts, asts[1]]


ENDS = """
import threading, time
from manygrad import Tensor

def work(n):
    while True:
        (Tensor.ones(512, 512) * (n := n + 1.5)).sum().item()

for n in range(3):
    threading.Thread(target=work, args=(100 * n,), daemon=True).start()
time.sleep(1.5)
"""


def test_the_end_of_the_interpreter_unloads_nothing_that_runs() -> None:
    done = subprocess.run([sys.executable, "-c", ENDS], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, (done.returncode, done.stderr)
