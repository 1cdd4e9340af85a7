"""Every fuzzer, for a few seconds with a fixed seed."""

from __future__ import annotations

import pytest

from manygrad.tensor.environment import FOLLOW
from tests.fuzz.failures import STAGES
from tests.fuzz.runner import load, names, run_round


@pytest.mark.parametrize("name", names())
def test_fuzzer(name: str) -> None:
    if name.startswith("following") and not FOLLOW:
        pytest.skip("FOLLOW=0: no call is put off")
    fuzzer = load(name)
    assert run_round(fuzzer, fuzzer.EXAMPLES, round_seed=12) >= fuzzer.EXAMPLES // 2


def test_every_stage_that_may_fail_is_there() -> None:
    assert not [f"{owner.__name__}.{name}" for owner, name in STAGES if name not in vars(owner)]


def test_a_rank_whose_part_of_a_collective_is_nothing() -> None:
    """One row on two workers: the second has nothing to send, to receive or to keep."""
    program = {"shape": (1, 2), "ops": [3], "nodes": 2, "devices per node": 1, "axes": [None, 0]}
    load("ranks").check({**program, "on one": False, "cut result": False, "in parts": False})
