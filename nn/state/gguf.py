"""GGUF files (llama.cpp's): metadata, and tensors that may be quantised in blocks.

A quantised tensor comes as a lazy value: its bytes are mapped and the formula of its blocks (`nn/quantized/blocks.py`)
is a part of the graph, so a kernel that uses it reads the small numbers. Or it comes as a `QuantizedWeight`.
"""

from __future__ import annotations

import mmap
import os
import struct
from itertools import pairwise
from math import prod
from typing import Any

import numpy as np

from manygrad.nn.quantized.blocks import BLOCKS
from manygrad.nn.quantized.weight import QuantizedWeight
from manygrad.tensor.dtype import DType, dtypes
from manygrad.tensor.engine import default_device, engine
from manygrad.tensor.tensor import Tensor

PLAIN: dict[int, DType] = {
    0: dtypes.float32, 1: dtypes.float16, 30: dtypes.bfloat16, 28: dtypes.float64, 24: dtypes.int8, 25: dtypes.int16,
    26: dtypes.int32, 27: dtypes.int64,
}  # fmt: skip
SCALARS = {0: "<B", 1: "<b", 2: "<H", 3: "<h", 4: "<I", 5: "<i", 6: "<f", 7: "<?", 10: "<Q", 11: "<q", 12: "<d"}
STRING, ARRAY = 8, 9
MAX_DIMS = 8


class _Header:
    """Reads values from the front of a mapped file; never more than the file has."""

    def __init__(self, data: mmap.mmap):
        self.data, self.size, self.at = data, len(data), 0

    def bytes(self, n: int) -> bytes:
        at, self.at = self.at, self.at + n
        if self.at > self.size:
            raise ValueError(f"it is truncated: {n} bytes wanted at byte {at} of {self.size}")
        return self.data[at : self.at]

    def scalar(self, form: str) -> Any:
        return struct.unpack(form, self.bytes(struct.calcsize(form)))[0]

    def text(self) -> str:
        return self.bytes(self.scalar("<Q")).decode("utf-8")

    def texts(self, count: int) -> list[str]:
        """A vocabulary has a hundred thousand of them: in one loop."""
        data, at, size, length_at = self.data, self.at, self.size, struct.Struct("<Q").unpack_from
        found: list[bytes] = []
        keep = found.append
        for _ in range(count):
            begin = at + 8
            at = begin + length_at(data, at)[0]
            if at > size:
                raise ValueError(f"it is truncated: {at - begin} bytes wanted at byte {begin} of {size}")
            keep(data[begin:at])
        self.at = at
        joined = b"\0".join(found)
        if joined.count(b"\0") < count:  # decoded at once: no text holds what is between them
            return joined.decode().split("\0") if count else []
        return [text.decode() for text in found]

    def value(self, kind: int, depth: int = 0) -> Any:
        if kind in SCALARS:
            return self.scalar(SCALARS[kind])
        if kind == STRING:
            return self.text()
        if kind != ARRAY or depth > 4:
            raise ValueError(f"metadata of the unknown type {kind}")
        inner, count = self.scalar("<I"), self.scalar("<Q")
        if inner in SCALARS:
            form = SCALARS[inner]
            raw = self.bytes(count * struct.calcsize(form))
            return list(struct.unpack(f"<{count}{form[1]}", raw))
        if count > self.size:
            raise ValueError(f"an array of {count} items in a file of {self.size} bytes")
        return self.texts(count) if inner == STRING else [self.value(inner, depth + 1) for _ in range(count)]


