"""LLVM in this process: from IR text to object code, and from object code to addresses."""

from __future__ import annotations

import ctypes
import os
import platform
import threading
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import llvmlite.binding as llvm

from manygrad.runtime.codegen.dots import Dot
from manygrad.runtime.codegen.facts import Machine
from manygrad.tensor.dtype import dtypes

MADV_DONTNEED = 4
ZEN_BURST_BYTES = (
    4 << 10
)  # a softmax over rows of 4 KiB is a tenth faster where its first pass asks for the next row, if memory is busy


@dataclass(frozen=True)
class Target:
    """The processor code is made for: triple, LLVM's name of it, its features, and what the heuristics need to know."""

    triple: str
    cpu: str
    features: str
    machine: Machine

    @property
    def key(self) -> bytes:
        return f"{self.triple} {self.cpu} {self.features} {self.machine} {'.'.join(map(str, llvm.llvm_version_info))}".encode()


def cache_bytes() -> int:
    """A core's own second-level cache; 1 MiB where the system does not tell."""
    try:
        text = Path("/sys/devices/system/cpu/cpu0/cache/index2/size").read_text().strip()
        return int(text.removesuffix("K")) << 10
    except (OSError, ValueError):
        return 1 << 20


@cache
def host_target() -> Target:
    features = llvm.get_host_cpu_features()
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    if features.get("avx512f"):
        machine = Machine(64, 32, cache_bytes(), all(features.get(x) for x in ("avx512vl", "avx512dq")), cores)
    elif platform.machine() in ("aarch64", "arm64"):
        machine = Machine(16, 32, cache_bytes(), cores=cores)
    else:
        machine = Machine(32 if features.get("avx2") else 16, 16, cache_bytes(), cores=cores)
    name = llvm.get_host_cpu_name()
    machine = replace(
        machine, dots=dot_products(features), burst_bytes=ZEN_BURST_BYTES if name.startswith("znver") else 0
    )
    return Target(llvm.get_process_triple(), name, features.flatten(), machine)


def dot_products(features: Mapping[str, bool]) -> tuple[Dot, ...]:
    """The products of bytes that one instruction adds up: of AVX-512 VNNI, AVX-VNNI, or NEON; and of bfloat16: of AVX-512 BF16."""
    if features.get("avx512vnni") and features.get("avx512vl"):
        halves = (
            (Dot(dtypes.bfloat16, dtypes.bfloat16, 64),)
            if features.get("avx512bf16") and llvm.llvm_version_info[0] >= 20
            else ()
        )
        return (Dot(dtypes.uint8, dtypes.int8, 64), *halves)
    if features.get("avxvnni"):
        return (Dot(dtypes.uint8, dtypes.int8, 32),)
    return tuple(Dot(d, d, 16) for d in (dtypes.int8, dtypes.uint8)) if features.get("dotprod") else ()


class Compiler:
    """Compiles for a processor, by default the host's, and keeps what it loaded for the life of the process (threads may be running it)."""

    def __init__(self, target: Target | None = None) -> None:
        llvm.initialize_native_target()
        llvm.initialize_native_asmprinter()
        self.target = target or host_target()
        self.machine = self.target_machine()  # one for all kernels: to make it costs as much as to compile a small one
        self.jit: Any = None
        self.lock = threading.Lock()
        self.count = self.compiled = 0  # libraries that were linked; texts that were compiled
        self.keep: list[Any] = []
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(self.keep))

    def target_machine(self) -> Any:
        t = llvm.Target.from_triple(self.target.triple)
        return t.create_target_machine(
            cpu=self.target.cpu, features=self.target.features, opt=2, reloc="pic", codemodel="default", jit=True
        )

    def object_code(self, ir: str) -> bytes:
        """Vectors, tiles and invariants are explicit in the IR, so few passes are needed."""
        self.compiled += 1
        context = llvm.create_context()
        module = llvm.parse_assembly(ir, context)
        module.verify()
        module.triple = self.target.triple
        module.data_layout = str(self.machine.target_data)
        passes = llvm.create_new_module_pass_manager()
        passes.add_sroa_pass()
        builder = llvm.create_pass_builder(self.machine, llvm.create_pipeline_tuning_options(speed_level=1))
        passes.run(module, builder)
        return self.machine.emit_object(module)

    def load(self, code: bytes, names: list[str]) -> dict[str, int]:
        """The addresses of the functions `names` of an object file, which stays loaded."""
        linked = self.link(code, names)
        self.keep.append(linked)
        return {name: linked[name] for name in names}

    def link(self, code: bytes, names: list[str]) -> Any:
        """The functions of an object file, by name, loaded for as long as the result lives."""
        with self.lock:
            if self.jit is None:
                self.jit = llvm.create_lljit_compiler(self.target_machine(), use_jit_link=True, suppress_errors=False)
                self.keep.append(self.jit)
            self.count += 1
            library = llvm.JITLibraryBuilder().add_object_img(code).add_current_process()
            for name in names:
                library.export_symbol(name)
            return library.link(self.jit, f"manygrad{self.count}")


def leave_memory() -> None:
    """Gives back what LLVM's own code takes of this process's memory, tens of megabytes: it is read from its file again when it runs."""
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


@cache
def compiler() -> Compiler:
    return Compiler()
