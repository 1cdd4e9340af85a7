"""PyTorch's files (.pt, .pth), read without PyTorch, and without running what they contain.

A file is a pickle (`pickle_reader.py`) and raw storages: in a zip archive, or (before 2020) one after another. Tensors
come mapped, on `DISK:path`, where their dims lie in order in the file.
"""

from __future__ import annotations

import io
import os
import struct
import zipfile
from math import prod
from typing import Any, BinaryIO

import numpy as np

from manygrad.nn.state.files import replaced
from manygrad.nn.state.pickle_reader import FileStorage, PickleReader, View
from manygrad.tensor.dtype import DType
from manygrad.tensor.engine import default_device, engine
from manygrad.tensor.tensor import Tensor

MAX_PICKLE = 512 << 20
LEGACY_MAGIC, LEGACY_PROTOCOL = 0x1950A86A20F9469CFC6C, 1001

# what a damaged file leads to
READING = (
    ValueError,
    KeyError,
    IndexError,
    TypeError,
    EOFError,
    struct.error,
    zipfile.BadZipFile,
    OverflowError,
    AttributeError,
    RuntimeError,
)


def torch_load(path: str | os.PathLike[str]) -> Any:
    """Reads what torch.save wrote: a state dict, or containers with tensors in them. Nothing in the file is executed.

    ValueError on a file that is truncated, compressed, malformed, or needs a global that is not of tensors.
    """
    return load_part(os.fspath(path))


def load_part(name: str, begin: int = 0, nbytes: int | None = None) -> Any:
    """`torch_load` of the file that lies in `nbytes` bytes of another one, from `begin` on."""
    try:
        with open(name, "rb") as whole:
            f = whole if nbytes is None else io.BufferedReader(_Window(whole, begin, nbytes))
            zipped = f.read(4) == b"PK\x03\x04"
            f.seek(0)
            root, places = _read_zip(f) if zipped else _read_legacy(f)
            size = f.seek(0, os.SEEK_END)
        views = _views(root)
        for v in views:
            if v.storage.key not in places:
                raise ValueError(f"storage {v.storage.key!r} is not in the file")
            at, nbytes = places[v.storage.key]
            if v.storage.count * v.storage.dtype.itemsize > nbytes or at + nbytes > size:
                raise ValueError(
                    f"storage {v.storage.key!r} needs {v.storage.count * v.storage.dtype.itemsize} bytes, the file has "
                    f"{min(nbytes, max(size - at, 0))}; it is truncated"
                )
        places = {key: (begin + at, nbytes) for key, (at, nbytes) in places.items()}
        return replaced(root, View, dict(zip(map(id, views), _tensors(name, views, places))))
    except READING as error:
        raise ValueError(f"{name} cannot be read as a PyTorch file: {reason_of(error)}") from None


def reason_of(error: Exception) -> str:
    """Why a file cannot be read."""
    return str(error) if isinstance(error, ValueError) else f"{type(error).__name__}: {error}"


class _Window(io.RawIOBase):
    """A part of a file, read as a file."""

    def __init__(self, file: BinaryIO, begin: int, nbytes: int):
        self.file, self.begin, self.nbytes, self.at = file, begin, nbytes, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        at = offset + {os.SEEK_SET: 0, os.SEEK_CUR: self.at, os.SEEK_END: self.nbytes}[whence]
        if at < 0:
            raise ValueError(f"a place {-at} bytes before the file's beginning")
        self.at = at
        return self.at

    def readinto(self, buffer: Any) -> int:
        self.file.seek(self.begin + self.at)
        data = self.file.read(min(len(buffer), max(0, self.nbytes - self.at)))
        buffer[: len(data)] = data
        self.at += len(data)
        return len(data)


def _views(root: Any) -> list[View]:
    found: dict[int, View] = {}
    todo, seen = [root], set()
    while todo:
        x = todo.pop()
        if isinstance(x, View):
            found[id(x)] = x
        elif isinstance(x, (dict, list, tuple)) and id(x) not in seen:
            seen.add(id(x))
            todo += x.values() if isinstance(x, dict) else x
    return list(found.values())


def _read_zip(f: BinaryIO) -> tuple[Any, dict[str, tuple[int, int]]]:
    """(the pickled structure, (offset, bytes) of each storage)."""
    with zipfile.ZipFile(f) as archive:
        infos = {i.filename: i for i in archive.infolist()}
        if packed := [n for n, i in infos.items() if i.compress_type != zipfile.ZIP_STORED or i.flag_bits & 1]:
            raise ValueError(f"{packed[0]} is compressed or encrypted; torch.save stores it as it is")
        pickles = [n for n in infos if n.endswith("data.pkl")]
        if len(pickles) != 1:
            raise ValueError(f"the archive holds {len(pickles)} files data.pkl")
        folder = pickles[0][: -len("data.pkl")]
        if infos[pickles[0]].file_size > MAX_PICKLE:
            raise ValueError(f"its pickle has {infos[pickles[0]].file_size} bytes, more than {MAX_PICKLE}")
        order = archive.read(folder + "byteorder") if folder + "byteorder" in infos else b"little"
        if order != b"little":
            raise ValueError(f"its byte order is {order!r}; load it with PyTorch on such a machine and save it here")
        root = PickleReader(_zip_storage).read(io.BytesIO(archive.read(pickles[0])))
    places = {}
    for n, i in infos.items():
        if n.startswith(folder + "data/"):
            f.seek(i.header_offset)
            head = f.read(30)
            if head[:4] != b"PK\x03\x04":
                raise ValueError(f"{n} does not lie where the archive says")
            skip = struct.unpack("<HH", head[26:30])
            places[n[len(folder + "data/") :]] = (i.header_offset + 30 + sum(skip), i.file_size)
    return root, places


