"""A few endings of runs in which much happens at once; `endings.py` draws hundreds by chance."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.end_to_end.endings import ALL, BEYOND, CHILDREN, DESTRUCTORS, OWN, PLACES, carried_out


def acts(places: tuple[str, ...], whats: tuple[str, ...], choice: Any = 0.0) -> list[tuple[str, str, Any]]:
    return [(place, what, choice) for place in places for what in whats]


@pytest.mark.parametrize(
    "plan",
    [
        {"workers": 2, "acts": acts(PLACES, ALL), "end": ["", 0]},
        {"workers": 2, "acts": acts((*PLACES, *DESTRUCTORS), OWN), "end": ["exit", 0]},
        {"workers": 2, "acts": acts(CHILDREN, (*OWN, *ALL), "exit"), "end": ["", 0]},
        {"workers": 2, "acts": [*acts(BEYOND, OWN), *acts(BEYOND[1:], ALL)], "end": ["", 0]},
        {"workers": 4, "acts": acts(("thread", "exit handler"), ("gather", "save"), 0.1), "end": ["raise", 2]},
        {"workers": 1, "acts": acts((*PLACES, *CHILDREN[:2]), ("save", "gather"), "_exit"), "end": ["", 0]},
    ],
    ids=["communicating", "alone", "children", "beyond", "failing", "one worker"],
)
def test_an_ending(plan: dict[str, Any], tmp_path: Path) -> None:
    plan["acts"] = [[p, w, 0.0 if p not in CHILDREN and not isinstance(c, float) else c] for p, w, c in plan["acts"]]
    assert carried_out(plan, tmp_path) == []
