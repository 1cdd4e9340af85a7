"""`@function`: the same values as without it, traced once, scheduled once."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from manygrad import GlobalCounters, Tensor, TinyJit, Variable, autograd, function, nn, no_grad
from manygrad.errors import JitError
from manygrad.nn.optim import SGD
from manygrad.runtime.current import current

RNG = np.random.default_rng(0)


def stored(*shape: int, devices: tuple[str, ...] | None = None, axis: int | None = None) -> Tensor:
    t = Tensor((RNG.normal(size=shape) / 4).astype(np.float32))
    return (t.shard(devices, axis) if devices else t).realize()


def residual(x: Tensor, w: Tensor) -> Tensor:
    return (x @ w).tanh() + x


def chain(f: Callable[..., Tensor], x: Tensor, ws: list[Tensor]) -> Tensor:
    for w in ws:
        x = f(x, w)
    return x


@pytest.mark.parametrize("devices", [None, ("CPU:0", "CPU:1", "CPU:2")])
def test_values_and_gradients(devices: tuple[str, ...] | None) -> None:
    ws = [stored(8, 8, devices=devices) for _ in range(3)]
    x = stored(7, 8, devices=devices, axis=0 if devices else None)
    for t in (x, *ws):
        t.requires_grad = True
    results = []
    for f in (residual, function(residual)):
        loss = chain(f, x, ws).square().sum()
        grads = loss.gradient(x, *ws)
        results.append([loss.numpy(), *(g.numpy() for g in grads)])
    for plain, traced in zip(*results):
        np.testing.assert_allclose(traced, plain, rtol=1e-5, atol=1e-6)


def test_it_is_traced_and_scheduled_once() -> None:
    traced = 0

    @function
    def f(x: Tensor, w: Tensor) -> Tensor:
        nonlocal traced
        traced += 1
        return residual(x, w)

    counts = []
    for layers in (2, 12):
        ws = [stored(6, 6) for _ in range(layers)]
        before = current().schedules.misses
        chain(f, stored(3, 6), ws).realize()
        counts.append(current().schedules.misses - before)
    assert traced == 1 and counts[1] <= counts[0]
    f(stored(4, 6), stored(6, 6))
    assert traced == 2  # another shape is another trace


def test_nothing_is_computed_twice() -> None:
    """The gradient reads what the call has computed: hardly more kernels than without
    (nothing is merged across a call's two ends)."""
    ws = [stored(16, 16) for _ in range(4)]
    for w in ws:
        w.requires_grad = True
    kernels, flops = [], []
    for f in (residual, function(residual)):
        loss = chain(f, stored(8, 16), ws).square().sum()
        grads = loss.gradient(*ws)
        GlobalCounters.reset()
        loss.realize(*grads)
        kernels.append(GlobalCounters.kernel_count)
        flops.append(GlobalCounters.global_ops)
    assert kernels[1] <= kernels[0] + 2 * len(ws) and flops[1] < 1.3 * flops[0]


def test_higher_orders() -> None:
    x = Tensor(np.array([0.5, -1.0, 2.0]), requires_grad=True)
    cube = function(lambda x: x * x * x)
    (g,) = cube(x).sum().gradient(x)
    (gg,) = g.sum().gradient(x)
    np.testing.assert_allclose(g.numpy(), 3 * x.numpy() ** 2)
    np.testing.assert_allclose(gg.numpy(), 6 * x.numpy())


def test_several_results_in_any_structure() -> None:
    @function
    def f(pair: dict[str, Tensor], scale: float) -> tuple[dict[str, Tensor], list[Any]]:
        return {"sum": pair["a"] + pair["b"]}, [pair["a"] * scale, "text", None]

    a, b = Tensor([1.0, 2.0], requires_grad=True), Tensor([3.0, 4.0])
    for scale in (2.0, 3.0):
        first, (second, text, none) = f({"a": a, "b": b}, scale)
        assert (
            first["sum"].tolist() == [4, 6] and second.tolist() == [scale, 2 * scale] and (text, none) == ("text", None)
        )
    (g,) = (first["sum"] * second).sum().gradient(a)
    assert g.tolist() == [3 * (1 + 3 + 1), 3 * (2 + 4 + 2)]


def test_weights_of_layers_and_from_outside() -> None:
    class Block:
        def __init__(self) -> None:
            self.linear = nn.Linear(4, 4)

        @function
        def __call__(self, x: Tensor) -> Tensor:
            return self.linear(x).relu() + outside

    outside = stored(4)
    blocks = [Block(), Block()]
    x = stored(2, 4)
    before = current().schedules.misses
    got = [b(x).numpy() for b in blocks]
    misses = current().schedules.misses - before
    for b, y in zip(blocks, got):
        np.testing.assert_allclose(
            y,
            np.maximum(x.numpy() @ b.linear.weight.numpy().T + b.linear.bias.numpy(), 0) + outside.numpy(),
            rtol=1e-5,
            atol=1e-6,
        )  # type: ignore[union-attr]
    outside.assign(outside + 1).realize()
    np.testing.assert_allclose(blocks[0](x).numpy(), got[0] + 1, rtol=1e-5, atol=1e-6)
    blocks[1](x).realize()
    assert current().schedules.misses - before - misses <= 2  # of the assignment and the copy out, not of the body


def test_training_with_flat_storage() -> None:
    """An optimiser makes the weights views of one buffer: bodies are given parts of it in place."""
    losses = []
    start = [RNG.normal(size=(6, 6)).astype(np.float32) / 3 for _ in range(3)]
    for f in (residual, function(residual)):
        ws = [Tensor(a, requires_grad=True) for a in start]
        x, optimizer = Tensor(np.ones((4, 6), np.float32)), SGD(ws, lr=0.1, momentum=0.9)
        mine = []
        with Tensor.train():
            for _ in range(4):
                optimizer.zero_grad()
                loss = chain(f, x, ws).square().mean()
                loss.backward()
                optimizer.step()
                mine.append(loss.item())
        losses.append(mine)
    np.testing.assert_allclose(losses[1], losses[0], rtol=1e-5)
    assert losses[0][-1] < losses[0][0]


def test_random_numbers_differ_from_call_to_call() -> None:
    @function
    def noisy(x: Tensor) -> Tensor:
        return x + Tensor.rand(3)

    x = Tensor.zeros(3).contiguous().realize()
    Tensor.manual_seed(7)
    want = [Tensor.rand(3).tolist() for _ in range(3)]
    Tensor.manual_seed(7)
    assert [noisy(x).tolist() for _ in range(3)] == want
    Tensor.manual_seed(7)
    assert (noisy(x) + noisy(x) * 2).tolist() == pytest.approx([a + 2 * b for a, b in zip(want[0], want[1])])


def test_assignments_inside_happen_at_every_call() -> None:
    total, count = Tensor([0.0, 0.0]).realize(), Tensor([0.0]).realize()

    @function
    def add(x: Tensor, count: Tensor) -> Tensor:
        total.assign(total + x)
        count.assign(count + 1)
        return total * 2

    assert add(Tensor([1.0, 2.0]), count).tolist() == [2, 4]
    assert add(Tensor([1.0, 2.0]), count).tolist() == [4, 8]
    assert total.tolist() == [2, 4] and count.tolist() == [2]

    @function
    def part(x: Tensor) -> Tensor:
        total[0] = x.sum()
        return x

    assert [part(Tensor([k])).item() for k in (7.0, 8.0)] == [7, 8]
    assert total.tolist() == [8, 4]


def test_values_read_before_an_assignment_inside() -> None:
    state = Tensor([1.0, 2.0]).realize()

    @function
    def grow(x: Tensor) -> Tensor:
        state.assign(state * 10)
        return x + state

    old = state * 1
    first = grow(old)
    second = grow(first)
    assert (second + old).tolist() == [1 + 10 + 100 + 1, 2 + 20 + 200 + 2]


def test_in_a_jit() -> None:
    w = stored(4, 4)
    f = function(residual)

    @TinyJit
    def step(x: Tensor) -> Tensor:
        return f(f(x, w), w).realize()

    for _ in range(4):
        x = stored(3, 4)
        want = residual(residual(x, w), w).numpy()
        np.testing.assert_allclose(step(x).numpy(), want, rtol=1e-5, atol=1e-6)


def test_no_grad_and_checkpoint() -> None:
    x, w = stored(3, 4), stored(4, 4)
    w.requires_grad = True
    f = function(residual)
    with no_grad():
        assert not f(x, w).requires_grad
    y = f(x, w)
    assert y.requires_grad
    (want,) = y.sum().gradient(w)
    (got,) = autograd.checkpoint(f, x, w).sum().gradient(w)
    np.testing.assert_allclose(got.numpy(), want.numpy(), rtol=1e-5, atol=1e-6)


def test_symbolic_dims_are_traced_as_they_stand() -> None:
    f = function(lambda x: (x * 2).sum())
    x = Tensor(np.arange(10, dtype=np.float32)).realize()
    n = Variable("n", 1, 10)
    assert [f(x[: n.bind(k)]).item() for k in (3, 5)] == [6.0, 20.0]


def test_arguments_that_cannot_be_followed() -> None:
    with pytest.raises(TypeError, match="pass its values as a Tensor"):
        function(lambda x: Tensor(x))(np.ones(3))


def test_what_one_assignment_left_is_read_after_the_next_though_a_call_comes_between() -> None:
    f = function(lambda a: a * 3)
    x = Tensor(np.ones(4)).realize()
    x.assign(x * 2)
    between = x.cumsum(0)
    x.assign(x + 5)
    called = f(x)
    x.assign(x * 10)
    x.realize()
    assert between.tolist() == [2.0, 4.0, 6.0, 8.0]
    assert called.tolist() == [21.0] * 4 and x.tolist() == [70.0] * 4


def test_an_argument_is_read_before_it_is_assigned_for_another_call() -> None:
    f = function(lambda a: a * 3)
    x = Tensor(np.arange(4.0)).realize()
    before, part = f(x), f(x[1:3])
    x.assign(x + 1)
    after = f(x)
    x.assign(x + 1)
    after.realize(before, part)
    assert (before.tolist(), part.tolist(), after.tolist()) == ([0, 3, 6, 9], [3, 6], [3, 6, 9, 12])


def test_equal_bodies_of_different_numbers_of_arguments() -> None:
    one, two = function(lambda a: a * 2), function(lambda a, b: a * 2)
    x, y = Tensor(np.arange(3.0), requires_grad=True).realize(), Tensor(np.ones(3)).realize()
    held = [one(x), two(x, y), one(x).sum().gradient(x)[0], two(x, y).sum().gradient(x)[0]]
    assert [t.tolist() for t in held] == [[0, 2, 4], [0, 2, 4], [2, 2, 2], [2, 2, 2]]


def test_what_is_computed_again_after_a_call_is_computed_from_what_it_was() -> None:
    f = function(lambda a: a * 3)
    x, y = Tensor(np.arange(4.0)).realize(), Tensor(np.zeros(4)).realize()
    y.assign(x + 1)  # equal to the next, and not stored
    x.assign(x + 1)
    called = f(x)
    x.assign(x * 10)
    called.realize()
    assert (y.tolist(), x.tolist(), called.tolist()) == ([1, 2, 3, 4], [10, 20, 30, 40], [3, 6, 9, 12])


def test_functions_call_functions() -> None:
    inner = function(lambda a, w: (a @ w).tanh())
    scale = Tensor([2.0]).realize()

    @function
    def outer(x: Tensor, u: Tensor, v: Tensor) -> Tensor:
        h = inner(x, u) * scale
        return inner(h, v) + inner(x, v).sum()

    def plain(x: Any, u: Any, v: Any) -> Any:
        return np.tanh(np.tanh(x @ u) * 2 @ v) + np.tanh(x @ v).sum()

    rng = np.random.default_rng(0)
    for _ in range(2):
        x, u, v = (rng.standard_normal((3, 3)) for _ in range(3))
        tensors = [Tensor(a, requires_grad=True) for a in (x, u, v)]
        np.testing.assert_allclose(outer(*tensors).numpy(), plain(x, u, v), rtol=1e-6)
        outer(*tensors).sum().backward()
        for i, t in enumerate(tensors):
            moved = [[a + (k == i) * d for k, a in enumerate((x, u, v))] for d in (1e-6 * np.eye(3), -1e-6 * np.eye(3))]
            assert t.grad is not None
            np.testing.assert_allclose(
                (t.grad.numpy() * np.eye(3)).sum(), (plain(*moved[0]).sum() - plain(*moved[1]).sum()) / 2e-6, rtol=1e-5
            )


def test_a_trace_that_fails_leaves_nothing() -> None:
    kept = []

    @function
    def f(a: Tensor, fail: list[int]) -> Tensor:
        kept.append(a * 2 + counter)
        counter.assign(counter + 1)
        if not counting:
            raise KeyError("not yet")
        return a * 2 + 1

    counter, counting = Tensor([0.0]).realize(), []
    x = Tensor(np.arange(3.0)).realize()
    with pytest.raises(KeyError, match="not yet"):
        f(x, [])
    counter.assign(counter + 5)
    assert counter.tolist() == [5.0] and x.tolist() == [0, 1, 2]
    with pytest.raises(RuntimeError, match="made while @function .*was traced and kept.*return it"):
        kept[0].numpy()
    counting.append(1)
    assert f(x, []).tolist() == [1, 3, 5] and counter.tolist() == [6.0]


@pytest.mark.parametrize("axis", [0, 1, None])
def test_gradients_on_several_devices(axis: int | None) -> None:
    two = ("CPU:0", "CPU:1")
    f = function(lambda x, w: (x @ w).tanh() + x)
    rng = np.random.default_rng(0)
    x, w = rng.standard_normal((4, 6)), rng.standard_normal((6, 6))
    for scale in (1.0, Tensor(np.full((4, 6), 2.0)).shard(two, axis)):
        tx, tw = Tensor(x).shard(two, axis).realize(), Tensor(w, requires_grad=True)
        out = f(tx, tw.shard(two))
        (out * scale).sum().backward()
        k = scale if isinstance(scale, float) else 2.0
        assert tw.grad is not None
        np.testing.assert_allclose(tw.grad.numpy(), x.T @ (1 - np.tanh(x @ w) ** 2) * k)
        np.testing.assert_allclose(out.numpy(), np.tanh(x @ w) + x)


FACTOR, OPTIONS = 2.0, {"scale": 1.0}


class Holder:
    offset = 0.0


HOLDER = Holder()


def scaled(x: Tensor) -> Tensor:
    return x * FACTOR * OPTIONS["scale"] + HOLDER.offset


def test_numbers_from_outside_are_followed(monkeypatch: pytest.MonkeyPatch) -> None:
    """A number of the globals, the closure, a dict, an object or a function that is called was kept for ever."""
    k, x = 1.0, Tensor([1.0, 2.0])

    @function
    def f(x: Tensor) -> Tensor:
        return scaled(x) + k

    def expected() -> list[float]:
        return [v * FACTOR * OPTIONS["scale"] + HOLDER.offset + k for v in (1.0, 2.0)]

    assert f(x).tolist() == expected() == [3.0, 5.0]
    k = 5.0
    assert f(x).tolist() == expected() == [7.0, 9.0]
    monkeypatch.setitem(globals(), "FACTOR", 3.0)
    assert f(x).tolist() == expected() == [8.0, 11.0]
    monkeypatch.setitem(OPTIONS, "scale", 2.0)
    assert f(x).tolist() == expected() == [11.0, 17.0]
    monkeypatch.setattr(HOLDER, "offset", 0.5)
    assert f(x).tolist() == expected() == [11.5, 17.5]
    traces = sum(map(len, f.traces.values()))
    k = 1.0
    assert f(x).tolist() == expected() and sum(map(len, f.traces.values())) == traces + 1
    k = 5.0
    assert f(x).tolist() == expected() and sum(map(len, f.traces.values())) == traces + 1, "that trace is known"


@pytest.mark.parametrize("ask", [lambda x: x.sum().item(), lambda x: x.numpy(), lambda x: bool((x > 0).all())])
def test_a_value_that_is_asked_for_while_it_is_traced_is_an_error(ask: Callable[[Tensor], Any]) -> None:
    """It was an IndexError from the inside of the engine."""
    outside = (Tensor([1.0, 2.0]).realize() * 2).sum()

    @function
    def f(x: Tensor) -> Tensor:
        ask(x)
        return x

    with pytest.raises(JitError, match=r"test_function\.py:\d+: .* @function .*f is traced.*Tensor\.where"):
        f(Tensor([1.0, 2.0]).realize())
    assert outside.item() == 6.0, "what was not computed yet has its value after a trace that failed"
    assert (Tensor([1.0, 2.0]) * 2).tolist() == [2.0, 4.0]
