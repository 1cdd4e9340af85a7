"""What a captured function returns is the caller's, as without a capture."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from manygrad import Tensor, TinyJit, no_grad
from tests.runtime.jit.programs import CALLS, Case, Jit, Training, batch, same

RIGHT: dict[str, Case] = {}  # captured, they give what the plain program gives


def right(case: Case) -> Case:
    RIGHT[case.__name__] = case
    return case


@right
def results_that_are_kept(jit: Jit) -> list[Any]:
    step = jit(lambda x, y: (x * y).sum())
    losses = [step(*batch(i)) for i in range(CALLS)]
    return [t.item() for t in losses]


@right
def results_of_one_input_that_are_kept(jit: Jit) -> list[Any]:
    step, x, count = jit(lambda x: x * 2 + count), batch(0)[0], Tensor(np.zeros(1, np.float32)).realize()
    outs = []
    for _ in range(CALLS):
        outs.append(step(x))
        count.assign(count + 1).realize()
    return [t.numpy() for t in outs]


@right
def views_of_results_that_are_kept(jit: Jit) -> list[Any]:
    step = jit(lambda x, y: {"sum": x + y, "both": (x, [x * y])})
    outs = []
    for i in range(CALLS):
        out = step(*batch(i))
        outs.append((out["sum"].detach(), out["sum"][1:].T, out["both"][1][0] * 2))
    return [t.numpy() for ts in outs for t in ts]


@right
def containers_of_results_that_are_kept(jit: Jit) -> list[Any]:
    step = jit(lambda x, y: (x.sum(), {"y": y + 1}))
    outs = [step(*batch(i)) for i in range(CALLS)]
    return [v for total, d in outs for v in (total.item(), d["y"].numpy())]


@right
def results_of_training_that_are_kept(jit: Jit) -> list[Any]:
    t = Training()
    step = jit(t.step)
    return [x.item() for x in [step(*batch(i)) for i in range(CALLS)]]


@right
def a_result_that_is_state(jit: Jit) -> list[Any]:
    """It is the state, which goes on."""
    total = Tensor(np.zeros(3, np.float32)).realize()

    def step(x: Tensor) -> Tensor:
        return total.assign(total + x.sum(0))

    called = jit(step)
    for i in range(CALLS):
        out = called(batch(i)[0])
    return [out.numpy(), total.numpy()]


@right
def the_last_result_as_argument(jit: Jit) -> list[Any]:
    step, h, seen = jit(lambda h, x: (h * 0.5 + x).tanh()), batch(9)[0], []
    for i in range(CALLS):
        h = step(h, batch(i)[0])
        seen.append(h)
    return [t.numpy() for t in seen]


@pytest.mark.parametrize("name", RIGHT)
def test_is_as_without_it(name: str) -> None:
    same(RIGHT[name])


def test_what_is_dropped_or_held_once_takes_no_memory() -> None:
    """Two pieces of memory take turns, and native code goes on writing them."""
    step, x = TinyJit(lambda x: x * 2), batch(0)[0]
    nodes = set()
    for _ in range(40):
        out = step(x)
        nodes.add(id(out.uop))
    assert len(nodes) <= 4


def test_a_donated_result_lies_where_the_last_one_lay() -> None:
    step = TinyJit(lambda x: x * 2, donate=True)
    outs = [step(batch(i)[0]) for i in range(6)]
    assert outs[2] is outs[5] and np.array_equal(outs[2].numpy(), batch(5)[0].numpy() * 2)


def test_a_result_that_is_changed_is_not_the_next_one() -> None:
    step, x = TinyJit(lambda x: x * 2), batch(0)[0]
    for _ in range(6):
        out = step(x)
        assert np.array_equal(out.numpy(), x.numpy() * 2) and not out.requires_grad
        out.assign(out + 1).realize()
        out.requires_grad_()


def test_a_result_made_without_gradients_stays_as_it_was_made() -> None:
    """Each call that left a result to its holder added a DETACH to the next one: after a thousand tokens a language
    model ended in a RecursionError."""
    x = Tensor(np.ones((2, 3), np.float32)).realize()
    step = TinyJit(lambda x: (x * 2, x[1], x.reshape(6)))
    with no_grad():
        outs = [step(x) for _ in range(40)]
    for out in outs[4:]:
        for t, before in zip(out, outs[3]):
            assert len(t.uop.toposort()) == len(before.uop.toposort())
            assert t.tolist() == before.tolist() and not t.requires_grad


STEPS: dict[str, Callable[[Tensor], Any]] = {
    "a kernel": lambda x: x + 1,
    "a copy to another device": lambda x: x.to("CPU:1"),
    "a copy and what stands on it": lambda x: (y := x.to("CPU:1"), y * 2),
    "a view of a copy": lambda x: x.to("CPU:1").reshape(2, 2).T,
    "kernels on both": lambda x: ((x * 2).to("CPU:1") + 1, x - 1),
}


@pytest.mark.parametrize("name", STEPS)
@pytest.mark.parametrize("captured", [True, False])
def test_results_keep_their_values_however_long_they_are_held(name: str, captured: bool) -> None:
    """Calls write where nobody holds what is there, whichever results are dropped, and in which order."""
    rng, held = np.random.default_rng(0), list[tuple[float, list[Tensor]]]()
    step = TinyJit(STEPS[name]) if captured else STEPS[name]
    for i in range(80):
        out = step(Tensor(np.full(4, i, np.float32)).realize())
        held.append((float(i), [t.realize() for t in (out if isinstance(out, tuple) else (out,))]))
        del out
        while held and rng.random() < 0.55:
            held.pop(int(rng.integers(len(held))))
        for value, tensors in held:
            want = STEPS[name](Tensor(np.full(4, value, np.float32)))
            for t, w in zip(tensors, want if isinstance(want, tuple) else (want,)):
                assert t.tolist() == w.tolist()