def _zip_storage(saved: Any) -> FileStorage:
    kind, dtype, key, _, count = saved
    if kind != "storage" or not isinstance(dtype, FileStorage) or type(count) is not int or count < 0:
        raise ValueError(f"a persistent id {saved!r} is not of a storage")
    return FileStorage(str(key), dtype.dtype, count)


def _read_legacy(f: BinaryIO) -> tuple[Any, dict[str, tuple[int, int]]]:
    """The format before zip: magic number, version, system, the structure, the storages' keys, the storages."""
    first = PickleReader(_zip_storage).read(f)
    if first != LEGACY_MAGIC:
        raise ValueError("it is neither a zip archive nor of the format before it (tar files are not read)")
    if PickleReader(_zip_storage).read(f) != LEGACY_PROTOCOL:
        raise ValueError("its protocol version is not known")
    system = PickleReader(_zip_storage).read(f)
    if isinstance(system, dict) and system.get("little_endian") is False:
        raise ValueError("its byte order is big-endian")
    storages: dict[str, FileStorage] = {}

    def storage(saved: Any) -> FileStorage:
        if (
            not isinstance(saved, tuple)
            or len(saved) < 5
            or saved[0] != "storage"
            or (len(saved) > 5 and saved[5] is not None)
        ):
            raise ValueError(f"a persistent id {saved!r} is not of a whole storage")
        return storages.setdefault(str(saved[2]), _zip_storage(saved[:5]))

    root = PickleReader(storage).read(f)
    places = {}
    for key in PickleReader(_zip_storage).read(f):
        if key not in storages:
            raise ValueError(f"storage {key!r} belongs to no tensor")
        head = f.read(8)
        count = struct.unpack("<q", head)[0] if len(head) == 8 else -1
        if count != storages[key].count:
            raise ValueError(
                f"storage {key!r} should have {storages[key].count} elements, the file says {count}; "
                "it is truncated or damaged"
            )
        at, nbytes = f.tell(), count * storages[key].dtype.itemsize
        places[key] = (at, nbytes)
        f.seek(at + nbytes)
    return root, places


def _tensors(path: str, views: list[View], places: dict[str, tuple[int, int]]) -> list[Tensor]:
    """A tensor a view: mapped in place if its dims lie in order;
    else gathered from the part of the storage that it covers."""
    parts: list[tuple[DType, tuple[int, ...], int]] = []
    plain: list[bool] = []
    full = [v for v in views if prod(v.shape)]
    for v in full:
        in_order = v.strides == _row_major(v.shape) or all(
            d == 1 or s == w for d, s, w in zip(v.shape, v.strides, _row_major(v.shape))
        )
        extent = v.shape if in_order else (sum((d - 1) * s for d, s in zip(v.shape, v.strides)) + 1,)
        parts.append((v.dtype, extent, places[v.storage.key][0] + v.offset * v.dtype.itemsize))
        plain.append(in_order)
    made: dict[int, Tensor] = {}
    for v, in_order, uop in zip(full, plain, engine().map_file(os.path.abspath(path), parts) if parts else []):
        made[id(v)] = Tensor(uop) if in_order else _strided(Tensor(uop).to(default_device()), v)
    return [made[id(v)] if id(v) in made else Tensor(np.empty(v.shape, v.dtype.np)) for v in views]


def _row_major(shape: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(prod(shape[i + 1 :]) for i in range(len(shape)))


def _strided(flat: Tensor, v: View) -> Tensor:
    """Elements of `flat` at Σ i·stride: a permutation where the strides are one of a dense tensor, else a gather."""
    order = sorted(range(len(v.shape)), key=lambda i: -v.strides[i])
    dense = tuple(v.shape[i] for i in order)
    if flat.shape == (prod(dense),) and tuple(v.strides[i] for i in order) == _row_major(dense):
        return flat.reshape(dense).permute(*(order.index(i) for i in range(len(order))))
    index: Tensor | None = None
    for i, (d, s) in enumerate(zip(v.shape, v.strides)):
        along = (Tensor.arange(d) * s).reshape(tuple(d if j == i else 1 for j in range(len(v.shape))))
        index = along if index is None else index + along
    assert index is not None
    return flat[index]
