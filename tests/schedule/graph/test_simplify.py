"""Values of folded constants are those that kernels compute."""

from __future__ import annotations

import numpy as np
import pytest

from manygrad import Context, Tensor
from manygrad.schedule.graph.simplify import simplify
from manygrad.tensor.dtype import DType, dtypes
from manygrad.tensor.uop import Ops

NUMBERS = (0, 1, 3, -1, 100, 0.1, -2.5, 300.0, 65504.0)


def fits(number: float, d: DType) -> bool:
    if d.is_float:
        return True
    return not d.is_bool and number == int(number) and d.min <= number <= d.max


@pytest.mark.parametrize("of", [d for d in dtypes.all if not d.is_bool], ids=lambda d: d.name)
def test_casts_of_constants_and_of_choices(of: DType) -> None:
    """Those that C leaves open are left out: negative or large floats as unsigned or small integers."""
    numbers = [n for n in NUMBERS if fits(n, of)]
    pick = Tensor([True, False])
    for to in (d for d in dtypes.all if fits(0, d)):
        for a, b in zip(numbers, reversed(numbers)):
            one, other = (Tensor(n, dtype=of) for n in (a, b))
            if of.is_float and not all(fits(int(of.const(n)), to) for n in (a, b)):
                continue
            for value in (pick.where(one, other), one.expand(2)):
                cast = value.cast(to)
                assert not any(u.op is Ops.CAST for u in simplify(cast.uop).toposort())
                with Context(NOOPT=1):
                    want = value.contiguous().realize().cast(to)
                np.testing.assert_array_equal(cast.float().numpy(), want.float().numpy(), f"{a}, {b} as {to.name}")


def test_a_choice_of_python_numbers_is_computed_in_the_type_that_it_is_read_in() -> None:
    """Its own type is int64, of which a vector has half as many."""
    mask, x = Tensor(np.arange(64) % 3 == 0), Tensor(np.ones(64, np.float32))
    assert mask.where(1, 0).dtype is dtypes.int64
    made = simplify((mask.where(1, 0) * x).uop).toposort()
    assert not any(u.dtype is dtypes.int64 for u in made)
