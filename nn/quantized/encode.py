"""Float weights to GGUF's blocks, with NumPy: the formats without K as ggml rounds them, of the K formats each group by
its extremes, without ggml's search for a scale of least error."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from manygrad.nn.quantized.blocks import NAMED
from manygrad.tensor.tensor import Tensor


def encode(weight: Tensor, kind: str) -> Tensor:
    """(rows, columns) float -> (rows, blocks, bytes) uint8 where `weight` is. Rows are whole blocks."""
    block = NAMED[kind]
    rows, columns = weight.shape
    if columns % block.size:
        raise ValueError(f"a row of {columns} is not whole blocks of {block.size}, as {kind} has them")
    values = weight.float().numpy().reshape(-1, block.size)
    found = Tensor(ENCODERS[kind](values).reshape(rows, columns // block.size, block.nbytes))
    return found.to(weight.device) if isinstance(weight.device, str) else found.shard(weight.device)


def _inverse(x: np.ndarray) -> np.ndarray:
    return np.divide(1, x, out=np.zeros_like(x), where=x != 0)


def _halves(x: np.ndarray) -> np.ndarray:
    """(n, 1) float32 -> (n, 2) bytes of float16."""
    return x.astype("<f2").view(np.uint8)


def _extreme(x: np.ndarray) -> np.ndarray:
    """The element of each row that is furthest from 0, (n, 1)."""
    return np.take_along_axis(x, np.abs(x).argmax(-1, keepdims=True), -1)


def _pairs(q: np.ndarray) -> np.ndarray:
    """(..., 2, n) numbers below 16 -> (..., n) bytes, the first ones in the low halves."""
    return q[..., 0, :] | q[..., 1, :] << 4


def _q8_0(x: np.ndarray) -> np.ndarray:
    d = np.abs(x).max(-1, keepdims=True) / 127
    q = x * _inverse(d)
    rounded = np.floor(np.abs(q) + 0.5) * np.sign(q)  # (halves away from 0, as C's roundf)
    return np.concatenate([_halves(d), rounded.astype(np.int8).view(np.uint8)], -1)


def _q4_0(x: np.ndarray) -> np.ndarray:
    d = _extreme(x) / -8
    q = np.trunc(x * _inverse(d) + 8.5).clip(0, 15).astype(np.uint8)
    return np.concatenate([_halves(d), _pairs(q.reshape(-1, 2, 16))], -1)


def _q4_1(x: np.ndarray) -> np.ndarray:
    low = x.min(-1, keepdims=True)
    d = (x.max(-1, keepdims=True) - low) / 15
    q = np.trunc((x - low) * _inverse(d) + 0.5).clip(0, 15).astype(np.uint8)
    return np.concatenate([_halves(d), _halves(low), _pairs(q.reshape(-1, 2, 16))], -1)


def _with_fifths(q: np.ndarray) -> list[np.ndarray]:
    """(n, 32) numbers below 32: their highest bits, 4 bytes, and the rest, 16."""
    return [np.packbits(q >> 4, axis=-1, bitorder="little"), _pairs((q & 15).reshape(-1, 2, 16))]


def _q5_0(x: np.ndarray) -> np.ndarray:
    d = _extreme(x) / -16
    q = np.trunc(x * _inverse(d) + 16.5).clip(0, 31).astype(np.uint8)
    return np.concatenate([_halves(d), *_with_fifths(q)], -1)


def _q5_1(x: np.ndarray) -> np.ndarray:
    low = x.min(-1, keepdims=True)
    d = (x.max(-1, keepdims=True) - low) / 31
    q = np.trunc((x - low) * _inverse(d) + 0.5).clip(0, 31).astype(np.uint8)
    return np.concatenate([_halves(d), _halves(low), *_with_fifths(q)], -1)


def _sixths(x: np.ndarray, most: int) -> tuple[np.ndarray, np.ndarray]:
    """(n, groups), none negative, as a float16 a row, (n, 1) in float32, times integers up to `most`."""
    d = (x.max(-1, keepdims=True) / most).astype(np.float16).astype(np.float32)
    return d, np.rint(x * _inverse(d)).clip(0, most)


def _in_eight_groups(x: np.ndarray, most: int) -> tuple[list[np.ndarray], np.ndarray]:
    """The scales of a block of `q4_k` or `q5_k`, as it has them, and its numbers up to `most`, (n, 8, 32)."""
    groups = x.reshape(-1, 8, 32)
    low = np.minimum(groups.min(-1), 0)
    d, scales = _sixths((groups.max(-1) - low) / most, 63)
    m, offsets = _sixths(-low, 63)
    scale, offset = (d * scales)[..., None], (m * offsets)[..., None]
    q = np.rint((groups + offset) * _inverse(scale)).clip(0, most).astype(np.uint8)
    s, o = scales.astype(np.uint8), offsets.astype(np.uint8)
    packed = [s[:, :4] | s[:, 4:] >> 4 << 6, o[:, :4] | o[:, 4:] >> 4 << 6, s[:, 4:] & 15 | (o[:, 4:] & 15) << 4]
    return [_halves(d), _halves(m), *packed], q


def _q4_k(x: np.ndarray) -> np.ndarray:
    scales, q = _in_eight_groups(x, 15)
    return np.concatenate([*scales, _pairs(q.reshape(-1, 4, 2, 32)).reshape(-1, 128)], -1)


def _q5_k(x: np.ndarray) -> np.ndarray:
    scales, q = _in_eight_groups(x, 31)
    high = np.packbits(q >> 4, axis=1, bitorder="little")[:, 0]  # bit g of byte i is of number i of group g
    return np.concatenate([*scales, high, _pairs((q & 15).reshape(-1, 4, 2, 32)).reshape(-1, 128)], -1)


def _q6_k(x: np.ndarray) -> np.ndarray:
    groups = x.reshape(-1, 16, 16)
    scale = _extreme(groups)[..., 0] / -32
    d = (_extreme(scale) / -128).astype(np.float16).astype(np.float32)
    scales = np.rint(scale * _inverse(d)).clip(-128, 127)
    q = np.rint(groups * _inverse((d * scales)[..., None])).clip(-32, 31).astype(np.int8) + 32
    q = q.astype(np.uint8).reshape(-1, 2, 128)
    low = _pairs((q & 15).reshape(-1, 2, 2, 64)).reshape(-1, 128)
    parts = (q >> 4).reshape(-1, 2, 4, 32)
    high = sum((parts[:, :, i] << 2 * i for i in range(4)), np.zeros((len(x), 2, 32), np.uint8)).reshape(-1, 64)
    return np.concatenate([low, high.astype(np.uint8), scales.astype(np.int8).view(np.uint8), _halves(d)], -1)


ENCODERS: dict[str, Callable[[np.ndarray], np.ndarray]] = {
    "q8_0": _q8_0, "q4_0": _q4_0, "q4_1": _q4_1, "q5_0": _q5_0, "q5_1": _q5_1, "q4_k": _q4_k, "q5_k": _q5_k,
    "q6_k": _q6_k,
}  # fmt: skip
