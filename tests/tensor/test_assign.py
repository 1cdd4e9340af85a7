"""Writing: what was computed before keeps the old values, views share memory, equal graphs do not."""

from __future__ import annotations

import pickle
from collections.abc import Iterator
from copy import deepcopy

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from manygrad import Context, GlobalCounters, Tensor, dtypes, no_grad
from manygrad.tensor.storage import MOST_WAITING, waiting
from manygrad.tensor.tensor import PENDING
from manygrad.tensor.uop import Ops
from manygrad.tensor.uop.views import memory


@pytest.fixture(autouse=True, scope="module")
def interpreter() -> Iterator[None]:
    with Context(DEVICE="PYTHON"):
        yield


def stored(*values: float) -> Tensor:
    return Tensor(list(values)).realize()


def test_assign_is_lazy_and_runs_with_the_next_realize() -> None:
    t, other = stored(1, 2), stored(3)
    t.assign(t * 10)
    assert t.uop.op is Ops.AFTER and not t.is_realized
    (other + 1).realize()  # anything: what is pending runs first
    assert t.is_realized and len(PENDING) == 0 and t.tolist() == [10, 20]


def test_assign_keeps_the_storage() -> None:
    t = stored(1, 2)
    buffer = t.uop
    for _ in range(3):
        t.assign(t + 1).realize()
        assert t.uop is buffer
    assert t.tolist() == [4, 5]


def test_values_between_assignments_that_another_value_brings_along_are_kept() -> None:
    t = stored(1.0)
    first = t * 7
    t.assign(t + 1)
    second = t * 2
    t.assign(t + 1)
    third = t * 3
    t.assign(t + 1)
    both = first + t * 5
    second._store()  # carries out the first assignment; so `both` is computed, which reads the last one's
    assert [x.item() for x in (second, third, both, t)] == [4, 9, 27, 4]


def test_assign_converts_and_broadcasts_the_value() -> None:
    t = stored(1, 2, 3)
    assert t.assign(7).tolist() == [7, 7, 7] and t.dtype is dtypes.int64
    assert t.assign(Tensor([2.9])).tolist() == [2, 2, 2]
    assert t.assign(t).tolist() == [2, 2, 2]


def test_before_it_is_stored_a_tensor_just_becomes_the_value() -> None:
    t = Tensor.zeros(3)
    copy = t + 0
    t.assign(Tensor([1.0, 2.0, 3.0]))
    assert (t.tolist(), copy.tolist()) == ([1, 2, 3], [0, 0, 0])


@pytest.mark.parametrize("read_first", [False, True])
def test_lazy_readers_see_the_value_of_their_time(read_first: bool) -> None:
    t = stored(1, 2, 3)
    old = t * 2
    t.assign(t + 10)
    middle = t * 2
    t.assign(t * t)
    new = t * 2
    want = {"old": [2, 4, 6], "middle": [22, 24, 26], "new": [242, 288, 338]}
    tensors = {"old": old, "middle": middle, "new": new}
    for name in want if read_first else reversed(want):
        assert tensors[name].tolist() == want[name]
    assert t.tolist() == [121, 144, 169]


@pytest.mark.parametrize(
    "same",
    [
        lambda t: t + 0,
        lambda t: t * 1,
        lambda t: t.clone(),
        lambda t: t.contiguous().clone(),
        lambda t: t[1:] * 1,
        lambda t: t.pad((1, 0)),
    ],
)
def test_readers_that_simplify_to_the_tensor_itself(same) -> None:  # type: ignore[no-untyped-def]
    t = stored(1, 2, 3)
    before = same(t).tolist()
    t = stored(1, 2, 3)
    old = same(t)
    t.assign(Tensor([7, 8, 9]))
    assert (t.tolist(), old.tolist()) == ([7, 8, 9], before)
    t.assign(t + 1)
    assert (t.tolist(), old.tolist()) == ([8, 9, 10], before)


