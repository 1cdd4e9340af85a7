"""How many kernels a program becomes, and which loops are left in them."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from manygrad import Tensor
from manygrad.tensor.uop import Ops
from tests.schedule.programs import kernels_of, linear_of, reduce_ranges, stored

INDEX = Tensor(np.array([[1, 0, 3], [2, 2, 1]])).realize()
Program = Callable[[], Tensor | list[Tensor]]

ONE: dict[str, Program] = {
    "elementwise chain": lambda: (((stored(16, 16) + 1) * stored(16, 16)).relu() - stored(16)).tanh(),
    "elementwise chain and a sum": lambda: (stored(16, 16) * 2 + stored(16, 16)).exp().sum(),
    "elementwise chain and a max": lambda: (stored(16, 16) - stored(16)).abs().amax(1),
    "a sum and what follows": lambda: (stored(16, 16).sum(1) * 2 + stored(16)).sqrt(),
    "mean square": lambda: (stored(16, 16) ** 2).mean(),
    "matmul": lambda: stored(16, 8) @ stored(8, 16),
    "matmul, bias, relu": lambda: (stored(16, 8) @ stored(8, 16) + stored(16)).relu(),
    "batched matmul of transposes": lambda: stored(3, 8, 16).mT @ stored(3, 8, 16),
    "linear and gelu": lambda: stored(16, 8).linear(stored(4, 8), stored(4)).gelu(),
    "convolution, bias, relu": lambda: stored(2, 3, 8, 8).conv2d(stored(4, 3, 3, 3), stored(4), padding=1).relu(),
    "average pooling": lambda: stored(1, 2, 8, 8).avg_pool2d(2) * 2,
    "movement only": lambda: stored(4, 6).T.reshape(2, 12).flip(1).pad((1, 1)).contiguous(),
    "embedding": lambda: stored(10, 4)[INDEX] * 2 + 1,
    "masked sum": lambda: stored(8, 8).tril().sum(1),
    "cumulative sum": lambda: stored(4, 8).cumsum(1),
    "casts": lambda: stored(16).cast("float16").cast("float32").cast("int32").sum(),
    "constants": lambda: Tensor.ones(4, 4) * 3 + Tensor.arange(4),
}


@pytest.mark.parametrize("name", ONE)
def test_one_kernel(name: str) -> None:
    assert len(kernels_of(ONE[name]())) == 1


AT_MOST: dict[str, tuple[int, Program]] = {
    "softmax": (3, lambda: stored(16, 16).softmax()),
    "log_softmax": (3, lambda: stored(16, 16).log_softmax()),
    "layer norm": (3, lambda: stored(16, 16).layer_norm(16, stored(16), stored(16))),
    "variance": (2, lambda: stored(16, 16).var()),
    "two matmuls": (2, lambda: (stored(16, 8) @ stored(8, 16)).relu() @ stored(16, 4)),
    "cross entropy": (4, lambda: stored(8, 4).cross_entropy(Tensor([0, 1, 2, 3, 3, 2, 1, 0]))),
    "attention": (
        5,
        lambda: stored(2, 8, 4).scaled_dot_product_attention(stored(2, 8, 4), stored(2, 8, 4), is_causal=True),
    ),
    "convolution and pooling": (2, lambda: stored(1, 1, 8, 8).conv2d(stored(2, 1, 3, 3)).relu().max_pool2d(2)),
    "argmax": (2, lambda: stored(8, 8).argmax(1)),
    "concatenation": (3, lambda: (stored(3, 4) + 1).cat(stored(2, 4)) * 2),
    "two outputs": (2, lambda: [stored(8) + 1, stored(8) * 2]),
}


@pytest.mark.parametrize("name", AT_MOST)
def test_few_kernels(name: str) -> None:
    most, program = AT_MOST[name]
    assert 1 <= len(kernels_of(program())) <= most


@pytest.mark.parametrize("dim", [0, 1])
def test_a_product_of_joined_values_is_the_join_and_the_product(dim: int) -> None:
    """Why it is not one kernel: docs/decisions/0007."""
    w = stored(4 if dim == 0 else 8, 5)
    assert len(kernels_of(Tensor.cat((stored(3, 4), stored(3, 4)), dim=dim) @ w)) == 2


@pytest.mark.parametrize("depth", [2, 30, 400])
def test_a_long_elementwise_chain_is_cut_only_where_a_kernel_gets_too_deep(depth: int) -> None:
    x = t = stored(32)
    for i in range(depth):
        t = t * 1.5 + float(i)
    assert len(kernels_of(t)) <= 1 + depth * 2 // 100
    want = np.float64(x.numpy())
    for i in range(depth):
        want = want * 1.5 + i
    if depth < 100:
        np.testing.assert_allclose(t.numpy(), want, rtol=1e-5)


def test_a_value_that_many_kernels_read_is_computed_once() -> None:
    x = stored(16, 16)
    h = (x @ x).exp()
    kernels = kernels_of([h @ stored(16, 4), h.sum(), h.amax(1)])
    assert len(kernels) == 4
    assert sum(any(u.op is Ops.EXP for u in k.toposort()) for k in kernels) == 1


def test_cheap_values_are_rather_computed_twice() -> None:
    x = stored(16, 16)
    h = x + 1
    assert len(kernels_of([h.sum(0), h.sum(1)])) == 2


def test_a_reduction_is_not_repeated_for_each_element_that_reads_it() -> None:
    x = stored(16, 16)
    kernels = kernels_of(x - x.sum(0, keepdim=True))  # (of rows: test_rows.py)
    assert len(kernels) == 2 and [len(reduce_ranges(k)) for k in kernels] == [1, 0]


# *** large reductions ***


@pytest.mark.parametrize("shape, dims", [((1 << 16,), None), ((300, 400), None), ((2, 1 << 16), 1), ((1 << 15, 3), 0)])
def test_a_large_reduction_with_few_outputs_is_two_kernels(shape: tuple[int, ...], dims: int | None) -> None:
    a = np.random.default_rng(0).integers(-9, 9, shape).astype(np.float32)
    t = Tensor(a).realize().sum(dims)
    first, second = kernels_of(t)
    outputs = [int(np.prod([r.src[0].arg for r in k.src[0].src[2:]])) for k in (first, second)]
    assert 32 <= outputs[0] // max(outputs[1], 1) <= 256  # parts in parallel, then their sum
    np.testing.assert_array_equal(t.numpy(), a.sum(dims))


@pytest.mark.parametrize("shape, dims", [((1 << 10, 1 << 10), 0), ((4096, 16), 1), ((1 << 14,), None)])
def test_others_stay_one(shape: tuple[int, ...], dims: int | None) -> None:
    assert len(kernels_of(stored(*shape).sum(dims))) == 1


# *** reductions that need no loop ***

N = 8
I8 = Tensor(np.arange(N)).realize()
COLLAPSING: dict[str, tuple[Program, object]] = {
    "a broadcast constant": (lambda: Tensor.full((4, N), 2.5).sum(1) + stored(4) * 0, np.full(4, 2.5 * N)),
    "a broadcast value": (lambda: stored(4).reshape(4, 1).expand(4, N).sum(1), np.full(4, N)),
    "its max": (lambda: stored(4).reshape(4, 1).expand(4, N).amax(1), np.ones(4)),
    "a count below": (lambda: (Tensor.arange(N) < 5).where(3.0, 0.0).sum() + stored(1) * 0, [15.0]),
    "a count by row": (
        lambda: (Tensor.arange(N).unsqueeze(0) <= Tensor.arange(N).unsqueeze(1)).where(1.0, 0.0).sum(1),
        np.arange(N) + 1,
    ),
    "a count above": (
        lambda: (Tensor.arange(N).unsqueeze(0) > Tensor.arange(N).unsqueeze(1)).where(2.0, 0.0).sum(1),
        2.0 * (N - 1 - np.arange(N)),
    ),
    "one of a range": (lambda: (Tensor.arange(N).eq(3)).where(stored(N), 0.0).sum(), 1.0),
    "a diagonal": (
        lambda: (Tensor.arange(N).unsqueeze(0).eq(Tensor.arange(N).unsqueeze(1))).where(stored(N, N), 0.0).sum(1),
        np.ones(N),
    ),
    "picked by index": (lambda: (I8[:4].unsqueeze(1).eq(Tensor.arange(N))).where(stored(4, N), 0.0).sum(1), np.ones(4)),
}


@pytest.mark.parametrize("name", COLLAPSING)
def test_no_loop_is_left(name: str) -> None:
    program, want = COLLAPSING[name]
    t = program()
    assert isinstance(t, Tensor)
    assert [reduce_ranges(k) for k in kernels_of(t)] == [[]]
    np.testing.assert_allclose(t.numpy(), want)


def test_cross_entropy_reads_one_element_a_row() -> None:
    """The row of log-probabilities is not multiplied by a one-hot row: the loop over classes is gone from the pick."""
    logp, y = stored(6, 50), Tensor(np.array([3, 49, 0, 7, 7, 1])).realize()
    (kernel,) = kernels_of(logp.nll_loss(y, reduction="none"))
    assert reduce_ranges(kernel) == []
    a = np.random.default_rng(0).standard_normal((6, 50)).astype(np.float32)
    np.testing.assert_allclose(Tensor(a).nll_loss(y, reduction="none").numpy(), -a[np.arange(6), y.numpy()])


def test_collapsing_outside_the_range_gives_zero() -> None:
    for k in (-1, 0, 7, 8, 100):
        i = Tensor(np.array([k])).realize()
        got = (Tensor.arange(N).eq(i)).where(stored(N), 0.0).sum().item()
        assert got == (1.0 if 0 <= k < N else 0.0)
        assert (Tensor.arange(N) < k).where(1.0, 0.0).sum().item() == min(max(k, 0), N)


# *** gradients ***


def test_the_gradient_of_an_embedding_is_one_scatter() -> None:
    w = stored(10, 4).requires_grad_()
    (w[INDEX] * 3).sum().backward()
    assert w.grad is not None
    kernels = kernels_of(w.grad)
    assert len(kernels) == 2 and [k.src[0].arg for k in kernels] == [None, "add"]
    assert len(linear_of(w.grad).src) == 3  # and the check of the indices


def test_a_layer_forward_and_backward_stays_small() -> None:
    x, w, b = stored(16, 8), stored(4, 8).requires_grad_(), stored(4).requires_grad_()
    loss = x.linear(w, b).relu().square().mean()
    loss.backward()
    assert w.grad is not None and b.grad is not None
    assert len(kernels_of([loss, w.grad, b.grad])) <= 6


def test_a_sum_of_products_of_stored_values_stores_no_product() -> None:
    """dy and the normalised x are stored for others; the gradient of a norm's weight multiplies them while it adds."""
    x, w, v = (stored(*s).requires_grad_() for s in ((32, 8), (8,), (8, 8)))
    (x.layer_norm(8, w) @ v).square().sum().backward()
    assert w.grad is not None and x.grad is not None
    weight = kernels_of([x.grad, w.grad])[-1]
    assert len({u.src[0] for u in weight.toposort() if u.op is Ops.INDEX}) >= 3  # two factors and the result


def test_parts_of_a_stored_value_are_read_where_they_lie() -> None:
    x, w = stored(6, 4), stored(4, 9)
    q, k, v = (x @ w).chunk(3, dim=-1)
    assert len(kernels_of(q @ k.T @ v)) == 3
