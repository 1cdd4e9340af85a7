"""Gradients of what is written in place: through views, past no_grad(), behind detach(), in memory and out of it."""

from __future__ import annotations

import gc
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

import numpy as np
import pytest

from manygrad import Context, Tensor, nn, no_grad
from manygrad.tensor.uop import UOp
from tests.tensor.eager import Eager, Scalar, eager_no_grad

Case = Callable[[Tensor, Tensor], Any]


def leaf(*values: float) -> Tensor:
    return Tensor([float(v) for v in values], requires_grad=True)


def a_sum_in_memory(w: Tensor, u: Tensor) -> Any:
    total = Tensor([0.0])
    for k in (1, 2):
        total += (w * k).sum()
    total.item()
    total.backward()
    return [3, 3, 3], None


def memory_that_is_read_on_the_way(w: Tensor, u: Tensor) -> Any:
    x = Tensor([1.0, 1.0, 1.0])
    x += w
    x.tolist()
    x[1:] += u[1:] * 2
    x.tolist()
    (x * x).sum().backward()
    return [4, 8, 9], [0, 16, 18]


def memory_written_past_the_gradient(w: Tensor, u: Tensor) -> Any:
    x = Tensor([1.0, 1.0, 1.0])
    x.add_(w)
    with no_grad():
        x.mul_(3)
        x[0] = 7
    (x * x).sum().backward()
    return [14, 18, 24], None


def what_no_grad_made(w: Tensor, u: Tensor) -> Any:
    with no_grad():
        f = u * 2
    f += w
    (f * f).sum().backward()
    return [4, 6, 7], None


def what_no_grad_made_in_part(w: Tensor, u: Tensor) -> Any:
    with no_grad():
        f = u * 2
    f[1:] = w[1:]
    f[:2].mul_(u[:2])
    (f * f).sum().backward()
    return [0, 1, 6], [1, 4, 0]


def what_no_grad_made_and_read(w: Tensor, u: Tensor) -> Any:
    with no_grad():
        f = u * 2
    f.tolist()
    f[1] = w[0]
    (f * f).sum().backward()
    return [2, 0, 0], None


def what_is_detached(w: Tensor, u: Tensor) -> Any:
    h = u * 2
    h = h.detach()
    h.add_(w)
    (h * h).sum().backward()
    return [4, 6, 7], None


def what_is_detached_and_was_read(w: Tensor, u: Tensor) -> Any:
    h = (u * 2).realize()
    h = h.detach()
    h[:2] += w[:2]
    (h * h).sum().backward()
    return [4, 6, 0], None


def a_constant_written_under_no_grad(w: Tensor, u: Tensor) -> Any:
    v = Tensor([4.0, 9.0, 16.0]).sqrt()
    with no_grad():
        v.mul_(0.5)
    v[1:] = w[1:]
    (v * v).sum().backward()
    return [0, 4, 6], None


def copied_under_no_grad(w: Tensor, u: Tensor) -> Any:
    f = Tensor([5.0, 5.0, 5.0])
    with no_grad():
        f.copy_(u)
    f += w
    (f * f).sum().backward()
    return [3, 5, 6.5], None


def copied_under_no_grad_and_read(w: Tensor, u: Tensor) -> Any:
    f = Tensor([5.0, 5.0, 5.0])
    with no_grad():
        f.copy_(u)
    f.tolist()
    (f * w).sum().backward()
    return [0.5, 0.5, 0.25], None


def a_leaf_made_under_no_grad(w: Tensor, u: Tensor) -> Any:
    with no_grad():
        f = u * 2
        f.add_(w)
    f.requires_grad_()
    (f * w).sum().backward()
    return [2, 3, 3.5], None


def views_of_a_leaf_under_no_grad(w: Tensor, u: Tensor) -> Any:
    with no_grad():
        views = [w[:], w[...], w.reshape(3), w.view(-1), w.expand(3), w.permute(0), w.narrow(0, 0, 3), w.chunk(1)[0]]
    assert not any(v.requires_grad for v in views)
    (sum(views) * u).sum().backward()
    return None, [8, 16, 24]


def one_element_past_the_gradient(w: Tensor, u: Tensor) -> Any:
    h = w.sum() * u
    with no_grad():
        h[0] = 4
    (h * h).sum().backward()
    return [7.75, 7.75, 7.75], [48, 36, 18]


def the_gradient_of_what_a_detached_view_wrote_past(w: Tensor, u: Tensor) -> Any:
    h = w * 2
    h.detach().add_(u)
    h.sum().backward()
    return [2, 2, 2], None


