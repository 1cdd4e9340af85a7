"""`add_`, `clamp_`, `squeeze_`, ...: every operator that PyTorch also has in place,
made from the one without the underscore.

The result is assigned to the tensor's storage, so its views show it; shape and type stay.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import TYPE_CHECKING, Any

from manygrad.tensor import grad_mode, storage
from manygrad.tensor.dtype import can_cast
from manygrad.tensor.lock import locked
from manygrad.tensor.source import user_line
from manygrad.tensor.uop.views import ALIASES

if TYPE_CHECKING:
    from manygrad.tensor.tensor import Tensor

Written = Callable[..., Any]  # the result is written into the tensor's storage
Viewed = Callable[..., Any]  # the tensor becomes a view of its storage, perhaps of another shape; nothing is written
OPERATORS = {
    "__iadd__": "add", "__isub__": "sub", "__imul__": "mul", "__itruediv__": "div", "__ifloordiv__": "floor_divide",
    "__imod__": "remainder",
    "__ipow__": "pow", "__iand__": "bitwise_and", "__ior__": "bitwise_or", "__ixor__": "bitwise_xor",
    "__ilshift__": "bitwise_left_shift",
    "__irshift__": "bitwise_right_shift",
}  # fmt: skip


def _comes_before(cls: type, name: str, other: str) -> bool:
    """Whether the class that `name` is found in stands before that of `other`, or there is no other: what is made of
    `name` is then not inherited."""
    kinds = cls.__mro__
    of_name, of_other = (next((i for i, k in enumerate(kinds) if n in k.__dict__), len(kinds)) for n in (name, other))
    return of_name < of_other


def _writing(name: str, f: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(f)
    def value(self: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        refuse_leaf(self, f"{name}_")
        out = f(self, *args, **kwargs)
        if out.shape != self.shape:
            raise ValueError(
                f"{name}_: the result has shape {out.shape}, but it is written in place of {self.shape}; "
                f"use x = x.{name}(...)"
            )
        if not can_cast(out.dtype, self.dtype):
            raise TypeError(
                f"{name}_: the result is {out.dtype.name} and cannot be written in place of {self.dtype.name}; "
                f"use x = x.{name}(...), or cast x first"
            )
        return out if out.dtype is self.dtype else out.cast(self.dtype)

    @locked
    @wraps(f)
    def method(self: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        return self._overwrite(value(self, *args, **kwargs))

    method.__name__, method.__doc__ = f"{name}_", f"`{name}`, written in place of self."
    method.value = value  # type: ignore[attr-defined]
    value.__name__ = f"{name}_"
    return method


def refuse_leaf(t: Tensor, name: str) -> None:
    """What gradients are taken to must keep its value while they can still be asked for:
    it is written under no_grad()."""
    if not grad_mode.is_grad_enabled() or not t.dtype.is_float:
        return
    what = ""
    if t._requires_grad:
        what = "a leaf Variable"
    elif t.uop.op in ALIASES and t.requires_grad and any(s._requires_grad for s in storage.sharing(t)):
        what = "a view of a leaf Variable"
    if what:
        raise RuntimeError(
            f"{name}: {what} that requires grad is being used in an in-place operation (shape {t.shape}, "
            f"{user_line()}); write to it under no_grad(), or use the operator without the underscore, "
            "which makes a new tensor"
        )


def _viewing(name: str, f: Callable[..., Any]) -> Callable[..., Any]:
    @locked
    @wraps(f)
    def method(self: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        view = f(self, *args, **kwargs)
        self._become(view.uop, view._storage)
        return self

    method.__name__, method.__doc__ = f"{name}_", f"self becomes `self.{name}(...)`, a view of the same storage."
    return method


class InplaceMixin:
    """The annotations are the table: each name is made where the class has the operator without the underscore.

    Large: PyTorch's functions.
    """

    abs_: Written
    absolute_: Written
    acos_: Written
    acosh_: Written
    add_: Written
    addbmm_: Written
    addcdiv_: Written
    addcmul_: Written
    addmm_: Written
    addmv_: Written
    addr_: Written
    arccos_: Written
    arccosh_: Written
    arcsin_: Written
    arcsinh_: Written
    arctan_: Written
    arctan2_: Written
    arctanh_: Written
    asin_: Written
    asinh_: Written
    atan_: Written
    atan2_: Written
    atanh_: Written
    baddbmm_: Written
    bernoulli_: Written
    bitwise_and_: Written
    bitwise_left_shift_: Written
    bitwise_not_: Written
    bitwise_or_: Written
    bitwise_right_shift_: Written
    bitwise_xor_: Written
    ceil_: Written
    clamp_: Written
    clamp_max_: Written
    clamp_min_: Written
    clip_: Written
    conj_physical_: Written
    copysign_: Written
    cos_: Written
    cosh_: Written
    cumprod_: Written
    cumsum_: Written
    deg2rad_: Written
    digamma_: Written
    div_: Written
    divide_: Written
    eq_: Written
    erf_: Written
    erfc_: Written
    erfinv_: Written
    exp_: Written
    exp2_: Written
    expm1_: Written
    fill_diagonal_: Written
    fix_: Written
    float_power_: Written
    floor_: Written
    floor_divide_: Written
    fmod_: Written
    frac_: Written
    gcd_: Written
    ge_: Written
    greater_: Written
    greater_equal_: Written
    gt_: Written
    heaviside_: Written
    hypot_: Written
    i0_: Written
    igamma_: Written
    igammac_: Written
    index_add_: Written
    index_copy_: Written
    index_fill_: Written
    index_put_: Written
    index_reduce_: Written
    lcm_: Written
    ldexp_: Written
    le_: Written
    lerp_: Written
    less_: Written
    less_equal_: Written
    lgamma_: Written
    log_: Written
    log10_: Written
    log1p_: Written
    log2_: Written
    logical_and_: Written
    logical_not_: Written
    logical_or_: Written
    logical_xor_: Written
    logit_: Written
    lt_: Written
    lshift_: Written
    masked_fill_: Written
    masked_scatter_: Written
    mul_: Written
    multiply_: Written
    mvlgamma_: Written
    nan_to_num_: Written
    ne_: Written
    neg_: Written
    negative_: Written
    nextafter_: Written
    not_equal_: Written
    polygamma_: Written
    pow_: Written
    put_: Written
    rad2deg_: Written
    reciprocal_: Written
    relu_: Written
    remainder_: Written
    renorm_: Written
    round_: Written
    rsqrt_: Written
    rshift_: Written
    scatter_: Written
    scatter_add_: Written
    scatter_reduce_: Written
    sgn_: Written
    sigmoid_: Written
    sign_: Written
    sin_: Written
    sinc_: Written
    sinh_: Written
    sqrt_: Written
    square_: Written
    sub_: Written
    subtract_: Written
    tan_: Written
    tanh_: Written
    tril_: Written
    triu_: Written
    true_divide_: Written
    trunc_: Written
    xlogy_: Written

    squeeze_: Viewed
    unsqueeze_: Viewed
    transpose_: Viewed
    swapaxes_: Viewed
    swapdims_: Viewed
    t_: Viewed
    detach_: Viewed
    as_strided_: Viewed

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        for inplace, kind in InplaceMixin.__annotations__.items():
            name = inplace.removesuffix("_")
            if _comes_before(cls, name, inplace):
                setattr(cls, inplace, (_writing if kind == "Written" else _viewing)(name, getattr(cls, name)))
        for operator, name in OPERATORS.items():
            if _comes_before(cls, f"{name}_", operator):
                setattr(cls, operator, getattr(cls, f"{name}_"))

    def fill_(self: Tensor, value: Any) -> Tensor:
        """Every element becomes `value` (a number or 0-d tensor)."""
        if hasattr(value, "uop") and value.ndim:
            raise ValueError(f"fill_ takes one value, not a tensor of shape {value.shape}; use copy_")
        refuse_leaf(self, "fill_")
        return self._overwrite(value)

    def zero_(self: Tensor) -> Tensor:
        return self.fill_(0)

    def copy_(self: Tensor, src: Tensor, non_blocking: bool = False) -> Tensor:
        """The values of `src`, broadcast, cast, and moved to this tensor's device."""
        refuse_leaf(self, "copy_")
        return self._overwrite(src.to(self.device) if src.uop.device is not None and src.device != self.device else src)
