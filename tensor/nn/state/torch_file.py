"""PyTorch's files (.pt, .pth), read and written without PyTorch, and without running what they contain.

A file is a pickle and raw storages: in a zip archive, or (before 2020) one after another. The pickle is read by an interpreter of
its opcodes that knows containers, numbers, text and the few globals of tensors; any other global is an error with its name.
Tensors come mapped, on `DISK:path`, where they lie in the file in order of their dims.
"""

from __future__ import annotations

import io
import os
import pickletools
import struct
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from math import prod
from typing import Any, BinaryIO

import numpy as np

from manygrad.tensor.dtype import DType, dtypes
from manygrad.tensor.engine import engine
from manygrad.tensor.nn.state.files import replaced, written_at_once
from manygrad.tensor.tensor import Tensor, default_device

STORAGES: dict[str, DType] = {
    "DoubleStorage": dtypes.float64, "FloatStorage": dtypes.float32, "HalfStorage": dtypes.float16, "BFloat16Storage": dtypes.bfloat16,
    "LongStorage": dtypes.int64, "IntStorage": dtypes.int32, "ShortStorage": dtypes.int16, "CharStorage": dtypes.int8,
    "ByteStorage": dtypes.uint8, "BoolStorage": dtypes.bool, "UntypedStorage": dtypes.uint8,
}  # fmt: skip
NAMES = {d: n for n, d in reversed(STORAGES.items()) if n != "UntypedStorage"}
DTYPES: dict[str, DType] = {**{d.name: d for d in dtypes.all}, "long": dtypes.int64, "float": dtypes.float32, "double": dtypes.float64, "half": dtypes.float16, "int": dtypes.int32}
MAX_PICKLE = 512 << 20
LEGACY_MAGIC, LEGACY_PROTOCOL = 0x1950A86A20F9469CFC6C, 1001


@dataclass(frozen=True)
class _Global:
    module: str
    name: str

    def __str__(self) -> str:
        return f"{self.module}.{self.name}"


@dataclass(frozen=True)
class _Storage:
    """`count` elements of `dtype`, called `key` in the file."""

    key: str
    dtype: DType
    count: int


@dataclass(eq=False)
class _View:
    """A tensor to be: a strided view of a storage, offsets and strides in elements."""

    storage: _Storage
    dtype: DType
    offset: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]


def _ints(what: str, values: Any) -> tuple[int, ...]:
    if not isinstance(values, (tuple, list)) or any(type(v) is not int or v < 0 for v in values):
        raise ValueError(f"{what} {values!r} is not a tuple of sizes")
    return tuple(values)


def _rebuild_tensor(storage: Any, offset: Any, shape: Any, strides: Any, *rest: Any) -> _View:
    return _view(storage, None, offset, shape, strides)


def _rebuild_tensor_v3(storage: Any, offset: Any, shape: Any, strides: Any, requires_grad: Any, hooks: Any, dtype: Any, *rest: Any) -> _View:
    return _view(storage, dtype, offset, shape, strides)


def _view(storage: Any, dtype: Any, offset: Any, shape: Any, strides: Any) -> _View:
    if not isinstance(storage, _Storage):
        raise ValueError(f"a tensor is built from {type(storage).__name__}, not from a storage")
    dims, steps = _ints("a tensor's shape", shape), _ints("a tensor's strides", strides)
    if len(dims) != len(steps) or type(offset) is not int or offset < 0:
        raise ValueError(f"a tensor of shape {dims} has strides {steps} and offset {offset!r}")
    kind = dtype if isinstance(dtype, DType) else storage.dtype
    have = storage.count * storage.dtype.itemsize // kind.itemsize
    need = offset + sum((d - 1) * s for d, s in zip(dims, steps)) + 1 if prod(dims) else 0
    if need > have:
        raise ValueError(f"a tensor of shape {dims}, strides {steps}, offset {offset} needs {need} elements, storage {storage.key!r} has {have}")
    return _View(storage, kind, offset, dims, steps)


def _ordered_dict(items: Any = ()) -> dict[Any, Any]:
    return dict(items)


def _encode(text: str, encoding: str = "latin1") -> bytes:
    if encoding != "latin1":
        raise ValueError(f"bytes in the encoding {encoding!r}")
    return text.encode("latin1")


ALLOWED: dict[str, Callable[..., Any]] = {
    "collections.OrderedDict": _ordered_dict,
    "torch._utils._rebuild_tensor": _rebuild_tensor,
    "torch._utils._rebuild_tensor_v2": _rebuild_tensor,
    "torch._utils._rebuild_tensor_v3": _rebuild_tensor_v3,
    "torch._utils._rebuild_parameter": lambda data, *rest: data,
    "torch._utils._rebuild_parameter_with_state": lambda data, *rest: data,
    "torch.Size": lambda values=(): tuple(values),
    "torch.device": lambda kind, index=None: kind if index is None else f"{kind}:{index}",
    "_codecs.encode": _encode,
    "builtins.set": lambda values=(): set(values),
    "__builtin__.set": lambda values=(): set(values),
    "builtins.bytearray": lambda values=b"": bytes(values),
}