def a_leaf_of_what_is_written_later(w: Tensor, u: Tensor) -> Any:
    h = w * 2
    z = h.detach().requires_grad_()
    s = z + h.detach()
    h.tolist()
    h.mul_(0.5)
    (s * s + z + h).sum().backward()
    assert z.grad is not None and z.grad.tolist() == [9, 17, 25]  # 2 s + 1
    return [1, 1, 1], None


def memory_of_a_leaf_that_another_gradient_flows_through(w: Tensor, u: Tensor) -> Any:
    h = Tensor([1.0, 1.0, 1.0])
    z = h.detach().requires_grad_()
    h[1:] = w[1:]
    z.tolist()
    with no_grad():
        z.add_(u)
    (h * h * z).sum().backward()
    assert z.grad is not None and z.grad.tolist() == [2.25, 6.25, 10.5625]  # h * h
    return [0, 12.5, 21.125], None  # 2 h z


def what_is_detached_from_what_has_no_gradient(w: Tensor, u: Tensor) -> Any:
    with no_grad():
        h = u * 2
    z = h.detach()
    h.add_(w)
    (h * z).sum().backward()
    return [2, 3, 3.5], None  # z, which is h


CASES: list[Case] = [
    f
    for f in list(globals().values())
    if callable(f) and getattr(f, "__module__", "") == __name__ and f.__name__ != "leaf"
]


@pytest.mark.parametrize("follow", [0, 1])
@pytest.mark.parametrize("case", CASES, ids=lambda f: f.__name__)
def test_gradients(case: Case, follow: int) -> None:
    with Context(FOLLOW=0) if not follow else nullcontext():
        for _ in range(4):
            w, u = leaf(1, 2, 3), leaf(0.5, 0.5, 0.25)
            for expected, t in zip(case(w, u), (w, u)):
                assert expected == (None if t.grad is None else t.grad.tolist())


@pytest.mark.parametrize("follow", [0, 1])
def test_a_value_that_is_gone_is_an_error(follow: int) -> None:
    with Context(FOLLOW=0) if not follow else nullcontext():
        for _ in range(4):
            w, x = leaf(1, 2), Tensor([1.0, 1.0])
            x *= w
            assert x.tolist() == [1, 2]
            with pytest.raises(RuntimeError, match=r"as it was before it was written to in place \(.*:\d+\)"):
                x.sum().backward()
                w.grad.tolist()
            x.copy_(Tensor([5.0, 6.0]))
            w.grad = None
            (x * w).sum().backward()
            assert w.grad.tolist() == [5, 6]


@pytest.mark.parametrize("follow", [0, 1])
def test_what_was_written_somewhere_stays_as_it_is(follow: int) -> None:
    """A computed value, stored or not, or memory of a leaf that is written to is no other tensor's memory then."""
    with Context(FOLLOW=0) if not follow else nullcontext():
        for _ in range(6):
            w, a, b = leaf(0, 1, 2), Tensor([5.0, 5.0, 5.0]), Tensor([7.0, 7.0, 7.0])
            h = w * 2
            h.tolist()
            h.copy_(a)
            h.add_(1.0)
            h[:] = b
            h.mul_(2.0)
            x = w.detach()
            x.copy_(a)
            x.copy_(b)
            y = (a * 1)[:]
            y.detach().mul_(3.0)
            z = y.detach()
            y[1:] = b[1:]
            total = (a * a).sum() + (w * w).sum() + (z * z).sum()
            total.backward()
            assert total.item() == 75 + 147 + 225 + 98
            assert (h.tolist(), a.tolist(), b.tolist()) == ([14.0] * 3, [5.0] * 3, [7.0] * 3)
            assert w.tolist() == x.tolist() == b.tolist() and w.grad is not None and w.grad.tolist() == [14.0] * 3


def test_a_state_that_is_carried_on_for_ever_holds_no_more() -> None:
    w, state = leaf(1, 2), Tensor([0.0, 0.0])
    for _ in range(30):
        state.assign(state * 0.5 + w).realize()
    state.sum().backward()
    np.testing.assert_allclose(w.grad.tolist(), [2, 2])
    counts = []
    for _ in range(4):
        for _ in range(150):
            state.assign(state * 0.5 + w).realize()
        gc.collect()
        counts.append(sum(type(x) is UOp for x in gc.get_objects()))
    assert max(counts) < counts[0] + 3000  # (a write has ten nodes)
    with pytest.raises(RuntimeError, match="more than 100 times"):
        state.sum().backward()
    state.copy_(w)
    state.tolist()
    (state * 3).sum().backward()
    np.testing.assert_allclose(w.grad.tolist(), [5, 5])


