"""Every operator in a loop is replayed, but for those whose results' sizes depend on values."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import Phase, given, seed, settings
from hypothesis import strategies as st

from manygrad import Tensor
from manygrad.runtime.profile.counters import GlobalCounters
from manygrad.tensor.environment import FOLLOW
from tests.tensor.cases.case import Case, Sample
from tests.tensor.following.loops import Counts
from tests.tensor.test_ops import CASES, MANYGRAD, flat

pytestmark = pytest.mark.skipif(not FOLLOW, reason="FOLLOW=0: no call is put off")
SIZED_BY_VALUES = {
    *("Tensor.masked_select", "Tensor.nonzero", "Tensor.nonzero[tuple]", "Tensor.argwhere", "Tensor.unique"),
    *("Tensor.unique[dim]", "Tensor.unique_consecutive", "Tensor.unique_consecutive[dim]", "Tensor.bincount"),
    *("Tensor.bincount[weights]", "Tensor.__getitem__[mask]", "Tensor.__getitem__[inner mask]"),
    *("Tensor.__getitem__[mask and index]", "Tensor.__setitem__[mask]", "Tensor.repeat_interleave[counts]"),
    "functional.one_hot[counted]",
}
RANDOM_PLACES = {f"functional.fractional_max_pool{n}d{kind}" for n in (2, 3) for kind in ("", "_with_indices")}
ONE_OF_EACH = {c.op: c for c in reversed(CASES) if c.name not in SIZED_BY_VALUES | RANDOM_PLACES}


def sample_of(case: Case) -> Sample:
    """The largest of a few."""
    found: list[Sample] = []

    @seed(3)
    @settings(max_examples=12, database=None, deadline=None, phases=[Phase.generate])
    @given(data=st.data())
    def draw(data: st.DataObject) -> None:
        found.append(case.samples(data.draw))

    draw()
    return max(found, key=lambda s: min([a.size for a in s.arrays] or [0]))


@pytest.mark.parametrize("op", sorted(ONE_OF_EACH))
def test_it_is_replayed(op: str, counts: Counts) -> None:
    case = ONE_OF_EACH[op]
    sample = sample_of(case)
    kernels = 0
    for _ in range(5):
        kernels = GlobalCounters.kernel_count
        for t in flat(case.run(MANYGRAD, [Tensor(np.array(a)) for a in sample.arrays], sample)):
            if isinstance(t, Tensor):
                t.clone().numpy()  # (a view is not computed)
        kernels = GlobalCounters.kernel_count - kernels
    assert counts.replays or not kernels, "computed anew each time"


def test_those_that_are_left_out_are_cases() -> None:
    assert {c.name for c in CASES} >= SIZED_BY_VALUES | RANDOM_PLACES
