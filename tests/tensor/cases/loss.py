"""Losses; each oracle gives the losses of the elements, `reduced` does the rest."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
from hypothesis import strategies as st

from tests.tensor.cases.activation import sigmoid, softplus
from tests.tensor.cases.case import Case, Draw, Library, Sample, array, shapes
from tests.tensor.cases.normalization import distance

HOW = st.sampled_from(["mean", "sum", "none"])


def reduced(loss: np.ndarray, how: str, count: Any = None) -> Any:
    return (
        loss if how == "none" else loss.sum() if how == "sum" else loss.sum() / (loss.size if count is None else count)
    )


def of(elementwise: Callable[..., np.ndarray]) -> Callable[..., Any]:
    return lambda *arrays, reduction, **k: reduced(elementwise(*arrays, **k), reduction)


def same(*ranges: tuple[float, float], min_dims: int = 0, **named: Any) -> Any:
    """Tensors of one shape, each in its range."""

    def samples(draw: Draw) -> Sample:
        shape = shapes(draw, min_dims, empty=False)
        kwargs = {k: draw(st.sampled_from(v)) for k, v in named.items()}
        return Sample(
            tuple(array(draw, shape, low=a, high=b) for a, b in ranges), (), {**kwargs, "reduction": draw(HOW)}
        )

    return samples


def signs(draw: Draw, shape: tuple[int, ...]) -> np.ndarray:
    return np.where(array(draw, shape, "bool"), 1.0, -1.0)


def classes(draw: Draw, weights: bool = True, smoothing: bool = False) -> Sample:
    """Logits (N, C, ...) and class numbers, some of them ignored; class 0 always counts."""
    c = draw(st.integers(2, 4))
    rest = draw(st.sampled_from([(), (2,), (3, 2)]))
    n = draw(st.integers(1, 4))
    y = array(draw, (n, *rest), "int64", 0, c - 1)
    y = np.where(array(draw, y.shape, "bool") & (np.arange(y.size).reshape(y.shape) > 0), y, -100)
    y[(0,) * y.ndim] = 0
    w = (array(draw, (c,), low=0.5, high=2),) if weights else ()
    return Sample(
        (array(draw, (n, c, *rest)), y, *w),
        (),
        {"reduction": draw(HOW), **({"label_smoothing": draw(st.sampled_from([0.0, 0.1]))} if smoothing else {})},
    )


def log_softmax(x: np.ndarray) -> np.ndarray:
    return x - np.log(np.exp(x).sum(1, keepdims=True))


def nll(
    logp: np.ndarray, y: np.ndarray, w: np.ndarray | None = None, *, reduction: str, label_smoothing: float = 0
) -> Any:
    c = logp.shape[1]
    w = np.ones(c) if w is None else w
    hit = np.moveaxis(np.eye(c)[np.maximum(y, 0)] * (y != -100)[..., None], -1, 1)
    shaped = w.reshape(1, -1, *(1,) * (y.ndim - 1))
    loss = (
        -(hit * shaped * logp).sum(1) * (1 - label_smoothing)
        - (y != -100) * (shaped * logp).sum(1) * label_smoothing / c
    )
    return reduced(loss, reduction, (hit * shaped).sum())


def by_weight(name: str) -> Any:
    return lambda lib, x, y, w=None, **k: getattr(lib.functional, name)(x, y, weight=w, **k)


def soft_targets(draw: Draw) -> Sample:
    shape = (draw(st.integers(1, 3)), draw(st.integers(2, 4)))
    y = array(draw, shape, low=0.1, high=1)
    return Sample(
        (array(draw, shape), y / y.sum(1, keepdims=True)),
        (),
        {"reduction": draw(HOW), "label_smoothing": draw(st.sampled_from([0.0, 0.2]))},
    )


def soft_cross_entropy(x: np.ndarray, y: np.ndarray, *, reduction: str, label_smoothing: float) -> Any:
    loss = -(log_softmax(x) * (y * (1 - label_smoothing) + label_smoothing / x.shape[1])).sum(1)
    return reduced(loss, reduction)


def bce(x: np.ndarray, y: np.ndarray) -> np.ndarray:
    return -(y * np.log(x) + (1 - y) * np.log(1 - x))


def logit_samples(draw: Draw) -> Sample:
    shape = shapes(draw, 1, empty=False)
    return Sample(
        (
            array(draw, shape),
            array(draw, shape, low=0.1, high=0.9),
            array(draw, shape, low=0.5, high=2),
            array(draw, shape[-1:], low=0.5, high=2),
        ),
        (),
        {"reduction": draw(HOW)},
    )


def bce_logits(x: np.ndarray, y: np.ndarray, w: np.ndarray, p: np.ndarray) -> np.ndarray:
    return w * (p * y * softplus(-x) + (1 - y) * softplus(x))


def smooth(x: np.ndarray, y: np.ndarray, beta: float) -> np.ndarray:
    d = np.abs(x - y)
    return np.where(d < beta, d * d / (2 * beta), d - beta / 2)


def kl(x: np.ndarray, y: np.ndarray, *, reduction: str, log_target: bool) -> Any:
    loss = np.exp(y) * (y - x) if log_target else y * (np.log(y) - x)
    return loss.sum() / len(x) if reduction == "batchmean" else reduced(loss, reduction)


def kl_samples(draw: Draw) -> Sample:
    s = same((-4, 0), (0.1, 1), min_dims=1, log_target=[False, True])(draw)
    return Sample(s.arrays, (), {**s.kwargs, "reduction": draw(st.sampled_from(["mean", "sum", "none", "batchmean"]))})


def poisson(x: np.ndarray, y: np.ndarray, log_input: bool, full: bool) -> np.ndarray:
    loss = np.exp(x) - y * x if log_input else x - y * np.log(x + 1e-8)
    return loss + np.where(y > 1, y * np.log(y) - y + 0.5 * np.log(2 * np.pi * y), 0) if full else loss


def gaussian(x: np.ndarray, y: np.ndarray, v: np.ndarray, full: bool) -> np.ndarray:
    return 0.5 * (np.log(v) + (x - y) ** 2 / v) + (0.5 * math.log(2 * math.pi) if full else 0)


def signed(draw: Draw) -> Sample:
    shape = shapes(draw, empty=False)
    return Sample((array(draw, shape), signs(draw, shape)), (), {"reduction": draw(HOW)})


def ranked(draw: Draw) -> Sample:
    shape = shapes(draw, empty=False)
    return Sample(
        (array(draw, shape), array(draw, shape), signs(draw, shape)), (), {"margin": 0.3, "reduction": draw(HOW)}
    )


def embedded(draw: Draw) -> Sample:
    n, m = draw(st.integers(1, 3)), draw(st.integers(2, 4))
    return Sample(
        (array(draw, (n, m)), array(draw, (n, m)), signs(draw, (n,))), (), {"margin": -0.2, "reduction": draw(HOW)}
    )


def cosine_embedding(x: np.ndarray, y: np.ndarray, t: np.ndarray, margin: float) -> np.ndarray:
    cos = (x * y).sum(-1) / np.sqrt(((x * x).sum(-1) + 1e-12) * ((y * y).sum(-1) + 1e-12))
    return np.where(t == 1, 1 - cos, np.maximum(0, cos - margin))


def margins(draw: Draw) -> Sample:
    n, c = draw(st.integers(1, 3)), draw(st.integers(2, 4))
    return Sample(
        (array(draw, (n, c)), array(draw, (n,), "int64", 0, c - 1), array(draw, (c,), low=0.5)),
        (),
        {"p": draw(st.integers(1, 2)), "margin": 1.3, "reduction": draw(HOW)},
    )


def multi_margin(x: np.ndarray, y: np.ndarray, w: np.ndarray, p: int, margin: float) -> np.ndarray:
    hit = np.eye(x.shape[1])[y]
    return ((np.maximum(0, margin - (hit * x).sum(1, keepdims=True) + x) ** p * (1 - hit)).sum(1) * w[y]) / x.shape[1]


def lists(draw: Draw) -> Sample:
    n, c = draw(st.integers(1, 3)), draw(st.integers(2, 4))
    rng = np.random.default_rng(draw(st.integers(0, 99)))
    y = np.stack([np.where(np.arange(c) < rng.integers(0, c + 1), rng.permutation(c), -1) for _ in range(n)])
    return Sample((array(draw, (n, c)), y.astype(np.int64)), (), {"reduction": draw(HOW)})


def multilabel_margin(x: np.ndarray, y: np.ndarray) -> np.ndarray:
    out = np.zeros(len(x))
    for i, (row, labels) in enumerate(zip(x, y)):
        right = list(labels[: list(labels).index(-1)] if -1 in labels else labels)
        out[i] = sum(max(0, 1 - row[t] + row[c]) for t in right for c in range(len(row)) if c not in right) / len(row)
    return out


def triplets(draw: Draw) -> Sample:
    shape = (draw(st.integers(1, 3)), 3)
    return Sample(
        tuple(array(draw, shape, low=a, high=a + 1.5) for a in (-4, -1, 2)),
        (),
        {"p": draw(st.sampled_from([2.0, 3.0])), "swap": draw(st.booleans()), "reduction": draw(HOW)},
    )


def triplet(a: np.ndarray, x: np.ndarray, y: np.ndarray, p: float, swap: bool) -> np.ndarray:
    far = distance(a, y, p)
    return np.maximum(0, distance(a, x, p) - (np.minimum(far, distance(x, y, p)) if swap else far) + 1)


def alignments(draw: Draw) -> Sample:
    n, t, c, s = draw(st.integers(1, 2)), draw(st.integers(2, 4)), draw(st.integers(2, 3)), draw(st.integers(1, 2))
    rng = np.random.default_rng(draw(st.integers(0, 99)))
    x = np.swapaxes(log_softmax(rng.uniform(-2, 2, (n, c, t))), 1, 2)
    frames, lengths = rng.integers(1, t + 1, n), rng.integers(0, s + 1, n)
    return Sample(
        (np.ascontiguousarray(np.swapaxes(x, 0, 1)), rng.integers(1, c, (n, s)), frames, lengths),
        (),
        {"reduction": draw(HOW), "zero_infinity": True},
    )


def ctc(
    logp: np.ndarray, y: np.ndarray, frames: np.ndarray, lengths: np.ndarray, *, reduction: str, zero_infinity: bool
) -> Any:
    """Every path of labels, blanks and repeats removed, that gives the target."""
    import itertools

    out = []
    for i in range(logp.shape[1]):
        want = tuple(y[i, : lengths[i]])
        total = 0.0
        for path in itertools.product(range(logp.shape[2]), repeat=int(frames[i])):
            if tuple(k for k, _ in itertools.groupby(path) if k) == want:
                total += math.exp(sum(logp[t, i, k] for t, k in enumerate(path)))
        out.append(-math.log(total) if total else 0.0)
    loss = np.array(out)
    return (loss / np.maximum(lengths, 1)).mean() if reduction == "mean" else reduced(loss, reduction)


def f(name: str, oracle: Any, samples: Any, **options: Any) -> Case:
    return Case(f"functional.{name}", oracle, samples, **options)


def weighted_bce(lib: Library, x: Any, y: Any, w: Any, p: Any, **k: Any) -> Any:
    return lib.functional.binary_cross_entropy_with_logits(x, y, weight=w, pos_weight=p, **k)


APART = ((-4, -0.2), (0.2, 4))  # no kink between

CASES = [
    f("l1_loss", of(lambda x, y: np.abs(x - y)), same(*APART)),
    f("mse_loss", of(lambda x, y: (x - y) ** 2), same((-4, 4), (-4, 4)),
      dtypes=("float16", "bfloat16", "float32", "float64")),
    f("smooth_l1_loss", of(smooth), same((-4, 4), (-4, 4), beta=[1.0, 0.5])),
    f("huber_loss", of(lambda x, y, delta: smooth(x, y, delta) * delta), same((-4, 4), (-4, 4), delta=[1.0, 2.0])),
    f("cross_entropy", lambda x, *a, **k: nll(log_softmax(x), *a, **k), lambda d: classes(d, True, True),
      call=by_weight("cross_entropy")),
    f("cross_entropy", lambda x, *a, **k: nll(log_softmax(x), *a, **k), lambda d: classes(d, False, True),
      variant="plain"),
    f("cross_entropy", soft_cross_entropy, soft_targets, variant="probabilities"),
    f("linear_cross_entropy", lambda x, v, y: nll(log_softmax(x @ v.T), y, reduction="mean"),
      lambda d: Sample((array(d, (3, 2)), array(d, (4, 2)), array(d, (3,), "int64", 0, 3)))),
    f("nll_loss", nll, classes, call=by_weight("nll_loss")),
    f("nll_loss", nll, lambda d: classes(d, False), variant="plain"),
    f("binary_cross_entropy", of(bce), same((0.1, 0.9), (0.1, 0.9))),
    f("binary_cross_entropy_with_logits", of(bce_logits), logit_samples, call=weighted_bce),
    f("kl_div", kl, kl_samples),
    f("poisson_nll_loss", of(poisson), same((0.1, 3), (1.2, 5), log_input=[True, False], full=[True, False])),
    f("gaussian_nll_loss", of(gaussian), same((-4, 4), (-4, 4), (0.5, 2), full=[True, False])),
    f("hinge_embedding_loss", of(lambda x, y: np.where(y == 1, x, np.maximum(0, 1 - x))), signed),
    f("soft_margin_loss", of(lambda x, y: np.log1p(np.exp(-y * x))), signed),
    f("margin_ranking_loss", of(lambda x, y, t, margin: np.maximum(0, -t * (x - y) + margin)), ranked),
    f("cosine_embedding_loss", of(cosine_embedding), embedded),
    f("multi_margin_loss", of(multi_margin), margins,
      call=lambda lib, x, y, w, **k: lib.functional.multi_margin_loss(x, y, weight=w, **k)),
    f("multilabel_margin_loss", of(multilabel_margin), lists),
    f("multilabel_soft_margin_loss",
      of(lambda x, y: -(y * np.log(sigmoid(x)) + (1 - y) * np.log(sigmoid(-x))).mean(-1)),
      same((-4, 4), (0.1, 0.9), min_dims=1)),
    f("triplet_margin_loss", of(triplet), triplets),
    f("triplet_margin_with_distance_loss", of(lambda a, x, y: triplet(a, x, y, 2.0, False)),
      lambda d: Sample((s := triplets(d)).arrays, (), {"reduction": s.kwargs["reduction"]})),
    f("ctc_loss", ctc, alignments),
]  # fmt: skip
