"""Programs that change an optimiser between its steps: parameters taken out, replaced and regrouped, states written,
dropped and kept by an optimiser of their own. What is expected is by hand, PyTorch's."""

from __future__ import annotations

import copy
import pickle
from collections import defaultdict
from typing import Any

import numpy as np
import pytest

from manygrad import Context, Tensor, TinyJit, nn, no_grad
from manygrad.nn import optim


def take_out(o: optim.Optimizer, new: Tensor) -> None:
    o.param_groups[0]["params"].pop(0)


def replace(o: optim.Optimizer, new: Tensor) -> None:
    o.param_groups[0]["params"][0] = new


def other_list(o: optim.Optimizer, new: Tensor) -> None:
    o.param_groups[0]["params"] = o.param_groups[0]["params"][1:]


def drop_group(o: optim.Optimizer, new: Tensor) -> None:
    o.param_groups.pop()


def other_group(o: optim.Optimizer, new: Tensor) -> None:
    p = o.param_groups[0]["params"].pop(0)
    o.add_param_group({"params": [p], "lr": 0.05})


# steps of size (lr 0.1) · 2 and · 1 and · 3 that p, q and new have taken after six steps, of which three after it
SGD_STEPS = {
    take_out: (3, 6, 0),
    replace: (3, 6, 3),
    other_list: (3, 6, 0),
    drop_group: (3, 3, 0),
    other_group: (4.5, 6, 0),
}


@pytest.mark.parametrize("captured", [False, True])
@pytest.mark.parametrize("follow", [0, 1])
@pytest.mark.parametrize("change", SGD_STEPS, ids=lambda f: f.__name__)
def test_parameters_of_a_group_change(change: Any, follow: int, captured: bool) -> None:
    p, q, new = (nn.Parameter(Tensor([v, v])) for v in (1.0, 2.0, 5.0))
    optimizer = optim.SGD([p, q], lr=0.1)

    def step() -> None:
        for t in (p, q, new):
            t.grad = None
        (p * 2 + q + new * 3).sum().backward()
        optimizer.step()

    def loop() -> None:
        run = TinyJit(step) if captured else step
        for i in range(6):
            if i == 3:
                change(optimizer, new)
            run()

    if follow:
        loop()
    else:
        with Context(FOLLOW=0):
            loop()
    taken = [round((a - t.tolist()[0]) / (0.1 * b), 4) for a, b, t in ((1, 2, p), (2, 1, q), (5, 3, new))]
    assert taken == [*SGD_STEPS[change]]


def exp_avg_set(o: optim.Optimizer, p: Tensor) -> None:
    o.state[p]["exp_avg"] = Tensor.zeros_like(p)


def exp_avg_written(o: optim.Optimizer, p: Tensor) -> None:
    with no_grad():
        o.state[p]["exp_avg"].zero_()


def deleted(o: optim.Optimizer, p: Tensor) -> None:
    del o.state[p]


def popped(o: optim.Optimizer, p: Tensor) -> None:
    assert set(o.state.pop(p)) == {"step", "exp_avg", "exp_avg_sq"}


def cleared(o: optim.Optimizer, p: Tensor) -> None:
    o.state.clear()


def begun_anew(o: optim.Optimizer, p: Tensor) -> None:
    o.state = defaultdict(dict)


def step_set(o: optim.Optimizer, p: Tensor) -> None:
    o.state[p]["step"] = 0


def adam(steps: int, changed: int, m_only: bool, step_only: bool = False) -> float:
    """x after Adam's steps on a gradient of 1, -1 from step `changed` on, where the state changes."""
    x, m, v, t = 1.0, 0.0, 0.0, 0
    for i in range(steps):
        if i == changed:
            if step_only:
                t = 0
            elif m_only:
                m = 0.0
            else:
                m, v, t = 0.0, 0.0, 0
        g = 1.0 if i < changed else -1.0
        m, v, t = 0.9 * m + 0.1 * g, 0.999 * v + 0.001 * g * g, t + 1
        x -= 0.1 * (m / (1 - 0.9**t)) / ((v / (1 - 0.999**t)) ** 0.5 + 1e-8)
    return x


