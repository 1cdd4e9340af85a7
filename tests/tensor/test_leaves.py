"""Which leaf a gradient belongs to: several ones in one memory, leaves that were written to or moved since, and writes
past a gradient. What is expected is PyTorch's, by hand."""

from __future__ import annotations

import copy
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import numpy as np
import pytest

from manygrad import Context, Tensor, TinyJit, autograd, dtypes, nn, no_grad


def leaf(*values: float) -> Tensor:
    return Tensor([float(v) for v in values], requires_grad=True)


def of(t: Tensor) -> Any:
    return None if t.grad is None else t.grad.tolist()


# *** several leaves in one memory ***


@pytest.mark.parametrize("stored", [True, False])
def test_leaves_of_one_value_have_gradients_of_their_own(stored: bool) -> None:
    x = Tensor([1.0, 2.0]) if stored else Tensor([0.5, 1.0]) * 2
    found = []
    for k in (1, 2, 3):
        xi = x.detach().requires_grad_(True)
        (xi**k).sum().backward()
        found.append(xi)
    assert [of(t) for t in found] == [[1, 1], [2, 4], [3, 12]]
    assert x.grad is None and not x.requires_grad


def test_parameters_made_of_one_tensor_are_apart_and_apart_from_it() -> None:
    w = Tensor([1.0, 2.0])
    a, b, unused = nn.Parameter(w), nn.Parameter(w), nn.Parameter(w)
    (a * b * b * w).sum().backward()
    assert (of(a), of(b), of(unused)) == ([1, 8], [2, 16], None)
    with no_grad():
        a += 1  # (in the same memory)
    assert w.tolist() == [2, 3] and b.tolist() == [2, 3]


def test_views_made_leaves_are_apart() -> None:
    x = Tensor([1.0, 2.0])
    first, again, both = x[0].requires_grad_(), x[0].requires_grad_(), x.detach()
    (first * again * again * 3 + both.sum()).backward()
    assert (of(first), of(again)) == (3, 6)


def test_what_is_made_of_such_a_leaf_requires_a_gradient_and_keeps_it_when_read() -> None:
    p = Tensor([1.0, 2.0]).detach().requires_grad_()
    y = p * 2
    assert y.requires_grad and y.tolist() == [2, 4]
    (y * y).sum().backward()
    assert of(p) == [8, 16]


def test_copies_of_a_leaf() -> None:
    p = leaf(1, 2)
    for q in (copy.copy(p), copy.deepcopy(p), nn.Parameter(p)):
        assert q.is_leaf and q.requires_grad
        (q * 3).sum().backward()
        assert of(q) == [3, 3]


# *** leaves that are written to between forward and backward pass ***

WRITES: dict[str, Callable[[Tensor], object]] = {
    "subtracted": lambda p: p.sub_(0.1),
    "data": lambda p: setattr(p, "data", Tensor([5.0, 5.0])),
    "copied": lambda p: p.copy_(Tensor([7.0, 7.0])),
    "an element": lambda p: p.__setitem__(0, 9.0),
    "interpolated": lambda p: p.lerp_(Tensor([0.0, 0.0]), 0.5),
    "a view": lambda p: p.detach()[1:].mul_(4.0),
}


@pytest.mark.parametrize("follow", [0, 1])
@pytest.mark.parametrize("how", WRITES)
def test_a_gradient_is_of_the_value_that_was_read(how: str, follow: int) -> None:
    with Context(FOLLOW=follow):
        p, q = leaf(1, 2), leaf(1, 2)
        loss, value = (p * p).sum() + q.sum(), p * 2
        with no_grad():
            WRITES[how](p)
        later = (p * 3).sum()
        assert value.requires_grad
        loss.backward()
        assert (of(p), of(q)) == ([2, 4], [1, 1])
        assert value.tolist() == [2, 4]
        later.backward()
        assert of(p) == [5, 7]


@pytest.mark.parametrize("optimizer", [nn.optim.SGD, nn.optim.Adam])
@pytest.mark.parametrize("how", ["clamp", "set", "data", "load", "nothing"])
def test_writing_one_parameter_leaves_the_others_their_gradients(optimizer: Any, how: str) -> None:
    """All lie in one memory after the first step."""
    w, b = Tensor(np.ones((3, 2), np.float32), requires_grad=True), leaf(1, 1)
    opt = optimizer([w, b], lr=0.1)
    for _ in range(7):
        opt.zero_grad()
        h = Tensor(np.ones((2, 3), np.float32)) @ w
        with no_grad():
            if how == "clamp":
                b.clamp_(min=0.95)
            elif how == "set":
                b[0] = 5
            elif how == "data":
                b.data.mul_(0.5)
            elif how == "load":
                b.copy_(Tensor([3.0, 4.0]))
        (h.sum() + b.sum()).backward()
        assert (of(w), of(b)) == ([[2, 2]] * 3, [1, 1])
        before = w.tolist()
        opt.step()
        assert w.tolist() != before


