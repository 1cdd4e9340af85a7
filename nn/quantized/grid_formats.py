"""ggml's IQ1, IQ2 and IQ3: a number in a block is the row of a table, which holds the sizes of 4 or 8 weights
(`grids.py`); their signs, or for IQ1 whether all are a bit more or less, stand apart.

Each format is taken as integers and the integers s of its groups' scales, (2 s + 1) · d · a part.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from manygrad.nn.quantized.bits import bits_of, half_bits, two_nibbles, words
from manygrad.nn.quantized.grids import grid
from manygrad.tensor.dtype import dtypes
from manygrad.tensor.tensor import Tensor


def _from_grid(name: str, index: Tensor) -> Tensor:
    """(...,) numbers of rows -> (..., width) int8. The mask says that there is a row of each number: none is checked
    then."""
    table = grid(name, index.device)
    return table[index if index.dtype is dtypes.uint8 else index & (table.shape[0] - 1)]


def _signed(values: Tensor, negative: Tensor) -> Tensor:
    return negative.ne(0)._where(-values, values)


def _eight_signs(seven: Tensor) -> Tensor:
    """(..., 8) bits, of which the number has seven: the last one makes their count even."""
    odd = seven ^ seven >> 4
    odd = odd ^ odd >> 2
    return bits_of(seven | ((odd ^ odd >> 1) & 1) << 7, 0, 1, 8, 1)


def _iq2_xxs(b: Tensor) -> tuple[Tensor, Tensor]:
    """(numbers (..., 8, 4, 8) int8, scales (..., 8))."""
    halves = b[..., 2:66].reshape(*b.shape[:-1], 8, 2, 4)
    rest = words(halves[..., 1, :], 4).squeeze(-1)
    return _signed(_from_grid("iq2_xxs", halves[..., 0, :]), _eight_signs(bits_of(rest, 0, 7, 4, 7))), rest >> 28


def _iq2_xs(b: Tensor) -> tuple[Tensor, Tensor]:
    """(numbers (..., 16, 2, 8) int8, scales (..., 16))."""
    q = words(b[..., 2:66], 2).reshape(*b.shape[:-1], 16, 2)
    return _signed(_from_grid("iq2_xs", q), _eight_signs(q >> 9)), two_nibbles(b, 66, 74)


def _iq2_s(b: Tensor) -> tuple[Tensor, Tensor]:
    """(numbers (..., 16, 2, 8) int8, scales (..., 16))."""
    high = bits_of(b[..., 66:74], 0, 2, 4, 2).reshape(*b.shape[:-1], 32).cast(dtypes.uint16)
    rows = (b[..., 2:34] | high << 8).reshape(*b.shape[:-1], 16, 2)
    signs = bits_of(b[..., 34:66], 0, 1, 8, 1).reshape(*b.shape[:-1], 16, 2, 8)
    return _signed(_from_grid("iq2_s", rows), signs), two_nibbles(b, 74, 82)


def _iq3_xxs(b: Tensor) -> tuple[Tensor, Tensor]:
    """(numbers (..., 8, 4, 8) int8, scales (..., 8))."""
    rest = words(b[..., 66:98], 4)
    sizes = _from_grid("iq3_xxs", b[..., 2:66]).reshape(*b.shape[:-1], 8, 4, 8)
    return _signed(sizes, _eight_signs(bits_of(rest, 0, 7, 4, 7))), rest >> 28


def _iq3_s(b: Tensor) -> tuple[Tensor, Tensor]:
    """(numbers (..., 8, 4, 8) int8, scales (..., 8))."""
    high = bits_of(b[..., 66:74], 0, 1, 8, 1).reshape(*b.shape[:-1], 64).cast(dtypes.uint16)
    sizes = _from_grid("iq3_s", b[..., 2:66] | high << 8).reshape(*b.shape[:-1], 8, 4, 8)
    return _signed(sizes, bits_of(b[..., 74:106], 0, 1, 8, 1).reshape(sizes.shape)), two_nibbles(b, 106, 110)


def _iq1_s(b: Tensor) -> tuple[Tensor, Tensor]:
    """(eight times the numbers (..., 8, 4, 8) int8, scales (..., 8))."""
    more = words(b[..., 34:50], 2)
    # (the bytes are expanded, not the word: work on an index that is expanded afterwards would be a kernel of its own)
    each = words(b[..., 34:50].reshape(*b.shape[:-1], 8, 1, 2).expand(*b.shape[:-1], 8, 4, 2), 2).squeeze(-1)
    rows = b[..., 2:34].reshape(*b.shape[:-1], 8, 4) | (each >> (each.arange(4) * 3).cast(each.dtype) & 7) << 8
    return _moved(_from_grid("iq1", rows), (more >> 15).unsqueeze(-1)), more >> 12 & 7


def _iq1_m(b: Tensor) -> tuple[Tensor, Tensor]:
    """(eight times the numbers (..., 16, 2, 8) int8, scales (..., 16))."""
    more = two_nibbles(b, 32, 48).reshape(*b.shape[:-1], 16, 2).cast(dtypes.uint16)
    rows = b[..., :32].reshape(*b.shape[:-1], 16, 2) | (more & 7) << 8
    scales = bits_of(words(b[..., 48:56], 2), 0, 3, 4, 3).reshape(*b.shape[:-1], 16)
    return _moved(_from_grid("iq1", rows), more >> 3), scales


def _moved(eights: Tensor, down: Tensor) -> Tensor:
    """8 x + 1 or, where it is `down`, 8 x - 1."""
    return eights * 8 + down.unsqueeze(-1).ne(0)._where(-1, 1).cast(dtypes.int8)


def _scale_in_four(b: Tensor) -> Tensor:
    """The float16 of `iq1_m`, in the highest bits of four numbers: (...,)."""
    q = words(b[..., 48:56], 2) >> 12
    return (q[..., 0] | q[..., 1] << 4 | q[..., 2] << 8 | q[..., 3] << 12).bitcast(dtypes.float16)


@dataclass(frozen=True)
class GridFormat:
    take: Callable[[Tensor], tuple[Tensor, Tensor]]  # numbers as int8 and s
    part: float
    d: Callable[[Tensor], Tensor]

    def numbers(self, b: Tensor) -> Tensor:
        return self.take(b)[0]

    def scales(self, b: Tensor) -> Tensor:
        """2 s + 1 of each group: (..., groups) int8."""
        return (self.take(b)[1] * 2 + 1).cast(dtypes.int8)

    def block_scale(self, b: Tensor) -> Tensor:
        """d · part: (..., 1) float32."""
        return (self.d(b).float() * self.part).unsqueeze(-1)

    def values(self, b: Tensor) -> Tensor:
        q, scale = self.numbers(b), self.scales(b).float() * self.block_scale(b)
        return q.float() * scale.reshape(*scale.shape, 1, 1)


def _leading_half(b: Tensor) -> Tensor:
    return half_bits(b, 0)


GRID_FORMATS = {
    "iq2_xxs": GridFormat(_iq2_xxs, 1 / 8, _leading_half),
    "iq2_xs": GridFormat(_iq2_xs, 1 / 8, _leading_half),
    "iq2_s": GridFormat(_iq2_s, 1 / 8, _leading_half),
    "iq3_xxs": GridFormat(_iq3_xxs, 1 / 4, _leading_half),
    "iq3_s": GridFormat(_iq3_s, 1, _leading_half),
    "iq1_s": GridFormat(_iq1_s, 1 / 8, _leading_half),
    "iq1_m": GridFormat(_iq1_m, 1 / 8, _scale_in_four),
}
