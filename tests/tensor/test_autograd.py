"""Modes, hooks, custom functions, gradients of gradients, activation checkpoints."""

from __future__ import annotations

import copy
import random
from typing import Any

import numpy as np
import pytest

from manygrad import (
    Context,
    Tensor,
    TinyJit,
    Variable,
    autograd,
    enable_grad,
    is_grad_enabled,
    no_grad,
    set_grad_enabled,
)
from manygrad.runtime.current import current
from manygrad.schedule import create_linear_with_vars
from manygrad.tensor.dtype import dtypes
from manygrad.tensor.storage import LIVE, TRAINED
from manygrad.tensor.uop import Ops, UOp


def leaf(*values: float) -> Tensor:
    return Tensor([float(v) for v in values], requires_grad=True)


# *** modes ***


def test_no_grad() -> None:
    x = leaf(1, 2, 3)
    with no_grad():
        y, view = x * 2, x[1:]
        assert not is_grad_enabled()
        with enable_grad():
            inside = x * 2
    assert is_grad_enabled()
    assert not y.requires_grad and not view.requires_grad and inside.requires_grad and (y * x).requires_grad
    (y * x).sum().backward()
    assert x.grad is not None and x.grad.tolist() == [2, 4, 6]


def test_no_grad_detaches_where_values_come_in() -> None:
    """A node for each of many operators would be half of a model's graph."""
    x, w = leaf(1, 2, 3), Tensor([2.0, 3.0, 4.0]).realize()
    with no_grad(), Context(FOLLOW=0):  # (a loop of so many calls would be computed in parts)
        y = x * w
        for i in range(20):
            y = (y * 0.5 + i).reshape(3, 1).sin().reshape(3)
    detached = [u for u in y.uop.toposort() if u.op is Ops.DETACH]
    assert len(detached) == 1 and not y.requires_grad
    (y * x).sum().backward()
    assert x.grad is not None
    np.testing.assert_allclose(x.grad.numpy(), y.numpy(), rtol=1e-6)


def test_a_leaf_that_was_made_of_detached_memory_is_not_passed_in_no_grad() -> None:
    w = Tensor([1.0, 2.0, 3.0, 4.0]).realize()
    for make in (lambda: w.detach(), lambda: w.detach().reshape(2, 2), lambda: w.detach() * 2):
        x = make()
        x.requires_grad = True
        with no_grad():
            y = x * 3
            z = y.reshape(4) + 1
        assert not y.requires_grad and not z.requires_grad
        ((z.reshape(*x.shape) + x) * x).sum().backward()
        assert x.grad is not None
        np.testing.assert_allclose(x.grad.numpy(), x.numpy() * 2 + x.numpy() * 3 + 1)


def test_no_grad_as_a_decorator_and_set_grad_enabled() -> None:
    x = leaf(1, 2)

    @no_grad()
    def double(x: Tensor) -> Tensor:
        return x * 2

    assert not double(x).requires_grad
    with set_grad_enabled(False):
        assert not (x + 1).requires_grad
    with pytest.raises(ZeroDivisionError), no_grad():
        _ = 1 // 0
    assert is_grad_enabled()


def test_a_leaf_is_written_inside_no_grad_only() -> None:
    x = leaf(1, 2, 3)
    with pytest.raises(
        RuntimeError,
        match=(
            r"t\[\.\.\.\] = value: a leaf Variable that requires grad is being used in an in-place operation "
            r"\(shape \(3,\)"
        ),
    ):
        x[0] = 5
    with Tensor.no_grad():
        x[0] = 5
        x[1:].assign(x[1:] * 2)
        x.assign(x + 1)
    assert x.tolist() == [6, 5, 7] and x.requires_grad and x.is_leaf


def test_requires_grad_of_what_is_computed() -> None:
    x = leaf(1, 2)
    y = (x * 2).exp()
    assert y.requires_grad and not y.is_leaf and not y.detach().requires_grad and y.detach().is_leaf
    y.realize()
    assert y.requires_grad  # it remembers how it was computed
    assert not (x > 1).requires_grad and not Tensor([1.0]).requires_grad
    with pytest.raises(TypeError, match="only float tensors can require a gradient"):
        Tensor([1, 2]).requires_grad_()


