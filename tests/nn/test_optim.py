"""Optimisers against their formulas in NumPy, and how few kernels a step takes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from manygrad import GlobalCounters, Tensor, TinyJit, nn
from manygrad.nn import optim
from manygrad.nn.optim import SGD, Adam, AdamW, Optimizer
from manygrad.runtime.current import current

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


def sgd_dampening(w: np.ndarray, g: np.ndarray, s: dict[str, Any]) -> np.ndarray:
    s["v"] = 0.9 * s["v"] - 0.8 * g if "v" in s else -g
    return w - 0.1 * s["v"]


def adagrad(w: np.ndarray, g: np.ndarray, s: dict[str, Any]) -> np.ndarray:
    s["t"] = s.get("t", 0) + 1
    s["v"] = s.get("v", 0.1) + g * g
    return w - 0.1 / (1 + (s["t"] - 1) * 0.2) * g / (np.sqrt(s["v"]) + 1e-10)


def rmsprop(w: np.ndarray, g: np.ndarray, s: dict[str, Any]) -> np.ndarray:
    g = g + 0.1 * w
    s["v"], s["a"] = 0.9 * s.get("v", 0) + 0.1 * g * g, 0.9 * s.get("a", 0) + 0.1 * g
    s["b"] = 0.5 * s.get("b", 0) + g / (np.sqrt(s["v"] - s["a"] ** 2) + 1e-3)
    return w - 0.05 * s["b"]


def adadelta(w: np.ndarray, g: np.ndarray, s: dict[str, Any]) -> np.ndarray:
    s["v"] = 0.8 * s.get("v", 0) + 0.2 * g * g
    d = np.sqrt(s.get("u", 0) + 1e-4) / np.sqrt(s["v"] + 1e-4) * g
    s["u"] = 0.8 * s.get("u", 0) + 0.2 * d * d
    return w - 0.5 * d


def adamax(w: np.ndarray, g: np.ndarray, s: dict[str, Any]) -> np.ndarray:
    s["t"] = s.get("t", 0) + 1
    s["m"], s["u"] = 0.9 * s.get("m", 0) + 0.1 * g, np.maximum(0.99 * s.get("u", 0), np.abs(g) + 1e-8)
    return w - 0.1 / (1 - 0.9 ** s["t"]) * s["m"] / s["u"]


def nadam(w: np.ndarray, g: np.ndarray, s: dict[str, Any]) -> np.ndarray:
    t = s["t"] = s.get("t", 0) + 1
    mu, following = (0.9 * (1 - 0.5 * 0.96 ** (k * 0.1)) for k in (t, t + 1))
    s["p"] = s.get("p", 1) * mu
    s["m"], s["v"] = 0.9 * s.get("m", 0) + 0.1 * g, 0.99 * s.get("v", 0) + 0.01 * g * g
    d = np.sqrt(s["v"] / (1 - 0.99**t)) + 1e-8
    return w - 0.1 * ((1 - mu) / (1 - s["p"]) * g + following / (1 - s["p"] * following) * s["m"]) / d


def radam(w: np.ndarray, g: np.ndarray, s: dict[str, Any]) -> np.ndarray:
    t = s["t"] = s.get("t", 0) + 1
    w = w * (1 - 0.1 * 0.1)
    s["m"], s["v"] = 0.9 * s.get("m", 0) + 0.1 * g, 0.9 * s.get("v", 0) + 0.1 * g * g
    m, limit = s["m"] / (1 - 0.9**t), 2 / 0.1 - 1
    rho = limit - 2 * t * 0.9**t / (1 - 0.9**t)
    if rho <= 5:
        return w - 0.1 * m
    r = np.sqrt((rho - 4) * (rho - 2) * limit / ((limit - 4) * (limit - 2) * rho))
    return w - 0.1 * m * r * np.sqrt(1 - 0.9**t) / (np.sqrt(s["v"]) + 1e-8)


def amsgrad(w: np.ndarray, g: np.ndarray, s: dict[str, Any]) -> np.ndarray:
    t = s["t"] = s.get("t", 0) + 1
    g = -g
    s["m"], s["v"] = 0.9 * s.get("m", 0) + 0.1 * g, 0.9 * s.get("v", 0) + 0.1 * g * g
    s["x"] = np.maximum(s.get("x", 0), s["v"])
    return w - 0.05 * (s["m"] / (1 - 0.9**t)) / (np.sqrt(s["x"] / (1 - 0.9**t)) + 1e-8)


def lars(w: np.ndarray, g: np.ndarray, s: dict[str, Any]) -> np.ndarray:
    a, b = np.linalg.norm(w), np.linalg.norm(g)
    g = (g + 0.1 * w) * (0.02 * a / (b + 0.1 * a) if a > 0 and b > 0 else 1)
    s["v"] = 0.9 * s.get("v", 0) + g
    return w - 0.5 * (g + 0.9 * s["v"])


def lamb(w: np.ndarray, g: np.ndarray, s: dict[str, Any]) -> np.ndarray:
    t = s["t"] = s.get("t", 0) + 1
    s["m"], s["v"] = 0.9 * s.get("m", 0) + 0.1 * g, 0.99 * s.get("v", 0) + 0.01 * g * g
    step = (s["m"] / (1 - 0.9**t)) / (np.sqrt(s["v"] / (1 - 0.99**t)) + 1e-6) + 0.1 * w
    a, b = np.linalg.norm(w), np.linalg.norm(step)
    return w - 0.05 * step * (a / b if a > 0 and b > 0 else 1)


CASES: dict[str, tuple[Callable[[list[Tensor]], Optimizer], Update]] = {
    "sgd": (lambda p: SGD(p, 0.1), sgd(0.1)),
    "sgd decay": (lambda p: SGD(p, 0.1, weight_decay=0.05), sgd(0.1, weight_decay=0.05)),
    "sgd momentum": (lambda p: SGD(p, 0.1, momentum=0.9), sgd(0.1, 0.9)),
    "sgd nesterov": (lambda p: SGD(p, 0.1, 0.9, weight_decay=0.01, nesterov=True), sgd(0.1, 0.9, 0.01, True)),
    "adam": (lambda p: Adam(p, 0.05), adam(0.05, (0.9, 0.999), 1e-8, 0.0, False)),
    "adam decay": (lambda p: Adam(p, 0.05, (0.8, 0.95), 1e-4, 0.1), adam(0.05, (0.8, 0.95), 1e-4, 0.1, False)),
    "adamw": (lambda p: AdamW(p, 0.05), adam(0.05, (0.9, 0.999), 1e-8, 0.01, True)),
    "sgd dampening": (lambda p: SGD(p, 0.1, 0.9, 0.2, maximize=True), sgd_dampening),
    "amsgrad": (lambda p: Adam(p, 0.05, (0.9, 0.9), amsgrad=True, maximize=True), amsgrad),
    "adagrad": (lambda p: optim.Adagrad(p, 0.1, lr_decay=0.2, initial_accumulator_value=0.1), adagrad),
    "rmsprop": (lambda p: optim.RMSprop(p, 0.05, 0.9, 1e-3, weight_decay=0.1, momentum=0.5, centered=True), rmsprop),
    "adadelta": (lambda p: optim.Adadelta(p, 0.5, 0.8, 1e-4), adadelta),
    "adamax": (lambda p: optim.Adamax(p, 0.1, (0.9, 0.99)), adamax),
    "nadam": (lambda p: optim.NAdam(p, 0.1, (0.9, 0.99), momentum_decay=0.1), nadam),
    "radam": (lambda p: optim.RAdam(p, 0.1, (0.9, 0.9), weight_decay=0.1, decoupled_weight_decay=True), radam),
    "lars": (lambda p: optim.LARS(p, 0.5, 0.9, 0.1, nesterov=True, tcoef=0.02), lars),
    "lamb": (lambda p: optim.LAMB(p, 0.05, (0.9, 0.99), weight_decay=0.1), lamb),
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
    with pytest.warns(UserWarning, match="SGD: 1 parameters of a group are given twice; each takes one step"):
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


@pytest.mark.parametrize(
    "make",
    [lambda p: SGD(p, 0.1), lambda p: SGD(p, 0.1, momentum=0.9), lambda p: Adam(p), lambda p: AdamW(p)],
    ids=["sgd", "momentum", "adam", "adamw"],
)
def test_a_step_takes_the_same_few_kernels_for_any_number_of_parameters(
    make: Callable[[list[Tensor]], Optimizer],
) -> None:
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


@pytest.mark.parametrize(
    "make", [lambda p: SGD(p, 0.1, momentum=0.9), AdamW, lambda p: optim.NAdam(p)], ids=["momentum", "adamw", "nadam"]
)
def test_the_second_step_is_the_first_ones_program(make: Callable[[list[Tensor]], Optimizer]) -> None:
    """It is scheduled once, and nothing in it is computed twice."""
    model = Mlp(3)
    params = nn.state.get_parameters(model)
    params[0].realize(*params[1:])
    optimiser = make(params)
    x = Tensor(np.ones((4, 8), np.float32)).realize()
    seen = []
    for _ in range(2):
        optimiser.zero_grad()
        loss = model(x).square().mean()
        loss.backward()
        optimiser._prepare()  # storage of its own
        misses, count = current().schedules.misses, GlobalCounters.kernel_count
        optimiser.step()
        seen.append((current().schedules.misses - misses, GlobalCounters.kernel_count - count))
        assert loss.is_realized
    assert seen == [(1, seen[0][1]), (0, seen[0][1])]


def test_graphs_from_before_the_first_step_read_the_flat_buffer() -> None:
    w = Tensor(np.ones((2, 2), np.float32)).requires_grad_()
    view, copy, double = w.detach().reshape(4), w.detach().clone(), w.detach() * 2
    optimiser = SGD([w], 1.0)
    w.sum().backward()
    optimiser.step()
    np.testing.assert_array_equal(w.numpy(), np.zeros((2, 2)))
    np.testing.assert_array_equal(view.numpy(), np.zeros(4))  # of the same memory
    np.testing.assert_array_equal(copy.numpy(), np.ones((2, 2)))
    np.testing.assert_array_equal(double.numpy(), np.full((2, 2), 2.0))


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


def test_a_step_without_gradients_changes_nothing() -> None:
    w, v = Tensor([1.0], requires_grad=True), Tensor([1.0], requires_grad=True)
    optimiser = SGD([w, v])
    with Tensor.train():
        optimiser.step()  # without any gradient: nothing
        (w * v).sum().backward()
        optimiser.step()
        assert w.item() == v.item() == pytest.approx(0.999)


W, V = Tensor([1.0], requires_grad=True), Tensor([2.0], requires_grad=True)
# what is refused, and with which words
REFUSED: list[tuple[Callable[..., Optimizer], Any, dict[str, Any], type[Exception], str]] = [
    (SGD, [W], {"learning_rate": 0.1}, TypeError, "SGD has no argument 'learning_rate'; did you mean 'lr'?"),
    (SGD, [W], {"momentun": 0.9}, TypeError, "did you mean 'momentum'?"),
    (Adam, [W], {"beta": (0.9, 0.99)}, TypeError, "did you mean 'betas'?"),
    (Adam, [W], {"wd": 0.1}, TypeError, "did you mean 'weight_decay'?"),
    (AdamW, [W], {"decoupled_weight_decay": False}, TypeError, "decoupled_weight_decay"),
    (Adam, [W], {"nesterov": True}, TypeError, "has no argument 'nesterov'; it takes all_reduce_dtype, amsgrad, betas"),
    (optim.Muon, [W], {"lr_": 0.1}, TypeError, "lr_"),
    (SGD, [{"params": [W], "learning_rate": 0.1}], {}, TypeError, "group of SGD has no argument 'learning_rate'; did"),
    (SGD, [{"params": [W], "head": True}], {}, TypeError, r"has no argument 'head'; it takes .*\['label'\] = \.\.\."),
    (SGD, [{"parameters": [W]}], {}, TypeError, 'a parameter group is a dict with "params"'),
    (SGD, [{"params": [W]}, V], {}, TypeError, 'a parameter group is a dict with "params"'),
    (SGD, {W, V}, {}, TypeError, "a set has no order that all runs and workers share"),
    (SGD, [{"params": {W, V}}], {}, TypeError, "a set has no order"),
    (SGD, {"weight": W}, {}, TypeError, "not a dict"),
    (SGD, W, {}, TypeError, r"takes a list of parameters, not one tensor; write \[parameter\]"),
    (SGD, 3, {}, TypeError, "not a int"),
    (SGD, [], {}, ValueError, "empty list of parameters"),
    (SGD, iter([]), {}, ValueError, r"model.parameters\(\) is empty once it was read"),
    (SGD, [W, 1.0], {}, TypeError, "an optimiser trains tensors, not float"),
    (SGD, [Tensor([1])], {}, TypeError, "a parameter of int64 cannot be trained"),
    (SGD, [W * 2], {}, ValueError, "is computed from others that require a gradient"),
    (SGD, [("w", W), V], {}, ValueError, "1 of 2 parameters have names"),
    (SGD, [{"params": [("w", W)]}, {"params": [V]}], {}, ValueError, "of all groups have names, or none have"),
    (SGD, [{"params": [W]}, {"params": [V, W]}], {}, ValueError, "is in two parameter groups"),
    (SGD, [W], {"lr": -0.1}, ValueError, "lr must not be negative, got -0.1"),
    (SGD, [W], {"lr": float("nan")}, ValueError, "lr must not be negative, got nan"),
    (SGD, [W], {"lr": "0.1"}, TypeError, "lr is a number, not '0.1' of type str"),
    (SGD, [W], {"lr": None}, TypeError, "lr is a number, not None"),
    (SGD, [W], {"lr": [0.1]}, TypeError, "lr is a number"),
    (SGD, [W], {"lr": Tensor([0.1, 0.2])}, ValueError, r"lr is one number, not a tensor of shape \(2,\)"),
    (SGD, [W], {"momentum": -0.5}, ValueError, "momentum must not be negative"),
    (SGD, [W], {"weight_decay": -1}, ValueError, "weight_decay must not be negative"),
    (SGD, [W], {"nesterov": True}, ValueError, "nesterov needs a momentum and no dampening"),
    (Adam, [W], {"betas": (1.0, 0.0)}, ValueError, r"betas\[0\] must lie in \[0, 1\), got 1.0"),
    (Adam, [W], {"betas": (0.0, 1.0)}, ValueError, r"betas\[1\] must lie in"),
    (Adam, [W], {"betas": (-0.1, 0.9)}, ValueError, r"betas\[0\] must lie in"),
    (Adam, [W], {"betas": 0.9}, TypeError, "betas are two numbers, got 0.9"),
    (Adam, [W], {"betas": (0.9,)}, TypeError, "betas are two numbers"),
    (Adam, [W], {"betas": (0.9, "0.99")}, TypeError, r"betas\[1\] is a number"),
    (Adam, [W], {"eps": -1e-8}, ValueError, "eps must not be negative"),
    (Adam, [W], {"weight_decay": -1}, ValueError, "weight_decay must not be negative"),
    (optim.Adamax, [W], {"betas": (0.0, 1.0)}, ValueError, r"betas\[1\] must lie in"),
    (optim.NAdam, [W], {"momentum_decay": -0.2}, ValueError, "momentum_decay must not be negative"),
    (optim.RAdam, [W], {"betas": (1.0, 0.0)}, ValueError, r"betas\[0\] must lie in"),
    (optim.Adagrad, [W], {"lr_decay": -0.5}, ValueError, "lr_decay must not be negative"),
    (optim.Adagrad, [W], {"initial_accumulator_value": -1}, ValueError, "initial_accumulator_value must not be"),
    (optim.Adadelta, [W], {"rho": 1.1}, ValueError, r"rho must lie in \[0, 1\], got 1.1"),
    (optim.RMSprop, [W], {"alpha": -0.1}, ValueError, "alpha must lie in"),
    (optim.RMSprop, [W], {"momentum": -1.0}, ValueError, "momentum must not be negative"),
    (optim.Muon, [Tensor.ones(2, 2)], {"ns_steps": 0}, ValueError, "ns_steps must be at least 1"),
    (optim.Muon, [Tensor.ones(2, 2)], {"ns_coefficients": (1.0, 2.0)}, ValueError, "ns_coefficients are three numbers"),
    (optim.Muon, [Tensor.ones(2, 2)], {"adjust_lr_fn": "arbitrary"}, ValueError, "adjust_lr_fn is None"),
    (optim.LARS, [W], {"tcoef": -1}, ValueError, "tcoef must not be negative"),
    (optim.LAMB, [W], {"betas": (0.9, 2)}, ValueError, r"betas\[1\] must lie in"),
]  # fmt: skip


@pytest.mark.parametrize("make,params,arguments,error,words", REFUSED)
def test_bad_arguments(
    make: Callable[..., Optimizer], params: Any, arguments: dict[str, Any], error: type[Exception], words: str
) -> None:
    with pytest.raises(error, match=words):
        make(params, **arguments)


def test_what_pytorch_passes_on_how_its_kernels_run_is_taken() -> None:
    for make in (
        SGD,
        Adam,
        AdamW,
        optim.Adamax,
        optim.NAdam,
        optim.RAdam,
        optim.Adagrad,
        optim.RMSprop,
        optim.Adadelta,
    ):
        group = make([W], foreach=True, differentiable=False).param_groups[0]  # type: ignore[operator]
        assert "foreach" not in group and "differentiable" not in group
    assert SGD([{"params": [W], "name": "head"}, {"params": []}]).param_groups[0]["name"] == "head"


@pytest.mark.parametrize("name", ["sgd nesterov", "adamw", "nadam", "lamb", "lars"])
@pytest.mark.parametrize("axis", [None, 0])
def test_sharded_parameters(name: str, axis: int | None) -> None:
    """Replicated over 3 devices, or cut into uneven parts: the same numbers as on one."""
    make, update = CASES[name]
    devices = ("CPU:0", "CPU:1", "CPU:2")
    arrays = [np.asarray(RNG.standard_normal(s)) for s in ((4, 3), (5,))]
    params = [Tensor(a.astype(np.float32)).shard(devices, axis).contiguous().realize() for a in arrays]
    optimiser, states = make(params), [{} for _ in arrays]  # type: ignore[var-annotated]
    for _ in range(3):
        for i, p in enumerate(params):
            g = RNG.standard_normal(arrays[i].shape)
            p.grad = Tensor(g.astype(np.float32)).shard(devices, axis)
            arrays[i] = update(arrays[i], g, states[i])
        optimiser.step()
    for p, a in zip(params, arrays):
        np.testing.assert_allclose(p.numpy(), a, rtol=2e-5, atol=2e-6)


def test_muon_orthogonalises_each_matrix() -> None:
    arrays = [RNG.standard_normal(s).astype(np.float32) for s in ((6, 4), (3, 5), (6, 4))]
    grads = [RNG.standard_normal(a.shape).astype(np.float32) for a in arrays]
    params = [Tensor(a) for a in arrays]
    optimiser = optim.Muon(params, lr=0.1, weight_decay=0.5, momentum=0.9)
    for p, g in zip(params, grads):
        p.grad = Tensor(g)
    optimiser.step()
    for p, a, g in zip(params, arrays, grads):
        x = g * 0.1 + g * 0.1 * 0.9
        x = x.T if x.shape[0] > x.shape[1] else x
        x = x / np.linalg.norm(x)
        for _ in range(5):
            gram = x @ x.T
            x = 3.4445 * x + (-4.775 * gram + 2.0315 * gram @ gram) @ x
        x = x.T if a.shape[0] > a.shape[1] else x
        np.testing.assert_allclose(
            p.numpy(), a * (1 - 0.1 * 0.5) - 0.1 * x * np.sqrt(max(1, a.shape[0] / a.shape[1])), rtol=1e-4, atol=1e-5
        )
    with pytest.raises(ValueError, match=r"Muon trains matrices only, not \(3,\); give the other parameters to AdamW"):
        optim.Muon([Tensor([1.0, 2.0, 3.0])])


def test_a_parameter_without_a_gradient_is_skipped_and_keeps_its_own_count() -> None:
    make, update = CASES["adamw"]
    arrays = [np.asarray(RNG.standard_normal(s)) for s in SHAPES]
    params = [Tensor(a.astype(np.float32)) for a in arrays]
    optimiser, states = make(params), [{} for _ in SHAPES]  # type: ignore[var-annotated]
    for missing in ((), (), (1,), (1, 3), (), (0,), ()):
        for i, p in enumerate(params):
            g = RNG.standard_normal(p.shape)
            p.grad = None if i in missing else Tensor(np.asarray(g, np.float32))
            if i not in missing:
                arrays[i] = update(arrays[i], g, states[i])
        optimiser.step()
    for p, a in zip(params, arrays):
        np.testing.assert_allclose(p.numpy(), a, rtol=2e-5, atol=2e-6)
    assert [optimiser.state[p]["step"].item() for p in params] == [6, 5, 7, 6]


def test_parameter_groups_and_the_rate_inside_a_replay() -> None:
    a, b = nn.Parameter(Tensor([1.0])), nn.Parameter(Tensor([1.0]))
    optimiser = SGD([{"params": [("a", a)]}, {"params": [("b", b)], "lr": 1.0}], lr=0.5)
    assert [g["lr"] for g in optimiser.param_groups] == [0.5, 1.0]

    @TinyJit
    def step(g: Tensor) -> None:
        a.grad, b.grad = g, g * 1
        optimiser.step()

    want = np.array([1.0, 1.0])
    for rate in (0.5, 0.5, 0.25, 0.125, 2.0):
        optimiser.param_groups[0]["lr"] = rate
        step(Tensor([1.0]))
        want -= [rate, 1.0]
        np.testing.assert_allclose([a.item(), b.item()], want)
    optimiser.add_param_group({"params": [("c", Tensor([1.0]))], "lr": 0.1})
    assert [g["param_names"] for g in optimiser.param_groups] == [["a"], ["b"], ["c"]]
    assert len(optimiser.params) == 3
    with pytest.raises(ValueError, match="is in two parameter groups"):
        optimiser.add_param_group({"params": [("a", a)]})
    for bad in ({"lr": -1.0}, {"momentum": -0.1}, {"nesterov": True}):
        with pytest.raises(ValueError, match="SGD:"):
            SGD([a], **bad)  # type: ignore[arg-type]
