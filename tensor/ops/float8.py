"""The float8 types: stored as bytes, cast both ways by arithmetic on bits; nothing else is computed with them.

`float8_e4m3fn` has no infinity and one NaN (0x7f), its largest number is 448; `float8_e5m2` has both, its largest is
57344. Rounding is to nearest even; what is too large becomes 448, or infinity, as in PyTorch.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from manygrad.tensor.dtype import DType, dtypes
from manygrad.tensor.ops.elementary import with_gradient
from manygrad.tensor.uop import Ops

if TYPE_CHECKING:
    from manygrad.tensor.tensor import Tensor

# of the fraction; the bias; what overflow becomes; the first code that is no number
BITS_OF = {dtypes.float8_e4m3fn: (3, 7, 0x7E, 0x7F), dtypes.float8_e5m2: (2, 15, 0x7C, 0x7C)}


def to_float8(x: Tensor, d: DType) -> Tensor:
    """Any type to a float8, by way of float32."""
    wide = x.cast(dtypes.float32)
    fraction, bias, too_large, _ = BITS_OF[d]
    drop = 23 - fraction
    size = wide.detach()._op(Ops.BITCAST, dtype=dtypes.int32) & 0x7FFFFFFF
    normal = ((size + ((1 << (drop - 1)) - 1) + ((size >> drop) & 1)) >> drop) - ((127 - bias) << fraction)
    small = (wide.detach().abs() * 2.0 ** (bias - 1 + fraction)).clamp(max=1 << fraction).round().cast(dtypes.int32)
    code = (size < (128 - bias) << 23)._where(small, (normal > too_large)._where(too_large, normal))
    code = wide.detach().isnan()._where(0x7E if d is dtypes.float8_e5m2 else 0x7F, code)
    signed = wide.detach().signbit()._where(code | 0x80, code)
    out = signed.cast(dtypes.uint8)._op(Ops.BITCAST, dtype=d)
    return with_gradient(out, "to_float8", d, lambda g, x: (g.cast(x.dtype),), x) if x.dtype.is_float else out


def from_float8(x: Tensor, d: DType) -> Tensor:
    """A float8 to any type; all its numbers are numbers of float32."""
    fraction, bias, _, special = BITS_OF[x.dtype]
    code = x.detach()._op(Ops.BITCAST, dtype=dtypes.uint8).cast(dtypes.int32)
    size = code & 0x7F
    normal = ((size << (23 - fraction)) + ((127 - bias) << 23))._op(Ops.BITCAST, dtype=dtypes.float32)
    value = (size < 1 << fraction)._where(size.cast(dtypes.float32) * 2.0 ** (1 - bias - fraction), normal)
    value = (size >= special)._where((size.eq(special) & (special != 0x7F))._where(math.inf, math.nan), value)
    out = (code > 0x7F)._where(-value, value).cast(d)
    return with_gradient(out, "from_float8", d, lambda g, x: (g.cast(x.dtype),), x) if d.is_float else out
