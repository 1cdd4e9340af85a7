"""Kernels over the same loops that become one with several results."""

from __future__ import annotations

import numpy as np
import pytest

from manygrad import Context, Tensor, TinyJit, world
from manygrad.nn.optim import AdamW
from manygrad.schedule import normalize
from manygrad.schedule.facts.rows import ROW
from manygrad.schedule.lower import lower_sink_to_linear
from manygrad.tensor.uop import Ops
from tests.schedule.programs import kernels_of, linear_of, sink_of, stored


def test_siblings_that_read_the_same_buffer() -> None:
    x = stored(8, 8)
    (kernel,) = kernels_of([x + 1, x * 2, x.exp()])
    assert len(kernel.src) == 3
    assert len(kernels_of([x + 1, stored(8, 8) * 2])) == 2  # nothing in common
    assert len(kernels_of([x + 1, x.T * 2])) == 1  # other elements of what is only read
    assert len(kernels_of([x + 1, x[:4] * 2])) == 2  # other loops
    assert len(kernels_of([x + 1, x.sum(1)])) == 2  # a reduction


def test_an_assigned_value_is_read_from_the_register() -> None:
    m, w, g = (Tensor(np.arange(1, 9, dtype=np.float32)).realize() for _ in range(3))
    m.assign(m * 0.5 + g)
    w.assign(w - m * 0.1)
    linear = linear_of([m, w])
    (call,) = linear.src
    assert len(call.src[0].src) == 2 and len(call.src) == 1 + 3
    m.realize(w)
    a = np.arange(1, 9, dtype=np.float32)
    np.testing.assert_allclose(m.numpy(), a * 1.5)
    np.testing.assert_allclose(w.numpy(), a - a * np.float32(0.15), rtol=1e-6)


def test_what_is_written_is_read_elsewhere_only_in_order() -> None:
    a, b = (Tensor(np.arange(6, dtype=np.float32)).realize() for _ in range(2))
    a.assign(a + 1)
    b.assign(b + a.flip(0))  # other elements of what the first writes
    assert len(linear_of([a, b]).src) == 2
    a.realize(b)
    assert (a.tolist(), b.tolist()) == ([1, 2, 3, 4, 5, 6], [6, 6, 6, 6, 6, 6])
    a.assign(b * 2)
    b.assign(a - b)  # reads both, writes what the first reads at the same elements
    assert len(linear_of([a, b]).src) == 1
    a.realize(b)
    assert (a.tolist(), b.tolist()) == ([12] * 6, [6] * 6)


def test_a_temporary_read_at_the_same_place_alone_is_not_stored() -> None:
    x = stored(64)
    y = ((x + 1).contiguous() * 2).contiguous() - 1
    (kernel,) = kernels_of(y)
    assert len(kernel.src) == 1
    np.testing.assert_array_equal(y.numpy(), (x.numpy() + 1) * 2 - 1)


def test_a_temporary_read_elsewhere_stays_a_boundary() -> None:
    x = Tensor(np.arange(64, dtype=np.float32).reshape(8, 8)).realize()
    y = (x + 1).contiguous()
    assert len(kernels_of(y * 2 + y.T)) == 2
    np.testing.assert_array_equal((y * 2 + y.T).numpy(), (x.numpy() + 1) * 2 + x.numpy().T + 1)


def test_what_is_counted_is_no_place_to_write_to_in_the_same_kernel() -> None:
    """Such a store goes one by one, and the count would, too."""
    x = Tensor(np.arange(2048, dtype=np.uint32).reshape(32, 64)[:, ::-1].copy()).realize()
    order = x.argsort(1)
    (counting,) = (k for k in kernels_of(order) if any(u.op is Ops.REDUCE for u in k.toposort()))
    assert all(u.op is not Ops.REDUCE for s in counting.src for p in s.src[0].src[1:] for u in p.toposort())
    np.testing.assert_array_equal(order.numpy(), np.broadcast_to(np.arange(64)[::-1], (32, 64)))