def _find(module: str, name: str) -> Any:
    """What a global of the pickle stands for: a storage or element type, or a function of the allow-list."""
    if module == "torch" and name in DTYPES:
        return DTYPES[name]
    if (module in ("torch", "torch.storage")) and name in STORAGES:
        return _Storage("", STORAGES[name], 0)
    found = _Global(module, name)
    if str(found) not in ALLOWED:
        raise ValueError(f"the file asks for {found}, which is not among what a file of tensors needs; nothing was run. Save the state dict alone, or as safetensors")
    return found


_MARK = object()


class _Reader:
    """Interprets one pickle of `stream`; `storage(persistent id)` finds storages."""

    def __init__(self, storage: Callable[[Any], _Storage]):
        self.storage = storage
        self.stack: list[Any] = []
        self.memo: dict[int, Any] = {}

    def read(self, stream: BinaryIO) -> Any:
        for opcode, arg, _ in pickletools.genops(stream):
            if opcode.name == "STOP":
                return self.stack.pop()
            self._step(opcode.name, arg)
        raise ValueError("the pickle has no end")

    def _popped(self) -> list[Any]:
        """The items above the last mark, which goes too."""
        at = max(i for i, x in enumerate(self.stack) if x is _MARK)
        items = self.stack[at + 1 :]
        del self.stack[at:]
        return items

    def _step(self, name: str, arg: Any) -> None:
        push, pop, stack = self.stack.append, self.stack.pop, self.stack
        if name in ("PROTO", "FRAME"):
            return
        if name in ("BININT", "BININT1", "BININT2", "INT", "LONG", "LONG1", "LONG4", "BINFLOAT", "FLOAT", "BINUNICODE", "SHORT_BINUNICODE", "BINUNICODE8", "UNICODE",
                    "STRING", "BINSTRING", "SHORT_BINSTRING", "BINBYTES", "SHORT_BINBYTES", "BINBYTES8", "BYTEARRAY8"):  # fmt: skip
            push(arg)
        elif name in ("NONE", "NEWTRUE", "NEWFALSE"):
            push({"NONE": None, "NEWTRUE": True, "NEWFALSE": False}[name])
        elif name == "MARK":
            push(_MARK)
        elif name in ("EMPTY_DICT", "EMPTY_LIST", "EMPTY_TUPLE", "EMPTY_SET"):
            push({"EMPTY_DICT": dict, "EMPTY_LIST": list, "EMPTY_TUPLE": tuple, "EMPTY_SET": set}[name]())
        elif name in ("TUPLE1", "TUPLE2", "TUPLE3"):
            n = int(name[-1])
            items = tuple(stack[-n:])
            del stack[-n:]
            push(items)
        elif name in ("TUPLE", "LIST", "FROZENSET"):
            push({"TUPLE": tuple, "LIST": list, "FROZENSET": frozenset}[name](self._popped()))
        elif name == "DICT":
            items = self._popped()  # type: ignore[assignment]
            push(dict(zip(items[::2], items[1::2])))
        elif name == "APPEND":
            value = pop()
            self._top(list).append(value)
        elif name in ("APPENDS", "ADDITEMS"):
            values = self._popped()
            (self._top(list).extend if name == "APPENDS" else self._top(set).update)(values)
        elif name == "SETITEM":
            value, key = pop(), pop()
            self._top(dict)[key] = value
        elif name == "SETITEMS":
            items = self._popped()  # type: ignore[assignment]
            self._top(dict).update(zip(items[::2], items[1::2]))
        elif name == "GLOBAL":
            module, _, attribute = arg.partition(" ")
            push(_find(module, attribute))
        elif name == "STACK_GLOBAL":
            attribute, module = pop(), pop()
            push(_find(str(module), str(attribute)))
        elif name == "REDUCE":
            args, function = pop(), pop()
            if not isinstance(function, _Global) or not isinstance(args, tuple):
                raise ValueError(f"the pickle calls {function!r}, which is no function of the allow-list")
            push(ALLOWED[str(function)](*args))
        elif name == "BUILD":  # attributes of a state dict (its `_metadata`) are not kept
            pop()
            self._top((dict, _View))
        elif name == "BINPERSID":
            push(self.storage(pop()))
        elif name in ("PUT", "BINPUT", "LONG_BINPUT"):
            self.memo[arg] = stack[-1]
        elif name == "MEMOIZE":
            self.memo[len(self.memo)] = stack[-1]
        elif name in ("GET", "BINGET", "LONG_BINGET"):
            push(self.memo[arg])
        elif name == "POP":
            pop()
        elif name == "POP_MARK":
            self._popped()
        elif name == "DUP":
            push(stack[-1])
        else:
            raise ValueError(f"the pickle has the opcode {name}, which no file of tensors needs; nothing was run")

    def _top(self, kind: Any) -> Any:
        if not isinstance(self.stack[-1], kind):
            raise ValueError(f"the pickle treats {type(self.stack[-1]).__name__} as {kind}")
        return self.stack[-1]


