"""Tensors on DISK: parts and other types of a file, what is written to it, and what is refused."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from manygrad import Tensor

RAW = (np.arange(80) % 251).astype(np.uint8)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    RAW.tofile(tmp_path / "a.bin")
    return tmp_path / "a.bin"


@pytest.mark.parametrize("dtype", ["uint8", "int16", "int32", "float64"])
@pytest.mark.parametrize("offset", [0, 1, 3, 8, 72])
def test_parts_from_any_offset(path: Path, dtype: str, offset: int) -> None:
    want = np.frombuffer(RAW.tobytes()[offset : offset + 8], dtype)
    t = Tensor.from_file(str(path), len(want), dtype, offset)
    np.testing.assert_array_equal(t.numpy(), want)
    np.testing.assert_array_equal(t.to("CPU").numpy(), want)
    np.testing.assert_array_equal(t[-1:].numpy(), want[-1:])
    assert t[0].item() == want[0]


def test_offsets_that_are_not_there_and_rests(path: Path) -> None:
    assert Tensor.from_file(str(path), offset=80).shape == (0,)
    for offset in (-1, 81):
        with pytest.raises(ValueError, match=f"offset {offset} is outside .*, which has 80 bytes"):
            Tensor.from_file(str(path), offset=offset)
    with pytest.raises(ValueError, match="has 78 bytes from offset 2 on, no whole number of int32; give the shape"):
        Tensor.from_file(str(path), dtype="int32", offset=2)


@pytest.mark.parametrize("begin, end", [(0, 80), (8, 24), (3, 43)])
@pytest.mark.parametrize("have", ["uint8", "int8"])
@pytest.mark.parametrize("want", ["int8", "int16", "float32", "float64"])
def test_bitcast_is_the_same_part_of_the_file(path: Path, begin: int, end: int, have: str, want: str) -> None:
    t = Tensor.from_file(str(path), dtype=have)[begin:end].bitcast(want)
    array = np.frombuffer(RAW.tobytes()[begin:end], want)
    assert t.device == f"DISK:{path}" and t.shape == array.shape
    np.testing.assert_array_equal(t.to("CPU").numpy(), array)
    np.testing.assert_array_equal(t[1:2].to("CPU").numpy(), array[1:2])  # (a part of it, again in place)
    np.testing.assert_array_equal(t.bitcast("uint8").numpy(), RAW[begin:end])


def test_bitcast_of_rows_and_of_what_is_no_piece_of_the_file(path: Path) -> None:
    rows = Tensor.from_file(str(path), (5, 4), "int32")
    np.testing.assert_array_equal(rows[1:3].bitcast("int16").to("CPU").numpy(), RAW.view(np.int16).reshape(5, 8)[1:3])
    for bad in (rows[:, 1], rows.T, rows[::2]):
        with pytest.raises(ValueError, match=r"bitcast of .* a piece of the file in order .* \.to\('CPU'\)"):
            bad.bitcast("float32")
    with pytest.raises(ValueError, match="whose last dim is whole elements"):
        Tensor.from_file(str(path))[:7].bitcast("int16")


def test_empty_over_a_file_is_what_it_holds(path: Path) -> None:
    t = Tensor.empty(20, dtype="int32", device=f"DISK:{path}")
    np.testing.assert_array_equal(t.numpy(), RAW.view(np.int32))
    np.testing.assert_array_equal(np.fromfile(path, np.uint8), RAW)
    longer = Tensor.empty(100, dtype="uint8", device=f"DISK:{path}")
    np.testing.assert_array_equal(longer.numpy(), [*RAW, *[0] * 20])
    new = Tensor.empty(3, dtype="int16", device=f"DISK:{path}.new")
    assert new.tolist() == [0, 0, 0] and Path(f"{path}.new").stat().st_size == 6


@pytest.mark.parametrize("begin, end", [(0, 10), (2, 5), (9, 10)])
def test_parts_of_a_file_are_written(path: Path, begin: int, end: int) -> None:
    t, want = Tensor.empty(10, dtype="int64", device=f"DISK:{path}"), RAW.view(np.int64).copy()
    want[begin:end] = np.arange(begin, end) * 2
    t[begin:end].assign((Tensor(np.arange(begin, end)) * 2).to(t.device)).realize()
    np.testing.assert_array_equal(np.fromfile(path, np.int64), want)
    np.testing.assert_array_equal(t.numpy(), want)
    np.testing.assert_array_equal(t.bitcast("int32").to("CPU").numpy(), want.view(np.int32))


def test_constants_go_to_a_file(path: Path) -> None:
    assert Tensor.full((3,), 9, dtype="uint8").to(f"DISK:{path}").tolist() == [9, 9, 9]
    assert np.fromfile(path, np.uint8)[:4].tolist() == [9, 9, 9, 3]


def test_what_is_refused_leaves_the_file_alone(path: Path) -> None:
    t = Tensor.from_file(str(path))
    for compute in (
        lambda: t.sum().item(),
        lambda: (t + 1).numpy(),
        lambda: t[::2].numpy(),
        lambda: t.clone().realize(),
    ):
        with pytest.raises(NotImplementedError, match="copy the tensor to a computing device first"):
            compute()
    with pytest.raises(NotImplementedError, match="copy the tensor to a computing device first"):
        t[::2].assign(Tensor.zeros(40, dtype="uint8").to(t.device)).realize()
    with pytest.raises(ValueError, match="random numbers cannot be drawn on DISK"):
        Tensor.rand(4, device=f"DISK:{path}")
    np.testing.assert_array_equal(np.fromfile(path, np.uint8)[40:], RAW[40:])
