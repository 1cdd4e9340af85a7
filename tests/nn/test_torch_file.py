"""PyTorch's files: written here by Python's own pickler as PyTorch writes them, read back;
and files that want to do harm."""

from __future__ import annotations

import io
import os
import pickle
import struct
import sys
import types
import zipfile
from collections import OrderedDict
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from manygrad import Tensor, nn
from manygrad.nn.state import torch_load, torch_save

CODES = {
    "f4": "FloatStorage",
    "f8": "DoubleStorage",
    "i8": "LongStorage",
    "u1": "ByteStorage",
    "b1": "BoolStorage",
    "f2": "HalfStorage",
}


class Strided:
    """A tensor over part of `base`, pickled as PyTorch does."""

    def __init__(
        self,
        base: np.ndarray,
        shape: tuple[int, ...] | None = None,
        strides: tuple[int, ...] | None = None,
        offset: int = 0,
    ):
        self.base = base
        self.shape = base.shape if shape is None else shape
        self.strides = tuple(s // base.itemsize for s in base.strides) if strides is None else strides
        self.offset = offset

    def __reduce__(self) -> Any:
        return sys.modules["torch._utils"]._rebuild_tensor_v2, (
            Storage(self.base),
            self.offset,
            self.shape,
            self.strides,
            False,
            OrderedDict(),
        )


class Storage:
    def __init__(self, array: np.ndarray):
        self.array = array


class Pickler(pickle.Pickler):
    def __init__(self, f: Any, protocol: int, arrays: list[np.ndarray], legacy: bool):
        super().__init__(f, protocol)
        self.arrays, self.legacy = arrays, legacy

    def persistent_id(self, x: Any) -> Any:
        if not isinstance(x, Storage):
            return None
        key = next((i for i, a in enumerate(self.arrays) if a is x.array), len(self.arrays))
        if key == len(self.arrays):
            self.arrays.append(x.array)
        kind = getattr(sys.modules["torch"], CODES[x.array.dtype.str[1:]])
        return ("storage", kind, str(key), "cpu", x.array.size) + ((None,) if self.legacy else ())


@pytest.fixture(autouse=True)
def names_of_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    """Modules with the names that PyTorch's pickles mention, so that Python's pickler writes them."""
    top, utils = types.ModuleType("torch"), types.ModuleType("torch._utils")

    def _rebuild_tensor_v2() -> None: ...

    _rebuild_tensor_v2.__module__, _rebuild_tensor_v2.__qualname__ = "torch._utils", "_rebuild_tensor_v2"
    utils._rebuild_tensor_v2 = _rebuild_tensor_v2  # type: ignore[attr-defined]
    for name in CODES.values():
        setattr(top, name, type(name, (), {"__module__": "torch"}))
    monkeypatch.setitem(sys.modules, "torch", top)
    monkeypatch.setitem(sys.modules, "torch._utils", utils)


def save_zip(obj: Any, path: Path, protocol: int = 2, compress: int = zipfile.ZIP_STORED) -> None:
    arrays: list[np.ndarray] = []
    f = io.BytesIO()
    Pickler(f, protocol, arrays, False).dump(obj)
    with zipfile.ZipFile(path, "w", compress) as z:
        z.writestr("m/data.pkl", f.getvalue())
        for i, a in enumerate(arrays):
            z.writestr(f"m/data/{i}", a.tobytes())


def save_legacy(obj: Any, path: Path) -> None:
    arrays: list[np.ndarray] = []
    with open(path, "wb") as f:
        for x in (0x1950A86A20F9469CFC6C, 1001, {"protocol_version": 1001, "little_endian": True}):
            pickle.dump(x, f, 2)
        Pickler(f, 2, arrays, True).dump(obj)
        pickle.dump([str(i) for i in range(len(arrays))], f, 2)
        for a in arrays:
            f.write(struct.pack("<q", a.size) + a.tobytes())


X = np.arange(24, dtype=np.float32).reshape(4, 6)
OBJECT = {
    "model": OrderedDict({"weight": Strided(X), "ids": Strided(np.array([3, 1, 2])),
                          "mask": Strided(np.array([True, False])), "half": Strided(np.float16([1.5, 2]))}),
    "transposed": Strided(X, (6, 4), (1, 6)), "part": Strided(X, (2, 3), (6, 2), 6),
    "repeated": Strided(X, (3, 6), (0, 1), 12), "scalar": Strided(np.float64([2.5]), (), ()),
    "none": Strided(np.zeros((0, 3), np.float32)), "epoch": 7, "rates": [0.5, None, True], "text": "é",
    "pair": (1, -(2**40)),
}  # fmt: skip


@pytest.mark.parametrize("save", [save_zip, lambda o, p: save_zip(o, p, 4), save_legacy])
def test_reads_what_pytorch_writes(save: Any, tmp_path: Path) -> None:
    path = tmp_path / "a.pt"
    save(OBJECT, path)
    got = torch_load(path)
    assert (
        list(got) == list(OBJECT)
        and got["epoch"] == 7
        and got["rates"] == [0.5, None, True]
        and got["text"] == "é"
        and got["pair"] == (1, -(2**40))
    )
    assert got["model"]["weight"].device == f"DISK:{path}"
    for name, want in {"weight": X, "ids": [3, 1, 2], "mask": [True, False], "half": [1.5, 2]}.items():
        np.testing.assert_array_equal(got["model"][name].to("CPU").numpy(), want)
    np.testing.assert_array_equal(got["transposed"].numpy(), X.T)
    np.testing.assert_array_equal(got["part"].numpy(), X[1:3, :6:2])
    np.testing.assert_array_equal(got["repeated"].numpy(), np.repeat(X[2:3], 3, 0))
    assert got["scalar"].to("CPU").item() == 2.5 and got["none"].shape == (0, 3)


def test_a_state_dict_loads_into_a_module_and_back(tmp_path: Path) -> None:
    a, b = nn.BatchNorm1d(3), nn.BatchNorm1d(3)
    a(Tensor(np.random.default_rng(0).standard_normal((5, 3)).astype(np.float32)))
    torch_save({"state": a.state_dict(), "step": 3, "more": [1.5, "x", (None, True, 2**70)]}, tmp_path / "a.pt")
    got = torch_load(tmp_path / "a.pt")
    b.load_state_dict(got["state"])
    assert got["step"] == 3 and got["more"] == [1.5, "x", (None, True, 2**70)] and b.num_batches_tracked.item() == 1  # type: ignore[union-attr]
    np.testing.assert_array_equal(b.running_mean.numpy(), a.running_mean.numpy())  # type: ignore[union-attr]
    with pytest.raises(TypeError, match="cannot write a set"):
        torch_save({1, 2}, tmp_path / "b.pt")
    assert not (tmp_path / "b.pt").exists() and len(list(tmp_path.iterdir())) == 1


class Harm:
    def __reduce__(self) -> Any:
        return os.system, ("touch harmed",)


@pytest.mark.parametrize("save", [save_zip, save_legacy])
def test_nothing_in_a_file_is_run(save: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    save({"a": Harm()}, tmp_path / "a.pt")
    with pytest.raises(ValueError, match=r"a.pt cannot be read .* asks for posix.system, .*nothing was run"):
        torch_load(tmp_path / "a.pt")
    assert not (tmp_path / "harmed").exists()


def test_broken_files(tmp_path: Path) -> None:
    path = tmp_path / "a.pt"
    save_zip({"w": Strided(X)}, path, compress=zipfile.ZIP_DEFLATED)
    with pytest.raises(ValueError, match="is compressed"):
        torch_load(path)
    for bad, message in [
        (Strided(X, (5, 6), (6, 1)), "needs 30 elements, storage '0' has 24"),
        (Strided(X, (2, -1), (1, 1)), "not a tuple of sizes"),
        (Strided(X, (2,), (1, 1)), "has strides"),
    ]:
        save_zip({"w": bad}, path)
        with pytest.raises(ValueError, match=message):
            torch_load(path)
    path.write_bytes(b"hello, this is text")
    with pytest.raises(ValueError, match="cannot be read as a PyTorch file"):
        torch_load(path)
    for save in (save_zip, save_legacy):
        save(OBJECT, path)
        whole = path.read_bytes()
        for n in [*range(0, len(whole), 97), len(whole) - 1]:
            path.write_bytes(whole[:n])
            with pytest.raises(ValueError, match="cannot be read as a PyTorch file"):
                torch_load(path)


def test_any_changed_byte_gives_a_value_or_a_value_error(tmp_path: Path) -> None:
    path = tmp_path / "a.pt"
    save_legacy({"w": Strided(X[:1]), "n": [1, 2]}, path)
    whole = bytearray(path.read_bytes())
    rng = np.random.default_rng(0)
    for at in rng.permutation(len(whole))[:150]:
        changed = whole.copy()
        changed[at] ^= int(rng.integers(1, 256))
        path.write_bytes(changed)
        try:
            torch_load(path)
        except ValueError as error:
            assert "cannot be read as a PyTorch file" in str(error)


def test_a_length_that_a_damaged_pickle_names_takes_no_memory(tmp_path: Path) -> None:
    (tmp_path / "x.pt").write_bytes(b"\x80\x04\x8e" + (1 << 46).to_bytes(8, "little") + b"abc.")  # BINBYTES8
    with pytest.raises(ValueError, match="cannot be read as a PyTorch file"):
        torch_load(tmp_path / "x.pt")


def test_members_that_are_packed_are_refused_before_they_are_read(tmp_path: Path) -> None:
    torch_save({"w": Tensor.ones(2)}, tmp_path / "whole.pt")
    with zipfile.ZipFile(tmp_path / "whole.pt") as whole, zipfile.ZipFile(tmp_path / "x.pt", "w") as packed:
        for i in whole.infolist():
            kind = zipfile.ZIP_DEFLATED if i.filename.endswith("byteorder") else zipfile.ZIP_STORED
            packed.writestr(i.filename, whole.read(i), kind)
    with pytest.raises(ValueError, match="byteorder is compressed or encrypted"):
        torch_load(tmp_path / "x.pt")
