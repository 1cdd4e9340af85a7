"""How exact products of float32 are (torch.set_float32_matmul_precision)."""

from __future__ import annotations

from manygrad.tensor.environment import FLOAT32_MATMUL_PRECISION

PRECISIONS = ("highest", "high", "medium")


def set_float32_matmul_precision(precision: str) -> None:
    """Sets it for all threads, for kernels that are made from now on: what a TinyJit has captured stays as it is.
    `"highest"`, the default: in float32; `"high"` and `"medium"`: a GPU's matrix instructions may round factors to
    tf32, 10 bits after the point, and add up in float32. Raises ValueError for another name."""
    if precision not in PRECISIONS:
        raise ValueError(f"set_float32_matmul_precision: one of {', '.join(PRECISIONS)}, not {precision!r}")
    FLOAT32_MATMUL_PRECISION.common = precision


def get_float32_matmul_precision() -> str:
    """The precision that holds in this thread."""
    return str(FLOAT32_MATMUL_PRECISION.value)
