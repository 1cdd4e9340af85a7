"""Kernels that hand large temporaries to each other: which become a chain, how they are cut,
and what a mask leaves out."""

from __future__ import annotations

import numpy as np
import pytest

from manygrad import Context, Tensor, TinyJit
from manygrad.runtime.current import current
from manygrad.schedule.kernels import chain_kernels
from manygrad.schedule.order.plan_memory import MemoryPlan
from manygrad.tensor.uop import Ops, UOp, VarArg
from tests.schedule.programs import linear_of, stored

RNG = np.random.default_rng(0)
N, D = 256, 8  # rows, of which a chain has 16 blocks; what the kernels sum over


@pytest.fixture(autouse=True)
def fresh():  # type: ignore[no-untyped-def]
    """Schedules are made anew: tests change what a chain takes."""
    with Context(SCACHE=0):
        yield


def chained(x: Tensor, y: Tensor, z: Tensor) -> Tensor:
    """(N, D), (N, D), (N, D) -> (N, D) through two temporaries of N x N."""
    return (x @ y.T).softmax(-1) @ z


def test_temporaries_that_are_not_needed_together_share_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two parts of the columns one after the other: what is N x N / 2 of the second takes the place of the first's."""
    for name, value in {"SAVED_BYTES": 0, "AGAIN": 1000}.items():
        monkeypatch.setattr(chain_kernels, name, value)
    x, halves = stored(N, D), [(stored(N // 2, D), stored(N // 2, D)) for _ in range(2)]
    first, second = ((x @ y.T).exp() @ z for y, z in halves)
    (call,) = linear_of(first.contiguous() + second).src
    temps = call.src[0].arg.temps
    assert len(call.src[0].src) >= 4
    assert max(t.offset + t.nbytes for t in temps) < sum(t.nbytes for t in temps)


def ops_of(*tensors: Tensor) -> list[Ops]:
    return [c.src[0].op for c in linear_of(list(tensors)).src]


def test_three_kernels_are_one_call_and_their_temporaries_one_block() -> None:
    linear = linear_of(chained(stored(N, D), stored(N, D), stored(N, D)))
    (call,) = linear.src
    what = call.src[0]
    assert what.op is Ops.CHAIN and len(what.src) == 3 and what.arg.blocks == 16
    assert [t.nbytes for t in what.arg.temps] == [N // 16 * N * 4] * 2
    assert isinstance(linear.arg, MemoryPlan) and [p.nbytes for p in linear.arg.pools] == [2 * N // 16 * N * 4]
    for kernel in what.src:
        assert kernel.src[0].src[2].src[0].arg == N // 16  # the loop over rows is over one block's
        assert {u.arg for u in kernel.toposort() if u.op is Ops.DEFINE_VAR} <= {VarArg("block", 0, 15)}


@pytest.mark.parametrize("device", ["CPU", "PYTHON"])
@pytest.mark.parametrize("env", [{}, {"CHECK_OOB": 1}, {"VALIDATE_WITH_CPU": 1}, {"NOOPT": 1}, {"THREADS": 1}], ids=str)
def test_the_same_bits_as_without(device: str, env: dict[str, int], monkeypatch: pytest.MonkeyPatch) -> None:
    arrays = [RNG.standard_normal((N, D)).astype(np.float32) for _ in range(3)]
    with Context(**env):
        x, y, z = (Tensor(a, device=device).realize() for a in arrays)
        assert Ops.CHAIN in ops_of(chained(x, y, z))
        got = chained(x, y, z).numpy()
        monkeypatch.setattr(chain_kernels, "SAVED_BYTES", 1 << 40)
        assert Ops.CHAIN not in ops_of(chained(x, y, z))
        np.testing.assert_array_equal(got, chained(x, y, z).numpy())


def test_a_replay_runs_it_with_other_kernels_in_one_native_call() -> None:
    @TinyJit
    def step(x: Tensor, y: Tensor, z: Tensor) -> Tensor:
        return chained(x + 1, y, z).realize() * 2

    arrays = [RNG.standard_normal((N, D)).astype(np.float32) for _ in range(3)]
    want = chained(Tensor(arrays[0]) + 1, Tensor(arrays[1]), Tensor(arrays[2])).numpy() * 2
    for _ in range(4):
        got = step(*(Tensor(a).realize() for a in arrays)).numpy()
        np.testing.assert_array_equal(got, want)
    assert len(step.captured.items) == 1


def test_each_device_has_its_own() -> None:
    two = ("CPU:0", "CPU:1")
    arrays = [RNG.standard_normal((2, N, D)).astype(np.float32) for _ in range(3)]

    def attention(x: Tensor, y: Tensor, z: Tensor) -> Tensor:
        return (x @ y.transpose(-1, -2)).softmax(-1) @ z

    x, y, z = (Tensor(a).shard(two, 0).contiguous().realize() for a in arrays)
    assert ops_of(attention(x, y, z)) == [Ops.CHAIN, Ops.CHAIN]
    np.testing.assert_array_equal(attention(x, y, z).numpy(), attention(*map(Tensor, arrays)).numpy())


def test_a_chain_is_read_from_disk(tmp_path) -> None:  # type: ignore[no-untyped-def]
    from manygrad.schedule import create_linear, normalize
    from manygrad.schedule.cache import Schedules
    from tests.schedule.programs import sink_of

    world, store = current().world, current().schedules.store
    with Context(SCACHE=1, SPEC=0, DEBUG=0, CACHE_DIR=str(tmp_path)):
        graph = normalize(sink_of(chained(stored(N, D), stored(N, D), stored(N, D)))).graph
        first, again = create_linear(graph, world, Schedules(store)), Schedules(store)
        assert create_linear(graph, world, again) is first and again.loaded == 1
        assert first.src[0].src[0].op is Ops.CHAIN


# *** what is no chain ***


def test_what_others_read_stays_in_memory() -> None:
    x, y, z = stored(N, D), stored(N, D), stored(N, D)
    weights = (x @ y.T).softmax(-1).contiguous()
    # weights are a result, scores are not
    (call,) = [c for c in linear_of([weights @ z, weights]).src if c.src[0].op is Ops.CHAIN]
    assert len(call.src[0].arg.temps) == 1
    np.testing.assert_allclose((weights @ z).numpy(), np.ones((N, D)), rtol=1e-5)


def test_rows_must_be_the_same() -> None:
    x, y = stored(N, D), stored(N, D)
    assert Ops.CHAIN not in ops_of((x @ y.T).contiguous().sum(0))  # a sum over rows
    assert Ops.CHAIN not in ops_of((x @ y.T).contiguous().flip(0) * 2)  # other rows
    assert Ops.CHAIN not in ops_of((x @ y.T).contiguous().T.contiguous())  # rows as columns
    assert Ops.CHAIN in ops_of((x @ y.T).contiguous().sum(1))


def test_small_ones_are_left_alone() -> None:
    small = stored(64, D)
    assert Ops.CHAIN not in ops_of(chained(small, small, small))
    hidden = (stored(N, 64) @ stored(64, 64)).contiguous().exp() @ stored(64, 64)  # no larger than what it is made from
    assert Ops.CHAIN not in ops_of(hidden)
    prime = stored(1021, D)
    assert Ops.CHAIN not in ops_of(chained(prime, prime, prime))  # no blocks of equal size


# *** what a mask leaves out ***


def sizes_at(u: UOp, block: int) -> int:
    from manygrad.runtime.codegen.analysis.describe import evaluate_int

    return evaluate_int(u, {"block": block})


def test_columns_that_a_mask_leaves_out_are_not_computed() -> None:
    n = 512
    x, y, z = stored(n, D), stored(n, D), stored(n, D)
    out = x.unsqueeze(0).scaled_dot_product_attention(y.unsqueeze(0), z.unsqueeze(0), is_causal=True)
    (call,) = linear_of(out).src
    rows = n // call.src[0].arg.blocks
    for kernel in call.src[0].src:
        wide = [
            r.src[0]
            for r in kernel.toposort()
            if r.op is Ops.RANGE and sizes_at(r.src[0], call.src[0].arg.blocks - 1) == n
        ]
        assert wide
        for size in wide:
            assert [sizes_at(size, b) for b in range(n // rows)] == [
                -(-(b + 1) * rows // 64) * 64 for b in range(n // rows)
            ]


@pytest.mark.parametrize(("n", "rows"), [(128, 64), (256, 64), (512, 128)])
def test_blocks_that_a_mask_cuts_are_a_quarter_of_the_columns_or_as_many_as_are_cut_at_once(n: int, rows: int) -> None:
    x = stored(16 * 512 // n, n, 32)
    (masked,), (whole,) = (
        linear_of(x.scaled_dot_product_attention(x, x, is_causal=causal)).src for causal in (True, False)
    )
    assert (masked.src[0].arg.blocks, whole.src[0].arg.blocks) == (16 * 512 // rows, 16 * 512 // 128)


@pytest.mark.parametrize("n", [200, 256, 320])
@pytest.mark.parametrize("env", [{}, {"CHECK_OOB": 1}, {"NOOPT": 1}, {"DEVICE": "PYTHON"}], ids=str)
def test_upper_and_lower_triangles(n: int, env: dict[str, object], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chain_kernels, "SAVED_BYTES", 0)
    monkeypatch.setattr(chain_kernels, "MIN_BLOCKS", 4)
    rng = np.random.default_rng(n)
    a, b, c = (rng.uniform(-1, 1, (n, s)) for s in (D, D, 40))  # (no exponential is far larger than the others)
    with Context(**env):  # type: ignore[arg-type]
        x, y, z = (Tensor(v.astype(np.float32)).realize() for v in (a, b, c))
        keep = x.arange(n)
        for lower in (True, False):
            seen = (keep.unsqueeze(0) <= keep.unsqueeze(1)) if lower else (keep.unsqueeze(0) >= keep.unsqueeze(1))
            out = seen.where((x @ y.T).contiguous().exp(), 0.0).contiguous() @ z
            assert Ops.CHAIN in ops_of(out)
            want = (np.tril if lower else np.triu)(np.exp(a @ b.T)) @ c
            np.testing.assert_allclose(out.numpy(), want, rtol=1e-4, atol=1e-3)


def test_an_infinite_value_that_is_masked_out_does_not_matter() -> None:
    z = np.ones((N, D), np.float32)
    z[-64:] = np.inf
    x = stored(1, N, D)
    out = x.scaled_dot_product_attention(x, Tensor(z[None]), is_causal=True).numpy()
    assert np.isfinite(out[0, : N - 64]).all()
