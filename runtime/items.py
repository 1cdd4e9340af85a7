"""Executors: one class for each kind of CALL, with everything resolved to run it again and again."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from manygrad.runtime.buffer import Buffer, copy_buffer
from manygrad.runtime.counters import GlobalCounters
from manygrad.runtime.devices import Device, Kernel, get_device
from manygrad.tensor.environment import DEBUG, VALIDATE_WITH_CPU
from manygrad.tensor.uop import Ops, UOp

Vars = Mapping[str, int]


def report(name: str, device: str, seconds: float, flops: int, nbytes: int, line: str) -> None:
    """One line of DEBUG=2."""
    GlobalCounters.time_sum_s += seconds
    rate = f"{flops / seconds * 1e-9:9.2f} GFLOPS {nbytes / seconds * 1e-9:8.2f} GB/s" if seconds > 0 else ""
    print(f"*** {device:<8} {GlobalCounters.kernel_count:5d} {name:<40} {seconds * 1e6:10.2f} us {rate}  {line}")


class ExecItem:
    """`run(vars)` does the work; `line` is the user's source line."""

    line: str
    buffers: list[Buffer]

    def run(self, vars: Vars) -> None:
        raise NotImplementedError

    @property
    def written(self) -> list[Buffer]:
        """The buffers it writes."""
        return self.buffers[:1]


class KernelItem(ExecItem):
    """exec_kernel: one compiled kernel on its buffers."""

    def __init__(self, ast: UOp, kernel: Kernel, buffers: list[Buffer], names: Sequence[str], line: str):
        self.ast, self.kernel, self.buffers, self.names, self.line = ast, kernel, buffers, tuple(names), line

    def values(self, vars: Vars) -> tuple[int, ...]:
        return tuple(vars[n] for n in self.names)

    def run(self, vars: Vars) -> None:
        GlobalCounters.kernel_count += 1
        GlobalCounters.global_ops += self.kernel.flops
        GlobalCounters.global_mem += self.kernel.nbytes
        handles = [b.handle for b in self.buffers]
        if VALIDATE_WITH_CPU and self.buffers[0].device.kind not in ("PYTHON", "NULL"):
            self._run_validated(handles, vars)
        elif DEBUG >= 2:
            seconds = self.kernel(handles, self.values(vars), wait=True)
            report(self.kernel.name, self.buffers[0].device.name, seconds or 0.0, self.kernel.flops, self.kernel.nbytes, self.line)
        else:
            self.kernel(handles, self.values(vars))

    def _run_validated(self, handles: list[Any], vars: Vars) -> None:
        """Runs here and on the PYTHON device; ValueError where the outputs differ."""
        before = [b.copyout() for b in self.buffers]
        self.kernel(handles, self.values(vars))
        oracle = get_device("PYTHON")
        kernel = oracle.compile(self.ast)
        twins = [Buffer("PYTHON", b.count, b.dtype).copyin(x) for b, x in zip(self.buffers, before)]
        kernel([t.handle for t in twins], self.values(vars))
        for slot in sorted({s.src[0].src[0].arg for s in self.ast.src}):
            got, want = self.buffers[slot].copyout(), twins[slot].copyout()
            tolerance = {8: 1e-9, 4: 1e-4, 2: 3e-2}.get(got.dtype.itemsize, 0.0) if self.buffers[slot].dtype.is_float else 0.0
            a, b = (got.astype(np.float64), want.astype(np.float64)) if self.buffers[slot].dtype.is_float else (got, want)
            if not np.allclose(a, b, rtol=tolerance, atol=tolerance, equal_nan=True):
                worst = int(np.nanargmax(np.abs(a.astype(np.float64) - b.astype(np.float64))))
                raise ValueError(
                    f"kernel {self.kernel.name} ({self.line}) differs from the PYTHON device in argument {slot}: element {worst} is {a[worst]}, "
                    f"expected {b[worst]}; print its code with DEBUG=4, or run with NOOPT=1 to see whether an optimisation is at fault"
                )


class CopyItem(ExecItem):
    """exec_copy: between devices of this worker."""

    def __init__(self, dst: Buffer, src: Buffer, line: str):
        self.buffers, self.line = [dst, src], line

    def run(self, vars: Vars) -> None:
        GlobalCounters.kernel_count += 1
        start = time.perf_counter()
        dst, src = self.buffers
        copy_buffer(dst, src)
        if DEBUG >= 2:
            report(f"copy {dst.nbytes} {src.device.name} -> {dst.device.name}", dst.device.name, time.perf_counter() - start, 0, 2 * dst.nbytes, self.line)


class GraphItem(ExecItem):
    """exec_graph: a run of kernels as one native call, their handles and variables fixed."""

    def __init__(self, items: list[KernelItem], vars: Vars):
        self.items, self.line = items, items[0].line
        self.buffers = [b for i in items for b in i.buffers]
        device: Device = items[0].buffers[0].device
        self.call = device.graph([(i.kernel, [b.handle for b in i.buffers], i.values(vars)) for i in items])
        self.flops, self.nbytes = sum(i.kernel.flops for i in items), sum(i.kernel.nbytes for i in items)

    def run(self, vars: Vars) -> None:
        c = GlobalCounters
        c.kernel_count += len(self.items)
        c.global_ops += self.flops
        c.global_mem += self.nbytes
        if DEBUG >= 2:
            start = time.perf_counter()
            self.call()
            report(f"graph of {len(self.items)} kernels", self.buffers[0].device.name, time.perf_counter() - start, self.flops, self.nbytes, self.line)
        else:
            self.call()


def variable_names(ast: UOp) -> list[str]:
    return sorted({u.arg[0] for u in ast.toposort() if u.op is Ops.DEFINE_VAR})
