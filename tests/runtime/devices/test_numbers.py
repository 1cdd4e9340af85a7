"""The variables of a capture: one place for all calls that read them, checked before any of them changes."""

import numpy as np
import pytest

from manygrad.runtime.devices import get_device
from manygrad.runtime.devices.numbers import Variables
from manygrad.tensor.dtype import dtypes
from manygrad.tensor.uop.args import VarArg
from manygrad.tensor.uop.ops import Ops
from manygrad.tensor.uop.uop import UOp
from tests.runtime.codegen.kernels import load, loop, sink, store


def test_calls_of_many_graphs_follow() -> None:
    device = get_device("CPU")
    n = UOp(Ops.DEFINE_VAR, dtypes.index, (), VarArg("n", 1, 1_000_000))
    i = loop(n, 0)
    one_more = device.compile(sink(store(0, i, load(0, i).alu(Ops.ADD, load(1, i)), i)))
    a, one = device.alloc(4_000_000), device.alloc(4_000_000)
    for block, value in ((a, 0), (one, 1)):
        device.copyin(block, memoryview(np.full(1_000_000, value, np.float32)).cast("B"))
    variables = Variables({"n": 3, "other": 5}, ["n"])
    numbers = variables.numbers(("n",))
    assert variables.numbers(("n",)) is numbers and variables.asked == ["n"]
    graphs = [device.graph([(one_more, [a, one], numbers)] * 2) for _ in range(2)]

    def counts() -> list[int]:
        for graph in graphs:
            graph()
        out = np.empty(1_000_000, np.float32)
        device.copyout(memoryview(out).cast("B"), a)
        device.copyin(a, memoryview(np.zeros(1_000_000, np.float32)).cast("B"))
        assert (np.diff(out) <= 0).all()
        return [int((out == 4).sum()), int((out == 0).sum())]

    assert counts() == [3, 999_997]
    for length in (1_000_000, 1, 700_001):  # one thread's, and the whole team's
        variables.set({"n": length, "other": 7})
        assert counts() == [length, 1_000_000 - length] and variables.vars == {"n": length, "other": 5}
    with pytest.raises(ValueError, match="variable n is 1000001, outside of its bounds"):
        variables.set({"n": 1_000_001})
    assert counts() == [700_001, 299_999] and numbers.values == (700_001,)
    narrow = variables.numbers(("other", "n"))
    narrow.checks["a kernel of both"] = lambda values: one_more.cut((values[1] + 999_990,))
    with pytest.raises(ValueError, match="variable n is 1000011"):
        variables.set({"n": 21})  # the other kernel would take it
    assert counts() == [700_001, 299_999] and narrow.values == (5, 700_001)
