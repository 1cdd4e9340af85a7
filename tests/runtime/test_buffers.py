"""Buffers: lifetime, views, copies; counters; the devices behind a tensor."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from manygrad import Context, GlobalCounters, Tensor, TinyJit
from manygrad.runtime.buffer import Buffer, copy_buffer
from manygrad.runtime.devices import get_device
from manygrad.tensor.dtype import dtypes


def test_memory_is_freed_with_its_last_user(no_collection: None) -> None:
    before, held = get_device("CPU").allocated, GlobalCounters.mem_used
    a = Tensor(np.ones(1 << 20, np.float32)).realize()
    b = (a * 2).realize()
    assert get_device("CPU").allocated - before >= 2 << 22
    assert GlobalCounters.mem_used - held == 2 << 22
    view = b[:10]
    del a, b
    assert GlobalCounters.mem_used - held == 1 << 22, "a view keeps its buffer"
    np.testing.assert_array_equal(view.numpy(), np.full(10, 2, np.float32))
    del view
    assert GlobalCounters.mem_used == held
    assert get_device("CPU").allocated == before


def test_nothing_is_allocated_before_it_is_needed(no_collection: None) -> None:
    held = GlobalCounters.mem_used
    t = Tensor.ones(1 << 24) + 1
    assert GlobalCounters.mem_used == held
    assert not t.is_realized


def test_views_share_memory_and_stay_inside() -> None:
    base = Buffer("CPU", 16, dtypes.float32).copyin(np.arange(16, dtype=np.float32))
    view = base.view(4, dtypes.float32, 16)
    np.testing.assert_array_equal(view.copyout(), [4, 5, 6, 7])
    view.copyin(np.full(4, -1, np.float32))
    np.testing.assert_array_equal(base.copyout()[4:8], [-1] * 4)
    np.testing.assert_array_equal(view.view(2, dtypes.float32, 4).copyout(), [-1, -1])
    with pytest.raises(ValueError, match="does not lie in"):
        base.view(10, dtypes.float32, 40)
    with pytest.raises(ValueError, match="copyin of 8 bytes"):
        base.copyin(np.zeros(2, np.float32))


def test_copies_between_devices() -> None:
    data = np.arange(8, dtype=np.int32)
    src = Buffer("PYTHON", 8, dtypes.int32).copyin(data)
    dst = Buffer("CPU:1", 8, dtypes.int32)
    copy_buffer(dst, src)
    np.testing.assert_array_equal(dst.copyout(), data)
    with pytest.raises(ValueError, match="copy of 32 bytes into 16"):
        copy_buffer(Buffer("CPU", 4, dtypes.int32), src)


@pytest.mark.parametrize("device", ["CPU", "CPU:3", "PYTHON"])
def test_a_program_runs_on_every_computing_device(device: str) -> None:
    x = np.random.RandomState(0).randn(5, 7).astype(np.float32)
    t = Tensor(x, device=device)
    np.testing.assert_allclose((t @ t.T).softmax(1).numpy().sum(1), np.ones(5), rtol=1e-5)
    assert (t + 1).to("CPU").device == "CPU:0"


def test_null_computes_nothing_but_runs() -> None:
    t = Tensor(np.ones((4, 4), np.float32), device="NULL")
    assert (t @ t).numpy().shape == (4, 4)


def test_files_are_tensors(tmp_path: Any) -> None:
    path = tmp_path / "data.bin"
    np.arange(10, dtype=np.int32).tofile(path)
    t = Tensor.from_file(str(path), (5, 2), "int32")
    assert str(t.device).startswith("DISK:")
    np.testing.assert_array_equal(t.numpy(), np.arange(10).reshape(5, 2))
    assert (t.to("CPU") * 2).sum().item() == 90
    with pytest.raises(NotImplementedError, match="copy the tensor to a computing device"):
        (t * 2).realize()
    with pytest.raises(ValueError, match="ends at byte 44"):
        Tensor.from_file(str(path), (11,), "int32")


def test_counters_add_up_flops_and_bytes() -> None:
    a = Tensor(np.ones((64, 64), np.float32)).realize()
    GlobalCounters.reset()
    (a @ a).realize()
    assert GlobalCounters.kernel_count == 1
    assert GlobalCounters.global_ops == pytest.approx(2 * 64**3, rel=0.2)
    assert GlobalCounters.global_mem >= 2 * 64 * 64 * 4, "the operand is one buffer"


def test_debug_2_prints_a_line_a_kernel(capsys: pytest.CaptureFixture[str]) -> None:
    a = Tensor(np.ones((64, 64), np.float32)).realize()
    with Context(DEBUG=2):
        (a @ a).realize()
    lines = [x for x in capsys.readouterr().out.splitlines() if x.startswith("***")]
    assert len(lines) == 1
    assert "GFLOPS" in lines[0] and "GB/s" in lines[0] and "test_buffers.py:" in lines[0]


def test_validation_finds_a_wrong_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    device = get_device("CPU")
    true_compile = device.compile

    class Wrong:
        def __init__(self, kernel: Any):
            self.kernel = kernel

        def __getattr__(self, name: str) -> Any:
            return getattr(self.kernel, name)

        def __call__(self, handles: Sequence[Any], vars: tuple[int, ...] = (), wait: bool = False) -> float | None:
            seconds = self.kernel(handles, vars, wait)
            device.as_numpy(handles[0], 4).view(np.float32)[0] += 1  # type: ignore[union-attr]
            return seconds  # type: ignore[no-any-return]

    # setattr would leave the method it found on this one device, where a patched class does not reach it
    monkeypatch.setitem(vars(device), "compile", lambda ast: Wrong(true_compile(ast)))
    with (
        Context(VALIDATE_WITH_CPU=1),
        pytest.raises(ValueError, match="differs from the PYTHON device in argument 0: element 0"),
    ):
        (Tensor(np.ones(5, np.float32)) * 3).realize()


def test_equal_graphs_have_storage_of_their_own() -> None:
    a, b = Tensor.zeros(3).contiguous(), Tensor.zeros(3).contiguous()
    a.realize(b)
    a.assign(a + 1).realize()
    assert b.tolist() == [0, 0, 0] and a.tolist() == [1, 1, 1]


def test_a_lazy_reader_keeps_the_value_from_before_an_assignment() -> None:
    a = Tensor([1.0, 2.0])
    before = a * 10
    a.assign(a + 1).realize()
    assert before.tolist() == [10, 20] and a.tolist() == [2, 3]


def anonymous_mb() -> float:
    with open("/proc/self/status") as f:
        return next(int(line.split()[1]) / 1024 for line in f if line.startswith("RssAnon"))


@Context(VALIDATE_WITH_CPU=0)
def test_zeros_take_memory_where_they_are_written() -> None:
    rooms = [Tensor.zeros(4, 8 << 20).contiguous() for _ in range(2)]  # (two, which are one value)
    before = anonymous_mb()
    Tensor.realize(*rooms)
    assert anonymous_mb() - before < 16
    rooms[0][1, :4096] = 3.0
    rooms[0].realize()
    assert anonymous_mb() - before < 32
    assert rooms[0].sum().item() == 3.0 * 4096 and rooms[1].sum().item() == 0
    assert GlobalCounters.mem_used >= 2 * 4 * 4 * (8 << 20)


def test_zeros_in_freed_memory_are_zeros() -> None:
    for _ in range(3):
        a = Tensor.ones(1 << 18).contiguous().realize()
        del a
        assert (Tensor.zeros(1 << 18).contiguous().realize().numpy() == 0).all()
    x = Tensor(np.ones(1 << 18, np.float32)).realize()
    x.assign(Tensor.zeros(1 << 18)).realize()
    assert (x.numpy() == 0).all()
    assert np.signbit(Tensor.full((1 << 18,), -0.0).contiguous().numpy()).all()


def test_a_capture_writes_its_zeros_in_each_replay() -> None:
    @TinyJit
    def step(x: Tensor) -> tuple[Tensor, Tensor]:
        zeros = Tensor.zeros(1 << 16).contiguous()
        return zeros, x + 1

    for i in range(4):
        zeros, y = step(Tensor(np.full(4, i, np.float32)))
        assert (zeros.numpy() == 0).all() and y.tolist() == [i + 1.0] * 4
        zeros.assign(Tensor.ones(1 << 16)).realize()
