"""GGUF's quantised blocks as numbers: each format is a formula over the bytes of its blocks, (blocks, bytes) uint8 ->
(blocks, size) float32.

q are small integers packed in bytes, d and m a scale and an offset in float16; the K formats have 8 or 16 groups a
block whose own scales are integers, times the block's d (layouts: ggml's ggml-common.h).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from manygrad.tensor.dtype import dtypes
from manygrad.tensor.tensor import Tensor


@dataclass(frozen=True)
class Block:
    name: str
    size: int  # elements
    nbytes: int
    values: Callable[[Tensor], Tensor]


def _half(b: Tensor, at: int) -> Tensor:
    """The float16 at bytes at, at + 1: (blocks, 1) float32."""
    low, high = b[:, at : at + 1].cast(dtypes.uint16), b[:, at + 1 : at + 2].cast(dtypes.uint16)
    return (low | high << 8).bitcast(dtypes.float16).cast(dtypes.float32)


def _parts(b: Tensor, begin: int, end: int, rows: int, bits: int) -> Tensor:
    """Bytes begin..end as (blocks, rows, 8 / bits, bytes / rows): part j of each byte is its bits j·bits..
    and stands in row j."""
    x = b[:, begin:end].reshape(b.shape[0], rows, 1, (end - begin) // rows)
    return x >> (x.arange(8 // bits) * bits).cast(dtypes.uint8).reshape(1, 1, -1, 1) & ((1 << bits) - 1)


def _nibbles(b: Tensor, at: int) -> Tensor:
    """16 bytes: 32 numbers, low halves first."""
    return _parts(b, at, at + 16, 1, 4).reshape(-1, 32)


def _fifth_bits(b: Tensor, at: int) -> Tensor:
    """4 bytes: 32 bits in order, each as 16 or 0."""
    x = b[:, at : at + 4].reshape(-1, 4, 1) >> b.arange(8).cast(dtypes.uint8) & 1
    return x.reshape(-1, 32) << 4


def _q4_0(b: Tensor) -> Tensor:
    return (_nibbles(b, 2).float() - 8) * _half(b, 0)


def _q4_1(b: Tensor) -> Tensor:
    return _nibbles(b, 4).float() * _half(b, 0) + _half(b, 2)


def _q5_0(b: Tensor) -> Tensor:
    return ((_nibbles(b, 6) | _fifth_bits(b, 2)).float() - 16) * _half(b, 0)


def _q5_1(b: Tensor) -> Tensor:
    return (_nibbles(b, 8) | _fifth_bits(b, 4)).float() * _half(b, 0) + _half(b, 2)


def _q8_0(b: Tensor) -> Tensor:
    return b[:, 2:34].bitcast(dtypes.int8).float() * _half(b, 0)


def _groups(q: Tensor, scale: Tensor, offset: Tensor | None = None) -> Tensor:
    """q (blocks, groups, size) · scale (blocks, groups) − offset -> (blocks, elements)."""
    out = q.float() * scale.unsqueeze(-1)
    return (out if offset is None else out - offset.unsqueeze(-1)).reshape(-1, 256)


def _q2_k(b: Tensor) -> Tensor:
    scales = b[:, :16]
    return _groups(
        _parts(b, 16, 80, 2, 2).reshape(-1, 16, 16),
        (scales & 15).float() * _half(b, 80),
        (scales >> 4).float() * _half(b, 82),
    )


def _q3_k(b: Tensor) -> Tensor:
    low, high = _parts(b, 96, 104, 1, 4).reshape(-1, 16), _parts(b, 104, 108, 1, 2).reshape(-1, 16)
    scales = (low | high << 4).float() - 32
    missing = _parts(b, 0, 32, 1, 1).reshape(-1, 16, 16) ^ 1
    return _groups(_parts(b, 32, 96, 2, 2).reshape(-1, 16, 16).float() - (missing << 2).float(), scales * _half(b, 108))


def _scales_and_offsets(b: Tensor, at: int) -> tuple[Tensor, Tensor]:
    """12 bytes: 8 scales and 8 offsets of 6 bits, (blocks, 8) each."""
    s, m, both = b[:, at : at + 4], b[:, at + 4 : at + 8], b[:, at + 8 : at + 12]
    return (s & 63).cat(both & 15 | s >> 2 & 48, dim=1).float(), (m & 63).cat(both >> 4 | m >> 2 & 48, dim=1).float()


def _q4_k(b: Tensor) -> Tensor:
    scales, offsets = _scales_and_offsets(b, 4)
    return _groups(_parts(b, 16, 144, 4, 4).reshape(-1, 8, 32), scales * _half(b, 0), offsets * _half(b, 2))


def _q5_k(b: Tensor) -> Tensor:
    scales, offsets = _scales_and_offsets(b, 4)
    q = _parts(b, 48, 176, 4, 4).reshape(-1, 8, 32) | _parts(b, 16, 48, 1, 1).reshape(-1, 8, 32) << 4
    return _groups(q, scales * _half(b, 0), offsets * _half(b, 2))


def _q6_k(b: Tensor) -> Tensor:
    q = _parts(b, 0, 128, 2, 4).reshape(-1, 16, 16) | _parts(b, 128, 192, 2, 2).reshape(-1, 16, 16) << 4
    return _groups(q.float() - 32, b[:, 192:208].bitcast(dtypes.int8).float() * _half(b, 208))


BLOCKS: dict[int, Block] = {  # by ggml's type number
    2: Block("Q4_0", 32, 18, _q4_0),
    3: Block("Q4_1", 32, 20, _q4_1),
    6: Block("Q5_0", 32, 22, _q5_0),
    7: Block("Q5_1", 32, 24, _q5_1),
    8: Block("Q8_0", 32, 34, _q8_0),
    10: Block("Q2_K", 256, 84, _q2_k),
    11: Block("Q3_K", 256, 110, _q3_k),
    12: Block("Q4_K", 256, 144, _q4_k),
    13: Block("Q5_K", 256, 176, _q5_k),
    14: Block("Q6_K", 256, 210, _q6_k),
}
