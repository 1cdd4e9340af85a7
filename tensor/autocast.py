"""Mixed precision: `with autocast():` products are made in a half type, what needs range or many digits in float32.

Parameters stay in float32, and so do their gradients; a product converts what it is given, and gives the half type.
Sums, exponentials, norms and losses convert half types to float32. All other operations take the types that come.
A mode is its thread's own; inside of an operation, and in the backward pass, nothing is converted.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextvars import ContextVar, Token
from typing import Any

from manygrad.tensor.dtype import DType, dtypes

AUTOCAST: ContextVar[DType | None] = ContextVar("autocast", default=None)
autocast_dtype = AUTOCAST.get  # the half type, None outside

IN_HALF = frozenset(
    "matmul __matmul__ __rmatmul__ mm bmm mv addmm addmv addbmm baddbmm linear bilinear einsum tensordot "
    "conv1d conv2d conv3d conv_transpose1d conv_transpose2d conv_transpose3d scaled_dot_product_attention".split()
)
IN_FLOAT32 = frozenset(
    "exp exp2 expm1 log log2 log10 log1p pow __pow__ __rpow__ rsqrt reciprocal acos asin cosh sinh tan erfinv "
    "softmax log_softmax softmin logsumexp sum prod cumsum cumprod norm dist cdist renorm "
    "layer_norm group_norm rms_norm local_response_norm cosine_similarity pairwise_distance "
    "cross_entropy nll_loss gaussian_nll_loss poisson_nll_loss mse_loss l1_loss smooth_l1_loss huber_loss kl_div "
    "soft_margin_loss margin_ranking_loss multi_margin_loss multilabel_margin_loss multilabel_soft_margin_loss "
    "triplet_margin_loss hinge_embedding_loss cosine_embedding_loss binary_cross_entropy "
    "binary_cross_entropy_with_logits linear_cross_entropy ctc_loss".split()
)


class autocast:
    """`with autocast():` or `@autocast()`: mixed precision for what is computed inside (torch.autocast).

    `device_type` is there for programs that were written for PyTorch, which has a mode for each; `dtype`: bfloat16,
    which needs nothing else, or float16, whose gradients need a GradScaler; `enabled=False`: as without it."""

    def __init__(self, device_type: str | None = None, dtype: DType | None = None, enabled: bool = True) -> None:
        if isinstance(device_type, DType):
            raise TypeError("autocast: the first argument is the kind of device; pass dtype=")
        kind = dtypes.bfloat16 if dtype is None else dtype
        if kind not in (dtypes.bfloat16, dtypes.float16):
            raise ValueError(f"autocast: dtype is bfloat16 or float16, not {kind.name}")
        self.dtype = kind if enabled else None
        self.before: list[Token[DType | None]] = []

    def __enter__(self) -> None:
        self.before.append(AUTOCAST.set(self.dtype))

    def __exit__(self, *exc: object) -> None:
        AUTOCAST.reset(self.before.pop())

    def __call__(self, fn: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(fn)
        def wrapped(*args: Any, **kwargs: Any) -> Any:
            with autocast(dtype=self.dtype, enabled=self.dtype is not None):
                return fn(*args, **kwargs)

        return wrapped


class as_given:
    """`with as_given():` an operation that is made inside converts nothing."""

    def __enter__(self) -> None:
        self.before = AUTOCAST.set(None)

    def __exit__(self, *exc: object) -> None:
        AUTOCAST.reset(self.before)


def converted(half: DType, call: Callable[..., Any], name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """`call(*args, **kwargs)`, an operation of that name, with tensors of the types that it has under autocast."""
    with as_given():
        to = half if name in IN_HALF else dtypes.float32 if name in IN_FLOAT32 else None
        if to is None:
            return call(*args, **kwargs)
        return call(*[_to(x, to) for x in args], **{k: _to(x, to) for k, x in kwargs.items()})


def _to(x: Any, to: DType) -> Any:
    """Tensors of float32 and half types in that type; float64 stays, as in PyTorch."""
    from manygrad.tensor.tensor import Tensor

    if isinstance(x, Tensor):
        return x.cast(to) if x.dtype is not to and (x.dtype is dtypes.float32 or x.dtype.is_half) else x
    return type(x)(_to(y, to) for y in x) if type(x) in (list, tuple) else x
