"""A TinyJit that is called with arguments of several shapes: a capture for each, as many as are kept."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from manygrad import Context, Tensor, TinyJit, nn
from manygrad.errors import JitError
from manygrad.nn import functional as F
from manygrad.runtime.jit import tiny_jit
from manygrad.runtime.jit.captured import Captured

LENGTHS = (5, 3, 5, 4, 3, 4, 5, 5, 3, 4, 5, 3, 3, 4)


@pytest.fixture
def replays(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    found: list[int] = []
    replay, again = Captured.replay, Captured.replay_in_place

    def counted(self: Captured[Any], *args: Any) -> Any:
        found.append(1)
        return replay(self, *args)

    def counted_in_place(self: Captured[Any]) -> Any:
        found.append(1)
        return again(self)

    monkeypatch.setattr(Captured, "replay", counted)
    monkeypatch.setattr(Captured, "replay_in_place", counted_in_place)
    return found


def array(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def trained(wrap: Callable[[Any], Any], warmup: int = 1) -> list[np.ndarray]:
    """Losses, parameters and the optimiser's state of a model of text of changing lengths."""
    Tensor.manual_seed(0)
    lstm, out = nn.LSTM(3, 4), nn.Sequential(nn.Dropout(0.3), nn.Linear(4, 2))
    optimizer = nn.optim.Adam([*lstm.parameters(), *out.parameters()], lr=0.05)

    def step(x: Tensor, y: Tensor) -> Tensor:
        optimizer.zero_grad()
        loss = F.cross_entropy(out(lstm(x)[0][-1]), y)
        loss.backward()
        optimizer.step()
        return loss

    step = wrap(step)
    y = Tensor([0, 1])
    losses = [step(Tensor(array(n, 2, 3, seed=i)), y) for i, n in enumerate(LENGTHS)]
    return [*(x.numpy() for x in losses), *(p.numpy() for p in lstm.parameters())]


@pytest.mark.parametrize("warmup", [0, 1])
def test_a_step_of_changing_lengths_gives_the_same_bits(warmup: int, replays: list[int]) -> None:
    with Context(FOLLOW=0):
        want = trained(lambda f: f)
    for a, b in zip(trained(lambda f: TinyJit(f, warmup=warmup)), want, strict=True):
        np.testing.assert_array_equal(a, b)
    assert (
        len(replays) >= len(LENGTHS) - 3 * 2
    )  # (of each of three shapes a call that is made, and one that is captured)


def test_each_shape_is_captured_once(replays: list[int]) -> None:
    calls = 0

    @TinyJit
    def f(x: Tensor) -> Tensor:
        nonlocal calls
        calls += 1
        return (x * 2).sum(0)

    for i in range(40):
        x = array(2 + i % 4, 3, seed=i)
        np.testing.assert_allclose(f(Tensor(x)).numpy(), (x * 2).sum(0), rtol=1e-5)
    made = calls
    assert len(f.captures) == 4 and len(replays) == 40 - 2 * 4
    with Context(JIT_CHECK=0):
        for i in range(8):
            f(Tensor(array(2 + i % 4, 3)))
    assert calls == made


def test_results_of_one_shape_are_kept_while_others_are_made() -> None:
    f = TinyJit(lambda x: x * 2)
    kept = [(f(Tensor(array(2 + i % 3, seed=i))), array(2 + i % 3, seed=i) * 2) for i in range(15)]
    for t, want in kept:
        np.testing.assert_array_equal(t.numpy(), want)


def test_state_is_one_for_all_shapes() -> None:
    total = Tensor(np.zeros(3, np.float32)).realize()

    @TinyJit
    def add(x: Tensor) -> Tensor:
        total.assign(total + x.sum(0)).realize()
        return total * 1

    want = np.zeros(3)
    for i in range(20):
        x = np.full((1 + i % 3, 3), i, np.float32)
        want = want + x.sum(0)
        np.testing.assert_array_equal(add(Tensor(x)).numpy(), want)
        if i == 10:
            total.assign(total * 0).realize()
            want = want * 0


