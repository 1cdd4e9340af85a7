"""Sampling: what may be drawn against NumPy, how often it is drawn by chi-square, and who decides the numbers."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

from manygrad import Tensor, TinyJit, Variable, nn
from manygrad.runtime.devices import get_device

RNG = np.random.default_rng(7)
DEVICES = tuple(f"CPU:{i}" for i in range(4))


def oracle(x: np.ndarray, temperature: float = 1.0, top_k: int = 0, top_p: float = 1.0, min_p: float = 0.0,
           repetition_penalty: float = 1.0, history: Any = ()) -> np.ndarray:  # fmt: skip
    """One row (V,) -> scores, float64, by sorting."""
    x = x.astype(np.float64)
    seen = sorted({t for t in history if t >= 0})
    x[seen] = np.where(x[seen] > 0, x[seen] / repetition_penalty, x[seen] * repetition_penalty)
    x = (x - x.max()) / (temperature or 1.0)
    order = np.argsort(-x, kind="stable")
    kept = np.ones(len(x), bool)
    if 0 < top_k < len(x):
        kept &= x >= x[order[top_k - 1]]
    p = np.where(kept, np.exp(x), 0)
    share = np.cumsum(p[order]) / p.sum()
    if top_p < 1:
        kept &= x >= x[order[np.searchsorted(share, top_p)]]
    kept &= np.exp(x) >= min_p
    return np.where(kept, x, -np.inf)


CASES: list[dict[str, Any]] = [
    {},
    {"temperature": 0.7},
    {"temperature": 0.0, "top_k": 3},
    {"top_k": 1},
    {"top_k": 17},
    {"top_k": 0},
    {"top_k": 1000},
    {"top_p": 0.3},
    {"top_p": 0.95, "temperature": 1.7},
    {"min_p": 0.1},
    {"min_p": 0.0},
    {"repetition_penalty": 1.5},
    {"repetition_penalty": 1.3, "temperature": 0.8, "top_k": 50, "top_p": 0.9, "min_p": 0.02},
]


@pytest.mark.parametrize("as_tensors", [False, True])
@pytest.mark.parametrize("case", CASES, ids=str)
def test_scores_are_those_of_the_definition(case: dict[str, Any], as_tensors: bool) -> None:
    x = (RNG.standard_normal((3, 200)) * 2).astype(np.float32)
    x[:, 50] = x[:, 60]  # as likely as each other
    past = RNG.integers(-2, 200, (3, 30))
    more = {"history": Tensor(past)} if "repetition_penalty" in case else {}
    given = {k: Tensor(v) for k, v in case.items()} if as_tensors else case
    got = nn.filter_logits(Tensor(x), **given, **more).numpy()
    want = np.stack([oracle(row, **case, history=past[i] if more else ()) for i, row in enumerate(x)])
    np.testing.assert_array_equal(np.isinf(got), np.isinf(want))
    np.testing.assert_allclose(got[np.isfinite(want)], want[np.isfinite(want)], rtol=1e-5, atol=1e-5)


def test_each_row_may_have_its_own_parameters() -> None:
    x = RNG.standard_normal((4, 90)).astype(np.float32)
    rows = {"temperature": [0.0, 0.5, 1.0, 2.0], "top_k": [0, 5, 90, 2], "top_p": [0.5, 1.0, 0.9, 0.7],
            "min_p": [0.0, 0.2, 0.01, 0.0]}  # fmt: skip
    got = nn.filter_logits(Tensor(x), **{k: Tensor(v) for k, v in rows.items()}).numpy()
    want = np.stack([oracle(x[i], **{k: v[i] for k, v in rows.items()}) for i in range(4)])  # type: ignore[arg-type]
    np.testing.assert_array_equal(np.isinf(got), np.isinf(want))
    np.testing.assert_array_equal(
        nn.sample(Tensor(x), temperature=Tensor(rows["temperature"])).numpy()[:1], x[:1].argmax(-1)
    )


@pytest.mark.parametrize("as_tensors", [False, True])
@pytest.mark.parametrize("top_p", [1.0, 0.99999994, 0.9999999])
def test_top_k_holds_where_top_p_leaves_all(top_p: float, as_tensors: bool) -> None:
    """The terms of a sum that is compared to a share of 1 are added up in another order than the sum itself."""
    x = RNG.standard_normal((100, 90)).astype(np.float32)
    given = {"top_k": Tensor([5] * 100), "top_p": Tensor([top_p] * 100)} if as_tensors else {"top_k": 5, "top_p": top_p}
    kept = np.isfinite(nn.filter_logits(Tensor(x), **given).numpy())
    likeliest = np.argsort(-x, axis=-1)[:, :5]
    assert (kept.sum(-1) <= 5).all() and np.take_along_axis(kept, likeliest[:, :4], -1).all()
    alone = np.isfinite(nn.filter_logits(Tensor(x), top_p=Tensor([top_p] * 100) if as_tensors else top_p).numpy())
    assert (alone.sum(-1) > 80).all() and (top_p < 1 or alone.all())


def test_rows_without_a_setting_are_as_if_there_were_none() -> None:
    """`inf` for top_p, 0 for top_k and min_p: rows of several users, of whom each has settings of their own."""
    x = (RNG.standard_normal((3, 90)) * 2).astype(np.float32)
    rows = {"top_k": [5, 0, 0], "top_p": [np.inf, 0.6, np.inf], "min_p": [0.0, 0.0, 0.3]}
    got = np.isfinite(nn.filter_logits(Tensor(x), **{k: Tensor(np.array(v)) for k, v in rows.items()}).numpy())
    for i, alone in enumerate(({"top_k": 5}, {"top_p": 0.6}, {"min_p": 0.3})):
        np.testing.assert_array_equal(got[i], np.isfinite(nn.filter_logits(Tensor(x[i]), **alone).numpy()))


def test_temperature_0_is_greedy() -> None:
    x = RNG.standard_normal((2, 5, 70)).astype(np.float32)
    x[0, 0, 8] = x[0, 0].max() + 1
    x[0, 0, 33] = x[0, 0, 8]  # the first of equal ones
    for heat in (0, 0.0, Tensor(0.0)):
        np.testing.assert_array_equal(nn.sample(Tensor(x), temperature=heat).numpy(), x.argmax(-1))


@pytest.mark.parametrize(
    "given", [{}, {"temperature": 0.6}, {"top_k": 8}, {"top_p": 0.8, "temperature": 1.4}, {"seed": 5}], ids=str
)
def test_tokens_are_drawn_as_often_as_they_are_likely(given: dict[str, Any]) -> None:
    """30,000 draws of 24 tokens, at fixed seeds: chi-square below the 99.9% quantile."""
    row, rows = np.random.default_rng(3).standard_normal(24).astype(np.float32), 30_000
    Tensor.manual_seed(11)
    more = {"draw": Tensor.arange(rows)} if "seed" in given else {}
    drawn = nn.sample(Tensor(np.tile(row, (rows, 1))), **given, **more).numpy()
    scores = oracle(row, **{k: v for k, v in given.items() if k != "seed"})
    p = np.exp(scores) / np.exp(scores).sum()
    times = np.bincount(drawn, minlength=24)
    assert times[p == 0].sum() == 0
    p, times = p[p > 0], times[p > 0]
    chi, free = (((times - rows * p) ** 2) / (rows * p)).sum(), len(p) - 1
    assert chi < free * (1 - 2 / (9 * free) + 3.09 * math.sqrt(2 / (9 * free))) ** 3  # Wilson and Hilferty, 1931


def test_a_seed_and_a_count_decide_a_row_alone() -> None:
    x = RNG.standard_normal((6, 500)).astype(np.float32)
    seeds, draws = Tensor([1, 2, 3, 1, 2, 3]), Tensor([0, 0, 0, 1, 7, 9])
    together = nn.sample(Tensor(x), seed=seeds, draw=draws).numpy()
    Tensor.rand(5).realize()
    for i, (seed, draw) in enumerate(zip(seeds.tolist(), draws.tolist())):
        assert nn.sample(Tensor(x[i]), seed=seed, draw=draw).item() == together[i]
        bound = Variable("draw", 0, 10).bind(draw)
        assert nn.sample(Tensor(x[i : i + 1]), seed=seed, draw=bound).item() == together[i]
    assert len(set(nn.sample(Tensor(np.zeros((9, 500), np.float32)), seed=4, draw=Tensor.arange(9)).tolist())) > 5


def test_the_same_tokens_at_any_sharding() -> None:
    x = (RNG.standard_normal((5, 203)) * 3).astype(np.float32)
    past = Tensor(RNG.integers(0, 203, (5, 9)))
    found = []
    for n, axis in ((1, None), (2, 1), (4, 1), (4, 0), (2, None)):
        Tensor.manual_seed(2)
        place = (lambda t: t) if n == 1 else (lambda t, n=n: t.shard(DEVICES[:n]))
        logits = Tensor(x) if n == 1 else Tensor(x).shard(DEVICES[:n], axis)
        found.append([
            nn.sample(logits, temperature=1.2, top_k=40, top_p=0.9, min_p=0.01, seed=seed,
                      repetition_penalty=1.2, history=place(past)).tolist() for seed in (None, 9, 10)
        ])  # fmt: skip
    assert all(f == found[0] for f in found), found


def test_other_parameters_compile_nothing_again() -> None:
    x = Tensor(RNG.standard_normal((2, 300)).astype(np.float32)).realize()
    step = TinyJit(lambda x, t, k, p, m, r, h: nn.sample(
        x, temperature=t, top_k=k, top_p=p, min_p=m, repetition_penalty=r, history=h))  # fmt: skip

    def call(*values: float) -> list[int]:
        return step(x, *(Tensor(np.array(v)) for v in values), Tensor([[3, -1], [4, 5]])).tolist()  # type: ignore[no-any-return]

    for values in [(1.0, 40, 0.9, 0.01, 1.1)] * 3:
        call(*values)
    kernels = len(get_device("CPU").kernels.kernels)
    assert call(0.0, 0, 1.0, 0.0, 1.0) == x.numpy().argmax(-1).tolist()
    assert call(2.0, 1, 0.5, 0.5, 1.0) == x.numpy().argmax(-1).tolist()
    assert len({tuple(call(9.0, 0, 1.0, 0.0, 1.0)) for _ in range(12)}) > 6
    assert len(get_device("CPU").kernels.kernels) == kernels


def test_what_is_wrong_is_said() -> None:
    x = Tensor.zeros(2, 8)
    for given, message in [
        ({"temperature": -1.0}, "temperature = -1.0 lies outside 0.0..inf"),
        ({"top_p": 0.0}, "top_p = 0.0 lies outside 0.0..1.0; it is more than 0"),
        ({"top_p": 1.5}, r"top_p = 1.5 lies outside 0.0..1.0"),
        ({"top_k": -3}, "top_k = -3 lies outside"),
        ({"top_k": Tensor([1, 2, 3])}, r"top_k has shape \(3,\); one number \(\), or one a row \(2,\), is expected"),
        ({"repetition_penalty": 1.2}, "repetition_penalty and history belong together"),
        ({"repetition_penalty": 1.2, "history": Tensor([1, 2])}, r"history is integers \(2, 'n'\), not int64 \(2,\)"),
        ({"seed": Tensor([1, 2, 3])}, "seed and draw are numbers, or one a row"),
    ]:
        with pytest.raises(ValueError, match=f"sample: {message}"):
            nn.sample(x, **given)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"logits are floats \(..., vocabulary\), not int64"):
        nn.sample(Tensor([1, 2]))
