"""Names, memory, graphs, threads, forks and arenas of the devices."""

from __future__ import annotations

import mmap
import os
import re
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from manygrad.native.compiler import leave_memory
from manygrad.runtime.devices import Device, Devices, canonical, get_device
from manygrad.runtime.devices.cpu.threads import team
from manygrad.runtime.devices.numbers import Numbers
from manygrad.tensor.dtype import dtypes
from manygrad.tensor.environment import Context
from manygrad.tensor.uop.args import VarArg
from manygrad.tensor.uop.ops import Ops
from manygrad.tensor.uop.uop import UOp
from tests.runtime.codegen.kernels import (
    add,
    elementwise,
    f32,
    gemm,
    load,
    loop,
    mul,
    red,
    reduce,
    run,
    sink,
    store,
)

RNG = np.random.default_rng(0)


def test_names() -> None:
    assert get_device("CPU") is get_device("cpu:0") is get_device("CPU:0@3")
    assert get_device("CPU:1") is not get_device("CPU")
    assert get_device("NULL:17").name == "NULL:17"
    assert canonical("DISK:/tmp/a@b") == "DISK:/tmp/a@b"
    for bad in ("GPU", "CPU:x", "CPU:", "DISK", ""):
        with pytest.raises(ValueError, match="device"):
            get_device(bad)
    with pytest.raises(ValueError, match="the kinds are CPU, CUDA, OPENCL, PYTHON, NULL, DISK"):
        get_device("TPU:1")


@pytest.mark.parametrize("name", ["CPU:61", "PYTHON:61"])
def test_memory(name: str) -> None:
    device = get_device(name)
    a = device.alloc(1000)
    assert device.address(a) % 64 == 0
    assert device.allocated == 1024
    part = device.view(a, 100, 200)
    device.copyin(part, memoryview(bytes(range(200))))
    array = device.as_numpy(a, 1000)
    assert array is not None and array[100:300].tolist() == list(range(200))
    out = bytearray(50)
    device.copyout(memoryview(out), device.view(a, 110, 50))
    assert list(out) == list(range(10, 60))
    address = device.address(a)
    device.free(a, 1000)
    assert (device.allocated, device.cached) == (0, 1024)
    again = device.alloc(1010)
    assert device.address(again) == address and device.cached == 0
    device.free(again, 1010)
    device.trim()
    assert device.cached == 0 and device.peak == 1024


def test_freed_blocks_make_room_for_a_larger_one() -> None:
    """Never for a smaller one: sizes that take turns all stay."""
    device, mb = get_device("PYTHON:62"), 1 << 20
    small, large = device.alloc(mb), device.alloc(3 * mb)
    device.free(small, mb)
    device.free(large, 3 * mb)
    device.alloc(2 * mb)
    assert device.cached == 3 * mb  # the block of 1 MB is gone
    device.alloc(3 * mb)
    assert device.cached == 0 and device.allocated == 5 * mb


def test_the_compilers_code_leaves_memory_and_comes_back() -> None:
    if not Path("/proc/self/smaps").exists():
        pytest.skip("needs Linux")

    def resident() -> int:
        """KiB of LLVM's code."""
        parts = re.split(r"^(?=[0-9a-f]+-[0-9a-f]+ )", Path("/proc/self/smaps").read_text(), flags=re.MULTILINE)
        return sum(
            int(re.search(r"^Rss: +(\d+)", p, re.MULTILINE)[1]) for p in parts if " r-xp " in p and "libllvmlite" in p
        )  # type: ignore[index]

    device, x = get_device("CPU"), np.arange(70, dtype=np.float32)
    with Context(CACHE=0):
        device.compile(elementwise(lambda a: a.alu(Ops.ADD, a), [f32], 70))
        before = resident()
        leave_memory()
        assert resident() < before // 2
        ast = elementwise(lambda a: a.alu(Ops.MUL, a), [f32], 70)
        assert (run(ast, [np.zeros_like(x), x], device="CPU")[0] == x * x).all()


