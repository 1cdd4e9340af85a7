"""A program in each of ten threads: each gives what it gives alone, though the others build, compute, draw,
differentiate and fail."""

from __future__ import annotations

import sys
import threading

import numpy as np
from hypothesis import strategies as st

from manygrad import Context, Tensor, TinyJit, Variable, function, is_grad_enabled, no_grad
from manygrad.tensor.environment import DEBUG

EXAMPLES = 12
THREADS, N, STEPS = 10, 4, 9
SHARED = Tensor(np.arange(1.0, N + 1), device="PYTHON").realize()


@st.composite
def programs(draw: st.DrawFn) -> list[list[tuple[int, int]]]:
    """(what, a number) of each step, for each thread."""
    return draw(
        st.lists(
            st.lists(st.tuples(st.integers(0, STEPS - 1), st.integers(0, 3)), min_size=2, max_size=10),
            min_size=2,
            max_size=THREADS,
        )
    )


def run(steps: list[tuple[int, int]], number: int) -> None:
    """Each step checks itself; the random numbers of a thread are all different."""
    rng = np.random.default_rng(number)
    a = rng.integers(-4, 5, N).astype(np.float64)
    x, start = Tensor(a).realize(), a.copy()
    weight = Tensor(np.arange(1.0, N + 1) + number, requires_grad=True)
    state = Tensor(np.zeros(N)).realize()
    total = np.zeros(N)
    traced = function(lambda p, q: (p * q + 1).cumsum(0))
    drawn: list[float] = []
    n = Variable("n", 1, N)

    def step(t: Tensor) -> tuple[Tensor, Tensor]:
        state.assign(state + t * number)
        return state * 2, Tensor.rand(2)

    jit = TinyJit(step)
    assert is_grad_enabled() and Tensor.training is None
    for what, k in steps:
        if what == 0:  # shared subgraphs: equal nodes in all threads
            got = ((SHARED * 2 + 1).cumsum(0) * x).sum()
            np.testing.assert_array_equal(got.numpy(), ((np.arange(1.0, N + 1) * 2 + 1).cumsum() * a).sum())
        elif what == 1:
            x.assign(x + k)
            a = a + k
        elif what == 2:
            x[k:] = SHARED[k:] + number
            a = np.concatenate([a[:k], np.arange(1.0, N + 1)[k:] + number])
        elif what == 3:
            np.testing.assert_array_equal(x.numpy(), a)
        elif what == 4:
            weight.grad = None
            with Tensor.train(bool(k % 2)):
                (weight * x * 2).sum().backward()
                assert weight.grad is not None and Tensor.training is bool(k % 2)
                np.testing.assert_array_equal(weight.grad.numpy(), a * 2)
        elif what == 5:
            with no_grad(), Context(DEBUG=-number):
                y = weight * 2
                assert not y.requires_grad and not is_grad_enabled() and DEBUG.value == -number
        elif what == 6:
            for _ in range(k):
                got, random = jit(x)
                total = total + a * number
                np.testing.assert_array_equal(got.numpy(), total * 2)
                drawn += random.tolist()
        elif what == 7:
            np.testing.assert_array_equal(traced(x, SHARED).numpy(), (a * np.arange(1.0, N + 1) + 1).cumsum())
            drawn += Tensor.rand(3).tolist()
        elif what == 8:
            bad = SHARED[: n.bind(2)].sum() + SHARED[: n.bind(3)].sum()
            np.testing.assert_array_equal(x.numpy(), a)
            x.assign(x + bad)
            try:
                x.realize()
            except ValueError as error:
                assert "bind mismatch" in str(error), error
            else:
                raise AssertionError("no error")
    np.testing.assert_array_equal(x.numpy(), a)
    assert len(set(drawn)) == len(drawn), "a random number came twice"
    np.testing.assert_array_equal(SHARED.numpy(), np.arange(1.0, N + 1))
    assert start.shape == a.shape


def check(program: list[list[tuple[int, int]]]) -> None:
    errors: list[BaseException] = []
    ready = threading.Barrier(len(program))

    def work(steps: list[tuple[int, int]], number: int) -> None:
        try:
            ready.wait()
            with Context(DEVICE="PYTHON"):
                run(steps, number)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=(steps, i + 1), daemon=True) for i, steps in enumerate(program)]
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    try:
        for t in threads:
            t.start()
        for t in threads:
            t.join(120)
    finally:
        sys.setswitchinterval(before)
    assert not any(t.is_alive() for t in threads), "the threads wait for each other"
    if errors:
        raise errors[0]