def test_what_reads_a_product_at_the_same_place_is_computed_with_it() -> None:
    rng = np.random.default_rng(0)
    x, w = (Tensor(rng.normal(size=s).astype(np.float32)).realize() for s in ((6, 5), (5, 7)))
    h = x @ w
    a, d = h.gelu("tanh").contiguous(), (h * h).contiguous()
    (kernel,) = kernels_of([a, d])
    assert len(kernel.src) == 2  # and h itself is not stored
    want = x.numpy() @ w.numpy()
    np.testing.assert_allclose(d.numpy(), want * want, rtol=1e-6)
    np.testing.assert_allclose(
        a.numpy(), 0.5 * want * (1 + np.tanh(np.sqrt(2 / np.pi) * (want + 0.044715 * want**3))), rtol=1e-5, atol=1e-7
    )


def test_an_optimiser_is_one_kernel_and_a_replay_sees_all_results() -> None:
    rng = np.random.default_rng(0)
    start, grads = rng.normal(size=100).astype(np.float32), rng.normal(size=(5, 100)).astype(np.float32)
    p = Tensor(start, requires_grad=True)
    optimizer = AdamW([p], lr=0.1)

    @TinyJit
    def step(g: Tensor) -> Tensor:
        p.grad = g * 1.0
        optimizer.step()
        return p

    w, m, v = start.astype(np.float64), 0.0, 0.0
    for t, g in enumerate(grads, 1):
        step(Tensor(g))
        m, v = 0.9 * m + 0.1 * g, 0.999 * v + 0.001 * g.astype(np.float64) ** 2
        w = w * (1 - 0.1 * 0.01) - 0.1 * (m / (1 - 0.9**t)) / (np.sqrt(v / (1 - 0.999**t)) + 1e-8)
        np.testing.assert_allclose(p.numpy(), w, rtol=1e-5, atol=1e-6)
    state = optimizer.state[p]
    np.testing.assert_allclose(state["exp_avg"].numpy(), m, rtol=1e-5, atol=1e-7)
    np.testing.assert_allclose(state["exp_avg_sq"].numpy(), v, rtol=1e-5, atol=1e-7)


def test_a_kernel_waits_for_what_a_later_one_needs_to_join_it() -> None:
    """The first assignment needs nothing, the second also a number: both are one kernel after that number's."""
    m, w, g = (Tensor(np.arange(1, 9, dtype=np.float32)).realize() for _ in range(3))
    t = Tensor(np.array([3.0], np.float32)).realize()
    m.assign(m * 0.5 + g)
    rate = (t * t + 1).contiguous()
    w.assign(w - m * rate)
    linear = linear_of([m, w])
    assert [len(call.src[0].src) for call in linear.src] == [1, 2]
    m.realize(w)
    a = np.arange(1, 9, dtype=np.float32)
    np.testing.assert_allclose(m.numpy(), a * 1.5)
    np.testing.assert_allclose(w.numpy(), a - a * 15, rtol=1e-6)


def test_a_kernel_that_another_waits_for_stays_in_its_place() -> None:
    m, w, g = (Tensor(np.arange(1, 9, dtype=np.float32)).realize() for _ in range(3))
    m.assign(m * 0.5 + g)
    rate = m.sum().contiguous()
    w.assign(w - m * rate)
    assert len(linear_of([m, w]).src) == 3
    m.realize(w)
    a = np.arange(1, 9, dtype=np.float32)
    np.testing.assert_allclose(w.numpy(), a - a * 1.5 * 54, rtol=1e-6)


# *** reductions that go over the same elements ***


