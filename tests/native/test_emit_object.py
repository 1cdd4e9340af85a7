"""LLVM's code generator in several threads at once."""

from __future__ import annotations

import ctypes
import threading

from llvmlite.binding import ffi

from manygrad.native import compiler as compilers
from manygrad.native.emit_object import _without_lock
from manygrad.tensor.threads import Threads

THREADS, LIMIT_S = 4, 60.0


def text(n: int) -> str:
    """A function that adds n to a number, n times, so that no two have the same code."""
    adds = "\n".join(f"  %v{i + 1} = mul i64 %v{i}, {2 * i + n}" for i in range(50 + n))
    return f"define i64 @f(i64 %v0) {{\n{adds}\n  ret i64 %v{50 + n}\n}}\n"


def test_threads_compile_at_once_what_one_compiles_alone() -> None:
    compiler = compilers.Compiler()
    texts = [text(n) for n in range(40)]
    expected = [compiler.object_code(t) for t in texts]
    found: list[list[bytes]] = [[] for _ in range(THREADS)]
    begin = threading.Barrier(THREADS)

    def work(k: int) -> None:
        begin.wait(LIMIT_S)
        for t in texts[k::THREADS]:
            found[k].append(compiler.object_code(t))

    threads = [Threads().start(f"compiles-{k}", lambda k=k: work(k)) for k in range(THREADS)]  # type: ignore[misc]
    for thread in threads:
        thread.join(LIMIT_S)
        assert not thread.is_alive()
        thread.check()
    for k in range(THREADS):
        assert found[k] == expected[k::THREADS]
    assert 1 <= len(compiler.machines) <= THREADS


def test_code_is_made_while_another_thread_is_in_llvmlite() -> None:
    """With this version of llvmlite, too: without its function the code is made under its lock, one at a time."""
    emit = _without_lock()
    assert emit is not None
    compiler = compilers.Compiler()
    machine, module = compiler.target_machine(), compilers.llvm.parse_assembly(text(3))
    held, over = threading.Event(), threading.Event()

    def hold() -> None:
        with ffi.lib._lock:
            held.set()
            over.wait(LIMIT_S)

    holder = Threads().start("holds-llvmlite", hold)
    try:
        assert held.wait(LIMIT_S)
        buffer = emit(machine, module, 1, ctypes.byref(ctypes.c_char_p()))
        assert buffer
    finally:
        over.set()
        holder.join(LIMIT_S)
    ffi.lib.LLVMPY_DisposeMemoryBuffer(buffer)
