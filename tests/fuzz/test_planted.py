"""The fuzzers of kernels and of captured steps find what is wrong: faults that are planted here, each within
seconds."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any
from unittest.mock import patch

import pytest

from manygrad import Context
from manygrad.runtime.codegen.analysis.affine import TileAnalysis
from manygrad.runtime.codegen.emit import memory, stores, sums
from manygrad.runtime.codegen.emit.emission import Emission, Remembered
from manygrad.runtime.codegen.loops.tiles import Tiler
from manygrad.runtime.codegen.lowered import Inst
from manygrad.runtime.codegen.pipeline import rendered
from manygrad.runtime.jit import following
from manygrad.runtime.jit.results import ResultMemory
from manygrad.runtime.jit.tiny_jit import JitError
from manygrad.tensor.deferred import arguments, endings, trace, varying
from manygrad.tensor.environment import FOLLOW
from manygrad.tensor.guards import Guards
from manygrad.tensor.uop import UOp
from tests.fuzz import following as fuzz_loops
from tests.fuzz import kernels, training
from tests.fuzz.runner import run_round

ROUNDS, PROGRAMS = 10, 60  # programs a round: one of the first rounds has to show the fault
FIRST = 4  # of the rounds of kernels (0 and 1 take 20 s, and do not show what is kept too far out)
extremes, rest, remember = TileAnalysis.extremes, Tiler.rest, Emission.remember


def keep_too_far_out(e: Emission, u: UOp, key: Any, inst: Inst) -> None:
    """A value holds wherever its instruction stands."""
    e.values.setdefault(key, []).append(Remembered(e.blocks[inst.depth], inst, None))


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
            for seed in range(FIRST, FIRST + ROUNDS):
                run_round(kernels, PROGRAMS, seed, shrink=False)
    finally:
        rendered.cache_clear()


FAULTS_OF_CAPTURES: dict[str, Callable[[], AbstractContextManager[Any]]] = {
    "guards that always hold": lambda: patch.object(Guards, "hold", lambda guards: True),
    "results written again": lambda: patch.object(ResultMemory, "is_free", lambda memory: True),
    "gradients not set": lambda: patch.object(ResultMemory, "give", lambda memory: None),
    "nothing found by following": lambda: patch.object(following, "difference", lambda was, now: ""),
}


@pytest.mark.parametrize("fault", FAULTS_OF_CAPTURES)
def test_a_fault_of_captures_is_found(fault: str) -> None:
    found = (AssertionError, JitError)  # (following the step may be what finds it)
    with FAULTS_OF_CAPTURES[fault](), Context(SPEC=0), pytest.raises(found):
        for seed in range(ROUNDS):
            run_round(training, 10, seed, shrink=False)


def without(kind: type) -> Callable[..., Any]:
    """Keys say nothing of constants of one kind."""
    told = arguments.told

    def planted(x: Any, sig: list[Any], serial: int, external: Any) -> Any:
        return x if type(x) is kind else told(x, sig, serial, external)

    return planted


def nothing_is_state(external: arguments.External, x: Any, sig: list[Any]) -> Any:
    """State is taken for a value that is the same one each time, wherever it lies."""
    kept = told_external(external, x, sig)
    sig[:] = ["s" if type(s) is int and s > 1 << 20 else s for s in sig]
    return kept


def first_number() -> Callable[..., Any]:
    """A number that changes keeps the memory of the first."""
    kept: list[Any] = []

    def found(args: tuple[Any, ...]) -> tuple[Any, ...]:
        t, x = varying.with_input(args)
        kept.append(x)
        return t, kept[0]

    return found


told_external = arguments.External.told

FAULTS_OF_LOOPS: dict[str, Callable[[], AbstractContextManager[Any]]] = {
    "a number left out of keys": lambda: patch.object(trace, "told", without(int)),
    "state that is not told apart": lambda: patch.object(arguments.External, "told", nothing_is_state),
    "options of an optimiser forgotten": lambda: patch.object(endings, "settings", lambda optimizer: []),
    "a number that is the first one for ever": lambda: patch.object(trace, "with_input", first_number()),
    "results written again": lambda: patch.object(ResultMemory, "is_free", lambda memory: True),
    "gradients not set": lambda: patch.object(ResultMemory, "give", lambda memory: None),
}
FOUND = (AssertionError, RuntimeError, AttributeError, ValueError, TypeError, LookupError)  # by which a fault is seen
USUAL = {
    "optimizer": "Adam", "norm": False, "dropout": False, "all stepped": True, "sizes": (4,),
    "events": [None] * 10, "within": [None] * 10,
}  # fmt: skip


@pytest.mark.skipif(not FOLLOW, reason="FOLLOW=0: no call is put off")
@pytest.mark.parametrize("fault", FAULTS_OF_LOOPS)
def test_a_fault_of_plain_loops_is_found(fault: str) -> None:
    with FAULTS_OF_LOOPS[fault](), pytest.raises(FOUND):
        for usual in (["counted"], ["kept"]):  # (random programs find these, too, in a minute or four)
            fuzz_loops.check({**USUAL, "usual": usual})
        for seed in range(ROUNDS):
            run_round(fuzz_loops, 20, seed, shrink=False)