def torch_load(path: str | os.PathLike[str]) -> Any:
    """What torch.save wrote: a state dict, or containers with tensors in them. Nothing in the file is executed.

    ValueError on a file that is truncated, compressed, malformed, or needs a global that is not of tensors.
    """
    name = os.fspath(path)
    try:
        with open(name, "rb") as f:
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
                raise ValueError(f"storage {v.storage.key!r} needs {v.storage.count * v.storage.dtype.itemsize} bytes, the file has {min(nbytes, max(size - at, 0))}; it is truncated")
    except (ValueError, KeyError, IndexError, TypeError, EOFError, struct.error, zipfile.BadZipFile, RecursionError, OverflowError, AttributeError, UnicodeError) as error:
        reason = str(error) if isinstance(error, ValueError) else f"{type(error).__name__}: {error}"
        raise ValueError(f"{name} cannot be read as a PyTorch file: {reason}") from None
    return replaced(root, _View, dict(zip(map(id, views), _tensors(name, views, places))))


def _views(root: Any) -> list[_View]:
    found: dict[int, _View] = {}
    todo, seen = [root], set()
    while todo:
        x = todo.pop()
        if isinstance(x, _View):
            found[id(x)] = x
        elif isinstance(x, (dict, list, tuple)) and id(x) not in seen:
            seen.add(id(x))
            todo += x.values() if isinstance(x, dict) else x
    return list(found.values())


def _read_zip(f: BinaryIO) -> tuple[Any, dict[str, tuple[int, int]]]:
    """(the pickled structure, (offset, bytes) of each storage)."""
    with zipfile.ZipFile(f) as archive:
        infos = {i.filename: i for i in archive.infolist()}
        pickles = [n for n in infos if n.endswith("data.pkl")]
        if len(pickles) != 1:
            raise ValueError(f"the archive holds {len(pickles)} files data.pkl")
        folder = pickles[0][: -len("data.pkl")]
        if infos[pickles[0]].file_size > MAX_PICKLE:
            raise ValueError(f"its pickle has {infos[pickles[0]].file_size} bytes, more than {MAX_PICKLE}")
        order = archive.read(folder + "byteorder") if folder + "byteorder" in infos else b"little"
        if order != b"little":
            raise ValueError(f"its byte order is {order!r}; load it with PyTorch on such a machine and save it here")
        root = _Reader(_zip_storage).read(io.BytesIO(archive.read(pickles[0])))
    places = {}
    for n, i in infos.items():
        if n.startswith(folder + "data/"):
            if i.compress_type != zipfile.ZIP_STORED:
                raise ValueError(f"{n} is compressed; torch.save stores it as it is")
            f.seek(i.header_offset)
            head = f.read(30)
            if head[:4] != b"PK\x03\x04":
                raise ValueError(f"{n} does not lie where the archive says")
            skip = struct.unpack("<HH", head[26:30])
            places[n[len(folder + "data/") :]] = (i.header_offset + 30 + sum(skip), i.file_size)
    return root, places


def _zip_storage(saved: Any) -> _Storage:
    kind, dtype, key, _, count = saved
    if kind != "storage" or not isinstance(dtype, _Storage) or type(count) is not int or count < 0:
        raise ValueError(f"a persistent id {saved!r} is not of a storage")
    return _Storage(str(key), dtype.dtype, count)


