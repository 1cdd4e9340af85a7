"""The kernels that were compiled in this process, shared by all devices of a kind."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable
from typing import Any

from manygrad.runtime.devices.base import Builder, Kernel
from manygrad.runtime.devices.compile.chain import Chained
from manygrad.runtime.profile import profile
from manygrad.tensor.environment import REGISTRY
from manygrad.tensor.uop.ops import Ops
from manygrad.tensor.uop.uop import UOp

LIMIT = 1024  # kernels, of 50 to 70 KB each, kept for whoever asks next; what runs one keeps it, too


class LoadedKernels:
    """A kernel is built once, also where several threads ask for it. Where there are LIMIT, the one asked for least
    recently goes: a program whose every step has another shape, or another number in it, makes kernels without end."""

    def __init__(self, builder: Builder) -> None:
        self.builder = builder
        self.kernels: dict[Any, Kernel] = {}
        self._building: dict[Any, threading.RLock] = {}
        self._lock = threading.RLock()

    def key(self, ast: UOp) -> tuple[Any, ...]:
        return (ast, *(REGISTRY[k].value for k in self.builder.knobs))

    def get(self, ast: UOp) -> Kernel:
        """The kernel of `ast`, a SINK or a CHAIN; built if it is not loaded."""
        key = self.key(ast)
        if (found := self.kernels.get(key)) is not None:
            if len(self.kernels) > LIMIT // 2:  # (in most programs none has to go)
                self._renew(key)
            return found
        with self._lock:
            building = self._building.setdefault(key, threading.RLock())
        with building:
            if (found := self.kernels.get(key)) is None:
                found = self._build(ast)
                self._add(key, found)
        self._building.pop(key, None)
        return found

    def _build(self, ast: UOp) -> Kernel:
        start = time.perf_counter()
        if ast.op is Ops.SINK:
            kernel = self.builder.build(ast)
        else:
            kernel = (self.builder.chain or Chained)(ast, [self.get(k) for k in ast.src])
        if profile.active:
            facts = {"opts": list(map(repr, kernel.opts))}
            profile.record(profile.compile_track(), kernel.name, start, time.perf_counter(), facts)
        return kernel

    def get_all(self, asts: Iterable[UOp]) -> None:
        """Builds what `get` will be asked for; a builder may do so in parallel."""
        new = [ast for ast in dict.fromkeys(asts) if self.key(ast) not in self.kernels]
        if new:
            self.builder.build_all(new, self)

    def keep(self, ast: UOp, kernel: Kernel) -> None:
        """For `get` to find."""
        if (key := self.key(ast)) not in self.kernels:
            self._add(key, kernel)

    def _renew(self, key: tuple[Any, ...]) -> None:
        with self._lock:
            if (kernel := self.kernels.pop(key, None)) is not None:
                self.kernels[key] = kernel

    def _add(self, key: tuple[Any, ...], kernel: Kernel) -> None:
        with self._lock:
            while len(self.kernels) >= LIMIT:
                del self.kernels[next(iter(self.kernels))]
            self.kernels[key] = kernel
