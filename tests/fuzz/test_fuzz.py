"""Every fuzzer, for a few seconds with a fixed seed."""

from __future__ import annotations

import pytest

from tests.fuzz.runner import load, names, run_round


@pytest.mark.parametrize("name", names())
def test_fuzzer(name: str) -> None:
    fuzzer = load(name)
    assert run_round(fuzzer, fuzzer.EXAMPLES, round_seed=12) >= fuzzer.EXAMPLES // 2
