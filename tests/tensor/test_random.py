"""Random numbers: distribution, seeds, the same numbers at any sharding, fresh numbers from a replayed JIT."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import pytest

from manygrad import Context, Tensor, TinyJit, dtypes

N = 40_000


def reference_philox(counter: np.ndarray, key: int) -> np.ndarray:
    """Philox 2x32-10 as in the paper (Salmon et al. 2011), word 0, in Python's integers."""
    out = []
    for c in counter:
        left, right, k = int(c), 0, key
        for _ in range(10):
            product = left * 0xD256D193
            left, right = (product >> 32) ^ k ^ right, product & 0xFFFFFFFF
            k = (k + 0x9E3779B9) & 0xFFFFFFFF
        out.append(left)
    return np.array(out, np.uint32)


def test_bits_are_philox() -> None:
    from manygrad.tensor.ops.random import philox

    counter = np.array([0, 1, 2, 77, 2**31, 2**32 - 1], np.uint32)
    for key in (0, 1, 0xDEADBEEF, 2**32 - 1):
        got = philox(Tensor(counter), Tensor(np.array([key], np.uint32)))[0]
        np.testing.assert_array_equal(got.numpy(), reference_philox(counter, key))


def test_uniform() -> None:
    x = Tensor.rand(N).numpy().astype(np.float64)
    assert x.min() >= 0 and x.max() < 1 and len(np.unique(x)) > 0.99 * N
    assert abs(x.mean() - 0.5) < 5 / math.sqrt(12 * N) and abs(x.var() - 1 / 12) < 0.003
    histogram = np.histogram(x, 20, (0, 1))[0]
    assert ((histogram - N / 20) ** 2 / (N / 20)).sum() < 45  # chi-square, 19 degrees: p = 0.0007
    assert abs(np.corrcoef(x[:-1], x[1:])[0, 1]) < 0.03
    y = Tensor.uniform(N, low=-2, high=6).numpy()
    assert -2 <= y.min() < -1.99 and 5.99 < y.max() < 6


def test_normal() -> None:
    x = Tensor.randn(N).numpy().astype(np.float64)
    assert np.isfinite(x).all()
    assert abs(x.mean()) < 5 / math.sqrt(N) and abs(x.std() - 1) < 0.02
    assert abs((x**3).mean()) < 0.1 and abs((x**4).mean() - 3) < 0.2
    assert abs((np.abs(x) > 1.96).mean() - 0.05) < 0.006


def test_integers() -> None:
    x = Tensor.randint(N, low=-3, high=4)
    assert x.dtype is dtypes.int64
    values, counts = np.unique(x.numpy(), return_counts=True)
    assert values.tolist() == [-3, -2, -1, 0, 1, 2, 3]
    assert ((counts - N / 7) ** 2 / (N / 7)).sum() < 25
    assert Tensor.randint(5, low=2, high=3, dtype="uint8").tolist() == [2] * 5
    with pytest.raises(ValueError, match=r"randint: the range \[3, 3\) is empty"):
        Tensor.randint(1, low=3, high=3)


def test_permutation() -> None:
    for n in (1, 2, 17, 200):
        assert sorted(Tensor.randperm(n).tolist()) == list(range(n))
    assert Tensor.randperm(50).tolist() != Tensor.randperm(50).tolist()


def test_shapes_and_types() -> None:
    assert Tensor.rand(2, 3).shape == Tensor.rand((2, 3)).shape == (2, 3) and Tensor.randn().shape == ()
    assert Tensor.rand(0, 3).tolist() == [] and Tensor.rand(2, 0).shape == (2, 0)
    for kind in ("float16", "bfloat16", "float64"):
        assert Tensor.randn(4, dtype=kind).dtype.name == Tensor.rand(4, dtype=kind).dtype.name == kind
    assert Tensor.rand(3, requires_grad=True).requires_grad and Tensor.zeros(2, 3).rand_like().shape == (2, 3)
    half = Tensor.rand(N, dtype="float16").numpy()
    assert half.max() <= 1


def test_bounds_of_initialisers() -> None:
    x = Tensor.kaiming_uniform(64, 32, 3, 3, a=math.sqrt(5)).numpy()
    assert abs(np.abs(x).max() - 1 / math.sqrt(32 * 9)) < 1e-3
    y = Tensor.glorot_uniform(30, 50).numpy()
    assert np.abs(y).max() <= math.sqrt(6 / 80) and np.abs(y).max() > 0.95 * math.sqrt(6 / 80)


def test_seeds() -> None:
    def draw(seed: int) -> list[float]:
        Tensor.manual_seed(seed)
        return [Tensor.rand(3).tolist(), Tensor.randn(3).tolist(), Tensor.randint(3, high=100).tolist()]

    assert draw(1) == draw(1) != draw(2)
    Tensor.manual_seed(1)
    a = Tensor.rand(3).tolist()
    assert a != Tensor.rand(3).tolist() and a == draw(1)[0]


