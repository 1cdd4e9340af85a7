"""GGUF's quantised blocks as numbers: each format is a formula over the bytes of its blocks.

(..., blocks, bytes) uint8 -> (..., blocks, *dims) float32. `dims` are a block's elements in order, in the shape in
which its bytes hold them: of two nibbles a byte (2, bytes). A sum over these dims reads bytes in vectors, and what
belongs to a whole block, its scale, is decoded once a block.

q are small integers packed in bytes, d and m a scale and an offset in float16; the K formats have 8 or 16 groups a
block whose own scales are integers, times the block's d (layouts: ggml's ggml-common.h). Of IQ4, MXFP4 and NVFP4 a
nibble is the number of a value in a table; of IQ1, IQ2 and IQ3 a number is a row of 4 or 8 values, and signs stand
apart (`grid_formats.py`). TQ are numbers of -1, 0 and 1.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import lru_cache
from math import prod

from manygrad.nn.quantized.bits import fifth_bits, half_bits, nibbles, parts
from manygrad.nn.quantized.grid_formats import GRID_FORMATS
from manygrad.tensor.dtype import dtypes
from manygrad.tensor.grad_mode import set_grad_enabled
from manygrad.tensor.ops.elementary import fma
from manygrad.tensor.source import mark
from manygrad.tensor.tensor import Tensor
from manygrad.tensor.uop import BufferSpec, Ops, UOp
from manygrad.tensor.uop.rewrite import substitute


@dataclass(frozen=True)
class BlockFormat:
    name: str
    number: int  # ggml's, in GGUF files
    nbytes: int
    dims: tuple[int, ...]
    formula: Callable[[Tensor], Tensor]

    def values(self, blocks: Tensor) -> Tensor:
        """(..., blocks, bytes) -> (..., blocks, *dims) float32. A model has hundreds of matrices of few shapes: for
        blocks in memory the formula is written down once a shape and place, which takes ten times as long as putting
        a matrix into it."""
        u = blocks.uop
        if u.op is not Ops.BUFFER:
            return self.formula(blocks)
        given, graph = _graph(self.name, replace(u.arg, uid=0))
        return blocks._new(mark(substitute(graph, {given: u})))

    @property
    def size(self) -> int:
        """Elements."""
        return prod(self.dims)

    @property
    def bits(self) -> float:
        """An element's, with its share of the scales."""
        return 8 * self.nbytes / self.size


def _half(b: Tensor, at: int, dims: int) -> Tensor:
    """The same as (..., 1, ...) float32, beside so many dims of a block."""
    return half_bits(b, at).cast(dtypes.float32).reshape(*b.shape[:-1], *(1,) * dims)


def _line(q: Tensor, d: Tensor, m: Tensor) -> Tensor:
    """q · d + m, rounded once."""
    return fma(q.float(), *(x._broadcast(q.shape) for x in (d, m)))


def _q4_0(b: Tensor) -> Tensor:
    return (nibbles(b, 2).float() - 8) * _half(b, 0, 2)


def _q4_1(b: Tensor) -> Tensor:
    return _line(nibbles(b, 4), _half(b, 0, 2), _half(b, 2, 2))


def _q5_0(b: Tensor) -> Tensor:
    return ((nibbles(b, 6) | fifth_bits(b, 2)).float() - 16) * _half(b, 0, 2)


def _q5_1(b: Tensor) -> Tensor:
    return _line(nibbles(b, 8) | fifth_bits(b, 4), _half(b, 0, 2), _half(b, 2, 2))


def _q8_0(b: Tensor) -> Tensor:
    return b[..., 2:34].bitcast(dtypes.int8).float() * _half(b, 0, 1)


def _groups(x: Tensor, *dims: int) -> Tensor:
    """Integers (..., groups), one for each of `dims`, beside their elements: float32."""
    return x.reshape(*x.shape[:-1], *dims, 1).float()


def _q2_k(b: Tensor) -> Tensor:
    scales, dims = b[..., :16], (2, 4, 2)
    q = parts(b, 16, 80, 2, 2).reshape(*b.shape[:-1], *dims, 16)
    offset = _groups(scales >> 4, *dims) * _half(b, 82, 4)
    return q.float() * (_groups(scales & 15, *dims) * _half(b, 80, 4)) - offset


def sixteen_scales(b: Tensor) -> Tensor:
    """Scales of `q3_k`, 6 bits each: (..., 16)."""
    low, high = parts(b, 96, 104, 1, 4), parts(b, 104, 108, 1, 2)
    return low.reshape(*b.shape[:-1], 16) | high.reshape(*b.shape[:-1], 16) << 4


