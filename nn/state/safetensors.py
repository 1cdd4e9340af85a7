"""safetensors files: one, or several with an index (`model.safetensors.index.json`)."""

from __future__ import annotations

import json
import os
import struct
from itertools import pairwise
from math import prod
from typing import Any

import numpy as np

from manygrad.nn.state.files import written_at_once
from manygrad.tensor.dtype import DType, dtypes
from manygrad.tensor.engine import engine
from manygrad.tensor.tensor import Tensor

CODES: dict[str, DType] = {
    "BOOL": dtypes.bool, "I8": dtypes.int8, "I16": dtypes.int16, "I32": dtypes.int32, "I64": dtypes.int64,
    "U8": dtypes.uint8,
    "U16": dtypes.uint16, "U32": dtypes.uint32, "U64": dtypes.uint64, "F16": dtypes.float16, "BF16": dtypes.bfloat16,
    "F32": dtypes.float32, "F64": dtypes.float64, "F8_E4M3": dtypes.float8_e4m3fn, "F8_E5M2": dtypes.float8_e5m2,
}  # fmt: skip
NAMES = {d: c for c, d in CODES.items()}
BY_NP = {d.np: c for c, d in CODES.items()}
METADATA = "__metadata__"  # the name in a header that is no tensor's
MAX_HEADER = 100 << 20


def safe_save(tensors: dict[str, Tensor], path: str | os.PathLike[str], metadata: dict[str, str] | None = None) -> None:
    """Writes a safetensors file; the old one stays whole until the new one is on disk. ValueError on a tensor that is
    named `__metadata__`, which is the place of `metadata`: text by name, else TypeError."""
    if METADATA in tensors:
        raise ValueError(f"safe_save: a tensor cannot be named {METADATA!r} in a safetensors file; rename it")
    if odd := [k for k, v in (metadata or {}).items() if not isinstance(k, str) or not isinstance(v, str)]:
        raise TypeError(f"safe_save: the metadata {odd[0]!r} is no text, which is all that such a file has there")
    header: dict[str, Any] = {METADATA: metadata} if metadata else {}
    arrays, at = [], 0
    for name, t in tensors.items():
        a = np.ascontiguousarray(t.numpy())
        header[name] = {"dtype": NAMES[t.dtype], "shape": list(t.shape), "data_offsets": [at, at + a.nbytes]}
        arrays.append(a)
        at += a.nbytes
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with written_at_once(path) as f:
        f.write(struct.pack("<Q", len(text)) + text)
        for a in arrays:
            f.write(a.reshape(-1).view(np.uint8).data)


def _tensors_of(text: bytes, path: str) -> dict[str, Any]:
    """The tensors that a header describes. ValueError: it is malformed, or has a type that tensors here do not have."""
    try:
        header = json.loads(text)
        tensors = {str(k): dict(v) for k, v in header.items() if k != METADATA}
        codes = {k: str(v["dtype"]) for k, v in tensors.items()}
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{path}: the safetensors header is malformed ({type(error).__name__}: {error})") from None
    if other := [f"{k!r} is {code}" for k, code in codes.items() if code not in CODES]:
        more = f", and {len(other) - 1} more tensors are of such types" if len(other) > 1 else ""
        raise ValueError(
            f"{path}: the tensor {other[0]}, a type that tensors here do not have{more}; there are {', '.join(CODES)}"
        )
    return tensors


def _entry(v: Any) -> tuple[DType, tuple[int, ...], int, int]:
    """(dtype, shape, begin, end) of one tensor in the header."""
    begin, end = (int(x) for x in v["data_offsets"])
    return CODES[v["dtype"]], tuple(int(d) for d in v["shape"]), begin, end


def safe_load(path: str | os.PathLike[str]) -> dict[str, Tensor]:
    """Tensors of a safetensors file, on the device `DISK:path`: mapped, read when copied with `.to(...)`. Of an index
    (`*.index.json`) the tensors of all files that it names. ValueError on a file that is truncated or malformed;
    nothing is half loaded."""
    return _load_index(os.fspath(path)) if os.fspath(path).endswith(".json") else _load_file(path)


def _load_index(path: str) -> dict[str, Tensor]:
    """{"weight_map": {tensor: file}}; the files lie beside the index."""
    try:
        with open(path, encoding="utf-8") as f:
            files = {str(k): str(v) for k, v in json.load(f)["weight_map"].items()}
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{path} is no index of safetensors files ({type(error).__name__}: {error})") from None
    if outside := sorted({f for f in files.values() if os.path.basename(f) != f or f in ("", ".", "..")}):
        raise ValueError(f"{path} names files outside its folder: {outside}")
    folder = os.path.dirname(os.path.abspath(path))
    loaded = {f: _load_file(os.path.join(folder, f)) for f in sorted(set(files.values()))}
    if lost := [f"{k} in {f}" for k, f in files.items() if k not in loaded[f]]:
        raise ValueError(f"{path}: tensors are not where it says: {', '.join(lost)}")
    return {k: loaded[f][k] for k, f in files.items()}


def _load_file(path: str | os.PathLike[str]) -> dict[str, Tensor]:
    size = os.path.getsize(path)
    with open(path, "rb") as f:
        head = f.read(8)
        n = struct.unpack("<Q", head)[0] if len(head) == 8 else -1
        if not 0 <= n <= min(size - 8, MAX_HEADER):
            raise ValueError(
                f"{path} is not a whole safetensors file: {size} bytes, header length {n}; fetch or save it again"
            )
        tensors = _tensors_of(f.read(n), os.fspath(path))
        try:
            entries = {k: _entry(v) for k, v in tensors.items()}
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise ValueError(f"{path}: the safetensors header is malformed ({type(error).__name__}: {error})") from None
    for name, (dtype, shape, begin, end) in entries.items():
        want = prod(shape) * dtype.itemsize
        if any(d < 0 for d in shape) or not 0 <= begin <= end or end - begin != want:
            raise ValueError(
                f"{path}: tensor {name!r} of shape {shape} {dtype.name} needs {want} bytes, "
                f"its offsets say {begin}..{end}"
            )
        if 8 + n + end > size:
            raise ValueError(
                f"{path} is truncated: tensor {name!r} ends at byte {8 + n + end}, the file has {size}; "
                "nothing was loaded"
            )
    placed = sorted((begin, end, name) for name, (_, _, begin, end) in entries.items())
    for (_, end, a), (begin, _, b) in pairwise(placed):
        if begin < end:
            raise ValueError(f"{path}: tensors {a!r} and {b!r} overlap")
    full = {name: e for name, e in entries.items() if e[3] > e[2]}
    mapped = engine().map_file(
        os.path.abspath(path), [(dtype, shape, 8 + n + begin) for dtype, shape, begin, _ in full.values()]
    )
    found = {name: Tensor(u) for name, u in zip(full, mapped)}
    return {
        name: found[name] if name in found else Tensor(np.empty(shape, dtype.np))
        for name, (dtype, shape, _, _) in entries.items()
    }
