"""Stores that may meet at one address on CUDA: each thread has rows of the target of its own, and all are stored to in
the order of a CPU, so the bits are the same."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from manygrad import GlobalCounters, Tensor, nn
from manygrad.runtime.codegen.opts import Parallel
from manygrad.runtime.devices import get_device
from tests.cuda.install import emulated
from tests.cuda.test_warp_matrix import opts_of_kernels

RNG = np.random.default_rng(0)
Scatter = Callable[[Tensor, Tensor, Tensor], Tensor]


def gradient_of_rows(table: Tensor, at: Tensor, g: Tensor) -> Tensor:
    table = table.detach().requires_grad_()
    return (nn.functional.embedding(at, table) * g).sum().gradient(table)[0]


def stored(table: Tensor, at: Tensor, g: Tensor) -> Tensor:
    table = table.clone()
    table[at] = g
    return table


SCATTERS: dict[str, Scatter] = {
    "gradient of an embedding": gradient_of_rows,
    "index_add": lambda table, at, g: table.index_add(0, at, g),
    "the last stays": stored,
    "the greatest": lambda table, at, g: table.index_reduce(0, at, g, "amax"),
    "scatter_add": lambda table, at, g: table.scatter_add(0, at.unsqueeze(1).expand(g.shape), g),
    "along columns": lambda table, at, g: table.T.contiguous().index_add(1, at, g.T.contiguous()),
}


@pytest.mark.parametrize("rows", [2, 63, 64, 65, 200])
@pytest.mark.parametrize("columns", [1, 7, 24])
@pytest.mark.parametrize("name", SCATTERS)
def test_rows_are_stored_to_in_order(name: str, columns: int, rows: int) -> None:
    numbers = RNG.standard_normal((rows, columns)).astype(np.float32), RNG.integers(0, rows, 150)
    g = RNG.standard_normal((150, columns)).astype(np.float32)
    found = [
        SCATTERS[name](*(Tensor(x, device=device).realize() for x in (*numbers, g))).numpy()
        for device in ("CPU", "CUDA:0")
    ]
    np.testing.assert_array_equal(*found)


@emulated
def test_sums_that_are_scattered_are_made_once() -> None:
    """Each part would make them again."""
    shapes = (70, 16), (40, 16), (9, 10, 40)
    table, w, g = (Tensor(RNG.standard_normal(s).astype(np.float32), device="CUDA:0").realize() for s in shapes)
    at = RNG.integers(0, 70, (9, 10))
    table.requires_grad_()
    out = nn.functional.embedding(Tensor(at, device="CUDA:0").realize(), table).matmul(w.T)
    before = GlobalCounters.global_ops
    got = (out * g).sum().gradient(table)[0].numpy()
    once = 2 * 90 * 16 * 40
    assert once <= GlobalCounters.global_ops - before < 4 * once
    want = np.zeros((70, 16), np.float32)
    np.add.at(want, at.ravel(), (g.numpy() @ w.numpy()).reshape(90, 16))
    np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-4)


@emulated
def test_threads_have_rows_and_columns(monkeypatch: pytest.MonkeyPatch) -> None:
    get_device("CUDA:0").kernels.kernels.clear()
    found = opts_of_kernels(monkeypatch)
    table, at, g = (Tensor(x, device="CUDA:0").realize() for x in (
        np.zeros((130, 40), np.float32), RNG.integers(0, 130, 100), RNG.standard_normal((100, 40)).astype(np.float32),
    ))  # fmt: skip
    table.index_add(0, at, g).realize()
    assert Parallel(2) in [o for opts in found for o in opts]  # type: ignore[attr-defined]


def test_an_index_out_of_range_is_an_error_and_stores_nothing() -> None:
    table = Tensor(np.zeros((100, 4), np.float32), device="CUDA:0").realize()
    at = Tensor(np.array([*range(99), 100]), device="CUDA:0").realize()
    with pytest.raises(IndexError, match="100 is out of range"):
        table.index_add(0, at, Tensor.ones(100, 4, device="CUDA:0")).numpy()
