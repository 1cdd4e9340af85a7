"""A captured step follows its program: what changes between two calls is in the numbers, or an error names it."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from manygrad import Context, Tensor, TinyJit, nn, no_grad
from manygrad.nn import functional as F
from manygrad.runtime.jit import following
from manygrad.runtime.jit.tiny_jit import MOST_CAPTURES, JitError
from tests.runtime.jit.programs import CALLS, Case, Jit, Net, Training, batch, same

RIGHT: dict[str, Case] = {}  # captured, they give what the plain program gives
ROUNDED = ("backward_inside_step_outside", "gradients_are_accumulated_over_steps")
REFUSED: dict[str, tuple[str, Case]] = {}  # or are this error, never other numbers


def right(case: Case) -> Case:
    RIGHT[case.__name__] = case
    return case


def refused(text: str) -> Callable[[Case], Case]:
    def add(case: Case) -> Case:
        REFUSED[case.__name__] = text, case
        return case

    return add


# *** state that is loaded or replaced ***


@right
def load_state_dict(jit: Jit) -> list[Any]:
    t = Training(nn.optim.Adam)
    best = {k: v.detach().clone().realize() for k, v in t.model.state_dict().items()}
    return t.run(jit, lambda i: t.model.load_state_dict(best) if i == 4 else None)


@right
def load_state_dict_of_the_optimizer(jit: Jit) -> list[Any]:
    t = Training(nn.optim.Adam, lr=0.01)
    saved: dict[str, Any] = {}

    def between(i: int) -> None:
        if i == 2:
            saved.update(t.optimizer.state_dict())
        if i == 5:
            t.optimizer.load_state_dict(saved)

    return t.run(jit, between)


@right
def data_of_a_parameter(jit: Jit) -> list[Any]:
    t = Training()

    def between(i: int) -> None:
        if i in (3, 5):
            t.model.a.weight.data = Tensor(np.full((5, 3), 0.25 * i, np.float32))

    return t.run(jit, between)


@right
def data_of_what_is_read(jit: Jit) -> list[Any]:
    w, seen = Tensor(np.ones(3, np.float32)).realize(), []
    step = jit(lambda x: x * w)
    for i in range(CALLS):
        if i in (3, 5):
            w.data = Tensor(np.full(3, float(i), np.float32))
        seen.append(step(batch(i)[0]).numpy())
    return seen


@right
def another_parameter(jit: Jit) -> list[Any]:
    Tensor.manual_seed(3)
    model, seen = Net().eval(), []
    step = jit(lambda x: model(x))
    for i in range(CALLS):
        if i == 3:
            model.a.weight = nn.Parameter(Tensor(np.full((5, 3), 0.5, np.float32)))
        seen.append(step(batch(i)[0]).numpy())
    return seen


@right
def another_layer(jit: Jit) -> list[Any]:
    Tensor.manual_seed(3)
    model, seen = Net().eval(), []
    step = jit(lambda x: model(x))
    for i in range(CALLS):
        if i == 4:
            model.b = nn.Linear(5, 2)
        seen.append(step(batch(i)[0]).numpy())
    return seen


# *** modes and flags ***


@right
def modes_of_a_model(jit: Jit) -> list[Any]:
    t = Training()
    return t.run(jit, lambda i: t.model.train(i not in (3, 5)))


@right
def mode_of_one_layer(jit: Jit) -> list[Any]:
    t = Training()

    def between(i: int) -> None:
        t.model.norm.training = i < 4

    return t.run(jit, between)


@right
def mode_of_all_modules(jit: Jit) -> list[Any]:
    t, seen = Training(), []
    step = jit(lambda x: t.model(x).sum())
    for i in range(CALLS):
        with Tensor.train(i < 3):
            seen.append(step(batch(i)[0]).item())
    return [*seen, t.model.norm.running_mean.numpy()]


@right
def dropout_ends(jit: Jit) -> list[Any]:
    drop, seen = nn.Dropout(0.5), []
    step = jit(lambda x: drop(x * 0 + 1).sum() / x.numel())
    for i in range(CALLS):
        drop.train(i < 3)
        value = step(batch(i)[0]).item()
        seen.append(value if i >= 3 else i)
    return seen


@right
def frozen(jit: Jit) -> list[Any]:
    t = Training()
    return t.run(jit, lambda i: t.model.a.requires_grad_(False) if i == 4 else None)


@right
def no_grad_around_it(jit: Jit) -> list[Any]:
    w, seen = Tensor(np.ones(3, np.float32), requires_grad=True).realize(), []
    step = jit(lambda x: (x * w).sum())
    for i in range(CALLS):
        if i in (3, 4):
            with no_grad():
                seen.append(step(batch(i)[0]).item())
        else:
            seen.append(step(batch(i)[0]).item())
    return seen


# *** hyperparameters ***


def hyperparameter(name: str, optimizer: Any, values: tuple[Any, Any], **options: Any) -> None:
    def case(jit: Jit) -> list[Any]:
        t = Training(optimizer, **{name: values[0]}, **options)

        def between(i: int) -> None:
            if i in (3, 6):
                t.optimizer.param_groups[0][name] = values[i == 3]

        return t.run(jit, between)

    case.__name__ = f"{name}_of_{optimizer.__name__}"
    right(case)


hyperparameter("weight_decay", nn.optim.SGD, (0.0, 0.3))
hyperparameter("momentum", nn.optim.SGD, (0.9, 0.5))
hyperparameter("nesterov", nn.optim.SGD, (False, True), momentum=0.9)
hyperparameter("maximize", nn.optim.SGD, (False, True))
hyperparameter("lr", nn.optim.SGD, (0.05, 0.01))
hyperparameter("betas", nn.optim.Adam, ((0.9, 0.99), (0.5, 0.9)))
hyperparameter("eps", nn.optim.Adam, (1e-8, 1e-2))
hyperparameter("weight_decay", nn.optim.AdamW, (0.0, 0.3))


@right
def another_parameter_group(jit: Jit) -> list[Any]:
    Tensor.manual_seed(3)
    model = Net()
    optimizer = nn.optim.SGD(model.a.parameters(), lr=0.05)

    def step(x: Tensor, y: Tensor) -> Tensor:
        optimizer.zero_grad()
        model.b.zero_grad()
        loss = F.mse_loss(model(x), y)
        loss.backward()
        optimizer.step()
        return loss

    called, seen = jit(step), []
    for i in range(CALLS):
        if i == 4:
            optimizer.add_param_group({"params": list(model.b.parameters()), "lr": 0.02})
        seen.append(called(*batch(i)).item())
    return seen


# *** what Python decided ***


@refused(r"test_guards.py:\d+: group\['lr'\] is set to 0.0125 inside of a TinyJit")
def scheduler_inside(jit: Jit) -> list[Any]:
    t = Training()
    scheduler = nn.optim.lr_scheduler.StepLR(t.optimizer, 1, 0.5)
    plain = t.step

    def step(x: Tensor, y: Tensor) -> Tensor:
        loss = plain(x, y)
        scheduler.step()
        return loss

    t.step = step  # type: ignore[method-assign]
    return t.run(jit)


@refused("the number .* is .* now")
def random_inside(jit: Jit) -> list[Any]:
    random.seed(5)
    step = jit(lambda x: x.sum() * random.random())
    return [step(batch(i)[0]).item() for i in range(CALLS)]


@refused(r"test_guards.py:\d+")
def numpy_random_inside(jit: Jit) -> list[Any]:
    rng = np.random.default_rng(5)
    step = jit(lambda x: x.sum() * float(rng.random()))
    return [step(batch(i)[0]).item() for i in range(CALLS)]


@refused("The step itself changes count")
def a_counter_inside(jit: Jit) -> list[Any]:
    count = 0

    def step(x: Tensor) -> Tensor:
        nonlocal count
        count += 1
        return x.sum() * count

    called = jit(step)
    return [called(batch(i)[0]).item() for i in range(CALLS)]


@refused(r"test_guards.py:\d+")
def a_counter_in_a_list(jit: Jit) -> list[Any]:
    calls: list[int] = []

    def step(x: Tensor) -> Tensor:
        calls.append(1)
        return x.sum() * len(calls)

    called = jit(step)
    return [called(batch(i)[0]).item() for i in range(CALLS)]


@right
def a_number_of_the_closure(jit: Jit) -> list[Any]:
    scale, seen = 1.0, []
    step = jit(lambda x: x.sum() * scale)
    for i in range(CALLS):
        scale = 2.0 if i in (3, 4) else 1.0
        seen.append(step(batch(i)[0]).item())
    return seen


@right
def a_tensor_of_the_closure(jit: Jit) -> list[Any]:
    w, seen = Tensor(np.ones(3, np.float32)).realize(), []
    step = jit(lambda x: x * w)
    for i in range(CALLS):
        if i == 3:
            w = Tensor(np.full(3, 2.0, np.float32)).realize()
        seen.append(step(batch(i)[0]).numpy())
    return seen


SCALE = 1.0


@right
def a_number_of_the_module(jit: Jit) -> list[Any]:
    global SCALE
    step, seen = jit(lambda x: x.sum() * SCALE), []
    for i in range(CALLS):
        SCALE = 2.0 if i >= 3 else 1.0
        seen.append(step(batch(i)[0]).item())
    return seen


class Settings:
    scale = 1.0


@right
def an_attribute(jit: Jit) -> list[Any]:
    settings, seen = Settings(), []
    step = jit(lambda x: x.sum() * settings.scale)
    for i in range(CALLS):
        if i == 4:
            settings.scale = 3.0
        seen.append(step(batch(i)[0]).item())
    return seen


class Scaled:
    def __init__(self) -> None:
        self.scale, self.w = 1.0, Tensor(np.ones(3, np.float32)).realize()

    def step(self, x: Tensor) -> Tensor:
        return self._scaled(x).sum()

    def _scaled(self, x: Tensor) -> Tensor:
        return x * self.w * self.scale


@right
def attributes_of_a_method(jit: Jit) -> list[Any]:
    scaled, seen = Scaled(), []
    step = jit(scaled.step)
    for i in range(CALLS):
        if i == 3:
            scaled.w = Tensor(np.full(3, 2.0, np.float32)).realize()
        if i == 5:
            scaled.scale = 0.5
        seen.append(step(batch(i)[0]).item())
    return seen


@right
def an_item_of_a_dict(jit: Jit) -> list[Any]:
    config, seen = {"scale": 1.0}, []
    step = jit(lambda x: x.sum() * config["scale"])
    for i in range(CALLS):
        config["scale"] = 1.0 + (i >= 3)
        seen.append(step(batch(i)[0]).item())
    return seen


# *** gradients outside ***


@right
def backward_inside_step_outside(jit: Jit) -> list[Any]:
    t, seen = Training(), []
    t.model.eval()  # (a bias before batch norm has a gradient of rounding errors alone)

    def gradients(x: Tensor, y: Tensor) -> Tensor:
        loss = F.mse_loss(t.model(x), y)
        loss.backward()
        return loss

    called = jit(gradients)
    for i in range(CALLS):
        t.optimizer.zero_grad()
        seen.append(called(*batch(i)).item())
        t.optimizer.step()
    return [*seen, t.model.a.weight.numpy()]


@right
def gradients_are_forgotten_outside(jit: Jit) -> list[Any]:
    w, seen = Tensor(np.ones(3, np.float32), requires_grad=True).realize(), []

    def loss(x: Tensor) -> Tensor:
        return (x * w).square().sum().backward()

    called = jit(loss)
    for i in range(CALLS):
        w.grad = None
        called(batch(i)[0])
        assert w.grad is not None
        seen.append(w.grad.numpy())
    return seen


@right
def gradients_add_up(jit: Jit) -> list[Any]:
    w, seen = Tensor(np.ones(3, np.float32), requires_grad=True).realize(), []

    def loss(x: Tensor) -> Tensor:
        return (x * w).square().sum().backward()

    called = jit(loss)
    for i in range(CALLS):
        if i == 4:
            w.grad = None
        called(batch(i)[0])
        assert w.grad is not None
        seen.append(w.grad.numpy())
    return seen


@right
def gradients_that_are_kept(jit: Jit) -> list[Any]:
    t, kept = Training(), []
    t.model.eval()
    step = jit(t.step)
    for i in range(CALLS):
        step(*batch(i))
        kept.append((t.model.a.weight.grad, t.model.b.weight.grad))
    return [g.numpy() for gs in kept[1::2] for g in gs]


@right
def gradients_are_forgotten_now_and_then(jit: Jit) -> list[Any]:
    t, seen = Training(), []
    t.model.eval()
    step = jit(t.step)
    for i in range(CALLS):
        if i % 3 == 2:
            t.optimizer.zero_grad(set_to_none=i % 2 == 0)
        step(*batch(i))
        assert t.model.b.weight.grad is not None
        seen.append(t.model.b.weight.grad.numpy())
    return seen


@right
def gradients_are_accumulated_over_steps(jit: Jit) -> list[Any]:
    t, seen = Training(), []
    t.model.eval()
    step = jit(lambda x, y: F.mse_loss(t.model(x), y).backward())
    for i in range(3 * CALLS):
        seen.append(step(*batch(i)).item())
        if i % 3 == 2:
            t.optimizer.step()
            t.optimizer.zero_grad()
    return [*seen, t.model.a.weight.numpy()]


@refused("argument")
def gradients_of_an_argument(jit: Jit) -> list[Any]:
    step, seen = jit(lambda x: x.square().sum().backward()), []
    for i in range(CALLS):
        x = batch(i)[0].requires_grad_()
        step(x)
        assert x.grad is not None
        seen.append(x.grad.numpy())
    return seen


@right
def gradients_after_training(jit: Jit) -> list[Any]:
    t, seen = Training(), []
    step = jit(t.step)
    for i in range(CALLS):
        step(*batch(i))
        assert t.model.a.weight.grad is not None
        seen.append(t.model.a.weight.grad.numpy())
    return seen


def test_a_step_that_is_captured_often_says_why() -> None:
    scale = 0.0
    step = TinyJit(lambda x: x.sum() * scale)
    with pytest.warns(UserWarning, match="scale was 14.0, now it is 16.0"):
        for i in range(2 * MOST_CAPTURES + 8):
            scale = float(i - i % 2)
            assert step(batch(0)[0]).item() == (batch(0)[0].sum() * scale).item()
    assert len(step.captures) == MOST_CAPTURES


def test_captures_for_what_was_before_are_kept() -> None:
    t = Training()
    step, calls = TinyJit(t.step), 0
    for i in range(12):
        t.model.train(i % 2 == 0)
        step(*batch(i))
    calls = len(step.captures)
    for i in range(6):
        t.model.train(i % 2 == 0)
        step(*batch(i))
    assert calls == len(step.captures) == 2


def test_values_and_learning_rates_make_no_captures() -> None:
    t = Training(nn.optim.Adam)
    step = TinyJit(t.step)
    scheduler = nn.optim.lr_scheduler.StepLR(t.optimizer, 1, 0.9)
    for i in range(8):
        step(*batch(i))
        scheduler.step()
        t.model.a.weight.assign(t.model.a.weight * 0.5).realize()
        t.model.load_state_dict(t.model.state_dict())
    assert len(step.captures) == 1


@pytest.mark.filterwarnings("ignore:what the TinyJit of")
@pytest.mark.parametrize("name", RIGHT)
def test_is_as_without_it(name: str) -> None:
    same(RIGHT[name], 1e-5 if name in ROUNDED else 0.0)


@pytest.mark.parametrize("name", REFUSED)
def test_is_refused(name: str) -> None:
    text, case = REFUSED[name]
    with pytest.raises(JitError, match=text):
        same(case)


def test_it_is_followed_in_the_third_tenth_and_hundredth_call(monkeypatch: pytest.MonkeyPatch) -> None:
    followed: list[int] = []
    follow = following.Following.follow
    monkeypatch.setattr(following.Following, "follow", lambda self, *a: followed.append(n) or follow(self, *a))
    step, x = TinyJit(lambda x: x * 2), batch(0)[0]
    for n in range(1, 120):  # noqa: B007
        step(x)
    assert followed == [3, 10, 100]


def test_following_leaves_all_as_it_was() -> None:
    t, trace = Training(nn.optim.Adam), []
    rng = np.random.default_rng(1)

    def step(x: Tensor, y: Tensor) -> Tensor:
        trace.append(rng.random())
        t.model.seen = x * 2  # type: ignore[assignment]
        return t.step(x, y)

    called = TinyJit(step)
    for i in range(2):
        called(*batch(i))
    before = len(trace), t.model.seen, rng.bit_generator.state, t.optimizer.flats[0]
    for i in range(2, 12):
        called(*batch(i))
    after = len(trace), t.model.seen, rng.bit_generator.state, t.optimizer.flats[0]
    assert before[0] == after[0] == 2 and before[1] is after[1] and before[2] == after[2] and before[3] is after[3]


def test_without_following_nothing_is_said() -> None:
    with Context(JIT_CHECK=0):
        assert len(a_counter_inside(TinyJit)) == CALLS


def test_an_error_of_python_in_it_is_told() -> None:
    calls: list[int] = []

    def step(x: Tensor) -> Tensor:
        calls.append(1)
        if len(calls) > 2:
            raise KeyError("the third one")
        return x + 1

    called = TinyJit(step)
    for i in range(2):
        called(batch(i)[0])
    for _ in range(2):
        with pytest.raises(JitError, match="it raised KeyError: 'the third one'"):
            called(batch(2)[0])


def test_the_line_that_calls_a_step_does_not_matter() -> None:
    """Indices out of range are told with the line of the program, which is that of the call for the package's code."""
    table = nn.Embedding(5, 2)
    step, ids = TinyJit(table.__call__, warmup=0), Tensor([1, 2])
    first = step(ids).numpy()
    second = step(ids).numpy()
    third = step(ids).numpy()
    assert np.array_equal(first, second) and np.array_equal(first, third)


def test_what_a_followed_step_raises_is_the_cause() -> None:
    """Without it the user's line was not in the traceback."""
    left = iter(range(2))

    def step(x: Tensor) -> Tensor:
        return x * (1 + 0 * next(left))

    jit, x = TinyJit(step), Tensor([1.0]).realize()
    jit(x), jit(x)
    with pytest.raises(JitError, match="it raised StopIteration") as e:
        for _ in range(3):
            jit(x)
    assert isinstance(e.value.__cause__, StopIteration)
