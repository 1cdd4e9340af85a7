"""A view and its base are one storage, computed or not; equal graphs are not."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest

from manygrad import Tensor, TinyJit, function, nn, no_grad
from manygrad.tensor.storage import RECENT, TensorSet


def test_a_view_of_what_is_not_computed_writes_to_its_base() -> None:
    w, other = Tensor.zeros(2, 2), Tensor.zeros(2, 2)
    assert w.uop is other.uop
    row = w[0]
    row[1] = 3
    assert (w.tolist(), row.tolist(), other.tolist()) == ([[0, 3], [0, 0]], [0, 3], [[0, 0], [0, 0]])
    bias = Tensor.zeros(8)
    bias.data[4:8].fill_(1.0)
    assert bias.tolist() == [0] * 4 + [1] * 4
    layer = nn.Linear(3, 2)
    with no_grad():
        layer.weight[0].zero_()
    assert layer.weight.numpy()[0].tolist() == [0, 0, 0] and layer.weight.requires_grad and layer.weight.is_leaf
    assert (layer.weight.numpy()[1] != 0).all()


def test_what_was_computed_before_keeps_its_value() -> None:
    t = Tensor.ones(3) * 2
    view, before = t[1:], t * 1
    view += 5
    assert (t.tolist(), view.tolist(), before.tolist()) == ([2, 7, 7], [7, 7], [2, 2, 2])


@pytest.mark.parametrize("computed", [False, True])
def test_a_view_that_is_computed_first_stays_a_view(computed: bool) -> None:
    t = Tensor([1.0, 2, 3]) * 2
    view = t[1:].realize()
    if computed:
        t.realize()
    view.fill_(0)
    assert t.tolist() == [2, 0, 0]


def test_views_of_other_types() -> None:
    for t in (Tensor.ones(2), Tensor([1.0, 1.0])):
        t.view("int32")[0] = 0x40000000
        assert t.tolist() == [2, 1]
        t.view("uint8")[4:].fill_(0)
        assert t.tolist() == [2, 0]
    wide = Tensor(np.zeros(8, np.uint8))
    wide.view("float32")[1] = 1.0
    assert wide.tolist() == [0] * 6 + [0x80, 0x3F]


@pytest.mark.parametrize("stored", [False, True])
def test_what_pytorch_copies_is_a_copy(stored: bool) -> None:
    t = Tensor(np.arange(6.0).reshape(2, 3)) + 0
    t = t.realize() if stored else t * 1
    copies = [t.flip(0), t.T.reshape(-1), t.clone(), t + 0, t.T.reshape(-1), t.roll(1, 0), t.repeat(1, 1)]
    before = [c.numpy() for c in copies]
    for c in copies:
        c[0] = 100
    t[0, 0] = -1
    assert t.tolist() == [[-1, 1, 2], [3, 4, 5]]
    for c, b in zip(copies, before):
        b[0] = 100
        np.testing.assert_array_equal(c.numpy(), b)


def test_expanded_views_are_not_written() -> None:
    for t in (Tensor([[1.0], [2.0]]), Tensor.ones(2, 1) * 2):
        with pytest.raises(ValueError, match=r"assign: \(2, 3\) is an expanded view, whose elements share memory"):
            t.expand(2, 3).fill_(0)
        with pytest.raises(ValueError, match="expanded view"):
            t.expand(2, 3)[0].add_(1)


def test_a_copy_is_no_alias() -> None:
    a, b = Tensor.zeros(3) + 1, Tensor([7.0, 8, 9])
    a.copy_(b)
    a[0] = 0
    assert (a.tolist(), b.tolist()) == ([0, 8, 9], [7, 8, 9])


def test_sharded() -> None:
    for axis in (None, 0, 1):
        t = Tensor.zeros(4, 4).shard(("CPU:0", "CPU:1"), axis)
        t[1][2:].fill_(5)
        t[:, 0] += 1
        want = np.zeros((4, 4))
        want[1][2:] = 5
        want[:, 0] += 1
        np.testing.assert_array_equal(t.numpy(), want)
        t.fill_(3)
        assert isinstance(t.device, tuple)


def test_gradients_go_through_writes_to_views() -> None:
    w = Tensor([1.0, 2.0, 3.0], requires_grad=True)
    y = w * 2
    y[0].mul_(3)
    y[1] = w[2] * 5
    loss = y.sum()
    assert loss.item() == 6 + 15 + 6
    loss.backward()
    assert w.grad is not None and w.grad.tolist() == [6, 0, 7]


def test_in_a_function_and_a_jit() -> None:
    for wrap in (function, TinyJit):
        state, seen = Tensor.zeros(3), []
        view = state[1:]

        @wrap
        def step(x: Tensor) -> Tensor:
            view[0] = x.sum()  # noqa: B023
            state.add_(1)  # noqa: B023
            return state * 1  # noqa: B023

        for n in range(4):
            seen.append(step(Tensor([float(n)]).realize()).tolist())
        assert seen == [[n + 1, n + 1, n + 1] for n in range(4)], wrap
        assert state.tolist() == [4, 4, 4] and view.tolist() == [4, 4]


# *** leaves ***


@pytest.mark.parametrize("stored", [False, True])
def test_a_leaf_is_not_written_with_gradients_on(stored: bool) -> None:
    w = Tensor([1.0, 2.0]) if stored else Tensor.ones(2) * 2
    w.requires_grad_()
    writes = [
        lambda: w.__iadd__(1),
        lambda: w.mul_(2),
        lambda: w.zero_(),
        lambda: w.__setitem__(0, 1.0),
        lambda: w.copy_(Tensor([1.0, 1.0])),
        lambda: nn.functional.relu_(w),
    ]
    for write in writes:
        with pytest.raises(
            RuntimeError, match=r"a leaf Variable that requires grad is being used in an in-place operation"
        ):
            write()
    with pytest.raises(
        RuntimeError, match=r"a view of a leaf Variable that requires grad is being used in an in-place operation"
    ):
        w[0].add_(1)
    w.data[0] = 10
    w.detach().mul_(2)
    with no_grad():
        w += 1
        w[1] = 5
    assert w.tolist() == [21, 5] and w.is_leaf and w.requires_grad


def test_grad_is_one_object() -> None:
    w = Tensor([1.0, 2.0], requires_grad=True)
    (w * 2).sum().backward()
    held = w.grad
    assert held is not None
    (w * 3).sum().backward()
    assert w.grad is held and held.tolist() == [5, 5]
    held.realize()
    (w * 4).sum().backward()
    assert w.grad is held and held.tolist() == [9, 9]
    nn.optim.SGD([w], lr=0.1).zero_grad(set_to_none=False)
    assert w.grad is held and held.tolist() == [0, 0]


@pytest.mark.parametrize("realized", [True, False])
def test_views_of_a_grad_see_it_zeroed(realized: bool) -> None:
    model = nn.Linear(2, 1)
    for zeroing in (model, nn.optim.SGD(model.parameters(), lr=0.1)):
        model(Tensor([[1.0, 2.0]])).sum().backward()
        g = model.weight.grad
        assert g is not None
        if realized:
            g.realize()
        row, detached = g[0], g.detach()
        zeroing.zero_grad(set_to_none=False)
        assert row.tolist() == [0, 0] and detached.tolist() == [[0, 0]] and model.weight.grad is g
        model(Tensor([[3.0, 4.0]])).sum().backward()
        assert row.tolist() == [3, 4] and detached.tolist() == [[3, 4]]
        model.zero_grad()
        assert model.weight.grad is None and row.tolist() == [3, 4]


def test_a_view_of_a_parameter_follows_an_optimizer() -> None:
    w = nn.Parameter(Tensor.ones(4))
    row = w.data[:2]
    opt = nn.optim.SGD([w], lr=0.5)
    for _ in range(2):
        w.sum().backward()
        opt.step()
        opt.zero_grad()
    assert row.tolist() == [0, 0] and w.tolist() == [0] * 4


@pytest.mark.parametrize("realized", [False, True])
def test_bytes_of_a_slice_whose_rows_lie_apart(realized: bool) -> None:
    """Their reshape to one row would move elements: it is a copy, as in NumPy, and keeps the value of its time."""
    values = np.arange(24, dtype=np.float32).reshape(4, 6)
    t, a = Tensor(values.copy()), values.copy()
    if realized:
        t.realize()
    column, expected = t[:, :1].view("uint8"), a[:, :1].view(np.uint8)
    flat, expected_flat = column.reshape(-1), expected.reshape(-1)
    whole, expected_whole = t.view("uint8").reshape(-1), a.view(np.uint8).reshape(-1)
    wide, expected_wide = t.view("uint8")[1:].view("int32"), a.view(np.uint8)[1:].view(np.int32)
    t[0] = -1
    t[1:].fill_(2)
    a[0], a[1:] = -1, 2
    for ours, numpys in ((column, expected), (flat, expected_flat), (whole, expected_whole), (wide, expected_wide)):
        np.testing.assert_array_equal(ours.numpy(), numpys)


@pytest.mark.parametrize("seed", range(4))
def test_newer_tensors_are_those_since_the_last_question(seed: int) -> None:
    """Of several who ask: tensors go, ids are used again, more come than are looked at first."""

    class Mark:
        pass

    draw, tensors = random.Random(seed), TensorSet()
    made: list[Any] = [Tensor(0.0) for _ in range(5)]
    order: list[int] = []  # ids of those that live, the newest last; marks among them
    marks = [Mark() for _ in range(3)]
    for _ in range(600):
        act = draw.choice(["make", "make", "make", "many", "drop", "renew", "ask", "forget"])
        if act in ("make", "many"):
            for _ in range(1 if act == "make" else 2 * RECENT):
                tensors.add(t := made[0].detach())
                made.append(t)
                order.append(id(t))
        elif act == "drop" and len(made) > 5:
            t = made.pop(draw.randrange(5, len(made)))
            order.remove(id(t))
            del t
        elif act == "renew" and len(made) > 5:
            t = draw.choice(made[5:])
            tensors.renew(t)
            order.remove(id(t))
            order.append(id(t))
        elif act in ("ask", "forget"):
            mark = draw.choice(marks)
            since = order.index(id(mark)) + 1 if id(mark) in order else 0
            if act == "ask":
                found = [id(t) for t in tensors.newer(mark)]
                assert found == [i for i in order[since:] if i not in map(id, marks)][::-1]
            else:
                tensors.forget(mark)
                marks[marks.index(mark)] = Mark()
            if since:
                del order[since - 1]
            if act == "ask":
                order.append(id(mark))
        t = None
