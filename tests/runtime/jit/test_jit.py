"""TinyJit: capture, replay, guards."""

from __future__ import annotations

import numpy as np
import pytest

from manygrad import Context, GlobalCounters, Tensor, TinyJit, Variable
from manygrad.errors import JitError


def test_replay_gives_new_values_for_new_inputs() -> None:
    calls = 0

    @TinyJit
    def f(a: Tensor, b: Tensor) -> Tensor:
        nonlocal calls
        calls += 1
        return ((a + b) * 2).relu().sum(0)

    for i in range(6):
        a, b = np.random.RandomState(i).randn(2, 4, 5).astype(np.float32)
        np.testing.assert_allclose(
            f(Tensor(a), Tensor(b)).numpy(), np.maximum((a + b) * 2, 0).sum(0), rtol=1e-5, atol=1e-5
        )
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
    with pytest.raises(JitError, match=r"captured as shape \(2, 3\) float32.*now it is \(2, 3\) float64"):
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
            a = (a.flip(0) + 1).contiguous()
        return a

    x = Tensor(np.zeros(3, np.float32))
    for _ in range(3):
        f(x)
    assert len(f.captured.items) == 1
    before = GlobalCounters.kernel_count
    assert f(x).numpy().tolist() == [5.0] * 3
    assert GlobalCounters.kernel_count - before == 5


def test_validation_runs_every_kernel_of_a_replay() -> None:
    with Context(VALIDATE_WITH_CPU=1):
        f = TinyJit(lambda a: ((a + 1).contiguous() * 2).contiguous() - 3)
        for i in range(4):
            assert f(Tensor([1.0 * i])).item() == (i + 1) * 2 - 3


def test_one_tensor_as_two_inputs_and_an_input_that_is_returned() -> None:
    f = TinyJit(lambda a, b: (a, a * 10 + b))
    for i in range(5):
        x = Tensor([1.0 * i])
        same, out = f(x, x)
        assert (same.item(), out.item()) == (i, 11.0 * i)
    with pytest.raises(JitError, match=r"argument\[1\] and argument\[0\] were one tensor at capture, now they are two"):
        f(Tensor([1.0]), Tensor([5.0]))
    g = TinyJit(lambda a, b: a * 10 + b)
    for i in range(4):
        assert g(Tensor([1.0 * i]), Tensor([5.0])).item() == 10.0 * i + 5
    x = Tensor([2.0])
    assert g(x, x).item() == 22.0  # two inputs may become one


def test_the_callers_tensors_keep_their_values() -> None:
    f = TinyJit(lambda a: a + 1)
    xs = [Tensor([1.0 * i]) for i in range(5)]
    for x in xs:
        f(x)
    assert [x.item() for x in xs] == [0.0, 1.0, 2.0, 3.0, 4.0]


def test_a_view_that_is_passed_stays_a_view() -> None:
    f = TinyJit(lambda a: a.sum())
    base = Tensor(np.zeros((4, 2), np.float32)).realize()
    rows = [base[i] for i in range(4)]
    for row in rows:
        assert f(row).item() == 0.0
    base.assign(1.0)
    assert [row.tolist() for row in rows] == [[1.0, 1.0]] * 4
    assert f(rows[0]).item() == 2.0


def test_outputs_hold_the_values_of_their_call() -> None:
    f = TinyJit(lambda a: a + 1)
    outs = [f(Tensor([1.0 * i])) for i in range(5)]
    assert [t.item() for t in outs] == [1, 2, 3, 4, 5]


def test_feeding_an_output_back_in() -> None:
    f = TinyJit(lambda a: a * 2 + 1)
    x, want = Tensor([1.0]), 1.0
    for _ in range(6):
        x, want = f(x), want * 2 + 1
        assert x.item() == want


def test_a_function_that_writes_its_input() -> None:
    @TinyJit
    def f(a: Tensor, b: Tensor) -> Tensor:
        a.assign(a + b)
        return a * 10

    b, state = Tensor([1.0]), Tensor([0.0]).realize()
    for i in range(5):
        assert f(state, b).item() == 10.0 * (i + 1)
        assert (state.item(), b.item()) == (i + 1, 1.0)
    table = Tensor(np.zeros((2, 1), np.float32)).realize()
    for i in range(3):
        f(table[1], b)
        assert table.tolist() == [[0.0], [i + 1.0]]


