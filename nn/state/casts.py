"""Which values may be loaded into a tensor of another type.

from float to float, of any width    rounded to it
from bool, whole numbers             where each of the values is one of the new type's, too
from float to bool, whole numbers    never
"""

from __future__ import annotations

from typing import Any

import numpy as np

from manygrad.tensor.dtype import DType, to_dtype
from manygrad.tensor.engine import default_device
from manygrad.tensor.tensor import Tensor

EXACT = 1 << 53  # whole numbers up to it are float64's


def loses(values: Tensor | np.ndarray, to: DType) -> str:
    """Why `values` are not to be loaded into a tensor of type `to`, or nothing. Cost: a look at all values where whole
    numbers become those of a smaller range."""
    of = values.dtype if isinstance(values, Tensor) else _type_of(values)
    if of is to or (of.is_float and to.is_float):
        return ""
    if of.is_float:
        return f"{of.name} does not go into {to.name}, which has no fractions: cast it where it is meant"
    if not to.is_float and to.min <= of.min and of.max <= to.max:
        return ""
    array = _array(values)
    if not array.size:
        return ""
    low, high = int(array.min()), int(array.max())
    if to.is_float:
        floats = array.astype(np.float64)
        with np.errstate(over="ignore"):
            kept = bool((to.array(floats).astype(np.float64) == floats).all())
        if kept and not -EXACT <= low <= high <= EXACT:
            kept = all(int(f) == int(x) for f, x in zip(floats.ravel(), array.ravel()))
    else:
        kept = to.min <= low and high <= to.max
    return (
        "" if kept else f"{of.name} does not go into {to.name}, which does not have all of its values {low} to {high}"
    )


def _array(values: Tensor | np.ndarray) -> np.ndarray:
    if isinstance(values, np.ndarray):
        return values
    on_disk = isinstance(values.device, str) and values.device.startswith("DISK")
    array: np.ndarray = (values.to(default_device()) if on_disk else values).detach().numpy()
    return array


def _type_of(array: np.ndarray) -> DType:
    return to_dtype(str(array.dtype))


def array_loses(values: np.ndarray, to: Any) -> str:
    """The same for arrays of NumPy's, which have types that tensors have not."""
    is_exact = values.dtype == to or np.can_cast(values.dtype, to, "safe")
    if is_exact and not (values.dtype.kind in "iu" and to.kind in "fc"):  # (int64 is "safe" in float64, and loses)
        return ""
    if {values.dtype.kind, to.kind} <= set("biuf") and to.itemsize <= 8:
        return loses(values, to_dtype(str(to)))
    return "" if np.can_cast(values.dtype, to, "same_kind") else f"{values.dtype} does not go into {to}: cast it"