@pytest.mark.parametrize("follow", [0, 1])
def test_a_parameter_clamped_between_forward_and_backward_trains(follow: int) -> None:
    """As one that is clamped after the step."""

    def run(between: bool) -> list[Any]:
        p, w = Tensor([0.5, 0.9], requires_grad=True), Tensor([1.0, -2.0], requires_grad=True)
        opt = nn.optim.SGD([p, w], lr=0.05)
        for i in range(9):
            opt.zero_grad()
            loss = ((p * (i % 3) + 1) * w).square().sum()
            if between:
                with no_grad():
                    p.clamp_(max=0.8)
            loss.backward()
            opt.step()
            if not between:
                with no_grad():
                    p.copy_((p + 0.05 * p.grad).clamp(max=0.8) - 0.05 * p.grad)
        return [p.tolist(), w.tolist()]

    with Context(FOLLOW=follow):
        np.testing.assert_allclose(run(True), run(False), rtol=1e-5)


def test_a_leaf_that_moved_in_a_captured_step() -> None:
    p, q = leaf(1, 2), leaf(1, 2)
    opt = nn.optim.SGD([p, q], lr=0.0)

    @TinyJit
    def step() -> tuple[Tensor, Tensor]:
        opt.zero_grad()
        loss = (p * 3).sum() + (q * q).sum()
        with no_grad():
            p.clamp_(min=0.5)
        loss.backward()
        opt.step()
        return p.grad, q.grad  # type: ignore[return-value]

    for _ in range(5):
        a, b = step()
        assert (a.tolist(), b.tolist()) == ([3, 3], [2, 4])


# *** writes past a gradient ***

PAST: dict[str, Callable[[Tensor], object]] = {
    "data": lambda h: h.data.clamp_(0, 3),
    "detach": lambda h: h.detach().clamp_(0, 3),
    "new data": lambda h: setattr(h, "data", Tensor([2.0, 3.0])),
    "a part": lambda h: h.data.__setitem__(slice(1, None), 3.0),
}


def without_gradients(h: Tensor) -> None:
    with no_grad():
        h.clamp_(0, 3)


@pytest.mark.parametrize("read", [False, True])
@pytest.mark.parametrize("how", [*PAST, "no_grad"])
def test_a_write_that_no_gradient_sees_changes_none(how: str, read: bool) -> None:
    p, q = leaf(1, 2), leaf(1, 2)
    h = p * 2
    if read:
        h.tolist()
    PAST.get(how, without_gradients)(h)
    loss = (h * h).sum() + q.sum()
    if read:
        loss.item()
    loss.backward()
    assert h.tolist() == [2, 3] and (of(p), of(q)) == ([8, 12], [1, 1])


def test_a_write_that_a_gradient_sees_is_one() -> None:
    p = leaf(1, 2)
    h = p * 2
    h[1:] = 3.0
    (h * h).sum().backward()
    assert of(p) == [8, 0]


def test_a_trained_value_added_to_memory() -> None:
    """(Until something is read: then it is memory that was written.)"""
    ways: list[Callable[[Tensor, Tensor], object]] = [
        lambda x, p: x.__iadd__(p),
        lambda x, p: x.copy_(p),
        lambda x, p: x.__setitem__(slice(0, 2), p),
    ]
    for way in ways:
        x, p, q = Tensor([1.0, 2.0]), leaf(1, 2), leaf(1, 2)
        way(x, p)
        assert x.requires_grad
        ((x * 2).sum() + q.sum()).backward()
        assert (of(p), of(q)) == ([2, 2], [1, 1])


def test_a_leaf_is_not_what_is_detached_of_it() -> None:
    layer = nn.Linear(2, 2)
    nn.init.normal_(layer.weight)
    layer.weight.data.mul_(0.1)
    found = layer.weight.detach()
    assert found is not layer.weight and not found.requires_grad
    (Tensor([[1.0, 2.0]]) @ found + 0 * layer.bias).sum().backward()
    assert layer.weight.grad is None
    layer.weight.data.mul_(0.1)


# *** gradients that are written to ***


