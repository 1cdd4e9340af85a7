"""Loaded kernels are bounded: those asked for least recently go."""

from __future__ import annotations

from typing import Any

import pytest

from manygrad.runtime.devices import loaded
from manygrad.runtime.devices.base import Builder
from manygrad.runtime.devices.loaded import LoadedKernels
from manygrad.tensor.dtype import dtypes
from manygrad.tensor.uop import Ops, UOp


def test_what_is_asked_for_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loaded, "LIMIT", 8)
    built: list[UOp] = []

    def build(ast: UOp) -> Any:
        built.append(ast)
        return object()

    kernels = LoadedKernels(Builder(build))
    asts = [UOp(Ops.SINK, dtypes.void, (UOp.const(dtypes.int32, n),)) for n in range(40)]
    for ast in asts:  # as of a program that makes new ones, and runs one in every step
        kernels.get(ast)
        kernels.get(asts[0])
    assert len(kernels.kernels) == 8 and built == asts
    kernels.get(asts[1])
    assert built == [*asts, asts[1]]
