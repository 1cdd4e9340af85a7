"""Types and PyTorch's promotion, against tables written by hand from PyTorch's documentation and behaviour."""

from __future__ import annotations

import itertools

import ml_dtypes
import numpy as np
import pytest

from manygrad import Tensor, dtypes
from manygrad.tensor.dtype import DType, promote, to_dtype

# torch.promote_types; columns in the order of the rows
ORDER = "bool  uint8 int8  int16 int32 int64 float16 bfloat16 float32 float64".split()
TABLE = """
bool     bool     uint8    int8     int16    int32    int64    float16  bfloat16 float32  float64
uint8    uint8    uint8    int16    int16    int32    int64    float16  bfloat16 float32  float64
int8     int8     int16    int8     int16    int32    int64    float16  bfloat16 float32  float64
int16    int16    int16    int16    int16    int32    int64    float16  bfloat16 float32  float64
int32    int32    int32    int32    int32    int32    int64    float16  bfloat16 float32  float64
int64    int64    int64    int64    int64    int64    int64    float16  bfloat16 float32  float64
float16  float16  float16  float16  float16  float16  float16  float16  float32  float32  float64
bfloat16 bfloat16 bfloat16 bfloat16 bfloat16 bfloat16 bfloat16 float32  bfloat16 float32  float64
float32  float32  float32  float32  float32  float32  float32  float32  float32  float32  float64
float64  float64  float64  float64  float64  float64  float64  float64  float64  float64  float64
"""
PROMOTE = {
    (row.split()[0], name): want for row in TABLE.strip().splitlines() for name, want in zip(ORDER, row.split()[1:])
}
# what PyTorch has no answer for: the unsigned types above 8 bits with other integers
WIDE = {
    ("uint16", "uint8"): "uint16", ("uint32", "uint16"): "uint32", ("uint64", "uint32"): "uint64",
    ("uint64", "bool"): "uint64",
    ("uint16", "int8"): "int32", ("uint16", "int32"): "int32", ("uint32", "int32"): "int64",
    ("uint64", "int8"): "int64",
    ("uint16", "float16"): "float16", ("uint64", "float32"): "float32",
}  # fmt: skip


def dt(name: str) -> DType:
    return to_dtype(name)


@pytest.mark.parametrize("a, b", PROMOTE)
def test_promote_types(a: str, b: str) -> None:
    want = dt(PROMOTE[a, b])
    assert promote(dt(a), dt(b)) is want
    assert (Tensor.ones(2, dtype=a) + Tensor.ones(2, dtype=b)).dtype is want
    assert (Tensor.ones(dtype=a) + Tensor.ones(dtype=b)).dtype is want  # both 0-d


@pytest.mark.parametrize("a, b", WIDE)
def test_promote_wide_unsigned_types(a: str, b: str) -> None:
    assert promote(dt(a), dt(b)) is promote(dt(b), dt(a)) is dt(WIDE[a, b])


def test_promotion_is_symmetric_and_keeps_equal_types() -> None:
    for a, b in itertools.product(dtypes.all, repeat=2):
        assert promote(a, b) is promote(b, a)
        if a is b:
            assert promote(a, b) is a


RANK = {"b": 0, "i": 1, "u": 1, "f": 2}


@pytest.mark.parametrize("a, b", PROMOTE)
def test_a_0d_tensor_only_raises_the_category(a: str, b: str) -> None:
    """torch.result_type: of a tensor with dims and a 0-d one, the second counts only if its category is higher."""
    x, zero_d = Tensor.ones(3, dtype=a), Tensor.ones(dtype=b)
    want = dt(PROMOTE[a, b]) if RANK[dt(b).kind] > RANK[dt(a).kind] else dt(a)
    assert (x + zero_d).dtype is want
    assert (zero_d + x).dtype is want


@pytest.mark.parametrize("a", ORDER)
def test_python_numbers_only_raise_the_category(a: str) -> None:
    x = Tensor.ones(3, dtype=a)
    rank = RANK[dt(a).kind]
    assert (x * 2.5).dtype is (2.5 * x).dtype is (dt(a) if rank == 2 else dtypes.float32)
    assert (x * 2).dtype is (2 * x).dtype is (dt(a) if rank >= 1 else dtypes.int64)
    assert (x * True).dtype is dt(a)


@pytest.mark.parametrize("a", ORDER)
def test_division_and_functions_give_floats(a: str) -> None:
    x, want = Tensor.ones(3, dtype=a), dt(a) if dt(a).is_float else dtypes.float32
    assert (x / x).dtype is (x / 2).dtype is (1 / x).dtype is x.exp().dtype is x.sqrt().dtype is x.sin().dtype is want
    assert (x < x).dtype is x.eq(1).dtype is x.isnan().dtype is dtypes.bool


