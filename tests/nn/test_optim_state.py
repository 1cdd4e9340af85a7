"""State of optimisers: saved, loaded, copied, shared, and read by captured steps."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from manygrad import Tensor, TinyJit, nn
from manygrad.nn import optim
from manygrad.nn.optim import SGD, Adam, Optimizer
from manygrad.runtime.devices import get_device
from manygrad.tensor.uop import UOp
from tests.nn.test_optim import CASES, RNG, SHAPES, loss_of


@pytest.mark.parametrize("name", ["sgd momentum", "adam", "amsgrad", "nadam", "rmsprop"])
def test_state_goes_to_a_dict_and_back(name: str) -> None:
    """Training that stops and goes on elsewhere takes the steps it would have taken."""
    make, _ = CASES[name]
    start = [np.asarray(RNG.standard_normal(s), np.float32) for s in SHAPES]
    grads = [[np.asarray(RNG.standard_normal(s), np.float32) for s in SHAPES] for _ in range(4)]

    def run(optimiser: Optimizer, params: list[Tensor], rows: list[list[np.ndarray]]) -> None:
        for row in rows:
            for p, g in zip(params, row):
                p.grad = Tensor(g)
            optimiser.step()

    one = [Tensor(a) for a in start]
    whole = make(one)
    whole.param_groups[0]["lr"] = 0.02
    run(whole, one, grads[:2])
    state = whole.state_dict()
    assert (
        list(state["state"]) == [0, 1, 2, 3]
        and state["param_groups"][0]["params"] == [0, 1, 2, 3]
        and state["param_groups"][0]["lr"] == 0.02
    )
    two = [Tensor(p.numpy()) for p in one]
    again = make(two)
    again.load_state_dict(state)
    run(whole, one, grads[2:])
    run(again, two, grads[2:])
    assert len(again.flats) == 1
    for p, q in zip(one, two):
        np.testing.assert_array_equal(p.numpy(), q.numpy())
    with pytest.raises(ValueError, match=r"have \[1\] parameters here and \[4\] in the state"):
        make([Tensor([1.0])]).load_state_dict(state)


@pytest.mark.parametrize("name", ["sgd momentum", "adamw", "amsgrad", "nadam", "adagrad", "rmsprop"])
def test_a_captured_step_goes_on_with_the_state_that_was_loaded(name: str) -> None:
    make, _ = CASES[name]
    params = [Tensor(np.asarray(RNG.standard_normal(s), np.float32)) for s in SHAPES]
    optimiser = make(params)

    @TinyJit
    def step(at: Tensor) -> Tensor:
        optimiser.zero_grad()
        loss = loss_of([p - at for p in params], np.ones(len(SHAPES)))
        loss.backward()
        optimiser.step()
        return loss

    ats = [Tensor(float(a)).contiguous().realize() for a in RNG.standard_normal(4)]
    values, empty = [p.clone().realize() for p in params], optimiser.state_dict()
    first = [step(at).item() for at in ats]
    later, state = [p.clone().realize() for p in params], optimiser.state_dict()
    second = [step(at).item() for at in ats]
    for start, loaded, want in ((later, state, second), (values, empty, first), (later, state, second)):
        for p, v in zip(params, start):
            p.assign(v)
        optimiser.load_state_dict(loaded)
        np.testing.assert_allclose([step(at).item() for at in ats], want, rtol=1e-6)


def test_gradients_of_a_captured_step_are_set_to_zero_where_they_lie() -> None:
    w = nn.Parameter(Tensor([1.0, 2.0]))

    @TinyJit
    def add_gradient(x: Tensor) -> Tensor | None:
        (w * x).sum().backward()
        return w.grad

    for _ in range(3):
        add_gradient(Tensor([1.0, 3.0]))
    SGD([w]).zero_grad(set_to_none=False)
    assert w.grad is not None and w.grad.tolist() == [0.0, 0.0]
    add_gradient(Tensor([1.0, 3.0]))
    assert w.grad.tolist() == [1.0, 3.0]


def pickled(x: Any) -> Any:
    return pickle.loads(pickle.dumps(x))


@pytest.mark.parametrize("copied", [copy.deepcopy, pickled])
@pytest.mark.parametrize("name", ["sgd momentum", "adamw", "amsgrad", "nadam", "adagrad"])
def test_copies_take_the_same_steps(name: str, copied: Callable[[Any], Any]) -> None:
    make, _ = CASES[name]
    params = [Tensor(np.asarray(RNG.standard_normal(s), np.float32)) for s in SHAPES]
    optimiser = make(params)
    schedule = optim.lr_scheduler.ExponentialLR(optimiser, 0.5)
    grads = [[np.asarray(RNG.standard_normal(s), np.float32) for s in SHAPES] for _ in range(4)]

    def run(optimiser: Optimizer, schedule: Any, params: list[Tensor], rows: list[list[np.ndarray]]) -> None:
        for row in rows:
            for p, g in zip(params, row):
                p.grad = Tensor(g)
            optimiser.step()
            schedule.step()

    run(optimiser, schedule, params, grads[:2])
    # (parameters come along, and are the same ones in all)
    again, its_schedule, its_params = copied((optimiser, schedule, params))
    assert its_schedule.optimizer is again and all(p is q for p, q in zip(again.params, its_params))
    run(optimiser, schedule, params, grads[2:])
    run(again, its_schedule, its_params, grads[2:])
    for p, q in zip(params, its_params):
        assert p is not q
        np.testing.assert_array_equal(p.numpy(), q.numpy())
    assert again.param_groups[0]["lr"] == optimiser.param_groups[0]["lr"]


@pytest.mark.parametrize("axis", [None, 0, 1])
def test_parameters_that_share_storage_are_written_in_place(axis: int | None) -> None:
    """Each is a part of the flat buffer, also where it is cut over devices: writing to one, or to a part of it, leaves
    it there, and the others as they are."""
    devices = ("CPU:0", "CPU:1")
    arrays = [np.arange(8, dtype=np.float32).reshape(2, 4), np.arange(12, dtype=np.float32).reshape(4, 3)[:, :2].copy()]
    params = [Tensor(a).shard(devices, axis).contiguous().realize() for a in arrays]
    optimiser = SGD(params, lr=0.5)
    for p in params:
        p.grad = p.zeros_like()
    optimiser.step()
    (flat,) = optimiser.flats
    params[1].assign(Tensor(arrays[1] + 100).shard(devices, axis))
    assert flat.is_attached()
    with Tensor.no_grad():
        params[0].copy_(Tensor(arrays[0] * 2))
        params[1][1:3] = 7.0
    arrays = [arrays[0] * 2, arrays[1] + 100]
    arrays[1][1:3] = 7
    Tensor.realize(*params)
    assert flat.is_attached() and optimiser.flats == [flat]
    for p, part, a in zip(params, flat.split(flat.flat), arrays):
        np.testing.assert_array_equal(p.numpy(), a)
        np.testing.assert_array_equal(part.numpy(), a)


def test_copies_of_sharded_state_keep_its_place() -> None:
    devices = ("CPU:0", "CPU:1")
    w = Tensor(np.arange(6, dtype=np.float32).reshape(2, 3)).shard(devices, 1).contiguous().realize()
    optimiser = Adam([w], lr=0.1)
    w.grad = Tensor.ones(2, 3).shard(devices, 1)
    optimiser.step()
    again, v = copy.deepcopy((optimiser, w))
    assert v.device == devices and again.flats[0].device == devices
    for o, p in ((optimiser, w), (again, v)):
        p.grad = Tensor.full((2, 3), 2.0).shard(devices, 1)
        o.step()
    np.testing.assert_array_equal(w.numpy(), v.numpy())


def test_what_cannot_be_loaded_changes_nothing() -> None:
    w = nn.Parameter(Tensor([1.0, 2.0]))
    adam, sgd_ = Adam([w], lr=0.5), SGD([w], lr=0.25, momentum=0.9)
    for optimiser in (adam, sgd_):
        w.grad = Tensor([1.0, 1.0])
        optimiser.step()
    with pytest.raises(ValueError, match=r"parameter 0 has \['momentum_buffer', 'step'\], Adam keeps \['exp_avg'"):
        adam.load_state_dict(sgd_.state_dict())
    state = adam.state_dict()
    state["state"][0]["exp_avg"] = Tensor.zeros(3)
    with pytest.raises(ValueError, match=r"\['exp_avg'\] of parameter 0 have the shape \(3,\), the parameter \(2,\)"):
        adam.load_state_dict(state)
    assert adam.param_groups[0]["lr"] == 0.5 and adam.state[w]["step"].item() == 1


def test_closure_and_zero_grad() -> None:
    w = nn.Parameter(Tensor([2.0]))
    optimiser = SGD(iter([w]), lr=0.5)

    def closure() -> Tensor:
        optimiser.zero_grad()
        loss = (w * w).sum()
        loss.backward()
        return loss

    assert optimiser.step(closure).item() == 4.0 and w.item() == 0.0  # 2 − 0.5 · 4
    optimiser.zero_grad(set_to_none=False)
    assert w.grad is not None and w.grad.item() == 0.0


@pytest.mark.parametrize("captured", [False, True])
@pytest.mark.parametrize("devices", ["CPU:0", ("CPU:0", "CPU:1")])
def test_numbers_that_change_in_each_step_compile_nothing(
    devices: Any, captured: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A learning rate, a seed, the count of a state that is loaded: each was a kernel of its own, 10 to 40 ms a
    step."""
    seen, cpu = set(), type(get_device("CPU"))
    compile = cpu.compile

    def counted(self: Any, ast: UOp) -> Any:
        seen.add(ast)
        return compile(self, ast)

    monkeypatch.setattr(cpu, "compile", counted)
    w, v = (Tensor(np.ones(3, np.float32)).to(devices).contiguous().realize().requires_grad_() for _ in range(2))
    optimizer, counting, x = SGD([w], lr=0.5), Adam([v]), np.ones(3, np.float32)

    def step() -> None:
        optimizer.zero_grad()
        counting.zero_grad()
        (w * 2 + v).sum().backward()
        optimizer.step()
        counting.step()

    run = TinyJit(step) if captured else step
    kernels = 0
    for i in range(24):
        lr = 0.5 / (1 + i)
        optimizer.param_groups[0]["lr"] = lr
        run()
        counting.load_state_dict(counting.state_dict())
        Tensor.manual_seed(i)
        w.rand_like().numpy()
        x -= np.float32(lr * 2)
        np.testing.assert_allclose(w.numpy(), x, rtol=1e-5)
        kernels = kernels if i > 4 else len(seen)
    assert len(seen) == kernels