def _q3_k(b: Tensor) -> Tensor:
    scales = sixteen_scales(b)
    missing = parts(b, 0, 32, 1, 1).reshape(*b.shape[:-1], 2, 4, 2, 16) ^ 1
    q = parts(b, 32, 96, 2, 2).reshape(*b.shape[:-1], 2, 4, 2, 16)
    return (q.float() - (missing << 2).float()) * ((_groups(scales, 2, 4, 2) - 32) * _half(b, 108, 4))


def scales_and_offsets(b: Tensor, at: int) -> tuple[Tensor, Tensor]:
    """12 bytes: 8 scales and 8 offsets of 6 bits. The later 4 of both share the last bytes, and have their highest bits
    in those of the first 4."""
    s, m, both = (b[..., i : i + 4] for i in (at, at + 4, at + 8))
    scales = (s & 63).pad((0, 4)) | (both & 15 | s >> 2 & 48).pad((4, 0))
    offsets = (m & 63).pad((0, 4)) | (both >> 4 | m >> 2 & 48).pad((4, 0))
    return scales, offsets


def _scaled(b: Tensor) -> tuple[Tensor, Tensor]:
    """The same of `q4_k` and `q5_k`, times the block's own: (..., 4, 2, 1) each."""
    scales, offsets = scales_and_offsets(b, 4)
    return _groups(scales, 4, 2) * _half(b, 0, 3), _groups(offsets, 4, 2) * _half(b, 2, 3)


def _q4_k(b: Tensor) -> Tensor:
    scales, offsets = _scaled(b)
    return parts(b, 16, 144, 4, 4).float() * scales - offsets


def _q5_k(b: Tensor) -> Tensor:
    scales, offsets = _scaled(b)
    q = parts(b, 48, 176, 4, 4) | parts(b, 16, 48, 1, 1).reshape(*b.shape[:-1], 4, 2, 32) << 4
    return q.float() * scales - offsets


def _q6_k(b: Tensor) -> Tensor:
    low, high = parts(b, 0, 128, 2, 4), parts(b, 128, 192, 2, 2)  # (2, 2, 64), (2, 4, 32)
    q = low.reshape(*b.shape[:-1], 2, 4, 2, 16) | high.reshape(*b.shape[:-1], 2, 4, 2, 16) << 4
    return (q.float() - 32) * (_groups(b[..., 192:208].bitcast(dtypes.int8), 2, 4, 2) * _half(b, 208, 4))


# of IQ4_NL and IQ4_XS, closer together near 0, as weights are
UNEVEN = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)
# of MXFP4 and NVFP4, twice those of a float of 4 bits (2 of exponent, 1 of mantissa): OCP Microscaling Formats (MX) 1.0
FLOAT4 = (0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12)


def looked_up(q: Tensor, table: tuple[int, ...]) -> Tensor:
    """The int8 of a table at each number, chosen bit by bit: a choice is made in registers, a table is read."""
    found: list[Tensor] = [q.full_like(v & 255) for v in table]  # (as bytes)
    bit = 0
    while len(found) > 1:
        is_set = (q >> bit & 1).ne(0)
        found = [is_set._where(high, low) for low, high in zip(found[::2], found[1::2])]
        bit += 1
    return found[0].bitcast(dtypes.int8)


def power_of_two(e: Tensor) -> Tensor:
    """2**(e - 128) of a byte, half of MX's scale, as the values of its table are doubled: float32."""
    e = e.cast(dtypes.uint32)
    small = (e.ne(0)._where(2, 1) << 21).cast(dtypes.uint32)  # (no exponent is so small)
    return (e < 2)._where(small, (e - 1) << 23).bitcast(dtypes.float32)


def scales_of_six(b: Tensor) -> Tensor:
    """Scales of `iq4_xs`, of which the highest two bits stand apart: (..., 8) int8."""
    low, high = (x.reshape(*b.shape[:-1], 8) for x in (parts(b, 4, 8, 4, 4), parts(b, 2, 4, 2, 2)))
    return (low | high << 4).cast(dtypes.int8) - 32


def _iq4_nl(b: Tensor) -> Tensor:
    return looked_up(nibbles(b, 2), UNEVEN).float() * _half(b, 0, 2)


def _iq4_xs(b: Tensor) -> Tensor:
    return looked_up(parts(b, 8, 136, 8, 4), UNEVEN).float() * (_groups(scales_of_six(b), 8, 1) * _half(b, 0, 3))


def _mxfp4(b: Tensor) -> Tensor:
    return looked_up(nibbles(b, 1), FLOAT4).float() * power_of_two(b[..., 0]).reshape(*b.shape[:-1], 1, 1)