def gguf_load(path: str | os.PathLike[str], quantized: bool = False) -> tuple[dict[str, Any], dict[str, Any]]:
    """(metadata, tensors) of a GGUF file. Plain types come on `DISK:path`, quantised ones as float32 on the default
    device, lazily. With `quantized`, quantised matrices are QuantizedWeights whose blocks are on `DISK:path`.

    ValueError on a file that is truncated, overlaps itself, or has types that are not known.
    """
    name = os.fspath(path)
    try:
        if not os.path.getsize(path):
            raise ValueError("it is empty")
        with open(path, "rb") as f, mmap.mmap(f.fileno(), 0, access=mmap.ACCESS_READ) as data:
            metadata, entries = _read(_Header(data))
    except (ValueError, struct.error, UnicodeDecodeError, OverflowError, MemoryError) as error:
        raise ValueError(f"{name} cannot be read as a GGUF file: {error}") from None
    full = {n: e for n, e in entries.items() if prod(e[1])}
    uops = (
        engine().map_file(os.path.abspath(path), [_part(kind, shape, at) for kind, shape, at in full.values()])
        if full
        else []
    )
    tensors = dict(zip(full, map(Tensor, uops)))
    out: dict[str, Any] = {}
    for n, (kind, shape, _) in entries.items():
        if n not in tensors:
            out[n] = Tensor(np.empty(shape, PLAIN[kind].np if kind in PLAIN else np.float32))
        elif kind in PLAIN:
            out[n] = tensors[n]
        elif quantized and len(shape) == 2:
            out[n] = QuantizedWeight(tensors[n], BLOCKS[kind].name)
        else:
            out[n] = BLOCKS[kind].values(tensors[n].to(default_device())).reshape(shape)
    return metadata, out


def _part(kind: int, shape: tuple[int, ...], at: int) -> tuple[DType, tuple[int, ...], int]:
    if kind in PLAIN:
        return PLAIN[kind], shape, at
    block = BLOCKS[kind]
    *rows, columns = shape or (1,)
    return dtypes.uint8, (*rows, columns // block.size, block.nbytes), at


def _read(h: _Header) -> tuple[dict[str, Any], dict[str, tuple[int, tuple[int, ...], int]]]:
    """(metadata, (type, shape, offset in the file) by name)."""
    if h.bytes(4) != b"GGUF":
        raise ValueError("it does not begin with GGUF")
    version = h.scalar("<I")
    if version not in (2, 3):
        raise ValueError(f"it has version {version}; 2 and 3 are known (a big-endian file looks so too)")
    count, pairs = h.scalar("<Q"), h.scalar("<Q")
    if count > h.size // 24 or pairs > h.size // 12:
        raise ValueError(f"it claims {count} tensors and {pairs} metadata entries in {h.size} bytes")
    metadata: dict[str, Any] = {}
    for _ in range(pairs):
        key = h.text()
        metadata[key] = h.value(h.scalar("<I"))
    found: dict[str, tuple[int, tuple[int, ...], int]] = {}
    for _ in range(count):
        key, dims = h.text(), h.scalar("<I")
        if dims > MAX_DIMS or key in found:
            raise ValueError(f"tensor {key!r} has {dims} dims or is named twice")
        shape = tuple(h.scalar("<Q") for _ in range(dims))[::-1]
        kind, offset = h.scalar("<I"), h.scalar("<Q")
        if kind not in PLAIN and kind not in BLOCKS:
            raise ValueError(f"tensor {key!r} has the type {kind}; known are {sorted([*PLAIN, *BLOCKS])}")
        found[key] = (kind, shape, offset)
    alignment = metadata.get("general.alignment", 32)
    if not isinstance(alignment, int) or alignment <= 0:
        raise ValueError(f"its alignment is {alignment!r}")
    start = -(-h.at // alignment) * alignment
    return metadata, _placed(found, start, h.size)


def _placed(
    found: dict[str, tuple[int, tuple[int, ...], int]], start: int, size: int
) -> dict[str, tuple[int, tuple[int, ...], int]]:
    """With offsets from the file's beginning; each tensor lies inside the file and on no other."""
    out, spans = {}, []
    for key, (kind, shape, offset) in found.items():
        n = prod(shape)
        if kind in BLOCKS and shape and shape[-1] % BLOCKS[kind].size:
            raise ValueError(
                f"tensor {key!r} of shape {shape} has rows that are not whole blocks of {BLOCKS[kind].size}"
            )
        nbytes = n * PLAIN[kind].itemsize if kind in PLAIN else n // BLOCKS[kind].size * BLOCKS[kind].nbytes
        if start + offset + nbytes > size:
            raise ValueError(
                f"tensor {key!r} ends at byte {start + offset + nbytes}, the file has {size}; it is truncated"
            )
        out[key] = (kind, shape, start + offset)
        spans.append((start + offset, start + offset + nbytes, key))
    spans.sort()
    for (_, end, a), (begin, _, b) in pairwise(spans):
        if begin < end:
            raise ValueError(f"tensors {a!r} and {b!r} overlap")
    return out
