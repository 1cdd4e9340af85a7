"""Losses, with torch.nn.functional's names and signatures. A mean divides by the global count at any sharding.

`size_average` and `reduce` are PyTorch's old form of `reduction`.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from manygrad.tensor.dtype import accumulate_dtype
from manygrad.tensor.ops.broadcast import expect_shape
from manygrad.tensor.ops.checking import checked
from manygrad.tensor.ops.distance import pairwise_distance
from manygrad.tensor.ops.elementary import with_gradient

if TYPE_CHECKING:
    from manygrad.tensor.tensor import Tensor


def _reduction(reduction: str, size_average: bool | None, reduce: bool | None) -> str:
    if size_average is not None or reduce is not None:
        reduction = "none" if reduce is False else "sum" if size_average is False else "mean"
    if reduction not in ("mean", "sum", "none"):
        raise ValueError(f'reduction is "mean", "sum" or "none", not {reduction!r}')
    return reduction


def _reduced(
    loss: Tensor,
    reduction: str,
    size_average: bool | None = None,
    reduce: bool | None = None,
    weight: Tensor | None = None,
) -> Tensor:
    """The losses of the elements reduced; the mean is over the sum of `weight` if given."""
    how = _reduction(reduction, size_average, reduce)
    if how == "none":
        return loss
    if how == "sum":
        return loss.sum()
    if weight is None:
        return loss.mean()
    wide = accumulate_dtype(loss.dtype)
    return (loss.cast(wide).sum() / weight.cast(wide).sum()).cast(loss.dtype)


def _same_shape(name: str, input: Tensor, target: Tensor) -> None:
    if input.shape != target.shape:
        raise ValueError(
            f"{name}: the target has shape {target.shape}, the input {input.shape}; "
            "they must be the same (reshape or expand one)"
        )


# *** distances of numbers ***


def l1_loss(
    input: Tensor,
    target: Tensor,
    size_average: bool | None = None,
    reduce: bool | None = None,
    reduction: str = "mean",
    weight: Tensor | None = None,
) -> Tensor:
    """|x − y|."""
    return _weighted((input - target).abs(), weight, reduction, size_average, reduce)


def mse_loss(
    input: Tensor,
    target: Tensor,
    size_average: bool | None = None,
    reduce: bool | None = None,
    reduction: str = "mean",
    weight: Tensor | None = None,
) -> Tensor:
    """(x − y)²."""
    return _weighted((input - target).square(), weight, reduction, size_average, reduce)


def smooth_l1_loss(
    input: Tensor,
    target: Tensor,
    size_average: bool | None = None,
    reduce: bool | None = None,
    reduction: str = "mean",
    beta: float = 1.0,
) -> Tensor:
    """d² / (2 beta) where d = |x − y| < beta, else d − beta / 2."""
    if not beta >= 0:
        raise ValueError(f"smooth_l1_loss: beta is at least 0, not {beta}")
    difference = input - target
    d = difference.abs()
    return _reduced(
        d if beta == 0 else (d < beta)._where(difference.square() * (0.5 / beta), d - 0.5 * beta),
        reduction,
        size_average,
        reduce,
    )


def huber_loss(
    input: Tensor, target: Tensor, reduction: str = "mean", delta: float = 1.0, weight: Tensor | None = None
) -> Tensor:
    """d² / 2 where d = |x − y| <= delta, else delta · (d − delta / 2)."""
    if not delta > 0:
        raise ValueError(f"huber_loss: delta is above 0, not {delta}")
    difference = input - target
    d = difference.abs()
    loss = (d <= delta)._where(difference.square() * 0.5, (d - 0.5 * delta) * delta)
    return _weighted(loss, weight, reduction, None, None)


def _weighted(
    loss: Tensor, weight: Tensor | None, reduction: str, size_average: bool | None, reduce: bool | None
) -> Tensor:
    if weight is None:
        return _reduced(loss, reduction, size_average, reduce)
    return _reduced(loss * weight, reduction, size_average, reduce, weight._broadcast(loss.shape))


# *** probabilities ***


def cross_entropy(input: Tensor, target: Tensor, weight: Tensor | None = None, size_average: bool | None = None,
                  ignore_index: int | None = -100, reduce: bool | None = None, reduction: str = "mean",
                  label_smoothing: float = 0.0) -> Tensor:  # fmt: skip
    """Logits (C,), (N, C) or (N, C, ...) against class numbers (), (N,) or (N, ...),
    or probabilities of the logits' shape.

    `weight` (C,) scales the classes. The mean is over the weights of the classes that count;
    for probabilities over N · ....

    `ignore_index`: targets that do not count; None: all do. Then the mean divides by a number known beforehand, where
    else workers that each have a part of the targets wait for one another before the backward pass.
    """
    if not 0 <= label_smoothing <= 1:
        raise ValueError(f"label_smoothing is in [0, 1], not {label_smoothing}")
    d = 0 if input.ndim == 1 else 1
    if input.ndim and target.dtype.is_float and target.shape == input.shape:
        if ignore_index is not None and ignore_index >= 0:
            raise ValueError(
                f"cross_entropy: ignore_index {ignore_index} is for class numbers; probabilities all count"
            )
        return _soft_cross_entropy(
            input.log_softmax(d), target, d, weight, _reduction(reduction, size_average, reduce), label_smoothing
        )
    _check_classes("cross_entropy", input, target)
    logp = input.log_softmax(d)
    n: Any = input.shape[d]
    loss, w, counted = _picked("cross_entropy", logp, target, d, weight, ignore_index)
    if label_smoothing:
        spread = -(logp if weight is None else logp * _along(weight, d, logp.ndim)).sum(d)
        spread = spread if counted is None else counted._where(spread, 0.0)
        loss = loss * (1 - label_smoothing) + spread * (label_smoothing / n)
    return _reduced(loss, reduction, size_average, reduce, w)


def linear_cross_entropy(input: Tensor, linear_weight: Tensor, target: Tensor, *, linear_bias: Tensor | None = None,
                         weight: Tensor | None = None, reduction: str = "mean", ignore_index: int | None = None,
                         label_smoothing: float = 0.0, options: Any = None) -> Tensor:  # fmt: skip
    """cross_entropy of the logits linear(input, linear_weight, linear_bias), linear_weight (C, in_features). Without
    `ignore_index` it is -100."""
    if linear_weight.ndim != 2:
        raise ValueError(
            f"linear_cross_entropy: linear_weight has shape {linear_weight.shape}, expected (classes, in_features)"
        )
    logits = input.linear(linear_weight, linear_bias)
    return cross_entropy(
        logits,
        target,
        weight,
        ignore_index=-100 if ignore_index is None else ignore_index,
        reduction=reduction,
        label_smoothing=label_smoothing,
    )


def _soft_cross_entropy(
    logp: Tensor, target: Tensor, d: int, weight: Tensor | None, how: str, smoothing: float
) -> Tensor:
    n: Any = logp.shape[d]
    if smoothing:
        target = target * (1 - smoothing) + smoothing / n
    loss = -(logp * target if weight is None else logp * target * _along(weight, d, logp.ndim)).sum(d)
    return _reduced(loss, how)


def nll_loss(input: Tensor, target: Tensor, weight: Tensor | None = None, size_average: bool | None = None,
             ignore_index: int | None = -100, reduce: bool | None = None,
             reduction: str = "mean") -> Tensor:  # fmt: skip
    """−input[class] · weight[class], for log-probabilities (C,), (N, C) or (N, C, ...) and class numbers (), (N,)
    or (N, ...). `ignore_index` as in `cross_entropy`."""
    _check_classes("nll_loss", input, target)
    loss, w, _ = _picked("nll_loss", input, target, 0 if input.ndim == 1 else 1, weight, ignore_index)
    return _reduced(loss, reduction, size_average, reduce, w)


def _check_classes(name: str, input: Tensor, target: Tensor) -> None:
    want = () if input.ndim == 1 else (input.shape[0], *input.shape[2:]) if input.ndim else None
    if want is None or target.shape != want:
        raise ValueError(f"{name}: an input of shape {input.shape} needs targets of shape {want}, got {target.shape}")
    if not target.dtype.is_int:
        raise TypeError(f"{name}: targets are class numbers (integers), not {target.dtype.name}")


def _along(weight: Tensor, d: int, ndim: int) -> Tensor:
    return weight.reshape(tuple(-1 if i == d else 1 for i in range(ndim)))


def _picked(
    name: str, logp: Tensor, target: Tensor, d: int, weight: Tensor | None, ignore_index: int | None
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """(−logp[target] · weight[target], weight[target], whether it counts); 0 where the target is `ignore_index`. None
    for what is 1 everywhere."""
    n: Any = logp.shape[d]
    expect_shape(name, (n,), weight=weight)
    target = checked(target, f"{name}: class", n, logp, spared=ignore_index)
    hit = target.unsqueeze(d).eq(_along(logp.arange(n), d, logp.ndim).cast(target.dtype))
    loss = -hit._where(logp, 0.0).sum(d)
    counted = None if ignore_index is None else target.ne(ignore_index)
    if counted is not None:
        loss = counted._where(loss, 0.0)
    if weight is None:
        return loss, counted, counted
    w = hit._where(_along(weight, d, logp.ndim), 0.0).sum(d)
    if counted is not None:
        w = counted._where(w, 0.0)
    return loss * w, w, counted


def binary_cross_entropy(input: Tensor, target: Tensor, weight: Tensor | None = None, size_average: bool | None = None,
                         reduce: bool | None = None, reduction: str = "mean") -> Tensor:  # fmt: skip
    """−(y log x + (1 − y) log(1 − x)) for probabilities x; the logarithms are at least −100."""
    _same_shape("binary_cross_entropy", input, target)
    value = _bce(input, target)
    return _reduced(value if weight is None else value * weight, reduction, size_average, reduce)


def _bce(x: Tensor, y: Tensor) -> Tensor:
    out = (y - 1) * (-x).log1p().clamp(min=-100) - y * x.log().clamp(min=-100)

    def backward(g: Tensor, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        return g * (x - y) / ((1 - x) * x).clamp(min=1e-12), g * (
            (-x).log1p().clamp(min=-100) - x.log().clamp(min=-100)
        )

    return with_gradient(out, "binary_cross_entropy", None, backward, x, y)


def binary_cross_entropy_with_logits(input: Tensor, target: Tensor, weight: Tensor | None = None,
                                     size_average: bool | None = None, reduce: bool | None = None,
                                     reduction: str = "mean", pos_weight: Tensor | None = None) -> Tensor:  # fmt: skip
    """binary_cross_entropy of sigmoid(x), without overflow; `pos_weight` scales the loss where the target is 1."""
    _same_shape("binary_cross_entropy_with_logits", input, target)
    value = (1 - target) * input + _opposite(input) * (1 if pos_weight is None else (pos_weight - 1) * target + 1)
    return _reduced(value if weight is None else value * weight, reduction, size_average, reduce)


def _opposite(x: Tensor) -> Tensor:
    """−log sigmoid(x)."""
    return (-x)._softplus()


def kl_div(
    input: Tensor,
    target: Tensor,
    size_average: bool | None = None,
    reduce: bool | None = None,
    reduction: str = "mean",
    log_target: bool = False,
) -> Tensor:
    """y (log y − x) for log-probabilities x; `log_target`: y is given as its log.
    "batchmean" divides the sum by the batch."""
    value = target.exp() * (target - input) if log_target else target.xlogy(target) - target * input
    if reduction == "batchmean" and size_average is None and reduce is None:
        return value.sum() / (input.shape[0] if input.ndim else 1)
    return _reduced(value, reduction, size_average, reduce)


def poisson_nll_loss(input: Tensor, target: Tensor, log_input: bool = True, full: bool = False,
                     size_average: bool | None = None, eps: float = 1e-8, reduce: bool | None = None,
                     reduction: str = "mean") -> Tensor:  # fmt: skip
    """exp(x) − y x (log_input), else x − y log(x + eps); `full` adds Stirling's log y! where y > 1."""
    value = input.exp() - target * input if log_input else input - target * (input + eps).log()
    if full:
        stirling = target * target.log() - target + 0.5 * (2 * math.pi * target).log()
        value = value + (target <= 1)._where(0.0, stirling)
    return _reduced(value, reduction, size_average, reduce)


