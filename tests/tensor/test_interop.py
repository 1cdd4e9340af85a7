"""Values in and out without a copy, and printing that computes nothing. (Against torch: benchmarks/ops_vs_torch.py.)"""

from __future__ import annotations

import array
import copy
import gc
import pickle
import sys
import weakref

import numpy as np
import pytest

from manygrad import Context, GlobalCounters, Tensor, dtypes, nn
from manygrad.tensor.engine import engine


@pytest.mark.parametrize("kind", ["bool", "int8", "int64", "uint8", "uint32", "float16", "float32", "float64"])
def test_dlpack_both_ways(kind: str) -> None:
    a = np.arange(6).reshape(2, 3).astype(kind)
    t = Tensor.from_dlpack(a)
    assert t.dtype.name == kind and t.tolist() == a.tolist()
    a[0, 1] = 0
    assert t.tolist() == a.tolist()  # one memory
    back = np.from_dlpack(t)
    assert back.dtype == a.dtype and back.ctypes.data == a.ctypes.data == t.data_ptr()


def test_bfloat16_travels_by_dlpack() -> None:
    t = Tensor([1.0, 2.5, -3.0]).bfloat16().realize()
    back = Tensor.from_dlpack(t)
    assert back.dtype is dtypes.bfloat16 and back.data_ptr() == t.data_ptr() and back.tolist() == [1.0, 2.5, -3.0]


def test_what_is_computed_or_viewed_is_shared_after_computing_it() -> None:
    x = Tensor([[1.0, 2.0], [3.0, 4.0]])
    assert np.from_dlpack(x * 2).tolist() == [[2, 4], [6, 8]]
    assert np.from_dlpack(x.T).tolist() == [[1, 3], [2, 4]]
    assert Tensor.from_dlpack(np.arange(6).reshape(2, 3).T).tolist() == [[0, 3], [1, 4], [2, 5]]
    assert np.from_dlpack(Tensor.zeros(0, 3)).shape == (0, 3)


def test_shared_memory_outlives_both_sides() -> None:
    a = np.arange(4.0)
    seen = weakref.ref(a)
    t = Tensor.from_numpy(a)
    out = np.asarray(t, copy=False)
    del a, t
    gc.collect()
    assert out.tolist() == [0, 1, 2, 3] and seen() is not None
    del out
    gc.collect()
    assert seen() is None


def test_assignments_write_shared_memory() -> None:
    a = np.arange(4.0)
    t = Tensor.from_numpy(a)
    t.assign(t * 2).realize()
    t[1] = 9
    t.realize()
    assert a.tolist() == [0, 9, 4, 6]
    with pytest.raises(TypeError, match="takes a NumPy array"):
        Tensor.from_numpy([1, 2])  # type: ignore[arg-type]


def test_what_cannot_be_shared_says_so() -> None:
    with pytest.raises(BufferError, match="on 2 devices"):
        np.from_dlpack(Tensor([1.0, 2.0]).shard(("CPU:0", "CPU:1"), axis=0))
    with pytest.raises(BufferError, match="requires a gradient"):
        np.from_dlpack(Tensor([1.0], requires_grad=True))
    with Context(DEVICE="NULL"), pytest.raises(BufferError, match="not visible to the host"):
        np.from_dlpack(Tensor([1.0]))
    with pytest.raises(ValueError, match="without a copy is not possible"):
        np.asarray(Tensor([1.0]), dtype=np.int32, copy=False)


def test_numpy_copies_and_array_converts() -> None:
    t = Tensor([1.0, 2.0]).realize()
    a = t.numpy()
    a[0] = 5
    assert t.tolist() == [1, 2]
    assert np.asarray(t, dtype=np.int64).dtype == np.int64 and np.add(t, 1).tolist() == [2, 3]


def test_buffers_and_lists_in() -> None:
    for buffer in (array.array("d", [1.0, 2.0]), memoryview(array.array("d", [1.0, 2.0]))):
        t = Tensor(buffer)
        assert t.dtype is dtypes.float64 and t.tolist() == [1, 2]
    assert Tensor(b"\x01\x02").tolist() == [1, 2] and Tensor(b"\x01\x00\x02\x00", dtype="int16").tolist() == [1, 2]
    assert Tensor([Tensor(1.0), [2.0][0], Tensor([3.0])[0]]).tolist() == [1, 2, 3]


