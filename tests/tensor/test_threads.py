"""Threads side by side: modes are a thread's own, a Dataset may compute, a capture holds one thread's calls.
(More: tests/fuzz/threads.py.)"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator

import numpy as np
import pytest

from manygrad import Context, Tensor, TinyJit, function, is_grad_enabled, nn, no_grad
from manygrad.nn.data import DataLoader
from manygrad.nn.optim import SGD
from manygrad.tensor.environment import DEVICE, FOLLOW


def in_thread(f: Callable[[], object]) -> None:
    """Runs `f` in another thread to its end; its error is raised here."""
    errors: list[BaseException] = []

    def work() -> None:
        try:
            f()
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join(60)
    assert not thread.is_alive()
    if errors:
        raise errors[0]


def test_modes_are_a_threads_own() -> None:
    def other() -> None:
        assert is_grad_enabled() and Tensor.training is None and DEVICE.value == common
        w = Tensor([1.0, 2.0], requires_grad=True)
        (w * w).sum().backward()
        assert w.grad is not None and w.grad.tolist() == [2.0, 4.0]

    common = DEVICE.value
    with no_grad(), Tensor.train(), Context(DEVICE="NULL"):
        in_thread(other)
        assert not is_grad_enabled() and Tensor.training is True and DEVICE.value == "NULL"


def test_a_decorated_function_in_two_threads() -> None:
    inside = threading.Barrier(2)

    @no_grad()
    @Context(DEVICE="PYTHON")
    def f() -> None:
        inside.wait(10)
        assert not is_grad_enabled() and DEVICE.value == "PYTHON"
        inside.wait(10)

    first = threading.Thread(target=f)
    first.start()
    f()
    first.join()
    assert is_grad_enabled()


def test_no_grad_of_a_generator() -> None:
    @no_grad()
    def numbers() -> Iterator[bool]:
        for _ in range(2):
            yield is_grad_enabled()

    for enabled in numbers():
        assert not enabled and is_grad_enabled()


class Noisy:
    """A dataset that computes with Tensors."""

    def __len__(self) -> int:
        return 48

    def __getitem__(self, i: int) -> tuple[Tensor, int]:
        x = Tensor(np.full(8, float(i), np.float32))
        return (x * 2 + 1).tanh() + 0 * Tensor.rand(8), i % 2


def test_a_dataset_that_returns_tensors_while_the_loop_trains() -> None:
    model = nn.Linear(8, 1)
    optimizer = SGD(list(model.parameters()), lr=0.01)
    seen = []
    for x, y in DataLoader(Noisy(), batch_size=4, num_workers=2):
        optimizer.zero_grad()
        loss = ((model(x).reshape(-1) - y.float()) ** 2).mean()
        loss.backward()
        optimizer.step()
        seen += x.numpy()[:, 0].tolist()
        assert np.isfinite(loss.item())
    np.testing.assert_allclose(seen, np.tanh(2 * np.arange(48) + 1), rtol=1e-5)


def test_a_capture_holds_one_threads_calls() -> None:
    stop, ran = threading.Event(), []

    def busy() -> None:
        x = Tensor(np.ones(4)).realize()
        while not stop.is_set():
            x.assign(x + 1)
            x.realize()
            ran.append(1)

    other = threading.Thread(target=busy)
    other.start()
    try:
        for _ in range(5):
            step = TinyJit(lambda t: (t * 2).contiguous() + 1)
            for i in range(4):
                assert step(Tensor([float(i)]).realize()).item() == 2 * i + 1
            assert sum(len(getattr(i, "items", [i])) for i in step.captured.items) == 2
    finally:
        stop.set()
        other.join()
    # its kernels take a microsecond: were Python's lock free so long only, we would wait for it for seconds
    assert 0 < len(ran) < 10_000


@pytest.mark.skipif(not FOLLOW, reason="FOLLOW=0: no call is put off")
@pytest.mark.parametrize("call", [0, 1, 2], ids=["first", "captured", "followed"])
def test_a_capture_does_not_make_what_another_thread_has_put_off(call: int) -> None:
    """An assignment of a loop that is replayed, put off while a step is recorded, or followed without being run."""
    ready, go, put_off, end = (threading.Event() for _ in range(4))
    values: list[object] = []
    calls: list[int] = []

    def busy() -> None:
        x = Tensor(np.ones(4)).realize()
        for i in range(8):
            if i == 7:
                ready.set()
                values.append(go.wait(20))
            x.assign(x + 1)
            if i == 7:
                put_off.set()
                end.wait(20)
            x.realize()
        values.append(x.tolist())

    def step(t: Tensor) -> Tensor:
        if len(calls) == call:
            go.set()
            assert put_off.wait(20)
        calls.append(1)
        return (t * 2).contiguous() + 1

    other = threading.Thread(target=busy)
    other.start()
    try:
        assert ready.wait(20)
        captured = TinyJit(step)
        for i in range(5):
            assert captured(Tensor([float(i)]).realize()).item() == 2 * i + 1
        assert sum(len(getattr(i, "items", [i])) for i in captured.captured.items) == 2
    finally:
        end.set()
        other.join()
    assert values == [True, [9.0] * 4]


def test_an_argument_of_a_trace_is_what_it_was_to_other_threads() -> None:
    x = Tensor([1.0, 2.0]).realize()
    read = []

    def look() -> None:
        read.append((x * 10).uop)

    @function
    def f(t: Tensor) -> Tensor:
        in_thread(look)
        return t * 3

    assert f(x).tolist() == [3.0, 6.0]
    assert Tensor(read[0]).tolist() == [10.0, 20.0] and type(x) is Tensor


def test_random_numbers_of_threads_differ() -> None:
    drawn = [Tensor.rand(4).tolist()]
    for _ in range(3):
        in_thread(lambda: drawn.append(Tensor.rand(4).tolist()))
    assert len({tuple(d) for d in drawn}) == 4
    Tensor.manual_seed(0)
    again = [Tensor.rand(4).tolist()]
    for _ in range(3):
        in_thread(lambda: again.append(Tensor.rand(4).tolist()))
    assert drawn == again
