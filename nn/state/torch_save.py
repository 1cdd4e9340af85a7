"""Writes files that PyTorch reads."""

from __future__ import annotations

import os
import struct
import zipfile
from math import prod
from typing import Any

import numpy as np

from manygrad.nn.state.files import written_at_once
from manygrad.nn.state.pickle_reader import STORAGES
from manygrad.tensor.tensor import Tensor

NAMES = {d: n for n, d in reversed(STORAGES.items()) if n != "UntypedStorage"}


def torch_save(obj: Any, path: str | os.PathLike[str]) -> None:
    """Writes what torch.load(weights_only=True) reads: dicts, lists, tuples, text, numbers and tensors,
    in a zip archive."""
    arrays: list[np.ndarray] = []
    pickled = b"\x80\x02" + _pickled(obj, arrays) + b"."
    with written_at_once(path) as f, zipfile.ZipFile(f, "w", zipfile.ZIP_STORED) as archive:
        for name, data in [
            ("data.pkl", pickled),
            ("byteorder", b"little"),
            *((f"data/{i}", a.tobytes()) for i, a in enumerate(arrays)),
            ("version", b"3\n"),
        ]:
            archive.writestr(f"archive/{name}", data)


def _pickled(x: Any, arrays: list[np.ndarray]) -> bytes:
    """Opcodes that push `x`; the data of tensors are appended to `arrays`."""
    if x is None or isinstance(x, bool):
        return {None: b"N", True: b"\x88", False: b"\x89"}[x]
    if isinstance(x, int):
        return (
            b"J" + struct.pack("<i", x)
            if -(1 << 31) <= x < 1 << 31
            else b"\x8a" + bytes([n := x.bit_length() // 8 + 1]) + x.to_bytes(n, "little", signed=True)
        )
    if isinstance(x, float):
        return b"G" + struct.pack(">d", x)
    if isinstance(x, str):
        text = x.encode("utf-8", "surrogatepass")
        return b"X" + struct.pack("<I", len(text)) + text
    if isinstance(x, Tensor):
        a = np.ascontiguousarray(x.detach().numpy())
        if x.dtype not in NAMES:
            raise TypeError(f"torch_save: {x.dtype.name} has no storage in this format; cast it first")
        arrays.append(a)
        sizes, steps = (
            b"(" + b"".join(_pickled(int(d), arrays) for d in dims) + b"t"
            for dims in (x.shape, tuple(prod(x.shape[i + 1 :]) for i in range(x.ndim)))
        )
        kind = f"ctorch\n{NAMES[x.dtype]}\n".encode()
        storage = (
            b"("
            + _pickled("storage", arrays)
            + kind
            + _pickled(str(len(arrays) - 1), arrays)
            + _pickled("cpu", arrays)
            + _pickled(a.size, arrays)
            + b"tQ"
        )
        hooks = b"ccollections\nOrderedDict\n)R"
        return (
            b"ctorch._utils\n_rebuild_tensor_v2\n("
            + storage
            + _pickled(0, arrays)
            + sizes
            + steps
            + b"\x89"
            + hooks
            + b"tR"
        )
    if isinstance(x, dict):
        return b"}(" + b"".join(_pickled(k, arrays) + _pickled(v, arrays) for k, v in x.items()) + b"u"
    if isinstance(x, (list, tuple)):
        inside = b"(" + b"".join(_pickled(v, arrays) for v in x)
        return b"]" + inside + b"e" if isinstance(x, list) else inside + b"t"
    raise TypeError(
        f"torch_save: cannot write a {type(x).__name__}; pass dicts, lists, tuples, text, numbers and tensors"
    )
