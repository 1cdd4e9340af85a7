"""Which rule of `schedule/fusion.py` stores a value: a program for each, by the rule's name."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from manygrad import Context, Tensor
from manygrad.schedule.fusion import LIMITS, MAX_DEPTH, MAX_LEAVES, RULES, RULES_OF, SHARED, WHY
from manygrad.tensor.uop import Ops
from tests.schedule.programs import kernels_of, stored, stores_of

Program = Callable[[], Tensor | list[Tensor]]
INDEX = Tensor(np.array([2, 0, 3])).realize()


def _of_two_products() -> Tensor:
    return stored(16, 16) @ stored(16, 16) + stored(16, 32) @ stored(32, 16)


def _of_a_norm_and_its_sum() -> Tensor:
    x = stored(16, 8)
    return (x - x.mean(1, keepdim=True)).T.contiguous()


def _of_many_buffers() -> Tensor:
    total = stored(4) * 1.0
    for _ in range(MAX_LEAVES):
        total = total + stored(4) * stored(4)
    return total


def _of_many_moves() -> Tensor:
    x = stored(4, 4)
    for _ in range(MAX_DEPTH):
        x = x.T.flip(0)
    return x


def _read_twice(value: Callable[[Tensor], Tensor], read: Callable[[Tensor], Tensor] = Tensor.sum) -> list[Tensor]:
    h = value(stored(16, 16))
    return [read(h), read(h.T)]


BY_RULE: dict[str, Program] = {
    "contiguous": lambda: (stored(4, 4) + 1).contiguous().T + 1,
    "row under other loops": _of_a_norm_and_its_sum,
    "smaller contraction": _of_two_products,
    "reduction of a reduction": lambda: stored(4, 4, 4).sum(2).amax(1),
    "broadcast reduction": lambda: stored(4, 4) - stored(4, 4).sum(0, keepdim=True),
    "broadcast work": lambda: (stored(16, 16) + 1) @ stored(16, 16),
    "padded reduction": lambda: stored(4, 4).sum(1).pad((1, 1)),
    "gathered reduction": lambda: stored(4, 4, 4).sum(2)[INDEX],
    "gathered work": lambda: stored(4, 4).exp().tanh()[INDEX],
    "index of a gather": lambda: stored(4, 4)[stored(3, 4).sum(1).cast("int64")],
    "large kernel": _of_many_buffers,
    "deep kernel": _of_many_moves,
    "shared reduction": lambda: _read_twice(lambda x: x @ x, Tensor.exp),
    "shared work": lambda: _read_twice(lambda x: (x * 2).exp().exp().exp().exp()),
    "shared reads": lambda: _read_twice(lambda x: x * stored(16, 16) + stored(16, 16) * stored(16, 16)),
}


@pytest.mark.parametrize("rule", BY_RULE)
def test_a_value_is_stored_by_rule(rule: str) -> None:
    assert rule in {found.rule for found in stores_of(BY_RULE[rule]()).values()}


def test_rules_have_names_of_their_own_and_ops_they_hold_at() -> None:
    rules = [*RULES, *LIMITS, *SHARED]
    assert len({r.name for r in rules}) == len(rules) == len(WHY)
    assert all(r.why for r in rules) and all(r.ops for r in RULES)
    assert {r for found in RULES_OF.values() for r in found} == set(RULES)


def test_a_few_ops_on_a_shared_value_are_rather_done_again() -> None:
    x = stored(16, 16)
    h = x @ x
    near = h * 2
    found = stores_of([near + 1, near.exp(), h - 3])
    assert [(u.op, s.rule, s.kernels) for u, s in found.items()] == [(Ops.REDUCE, "shared reduction", 3)]


def test_nothing_is_stored_in_one_kernel() -> None:
    assert not stores_of((stored(16, 8) @ stored(8, 16) + stored(16)).relu())


def test_debug_4_says_which_rule_stored_a_value_its_bytes_and_line(capsys: pytest.CaptureFixture[str]) -> None:
    x = stored(4, 8)
    y = x - x.sum(0, keepdim=True)
    with Context(DEBUG=4, SCACHE=0):
        kernels_of(y)
    (line,) = [text for text in capsys.readouterr().out.splitlines() if text.startswith("stored ")]
    assert line.startswith("stored REDUCE (1, 8) float32, 32 bytes, test_fusion_rules.py:")
    assert "broadcast reduction (each element that it is broadcast to would reduce again)" in line
    assert "read by EXPAND (4, 8)" in line