def test_null_computes_nothing() -> None:
    device = get_device("NULL:1023")
    kernel = device.compile(gemm(512, 512, 512))
    assert kernel.flops == 2 * 512**3 and kernel.nbytes == 3 * 4 * 512**2
    assert kernel([device.alloc(1)] * 3, wait=True) == 0.0
    out = bytearray(b"abc")
    device.copyout(memoryview(out), None)
    assert out == bytes(3)
    device.graph([(kernel, [None] * 3, Numbers())])()


def test_disk(tmp_path: Path) -> None:
    path = tmp_path / "file.bin"
    device = get_device(f"DISK:{path}")
    handle = device.alloc(100)
    device.copyin(device.view(handle, 10, 4), memoryview(b"abcd"))
    device.free(handle, 100)
    assert path.stat().st_size == 100
    assert path.read_bytes()[10:14] == b"abcd"
    larger = device.alloc(200)
    array = device.as_numpy(larger, 200)
    assert array is not None and bytes(array[10:14]) == b"abcd" and path.stat().st_size == 200
    with pytest.raises(NotImplementedError, match="copy the tensor to a computing device first"):
        device.compile(gemm(2, 2, 2))
    with pytest.raises(OSError, match="device DISK:/no/such"):
        get_device("DISK:/no/such/folder/file").alloc(10)


def test_compile_gives_the_same_kernel() -> None:
    ast = elementwise(lambda a: a.alu(Ops.NEG), [f32], 50)
    kernel = get_device("CPU").compile(ast)
    assert get_device("CPU:3").compile(ast) is kernel
    with Context(NOOPT=1):
        plain = get_device("CPU").compile(ast)
    assert plain is not kernel and len(plain.opts) < len(kernel.opts)
    assert "fneg" in kernel.source and kernel.name.startswith("e_50")


