"""The LLVM compiler of this process: from IR text to object code, and from object code to addresses.

Kernels, reductions of collectives, the thread team and the waiting on sequence words all go through it.
"""

from __future__ import annotations

import ctypes
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

import llvmlite.binding as llvm

from manygrad.native.emit_object import emit_object
from manygrad.native.processor import Processor, processor

MADV_DONTNEED = 4
LIBRARIES = 256  # of one JIT: LLVM forgets a library's code, and only with the JIT its name and its tables


class Linked:
    """The functions of an object file, by name, loaded for as long as this lives. Not even the end of the interpreter
    unloads them: threads may be running them. (`tracker` is LLVM's; it unloads when it goes, and holds their JIT.)"""

    def __init__(self, tracker: Any) -> None:
        self._tracker = tracker

    def __getitem__(self, name: str) -> int:
        return int(self._tracker[name])

    def __del__(
        self,
        ended: Callable[[], bool] = sys.is_finalizing,
        keep: Callable[[Any], object] = ctypes.pythonapi.Py_IncRef,
        reference: Callable[[Any], Any] = ctypes.py_object,
    ) -> None:
        if ended():
            keep(reference(self._tracker))


class Compiler:
    """Compiles for a processor, by default this machine's, and loads what it compiled."""

    def __init__(self, target: Processor | None = None) -> None:
        llvm.initialize_native_target()
        llvm.initialize_native_asmprinter()
        self.target = target or processor()
        self.machines: list[Any] = []  # that no thread uses now: to make one costs as much as to compile a small kernel
        self.jit: Any = None
        self.lock = threading.RLock()
        self.count = self.compiled = 0  # libraries of this JIT; texts that were compiled
        self.keep: list[Linked] = []

    def target_machine(self) -> Any:
        t = llvm.Target.from_triple(self.target.triple)
        return t.create_target_machine(
            cpu=self.target.cpu, features=self.target.features, opt=2, reloc="pic", codemodel="default", jit=True
        )

    @contextmanager
    def _machine(self) -> Iterator[Any]:
        """A target machine for this thread alone."""
        try:
            machine = self.machines.pop()
        except IndexError:
            machine = self.target_machine()
        yield machine
        self.machines.append(machine)

    def object_code(self, ir: str) -> bytes:
        """Vectors, tiles and invariants are explicit in the IR, so few passes are needed. From any thread."""
        self.compiled += 1
        context = llvm.create_context()
        module = llvm.parse_assembly(ir, context)
        module.verify()
        module.triple = self.target.triple
        passes = llvm.create_new_module_pass_manager()
        passes.add_sroa_pass()
        with self._machine() as machine:
            module.data_layout = str(machine.target_data)
            passes.run(module, llvm.create_pass_builder(machine, llvm.create_pipeline_tuning_options(speed_level=1)))
            return emit_object(machine, module)

    def load(self, code: bytes, names: Sequence[str]) -> dict[str, int]:
        """The addresses of the functions `names` of an object file, which stays loaded for good."""
        linked = self.link(code, names)
        self.keep.append(linked)
        return {name: linked[name] for name in names}

    def link(self, code: bytes, names: Sequence[str]) -> Linked:
        with self.lock:
            if self.jit is None or self.count == LIBRARIES:
                self.jit = llvm.create_lljit_compiler(self.target_machine(), use_jit_link=True, suppress_errors=False)
                self.count = 0
            self.count += 1
            jit, library_name = self.jit, f"manygrad{self.count}"
            library = llvm.JITLibraryBuilder().add_object_img(code).add_current_process()
            for name in names:
                library.export_symbol(name)
            return Linked(library.link(jit, library_name))

    def functions(self, ir: str, names: Sequence[str]) -> dict[str, int]:
        """The addresses of the functions `names` of IR text, compiled and loaded for good."""
        return self.load(self.object_code(ir), names)


@cache
def compiler() -> Compiler:
    """The one of this process, for the processor it runs on."""
    return Compiler()


def leave_memory() -> None:
    """Gives back what LLVM's own code takes of this process's memory, tens of megabytes: it is read from its file again
    when it runs."""
    try:
        maps = Path("/proc/self/maps").read_text().splitlines()
    except OSError:
        return
    advise = ctypes.CDLL(None).madvise
    for line in maps:
        place, rights, *_, file = line.split()
        if rights == "r-xp" and "libllvmlite" in file:
            begin, end = (int(x, 16) for x in place.split("-"))
            advise(ctypes.c_void_p(begin), ctypes.c_size_t(end - begin), MADV_DONTNEED)