def test_a_chain_of_assignments_in_one_realize() -> None:
    a, b = stored(1, 1), stored(2, 3)
    for _ in range(5):
        a.assign(a + b)
        b.assign(b * a - b)
    x, y = np.array([1, 1]), np.array([2, 3])
    for _ in range(5):
        x = x + y
        y = y * x - y
    assert (a.tolist(), b.tolist()) == (x.tolist(), y.tolist())


def test_swap() -> None:
    a, b = stored(1, 2), stored(3, 4)
    old = a.clone()
    a.assign(b)
    b.assign(old)
    assert (a.tolist(), b.tolist()) == ([3, 4], [1, 2])


def test_assignments_that_read_what_the_other_overwrites() -> None:
    a, b = stored(1, 2), stored(3, 4)
    old = a + 0  # not stored: the same memory
    a.assign(b + 0)
    b.assign(old)
    del old
    a.realize()
    assert (a.tolist(), b.tolist()) == ([3, 4], [1, 2])


@pytest.mark.parametrize("device", ["CPU", "PYTHON", ("CPU:0", "CPU:1")])
def test_one_kernel_reads_a_tensor_before_and_after_it_is_assigned(device: str | tuple[str, ...]) -> None:
    made = Tensor([1.0, 2, 3, 4]) if isinstance(device, tuple) else Tensor([1.0, 2, 3, 4], device=device)
    a = (made.shard(device, axis=0) if isinstance(device, tuple) else made).realize()
    flipped, same = a.flip(0), a * 1
    a.assign(a * 2 + 1)  # 3 5 7 9
    between = a + 0
    a.assign(a - flipped)  # -1 2 5 8
    total = flipped + same + between * 10 + a * 100
    del flipped, same, between
    assert total.tolist() == [-65, 255, 575, 895]
    assert a.tolist() == [-1, 2, 5, 8]


def test_swap_through_a_value_that_is_not_stored() -> None:
    a, b = stored(1, 2), stored(3, 4)
    old = a + 0
    a.assign(b + 0)
    b.assign(old)
    assert (a.tolist(), b.tolist(), old.tolist()) == ([3, 4], [1, 2], [1, 2])


# *** equal graphs are one node, but not one storage ***


def test_equal_tensors_realized_apart_are_independent() -> None:
    a, b = Tensor.zeros(3).contiguous(), Tensor.zeros(3).contiguous()
    assert a.uop is b.uop
    a.realize(), b.realize()
    a.assign(a + 1)
    assert (a.tolist(), b.tolist()) == ([1, 1, 1], [0, 0, 0])


def test_equal_tensors_realized_together_are_independent() -> None:
    x = stored(1, 2)
    a, b, c = x * 3, x * 3, x * 3
    a.realize(b)
    a.assign(a + 1)
    c.assign(c - 1)
    assert (a.tolist(), b.tolist(), c.tolist()) == ([4, 7], [3, 6], [2, 5])


def test_an_equal_tensor_or_a_view_of_one_does_not_follow_a_write() -> None:
    x = stored(1, 2)
    a, lazy, view = x * 3, x * 3, (x * 3).reshape(2, 1)
    a.realize()
    a.assign(a * 0)
    assert (a.tolist(), lazy.tolist(), view.tolist()) == ([0, 0], [3, 6], [[3], [6]])


def test_copies_and_clones_are_independent() -> None:
    t = stored(1, 2)
    copies = [t.clone(), deepcopy(t), pickle.loads(pickle.dumps(t)), Tensor(t.numpy())]
    t.assign(t * 0)
    assert t.tolist() == [0, 0]
    assert [c.tolist() for c in copies] == [[1, 2]] * 4


# *** views ***

