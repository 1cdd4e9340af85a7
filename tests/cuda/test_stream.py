"""Copies by way of pinned memory, and waits for a GPU: in order, without the host, and never for ever."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

from manygrad import Tensor
from manygrad.errors import CUDAError
from manygrad.runtime.devices import get_device
from manygrad.runtime.devices.cuda.staging import PIECE_BYTES, PIECES, SMALL_BYTES
from manygrad.runtime.devices.cuda.stream import MARK_EVERY, CUDAStream
from manygrad.tensor.environment import Context
from tests.cuda.driver import CUresult
from tests.cuda.install import emulated, emulator

RNG = np.random.default_rng(0)
SIZES = [1, 5, SMALL_BYTES, SMALL_BYTES + 1, PIECE_BYTES, PIECE_BYTES + 3, (PIECES + 1) * PIECE_BYTES + 7]


@pytest.fixture
def stream() -> Iterator[CUDAStream]:
    get_device("CUDA:1")
    found = get_device("CUDA:1").alloc(4).stream
    yield found
    found.handle.hangs, found.stuck = False, ""
    found.finish()


@emulated
def test_what_is_copied_to_a_gpu_may_change_at_once() -> None:
    """More copies than there are pieces are under way, behind kernels, and none waits for the host."""
    held, tensors = [], []
    for i in range(3 * len(SIZES)):
        numbers = RNG.integers(0, 255, SIZES[i % len(SIZES)], np.uint8)
        held.append(numbers.copy())
        tensors.append(Tensor(numbers).to("CUDA:1").realize())
        numbers[:] = 0
    for t, want in zip(tensors, held):
        np.testing.assert_array_equal(t.numpy(), want)


@emulated
def test_a_copy_to_a_gpu_does_not_wait_for_what_runs_there(stream: CUDAStream) -> None:
    busy = Tensor(np.ones(9, np.float32)).to("CUDA:1").realize()
    stream.handle.hangs = True
    more = [Tensor(np.full(9, i, np.float32)).to("CUDA:1").realize() for i in range(PIECES - 1)]
    stream.handle.hangs = False
    assert busy.tolist() == [1.0] * 9 and [t.tolist()[0] for t in more] == [*range(PIECES - 1)]


@emulated
def test_a_kernel_that_does_not_end_is_an_error(stream: CUDAStream) -> None:
    x = Tensor(np.ones(9, np.float32)).to("CUDA:1").realize()
    (x + 1).realize()
    stream.handle.hangs = True
    with Context(KERNEL_TIMEOUT_S=0.2):
        y, began = (x * 3).realize(), time.monotonic()
        with pytest.raises(CUDAError, match=r"CUDA:1: the GPU has not got on for 0.2 s .*last .* is e_9"):
            y.numpy()
        assert time.monotonic() - began < 30
        with pytest.raises(CUDAError, match="has not got on"):  # and at once: what comes after is behind it
            y.numpy()


@emulated
def test_a_gpu_that_gets_on_may_take_long(stream: CUDAStream, monkeypatch: pytest.MonkeyPatch) -> None:
    """The deadline counts from the last mark that was passed, not from the beginning."""
    own, last = emulator(), [time.monotonic()]

    def slowly(of: Any, is_ready: Callable[[], bool]) -> tuple[Any, ...]:
        with own.lock:
            if of is not None and time.monotonic() - last[0] > 0.3:
                last[0] = time.monotonic()
                for _ in range(min(MARK_EVERY, len(of.waiting))):
                    of.waiting.pop(0)()
            return (CUresult.CUDA_SUCCESS if is_ready() else CUresult.CUDA_ERROR_NOT_READY,)

    monkeypatch.setattr(own, "get_on", slowly)
    began, x = time.monotonic(), Tensor(np.zeros(9, np.float32)).to("CUDA:1").realize()
    with Context(KERNEL_TIMEOUT_S=1.0):
        for _ in range(10 * MARK_EVERY):
            x = (x + 1).realize()
        assert x.tolist() == [10.0 * MARK_EVERY] * 9
    assert time.monotonic() - began > 1.2
