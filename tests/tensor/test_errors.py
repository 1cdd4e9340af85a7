"""Bad input: a clear message, raised where the user wrote the operation, and nothing is lost."""

from __future__ import annotations

import traceback
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from manygrad import Tensor

x = Tensor(np.zeros((2, 3), np.float32))
y = Tensor(np.zeros((4, 5), np.float32))
far = Tensor(np.zeros((2, 3), np.float32), device="CPU:1")

CASES: list[tuple[Callable[[], Any], type[Exception], str]] = [
    # shapes
    (
        lambda: x + y,
        ValueError,
        r"shapes \(2, 3\) and \(4, 5\) do not broadcast: dims \(2, 4\) differ and none of them is 1",
    ),
    (lambda: (x > 0).where(y, 0), ValueError, r"shapes \(2, 3\) and \(4, 5\) and \(4, 5\) do not broadcast"),
    (lambda: x @ y, ValueError, r"matmul: \(2, 3\) @ \(4, 5\): inner dims 3 and 4 differ"),
    (lambda: x @ Tensor(1.0), ValueError, r"matmul: both operands need at least 1 dim, got \(2, 3\) and \(\)"),
    (lambda: x.reshape(4, 2), ValueError, r"reshape \(2, 3\) to \(4, 2\): 6 elements are not 8"),
    (lambda: x.reshape(-1, 4), ValueError, r"reshape \(2, 3\) to \(-1, 4\): 6 elements do not divide by 4"),
    (lambda: x.reshape(-1, -1), ValueError, r"at most one dim can be -1"),
    (lambda: x.permute(0, 0), ValueError, r"permute\(0, 0\) does not name every dim of \(2, 3\) once"),
    (
        lambda: x.expand(4, 3),
        ValueError,
        r"expand \(2, 3\) to \(4, 3\): a dim of 2 cannot become 4; only dims of size 1 expand",
    ),
    (lambda: x.expand(3), ValueError, r"expand \(2, 3\) to \(3,\): fewer dims than it has"),
    (lambda: x.shrink(((0, 3), (0, 3))), ValueError, r"shrink of \(2, 3\): \[0, 3\) is outside \[0, 2\]"),
    (lambda: x.pad((1, 2, 3)), ValueError, r"pad: \(1, 2, 3\) is not pairs for at most 2 dims"),
    (lambda: x.pad((1, 1), mode="mirror"), ValueError, "mode"),
    (lambda: x.cat(y), ValueError, r"cat along dim 0: \(4, 5\) does not fit \(2, 3\)"),
    (lambda: x.split([1, 3]), ValueError, r"split: sizes \[1, 3\] do not add up to dim 0 of \(2, 3\)"),
    (lambda: x.sum(2), IndexError, r"dim 2 is outside -2\.\.1 for shape \(2, 3\)"),
    (lambda: x.sum((0, 0)), ValueError, r"a dim stands twice in \(0, 0\)"),
    (lambda: x.flatten(1, 0), ValueError, r"flatten: start_dim 1 comes after end_dim 0"),
    (lambda: Tensor.zeros(2, -1), ValueError, r"negative dim in shape \(2, -1\)"),
    (lambda: x.einsum("ij,jk->ik", y), ValueError, r"do not broadcast|einsum"),
    (lambda: x.einsum("ij->i", y), ValueError, r"einsum 'ij->i' names 1 operands, got 2"),
    (lambda: x.einsum("ijk->i"), ValueError, r"operand 'ijk' has 2 dims"),
    (lambda: x.gather(0, Tensor([1])), ValueError, r"gather: index has 1 dims, the tensor 2"),
    (lambda: x.conv2d(y), ValueError, r"conv: input \(2, 3\) and weight \(4, 5\)"),
    # values
    (lambda: x.item(), ValueError, r"item\(\) needs one element, this tensor has shape \(2, 3\)"),
    (lambda: bool(x), TypeError, r"the truth of a tensor of shape \(2, 3\) is ambiguous; use \.any\(\) or \.all\(\)"),
    (lambda: [0, 1][Tensor(0.5)], TypeError, r"only integer tensors can be an index, not float32"),
    (lambda: len(Tensor(1)), TypeError, r"len\(\) of a 0-d tensor"),
    (lambda: x.clamp(), ValueError, r"clamp: give min, max or both"),
    (lambda: x.div(2, rounding_mode="up"), ValueError, r"rounding_mode"),
    (lambda: Tensor.arange(0, 3, 0), ValueError, r"arange: step is 0"),
    # types and data
    (lambda: x & 1, TypeError, r"bitwise AND needs bool or integer operands, not float32; cast first"),
    (lambda: x << 1, TypeError, r"bitwise SHL needs"),
    (lambda: Tensor([1, 2]).mean(), TypeError, r"mean needs a float tensor, not int64; cast with \.float\(\) first"),
    (lambda: x.cast("float128"), TypeError, r"unknown dtype 'float128'; known:"),
    (lambda: Tensor([[1, 2], [3]]), ValueError, r"its rows differ in length"),
    (lambda: Tensor(object()), TypeError, r"cannot make a tensor of object; pass a number, a list"),
    (lambda: Tensor(["a"]), TypeError, r"cannot make a tensor|NumPy dtype <U1 has no counterpart"),
    (lambda: x + "a", TypeError, r"cannot make a tensor of str"),
    # devices
    (
        lambda: x + far,
        ValueError,
        r"operands are on different devices: \(2, 3\) on CPU:0 and \(2, 3\) on CPU:1; move one with \.to",
    ),
    (lambda: x @ far.T, ValueError, r"different devices"),
    (lambda: x.cat(far), ValueError, r"cat: the tensors are on different devices \['CPU:0', 'CPU:1'\]"),
    (lambda: (x > 0).where(far, 0), ValueError, r"where: operands are on different devices"),
    (lambda: x[Tensor([0], device="CPU:1")], ValueError, r"index tensors are on CPU:1, the tensor on CPU:0"),
    (lambda: x.to("TPU"), ValueError, r"unknown device 'TPU': the kinds are CPU, CUDA, OPENCL, PYTHON, NULL, DISK"),
    (lambda: Tensor([1], device="CPU:x"), ValueError, r"device 'CPU:x': after 'CPU:' a number is expected"),
    (lambda: x.shard(("CPU:0", "CPU:0")), ValueError, r"shard: a device is named twice"),
    (lambda: x.shard(()), ValueError, r"an empty tuple of devices"),
    (lambda: x.shard(("CPU:0", "CPU:1"), 2), IndexError, r"dim 2 is outside"),
]


@pytest.mark.parametrize("f, kind, message", CASES, ids=[m.replace("\\", "")[:40] for *_, m in CASES])
def test_bad_input(f: Callable[[], Any], kind: type[Exception], message: str) -> None:
    with pytest.raises(kind, match=message) as caught:
        f()
    lines = [frame.name for frame in traceback.extract_tb(caught.tb) if frame.filename == __file__]
    assert lines[-1] == "<lambda>"  # raised by the operation itself, not when it is computed
    assert (x.sum().item(), far.sum().item()) == (0.0, 0.0)


def test_kernels_name_the_line_that_asked_for_them(capsys: pytest.CaptureFixture[str]) -> None:
    from manygrad import Context

    with Context(DEBUG=2):
        (Tensor([1.0, 2.0]) * 3.0625).realize()
    assert "test_errors.py:" in capsys.readouterr().out


def test_a_failed_graph_does_not_stop_others() -> None:
    t = Tensor([1.0, 2.0], device="NULL")
    with pytest.raises(ValueError, match="different devices"):
        t + x[0, :2]
    disk = Tensor([1.0], device="CPU") + 1
    assert disk.item() == 2.0
