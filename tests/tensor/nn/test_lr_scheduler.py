"""Schedules against their formulas, how they combine, and that a captured step follows them."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from manygrad import Tensor, TinyJit
from manygrad.tensor.nn.optim import SGD, Adam, Optimizer
from manygrad.tensor.nn.optim import lr_scheduler as lrs

Rates = Callable[[int], float]


def optimiser(**more: Any) -> Optimizer:
    return SGD([{"params": [Tensor([0.0])]}, {"params": [Tensor([0.0])], "lr": 0.3}], lr=0.1, **more)


def one_cycle(t: int) -> float:
    between = lambda a, b, x: b + (a - b) / 2 * (1 + math.cos(math.pi * x))  # noqa: E731
    up = 0.3 * 20 - 1
    return between(0.02, 0.5, t / up) if t <= up else between(0.5, 0.02 / 1e4, (t - up) / (19 - up))


def restarts(t: int) -> float:
    length = 3
    while t >= length:
        t, length = t - length, length * 2
    return 0.01 + 0.09 * (1 + math.cos(math.pi * t / length)) / 2


CASES: dict[str, tuple[Callable[[Optimizer], Any], Rates]] = {
    "step": (lambda o: lrs.StepLR(o, 3, 0.5), lambda t: 0.1 * 0.5 ** (t // 3)),
    "multistep": (lambda o: lrs.MultiStepLR(o, [7, 2, 2]), lambda t: 0.1 * 0.1 ** (2 * (t >= 2) + (t >= 7))),
    "exponential": (lambda o: lrs.ExponentialLR(o, 0.9), lambda t: 0.1 * 0.9**t),
    "linear": (lambda o: lrs.LinearLR(o, 0.2, 0.8, 6), lambda t: 0.1 * (0.2 + 0.6 * min(t, 6) / 6)),
    "constant": (lambda o: lrs.ConstantLR(o, 0.5, 4), lambda t: 0.05 if t < 4 else 0.1),
    "polynomial": (lambda o: lrs.PolynomialLR(o, 8, 2.0), lambda t: 0.1 * (1 - min(t, 8) / 8) ** 2),
    "cosine": (
        lambda o: lrs.CosineAnnealingLR(o, 5, 0.01),
        lambda t: 0.01 + 0.09 * (1 + math.cos(math.pi * t / 5)) / 2,
    ),
    "restarts": (lambda o: lrs.CosineAnnealingWarmRestarts(o, 3, 2, 0.01), restarts),
    "lambda": (lambda o: lrs.LambdaLR(o, lambda t: 1 / (1 + t)), lambda t: 0.1 / (1 + t)),
    "multiplicative": (lambda o: lrs.MultiplicativeLR(o, lambda t: 0.5), lambda t: 0.1 * 0.5**t),
    "one cycle": (lambda o: lrs.OneCycleLR(o, 0.5, total_steps=20), one_cycle),
    "cyclic": (
        lambda o: lrs.CyclicLR(o, 0.1, 0.5, 4, 2, cycle_momentum=False),
        lambda t: 0.1 + 0.4 * (t % 6 / 4 if t % 6 <= 4 else (6 - t % 6) / 2),
    ),
    "chained": (
        lambda o: lrs.ChainedScheduler([lrs.ConstantLR(o, 0.1, 3), lrs.ExponentialLR(o, 0.9)]),
        lambda t: 0.1 * 0.9**t * (0.1 if t < 3 else 1),
    ),
    "sequential": (
        lambda o: lrs.SequentialLR(o, [lrs.LinearLR(o, 0.5, 1.0, 4), lrs.ExponentialLR(o, 0.9)], [4]),
        lambda t: 0.1 * (0.5 + 0.125 * t) if t < 4 else 0.1 * 0.9 ** (t - 4),
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_rates(name: str) -> None:
    make, want = CASES[name]
    o = optimiser(momentum=0.9)
    scheduler = make(o)
    for t in range(20):
        assert o.param_groups[0]["lr"] == pytest.approx(want(t), rel=1e-9, abs=1e-15), t
        assert scheduler.get_last_lr() == [g["lr"] for g in o.param_groups]
        if name not in ("one cycle", "cyclic"):
            assert o.param_groups[1]["lr"] == pytest.approx(
                0.3 if t == 0 and name == "multistep" else o.param_groups[1]["lr"]
            )
        if t < 19:
            scheduler.step()


@pytest.mark.parametrize("name", ["step", "cosine", "one cycle", "sequential", "chained"])
def test_going_on_from_a_saved_state(name: str) -> None:
    make, want = CASES[name]
    o = optimiser(momentum=0.9)
    scheduler = make(o)
    for _ in range(5):
        scheduler.step()
    other = optimiser(momentum=0.9)
    again = make(other)
    other.load_state_dict(o.state_dict())
    again.load_state_dict(scheduler.state_dict())
    for t in range(6, 12):
        again.step()
        assert other.param_groups[0]["lr"] == pytest.approx(want(t), rel=1e-9)


def test_momentum_goes_against_the_rate() -> None:
    o = optimiser(momentum=0.9)
    scheduler = lrs.OneCycleLR(o, 0.5, total_steps=20)
    assert o.param_groups[0]["momentum"] == 0.95
    for _ in range(5):
        scheduler.step()
    assert o.param_groups[0]["momentum"] == pytest.approx(0.85)
    adam = Adam([Tensor([0.0])], lr=0.1)
    lrs.CyclicLR(adam, 0.1, 0.5, 4)
    assert adam.param_groups[0]["betas"] == (0.9, 0.999)


def test_a_captured_step_follows_rate_and_momentum() -> None:
    w = Tensor([0.0])
    o = SGD([w], lr=0.1, momentum=0.9)
    scheduler = lrs.OneCycleLR(o, 0.5, total_steps=20)

    @TinyJit
    def step(g: Tensor) -> None:
        w.grad = g
        o.step()

    want, v = 0.0, 0.0
    for _ in range(8):
        lr, momentum = o.param_groups[0]["lr"], o.param_groups[0]["momentum"]
        step(Tensor([1.0]))
        v = momentum * v + 1
        want -= lr * v
        np.testing.assert_allclose(w.item(), want, rtol=1e-5)
        scheduler.step()


def test_plateau() -> None:
    o = optimiser()
    scheduler = lrs.ReduceLROnPlateau(o, factor=0.5, patience=1, cooldown=1, min_lr=[0.03, 0.0])
    rates = []
    for loss in (1.0, 0.9, 0.9, 0.9, 0.95, 0.9, 0.9, 0.9, 0.9, 0.5):
        scheduler.step(Tensor(loss))
        rates.append(o.param_groups[0]["lr"])
    assert rates == [0.1, 0.1, 0.1, 0.05, 0.05, 0.05, 0.03, 0.03, 0.03, 0.03]
    with pytest.raises(ValueError, match="factor must be below 1"):
        lrs.ReduceLROnPlateau(o, factor=1.0)


def test_errors() -> None:
    o = optimiser()
    with pytest.raises(ValueError, match="step 5 of 4; make a new schedule"):
        scheduler = lrs.OneCycleLR(o, 0.5, total_steps=4, cycle_momentum=False)
        for _ in range(5):
            scheduler.step()
    with pytest.raises(ValueError, match="3 schedulers need 2 milestones"):
        lrs.SequentialLR(o, [lrs.StepLR(o, 1) for _ in range(3)], [1])
    with pytest.raises(KeyError, match="initial_lr"):
        lrs.StepLR(optimiser(), 1, last_epoch=3)
    with pytest.raises(TypeError, match="takes an optimiser, not int"):
        lrs.StepLR(3, 1)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="2 parameter groups need as many functions, got 3"):
        lrs.LambdaLR(o, [lambda t: 1.0] * 3)