VIEWS = {
    "row": (lambda t: t[1], lambda a: a[1]),
    "column": (lambda t: t[:, 1], lambda a: a[:, 1]),
    "transposed": (lambda t: t.T, lambda a: a.T),
    "flat": (lambda t: t.reshape(-1), lambda a: a.reshape(-1)),
    "strided": (lambda t: t[::2, 1::2], lambda a: a[::2, 1::2]),
    "backwards": (lambda t: t[:, ::-1], lambda a: a[:, ::-1]),
    "view of a view": (lambda t: t.T[1:][:, ::2], lambda a: a.T[1:][:, ::2]),
    "element": (lambda t: t[2, 3], lambda a: a[2:3, 3:4].reshape(())),
}


@pytest.mark.parametrize("name", VIEWS)
@pytest.mark.parametrize("hold", [True, False])
def test_writing_through_a_view_shows_in_all(name: str, hold: bool) -> None:
    of_tensor, of_array = VIEWS[name]
    a = np.arange(20.0).reshape(4, 5)
    t = Tensor(a).realize()
    other = t[2:]
    before = t * 1
    if hold:
        view = of_tensor(t)
        view += 100
        assert view.tolist() == (of_array(a) + 100).tolist()
    else:
        of_tensor(t).assign(of_tensor(t) + 100)
    w = of_array(a)
    w += 100
    assert (t.tolist(), other.tolist(), before.tolist()) == (
        a.tolist(),
        a[2:].tolist(),
        np.arange(20.0).reshape(4, 5).tolist(),
    )


@pytest.mark.parametrize("name", VIEWS)
def test_a_view_follows_its_base(name: str) -> None:
    of_tensor, of_array = VIEWS[name]
    a = np.arange(20.0).reshape(4, 5)
    t = Tensor(a).realize()
    view = of_tensor(t)
    t.assign(t * 2)
    t[1] = -1.0
    a = a * 2
    a[1] = -1
    assert view.tolist() == of_array(a).tolist()
    assert t.tolist() == a.tolist()


def test_chained_indexing_writes() -> None:
    t = Tensor(np.zeros((2, 3)))
    t[1][2] = 5.0
    t[0][:2] += 1.0
    assert t.tolist() == [[1, 1, 0], [0, 0, 5]]


def test_an_expanded_view_cannot_be_assigned() -> None:
    t = stored(1, 2)
    with pytest.raises(ValueError, match=r"assign: \(3, 2\) is an expanded view, whose elements share memory"):
        t.expand(3, 2).assign(Tensor([[1, 2]] * 3))
    assert t.tolist() == [1, 2]


# *** overlap ***


@pytest.mark.parametrize("device", ["PYTHON", "CPU"])
def test_values_that_read_what_they_overwrite(device: str) -> None:
    for n in (2, 5, 1000):
        a = np.arange(float(n))
        t = Tensor(a, device=device).realize()
        t.assign(t.flip(0))
        a = a[::-1].copy()
        np.testing.assert_array_equal(t.numpy(), a)
        t[1:] = t[:-1]
        a[1:] = a[:-1].copy()
        np.testing.assert_array_equal(t.numpy(), a)
        t[:-1] = t[1:] * 2
        a[:-1] = a[1:].copy() * 2
        np.testing.assert_array_equal(t.numpy(), a)
        t.assign(t + t.sum())
        np.testing.assert_allclose(t.numpy(), a + a.sum())


def test_transposed_in_place_and_gathered_in_place() -> None:
    a = np.arange(16.0).reshape(4, 4)
    t = Tensor(a).realize()
    t.assign(t.T + 1)
    t.assign(t[Tensor([2, 0, 3, 1])])
    assert t.tolist() == (a.T + 1)[[2, 0, 3, 1]].tolist()


# *** errors ***


