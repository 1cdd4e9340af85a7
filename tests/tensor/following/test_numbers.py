"""What a key says, numbers that change and become inputs, and the line that tells of what cannot."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from manygrad import Tensor, autograd, dtypes, nn, no_grad
from manygrad.nn import functional as F
from manygrad.tensor.deferred import varying
from manygrad.tensor.deferred.tree import MOST_CHILDREN
from manygrad.tensor.environment import FOLLOW
from tests.tensor.following.loops import Counts, Training, array, same

pytestmark = pytest.mark.skipif(not FOLLOW, reason="FOLLOW=0: no call is put off")


def test_a_number_that_changes_and_sizes_that_change() -> None:
    def run() -> list[np.ndarray]:
        w, found = Tensor(array(4, 4)).realize(), []
        for i in range(3 * MOST_CHILDREN):
            found.append((w * (i * 0.5) + 1).relu().sum().numpy())
        loop = Training(nn.ReLU())
        found += [loop.step(i, rows=2 + i % 3).numpy() for i in range(20)]
        return [*found, *loop.state()]

    same(run)


def test_what_a_key_says_is_all_that_a_call_depends_on() -> None:
    """Zeros of both signs, numbers of other kinds, modes and orders of arguments are told apart."""

    def run() -> list[np.ndarray]:
        x, found = Tensor(np.array([-1.0, 0.0, 1.0], np.float32)).realize(), []
        for zero in (0.0, -0.0, 0, False, 0.0, -0.0):
            found.append((x.copysign(zero)).numpy())
            found.append((1 / (x * 0 + zero)).numpy())
        for one in (1, 1.0, True, 1, 1.0, True):
            found.append((Tensor([3]) * one).numpy())
        for mode in (True, False, True, False):
            with Tensor.train(mode):
                Tensor.manual_seed(5)
                found.append(x.dropout(0.5).numpy())
        return found

    same(run)


def test_the_default_type_is_part_of_a_key(monkeypatch: pytest.MonkeyPatch) -> None:
    for kind in ("float32", "float64", "float32", "float64"):
        monkeypatch.setattr(dtypes, "default_float", getattr(dtypes, kind))
        for _ in range(3):
            t = Tensor.ones(3) * 2
            assert t.dtype.name == kind and t.numpy().dtype.name == kind


def test_a_loop_by_hand_with_numbers_that_change(counts: Counts) -> None:
    """Decay of the rate, weights of the loss: numbers become inputs after a few steps, and nothing is built anew."""

    def run() -> list[np.ndarray]:
        Tensor.manual_seed(5)
        layer, rate, found = nn.Linear(4, 3), 0.1, []
        for i in range(24):
            x = Tensor(array(5, 4, seed=i))
            loss = F.mse_loss(layer(x), x[:, :3]) * (1 + 1 / (i + 1)) + i * 1e-3
            loss.backward()
            with no_grad():
                for p in layer.parameters():
                    p -= rate * p.grad
                    p.grad = None
            rate *= 0.97
            found.append(loss.numpy())
            if i == 14:
                counts.captures = counts.replays = counts.flushes = 0
        return [*found, *(p.numpy() for p in layer.parameters())]

    same(run)
    assert (counts.captures, counts.flushes) == (0, 0) and counts.replays >= 9


@pytest.mark.filterwarnings("ignore:.*another number each time")
@pytest.mark.parametrize("number", [0.0, -0.0, 1.0, -1.0, 2.0, 3, 1e-45, 1e38, 0.1])
@pytest.mark.parametrize("kind", ["float64", "float32", "float16", "bfloat16", "int32"])
def test_a_number_from_memory_gives_the_bits_of_a_constant(number: float, kind: str) -> None:
    x = Tensor(np.array([0.0, -0.0, 1.5, -3.25, 7.0, 0.1]), dtype=kind)
    for name in sorted(n for n in varying.OPERATORS if not n.startswith("__i")):
        op = getattr(x, name)
        _, (_, given) = varying.with_input(op.__func__, (x, number))
        whole = kind == "int32" and type(number) is int and "div" not in op.__func__.__name__
        assert isinstance(given, Tensor) == (kind in varying.TYPES or whole), name
        want, got = op(number), op(given)
        assert got.dtype is want.dtype
        assert got.numpy().tobytes() == want.numpy().tobytes(), name
        if "div" in name and kind in varying.TYPES:  # (whose derivative divides by it, too)
            y = x.detach().requires_grad_()
            want, got = (autograd.grad(getattr(y, name)(n).sum(), y)[0] for n in (number, given))
            a, b = (np.where(np.isnan(g.numpy()), np.nan, g.numpy()) for g in (got, want))  # (of a NaN no sign is told)
            assert a.tobytes() == b.tobytes(), f"the derivative of {name}"


NUMBERS: dict[str, Callable[[Tensor, int], Tensor]] = {
    "a tensor": lambda x, i: x * Tensor(1 / (i + 1)),
    "on the left": lambda x, i: Tensor(i * 0.25) - x,
    "of another type": lambda x, i: x + Tensor(i, dtype="int32"),
    "chosen": lambda x, i: (x > 0).where(x, Tensor(i * 0.5)),
    "chosen, a number": lambda x, i: (x > 0).where(x, i * 0.5),
    "whole ones chosen": lambda x, i: x * (x > 0).where((x * 3).int(), i),
    "filled in": lambda x, i: x.masked_fill(x < 0, i * 0.5),
    "whole": lambda x, i: x * ((x > 0).int() * (i + 2)),
}


@pytest.mark.parametrize("kind", NUMBERS)
def test_numbers_that_become_inputs(kind: str, counts: Counts) -> None:
    def run() -> list[np.ndarray]:
        x = Tensor(array(4, 5)).realize()
        return [NUMBERS[kind](x, i).square().sum().numpy() for i in range(12)]

    same(run)
    assert counts.replays >= 5 and counts.captures == 1


def test_a_line_says_what_keeps_a_loop_from_being_replayed() -> None:
    first = test_a_line_says_what_keeps_a_loop_from_being_replayed.__code__.co_firstlineno
    x = Tensor(array(3)).realize()
    cases: list[tuple[str, int, Callable[[int], Tensor]]] = [
        ("`clamp` has another number each time .*Tensor", 4, lambda i: x.clamp(0, i / 3)),
        ("`roll` has another number each time .*Tensor", 5, lambda i: x.roll(i)),
    ]
    for text, line, make in cases:
        with pytest.warns(UserWarning, match=rf"test_numbers.py:{first + line}: {text}"):
            for i in range(20):
                make(i).numpy()
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            for i in range(20, 30):  # (once)
                make(i).numpy()


def test_what_is_made_once_is_no_cliff() -> None:
    """Models that are trained one after the other, parameters that are read and written one by one."""
    weights = [nn.Parameter(array(k + 1)) for k in range(30)]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for w in weights:
            w.detach().numpy()
            Tensor(array(*w.shape)).to(w.device).numpy()
        for _ in range(20):
            loop = Training(nn.ReLU())
            for i in range(3):
                loop.step(i).item()


def test_a_place_that_is_called_in_several_ways() -> None:
    """Its number is an input only where it is all that there is besides a tensor."""

    def run() -> list[np.ndarray]:
        x, found = Tensor(array(3)).realize(), []
        for i in range(20):
            ways: list[tuple[tuple[Any, ...], dict[str, Any]]] = [((0.1 * i + 0.3,), {}), ((0.1 * i,), {"alpha": 0.7})]
            ways += [((), {"other": 0.1 * i}), ((Tensor(array(3, seed=i)),), {"alpha": 0.1 * i})]
            for args, named in ways:
                found.append(x.add(*args, **named).numpy())
        return found

    same(run)
