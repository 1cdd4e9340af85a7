"""Parameters by walking attributes, and safetensors files."""

from __future__ import annotations

import json
import os
import struct
import tempfile
from math import prod
from typing import Any

import numpy as np

from manygrad.tensor.dtype import DType, dtypes
from manygrad.tensor.engine import engine
from manygrad.tensor.tensor import Tensor, default_device

CODES: dict[str, DType] = {
    "BOOL": dtypes.bool, "I8": dtypes.int8, "I16": dtypes.int16, "I32": dtypes.int32, "I64": dtypes.int64, "U8": dtypes.uint8,
    "U16": dtypes.uint16, "U32": dtypes.uint32, "U64": dtypes.uint64, "F16": dtypes.float16, "BF16": dtypes.bfloat16,
    "F32": dtypes.float32, "F64": dtypes.float64,
}  # fmt: skip
NAMES = {d: c for c, d in CODES.items()}
MAX_HEADER = 100 << 20


def get_state_dict(obj: Any, prefix: str = "") -> dict[str, Tensor]:
    """All tensors below `obj`, named by their path: attributes, list positions and dict keys joined by dots."""
    if isinstance(obj, Tensor):
        return {prefix.strip("."): obj}
    if isinstance(obj, (list, tuple)):
        items: Any = enumerate(obj)
    elif isinstance(obj, dict):
        items = obj.items()
    elif hasattr(obj, "__dict__"):
        items = obj.__dict__.items()
    else:
        return {}
    out: dict[str, Tensor] = {}
    for k, v in items:
        if not str(k).startswith("_jit_"):
            out.update(get_state_dict(v, f"{prefix}{k}."))
    return out


def get_parameters(obj: Any) -> list[Tensor]:
    return list(get_state_dict(obj).values())


def load_state_dict(model: Any, state: dict[str, Tensor], strict: bool = True) -> None:
    """Copies `state` into the model's tensors of the same names. KeyError lists what is missing or left over (strict), ValueError
    names the tensors whose shapes differ; then nothing is loaded."""
    own = get_state_dict(model)
    missing, extra = sorted(set(own) - set(state)), sorted(set(state) - set(own))
    if strict and (missing or extra):
        raise KeyError(f"load_state_dict: missing {missing or 'nothing'}, unexpected {extra or 'nothing'}; strict=False loads what fits")
    pairs = {name: (t, state[name]) for name, t in own.items() if name in state}
    wrong = [f"{name} has shape {new.shape} in the file, {t.shape} in the model" for name, (t, new) in pairs.items() if new.shape != t.shape]
    if wrong:
        raise ValueError(f"load_state_dict: {'; '.join(wrong)}")
    for t, new in pairs.values():
        if new.device != t.device:
            if isinstance(new.device, str) and new.device.startswith("DISK"):
                new = new.to(default_device())
            new = new.shard(t.device, engine().sharding_axis(t.uop)) if isinstance(t.device, tuple) else new.to(t.device)
        new = new.detach().cast(t.dtype)
        if t.is_realized:
            t.assign(new)
        else:
            t.replace(new.clone())
    loaded = [t for t, _ in pairs.values()]
    if loaded:
        loaded[0].realize(*loaded[1:])


def safe_save(tensors: dict[str, Tensor], path: str | os.PathLike[str], metadata: dict[str, str] | None = None) -> None:
    """Writes a safetensors file; the old one stays whole until the new one is on disk."""
    header: dict[str, Any] = {"__metadata__": metadata} if metadata else {}
    arrays, at = [], 0
    for name, t in tensors.items():
        a = np.ascontiguousarray(t.numpy())
        header[name] = {"dtype": NAMES[t.dtype], "shape": list(t.shape), "data_offsets": [at, at + a.nbytes]}
        arrays.append(a)
        at += a.nbytes
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    folder = os.path.dirname(os.path.abspath(path))
    fd, temporary = tempfile.mkstemp(dir=folder, prefix=".saving-")
    try:
        with os.fdopen(fd, "wb") as f:
            f.write(struct.pack("<Q", len(text)) + text)
            for a in arrays:
                f.write(a.reshape(-1).view(np.uint8).data)
            f.flush()
            os.fsync(f.fileno())
        os.replace(temporary, path)
    except BaseException:
        os.unlink(temporary)
        raise


def _entry(v: Any) -> tuple[DType, tuple[int, ...], int, int]:
    """(dtype, shape, begin, end) of one tensor in the header."""
    begin, end = (int(x) for x in v["data_offsets"])
    return CODES[v["dtype"]], tuple(int(d) for d in v["shape"]), begin, end


def safe_load(path: str | os.PathLike[str]) -> dict[str, Tensor]:
    """Tensors of a safetensors file, on the device `DISK:path`: mapped, read when copied with `.to(...)`. ValueError on a file that is truncated or malformed; nothing is half loaded."""
    size = os.path.getsize(path)
    with open(path, "rb") as f:
        head = f.read(8)
        n = struct.unpack("<Q", head)[0] if len(head) == 8 else -1
        if not 0 <= n <= min(size - 8, MAX_HEADER):
            raise ValueError(f"{path} is not a whole safetensors file: {size} bytes, header length {n}; fetch or save it again")
        try:
            header = json.loads(f.read(n))
            entries = {k: _entry(v) for k, v in header.items() if k != "__metadata__"}
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise ValueError(f"{path}: the safetensors header is malformed ({type(error).__name__}: {error})") from None
    for name, (dtype, shape, begin, end) in entries.items():
        want = prod(shape) * dtype.itemsize
        if any(d < 0 for d in shape) or not 0 <= begin <= end or end - begin != want:
            raise ValueError(f"{path}: tensor {name!r} of shape {shape} {dtype.name} needs {want} bytes, its offsets say {begin}..{end}")
        if 8 + n + end > size:
            raise ValueError(f"{path} is truncated: tensor {name!r} ends at byte {8 + n + end}, the file has {size}; nothing was loaded")
    full = {name: e for name, e in entries.items() if e[3] > e[2]}
    mapped = engine().map_file(os.path.abspath(path), [(dtype, shape, 8 + n + begin) for dtype, shape, begin, _ in full.values()])
    found = {name: Tensor(u) for name, u in zip(full, mapped)}
    return {name: found[name] if name in found else Tensor(np.empty(shape, dtype.np)) for name, (dtype, shape, _, _) in entries.items()}
