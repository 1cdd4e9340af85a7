"""Small integers packed in the bytes of blocks: (..., bytes) uint8 -> (..., numbers)."""

from __future__ import annotations

from manygrad.tensor.dtype import dtypes
from manygrad.tensor.tensor import Tensor


def half_bits(b: Tensor, at: int) -> Tensor:
    """The float16 at bytes at, at + 1 of each block."""
    low, high = b[..., at].cast(dtypes.uint16), b[..., at + 1].cast(dtypes.uint16)
    return (low | high << 8).bitcast(dtypes.float16)


def parts(b: Tensor, begin: int, end: int, rows: int, bits: int) -> Tensor:
    """Bytes begin..end as (..., rows, 8 / bits, bytes / rows): part j of each byte is its bits j·bits.. and stands in
    row j."""
    x = b[..., begin:end].reshape(*b.shape[:-1], rows, 1, (end - begin) // rows)
    return x >> (x.arange(8 // bits) * bits).cast(dtypes.uint8).reshape(-1, 1) & ((1 << bits) - 1)


def nibbles(b: Tensor, at: int) -> Tensor:
    """16 bytes: (2, 16) numbers, low halves first."""
    return parts(b, at, at + 16, 1, 4).squeeze(-3)


def fifth_bits(b: Tensor, at: int) -> Tensor:
    """4 bytes: (2, 16) bits in order, each as 16 or 0: of two bytes at once, which a vector of bits has in common."""
    x = b[..., at : at + 4].cast(dtypes.uint32).reshape(*b.shape[:-1], 2, 2)
    word = (x[..., :1] | x[..., 1:] << 8).expand(*b.shape[:-1], 2, 16)
    return ((word >> b.arange(16).cast(dtypes.uint32) & 1) << 4).cast(dtypes.uint8)


def bits_of(x: Tensor, first: int, step: int, count: int, width: int) -> Tensor:
    """(..., count): from bit `first` on, every `step` bits of integers one of `width` bits."""
    at = (x.arange(count) * step + first).cast(x.dtype)
    return x.unsqueeze(-1) >> at & ((1 << width) - 1)


def words(b: Tensor, size: int) -> Tensor:
    """Bytes as (..., bytes / size) integers of `size` bytes, lowest byte first."""
    x = b.reshape(*b.shape[:-1], b.shape[-1] // size, size).cast(_UINTS[size])
    total = x[..., 0]
    for i in range(1, size):
        total = total | x[..., i] << 8 * i
    return total


_UINTS = {2: dtypes.uint16, 4: dtypes.uint32}


def two_nibbles(b: Tensor, begin: int, end: int) -> Tensor:
    """(..., 2 · bytes) numbers of 4 bits, of each byte the lower one first."""
    return bits_of(b[..., begin:end], 0, 4, 2, 4).reshape(*b.shape[:-1], 2 * (end - begin))