def test_draws_of_one_graph_differ_in_whatever_order_they_are_realized() -> None:
    Tensor.manual_seed(5)
    a, b, c = Tensor.rand(4), Tensor.rand(4), Tensor.rand(4)
    backwards = [t.tolist() for t in (c, b, a)][::-1]
    Tensor.manual_seed(5)
    assert [Tensor.rand(4).tolist() for _ in range(3)] == backwards
    assert len({tuple(x) for x in backwards}) == 3
    assert a.tolist() == a.tolist() == backwards[0]


def test_the_number_is_a_function_of_the_position() -> None:
    """A longer draw begins with the shorter one: element i is a function of (seed, draw, i)."""
    Tensor.manual_seed(3)
    short = Tensor.rand(10).tolist()
    Tensor.manual_seed(3)
    assert Tensor.rand(10, 100).tolist()[0][:10] == short


@pytest.mark.parametrize(
    "make",
    [
        lambda d: Tensor.rand(6, 4, device=d),
        lambda d: Tensor.randn(6, 4, device=d),
        lambda d: Tensor.randint(6, 4, high=99, device=d),
    ],
)
@pytest.mark.parametrize("n", [2, 3, 4])
def test_the_same_numbers_at_any_sharding(make, n: int) -> None:  # type: ignore[no-untyped-def]
    devices = tuple(f"CPU:{i}" for i in range(n))
    Tensor.manual_seed(9)
    want = make(None).numpy()
    for axis in (None, 0, 1):
        Tensor.manual_seed(9)
        np.testing.assert_array_equal(make(devices).shard(devices, axis).numpy(), want)
        Tensor.manual_seed(9)
        np.testing.assert_array_equal(make(None).shard(devices, axis).numpy(), want)


def test_dropout() -> None:
    x = Tensor.ones(N)
    assert x.dropout(0.3) is x  # outside training
    with Tensor.train():
        y = x.dropout(0.3).numpy()
        assert np.unique(y).tolist() == [0.0, np.float32(1 / 0.7)]
        assert abs((y == 0).mean() - 0.3) < 0.012
        assert x.dropout(0.0) is x and x.dropout(1.0).sum().item() == 0.0
        assert x.dropout(0.5).tolist() != x.dropout(0.5).tolist()
        with pytest.raises(ValueError, match=r"dropout: the probability must lie in \[0, 1\], got 1.5"):
            x.dropout(1.5)
    assert not Tensor.training


def test_the_gradient_of_dropout_has_the_same_mask() -> None:
    x = Tensor(np.ones((50, 20), np.float32), requires_grad=True)
    with Tensor.train():
        y = x.dropout(0.5)
        (y * 3).sum().backward()
        np.testing.assert_array_equal(x.grad.numpy(), y.numpy() * 3)  # type: ignore[union-attr]


@pytest.mark.parametrize("n", [2, 3])
def test_dropout_is_the_same_at_any_sharding(n: int) -> None:
    devices = tuple(f"CPU:{i}" for i in range(n))
    with Tensor.train():
        Tensor.manual_seed(2)
        want = Tensor.ones(6, 5).contiguous().realize().dropout(0.5).numpy()
        for axis in (0, 1, None):
            Tensor.manual_seed(2)
            np.testing.assert_array_equal(
                Tensor.ones(6, 5).contiguous().realize().shard(devices, axis).dropout(0.5).numpy(), want
            )


def test_a_replayed_jit_draws_what_plain_calls_draw() -> None:
    def draw() -> Tensor:
        return Tensor.rand(5) + Tensor.randn(5)

    Tensor.manual_seed(4)
    want = [draw().realize().tolist() for _ in range(6)]
    Tensor.manual_seed(4)
    step = TinyJit(lambda: draw().realize())
    assert [step().tolist() for _ in range(6)] == want
    assert len({tuple(w) for w in want}) == 6


# *** distributions ***

MANY = 1 << 16


@pytest.mark.parametrize(
    ("fill", "mean", "deviation"),
    [
        (lambda t: t.uniform_(-1, 3), 1.0, 4 / math.sqrt(12)),
        (lambda t: t.normal_(2.0, 3.0), 2.0, 3.0),
        (lambda t: t.exponential_(0.5), 2.0, 2.0),
        (lambda t: t.geometric_(0.25), 4.0, math.sqrt(0.75) / 0.25),
        (lambda t: t.bernoulli_(0.3), 0.3, math.sqrt(0.21)),
        (lambda t: t.log_normal_(0.0, 0.5), math.exp(0.125), math.sqrt((math.exp(0.25) - 1) * math.exp(0.25))),
        (lambda t: t.random_(0, 10), 4.5, math.sqrt(99 / 12)),
        (lambda t: t.assign((t + 0.3).bernoulli()), 0.3, math.sqrt(0.21)),
        (lambda t: t.assign(t.randint_like(2, 6)), 3.5, math.sqrt(15 / 12)),
    ],
)
def test_filled_with_samples(fill: Callable[[Tensor], Tensor], mean: float, deviation: float) -> None:
    a = fill(Tensor.zeros(MANY)).numpy().astype(np.float64)
    assert abs(a.mean() - mean) < 5 * deviation / math.sqrt(MANY)
    assert abs(a.std() - deviation) < 0.03 * deviation


