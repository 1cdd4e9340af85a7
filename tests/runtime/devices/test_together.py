"""Kernels compiled together: loaded from disk first, made once on a host, whoever ends, waits or fails."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextvars import copy_context
from pathlib import Path

import numpy as np
import pytest

from manygrad import Context
from manygrad.native.compiler import Compiler
from manygrad.runtime.devices import get_device
from manygrad.runtime.devices.compile import together
from manygrad.runtime.devices.compile.diskcache import DiskCache
from manygrad.runtime.devices.cpu.backend import COMPILED
from manygrad.runtime.devices.cpu.objects import OBJECTS
from manygrad.runtime.devices.cpu.threads import team
from manygrad.tensor.uop.ops import Ops
from manygrad.tensor.uop.uop import UOp
from tests.runtime.codegen.kernels import elementwise, f32, run

KEY = bytes(range(32))


@pytest.fixture
def made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """The texts that LLVM was given, with an empty cache and no loaded kernels."""
    team()  # is made of LLVM IR, too
    texts: list[str] = []
    compile = Compiler.object_code

    def counted(self: Compiler, ir: str) -> bytes:
        texts.append(ir)
        return compile(self, ir)

    monkeypatch.setattr(Compiler, "object_code", counted)
    loaded = dict(get_device("CPU").kernels.kernels)
    get_device("CPU").kernels.kernels.clear()
    with Context(CACHE_DIR=str(tmp_path), DEBUG=0):
        yield texts
    get_device("CPU").kernels.kernels.update(loaded)


def kernels(n: int) -> list[UOp]:
    return [elementwise(lambda a: a.alu(Ops.MUL, a), [f32], 40 + i) for i in range(n)]


def test_each_is_made_once_and_works(made: list[str]) -> None:
    asts = kernels(6)
    device = get_device("CPU")
    device.compile_all([*asts, *asts])
    assert len(made) == 6
    for i, ast in enumerate(asts):
        x = np.arange(40 + i, dtype=np.float32)
        assert (run(ast, [np.zeros_like(x), x], device="CPU")[0] == x * x).all()
    assert len(made) == 6
    get_device("CPU").kernels.kernels.clear()
    device.compile_all(asts)
    assert len(made) == 6  # from disk


def test_equal_code_is_compiled_once(made: list[str]) -> None:
    """The sizes of copies stand in their calls alone."""
    asts = [elementwise(lambda a: a.alu(Ops.MUL, a), [f32], n) for n in (1 << 14, 1 << 15, 1 << 16)]
    get_device("CPU").compile_all(asts)
    assert len(made) == 1
    for ast, n in zip(asts, (1 << 14, 1 << 15, 1 << 16)):
        x = np.arange(n, dtype=np.float32)
        assert (run(ast, [np.zeros_like(x), x], device="CPU")[0] == x * x).all()
    get_device("CPU").kernels.kernels.clear()
    get_device("CPU").compile_all(asts)
    assert len(made) == 1  # all are on disk


def test_a_failure_is_the_callers_and_leaves_no_claim(
    made: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asts = kernels(5)

    def broken(self: Compiler, ir: str) -> bytes:
        raise RuntimeError("no code today")

    with monkeypatch.context() as m, pytest.raises(RuntimeError, match="no code today"):
        m.setattr(Compiler, "object_code", broken)
        get_device("CPU").compile_all(asts)
    assert not list(tmp_path.rglob(".claim-*"))
    get_device("CPU").compile_all(asts)


AT_THE_END = """
import atexit, sys, threading
from manygrad import Tensor

x = Tensor([1.0, 2.0, 3.0])

def at_the_end(name, n):
    y = (x * n).sum().to("CPU:1")
    print(name, (y * y + n).item())

def outliving():
    threading.main_thread().join()
    at_the_end("thread", 2)