def test_behind_detach_while_the_other_lives() -> None:
    """Both lie in one memory, and each would have a gradient of its own: only the first one's is known."""
    w, x = leaf(1, 2), Tensor([1.0, 1.0])
    y = x.detach()
    y += w
    assert x.tolist() == y.tolist() == [2, 3] and y.requires_grad and not x.requires_grad
    with pytest.raises(RuntimeError, match=r"was detached, and then written in place.*clone\(\)"):
        (y * w).sum().backward()
    (x * w).sum().backward()
    assert w.grad.tolist() == [2, 3]


def test_a_result_that_is_written_to_leaves_the_next_one_alone() -> None:
    """A replay that writes where the last result lay, which nobody has any more, gave that one's gradient."""
    w = leaf(1, 2)
    for k in range(8):
        x = Tensor([float(k), 1.0])
        y = x * 2 - 1
        y.tolist()
        (y * w).sum().backward()
        assert w.grad.tolist() == [2 * k - 1, 1]
        w.grad = None
        y += w
        y.tolist()
        del y


def test_losses_read_after_the_step_that_follows_a_read() -> None:
    """Calls of one trace were made after the step of the next one, which they come before."""
    w = leaf(1, 2)
    opt = nn.optim.SGD([w], lr=0.25)
    for k in range(6):
        x = Tensor([1.0, 1.0])
        opt.zero_grad()
        x.add_(w)
        loss = (x * x).sum() + (w * w).sum()
        loss.backward()
        w.grad.tolist()
        before = w.tolist()
        opt.step()
        assert loss.item() == sum((1 + v) ** 2 + v * v for v in before), k


# *** random programs ***


class Step(NamedTuple):
    """One of a random program; `i` and `j` are numbers of values."""

    kind: int
    i: int
    j: int
    under_no_grad: bool
    number: float


VALUES = 9  # kinds that give another value; the others write
KINDS = 17


def program(seed: int) -> list[Step]:
    rng, steps, count = np.random.default_rng(seed), list[Step](), 4
    for _ in range(rng.integers(5, 13)):
        i, j = (int(k) for k in rng.integers(count, size=2))
        steps.append(Step(int(rng.integers(KINDS)), i, j, bool(rng.random() < 0.25), float(rng.integers(-3, 4)) / 2))
        count += steps[-1].kind < VALUES
    return steps


def run(steps: list[Step], values: list[Any], off: Callable[[], AbstractContextManager[Any]], first: int = 2) -> None:
    """`values` before `first` are leaves, which are not written to."""
    for kind, i, j, under_no_grad, number in steps:
        a, b = values[i], values[j]
        with off() if under_no_grad else nullcontext():
            if kind == 0:
                values.append(a * b)
            elif kind == 1:
                values.append(a + b * b)
            elif kind == 2:
                values.append(a * number)
            elif kind == 3:
                values.append(a.detach())
            elif kind == 4:
                values.append(a.clone())
            elif kind == 5:
                values.append(a[:])
            elif kind == 6:
                values.append(a + b.detach())
            elif kind == 7:
                values.append(a.sum() * b)
            elif kind == 8:
                values.append(a.detach().requires_grad_())
            elif i < first:
                pass
            elif kind == 9:
                a.add_(b)
            elif kind == 10:
                a[1:3] = b[2:]
            elif kind == 11:
                a.mul_(0.5)
            elif kind == 12:
                a.copy_(b)
            elif kind == 13:
                a[0] = number
            elif kind == 14:
                a[:2].add_(b[:2])
            elif kind == 15:
                a.detach().mul_(number)
            elif kind == 16:
                a.tolist()


@pytest.mark.parametrize("follow", [0, 1])
def test_random_programs(follow: int) -> None:
    """Against numbers that each know what they were computed from (`eager.py`), or an error. Whole numbers and halves:
    every sum is exact."""
    right = refused = 0
    for seed in range(120):
        steps = program(seed)
        for _ in range(3):
            numbers = np.random.default_rng(seed).integers(-2, 3, size=(4, 4)).astype(float)
            expected = [Eager(row, is_leaf=k < 2) for k, row in enumerate(numbers)]
            try:
                run(steps, expected, eager_no_grad)
            except RuntimeError:  # (a view of a leaf is written to)
                break
            loss = sum(((v * v).sum() for v in expected), Scalar(0.0))
            loss.backward()
            leaves = [k for k, v in enumerate(expected) if v.leaves and v.family.is_leaf]
            with Context(FOLLOW=0) if not follow else nullcontext():
                values = [Tensor(row, requires_grad=k < 2) for k, row in enumerate(numbers)]
                try:
                    run(steps, values, no_grad)
                    total = sum((v * v).sum() for v in values)
                    total.backward()
                    found = [total.item(), *(values[k].grad.tolist() for k in leaves)]
                except RuntimeError:
                    refused += 1
                    break
            assert found == [loss.value, *(expected[k].gradient() for k in leaves)], (seed, steps)
            right += 1
    assert right > 200 and refused < 30
