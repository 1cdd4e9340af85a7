"""Symbolic sizes: one graph, one schedule and one kernel for every value of a bound variable."""

from __future__ import annotations

import numpy as np
import pytest

from manygrad import GlobalCounters, Tensor, TinyJit, Variable, nn
from manygrad.runtime.current import current
from manygrad.runtime.devices import get_device

A = np.arange(60, dtype=np.float32).reshape(10, 6)


@pytest.fixture
def t() -> Tensor:
    return Tensor(A).realize()


def n(value: int, name: str = "n", lo: int = 1, hi: int = 10):  # type: ignore[no-untyped-def]
    return Variable(name, lo, hi).bind(value)


@pytest.mark.parametrize("k", [1, 4, 10])
def test_slices_and_reductions(t: Tensor, k: int) -> None:
    part = t[: n(k)]
    assert not isinstance(part.shape[0], int) and part.shape[1] == 6
    for got, want in [
        (part.sum(), A[:k].sum()),
        (part.sum(0), A[:k].sum(0)),
        (part.amax(0), A[:k].max(0)),
        ((part * 2 + 1).sum(0), (A[:k] * 2 + 1).sum(0)),
        (part.T.sum(1), A[:k].sum(0)),
        (t[n(k) :].sum(), A[k:].sum()),
        (part.flip(0)[0], A[k - 1]),
        ((part.sum(1) * part.sum(1)).sum(), (A[:k].sum(1) ** 2).sum()),
        (part.exp().sum(1).log().sum(), np.log(np.exp(A[:k].astype(np.float64)).sum(1)).sum() if k < 4 else None),
    ]:
        if want is not None:
            np.testing.assert_allclose(got.numpy(), want, rtol=1e-5)


@pytest.mark.parametrize("k", [1, 2, 7, 10])
def test_what_counts_along_a_symbolic_dim(t: Tensor, k: int) -> None:
    """Means, variances, positions, scans and triangles, also of a capture that is replayed with other sizes."""
    x = Tensor(np.random.default_rng(2).permutation(A.ravel()).reshape(A.shape)).realize()
    of_columns = {
        "mean": lambda p: p.mean(0),
        "var": lambda p: p.var(0),
        "biased": lambda p: p.std(0, correction=0),
        "max": lambda p: p.max(0).values,
        "last": lambda p: p.max(0).indices,
        "argmin": lambda p: p.argmin(0),
        "cumsum": lambda p: p.cumsum(0).sum(0),
        "arange": lambda p: Tensor.arange(2, p.shape[0] + 2).sum(),
        "tril": lambda p: p.tril().sum(1, keepdim=True).sum(0),
        "count": lambda p: p.shape[0] * p.sum(0) - p.shape[0],
        "normal": lambda p: nn.functional.layer_norm(p.T, (p.shape[0],)).square().sum(1),
    }
    a = x.numpy()[:k].astype(np.float64)
    want = {
        "mean": a.mean(0),
        "var": a.var(0, ddof=1) if k > 1 else np.full(6, np.nan),
        "biased": a.std(0),
        "max": a.max(0),
        "last": a.argmax(0),
        "argmin": a.argmin(0),
        "cumsum": a.cumsum(0).sum(0),
        "arange": np.arange(2, k + 2).sum(),
        "tril": np.tril(a).sum(1, keepdims=True).sum(0),
        "count": k * a.sum(0) - k,
        "normal": ((a - a.mean(0)) ** 2 / (a.var(0) + 1e-5)).sum(0),
    }
    for name, fn in of_columns.items():
        step = TinyJit(lambda k, fn=fn: fn(x[:k]).realize())
        for other in (3, 5, k):
            got = step(n(other))
        np.testing.assert_allclose(got.numpy(), want[name], rtol=1e-5, err_msg=name)
        np.testing.assert_allclose(fn(x[: n(k)]).numpy(), want[name], rtol=1e-5, err_msg=name)


def test_an_element_and_a_number(t: Tensor) -> None:
    i = Variable("i", 0, 9)
    for k in (0, 3, 9):
        np.testing.assert_array_equal(t[i.bind(k)].numpy(), A[k])
        np.testing.assert_array_equal((t + i.bind(k)).numpy(), A + k)
        np.testing.assert_array_equal(t[i.bind(k), 2].numpy(), A[k, 2])


def test_matmul_over_a_symbolic_dim(t: Tensor) -> None:
    w = Tensor(np.random.default_rng(0).standard_normal((6, 4)).astype(np.float32))
    for k in (2, 7):
        out = t[: n(k)] @ w
        np.testing.assert_allclose(out.sum(0).numpy(), (A[:k] @ w.numpy()).sum(0), rtol=1e-4)
        np.testing.assert_allclose((t[: n(k)].T @ t[: n(k)]).numpy(), A[:k].T @ A[:k], rtol=1e-5)


def test_attention_over_a_growing_cache() -> None:
    """Two variables: the cache is written at a position and read up to it."""
    rng = np.random.default_rng(1)
    cache, want = Tensor(np.zeros((8, 4), np.float32)).realize(), np.zeros((8, 4), np.float32)
    pos = Variable("pos", 0, 7)
    for k in range(5):
        row, q = (rng.standard_normal(4).astype(np.float32) for _ in range(2))
        at = pos.bind(k)
        cache[at] = Tensor(row)
        want[k] = row
        scores = (cache[: n(k + 1, "length", 1, 8)] * Tensor(q)).sum(1)
        np.testing.assert_allclose(scores.exp().sum().item(), np.exp(want[: k + 1] @ q).sum(), rtol=1e-4)


