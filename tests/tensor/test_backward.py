"""How backward() and gradient() behave: what gets a gradient, what is remembered, and what is refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from manygrad import GlobalCounters, Tensor, autograd, nn, no_grad
from manygrad.runtime.engine import computed
from manygrad.tensor.stored import SOURCES, carries


def test_gradients_add_up_until_they_are_cleared() -> None:
    x = Tensor([1.0, 2.0], requires_grad=True)
    (x * 3).sum().backward()
    (x * x).sum().backward()
    assert x.grad.tolist() == [5.0, 7.0]  # type: ignore[union-attr]
    x.grad = None
    (x * 2).sum().backward()
    assert x.grad.tolist() == [2.0, 2.0]  # type: ignore[union-attr]


def test_only_what_requires_a_gradient_gets_one() -> None:
    x, y, z = Tensor([1.0, 2.0], requires_grad=True), Tensor([3.0, 4.0]), Tensor([5.0], requires_grad=True)
    (x * y).sum().backward()
    assert x.grad.tolist() == [3.0, 4.0] and y.grad is None and z.grad is None  # type: ignore[union-attr]


def test_a_gradient_flows_on_through_what_is_asked_to_require_one() -> None:
    """As in PyTorch: of what was computed from a leaf it changes nothing, and cannot be undone."""
    x = Tensor([1.0, 2.0], requires_grad=True)
    h = (x * 3).requires_grad_()
    assert h.requires_grad and not h.is_leaf
    (h * h).sum().backward()
    assert h.grad is None and x.grad.tolist() == [18.0, 36.0]  # type: ignore[union-attr]
    read = (x * 3).realize()
    read.requires_grad = True
    read.sum().backward()
    assert x.grad.tolist() == [21.0, 39.0]  # type: ignore[union-attr]
    with pytest.raises(RuntimeError, match="detach"):
        h.requires_grad_(False)
    h.retain_grad()
    (h * 2).sum().backward()
    assert h.grad.tolist() == [2.0, 2.0]  # type: ignore[union-attr]


@pytest.mark.parametrize("make", [lambda h: Tensor(h, requires_grad=True), nn.Parameter, lambda h: h.detach()])
def test_a_leaf_made_of_a_computed_value_is_one(make: Callable[[Tensor], Tensor]) -> None:
    x = Tensor([1.0, 2.0], requires_grad=True)
    p = make(x * 3).requires_grad_()
    assert p.is_leaf and p.requires_grad
    (p * p).sum().backward()
    assert x.grad is None and p.grad.tolist() == [6.0, 12.0]  # type: ignore[union-attr]
    q = nn.Parameter(x)  # (of a leaf: another one in the same memory)
    (q * 2).sum().backward()
    assert q.grad.tolist() == [2.0, 2.0] and q.is_leaf  # type: ignore[union-attr]


def test_detach_stops_the_flow() -> None:
    x = Tensor([1.0, 2.0], requires_grad=True)
    (x * x.detach() + x.detach()).sum().backward()
    assert x.grad.tolist() == [1.0, 2.0]  # type: ignore[union-attr]
    with pytest.raises(RuntimeError, match="no tensor with requires_grad=True stands below"):
        (Tensor([1.0]) * 2).sum().backward()


@pytest.mark.parametrize(
    "look", [lambda t: t.sum().item(), lambda t: t.realize(), lambda t: t.numpy(), lambda t: t.tolist()]
)
def test_backward_after_the_value_was_read(look: Callable[[Tensor], object]) -> None:
    w = Tensor([[1.0, 2.0], [3.0, 4.0]], requires_grad=True)
    h = (Tensor([[1.0, 1.0]]) @ w).relu()
    loss = (h**2).mean()
    look(h)
    look(loss)
    loss.backward()
    assert w.grad.tolist() == [[4.0, 6.0], [4.0, 6.0]]  # type: ignore[union-attr]


def test_a_written_value_has_the_history_of_what_was_written() -> None:
    """A running sum of losses: its graph is not the one that its storage was first made of, nor is it a constant."""
    w = Tensor([2.0], requires_grad=True)
    total = (w * 1).realize()
    for _ in range(2):
        total.assign(total + w + 5).realize()
    (total * w).sum().backward()
    assert w.grad.tolist() == [16.0 + 3 * 2]  # type: ignore[union-attr]
    w.grad = None
    (total.detach() * w).sum().backward()
    assert w.grad.tolist() == [16.0]  # type: ignore[union-attr]


def test_reading_first_changes_no_gradient() -> None:
    """Dropout and an assigned weight in one model: backward() uses the numbers that the value was computed with,
    and writes nothing again."""

    def run(read: bool) -> list[list[float]]:
        Tensor.manual_seed(1)
        w, scale = Tensor([[0.5, -1.0], [2.0, 0.25]], requires_grad=True).realize(), Tensor([3.0]).realize()
        w.assign(w * 2)
        scale.assign(scale + 1)
        with Tensor.train():
            h = ((Tensor([[1.0, 2.0], [3.0, 4.0]]) @ w).dropout(0.5) * scale).tanh()
            loss = (h * h).mean(1).dropout(0.5).sum()
            if read:
                h.numpy()
                loss.item()
            loss.backward()
        assert w.grad is not None
        return [w.grad.tolist(), w.tolist(), scale.tolist(), [loss.item()]]

    assert run(True) == run(False)


def test_backward_reads_what_is_stored() -> None:
    w = Tensor(np.ones((8, 8)), requires_grad=True).realize()
    x = Tensor(np.ones((4, 8))).realize()

    def kernels(read: bool) -> int:
        h = (x @ w).exp()
        loss = (h @ w).sum()
        if read:
            h.realize(loss)
        w.grad = None
        before = GlobalCounters.kernel_count
        loss.backward()
        w.grad.realize()  # type: ignore[attr-defined]
        return GlobalCounters.kernel_count - before

    assert kernels(read=True) < kernels(read=False)


def test_backward_through_what_was_overwritten_is_an_error() -> None:
    w, x = Tensor([2.0, 3.0], requires_grad=True), Tensor([1.0, 1.0]).realize()
    for written in (x, w):
        h = (w * x * x).realize()
        written.assign(written + 1).realize()
        with pytest.raises(
            RuntimeError,
            match=r"a value of shape \(2,\) was computed and then what it was computed from was overwritten",
        ):
            h.sum().backward()
        assert w.grad is None
    (w * x).sum().backward()  # computed again, it is fine
    assert w.grad.tolist() == [2.0, 2.0]  # type: ignore[attr-defined]


@pytest.mark.parametrize("known", [False, True])
def test_backward_through_noise_of_which_a_part_was_trained_from(known: bool) -> None:
    """A generator's images, which the judge's step stores on its way, while later draws wait to be noted."""
    Tensor.manual_seed(3)
    maker, judge = nn.Linear(4, 4), nn.Linear(4, 1)
    optimizer = nn.optim.SGD(judge.parameters(), lr=0.1)
    z = Tensor.randn(8, 4)
    if known:  # (then the numbers do not stand on the generator's state any more)
        z = Tensor(z.numpy())
    made = maker(z)
    judge(made.detach()).mean().backward()
    optimizer.step()
    judge(made).mean().backward()
    assert maker.weight.grad is not None
    want = np.outer(judge.weight.numpy()[0], z.numpy().mean(0))
    np.testing.assert_allclose(maker.weight.grad.numpy(), want, rtol=1e-5, atol=1e-6)


def test_two_parameters_that_start_equal_have_two_gradients() -> None:
    """Ones and zeros are one node in the graph; parameters are not."""
    a, b = Tensor.ones(2, requires_grad=True), Tensor.ones(2, requires_grad=True)
    (a * 2 + b * 3).sum().backward()
    assert (a.grad.tolist(), b.grad.tolist()) == ([2.0, 2.0], [3.0, 3.0])  # type: ignore[union-attr]
    a, b = Tensor.zeros(2), Tensor.zeros(2)
    a.requires_grad_(), b.requires_grad_()
    y = (a * 2 + b * 3 + 1).realize()  # stored before the parameters are
    a.realize()
    (y * y).sum().backward()
    assert (a.grad.tolist(), b.grad.tolist()) == ([4.0, 4.0], [6.0, 6.0])  # type: ignore[union-attr]


def test_backward_with_a_given_gradient() -> None:
    x = Tensor([1.0, 2.0], requires_grad=True)
    (x * x).backward(Tensor([10.0, 100.0]))
    assert x.grad.tolist() == [20.0, 400.0]  # type: ignore[union-attr]


def test_gradient_leaves_grad_alone_and_gives_zeros_where_nothing_flows() -> None:
    x, y, z = Tensor([1.0, 2.0], requires_grad=True), Tensor([3.0], requires_grad=True), Tensor([4.0])
    gx, gy, gz = ((x * x).sum() + z.detach()).gradient(x, y, z)
    assert gx.tolist() == [2.0, 4.0] and gy.tolist() == gz.tolist() == [0.0] and x.grad is None


def test_no_zeros_for_what_a_computed_value_may_depend_on() -> None:
    """A value in memory knows only that it was computed from what has no requires_grad."""
    for kept in (True, False):
        x = Tensor([1.0, 2.0])
        x.requires_grad = kept
        (slope,) = (x**3).sum().gradient(x)
        assert slope.sum().gradient(x)[0].tolist() == [6.0, 12.0]
        for value in (slope, x * x * 3):
            value.realize()
            if kept:
                assert value.sum().gradient(x)[0].tolist() == [6.0, 12.0]
            else:
                with pytest.raises(RuntimeError, match="was computed from one of the targets"):
                    value.sum().gradient(x)


STORED: dict[str, Callable[[Tensor], tuple[Tensor, Tensor]]] = {  # -> (what a gradient does not flow through, target)
    "directly": lambda x: ((x * x).realize(), x),
    "lazy target": lambda x: (((y := x + 1) * y).realize(), y),
    "view": lambda x: (((y := x.reshape(2, 1)) * 2).realize().reshape(2), y),
    "through another": lambda x: (((x * x).realize() * 2).realize(), x),
    "in one go": lambda x: (((y := x * x) + 1).realize(y), y),
    "below a trained one": lambda x: (((x * x).realize() * Tensor([1.0, 2.0], requires_grad=True)).realize(), x),
}


@pytest.mark.parametrize("name", STORED)
def test_a_part_that_a_gradient_cannot_see_is_an_error(name: str) -> None:
    """The rest of it would be a wrong number."""
    z, target = STORED[name](Tensor([1.0, 2.0]))
    for value in (z, z + target.reshape(2)):
        with pytest.raises(RuntimeError, match=r"as far as is known|was computed from one of the targets"):
            value.sum().gradient(target)
        with pytest.raises(RuntimeError, match="was computed from one of the targets"):
            autograd.grad(value.sum(), target, allow_unused=True)
    (z.detach() + target.reshape(2)).sum().gradient(target)


def test_values_that_others_were_computed_from_are_constants_to_these() -> None:
    x, w = Tensor([1.0, 2.0]), Tensor([3.0, 4.0])
    z = (x * 2).realize()
    assert (z * w + x.detach()).sum().gradient(w)[0].tolist() == [2.0, 4.0]  # (no other target)
    assert (z * 3).sum().gradient(z)[0].tolist() == [3.0, 3.0]
    z.assign(Tensor([5.0, 6.0])).realize()  # and no longer what was computed
    assert (z + x).sum().gradient(x)[0].tolist() == [1.0, 1.0]
    with no_grad():
        y = (x * 2).realize()
    assert (y + x).sum().gradient(x)[0].tolist() == [1.0, 1.0]


def test_a_long_computation_does_not_remember_what_is_gone() -> None:
    first = x = Tensor([1.0, 2.0]).realize()
    for _ in range(50):
        x = (x * 0.5 + 1).realize()
    sources = SOURCES[x.uop]
    assert first.uop in sources and Tensor([3.0]).realize().uop not in sources
    links, todo = 0, [sources]
    while todo:
        links, todo = links + 1, [*todo.pop().below, *todo]
    assert links < 8


def test_values_computed_together_are_gone_over_once(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[object] = []
    monkeypatch.setattr(computed, "carries", lambda u: bool(seen.append(u)) or carries(u))
    counts = []
    for n in (40, 80):
        first = y = Tensor([1.0, 2.0]).realize()
        made = [y := (y * 0.5 + i).contiguous() for i in range(n)]
        seen.clear()
        made[0].realize(*made[1:])
        counts.append(len(seen))
        assert all(first.uop in SOURCES[t.uop] for t in made)
        assert made[3].uop in SOURCES[made[30].uop] and made[30].uop not in SOURCES[made[3].uop]
    assert 0 < counts[1] < 2.2 * counts[0]


def test_gradients_of_the_half_types() -> None:
    for kind in ("float16", "bfloat16"):
        x = Tensor(np.ones((4, 3))).cast(kind).realize().requires_grad_()
        (x * Tensor([1.0, 2.0, 3.0])).sum().backward()
        assert x.grad.dtype is x.dtype and x.grad.tolist() == [[1.0, 2.0, 3.0]] * 4  # type: ignore[union-attr]


def test_deep_graphs_and_shared_values() -> None:
    x = Tensor([1.0], requires_grad=True)
    y = x
    for _ in range(3000):
        y = y * 1.0001 + 0.0
    y.sum().backward()
    assert x.grad.item() == pytest.approx(1.0001**3000, rel=1e-3)  # type: ignore[union-attr]


@pytest.mark.parametrize("devices", ["CPU:1", ("CPU:0", "CPU:1")])
def test_a_gradient_that_is_a_constant_lies_with_its_tensor(devices: Any) -> None:
    w = Tensor(np.ones(3, np.float32)).to(devices).contiguous().realize().requires_grad_()
    (w * 2).sum().backward()
    assert w.grad is not None and w.grad.device == devices
    assert w.grad.numpy().tolist() == [2.0, 2.0, 2.0] and w.grad.device == devices
    assert (w + w.grad).tolist() == [3.0, 3.0, 3.0]