def four_scales(b: Tensor) -> Tensor:
    """Scales of `nvfp4`, halved, floats of 4 bits of exponent and 3 of mantissa, of which NaN counts as 0: (..., 4)
    float32. As the bits of a float16 behind its highest one they are 2**8 too small."""
    e = b[..., :4]
    return e.ne(127)._where(((e & 127).cast(dtypes.uint16) << 7).bitcast(dtypes.float16).float() * 2.0**7, 0.0)


def _nvfp4(b: Tensor) -> Tensor:
    return looked_up(parts(b, 4, 36, 4, 4), FLOAT4).float() * _groups(four_scales(b), 4, 1)


def trits(b: Tensor) -> Tensor:
    """The numbers of `tq1_0`, 0 to 2, in order: (..., 256) uint8. A byte holds five of them, of the last four bytes
    four, as a fraction of 256 in base 3."""
    found = []
    for begin, end, count, at in ((0, 32, 5, 0), (32, 48, 5, 160), (48, 52, 4, 240)):
        each = b[..., begin:end].unsqueeze(-2).expand(*b.shape[:-1], count, end - begin).cast(dtypes.uint16)
        powers = looked_up(each.arange(count).cast(dtypes.uint8), (1, 3, 9, 27, 81, 0, 0, 0))
        trit = ((each * powers.cast(dtypes.uint16).unsqueeze(-1) & 255) * 3 >> 8).cast(dtypes.uint8)
        size = count * (end - begin)
        found.append(trit.reshape(*b.shape[:-1], size).pad((at, 256 - at - size)))
    return found[0] | found[1] | found[2]


def twos(b: Tensor) -> Tensor:
    """The numbers of `tq2_0`, 0 to 2: (..., 2, 4, 32)."""
    return parts(b, 0, 64, 2, 2)


def _tq1_0(b: Tensor) -> Tensor:
    return (trits(b).float() - 1) * _half(b, 52, 1)


def _tq2_0(b: Tensor) -> Tensor:
    return (twos(b).float() - 1) * _half(b, 64, 3)


FORMATS = (
    BlockFormat("q4_0", 2, 18, (2, 16), _q4_0),
    BlockFormat("q4_1", 3, 20, (2, 16), _q4_1),
    BlockFormat("q5_0", 6, 22, (2, 16), _q5_0),
    BlockFormat("q5_1", 7, 24, (2, 16), _q5_1),
    BlockFormat("q8_0", 8, 34, (32,), _q8_0),
    BlockFormat("q2_k", 10, 84, (2, 4, 2, 16), _q2_k),
    BlockFormat("q3_k", 11, 110, (2, 4, 2, 16), _q3_k),
    BlockFormat("q4_k", 12, 144, (4, 2, 32), _q4_k),
    BlockFormat("q5_k", 13, 176, (4, 2, 32), _q5_k),
    BlockFormat("q6_k", 14, 210, (2, 4, 2, 16), _q6_k),
    BlockFormat("iq2_xxs", 16, 66, (8, 4, 8), GRID_FORMATS["iq2_xxs"].values),
    BlockFormat("iq2_xs", 17, 74, (16, 2, 8), GRID_FORMATS["iq2_xs"].values),
    BlockFormat("iq3_xxs", 18, 98, (8, 4, 8), GRID_FORMATS["iq3_xxs"].values),
    BlockFormat("iq1_s", 19, 50, (8, 4, 8), GRID_FORMATS["iq1_s"].values),
    BlockFormat("iq4_nl", 20, 18, (2, 16), _iq4_nl),
    BlockFormat("iq3_s", 21, 110, (8, 4, 8), GRID_FORMATS["iq3_s"].values),
    BlockFormat("iq2_s", 22, 82, (16, 2, 8), GRID_FORMATS["iq2_s"].values),
    BlockFormat("iq4_xs", 23, 136, (8, 2, 16), _iq4_xs),
    BlockFormat("iq1_m", 29, 56, (16, 2, 8), GRID_FORMATS["iq1_m"].values),
    BlockFormat("tq1_0", 34, 54, (256,), _tq1_0),
    BlockFormat("tq2_0", 35, 66, (2, 4, 32), _tq2_0),
    BlockFormat("mxfp4", 39, 17, (2, 16), _mxfp4),
    BlockFormat("nvfp4", 40, 36, (4, 2, 8), _nvfp4),
)
BLOCKS = {f.number: f for f in FORMATS}
NAMED = {f.name: f for f in FORMATS}


@lru_cache(256)
def _graph(name: str, blocks: BufferSpec) -> tuple[UOp, UOp]:
    """(stands for the blocks, their values by the formula of a format). There are no gradients to be held back below
    integers, so it is the same with and without them."""
    given = UOp(Ops.PARAM, dtypes.uint8, (), blocks)
    with set_grad_enabled(True):
        return given, NAMED[name].formula(Tensor(given)).uop
