"""The native reducers against NumPy, and programs inside one process."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from manygrad.collectives import reducers
from manygrad.collectives.algorithms import ALGORITHMS, build
from manygrad.collectives.execute import prepare, reduce_numpy, run_program
from manygrad.collectives.program import Collective
from manygrad.tensor.dtype import dtypes

from collective_tasks import values  # isort: skip

NAMES = [d.name for d in dtypes.all]


def same(a: np.ndarray, b: np.ndarray) -> bool:
    if a.dtype.kind == "V" or a.dtype.itemsize == 2:  # bfloat16 and float16: NaNs of any payload
        a, b = a.astype(np.float32), b.astype(np.float32)
    return np.array_equal(a, b, equal_nan=a.dtype.kind == "f")


@pytest.mark.parametrize("dtype", NAMES)
@pytest.mark.parametrize("op", ["add", "mul", "max", "min"])
def test_native_reducers_equal_numpy(dtype: str, op: str) -> None:
    for sources, count in ((2, 1), (2, 133), (5, 64), (17, 9001)):
        arrays = [values(dtype, count, r, seed=1) for r in range(sources)]
        if dtypes.all[NAMES.index(dtype)].is_float and count > 1:
            arrays[0][1], arrays[1][2], arrays[1][3] = np.nan, np.inf, -np.inf
        out = np.zeros(count, arrays[0].dtype)
        reducers.reducer(op, dtype, (dtype,) * sources)(out.ctypes.data, [a.ctypes.data for a in arrays], count)
        assert same(out, reducers.reduce_arrays(arrays, op, dtypes.all[NAMES.index(dtype)])), (sources, count)


@pytest.mark.parametrize("half", ["float16", "bfloat16"])
def test_half_types_are_rounded_once(half: str) -> None:
    d = dtypes.all[NAMES.index(half)]
    big, small = np.array([256.0], d.np), np.array([0.5], d.np)
    out, wide = np.zeros(1, d.np), np.zeros(1, np.float32)
    reducers.reducer("add", half, (half,) * 5)(
        out.ctypes.data, [a.ctypes.data for a in (big, small, small, small, small)], 1
    )
    assert float(out[0]) == 258.0  # rounding after each addition would lose every half
    reducers.reducer("add", "float32", (half, half))(wide.ctypes.data, [big.ctypes.data, small.ctypes.data], 1)
    assert wide[0] == 256.5
    reducers.reducer("add", half, ("float32", half))(out.ctypes.data, [wide.ctypes.data, big.ctypes.data], 1)
    assert float(out[0]) == float(np.float32(512.5).astype(d.np))


def test_unaligned_sources_and_in_place() -> None:
    raw = np.zeros(1000, np.uint8)
    a, b = raw[4:404].view(np.float32), raw[500:900].view(np.float32)
    a[:], b[:] = 1.5, 2.0
    reducers.reducer("add", "float32", ("float32", "float32"))(a.ctypes.data, [a.ctypes.data, b.ctypes.data], 100)
    assert (a == 3.5).all() and raw[404] == 0


def test_mixed_types_are_refused() -> None:
    for dst, src in (("int32", "float32"), ("float64", "float32")):
        with pytest.raises(TypeError, match="cannot reduce"):
            reducers.reducer("add", dst, (src, src))


def in_one_process(algorithm: str, c: Collective, dtype: str, reduce_fn=reducers.reducer) -> list[np.ndarray]:
    item = values(dtype, 1, 0).dtype
    ins = [values(dtype, c.in_length(r), r) for r in range(c.ranks)]
    outs = [np.zeros(c.out_length(r), item) for r in range(c.ranks)]
    addresses = {r: {"in": ins[r].ctypes.data, "out": outs[r].ctypes.data} for r in range(c.ranks)}
    run_program(build(algorithm, c), addresses, dtype, reduce_fn=reduce_fn)
    return outs


@settings(max_examples=40, deadline=None)
@given(
    st.sampled_from(NAMES), st.integers(1, 9), st.integers(0, 50), st.sampled_from(["add", "max"]),
    st.sampled_from(["naive", "direct", "halving_doubling"]),
)  # fmt: skip
def test_all_reduce_in_one_process_equals_the_tree_of_numpy(
    dtype: str, ranks: int, count: int, op: str, algorithm: str
) -> None:
    if not ALGORITHMS[algorithm].can("all_reduce", ranks):
        algorithm = "direct"
    want = reducers.reduce_arrays([values(dtype, count, r) for r in range(ranks)], op, dtypes.all[NAMES.index(dtype)])
    for reduce_fn in (reducers.reducer, reduce_numpy):
        for out in in_one_process(algorithm, Collective("all_reduce", ranks, count, op), dtype, reduce_fn):
            assert out.tobytes() == want.tobytes()


def test_ring_in_one_process() -> None:
    for out in in_one_process("ring", Collective("all_reduce", 5, 23), "bfloat16"):
        want = sum(values("bfloat16", 23, r).astype(np.float64) for r in range(5))
        np.testing.assert_allclose(out.astype(np.float64), want, rtol=0.01, atol=0.1)


def test_overlapping_buffers_are_refused() -> None:
    a = np.zeros(8, np.float32)
    with pytest.raises(ValueError, match="overlap"):
        run_program(
            build("naive", Collective("all_reduce", 1, 8)), {0: {"in": a.ctypes.data, "out": a.ctypes.data}}, "float32"
        )


def test_prepared_refuses_foreign_ranks() -> None:
    c = Collective("all_reduce", 2, 4)
    with pytest.raises(ValueError, match="of other workers"):
        prepare(build("direct", c), "float32", rank_to_worker=[0, 1])
    with pytest.raises(ValueError, match="no endpoint"):
        prepare(build("direct", c, {0}), "float32", rank_to_worker=[0, 1])