def gaussian_nll_loss(
    input: Tensor, target: Tensor, var: Any, full: bool = False, eps: float = 1e-6, reduction: str = "mean"
) -> Tensor:
    """(log v + (x − y)² / v) / 2 with v = max(var, eps), whose gradient passes the max; `full` adds log(2π) / 2."""
    if not hasattr(var, "uop"):
        if var < 0:
            raise ValueError(f"gaussian_nll_loss: a variance is not negative, got {var}")
        var = input.ones_like() * var
    if var.shape != input.shape:
        if var.shape == input.shape[:-1]:
            var = var.unsqueeze(-1)
        elif var.ndim and not (var.ndim == input.ndim and all(v in (1, n) for v, n in zip(var.shape, input.shape))):
            raise ValueError(
                f"gaussian_nll_loss: var has shape {var.shape}, the input {input.shape}; "
                "the same, with 1 for some dims, or without the last dim"
            )
    v = (var < 0)._where(math.nan, var + (var.clamp(min=eps) - var).detach())  # (no variance is negative)
    value = 0.5 * (v.log() + (input - target).square() / v)
    return _reduced(value + 0.5 * math.log(2 * math.pi) if full else value, reduction)


# *** margins ***


def hinge_embedding_loss(
    input: Tensor,
    target: Tensor,
    margin: float = 1.0,
    size_average: bool | None = None,
    reduce: bool | None = None,
    reduction: str = "mean",
) -> Tensor:
    """x where the target is 1, max(0, margin − x) where it is −1."""
    value = target.ne(1)._where((margin - input).clamp(min=0), 0.0) + target.ne(-1)._where(input, 0.0)
    return _reduced(value, reduction, size_average, reduce)


