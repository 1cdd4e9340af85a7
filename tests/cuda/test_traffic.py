"""What kernels move on a GPU, counted by the emulator: a warp's accesses touch whole sectors of memory, so threads side
by side have to read what lies side by side."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import pytest

from manygrad import Tensor
from manygrad.nn import functional as F
from tests.cuda.install import emulated, emulator
from tests.cuda.memory import Traffic

RNG = np.random.default_rng(0)


def traffic_of(f: Callable[..., Tensor], *shapes: tuple[int, ...]) -> Traffic:
    """Of the kernels of one call, whose inputs are there."""
    arrays = [RNG.standard_normal(s).astype(np.float32) for s in shapes]
    given = [Tensor(a, device="CUDA:0").realize() for a in arrays]
    memory = emulator().memories[0]
    memory.traffic = Traffic()
    try:
        result = f(*given).numpy()
        found = memory.traffic
    finally:
        memory.traffic = None
    np.testing.assert_allclose(result, f(*map(Tensor, arrays)).numpy(), rtol=1e-4, atol=1e-4)
    return found


# (how many times each input is read, and each result written, at most)
CASES: dict[str, tuple[Callable[..., Tensor], list[tuple[int, ...]], float]] = {
    "add": (lambda a, b: a + b, [(256, 512)] * 2, 3),
    "add a row": (lambda a, b: a + b, [(256, 512), (512,)], 3.1),
    "gelu": (lambda a: F.gelu(a), [(256, 512)], 2),
    "sum of rows": (lambda a: a.sum(1), [(256, 1024)], 1.1),
    "sum of columns": (lambda a: a.sum(0), [(256, 1024)], 1.1),
    "sum of all": (lambda a: a.sum(), [(512, 512)], 1.1),
    "softmax": (lambda a: a.softmax(), [(64, 1024)], 4.1),
    "layer norm": (lambda a: F.layer_norm(a, (768,)), [(64, 768)], 4.1),
    "logsumexp": (lambda a: a.logsumexp(1), [(64, 1024)], 2.1),
    "transpose": (lambda a: a.T.contiguous(), [(256, 256)], 9.1),  # (eight warps of a block read the same sectors)
    "matrix times vector": (lambda a, b: a @ b, [(256, 1024), (1024,)], 2.1),
}


@emulated
@pytest.mark.parametrize("name", CASES)
def test_a_warp_moves_little_more_than_it_asks_for(name: str) -> None:
    f, shapes, most = CASES[name]
    moved = traffic_of(f, *shapes).moved
    assert moved <= most * 4 * math.prod(shapes[0]), moved / (4 * math.prod(shapes[0]))


@emulated
@pytest.mark.parametrize("layout", ["NN", "NT", "TN"])
def test_a_product_reads_its_operands_once_a_block(layout: str) -> None:
    """Each of 64 columns or rows: 1/64 of what each multiplication would read; with both operands in shared memory."""
    n = 256
    f = {"NN": lambda a, b: a @ b, "NT": lambda a, b: a @ b.T, "TN": lambda a, b: a.T @ b}[layout]
    moved = traffic_of(f, (n, n), (n, n)).moved
    assert moved <= 1.2 * (2 * 4 * n**3 / 64 + 4 * n * n), moved


@emulated
def test_the_counter_sees_accesses_that_are_apart() -> None:
    one = Traffic()
    one.count(np.zeros(32, int), np.arange(32) * 4, 4)
    assert (one.asked, one.moved) == (128, 128)
    one.count(np.zeros(32, int), np.arange(32) * 128, 4)
    assert (one.asked, one.moved) == (256, 128 + 32 * 32)


def test_the_counter_sees_reads_that_meet_in_a_bank() -> None:
    threads = np.arange(32)
    for step, nbytes, reads, turns in (
        (4, 4, 1, 1),
        (8, 4, 1, 2),
        (128, 4, 1, 32),
        (0, 4, 1, 1),
        (16, 16, 4, 4),
        (32, 16, 4, 8),
    ):
        one = Traffic()
        one.count_banks(threads, threads * step, nbytes)
        assert (one.reads, one.turns) == (reads, turns), (step, nbytes)


@emulated
def test_a_sum_down_long_columns_is_cut_into_parts() -> None:
    """A thread would go down a whole column; along rows the threads of a group share one."""
    from manygrad.runtime.devices import get_device

    for dim, kernels in ((0, 2), (1, 1)):
        x = Tensor(RNG.standard_normal((1024, 1024)).astype(np.float32), device="CUDA:0").realize()
        before = emulator().counts["kernels"]
        x.sum(dim).realize()
        get_device("CUDA:0").synchronize()
        assert emulator().counts["kernels"] - before == kernels, dim