def _read_legacy(f: BinaryIO) -> tuple[Any, dict[str, tuple[int, int]]]:
    """The format before zip: magic number, version, system, the structure, the storages' keys, the storages."""
    first = _Reader(_zip_storage).read(f)
    if first != LEGACY_MAGIC:
        raise ValueError("it is neither a zip archive nor of the format before it (tar files are not read)")
    if _Reader(_zip_storage).read(f) != LEGACY_PROTOCOL:
        raise ValueError("its protocol version is not known")
    system = _Reader(_zip_storage).read(f)
    if isinstance(system, dict) and system.get("little_endian") is False:
        raise ValueError("its byte order is big-endian")
    storages: dict[str, _Storage] = {}

    def storage(saved: Any) -> _Storage:
        if not isinstance(saved, tuple) or len(saved) < 5 or saved[0] != "storage" or (len(saved) > 5 and saved[5] is not None):
            raise ValueError(f"a persistent id {saved!r} is not of a whole storage")
        return storages.setdefault(str(saved[2]), _zip_storage(saved[:5]))

    root = _Reader(storage).read(f)
    places = {}
    for key in _Reader(_zip_storage).read(f):
        if key not in storages:
            raise ValueError(f"storage {key!r} belongs to no tensor")
        head = f.read(8)
        count = struct.unpack("<q", head)[0] if len(head) == 8 else -1
        if count != storages[key].count:
            raise ValueError(f"storage {key!r} should have {storages[key].count} elements, the file says {count}; it is truncated or damaged")
        at, nbytes = f.tell(), count * storages[key].dtype.itemsize
        places[key] = (at, nbytes)
        f.seek(at + nbytes)
    return root, places


def _tensors(path: str, views: list[_View], places: dict[str, tuple[int, int]]) -> list[Tensor]:
    """A tensor a view: mapped in place if its dims lie in order; else gathered from the part of the storage that it covers."""
    parts: list[tuple[DType, tuple[int, ...], int]] = []
    plain: list[bool] = []
    full = [v for v in views if prod(v.shape)]
    for v in full:
        in_order = v.strides == _row_major(v.shape) or all(d == 1 or s == w for d, s, w in zip(v.shape, v.strides, _row_major(v.shape)))
        extent = v.shape if in_order else (sum((d - 1) * s for d, s in zip(v.shape, v.strides)) + 1,)
        parts.append((v.dtype, extent, places[v.storage.key][0] + v.offset * v.dtype.itemsize))
        plain.append(in_order)
    made: dict[int, Tensor] = {}
    for v, in_order, uop in zip(full, plain, engine().map_file(os.path.abspath(path), parts) if parts else []):
        made[id(v)] = Tensor(uop) if in_order else _strided(Tensor(uop).to(default_device()), v)
    return [made[id(v)] if id(v) in made else Tensor(np.empty(v.shape, v.dtype.np)) for v in views]


def _row_major(shape: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(prod(shape[i + 1 :]) for i in range(len(shape)))


def _strided(flat: Tensor, v: _View) -> Tensor:
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


# *** writing ***


def torch_save(obj: Any, path: str | os.PathLike[str]) -> None:
    """Writes what torch.load(weights_only=True) reads: dicts, lists, tuples, text, numbers and tensors, in a zip archive."""
    arrays: list[np.ndarray] = []
    pickled = b"\x80\x02" + _pickled(obj, arrays) + b"."
    with written_at_once(path) as f, zipfile.ZipFile(f, "w", zipfile.ZIP_STORED) as archive:
        for name, data in [("data.pkl", pickled), ("byteorder", b"little"), *((f"data/{i}", a.tobytes()) for i, a in enumerate(arrays)), ("version", b"3\n")]:
            archive.writestr(f"archive/{name}", data)


def _pickled(x: Any, arrays: list[np.ndarray]) -> bytes:
    """Opcodes that push `x`; the data of tensors are appended to `arrays`."""
    if x is None or isinstance(x, bool):
        return {None: b"N", True: b"\x88", False: b"\x89"}[x]
    if isinstance(x, int):
        return b"J" + struct.pack("<i", x) if -(1 << 31) <= x < 1 << 31 else b"\x8a" + bytes([n := x.bit_length() // 8 + 1]) + x.to_bytes(n, "little", signed=True)
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
        sizes, steps = (b"(" + b"".join(_pickled(int(d), arrays) for d in dims) + b"t" for dims in (x.shape, _row_major(tuple(x.shape))))
        kind = f"ctorch\n{NAMES[x.dtype]}\n".encode()
        storage = b"(" + _pickled("storage", arrays) + kind + _pickled(str(len(arrays) - 1), arrays) + _pickled("cpu", arrays) + _pickled(a.size, arrays) + b"tQ"
        hooks = b"ccollections\nOrderedDict\n)R"
        return b"ctorch._utils\n_rebuild_tensor_v2\n(" + storage + _pickled(0, arrays) + sizes + steps + b"\x89" + hooks + b"tR"
    if isinstance(x, dict):
        return b"}(" + b"".join(_pickled(k, arrays) + _pickled(v, arrays) for k, v in x.items()) + b"u"
    if isinstance(x, (list, tuple)):
        inside = b"(" + b"".join(_pickled(v, arrays) for v in x)
        return b"]" + inside + b"e" if isinstance(x, list) else inside + b"t"
    raise TypeError(f"torch_save: cannot write a {type(x).__name__}; pass dicts, lists, tuples, text, numbers and tensors")