@pytest.mark.parametrize("change", [exp_avg_set, exp_avg_written, deleted, popped, cleared, begun_anew, step_set])
def test_states_that_a_program_changes(change: Any) -> None:
    p, other = nn.Parameter(Tensor([1.0, 1.0])), nn.Parameter(Tensor([1.0]))
    optimizer = optim.Adam([p, other], lr=0.1)
    for i in range(6):
        if i == 4:
            change(optimizer, p)
        sign = 1 if i < 4 else -1
        optimizer.zero_grad()
        (p * sign).sum().backward()
        (other * sign).sum().backward()
        optimizer.step()
    m_only, step_only = change in (exp_avg_set, exp_avg_written), change is step_set
    np.testing.assert_allclose(p.tolist(), [adam(6, 4, m_only, step_only)] * 2, rtol=1e-5)
    alone = change not in (cleared, begun_anew)  # (the other one's state is as it was)
    want = adam(6, 4, m_only=True) if not alone else _untouched()
    np.testing.assert_allclose(other.tolist(), [adam(6, 4, False) if not alone else want], rtol=1e-5)
    assert optimizer.state[other]["step"].item() == (6 if alone else 2)


def _untouched() -> float:
    x, m, v = 1.0, 0.0, 0.0
    for t in range(1, 7):
        g = 1.0 if t <= 4 else -1.0
        m, v = 0.9 * m + 0.1 * g, 0.999 * v + 0.001
        x -= 0.1 * (m / (1 - 0.9**t)) / ((v / (1 - 0.999**t)) ** 0.5 + 1e-8)
    return x


def test_a_state_that_is_not_kept_is_an_error() -> None:
    p = nn.Parameter(Tensor([1.0]))
    optimizer = optim.Adam([p])
    assert dict(optimizer.state[p]) == {} and len(optimizer.state) == 0
    p.sum().backward()
    optimizer.step()
    with pytest.raises(KeyError, match="exp_avg_sq.*not 'momentum'"):
        optimizer.state[p]["momentum"] = 1
    assert p in optimizer.state and [*optimizer.state] == [p]


class Lion(optim.Optimizer):
    """As PyTorch's users write one."""

    def __init__(self, params: Any, lr: float) -> None:
        super().__init__(params, {"lr": lr})

    def step(self, closure: Any = None) -> None:
        with no_grad():
            for group in self.param_groups:
                for p in group["params"]:
                    state = self.state[p]
                    if len(state) == 0:
                        state["count"], state["m"] = 0, Tensor.zeros_like(p)
                    state["count"] += 1
                    state["m"].mul_(0.9).add_(p.grad, alpha=0.1)
                    p.add_(state["m"].sign(), alpha=-group["lr"])


def test_an_optimiser_with_a_step_of_its_own() -> None:
    p = nn.Parameter(Tensor([1.0, -1.0]))
    optimizer = Lion([p], 0.1)

    def train(p: Tensor, optimizer: optim.Optimizer, steps: int) -> None:
        for _ in range(steps):
            optimizer.zero_grad()
            (p * p).sum().backward()
            optimizer.step()

    train(p, optimizer, 5)
    np.testing.assert_allclose(p.tolist(), [0.5, -0.5], rtol=1e-6)
    state = optimizer.state_dict()
    assert state["state"][0]["count"] == 5
    q = nn.Parameter(p.detach().clone())
    loaded = Lion([q], 0.1)
    loaded.load_state_dict(state)
    for other in (copy.deepcopy(optimizer), pickle.loads(pickle.dumps(optimizer))):
        (own,) = other.params
        assert other.state[own]["count"] == 5
        np.testing.assert_array_equal(other.state[own]["m"].numpy(), optimizer.state[p]["m"].numpy())
    train(p, optimizer, 3)
    train(q, loaded, 3)
    assert q.tolist() == p.tolist() and loaded.state[q]["count"] == 8
    np.testing.assert_array_equal(loaded.state[q]["m"].numpy(), optimizer.state[p]["m"].numpy())
