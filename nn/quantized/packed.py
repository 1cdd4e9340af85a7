"""Quantised weights packed for products with inputs of int8: what bounds a product is then memory, not unpacking.

16 rows stand side by side, so that a vector holds four bytes of each, which one instruction multiplies and adds up
(`runtime/codegen/kernel/dots.py`), and so that a vector of scales belongs to a vector of sums. Bits and scales are
those of GGUF's blocks; a number's bits lie in planes of 4, 2 or 1 bits, and every 32 numbers of a row are unpacked
alike:

    plane of w bits: (rows / 16, groups of 32, w, 16, 4) uint8; bits p·w.. of byte (k, t) are of number p·4w + 4k + t

    weight  = scale · (number - zero) + offset              scale = d · s, offset = -m · o, where the format has s and o
    product = Σ over groups of (scale · (Σ numbers · x - zero · Σ x) + offset · Σ x) · x's scale      (Σ in int32)
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from manygrad.nn.module import Module
from manygrad.nn.parameter import Buffer
from manygrad.nn.quantized.activations import GROUP, Rounded
from manygrad.nn.quantized.bits import fifth_bits, half_bits, nibbles, parts
from manygrad.nn.quantized.blocks import (
    FLOAT4,
    NAMED,
    UNEVEN,
    four_scales,
    looked_up,
    power_of_two,
    scales_and_offsets,
    scales_of_six,
    sixteen_scales,
    trits,
    twos,
)
from manygrad.nn.quantized.grid_formats import GRID_FORMATS, GridFormat
from manygrad.tensor.dtype import dtypes
from manygrad.tensor.tensor import Tensor

ROWS = 16  # side by side: the 32-bit lanes of the widest vectors
BYTES = 4  # of each, which an instruction adds up

Take = Callable[[Tensor], Tensor]  # bytes of blocks (rows, blocks, bytes) -> (rows, blocks, n) for each block


@dataclass(frozen=True)
class Packing:
    """The parts that are taken from a format's blocks: `numbers`, uint8 in order; factors of the scale and of the
    offset."""

    bits: tuple[int, ...]  # of the planes, from the lowest
    numbers: Take
    scales: tuple[Take, ...]
    offsets: tuple[Take, ...] = ()
    zero: int = 0


def _d(at: int) -> Take:
    """The float16 at a byte, by itself."""
    return lambda b: half_bits(b, at).unsqueeze(-1)


def _minus(at: int) -> Take:
    return lambda b: -half_bits(b, at).unsqueeze(-1)


def _flat(take: Take) -> Take:
    """All that belongs to a block, in order."""
    return lambda b: take(b).reshape(*b.shape[:-1], -1)


def _fives(at: int, bits: int) -> Take:
    return _flat(lambda b: nibbles(b, at) | fifth_bits(b, bits))


def _six_bits(i: int) -> Take:
    return lambda b: scales_and_offsets(b, 4)[i]


def _q3_k(b: Tensor) -> Tensor:
    return parts(b, 32, 96, 2, 2).reshape(*b.shape[:-1], 256) | parts(b, 0, 32, 1, 1).reshape(*b.shape[:-1], 256) << 2


def _q5_k(b: Tensor) -> Tensor:
    return parts(b, 48, 176, 4, 4) | parts(b, 16, 48, 1, 1).reshape(*b.shape[:-1], 4, 2, 32) << 4


def _q6_k(b: Tensor) -> Tensor:
    low, high = parts(b, 0, 128, 2, 4), parts(b, 128, 192, 2, 2)
    return low.reshape(*b.shape[:-1], 2, 128) | high.reshape(*b.shape[:-1], 2, 128) << 4


def _table(take: Take, table: tuple[int, ...]) -> Take:
    """Values of a table, kept as bytes."""
    return _flat(lambda b: looked_up(take(b), table).bitcast(dtypes.uint8) ^ 128)


def _of_grid(f: GridFormat) -> Packing:
    numbers = _flat(lambda b: f.numbers(b).bitcast(dtypes.uint8) ^ 128)
    return Packing((8,), numbers, (f.block_scale, f.scales), zero=128)


PACKINGS = {
    "q4_0": Packing((4,), _flat(lambda b: nibbles(b, 2)), (_d(0),), zero=8),
    "q4_1": Packing((4,), _flat(lambda b: nibbles(b, 4)), (_d(0),), (_d(2),)),
    "q5_0": Packing((4, 1), _fives(6, 2), (_d(0),), zero=16),
    "q5_1": Packing((4, 1), _fives(8, 4), (_d(0),), (_d(2),)),
    "q8_0": Packing((8,), lambda b: b[..., 2:34] ^ 128, (_d(0),), zero=128),
    "q2_k": Packing(
        (2,), _flat(lambda b: parts(b, 16, 80, 2, 2)), (_d(80), lambda b: b[..., :16] & 15),
        (_minus(82), lambda b: b[..., :16] >> 4),
    ),
    "q3_k": Packing((2, 1), _q3_k, (_d(108), lambda b: sixteen_scales(b).cast(dtypes.int8) - 32), zero=4),
    "q4_k": Packing((4,), _flat(lambda b: parts(b, 16, 144, 4, 4)), (_d(0), _six_bits(0)), (_minus(2), _six_bits(1))),
    "q5_k": Packing((4, 1), _flat(_q5_k), (_d(0), _six_bits(0)), (_minus(2), _six_bits(1))),
    "q6_k": Packing((4, 2), _flat(_q6_k), (_d(208), lambda b: b[..., 192:208].bitcast(dtypes.int8)), zero=32),
    "iq4_nl": Packing((8,), _table(lambda b: nibbles(b, 2), UNEVEN), (_d(0),), zero=128),
    "iq4_xs": Packing((8,), _table(lambda b: parts(b, 8, 136, 8, 4), UNEVEN), (_d(0), scales_of_six), zero=128),
    "tq1_0": Packing((2,), trits, (_d(52),), zero=1),
    "tq2_0": Packing((2,), _flat(twos), (_d(64),), zero=1),
    **{name: _of_grid(f) for name, f in GRID_FORMATS.items()},
    "mxfp4": Packing((8,), _table(lambda b: nibbles(b, 1), FLOAT4), (lambda b: power_of_two(b[..., :1]),), zero=128),
    "nvfp4": Packing((8,), _table(lambda b: parts(b, 4, 36, 4, 4), FLOAT4), (four_scales,), zero=128),
}  # fmt: skip


class PackedWeight(Module):
    """The blocks of a matrix packed, and its products with inputs of int8. Not saved: the blocks are.

    All that it holds may be cut along dim 0 (groups of 16 rows) or 1 (blocks), as the blocks.
    """

    def __init__(self, blocks: Tensor, kind: str):
        """`blocks`: (rows, blocks, bytes) uint8; rows that do not fill the last 16 are filled up."""
        p = self.packing = PACKINGS[kind]
        self.rows, self.size = blocks.shape[0], NAMED[kind].size
        self.planes, self.scales, self.offsets = [], list[Buffer](), list[Buffer]()
        blocks = blocks.pad((0, 0, 0, 0, 0, -self.rows % ROWS)) if self.rows % ROWS else blocks
        shift, numbers = 0, p.numbers(blocks)
        for bits in p.bits:
            self.planes.append(_kept(_plane(numbers >> shift & ((1 << bits) - 1), bits)))
            shift += bits
        self.scales = [_kept(_beside(take(blocks))) for take in p.scales]
        self.offsets = [_kept(_beside(take(blocks))) for take in p.offsets]

    def product(self, x: Rounded) -> Tensor:
        """x Wᵀ: (count, columns) -> (count, rows) float32."""
        count, blocks = x.numbers.shape[0], self.planes[0].shape[1]
        each = self.size // GROUP
        pieces = max(1, max(s.shape[2] for s in self.scales) // each)  # of a group, that have scales of their own
        given = x.numbers.reshape(count, 1, 1, blocks, each, *_dims(pieces))
        dot = self._numbers(pieces).unsqueeze(0).cast(dtypes.int32) * given.cast(dtypes.int32)
        dot = dot.sum(tuple(range(6, given.ndim)), dtype=dtypes.int32)  # (count, groups, 16, blocks, each, pieces)
        of_all = (count, 1, 1, blocks, each)
        sums = x.sums(pieces).reshape(*of_all, pieces).expand(dot.shape)
        if self.packing.zero:
            dot = dot - sums * self.packing.zero
        found = _factor(self.scales, dot.shape) * dot.float()
        if self.offsets:
            found = found + _factor(self.offsets, dot.shape) * sums.float()
        out = (x.scales.reshape(*of_all, 1) * found).sum((3, 4, 5)).reshape(count, -1)
        return out if out.shape[1] == self.rows else out[:, : self.rows]

    def _numbers(self, pieces: int) -> Tensor:
        """(groups, 16, blocks, each, pieces, ...) uint8."""
        total: Tensor | None = None
        shift = 0
        for bits, plane in zip(self.packing.bits, self.planes):
            groups, blocks, each = plane.shape[:3]
            found = plane if bits == 8 else _shifted(plane, bits)
            found = found.reshape(groups, blocks, each, 2, 2, 2, ROWS, BYTES)
            total = found if total is None else total + found * (1 << shift)
            shift += bits
        assert total is not None
        total = total.permute(0, 6, 1, 2, 3, 4, 5, 7)
        return total.reshape(*total.shape[:4], *_dims(pieces))


def _factor(factors: list[Buffer], shape: tuple[int, ...]) -> Tensor:
    """Their product for each sum, (count, groups, 16, blocks, each, pieces): float32."""
    total: Tensor | None = None
    for t in factors:
        groups, blocks, n, _ = t.shape
        pieces = min(n, shape[-1])
        x = t.permute(0, 3, 1, 2).reshape(1, groups, ROWS, blocks, n // pieces, pieces).expand(shape).float()
        total = x if total is None else total * x
    assert total is not None
    return total


def _dims(pieces: int) -> tuple[int, ...]:
    """Shape of a group of 32: its pieces, and the numbers of one."""
    return (1, 2, 2, 2, BYTES) if pieces == 1 else (2, 2, 2, BYTES)


def _kept(t: Tensor) -> Buffer:
    return Buffer(t.contiguous(), persistent=False)


def _shifted(plane: Tensor, bits: int) -> Tensor:
    """(groups, blocks, each, bits, 16, 4) bytes -> (..., 8 / bits, bits, 16, 4) numbers."""
    by = (plane.arange(8 // bits) * bits).cast(dtypes.uint8).reshape(-1, 1, 1, 1)
    return plane.unsqueeze(3) >> by & ((1 << bits) - 1)


def _plane(numbers: Tensor, bits: int) -> Tensor:
    """(rows, blocks, numbers of a block) below 2**bits -> (groups, blocks, each, bits, 16, 4) bytes."""
    rows, blocks, size = numbers.shape
    x = numbers.reshape(rows // ROWS, ROWS, blocks, size // GROUP, 8 // bits, bits, BYTES)
    found = x[:, :, :, :, 0]
    for p in range(1, 8 // bits):
        found = found | x[:, :, :, :, p] << p * bits
    return found.permute(0, 2, 3, 4, 1, 5)


def _beside(factors: Tensor) -> Tensor:
    """(rows, blocks, n) -> (groups, blocks, n, 16)."""
    rows, blocks, n = factors.shape
    return factors.reshape(rows // ROWS, ROWS, blocks, n).permute(0, 2, 3, 1)