@pytest.mark.parametrize("a", ORDER)
def test_reductions(a: str) -> None:
    x = Tensor.ones(3, dtype=a)
    assert x.sum().dtype is x.prod().dtype is x.cumsum(0).dtype is (dt(a) if dt(a).is_float else dtypes.int64)
    assert x.max().dtype is x.min().dtype is dt(a)
    assert x.argmax().dtype is dtypes.int64
    assert x.any().dtype is x.all().dtype is (dtypes.uint8 if a == "uint8" else dtypes.bool)


def test_data_gets_the_type_pytorch_gives_it() -> None:
    assert Tensor([1, 2]).dtype is Tensor(3).dtype is dtypes.int64
    assert Tensor([1.0, 2]).dtype is Tensor(3.5).dtype is Tensor([]).dtype is dtypes.float32
    assert Tensor([True, False]).dtype is Tensor(True).dtype is dtypes.bool
    assert Tensor.arange(3).dtype is dtypes.int64 and Tensor.arange(3.0).dtype is dtypes.float32
    assert Tensor.full((2,), 1).dtype is dtypes.int64 and Tensor.full((2,), True).dtype is dtypes.bool


@pytest.mark.parametrize("d", dtypes.all, ids=lambda d: d.name)
def test_numpy_types_are_kept_both_ways(d: DType) -> None:
    a = np.array([0, 1, 1, 0]).astype(d.np)
    t = Tensor(a)
    assert t.dtype is d and t.numpy().dtype == d.np
    np.testing.assert_array_equal((t + Tensor.zeros(4, dtype=d)).numpy(), a)
    assert t.nbytes == 4 * d.itemsize == a.nbytes


def test_limits() -> None:
    for d in dtypes.all:
        if d.is_int:
            assert (d.min, d.max) == (np.iinfo(d.np).min, np.iinfo(d.np).max)
    assert dtypes.bfloat16.np == np.dtype(ml_dtypes.bfloat16) and dtypes.float32.min == -float("inf")


def test_unknown_types_are_named() -> None:
    with pytest.raises(TypeError, match="unknown dtype 'float8'; known: .*'bfloat16'"):
        Tensor([1], dtype="float8")
    with pytest.raises(TypeError, match="NumPy dtype complex64 has no counterpart"):
        Tensor(np.zeros(2, np.complex64))
    with pytest.raises(TypeError, match="unknown dtype"):
        Tensor([1]).cast("all")


def test_limits_and_promotion_by_name() -> None:
    import manygrad

    assert manygrad.finfo(dtypes.float32).eps == 2**-23 and manygrad.finfo("bfloat16").max == 3.3895313892515355e38
    assert manygrad.finfo(dtypes.float8_e4m3fn).max == 448 and manygrad.iinfo("int8").min == -128
    with pytest.raises(TypeError, match="iinfo is of integer types, not float32; use finfo"):
        manygrad.iinfo("float32")
    assert (
        manygrad.can_cast("int64", "float16")
        and not manygrad.can_cast("float16", "int64")
        and not manygrad.can_cast("int8", "bool")
    )
    assert manygrad.promote_types(dtypes.int8, dtypes.uint8) is dtypes.int16
    assert manygrad.result_type(Tensor([1]), 1.0) is dtypes.float32 and manygrad.result_type(1, 2.0) is dtypes.float32


def test_to_takes_a_type_a_device_or_a_tensor() -> None:
    t = Tensor([1.5, 2.5])
    assert t.to("float64").dtype is t.to(dtypes.float64).dtype is t.to(dtype="double").dtype is dtypes.float64
    moved = t.to("CPU:1", dtypes.int32, non_blocking=True)
    assert (moved.device, moved.dtype, moved.tolist()) == ("CPU:1", dtypes.int32, [1, 2])
    assert (t.to(moved).device, t.to(moved).dtype) == ("CPU:1", dtypes.int32)
    assert t.to(t.dtype).uop is t.uop and t.to(t.dtype, copy=True).uop is not t.uop
    assert t.type_as(moved).dtype is t.int().dtype and t.type() == "manygrad.float32"
    with pytest.raises(TypeError, match=r"to\(\) has no argument 'devise'"):
        t.to(devise="CPU")


def test_where_in_both_orders() -> None:
    x, c = Tensor([1.0, 2.0, 3.0]), Tensor([True, False, True])
    assert x.where(c, 0).tolist() == c.where(x, 0.0).tolist() == [1, 0, 3]
    # PyTorch's order where both are bool
    assert c.where(Tensor([False, True, True]), c).tolist() == [True, False, True]
