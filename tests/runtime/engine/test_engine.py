"""The realize engine: what runs when, on which device, what it prints and counts, and what a failure leaves behind."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Callable

import numpy as np
import pytest

from manygrad import Context, GlobalCounters, Tensor, TinyJit, Variable, nn
from manygrad.nn.state import get_parameters
from manygrad.runtime.current import current
from manygrad.runtime.devices import get_device
from manygrad.runtime.engine.linear import run_linear
from manygrad.schedule.lower import PASSES
from manygrad.tensor.environment import REGISTRY
from manygrad.tensor.tensor import LIVE
from manygrad.tensor.uop.uop import live_nodes


def kernels(f: Callable[[], object]) -> int:
    before = GlobalCounters.kernel_count
    f()
    return GlobalCounters.kernel_count - before


def ones(*shape: int, device: str | None = None) -> Tensor:
    return Tensor(np.ones(shape, np.float32), device=device).realize()


# *** what runs ***


def test_a_value_is_computed_once() -> None:
    t = ones(4) * 2
    assert kernels(t.realize) == 1
    assert kernels(t.realize) == 0
    assert kernels(t.numpy) == 0
    assert kernels(lambda: (t + 1).numpy()) == 1


def test_reading_a_lazy_value_keeps_it() -> None:
    t = ones(4) * 3
    assert kernels(t.tolist) == 1 and t.is_realized
    assert kernels(t.tolist) == 0


def test_others_see_what_was_computed() -> None:
    h = (ones(8, 8) @ ones(8, 8)).exp()
    a, b = h.sum(), h * 2
    h.realize()
    assert kernels(lambda: a.realize(b)) == 2  # from h's memory: no product, no exp


def test_views_compute_nothing() -> None:
    t = ones(4, 6)
    for view in (t.T, t[1], t[::2, 1:4], t.reshape(24), t[::-1], t.expand(4, 6)):
        assert kernels(view.realize) == 0 and view.is_realized
    assert kernels(lambda: t.T.numpy()) == 1  # read in its own order


def test_empty_values_compute_nothing() -> None:
    assert kernels(lambda: (Tensor(np.zeros((0, 3), np.float32)) * 2).realize().numpy()) == 0


def test_many_tensors_in_one_realize() -> None:
    x = ones(5)
    ts = [x * float(i) for i in range(2, 12)]
    misses = current().schedules.misses
    assert kernels(lambda: ts[0].realize(*ts[1:])) == 2  # with 6 and 4 results
    assert current().schedules.misses == misses + 1
    assert [t.numpy()[0] for t in ts] == [float(i) for i in range(2, 12)]


def test_deep_graphs() -> None:
    t = ones(3)
    for _ in range(3000):
        t = (t + 1) * 1.0
    np.testing.assert_array_equal(t.numpy(), [3001] * 3)


def test_graphs_and_memory_die_with_their_tensors(no_collection: None) -> None:
    """By reference counts: memory does not wait for a garbage collection."""

    def use() -> None:
        w = ones(16, 16).requires_grad_()
        for _ in range(3):
            loss = ((ones(4, 16) @ w).relu() ** 2).mean()
            loss.backward()
            loss.item()
            assert w.grad is not None
            w.assign(w - w.grad * 0.1).realize()
            w.grad = None

    for _ in range(3):  # (a loop that is made again is captured, and its capture stays)
        use()
    nodes, live, held = live_nodes(), len(LIVE), GlobalCounters.mem_used
    for _ in range(3):
        use()
    assert len(LIVE) == live and GlobalCounters.mem_used == held
    assert live_nodes() <= nodes + 20  # (schedules are kept; these are the same ones)


# *** devices ***


class Net:
    def __init__(self) -> None:
        self.conv, self.norm, self.linear = nn.Conv2d(1, 2, 3), nn.BatchNorm(2), nn.Linear(18, 3)

    def __call__(self, x: Tensor) -> Tensor:
        return self.linear(self.norm(self.conv(x)).relu().max_pool2d(2).flatten(1))


def train(device: str) -> list[float]:
    rng = np.random.default_rng(0)
    with Context(DEVICE=device):
        Tensor.manual_seed(3)
        net = Net()
        params = [p for p in get_parameters(net) if p.requires_grad]
        optimiser, losses = nn.optim.AdamW(params, lr=0.01), []
        with Tensor.train():
            for _ in range(3):
                x, y = Tensor(rng.standard_normal((4, 1, 8, 8)).astype(np.float32)), Tensor(rng.integers(0, 3, 4))
                optimiser.zero_grad()
                loss = net(x).cross_entropy(y)
                loss.backward()
                optimiser.step()
                losses.append(loss.item())
    return losses


def test_training_on_the_interpreter_and_on_the_cpu_agrees() -> None:
    """Every kernel of a training step, written by two backends."""
    np.testing.assert_allclose(train("CPU"), train("PYTHON"), rtol=1e-4)
    assert len(train("NULL")) == 3


def test_noopt_gives_the_same() -> None:
    plain = train("CPU")
    with Context(NOOPT=1):
        np.testing.assert_allclose(train("CPU"), plain, rtol=1e-4)


def test_validation_passes_for_right_kernels_and_counts_nothing_else() -> None:
    with Context(VALIDATE_WITH_CPU=1):
        assert (ones(4, 4) @ ones(4, 4) + ones(4, 4).sum()).sum().item() == 16 * 20
        assert ones(4).to("CPU:1").sum().item() == 4.0
        t = ones(5)
        t.assign(t + t.sum())
        assert t.tolist() == [6.0] * 5


def test_moving_between_devices() -> None:
    a = np.arange(6, dtype=np.float32).reshape(2, 3)
    t = Tensor(a)
    for device in ("CPU:1", "PYTHON", "CPU:0"):
        t = t.to(device)
        assert t.device == (device if ":" in device else f"{device}:0")
        np.testing.assert_array_equal((t.T * 1).numpy(), a.T)
    u = (Tensor(a) + 1).to("PYTHON") * 2
    np.testing.assert_array_equal(u.numpy(), (a + 1) * 2)
    assert Tensor(a).to("CPU:0").device == "CPU:0" and Tensor(a).to(None).device == "CPU:0"
    assert (Tensor(2.0).to("CPU:1") + Tensor(a).to("CPU:1")).device == "CPU:1"


def test_a_gradient_goes_back_to_where_the_parameter_is() -> None:
    w = Tensor([1.0, 2.0], device="CPU:1", requires_grad=True)
    (w.to("CPU:0") * 3).sum().backward()
    assert w.grad is not None and w.grad.device == "CPU:1" and w.grad.tolist() == [3.0, 3.0]


@pytest.mark.parametrize("device", ["CPU:5", "PYTHON:5", "NULL:5"])
def test_memory_is_counted_where_it_is(device: str, no_collection: None) -> None:
    before = get_device(device).allocated, get_device("CPU").allocated
    t = ones(1 << 16, device=device)
    u = (t + 1).realize()
    assert u.numpy().shape == t.numpy().shape  # (what is read is not allocated once more)
    assert get_device(device).allocated - before[0] == 2 << 18 and get_device("CPU").allocated == before[1]
    del t, u
    assert get_device(device).allocated == before[0]


# *** what it tells ***

LINE = re.compile(
    r"^\*\*\* CPU:0 +\d+ \S+ +[\d.]+ us +[\d.]+ GFLOPS +[\d.]+ GB/s +[\d.]+% of limit  test_engine\.py:\d+$"
)


def test_debug_2_is_one_line_a_kernel_or_copy(capsys: pytest.CaptureFixture[str]) -> None:
    x = ones(61, 61)
    with Context(DEBUG=2):
        (x @ x).softmax().realize()
        x.to("CPU:1").realize()
    lines = [x for x in capsys.readouterr().out.splitlines() if not x.startswith("compiled ")]
    assert len(lines) >= 3 and all(LINE.match(line) for line in lines[:-1]), lines
    assert "copy 14884 CPU:0 -> CPU:1" in lines[-1] and "test_engine.py:" in lines[-1]


def test_debug_2_tells_the_work_of_this_call_where_variables_say_how_much_it_is(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    told: list[tuple[int, int]] = []
    monkeypatch.setattr("manygrad.runtime.executors.items.report", lambda *a: told.append((a[3], a[4])))
    x, v = ones(64, 64), Variable("rows", 1, 64)
    step = TinyJit(lambda n: (x[:n] * 2).contiguous())
    with Context(DEBUG=2):
        for rows in (3, 64, 10, 5):  # (as it is, recorded, replayed)
            told.clear()
            step(v.bind(rows))
            assert told == [(64 * rows, 2 * 256 * rows)]


def test_debug_4_shows_the_code_and_5_the_passes(capsys: pytest.CaptureFixture[str]) -> None:
    x = ones(4)
    with Context(DEBUG=4, SCACHE=0):
        (x * 3.3125).realize()
    text = capsys.readouterr().out
    assert "define" in text and "RANGE" in text  # LLVM IR; the kernel's graph
    with Context(DEBUG=5, SCACHE=0):
        (x * 3.3125).realize()
    passes = re.findall(r"^pass (\w+) +[\d.]+ ms +\d+ -> +\d+ (?:ops|calls)$", capsys.readouterr().out, re.MULTILINE)
    assert passes == [p.name for p in PASSES]
    with Context(DEBUG=6, SCACHE=0):
        (x * 3.3125).realize()
    whole, *changes = re.split(r"^pass .*$", capsys.readouterr().out, flags=re.MULTILINE)
    assert whole.startswith("schedule, before its passes:\n%0 = PARAM float32 (4)")
    by_pass = {p.name: text.strip().splitlines() for p, text in zip(PASSES[:-1], changes)}
    assert by_pass["clean"] == []  # it finds nothing to do
    assert any(re.match(r"\+%\d+ = RANGE", line) for line in by_pass["rangeify"])
    assert all(line[0] in "+-" for lines in by_pass.values() for line in lines)


def test_counters_reset_but_not_the_memory(no_collection: None) -> None:
    t = ones(256)
    (t * 2).realize()
    held = GlobalCounters.mem_used
    assert GlobalCounters.kernel_count > 0 and held >= 1024
    GlobalCounters.reset()
    assert (
        GlobalCounters.kernel_count,
        GlobalCounters.global_ops,
        GlobalCounters.global_mem,
        GlobalCounters.net_bytes,
    ) == (0, 0, 0, 0)
    assert GlobalCounters.mem_used == held
    (t + t).realize()
    assert GlobalCounters.global_ops == 256 and GlobalCounters.global_mem == 2 * 1024


def test_contexts_restore_and_refuse_unknown_names() -> None:
    before = REGISTRY["DEBUG"].value
    with pytest.raises(KeyError), Context(DEBUG=before + 1):
        assert REGISTRY["DEBUG"].value == before + 1
        raise KeyError
    assert REGISTRY["DEBUG"].value == before
    with pytest.raises(ValueError, match=r"unknown environment variables \['DEBAG'\]; known: "):
        Context(DEBAG=1)


def test_an_environment_variable_that_is_no_number_is_named() -> None:
    run = subprocess.run(
        [sys.executable, "-c", "import manygrad"], env={"DEBUG": "loud"}, capture_output=True, text=True
    )
    assert run.returncode != 0 and "DEBUG='loud' is not a valid int" in run.stderr


def test_a_program_that_keeps_tensors_to_the_end_exits_silently() -> None:
    code = (
        "from manygrad import Tensor\nt = Tensor([1.0]) + 1\n"
        "t.realize(); d = {'x': t * 2}; d['x'].numpy(); print('done')"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert (run.returncode, run.stdout, run.stderr) == (0, "done\n", "")


# *** failures ***


def test_a_kernel_that_fails_leaves_its_inputs_and_runs_again(monkeypatch: pytest.MonkeyPatch) -> None:
    x = ones(3)
    t = x * 7.25
    device = type(get_device("CPU"))

    def broken(self: object, ast: object) -> None:
        raise MemoryError("no room")

    with monkeypatch.context() as m:
        m.setattr(device, "compile", broken)
        with pytest.raises(MemoryError, match="no room"):
            t.realize()
    assert x.tolist() == [1.0] * 3 and not t.is_realized
    assert t.tolist() == [7.25] * 3


def test_an_assignment_that_could_not_be_compiled_is_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    x = ones(3)
    x.assign(x + 5.125)
    with monkeypatch.context() as m:
        m.setattr(type(get_device("CPU")), "compile", lambda self, ast: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            (x * 1.0).realize()
    assert x.tolist() == [1.0] * 3  # as it was
    x.assign(x + 5.125)
    assert x.tolist() == [6.125] * 3


def test_an_empty_linear_runs() -> None:
    run_linear([], {})
