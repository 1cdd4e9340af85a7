"""What a kernel uses of a buffer from a constant offset on is an argument of its own,
so that equal kernels on other parts are one."""

from __future__ import annotations

import numpy as np
import pytest

from manygrad import Context, Tensor
from manygrad.tensor.uop import Ops, UOp
from manygrad.tensor.uop.symbolic import linear
from tests.schedule.programs import kernels_of, linear_of, stored

RNG = np.random.default_rng(0)


@pytest.fixture(autouse=True)
def fresh():  # type: ignore[no-untyped-def]
    with Context(SCACHE=0):
        yield


def offsets(call: UOp) -> list[int]:
    return [a.arg.offset if a.op is Ops.VIEW else 0 for a in call.src[1:]]


def constants(kernel: UOp) -> set[int]:
    """What kernels add to all indices of an argument."""
    return {linear(u.src[1])[1] for u in kernel.toposort() if u.op is Ops.INDEX}


def test_layers_that_share_a_buffer_share_a_kernel() -> None:
    flat = stored(3 * 8 * 8)
    y = stored(4, 8)
    for i in range(3):
        y = (y @ flat[64 * i : 64 * i + 64].reshape(8, 8)).relu().contiguous()
    calls = linear_of(y).src
    assert len({c.src[0] for c in calls}) == 1
    assert [offsets(c) for c in calls] == [[0, 0, 0], [0, 0, 64], [0, 0, 128]]
    assert constants(calls[0].src[0]) == {0}


def test_parts_that_are_written() -> None:
    a, b, c = stored(4, 3), stored(4, 3), stored(2, 3)
    calls = linear_of((a + 1).cat(b + 1, c + 1)).src
    assert [offsets(c) for c in calls] == [[0, 0, 0], [24, 0]]  # (those of one shape are one kernel)
    assert constants(calls[1].src[0]) == {0}


def test_an_offset_below_all_that_is_used_of_an_argument() -> None:
    x = stored(10)
    (call,) = linear_of(x[3:7] + x[5:9]).src
    assert offsets(call) == [0, 3] and constants(call.src[0]) == {0, 2}


def test_what_lies_before_a_constant_stays() -> None:
    for kernel, offset in (
        (stored(8).flip(0) + 1, 0),
        (stored(8)[2:].pad((3, 0)) + 1, 0),
        (stored(8)[2:6].flip(0) + 1, 2),
    ):
        (call,) = linear_of(kernel).src
        assert offsets(call) == [0, offset]


def test_kernels_of_a_chain_use_parts_of_one_buffer() -> None:
    n, d = 256, 8
    flat = Tensor(RNG.standard_normal(3 * n * d).astype(np.float32)).realize()
    x, y, z = (flat[n * d * i : n * d * (i + 1)].reshape(n, d) for i in range(3))
    out = (x @ y.T).softmax(-1) @ z
    (call,) = linear_of(out).src
    assert call.src[0].op is Ops.CHAIN and sorted(offsets(call)) == [0, 0, 0, 0, n * d, 2 * n * d]
    apart = [Tensor(a.numpy()).realize() for a in (x, y, z)]
    np.testing.assert_array_equal(out.numpy(), ((apart[0] @ apart[1].T).softmax(-1) @ apart[2]).numpy())


@pytest.mark.parametrize("device", ["CPU", "PYTHON"])
def test_values(device: str) -> None:
    """Rows looked up in a part, masked and reversed reads, assignments to parts, with every access checked."""
    a = RNG.standard_normal((12, 5)).astype(np.float32)
    rows = np.array([3, 0, 2])
    with Context(CHECK_OOB=1, VALIDATE_WITH_CPU=1):
        x, i = Tensor(a, device=device), Tensor(rows, device=device)
        np.testing.assert_array_equal((x[4:9][i] * 2).numpy(), a[4:9][rows] * 2)
        np.testing.assert_array_equal(
            (x[7:].flip(0).pad((0, 0, 2, 1)) * 2).numpy(), np.pad(a[7:][::-1], ((2, 1), (0, 0))) * 2
        )
        np.testing.assert_array_equal((x[2:6, 1:3] + x[6:10, 2:4]).numpy(), a[2:6, 1:3] + a[6:10, 2:4])
        x[3:5].assign(x[4:6] * 2).realize()
        a[3:5] = a[4:6] * 2
        x[6:][i].realize()
        np.testing.assert_array_equal(x.numpy(), a)


def test_a_looked_up_part_is_one_kernel_for_all() -> None:
    """What data gives as an index lies in its dim: only the part's beginning is a constant."""
    x, i = stored(12, 4), Tensor(np.array([1, 0])).realize()
    first, second = (kernels_of(x[n : n + 4][i] * 2) for n in (4, 8))
    assert first == second and constants(first[0]) == {0}


def test_a_part_of_what_travels_is_never_empty() -> None:
    """Nor where all accesses of a kernel lie outside, under a condition that never holds."""
    from manygrad.schedule.kernels.pass_parts import _part

    buffer = stored(12).uop
    assert _part(buffer, 0, -6).arg == (0, (1,)) and _part(buffer, 8, 4).arg == (8, (1,))
    assert _part(buffer, 2, 7).arg == (2, (5,)) and _part(buffer, 0, 12) is buffer
    empty = Tensor(np.zeros((0,), np.float32)).realize().uop
    assert _part(empty, 0) is empty and _part(empty, 0, 0) is empty
