"""Inverses of triangular matrices, without a loop over rows.

The inverse of [[A, 0], [C, B]] is [[A⁻¹, 0], [−B⁻¹ C A⁻¹, B⁻¹]]: starting from 1×1 blocks, one batched product per
doubling of the block size gives the inverse of n×n in log2(n) steps of matmuls (Borodin and Munro, 1975).
"""

from __future__ import annotations

from manygrad.tensor.tensor import Tensor


def lower_inverse(a: Tensor, unit: bool = False) -> Tensor:
    """L⁻¹ for the lower triangle of (..., n, n); with `unit` its diagonal counts as ones."""
    n = a.shape[-1]
    if n == 0:
        return a
    size = 1 << (n - 1).bit_length()
    lead = a.shape[:-2]
    eye = Tensor.eye(size, dtype=a.dtype, device=a.device)
    low = a.tril(-1 if unit else 0)
    if size > n:
        low = low.pad((0, size - n, 0, size - n))
        low = low + eye * (Tensor.arange(size) >= n).cast(a.dtype)
    if unit:
        low = low.tril(-1) + eye
    blocks = low.diagonal(0, -2, -1).reciprocal().reshape(*lead, size, 1, 1)  # (..., blocks, width, width), inverted
    width = 1
    while width < size:
        count = size // (2 * width)
        whole = low.reshape(*lead, count, 2 * width, count, 2 * width).diagonal(0, -4, -2).movedim(-1, -3)
        corner = whole[..., width:, :width]
        pairs = blocks.reshape(*lead, count, 2, width, width)
        first, second = pairs[..., 0, :, :], pairs[..., 1, :, :]
        below = -(second @ corner @ first)
        above = first.cat(below.zeros_like(), dim=-1)
        blocks = above.cat(below.cat(second, dim=-1), dim=-2).contiguous()
        width *= 2
    return blocks.reshape(*lead, size, size)[..., :n, :n]


def upper_inverse(a: Tensor, unit: bool = False) -> Tensor:
    return lower_inverse(a.mT, unit).mT
