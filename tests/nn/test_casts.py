"""Values are loaded into tensors of other types where these have them, and floats are rounded."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from manygrad import Tensor, dtypes, nn
from manygrad.checkpoint import Checkpointer, load, save
from manygrad.nn.state import load_state_dict, safe_load, safe_save
from manygrad.nn.state.casts import array_loses, loses

WHOLE = ("bool", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64")
FLOATS = ("float16", "bfloat16", "float32", "float64")


def test_floats_do_not_go_into_whole_numbers(tmp_path: Path) -> None:
    """By a model's `load_state_dict`, from a file, and from a checkpoint; nothing is loaded then."""
    model = {"first": Tensor([1.0, 2.0]), "count": Tensor([7, 8])}
    state = {"first": Tensor([3.0, 4.0]), "count": Tensor([0.5, 3.0])}
    with pytest.raises(ValueError, match="load_state_dict: count: float32 does not go into int"):
        load_state_dict(model, state)
    safe_save(state, tmp_path / "x.safetensors")
    with pytest.raises(ValueError, match="count: float32 does not go into int"):
        load_state_dict(model, safe_load(tmp_path / "x.safetensors"))
    assert model["first"].tolist() == [1, 2] and model["count"].tolist() == [7, 8]
    path = save(tmp_path, {"part": [state]}, 1)
    with pytest.raises(ValueError, match=r"part\.0\.count: float32 does not go into int"):
        load(path, {"part": [model]})
    Checkpointer(tmp_path / "c", {"a": np.array([1.5])}).save(1)
    with pytest.raises(ValueError, match=r"load: a: float64 does not go into int32"):
        Checkpointer(tmp_path / "c", {"a": np.array([1], np.int32)}).resume()


def test_a_module_is_told_by_its_names() -> None:
    class Counting(nn.Module):
        def __init__(self) -> None:
            self.linear, self.count = nn.Linear(2, 2), nn.Buffer(Tensor([0, 1]))

    model = Counting()
    state = {k: t.clone() for k, t in model.state_dict().items()}
    with pytest.raises(ValueError, match="load_state_dict: count: float32 does not go into int"):
        model.load_state_dict({**state, "count": Tensor([0.0, 1.0])})
    model.load_state_dict({k: t.double() if t.dtype.is_float else t.cast("uint8") for k, t in state.items()})
    assert model.linear.weight.dtype is dtypes.float32
    model.load_state_dict({**state, "count": Tensor([0.5, 1.0])}, assign=True)
    assert model.count.tolist() == [0.5, 1]


def test_what_a_type_does_not_have_is_named() -> None:
    for values, of, to, words in (
        ([300], "int64", "uint8", "int64 does not go into uint8, which does not have all of its values 300 to 300"),
        ([-1], "int32", "uint64", "int32 does not go into uint64"),
        ([1 << 63], "uint64", "int64", "uint64 does not go into int64"),
        ([2], "uint8", "bool", "uint8 does not go into bool"),
        ([(1 << 24) + 1], "int32", "float32", "int32 does not go into float32"),
        ([(1 << 53) + 1], "int64", "float64", "int64 does not go into float64"),
        ([70000], "int32", "float16", "int32 does not go into float16"),
    ):
        t = Tensor(np.array(values, of))
        with pytest.raises(ValueError, match=f"load_state_dict: n: {words}"):
            load_state_dict({"n": Tensor.zeros(1, dtype=to).contiguous()}, {"n": t})
    assert array_loses(np.array([1j]), np.dtype(np.float64)) and array_loses(np.array([0.5]), np.dtype(bool))
    assert not array_loses(np.array([1.5]), np.dtype(np.complex128))


@settings(max_examples=500, deadline=None)
@given(st.data())
def test_as_python_counts(data: Any) -> None:
    """Whole numbers of any type into any other: as many as come back the same are loaded."""
    of, to = data.draw(st.sampled_from(WHOLE)), data.draw(st.sampled_from(WHOLE + FLOATS))
    source = getattr(dtypes, of)
    near = [n for e in (0, 7, 8, 11, 15, 16, 24, 31, 32, 53, 63) for n in (1 << e, (1 << e) - 1, (1 << e) + 1)]
    numbers = st.sampled_from(near + [-n for n in near] + [0]) | st.integers(source.min, source.max)
    values = data.draw(st.lists(numbers.filter(lambda n: source.min <= n <= source.max), max_size=4))
    target = np.dtype(getattr(ml_dtypes, to)) if to == "bfloat16" else np.dtype(to)

    def kept(n: int) -> bool:
        if to in FLOATS:
            digits = {"float16": 11, "bfloat16": 8, "float32": 24, "float64": 53}[to]
            m = abs(n)
            while m and not m % 2:
                m //= 2
            return m < 1 << digits and abs(n) <= (65504 if to == "float16" else 1 << 64)
        return getattr(dtypes, to).min <= n <= getattr(dtypes, to).max

    array = np.array(values, of)
    assert (loses(array, getattr(dtypes, to)) == "") == all(map(kept, values)), (of, to, values)
    if to != "bfloat16":
        assert (array_loses(array, target) == "") == all(map(kept, values))
