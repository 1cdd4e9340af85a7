"""Names of parameters, loading, and safetensors files: read and written by the `safetensors` package as well."""

from __future__ import annotations

import errno
import json
import os
import stat
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.numpy
from hypothesis import given, settings
from hypothesis import strategies as st

from manygrad import Tensor, TinyJit, checkpoint, dtypes, nn
from manygrad.nn import optim
from manygrad.nn.state import get_parameters, get_state_dict, load_state_dict, safe_load, safe_save


class Block:
    def __init__(self) -> None:
        self.norm = nn.LayerNorm(4)
        self.heads = [nn.Linear(4, 2, bias=False), nn.Linear(4, 2)]
        self.table = {"a": Tensor.zeros(3), "b": (Tensor.ones(1), "text", 5)}
        self.depth = 3


NAMES = ["norm.weight", "norm.bias", "heads.0.weight", "heads.1.weight", "heads.1.bias", "table.a", "table.b.0"]


def test_names_are_paths() -> None:
    model = Block()
    assert list(get_state_dict(model)) == NAMES
    assert get_state_dict(model)["heads.1.bias"] is model.heads[1].bias
    assert list(get_state_dict([model.norm], "net.")) == ["net.0.weight", "net.0.bias"]
    assert len(get_parameters(model)) == 7 and get_state_dict(5) == {}


def test_load_copies_values_into_the_same_tensors() -> None:
    a, b = Block(), Block()
    before = get_state_dict(b)
    buffers = {n: t.realize().uop for n, t in before.items()}
    load_state_dict(b, get_state_dict(a))
    for name, t in get_state_dict(b).items():
        assert t is before[name] and t.uop is buffers[name]
        np.testing.assert_array_equal(t.numpy(), get_state_dict(a)[name].numpy())
    a.table["a"].assign(Tensor([1.0, 2.0, 3.0])).realize()  # type: ignore[attr-defined]
    assert b.table["a"].tolist() == [0.0, 0.0, 0.0]  # type: ignore[attr-defined]


def test_load_converts_types_and_moves() -> None:
    model = nn.Linear(2, 2)
    model.weight.shard_(("CPU:0", "CPU:1"), 0)
    load_state_dict(model, {"weight": Tensor([[1, 2], [3, 4]]), "bias": Tensor(np.float64([5, 6]), device="CPU:1")})
    assert model.weight.tolist() == [[1.0, 2.0], [3.0, 4.0]] and model.weight.dtype is dtypes.float32
    assert (
        model.weight.device == ("CPU:0", "CPU:1") and model.bias.tolist() == [5.0, 6.0] and model.bias.device == "CPU:0"
    )  # type: ignore[union-attr]


def test_load_is_strict() -> None:
    model = nn.Linear(2, 2)
    before = model.weight.tolist()
    with pytest.raises(KeyError, match=r"missing \['bias'\], unexpected \['scale'\]; strict=False loads what fits"):
        load_state_dict(model, {"weight": Tensor.zeros(2, 2), "scale": Tensor([1.0])})
    with pytest.raises(ValueError, match=r"weight has shape \(2, 3\) in the file, \(2, 2\) in the model"):
        load_state_dict(model, {"weight": Tensor.zeros(2, 3), "bias": Tensor.zeros(2)})
    assert model.weight.tolist() == before
    load_state_dict(model, {"weight": Tensor.ones(2, 2), "scale": Tensor([1.0])}, strict=False)
    assert model.weight.tolist() == [[1.0, 1.0], [1.0, 1.0]]


def test_a_shape_that_differs_loads_nothing_at_all() -> None:
    model = nn.Linear(2, 2)
    before = model.weight.tolist()
    with pytest.raises(ValueError, match="bias has shape"):
        load_state_dict(model, {"weight": Tensor.zeros(2, 2), "bias": Tensor.zeros(3)})
    assert model.weight.tolist() == before


DEVICES = ("CPU:0", "CPU:1")
RULES: dict[str, Any] = {  # how a model lies on two devices, if it does
    "one device": None,
    "copies": {},
    "rows": {"*.weight": 0, "*.bias": 0},
    "columns": {"*.weight": 1, "*.bias": 0},
    "unevenly": {"0.weight": (0, 3), "2.weight": 1},
}