def test_compile_from_many_threads() -> None:
    asts = [elementwise(lambda a, n=n: a.alu(Ops.ADD, UOp.const(f32, n)), [f32], 64) for n in range(8)]
    found: list[list[int]] = []

    def work() -> None:
        found.append([id(get_device("CPU").compile(a)) for a in asts])

    threads = [threading.Thread(target=work) for _ in range(4)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert len(found) == 4 and all(f == found[0] for f in found)


def upload(device: Device, *arrays: np.ndarray) -> list:
    handles = [device.alloc(a.nbytes) for a in arrays]
    for h, a in zip(handles, arrays):
        device.copyin(h, memoryview(a))
    return handles


@pytest.mark.parametrize("name", ["CPU", "PYTHON"])
def test_graph(name: str) -> None:
    """Calls run in order, symbolic ones with the values given."""
    device = get_device(name)
    n = UOp(Ops.DEFINE_VAR, dtypes.index, (), VarArg("n", 1, 1000))
    i = loop(n, 0)
    grow = sink(store(0, i, load(0, i).alu(Ops.ADD, load(1, i)), i))
    double = elementwise(lambda a: a.alu(Ops.ADD, a), [f32], 1000)
    a, b, c = upload(device, np.zeros(1000, np.float32), np.ones(1000, np.float32), np.zeros(1000, np.float32))
    steps = [
        (device.compile(grow), [a, b], Numbers((1000,))),
        (device.compile(double), [c, a], Numbers()),
        (device.compile(grow), [a, c], Numbers((500,))),
    ]
    replay = device.graph(steps)
    replay()
    replay()
    result = device.as_numpy(a, 4000)
    assert result is not None
    first, second = result.view(np.float32)[:500], result.view(np.float32)[500:]
    assert (first == 12).all() and (second == 2).all()  # ((0+1) + 2 + 1) * 3
    device.graph([])()


@pytest.mark.parametrize("shape", [(257, 130, 300), (64, 1000, 64)])
def test_threads_do_not_change_the_bits(shape: tuple[int, int, int]) -> None:
    m, n, k = shape
    a, b = RNG.standard_normal((m, k)).astype(np.float32), RNG.standard_normal((k, n)).astype(np.float32)
    results = []
    for threads in (1, 2, 3, 7, 1):
        with Context(THREADS=threads):
            results.append(run(gemm(m, n, k), [np.zeros((m, n), np.float32), a, b], device="CPU")[0])
    assert all((r == results[0]).all() for r in results)


@pytest.mark.parametrize("layout", ["NN", "NT", "TN"])
def test_other_dims_do_not_change_the_bits(layout: str) -> None:
    """A row of a product has the same bits in a batch of any size, and a column among any number of columns."""
    a, b = RNG.standard_normal((130, 200)).astype(np.float32), RNG.standard_normal((200, 150)).astype(np.float32)
    results = []
    for m, n in ((130, 150), (2, 150), (31, 150), (130, 3), (17, 33), (64, 64)):
        x, y = a[:m], b[:, :n]
        stored = [np.ascontiguousarray(z if t == "N" else z.T) for z, t in zip((x, y), layout)]
        results.append(run(gemm(m, n, 200, layout), [np.zeros((m, n), np.float32), *stored], device="CPU")[0])
    for r in results:
        np.testing.assert_array_equal(r, results[0][: r.shape[0], : r.shape[1]])


def test_kernels_from_many_python_threads() -> None:
    """One thread has the team; the others work alone, and all are right."""
    a, b = RNG.standard_normal((200, 200)).astype(np.float32), RNG.standard_normal((200, 200)).astype(np.float32)
    device = get_device("CPU")
    kernel = device.compile(gemm(200, 200, 200))
    want = run(gemm(200, 200, 200), [np.zeros((200, 200), np.float32), a, b], device="CPU")[0]
    wrong = []

    def work() -> None:
        handles = upload(device, np.zeros((200, 200), np.float32), a, b)
        for _ in range(20):
            kernel(handles)
            out = device.as_numpy(handles[0], want.nbytes)
            assert out is not None
            if not (out.view(np.float32).reshape(200, 200) == want).all():
                wrong.append(1)

    with Context(THREADS=3):
        threads = [threading.Thread(target=work) for _ in range(4)]
        for t in threads:
            t.start()
        for t in threads:
            t.join()
    assert not wrong


def test_idle_team_sleeps() -> None:
    import time

    with Context(THREADS=2):
        run(gemm(200, 200, 200), [np.zeros((200, 200), np.float32)] * 3, device="CPU")
        time.sleep(0.05)
        before = time.process_time()
        time.sleep(0.3)
        assert time.process_time() - before < 0.1


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork")
def test_fork() -> None:
    """A child has its own team, also when it is forked while the parent's is alive."""
    a = RNG.standard_normal((300, 300)).astype(np.float32)
    arrays = [np.zeros((300, 300), np.float32), a, a]
    with Context(THREADS=2):
        want = run(gemm(300, 300, 300), arrays, device="CPU")[0]
        pid = os.fork()
        if pid == 0:
            status = 1
            try:
                fresh = team().threads == 1
                got = run(gemm(300, 300, 300), arrays, device="CPU")[0]
                status = 0 if fresh and (got == want).all() and team().threads == 2 else 2
            finally:
                os._exit(status)
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
        assert (run(gemm(300, 300, 300), arrays, device="CPU")[0] == want).all()


def test_arena() -> None:
    """Memory from an arena is used, and given back when trimmed."""
    shared = mmap.mmap(-1, 1 << 20)
    base = np.frombuffer(shared, dtype=np.uint8)
    live: dict[int, int] = {}

    def alloc(nbytes: int) -> int:
        offset = max((o + n for o, n in live.items()), default=0)
        live[offset] = nbytes
        return offset

    arena: Any = SimpleNamespace(alloc=alloc, free=live.pop, addr=lambda offset: base.ctypes.data + offset)
    device = Devices(arena).get("CPU:9")
    a, b = upload(device, np.zeros(100, np.float32), np.arange(100, dtype=np.float32))
    assert device.address(b) == base.ctypes.data + 448
    device.compile(elementwise(lambda x: x.alu(Ops.ADD, x), [f32], 100))([a, b])
    assert base[:400].view(np.float32).tolist() == [2.0 * i for i in range(100)]
    for h in (a, b):
        device.free(h, 400)
    device.trim()
    assert not live


def test_estimates() -> None:
    i, r = loop(8, 0), red(100, 1)
    x = load(1, add(mul(i, 100), r))
    kernel = get_device("NULL").compile(sink(store(0, i, reduce(x.alu(Ops.MUL, x), r), i)))
    assert kernel.flops == 1600 and kernel.nbytes == 4 * (800 + 8)
