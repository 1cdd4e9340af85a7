"""From kernel AST to kernel by way of text: prepare, render, compile, load; binaries are kept on disk.

A backend names the parts: what the machine is, a renderer, a compiler, and how a binary is loaded.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic, TypeVar

from manygrad.runtime.codegen.lowered import LoweredProgram
from manygrad.runtime.codegen.opts import Opt
from manygrad.runtime.codegen.pipeline import Prepared, prepare
from manygrad.runtime.codegen.target import Machine
from manygrad.runtime.devices.base import Kernel
from manygrad.runtime.devices.compile.diskcache import DiskCache
from manygrad.tensor.environment import BEAM, CHECK_OOB, DEBUG, NOOPT
from manygrad.tensor.uop.uop import UOp

K = TypeVar("K", bound=Kernel)
# what `Compiled.build` depends on
KNOBS = ("NOOPT", "CHECK_OOB", "BEAM", "BEAM_SPLIT", "FLOAT32_PARTS", "FLOAT32_MATMUL_PRECISION")


@dataclass(frozen=True)
class Renderer:
    """Prints the instructions of a kernel in a language. `checked`: with a test of every index (CHECK_OOB=1)."""

    render: Callable[[LoweredProgram], str]
    checked: Callable[[LoweredProgram], str] | None = None

    def of(self, checked: bool) -> Callable[[LoweredProgram], str]:
        return self.checked if checked and self.checked is not None else self.render


@dataclass(frozen=True)
class Compiled(Generic[K]):
    """The stages, each a part. What takes time to make (a target, a compiler) is asked for when it is needed."""

    machine: Callable[[], Machine]
    renderer: Renderer
    compile: Callable[[str], bytes]  # text -> binary; from any thread
    load: Callable[[Prepared, UOp, bytes], K]  # (prepared, ast, binary)
    version: Callable[[], bytes]  # what binaries depend on besides the kernel
    store: DiskCache
    search: Callable[[UOp], tuple[Opt, ...] | None] | None = None  # BEAM's Opts; None: the heuristic's

    def build(self, ast: UOp) -> K:
        searched = self.search(ast) if BEAM and not NOOPT and self.search is not None else None
        return self.build_with(ast, searched)

    def build_with(self, ast: UOp, opts: tuple[Opt, ...] | None = None, simplify: bool = True) -> K:
        """The kernel under given optimisations (None: the heuristic's)."""
        return self.finish(prepare(ast, self.machine(), opts, simplify), ast)

    def finish(self, prepared: Prepared, ast: UOp) -> K:
        """The kernel, ready to run; its binary from the disk cache where it was made before."""
        key = self.key(prepared, ast)
        binary = self.store.get(key)
        if binary is None:
            binary = self.make(prepared, key, self.text(prepared))
        return self.load(prepared, ast, binary)

    def key(self, prepared: Prepared, ast: UOp) -> bytes:
        """Key of a kernel's binary on disk."""
        checked = "True" if CHECK_OOB else ""
        return hashlib.sha256(ast.key + f"{prepared.opts}{checked}".encode() + self.version()).digest()

    def text(self, prepared: Prepared) -> str:
        return prepared.code(self.renderer.of(bool(CHECK_OOB)))

    def make(self, prepared: Prepared, key: bytes, text: str, known: bytes | None = None) -> bytes:
        """The binary of `text` (`known`, if it was compiled before), put on disk under `key`. From any thread."""
        began = time.perf_counter()
        binary = known or self.compile(text)
        self.store.put(key, binary)
        if DEBUG >= 1:
            print(f"compiled {prepared.name} in {(time.perf_counter() - began) * 1e3:.1f} ms: {list(prepared.opts)}")
        return binary
