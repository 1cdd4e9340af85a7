"""Schedules against their formulas, how they combine, and that a captured step follows them."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from manygrad import Tensor, TinyJit
from manygrad.nn.optim import SGD, Adam, Optimizer
from manygrad.nn.optim import lr_scheduler as lrs

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
    "nested": (
        lambda o: lrs.SequentialLR(
            o,
            [
                lrs.SequentialLR(o, [lrs.LinearLR(o, 0.5, 1.0, 2), lrs.StepLR(o, 1, 0.5)], [2]),
                lrs.ChainedScheduler([lrs.ConstantLR(o, 0.1, 3), lrs.ExponentialLR(o, 0.9)]),
                lrs.SequentialLR(o, [lrs.ConstantLR(o, 0.5, 9), lrs.ExponentialLR(o, 0.5)], [2]),
            ],
            [5, 11],
        ),
        lambda t: (
            (0.05, 0.075, 0.1, 0.05, 0.025)[t]
            if t < 5
            else 0.1 * 0.9 ** (t - 5) * (0.1 if t < 8 else 1)
            if t < 11
            else 0.05
            if t < 13
            else 0.1 * 0.5 ** (t - 13)
        ),
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


@pytest.mark.parametrize("name", ["step", "cosine", "one cycle", "sequential", "chained", "nested"])
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


GOES_ON: dict[Callable[..., Any], tuple[Any, ...]] = {
    lrs.StepLR: (3, 0.5), lrs.MultiStepLR: ([7, 2, 2],), lrs.ExponentialLR: (0.9,), lrs.LinearLR: (0.2, 0.8, 6),
    lrs.ConstantLR: (0.5, 4), lrs.PolynomialLR: (8, 2.0), lrs.CosineAnnealingLR: (5, 0.01),
    lrs.CosineAnnealingWarmRestarts: (3, 2), lrs.LambdaLR: (lambda t: 1 / (1 + t),),
    lrs.MultiplicativeLR: (lambda t: 0.5 + t / 50,), lrs.OneCycleLR: (0.5, 20), lrs.CyclicLR: (0.1, 0.5, 4),
}  # fmt: skip


@pytest.mark.parametrize("made", GOES_ON, ids=lambda made: made.__name__)
@pytest.mark.parametrize("done", range(1, 9))
def test_going_on_from_the_optimiser_alone(made: Callable[..., Any], done: int) -> None:
    """The optimiser's state has the rates of the step that is to come, and `last_epoch` is the one that was done."""
    o, other = optimiser(momentum=0.9), optimiser(momentum=0.9)
    scheduler = made(o, *GOES_ON[made])
    for _ in range(done):
        scheduler.step()
    other.load_state_dict(o.state_dict())
    again = made(other, *GOES_ON[made], last_epoch=done - 1)
    for _ in range(10):
        assert again.get_last_lr() == pytest.approx(scheduler.get_last_lr(), rel=1e-12)
        scheduler.step()
        again.step()


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
    with pytest.raises(ValueError, match=r"factor must lie in \[0, 1\), got 1.0"):
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


