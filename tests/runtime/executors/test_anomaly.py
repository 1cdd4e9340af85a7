"""detect_anomaly: the first kernel that makes NaN or infinity, its op and the user's line; and what is none."""

from __future__ import annotations

import inspect
from collections.abc import Callable

import numpy as np
import pytest

from manygrad import Context, Tensor, TinyJit, autograd, detect_anomaly, nn
from manygrad.errors import AnomalyError
from manygrad.runtime.devices import python
from manygrad.tensor.environment import JIT
from manygrad.tensor.uop import Ops
from tests.opencl import needs_opencl
from tests.schedule.programs import linear_of, stored

INF = float("inf")


def floats(*values: float, dtype: str = "float32") -> Tensor:
    return Tensor(np.array(values, np.float32)).cast(dtype).realize()


def line() -> str:
    """Of the caller, as errors have it."""
    frame = inspect.currentframe()
    assert frame is not None and frame.f_back is not None
    return f"test_anomaly.py:{frame.f_back.f_lineno}"


MADE: list[tuple[Callable[[], Tensor], str]] = [
    (lambda: (floats(1, -3).log() * 2).exp().sum(), "NaN was made by LOG of -3.0 at"),
    (lambda: floats(1, 100).exp(), "infinity was made by EXP of 100.0 at"),
    (lambda: (floats(1, -2) / 0).sum(), "NaN came of infinity, which was made by FDIV of -?[12].0, 0.0 at"),
    (lambda: (floats(2, 0) > 1).where(floats(-1, 1).log(), 0.0), "NaN was made by LOG of -1.0 at"),
    (lambda: floats(-1, 1, dtype="bfloat16").sqrt().float(), "NaN was made by SQRT of -1"),
    (lambda: floats(1, 60000, dtype="float16") * 2, "infinity was made by MUL of .*60000"),
    (lambda: (Tensor.ones(1 << 10).contiguous() * 1e36).sum(), "infinity was made by REDUCE of "),
    (lambda: floats(0, 1).log(), "infinity was made by LOG of 0.0 at"),
    (lambda: (lambda t: t - t)(floats(INF, 1)), "NaN was made by SUB of inf, inf at"),
    (lambda: floats(float("nan"), 1) + 1, "NaN was read at"),
]


@pytest.mark.parametrize("program, expected", MADE, ids=[e for _, e in MADE])
@pytest.mark.parametrize("device", ["CPU", "PYTHON"])
def test_the_op_that_makes_it_is_named(program: Callable[[], Tensor], expected: str, device: str) -> None:
    with Context(DEVICE=device):
        with detect_anomaly(), pytest.raises(AnomalyError, match=expected) as told:
            program().numpy()
        assert f"on {device}" in str(told.value) and "test_anomaly.py:" in str(told.value)


@pytest.mark.parametrize("device", ["CPU", "PYTHON"])
def test_the_line_is_that_of_the_program_and_not_of_an_equal_one(device: str) -> None:
    """Equal computations have one kernel and one schedule, in memory and on disk, and stay apart by their lines."""

    def here(x: Tensor) -> None:
        (x.log() * 3).numpy()

    def there(x: Tensor) -> None:
        (x.log() * 3).numpy()

    for scache in (1, 0, 1):
        for _ in range(3):
            for program in (here, there):
                with Context(DEVICE=device, SCACHE=scache):
                    program(floats(1, 2))  # (what is not looked at has a schedule as well)
                    with detect_anomaly(), pytest.raises(AnomalyError) as told:
                        program(floats(1, -3))
                    assert f"test_anomaly.py:{program.__code__.co_firstlineno + 1} " in str(told.value)


FINE: list[Callable[[], Tensor]] = [
    lambda: Tensor.rand(2, 8, 8).masked_fill(Tensor.ones(8, 8).tril() == 0, -INF).softmax(-1),
    lambda: (Tensor([0.0, 4.0]).contiguous() > 1).where(Tensor([0.0, 4.0]).contiguous().log(), 0.0),
    lambda: Tensor.cat(Tensor.full((2,), -INF), Tensor.ones(2)),
    lambda: floats(INF, 1) + 1,
    lambda: floats(float("nan"), 1).isnan(),
    lambda: Tensor.rand(1, 2, 5, 5).max_pool2d(3, padding=1),
]


@pytest.mark.parametrize("number", range(len(FINE)))
def test_what_is_masked_and_what_is_meant_is_none(number: int) -> None:
    with detect_anomaly():
        inside = FINE[number]().numpy()
    assert inside.size


def test_infinity_may_be_left_out_and_everything() -> None:
    with detect_anomaly(check_infinity=False):
        assert floats(100).exp().item() == INF
        with pytest.raises(AnomalyError, match="NaN"):
            floats(-1).log().item()
    with detect_anomaly(check_nan=False):
        assert np.isnan(floats(-1).log().item())
    assert np.isnan(floats(-1).log().item())