def test_the_set_of_leaves_is_those_that_require_a_gradient() -> None:
    """In the order in which all live tensors stand: ranks add up gradients in it."""
    rng, tensors = random.Random(5), [Tensor([1.0, float(i)]) for i in range(6)]
    copies = list[Tensor]()
    for _ in range(200):
        t = rng.choice(tensors)
        what = rng.randrange(7)
        if what == 0:
            t.requires_grad = rng.choice([True, False, None])
        elif what == 1:
            t.detach_()
        elif what == 2:
            t.data = Tensor([3.0, 4.0])
        elif what == 3:
            t.realize()
        elif what == 4:
            copies.append(copy.deepcopy(t))
        elif what == 5:
            (t * 2).sum().item()
        elif copies:
            copies.pop(0)
        leaves = [u for u in LIVE if u._requires_grad]
        assert list(map(id, TRAINED)) == list(map(id, leaves))
        assert all(u.is_leaf and u.requires_grad for u in leaves)


def test_detach_shares_storage() -> None:
    x = leaf(1, 2, 3)
    x.realize()
    x.detach().assign(Tensor([4.0, 5.0, 6.0]))
    assert x.tolist() == [4, 5, 6]
    x.data = Tensor([0.0, 0.0, 1.0])
    (x * x).sum().backward()
    assert x.grad is not None and x.grad.tolist() == [0, 0, 2]


# *** hooks ***


def test_hooks() -> None:
    x = leaf(1, 2, 3)
    y = x * x
    seen: list[Any] = []
    first = y.register_hook(lambda g: seen.append(g.tolist()))
    y.register_hook(lambda g: g * 10)
    last = x.register_hook(lambda g: g + 1)
    y.retain_grad()
    (y * 3).sum().backward()
    assert seen == [[3, 3, 3]] and y.grad is not None and y.grad.tolist() == [30, 30, 30]
    assert x.grad is not None and x.grad.tolist() == [61, 121, 181]
    first.remove()
    last.remove()
    x.grad = None
    (y * 3).sum().backward()
    assert len(seen) == 1 and x.grad.tolist() == [60, 120, 180]
    with pytest.raises(RuntimeError, match="does not require a gradient"):
        Tensor([1.0]).register_hook(lambda g: g)
    y.register_hook(lambda g: g.sum())
    with pytest.raises(RuntimeError, match="hook returned"):
        (y * 3).sum().backward()


def test_hooks_of_computed_values_work_on_what_was_stored_since() -> None:
    x = leaf(1, 2, 3)
    y = x * x
    y.register_hook(lambda g: g * 2)
    loss = (y * 3).sum()
    assert loss.item() == 42
    loss.backward()
    assert x.grad is not None and x.grad.tolist() == [12, 24, 36]


def test_values_that_were_computed_alike_have_hooks_and_gradients_of_their_own() -> None:
    rng = np.random.default_rng(0)
    for _ in range(4):  # (repeated, as a step is)
        x = Tensor(rng.standard_normal(3), requires_grad=True)
        a, b, c = x * 2, x * 2, x * 2
        a.register_hook(lambda g: g * 10)
        b.retain_grad()
        c.retain_grad()
        seen_through = b[:]
        (a * 2 + b * 3 + c + seen_through).sum().backward()
        assert x.grad is not None and x.grad.tolist() == [50, 50, 50]  # 2 (20 + 4 + 1)
        assert b.grad is not None and b.grad.tolist() == [4, 4, 4] and c.grad is not None and c.grad.tolist() == [1] * 3
        b.add_(1.0)
        assert seen_through.tolist() == b.tolist() == pytest.approx((x * 2 + 1).tolist())
        y = x * 3
        view = y[:]
        y.retain_grad()
        (y + view * 2).sum().backward()
        assert y.grad is not None and y.grad.tolist() == [3, 3, 3]


