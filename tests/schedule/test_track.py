"""What TRACK_MATCH_STATS=1 keeps of the rewrites that led to a kernel."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from manygrad import Context, Tensor
from manygrad.schedule.lower import PASSES
from manygrad.tensor.uop import Ops, track
from tests.schedule.programs import linear_of, stored


@pytest.fixture(autouse=True)
def records() -> Iterator[list[track.Rewrite]]:
    track.records.clear()
    with Context(TRACK_MATCH_STATS=1, SCACHE=0):
        yield track.records
    track.records.clear()


def two_kernels() -> list[Tensor]:
    x = stored(4, 8)
    y = (x + -0.0).sum(1)
    return [y.exp(), (x * 1).sum(0)]


def test_each_rewrite_is_kept_with_pass_rule_nodes_and_line(records: list[track.Rewrite]) -> None:
    linear_of(two_kernels())
    assert {r.of_pass for r in records} <= {p.name for p in PASSES}
    added, times = (r for r in records if r.rule == "fold_binary")
    for r, op in ((added, Ops.ADD), (times, Ops.MUL)):
        assert (r.of_pass, r.before.op, r.after.op) == ("simplify", op, Ops.PARAM)
        assert r.line.startswith("test_track.py:")
    assert [r.of_pass for r in records if r.rule == track.WHOLE] == [
        "simplify", "lower_storage", "split_kernels", "rangeify", "plan_memory",
    ]  # fmt: skip


def test_the_history_of_a_kernel_is_its_own_and_in_the_order_of_the_passes() -> None:
    names = [p.name for p in PASSES]
    for kernel, op in zip((c.src[0] for c in linear_of(two_kernels()).src), (Ops.ADD, Ops.MUL)):
        found = track.history(kernel)
        assert [r.before.op for r in found if r.rule == "fold_binary"] == [op]
        assert found[-1].of_pass == "rangeify" and found[-1].after is kernel
        places = [names.index(r.of_pass) for r in found]
        assert places == sorted(places)


def test_a_lambda_is_named_by_where_it_stands(records: list[track.Rewrite]) -> None:
    linear_of(stored(4)[Tensor([1, 2]).realize()])
    assert any(r.rule.startswith("lower_checks.py:") and r.before.op is Ops.CHECK for r in records)


def test_what_several_kernels_became_one_of_is_told() -> None:
    m, w = stored(64), stored(64)
    m2 = m.assign(m * 0.9 + 1)
    linear = linear_of([m2, w.assign(w - m2)])
    assert len(linear.src) == 1
    rules = [(r.of_pass, r.rule) for r in track.history(linear.src[0].src[0])]
    assert rules.count(("merge_kernels", "merged")) == 2 and rules.count(("rangeify", "_kernel_item")) == 2


def test_debug_prints_how_a_kernel_came_about(capsys: pytest.CaptureFixture[str]) -> None:
    with Context(DEBUG=5):
        linear_of([stored(4) * 1 + 2])
    assert "simplify           fold_binary" in capsys.readouterr().out


def test_nothing_is_kept_untracked(records: list[track.Rewrite]) -> None:
    with Context(TRACK_MATCH_STATS=0):
        linear_of(two_kernels())
    assert not records