threading.Thread(target=outliving).start()
atexit.register(at_the_end, "exit handler", 3)
"""


def test_threads_and_exit_handlers_that_outlive_the_script_make_kernels(tmp_path: Path) -> None:
    """By then Python does not import concurrent.futures any more: the first of them were lost with an error."""
    done = subprocess.run(
        [sys.executable, "-P", "-c", AT_THE_END],
        env={**os.environ, "CACHE_DIR": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert (done.stdout, done.stderr, done.returncode) == ("thread 146.0\nexit handler 327.0\n", "", 0)


def test_where_no_thread_starts_kernels_are_made_all_the_same(made: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(self: threading.Thread) -> None:
        raise RuntimeError("can't create new thread at interpreter shutdown")

    with monkeypatch.context() as m:
        m.setattr(threading.Thread, "start", refused)
        get_device("CPU").compile_all(kernels(3))
    assert len(made) == 3


def test_what_another_has_claimed_comes_from_it(made: list[str]) -> None:
    asts = kernels(4)
    device = get_device("CPU")
    prepared = together.prepare(asts[0], COMPILED.machine())
    key = COMPILED.key(prepared, asts[0])
    claim = OBJECTS.claim(key)
    assert claim is not None

    def other() -> None:
        with claim:
            while len(made) < 3:  # until only the claimed one is left
                time.sleep(0.001)
            COMPILED.make(prepared, key, COMPILED.text(prepared))

    thread = threading.Thread(target=copy_context().run, args=(other,))  # with this test's CACHE_DIR
    thread.start()
    device.compile_all(asts)
    thread.join()
    assert len(made) == 4


def test_nobody_waits_for_a_claim_for_ever(made: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(together, "CLAIM_WAIT_S", 0.05)
    asts = kernels(2)
    device = get_device("CPU")
    claim = OBJECTS.claim(COMPILED.key(together.prepare(asts[0], COMPILED.machine()), asts[0]))
    assert claim is not None
    with claim:
        device.compile_all(asts)
    assert len(made) == 2


def test_a_claim_is_one_holders(tmp_path: Path) -> None:
    store = DiskCache("test")
    with Context(CACHE_DIR=str(tmp_path)):
        first = store.claim(KEY)
        assert first is not None and store.claim(KEY) is None
        with first:
            pass
        second = store.claim(KEY)
        assert second is not None
        with second:
            pass
        assert not [p for p in tmp_path.rglob("*") if p.is_file()]
        with Context(CACHE=0):
            assert store.claim(KEY) is not None and store.claim(KEY) is not None


HOLDER = """
import sys
from manygrad.runtime.devices.compile.diskcache import DiskCache
claim = DiskCache("test").claim(bytes(range(32)))
print("held" if claim else "refused", flush=True)
sys.stdin.read()
"""


def test_a_claim_ends_with_its_process(tmp_path: Path) -> None:
    env = {**os.environ, "CACHE_DIR": str(tmp_path)}
    holder = subprocess.Popen(
        [sys.executable, "-c", HOLDER], env=env, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert holder.stdout is not None and holder.stdout.readline() == "held\n"
    store = DiskCache("test")
    with Context(CACHE_DIR=str(tmp_path)):
        assert store.claim(KEY) is None
        holder.kill()
        holder.communicate()
        assert store.claim(KEY) is not None


PROGRAM = """
import numpy as np
from manygrad import Tensor
from manygrad.native.compiler import Compiler
made = []
compile = Compiler.object_code
Compiler.object_code = lambda self, ir: (made.append("define void @team_run" not in ir), compile(self, ir))[1]
x = [Tensor(np.ones((8, n), np.float32)).realize() for n in range(3, 15)]
outs = [(a @ a.T).softmax() for a in x]
outs[0].realize(*outs[1:])
print(sum(made))
"""


def test_two_processes_share_the_work(tmp_path: Path) -> None:
    def start(cache: str) -> subprocess.Popen[str]:
        env = {**os.environ, "CACHE_DIR": str(tmp_path / cache)}
        return subprocess.Popen([sys.executable, "-c", PROGRAM], env=env, stdout=subprocess.PIPE, text=True)

    def total(processes: list[subprocess.Popen[str]]) -> int:
        return sum(int(p.communicate()[0]) for p in processes)

    alone = total([start("one")])
    assert alone > 10
    both = total([start("two"), start("two")])
    # (the first kernel of each may be made by both: a LINEAR of one kernel has no claim)
    assert alone <= both <= alone + 2