def test_one_compilation_serves_all_values(t: Tensor) -> None:
    kernels, schedules = get_device("CPU").kernels.kernels, current().schedules

    def run(k: int) -> float:
        return (t[: n(k, "m")] * 3 + 0.125).sum().item()  # type: ignore[no-any-return]

    run(2)
    compiled, misses, hits = len(kernels), schedules.misses, schedules.hits
    for k in (1, 5, 10):
        before = GlobalCounters.kernel_count
        assert run(k) == (A[:k] * 3 + 0.125).sum()
        assert GlobalCounters.kernel_count == before + 1
    assert (len(kernels), schedules.misses, schedules.hits) == (compiled, misses, hits + 3)


def test_a_jit_step_takes_other_values(t: Tensor) -> None:
    step = TinyJit(lambda x, k: (x[:k] + 1).sum(0).realize())
    for k in (3, 4, 7, 1, 10):
        np.testing.assert_allclose(step(t, n(k)).numpy(), (A[:k] + 1).sum(0))


def test_two_values_in_one_graph_are_an_error(t: Tensor) -> None:
    with pytest.raises(
        ValueError, match="bind mismatch: variable 'n' is bound to 2 and to 3 in one graph; realize one"
    ):
        (t[: n(2)].sum() + t[: n(3)].sum()).realize()
    a, b = t[: n(2)].sum().realize(), t[: n(3)].sum().realize()
    assert (a + b).item() == A[:2].sum() + A[:3].sum()
    assert (t[: n(2)].sum() + t[: n(3, "other")].sum()).item() == A[:2].sum() + A[:3].sum()


def test_values_outside_the_range_are_refused() -> None:
    for bad in (0, 11, 2.5, "3"):
        with pytest.raises(ValueError, match=r"bind: variable 'n' ranges over 1\.\.10, got "):
            n(bad)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="smallest value 5 is above its largest 4"):
        Variable("x", 5, 4)
    n(np.int64(3))  # type: ignore[arg-type]


def test_what_needs_numbers_says_so(t: Tensor) -> None:
    part = t[: n(3)]
    with pytest.raises(ValueError, match=r"numpy\(\) needs a shape of numbers"):
        part.numpy()
    with pytest.raises(ValueError, match="a slice with symbolic bounds needs step 1"):
        t[: n(3) : 2]
    with pytest.raises(ValueError, match=r"reshape \[n=3, 6\] to \[18\]: \(n=3\*6\) elements are not 18"):
        part.reshape(18)
    with pytest.raises(ValueError, match="do not broadcast"):
        part + t
    with pytest.raises(
        ValueError, match=r"\[0, big=5\) can reach outside \[0, 10\]: it covers 0\.\.99; narrow the variable's range"
    ):
        t.shrink(((0, Variable("big", 1, 99).bind(5)), None))
    with pytest.raises(IndexError, match=r"index low=0 can be outside dim 0 of shape \[10, 6\].*narrow their ranges"):
        t[Variable("low", -1, 7).bind(0)]
    with pytest.raises(ValueError, match=r"numpy\(\) needs a shape of numbers, not \[n=3, 6\]; shrink"):
        part.numpy()
    for refused in (lambda: part.topk(2, 0), lambda: part.split(2), lambda: int(part.shape[0])):
        with pytest.raises(TypeError, match=r"n=3 is known when the program runs.*cut such a dim to a number first"):
            refused()
    with pytest.raises(ValueError, match=r"arange: the end \(n=3\+-2\) can be -1, below the start 0"):
        Tensor.arange(n(3) - 2)


def test_dims_of_equal_variables_fit_and_others_do_not(t: Tensor) -> None:
    a, b = t[: n(3)], t[: n(3)]
    assert (a + b).sum().item() == 2 * A[:3].sum()
    with pytest.raises(ValueError, match="do not broadcast"):
        a + t[: n(3, "other")]


def test_a_gradient_of_a_symbolic_slice_and_of_what_is_beside_it() -> None:
    x, w = Tensor(A, requires_grad=True), Tensor([2.0], requires_grad=True)
    (x[: n(4)] ** 2 * w).sum().backward()
    np.testing.assert_allclose(x.grad.numpy(), np.where(np.arange(10)[:, None] < 4, 4 * A, 0))  # type: ignore[union-attr]
    np.testing.assert_allclose(w.grad.numpy(), [(A[:4] ** 2).sum()])  # type: ignore[union-attr]


@pytest.mark.parametrize("size", [1, 4, 33])
def test_a_stride_of_symbolic_size_in_a_vector(size: int) -> None:
    """i // 192 · (p + 1) is the same in a vector of i, though neither factor is a constant."""
    rng = np.random.default_rng(size)
    base, b = rng.standard_normal((3, 64)).astype(np.float32), rng.standard_normal(576).astype(np.float32)
    p = Variable("p", 1, 63).bind(size)
    rows = (Tensor(base)[:, : p + 1] * 2).contiguous().realize()
    found = rows[:, 0:1].expand(3, 192).reshape(576) * Tensor(b)
    np.testing.assert_array_equal(found.numpy(), np.repeat(base[:, 0] * 2, 192) * b)
    table = rows[:, 0:1].expand(3, 192) + Tensor(b).reshape(3, 192)  # the same in two dims
    np.testing.assert_array_equal(table.numpy(), base[:, :1] * 2 + b.reshape(3, 192))
