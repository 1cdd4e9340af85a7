"""A TinyJit's inputs: read where they lie or copied, and which ones it refuses."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from manygrad import Tensor, TinyJit, Variable
from manygrad.errors import JitError
from manygrad.runtime.executors.items import GraphItem


def test_an_input_is_read_in_place() -> None:
    @TinyJit
    def f(a: Tensor) -> Tensor:
        return ((a + 1).flip(0) * 2).contiguous() + a.sum()

    arrays = [np.arange(i, i + 64, dtype=np.float32) for i in range(5)]
    for a in arrays:
        np.testing.assert_array_equal(f(Tensor.from_numpy(a)).numpy(), (a[::-1] + 1) * 2 + a.sum())
    assert f.captured.inputs[0].moves is not None
    np.testing.assert_array_equal(f.captured.inputs[0].own.numpy(), arrays[1])  # since the capture nothing was copied


def test_an_input_in_memory_that_the_step_writes_is_copied() -> None:
    w = Tensor(np.ones(64, np.float32)).realize()

    @TinyJit
    def f(a: Tensor) -> Tensor:
        w.assign(w + 1).realize()
        return ((a * 10).flip(0).contiguous() + w).realize()

    for i in range(5):
        before = 1.0 + i
        got = f(w.detach() if i >= 2 else w.clone().realize())  # a replay is given the memory that it writes
        assert set(got.tolist()) == {before * 10 + before + 1}, i


def test_a_result_that_is_the_input_holds_the_last_one() -> None:
    @TinyJit
    def f(a: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        turned = (a + 1).flip(0).contiguous().realize()  # a kernel of its own: two are one native call
        return a, turned * 2, a * 3

    for i in range(4):
        a = np.full(16, i, np.float32)
        same, other, third = f(Tensor.from_numpy(a))
        assert (same.tolist(), other.tolist(), third.tolist()) == ([i] * 16, [2 * (i + 1)] * 16, [3 * i] * 16)
    assert isinstance(f.captured.items[0], GraphItem)


def test_what_was_made_of_an_input_and_lives_on_holds_the_last_one() -> None:
    kept: list[Tensor] = []

    @TinyJit
    def f(a: Tensor) -> Tensor:
        kept.append(a.reshape(4, 4))
        return ((a + 1).flip(0).contiguous() * 2).realize()

    for i in range(4):
        f(Tensor(np.full(16, i, np.float32)))
    assert f.captured.inputs[0].moves is None
    assert set(np.unique(kept[-1].numpy())) == {3.0}


def test_keyword_arguments_in_any_order() -> None:
    step = TinyJit(lambda *, a, b, more: a * 10 + b + more["x"] * 100 - more["y"])
    for i in range(5):
        a, b, x, y = (Tensor([float(i + k)]).realize() for k in range(4))
        more = {"x": x, "y": y} if i % 2 else {"y": y, "x": x}
        got = step(a=a, b=b, more=more) if i % 2 else step(b=b, more=more, a=a)
        assert got.item() == i * 10 + i + 1 + (i + 2) * 100 - (i + 3)


def test_arguments_passed_in_another_way_are_an_error() -> None:
    step = TinyJit(lambda a, b: a * 10 + b)
    a, b = Tensor([1.0]).realize(), Tensor([2.0]).realize()
    for _ in range(3):
        step(a, b)
    with pytest.raises(
        JitError, match=r"captured with a tensor as argument\[1\], called with one as argument\['b'\]; pass"
    ):
        step(a, b=b)
    with pytest.raises(JitError, match="pass the arguments in the same way"):
        step(b=b, a=a)


def test_a_computed_tensor_of_symbolic_shape() -> None:
    x = Tensor(np.arange(8.0).reshape(4, 2)).realize()
    n = Variable("n", 1, 4)
    for k in (3, 2, 4, 1, 3):
        part = (x[: n.bind(k)] * 2).realize()
        assert part.is_realized
        for _ in range(2):
            assert part.sum().item() == 2 * np.arange(2.0 * k).sum()
        assert (part + 1).sum().item() == 2 * np.arange(2.0 * k).sum() + 2 * k


def test_inputs_and_results_of_symbolic_shape() -> None:
    x = Tensor(np.arange(8.0).reshape(4, 2)).realize()
    n = Variable("n", 1, 4)
    step = TinyJit(lambda t, m: ((t * 3).sum() + m.sum(), t + 1))
    for k in (3, 2, 4, 1, 3):
        for part in (x[: n.bind(k)] * 2, (x[: n.bind(k)] * 2).realize()):
            total, more = step(part, x)
            assert total.item() == 6 * np.arange(2.0 * k).sum() + 28
            assert more.sum().item() == 2 * np.arange(2.0 * k).sum() + 2 * k


def test_an_input_that_is_written_and_another_of_the_same_memory_are_an_error() -> None:
    def f(a: Tensor, b: Tensor) -> Tensor:
        a.assign(a + 1)
        return a + b

    step = TinyJit(f)
    a, b = Tensor([1.0, 2.0]).realize(), Tensor([5.0, 6.0]).realize()
    for _ in range(3):
        step(a, b)
    with pytest.raises(
        JitError, match=r"argument\[0\] is assigned by the function, and argument\[1\] is the same memory; pass a clone"
    ):
        step(a, a)
    with pytest.raises(JitError, match="same memory"):
        step(a, a[::-1])
    assert a.tolist() == [4.0, 5.0] and step(a, b).tolist() == [10.0, 12.0]
    assert step(a, a.flip(0)).tolist() == [12.0, 12.0]  # (a copy)


@pytest.mark.parametrize("devices", [None, ("CPU:0", "CPU:1")])
def test_replays_follow_a_new_seed(devices: tuple[str, str] | None) -> None:
    x = Tensor(np.zeros(6, np.float32))
    x = (x if devices is None else x.shard(devices, 0)).realize()
    step = TinyJit(lambda x: x + x.rand_like())

    def drawn(seed: int, f: Any) -> list[list[float]]:
        Tensor.manual_seed(seed)
        return [f(x).tolist() for _ in range(4)]

    first, second = ([drawn(seed, f) for seed in (5, 5, 6, 5)] for f in (step, lambda x: x + x.rand_like()))
    assert first == second
    assert first[0] == first[1] == first[3] != first[2] and len({tuple(r) for r in first[0]}) == 4


def test_an_argument_that_is_cut_in_another_way_is_an_error() -> None:
    devices, values = ("CPU:0", "CPU:1"), np.arange(16, dtype=np.float32).reshape(4, 4)
    step = TinyJit(lambda x: x * 2 + 1)
    for axis in (0, 0, -2):
        np.testing.assert_array_equal(step(Tensor(values).shard(devices, axis)).numpy(), values * 2 + 1)
    for other, now in ((1, "cut along axis 1 at 2"), (None, "a copy on each")):
        with pytest.raises(JitError, match=rf"float32 on .*, cut along axis 0 at 2, now .*, {now}; pass the same kind"):
            step(Tensor(values).shard(devices, other))
    np.testing.assert_array_equal(step(Tensor(values + 1).shard(devices, 0)).numpy(), values * 2 + 3)


def test_a_result_may_be_passed_where_the_function_writes() -> None:
    """The next result lies elsewhere."""

    def f(a: Tensor, b: Tensor) -> Tensor:
        x = a + 2 * b
        a.assign(b + 1)
        return x

    step = TinyJit(f)
    a, b = Tensor([1.0]).realize(), Tensor([5.0]).realize()
    assert [step(a, b).item() for _ in range(4)] == [11, 16, 16, 16]
    last = step(a, b)
    assert (step(last, b).item(), last.item()) == (26, 6)
    assert step(step(a, b).clone(), b).item() == 26 and a.item() == 6
