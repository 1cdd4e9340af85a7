"""A kernel over a loop that a variable leaves nothing of runs no iteration: on its own, in a graph, and with others."""

from __future__ import annotations

import numpy as np
import pytest

from manygrad import Tensor, TinyJit, Variable
from manygrad.runtime.devices import get_device
from manygrad.tensor.dtype import dtypes
from manygrad.tensor.uop import Ops, UOp
from manygrad.tensor.uop.args import VarArg
from tests.runtime.codegen.kernels import loop, mul, sink, store


@pytest.mark.parametrize("kind", ["CPU", "PYTHON"])
@pytest.mark.parametrize("n", [0, 1, 3])
def test_a_loop_of_no_iterations(kind: str, n: int) -> None:
    i, j = loop(UOp(Ops.DEFINE_VAR, dtypes.index, (), VarArg("n", 0, 8)), 0), loop(5, 1)
    value = UOp.const(dtypes.float32, 1.0)
    ast = sink(store(0, mul(i, 5).alu(Ops.ADD, j), value, i, j))
    device = get_device(kind)
    memory = device.alloc(160)
    device.copyin(memory, memoryview(np.zeros(160, np.uint8)))
    device.compile(ast)([memory], (n,))
    out = np.empty(160, np.uint8)
    device.copyout(memoryview(out), memory)
    device.free(memory, 160)
    np.testing.assert_array_equal(out.view(np.float32), [1.0] * 5 * n + [0.0] * (40 - 5 * n))


def test_parts_of_no_rows_write_nothing() -> None:
    """The rows behind, which another part has written, stay."""

    def step(v: object) -> Tensor:
        first = Tensor.cat(Tensor.zeros(v, 3), Tensor.ones(9 - v, 3)).contiguous()  # type: ignore[operator]
        return (first + Tensor.cat(Tensor.full((v, 3), 5.0), Tensor.zeros(9 - v, 3)).contiguous()).realize()  # type: ignore[operator, arg-type]

    captured = TinyJit(step)
    for n in (4, 0, 9, 0, 1, 8):
        want = np.where(np.arange(9)[:, None] < n, 5.0, 1.0) * np.ones(3)
        np.testing.assert_array_equal(captured(Variable("v", 0, 9).bind(n)).numpy(), want)
        np.testing.assert_array_equal(step(Variable("v", 0, 9).bind(n)).numpy(), want)