def soft_margin_loss(
    input: Tensor, target: Tensor, size_average: bool | None = None, reduce: bool | None = None, reduction: str = "mean"
) -> Tensor:
    """log(1 + exp(−y x))."""
    return _reduced(_opposite(target * input), reduction, size_average, reduce)


def margin_ranking_loss(input1: Tensor, input2: Tensor, target: Tensor, margin: float = 0,
                        size_average: bool | None = None, reduce: bool | None = None,
                        reduction: str = "mean") -> Tensor:  # fmt: skip
    """max(0, −y (x1 − x2) + margin)."""
    if not input1.ndim == input2.ndim == target.ndim:
        raise ValueError(
            "margin_ranking_loss: the inputs and the target have equally many dims, "
            f"not {input1.shape}, {input2.shape} and {target.shape}"
        )
    return _reduced((margin - target * (input1 - input2)).clamp(min=0), reduction, size_average, reduce)


def cosine_embedding_loss(input1: Tensor, input2: Tensor, target: Tensor, margin: float = 0,
                          size_average: bool | None = None, reduce: bool | None = None,
                          reduction: str = "mean") -> Tensor:  # fmt: skip
    """1 − cos where the target is 1, max(0, cos − margin) where it is −1; vectors (M,) or (N, M)."""
    if input1.ndim not in (1, 2) or target.ndim != input1.ndim - 1:
        raise ValueError(
            "cosine_embedding_loss: inputs (N, M) need a target (N,), inputs (M,) a target (); "
            f"got {input1.shape}, {target.shape}"
        )
    tiny = 1e-12
    product, square1, square2 = (
        (input1 * input2).sum(-1),
        input1.square().sum(-1) + tiny,
        input2.square().sum(-1) + tiny,
    )
    cos = product / (square1 * square2).sqrt()
    value = target.eq(1)._where(1 - cos, target.eq(-1)._where((cos - margin).clamp(min=0), 0.0))
    return _reduced(value, reduction, size_average, reduce)