@pytest.mark.parametrize("lies", RULES)
def test_loading_is_seen_by_a_captured_step(lies: str) -> None:
    """An optimiser keeps all parameters in one buffer: every one of them is written there, not the first alone, also
    where it is no view with strides of the whole buffer, but on each device alone."""
    Tensor.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 2))
    x, y = Tensor.randn(8, 4), Tensor.ones(8, 2)
    if RULES[lies] is not None:
        nn.shard_rules(model, RULES[lies], DEVICES)
        x, y = x.shard(DEVICES, 0), y.shard(DEVICES, 0)
    optimiser = optim.Adam(model.parameters(), lr=0.1)
    x.realize(y)

    @TinyJit
    def step() -> Tensor:
        optimiser.zero_grad()
        loss = ((model(x) - y) ** 2).mean()
        loss.backward()
        optimiser.step()
        return loss

    for _ in range(3):
        step()
    best, state = {k: Tensor(t.numpy()) for k, t in model.state_dict().items()}, optimiser.state_dict()
    losses = [step().item() for _ in range(4)]
    for load in (model.load_state_dict, lambda values: load_state_dict(model, values)):
        load(best)
        optimiser.load_state_dict(state)
        for p, t in zip(model.parameters(), best.values()):
            np.testing.assert_array_equal(p.numpy(), t.numpy())
        assert [step().item() for _ in range(4)] == losses


def test_loaded_values_are_copies_also_of_lazy_ones() -> None:
    model = nn.BatchNorm1d(2)
    state = {k: (t * 1 + 1).detach() for k, t in model.state_dict().items()}
    model.load_state_dict(state)
    for t in model.state_dict().values():
        t.assign(7).realize()
    assert [t.tolist() for t in state.values()] == [[2.0, 2.0], [1.0, 1.0], [1.0, 1.0], [2.0, 2.0], 1]


def test_assigning_takes_types_and_memory() -> None:
    model = nn.Linear(2, 2)
    weight, bias = Tensor.ones(2, 2, dtype="bfloat16").realize(), Tensor.zeros(2, dtype="float64").realize()
    before = model.weight
    model.load_state_dict({"weight": weight, "bias": bias}, assign=True)
    assert model.weight is before and model.weight.requires_grad and isinstance(model.bias, nn.Parameter)
    assert [p.dtype.name for p in model.parameters()] == ["bfloat16", "float64"]
    weight.assign(3).realize()
    assert model.weight.tolist() == [[3.0, 3.0], [3.0, 3.0]]


# *** safetensors ***

ARRAYS = {d.name: np.array([[0, 1, 1], [1, 0, 1]]).astype(d.np) for d in dtypes.all}


def test_written_files_are_read_by_the_safetensors_package(tmp_path: Path) -> None:
    path = tmp_path / "a.safetensors"
    arrays = {k: v for k, v in ARRAYS.items() if k != "bfloat16"} | {
        "0-d": np.float32(2.5),
        "empty": np.zeros((0, 3), np.float32),
    }
    safe_save({k: Tensor(v) for k, v in arrays.items()}, path, metadata={"step": "3"})
    got = safetensors.numpy.load_file(path)
    assert got.keys() == arrays.keys()
    for name, a in arrays.items():
        assert got[name].dtype == np.asarray(a).dtype and got[name].shape == np.shape(a)
        np.testing.assert_array_equal(got[name], a)
    with safetensors.safe_open(path, "np") as f:
        assert f.metadata() == {"step": "3"}


def test_files_of_the_safetensors_package_are_read(tmp_path: Path) -> None:
    path = tmp_path / "a.safetensors"
    arrays = {k: v for k, v in ARRAYS.items() if k != "bfloat16"} | {
        "0-d": np.array(2.5, np.float32),
        "odd": np.arange(3, dtype=np.uint8),
        "after odd": np.arange(5.0),
    }
    safetensors.numpy.save_file(arrays, path, {"format": "np"})
    got = safe_load(path)
    assert got.keys() == arrays.keys()
    for name, a in arrays.items():
        assert got[name].dtype.np == a.dtype and got[name].shape == a.shape
        np.testing.assert_array_equal(got[name].to("CPU").numpy(), a)


