"""CHECK_OOB=1: kernels that check every access say so when one is outside, and compute the same when none is."""

from __future__ import annotations

import pickle
import threading
from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from manygrad import Tensor
from manygrad.errors import OutOfBoundsError
from manygrad.runtime.buffer import Buffer
from manygrad.runtime.codegen.analysis.describe import kernel_name
from manygrad.runtime.codegen.emit.emission import INDEX, Instructions
from manygrad.runtime.codegen.lowered import Inst, Low, LoweredProgram
from manygrad.runtime.codegen.opts import named
from manygrad.runtime.codegen.pipeline import Prepared
from manygrad.runtime.devices import get_device
from manygrad.runtime.devices.base import Kernel
from manygrad.runtime.devices.numbers import Numbers
from manygrad.runtime.executors.items import KernelItem
from manygrad.tensor.dtype import dtypes
from manygrad.tensor.environment import Context
from tests.opencl import OPENCL, needs_opencl
from tests.runtime.codegen.kernels import add, elementwise, f32, gemm, load, loop, mul, run, sink, store
from tests.runtime.codegen.test_groups import SHARED, numbers
from tests.runtime.codegen.test_opts import SETTINGS, close, families, products_of_bytes
from tests.runtime.codegen.test_random import kernels

DEVICES = pytest.mark.parametrize("device", ["CPU", OPENCL])
COPY = elementwise(lambda a: a, [f32], 20)  # what the hand-made programs pretend to be


@dataclass(frozen=True)
class HandMade(Prepared):
    """A kernel whose lowered program is given."""

    made: LoweredProgram | None = None

    def code(self, render: Callable[[LoweredProgram], str]) -> str:
        assert self.made is not None
        return render(self.made)


def by_hand(device: str, e: Instructions, scratch_bytes: int = 0) -> Kernel:
    """The kernel of what was emitted in `e`."""
    compiled = import_module(f"manygrad.runtime.devices.{device.lower()}.backend").COMPILED
    name = kernel_name(COPY)
    program = LoweredProgram(name, tuple(e.blocks[0].insts), (), 2, (), scratch_bytes)
    with Context(CACHE=0, CHECK_OOB=1):
        return compiled.finish(HandMade(name, COPY, (), program), COPY)


def access(e: Instructions, op: Low, offset: Inst, constant: int, lanes: int, *guard: Inst) -> None:
    """out[0...] = in[offset + constant...], or out[offset + constant...] = in[0...]."""
    source, target, zero = e.emit(Low.PARAM, f32, (), 1), e.emit(Low.PARAM, f32, (), 0), e.const(0)
    if op is Low.LOAD:
        value = e.emit(Low.LOAD, f32, (source, offset, *guard), constant, lanes)
        e.emit(Low.STORE, dtypes.void, (target, zero, value), 0, lanes, here=True)
    else:
        value = e.emit(Low.LOAD, f32, (source, zero), 0, lanes)
        e.emit(Low.STORE, dtypes.void, (target, offset, value, *guard), constant, lanes, here=True)


def buffers(device: str) -> list[Buffer]:
    """20 floats of which the program writes, 20 which it reads."""
    return [
        Buffer(device, 20, f32).copyin(np.zeros(20, np.float32)),
        Buffer(device, 20, f32).copyin(np.arange(20, dtype=np.float32)),
    ]


@DEVICES
@pytest.mark.parametrize(("op", "slot"), [(Low.LOAD, 1), (Low.STORE, 0)])
@pytest.mark.parametrize(
    ("start", "lanes", "seen"), [(20, 1, 20), (-1, 1, -1), (13, 8, 20), (17, 4, 20), (-2, 4, -2), (12, 8, None)]
)
def test_a_wrong_kernel_is_reported(device: str, op: Low, slot: int, start: int, lanes: int, seen: int | None) -> None:
    """The first element outside is named; the last vector that fits (None) runs."""
    e = Instructions()
    access(e, op, e.const(0), start, lanes)
    item = KernelItem(COPY, by_hand(device, e), buffers(device), (), "train.py:7")
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
    if device == "CPU":  # (a work item goes on, as others may wait for it)
        assert (item.buffers[0].copyout() == 0).all()  # nothing was written


@DEVICES
def test_masked_lanes_are_not_accesses(device: str) -> None:
    for active, fails in ((3, False), (5, True)):
        e = Instructions()
        access(e, Low.STORE, e.const(0), 16, 8, e.emit(Low.FIRST, dtypes.bool, (), active, 8))
        kernel, args = by_hand(device, e), buffers(device)
        if fails:
            with pytest.raises(OutOfBoundsError, match="element 20 of argument 0"):
                kernel([b.handle for b in args])
        else:
            kernel([b.handle for b in args])
            assert args[0].copyout()[16:].tolist() == [0, 1, 2, 0]


@DEVICES
def test_gathers_and_local_memory(device: str) -> None:
    e = Instructions()
    access(e, Low.LOAD, e.emit(Low.TABLE, INDEX, (), (3, 25, 0, 21), 4), 0, 4)
    seen = 21 if device == "CPU" else 25  # the least one of a vector; that of the first lane
    with pytest.raises(OutOfBoundsError, match=f"element {seen} of argument 1"):
        by_hand(device, e)([b.handle for b in buffers(device)])
    e = Instructions()
    local = e.emit(Low.SCRATCH, f32, (), 64)
    value = e.emit(Low.LOAD, f32, (local, e.const(14)), 0, 4)
    e.emit(Low.STORE, dtypes.void, (e.emit(Low.PARAM, f32, (), 0), e.const(0), value), 0, 4, here=True)
    with pytest.raises(OutOfBoundsError, match="load at element 16 of local memory, which has 16"):
        by_hand(device, e, 128)([b.handle for b in buffers(device)])


