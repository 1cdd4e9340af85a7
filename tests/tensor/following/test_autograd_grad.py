"""Loops that take gradients of gradients, or of inputs, are replayed: physics-informed networks, gradient penalties,
MAML, adversarial examples."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from typing import Any

import numpy as np
import pytest

from manygrad import Context, Tensor, autograd, nn, no_grad
from manygrad.nn import functional as F
from manygrad.tensor.deferred import counts
from manygrad.tensor.environment import FOLLOW
from tests.tensor.following.loops import array

pytestmark = pytest.mark.skipif(not FOLLOW, reason="FOLLOW=0: no call is put off")
STEPS = 14
Step = Callable[[], Tensor]
Draw = Callable[..., np.ndarray]


def network(*sizes: int, draw: Draw) -> nn.Sequential:
    layers: list[nn.Module] = []
    for a, b in pairwise(sizes):
        layers += [nn.Tanh()] * bool(layers) + [nn.Linear(a, b)]
    model = nn.Sequential(*layers)
    with no_grad():
        for p in model.parameters():
            p.copy_(Tensor(draw(*p.shape) - np.float32(0.5)))
    return model


def physics_informed(draw: Draw) -> Step:
    net = network(2, 8, 1, draw=draw)
    opt = nn.optim.Adam(net.parameters(), lr=1e-2)

    def step() -> Tensor:
        x = Tensor(draw(6, 2), requires_grad=True)
        opt.zero_grad()
        u = net(x)
        (d,) = autograd.grad(u.sum(), x, create_graph=True)
        assert d is not None
        (second,) = autograd.grad(d[:, 0].sum(), x, create_graph=True)
        assert second is not None
        loss = ((second[:, 0] - d[:, 1]) ** 2).mean()
        loss.backward()
        opt.step()
        return loss

    return step


def two_points(draw: Draw) -> Step:
    net, ones = network(2, 8, 1, draw=draw), Tensor.ones(6, 1)
    opt = nn.optim.SGD(net.parameters(), lr=1e-2)

    def step() -> Tensor:
        x, t = (Tensor(draw(6, 1)).requires_grad_() for _ in range(2))
        opt.zero_grad()
        u = net(Tensor.cat([x, t], dim=1))
        dx, dt = autograd.grad(u, (x, t), grad_outputs=ones, create_graph=True)
        assert dx is not None and dt is not None
        loss = ((dt + u * dx) ** 2).mean()
        loss.backward()
        opt.step()
        return loss

    return step


def gradient_penalty(draw: Draw) -> Step:
    made, critic = network(3, 8, 4, draw=draw), network(4, 8, 1, draw=draw)
    first, second = (nn.optim.Adam(m.parameters(), lr=1e-2) for m in (made, critic))

    def step() -> Tensor:
        real, noise, share = Tensor(draw(5, 4)), Tensor(draw(5, 3)), Tensor(draw(5, 1))
        second.zero_grad()
        fake = made(noise).detach()
        between = (share * real + (1 - share) * fake).requires_grad_()
        (g,) = autograd.grad(outputs=critic(between).sum(), inputs=between, create_graph=True)
        assert g is not None
        loss = critic(fake).mean() - critic(real).mean() + 10 * ((g.norm(2, dim=1) - 1) ** 2).mean()
        loss.backward()
        second.step()
        assert between.grad is not None
        first.zero_grad()
        other = -critic(made(noise)).mean()
        other.backward()
        first.step()
        return loss + other

    return step


def inner_steps(draw: Draw) -> Step:
    net = network(2, 8, 1, draw=draw)
    opt = nn.optim.Adam(net.parameters(), lr=1e-2)

    def forward(x: Tensor, w: list[Tensor]) -> Tensor:
        return (x @ w[0].T + w[1]).tanh() @ w[2].T + w[3]

    def step() -> Tensor:
        opt.zero_grad()
        total: Any = 0
        for _ in range(2):
            x, y = Tensor(draw(4, 2)), Tensor(draw(4, 1))
            ps = list(net.parameters())
            grads = autograd.grad(F.mse_loss(forward(x, ps), y), ps, create_graph=True)
            fast = [p - 0.1 * g for p, g in zip(ps, grads) if g is not None]
            total = total + F.mse_loss(forward(Tensor(draw(4, 2)), fast), y)
        total.backward()
        opt.step()
        found: Tensor = total
        return found

    return step


def adversarial(draw: Draw) -> Step:
    net = network(4, 8, 3, draw=draw)
    opt = nn.optim.SGD(net.parameters(), lr=1e-1)

    def step() -> Tensor:
        x, y, d = Tensor(draw(6, 4)), Tensor(np.arange(6) % 3), Tensor.zeros(6, 4).requires_grad_()
        for _ in range(2):
            (g,) = autograd.grad(F.cross_entropy(net(x + d), y), d)
            assert g is not None
            d = (d.detach() + 0.05 * g.sign()).clamp(-0.1, 0.1).requires_grad_()
        opt.zero_grad()
        loss = F.cross_entropy(net(x + d.detach()), y)
        loss.backward()
        opt.step()
        return loss

    return step


def gradients_of_inputs_that_are_read(draw: Draw) -> Step:
    net = network(4, 8, 1, draw=draw)
    opt = nn.optim.SGD(net.parameters(), lr=1e-2)

    def step() -> Tensor:
        x = Tensor(draw(6, 4), requires_grad=True)
        opt.zero_grad()
        loss = (net(x) ** 2).mean()
        loss.backward()
        assert x.grad is not None
        scale = float(x.grad.abs().max().item())
        opt.step()
        return loss * scale

    return step


def moved_inputs(draw: Draw) -> Step:
    net = network(4, 8, 1, draw=draw)
    opt = nn.optim.SGD(net.parameters(), lr=1e-2)

    def step() -> Tensor:
        x = Tensor(draw(6, 4), requires_grad=True)
        for _ in range(3):
            (g,) = autograd.grad(net(x).sum(), x)
            assert g is not None
            with no_grad():
                x.sub_(0.1 * g)
        opt.zero_grad()
        loss = net(x.detach()).mean()
        loss.backward()
        opt.step()
        return loss

    return step


def by_hand(draw: Draw) -> Step:
    net = network(4, 8, 1, draw=draw)
    ps = list(net.parameters())

    def step() -> Tensor:
        loss = (net(Tensor(draw(6, 4))) ** 2).mean()
        grads = autograd.grad(loss, ps, create_graph=True)
        dot = sum(((g * g).sum() for g in grads if g is not None), Tensor(0.0))
        with no_grad():
            for p, g in zip(ps, autograd.grad(dot, ps)):
                if g is not None:
                    p -= 0.01 * g
        return loss

    return step


def unused(draw: Draw) -> Step:
    net = network(4, 8, 1, draw=draw)
    opt = nn.optim.SGD(net.parameters(), lr=1e-2)

    def step() -> Tensor:
        x, other = Tensor(draw(6, 4), requires_grad=True), Tensor(draw(6, 4), requires_grad=True)
        opt.zero_grad()
        g, none = autograd.grad(net(x).sum(), [x, other], create_graph=True, allow_unused=True)
        assert g is not None and none is None
        loss = (g**2).mean()
        loss.backward()
        opt.step()
        return loss

    return step


def an_input_that_is_trained(draw: Draw) -> Step:
    """The network's gradients, which nobody clears, add up: some are made of numbers alone."""
    net, x = network(4, 8, 1, draw=draw), Tensor(draw(3, 4), requires_grad=True)
    opt = nn.optim.Adam([x], lr=1e-1)

    def step() -> Tensor:
        opt.zero_grad()
        loss = (x**2).mean() - net(x).mean()
        loss.backward()
        opt.step()
        total = sum((p.grad.sum() for p in net.parameters() if p.grad is not None), Tensor(0.0))
        return loss + total

    return step


