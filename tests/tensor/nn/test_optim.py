"""Optimisers against their formulas in NumPy, and how few kernels a step takes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from manygrad import GlobalCounters, Tensor, TinyJit, nn
from manygrad.tensor.nn.optim import SGD, Adam, AdamW, Optimizer

RNG = np.random.default_rng(0)
SHAPES = [(4, 3), (3,), (2, 2, 2), ()]
Update = Callable[[np.ndarray, np.ndarray, dict[str, Any]], np.ndarray]


def sgd(lr: float, momentum: float = 0.0, weight_decay: float = 0.0, nesterov: bool = False) -> Update:
    def update(w: np.ndarray, g: np.ndarray, s: dict[str, Any]) -> np.ndarray:
        g = g + weight_decay * w
        if momentum:
            s["v"] = momentum * s["v"] + g if "v" in s else g
            g = g + momentum * s["v"] if nesterov else s["v"]
        return w - lr * g

    return update


def adam(lr: float, betas: tuple[float, float], eps: float, weight_decay: float, decoupled: bool) -> Update:
    def update(w: np.ndarray, g: np.ndarray, s: dict[str, Any]) -> np.ndarray:
        if decoupled:
            w = w - lr * weight_decay * w
        else:
            g = g + weight_decay * w
        s["t"] = s.get("t", 0) + 1
        s["m"] = betas[0] * s.get("m", 0) + (1 - betas[0]) * g
        s["v"] = betas[1] * s.get("v", 0) + (1 - betas[1]) * g * g
        return w - lr * (s["m"] / (1 - betas[0] ** s["t"])) / (np.sqrt(s["v"] / (1 - betas[1] ** s["t"])) + eps)

    return update


CASES: dict[str, tuple[Callable[[list[Tensor]], Optimizer], Update]] = {
    "sgd": (lambda p: SGD(p, 0.1), sgd(0.1)),
    "sgd decay": (lambda p: SGD(p, 0.1, weight_decay=0.05), sgd(0.1, weight_decay=0.05)),
    "sgd momentum": (lambda p: SGD(p, 0.1, momentum=0.9), sgd(0.1, 0.9)),
    "sgd nesterov": (lambda p: SGD(p, 0.1, 0.9, 0.01, nesterov=True), sgd(0.1, 0.9, 0.01, True)),
    "adam": (lambda p: Adam(p, 0.05), adam(0.05, (0.9, 0.999), 1e-8, 0.0, False)),
    "adam decay": (lambda p: Adam(p, 0.05, (0.8, 0.95), 1e-4, 0.1), adam(0.05, (0.8, 0.95), 1e-4, 0.1, False)),
    "adamw": (lambda p: AdamW(p, 0.05), adam(0.05, (0.9, 0.999), 1e-8, 0.01, True)),
    "adamw decay": (lambda p: AdamW(p, 0.05, weight_decay=0.3, eps=1e-6), adam(0.05, (0.9, 0.999), 1e-6, 0.3, True)),
}


def loss_of(params: list[Tensor], at: np.ndarray) -> Tensor:
    """Its gradient depends on the parameters and on the step."""
    total = Tensor(0.0)
    for i, p in enumerate(params):
        total = total + ((p - float(at[i])) ** 2 * (i + 1)).sum()
    return total


def gradient_of(arrays: list[np.ndarray], at: np.ndarray) -> list[np.ndarray]:
    return [2 * (i + 1) * (a - at[i]) for i, a in enumerate(arrays)]


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("jit", [False, True])
def test_six_steps(name: str, jit: bool) -> None:
    make, update = CASES[name]
    arrays = [np.asarray(RNG.standard_normal(s)) for s in SHAPES]
    params = [Tensor(a.astype(np.float32), requires_grad=True) for a in arrays]
    optimiser, states = make(params), [{} for _ in SHAPES]  # type: ignore[var-annotated]

    def step(at: Tensor) -> Tensor:
        optimiser.zero_grad()
        loss = Tensor(0.0)
        for i, p in enumerate(params):
            loss = loss + ((p - at[i]) ** 2 * (i + 1)).sum()
        loss.backward()
        optimiser.step()
        return loss.realize()

    run = TinyJit(step) if jit else step
    with Tensor.train():
        for _ in range(6):
            at = RNG.standard_normal(len(SHAPES))
            run(Tensor(at.astype(np.float32)))
            for i, g in enumerate(gradient_of(arrays, at)):
                arrays[i] = update(arrays[i], g, states[i])
    for p, a in zip(params, arrays):
        np.testing.assert_allclose(p.numpy(), a, rtol=2e-5, atol=2e-6)


def test_the_learning_rate_can_change_between_steps() -> None:
    w = Tensor([1.0], requires_grad=True)
    optimiser = SGD([w], lr=0.5)
    with Tensor.train():
        for lr in (0.5, 0.25, 0.0):
            optimiser.lr.assign(lr)
            optimiser.zero_grad()
            (w * w).sum().backward()
            optimiser.step()
    assert w.item() == 0.0 * 1.0 + (1.0 - 0.5 * 2) * (1 - 0.5)


def test_types_and_shared_parameters() -> None:
    """Parameters of two types make two groups; one that is given twice is stepped once."""
    a, b = Tensor([1.0, 2.0], requires_grad=True), Tensor(np.float64([3.0]), requires_grad=True)
    optimiser = SGD([a, b, a], lr=0.1)
    with Tensor.train():
        ((a * a).sum() + (b * b).sum()).backward()
        optimiser.step()
    np.testing.assert_allclose(a.numpy(), [0.8, 1.6], rtol=1e-6)
    np.testing.assert_allclose(b.numpy(), [2.4], rtol=1e-6)
    assert b.dtype.name == "float64"


class Mlp:
    def __init__(self, layers: int):
        self.layers = [nn.Linear(8, 8) for _ in range(layers)]

    def __call__(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x).relu()
        return x


def kernels(f: Callable[[], object]) -> int:
    before = GlobalCounters.kernel_count
    f()
    return GlobalCounters.kernel_count - before


@pytest.mark.parametrize("make", [lambda p: SGD(p, 0.1), lambda p: SGD(p, 0.1, momentum=0.9), lambda p: Adam(p), lambda p: AdamW(p)], ids=["sgd", "momentum", "adam", "adamw"])
def test_a_step_takes_the_same_few_kernels_for_any_number_of_parameters(make: Callable[[list[Tensor]], Optimizer]) -> None:
    """Beyond what computes loss and gradients, which are written straight into the flat buffer."""
    extra = []
    x = Tensor(np.ones((4, 8), np.float32))
    for layers in (1, 4, 12):
        model = Mlp(layers)
        params = nn.state.get_parameters(model)
        optimiser = make(params)

        def forward() -> Tensor:
            optimiser.zero_grad()  # noqa: B023
            loss = model(x).square().mean()  # noqa: B023
            loss.backward()
            return loss

        def step() -> None:
            loss = forward()
            optimiser.step()  # noqa: B023
            loss.realize()

        with Tensor.train():
            step()
            plain = kernels(lambda: forward().realize(*[p.grad for p in params]))  # noqa: B023
            extra.append(kernels(step) - plain)
    assert len(set(extra)) == 1 and extra[0] <= 6, extra


def test_loading_and_moving_parameters_between_steps() -> None:
    """State follows a parameter that is replaced; the flat buffers are built again."""
    w = Tensor([1.0, 1.0], requires_grad=True)
    optimiser = SGD([w], lr=0.1, momentum=0.5)

    def step() -> None:
        optimiser.zero_grad()
        (w * 1.0).sum().backward()
        optimiser.step()

    with Tensor.train():
        step()  # v = 1, w = 0.9
        w.assign(Tensor([5.0, 6.0]))
        step()  # v = 1.5
        np.testing.assert_allclose(w.numpy(), [4.85, 5.85], rtol=1e-6)
        w.replace(Tensor([0.0, 0.0]).contiguous()).realize()
        step()  # v = 1.75
        np.testing.assert_allclose(w.numpy(), [-0.175, -0.175], rtol=1e-6)


def test_errors() -> None:
    with pytest.raises(ValueError, match="empty list of parameters"):
        SGD([])
    with pytest.raises(TypeError, match="a parameter of int64 cannot be trained"):
        SGD([Tensor([1])])
    w, v = Tensor([1.0], requires_grad=True), Tensor([1.0], requires_grad=True)
    optimiser = SGD([w, v])
    with Tensor.train():
        with pytest.raises(RuntimeError, match=r"no parameter has a gradient; call loss\.backward\(\) first"):
            optimiser.step()
        (w * v).sum().backward()
        optimiser.step()
        optimiser.zero_grad()
        (w * 2).sum().backward()
        with pytest.raises(RuntimeError, match=r"parameters \[1\] have no gradient this time"):
            optimiser.step()
    with pytest.raises(RuntimeError, match="outside training: wrap the training loop"):
        optimiser.step()
