"""A reduction of a reduction is one kernel where that is as fast, with the bits of the reduction over all its dims."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from manygrad import Tensor
from manygrad.tensor.uop import Ops
from tests.schedule.programs import kernels_of, linear_of, reduce_ranges, stored

Program = Callable[[Tensor], Tensor]
RNG = np.random.default_rng(0)

MERGED: dict[str, tuple[Program, Program]] = {
    "last two dims": (lambda x: x.sum(2).sum(1), lambda x: x.sum((1, 2))),
    "all dims, columns first": (lambda x: x.sum(1).sum(), lambda x: x.sum()),
    "with dims kept": (lambda x: x.sum(2, keepdim=True).sum(1, keepdim=True), lambda x: x.sum((1, 2), keepdim=True)),
    "three in a row": (lambda x: x.sum(2).sum(1).sum(0), lambda x: x.sum()),
    "maxima": (lambda x: x.amax(2).amax(1), lambda x: x.amax((1, 2))),
    "products": (lambda x: x.prod(2).prod(1), lambda x: x.prod((1, 2))),
    "dims of size 1 between": (
        lambda x: x.sum(2).unsqueeze(0).unsqueeze(3).sum(2),
        lambda x: x.sum((1, 2))[None, :, None],
    ),
    "of what is computed": (lambda x: (x.relu() * 2).sum(2).sum(1), lambda x: (x.relu() * 2).sum((1, 2))),
    "of half the precision, added up in float32": (
        lambda x: x.bfloat16().sum(2, dtype="float32").sum(1),
        lambda x: x.bfloat16().sum((1, 2), dtype="float32"),
    ),
}

APART: dict[str, Program] = {
    "a sum of maxima": lambda x: x.amax(2).sum(1),
    "a rounded sum": lambda x: x.bfloat16().sum(2).sum(1),
    "something in between": lambda x: x.sum(2).exp().sum(1),
    "rows, then columns": lambda x: x.sum(2).sum(0),
    "a contraction": lambda x: (x.reshape(12, 5) @ stored(5, 7)).sum(1),
    "a transposed value": lambda x: x.permute(0, 2, 1).sum(2).sum(1),
}


@pytest.mark.parametrize("name", MERGED)
def test_reductions_of_one_op_are_one_kernel(name: str) -> None:
    nested, at_once = MERGED[name]
    x = Tensor(RNG.standard_normal((3, 4, 5)).astype(np.float32)).realize()
    assert len(kernels_of(nested(x))) == 1
    np.testing.assert_array_equal(nested(x).numpy(), at_once(x).numpy())


@pytest.mark.parametrize("name", APART)
def test_what_one_kernel_would_not_do_as_well_is_two(name: str) -> None:
    assert len(kernels_of(APART[name](stored(3, 4, 5)))) == 2


def test_a_reduction_that_others_read_is_kept() -> None:
    rows = stored(3, 4, 5).sum(2)
    assert len(kernels_of([rows, rows.sum(1)])) == 2
    assert len(kernels_of([rows.sum(1), rows.exp()])) == 2


def test_a_large_sum_is_cut_into_rows_whatever_order_it_is_written_in() -> None:
    assert kernels_of(Tensor.empty(64, 512, 512).sum(1).sum()) == kernels_of(Tensor.empty(64, 512, 512).sum())
    assert len(kernels_of(Tensor.empty(64, 512, 512).sum(2).sum(1))) == 2  # the rows in parallel, then their sums
    assert len(kernels_of(Tensor.empty(2, 211, 223).sum(2).sum(1))) == 2  # 47,053 have no good rows: as written


def test_long_sums_are_cut_into_rows_however_many_there_are() -> None:
    for count in (8, 4096):
        (*_, call) = linear_of(Tensor.empty(count, 256, 256).sum(2).sum(1)).src
        last = call.src[0].src[-1] if call.src[0].op is Ops.CHAIN else call.src[0]
        assert reduce_ranges(last) == [64]


@pytest.mark.parametrize("shape", [(32, 7, 9), (40, 192, 256), (33, 3, 5)])
@pytest.mark.parametrize(
    ("f", "axis"),
    [
        *((lambda x: x.sum(2).sum(1), axis) for axis in range(3)),
        *((lambda x: x.sum(1).sum(), axis) for axis in range(3)),
        (lambda x: x.sum(2).sum(), 0),
        (lambda x: x.sum(2).sum(), 2),
    ],
)
def test_the_bits_are_those_of_one_device_on_any_number(f: Program, axis: int, shape: tuple[int, ...]) -> None:
    data = np.moveaxis(RNG.standard_normal(shape).astype(np.float32), 0, axis)
    devices = [tuple(f"CPU:{i}" for i in range(n)) for n in (1, 2, 4, 8)]
    found = [f(Tensor(data).shard(d, axis).contiguous().realize()).numpy() for d in devices]
    for got in found:
        np.testing.assert_array_equal(got, found[0])
    np.testing.assert_allclose(found[0], f(Tensor(data.astype(np.float64))).numpy(), rtol=1e-3, atol=1e-2)


def test_a_dim_that_is_cut_is_merged_where_it_is_the_first() -> None:
    devices = ("CPU:0", "CPU:1")
    local = {axis: Tensor.empty(8, 8, 8).shard(devices, axis).contiguous().realize() for axis in (0, 1)}
    merged, kept = ([k for k in linear_of(local[a].sum(2).sum(1)).src if k.src[0].op is Ops.SINK] for a in (0, 1))
    assert len(merged) == 2 and len(kept) > 2
