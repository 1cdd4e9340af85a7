"""A failure leaves no trace: what caused it is dropped, tensors keep the values they had, and the rest goes on."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from manygrad import Tensor, Variable
from tests.fuzz.failures import check

N = Variable("n", 1, 4)


def ones(*shape: int) -> Tensor:
    return Tensor(np.ones(shape, np.float32)).realize()


def mismatch() -> Tensor:
    """A number that cannot be computed: a variable with two values."""
    x = ones(4)
    return x[: N.bind(2)].sum() + x[: N.bind(3)].sum()


def test_an_assignment_that_cannot_be_scheduled_is_dropped() -> None:
    x, y, good = ones(4), ones(4), ones(4)
    x.assign(x + mismatch())
    good.assign(good * 5)
    with pytest.raises(ValueError, match="bind mismatch") as raised:
        (y + 1).realize()
    assert any("keeps the value it had" in n for n in raised.value.__notes__)
    np.testing.assert_array_equal((y + 1).numpy(), np.full(4, 2))
    np.testing.assert_array_equal(x.numpy(), np.ones(4))
    np.testing.assert_array_equal(good.numpy(), np.full(4, 5))


def test_what_is_asked_for_and_fails_leaves_assignments_waiting() -> None:
    x = ones(4)
    x.assign(x + 1)
    bad = mismatch()
    for _ in range(2):
        with pytest.raises(ValueError, match="bind mismatch"):
            bad.realize()
    np.testing.assert_array_equal(x.numpy(), np.full(4, 2))


def test_assignments_that_cannot_run_together_run_one_by_one() -> None:
    x, y, source = ones(4), ones(4), Tensor(np.arange(4, dtype=np.float32)).realize()
    x.assign(x + source[: N.bind(2)].sum())
    y.assign(y + source[: N.bind(3)].sum())
    np.testing.assert_array_equal(ones(3).numpy(), np.ones(3))
    (ones(3) + 1).realize()
    np.testing.assert_array_equal(x.numpy(), np.full(4, 2))
    np.testing.assert_array_equal(y.numpy(), np.full(4, 4))


def test_what_was_read_after_a_failed_assignment_is_lost() -> None:
    x = ones(4)
    x.assign(x + mismatch())
    y = x * 2
    with pytest.raises(ValueError, match="bind mismatch"):
        (ones(4) + 1).realize()
    for _ in range(2):
        with pytest.raises(RuntimeError, match=r"assignment that failed \(ValueError: bind mismatch.*is lost"):
            y.numpy()
    x.assign(7.0)
    np.testing.assert_array_equal(x.numpy(), np.full(4, 7))


def test_earlier_assignments_to_the_same_tensor_hold() -> None:
    x = ones(4)
    x.assign(x * 3)
    x.assign(x + mismatch())
    x.assign(x + 1)
    with pytest.raises(ValueError, match="bind mismatch"):
        (ones(4) + 1).realize()
    np.testing.assert_array_equal(x.numpy(), np.full(4, 3))


def test_a_lazy_value_that_cannot_be_computed_does_not_stop_others() -> None:
    x = ones(4)
    bad = x + mismatch()
    x.assign(x + 1)
    np.testing.assert_array_equal(x.numpy(), np.full(4, 2))
    with pytest.raises(RuntimeError, match="bind mismatch.*is lost"):
        bad.numpy()


def test_an_assignment_that_reads_what_another_overwrites_goes_first() -> None:
    """Also where only the other is asked for."""
    x, z = ones(4), ones(4)
    z.assign(x * 2)
    x.assign(x + 4)
    lazy = x * 3
    lazy._store()
    np.testing.assert_array_equal(lazy.numpy(), np.full(4, 15))
    np.testing.assert_array_equal(z.numpy(), np.full(4, 2))


def test_a_write_to_a_disk_that_fails(tmp_path: Path) -> None:
    out = ones(4).to(f"DISK:{tmp_path}/no/such/folder")
    x = ones(4)
    x.assign(x + 1)
    for _ in range(2):
        with pytest.raises(OSError, match="No such file"):
            out.realize()
    np.testing.assert_array_equal(x.numpy(), np.full(4, 2))


def test_what_fails_after_a_part_has_run_fails_once() -> None:
    """Interrupted where the call of a function would have run;
    then it runs, and another tensor's assignment turns out to be impossible."""
    check(([(0, 0, 0, 0), (8, 0, 0, 0), (0, 0, 0, 0), (9, 1, 0, 0)], (0, 0, 0, 2)))
