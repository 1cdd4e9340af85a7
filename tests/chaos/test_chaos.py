"""A short fixed set of chaos, and that the tool finds what is wrong."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from tests.chaos.__main__ import WARNED, causes, numbers, run, undisturbed
from tests.chaos.faults import KINDS, MOMENTS, STEPS, Fault, Plan, draw

Whole = tuple[dict[int, float], str]
FIXED = {
    "killed in the commit, then a pause": Plan(
        2, "", True, (Fault("kill", "commit", 0, 0, 6, 0.0), Fault("pause", "collective", 1, 1, 8, 0.1))
    ),
    "an exception, then a clock that jumps in the same process": Plan(
        2, "zmq", True, (Fault("raise", "step", 0, 1, 5, 0.0), Fault("clock", "step", 1, 1, 7, 0.0))
    ),
    "damage, then the supervisor": Plan(
        2, "zmq", False, (Fault("damage", "step", 0, 1, 8, 0.0), Fault("supervisor", "step", 1, 0, 10, 0.0))
    ),
    "the launcher is killed, and later told to end": Plan(
        2, "", False, (Fault("launcher", "step", 0, 1, 5, 0.0), Fault("preempt", "step", 0, 0, 8, 0.0))
    ),
    "links are cut, then a bit of the weights turns over": Plan(
        2, "zmq", True, (Fault("cut", "collective", 0, 1, 4, 0.02), Fault("flip", "step", 0, 0, 7, 0.0)), 1
    ),
    "a full disk, then SIGTERM to a worker": Plan(
        2, "", False, (Fault("full", "checkpoint", 0, 1, 3, 0.0), Fault("terminate", "step", 0, 0, 7, 0.0))
    ),
}


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Whole:
    return undisturbed(tmp_path_factory.mktemp("chaos"))


@pytest.mark.parametrize("name", FIXED)
def test_fixed(name: str, whole: Whole, tmp_path: Path) -> None:
    result = run(FIXED[name], tmp_path, whole)
    assert result.wrong == [], result.output
    assert [f for f in FIXED[name].faults if not (tmp_path / f.mark).exists()] == [], "they never happened"


def test_all_faults_and_moments_are_drawn() -> None:
    faults = [f for seed in range(300) for f in draw(seed).faults]
    assert {f.act for f in faults} == set(KINDS) and {f.moment for f in faults} == set(MOMENTS)
    assert {f.epoch for f in faults} == {0, 1, 2} and draw(7) == draw(7)


def test_wrong_numbers_are_found(tmp_path: Path) -> None:
    plan = Plan(1, "", False, ())
    whole = {i: i / 7 for i in range(STEPS)}, "digest"

    def written(losses: dict[int, float], digest: str = "digest") -> list[str]:
        (tmp_path / "losses.0").write_text("".join(json.dumps([k, v]) + "\n" for k, v in losses.items()) + "[3, 0.4")
        (tmp_path / "losses.0.digest").write_text(digest)
        return numbers(plan, tmp_path, whole)

    assert written(whole[0]) == []
    assert "step 4" in written(whole[0] | {4: 4 / 7 + 2**-52})[0]
    assert "losses of steps" in written({k: v for k, v in whole[0].items() if k != 9})[0]
    assert written(whole[0], "other") == ["rank 0 ends with other weights"]


def test_wrong_causes_are_found() -> None:
    fault = Fault("kill", "step", 0, 1, 3, 0.0)

    def told(*root: tuple[int, str], output: str = "", fault: Fault = fault) -> list[str]:
        attempts = [{"epoch": i, "root_cause": {"rank": r, "kind": k} if k else None} for i, (r, k) in enumerate(root)]
        return causes([fault], [{"attempts": attempts}], output)

    assert told((1, "signal")) == []
    assert "no attempt names kill in rank 1" in told((0, "signal"))[0] and told()
    assert any("nobody brought about" in w for w in told((1, "signal"), (0, "plan")))
    late = replace(fault, delay_s=0.2)
    assert told((0, "")) and not told((0, ""), fault=late) and told((0, "signal"), (0, ""), fault=late)
    assert told(output="UserWarning: saving into c failed: ValueError") and not told(output=f"saving: x{WARNED}")