def test_a_gradient_that_is_the_same_everywhere_is_added_to_and_changed() -> None:
    p = leaf(1, 2, 3)
    p.mean().backward()
    p.mean().backward()
    np.testing.assert_allclose(p.grad.numpy(), [2 / 3] * 3, rtol=1e-6)  # type: ignore[union-attr]
    p.grad.mul_(3)  # type: ignore[union-attr]
    np.testing.assert_allclose(p.grad.numpy(), [2] * 3, rtol=1e-6)  # type: ignore[union-attr]
    with pytest.raises(ValueError, match="expanded view"):
        Tensor([1.0]).expand(3).mul_(2)


@pytest.mark.parametrize("clip", [nn.utils.clip_grad_norm_, nn.utils.clip_grad_value_])
def test_clipping_changes_the_gradient_that_others_hold(clip: Any) -> None:
    p = leaf(3, 4)
    (p * p).sum().backward()
    held = p.grad
    clip([p], 1.0)
    assert held is p.grad
    want = [0.6, 0.8] if clip is nn.utils.clip_grad_norm_ else [1, 1]
    np.testing.assert_allclose(held.numpy(), want, rtol=1e-5)  # type: ignore[union-attr]


def test_gradients_are_constants_unless_they_are_asked_for_with_their_graph() -> None:
    for create, want in ((False, [12.0]), (True, [36.0])):
        w = leaf(2)
        (g,) = autograd.grad((w**3).sum(), w, create_graph=create)
        assert g is not None and g.requires_grad is create
        (g * w).sum().backward()
        assert of(w) == want


@pytest.mark.parametrize("flags", ["froze", "switched"])
def test_a_layer_that_is_frozen_in_a_loop_that_evaluates(flags: str) -> None:
    def run() -> list[Any]:
        Tensor.manual_seed(0)
        a, b = nn.Linear(2, 2), nn.Linear(2, 1)
        opt, x, found = nn.optim.SGD([*a.parameters(), *b.parameters()], lr=0.01), Tensor([[1.0, 2.0]]), []
        for step in range(20):
            a.requires_grad_(step < 8 if flags == "froze" else step % 6 < 3)
            opt.zero_grad()
            b(a(x)).sum().backward()
            opt.step()
            with no_grad():
                b(a(x))
            found.append((of(a.weight), of(b.weight)))
        return [*found, a.weight.tolist(), b.weight.tolist()]

    with Context(FOLLOW=0):
        want = run()
    assert run() == want


@pytest.mark.parametrize("seed", range(40))
def test_what_was_read_and_is_detached_elsewhere_has_its_gradient(seed: int) -> None:
    """As a softmax's maximum is: the value in one place, detached in another, in any order, read or not."""

    def gradients(reads: bool) -> Any:
        rng = np.random.default_rng(seed)
        leaves = [Tensor(rng.standard_normal(3), requires_grad=True) for _ in range(2)]
        values: list[Tensor] = [*leaves]
        for _ in range(8):
            a, b = (values[i] for i in rng.integers(len(values), size=2))
            a, b = (t.detach() if rng.random() < 0.3 else t for t in (a, b))
            values.append([a * b, a + b.sin(), a.sum() * b, b - a.max()][rng.integers(4)])
            is_read, which = rng.random() < 0.5, values[rng.integers(len(values))]
            if reads and is_read:
                which.tolist()
        loss = sum((v.sum() for v in values), Tensor(0.0, dtype=dtypes.float64))
        if reads:
            loss.item()
        loss.backward()
        return [of(t) for t in leaves]

    for got, want in zip(gradients(True), gradients(False)):
        np.testing.assert_allclose(got, want, rtol=1e-9)


def test_a_leaf_that_was_written_twice_and_is_read_detached_of_before() -> None:
    p, c = leaf(1, 2), Tensor([3.0, 4.0])
    h = p * c
    with no_grad():
        p.mul_(0.5)
    x = p.sum() * h.detach()
    with no_grad():
        p.mul_(0.5)
    x.sum().backward()  # (of the three nodes that p was, the second has a gradient)
    assert of(p) == [11, 11]


# *** values whose leaves were written to ***


def _lazily_over_a_write(w: Tensor, opt: Any) -> Tensor:
    h = w * w
    with no_grad():
        w.clamp_(max=1.5)
    h.tolist()
    return h


def _copied_and_stored_with_a_write(w: Tensor, opt: Any) -> Tensor:
    h, other = w.clone(), leaf(1)
    with no_grad():
        w.mul_(0.9)
    other.tolist()  # (which carries out the write, and so stores the copy)
    return h


