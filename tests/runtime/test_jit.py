"""TinyJit: capture, replay, guards."""

from __future__ import annotations

import numpy as np
import pytest

from manygrad import Context, GlobalCounters, Tensor, TinyJit, Variable
from manygrad.runtime.jit import JitError


def test_replay_gives_new_values_for_new_inputs() -> None:
    calls = 0

    @TinyJit
    def f(a: Tensor, b: Tensor) -> Tensor:
        nonlocal calls
        calls += 1
        return ((a + b) * 2).relu().sum(0)

    for i in range(6):
        a, b = np.random.RandomState(i).randn(2, 4, 5).astype(np.float32)
        np.testing.assert_allclose(f(Tensor(a), Tensor(b)).numpy(), np.maximum((a + b) * 2, 0).sum(0), rtol=1e-5, atol=1e-5)
    assert calls == 2, "the function runs for the first call and the capture only"


def test_state_changed_by_the_step_goes_on_in_replays() -> None:
    state = Tensor(np.zeros(3, np.float32))

    @TinyJit
    def step(x: Tensor) -> Tensor:
        state.assign(state + x)
        return state.sum()

    for i in range(1, 7):
        assert step(Tensor(np.ones(3, np.float32))).item() == 3.0 * i
    np.testing.assert_array_equal(state.numpy(), np.full(3, 6, np.float32))


def test_inputs_may_be_overwritten_or_freed_by_the_caller() -> None:
    @TinyJit
    def f(a: Tensor) -> Tensor:
        return a * 2

    for i in range(5):
        x = Tensor(np.full(4, i, np.float32))
        out = f(x)
        x.assign(x + 100).realize()
        np.testing.assert_array_equal(out.numpy(), np.full(4, 2 * i, np.float32))


def test_nested_containers_and_keywords_are_inputs() -> None:
    @TinyJit
    def f(pairs: list[tuple[Tensor, Tensor]], *, scale: Tensor) -> dict[str, Tensor]:
        return {"out": pairs[0][0] * scale + pairs[0][1]}

    for i in range(4):
        out = f([(Tensor([1.0 * i]), Tensor([2.0]))], scale=Tensor([3.0]))["out"]
        assert out.item() == 3.0 * i + 2


def test_lazy_inputs_are_computed_first() -> None:
    @TinyJit
    def f(a: Tensor) -> Tensor:
        return a + 1

    for i in range(4):
        assert f(Tensor([1.0, 2.0]).sum() * i).item() == 3.0 * i + 1


def test_methods_capture_per_instance() -> None:
    class Model:
        def __init__(self, w: float):
            self.w = Tensor([w])

        @TinyJit
        def run(self, x: Tensor) -> Tensor:
            return x * self.w

    one, two = Model(1.0), Model(2.0)
    for i in range(4):
        assert one.run(Tensor([1.0 * i])).item() == i
        assert two.run(Tensor([1.0 * i])).item() == 2 * i


def captured() -> TinyJit[Tensor]:
    f = TinyJit(lambda a, n=1: a * n)
    for _ in range(3):
        f(Tensor(np.ones((2, 3), np.float32)))
    return f


def test_guards_name_what_changed() -> None:
    with pytest.raises(JitError, match=r"captured as shape \(2, 3\) float32.*now it is \(3, 3\)"):
        captured()(Tensor(np.ones((3, 3), np.float32)))
    with pytest.raises(JitError, match="float64"):
        captured()(Tensor(np.ones((2, 3))))
    with pytest.raises(JitError, match="CPU:1"):
        captured()(Tensor(np.ones((2, 3), np.float32), device="CPU:1"))
    with pytest.raises(JitError, match="not a tensor changed"):
        captured()(Tensor(np.ones((2, 3), np.float32)), n=2)
    with pytest.raises(JitError, match="input tensors"):
        captured()(Tensor(np.ones((2, 3), np.float32)), Tensor([1.0]))


def test_a_function_that_computes_nothing_is_refused() -> None:
    f = TinyJit(lambda: 3)
    f()
    with pytest.raises(JitError, match="computed nothing"):
        f()


def test_a_jit_inside_a_recording_jit_is_refused() -> None:
    inner = TinyJit(lambda a: a + 1)
    inner(Tensor([1.0]))
    outer = TinyJit(lambda a: inner(a))
    with pytest.raises(JitError, match="another one is recording"):
        for _ in range(3):
            outer(Tensor([1.0]))


def test_a_variable_may_change_from_call_to_call() -> None:
    v = Variable("n", 1, 8)
    x = np.arange(8, dtype=np.float32)
    f = TinyJit(lambda t, n: t[:n].sum())
    for n in (3, 5, 2, 8, 1):
        assert f(Tensor(x), v.bind(n)).item() == x[:n].sum()


def test_random_numbers_are_fresh_in_every_replay() -> None:
    f = TinyJit(lambda: Tensor.rand(4))
    seen = {f().numpy().tobytes() for _ in range(6)}
    assert len(seen) == 6


def test_jit_0_runs_the_function_every_time() -> None:
    calls = []
    f = TinyJit(lambda a: calls.append(1) or a + 1)
    with Context(JIT=0):
        for i in range(4):
            assert f(Tensor([1.0 * i])).item() == i + 1
    assert len(calls) == 4


def test_kernels_are_batched_and_counted() -> None:
    @TinyJit
    def f(a: Tensor) -> Tensor:
        for _ in range(5):
            a = (a + 1).contiguous()
        return a

    x = Tensor(np.zeros(3, np.float32))
    for _ in range(3):
        f(x)
    assert len(f.items) == 1
    before = GlobalCounters.kernel_count
    assert f(x).numpy().tolist() == [5.0] * 3
    assert GlobalCounters.kernel_count - before == 5


def test_validation_runs_every_kernel_of_a_replay() -> None:
    with Context(VALIDATE_WITH_CPU=1):
        f = TinyJit(lambda a: ((a + 1).contiguous() * 2).contiguous() - 3)
        for i in range(4):
            assert f(Tensor([1.0 * i])).item() == (i + 1) * 2 - 3
