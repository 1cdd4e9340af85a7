"""Losses as modules; the formulas are in `functional`. A mean divides by the global count at any sharding."""

from __future__ import annotations

from math import prod
from typing import Any

from manygrad.nn import functional as F
from manygrad.nn.held import Held
from manygrad.nn.linear import Linear
from manygrad.nn.module import Module
from manygrad.nn.parameter import Buffer
from manygrad.tensor.ops.broadcast import expect_shape
from manygrad.tensor.tensor import Tensor

# PyTorch's old pair of arguments, kept in place; `reduction` says the same
OLD = {"size_average": None, "reduce": None}


class L1Loss(Held, of="l1_loss", show="", **OLD, reduction="mean"):
    """mean |x − y|."""


class MSELoss(Held, of="mse_loss", show="", **OLD, reduction="mean"):
    """mean (x − y)²."""


class SmoothL1Loss(Held, of="smooth_l1_loss", show="", **OLD, reduction="mean", beta=1.0):
    """Squared below beta, absolute above."""


class HuberLoss(Held, of="huber_loss", show="", reduction="mean", delta=1.0):
    """SmoothL1 times delta."""


class CrossEntropyLoss(
    Held,
    of="cross_entropy",
    show="",
    weight=None,
    size_average=None,
    ignore_index=-100,
    reduce=None,
    reduction="mean",
    label_smoothing=0.0,
):
    """−log softmax(logits)[class]; also with probabilities as targets."""


class NLLLoss(
    Held, of="nll_loss", show="", weight=None, size_average=None, ignore_index=-100, reduce=None, reduction="mean"
):
    """−logp[class]."""


class KLDivLoss(Held, of="kl_div", show="", **OLD, reduction="mean", log_target=False):
    """y (log y − x), x log-probabilities."""


class BCELoss(Held, of="binary_cross_entropy", show="", weight=None, **OLD, reduction="mean"):
    """−y log x − (1 − y) log(1 − x)."""


class BCEWithLogitsLoss(
    Held, of="binary_cross_entropy_with_logits", show="", weight=None, **OLD, reduction="mean", pos_weight=None
):
    """BCELoss of sigmoid(x)."""


class PoissonNLLLoss(
    Held,
    of="poisson_nll_loss",
    show="",
    log_input=True,
    full=False,
    size_average=None,
    eps=1e-8,
    reduce=None,
    reduction="mean",
):
    """exp(x) − y x."""


class GaussianNLLLoss(Held, of="gaussian_nll_loss", show="", keyword_only=True, full=False, eps=1e-6, reduction="mean"):
    """((x − y)² / var + log var) / 2."""


class HingeEmbeddingLoss(Held, of="hinge_embedding_loss", show="", margin=1.0, **OLD, reduction="mean"):
    """x where y is 1, max(0, margin − x) where it is −1."""


class CosineEmbeddingLoss(Held, of="cosine_embedding_loss", show="", margin=0.0, **OLD, reduction="mean"):
    """1 − cos where y is 1, max(0, cos − margin) where it is −1."""


class MarginRankingLoss(Held, of="margin_ranking_loss", show="", margin=0.0, **OLD, reduction="mean"):
    """max(0, −y (a − b) + margin)."""


class SoftMarginLoss(Held, of="soft_margin_loss", show="", **OLD, reduction="mean"):
    """log(1 + exp(−y x))."""


class MultiMarginLoss(Held, of="multi_margin_loss", show="", p=1, margin=1.0, weight=None, **OLD, reduction="mean"):
    """Hinge of all classes against the right one."""


class MultiLabelMarginLoss(Held, of="multilabel_margin_loss", show="", **OLD, reduction="mean"):
    """Hinge of all classes against each right one."""


class MultiLabelSoftMarginLoss(Held, of="multilabel_soft_margin_loss", show="", weight=None, **OLD, reduction="mean"):
    """Mean of a logistic loss a class."""


class TripletMarginLoss(
    Held, of="triplet_margin_loss", show="", margin=1.0, p=2.0, eps=1e-6, swap=False, **OLD, reduction="mean"
):
    """max(0, d(a, p) − d(a, n) + margin)."""


class TripletMarginWithDistanceLoss(
    Held,
    of="triplet_margin_with_distance_loss",
    show="",
    keyword_only=True,
    distance_function=None,
    margin=1.0,
    swap=False,
    reduction="mean",
):
    """TripletMarginLoss with a distance of one's own."""


class CTCLoss(Held, of="ctc_loss", show="", blank=0, reduction="mean", zero_infinity=False):
    """Connectionist temporal classification."""


NLLLoss2d = NLLLoss


class LinearCrossEntropyLoss(Module):
    """cross_entropy of a linear layer's output (N, num_classes, *out_features).
    `options` (PyTorch's chunks) change nothing."""

    def __init__(self, in_features: int, num_classes: int, *, out_features: tuple[int, ...] = (), bias: bool = False,
                 device: Any = None, dtype: Any = None, reduction: str = "mean", weight: Tensor | None = None,
                 ignore_index: int | None = None, label_smoothing: float = 0.0, options: Any = None):  # fmt: skip
        expect_shape("LinearCrossEntropyLoss", (num_classes,), weight=weight)
        self.num_classes, self.out_features = num_classes, tuple(out_features)
        self.linear = Linear(in_features, prod(self.out_features) * num_classes, bias, device, dtype)
        self.weight = None if weight is None else Buffer(weight)
        self.ignore_index = -100 if ignore_index is None else ignore_index
        self.reduction, self.label_smoothing = reduction, label_smoothing

    def forward(self, input: Tensor, target: Tensor) -> Tensor:
        logits = self.linear(input)
        if self.out_features:
            logits = logits.reshape(*logits.shape[:-1], self.num_classes, *self.out_features)
        return F.cross_entropy(
            logits, target, self.weight, ignore_index=self.ignore_index, reduction=self.reduction,
            label_smoothing=self.label_smoothing,
        )  # fmt: skip