def _kept_over_a_step(w: Tensor, opt: Any) -> Tensor:
    kept = (w * 3).sin()
    w.sum().backward()
    opt.step()
    kept.tolist()
    return kept


def _carried_state(w: Tensor, opt: Any) -> Tensor:
    h = Tensor([1.0, 1.0])
    for _ in range(3):
        h = (h * w).tanh()
        opt.zero_grad()
        w.sum().backward()
        opt.step()
    return h


def _written_in_place(w: Tensor, opt: Any) -> Tensor:
    x = Tensor([1.0, 2.0])
    x += w
    w.sum().backward()
    opt.step()
    x.tolist()
    return x


def _computed_of_such_a_one(w: Tensor, opt: Any) -> Tensor:
    y = _kept_over_a_step(w, opt) * 2
    y.tolist()
    return y


def _written_in_part_since(w: Tensor, opt: Any) -> Tensor:
    x = _written_in_place(w, opt)
    with no_grad():
        x[0] = 5
    x.tolist()
    return x


ENDED = [
    f for name, f in sorted(globals().items()) if name.startswith("_") and callable(f) and f.__module__ == __name__
]


@pytest.mark.parametrize("follow", [0, 1])
@pytest.mark.parametrize("made", ENDED, ids=lambda f: f.__name__)
def test_a_gradient_that_ended_is_no_constant(made: Callable[[Tensor, Any], Tensor], follow: int) -> None:
    """It counted as one, without a word. What is detached is one, and so is memory that was filled anew."""
    with Context(FOLLOW=follow):
        w, q = leaf(1, 2), leaf(1, 2)
        ended = made(w, nn.optim.SGD([w], lr=0.1))
        values = ended.tolist()
        w.grad = None
        with pytest.raises(RuntimeError, match="written .*backward.*detach"):
            (ended * q + w).sum().backward()
        assert (of(w), of(q)) == (None, None)
        (ended.detach() * q + (ended > -9).cast("float32") * w).sum().backward()
        assert (of(w), of(q)) == ([1, 1], values)
        with no_grad():  # (past the gradient)
            ended.copy_(Tensor([0.0, 1.0]))
        ended.detach().mul_(2)
        assert ended.tolist() == [0, 2] and ended.requires_grad
        with pytest.raises(RuntimeError, match="written .*backward.*detach"):
            (ended * q).sum().backward()
        ended.copy_(Tensor([3.0, 4.0]))
        ended.tolist()
        (ended * q).sum().backward()
        np.testing.assert_allclose(of(q), [values[0] + 3, values[1] + 4])


def test_a_state_that_is_no_longer_detached_in_a_replayed_loop() -> None:
    w, h = leaf(1, 2), Tensor([1.0, 1.0])
    opt = nn.optim.SGD([w], lr=0.01)
    for step in range(14):
        opt.zero_grad()
        s = (h * w).tanh()
        loss = s.sum()
        if step == 12:
            with pytest.raises(RuntimeError, match="was computed from a parameter"):
                loss.backward()
            return
        loss.backward()
        opt.step()
        h = s.detach() if step < 11 else s
    raise AssertionError("never reached")


def test_sums_of_losses_are_read_and_begun_anew_in_a_replayed_loop() -> None:
    w, total = leaf(1, 2), Tensor(0.0)
    opt = nn.optim.SGD([w], lr=0.25)
    for step in range(12):
        opt.zero_grad()
        loss = (w * w).sum()
        loss.backward()
        opt.step()
        total += loss
        if step % 3 == 2:
            assert total.item() == 5 * sum(0.25**k for k in range(step - 2, step + 1))
            total.zero_()


@pytest.mark.parametrize("follow", [0, 1])
def test_a_parameter_that_is_frozen_after_another_in_its_memory_was_written_is_a_leaf(follow: int) -> None:
    with Context(FOLLOW=0) if not follow else nullcontext():
        for _ in range(3):
            layer = nn.Linear(3, 4)
            optimizer = nn.optim.SGD(layer.parameters(), lr=0.1)
            layer(Tensor([[1.0, 2.0, 3.0]])).square().sum().backward()
            optimizer.step()  # (which puts them into one memory)
            with no_grad():
                layer.bias[0] = 0.0
            layer.weight.requires_grad_(False)
            assert layer.weight.is_leaf and not layer.weight.requires_grad
            assert copy.deepcopy(layer).weight.tolist() == layer.weight.tolist()