def test_round_trip_of_every_type(tmp_path: Path) -> None:
    """Those of 8 bits, too: in a file, and in a checkpoint, of one device and cut over two."""
    arrays = ARRAYS | {d.name: np.array([[0, 1, 448], [-1, 0, 0.5]]).astype(d.np) for d in dtypes.fp8s}
    safe_save({k: Tensor(v) for k, v in arrays.items()}, tmp_path / "a")
    for name, t in safe_load(tmp_path / "a").items():
        assert t.dtype.name == name
        np.testing.assert_array_equal(t.numpy(), arrays[name])
    cut = {f"{k} cut": Tensor(v).shard(("CPU:0", "CPU:1"), 0) for k, v in arrays.items()}
    path = checkpoint.save(
        tmp_path / "c", {**{k: Tensor(v) for k, v in arrays.items()}, **cut, "array": arrays["float8_e5m2"]}, 1
    )
    for name, t in checkpoint.load(path, None).items():
        want = arrays["float8_e5m2" if name == "array" else name.removesuffix(" cut")]
        got = t if isinstance(t, np.ndarray) else t.numpy()
        assert got.dtype == want.dtype
        np.testing.assert_array_equal(got, want)
    into = {k: t.zeros_like().contiguous() for k, t in cut.items()}
    checkpoint.load(path, into)
    for name, t in into.items():
        np.testing.assert_array_equal(t.numpy(), arrays[name.removesuffix(" cut")])


def test_odd_names(tmp_path: Path) -> None:
    """The empty one, those that a part of another has, and the one that a file has for its metadata."""
    safe_save({"": Tensor([1.0])}, tmp_path / "a", {"format": "pt"})
    assert safetensors.numpy.load_file(tmp_path / "a")[""].tolist() == [1.0] == safe_load(tmp_path / "a")[""].tolist()
    with pytest.raises(ValueError, match="cannot be named '__metadata__'"):
        safe_save({"__metadata__": Tensor([1.0])}, tmp_path / "b")
    with pytest.raises(TypeError, match="the metadata 'step' is no text"):
        safe_save({"x": Tensor([1.0])}, tmp_path / "b", {"step": 1})  # type: ignore[dict-item]
    x = Tensor([[1.0], [2.0]]).shard(("CPU:0", "CPU:1"), 0)
    names = {"": 3.0, "state": 4.0, "w[0:1, 0:1]": 5.0, "__metadata__": 6.0}
    state = {"w": x, **{k: Tensor([v]) for k, v in names.items()}, "below": {"": Tensor([7.0])}}
    path = checkpoint.save(tmp_path / "c", state, 1)
    got = checkpoint.load(path, None)
    assert {k: got[k].item() for k in names} == names and got["below"][""].item() == 7
    assert got["w"].tolist() == [[1], [2]]
    assert len(safe_load(Path(path) / "part-00000.safetensors")) == len(names) + 3
    with pytest.raises(TypeError, match="save: below.z is complex128, which checkpoints do not have"):
        checkpoint.save(tmp_path / "c", {"below": {"z": np.array([1j])}}, 2)


def test_a_model_is_saved_and_loaded(tmp_path: Path) -> None:
    a, b = Block(), Block()
    safe_save(get_state_dict(a), tmp_path / "m")
    load_state_dict(b, safe_load(tmp_path / "m"))
    for name, t in get_state_dict(b).items():
        np.testing.assert_array_equal(t.numpy(), get_state_dict(a)[name].numpy())


def test_computed_sharded_and_moved_tensors_are_saved(tmp_path: Path) -> None:
    a = np.arange(12, dtype=np.float32).reshape(4, 3)
    t = Tensor(a)
    safe_save(
        {"lazy": t * 2, "moved": t.T, "sharded": t.shard(("CPU:0", "CPU:1", "CPU:2"), 0), "part": t[1:, ::2]},
        tmp_path / "m",
    )
    got = safetensors.numpy.load_file(tmp_path / "m")
    for name, want in {"lazy": a * 2, "moved": a.T, "sharded": a, "part": a[1:, ::2]}.items():
        np.testing.assert_array_equal(got[name], want)


