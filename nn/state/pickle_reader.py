"""Reads a pickle of tensors opcode by opcode, without running what it contains.

Containers, numbers and text come as they are, tensors as `View`s of `FileStorage`s. Of the globals only those of the
allow-list `ALLOWED` mean something; any other is an error with its name.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from math import prod
from typing import Any, BinaryIO, cast

from manygrad.tensor.dtype import DType, dtypes

STORAGES: dict[str, DType] = {
    "DoubleStorage": dtypes.float64, "FloatStorage": dtypes.float32, "HalfStorage": dtypes.float16,
    "BFloat16Storage": dtypes.bfloat16,
    "LongStorage": dtypes.int64, "IntStorage": dtypes.int32, "ShortStorage": dtypes.int16, "CharStorage": dtypes.int8,
    "ByteStorage": dtypes.uint8, "BoolStorage": dtypes.bool, "UntypedStorage": dtypes.uint8,
}  # fmt: skip
DTYPES: dict[str, DType] = {
    **{d.name: d for d in dtypes.all},
    "long": dtypes.int64,
    "float": dtypes.float32,
    "double": dtypes.float64,
    "half": dtypes.float16,
    "int": dtypes.int32,
}


@dataclass(frozen=True)
class Global:
    module: str
    name: str

    def __str__(self) -> str:
        return f"{self.module}.{self.name}"


@dataclass(frozen=True)
class FileStorage:
    """`count` elements of `dtype`, called `key` in the file."""

    key: str
    dtype: DType
    count: int


@dataclass(eq=False)
class View:
    """A tensor to be: a strided view of a storage, offsets and strides in elements."""

    storage: FileStorage
    dtype: DType
    offset: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]


def _ints(what: str, values: Any) -> tuple[int, ...]:
    if not isinstance(values, (tuple, list)) or any(type(v) is not int or v < 0 for v in values):
        raise ValueError(f"{what} {values!r} is not a tuple of sizes")
    return tuple(values)


def _rebuild_tensor(storage: Any, offset: Any, shape: Any, strides: Any, *rest: Any) -> View:
    return _view(storage, None, offset, shape, strides)


def _rebuild_tensor_v3(
    storage: Any, offset: Any, shape: Any, strides: Any, requires_grad: Any, hooks: Any, dtype: Any, *rest: Any
) -> View:
    return _view(storage, dtype, offset, shape, strides)


def _view(storage: Any, dtype: Any, offset: Any, shape: Any, strides: Any) -> View:
    if not isinstance(storage, FileStorage):
        raise ValueError(f"a tensor is built from {type(storage).__name__}, not from a storage")
    dims, steps = _ints("a tensor's shape", shape), _ints("a tensor's strides", strides)
    if len(dims) != len(steps) or type(offset) is not int or offset < 0:
        raise ValueError(f"a tensor of shape {dims} has strides {steps} and offset {offset!r}")
    kind = dtype if isinstance(dtype, DType) else storage.dtype
    have = storage.count * storage.dtype.itemsize // kind.itemsize
    need = offset + sum((d - 1) * s for d, s in zip(dims, steps)) + 1 if prod(dims) else 0
    if need > have:
        raise ValueError(
            f"a tensor of shape {dims}, strides {steps}, offset {offset} needs {need} elements, storage "
            f"{storage.key!r} has {have}"
        )
    return View(storage, kind, offset, dims, steps)


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


_MARK = object()


class _ToItsEnd:
    """A stream of which no more is asked for than there is: a length in a damaged pickle takes no memory."""

    def __init__(self, stream: BinaryIO):
        self.stream, here = stream, stream.tell()
        self.end = stream.seek(0, os.SEEK_END)
        stream.seek(here)
        self.readline, self.tell = stream.readline, stream.tell

    def read(self, n: int) -> bytes:
        return self.stream.read(min(n, self.end - self.stream.tell()))


class PickleReader:
    """Interprets one pickle of `stream`; `storage(persistent id)` finds storages. `allowed`: what the globals mean that
    it may call."""

    allowed = ALLOWED

    def __init__(self, storage: Callable[[Any], FileStorage]):
        self.storage = storage
        self.stack: list[Any] = []
        self.memo: dict[int, Any] = {}

    def read(self, stream: BinaryIO) -> Any:
        import pickletools  # (a page of text for each opcode)

        for opcode, arg, _ in pickletools.genops(cast(BinaryIO, _ToItsEnd(stream))):
            if opcode.name == "STOP":
                return self.stack.pop()
            self._step(opcode.name, arg)
        raise ValueError("the pickle has no end")

    def find(self, module: str, name: str) -> Any:
        """The object that a global stands for: a storage or element type, or a function of the allow-list."""
        if module == "torch" and name in DTYPES:
            return DTYPES[name]
        if (module in ("torch", "torch.storage")) and name in STORAGES:
            return FileStorage("", STORAGES[name], 0)
        found = Global(module, name)
        if str(found) not in self.allowed:
            raise ValueError(
                f"the file asks for {found}, which is not among what a file of tensors needs; nothing was run. "
                "Save the state dict alone, or as safetensors"
            )
        return found

    def build(self, made: Any, state: Any) -> None:
        """An object's own state: attributes of a state dict (its `_metadata`) are not kept."""
        if not isinstance(made, (dict, View)):
            raise ValueError(f"the pickle gives a state to a {type(made).__name__}")

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
        if name in ("BININT", "BININT1", "BININT2", "INT", "LONG", "LONG1", "LONG4", "BINFLOAT", "FLOAT", "BINUNICODE",
                    "SHORT_BINUNICODE", "BINUNICODE8", "UNICODE",
                    "STRING", "BINSTRING", "SHORT_BINSTRING", "BINBYTES", "SHORT_BINBYTES", "BINBYTES8",
                    "BYTEARRAY8"):  # fmt: skip
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
            push(self.find(module, attribute))
        elif name == "STACK_GLOBAL":
            attribute, module = pop(), pop()
            push(self.find(str(module), str(attribute)))
        elif name in ("REDUCE", "NEWOBJ"):
            args, function = pop(), pop()
            if not isinstance(function, Global) or not isinstance(args, tuple):
                raise ValueError(f"the pickle calls {function!r}, which is no function of the allow-list")
            push(self.allowed[str(function)](*args))
        elif name == "BUILD":
            state = pop()
            self.build(stack[-1], state)
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