def test_errors_leave_the_tensor_as_it_was() -> None:
    t = stored(1, 2, 3)
    with pytest.raises(ValueError, match=r"expand \(2,\) to \(3,\): a dim of 2 cannot become 3"):
        t.assign(Tensor([1, 2]))
    with pytest.raises(ValueError, match=r"assign: the value is on PYTHON:1, the target on PYTHON:0; move it first"):
        t.assign(Tensor([1, 2, 3], device="PYTHON:1"))
    with pytest.raises(ValueError, match=r"replace: \(2,\) int64 is not \(3,\) int64"):
        t.replace(Tensor([1, 2]))
    assert t.tolist() == [1, 2, 3] and len(PENDING) == 0


# *** any program of writes and reads ***


@st.composite
def programs(draw):  # type: ignore[no-untyped-def]
    steps = []
    for _ in range(draw(st.integers(2, 9))):
        kind = draw(st.sampled_from(["assign", "assign", "slice", "view", "read", "keep", "realize"]))
        steps.append(
            (kind, draw(st.integers(0, 2)), draw(st.integers(0, 2)), draw(st.integers(0, 3)), draw(st.integers(1, 4)))
        )
    return steps


@settings(max_examples=200)
@given(programs())
def test_programs_give_what_numpy_gives(steps: list[tuple[str, int, int, int, int]]) -> None:
    """Random assignments, slice writes, views and lazy reads of three tensors, realized at random times."""
    arrays = [np.arange(4.0) + 10 * i for i in range(3)]
    tensors = [Tensor(a).realize() for a in arrays]
    views: list[tuple[Tensor, np.ndarray]] = []
    kept: list[tuple[Tensor, np.ndarray]] = []
    for kind, i, j, at, k in steps:
        t, a, u, b = tensors[i], arrays[i], tensors[j], arrays[j]
        if kind == "assign":
            t.assign(u.flip(0) * 2 + t)
            a[:] = b[::-1] * 2 + a
        elif kind == "slice":
            stop = min(at + k, 4)
            t[at:stop] = u[: stop - at] + k
            a[at:stop] = b[: stop - at].copy() + k
        elif kind == "view":
            views.append((t[at:], a[at:]))
        elif kind == "read":
            assert u.tolist() == b.tolist()
        elif kind == "keep":
            kept.append((t * 1 + u.sum() * k, a * 1 + b.sum() * k))
        elif views:
            views[at % len(views)][0].realize()
        elif kept:
            kept[-1][0].realize()
    for t, a in [*kept, *views, *zip(tensors, arrays)]:
        assert t.tolist() == a.tolist()


def test_a_leaf_that_is_trained_by_hand_is_written_with_each_loss() -> None:
    """Also one that was never computed: its graph, and what a loss takes, do not grow with the steps."""
    w, kernels = Tensor.zeros(3, requires_grad=True), []
    for _ in range(5):
        loss = (w - 1).square().sum()
        loss.backward()
        assert w.grad is not None
        with no_grad():
            w -= 0.25 * w.grad
            w.grad = None
        before = GlobalCounters.kernel_count
        loss.item()
        kernels.append(GlobalCounters.kernel_count - before)
        assert w.uop.op is Ops.BUFFER
    assert w.tolist() == [1 - 0.5**5] * 3 and kernels[-1] <= kernels[1]


@pytest.mark.parametrize("write", ["whole", "part"])
def test_many_writes_that_nothing_reads_take_time_in_proportion(write: str) -> None:
    """A simulation that is only looked at when it is over: some are carried out on the way, so no schedule compares all
    with all others (1,000 took 50 s)."""
    x, want, waited = Tensor.zeros(8).contiguous().realize(), np.zeros(8, np.float32), 0
    for i in range(3 * MOST_WAITING):
        if write == "whole":
            x.assign(x * 0.5 + 1)
            want = want * np.float32(0.5) + 1
        else:
            x[i % 8] = x[(i + 1) % 8] + 1
            want[i % 8] = want[(i + 1) % 8] + 1
        waited = max(waited, waiting(memory(x.uop)))
    assert waited <= MOST_WAITING
    np.testing.assert_array_equal(x.numpy(), want)
