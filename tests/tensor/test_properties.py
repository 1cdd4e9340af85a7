"""What a tensor says of itself, and tensors made like it."""

from __future__ import annotations

import numpy as np
import pytest

from manygrad import Context, GlobalCounters, Tensor, dtypes


def test_sizes_and_strides() -> None:
    t = Tensor.zeros(2, 3, 4)
    assert (t.ndim, t.dim(), t.ndimension(), t.numel(), t.nelement(), t.size(), t.size(-1)) == (
        3,
        3,
        3,
        24,
        24,
        (2, 3, 4),
        4,
    )
    assert (t.element_size(), t.itemsize, t.nbytes, t.stride(), t.stride(1), t.storage_offset()) == (
        4,
        4,
        96,
        (12, 4, 1),
        4,
        0,
    )
    assert t.is_same_size(Tensor.ones(2, 3, 4)) and not t.is_same_size(Tensor.ones(2, 3))
    stored = t.contiguous().realize()
    assert (
        stored.is_contiguous() and not stored.permute(1, 0, 2).is_contiguous() and stored.reshape(6, 4).is_contiguous()
    )
    with pytest.raises(IndexError, match="dim 3 is outside"):
        t.size(3)


@pytest.mark.parametrize(
    ("kind", "floating", "signed"),
    [
        ("float32", True, True),
        ("bfloat16", True, True),
        ("int8", False, True),
        ("uint8", False, False),
        ("bool", False, False),
    ],
)
def test_types(kind: str, floating: bool, signed: bool) -> None:
    t = Tensor([1, 0], dtype=kind)
    assert (t.is_floating_point(), t.is_signed()) == (floating, signed)
    assert not (
        t.is_complex() or t.is_conj() or t.is_neg() or t.is_inference() or t.is_sparse or t.is_quantized or t.is_nested
    )
    assert t.conj() is t and t.conj_physical() is t and t.real is t
    assert t.char().dtype is dtypes.int8


def test_places() -> None:
    t = Tensor([1.0])
    assert t.is_cpu and not t.is_cuda and not t.is_meta and t.get_device() == -1
    with Context(DEVICE="NULL"):
        n = Tensor([1.0])
        assert n.is_meta and not n.is_cpu and n.get_device() == 0
    two = Tensor([1.0, 2.0]).shard(("CPU:0", "CPU:1"), axis=0)
    assert not two.is_cpu and two.cpu().device == "CPU:0" and two.cpu().tolist() == [1, 2]
    with pytest.raises(ValueError, match="on 2 devices"):
        two.get_device()


def test_truth_of_one_element() -> None:
    assert Tensor([2.0]).is_nonzero() and not Tensor(0).is_nonzero()
    with pytest.raises(TypeError, match=r"ambiguous; use \.any\(\) or \.all\(\)"):
        Tensor([1, 2]).is_nonzero()


def test_new_tensors_have_the_type_and_the_place() -> None:
    t = Tensor(np.zeros((2, 2), np.float64), device="CPU:1")
    for new, want in [
        (t.new_zeros(2, 3), 0),
        (t.new_ones((2, 3)), 1),
        (t.new_full((2, 3), 7), 7),
        (t.new_empty(2, 3), 0),
        (t.new_tensor([[5] * 3] * 2), 5),
    ]:
        assert (new.shape, new.dtype, new.device) == ((2, 3), dtypes.float64, "CPU:1")
        assert (new + 0).tolist() == [[want] * 3] * 2
    assert t.new_zeros(2, dtype="int32", device="CPU:0").dtype is dtypes.int32
    assert t.new_ones(2, requires_grad=True).requires_grad and t.new_tensor([1.0], requires_grad=True).is_leaf


def test_asking_computes_nothing() -> None:
    before = GlobalCounters.kernel_count
    t = Tensor.rand(3, 3).exp()
    _ = (t.shape, t.stride(), t.is_contiguous(), t.nbytes, t.device, t.requires_grad, t.retains_grad)
    assert GlobalCounters.kernel_count == before
