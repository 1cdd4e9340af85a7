"""Each element of a tensor is written by one rank that holds it, and read from no more than the chunks it lies in."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from manygrad import Tensor
from manygrad.checkpoint import CheckpointError, index, save
from manygrad.checkpoint.layout import TensorLayout, divide, within
from manygrad.checkpoint.reader import CheckpointReader
from manygrad.tensor.uop import even_bounds


@st.composite
def tensors(draw: st.DrawFn) -> TensorLayout:
    shape = tuple(draw(st.lists(st.integers(0, 40), max_size=3)))
    ranks = tuple(r for r in range(draw(st.integers(1, 4))) for _ in range(draw(st.integers(1, 2))))
    itemsize = draw(st.sampled_from([1, 4, 1 << 20]))
    axis = draw(st.none() | st.integers(0, len(shape) - 1)) if shape else None
    bounds = () if axis is None else even_bounds(shape[axis], len(ranks))
    if axis is not None and draw(st.booleans()):
        cuts = sorted(draw(st.lists(st.integers(0, shape[axis]), min_size=len(ranks) - 1, max_size=len(ranks) - 1)))
        bounds = (0, *cuts, shape[axis])
    return TensorLayout(shape, itemsize, ranks, axis, bounds)


@given(st.lists(tensors(), max_size=6))
def test_each_element_is_written_once_by_who_holds_it(given: list[TensorLayout]) -> None:
    for t, parts in zip(given, divide(given)):
        written = np.zeros(t.shape, np.int64)
        for p in parts:
            written[within(p.box, tuple((0, d) for d in t.shape))] += 1
            holds = [t.box(i) for i, r in enumerate(t.ranks) if r == p.owner]
            assert any(all(a <= c < d <= b for (a, b), (c, d) in zip(h, p.box)) for h in holds)
        assert (written == 1).all()


def test_copies_are_divided_evenly() -> None:
    """Large ones by rows, small ones by what each rank has to write so far."""
    given = [TensorLayout((1000, 1024), 4, (0, 1, 2)), *(TensorLayout((64,), 4, (0, 1, 2)) for _ in range(30))]
    sizes = [0, 0, 0]
    for t, parts in zip(given, divide(given)):
        for p in parts:
            sizes[p.owner] += t.itemsize * int(np.prod([b - a for a, b in p.box]))
    assert max(sizes) - min(sizes) <= 4096


def test_some_rows_are_read_from_their_chunks_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Damage elsewhere in the tensor goes unnoticed, for it is not read; damage in these rows does not."""
    monkeypatch.setattr(index, "CHUNK", 64)
    monkeypatch.setattr("manygrad.checkpoint.reader.CHUNK", 64)
    a = np.arange(100 * 7, dtype=np.float32).reshape(100, 7)
    path = Path(save(tmp_path, {"a": Tensor(a)}, 1))
    reader = CheckpointReader(str(path))
    file, offset = path / "part-00000.safetensors", reader.index["tensors"]["a"]["parts"][0]["offset"]
    raw = bytearray(file.read_bytes())
    raw[offset] ^= 1
    raw[-1] ^= 1
    file.write_bytes(raw)
    for box in (((3, 97), (0, 7)), ((50, 51), (2, 5))):
        np.testing.assert_array_equal(reader.read("a", box), a[within(box, ((0, 100), (0, 7)))])
    for row in (0, 99):
        with pytest.raises(CheckpointError, match="is damaged: the checksum of 'a'"):
            reader.read("a", ((row, row + 1), (0, 7)))
    with pytest.raises(CheckpointError, match="is damaged"):
        reader.verify()
