"""Losses as layers, as a mean and as a sum."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from tests.nn.layers.layer import FUNCTION, Layer, data
from tests.tensor.cases.activation import sigmoid
from tests.tensor.cases.loss import bce, ctc, log_softmax, nll, reduced, soft_cross_entropy

A, B, C = data(3, 4), data(3, 4, seed=1), data(3, 4, seed=2)
P, Q = data(3, 4, low=0.1, high=0.9), data(3, 4, low=0.1, high=0.9, seed=1)
CLASS = np.array([1, 3, 0])
SIGN, SIGNS = np.array([1.0, -1.0, 1.0]), np.where(C > 0, 1.0, -1.0)
LABELS = np.array([[2, 0, -1, 1], [3, -1, 0, 0], [1, 2, 3, -1]])
LOGP = log_softmax(data(3, 3, 4, seed=5)).transpose(2, 0, 1).copy()  # (T, N, classes)
CTC = (LOGP, np.array([[1, 2], [2, 2], [1, 1]]), np.array([4, 3, 4]), np.array([2, 2, 1]))
State = dict[str, np.ndarray]


def f(
    name: str,
    oracle: Any,
    *inputs: np.ndarray,
    defaults: Any = None,
    variant: str = "",
    keys: tuple[str, ...] = (),
    axes: Sequence[int | None] | None = None,
    fixed: tuple[int, ...] = (),
    **kwargs: Any,
) -> list[Layer]:
    """The oracle (a function's by its name) takes the constructor's arguments, but tensors,
    and `defaults` that it has not itself."""
    function = FUNCTION[oracle] if isinstance(oracle, str) else oracle
    named = {
        **(defaults or {}),
        **{k: v for k, v in kwargs.items() if not isinstance(v, np.ndarray) and not callable(v)},
    }
    how: list[tuple[str, dict[str, Any]]] = [("mean", {}), ("sum", {"reduction": "sum"})]
    return [
        Layer(
            name,
            inputs,
            lambda *a, r=r: function(*a, **named, reduction=r),
            (),
            {**kwargs, **said},
            keys,
            ", ".join(v for v in (variant, r) if v),
            axes=axes,
            fixed=fixed,
        )
        for r, said in how
    ]


def manhattan(a: Any, b: Any) -> Any:
    return (a - b).abs().sum(-1)


def by_manhattan(a: np.ndarray, x: np.ndarray, y: np.ndarray, *, margin: float, swap: bool, reduction: str) -> Any:
    d = lambda u, v: np.abs(u - v).sum(-1)  # noqa: E731
    return reduced(np.maximum(0, d(a, x) - (np.minimum(d(a, y), d(x, y)) if swap else d(a, y)) + margin), reduction)


def soft_margins(w: State, x: np.ndarray, y: np.ndarray, *, reduction: str) -> Any:
    return reduced((-(y * np.log(sigmoid(x)) + (1 - y) * np.log(sigmoid(-x))) * w["weight"]).mean(-1), reduction)


def bce_logits(w: State, x: np.ndarray, y: np.ndarray, *, reduction: str) -> Any:
    return FUNCTION["binary_cross_entropy_with_logits"](x, y, w["weight"], w["pos_weight"], reduction=reduction)


def adaptive(w: State, x: np.ndarray, y: np.ndarray) -> tuple[np.ndarray, Any]:
    """Classes 0, 1 in the head; 2, 3 and 4..6 in clusters whose share is the head's third and fourth entry."""
    head = log_softmax(x @ w["head.weight"].T + w["head.bias"])
    tails = [
        log_softmax(x @ w[f"tail.{i}.0.weight"].T @ w[f"tail.{i}.1.weight"].T) + head[:, 2 + i : 3 + i]
        for i in range(2)
    ]
    out = np.concatenate([head[:, :2], *tails], 1)[np.arange(len(x)), y]
    return out, -out.mean()


LAYERS = [
    *f("L1Loss", "l1_loss", A, B), *f("MSELoss", "mse_loss", A, B),
    *f("SmoothL1Loss", "smooth_l1_loss", A, B, defaults={"beta": 1.0}),
    *f("SmoothL1Loss", "smooth_l1_loss", A, B, beta=2.5, variant="beta"),
    *f("HuberLoss", "huber_loss", A, B, delta=2.0),
    *f("CrossEntropyLoss", "cross_entropy[plain]", A, CLASS),
    *f("CrossEntropyLoss", soft_cross_entropy, A, P / P.sum(1, keepdims=True), defaults={"label_smoothing": 0.0},
       variant="probabilities"),
    *f("CrossEntropyLoss", lambda w, x, y, **k: nll(log_softmax(x), y, w["weight"], **k), data(3, 4, 2),
       np.array([[1, -100], [2, 0], [3, 3]]), keys=("weight",), weight=data(4), label_smoothing=0.1, variant="weight"),
    *f("NLLLoss", nll, log_softmax(A), CLASS),
    *f("NLLLoss", lambda w, x, y, **k: nll(x, y, w["weight"], **k), log_softmax(A), CLASS, keys=("weight",),
       weight=data(4), variant="weight"),
    *f("NLLLoss2d", nll, log_softmax(data(3, 2, 2, 1)), np.array([[[0], [1]], [[1], [-100]], [[0], [0]]])),
    *f("KLDivLoss", "kl_div", -P, Q, defaults={"log_target": False}),
    *f("KLDivLoss", "kl_div", -P, -Q, log_target=True, variant="log_target"),
    *f("BCELoss", "binary_cross_entropy", P, Q),
    *f("BCELoss", lambda w, x, y, **k: reduced(w["weight"] * bce(x, y), **{"how": k["reduction"]}), P, Q,
       keys=("weight",), weight=data(4), variant="weight"),
    *f("BCEWithLogitsLoss", bce_logits, A, Q, keys=("weight", "pos_weight"), weight=data(4), pos_weight=data(4)),
    *f("PoissonNLLLoss", "poisson_nll_loss", P, Q + 2, defaults={"log_input": True, "full": False}),
    *f("PoissonNLLLoss", "poisson_nll_loss", P, Q + 2, log_input=False, full=True, variant="full"),
    *f("GaussianNLLLoss", "gaussian_nll_loss", A, B, P, defaults={"full": False}),
    *f("GaussianNLLLoss", "gaussian_nll_loss", A, B, P, full=True, variant="full"),
    *f("HingeEmbeddingLoss", "hinge_embedding_loss", A, SIGNS, fixed=(1,)),
    *f("SoftMarginLoss", "soft_margin_loss", A, SIGNS),
    *f("MarginRankingLoss", "margin_ranking_loss", A, B, SIGNS, margin=0.3),
    *f("CosineEmbeddingLoss", "cosine_embedding_loss", A, B, SIGN, fixed=(2,), margin=-0.2),
    *f("MultiMarginLoss", lambda w, x, y, **k: FUNCTION["multi_margin_loss"](x, y, w["weight"], **k), A, CLASS,
       keys=("weight",), p=2, margin=1.3, weight=data(4)),
    *f("MultiLabelMarginLoss", "multilabel_margin_loss", A, LABELS),
    *f("MultiLabelSoftMarginLoss", "multilabel_soft_margin_loss", A, Q),
    *f("MultiLabelSoftMarginLoss", soft_margins, A, Q, keys=("weight",), weight=data(4), variant="weight"),
    *f("TripletMarginLoss", "triplet_margin_loss", A, B, C, defaults={"p": 2.0, "swap": False}),
    *f("TripletMarginLoss", "triplet_margin_loss", A, B, C, p=3.0, swap=True, variant="swap"),
    *f("TripletMarginWithDistanceLoss", "triplet_margin_with_distance_loss", A, B, C),
    *f("TripletMarginWithDistanceLoss", by_manhattan, A, B, C, distance_function=manhattan, margin=2.0, swap=True,
       variant="manhattan"),
    *f("CTCLoss", ctc, *CTC, axes=(1, 0, 0, 0), defaults={"zero_infinity": False}),
    *f("CTCLoss", ctc, *CTC, axes=(1, 0, 0, 0), zero_infinity=True, variant="zero_infinity"),
    Layer("LinearCrossEntropyLoss", (A, CLASS),
          lambda w, x, y: nll(log_softmax(x @ w["linear.weight"].T), y, reduction="mean"), (4, 5),
          keys=("linear.weight",)),
    Layer("LinearCrossEntropyLoss", (A, CLASS),
          lambda w, x, y: nll(log_softmax(x @ w["linear.weight"].T + w["linear.bias"]), y, reduction="sum",
                              label_smoothing=0.1),
          (4, 5), {"bias": True, "reduction": "sum", "label_smoothing": 0.1}, ("linear.weight", "linear.bias"), "sum"),
    Layer("AdaptiveLogSoftmaxWithLoss", (data(5, 4), np.array([0, 6, 2, 3, 4])), adaptive, (4, 7, [2, 4]),
          {"div_value": 2.0, "head_bias": True},
          ("head.weight", "head.bias", *(f"tail.{i}.{j}.weight" for i in range(2) for j in range(2)))),
]  # fmt: skip