def test_pending_assignments_run_before_the_step_and_only_once() -> None:
    """A learning rate that the caller changes between steps."""
    rate, total = Tensor([1.0]).realize(), Tensor([0.0]).realize()

    @TinyJit
    def step() -> Tensor:
        total.assign(total + rate)
        return total

    want = 0.0
    for i in range(6):
        rate.assign(float(i))
        want += i
        assert step().item() == want
    assert (step().item(), step().item(), rate.item()) == (want + 5, want + 10, 5.0)


def test_arrays_objects_and_read_values_are_refused() -> None:
    f = TinyJit(lambda a, o: a * 1)
    with pytest.raises(
        JitError, match=r"argument\[1\] is a NumPy array: its values would become a part of the capture"
    ):
        f(Tensor([1.0]), np.ones(2))
    for _ in range(2):
        f(Tensor([1.0]), f)
    f(Tensor([1.0]), f)
    with pytest.raises(JitError, match=r"changed since capture: argument\[1\] from .* to .*"):
        f(Tensor([1.0]), object())
    g = TinyJit(lambda a: (a * 2).item())
    assert g(Tensor([1.0])) == 2.0
    with pytest.raises(RuntimeError, match=r"a value is read .* while a TinyJit records"):
        g(Tensor([1.0]))


def test_sharded_inputs_and_collectives() -> None:
    devices = ("CPU:0", "CPU:1", "CPU:2")
    w = Tensor(np.ones((4, 2), np.float32)).shard(devices).contiguous().realize()

    @TinyJit
    def f(x: Tensor) -> Tensor:
        return (x @ w).relu().sum(0)

    for i in range(5):
        a = np.full((7, 4), i, np.float32)
        np.testing.assert_allclose(f(Tensor(a).shard(devices, 0)).numpy(), np.full(2, 28.0 * i))
    with pytest.raises(JitError, match=r"captured as shape"):
        f(Tensor(np.ones((7, 4), np.float32)))


def test_views_and_constants_as_inputs() -> None:
    f = TinyJit(lambda a, b: a.sum() + b)
    base = Tensor(np.arange(12, dtype=np.float32).reshape(3, 4))
    for i in range(3):
        assert f(base[i], Tensor(2.0)).item() == base.numpy()[i].sum() + 2
        assert f(base.T[0, :].reshape(3)[:1].expand(4), Tensor(1.0)).item() == 1.0 or i < 2


def test_reset_captures_again() -> None:
    f = captured()
    f.reset()
    assert not f.captured
    for i in range(3):
        assert f(Tensor([1.0 * i])).item() == i
    assert f.captured


def test_a_failed_capture_can_be_tried_again() -> None:
    fail = [False]

    @TinyJit
    def f(a: Tensor) -> Tensor:
        if fail[0]:
            raise KeyError("data")
        return a + 1

    f(Tensor([1.0]))
    fail[0] = True
    with pytest.raises(KeyError):
        f(Tensor([1.0]))
    fail[0] = False
    for i in range(3):
        assert f(Tensor([1.0 * i])).item() == i + 1


def test_the_variables_must_be_the_same_ones() -> None:
    t = Tensor(np.arange(8, dtype=np.float32))
    f = TinyJit(lambda n: t[:n].sum())
    v = Variable("n", 1, 8)
    for k in (2, 3, 4):
        f(v.bind(k))
    with pytest.raises(JitError, match=r"captured with the variables n .*, called with m"):
        f(Variable("m", 1, 8).bind(2))


def test_without_native_graphs_it_gives_the_same() -> None:
    with Context(JIT=2):
        f = TinyJit(lambda a: ((a + 1).contiguous() * 2).contiguous())
        for i in range(4):
            assert f(Tensor([1.0 * i])).item() == 2.0 * (i + 1)
        assert len(f.captured.items) == 2


def test_a_capture_keeps_its_memory_and_gives_it_back(no_collection: None) -> None:
    held = GlobalCounters.mem_used
    f = TinyJit(lambda a: ((a + 1).contiguous() * 2).sum(0))
    for _ in range(4):
        f(Tensor(np.ones((256, 256), np.float32)))
    assert GlobalCounters.mem_used - held >= 2 << 18  # its input and its temporary
    del f
    assert GlobalCounters.mem_used == held