def test_saving_over_a_file_keeps_it_whole_on_failure(tmp_path: Path) -> None:
    path = tmp_path / "m"
    safe_save({"x": Tensor([1.0])}, path)

    class Broken(Tensor):
        pass

    with pytest.raises(AttributeError):
        safe_save({"x": Tensor([2.0]), "y": object()}, path)  # type: ignore[dict-item]
    assert safe_load(path)["x"].tolist() == [1.0]
    assert os.listdir(tmp_path) == ["m"]


def test_a_full_disk_is_an_error_that_names_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "state.safetensors"
    safe_save({"a": Tensor([1.0])}, path)

    def full(fd: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space left on device: '.*state.safetensors'") as e:
        safe_save({"a": Tensor([2.0])}, path)
    assert e.value.__notes__ == ["it was not saved, the file that was there is as it was"]
    with pytest.raises(OSError, match="other") as e:
        safe_save({"a": Tensor([2.0])}, tmp_path / "other")
    assert e.value.__notes__ == ["it was not saved"]
    assert safe_load(path)["a"].to("CPU").tolist() == [1.0] and os.listdir(tmp_path) == [path.name]


def test_a_saved_file_has_the_permissions_of_any_other(tmp_path: Path) -> None:
    (tmp_path / "any").write_bytes(b"")
    path, link = tmp_path / "state.safetensors", tmp_path / "link"
    safe_save({"a": Tensor([1.0])}, path)
    assert path.stat().st_mode == (tmp_path / "any").stat().st_mode
    path.chmod(0o640)
    link.symlink_to(path)
    safe_save({"a": Tensor([2.0])}, link)
    assert link.is_symlink() and stat.S_IMODE(path.stat().st_mode) == 0o640
    assert safe_load(path)["a"].to("CPU").tolist() == [2.0]


def test_a_device_is_written_and_stays(tmp_path: Path) -> None:
    safe_save({"a": Tensor([1.0])}, os.devnull)
    assert stat.S_ISCHR(os.stat(os.devnull).st_mode)
    with pytest.raises(FileNotFoundError, match="nowhere"):
        safe_save({"a": Tensor([1.0])}, tmp_path / "nowhere" / "a")


def test_saving_over_the_file_that_was_loaded(tmp_path: Path) -> None:
    path = tmp_path / "m"
    safe_save({"x": Tensor([1.0, 2.0])}, path)
    safe_save({"x": safe_load(path)["x"].to("CPU") + 1}, path)
    assert safe_load(path)["x"].tolist() == [2.0, 3.0]


def a_file(tmp_path: Path) -> bytes:
    safe_save({"x": Tensor([1.0, 2.0, 3.0]), "y": Tensor([[1, 2]])}, tmp_path / "whole")
    return (tmp_path / "whole").read_bytes()


def test_every_truncation_is_an_error_that_says_so(tmp_path: Path) -> None:
    whole = a_file(tmp_path)
    for n in range(len(whole)):
        (tmp_path / "cut").write_bytes(whole[:n])
        with pytest.raises(ValueError, match="is not a whole safetensors file|is truncated"):
            safe_load(tmp_path / "cut")
    with pytest.raises(FileNotFoundError):
        safe_load(tmp_path / "none")


def written(tmp_path: Path, header: object, data: bytes = b"\0" * 64) -> Path:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path = tmp_path / "bad"
    path.write_bytes(struct.pack("<Q", len(text)) + text + data)
    return path


X = {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}


@pytest.mark.parametrize(
    "header, message",
    [
        (b"{not json", "header is malformed"),
        (b"\xff\xfe", "header is malformed"),
        ([1, 2], "header is malformed"),
        ({"x": 5}, "header is malformed"),
        (
            {"x": X, "y": {**X, "dtype": "C64"}, "z": {**X, "dtype": "F8_E8M0"}},
            "the tensor 'y' is C64, a type that tensors here do not have, and 1 more .*; there are BOOL, I8",
        ),
        ({"x": {**X, "shape": "ab"}}, "header is malformed"),
        ({"x": {**X, "data_offsets": [0]}}, "header is malformed"),
        (
            {"x": {**X, "data_offsets": [0, 4]}},
            r"tensor 'x' of shape \(2,\) float32 needs 8 bytes, its offsets say 0..4",
        ),
        ({"x": {**X, "data_offsets": [8, 0]}}, "its offsets say 8..0"),
        ({"x": {**X, "data_offsets": [-8, 0]}}, "its offsets say -8..0"),
        ({"x": {**X, "shape": [-2], "data_offsets": [0, -8]}}, "its offsets say 0..-8|shape"),
        ({"x": {**X, "shape": [-1, -2]}}, "shape|negative"),
        ({"x": {**X, "shape": [2**62, 4], "data_offsets": [0, 0]}}, "needs|shape"),
        ({"x": {**X, "data_offsets": [60, 68]}}, "is truncated: tensor 'x' ends at byte"),
    ],
)
def test_malformed_headers(tmp_path: Path, header: object, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        safe_load(written(tmp_path, header))


def test_a_huge_header_length_is_not_believed(tmp_path: Path) -> None:
    (tmp_path / "bad").write_bytes(struct.pack("<Q", 2**63 - 1) + b"{}")
    with pytest.raises(ValueError, match="is not a whole safetensors file"):
        safe_load(tmp_path / "bad")


@settings(max_examples=150)
@given(st.data())
def test_damaged_files_never_load_something_else(tmp_path_factory: pytest.TempPathFactory, data: st.DataObject) -> None:
    """A changed byte in the header gives an error, or tensors that still lie inside the file."""
    folder = tmp_path_factory.getbasetemp()
    whole = bytearray(a_file(folder))
    n = struct.unpack("<Q", whole[:8])[0]
    for _ in range(data.draw(st.integers(1, 3))):
        whole[data.draw(st.integers(0, 8 + n - 1))] = data.draw(st.integers(0, 255))
    (folder / "damaged").write_bytes(whole)
    try:
        loaded = safe_load(folder / "damaged")
    except ValueError:
        return
    for t in loaded.values():
        assert t.nbytes <= len(whole)
        t.numpy()


def test_an_index_of_several_files(tmp_path: Path) -> None:
    safe_save({"a": Tensor([1.0]), "b": Tensor([2.0])}, tmp_path / "m-1.safetensors")
    safe_save({"c": Tensor([3.0])}, tmp_path / "m-2.safetensors")
    index = tmp_path / "model.safetensors.index.json"
    names = {"a": "m-1.safetensors", "c": "m-2.safetensors", "b": "m-1.safetensors"}
    index.write_text(json.dumps({"metadata": {"total_size": 12}, "weight_map": names}))
    got = safe_load(index)
    assert {k: t.to("CPU").item() for k, t in got.items()} == {"a": 1.0, "c": 3.0, "b": 2.0}
    for bad, message in [
        ({**names, "a": "../m-1.safetensors"}, "outside its folder"),
        ({**names, "c": "m-1.safetensors"}, "c in m-1.safetensors"),
        (3, "is no index"),
    ]:
        index.write_text(json.dumps({"weight_map": bad}))
        with pytest.raises(ValueError, match=message):
            safe_load(index)


def test_tensors_that_overlap_are_refused(tmp_path: Path) -> None:
    head = json.dumps(
        {
            "a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]},
            "b": {"dtype": "F32", "shape": [2], "data_offsets": [4, 12]},
        }
    ).encode()
    (tmp_path / "a.safetensors").write_bytes(struct.pack("<Q", len(head)) + head + bytes(12))
    with pytest.raises(ValueError, match="tensors 'a' and 'b' overlap"):
        safe_load(tmp_path / "a.safetensors")


def test_a_file_of_empty_tensors_alone(tmp_path: Path) -> None:
    safe_save({"none": Tensor(np.empty((0, 3), np.float32))}, tmp_path / "x.safetensors")
    assert safe_load(tmp_path / "x.safetensors")["none"].shape == (0, 3)