@DEVICES
def test_a_buffer_one_element_short(device: str) -> None:
    """On one thread and on a team, in a call of its own and in a graph; memory of a freed block serves as much as was
    asked for."""
    ast = gemm(300, 64, 70)
    arrays = [np.zeros((300, 64), np.float32), np.ones(300 * 70, np.float32), np.ones(70 * 64, np.float32)]
    for slot in range(3):
        short = [a.reshape(-1)[: a.size - (i == slot)] for i, a in enumerate(arrays)]
        for threads in (1, 2):
            with Context(CHECK_OOB=1, THREADS=threads):
                with pytest.raises(OutOfBoundsError, match=rf"of argument {slot}, which has {short[slot].size}\."):
                    run(ast, short, device=device)
    own = get_device(device)
    with Context(CHECK_OOB=1):
        kernel = own.compile(ast)
        handles = [own.alloc(a.nbytes - 4) for a in arrays]
        graph = own.graph([(kernel, handles, Numbers())])
        for _ in range(2):
            with pytest.raises(OutOfBoundsError, match="kernel r_300_64_70"):
                graph()
        assert kernel is not own.compile(COPY)
    with Context(CHECK_OOB=0):
        assert kernel is not own.compile(ast)  # a checked kernel is another one
    for h, a in zip(handles, arrays):
        own.free(h, a.nbytes - 4)


@pytest.mark.parametrize(
    ("device", "examples"), [("CPU", 40), pytest.param("OPENCL", 6, marks=needs_opencl)], ids=["CPU", "OPENCL"]
)
def test_right_kernels_pass(device: str, examples: int) -> None:
    @settings(SETTINGS, max_examples=examples)
    @given(st.data())
    def passes(data: st.DataObject) -> None:
        ast, arrays = data.draw(st.one_of(families(), kernels(), products_of_bytes()))
        with Context(CACHE=0, CHECK_OOB=1):
            close(run(ast, arrays, device=device)[0], run(ast, arrays)[0])

    passes()


@DEVICES
def test_a_bad_index_from_data(device: str) -> None:
    """What a gather reads outside of its buffer is an error, not what happens to stand there."""
    i, j = loop(5, 0), loop(8, 1)
    at = load(2, i, dtypes.int64).cast(dtypes.index)
    ast = sink(store(0, add(mul(i, 8), j), load(1, add(mul(at, 8), j)), i, j))
    arrays = [np.zeros((5, 8), np.float32), np.ones((4, 8), np.float32), np.array([0, 3, 9, 1, 2])]
    with Context(CHECK_OOB=1), pytest.raises(OutOfBoundsError, match="element 72 of argument 1, which has 32"):
        run(ast, arrays, device=device)


@needs_opencl
def test_groups_are_checked_up_to_their_barriers() -> None:
    """A work item that reads outside gets to the barriers all the same."""
    device = get_device("OPENCL")
    lanes = (named("parallel", 2), named("bind", 0, 4), named("bind_reduce", 2, 8))
    for opts in (SHARED, lanes):
        with Context(CHECK_OOB=1):
            kernel = device.compile_with(gemm(64, 96, 48), opts)
            for slot, size in enumerate((64 * 96, 64 * 48, 48 * 96)):
                handles = [device.alloc(4 * (n - (i == slot))) for i, n in enumerate((64 * 96, 64 * 48, 48 * 96))]
                with pytest.raises(
                    OutOfBoundsError, match=rf"element {size - 1} of argument {slot}, which has {size - 1}\."
                ):
                    kernel(handles)


@needs_opencl
def test_groups_that_miss_tiles_read_nothing_beyond_the_last() -> None:
    groups = (named("parallel", 2), named("bind", 0, 4), named("bind", 1, 8))
    rng = np.random.default_rng(0)
    for m, n, k in ((17, 2, 3), (5, 13, 2)):
        arrays = [np.zeros((m, n), np.float32), rng.random((m, k), np.float32), rng.random((k, n), np.float32)]
        short = (named("unroll", 2, k), *groups)  # no loop is between the group and what it reads
        for opts in (short, (named("tile", 0, 2), *short), (named("vectorize", 1, 4), named("tile", 0, 3), *groups)):
            with Context(CHECK_OOB=1, CACHE=0):
                close(numbers(gemm(m, n, k), arrays, opts), run(gemm(m, n, k), arrays)[0])


@needs_opencl
def test_each_device_hears_of_its_own_kernels() -> None:
    """Threads that run one kernel, each on a device of its own, some with a bad index."""
    i = loop(64, 0)
    ast = sink(store(0, i, load(1, load(2, i, dtypes.int64).cast(dtypes.index)), i))
    found: dict[int, list[bool]] = {}

    def work(number: int) -> None:
        at = np.arange(64) + number % 2  # the last one is outside where the number is odd
        with Context(CHECK_OOB=1):
            for _ in range(20):
                try:
                    run(ast, [np.zeros(64, np.float32), np.ones(64, np.float32), at], device=f"OPENCL:{number}")
                    found.setdefault(number, []).append(False)
                except OutOfBoundsError:
                    found.setdefault(number, []).append(True)

    threads = [threading.Thread(target=work, args=(n,)) for n in range(4)]
    for t in threads:
        t.start()
    for t in threads:
        t.join(60)
    assert found == {n: [bool(n % 2)] * 20 for n in range(4)}


@DEVICES
def test_a_training_step(device: str) -> None:
    with Context(CHECK_OOB=1):
        x, w = Tensor.randn(17, 33, device=device), Tensor.randn(33, 5, device=device)
        w.requires_grad = True
        ((x @ w).softmax(1).log().sum()).backward()
        assert w.grad is not None and np.isfinite(w.grad.numpy()).all()
