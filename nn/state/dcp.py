"""Checkpoints of torch.distributed.checkpoint, read without PyTorch, and without running what they contain.

A folder has `.metadata`, a pickle of which tensors there are and where parts of them lie, and files `*.distcp` in which
each part, or value, is a file of torch.save (`torch_file.py`).
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass, field
from math import prod
from typing import Any

import numpy as np

from manygrad.nn.state.pickle_reader import ALLOWED, PickleReader
from manygrad.nn.state.torch_file import MAX_PICKLE, READING, load_part, reason_of
from manygrad.tensor.dtype import DType
from manygrad.tensor.tensor import Tensor

NAME = ".metadata"
_METADATA = "torch.distributed.checkpoint.metadata."
_FILESYSTEM = "torch.distributed.checkpoint.filesystem."


@dataclass
class PickledObject:
    """An object of the pickle: its class by name, and its attributes."""

    kind: str
    fields: dict[str, Any] = field(default_factory=dict)
    state: Any = None

    def __hash__(self) -> int:
        return id(self)

    def __eq__(self, other: object) -> bool:
        return self is other

    def get(self, name: str, kind: Any) -> Any:
        """An attribute, which must be of that type."""
        found = self.fields.get(name)
        if not isinstance(found, kind):
            raise ValueError(f"{self.kind} has {name} {found!r:.100}")
        return found


def _record(kind: str) -> Callable[..., PickledObject]:
    return lambda *args: PickledObject(kind)


_RECORDS = {
    _METADATA + name: _record(name)
    for name in (
        *("Metadata", "TensorStorageMetadata", "BytesStorageMetadata", "TensorProperties", "ChunkStorageMetadata"),
        *("MetadataIndex", "StorageMeta", "_MEM_FORMAT_ENCODING"),
    )
} | {_FILESYSTEM + name: _record(name) for name in ("_StorageInfo", "_StoragePrefix")}


class MetadataReader(PickleReader):
    """The pickle `.metadata`: its classes are PickledObjects, all else is as in a file of tensors."""

    allowed = {
        **ALLOWED,
        **_RECORDS,
        "torch.serialization._get_layout": str,
        **dict.fromkeys(
            ("pathlib.PosixPath", "pathlib.PurePosixPath", "pathlib._local.PosixPath"), lambda *parts: "/".join(parts)
        ),
    }

    def build(self, made: Any, state: Any) -> None:
        if not isinstance(made, PickledObject):
            return super().build(made, state)
        made.state = state
        if isinstance(state, dict):
            made.fields = {str(k): v for k, v in state.items()}
        return None


def is_dcp(folder: str) -> bool:
    return os.path.isfile(os.path.join(folder, NAME))


def dcp_load(folder: str | os.PathLike[str]) -> Any:
    """What torch.distributed.checkpoint.save wrote into `folder`: nested dicts and lists of tensors and values. Nothing
    in it is executed.

    A tensor that was saved whole is mapped, one that was cut is put together in memory. ValueError on files that are
    damaged, compressed, missing, or need a global that is not among what such a checkpoint needs.
    """
    folder = os.fspath(folder)
    try:
        with open(os.path.join(folder, NAME), "rb") as f:
            if (size := os.fstat(f.fileno()).st_size) > MAX_PICKLE:
                raise ValueError(f"{NAME} has {size} bytes, more than {MAX_PICKLE}")
            root = MetadataReader(_no_storage).read(f)
        if not isinstance(root, PickledObject) or root.kind != "Metadata":
            raise ValueError(f"{NAME} is no Metadata")
        places = _places(folder, root)
        found = {
            str(name): _value(str(name), about, places.get(str(name), {}))
            for name, about in root.get("state_dict_metadata", dict).items()
        }
        return _nested(found, root.fields.get("planner_data"))
    except READING as error:
        raise ValueError(f"{folder} cannot be read as a checkpoint of torch: {reason_of(error)}") from None


def _no_storage(saved: Any) -> Any:
    raise ValueError(f"{NAME} has a storage, {saved!r:.100}")


Place = tuple[str, int, int]  # path, offset, length


def _places(folder: str, root: PickledObject) -> dict[str, dict[tuple[int, ...], Place]]:
    """By name, and by where the part lies in its tensor (of a value: nowhere), where it stands."""
    sizes: dict[str, int] = {}
    out: dict[str, dict[tuple[int, ...], Place]] = {}
    for index, info in root.get("storage_data", dict).items():
        if not isinstance(index, PickledObject) or not isinstance(info, PickledObject):
            raise ValueError(f"a part is said to lie at {info!r:.100}")
        file, begin, nbytes = info.get("relative_path", str), info.get("offset", int), info.get("length", int)
        if info.fields.get("transform_descriptors"):
            raise ValueError(
                f"{file} was transformed ({info.fields['transform_descriptors']!r:.100}), or is compressed"
            )
        if os.path.basename(file) != file or file in ("", ".", ".."):
            raise ValueError(f"it names the file {file!r}, which is not in its folder")
        path = os.path.join(folder, file)
        if path not in sizes:
            sizes[path] = os.path.getsize(path)
        if begin < 0 or nbytes < 0 or begin + nbytes > sizes[path]:
            raise ValueError(f"{path} is truncated: it has {sizes[path]} bytes, a part ends at byte {begin + nbytes}")
        at = index.fields.get("offset")
        out.setdefault(index.get("fqn", str), {})[tuple(at or ())] = path, begin, nbytes
    return out


def _value(name: str, about: Any, parts: dict[tuple[int, ...], Place]) -> Any:
    """A tensor, put together of its parts, or what else was saved."""
    if not isinstance(about, PickledObject) or about.kind not in ("TensorStorageMetadata", "BytesStorageMetadata"):
        raise ValueError(f"{name} is described by {about!r:.100}")
    if about.kind == "BytesStorageMetadata":
        if () not in parts:
            raise ValueError(f"{name} has no place in the files")
        return load_part(*parts[()])
    shape = tuple(about.get("size", tuple))
    dtype = about.get("properties", PickledObject)
    kind = dtype.fields.get("dtype") if dtype.state is None or dtype.fields else dtype.state[0]
    if not isinstance(kind, DType) or not all(type(d) is int and d >= 0 for d in shape):
        raise ValueError(f"{name} has the type {kind!r:.100} and the shape {shape}")
    chunks = [(tuple(c.get("offsets", tuple)), tuple(c.get("sizes", tuple))) for c in about.get("chunks", list)]
    if prod(shape) != sum(prod(dims) for _, dims in chunks) or any(at not in parts for at, _ in chunks):
        raise ValueError(
            f"{name} of shape {shape} has the parts {chunks!r:.200}, of which files have {list(parts)!r:.200}"
        )
    if prod(shape) * kind.itemsize > sum(parts[at][2] for at, _ in chunks):
        raise ValueError(f"{name} of shape {shape} {kind.name} needs more bytes than its parts have")
    loaded = [(at, dims, _tensor(name, parts[at], dims, kind)) for at, dims in chunks]
    if len(loaded) == 1 and loaded[0][1] == shape:
        return loaded[0][2]
    whole = np.zeros(shape, kind.np)
    seen = np.zeros(shape, bool)
    for at, dims, part in loaded:
        inside = tuple(slice(a, a + n) for a, n in zip(at, dims))
        if whole[inside].shape != dims or seen[inside].any():
            raise ValueError(f"{name}: a part of {dims} at {at} does not fit in {shape}, or overlaps another")
        whole[inside], seen[inside] = part.numpy(), True
    return Tensor(whole)


def _tensor(name: str, place: Place, dims: tuple[int, ...], kind: DType) -> Tensor:
    found = load_part(*place)
    if not isinstance(found, Tensor) or tuple(found.shape) != dims or found.dtype is not kind:
        raise ValueError(f"a part of {name} should be {kind.name} {dims}, the file has {found!r:.100}")
    return found


def _nested(found: dict[str, Any], paths: Any) -> Any:
    """Values by their paths, as the dicts and lists that they were saved as; by name where there are no paths."""
    if not isinstance(paths, dict) or set(paths) != set(found):
        return found
    root: dict[Any, Any] = {}
    for name, path in paths.items():
        if not isinstance(path, tuple) or not path or not all(isinstance(k, (str, int)) for k in path):
            raise ValueError(f"{name} has the path {path!r:.100}")
        at = root
        for k in path[:-1]:
            at = at.setdefault(k, {})
            if not isinstance(at, dict):
                raise ValueError(f"{name} lies below a value, at {path!r:.100}")
        at[path[-1]] = found[name]
    return _with_lists(root)


def _with_lists(x: Any) -> Any:
    if not isinstance(x, dict):
        return x
    inside = {k: _with_lists(v) for k, v in x.items()}
    if inside and all(isinstance(k, int) for k in inside) and sorted(inside) == list(range(len(inside))):
        return [inside[i] for i in range(len(inside))]
    return inside