def test_what_is_detached_again_is_another_tensor() -> None:
    p = leaf(1, 2)
    y = (p * 3).detach()
    z = y.detach().requires_grad_()
    (y * p + z * 2).sum().backward()
    assert not y.requires_grad and y.grad is None
    assert p.grad is not None and p.grad.tolist() == [3, 6] and z.grad is not None and z.grad.tolist() == [2, 2]
    z.detach().add_(1.0)
    assert y.tolist() == z.tolist() == [4, 7]


def test_a_hook_after_accumulation() -> None:
    x = leaf(1, 2)
    seen: list[Any] = []
    x.register_post_accumulate_grad_hook(lambda t: seen.append(t.grad.tolist()))  # type: ignore[union-attr]
    (x * x).sum().backward()
    (x * x).sum().backward()
    assert seen == [[2, 4], [4, 8]]
    with pytest.raises(RuntimeError, match="only a leaf"):
        (x * 2).register_post_accumulate_grad_hook(print)


# *** gradients of anything by anything ***


def test_gradients_by_values_on_the_way() -> None:
    x = leaf(1, 2, 3)
    y = x * x
    z = (y * 3).sum()
    by_y, by_x = z.gradient(y, x)
    assert by_y.tolist() == [3, 3, 3] and by_x.tolist() == [6, 12, 18]
    y.realize()
    by_y, by_x = z.gradient(y, x)
    assert by_y.tolist() == [3, 3, 3] and by_x.tolist() == [6, 12, 18]


def test_backward_of_chosen_inputs() -> None:
    x, w = leaf(1, 2), leaf(3, 4)
    (x * w).sum().backward(inputs=[w])
    assert x.grad is None and w.grad is not None and w.grad.tolist() == [1, 2]


def test_grad() -> None:
    x, y = leaf(1, 2), leaf(3, 4)
    a, b = autograd.grad([x * y, (x * x).sum()], [x, y], [Tensor([1.0, 10.0]), None])
    assert a is not None and b is not None and a.tolist() == [5, 44] and b.tolist() == [1, 20]
    with pytest.raises(RuntimeError, match=r"positions \[1\]; pass allow_unused"):
        autograd.grad((x * 2).sum(), [x, y])
    assert autograd.grad((x * 2).sum(), [x, y], allow_unused=True)[1] is None
    with pytest.raises(ValueError, match="is no scalar"):
        autograd.grad(x * 2, x)


def test_higher_orders() -> None:
    x = Tensor(np.array([0.5, 1.5, -2.0]), requires_grad=True)
    f, want = x.sin(), [np.cos, lambda a: -np.sin(a), lambda a: -np.cos(a), np.sin]
    for derivative in want:
        (f,) = f.sum().gradient(x)
        np.testing.assert_allclose(f.numpy(), derivative(x.numpy()), atol=1e-12)


def test_hessian_vector_product_of_a_network() -> None:
    rng = np.random.default_rng(0)
    w, v, data = rng.normal(size=(4, 3)), rng.normal(size=(4, 3)), rng.normal(size=(5, 4))

    def slope(a: np.ndarray) -> Tensor:
        t = Tensor(a, requires_grad=True)
        return (Tensor(data) @ t).tanh().square().sum().gradient(t)[0]

    t = Tensor(w, requires_grad=True)
    (g,) = (Tensor(data) @ t).tanh().square().sum().gradient(t)
    (product,) = (g * Tensor(v)).sum().gradient(t)
    h = 1e-6
    np.testing.assert_allclose(
        product.numpy(), (slope(w + h * v).numpy() - slope(w - h * v).numpy()) / (2 * h), atol=1e-6
    )


# *** custom functions ***


