"""`manygrad.nn.functional`: torch.nn.functional's names and signatures, the input first.

A name whose method on `Tensor` has the same signature is that method.
"""

from __future__ import annotations

from manygrad.tensor.deferred.install import put_functions_off
from manygrad.tensor.dtype import DType
from manygrad.tensor.ops.adaptive_pooling import (
    adaptive_avg_pool1d,
    adaptive_avg_pool2d,
    adaptive_avg_pool3d,
    adaptive_max_pool1d,
    adaptive_max_pool1d_with_indices,
    adaptive_max_pool2d,
    adaptive_max_pool2d_with_indices,
    adaptive_max_pool3d,
    adaptive_max_pool3d_with_indices,
    fractional_max_pool2d,
    fractional_max_pool2d_with_indices,
    fractional_max_pool3d,
    fractional_max_pool3d_with_indices,
)
from manygrad.tensor.ops.attention import multi_head_attention_forward, scaled_dot_product_attention
from manygrad.tensor.ops.convolution import conv1d, conv2d, conv3d, conv_transpose1d, conv_transpose2d, conv_transpose3d
from manygrad.tensor.ops.ctc import ctc_loss
from manygrad.tensor.ops.distance import cosine_similarity, pairwise_distance, pdist
from manygrad.tensor.ops.dropout import alpha_dropout, dropout, dropout1d, dropout2d, dropout3d, feature_alpha_dropout
from manygrad.tensor.ops.embedding import embedding, embedding_bag
from manygrad.tensor.ops.inplace import refuse_leaf
from manygrad.tensor.ops.interpolation import (
    affine_grid,
    grid_sample,
    interpolate,
    upsample,
    upsample_bilinear,
    upsample_nearest,
)
from manygrad.tensor.ops.loss import (
    binary_cross_entropy,
    binary_cross_entropy_with_logits,
    cosine_embedding_loss,
    cross_entropy,
    gaussian_nll_loss,
    hinge_embedding_loss,
    huber_loss,
    kl_div,
    l1_loss,
    linear_cross_entropy,
    margin_ranking_loss,
    mse_loss,
    multi_margin_loss,
    multilabel_margin_loss,
    multilabel_soft_margin_loss,
    nll_loss,
    poisson_nll_loss,
    smooth_l1_loss,
    soft_margin_loss,
    triplet_margin_loss,
    triplet_margin_with_distance_loss,
)
from manygrad.tensor.ops.pooling import (
    avg_pool1d,
    avg_pool2d,
    avg_pool3d,
    lp_pool1d,
    lp_pool2d,
    lp_pool3d,
    max_pool1d,
    max_pool1d_with_indices,
    max_pool2d,
    max_pool2d_with_indices,
    max_pool3d,
    max_pool3d_with_indices,
    max_unpool1d,
    max_unpool2d,
    max_unpool3d,
)
from manygrad.tensor.ops.shuffling import bilinear, channel_shuffle, fold, pixel_shuffle, pixel_unshuffle, unfold
from manygrad.tensor.tensor import Tensor

__all__ = [
    "adaptive_avg_pool1d", "adaptive_avg_pool2d", "adaptive_avg_pool3d", "adaptive_max_pool1d",
    "adaptive_max_pool1d_with_indices", "adaptive_max_pool2d", "adaptive_max_pool2d_with_indices",
    "adaptive_max_pool3d", "adaptive_max_pool3d_with_indices", "affine_grid", "alpha_dropout", "avg_pool1d",
    "avg_pool2d", "avg_pool3d", "batch_norm", "bilinear", "binary_cross_entropy", "binary_cross_entropy_with_logits",
    "celu", "celu_", "channel_shuffle", "conv1d", "conv2d", "conv3d", "conv_transpose1d", "conv_transpose2d",
    "conv_transpose3d", "cosine_embedding_loss", "cosine_similarity", "cross_entropy", "ctc_loss", "dropout",
    "dropout1d", "dropout2d", "dropout3d", "elu", "elu_", "embedding", "embedding_bag", "feature_alpha_dropout",
    "fold", "fractional_max_pool2d", "fractional_max_pool2d_with_indices", "fractional_max_pool3d",
    "fractional_max_pool3d_with_indices", "gaussian_nll_loss", "gelu", "glu", "grid_sample", "group_norm",
    "gumbel_softmax", "hardshrink", "hardsigmoid", "hardswish", "hardtanh", "hardtanh_", "hinge_embedding_loss",
    "huber_loss", "instance_norm", "interpolate", "kl_div", "l1_loss", "layer_norm", "leaky_relu", "leaky_relu_",
    "linear", "linear_cross_entropy", "local_response_norm", "log_softmax", "logsigmoid", "lp_pool1d", "lp_pool2d",
    "lp_pool3d", "margin_ranking_loss", "max_pool1d", "max_pool1d_with_indices", "max_pool2d",
    "max_pool2d_with_indices", "max_pool3d", "max_pool3d_with_indices", "max_unpool1d", "max_unpool2d", "max_unpool3d",
    "mish", "mse_loss", "multi_head_attention_forward", "multi_margin_loss", "multilabel_margin_loss",
    "multilabel_soft_margin_loss", "nll_loss", "normalize", "one_hot", "pad", "pairwise_distance", "pdist",
    "pixel_shuffle", "pixel_unshuffle", "poisson_nll_loss", "prelu", "relu", "relu6", "relu_", "rms_norm", "rrelu",
    "rrelu_", "scaled_dot_product_attention", "selu", "selu_", "sigmoid", "silu", "smooth_l1_loss", "soft_margin_loss",
    "softmax", "softmin", "softplus", "softshrink", "softsign", "tanh", "tanhshrink", "threshold", "threshold_",
    "triplet_margin_loss", "triplet_margin_with_distance_loss", "unfold", "upsample", "upsample_bilinear",
    "upsample_nearest",
]  # fmt: skip