# what is refused, and with which words
REFUSED: list[tuple[str, dict[str, Any], type[Exception], str]] = [
    ("StepLR", {"step_size": 0}, ValueError, "step_size must be at least 1, got 0"),
    ("StepLR", {"step_size": 2.5}, TypeError, "step_size is a whole number, not 2.5"),
    ("StepLR", {"step_size": 2, "gamma": -1}, ValueError, "gamma must not be negative"),
    ("StepLR", {"step_size": 2, "gama": 0.5}, TypeError, "gama"),
    ("MultiStepLR", {"milestones": [3, "5"]}, TypeError, "a milestone is a whole number"),
    ("ExponentialLR", {"gamma": None}, TypeError, "gamma is a number, not None"),
    ("ConstantLR", {"factor": 1.5}, ValueError, r"factor must lie in \[0, 1\], got 1.5"),
    ("ConstantLR", {"total_iters": 0}, ValueError, "total_iters must be at least 1"),
    ("LinearLR", {"start_factor": 0.0}, ValueError, "start_factor must not be 0"),
    ("LinearLR", {"end_factor": -0.1}, ValueError, "end_factor must lie in"),
    ("LinearLR", {"total_iters": 0}, ValueError, "total_iters must be at least 1"),
    ("PolynomialLR", {"total_iters": 0}, ValueError, "total_iters must be at least 1"),
    ("CosineAnnealingLR", {"T_max": 0}, ValueError, "T_max must be at least 1"),
    ("CosineAnnealingLR", {"T_max": "5"}, TypeError, "T_max is a number"),
    ("CosineAnnealingWarmRestarts", {"T_0": 2.5}, TypeError, "T_0 is a whole number"),
    ("CosineAnnealingWarmRestarts", {"T_0": 2, "T_mult": 0}, ValueError, "T_mult must be at least 1"),
    ("LambdaLR", {"lr_lambda": 0.5}, TypeError, "lr_lambda is a function"),
    ("MultiplicativeLR", {"lr_lambda": [None, None]}, TypeError, "lr_lambda is a function"),
    ("OneCycleLR", {"max_lr": 0.1}, ValueError, "give total_steps, or epochs and steps_per_epoch"),
    ("OneCycleLR", {"max_lr": 0.1, "total_steps": 0}, ValueError, "total_steps must be at least 1"),
    ("OneCycleLR", {"max_lr": 0.1, "epochs": 2, "steps_per_epoch": 0.5}, TypeError, "steps_per_epoch is a whole"),
    ("OneCycleLR", {"max_lr": [0.1], "total_steps": 9}, ValueError, "2 parameter groups need as many max_lr"),
    ("OneCycleLR", {"max_lr": -0.1, "total_steps": 9}, ValueError, "max_lr must not be negative"),
    ("OneCycleLR", {"max_lr": 0.1, "total_steps": 9, "pct_start": 1.5}, ValueError, "pct_start must lie in"),
    ("OneCycleLR", {"max_lr": 0.1, "total_steps": 9, "anneal_strategy": "cosine"}, ValueError, "anneal_strategy is"),
    ("OneCycleLR", {"max_lr": 0.1, "total_steps": 9, "div_factor": 0}, ValueError, "div_factor must be positive"),
    ("CyclicLR", {"base_lr": 0.1, "max_lr": 0.5, "mode": "square"}, ValueError, "mode is"),
    ("CyclicLR", {"base_lr": 0.1, "max_lr": 0.5, "step_size_up": 0}, ValueError, "step_size_up must be at least 1"),
    ("CyclicLR", {"base_lr": [0.1] * 3, "max_lr": 0.5}, ValueError, "2 parameter groups need as many base_lr"),
    ("ReduceLROnPlateau", {"factor": -0.5}, ValueError, "factor must lie in"),
    ("ReduceLROnPlateau", {"patience": -1}, ValueError, "patience must not be negative"),
    ("ReduceLROnPlateau", {"mode": "low"}, ValueError, "mode is"),
    ("ReduceLROnPlateau", {"min_lr": [0.0]}, ValueError, "2 parameter groups need as many min_lr"),
]  # fmt: skip


@pytest.mark.parametrize("name,arguments,error,words", REFUSED)
def test_bad_arguments(name: str, arguments: dict[str, Any], error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        getattr(lrs, name)(optimiser(momentum=0.9), **arguments)


@pytest.mark.parametrize("name,arguments,error,words", REFUSED)
def test_all_take_optimisers_only(name: str, arguments: dict[str, Any], error: type[Exception], words: str) -> None:
    with pytest.raises((TypeError, ValueError)):
        getattr(lrs, name)([Tensor([0.0])], **arguments)


def test_schedules_made_of_schedules_take_what_they_can_step() -> None:
    o = optimiser()
    step, plateau = lrs.StepLR(o, 2), lrs.ReduceLROnPlateau(o)
    for make in (lambda: lrs.SequentialLR(o, [step, plateau], [3]), lambda: lrs.ChainedScheduler([step, plateau])):
        with pytest.raises(TypeError, match="takes schedulers whose step.. needs nothing, not ReduceLROnPlateau"):
            make()
    with pytest.raises(ValueError, match=r"milestones rise, got \[5, 3\]"):
        lrs.SequentialLR(o, [step, step, step], [5, 3])
    with pytest.raises(ValueError, match="must have the same optimiser"):
        lrs.ChainedScheduler([step, lrs.StepLR(optimiser(), 2)])


def test_the_state_of_another_schedule() -> None:
    o = optimiser()
    step, cosine = lrs.StepLR(o, 2), lrs.CosineAnnealingLR(o, 5)
    with pytest.raises(ValueError, match="StepLR: the state lacks gamma, step_size and has T_max"):
        step.load_state_dict(cosine.state_dict())