class Cube(autograd.Function):
    @staticmethod
    def forward(ctx: autograd.Context, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x * x * x

    @staticmethod
    def backward(ctx: autograd.Context, g: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return g * 3 * x * x


class Exp(autograd.Function):
    @staticmethod
    def forward(ctx: autograd.Context, x: Tensor, scale: float) -> Tensor:
        y = (x * scale).exp()
        ctx.save_for_backward(y)
        ctx.scale = scale  # type: ignore[attr-defined]
        return y

    @staticmethod
    def backward(ctx: autograd.Context, g: Tensor) -> tuple[Tensor, None]:
        (y,) = ctx.saved_tensors
        return g * y * ctx.scale, None  # type: ignore[attr-defined]


class SinCos(autograd.Function):
    @staticmethod
    def forward(ctx: autograd.Context, x: Tensor) -> tuple[Tensor, Tensor]:
        s, c = x.sin(), x.cos()
        ctx.save_for_backward(s, c)
        return s, c

    @staticmethod
    def backward(ctx: autograd.Context, gs: Tensor, gc: Tensor) -> Tensor:
        s, c = ctx.saved_tensors
        return gs * c - gc * s


def test_functions() -> None:
    x = leaf(1, 2, 3)
    (g,) = Cube.apply(x).sum().gradient(x)
    (gg,) = g.sum().gradient(x)
    assert g.tolist() == [3, 12, 27] and gg.tolist() == [6, 12, 18]
    y = Exp.apply(x, 0.5)
    (g,) = y.sum().gradient(x)
    (gg,) = g.sum().gradient(x)  # the saved output has a gradient too
    np.testing.assert_allclose(g.numpy(), 0.5 * np.exp(0.5 * x.numpy()), rtol=1e-6)
    np.testing.assert_allclose(gg.numpy(), 0.25 * np.exp(0.5 * x.numpy()), rtol=1e-6)
    s, c = SinCos.apply(x)
    (s * 2 + c * 3).sum().backward()
    assert x.grad is not None
    np.testing.assert_allclose(x.grad.numpy(), 2 * np.cos(x.numpy()) - 3 * np.sin(x.numpy()), rtol=1e-6)


def test_a_function_in_a_step_that_is_scheduled_once() -> None:
    x = leaf(1, 2, 3)
    Cube.apply(x).sum().gradient(x)[0].realize()
    before = current().schedules.misses
    Cube.apply(x).sum().gradient(x)[0].realize()
    assert current().schedules.misses == before


def test_functions_that_are_wrong() -> None:
    class Wrong(autograd.Function):
        @staticmethod
        def forward(ctx: autograd.Context, x: Tensor, y: Tensor) -> Tensor:
            return x * y

        @staticmethod
        def backward(ctx: autograd.Context, g: Tensor) -> Any:
            return g

    x = leaf(1, 2)
    with pytest.raises(RuntimeError, match=r"Wrong\.backward returned 1 gradients for 2 arguments"):
        Wrong.apply(x, x).sum().backward()
    Wrong.backward = staticmethod(lambda ctx, g: (g, None, g))  # type: ignore[method-assign]
    with pytest.raises(RuntimeError, match=r"Wrong\.backward returned 3 gradients for 2 arguments"):
        Wrong.apply(x, x).sum().backward()
    Wrong.backward = staticmethod(lambda ctx, g: (g, 1.0))  # type: ignore[method-assign]
    with pytest.raises(
        RuntimeError, match=r"returned a float as gradient 1, of an argument of forward that is a Tensor"
    ):
        Wrong.apply(x, x).sum().backward()
    Wrong.backward = staticmethod(lambda ctx, g: (g.sum(), None))  # type: ignore[method-assign]
    with pytest.raises(RuntimeError, match=r"shape \(\) for an argument of shape \(2,\)"):
        Wrong.apply(x, x).sum().backward()


# *** checkpoints ***


def network(layers: int, width: int, devices: tuple[str, ...] | None = None) -> tuple[list[Tensor], Tensor]:
    rng = np.random.default_rng(0)
    weights = [
        Tensor((rng.normal(size=(width, width)) / width**0.5).astype(np.float32), device=None) for _ in range(layers)
    ]
    x = Tensor(rng.normal(size=(6, width)).astype(np.float32))
    if devices:
        weights, x = [w.shard(devices) for w in weights], x.shard(devices, axis=0)
    x.realize(*weights)
    for w in weights:
        w.requires_grad = True
    return weights, x


def blocks(weights: list[Tensor], x: Tensor, each: int, check: bool) -> Tensor:
    for i in range(0, len(weights), each):

        def block(x: Tensor, ws: Any = tuple(weights[i : i + each])) -> Tensor:
            for w in ws:
                x = (x @ w).tanh()
            return x

        x = autograd.checkpoint(block, x) if check else block(x)
    return x


@pytest.mark.parametrize("devices", [None, ("CPU:0", "CPU:1", "CPU:2")])
def test_checkpoints_change_no_gradient(devices: tuple[str, ...] | None) -> None:
    grads = []
    for check in (False, True):
        weights, x = network(4, 8, devices)
        blocks(weights, x, 2, check).square().mean().backward()
        grads.append([w.grad.numpy() for w in weights])  # type: ignore[union-attr]
    for a, b in zip(*grads):
        np.testing.assert_array_equal(a, b)


def planned_bytes(check: bool) -> int:
    with Context(DEVICE="NULL"):
        weights, x = network(16, 64)
        blocks(weights, x.expand(64, 6, 64).reshape(-1, 64).contiguous().realize(), 4, check).square().mean().backward()
        sink = UOp(Ops.SINK, dtypes.void, tuple(UOp(Ops.STORE, dtypes.void, (w.uop, w.grad.uop)) for w in weights))  # type: ignore[union-attr]
        linear = create_linear_with_vars(sink, current().world, current().schedules).linear
        return sum(p.nbytes for p in linear.arg.pools)


def test_checkpoints_save_memory() -> None:
    assert planned_bytes(True) < 0.7 * planned_bytes(False)


def test_a_checkpoint_keeps_its_dropout_mask_and_works_in_a_jit() -> None:
    weights, x = network(2, 8)

    @TinyJit
    def step(x: Tensor) -> tuple[Tensor, Tensor]:
        with Tensor.train():
            y = autograd.checkpoint(lambda x: (x @ weights[0]).dropout(0.5) * 1.0, x * 1.0)
        (g,) = y.sum().gradient(weights[0])
        return y.realize(), g.realize()

    for _ in range(4):
        y, g = step(x)
        kept = y.numpy() != 0
        np.testing.assert_allclose(g.numpy(), x.numpy().T @ (kept * 2.0), rtol=1e-5, atol=1e-5)


# *** writing ***


def test_gradients_through_writes_by_index() -> None:
    x, v = leaf(1, 2, 3), leaf(5)
    y = x * x
    y[1:2] = v * 2
    y[2] = 7.0
    assert y.tolist() == [1, 10, 7]
    (y * Tensor([1.0, 10.0, 100.0])).sum().backward()
    assert x.grad is not None and v.grad is not None
    assert x.grad.tolist() == [2, 0, 0] and v.grad.tolist() == [20]


def test_gradients_through_writes_into_storage() -> None:
    stored, b, v = Tensor([0.0, 0.0, 0.0]).realize(), leaf(1, 2, 3), leaf(2)
    view = stored[2:]
    stored.assign(b * 2)
    stored[1:2] = v * 3
    assert view.tolist() == [6] and stored.tolist() == [2, 6, 6]  # a write, seen by views
    stored = Tensor([0.0, 0.0, 0.0]).realize()
    stored.assign(b * 2)
    stored[1:2] = v * 3
    (stored * Tensor([1.0, 10.0, 100.0])).sum().backward()
    assert b.grad is not None and v.grad is not None
    assert v.grad.tolist() == [30] and b.grad.tolist() == [2, 0, 200]


def test_a_cache_written_at_a_symbolic_place_in_a_jit() -> None:
    w = Tensor(np.eye(4, dtype=np.float32) * 2, requires_grad=True)
    cache = Tensor(np.zeros((8, 4), np.float32)).realize()
    position, count = Variable("position", 0, 7), Variable("count", 1, 8)

    @TinyJit
    def step(x: Tensor, cache: Tensor, at: Any, n: Any) -> Tensor:
        cache[at] = (x @ w)[0]
        return cache[:n].sum(0).contiguous()

    got = [
        step(Tensor(np.full((1, 4), i + 1, np.float32)), cache, position.bind(i), count.bind(i + 1)).numpy()[0]
        for i in range(5)
    ]
    assert got == [2, 6, 12, 20, 30]