def test_cauchy_by_its_median_and_quartiles() -> None:
    a = Tensor.zeros(MANY).cauchy_(1.0, 2.0).numpy()
    assert np.abs(np.quantile(a, [0.25, 0.5, 0.75]) - [-1, 1, 3]).max() < 0.1


@pytest.mark.parametrize("replacement", [True, False])
def test_multinomial(replacement: bool) -> None:
    weights = np.float32([0.5, 0.0, 2.0, 1.5])
    rows = Tensor(np.broadcast_to(weights, (20_000, 4)).copy())
    a = rows.multinomial(3, replacement).numpy()
    assert a.shape == (20_000, 3) and not (a == 1).any()
    share = np.bincount(a[:, 0], minlength=4) / len(a)
    assert np.abs(share - weights / weights.sum()).max() < 0.02
    if not replacement:
        assert all(len(set(r)) == 3 for r in a[:100].tolist())
    with pytest.raises(ValueError, match="pass replacement=True"):
        Tensor([0.5, 0.5]).multinomial(3)


def test_samples_are_the_same_at_any_sharding() -> None:
    def draw(t: Tensor) -> list[list[float]]:
        Tensor.manual_seed(5)
        return [
            t.rand_like().tolist(),
            t.randn_like().tolist(),
            (t * 0 + 0.5).bernoulli().tolist(),
            t.dropout(
                0.5,
            ).tolist(),
        ]

    whole = Tensor.ones(7, 3)
    with Tensor.train():
        assert draw(whole.shard(("CPU:0", "CPU:1", "CPU:2"), axis=0)) == draw(whole.shard(("CPU:0",))) == draw(whole)


def test_impossible_distributions() -> None:
    for call, message in [
        (lambda: Tensor.zeros(2).normal_(0, -1), "must not be negative"),
        (lambda: Tensor.zeros(2).geometric_(1.0), r"lie in \(0, 1\)"),
        (lambda: Tensor.zeros(2).uniform_(3, 1), "is empty"),
        (lambda: Tensor([1, 2]).bernoulli(), "probabilities are floats"),
        (lambda: Tensor([1, 2]).multinomial(1), "expected float weights"),
    ]:  # fmt: skip
        with pytest.raises((ValueError, TypeError), match=message):
            call()


def test_one_counter_wherever_numbers_are_drawn() -> None:
    """A dropout mask on several devices is not the bits of a weight that was drawn on one."""
    two = ("CPU:0", "CPU:1")

    def draws(*devices: object) -> list[np.ndarray]:
        Tensor.manual_seed(3)
        return [Tensor.rand(4, device=d).numpy() for d in devices]

    want = draws(None, None, None, None)
    assert len({a.tobytes() for a in want}) == 4
    for devices in ((None, two, two, None), (two, None, "CPU:1", two), ("CPU:1", two, None, None)):
        for a, b in zip(draws(*devices), want):
            np.testing.assert_array_equal(a, b)
    Tensor.manual_seed(3)
    step = TinyJit(lambda x: (Tensor.rand(4) + x, Tensor.rand(4, device=two) + x.shard(two)))
    zero = Tensor.zeros(4).contiguous().realize()
    found = [a.numpy() for _ in range(4) for a in step(zero)]
    for a, b in zip(found, draws(*[None] * 8)):
        np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize("wrap", [TinyJit, lambda step: step], ids=["captured", "followed"])
def test_a_device_that_is_drawn_on_after_a_capture(wrap: Callable[..., Callable[[], Tensor]]) -> None:
    """A replay moves its counter, too."""
    step = wrap(lambda: Tensor.rand(4).realize())
    found = [step().numpy() for _ in range(5)]
    found += [f().numpy() for _ in range(4) for f in (lambda: Tensor.rand(4, device="CPU:9"), step)]
    Tensor.manual_seed(0)
    with Context(FOLLOW=0):
        for a in found:
            np.testing.assert_array_equal(a, Tensor.rand(4).numpy())


@pytest.mark.parametrize("kind", ["float16", "bfloat16", "float8_e4m3fn", "float8_e5m2"])
def test_uniform_numbers_of_short_types_are_below_1(kind: str) -> None:
    a = Tensor.rand(1 << 16, dtype=getattr(dtypes, kind)).float().numpy()
    assert a.min() >= 0 and a.max() < 1 and abs(a.mean() - 0.5) < 0.1


@pytest.mark.parametrize("given, low, high", [((10,), 0, 10), ((3, 5), 3, 5), ((), 0, 2**24)])
def test_random_in_place_takes_the_upper_bound_first(given: tuple[int, ...], low: int, high: int) -> None:
    """`random_(to)` and `random_(from, to)`, as in PyTorch."""
    Tensor.manual_seed(3)
    x = Tensor.empty(4000).random_(*given).numpy()
    assert low <= x.min() < low + (high - low) / 100 + 1 and high - (high - low) / 100 - 1 <= x.max() < high
    assert Tensor.empty(200, dtype="int64").random_().numpy().max() > 2**61
