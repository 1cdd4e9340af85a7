"""CHECK_OOB=1: kernels that check every access say so when one is outside, and compute the same when none is."""

from __future__ import annotations

import pickle
from dataclasses import dataclass

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from manygrad import Tensor
from manygrad.runtime.buffer import Buffer
from manygrad.runtime.codegen.describe import kernel_name
from manygrad.runtime.codegen.emit.emission import INDEX, Instructions
from manygrad.runtime.codegen.lowered import Inst, Low, Program
from manygrad.runtime.codegen.pipeline import Prepared
from manygrad.runtime.devices import get_device
from manygrad.runtime.devices.bounds import OutOfBoundsError
from manygrad.runtime.devices.cpu import COMPILED
from manygrad.runtime.devices.cpu_kernel import CPUKernel
from manygrad.runtime.items import KernelItem
from manygrad.tensor.dtype import dtypes
from manygrad.tensor.environment import Context
from tests.runtime.codegen.kernels import add, elementwise, f32, gemm, load, loop, mul, run, sink, store
from tests.runtime.codegen.test_opts import SETTINGS, close, families, products_of_bytes
from tests.runtime.codegen.test_random import kernels

COPY = elementwise(lambda a: a, [f32], 20)  # what the hand-made programs pretend to be


@dataclass(frozen=True)
class HandMade(Prepared):
    """A kernel whose lowered program is given."""

    made: Program | None = None

    def program(self) -> Program:
        assert self.made is not None
        return self.made


def by_hand(e: Instructions, scratch_bytes: int = 0) -> CPUKernel:
    """The kernel of what was emitted in `e`."""
    name = kernel_name(COPY)
    program = Program(name, tuple(e.blocks[0].insts), (), 2, (), scratch_bytes)
    with Context(CACHE=0, CHECK_OOB=1):
        return COMPILED.finish(HandMade(name, COPY, (), program), COPY)


def access(e: Instructions, op: Low, offset: Inst, constant: int, lanes: int, *guard: Inst) -> None:
    """out[0...] = in[offset + constant...], or out[offset + constant...] = in[0...]."""
    source, target, zero = e.emit(Low.PARAM, f32, (), 1), e.emit(Low.PARAM, f32, (), 0), e.const(0)
    if op is Low.LOAD:
        value = e.emit(Low.LOAD, f32, (source, offset, *guard), constant, lanes)
        e.emit(Low.STORE, dtypes.void, (target, zero, value), 0, lanes, here=True)
    else:
        value = e.emit(Low.LOAD, f32, (source, zero), 0, lanes)
        e.emit(Low.STORE, dtypes.void, (target, offset, value, *guard), constant, lanes, here=True)


def buffers() -> list[Buffer]:
    """20 floats of which the program writes, 20 which it reads."""
    return [
        Buffer("CPU", 20, f32).copyin(np.zeros(20, np.float32)),
        Buffer("CPU", 20, f32).copyin(np.arange(20, dtype=np.float32)),
    ]


@pytest.mark.parametrize(("op", "slot"), [(Low.LOAD, 1), (Low.STORE, 0)])
@pytest.mark.parametrize(
    ("start", "lanes", "seen"), [(20, 1, 20), (-1, 1, -1), (13, 8, 20), (17, 4, 20), (-2, 4, -2), (12, 8, None)]
)
def test_a_wrong_kernel_is_reported(op: Low, slot: int, start: int, lanes: int, seen: int | None) -> None:
    """The first element outside is named; the last vector that fits (None) runs."""
    e = Instructions()
    access(e, op, e.const(0), start, lanes)
    item = KernelItem(COPY, by_hand(e), buffers(), (), "train.py:7")
    if seen is None:
        item.run({})
        return
    with pytest.raises(OutOfBoundsError) as caught:
        item.run({})
    text = str(caught.value)
    assert text.startswith(
        f"train.py:7: kernel {kernel_name(COPY)}: a {op.name.lower()} at element {seen} of argument {slot}, "
        "which has 20. "
    )
    assert str(pickle.loads(pickle.dumps(caught.value))) == text
    assert (item.buffers[0].copyout() == 0).all()  # nothing was written