@pytest.mark.skipif(
    sys.version_info < (3, 12),
    reason="memoryview(t) needs Python 3.12 (PEP 688); np.asarray(t, copy=False) works everywhere",
)
def test_memoryview() -> None:
    t = Tensor([1.0, 2.0]).realize()
    assert memoryview(t).tolist() == [1.0, 2.0]  # type: ignore[arg-type]


def test_printing_computes_nothing() -> None:
    t = Tensor.rand(3, 4) + 1
    before = GlobalCounters.kernel_count
    assert repr(t) == "<Tensor [3, 4] float32 on CPU:0, lazy>" and f"{t}" == repr(t)
    assert "<td>lazy</td>" in t._repr_html_() and "48 bytes" in t._repr_html_()
    s = Tensor.ones(6, 2).shard(("CPU:0", "CPU:1"), axis=0)
    assert "2 devices" in repr(s) and "CPU:0, CPU:1" in s._repr_html_()
    assert GlobalCounters.kernel_count == before
    assert f"{Tensor(1.5):.2f}" == "1.50"


COPIES = {"copy": copy.copy, "deepcopy": copy.deepcopy, "pickle": lambda t: pickle.loads(pickle.dumps(t))}


@pytest.mark.parametrize("kind", COPIES)
def test_copies_keep_class_place_and_what_was_set_on_them(kind: str) -> None:
    copied, devices = COPIES[kind], ("CPU:0", "CPU:1")
    place = (lambda t: ("CPU:0", None)) if kind == "pickle" else lambda t: (t.device, engine().sharding_axis(t.uop))
    for t in (
        nn.Parameter(Tensor([1.0, 2.0, 3.0]).shard(devices, 0)),
        nn.Parameter(Tensor([1.0, 2.0, 3.0]), requires_grad=False),
        nn.Buffer(Tensor([1.0, 2.0, 3.0], device="CPU:1"), persistent=False),
        Tensor([1.0, 2.0, 3.0]).shard(devices),
        Tensor([0.5, 1.0, 1.5]) * 2,
    ):
        t.note = {"of": "the user"}  # type: ignore[attr-defined]
        c = copied(t)
        assert type(c) is type(t) and c is not t and c.tolist() == [1.0, 2.0, 3.0]
        assert (c.requires_grad, getattr(c, "persistent", 0)) == (t.requires_grad, getattr(t, "persistent", 0))
        assert c.note == t.note and (c.device, engine().sharding_axis(c.uop)) == place(t)  # type: ignore[attr-defined]
        t.assign(0.0).realize()
        assert c.tolist() == ([0.0, 0.0, 0.0] if kind == "copy" else [1.0, 2.0, 3.0])  # a shallow copy shares memory


def test_a_deep_copy_has_a_copy_of_the_gradient() -> None:
    model = nn.Linear(2, 1)
    model(Tensor([[1.0, 2.0]])).square().sum().backward()
    other = copy.deepcopy(model)
    assert other.weight.grad is not model.weight.grad and other.weight.grad.tolist() == model.weight.grad.tolist()  # type: ignore[union-attr]
    model.weight.grad.assign(0.0).realize()  # type: ignore[union-attr]
    assert other.weight.grad.tolist() != [[0.0, 0.0]]  # type: ignore[union-attr]
    assert copy.deepcopy(nn.Linear(2, 1)).weight.grad is None
    with pytest.raises(RuntimeError, match=r"deepcopy of a tensor of shape \(1, 2\) that was computed from others"):
        copy.deepcopy(model.weight * 2)
    assert copy.deepcopy((model.weight * 2).detach()).requires_grad is False


def test_pickling_and_deepcopy() -> None:
    t = Tensor([[1.0, 2.0]], requires_grad=True)
    back = pickle.loads(pickle.dumps(t))
    assert back.tolist() == [[1, 2]] and back.requires_grad and back.dtype is t.dtype
    pair = [t, t]
    first, second = copy.deepcopy(pair)
    assert first is second and first is not t and first.requires_grad and first.tolist() == t.tolist()
    half = Tensor([1.0, 2.0]).bfloat16()
    assert pickle.loads(pickle.dumps(half)).tolist() == [1, 2]
    sharded = Tensor([1.0, 2.0, 3.0]).shard(("CPU:0", "CPU:1"), axis=0)
    assert pickle.loads(pickle.dumps(sharded)).tolist() == [1, 2, 3]