LOOPS = [
    physics_informed, two_points, gradient_penalty, inner_steps, adversarial, gradients_of_inputs_that_are_read,
    moved_inputs, by_hand, unused, an_input_that_is_trained,
]  # fmt: skip


def run(loop: Callable[[Draw], Step], steps: int = STEPS) -> list[float]:
    Tensor.manual_seed(1)
    rng = np.random.default_rng(2)
    step = loop(lambda *shape: rng.random(shape, dtype=np.float32))
    return [step().item() for _ in range(steps)]


@pytest.mark.parametrize("loop", LOOPS, ids=lambda f: f.__name__)
def test_a_loop(loop: Callable[[Draw], Step]) -> None:
    with Context(FOLLOW=0):
        want = run(loop)
    assert len(set(want)) == STEPS
    before = counts.COUNTS.replays
    found = run(loop)
    assert counts.COUNTS.replays - before >= STEPS - 7, counts.COUNTS.cause
    if loop is gradients_of_inputs_that_are_read:  # (a read in the middle stores other values: another kernel's sum)
        np.testing.assert_allclose(found, want, rtol=1e-5)
    else:
        assert found == want


def test_a_value_that_is_trained_is_a_leaf_whoever_made_its_calls() -> None:
    """Read, kept, written to and detached after it was put off."""
    w = Tensor([1.0, 2.0], requires_grad=True)
    kept: list[Tensor] = []
    for k in range(10):
        x = (Tensor([float(k), 1.0]) * 2).requires_grad_()
        assert x.requires_grad and x.is_leaf and not x.detach().requires_grad
        loss = (x * w).sum() ** 2
        if k % 2:
            assert x.tolist() == [2 * k, 2]
        loss.backward()
        assert x.grad is not None and w.grad is not None
        s = 2 * (2.0 * k + 4)
        assert (x.grad.tolist(), w.grad.tolist()) == ([s, 2 * s], [2 * k * s, 2 * s])
        w.grad = None
        with no_grad():
            x.add_(1)
        kept.append(x)
        (x * x).sum().backward()
        assert x.grad.tolist() == [s + 2 * (2 * k + 1), 2 * s + 6]
    assert [t.tolist() for t in kept] == [[2 * k + 1, 3] for k in range(10)]


def test_hooks_are_called_in_each_step() -> None:
    w, seen = Tensor([1.0, 2.0], requires_grad=True), list[list[float]]()
    for k in range(12):
        if k == 6:
            w.register_hook(lambda g: seen.append(g.tolist()) or g * 2)  # type: ignore[func-returns-value]
        x = Tensor([float(k), 1.0])
        (g,) = autograd.grad((w * x).sum(), w)
        assert g is not None and g.tolist() == [k * (1 + (k >= 6)), 1 + (k >= 6)]
    assert seen == [[k, 1] for k in range(6, 12)]


def test_parameters_where_new_inputs_were_met_before() -> None:
    """They are trained in the next loop, and by hand."""

    def train() -> list[list[float]]:
        found = []
        for trained in (False, True, True):
            w, p = (Tensor(array(2, seed=k), requires_grad=True) for k in range(2))
            opt = nn.optim.SGD([w], lr=0.01)
            for k in range(10):
                x = p if trained else Tensor(array(2, seed=k), requires_grad=True)
                opt.zero_grad()
                loss = (x * w).sum() ** 2
                loss.backward()
                opt.step()
                if trained:
                    with no_grad():
                        p -= 0.01 * p.grad
                    p.grad = None
                found.append([loss.item(), *p.tolist(), *w.tolist()])
        return found

    with Context(FOLLOW=0):
        want = train()
    assert train() == want