# *** activations ***

glu, gelu, hardshrink, logsigmoid, prelu, softplus, softshrink, softsign, tanhshrink = (
    Tensor.glu, Tensor.gelu, Tensor.hardshrink, Tensor.logsigmoid, Tensor.prelu, Tensor.softplus, Tensor.softshrink,
    Tensor.softsign, Tensor.tanhshrink
)  # fmt: skip
sigmoid, tanh = Tensor.sigmoid, Tensor.tanh


def threshold(input: Tensor, threshold: float, value: float, inplace: bool = False) -> Tensor:
    return _into(input, input.threshold(threshold, value), inplace)


def relu(input: Tensor, inplace: bool = False) -> Tensor:
    return _into(input, input.relu(), inplace)


def relu6(input: Tensor, inplace: bool = False) -> Tensor:
    return _into(input, input.relu6(), inplace)


def hardtanh(input: Tensor, min_val: float = -1.0, max_val: float = 1.0, inplace: bool = False) -> Tensor:
    return _into(input, input.hardtanh(min_val, max_val), inplace)


def hardsigmoid(input: Tensor, inplace: bool = False) -> Tensor:
    return _into(input, input.hardsigmoid(), inplace)


def hardswish(input: Tensor, inplace: bool = False) -> Tensor:
    return _into(input, input.hardswish(), inplace)


def leaky_relu(input: Tensor, negative_slope: float = 0.01, inplace: bool = False) -> Tensor:
    return _into(input, input.leaky_relu(negative_slope), inplace)


def elu(input: Tensor, alpha: float = 1.0, inplace: bool = False) -> Tensor:
    return _into(input, input.elu(alpha), inplace)


def selu(input: Tensor, inplace: bool = False) -> Tensor:
    return _into(input, input.selu(), inplace)


def celu(input: Tensor, alpha: float = 1.0, inplace: bool = False) -> Tensor:
    return _into(input, input.celu(alpha), inplace)


def silu(input: Tensor, inplace: bool = False) -> Tensor:
    return _into(input, input.silu(), inplace)


def mish(input: Tensor, inplace: bool = False) -> Tensor:
    return _into(input, input.mish(), inplace)


def rrelu(
    input: Tensor, lower: float = 1 / 8, upper: float = 1 / 3, training: bool = False, inplace: bool = False
) -> Tensor:
    return _into(input, input.rrelu(lower, upper, training), inplace)


def threshold_(input: Tensor, threshold: float, value: float) -> Tensor:
    return _written(input, input.threshold(threshold, value), "threshold_")


def relu_(input: Tensor) -> Tensor:
    return _written(input, input.relu(), "relu_")


def hardtanh_(input: Tensor, min_val: float = -1.0, max_val: float = 1.0) -> Tensor:
    return _written(input, input.hardtanh(min_val, max_val), "hardtanh_")


def leaky_relu_(input: Tensor, negative_slope: float = 0.01) -> Tensor:
    return _written(input, input.leaky_relu(negative_slope), "leaky_relu_")


def elu_(input: Tensor, alpha: float = 1.0) -> Tensor:
    return _written(input, input.elu(alpha), "elu_")


def selu_(input: Tensor) -> Tensor:
    return _written(input, input.selu(), "selu_")


def celu_(input: Tensor, alpha: float = 1.0) -> Tensor:
    return _written(input, input.celu(alpha), "celu_")


def rrelu_(input: Tensor, lower: float = 1 / 8, upper: float = 1 / 3, training: bool = False) -> Tensor:
    return _written(input, input.rrelu(lower, upper, training), "rrelu_")


def softmax(input: Tensor, dim: int | None = None, _stacklevel: int = 3, dtype: DType | str | None = None) -> Tensor:
    return input.softmax(_implicit(input, dim), dtype)


def softmin(input: Tensor, dim: int | None = None, _stacklevel: int = 3, dtype: DType | str | None = None) -> Tensor:
    return input.softmin(_implicit(input, dim), dtype)


def log_softmax(
    input: Tensor, dim: int | None = None, _stacklevel: int = 3, dtype: DType | str | None = None
) -> Tensor:
    return input.log_softmax(_implicit(input, dim), dtype)


def gumbel_softmax(logits: Tensor, tau: float = 1, hard: bool = False, eps: float = 1e-10, dim: int = -1) -> Tensor:
    return logits.gumbel_softmax(tau, hard, dim)


def _implicit(input: Tensor, dim: int | None) -> int:
    """PyTorch's old rule where no dim is given: dim 0 of vectors and of (C, H, W), else dim 1."""
    return dim if dim is not None else 0 if input.ndim in (0, 1, 3) else 1


def _into(input: Tensor, result: Tensor, inplace: bool) -> Tensor:
    return _written(input, result, "an activation in place") if inplace else result


def _written(input: Tensor, result: Tensor, name: str) -> Tensor:
    refuse_leaf(input, name)
    return input._overwrite(result)


# *** normalisation ***

batch_norm, group_norm, instance_norm = Tensor.batch_norm, Tensor.group_norm, Tensor.instance_norm
layer_norm, local_response_norm, normalize, rms_norm = (
    Tensor.layer_norm,
    Tensor.local_response_norm,
    Tensor.normalize,
    Tensor.rms_norm,
)

# *** linear ***

linear = Tensor.linear

# *** shapes and indices ***

pad = Tensor.pad
one_hot = Tensor.one_hot

put_functions_off(globals(), __all__)