def test_masked_lanes_are_not_accesses() -> None:
    for active, fails in ((3, False), (5, True)):
        e = Instructions()
        access(e, Low.STORE, e.const(0), 16, 8, e.emit(Low.FIRST, dtypes.bool, (), active, 8))
        kernel, args = by_hand(e), buffers()
        if fails:
            with pytest.raises(OutOfBoundsError, match="element 20 of argument 0"):
                kernel([b.handle for b in args])
        else:
            kernel([b.handle for b in args])
            assert args[0].copyout()[16:].tolist() == [0, 1, 2, 0]


def test_gathers_and_local_memory() -> None:
    e = Instructions()
    access(e, Low.LOAD, e.emit(Low.TABLE, INDEX, (), (3, 25, 0, 21), 4), 0, 4)
    with pytest.raises(OutOfBoundsError, match="element 21 of argument 1"):
        by_hand(e)([b.handle for b in buffers()])
    e = Instructions()
    local = e.emit(Low.SCRATCH, f32, (), 64)
    value = e.emit(Low.LOAD, f32, (local, e.const(14)), 0, 4)
    e.emit(Low.STORE, dtypes.void, (e.emit(Low.PARAM, f32, (), 0), e.const(0), value), 0, 4, here=True)
    with pytest.raises(OutOfBoundsError, match="load at element 16 of local memory, which has 16"):
        by_hand(e, 128)([b.handle for b in buffers()])


def test_a_buffer_one_element_short() -> None:
    """On one thread and on a team, in a call of its own and in a graph."""
    ast = gemm(300, 64, 70)
    arrays = [np.zeros((300, 64), np.float32), np.ones(300 * 70, np.float32), np.ones(70 * 64, np.float32)]
    for slot in range(3):
        short = [a.reshape(-1)[: a.size - (i == slot)] for i, a in enumerate(arrays)]
        for threads in (1, 2):
            with Context(CHECK_OOB=1, THREADS=threads):
                with pytest.raises(OutOfBoundsError, match=rf"of argument {slot}, which has {short[slot].size}\."):
                    run(ast, short, device="CPU")
    device = get_device("CPU")
    with Context(CHECK_OOB=1):
        kernel = device.compile(ast)
        handles = [device.alloc(a.nbytes - 4) for a in arrays]
        with pytest.raises(OutOfBoundsError, match="kernel r_300_64_70"):
            device.graph([(kernel, handles, ())])()
        assert kernel is not device.compile(COPY)
    with Context(CHECK_OOB=0):
        assert kernel is not device.compile(ast)  # a checked kernel is another one
    for h, a in zip(handles, arrays):
        device.free(h, a.nbytes - 4)


@settings(SETTINGS, max_examples=40)
@given(st.data())
def test_right_kernels_pass(data: st.DataObject) -> None:
    ast, arrays = data.draw(st.one_of(families(), kernels(), products_of_bytes()))
    with Context(CACHE=0, CHECK_OOB=1):
        close(run(ast, arrays, device="CPU")[0], run(ast, arrays)[0])


def test_a_bad_index_from_data() -> None:
    """What a gather reads outside of its buffer is an error, not what happens to stand there."""
    i, j = loop(5, 0), loop(8, 1)
    at = load(2, i, dtypes.int64).cast(dtypes.index)
    ast = sink(store(0, add(mul(i, 8), j), load(1, add(mul(at, 8), j)), i, j))
    arrays = [np.zeros((5, 8), np.float32), np.ones((4, 8), np.float32), np.array([0, 3, 9, 1, 2])]
    with Context(CHECK_OOB=1), pytest.raises(OutOfBoundsError, match="element 72 of argument 1, which has 32"):
        run(ast, arrays, device="CPU")


def test_a_training_step() -> None:
    with Context(CHECK_OOB=1):
        x, w = Tensor.randn(17, 33), Tensor.randn(33, 5)
        w.requires_grad = True
        ((x @ w).softmax(1).log().sum()).backward()
        assert w.grad is not None and np.isfinite(w.grad.numpy()).all()