def test_modes_and_shapes_together() -> None:
    """What a function reads besides its arguments is looked at for each shape."""
    drop = nn.Dropout(0.5)
    f = TinyJit(lambda x: drop(x * 3))
    for i in range(36):
        drop.train(i % 4 < 2)
        x = np.ones((40 + i % 3, 8), np.float32)
        found = f(Tensor(x)).numpy()
        assert found.shape == x.shape
        assert ((found == 0).any() and (found == 6).any()) if i % 4 < 2 else (found == 3).all()


def test_many_shapes_are_bounded_and_told_of(monkeypatch: pytest.MonkeyPatch) -> None:
    f = TinyJit(lambda x: (x + 1).sum())
    sizes = [1 + i % (tiny_jit.MOST_CAPTURES + 4) for i in range(4 * tiny_jit.MOST_CAPTURES)]
    with pytest.warns(
        UserWarning, match=r"called with more shapes than the 16 that are kept.* was \(\d+,\), now it is"
    ):
        for n in sizes:
            assert f(Tensor(np.ones(n, np.float32))).item() == 2 * n
    assert len(f.captures) == tiny_jit.MOST_CAPTURES
    monkeypatch.setattr(tiny_jit, "MOST_SHAPES", 10)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for n in range(100, 200):
            assert f(Tensor(np.ones(n, np.float32))).item() == 2 * n
    assert len(f.warm_shapes) == 10


def test_memory_of_captures_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    f = TinyJit(lambda x: ((x + 1).contiguous() * 2).sum(0))
    for n in (100, 100, 200, 200, 300, 300):
        f(Tensor(np.ones((n, 50), np.float32)))
    assert len(f.captures) == 3 and f.captures[-1].nbytes >= 300 * 50 * 4
    monkeypatch.setattr(tiny_jit, "MOST_BYTES", 400 * 50 * 4)
    for n in (400, 400):
        f(Tensor(np.ones((n, 50), np.float32)))
    assert len(f.captures) == 1


def test_an_exception_in_a_new_shape_leaves_the_others() -> None:
    @TinyJit
    def f(x: Tensor) -> Tensor:
        return x.reshape(2, -1) * 2

    for _ in range(3):
        assert f(Tensor(array(4))).shape == (2, 2)
    for _ in range(2):
        with pytest.raises(ValueError):
            f(Tensor(array(5)))
        np.testing.assert_array_equal(f(Tensor(array(4))).numpy(), array(4).reshape(2, 2) * 2)


def test_what_no_capture_is_made_for() -> None:
    """Another type, another device, other arguments: these are likely a mistake."""
    f = TinyJit(lambda x, *_: x + 1)
    for n in (2, 2, 3, 3):
        f(Tensor(array(n)))
    with pytest.raises(JitError, match=r"captured as shape \(3,\) float32.*now it is \(2,\) float64"):
        f(Tensor(array(2).astype(np.float64)))
    with pytest.raises(JitError, match="captured with 1 input tensors, called with 2"):
        f(Tensor(array(2)), Tensor(array(2)))
    np.testing.assert_array_equal(f(Tensor(array(2))).numpy(), array(2) + 1)


EMPTY = {
    "new": lambda: Tensor(np.zeros((0, 3), np.float32)),
    "computed": lambda: (Tensor.zeros(0, 3) + 1).realize(),
    "stored": lambda: Tensor.ones(2, 3).contiguous().realize()[:0].contiguous().realize(),
    "cut": lambda: Tensor(np.zeros((0, 3), np.float32)).shard(("CPU:0", "CPU:1"), 0),
}


@pytest.mark.parametrize("empty", EMPTY.values(), ids=EMPTY.keys())
def test_arguments_without_elements(empty: Callable[[], Tensor]) -> None:
    """As an argument among others, as one that is sometimes empty, and alone."""
    beside = TinyJit(lambda x, y: (x * 2, y + 1, Tensor.cat([x, y]).sum() + y.mean(1).sum()))
    alone = TinyJit(lambda x: x * 2)
    for i in range(6):
        y = empty()
        x = Tensor(np.full((2, 3), i, np.float32)).to(y.device)
        doubled, same, total = beside(x, y)
        assert (doubled == 2 * i).all().item() and same.shape == (0, 3) and total.item() == 6 * i
        assert (x if i % 2 else y).shape == alone(x if i % 2 else y).shape
        assert alone(x).tolist() == doubled.tolist() and alone(y).numpy().size == 0
