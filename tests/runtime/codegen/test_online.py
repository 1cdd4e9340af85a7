"""A maximum and the sum of exponentials below it in one pass: when, and what it computes;
sums down the rows, some rows at a time."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from manygrad.runtime.codegen.analysis.describe import signature
from manygrad.runtime.codegen.kernel.online import online_pairs
from manygrad.runtime.codegen.opts import Online, Opt, RFactor, Unroll, Vectorize, legal, neighbours
from manygrad.runtime.codegen.pipeline import prepare
from manygrad.runtime.devices.target import host_target
from manygrad.tensor.dtype import dtypes
from manygrad.tensor.environment import Context
from manygrad.tensor.uop.ops import Ops
from manygrad.tensor.uop.uop import UOp
from tests.runtime.codegen.kernels import add, f32, load, logsumexp, loop, mul, red, reduce, run, sink, store
from tests.runtime.codegen.test_memory import softmax
from tests.runtime.codegen.test_opts import run_with, values

LANES = host_target().machine.vector_bytes // 4
ONLINE = (RFactor(1, LANES), RFactor(2, LANES), Online(2, 1))


def rows(m: int, n: int) -> np.ndarray:
    """What is ordinary, what overflows, and rows of which the result is not finite."""
    x = values(0, f32, m * n).reshape(m, n) * 30
    special = [-np.inf, np.inf, np.nan, -3.4028235e38, 3.4028235e38, -1e5]
    x[: len(special)] = np.array(special, np.float32)[:m, None]
    for i, v in enumerate(special):
        for row in (len(special) + i, 2 * len(special) + i):
            if row < m:
                x[row, (i * 7) % n :: n if row % 2 else 3] = v
    x[-1] = np.sort(x[-1])  # every vector raises the maximum
    return x


def test_chosen_for_long_rows_of_which_only_the_sum_is_needed() -> None:
    kinds = lambda ast: [o.kind for o in prepare(ast, host_target().machine).opts]  # noqa: E731
    assert "online" in kinds(logsumexp(8, 1024)) and "online" in kinds(logsumexp(8, 50257, True))
    assert "online" not in kinds(logsumexp(8, 100)) and "online" not in kinds(softmax(8, 1024))


@pytest.mark.parametrize("guarded", [False, True])
@pytest.mark.parametrize("n", [512, 1000, 1033])
def test_as_two_passes(n: int, guarded: bool) -> None:
    ast, x = logsumexp(24, n, guarded), rows(24, n)
    arrays = [np.zeros(24, np.float32), x]
    chosen = prepare(ast, host_target().machine).opts
    twice = run_with(ast, arrays, tuple(o for o in chosen if o.kind in ("rfactor", "parallel")))
    once = run_with(ast, arrays, chosen)
    with Context(CHECK_OOB=1):
        np.testing.assert_array_equal(run_with(ast, arrays, chosen), once)
    assert any(o.kind == "online" for o in chosen)
    np.testing.assert_allclose(once, twice, rtol=3e-7)
    finite = np.isfinite(twice)
    np.testing.assert_array_equal(once[~finite], twice[~finite])
    assert 0 < finite.sum() < 24
    with np.errstate(all="ignore"):
        top = x.astype(np.float64).max(1)
        want = np.log(np.exp(x - top[:, None]).sum(1)) + top
    np.testing.assert_allclose(once[finite], want[finite], rtol=1e-6)


def test_of_float64() -> None:
    x = values(0, dtypes.float64, 4 * 600).reshape(4, 600) * 100
    ast, lanes = logsumexp(4, 600, d=dtypes.float64), RFactor(2, LANES // 2)
    got = run_with(ast, [np.zeros(4), x], (RFactor(1, LANES // 2), lanes, Online(2, 1), Unroll(2, LANES)))
    np.testing.assert_allclose(got, np.log(np.exp(x - x.max(1, keepdims=True)).sum(1)) + x.max(1), rtol=1e-14)


@settings(max_examples=40, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow])
@given(st.data())
def test_any_steps_of_the_search(data: st.DataObject) -> None:
    m, n = data.draw(st.sampled_from([1, 3, 24])), data.draw(st.sampled_from([1, 15, 64, 130]))
    ast = logsumexp(m, n, data.draw(st.booleans()))
    legalized = prepare(ast, host_target().machine, (), simplify=False).ast
    opts: tuple[Opt, ...] = ONLINE
    for _ in range(data.draw(st.integers(0, 4))):
        opts = data.draw(st.sampled_from(neighbours(signature(legalized), opts, LANES, sums_may_change=True)))
    arrays = [np.zeros(m, np.float32), rows(m, n)]
    with np.errstate(all="ignore"):
        want = run(ast, arrays)[0]
    np.testing.assert_allclose(run_with(ast, arrays, opts, simplify=False), want, rtol=2e-6, atol=1e-6)


def test_what_it_is_not() -> None:
    """Another base, another value, a factor, the maximum of other elements; opts without lanes or with what is kept."""
    i, k, j = loop(8, 0), red(600, 1), red(600, 2)
    at = lambda r: load(1, add(mul(i, 600), r))  # noqa: E731
    top, other = reduce(at(k), k, op=Ops.MAX), reduce(load(2, add(mul(i, 600), k)), k, op=Ops.MAX)
    e = at(j).alu(Ops.SUB, top).alu(Ops.EXP)
    chosen_by_value = top.alu(Ops.CMPLT, UOp.const(f32, 5.0)).alu(Ops.WHERE, top, UOp.const(f32, 0.0))
    for value in (
        mul(e, 2.0), e.alu(Ops.MUL, at(j)), e.alu(Ops.EXP), at(j).alu(Ops.SUB, other).alu(Ops.EXP),
        at(j).alu(Ops.SUB, chosen_by_value).alu(Ops.EXP),
        at(j).alu(Ops.ADD, top).alu(Ops.EXP), top.alu(Ops.SUB, at(j)).alu(Ops.EXP),
    ):  # fmt: skip
        assert online_pairs(signature(sink(store(0, i, reduce(value, j), i)))) == []
    ast = logsumexp(8, 600)
    assert legal(signature(ast), ONLINE) is None
    for opts in (ONLINE[2:], (*ONLINE[:2], Online(1, 2)), (*ONLINE, Vectorize(0, 8))):
        assert "online" in (legal(signature(ast), opts) or "") or "lanes" in (legal(signature(ast), opts) or "")


@pytest.mark.parametrize(("m", "n"), [(2048, 1024), (5000, 520), (3001, 1500)])
def test_sums_down_the_rows_have_the_same_bits(m: int, n: int) -> None:
    """In blocks of rows, each core's sums in the first cache, or column by column."""
    j, r = loop(n, 0), red(m, 1)
    ast = sink(store(0, j, reduce(load(1, add(mul(r, n), j)), r), j))
    chosen = prepare(ast, replace(host_target().machine, cores=2)).opts
    arrays = [np.zeros(n, np.float32), values(0, f32, m * n)]
    assert {"block", "reduce_block"} <= {o.kind for o in chosen}
    bare = tuple(o for o in chosen if o.kind not in ("block", "reduce_block"))
    np.testing.assert_array_equal(run_with(ast, arrays, chosen), run_with(ast, arrays, bare))


def test_sums_of_what_is_not_read() -> None:
    """Down the rows of what is computed from the indices alone."""
    i, r = loop(64, 0), red(128, 1)
    ast = sink(store(0, i, reduce(add(mul(i, 3), mul(r, r)).cast(f32), r), i))
    want = (np.arange(64)[:, None] * 3 + np.arange(128) ** 2).sum(1)
    np.testing.assert_array_equal(run(ast, [np.zeros(64, np.float32)], device="CPU")[0], want)