@pytest.mark.parametrize("devices", [None, ("CPU:0", "CPU:1")])
def test_what_is_made_of_state_or_results_between_calls_keeps_its_value(devices: tuple[str, str] | None) -> None:
    """Lazy values: nothing of them is computed before the end, and a replay writes what they read."""
    state = Tensor(np.ones(4, np.float32))
    state = (state if devices is None else state.shard(devices, 0).contiguous()).realize()
    step = TinyJit(lambda x: state.assign(state + x) * 10)
    one = Tensor(np.ones(4, np.float32))
    one = (one if devices is None else one.shard(devices, 0)).realize()
    seen, total = [], Tensor(0.0)
    for _ in range(6):
        seen.append(state * 2)
        total = total + step(one)[0]
    assert [t.numpy()[0] for t in seen] == [2, 4, 6, 8, 10, 12]
    assert total.item() == 10 * (2 + 3 + 4 + 5 + 6 + 7)
    assert (state * 2)[3].item() == 14


def test_what_only_a_capture_overwrites_is_no_part_of_the_step() -> None:
    state, other = (Tensor(np.full(3, v, np.float32)).realize() for v in (1.0, 5.0))
    step = TinyJit(lambda x: state.assign(state + x).realize())
    one = Tensor(np.ones(3, np.float32)).realize()
    step(one)
    old = state * 100 + other
    step(one)
    assert len(step.captured.items) == 1
    assert old.numpy().tolist() == [205.0] * 3
    for _ in range(3):
        step(one)
    assert old.numpy().tolist() == [205.0] * 3 and state.numpy().tolist() == [6.0] * 3


def test_a_copy_made_before_state_is_in_memory_is_not_copied_again() -> None:
    a, b = (Tensor(np.arange(6, dtype=np.float32)).shard(("CPU:0", "CPU:1"), 0) for _ in range(2))
    kept = a.clone()

    @TinyJit
    def step(x: Tensor) -> Tensor:
        b.copy_(a)
        a.fill_(0)
        return x + 1

    for n in range(4):
        step(Tensor([float(n)]).realize())
    assert kept.numpy().tolist() == list(range(6)) and b.numpy().tolist() == [0.0] * 6


def test_state_that_is_written_for_the_first_time_in_the_capture_is_a_part_of_the_step() -> None:
    # (a copy of zeros is zeros: after the first call `last` is still no memory)
    last, count = (Tensor.zeros(4), Tensor.zeros(4))

    @TinyJit
    def step(x: Tensor) -> Tensor:
        last.copy_(count)
        count.add_(1)
        return x + 1

    for n in range(5):
        step(Tensor([float(n)]).realize())
        assert (last.tolist(), count.tolist()) == ([n] * 4, [n + 1] * 4)


def test_a_lazy_value_that_cannot_be_computed_fails_no_replay() -> None:
    state, one = (Tensor(np.ones(4, np.float32)).realize() for _ in range(2))
    step = TinyJit(lambda x: state.assign(state + x).realize())
    n = Variable("n", 1, 4)
    for _ in range(3):
        step(one)
    bad = state[: n.bind(2)].sum() + state[: n.bind(3)].sum()
    for k in range(3):
        assert step(one).tolist() == [5.0 + k] * 4
    with pytest.raises(RuntimeError, match="is lost"):
        bad.item()
    assert step(one).tolist() == [8.0] * 4


@pytest.mark.parametrize("device", ["CPU", ("CPU:0", "CPU:1")])
def test_a_value_from_before_that_the_step_makes_too_is_not_taken_from_there(device: str | tuple[str, ...]) -> None:
    """`early` is computed as the step overwrites what it reads; the step's own `c * 2` is a part of each replay."""
    a, c = (Tensor(np.arange(8, dtype=np.float32).reshape(4, 2)) for _ in range(2))
    a, c = (t.shard(device, 0) if isinstance(device, tuple) else t for t in (a, c))
    early = a * 2

    def step(x: Tensor) -> tuple[Tensor, Tensor]:
        c.assign(c * 2 - 1)
        out = c * 2
        c.copy_(a)
        a.fill_(-2.0)
        return x + 1, out

    run = TinyJit(step)
    rows = np.arange(8, dtype=np.float32).reshape(4, 2)
    for n, read in enumerate((rows, rows, np.full((4, 2), -2), np.full((4, 2), -2))):
        x, out = run(Tensor([float(n)]))
        assert x.tolist() == [n + 1] and out.tolist() == ((read * 2 - 1) * 2).tolist()
    assert early.tolist() == (rows * 2).tolist()