def is_seen() -> bool:
    try:
        floats(-1).log().item()
    except AnomalyError:
        return True
    return False


def test_it_is_set_from_here_on_and_back() -> None:
    with Context(JIT=2):
        autograd.set_detect_anomaly(True)
        assert is_seen() and JIT.value == 0
        with autograd.set_detect_anomaly(False):
            assert not is_seen() and JIT.value == 2
        assert is_seen()
        with autograd.set_detect_anomaly(True, check_nan=False):
            assert not is_seen()
        autograd.set_detect_anomaly(True)
        autograd.set_detect_anomaly(False)
        assert not is_seen() and JIT.value == 2
        autograd.set_detect_anomaly(False)
        assert not is_seen() and JIT.value == 2
    assert not is_seen() and JIT.value != 2


def test_the_backward_pass_and_the_line_of_a_function() -> None:
    x = floats(0, 4).requires_grad_()

    @autograd.detect_anomaly()
    def step() -> str:
        loss, written = x.sqrt().sum(), line()
        loss.backward()
        with pytest.raises(AnomalyError, match="FDIV of 1.0, 0.0|RECIP of 0.0") as told:
            assert x.grad is not None
            x.grad.numpy()
        assert f"{written}, in the gradient, (kernel" in str(told.value)
        return "seen"

    assert step() == "seen"


@pytest.mark.parametrize("follow", [0, 1])
def test_what_was_captured_before_is_looked_at_too(follow: int) -> None:
    """A TinyJit's replay, and a loop that is put off, make no calls that can be looked at."""
    model = nn.Linear(2, 1)
    optimizer = nn.optim.SGD(model.parameters(), lr=0.1)
    model.weight.assign(Tensor([[1.0, 1.0]]))

    def run(x: Tensor) -> Tensor:
        optimizer.zero_grad()
        loss = (model.weight * x).log().sum()
        loss.backward()
        return loss

    step = run if follow else TinyJit(run)
    for _ in range(5):
        assert np.isfinite(step(floats(1, 2)).item())
    with detect_anomaly(), pytest.raises(AnomalyError, match="LOG of -2"):
        step(floats(1, -2)).item()
    assert np.isfinite(step(floats(1, 2)).item())


def test_training_goes_on_with_the_same_bits_inside() -> None:
    def train(inside: bool) -> list[float]:
        Tensor.manual_seed(3)
        model = nn.Sequential(nn.Linear(4, 8), nn.LayerNorm(8), nn.Dropout(0.3), nn.Linear(8, 2))
        optimizer = nn.optim.AdamW(model.parameters(), lr=0.1)
        out = []
        for i in range(4):
            x = Tensor(np.random.default_rng(i).standard_normal((6, 4)).astype(np.float32))
            with detect_anomaly(check_nan=inside):
                optimizer.zero_grad()
                loss = nn.functional.cross_entropy(model(x), Tensor(np.arange(6) % 2))
                loss.backward()
                optimizer.step()
                out.append(loss.item())
        return out

    assert train(True) == train(False)


@pytest.mark.parametrize("place", [3, 200])
def test_kernels_block_by_block(place: int) -> None:
    """A CHAIN, of which an inner kernel makes it in one of the blocks."""
    y, z, rows = stored(256, 8), stored(256, 8), np.ones((256, 8), np.float32)
    rows[place] = 5000
    program = (Tensor(rows).realize() @ y.T).exp() @ z
    with Context(SCACHE=0):
        assert [c.src[0].op for c in linear_of(program).src] == [Ops.CHAIN]
        with detect_anomaly(), pytest.raises(AnomalyError, match="infinity was made by EXP of") as told:
            program.numpy()
    assert "chain_" in str(told.value)


def test_the_interpreter_looks_block_by_block(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(python, "BLOCK_ELEMENTS", 64)
    x = np.ones((64, 16), np.float32)
    x[50, 3] = -1
    with detect_anomaly(), pytest.raises(AnomalyError, match="LOG of -1.0"):
        Tensor(x).log().sum(1).numpy()


def test_what_lies_in_memory_from_before_is_not_the_kernels() -> None:
    """A kernel that writes a part of a buffer, beside NaN of another one."""
    whole = Tensor(np.full(8, np.nan, np.float32))
    with detect_anomaly():
        whole[:4] = Tensor.arange(4).float() + 1
        assert whole.isnan().tolist() == [False] * 4 + [True] * 4
        whole[:4] = whole[:4] * 2
        assert whole.isnan().tolist() == [False] * 4 + [True] * 4
        with pytest.raises(AnomalyError):
            whole[:4] = (whole[:4] - 100).log()
            whole.numpy()


@needs_opencl
def test_on_a_device_whose_memory_the_host_does_not_see() -> None:
    with Context(DEVICE="OPENCL"), detect_anomaly(), pytest.raises(AnomalyError, match="LOG of -3.0"):
        Tensor(np.array([1, -3], np.float32)).log().numpy()
