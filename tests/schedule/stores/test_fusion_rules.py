"""Which rule of `schedule/stores/fusion.py` stores a value: a program for each, by the rule's name."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from manygrad import Context, Tensor
from manygrad.schedule.stores.fusion import BLOCK_ROWS, LIMITS, MAX_DEPTH, MAX_LEAVES, RULES, RULES_OF, SHARED, WHY
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
    with Context(FOLLOW=0):  # (a loop of so many calls would be computed in parts)
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


def test_what_belongs_to_a_block_of_a_sum_is_made_in_its_loops() -> None:
    scale, x = stored(16, 4, 1) * 2 + 1, stored(16, 4, 8)
    blocks = (x * scale).sum((1, 2))
    assert not stores_of(blocks) and not stores_of((x * scale).reshape(1, 16, 4, 8).sum((2, 3)))
    for other in ((x * scale).sum(1), (x * (stored(4, 1) * 2 + 1)).sum((1, 2))):
        assert "broadcast work" in {found.rule for found in stores_of(other).values()}


def test_quantised_weights_are_decoded_in_a_product_of_few_rows() -> None:
    def product(rows: int, kind: type, scaled: bool = True) -> Tensor:
        w = Tensor(np.zeros((32, 4, 8), kind)).realize().float()
        w = w * stored(32, 4, 1) if scaled else w * 2 + 1
        return (stored(rows, 1, 4, 8) * w.unsqueeze(0)).sum((2, 3))

    assert not stores_of(product(16, np.int8))
    for other in (product(17, np.int8), product(16, np.float32), product(16, np.int8, scaled=False)):
        assert "broadcast work" in {found.rule for found in stores_of(other).values()}


def test_short_sums_of_bytes_stay_in_a_sum_over_blocks_with_what_unpacks_them() -> None:
    def sums(x: Tensor, w: Tensor) -> Tensor:
        terms = x.shape[1] // 4
        products = x.reshape(8, 1, 4, terms).cast("int32") * (w & 15).reshape(1, 16, 4, terms).cast("int32")
        return products.sum(3, dtype="int32").float() * stored(1, 16, 4)

    def zeros(rows: int, columns: int, kind: type) -> Tensor:
        return Tensor(np.zeros((rows, columns), kind)).realize()

    assert not stores_of(sums(zeros(8, 128, np.int8), zeros(16, 128, np.uint8)).sum(2))
    rules = {s.rule for s in stores_of(sums(zeros(8, 128, np.int16), zeros(16, 128, np.uint8)).sum(2)).values()}
    assert {"reduction of a reduction", "broadcast work"} == rules
    long = sums(zeros(8, 1024, np.int8), zeros(16, 1024, np.uint8)).sum(2)
    assert "reduction of a reduction" in {s.rule for s in stores_of(long).values()}


def test_blocks_of_a_product_of_few_rows_are_added_in_its_kernel() -> None:
    """Over two devices, where each has four of the eight blocks."""

    def product(rows: int) -> Tensor:
        x, y = (Tensor.zeros(rows, n).contiguous().shard(("CPU:0", "CPU:1"), 0).realize() for n in (16, 8))
        return x.T @ y

    rule = "reduction of a reduction"
    assert rule not in {found.rule for found in stores_of(product(2 * BLOCK_ROWS)).values()}
    assert rule in {found.rule for found in stores_of(product(2 * BLOCK_ROWS + 8)).values()}


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
