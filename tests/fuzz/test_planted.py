"""The fuzzer of kernels finds a code generator that is wrong: faults that are planted here, each within seconds."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any
from unittest.mock import patch

import pytest

from manygrad import Context
from manygrad.runtime.codegen.analysis.affine import TileAnalysis
from manygrad.runtime.codegen.emit import memory, stores, sums
from manygrad.runtime.codegen.emit.emission import Emission
from manygrad.runtime.codegen.loops.tiles import Tiler
from manygrad.runtime.codegen.lowered import Inst
from manygrad.runtime.codegen.pipeline import rendered
from manygrad.tensor.uop import UOp
from tests.fuzz import kernels
from tests.fuzz.runner import run_round

ROUNDS, PROGRAMS = 10, 60  # programs a round: one of the first rounds has to show the fault
extremes, rest, remember = TileAnalysis.extremes, Tiler.rest, Emission.remember


def keep_too_far_out(e: Emission, u: UOp, key: Any, inst: Inst) -> None:
    """A value holds wherever its instruction stands."""
    e.blocks[inst.depth].values[key] = inst


def too_narrow(analysis: TileAnalysis, terms: Any) -> tuple[int, int]:
    """A bound is off by one tile: the last one is forgotten."""
    low, high = extremes(analysis, terms)
    return low, high - 1 if high > low else high


FAULTS: dict[str, Callable[[], AbstractContextManager[Any]]] = {
    "a value kept too far out": lambda: patch.object(Emission, "remember", keep_too_far_out),
    "a mask of loads dropped": lambda: patch.object(memory, "ragged_mask", lambda e, at: None),
    "a mask of stores dropped": lambda: patch.object(stores, "ragged_mask", lambda e, at: None),
    "a mask of sums dropped": lambda: patch.object(sums, "ragged_mask", lambda e, at: None),
    "a bound off by one": lambda: patch.object(TileAnalysis, "extremes", too_narrow),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_planted_fault_is_found(fault: str) -> None:
    rendered.cache_clear()
    try:
        with FAULTS[fault](), Context(SPEC=0), pytest.raises(AssertionError):
            for seed in range(ROUNDS):
                run_round(kernels, PROGRAMS, seed, shrink=False)
    finally:
        rendered.cache_clear()
