"""Steps of several models and optimisers, through whose values gradients flow on after one of them has stepped."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from manygrad import Tensor, nn
from manygrad.nn import functional as F
from manygrad.tensor.environment import FOLLOW
from tests.tensor.following.loops import Counts, array, close, same

pytestmark = pytest.mark.skipif(not FOLLOW, reason="FOLLOW=0: no call is put off")
STEPS = 12


def weights(*models: nn.Module) -> list[np.ndarray]:
    return [t.numpy() for m in models for t in m.state_dict().values()]


def gradients(*models: nn.Module) -> list[np.ndarray]:
    return [p.grad.numpy() for m in models for p in m.parameters() if p.grad is not None]


def test_encoder_and_decoder_with_an_optimiser_each(counts: Counts) -> None:
    def run() -> list[np.ndarray]:
        Tensor.manual_seed(1)
        models = [nn.Linear(4, 8), nn.Linear(8, 3)]
        optimizers = [nn.optim.Adam(m.parameters(), lr=0.01) for m in models]
        found = []
        for i in range(STEPS):
            for o in optimizers:
                o.zero_grad()
            loss = F.cross_entropy(models[1](models[0](Tensor(array(5, 4, seed=i))).relu()), Tensor(np.arange(5) % 3))
            loss.backward()
            for o in optimizers:
                o.step()
            found.append(loss.numpy())
        return [*found, *(t.numpy() for m in models for t in m.state_dict().values())]

    same(run)
    assert counts.replays >= 2 * (STEPS - 4)


def gan(norm: bool, apart: bool, read: bool, zeroed: bool) -> Callable[[], list[np.ndarray]]:
    """As in PyTorch's tutorial: what the generator made is judged twice, before and after the judge's step, whose
    gradients the second time are of no use. `apart`: backward() for each half of a batch; `zeroed`: what is of no use
    is dropped."""

    def run() -> list[np.ndarray]:
        Tensor.manual_seed(2)
        middle = [nn.BatchNorm1d(8)] if norm else []
        makes = nn.Sequential(nn.Linear(3, 8), *middle, nn.ReLU(), nn.Linear(8, 4))
        judges = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))
        steps = [nn.optim.Adam(m.parameters(), lr=0.01, eps=1e-3) for m in (makes, judges)]
        loss, found = F.binary_cross_entropy_with_logits, []
        for i in range(STEPS):
            real, made = Tensor(array(6, 4, seed=i)), makes(Tensor.randn(6, 3))
            steps[1].zero_grad()
            a = loss(judges(real), Tensor.ones(6, 1))
            if apart:
                a.backward()
            b = loss(judges(made.detach()), Tensor.zeros(6, 1))
            (b if apart else a + b).backward()
            if read:
                found.append(b.numpy())
            steps[1].step()
            steps[0].zero_grad()
            if zeroed:
                steps[1].zero_grad()
            c = loss(judges(made), Tensor.ones(6, 1))
            c.backward()
            steps[0].step()
            found += [a.numpy(), b.numpy(), c.numpy()]
        return [*found, made.numpy(), *weights(makes, judges), *gradients(makes, judges)]

    return run


@pytest.mark.parametrize("zeroed", [False, True])
@pytest.mark.parametrize("read", [False, True])
@pytest.mark.parametrize("apart", [False, True])
@pytest.mark.parametrize("norm", [False, True])
def test_a_gan(norm: bool, apart: bool, read: bool, zeroed: bool, counts: Counts) -> None:
    close(gan(norm, apart, read, zeroed))
    assert counts.replays >= 2 * (STEPS - 10)


@pytest.mark.parametrize("order", [0, 1])
def test_actor_and_critic(order: int, counts: Counts) -> None:
    """Two losses over one body, of which each optimiser steps a part."""

    def run() -> list[np.ndarray]:
        Tensor.manual_seed(4)
        body, actor, critic = nn.Linear(4, 8), nn.Linear(8, 3), nn.Linear(8, 1)
        steps = [
            nn.optim.SGD([*body.parameters(), *actor.parameters()], lr=0.05),
            nn.optim.SGD(critic.parameters(), lr=0.1, momentum=0.5),
        ]
        found = []
        for i in range(STEPS):
            h, reward = body(Tensor(array(5, 4, seed=i))).tanh(), Tensor(array(5, seed=i + 50))
            value = critic(h).squeeze(1)
            advantage = reward - value.detach()
            a = -(actor(h).log_softmax(1)[:, 0] * advantage).mean()
            b = (reward - value).square().mean()
            for step in steps:
                step.zero_grad()
            b.backward()
            a.backward()
            for step in steps[:: 1 - 2 * order]:
                step.step()
            found += [a.numpy(), b.numpy()]
        return [*found, *weights(body, actor, critic), *gradients(body, actor, critic)]

    close(run)
    assert counts.replays >= 2 * (STEPS - 8)


def test_gradients_that_are_added_to_after_a_step(counts: Counts) -> None:
    """They are parts of one memory then; who has a view of one sees what is added."""

    def run(seen: bool) -> Callable[[], list[np.ndarray]]:
        def run() -> list[np.ndarray]:
            Tensor.manual_seed(5)
            model = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 2))
            optimizer, found = nn.optim.SGD(model.parameters(), lr=0.01), []
            for i in range(STEPS):
                loss = model(Tensor(array(5, 4, seed=i))).square().mean()
                loss.backward()
                optimizer.step()
                if seen and i % 4 == 3:
                    assert model[0].weight.grad is not None
                    view = model[0].weight.grad.view(-1)
                    model(Tensor(array(5, 4))).mean().backward()
                    found += [view.numpy(), view.numpy()]
                found.append(loss.numpy())
            return [*found, *weights(model), *gradients(model)]

        return run

    close(run(False))
    assert counts.replays >= STEPS - 6
    close(run(True))
