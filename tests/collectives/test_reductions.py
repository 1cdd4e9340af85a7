"""The kernels that reduce against NumPy, and calls of one process's ranks."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from manygrad.collectives.algorithms import ALGORITHMS, build
from manygrad.collectives.lower import lower
from manygrad.collectives.program import Collective
from manygrad.collectives.reduction import reduction
from manygrad.runtime.buffer import Buffer
from manygrad.runtime.devices import get_device
from manygrad.runtime.exchange.exchange import Exchange
from manygrad.tensor.dtype import DType, dtypes, to_dtype

from collective_tasks import values  # isort: skip
from tests.collectives.oracle import reduce_arrays

NAMES = [d.name for d in dtypes.all]


def same(a: np.ndarray, b: np.ndarray) -> bool:
    if a.dtype.kind == "V" or a.dtype.itemsize == 2:  # bfloat16 and float16: NaNs of any payload
        a, b = a.astype(np.float32), b.astype(np.float32)
    return np.array_equal(a, b, equal_nan=a.dtype.kind == "f")


def held(array: np.ndarray, d: DType, device: str) -> Buffer:
    return Buffer(device, array.size, d).copyin(array)


def reduced(op: str, target: str, arrays: list[np.ndarray], sources: list[str], device: str = "CPU") -> np.ndarray:
    kernel = reduction(op, arrays[0].size, to_dtype(target), [to_dtype(s) for s in sources])
    out = Buffer(device, arrays[0].size, to_dtype(target))
    ins = [held(a, to_dtype(s), device) for a, s in zip(arrays, sources)]
    get_device(device).compile(kernel)([b.handle for b in (out, *ins)])
    return out.copyout()


@pytest.mark.parametrize("dtype", NAMES)
@pytest.mark.parametrize("op", ["add", "mul", "max"])
def test_reductions_equal_numpy(dtype: str, op: str) -> None:
    for sources, count in ((2, 1), (2, 133), (5, 64), (16, 9001)):
        arrays = [values(dtype, count, r, seed=1) for r in range(sources)]
        if to_dtype(dtype).is_float and count > 1:
            arrays[0][1], arrays[1][2], arrays[1][3] = np.nan, np.inf, -np.inf
        want = reduce_arrays(arrays, op, to_dtype(dtype))
        assert same(reduced(op, dtype, arrays, [dtype] * sources), want), (sources, count)


@pytest.mark.parametrize("half", ["float16", "bfloat16"])
def test_half_types_are_rounded_once(half: str) -> None:
    d = to_dtype(half)
    big, small = np.array([256.0], d.np), np.array([0.5], d.np)
    total = reduced("add", half, [big, small, small, small, small], [half] * 5)
    assert float(total[0]) == 258.0  # rounding after each addition would lose every half
    wide = reduced("add", "float32", [big, small], [half, half])
    assert wide[0] == 256.5
    assert float(reduced("add", half, [wide, big], ["float32", half])[0]) == float(np.float32(512.5).astype(d.np))


def test_sources_at_any_element() -> None:
    raw = held(np.arange(200, dtype=np.float32), dtypes.float32, "CPU")
    out = Buffer("CPU", 100, dtypes.float32)
    kernel = get_device("CPU").compile(reduction("add", 99, dtypes.float32, [dtypes.float32] * 2))
    kernel([b.handle for b in (out.view(99, dtypes.float32, 4), raw.view(99, dtypes.float32, 12), raw)])
    assert (out.copyout()[1:] == np.arange(3, 102) + np.arange(99)).all()


def test_mixed_types_are_refused() -> None:
    for target, source in ((dtypes.int32, dtypes.float32), (dtypes.float64, dtypes.float32)):
        with pytest.raises(TypeError, match="cannot reduce"):
            reduction("add", 4, target, [source, source])


def in_one_process(algorithm: str, c: Collective, dtype: str, devices: list[str]) -> list[np.ndarray]:
    d, ranks = to_dtype(dtype), range(c.ranks)
    names = {r: devices[r % len(devices)] for r in ranks}
    on_host = lambda name: get_device(name).allocator.host is not None  # noqa: E731
    body = lower(build(algorithm, c), d, [0] * c.ranks, names, on_host=on_host)
    outs = [held(np.zeros(c.out_length(r), d.np), d, names[r]) for r in ranks]
    ins = [held(values(dtype, c.in_length(r), r), d, names[r]) for r in ranks]
    temps = [Buffer(t.device, t.size, t.dtype) for t in body.temps]
    Exchange(body.linear, [*outs, *ins, *temps], c.ranks, None).run(0, 0)
    return [b.copyout() for b in outs]


@settings(max_examples=40, deadline=None)
@given(
    st.sampled_from(NAMES), st.integers(1, 40), st.integers(0, 50), st.sampled_from(["add", "max"]),
    st.sampled_from(["naive", "direct", "halving_doubling"]), st.sampled_from([["CPU:0", "CPU:1"], ["PYTHON"]]),
)  # fmt: skip
def test_all_reduce_in_one_process_equals_the_tree_of_numpy(
    dtype: str, ranks: int, count: int, op: str, algorithm: str, devices: list[str]
) -> None:
    if not ALGORITHMS[algorithm].can("all_reduce", ranks):
        algorithm = "direct"
    want = reduce_arrays([values(dtype, count, r) for r in range(ranks)], op, to_dtype(dtype))
    for out in in_one_process(algorithm, Collective("all_reduce", ranks, count, op), dtype, devices):
        assert out.tobytes() == want.tobytes()


def test_ring_in_one_process() -> None:
    for out in in_one_process("ring", Collective("all_reduce", 5, 23), "bfloat16", ["CPU"]):
        want = sum(values("bfloat16", 23, r).astype(np.float64) for r in range(5))
        np.testing.assert_allclose(out.astype(np.float64), want, rtol=0.01, atol=0.1)


def test_overlapping_buffers_are_refused() -> None:
    body = lower(build("naive", Collective("all_reduce", 1, 8)), dtypes.float32, [0], {0: "CPU"})
    whole = held(np.zeros(12, np.float32), dtypes.float32, "CPU")
    ends = [whole.view(8, dtypes.float32, 0), whole.view(8, dtypes.float32, 16)]
    with pytest.raises(ValueError, match="overlap"):
        Exchange(body.linear, ends, 1, None).run(0, 0)


def test_what_is_of_other_workers_is_refused() -> None:
    c = Collective("all_reduce", 2, 4)
    with pytest.raises(ValueError, match="of the workers"):
        lower(build("direct", c), dtypes.float32, [0, 1], {0: "CPU", 1: "CPU"})
    body = lower(build("direct", c, {0}), dtypes.float32, [0, 1], {0: "CPU"})
    ends = [Buffer("CPU", 4, dtypes.float32) for _ in range(2)]
    with pytest.raises(ValueError, match="no endpoint"):
        Exchange(body.linear, ends, 1, None)