@pytest.mark.parametrize("shape", [(6, 40), (4, 5, 8, 8), (3, 1000)])
def test_reductions_of_the_same_rows_are_one_kernel_of_the_same_bits(shape: tuple[int, ...]) -> None:
    rng = np.random.default_rng(0)
    x, y = (Tensor(rng.normal(size=shape).astype(np.float32)).realize() for _ in range(2))
    dims = tuple(range(max(1, len(shape) - 2), len(shape)))
    made = [lambda: x.sum(dims), lambda: (x * y).sum(dims), lambda: x.amax(dims)]
    (kernel,) = kernels_of([f() for f in made])
    assert len(kernel.src) == 3
    together = [f() for f in made]
    together[0].realize(*together[1:])
    for t, f in zip(together, made):
        np.testing.assert_array_equal(t.numpy(), f().numpy())


@pytest.mark.parametrize("device", ["CPU", "PYTHON"])
@pytest.mark.parametrize("shape", [(7,), (5, 9), (100, 30)])
def test_reductions_of_all_elements_are_one_kernel_of_the_same_bits(shape: tuple[int, ...], device: str) -> None:
    a = np.random.default_rng(0).normal(size=shape).astype(np.float32)
    with Context(DEVICE=device):
        x = Tensor(a).realize()
        made = [x.sum, x.amax, x.amin]
        (kernel,) = kernels_of([f() for f in made])
        assert len(kernel.src) == 3
        together = [f() for f in made]
        together[0].realize(*together[1:])
        assert [t.item() for t in together] == [f().item() for f in made]
        np.testing.assert_allclose([t.item() for t in together], [a.sum(), a.max(), a.min()], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("rows", [8, 7, 1])
def test_reductions_of_all_elements_of_cut_values(rows: int) -> None:
    a = np.random.default_rng(0).normal(size=(rows, 5)).astype(np.float32)
    x = Tensor(a).shard(("CPU:0", "CPU:1"), axis=0)
    found = [x.sum(), x.amax(), x.amin()]
    found[0].realize(*found[1:])
    np.testing.assert_allclose([t.item() for t in found], [a.sum(), a.max(), a.min()], rtol=1e-4, atol=1e-5)


def test_numbers_that_share_no_elements_are_kernels_of_their_own() -> None:
    x, y = stored(64), stored(64)
    assert len(kernels_of([x.sum(), y.sum()])) == 2
    assert len(kernels_of([stored(1) + 1, stored(1) * 2])) == 2


def test_a_statistic_and_what_needs_it_are_one_kernel_if_the_row_fits_the_cache() -> None:
    for columns, expected in ((ROW, 1), (ROW + 16, 2)):
        x = stored(3, columns)
        mean = x.mean(1, keepdim=True)
        linear = linear_of([mean, (x - mean).square().mean(1)])
        assert len(linear.src) == expected
    x = Tensor(np.random.default_rng(0).normal(3, 2, size=(5, 700)).astype(np.float32)).realize()
    mean = x.mean(1, keepdim=True)
    var = (x - mean).square().mean(1)
    mean.realize(var)
    np.testing.assert_allclose(mean.numpy()[:, 0], x.numpy().mean(1), rtol=1e-5)
    np.testing.assert_allclose(var.numpy(), x.numpy().var(1), rtol=1e-5)


def test_reductions_that_have_passes_of_their_own() -> None:
    x, y = stored(8, 8), stored(8, 8)
    assert len(kernels_of([x.sum(1), y.sum(1)])) == 2  # nothing in common
    assert len(kernels_of([x.sum(1), x.sum(0)])) == 2  # other elements in an iteration
    assert len(kernels_of([x @ y, x @ (y + 1)])) == 2 + 1  # contractions, and what one of them reads
    assert len(kernels_of([x.sum(1), x.cast("float64").sum(1)])) == 2  # vectors of another length: other partial sums


def test_a_kernel_is_overtaken_by_what_waits_for_it_only_without_a_cycle() -> None:
    """Both sums of a norm's gradient read the gradient: the first one waits, and with it what is made of it."""
    g, x = (Tensor(np.random.default_rng(i).normal(size=(4, 6, 64)).astype(np.float32)).realize() for i in range(2))
    total = g.sum((0, 2), keepdim=True)
    scale = (x * x).sum((0, 2), keepdim=True)
    along = (g * (x * scale)).sum((0, 2), keepdim=True)
    late = (g * (x * total)).sum((0, 2), keepdim=True)
    results = [total + 1, along, late]
    results[0].realize(*results[1:])
    a, b = (t.numpy().astype(np.float64) for t in (g, x))
    s = lambda v: v.sum((0, 2), keepdims=True)  # noqa: E731
    for t, e in zip(results, (s(a) + 1, s(a * b * s(b * b)), s(a * b * s(a)))):
        np.testing.assert_allclose(t.numpy(), e, rtol=1e-4, atol=1e-3)


def test_a_batch_norm_reads_its_images_once_for_the_statistics_and_twice_for_the_gradient() -> None:
    x, g = (
        Tensor(np.random.default_rng(i).normal(size=(8, 4, 16, 16)).astype(np.float32)).realize().requires_grad_()
        for i in range(2)
    )
    w, b = stored(4).requires_grad_(), stored(4).requires_grad_()
    y = x.batch_norm(None, None, w, b, training=True)

    def readers(outputs: list[Tensor], t: Tensor) -> int:
        sink, buffers, _ = normalize(sink_of(outputs))
        slot = buffers.index(t.uop)
        return sum(
            any(a.op is Ops.PARAM and a.arg.uid == slot for a in call.src[1:])
            for call in lower_sink_to_linear(sink, world).src
        )

    assert readers([y], x) == 2
    gradients = y.gradient(x, w, b, gradient=g)
    assert (readers(list(gradients), x), readers(list(gradients), g)) == (3, 2)


def test_a_variance_far_from_zero() -> None:
    x = np.random.default_rng(0).normal(1e4, 1, size=(16, 3, 16, 16)).astype(np.float32)
    out = Tensor(x).batch_norm(None, None, training=True).numpy()
    wide = x.astype(np.float64)
    expected = (wide - wide.mean((0, 2, 3), keepdims=True)) / wide.std((0, 2, 3), keepdims=True)
    np.testing.assert_allclose(out, expected, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("device", ["CPU", "PYTHON"])
@pytest.mark.parametrize("dim", [0, 1])
def test_the_parts_of_joined_values_are_one_kernel(dim: int, device: str) -> None:
    rng = np.random.default_rng(0)
    with Context(DEVICE=device):
        arrays = [rng.normal(size=(4, 6)).astype(np.float32) for _ in range(3)]
        parts = [Tensor(a).realize() for a in arrays]
        made = [lambda: Tensor.cat(*parts, dim=dim).relu(), lambda: Tensor.stack(parts, dim=dim)]
        for f, expected in zip(made, (np.maximum(np.concatenate(arrays, dim), 0), np.stack(arrays, dim))):
            (kernel,) = kernels_of([f()])
            assert len(kernel.src) == len(parts)
            np.testing.assert_array_equal(f().numpy(), expected)


def test_what_reads_joined_values_comes_after_all_parts() -> None:
    """Also where it runs over the loops of the parts, and reads what the last of them wrote."""
    a, b = stored(8, 4), stored(8, 4)
    joined = Tensor.cat(a, b)
    last, turned = joined[8:] * 2, joined.flip(0)[:8] + joined[:8]
    joined.realize(last, turned)
    whole = np.concatenate([a.numpy(), b.numpy()])
    np.testing.assert_array_equal(joined.numpy(), whole)
    np.testing.assert_array_equal(last.numpy(), whole[8:] * 2)
    np.testing.assert_array_equal(turned.numpy(), whole[::-1][:8] + whole[:8])


def test_assignments_to_overlapping_parts_keep_their_order() -> None:
    x, a, b = stored(8, 4), stored(4, 4), stored(4, 4)
    expected = x.numpy().copy()
    x[:4] = a
    x[2:6] = b
    x.realize()
    expected[:4], expected[2:6] = a.numpy(), b.numpy()
    np.testing.assert_array_equal(x.numpy(), expected)
