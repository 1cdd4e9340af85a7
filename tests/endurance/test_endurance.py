"""Nothing grows in loops as people write them, for some steps of each, and what does grow is found."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import count
from typing import Any

import pytest

from manygrad import Tensor
from manygrad.tensor.environment import FOLLOW
from tests.endurance.idiom import IDIOMS, Idiom
from tests.endurance.runner import SHORT, check

pytestmark = pytest.mark.skipif(not FOLLOW, reason="FOLLOW=0: no call is put off")


@pytest.mark.parametrize("name", IDIOMS)
def test_nothing_grows(name: str) -> None:
    assert check(IDIOMS[name], SHORT)[0] == []


KEPT: list[Any] = []


def a_tensor_each_step() -> Iterator[Any]:
    for i in count():
        KEPT.append(Tensor([float(i)]))
        yield None


def an_object_each_step() -> Iterator[Any]:
    for _ in count():
        KEPT.append({"kept": []})
        yield None


def a_graph_over_the_last_one() -> Iterator[Any]:
    x = Tensor.ones(2)
    for _ in count():
        x = x * 2 + 1
        KEPT[:] = [x]
        x.shape  # noqa: B018
        yield None


def another_number_in_each_kernel() -> Iterator[Any]:
    for i in count():
        yield Tensor([1.0]).fill_(i + 0.5).item()


def two_values_in_turn() -> Iterator[Any]:
    """What it shows depends on how often it was run."""
    KEPT.append(None)
    for i in count():
        yield Tensor([float(len(KEPT) * i)]).item()


@pytest.mark.parametrize(
    "loop, told",
    [
        (a_tensor_each_step, "tensors "),
        (an_object_each_step, "objects "),
        (a_graph_over_the_last_one, "nodes "),
        (another_number_in_each_kernel, "kernels "),
        (two_values_in_turn, "under FOLLOW=0"),
    ],
)
def test_a_planted_leak_is_found(loop: Any, told: str) -> None:
    try:
        assert any(told in line for line in check(Idiom(loop), SHORT)[0])
    finally:
        KEPT.clear()