def test_a_constant_that_is_assigned_an_equal_one_is_state() -> None:
    a, b = Tensor.zeros(2), Tensor.zeros(2)

    def step(x: Tensor) -> Tensor:
        a.assign(a + 5)
        a.copy_(b)
        b.fill_(1)
        return x + 1

    run, seen = TinyJit(step), []
    for n in range(4):
        assert run(Tensor([float(n)])).tolist() == [n + 1]
        seen.append((a.tolist(), b.tolist()))
    assert seen == [([0, 0], [1, 1]), *[([1, 1], [1, 1])] * 3]


def test_without_a_warm_up_the_first_call_is_captured() -> None:
    state, calls = Tensor(np.zeros(3, np.float32)).realize(), []

    def step(x: Tensor, written: Tensor) -> tuple[Tensor, Tensor]:
        calls.append(1)
        state.assign(state + x)
        written.assign(written * 2)
        return state * 1, x

    jit = TinyJit(step, warmup=0)
    for again in (1, 2):
        before, written = state * 10, Tensor(np.ones(3, np.float32)).realize()  # (of the state as it is)
        start = state.numpy()[0]
        for i in range(1, 5):
            x = Tensor(np.full(3, i, np.float32)).realize()
            out, same = jit(x, written)
            np.testing.assert_array_equal(out.numpy(), np.full(3, start + sum(range(i + 1))))
            np.testing.assert_array_equal(same.numpy(), np.full(3, i))
            np.testing.assert_array_equal(written.numpy(), np.full(3, 2**i))
        np.testing.assert_array_equal(before.numpy(), np.full(3, 10 * start))
        assert len(calls) == again
        jit.reset()
    with pytest.raises(ValueError, match="warmup is 1 or 0"):
        TinyJit(step, warmup=2)


@pytest.mark.parametrize("devices", [None, ("CPU:0", "CPU:1")])
def test_a_first_call_that_makes_state_is_a_warm_up_after_all(devices: tuple[str, str] | None) -> None:
    """Else each replay would begin with moments of zero."""

    def train(warmup: int | None) -> tuple[list[float], np.ndarray, int]:
        w = Tensor(np.arange(6, dtype=np.float32).reshape(2, 3))
        w = (w if devices is None else w.shard(devices)).realize()
        w.requires_grad = True
        moment: list[Tensor] = []
        calls = []

        def step(x: Tensor) -> tuple[Tensor, Tensor]:
            calls.append(1)
            if not moment:
                moment.append(w.zeros_like())
            (g,) = ((w * x).square().sum()).gradient(w)
            moment[0].assign(moment[0] * 0.9 + g)
            w.assign(w - moment[0] * 0.01)
            return w.sum(), x

        jit = step if warmup is None else TinyJit(step, warmup=warmup)
        losses = []
        for i in range(5):
            x = Tensor(np.full((2, 3), 1 + i, np.float32))
            x = (x if devices is None else x.shard(devices)).realize()
            loss, same = jit(x)
            assert same.numpy()[0, 0] == 1 + i
            losses.append(loss.item())
        return losses, w.numpy(), len(calls)

    plain, at_once, warm = train(None), train(0), train(1)
    for got in (at_once, warm):
        np.testing.assert_allclose(got[0], plain[0], rtol=1e-6)
        np.testing.assert_allclose(got[1], plain[1], rtol=1e-6)
        assert got[2] == 2


def test_a_first_capture_that_failed_can_be_tried_again() -> None:
    total = Tensor(np.zeros(2, np.float32)).realize()
    made: list[Tensor] = []
    fails = [True]

    def step(x: Tensor) -> Tensor:
        if fails:
            fails.pop()
            raise OSError("no data")
        if not made:
            made.append(x.zeros_like())
        made[0].assign(made[0] + x)
        total.assign(total + made[0])
        return total * 1

    jit = TinyJit(step, warmup=0)
    x = Tensor(np.ones(2, np.float32)).realize()
    with pytest.raises(OSError, match="no data"):
        jit(x)
    for want in (1.0, 3.0, 6.0, 10.0, 15.0):
        np.testing.assert_array_equal(jit(x).numpy(), [want, want])