def multi_margin_loss(input: Tensor, target: Tensor, p: int = 1, margin: float = 1.0, weight: Tensor | None = None,
                      size_average: bool | None = None, reduce: bool | None = None,
                      reduction: str = "mean") -> Tensor:  # fmt: skip
    """Σ over the other classes max(0, margin − x[class] + x)ᵖ / C, scaled by weight[class]; (C,) or (N, C)."""
    if p not in (1, 2):
        raise ValueError(f"multi_margin_loss: p is 1 or 2, not {p}")
    input = input if input.ndim else input.reshape(1)  # (one class)
    n: Any = input.shape[-1]
    if not target.dtype.is_int:
        raise TypeError(f"multi_margin_loss: targets are class numbers (integers), not {target.dtype.name}")
    expect_shape("multi_margin_loss", (n,), weight=weight)
    hit = checked(target, "multi_margin_loss: class", n, input).unsqueeze(-1).eq(input.arange(n).cast(target.dtype))
    right = hit._where(input, 0.0).sum(-1, keepdim=True)
    value = (margin - right + input).clamp(min=0)
    value = value if p == 1 else value.square()
    if weight is not None:
        value = value * hit._where(weight, 0.0).sum(-1, keepdim=True)
    return _reduced(hit._where(0.0, value).sum(-1) / n, reduction, size_average, reduce)


def multilabel_margin_loss(
    input: Tensor, target: Tensor, size_average: bool | None = None, reduce: bool | None = None, reduction: str = "mean"
) -> Tensor:
    """Σ over right classes t and wrong ones c max(0, 1 − x[t] + x[c]) / C;
    the targets (N, C) list right classes up to the first −1."""
    _same_shape("multilabel_margin_loss", input, target)
    if not input.ndim:  # (one class)
        input, target = input.reshape(1), target.reshape(1)
    n: Any = input.shape[-1]
    listed = (target < 0).long().cumsum(-1).eq(0)
    target = checked(target, "multilabel_margin_loss: class", n, input, low=-1)
    # (N, place in the list, class)
    hit = target.unsqueeze(-1).eq(input.arange(n).cast(target.dtype)) & listed.unsqueeze(-1)
    wrong = ~hit.any(-2, keepdim=True)
    right = hit._where(input.unsqueeze(-2), 0.0).sum(-1, keepdim=True)
    value = (wrong & listed.unsqueeze(-1))._where((1 - right + input.unsqueeze(-2)).clamp(min=0), 0.0)
    return _reduced(value.sum((-2, -1)) / n, reduction, size_average, reduce)


def multilabel_soft_margin_loss(input: Tensor, target: Tensor, weight: Tensor | None = None,
                                size_average: bool | None = None, reduce: bool | None = None,
                                reduction: str = "mean") -> Tensor:  # fmt: skip
    """The mean over classes of binary_cross_entropy_with_logits."""
    value = target * _opposite(input) + (1 - target) * _opposite(-input)
    return _reduced((value if weight is None else value * weight).mean(-1), reduction, size_average, reduce)


def triplet_margin_loss(anchor: Tensor, positive: Tensor, negative: Tensor, margin: float = 1.0, p: float = 2,
                        eps: float = 1e-6, swap: bool = False, size_average: bool | None = None,
                        reduce: bool | None = None, reduction: str = "mean") -> Tensor:  # fmt: skip
    """max(0, d(a, p) − d(a, n) + margin); `swap` takes d(p, n) where that is less than d(a, n)."""
    how = _reduction(reduction, size_average, reduce)
    return triplet_margin_with_distance_loss(
        anchor,
        positive,
        negative,
        distance_function=lambda x, y: pairwise_distance(x, y, p, eps),
        margin=margin,
        swap=swap,
        reduction=how,
    )


def triplet_margin_with_distance_loss(anchor: Tensor, positive: Tensor, negative: Tensor, *,
                                      distance_function: Callable[[Tensor, Tensor], Tensor] | None = None,
                                      margin: float = 1.0, swap: bool = False,
                                      reduction: str = "mean") -> Tensor:  # fmt: skip
    """triplet_margin_loss with a distance of one's own (default: pairwise_distance)."""
    if not margin > 0:
        raise ValueError(f"triplet_margin_loss: margin is above 0, not {margin}")
    if not anchor.ndim == positive.ndim == negative.ndim:
        raise ValueError(
            "triplet_margin_loss: anchor, positive and negative have equally many dims, "
            f"not {anchor.shape}, {positive.shape} and {negative.shape}"
        )
    distance = distance_function or pairwise_distance
    near, far = distance(anchor, positive), distance(anchor, negative)
    if swap:
        far = far.minimum(distance(positive, negative))
    return _reduced((near - far + margin).clamp(min=0), reduction)


class LossMixin:
    cross_entropy = sparse_categorical_crossentropy = cross_entropy
    nll_loss, mse_loss, l1_loss = nll_loss, mse_loss, l1_loss
    binary_cross_entropy, binary_cross_entropy_with_logits = binary_cross_entropy, binary_cross_entropy_with_logits
